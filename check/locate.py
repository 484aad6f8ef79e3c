"""The first layer, module and op of a grid whose values differ from one process, and the first gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .matching import Pieces, Place, close, relation, sum_of
from .recording import COLLECTIVE, Record
from .run import Observed

Key = tuple[int, int, str, str, int]


@dataclass
class Location:
    """Place of the first difference.

    Attributes:
        phase: ``forward``: an output differs; ``backward``: the outputs are equal, and a gradient of one differs;
            ``parameter``: only gradients of parameters differ.
        microbatch, layer: number of the microbatch, and index of the layer; the number of layers for ``loss_fn``.
        name, what, place: name and class of the module, or of the layer's function, and file and line of its code.
        op, op_place: the op, and file and line of its call; empty if unknown.
        pieces, whole: the differing tensor, of each rank and of one process.
        inputs: relation of the module's inputs to the whole ones, such as ``whole`` or ``parts``.
        records: the ranks' records of the module.
        largest: relation of the largest result of an op that agrees, in the module; empty if unknown.
    """

    phase: str
    microbatch: int
    layer: int
    name: str
    what: str
    place: str
    pieces: Pieces
    whole: Tensor
    op: str = ""
    op_place: str = ""
    inputs: str = ""
    records: dict[Place, Record] = field(default_factory=dict)
    largest: str = ""


class Comparison:
    """Records of one process beside those of a grid's ranks.

    Args:
        alone: what was seen on one process.
        ranks: what was seen on each rank of the grid.
        sizes: sizes of the grid's axes.
    """

    def __init__(self, alone: Observed, ranks: Sequence[Observed], sizes: dict[str, int]) -> None:
        self.alone, self.ranks, self.sizes = alone, ranks, sizes
        self._records: dict[Key, dict[Place, Record]] = {}
        for rank in ranks:
            place = _place(rank)
            for record in rank.records:
                self._records.setdefault(_key(record), {})[place] = record

    def first(self) -> Location | None:
        """Return the first difference of outputs, then of gradients of outputs; None if all that is known agrees."""
        return self._forward() or self._backward()

    def layers(self, microbatch: int) -> list[Record]:
        """Return the records of layers of one process, in order."""
        return [r for r in self.alone.records if r.kind == "layer" and r.microbatch == microbatch]

    def status(self, record: Record, what: str) -> tuple[str, Pieces, Tensor | None, str]:
        """Return (status, pieces, whole, relation) of a record's tensors.

        The status is ``equal``, ``terms`` (of a sum over the tensor axis), ``differs``, or ``unknown`` if there is
        nothing to compare. The tensor is the first one that is not equal.
        """
        ranks = self._records.get(_key(record), {})
        wanted: list[Tensor | None] = getattr(record, what)
        places = {_place(rank) for rank in self.ranks}
        if ranks.keys() != places or any(len(getattr(r, what)) != len(wanted) for r in ranks.values()):
            return "unknown", {}, None, ""
        status, kind = "unknown", ""
        for number, whole in enumerate(wanted):
            pieces = {place: getattr(ranks[place], what)[number] for place in sorted(ranks)}
            if whole is None or any(piece is None for piece in pieces.values()):
                if whole is not None and all(piece is None for piece in pieces.values()) and whole.any():
                    return "unknown", {}, None, ""
                continue
            found = relation(pieces, whole, self.sizes)
            if found is None and record.name == "loss_fn":
                found = _loss_relation(pieces, whole)
            if found is None:
                return "differs", pieces, whole, ""
            kind = found if isinstance(found, str) else found.kind
            if kind == "terms":
                return "terms", pieces, whole, kind
            status = "equal"
        return status, {}, None, kind

    # ---------------------------------------------------------------------------------------- forward

    def _forward(self) -> Location | None:
        for microbatch in sorted({record.microbatch for record in self.alone.records}):
            for layer in self.layers(microbatch):
                status, pieces, whole, _ = self.status(layer, "outputs")
                if status in ("differs", "terms"):
                    assert whole is not None
                    return self._descend(layer, "forward", pieces, whole)
        return None

    def _backward(self) -> Location | None:
        for microbatch in sorted({record.microbatch for record in self.alone.records}):
            layers = self.layers(microbatch)
            for number in range(len(layers) - 1, -1, -1):
                status, pieces, whole, _ = self.status(layers[number], "gradients")
                if status in ("differs", "terms") and layers[number].name != "loss_fn":
                    assert whole is not None
                    consumer = layers[min(number + 1, len(layers) - 1)]
                    return self._descend(consumer, "backward", pieces, whole)
        return None

    def _descend(self, layer: Record, phase: str, pieces: Pieces, whole: Tensor) -> Location:
        """Return the innermost module whose inputs are equal and whose outputs differ; for gradients the reverse."""
        before, after = ("inputs", "outputs") if phase == "forward" else ("gradients", "input_gradients")
        modules = [
            r
            for r in self.alone.records
            if (r.microbatch, r.layer, r.kind) == (layer.microbatch, layer.layer, "module")
        ]
        found: Record = layer
        own = [r for r in modules if "." not in r.name.removeprefix("layers.")]
        for record in modules if phase == "forward" else reversed(modules):
            status, its_pieces, its_whole, _ = self.status(record, after)
            if status == "differs" and self.status(record, before)[0] in ("equal", "terms", "unknown"):
                if phase == "backward" and record in own:
                    continue  # children come after it in this order
                assert its_whole is not None
                found, pieces, whole = record, its_pieces, its_whole
                break
        if found is layer and own:
            found = own[-1]
        if found in own and phase == "backward":
            # Each rank has a term of the gradient: the sum is missing in front of the outermost module that has terms.
            terms = [r for r in reversed(modules) if r not in own and self.status(r, after)[0] == "terms"]
            found = terms[0] if terms else found
        place = found.place or layer.place
        location = Location(phase, layer.microbatch, layer.layer, found.name, found.what, place, pieces, whole)
        location.inputs = self.status(found, "inputs")[3]
        location.records = self._records.get(_key(found), {})
        return location


def first_op(location: Location, alone: Iterable[Record], ranks: Sequence[Observed], sizes: dict[str, int]) -> None:
    """Find the op of a module that differs, from runs in which ops were recorded, and write it into the location.

    An op agrees if one process has an op whose result has a relation to it. Code that only a grid runs has results of
    its own, so an op that one process runs in the same line counts first.
    """

    def within(records: Iterable[Record]) -> list[Record]:
        at = location.microbatch, location.layer, "op"
        inner = location.name if "." in location.name else ""
        own = [r for r in records if (r.microbatch, r.layer, r.kind) == at]
        exact = [r for r in own if r.name == inner]
        return exact or own

    wanted = within(alone)
    found = {_place(rank): records for rank in ranks if (records := within(rank.records))}
    if not wanted or not found or len({len(records) for records in found.values()}) != 1:
        return
    agrees, most, before = [], 1, None
    made: dict[int, tuple[Pieces, Tensor]] = {}  # what a collective made of a value that agreed
    steps = list(zip(*(found[place] for place in sorted(found)), strict=True))
    for step in steps:
        pieces = {place: record.outputs[0] for place, record in zip(sorted(found), step, strict=True)}
        matches = ((relation(pieces, each.outputs[0], sizes), each) for each in _like(step[0], wanted))
        match, like = next(((each, record) for each, record in matches if each is not None), (None, None))
        agrees.append(match is not None)
        if like is not None:
            before = like.outputs[0]
        elif step[0].what.startswith(COLLECTIVE) and before is not None:
            made[len(agrees) - 1] = pieces, before
        size = step[0].outputs[0].numel()
        if match is not None and size > most:
            location.largest, most = match.kind, size
    known = {(each.what, each.place) for each in wanted}
    last = max((i for i, each in enumerate(agrees) if each), default=-1)
    bad = [i for i, each in enumerate(agrees) if not each]
    same = [i for i in bad if (steps[i][0].what, steps[i][0].place) in known]
    behind = [i for i in bad if i > last]
    # A collective behind the last op that agrees has no like on one process, and comes before what follows from it.
    first = [i for i in bad if i > last and i in made and i == last + 1]
    for choice in (first, [i for i in same if i > last], same, behind):
        if choice:
            record = steps[choice[0]][0]
            location.op, location.op_place = record.what, record.place
            location.pieces, location.whole = made.get(choice[0], (location.pieces, location.whole))
            return


def _like(record: Record, among: Sequence[Record]) -> list[Record]:
    """Return the records of ops whose results may be the whole of this one's: those of the same op first."""
    dims = record.outputs[0].dim()
    fitting = [each for each in among if each.outputs[0].dim() == dims]
    return [each for each in fitting if (each.what, each.place) == (record.what, record.place)] or fitting


