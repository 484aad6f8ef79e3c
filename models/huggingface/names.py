"""Tables that map triax's parameter names to Hugging Face's, as patterns that are expanded for each model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any


@dataclass(frozen=True)
class Transposed:
    """Name of a weight that Hugging Face stores as (..., inputs, outputs): GPT-2's ``Conv1D``, gpt-oss's experts."""

    name: str


@dataclass(frozen=True)
class OneRow:
    """Name of a tensor (1, n) of Hugging Face's that is a parameter (n,)."""

    name: str


@dataclass(frozen=True)
class PerExpert:
    """Names of the tensors of one expert, with ``{e}`` for its number, of a parameter (experts, ...).

    The tensors of an expert are concatenated along their dim 0, and the experts are stacked.
    """

    names: tuple[str, ...]


@dataclass(frozen=True)
class Fused:
    """Name of a tensor of Hugging Face's with the rows of queries, keys and values, of which a parameter has a part.

    Attributes:
        name: its name.
        part: ``q``, the rows of the queries; or ``kv``, those of all keys, then those of all values.
        grouped: the rows are, for each key/value head, those of its query heads, its key and its value; False: all
            queries, all keys, all values.
    """

    name: str
    part: str
    grouped: bool = True

    def rows(self, heads: int, kv_heads: int, dim: int) -> tuple[tuple[int, int], ...]:
        """Return the ranges [start, stop) of the part's rows, in order."""
        if not self.grouped:
            end = (heads + 2 * kv_heads) * dim
            return ((0, heads * dim),) if self.part == "q" else ((heads * dim, end),)
        group = heads // kv_heads
        starts = [head * (group + 2) * dim for head in range(kv_heads)]
        if self.part == "q":
            return tuple((start, start + group * dim) for start in starts)
        return tuple((start + (group + i) * dim, start + (group + i + 1) * dim) for i in range(2) for start in starts)


@dataclass(frozen=True)
class PerHead:
    """Name of the tensor of one head, with ``{h}`` for its number, of a parameter (heads, ...) that stacks them.

    Attributes:
        name: its name.
        part: ``q``, the heads of the queries; or ``k``, those of the keys.
    """

    name: str
    part: str


@dataclass(frozen=True)
class RowsOf:
    """Name of a tensor of Hugging Face's, of which a parameter has some rows.

    Attributes:
        name: its name.
        rows: ranges [start, stop) of these rows, in the parameter's order.
        of: number of rows of the tensor.
    """

    name: str
    rows: tuple[tuple[int, int], ...]
    of: int


@dataclass(frozen=True)
class Repeated:
    """Name of a tensor, and the names under which Hugging Face stores it again: they are written, and not read."""

    name: str
    again: tuple[str, ...]


@dataclass(frozen=True)
class FolderName:
    """Name of a tensor in a folder, and its name in a live model, under which it is read too.

    Several are a tuple of such names, as of plain ones: tensors that are concatenated along dim 0.
    """

    name: str
    live: str


@dataclass(frozen=True)
class Entry:
    """Source tensors of one parameter of triax.

    Attributes:
        theirs: Hugging Face's names of these tensors, in the order in which they are concatenated along dim 0. Of a
            parameter that triax alone has, such as a count, there are none.
        transposed: True if Hugging Face stores these matrices transposed, in their last two dims.
        per_expert: number of tensors of each expert, for a parameter (experts, ...) whose experts are stored one by
            one; ``theirs`` lists those of expert 0 first. 0: the parameter is stored as a whole. Heads that are stored
            one by one (``PerHead``) count as experts.
        other: another form in which a source may store the parameter, or None. Only the first form is written.
        rows: ranges [start, stop) of rows of the only tensor, which the parameter has in this order. Empty: all rows.
        of: number of rows of that tensor.
        one_row: True if Hugging Face stores the parameter (n,) as (1, n).
        again: further names under which the only tensor is written.
        live: name of the only tensor in a live model, if a folder has another one. Empty: they are equal.
    """

    theirs: tuple[str, ...]
    transposed: bool = False
    per_expert: int = 0
    other: Entry | None = None
    rows: tuple[tuple[int, int], ...] = ()
    of: int = 0
    again: tuple[str, ...] = ()
    one_row: bool = False
    live: tuple[str, ...] = ()


