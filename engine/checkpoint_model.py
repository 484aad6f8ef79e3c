"""What model a checkpoint is of, as far as the model tells; and its weights in the formats that packages offer.

A package offers a format by an entry point in the group ``triax.exports``, whose name is the format's: triax itself
``hf``, a folder for ``transformers``. What it names is called with

model: what ``describe`` found, or None
tensors: name -> (shape, dtype): what the checkpoint has of weights, and then of buffers
read: from a name to the whole tensor
folder: where to write
dtype: of floating-point tensors; None: their own
config: a file that the user gave, or None

and returns the names of what it wrote; a ValueError is shown to the user.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, is_dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoint_file import DTYPES
from .checkpoint_read import Reader
from .checkpoint_state import BUFFERS, WEIGHTS
from .config_base import ConfigError

_EXPORTS = "triax.exports"  # the group of entry points

Export = Callable[..., Sequence[str]]


def describe(module: nn.Module) -> dict[str, Any] | None:
    """What a model says of itself, in JSON: the configuration of a Hugging Face model, or the dataclass from which its
    layers are made, such as ``GPTConfig``; None where it says nothing.
    """
    specs: Any = getattr(module, "specs", ())
    inner, prefix = (specs[0], "layers.0.") if len(specs) == 1 else (module, "")
    config: Any = getattr(inner, "config", None)
    if hasattr(config, "to_dict"):
        found = config.to_dict()
        found["architectures"] = found.get("architectures") or [type(inner).__name__]
        return {"hf": _plain(found), "prefix": prefix}
    arguments = (value for spec in specs for value in getattr(spec, "args", ()))
    config = next((value for value in arguments if is_dataclass(value) and not isinstance(value, type)), None)
    return None if config is None else {"class": type(config).__name__, "fields": _plain(asdict(config))}


def exporter(name: str) -> Export:
    """What writes a format.

    Raises:
        ConfigError: no installed package offers it.
    """
    known = entry_points(group=_EXPORTS)
    if name not in known.names:
        raise ConfigError(f"--format {name}: there are {', '.join(['safetensors', *sorted(known.names)])}")
    found: Export = known[name].load()
    return found


def export_model(
    export: Export, reader: Reader, folder: Path, dtype: torch.dtype | None, config: Path | None
) -> Sequence[str]:
    """Have a checkpoint's weights and buffers written, of which no more than one tensor is held.

    Raises:
        ConfigError: it is not of a model that the format knows.
    """
    names = {
        entry.partition("/")[2]: entry
        for kind in (WEIGHTS, BUFFERS)
        for entry in reader.index.tensors
        if entry.partition("/")[0] == kind
    }
    entries = reader.index.tensors
    tensors = {name: (entries[entry].shape, DTYPES[entries[entry].dtype]) for name, entry in names.items()}

    def read(name: str) -> Tensor:
        return reader.whole(names[name])

    try:
        return export(reader.index.head.get("model"), tensors, read, folder, dtype, config)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
