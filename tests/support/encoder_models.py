"""Small encoders of transformers in float64, batches with padding, and their losses and gradients beside triax's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import triax
from triax import Grid, PipelineModule
from triax.models import ClassificationLoss, EncoderConfig, MaskedLMLoss
from triax.models.huggingface.config import entries, read_config
from triax.models.huggingface.load import config_from_hf, load_hf
from triax.models.huggingface.save import save_hf
from triax.tensor_parallel import gather_logits

from support.exact_norms import exact

ROWS = 8  # of the global batch


class Case(NamedTuple):
    """A class of transformers and the settings of its configuration."""

    cls: str
    options: dict[str, Any]


_SIZES: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 3}
_TEXT = _SIZES | {"vocab_size": 61, "max_position_embeddings": 20, "hidden_dropout_prob": 0.0}
_MODERN = _SIZES | {"vocab_size": 61, "num_hidden_layers": 4, "local_attention": 5, "pad_token_id": 3}
_MODERN |= {"rope_parameters": {"full_attention": {"rope_theta": 300.0}, "sliding_attention": {"rope_theta": 20.0}}}
_IMAGE = _SIZES | {"image_size": 8, "patch_size": 4, "num_labels": 5}
_DINO = {key: value for key, value in _IMAGE.items() if key != "intermediate_size"}
_DINO |= {"mlp_ratio": 2, "use_mask_token": False, "layerscale_value": 0.7}
CASES = {
    "bert": Case("BertForMaskedLM", _TEXT),
    "bert-classes": Case("BertForSequenceClassification", _TEXT | {"num_labels": 3}),
    "roberta": Case("RobertaForMaskedLM", _TEXT | {"type_vocab_size": 1}),
    "roberta-classes": Case("RobertaForSequenceClassification", _TEXT | {"num_labels": 4}),
    "modernbert": Case("ModernBertForMaskedLM", _MODERN),
    "modernbert-classes": Case(
        "ModernBertForSequenceClassification", _MODERN | {"num_labels": 4, "classifier_pooling": "mean"}
    ),
    "vit": Case("ViTForImageClassification", _IMAGE),
    "dinov2": Case("Dinov2ForImageClassification", _DINO),
    "dinov2-features": Case("Dinov2Model", _DINO),
    "siglip_vision_model": Case("SiglipVisionModel", _IMAGE | {"vision_use_head": False}),
}


def random_case(seed: int, family: str = "") -> Case:
    """Return an encoder with odd sizes, and heads that two tensor ranks share unevenly or evenly."""
    draw = random.Random(seed)
    heads, kind = draw.randint(2, 5), draw.choice([case.cls for case in CASES.values() if case.cls.startswith(family)])
    options: dict[str, Any] = {
        "hidden_size": heads * draw.randint(1, 9),
        "intermediate_size": draw.randint(2, 51),
        "num_hidden_layers": draw.randint(1, 4),
        "num_attention_heads": heads,
        "layer_norm_eps": draw.choice([1e-12, 1e-5, 1e-3]),
    }
    if not kind.startswith("Roberta"):
        options["hidden_act"] = draw.choice(["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu"])
    if "Classification" in kind:
        options["num_labels"] = draw.randint(1, 7)
    if kind.startswith("ModernBert"):
        return Case(kind, options | _random_modern(draw, heads))
    if not kind.startswith(("Bert", "Roberta")):
        patch = draw.randint(1, 4)
        options |= {"patch_size": patch, "image_size": patch * draw.randint(1, 4), "num_channels": draw.randint(1, 4)}
        if kind.startswith("Dino"):
            options |= _DINO | {"mlp_ratio": draw.randint(1, 3)} | options
            del options["intermediate_size"]
        if kind.startswith("Siglip"):
            return Case(kind, options | {"vision_use_head": False})
        return Case(kind, options | {"qkv_bias": draw.random() < 0.7})
    options |= {"vocab_size": draw.randint(8, 90), "max_position_embeddings": draw.randint(19, 30)}
    options |= {"type_vocab_size": draw.randint(1, 3), "hidden_dropout_prob": 0.0}
    return Case(kind, options | {"pad_token_id": draw.choice([0, 1, 5])})


def _random_modern(draw: random.Random, heads: int) -> dict[str, Any]:
    scaling: dict[str, Any] = draw.choice([{"rope_type": "default"}, {"rope_type": "linear", "factor": 2.5}])
    scaling = draw.choice([scaling, {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 10}])
    ropes = {"full_attention": scaling | {"rope_theta": 500.0}, "sliding_attention": {"rope_theta": 10.0}}
    options: dict[str, Any] = {"hidden_size": 2 * heads * draw.randint(1, 5), "vocab_size": draw.randint(8, 90)}
    options |= {"local_attention": draw.randint(0, 30), "pad_token_id": draw.choice([0, 1, 5]), "hidden_act": "gelu"}
    options |= {"classifier_pooling": draw.choice(["cls", "mean"]), "rope_parameters": ropes}
    options |= {"norm_eps": draw.choice([1e-5, 1e-3])}
    options |= {f"{part}_bias": draw.random() < 0.5 for part in ("norm", "attention", "mlp", "classifier")}
    depth = draw.randint(1, 5)
    types = [draw.choice(["full_attention", "sliding_attention"]) for _ in range(depth)]
    return options | {"num_hidden_layers": depth} | ({"layer_types": types} if draw.random() < 0.6 else {})


def make(case: Case) -> Any:
    """Return a random model in float64 in which no bias is 0 and no norm 1."""
    import transformers

    torch.manual_seed(3)
    cls = getattr(transformers, case.cls)
    torch.set_default_dtype(torch.float64)
    try:
        model = cls(cls.config_class(**case.options, architectures=[case.cls])).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1).add_(torch.randn_like(parameter), alpha=0.05)
    return model


def batch_of(config: Any) -> dict[str, Tensor]:
    """Return a global batch: rows of different lengths, padded on the right, or images; and labels."""
    generator = torch.Generator().manual_seed(5)
    draw = lambda high, *shape: torch.randint(high, shape, generator=generator)  # noqa: E731
    classes, name = config.num_labels, config.architectures[0]
    labels = torch.randn(ROWS, 1, generator=generator).double() if classes == 1 else draw(classes, ROWS)
    if hasattr(config, "patch_size"):
        shape = (ROWS, config.num_channels, config.image_size, config.image_size)
        if name.endswith("Model"):
            tokens = (config.image_size // config.patch_size) ** 2 + (config.model_type == "dinov2")
            labels = torch.randn(ROWS, tokens, config.hidden_size, generator=generator).double()
        return {"pixel_values": torch.randn(shape, generator=generator).double(), "labels": labels}
    length, padding = 12, config.pad_token_id
    ends = torch.tensor([12, 3, 7, 12, 1, 9, 5, 11])
    mask = (torch.arange(length) < ends[:, None]).long()
    ids = draw(config.vocab_size - 1, ROWS, length)
    ids = (ids + (ids >= padding)).masked_fill(mask == 0, padding)
    fields = {"input_ids": ids, "attention_mask": mask}
    if hasattr(config, "type_vocab_size"):
        fields["token_type_ids"] = draw(config.type_vocab_size, ROWS, length)
    if "MaskedLM" in name:
        masked = (torch.rand(ROWS, length, generator=generator) < 0.4) & (mask > 0)
        masked[0, 0] = True
        labels = draw(config.vocab_size, ROWS, length).masked_fill(~masked, -100)
    return fields | {"labels": labels}


def wanted(model: Any, folder: Path) -> dict[str, Any]:
    """Write a model and a global batch to a folder, and return logits, loss and gradients by transformers."""
    model.save_pretrained(folder / "model")
    batch = batch_of(model.config)
    torch.save(batch, folder / "batch.pt")
    labels = batch.pop("labels")
    with exact(model):
        outputs = model(**batch)
    logits = outputs.last_hidden_state if type(model).__name__.endswith("Model") else outputs.logits
    if labels.is_floating_point():
        loss = F.mse_loss(logits, labels)
    else:
        loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten())
    loss.backward()
    shown = logits.detach()
    if "attention_mask" in batch and shown.dim() == 3:
        shown = shown * batch["attention_mask"][..., None]  # nothing is asked of padding
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"logits": shown, "loss": loss.item(), "gradients": gradients}


def by_their_names(gradients: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Return gradients of triax's parameters under the names of transformers' live model."""
    table, found = entries(None, config), dict[str, Tensor]()
    for ours, gradient in gradients.items():
        entry = table[ours]
        names = entry.live or entry.theirs
        if entry.rows:
            whole = found.setdefault(names[0], gradient.new_empty(entry.of, *gradient.shape[1:]))
            for (start, stop), piece in zip(entry.rows, gradient.split([b - a for a, b in entry.rows]), strict=True):
                whole[start:stop] = piece
            continue
        for name, piece in zip(names, gradient.chunk(len(names)), strict=True):
            found[name] = piece[None] if entry.one_row else piece
    return found


