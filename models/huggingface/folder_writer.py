"""Writer of a folder of safetensors files as Hugging Face lays it out, one tensor at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...base.folder_files import FolderFiles
from ...base.safetensors import TensorStream, header

INDEX = "model.safetensors.index.json"


class TensorSink:
    """Base of a receiver of tensors under Hugging Face's names, one at a time, some of them in ranges of rows.

    Args:
        tensors: name -> (shape, dtype).
    """

    def __init__(self, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        self._tensors = dict(tensors)
        # A tensor that lacks some rows, and the number of rows that it lacks.
        self._partial: dict[str, tuple[Tensor, int]] = {}

    def write_tensor(self, name: str, tensor: Tensor) -> None:
        """Take the next tensor."""
        raise NotImplementedError

    def write_rows(self, name: str, rows: Tensor, at: Sequence[tuple[int, int]]) -> None:
        """Add rows to the next tensor, which is taken when it has all of them.

        Args:
            name: the tensor's name.
            rows: the rows, one range after another.
            at: the ranges [start, stop) of the tensor's rows that they are.
        """
        shape, dtype = self._tensors[name]
        if name not in self._partial:
            self._partial[name] = torch.empty(shape, dtype=dtype, device=rows.device), shape[0]
        tensor, missing = self._partial.pop(name)
        for piece, (start, stop) in zip(rows.split([stop - start for start, stop in at]), at, strict=True):
            tensor[start:stop] = piece
        if missing > len(rows):
            self._partial[name] = tensor, missing - len(rows)
        else:
            self.write_tensor(name, tensor)


class FolderWriter(TensorSink):
    """Writer of ``config.json`` and of ``model.safetensors``, or of several safetensors files and their index.

    The caller ends the context ``files``, which puts what was written in the place of an earlier model.

    Args:
        folder: the folder, created if it does not exist.
        config: content of ``config.json``. The dtype of the floating-point tensors is added to it, or float32 if
            these tensors have different dtypes.
        tensors: name -> (shape, dtype), in the order in which the tensors will be written.
        file_bytes: maximum size of a file in bytes. A tensor larger than this gets a file that exceeds it.

    Attributes:
        files: the files of the folder.

    Raises:
        ValueError: a tensor has a dtype that the safetensors format does not support.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        file_bytes: int = 5 * 10**9,
    ) -> None:
        super().__init__(tensors)
        files: list[dict[str, tuple[tuple[int, ...], torch.dtype]]] = [{}]
        filled = 0
        for name, (shape, dtype) in tensors.items():
            size = math.prod(shape) * dtype.itemsize
            if files[-1] and filled + size > file_bytes:
                files.append({})
                filled = 0
            files[-1][name] = (shape, dtype)
            filled += size
        count = len(files)
        names = ["model.safetensors"]
        if count > 1:
            names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        for held in files:
            header(held)  # refuses dtypes before anything is written
        self.files = FolderFiles(folder, ("model*.safetensors", INDEX))
        folder = self.files.path
        self._files = {folder / name: held for name, held in zip(names, files, strict=True)}
        self._file_of = {name: path for path, held in self._files.items() for name in held}
        self._stream: TensorStream | None = None
        self._path = self.files.path
        self._config = config

    def write_tensor(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor.

        Raises:
            ValueError: name, shape or dtype differ from those of the next entry of ``tensors``.
        """
        path = self._file_of.get(name, self._path)
        if self._stream is None or path != self._path:
            self._close_file()
            self._path, self._stream = path, TensorStream(path, self._files[path], checksums=False)
        # A copy: what numpy has once seen cannot be resized, and ZeRO empties the storages of gathered weights.
        self._stream.write(name, tensor.detach().cpu().clone(memory_format=torch.contiguous_format))

    def close(self) -> None:
        """Write ``config.json`` and the index, after the last tensor."""
        self._close_file()
        folder, kinds = self.files.path, {kind for _, kind in self._tensors.values() if kind.is_floating_point}
        dtype_name = str(kinds.pop() if len(kinds) == 1 else torch.float32).removeprefix("torch.")
        (folder / "config.json").write_text(json.dumps({**self._config, "dtype": dtype_name}, indent=2) + "\n")
        if len(self._files) > 1:
            total = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._tensors.values())
            weights = {name: path.name for name, path in self._file_of.items()}
            index = {"metadata": {"total_size": total}, "weight_map": weights}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _close_file(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
