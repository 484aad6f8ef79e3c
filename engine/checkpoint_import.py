"""From a folder of torch's distributed checkpoint (DCP) to one of ours. Its metadata are a pickle: only if one asks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..grid import Grid
from .checkpoint_boxes import everything
from .checkpoint_state import BUFFERS, OPTIMIZER, WEIGHTS, Part
from .checkpoint_values import encode
from .checkpoint_write import Writer


def import_dcp(
    source: Path,
    folder: Path,
    tag: str,
    weights: str = "model.",
    optimizer: str = "optimizer.state.",
    buffers: Sequence[str] = (),
    renames: Mapping[str, str] | None = None,
) -> list[str]:
    """Read all tensors of a DCP folder, on one process, and write them as a checkpoint.

    Args:
        source: what ``torch.distributed.checkpoint.save`` wrote. Its file ``.metadata`` is unpickled, which runs
            whatever code it holds.
        folder, tag: where to write.
        weights: what stands before the names of weights.
        optimizer: what stands before the names of the optimizer's state: a parameter's name, a dot and a key follow.
        buffers: patterns of names, of what is a buffer and no parameter.
        renames: what names begin with, once that is taken off -> what they begin with here.

    Returns:
        The names of what was left out.

    Raises:
        ValueError: nothing there has such a name.
        RuntimeError: it could not be written.
    """
    reader = dcp.FileSystemReader(source)
    entries = reader.read_metadata().state_dict_metadata
    tensors: dict[str, Tensor] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that this is one process
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    parts: list[Part] = []
    numbers: dict[str, dict[str, Any]] = {}
    for name, value in tensors.items():
        if name.startswith(optimizer):
            parameter, _, key = name.removeprefix(optimizer).rpartition(".")
            parameter = named(parameter, renames or {})
            if value.dim() == 0:
                numbers.setdefault(parameter, {})[key] = encode(value)
            else:
                parts.append(part(f"{OPTIMIZER}/{key}/{parameter}", value))
        elif name.startswith(weights):
            short = named(name.removeprefix(weights), renames or {})
            buffer = any(fnmatchcase(short, pattern) for pattern in buffers)
            parts.append(part(f"{BUFFERS if buffer else WEIGHTS}/{short}", value))
    if not any(each.name.startswith(WEIGHTS) for each in parts):
        raise ValueError(f"{source} has no tensor {weights}...: it has {', '.join([*entries][:6])}, ...")
    steps = [tensors[name] for name in tensors if name.startswith(optimizer) and name.endswith(".step")]
    step = int(max(map(float, steps), default=0))
    write(folder, tag, parts, numbers, {"global_steps": step}, {"from": f"DCP, {source}"})
    taken = (weights, optimizer)
    return [name for name in entries if name not in tensors or not name.startswith(taken)]


def write(
    folder: Path,
    tag: str,
    parts: Sequence[Part],
    numbers: dict[str, dict[str, Any]],
    run: Mapping[str, Any],
    versions: Mapping[str, str],
) -> None:
    """Write whole tensors as a checkpoint, on one process.

    Args:
        folder, tag: where.
        parts: whole tensors.
        numbers: for each parameter what its optimizer's state has of numbers.
        run: where the run was.
        versions: whose they are.

    Raises:
        RuntimeError: it could not be written.
    """
    head = {
        "tag": tag,
        "step": run["global_steps"],
        "versions": {"torch": torch.__version__, **versions},
        "grid": {},
        "config": {},
        "dtype": None,
        "run": dict(run),
        "client_state": {},
    }
    problem = Writer(Grid(), folder, tag, parts, numbers, head, lambda text: [text], True).run()
    if problem is not None:
        raise RuntimeError(problem)


def named(name: str, renames: Mapping[str, str]) -> str:
    """A name as it is here: the longest beginning that is renamed counts."""
    for old in sorted(renames, key=len, reverse=True):
        if name.startswith(old):
            return renames[old] + name[len(old) :]
    return name


def part(name: str, value: Tensor) -> Part:
    """A whole tensor, to be written."""
    return Part(name, tuple(value.shape), value.dtype, everything(value.shape), value)
