"""``hf_layers``: transformers' own blocks over pipe stages, against its models on one process, in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import triax
from triax import CausalLMLoss, Grid, PipelineModule, hf_layers
from triax.models.huggingface.load import load_hf
from triax.models.huggingface.names import expand
from triax.models.huggingface.save import save_hf, wrapping

from support.exact_norms import exact
from support.huggingface_models import CASES, make
from support.trainer_jobs import weights

_STILL = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
CHANGES: dict[str, dict[str, Any]] = {
    "gpt2": _STILL,
    "gpt2-untied": _STILL,
    "llama": {},
    "llama-tied": {"pad_token_id": 3},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": False},
}
MICROBATCHES = 4


def model_of(case: str, attention: str = "sdpa") -> Any:
    """A random model in fp64 in which no bias is 0 and no norm 1."""
    family, sizes = CASES[case]
    model = make(family, sizes | CHANGES[case]).double().train()
    model.config._attn_implementation = attention
    return model


def rows(vocab: int, replica: int, microbatch: int) -> tuple[Tensor, Tensor]:
    """Ids and labels, of which unlike numbers count."""
    generator = torch.Generator().manual_seed(10 * replica + microbatch)
    ids = torch.randint(vocab, (2, 11), generator=generator)
    labels = ids.clone()
    labels[:, : 1 + (3 * replica + 2 * microbatch) % 7] = -100
    return ids, labels


def whole_batch(case: str, replicas: int) -> tuple[float, dict[str, Tensor]]:
    """The mean loss over every label that counts, and its gradients, by transformers' model on one process."""
    model = model_of(case)
    all_rows = [rows(model.config.vocab_size, r, m) for r in range(replicas) for m in range(MICROBATCHES)]
    with exact(model):
        logits = model(input_ids=torch.cat([ids for ids, _ in all_rows])).logits
    labels = torch.cat([labels for _, labels in all_rows])
    # (transformers' own loss rounds to fp32.)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    rounded = model(input_ids=torch.cat([ids for ids, _ in all_rows]), labels=labels).loss
    assert loss.item() == pytest.approx(rounded.item(), rel=1e-6)
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def trained(case: str, sizes: tuple[int, int, int], stage: int, schedule: str, out: str, meta: bool) -> Any:
    """Train one step with 1F1B: whole gradients by transformers' names, and a saved folder before and after."""
    model = model_of(case)
    grid = Grid(*sizes)
    layers = hf_layers(model)
    options: dict[str, Any] = {"device": "meta", "dtype": torch.float64} if meta else {}
    loss_fn = CausalLMLoss(chunk_tokens=4)  # the output layer and the loss run four tokens at a time
    pipeline = PipelineModule(layers, grid=grid, loss_fn=loss_fn, **options)
    engine, *_ = triax.initialize(
        model=pipeline,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": MICROBATCHES,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "zero_optimization": {"stage": stage},
            "pipeline": {"schedule": schedule},
        },
    )
    save_hf(engine, f"{out}/before")
    data = (rows(model.config.vocab_size, grid.data.rank, m) for m in range(MICROBATCHES))
    with exact(pipeline):
        loss = engine.train_batch(data)
    gradients = engine.gather("gradients")
    entries = expand(wrapping(pipeline).names(), 3)
    save_hf(engine, f"{out}/after")
    return loss.item(), {entries[name].theirs[0]: gradient for name, gradient in gradients.items()}


def require_equal_to_transformers(
    ranks: Any, tmp_path: Path, case: str, sizes: tuple[int, int, int], stage: int, meta: bool = False
) -> None:
    loss, wanted = whole_batch(case, sizes[1])
    out = str(tmp_path)
    for mine, gradients in ranks(math.prod(sizes), trained, case, sizes, stage, "1f1b", out, meta, timeout=120):
        assert mine == pytest.approx(loss, rel=1e-10)
        assert gradients.keys() == wanted.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-12, msg=name)
    before, after, model = weights(f"{out}/before"), weights(f"{out}/after"), model_of(case)
    assert before.keys() == after.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(before[name], value), name
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(after[name], parameter - 0.5 * wanted[name], rtol=1e-10, atol=1e-12, msg=name)


def test_gpt2_trains_as_transformers_on_stages_and_replicas(ranks: Any, tmp_path: Path) -> None:
    """Two stages of a pipeline and two replicas, in stage 2 of ZeRO: loss, gradients and saved weights of a step."""
    require_equal_to_transformers(ranks, tmp_path, case="gpt2", sizes=(2, 2, 1), stage=2)


def test_tied_llama_trains_as_transformers_on_stages_and_shards(ranks: Any, tmp_path: Path) -> None:
    require_equal_to_transformers(ranks, tmp_path, "llama-tied", (2, 1, 2), 0)


def test_llama_on_meta_trains_as_transformers_on_two_stages(ranks: Any, tmp_path: Path) -> None:
    require_equal_to_transformers(ranks, tmp_path, "llama", (2, 1, 1), 3, meta=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1), (2, 2, 1), (4, 1, 1), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("case", CHANGES)
def test_every_family_trains_as_transformers_on_every_grid(
    ranks: Any, tmp_path: Path, case: str, sizes: tuple[int, int, int], stage: int
) -> None:
    require_equal_to_transformers(ranks, tmp_path, case, sizes, stage, meta=bool(stage % 2))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("case", CHANGES)
def test_hf_layers_have_the_logits_of_the_model(case: str, attention: str) -> None:
    model = model_of(case, attention).eval()
    mine = PipelineModule(hf_layers(model), loss_fn=CausalLMLoss()).eval()
    ids, labels = rows(model.config.vocab_size, 0, 3)
    with torch.no_grad():
        theirs = model(input_ids=ids, labels=labels)
        logits = mine(ids)
    torch.testing.assert_close(logits, theirs.logits, rtol=1e-12, atol=1e-12)
    total, count = CausalLMLoss()(logits, labels)
    assert (total / count).item() == pytest.approx(theirs.loss.item(), rel=1e-6)


