"""Small T5s and Whispers of transformers in float64, batches, and their losses and gradients beside triax's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import triax
from triax import Grid, PipelineModule
from triax.models import MaskedLMLoss
from triax.models.huggingface.config import read_config
from triax.models.huggingface.load import config_from_hf, load_hf
from triax.models.huggingface.save import save_hf
from triax.tensor_parallel import gather_logits

from support.encoder_models import ROWS, Case, by_their_names, make
from support.exact_norms import exact
from support.huggingface_models import assert_bitwise

CLASSES = "T5ForConditionalGeneration", "MT5ForConditionalGeneration"
_T5: dict[str, Any] = {"vocab_size": 61, "d_model": 20, "d_kv": 6, "d_ff": 37, "num_layers": 2, "num_heads": 3}
_T5 |= {"num_decoder_layers": 3, "relative_attention_num_buckets": 9, "relative_attention_max_distance": 11}
_T5 |= {"dropout_rate": 0.0, "initializer_factor": 0.25, "decoder_start_token_id": 0}
_GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
# "untied", which no configuration has, gives the output layer a weight of its own, as in the folders of Flan-T5.
T5_CASES = {
    "t5": Case(CLASSES[0], _T5),
    "flan-t5": Case(CLASSES[0], _T5 | _GATED | {"untied": True}),
    "mt5": Case(CLASSES[1], _T5 | _GATED | {"untied": True}),
}


# (pipe, data, tensor), and options of a step.
GRIDS_WITH_OPTIONS: list[tuple[tuple[int, int, int], dict[str, Any]]] = [
    ((4, 1, 1), {}),
    ((2, 1, 1), {"schedule": "interleaved"}),
    ((1, 1, 2), {"sequence_parallel": True, "recompute": "full"}),
    ((2, 1, 2), {"sequence_parallel": True, "recompute": "selective"}),
    ((1, 2, 1), {"stage": 1}),
    ((2, 2, 1), {"stage": 2}),
]
WHISPER_CLASS = "WhisperForConditionalGeneration"
_WHISPER: dict[str, Any] = {"vocab_size": 61, "d_model": 24, "num_mel_bins": 5, "encoder_layers": 2}
_WHISPER |= {"decoder_layers": 3, "encoder_attention_heads": 3, "decoder_attention_heads": 3, "encoder_ffn_dim": 37}
_WHISPER |= {"decoder_ffn_dim": 37, "max_source_positions": 6, "max_target_positions": 12, "decoder_start_token_id": 3}
_WHISPER |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 2) | {"begin_suppress_tokens": None}
WHISPER_CASES = {"whisper": Case(WHISPER_CLASS, _WHISPER)}


def random_whisper(seed: int) -> Case:
    """Return a Whisper with odd sizes, and heads that two tensor ranks share unevenly or evenly."""
    draw = random.Random(seed)
    heads, hidden = draw.randint(2, 5), draw.randint(2, 51)
    options = _WHISPER | {
        "vocab_size": draw.randint(8, 90),
        "d_model": heads * 2 * draw.randint(1, 5),
        "num_mel_bins": draw.randint(1, 9),
        "encoder_layers": draw.randint(1, 4),
        "decoder_layers": draw.randint(1, 4),
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": hidden,
        "decoder_ffn_dim": hidden,
        "max_source_positions": draw.randint(1, 9),
        "max_target_positions": draw.randint(10, 20),
        "activation_function": draw.choice(["gelu", "gelu_new", "relu", "silu"]),
        "pad_token_id": draw.choice([0, 1, 5]),
        "decoder_start_token_id": draw.choice([0, 1, 7]),
    }
    return Case(WHISPER_CLASS, options)


def random_t5(seed: int) -> Case:
    """Return a T5 with odd sizes, and heads that two tensor ranks share unevenly or evenly."""
    draw = random.Random(seed)
    buckets = draw.randint(4, 20)
    options = _T5 | {
        "vocab_size": draw.randint(8, 90),
        "d_model": draw.randint(2, 41),
        "d_kv": draw.randint(1, 9),
        "d_ff": draw.randint(2, 51),
        "num_layers": draw.randint(1, 4),
        "num_decoder_layers": draw.choice([None, 1, 2, 4]),
        "num_heads": draw.randint(2, 5),
        "relative_attention_num_buckets": buckets,
        "relative_attention_max_distance": buckets // 2 + draw.randint(1, 30),
        "layer_norm_epsilon": draw.choice([1e-6, 1e-5, 1e-3]),
        "feed_forward_proj": draw.choice(["relu", "gated-gelu", "gated-silu", "silu", "gelu"]),
        "tie_word_embeddings": draw.random() < 0.5,
        "untied": draw.random() < 0.5,
        "pad_token_id": draw.choice([0, 1, 5]),
        "decoder_start_token_id": draw.choice([0, 1, 7]),
    }
    return Case(draw.choice(CLASSES), options)


def make_model(case: Case) -> Any:
    """Return a random model in float64 in which no bias is 0 and no norm 1."""
    options = dict(case.options)
    untied = options.pop("untied", False)
    model = make(Case(case.cls, options))
    if untied:
        model.lm_head.weight = nn.Parameter(model.shared.weight.detach().flip(0) * 0.7)
    return model


@contextmanager
def exact_model(model: Any) -> Iterator[None]:
    """Context in which transformers rounds nothing to fp32 but the logarithms of T5's distances, as it always does."""
    attention = next((type(each) for each in model.modules() if type(each).__name__.endswith("T5Attention")), None)
    if attention is None:
        with exact(model):
            yield
        return
    bucket = attention._relative_position_bucket

    def rounded(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return bucket(*args, **kwargs)

    with patch.object(attention, "_relative_position_bucket", staticmethod(rounded)), exact(model):
        yield


def batch_of(config: Any) -> dict[str, Tensor]:
    """Return a global batch: sources padded on the right, one on the left, one with a gap; targets of other lengths.

    Those of a Whisper are features; two of its targets have a gap, behind which padding is a token that is looked up.
    """
    generator = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randint(config.vocab_size, shape, generator=generator)  # noqa: E731
    labels = draw(ROWS, 10).masked_fill(torch.arange(10) >= torch.tensor([10, 2, 5, 10, 7, 1, 9, 4])[:, None], -100)
    if config.model_type == "whisper":
        labels[0, 2:5], labels[3, 0], labels[6, 3] = -100, -100, config.pad_token_id
        shape = ROWS, config.num_mel_bins, 2 * config.max_source_positions
        return {"input_features": torch.randn(shape, generator=generator).double(), "labels": labels}
    ends = torch.tensor([14, 3, 7, 14, 1, 9, 14, 11])
    mask = (torch.arange(14) < ends[:, None]).long()
    mask[3, :5], mask[6, 4:9] = 0, 0
    ids = draw(ROWS, 14).masked_fill(mask == 0, config.pad_token_id)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def wanted(case: Case, folder: Path) -> dict[str, Any]:
    """Write a model and a global batch to a folder, and return logits, loss and gradients by transformers."""
    model = make_model(case)
    model.save_pretrained(folder / "model")
    batch = batch_of(model.config)
    torch.save(batch, folder / "batch.pt")
    with exact_model(model):
        logits = model(**batch).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {"logits": logits.detach(), "loss": loss.item(), "gradients": gradients}


def trained(
    folders: list[str], sizes: tuple[int, int, int], sequence_parallel: bool = False, **options: Any
) -> list[dict[str, Any]]:
    """Load each folder's model on a grid, evaluate and train its global batch, and save it again, as ``saved``."""
    grid = Grid(*sizes)
    return [_trained(Path(folder), grid, sequence_parallel, **options) for folder in folders]


def _trained(folder: Path, grid: Grid, sequence_parallel: bool, stage: Any = 0, **options: Any) -> dict[str, Any]:
    config, micro = config_from_hf(folder / "model"), 2
    module = PipelineModule(
        load_hf(folder / "model", sequence_parallel=sequence_parallel),
        grid=grid,
        loss_fn=MaskedLMLoss(grid, config.vocab_size),
        device="meta",
        dtype=torch.float64,
        output_fn=lambda x: gather_logits(x, grid=grid, vocab_size=config.vocab_size),
    )
    engine = triax.Engine(
        module,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        batch=triax.Batch(size=ROWS, microbatch=micro),
        zero=triax.Zero(stage=stage),
        **options,
    )
    batch, own = torch.load(folder / "batch.pt"), ROWS // grid.data.size
    rows = range(grid.data.rank * own, (grid.data.rank + 1) * own, micro)
    pieces = [{name: value[row : row + micro] for name, value in batch.items()} for row in rows]
    _, outputs = engine.eval_batch(iter(pieces), return_logits=True, num_micro_batches=len(pieces))
    save_hf(engine, folder / "saved")
    found: dict[str, Any] = {"loss": float(engine.train_batch(iter(pieces))), "logits": None}
    if grid.pipe.is_last:
        found["logits"] = slice(rows.start, rows.stop), torch.cat([*outputs])
    return found | {"gradients": by_their_names(engine.gather("gradients"), read_config(folder / "model"))}


def require_equal(
    ranks: Any, folder: Path, cases: dict[str, Case], sizes: tuple[int, int, int], **options: Any
) -> None:
    """Compare a step on a grid with transformers', and the saved folder with the loaded one, bit for bit."""
    right = {name: wanted(case, folder / name) for name, case in cases.items()}
    found = ranks(
        sizes[0] * sizes[1] * sizes[2], trained, [str(folder / n) for n in cases], sizes, timeout=300, **options
    )
    for rank in found:
        for name, step in zip(cases, rank, strict=True):
            require_step_equal(step, right[name], f"{name} {cases[name]}")
    for name in cases:
        theirs, mine = (load_file(folder / name / kind / "model.safetensors") for kind in ("model", "saved"))
        assert_bitwise(mine, theirs)


def require_step_equal(found: dict[str, Any], right: dict[str, Any], what: str) -> None:
    close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-11)
    assert found["loss"] == pytest.approx(right["loss"], rel=1e-10), what
    if found["logits"] is not None:
        rows, logits = found["logits"]
        close(logits, right["logits"][rows], msg=f"{what}: {{}}".format)
    assert found["gradients"].keys() == right["gradients"].keys(), what
    for name, gradient in right["gradients"].items():
        close(found["gradients"][name], gradient, msg=f"{what} {name}: {{}}".format)
