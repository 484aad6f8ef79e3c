"""Import of a torch distributed checkpoint (DCP). Its metadata file is a pickle, so the user has to ask for it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ...base.json_values import encode
from ..snapshot import BUFFERS, OPTIMIZER, WEIGHTS, Snapshot
from .whole_tensors import renamed, write_whole


def import_dcp(
    source: Path,
    folder: Path,
    tag: str,
    weights: str = "model.",
    optimizer: str = "optimizer.state.",
    buffers: Sequence[str] = (),
    renames: Mapping[str, str] | None = None,
) -> list[str]:
    """Read all tensors of a DCP folder on one process, and write them as a checkpoint.

    Args:
        source: the folder that ``torch.distributed.checkpoint.save`` wrote. Its file ``.metadata`` is unpickled,
            which runs any code in it.
        folder, tag: folder of checkpoints to write to, and the new checkpoint's name.
        weights: prefix of the names of weights.
        optimizer: prefix of the names of optimizer state; a parameter's name, a dot and a key follow.
        buffers: patterns of the names of buffers.
        renames: replacements of the beginnings of names, after the prefix is removed: old -> new.

    Returns:
        The names of the tensors that were left out.

    Raises:
        ValueError: if no name begins with ``weights``.
        RuntimeError: if the checkpoint could not be written.
    """
    reader = dcp.FileSystemReader(source)
    entries = reader.read_metadata().state_dict_metadata
    tensors: dict[str, Tensor] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the warning that this is one process
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    snapshot = Snapshot()
    for name, value in tensors.items():
        if name.startswith(optimizer):
            parameter, _, key = name.removeprefix(optimizer).rpartition(".")
            parameter = renamed(parameter, renames or {})
            if value.dim() == 0:
                snapshot.numbers.setdefault(parameter, {})[key] = encode(value)
            else:
                snapshot.add(f"{OPTIMIZER}/{key}/{parameter}", value)
        elif name.startswith(weights):
            short = renamed(name.removeprefix(weights), renames or {})
            buffer = any(fnmatchcase(short, pattern) for pattern in buffers)
            snapshot.add(f"{BUFFERS if buffer else WEIGHTS}/{short}", value)
    if not snapshot.of_kinds(WEIGHTS):
        raise ValueError(
            f"no name of a tensor in {source} begins with {weights!r}. Give the prefix of the weights; the first names "
            f"are: {', '.join([*entries][:6])}"
        )
    steps = [tensors[name] for name in tensors if name.startswith(optimizer) and name.endswith(".step")]
    step = int(max(map(float, steps), default=0))
    write_whole(folder, tag, snapshot, {"global_steps": step}, f"DCP, {source}")
    taken = (weights, optimizer)
    return [name for name in entries if name not in tensors or not name.startswith(taken)]
