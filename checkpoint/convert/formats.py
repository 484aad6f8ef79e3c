"""Export formats that packages offer, such as Hugging Face's; and the description of the model in a checkpoint.

A package offers a format by an entry point in the group ``triax.exports``, under the format's name. triax itself offers
``hf``, a folder for ``transformers``, and ``dcp``, one for ``torch.distributed.checkpoint``. The entry point names a
function of

model: the result of ``describe`` when the checkpoint was saved, or None
tensors: name -> (shape, dtype) of the weights, then of the buffers
read: function from a name to the whole tensor
folder: to write to
dtype: of floating-point tensors; None: their own
config: a configuration file that the user gave, or None
merge_lora: True, and given only then, if the products of LoRA adapters are to be added to the weights
tokenizer: folder with a tokenizer's files, given only if the user gave one

which returns the names that it wrote. Its ValueErrors are shown to the user.

The function may have an attribute ``module_names``, a function from a model to the names of its layers in the format:
see ``module_names``. It may have an attribute ``settings``, a function from a model to what a checkpoint keeps of it
for the format: JSON, in ``model`` under ``settings``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...base.entry_points import offered
from ...base.errors import ConfigError
from ..snapshot import BUFFERS, WEIGHTS, Snapshot

_EXPORTS = "triax.exports"  # the group of entry points

Export = Callable[..., Sequence[str]]


def describe(module: nn.Module) -> dict[str, Any] | None:
    """Return a model's configuration in JSON: that of a Hugging Face model, or the dataclass that its layers are made
    from, such as ``GPTConfig``; None if there is neither. The options of LoRA adapters are added; under ``settings``
    what an export format wants to know, such as special tokens; under ``shared`` second names of shared parameters.
    """
    described = _configuration(module)
    settings = _settings(module) if described is not None else None
    described = described if settings is None else {**(described or {}), "settings": _plain(settings)}
    shared = shared_names(module)
    return _with_lora({**(described or {}), "shared": shared} if shared else described, module)


def shared_names(module: nn.Module) -> dict[str, str]:
    """Return further names of parameters that have several in a module: name -> the name of its weights in the file."""
    first: dict[nn.Parameter, str] = {}
    named = () if hasattr(module, "layer_specs") else module.named_parameters(remove_duplicate=False)
    return {name: first[tensor] for name, tensor in named if first.setdefault(tensor, name) != name}


def _configuration(module: nn.Module) -> dict[str, Any] | None:
    specs: Any = getattr(module, "layer_specs", ())
    inner, prefix = (specs[0], "layers.0.") if len(specs) == 1 else (module, "")
    config: Any = getattr(inner, "config", None)
    if hasattr(config, "to_dict"):
        fields = config.to_dict()
        fields["architectures"] = fields.get("architectures") or [type(inner).__name__]
        return {"hf": _plain(fields), "prefix": prefix}
    arguments = (value for spec in specs for value in getattr(spec, "args", ()))
    config = next((value for value in arguments if is_dataclass(value) and not isinstance(value, type)), None)
    return None if config is None else {"class": type(config).__name__, "fields": _plain(asdict(config))}


def _settings(module: nn.Module) -> Any:
    """Return what the first format that knows the model wants to keep of it, or None."""
    finders = (getattr(entry.load(), "settings", None) for entry in offered(_EXPORTS))
    return next((settings for find in finders if find is not None and (settings := find(module)) is not None), None)


def _with_lora(found: dict[str, Any] | None, module: nn.Module) -> dict[str, Any] | None:
    """Add the options of the model's LoRA adapters to its description, if it has any."""
    options: Any = getattr(module, "lora_options", {})
    if not options:
        return found
    sets = {name: _plain(asdict(adapter)) for name, adapter in options.items()}
    return {**(found or {}), "lora": sets["default"]} if [*sets] == ["default"] else {**(found or {}), "loras": sets}


def module_names(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the names that a format has for a model's layers: from the name of a layer to its names in the format.

    There are several for a layer of several that are fused along their outputs. The result is {} if no format knows
    the model.
    """
    for entry in offered(_EXPORTS):
        find = getattr(entry.load(), "module_names", None)
        names: dict[str, tuple[str, ...]] = {} if find is None else find(module)
        if names:
            return names
    return {}


def exporter(name: str) -> Export:
    """Return the function that writes a format.

    Raises:
        ConfigError: no installed package offers it.
    """
    known = offered(_EXPORTS)
    if name not in known.names:
        raise ConfigError(
            f"--format {name} is not a format that an installed package offers: give one of "
            f"{', '.join(['safetensors', *sorted(known.names)])}"
        )
    export: Export = known[name].load()
    return export


def export_model(
    export: Export,
    snapshot: Snapshot,
    folder: Path,
    dtype: torch.dtype | None,
    config: Path | None,
    merge_lora: bool = False,
    tokenizer: str | Path | None = None,
) -> Sequence[str]:
    """Write a checkpoint's weights and buffers in a package's format. One tensor is in memory at a time.

    Returns:
        The names that were written.

    Raises:
        ConfigError: the checkpoint is of a model that the format does not support.
    """
    tensors = snapshot.of_kinds(WEIGHTS, BUFFERS)
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    model = snapshot.header.get("model")
    try:
        merge: dict[str, Any] = {"merge_lora": True} if merge_lora else {}
        merge |= {} if tokenizer is None else {"tokenizer": tokenizer}
        return export(model, shapes, lambda name: tensors[name].read_all(), folder, dtype, config, **merge)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