def trained(
    folders: list[str],
    sizes: tuple[int, int, int],
    stage: Any = 0,
    sequence_parallel: bool = False,
    context: int = 1,
    schedule: str = "1f1b",
) -> list[dict[str, Any]]:
    """Load each folder's model on a grid, evaluate and train its global batch, and save it again, as ``saved``."""
    grid = Grid(*sizes, context=context)
    return [_trained(Path(folder), grid, stage, sequence_parallel, schedule) for folder in folders]


def _trained(folder: Path, grid: Grid, stage: Any, sequence_parallel: bool, schedule: str) -> dict[str, Any]:
    config = config_from_hf(folder / "model")
    assert isinstance(config, EncoderConfig)
    masked, micro = config.predicts_masked, 2
    kind: Any = "regression" if config.num_labels < 2 else "single_label_classification"
    whole = lambda x: gather_logits(x, grid=grid, vocab_size=config.vocab_size) if masked else x  # noqa: E731
    module = PipelineModule(
        load_hf(folder / "model", sequence_parallel=sequence_parallel),
        grid=grid,
        loss_fn=MaskedLMLoss(grid, config.vocab_size) if masked else ClassificationLoss(kind),
        device="meta",
        dtype=torch.float64,
        output_fn=whole,
    )
    engine = triax.Engine(
        module,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        batch=triax.Batch(size=ROWS, microbatch=micro),
        zero=triax.Zero(stage=stage),
        schedule=schedule,
    )
    batch, own = torch.load(folder / "batch.pt"), ROWS // grid.data.size
    rows = range(grid.data.rank * own, (grid.data.rank + 1) * own, micro)
    pieces = [{name: value[row : row + micro] for name, value in batch.items()} for row in rows]
    _, outputs = engine.eval_batch(iter(pieces), return_logits=True, num_micro_batches=len(pieces))
    save_hf(engine, folder / "saved")
    loss = engine.train_batch(iter(pieces))
    found: dict[str, Any] = {"loss": float(loss), "logits": None}
    if grid.pipe.is_last and grid.context.size == 1:
        shown = torch.cat([*outputs])
        mask = batch.get("attention_mask") if masked else None
        mine = slice(rows.start, rows.stop)
        found["logits"] = mine, shown if mask is None else shown * mask[mine, :, None]
    return found | {"gradients": by_their_names(engine.gather("gradients"), read_config(folder / "model"))}