def swapped(lengths: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return lengths of a tensor, or slices of it, with the last two in the other order; of a vector, its own."""
    return (*lengths[:-2], *lengths[:-3:-1])


Joined = tuple[str, ...] | tuple[FolderName, ...]
Pattern = str | Joined | Transposed | OneRow | PerExpert | PerHead | Fused | RowsOf | Repeated | FolderName
# triax's name -> Hugging Face's. {i} is the block's index, {n} the number of blocks, a final * both weight and bias.
# A list has the form that is written, then another form that is read too.
Names = Mapping[str, "Pattern | list[Pattern]"]


def expand(names: Names, blocks: int, experts: int = 0, heads: tuple[int, int, int] | None = None) -> dict[str, Entry]:
    """Expand a table of name patterns to the full names of a model.

    Args:
        names: the table.
        blocks: number of blocks of the model.
        experts: number of experts of a block.
        heads: numbers of query heads and of key/value heads, and the width of a head, which ``Fused`` and ``PerHead``
            need.

    Raises:
        ValueError: a pattern has in braces something other than i, n or e, with or without a number added or
            subtracted.
    """
    expanded: dict[str, Entry] = {}
    for ours, theirs in names.items():
        forms = theirs if isinstance(theirs, list) else [theirs]
        for i in range(blocks) if "{i" in ours else (0,):
            for ending in ("weight", "bias") if ours.endswith("*") else ("",):
                entry = None
                for form in reversed(forms):
                    entry = _entry(form, ending, {"i": i, "n": blocks}, experts, heads, entry)
                assert entry is not None
                expanded[_written(ours, ending, {"i": i, "n": blocks})] = entry
    return expanded


def _entry(
    form: Pattern,
    ending: str,
    numbers: Mapping[str, int],
    experts: int,
    heads: tuple[int, int, int] | None,
    other: Entry | None,
) -> Entry:
    if isinstance(form, (Fused, PerHead)) and heads is None:
        raise ValueError(
            f"{type(form).__name__}({form.name!r}) needs the numbers of heads, and the model's configuration has no "
            "num_attention_heads and hidden_size, and no n_head and n_embd. Give RowsOf(name, ((start, stop), ...), "
            "of=rows), with the rows of the tensor that the parameter has."
        )
    if isinstance(form, PerHead):
        assert heads is not None
        count = heads[0] if form.part == "q" else heads[1]
        parts = [_written(form.name, ending, {**numbers, "h": head}) for head in range(count)]
        return Entry(tuple(parts), per_expert=1, other=other)
    if isinstance(form, Fused):
        assert heads is not None
        total = (heads[0] + 2 * heads[1]) * heads[2]
        return Entry((_written(form.name, ending, numbers),), other=other, rows=form.rows(*heads), of=total)
    if isinstance(form, RowsOf):
        return Entry((_written(form.name, ending, numbers),), other=other, rows=form.rows, of=form.of)
    if isinstance(form, PerExpert):
        parts = [_written(name, ending, {**numbers, "e": e}) for e in range(experts) for name in form.names]
        return Entry(tuple(parts), per_expert=len(form.names), other=other)
    if isinstance(form, Repeated):
        first, *again = (_written(name, ending, numbers) for name in (form.name, *form.again))
        return Entry((first,), other=other, again=tuple(again))
    folder = [each for each in (form if isinstance(form, tuple) else (form,)) if isinstance(each, FolderName)]
    if folder:
        own, live = (
            tuple(_written(n, ending, numbers) for n in each) for each in zip(*map(astuple, folder), strict=True)
        )
        return Entry(own, live=live, other=Entry(live, other=other))
    transposed = isinstance(form, Transposed)
    if isinstance(form, OneRow):
        return Entry((_written(form.name, ending, numbers),), other=other, one_row=True)
    several: Any = (form.name,) if isinstance(form, Transposed) else (form,) if isinstance(form, str) else form
    return Entry(tuple(_written(name, ending, numbers) for name in several), transposed, other=other)


def _written(pattern: str, ending: str, numbers: Mapping[str, int]) -> str:
    def value(match: re.Match[str]) -> str:
        number = re.fullmatch(r"([a-z])([+-]\d+)?", match[1])
        if number is None or number[1] not in numbers:
            raise ValueError(f"{pattern!r} has {match[0]}. Write {{i}} for a block's index, {{i+2}}, {{n}} or {{n+1}}.")
        return str(numbers[number[1]] + int(number[2] or 0))

    named = pattern.removesuffix("*") + ending * pattern.endswith("*")
    return re.sub(r"\{([^}]*)\}", value, named)
