"""Writing a safetensors folder one tensor at a time, as Hugging Face lays it out.

The format: 8 bytes with the length of a JSON header, the header (name -> dtype, shape and the tensor's range of
bytes), then the tensors' bytes. Nothing but the tensor under way is held, where the format's own library takes whole
dictionaries.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

__all__ = ["FolderWriter"]

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class FolderWriter:
    """Writes ``config.json``, and ``model.safetensors`` or several files and their index.

    Args:
        folder: made if it is not there.
        config: what ``config.json`` says.
        tensors: name -> (shape, dtype), in the order in which they will come.
        file_bytes: a file holds no more than this, but for a larger tensor.

    Raises:
        ValueError: a dtype that the format has not.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        file_bytes: int,
    ) -> None:
        self._folder = folder
        files: list[dict[str, Any]] = [{}]
        filled = total = 0
        for name, (shape, dtype) in tensors.items():
            if dtype not in _NAMES:
                raise ValueError(
                    f"{name} is of {dtype}, which safetensors does not hold: give {', '.join(_NAMES.values())}"
                )
            size = math.prod(shape) * dtype.itemsize
            if files[-1] and filled + size > file_bytes:
                files.append({})
                filled = 0
            files[-1][name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [filled, filled + size],
            }
            filled += size
            total += size
        count = len(files)
        names = (
            [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
            if count > 1
            else ["model.safetensors"]
        )
        self._order = [(name, file, dict(entry)) for file, held in zip(names, files) for name, entry in held.items()]
        self._headers = dict(zip(names, files))
        self._next = 0
        self._open: IO[bytes] | None = None
        self._path = Path()
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob("model*.safetensors"), folder / "model.safetensors.index.json"):
            old.unlink(missing_ok=True)  # an older, larger model's files would be read beside these
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if count > 1:
            index = {"metadata": {"total_size": total}, "weight_map": {name: file for name, file, _ in self._order}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def write(self, name: str, tensor: Tensor) -> None:
        """The next tensor.

        Raises:
            ValueError: it is not the one that was announced.
        """
        wanted, file, entry = self._order[self._next]
        if name != wanted or list(tensor.shape) != entry["shape"] or _NAMES[tensor.dtype] != entry["dtype"]:
            raise ValueError(f"{name} {tuple(tensor.shape)} of {tensor.dtype} came in the place of {wanted}: {entry}")
        if self._open is None or self._path.name != file:
            self.close()
            self._path = self._folder / file
            self._open = self._path.open("wb")
            header = json.dumps({"__metadata__": {"format": "pt"}, **self._headers[file]}).encode()
            header += b" " * (-len(header) % 8)  # tensors begin at a multiple of 8 bytes
            self._open.write(len(header).to_bytes(8, "little") + header)
        # A copy: what numpy has once seen cannot be resized, and ZeRO empties the storages of gathered weights.
        flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
        self._open.write(flat.view(torch.uint8).numpy().data)
        self._next += 1

    def close(self) -> None:
        """Close the file under way."""
        if self._open is not None:
            self._open.close()
            self._open = None