def _loss_relation(pieces: Pieces, whole: Tensor) -> str | None:
    """Return ``parts`` if the context ranks' losses add up to the whole one, or if their mean is it; else None."""
    if any(piece.shape != whole.shape for piece in pieces.values()):
        return None
    for t in {t for _, t in pieces}:
        ours = [piece for (_, at), piece in pieces.items() if at == t]
        total = sum_of(ours)
        if not close(total, whole) and not close(total / len(ours), whole):
            return None
    return "parts"


def differing_gradients(alone: Observed, ranks: Sequence[Observed], rtol: float) -> Iterator[tuple[str, Observed]]:
    """Yield (name, rank that differs) of the parameters whose gradient differs, in the order of the backward pass."""
    for name in reversed(list(alone.gradients)):
        for rank in ranks:
            pair = local_pair(alone, rank, ranks, name)
            if pair is not None and not close(*pair, rtol):
                yield name, rank
                break


def local_pair(alone: Observed, rank: Observed, ranks: Sequence[Observed], name: str) -> tuple[Tensor, Tensor] | None:
    """Return (a rank's own gradient of a parameter, its part of that of one process); None if the rank has none."""
    if name not in rank.local or name not in alone.gradients:
        return None
    layout, mine = rank.local[name]
    size = 1 + max(each.place["tensor"] for each in ranks)
    expert = (0, 1)
    if layout.expert_dim is not None:
        held = mine.shape[layout.expert_dim]
        shards = layout.shape[layout.expert_dim] // max(1, held)
        replica = rank.place["data"] * (1 + max(each.place.get("context", 0) for each in ranks))
        expert = ((replica + rank.place.get("context", 0)) % shards, shards)
    wanted = layout.shard(alone.gradients[name], rank.place["tensor"], size, expert)
    return (mine, wanted) if mine.shape == wanted.shape else None


def _place(rank: Observed) -> Place:
    return rank.place.get("context", 0), rank.place.get("tensor", 0)


def _key(record: Record) -> Key:
    return record.microbatch, record.layer, record.kind, record.name, record.call