def test_layers_of_a_configuration_draw_transformers_weights(tmp_path: Path) -> None:
    """Weights as transformers draws them, and a folder that it reads; then another model's weights into it."""
    for case in ("gpt2", "llama"):
        model = model_of(case).float()
        mine = PipelineModule(hf_layers(model.config), loss_fn=CausalLMLoss())
        save_hf(mine, tmp_path / case)
        drawn, names = weights(str(tmp_path / case)), dict(type(model)(model.config).named_parameters())
        for name, parameter in names.items():
            if parameter.dim() > 1 and parameter.numel() > 500:
                assert drawn[name].std().item() == pytest.approx(parameter.std().item(), rel=0.2), name
            elif parameter.dim() == 1:
                assert torch.equal(drawn[name].float(), parameter), name
        load_hf(model, mine)
        save_hf(mine, tmp_path / f"{case}-filled")
        for name, value in weights(str(tmp_path / f"{case}-filled")).items():
            assert torch.equal(value.float(), model.state_dict()[name]), name


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_half_precision_keeps_rotary_frequencies_in_fp32(half: str) -> None:
    """A rotary frequency in bf16 would be off by radians some thousand tokens on, and no checkpoint would say so."""
    config = {"train_batch_size": 2, half: {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    model = model_of("llama").float()
    wanted = model.model.rotary_emb.inv_freq.clone()
    pipe = PipelineModule(hf_layers(model), loss_fn=CausalLMLoss())
    for each in (pipe, model):
        triax.initialize(model=each, config=config)
        found = [buffer for name, buffer in each.named_buffers() if name.endswith("inv_freq")]
        assert found and all(buffer.dtype == torch.float32 and torch.equal(buffer, wanted) for buffer in found)
        assert {p.dtype for p in each.parameters()} == {torch.bfloat16 if half == "bf16" else torch.float16}


def test_hf_layers_refuses_families_and_options_it_lacks() -> None:
    import transformers

    with pytest.raises(ValueError, match=r"gpt2, llama, mistral, .* but the model is of the family 'bert'"):
        hf_layers(transformers.BertConfig())
    with pytest.raises(ValueError, match="add_cross_attention"):
        hf_layers(transformers.GPT2Config(add_cross_attention=True))
    with pytest.raises(ValueError, match="alibi=True"):
        hf_layers(transformers.FalconConfig(alibi=True))


def over_context(case: str, pipe: int, context: int, kind: str) -> dict[str, Any]:
    grid, model = Grid(pipe=pipe, context=context), model_of(case)
    loss = CausalLMLoss(grid=grid if context > 1 else None, chunk_tokens=5)
    module = PipelineModule(hf_layers(model, attention=kind), grid=grid, loss_fn=loss)
    engine, *_ = triax.initialize(
        model=module,
        config={
            "train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 1}},
        },
    )
    with exact(module):
        value = engine.train_batch(iter(masked_batches(model.config.vocab_size)))
    entries = expand(wrapping(module).names(), 3)
    gradients = {entries[name].theirs[0]: gradient for name, gradient in engine.gather("gradients").items()}
    return {"loss": float(value), **gradients}


def masked_batches(vocab: int) -> list[tuple[Tensor, Tensor]]:
    """Return two microbatches with different numbers of labels that count."""
    every = [torch.randint(vocab, (2, 12), generator=torch.Generator().manual_seed(number)) for number in range(2)]
    return [(ids, ids.masked_fill(torch.arange(12) < 3 * number, -100)) for number, ids in enumerate(every)]


def of_transformers(case: str) -> dict[str, Any]:
    """The mean loss over every label of ``masked_batches``, and its gradients, of transformers' model."""
    model = model_of(case)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for ids, labels in masked_batches(model.config.vocab_size):
        with exact(model):
            logits = model(input_ids=ids).logits
        total = total + F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        count += int((labels[:, 1:] != -100).sum())
    (total / count).backward()
    return {"loss": float(total.detach() / count), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize(
    ("case", "pipe", "context", "kind"),
    [
        ("gpt2", 1, 2, "ring"),
        ("llama-tied", 2, 2, "gather"),
        *(pytest.param(case, 1, 3, "gather", marks=pytest.mark.exhaustive) for case in CHANGES),
        *(pytest.param(case, 1, 2, "ulysses", marks=pytest.mark.exhaustive) for case in CHANGES),
    ],
)
def test_context_axis_has_the_gradients_of_transformers(
    ranks: Any, case: str, pipe: int, context: int, kind: str
) -> None:
    alone, found = of_transformers(case), ranks(pipe * context, over_context, case, pipe, context, kind)[0]
    assert found.pop("loss") == pytest.approx(alone.pop("loss"), rel=1e-12)
    assert found.keys() == alone.keys()
    for name, gradient in alone.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12, msg=name)


def refused_over_context(length: int, text: str) -> None:
    grid = Grid(context=2)
    layers = hf_layers(model_of("gpt2"))
    engine, *_ = triax.initialize(
        model=PipelineModule(layers, grid=grid, loss_fn=CausalLMLoss()),
        config={"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 1}}},
    )
    ids = torch.zeros(2, length, dtype=torch.int64)
    with pytest.raises(Exception, match=text):
        engine.eval_batch(iter([(ids, ids)]))


def test_errors_name_the_length_and_loss_of_the_context_axis(ranks: Any) -> None:
    ranks(2, refused_over_context, 11, "multiple of 4, such as 12")
    ranks(2, refused_over_context, 12, r"CausalLMLoss\(grid=grid\)")
