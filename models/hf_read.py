"""Reading Hugging Face's weights: a folder of safetensors, or a live model, slice by slice."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from ..grid.layout import Layout
from .hf_config import read_config
from .hf_names import Entry

__all__ = ["Source", "check", "fetch", "find", "open_source", "unused"]

# What files of the field have besides weights: masks and rotary tables, which no parameter holds.
_NO_WEIGHTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


class Source(Protocol):
    """Where weights come from.

    Attributes:
        where: for messages.
        config: what ``config.json`` says.
        shapes: of each tensor, by its name.
    """

    where: str
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """A slice of a tensor, new, in its own dtype; nothing else of it is read."""


class _Folder:
    """``model.safetensors``, or the files that ``model.safetensors.index.json`` lists."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self.config = read_config(folder)
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        elif (folder / "model.safetensors").is_file():
            names = ["model.safetensors"]
        else:
            names = sorted(path.name for path in folder.glob("*.safetensors"))
        if not names:
            found = ", ".join(sorted(path.name for path in folder.iterdir()))
            raise FileNotFoundError(
                f"{folder} has no *.safetensors ({found}): have transformers write it, "
                "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
            )
        self._files: dict[str, Any] = {}
        self.shapes = {}
        for file in names:
            if not (folder / file).is_file():
                raise FileNotFoundError(f"{index} lists {file}, which {folder} does not have")
            opened = safe_open(folder / file, framework="pt")
            for name in opened.keys():  # noqa: SIM118, it is no mapping
                self._files[name] = opened
                self.shapes[name] = tuple(opened.get_slice(name).get_shape())

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """See ``Source``."""
        read: Tensor = self._files[name].get_slice(name)[part]
        return read


class _Model:
    """A model in this process."""

    def __init__(self, model: Any) -> None:
        self.where = f"the {type(model).__name__}"
        self.config = model.config.to_dict()
        self._weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._weights.items()}

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """See ``Source``."""
        return self._weights[name][part].clone()  # the model may go on


def open_source(path_or_model: Any) -> Source:
    """A folder's path or a live ``transformers`` model, as a source.

    Raises:
        FileNotFoundError: the folder is not one that ``save_pretrained`` writes.
        TypeError: it is neither.
    """
    if isinstance(path_or_model, (str, Path)):
        return _Folder(Path(path_or_model))
    if hasattr(path_or_model, "state_dict") and hasattr(getattr(path_or_model, "config", None), "to_dict"):
        return _Model(path_or_model)
    raise TypeError(
        f"weights come from a folder's path or a transformers model, not from a {type(path_or_model).__name__}"
    )


def find(source: Source, name: str) -> str | None:
    """The tensor of this name: some files leave out the base model's prefix, and tied weights are kept once."""
    short = name.partition(".")[2]
    for candidate in (name, short):
        if candidate in source.shapes:
            return candidate
    return None


def unused(source: Source, entries: Iterable[Entry]) -> list[str]:
    """The weights of a source that no entry takes."""
    taken = {find(source, name) for entry in entries for name in entry.theirs}
    return [name for name in source.shapes if name not in taken and not name.endswith(_NO_WEIGHTS)]


def check(source: Source, ours: str, entry: Entry, layout: Layout) -> tuple[list[str], list[tuple[int, ...]]]:
    """Whether a source has what one of our parameters is made of; nothing is read.

    Args:
        source: of the weights.
        ours: the parameter's name, for messages.
        entry: what it is made of.
        layout: where its elements live.

    Returns:
        The source's names, and their shapes as ours has them.

    Raises:
        ValueError: a tensor that the source does not have, or shapes that do not fit.
    """
    names = []
    for theirs in entry.theirs:
        name = find(source, theirs)
        if name is None:
            raise ValueError(
                f"{ours} comes from {theirs}, which {source.where} does not have; it has {_near(theirs, source.shapes)}"
            )
        names.append(name)
    shapes = [source.shapes[name] for name in names]
    if entry.transposed:
        shapes = [shape[::-1] for shape in shapes]
    whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    if whole != layout.shape or any(shape[1:] != whole[1:] for shape in shapes):
        kept = ", ".join(f"{name} {tuple(source.shapes[name])}" for name in names)
        raise ValueError(
            f"{ours} is {layout.shape} here, and {kept} in {source.where}{', transposed' * entry.transposed}: build "
            "the model of the sizes in its config.json, config_from_hf(path)"
        )
    return names, shapes


def fetch(source: Source, ours: str, entry: Entry, layout: Layout, rank: int, size: int) -> Tensor:
    """This tensor rank's part of one of our parameters, in the dtype it is kept in. Reads no more than that.

    Args:
        source, ours, entry, layout: as in ``check``.
        rank, size: of the tensor axis.

    Returns:
        ``layout.local_shape(rank, size)``.

    Raises:
        ValueError: as ``check``.
    """
    names, shapes = check(source, ours, entry, layout)
    pieces: list[tuple[tuple[slice, ...], Tensor]] = []
    for box in layout.boxes(rank, size):
        rows, *rest = box.whole
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            low, high = max(rows.start, start), min(rows.stop, start + shape[0])
            if low < high:
                part = (slice(low - start, high - start), *rest)
                read = source.read(name, part[::-1]).t() if entry.transposed else source.read(name, part)
                shift = box.local[0].start - rows.start
                pieces.append(((slice(low + shift, high + shift), *box.local[1:]), read))
            start += shape[0]
    if len(pieces) == 1:
        return pieces[0][1]
    value = torch.empty(layout.local_shape(rank, size), dtype=pieces[0][1].dtype if pieces else torch.float32)
    for place, read in pieces:
        value[place] = read
    return value


def _near(name: str, names: Mapping[str, Any]) -> str:
    """Names with the same ending as one that is missing, or a few of all."""
    ending = name.rpartition(".")[0].rpartition(".")[2]
    near = [other for other in names if ending and ending in other] or list(names)
    return ", ".join(near[:6]) + (", ..." if len(near) > 6 else "")
