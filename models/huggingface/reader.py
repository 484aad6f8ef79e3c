"""Reading of Hugging Face's weights by slices, from a folder of safetensors files or from a live model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ...base.errors import ConfigError
from ...base.files import read_object
from ...base.hub import local_folder
from ...grid import Grid
from ...grid.layout import Layout
from .config import layer_count, names_of, read_config, text_name, text_part
from .families import FAMILIES, WRAPPERS
from .folder_settings import Settings, settings_of_folder, settings_of_model
from .mxfp4 import BLOCK, dequantized
from .names import Entry, swapped

_LONGEST = 200  # characters of a name
_CHUNK = 2**24  # elements that are compared at once
_HEADS = tuple(
    f"{name}.weight" for name in ("lm_head", "embed_out", "lm_head.decoder", "cls.predictions.decoder", "proj_out")
)
# Tensors in such files that are no weights: masks and rotary tables.
_NO_WEIGHTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


class Source(Protocol):
    """Source of weights: a folder or a model.

    Attributes:
        where: name of the source in error messages.
        file: name of its configuration in error messages.
        config: content of ``config.json``.
        shapes: tensor name -> shape.
        settings: what the folder or the model has beside weights.
        frozen: names of the tensors that are not trained.
        tied: name of a live model's parameter -> its identity, which is equal for the names of a tied one.
    """

    where: str
    file: str
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    settings: Settings
    frozen: frozenset[str]
    tied: dict[str, int]

    def is_tied(self, head: str, embedding: str) -> bool:
        """Return True if the output layer's weight and the token embedding are one."""

    def read_slice(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """Return a slice of a tensor as a new tensor of the same dtype, and read only this slice."""


def weight_files(folder: Path, name: str = "model.safetensors") -> list[Path]:
    """Return the files of a folder's weights: ``name``, or those that its index lists. Empty: there is neither.

    Raises:
        ConfigError: the index is damaged, or lists something other than files of its own folder.
        FileNotFoundError: the folder lacks a file that the index lists.
    """
    index = folder / f"{name}.index.json"
    if not index.is_file():
        return [folder / name] if (folder / name).is_file() else []
    listed = read_object(index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise ConfigError(f"{index} is damaged: it has no weight_map of names of files. Copy or write it again.")
    names = sorted(set(listed.values()))
    for file in names:
        if file in ("", ".", "..") or len(file) > _LONGEST or any(c in file for c in "/\\\0"):
            raise ConfigError(f"{index} lists {file[:60]!r}, but only files of its own folder are read.")
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{folder / file} is no file, but {index} lists it. Copy the whole folder.")
    return [folder / file for file in names]


def open_weights(file: Path) -> Any:
    """Open a safetensors file.

    Raises:
        ConfigError: the file is damaged.
    """
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(f"{file} is damaged: it is no safetensors file ({reason}). Copy it again.") from error


class _Folder:
    """Source that reads ``model.safetensors``, or the files that ``model.safetensors.index.json`` lists."""

    def __init__(self, folder: Path, whole: bool = False) -> None:
        self.where, self.file = str(folder), str(folder / "config.json")
        self.frozen, self.tied = frozenset[str](), dict[str, int]()
        self.config = read_config(folder)
        self.settings = settings_of_folder(folder, self.config)
        kind = read_object(folder / "config.json").get("model_type")
        if whole and kind in WRAPPERS:
            self.config, kind = read_object(folder / "config.json"), None
        files = weight_files(folder) or sorted(path for path in folder.glob("*.safetensors") if path.is_file())
        if not files:
            listed = ", ".join(sorted(path.name for path in folder.iterdir()))
            raise FileNotFoundError(
                f"{folder} has no *.safetensors ({listed}). Let transformers write the folder, "
                "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)."
            )
        self._files: dict[str, tuple[Any, str]] = {}
        self.shapes = {}
        for file in files:
            opened = open_weights(file)
            for name in opened.keys():  # noqa: SIM118, it is not a mapping
                now = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
                if (own := text_name(kind, now)) is not None:  # the first files have the first names
                    self._files[own] = opened, name
                    self.shapes[own] = tuple(opened.get_slice(name).get_shape())
        self._quantized: set[str] = set()  # names of weights that lie in the files as blocks and scales
        for name in [name.removesuffix("_blocks") for name in self.shapes if name.endswith("_blocks")]:
            if f"{name}_scales" in self.shapes:
                experts, rows, groups = self.shapes.pop(f"{name}_scales")
                del self.shapes[f"{name}_blocks"]
                self.shapes[name] = experts, groups * BLOCK, rows
                self._quantized.add(name)
        if (depth := layer_count(self.config)) > len(self.shapes):
            raise ConfigError(f"{self.file} counts {depth} blocks, but {folder} has {len(self.shapes)} tensors only.")

    def is_tied(self, head: str, embedding: str) -> bool:
        """Return True if two tensors have the same values."""
        shape, rows = self.shapes[head], max(1, _CHUNK // self.shapes[head][-1])
        parts = [(slice(at, at + rows), slice(None)) for at in range(0, shape[0], rows)]
        return all(torch.equal(self.read_slice(head, part), self.read_slice(embedding, part)) for part in parts)

    def read_slice(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """Read a part of a tensor."""
        if name in self._quantized:
            return self._dequantized(name, *part)
        opened, stored = self._files[name]
        read: Tensor = opened.get_slice(stored)[part]
        return read

    def _dequantized(self, name: str, experts: slice, inputs: slice, rows: slice) -> Tensor:
        """Read a part of a weight (experts, inputs, outputs) from its blocks, (experts, outputs, groups, 16)."""
        groups = slice(inputs.start // BLOCK, -(-inputs.stop // BLOCK))
        files = (self._files[file_name] for file_name in (f"{name}_blocks", f"{name}_scales"))
        blocks, scales = (opened.get_slice(stored)[experts, rows, groups] for opened, stored in files)
        first = groups.start * BLOCK
        return dequantized(blocks, scales)[..., inputs.start - first : inputs.stop - first].transpose(1, 2)


class _Model:
    """Source that reads the state dict of a ``transformers`` model in this process."""

    def __init__(self, model: Any, whole: bool = False) -> None:
        self.where, self.file = f"the {type(model).__name__}", f"the configuration of the {type(model).__name__}"
        given = model.config.to_dict() | {"architectures": [type(model).__name__]}  # as save_pretrained writes it
        kind = given.get("model_type")
        if whole and kind in WRAPPERS:
            kind = None
        self.config = given if kind is None else text_part(given)
        self.settings = settings_of_model(model)
        named = ((text_name(kind, name), tensor) for name, tensor in model.state_dict().items())
        self._weights = {name: tensor.detach() for name, tensor in named if name is not None}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._weights.items()}
        parameters = [*model.named_parameters(remove_duplicate=False)] if isinstance(model, nn.Module) else []
        self.frozen = frozenset(name for name, parameter in parameters if not parameter.requires_grad)
        self.tied = {name: id(parameter) for name, parameter in parameters}

    def is_tied(self, head: str, embedding: str) -> bool:
        """Return True if two tensors are one."""
        return self._weights[head].data_ptr() == self._weights[embedding].data_ptr()

    def read_slice(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """Read a part of a tensor."""
        return self._weights[name][part].clone()  # the model may change afterwards


def open_source(path_or_model: Any, embedding: str | None = None, whole: bool = False) -> Source:
    """Return the ``Source`` that reads a folder, a repository of the Hub, or a live ``transformers`` model.

    An output layer with values of its own is not tied, whatever ``tie_word_embeddings`` says, as in transformers 5.

    Args:
        path_or_model: the folder, the id or the model.
        embedding: name of the token embedding, without ``.weight``. None: that of the model's family, if it is known.
        whole: read a multimodal model as a whole, not its language model alone.

    Raises:
        FileNotFoundError: the folder lacks the files that ``save_pretrained`` writes.
        ConfigError: as ``base.hub.local_folder``.
        TypeError: the argument is neither a path nor a model.
    """
    if isinstance(path_or_model, (str, Path)):
        source: Source = _Folder(local_folder(path_or_model, weights=True), whole)
    elif hasattr(path_or_model, "state_dict") and hasattr(getattr(path_or_model, "config", None), "to_dict"):
        source = _Model(path_or_model, whole)
    else:
        raise TypeError(
            f"got a {type(path_or_model).__name__}. Give the path of a folder, an id of the Hub, or a transformers "
            "model."
        )
    family = FAMILIES.get(str(source.config.get("model_type")))
    if embedding is None and family is not None and family.names:
        form: Any = names_of(source.config).get(family.embedding, "")
        embedding = str(getattr(form, "name", form[0] if isinstance(form, list) else form)).removesuffix(".weight")
    token = find(source, f"{embedding}.weight")
    head = next((name for name in _HEADS if name in source.shapes), None)
    ties = source.config.get("tie_word_embeddings") is not False
    if ties and token is not None and head is not None and not source.is_tied(head, token):
        # The logits of a T5 keep their factor, which would else follow from tie_word_embeddings.
        source.config = {"scale_decoder_outputs": True, **source.config, "tie_word_embeddings": False}
    return source


def find(source: Source, name: str) -> str | None:
    """Return the name under which the source stores a tensor: ``name``, or ``name`` without its first part.

    Some files leave out the base model's prefix (``transformer.``). None if the source has neither, for example because
    it stores a tied weight under its other name.
    """
    return next((candidate for candidate in (name, name.partition(".")[2]) if candidate in source.shapes), None)


def stored(source: Source, entry: Entry) -> Entry:
    """Return the form of an entry that the source has; the first form if it has none."""
    form: Entry | None = entry
    while form is not None:
        if any(find(source, name) is not None for name in form.theirs[:1]):
            return form
        form = form.other
    return entry


def check_all_used(source: Source, entries: Iterable[Entry]) -> None:
    """Raise ValueError if a weight of a source belongs to no parameter's entry."""
    depth = layer_count(source.config)
    beyond = range(depth, depth + int(source.config.get("num_nextn_predict_layers") or 0))
    family = FAMILIES.get(str(source.config.get("model_type")))
    skipped = (*(f"model.layers.{layer}." for layer in beyond),)  # modules that predict further tokens
    skipped += () if family is None else family.unread
    taken = {find(source, name) for entry in entries for name in stored(source, entry).theirs}
    read = {source.tied[name] for name in taken if name in source.tied}
    unused = [
        name
        for name in source.shapes
        if name not in taken and not name.endswith(_NO_WEIGHTS) and not name.startswith(skipped)
        if source.tied.get(name) not in read
    ]
    if unused:
        more = f" and {len(unused) - 6} more weights" if len(unused) > 6 else ""
        raise ValueError(f"no parameter takes {', '.join(unused[:6])}{more} of {source.where}. Add them to names.")


class Piece(NamedTuple):
    """Tensor of a source that is a part of a parameter.

    Attributes:
        name: its name in the source.
        shape: its shape, transposed if the entry says so.
        expert: number of the expert that it belongs to; None: the parameter is stored as a whole.
        start: first row that it has, of the parameter or of the expert.
        offset: first row of the tensor that it is.
    """

    name: str
    shape: tuple[int, ...]
    expert: int | None
    start: int
    offset: int = 0


def check(source: Source, ours: str, entry: Entry, layout: Layout) -> list[Piece]:
    """Check that a source has the tensors of a parameter, in the right shapes. Nothing is read.

    Args:
        source: the source of the weights.
        ours: triax's name of the parameter, for error messages.
        entry: Hugging Face's names of the tensors that make up the parameter.
        layout: the parameter's layout over the grid.

    Returns:
        The source's tensors.

    Raises:
        ValueError: the source lacks a tensor, or the shapes do not add up to the parameter's shape.
    """
    entry = stored(source, entry)
    pieces: list[Piece] = []
    start = 0
    for index, theirs in enumerate(entry.theirs):
        name = find(source, theirs)
        if name is None:
            raise ValueError(
                f"{ours} is loaded from {theirs}, but {source.where} has only {_near(theirs, source.shapes)}. Change "
                "names, or the model."
            )
        shape = source.shapes[name]
        shape = shape[1:] if entry.one_row and shape[0] == 1 else shape
        if entry.rows:
            if shape[0] != entry.of:
                raise ValueError(
                    f"{name} has {shape[0]} rows in {source.where}, but by its config.json there are "
                    f"{entry.of}. Build the model with the sizes of its config.json, config_from_hf(path)."
                )
            for first, last in entry.rows:
                pieces.append(Piece(name, (last - first, *shape[1:]), None, start, first))
                start += last - first
            continue
        expert = None
        if entry.per_expert:
            expert, nth = divmod(index, entry.per_expert)
            start = start if nth else 0
        pieces.append(Piece(name, swapped(shape) if entry.transposed else shape, expert, start))
        start += pieces[-1].shape[0]
    count = len(pieces) // entry.per_expert if entry.per_expert else 1
    group = pieces[: entry.per_expert or None]
    joined_shape = (sum(piece.shape[0] for piece in group), *group[0].shape[1:]) if group else ()
    alike = all(
        piece.shape[1:] == joined_shape[1:] and piece.shape[0] == group[index % len(group)].shape[0]
        for index, piece in enumerate(pieces)
    )
    if not alike or layout.shape != ((count, *joined_shape) if entry.per_expert else joined_shape):
        kept = ", ".join(f"{piece.name} {tuple(source.shapes[piece.name])}" for piece in group)
        experts = f" for each of {count} experts" if entry.per_expert else ""
        raise ValueError(
            f"{ours} is {layout.shape} here, but {kept}{experts} in {source.where}"
            f"{', transposed' * entry.transposed}. Build the model with the sizes of its config.json, "
            "config_from_hf(path)."
        )
    return pieces


def fetch(source: Source, ours: str, entry: Entry, layout: Layout, grid: Grid) -> Tensor:
    """Read this rank's shard of one parameter, in the dtype of the source, and nothing beyond this shard.

    Args:
        source, ours, entry, layout: as in ``check``.
        grid: the grid.

    Returns:
        The shard, of the shape that ``layout.local_shape`` gives.

    Raises:
        ValueError: for the same reasons as in ``check``.
    """
    pieces = check(source, ours, entry, layout)
    transposed, one_row = stored(source, entry).transposed, stored(source, entry).one_row
    shard = (grid.tensor.rank, grid.tensor.size, (grid.expert.rank, grid.expert.size))
    pieces_read: list[tuple[tuple[int | slice, ...], Tensor]] = []
    for box in layout.boxes(*shard):
        for piece in pieces:
            global_box, local = box.whole, box.local
            outer: tuple[int, ...] = ()
            if piece.expert is not None:
                experts, *_ = global_box
                if not experts.start <= piece.expert < experts.stop:
                    continue
                outer = (local[0].start + piece.expert - experts.start,)
                global_box, local = global_box[1:], local[1:]
            rows, *rest = global_box
            low, high = max(rows.start, piece.start), min(rows.stop, piece.start + piece.shape[0])
            if low < high:
                shifted = piece.offset - piece.start
                ranges = (slice(low + shifted, high + shifted), *rest)
                if one_row:
                    read = source.read_slice(piece.name, (slice(0, 1), *ranges))[0]
                else:
                    read = source.read_slice(piece.name, swapped(ranges) if transposed else ranges)
                read = read.transpose(-1, -2) if transposed and read.dim() > 1 else read
                shift = local[0].start - rows.start
                pieces_read.append(((*outer, slice(low + shift, high + shift), *local[1:]), read))
    shape = layout.local_shape(*shard)
    if len(pieces_read) == 1 and pieces_read[0][1].shape == shape:
        return pieces_read[0][1]
    value = torch.empty(shape, dtype=pieces_read[0][1].dtype if pieces_read else torch.float32)
    for at, read in pieces_read:
        value[at] = read
    return value


def _near(name: str, names: Mapping[str, Any]) -> str:
    """Return a hint for a missing name: the names with the same ending or, if there are none, a few of all names."""
    ending = name.rpartition(".")[0].rpartition(".")[2]
    near = [other for other in names if ending and ending in other] or list(names)
    return ", ".join(near[:6]) + (", ..." if len(near) > 6 else "")
