"""Export of a checkpoint's weights to a folder for ``transformers``: ``triax checkpoint export --format hf``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...base.files import read_object
from ...grid import Layout
from ...tensor_parallel import nf4
from ...tensor_parallel.lora import LoraOptions
from ...tensor_parallel.lora_adapter import DEFAULT
from ..config import CONFIGS, config_from_fields
from .adapters import write_adapters
from .config import as_reward, is_reward, to_hf
from .config import entries as expanded
from .folder_settings import settings_of, write_settings
from .folder_writer import FolderWriter
from .merge_adapters import is_factor, merges, set_of_factor
from .names import Entry
from .save import Held, announced, linear_names, names_of_layers, parts_of, transposed_layers, write_parts

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def _export(
    model: Mapping[str, Any] | None,
    tensors: Shapes,
    read: Callable[[str], Tensor],
    folder: Path,
    dtype: torch.dtype | None = None,
    config: Path | None = None,
    merge_lora: bool = False,
    tokenizer: str | Path | None = None,
) -> list[str]:
    """Write a folder for ``from_pretrained``: ``config.json``, and the weights in safetensors; or for PEFT.

    A checkpoint with adapters becomes PEFT's folder, with the adapters alone, unless they are merged.

    Args:
        model: the model's description in the checkpoint, which is the content of ``config.json`` or the fields of a
            configuration such as ``LlamaConfig``.
        tensors: names -> shapes and dtypes of the checkpoint's weights and buffers.
        read: function that returns the whole tensor of a name. It is called for one tensor after the other.
        folder: the folder to write to. Weights of an earlier model in this folder are removed.
        dtype: dtype of the written weights. If None, each tensor keeps its dtype.
        config: content of a ``config.json`` that is used in place of ``model``.
        merge_lora: write all weights, and add the products of the adapters to them.
        tokenizer: folder with the tokenizer's files, or an id of the Hub; None: that from which the model was
            loaded, if any.

    Returns:
        Hugging Face's names of the tensors that were written.

    Raises:
        ValueError: the model's family is unknown, or a tensor has no counterpart in Hugging Face's model. The message
            says what to do.
    """
    written, prefix = _config(model, config)
    options = _adapters_of(model)
    if merge_lora and len(options) != 1:
        raise ValueError(
            f"the checkpoint has the adapters {', '.join(options)}, and one can be merged: load it, and call "
            "triax.use_lora and triax.save_hf(..., merge_lora=True)."
            if options
            else "the checkpoint has no LoRA adapters to merge. Leave out --merge-lora."
        )
    base = next((adapter.base for adapter in options.values()), None)
    if base is not None:
        flipped = {f"{prefix}{name}" for name in transposed_layers(written)} if prefix is not None else set[str]()
        tensors, read = _computed(tensors, read, base, flipped)
    if prefix is None:
        written = as_reward(written) if _has_score(written, tensors) else written
        entries = expanded(None, written)
    else:
        entries = {name: Entry((name.removeprefix(prefix),)) for name in tensors}
    conv1d = transposed_layers(written) if options else set[str]()
    factors = {name: read(name) for name in tensors if is_factor(name)}
    if options and not merge_lora:
        layers, names = names_of_layers(entries), list[str]()
        for name, adapter in options.items():
            own = {key: value for key, value in factors.items() if set_of_factor(key) == name}
            target = folder if name == DEFAULT else folder / name
            names += write_adapters(target, adapter, own, layers, conv1d, dtype, None)
        return names
    plan = {
        name: parts_of(name, Held(Layout(shape, name), kind, 0), entries, dtype if kind.is_floating_point else None)
        for name, (shape, kind) in tensors.items()
        if name not in factors
    }
    tensors_written = announced(plan, entries)
    writer = FolderWriter(folder, written, tensors_written)
    scalings = {key: options_of_set.scaling for key, options_of_set in options.items()}
    with writer.files as files:
        for name, parts in plan.items():
            if parts:
                changes = merges(name, entries[name], factors, scalings, conv1d)
                write_parts(writer, read(name), parts, entries[name], changes)
        writer.close()
        write_settings(files, None if model is None else model.get("settings"), tokenizer)
    return [*tensors_written]


def _adapters_of(model: Mapping[str, Any] | None) -> dict[str, LoraOptions]:
    """Return the options of each set of adapters in a checkpoint."""
    config: Mapping[str, Any] = model or {}
    sets: Mapping[str, Any] = config.get("loras") or ({DEFAULT: config["lora"]} if "lora" in config else {})
    return {name: LoraOptions(**adapter) for name, adapter in sets.items()}


def _computed(
    tensors: Shapes, read: Callable[[str], Tensor], form: str, flipped: set[str]
) -> tuple[Shapes, Callable[[str], Tensor]]:
    """Return the tensors, and the function that reads one, with fp32 weights in place of those in 4 or 8 bits.

    Args:
        tensors, read: as for ``_export``.
        form: format of the weights.
        flipped: names of layers whose weight is (inputs, outputs).
    """
    computed: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, (shape, kind) in tensors.items():
        layer, _, numbers = name.partition(".quantized.")
        if numbers == "codes":
            wide = (shape[0], shape[1] * (1 if form == "int8" else 2))
            computed[f"{layer}.weight"] = wide[::-1] if layer in flipped else wide, torch.float32
        elif not numbers:
            computed[name] = shape, kind

    def read_computed(name: str) -> Tensor:
        layer = name.removesuffix(".weight")
        if f"{layer}.quantized.codes" not in tensors or not name.endswith(".weight"):
            return read(name)
        parts = ("codes", "scales", "outer", "mean")
        held = {part: read(f"{layer}.quantized.{part}") for part in parts if f"{layer}.quantized.{part}" in tensors}
        weight = nf4.whole_weight(form, **held)
        return weight.t() if layer in flipped else weight

    return computed, read_computed


def _has_score(written: Mapping[str, Any], tensors: Shapes) -> bool:
    """Return True if the output layer of a checkpoint has one row: the head of a reward model."""
    if is_reward(written):
        return False  # the configuration says so already
    heads = [ours for ours, entry in expanded(None, written).items() if entry.theirs == ("lm_head.weight",)]
    return any(ours in tensors and tensors[ours][0][0] == 1 for ours in heads)


class _HuggingFace:
    """The format ``hf``: writes a checkpoint's weights, and tells transformers' names of a model's layers.

    ``settings`` tells what a checkpoint keeps of the folder that the model was loaded from.
    """

    __call__ = staticmethod(_export)
    module_names = staticmethod(linear_names)
    settings = staticmethod(settings_of)


export = _HuggingFace()


def _config(model: Mapping[str, Any] | None, file: Path | None) -> tuple[dict[str, Any], str | None]:
    """Return the content of ``config.json`` without the dtype, and the prefix of the parameters' names.

    The prefix is that of a Hugging Face model in the checkpoint, for example ``layers.0.``; None for other models.
    """
    prefix = model.get("prefix") if model is not None and "hf" in model else None
    if file is not None:
        return read_object(file), prefix
    if model is not None and "hf" in model:
        return dict(model["hf"]), prefix
    kind, fields = str((model or {}).get("class")), dict((model or {}).get("fields", {}))
    if kind in CONFIGS:
        return to_hf(config_from_fields(kind, fields), (model or {}).get("settings")), None
    of = "does not tell the model's configuration" if kind == "None" else f"has a model made from a {kind}"
    raise ValueError(
        f"the checkpoint {of}. Pass --config config.json if its layers are those of triax.gpt_layers or "
        "triax.llama_layers. For other layers call triax.load_weights(module, checkpoint) and "
        "triax.save_hf(module, folder, names=..., config=...)."
    )
