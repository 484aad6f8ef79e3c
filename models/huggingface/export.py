"""Export of a checkpoint's weights to a folder for ``transformers``: ``triax checkpoint export --format hf``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...grid import Layout
from ..config import CONFIGS, config_from_fields
from .config import expert_count, layer_count, to_hf
from .folder_writer import FolderWriter
from .names import Entry, expand, names_of
from .save import Held, parts_of, write_parts

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
        model: the model's description in the checkpoint, which is the content of ``config.json`` or the fields of a
            configuration such as ``LlamaConfig``.
        tensors: names -> shapes and dtypes of the checkpoint's weights and buffers.
        read: function that returns the whole tensor of a name. It is called for one tensor after the other.
        folder: the folder to write to. Weights of an earlier model in this folder are removed.
        dtype: dtype of the written weights. If None, each tensor keeps its dtype.
        config: content of a ``config.json`` that is used in place of ``model``.

    Returns:
        Hugging Face's names of the tensors that were written.

    Raises:
        ValueError: the model's family is unknown, or a tensor has no counterpart in Hugging Face's model. The message
            says what to do.
    """
    written, prefix = _config(model, config)
    if prefix is None:
        entries = expand(names_of(written.get("model_type")), layer_count(written), expert_count(written))
    else:
        entries = {name: Entry((name.removeprefix(prefix),)) for name in tensors}
    plan = {
        name: parts_of(name, Held(Layout(shape, name), kind, 0), entries, dtype if kind.is_floating_point else None)
        for name, (shape, kind) in tensors.items()
    }
    announced = {part: (shape, kind) for parts in plan.values() for part, shape, kind in parts}
    writer = FolderWriter(folder, written, announced)
    for name, parts in plan.items():
        if parts:
            write_parts(writer, read(name), parts, entries[name])
    writer.close()
    return [*announced]


def _config(model: Mapping[str, Any] | None, file: Path | None) -> tuple[dict[str, Any], str | None]:
    """Return the content of ``config.json`` without the dtype, and the prefix of the parameters' names.

    The prefix is that of a Hugging Face model in the checkpoint, for example ``layers.0.``; None for other models.
    """
    prefix = model.get("prefix") if model is not None and "hf" in model else None
    if file is not None:
        given: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return given, prefix
    if model is not None and "hf" in model:
        return dict(model["hf"]), prefix
    kind, fields = str((model or {}).get("class")), dict((model or {}).get("fields", {}))
    if kind in CONFIGS:
        return to_hf(config_from_fields(kind, fields)), None
    of = "does not tell the model's configuration" if model is None else f"has a model made from a {kind}"
    raise ValueError(
        f"the checkpoint {of}. Pass --config config.json if its layers are those of triax.gpt_layers or "
        "triax.llama_layers. For other layers call triax.load_weights(module, checkpoint) and "
        "triax.save_hf(module, folder, names=..., config=...)."
    )
