"""Export of whole weights to torch's format for distributed checkpoints: ``triax checkpoint export --format dcp``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

PREFIX = "model."  # as in ``dcp.save({"model": module.state_dict()})``


class _OneByOne(dcp.DefaultSavePlanner):
    """Planner that reads each tensor when it is written."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: Any) -> Tensor:
        """Return the tensor of a name."""
        return self._read(index.fqn)


def export(
    model: Mapping[str, Any] | None,
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    read: Callable[[str], Tensor],
    folder: Path,
    dtype: torch.dtype | None = None,
    config: Path | None = None,
    **others: Any,
) -> list[str]:
    """Write a folder for ``torch.distributed.checkpoint.load({"model": module.state_dict()}, checkpoint_id=folder)``.

    Args:
        model, tensors, read, folder, dtype, config, others: as ``formats`` describes; one tensor is read at a time.

    Returns:
        The names that were written.

    Raises:
        ValueError: an option that this format does not have.
    """
    if given := [*(["config"] if config is not None else []), *others]:
        flag = f"--{given[0].replace('_', '-')}"
        raise ValueError(f"{flag} is used only with --format hf, and not with --format dcp. Leave it out.")

    def kept(own: torch.dtype) -> torch.dtype:
        return dtype if dtype is not None and own.is_floating_point else own

    empty = {
        f"{PREFIX}{name}": torch.empty(shape, dtype=kept(own), device="meta") for name, (shape, own) in tensors.items()
    }

    def one(name: str) -> Tensor:
        tensor = read(name.removeprefix(PREFIX))
        return tensor.to(kept(tensor.dtype))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the warning that this is one process
        dcp.save(empty, checkpoint_id=folder, planner=_OneByOne(one), no_dist=True)
    return [*empty]
