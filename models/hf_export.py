"""A checkpoint's weights as a folder that ``transformers`` reads: ``triax checkpoint export --format hf``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..grid import Layout
from .config import GPTConfig, LlamaConfig, RopeScaling
from .hf_config import layer_count, to_hf
from .hf_names import Entry, expand, names_of
from .hf_save import Held, parts_of, split
from .hf_write import FolderWriter

__all__ = ["export"]

FILE_BYTES = 5 * 10**9  # weights are written to several files beyond that

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def export(
    model: Mapping[str, Any] | None,
    tensors: Shapes,
    read: Callable[[str], Tensor],
    folder: Path,
    dtype: torch.dtype | None = None,
    config: Path | None = None,
) -> list[str]:
    """Write a folder for ``from_pretrained``: ``config.json``, and the weights in safetensors.

    Args:
        model: what a checkpoint says of its model: the content of ``config.json``, or the fields of a ``GPTConfig`` or
            ``LlamaConfig``.
        tensors: names -> shapes and dtypes of weights and buffers.
        read: the whole tensor of a name; asked for one after the other.
        folder: to write to; weights of an earlier model there are removed.
        dtype: of what is written; None: each tensor's own.
        config: a ``config.json`` that counts in place of ``model``.

    Returns:
        The names that were written, Hugging Face's.

    Raises:
        ValueError: it is not known what model this is, or what its tensors are in Hugging Face's; the message says
            what to do.
    """
    written, prefix = _config(model, config)
    if prefix is None:
        entries = expand(names_of(written.get("model_type")), layer_count(written))
    else:
        entries = {name: Entry((name.removeprefix(prefix),)) for name in tensors}
    plan = {
        name: parts_of(name, Held(Layout(shape, name), kind, 0), entries, dtype if kind.is_floating_point else None)
        for name, (shape, kind) in tensors.items()
    }
    announced = {part: (shape, kind) for parts in plan.values() for part, shape, kind in parts}
    kinds = {kind for _, kind in announced.values() if kind.is_floating_point}
    said = str(kinds.pop() if len(kinds) == 1 else torch.float32).removeprefix("torch.")
    writer = FolderWriter(folder, {**written, "dtype": said}, announced, FILE_BYTES)
    for name, parts in plan.items():
        for theirs, piece in split(read(name), parts, entries[name]):
            writer.write(theirs, piece)
    writer.close()
    return [*announced]


def _config(model: Mapping[str, Any] | None, file: Path | None) -> tuple[dict[str, Any], str | None]:
    """What ``config.json`` says but for the dtype; and what stands before the names of a Hugging Face model's own."""
    prefix = model.get("prefix") if model is not None and "hf" in model else None
    if file is not None:
        given: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return given, prefix
    if model is not None and "hf" in model:
        return dict(model["hf"]), prefix
    kind, fields = (model or {}).get("class"), dict((model or {}).get("fields", {}))
    if kind == "GPTConfig":
        return to_hf(GPTConfig(**fields)), None
    if kind == "LlamaConfig":
        scaling = fields.pop("rope_scaling")
        return to_hf(LlamaConfig(**fields, rope_scaling=None if scaling is None else RopeScaling(**scaling))), None
    of = "does not tell what model it is of" if model is None else f"is of a model made from a {kind}"
    raise ValueError(
        f"the checkpoint {of}: pass --config config.json, if its layers are those of triax.gpt or triax.llama; else "
        "triax.load_weights(module, checkpoint) and triax.save_hf(module, folder, names=..., config=...)"
    )
