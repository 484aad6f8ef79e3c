"""Reader of a folder of torch.distributed.checkpoint (DCP) that runs no code of the folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .inert import Inert, read_pickle, read_torch_file


class DcpFolder:
    """Tensors and objects of a DCP folder: ``.metadata`` and files of parts, each part written by ``torch.save``.

    Args:
        folder: the folder.

    Attributes:
        shapes: name -> shape of each tensor.
        objects: names of the other entries.

    Raises:
        ValueError: ``.metadata`` cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            metadata = read_pickle((folder / ".metadata").read_bytes())
            entries: dict[str, Inert] = metadata.state["state_dict_metadata"]
            stored: dict[Inert, Inert] = metadata.state["storage_data"]
            self._parts: dict[str, list[tuple[tuple[int, ...], Inert]]] = {}
            for index, storage in stored.items():
                offset = index.get("offset")
                begin = () if offset is None else tuple(offset.args[0])
                self._parts.setdefault(index.get("fqn"), []).append((begin, storage))
            tensors = {name: entry for name, entry in entries.items() if entry.name.endswith("TensorStorageMetadata")}
            self.shapes = {name: tuple(entry.state["size"].args[0]) for name, entry in tensors.items()}
        except (ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
            raise ValueError(f"{folder / '.metadata'} is not metadata of a DCP checkpoint: {error}") from error
        self.objects = [name for name in entries if name not in self.shapes]

    def read_tensor(self, name: str) -> Tensor:
        """Return a tensor, assembled from its parts."""
        return self._assemble(name, self._parts.get(name, ()), self.shapes[name])

    def read_row(self, name: str, row: int) -> Tensor:
        """Return ``tensor[row]``. Only the parts that begin at this row are read, if each row has its own parts."""
        parts = [(begin, storage) for begin, storage in self._parts.get(name, ()) if begin]
        if {begin[0] for begin, _ in parts} != set(range(self.shapes[name][0])):
            return self.read_tensor(name)[row]
        here = [((0, *begin[1:]), storage) for begin, storage in parts if begin[0] == row]
        return self._assemble(name, here, (1, *self.shapes[name][1:]))[0]

    def _assemble(self, name: str, parts: Sequence[tuple[tuple[int, ...], Inert]], shape: tuple[int, ...]) -> Tensor:
        tensor: Tensor | None = None
        for begin, storage in parts:
            part = self._read_item(storage)
            if tensor is None:
                tensor = torch.empty(shape, dtype=part.dtype)
            spans = zip(begin or [0] * part.dim(), part.shape, strict=True)
            tensor[tuple(slice(at, at + size) for at, size in spans)] = part
        if tensor is None:
            raise ValueError(f"{self._folder} has no part of {name}: the checkpoint is incomplete")
        return tensor

    def read_object(self, name: str) -> Any:
        """Return an object, with ``Inert`` in place of everything that is no tensor, number, text or collection."""
        ((_, storage),) = self._parts[name]
        return self._read_item(storage)

    def _read_item(self, place: Inert) -> Any:
        if place.get("transform_descriptors"):
            raise ValueError(f"{self._folder} is compressed ({place.get('transform_descriptors')}): write it without")
        file = self._folder / str(place.get("relative_path"))
        with file.open("rb") as opened:
            opened.seek(place.get("offset"))
            return read_torch_file(opened.read(place.get("length")))
