"""What usually causes a difference, from what is seen of it: ratios, ranks that disagree, runs that differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .locate import Location, local_pair
from .matching import Pieces, candidates, close, sum_of
from .run import Observed


class Cause(NamedTuple):
    """A usual cause.

    Attributes:
        name: a short name, for CI.
        seen: what was seen.
        advice: what usually causes it, and what to write.
    """

    name: str
    seen: str
    advice: str


class Repeats(NamedTuple):
    """What further runs on one process showed.

    Attributes:
        same_seed: two runs with the same seeds are equal.
        other_seed: a run with other seeds of the default generators is equal.
        order: the microbatches in reversed order give the same.
        changed: buffers that a step changed.
    """

    same_seed: bool = True
    other_seed: bool = True
    order: bool = True
    changed: tuple[str, ...] = ()


class Facts(NamedTuple):
    """What is seen of a tensor that differs.

    Attributes:
        factor: the ranks have this multiple of what they should have; None: no multiple.
        terms: the sum over the tensor ranks is the whole.
        mean: the mean over the tensor ranks is the whole.
        disagree: tensor ranks with tensors of the whole shape have unlike ones.
        kind: ``whole`` or ``parts``, by the shapes; empty if they fit neither.
        offset: the same vector, along the last dim, is what each rank has too much; None: no such vector.
        equal_zeros: the ranks' parts have their zeros at the same places, where those of the whole are elsewhere.
        begins_alike: equal at the first place of the sequence on context rank 0, and unlike later.
    """

    factor: float | None = None
    terms: bool = False
    mean: bool = False
    disagree: bool = False
    kind: str = ""
    offset: Tensor | None = None
    equal_zeros: bool = False
    begins_alike: bool = False


def facts_of(pieces: Pieces, whole: Tensor, sizes: dict[str, int]) -> Facts:
    """Return what is seen of a tensor that differs: (context rank, tensor rank) -> tensor, beside the whole."""
    found = Facts()
    fitting = list(candidates(pieces, whole, sizes))
    groups = [[piece for (c, _), piece in sorted(pieces.items()) if c == at] for at in sorted({c for c, _ in pieces})]
    if fitting:
        chosen = min(fitting, key=lambda each: _error(pieces, each.expected))
        expected, ranks = chosen.expected, list(pieces)
        ratios = {_ratio(pieces[place], expected[place]) for place in ranks}
        factor = next(iter(ratios)) if len(ratios) == 1 else None
        differences = [pieces[place] - expected[place] for place in ranks]
        rows = [each.reshape(-1, each.shape[-1]) for each in differences if each.dim() and each.numel()]
        offset = None
        if rows and len(rows) == len(differences) and all(close(r, r[:1].expand_as(r), 1e-7) for r in rows):
            offset = rows[0][0]
        firsts = [g for g in groups if len(g) > 1]
        whole_kind = chosen.kind == "whole"
        found = Facts(
            factor=factor,
            disagree=whole_kind and any(not close(each, g[0]) for g in firsts for each in g[1:]),
            kind=chosen.kind,
            offset=offset,
            equal_zeros=not whole_kind and _equal_zeros(groups, expected, pieces),
            begins_alike=_begins_alike(pieces, expected),
        )
    same_shape = [g for g in groups if len(g) > 1 and all(each.shape == whole.shape for each in g)]
    if same_shape and len(same_shape) == len(groups):
        sums = [sum_of(g) for g in same_shape]
        rest = [each - whole for each in sums]
        found = found._replace(
            # A bias that is added after the missing sum is in each term.
            terms=all(close(each, whole) for each in sums)
            or (
                found.disagree
                and all(
                    each.dim() and close(each, each.reshape(-1, each.shape[-1])[0].expand_as(each)) for each in rest
                )
            ),
            mean=all(close(each / len(g), whole) for each, g in zip(sums, same_shape, strict=True)) and found.disagree,
        )
    return found


def _error(pieces: Pieces, expected: Pieces) -> float:
    return sum((pieces[place] - expected[place]).abs().sum().item() for place in pieces)


def _ratio(found: Tensor, wanted: Tensor) -> float | None:
    """Return the number that wanted is multiplied by, if there is one."""
    denominator = (wanted * wanted).sum().item()
    if not denominator or not wanted.isfinite().all():
        return None
    ratio = round((found * wanted).sum().item() / denominator, 9)
    return ratio if abs(ratio - 1) > 1e-8 and close(found, ratio * wanted, 1e-7) else None


def _equal_zeros(groups: Sequence[Sequence[Tensor]], expected: Pieces, pieces: Pieces) -> bool:
    masks = [[each == 0 for each in group] for group in groups if len(group) > 1]
    if not masks or not any(bool(mask.any()) for group in masks for mask in group):
        return False
    alike = all(mask.shape == group[0].shape and torch.equal(mask, group[0]) for group in masks for mask in group[1:])
    return alike and any(not torch.equal(pieces[place] == 0, expected[place] == 0) for place in pieces)


def _begins_alike(pieces: Pieces, expected: Pieces) -> bool:
    """Return True if context rank 0 has right values at the first place of dim 1, and another place has wrong ones."""
    first = [(piece, expected[place]) for place, piece in pieces.items() if place[0] == 0]
    if any(piece.dim() < 2 for piece, _ in first):
        return False
    return any(
        all(close(piece.select(d, 0), wanted.select(d, 0), 1e-8) for piece, wanted in first)
        for d in (0, 1)
        if all(piece.shape[d] > 1 for piece, _ in first)
    )


# ------------------------------------------------------------------------------------------------ the causes


def causes_of(
    repeats: Repeats,
    location: Location | None,
    parameter: str,
    alone: Observed,
    ranks: Sequence[Observed],
    sizes: dict[str, int],
    axes: Sequence[str],
) -> list[Cause]:
    """Return the usual causes of a difference, the most likely one first.

    Args:
        repeats: what further runs on one process showed.
        location: the first output or gradient of an output that differs; None: all known ones agree.
        parameter: the first parameter whose gradient differs; empty if none does.
        alone, ranks: what was seen on one process and on the grid.
        sizes: sizes of the grid's axes.
        axes: the axes that make the difference each on its own.
    """
    found = [*_of_repeats(repeats)]
    if not found and location is not None:
        facts = facts_of(location.pieces, location.whole, sizes)
        found = [*(_of_forward if location.phase == "forward" else _of_backward)(location, facts, alone, sizes, axes)]
    if not found and parameter:
        found = [*_of_parameter(parameter, alone, ranks, sizes, axes)]
    return found


def _of_repeats(repeats: Repeats) -> Iterator[Cause]:
    if not repeats.same_seed:
        yield Cause(
            "not deterministic",
            "two runs on one process with the same seeds differ",
            "something depends on time, on addresses or on memory that was not filled: find it first",
        )
    elif not repeats.other_seed:
        yield Cause(
            "default generator",
            "a second run on one process differs when torch's, Python's and NumPy's default generators are seeded "
            "otherwise",
            "random numbers of a default generator depend on the rank: use Dropout of triax.randomness.random, whose "
            "masks are keyed by sample and layer, and draw other numbers from a generator with a seed of your own",
        )
    elif not repeats.order and repeats.changed:
        yield Cause(
            "buffer of the batch",
            f"the result depends on the order of the microbatches, and a step changes {', '.join(repeats.changed)}",
            "a buffer that depends on the batch is unlike on each replica: use a layer without running statistics, "
            "such as LayerNorm, or average over all replicas",
        )
    elif not repeats.order:
        yield Cause(
            "state across microbatches",
            "on one process the result depends on the order of the microbatches",
            "a layer keeps a value from one microbatch to the next: make what it computes depend on its input alone",
        )


def _of_forward(
    at: Location, facts: Facts, alone: Observed, sizes: dict[str, int], axes: Sequence[str]
) -> Iterator[Cause]:
    t, c = sizes.get("tensor", 1), sizes.get("context", 1)
    is_loss = at.name == "loss_fn"
    if facts.terms:
        yield Cause(
            "missing all-reduce",
            f"the sum over the {t} tensor ranks is the value of one process",
            "each rank has one term: end the layer with triax.tensor_parallel.all_reduce_copy(y, grid.tensor), as "
            "RowParallelLinear does",
        )
        return
    if is_loss:
        yield from _of_loss(at, facts, alone, sizes, axes)
        return
    added = _added_bias(at, facts, alone)
    if added:
        yield Cause(
            "bias on every rank",
            f"each rank has {t - 1} times {added} too much",
            "the bias is added on every tensor rank before the sum: add it once, after the all-reduce",
        )
    elif facts.equal_zeros:
        yield Cause(
            "equal dropout masks",
            "the tensor ranks' parts have zeros at the same places",
            "the mask is drawn for a part as if it were the whole: give Dropout(p, axis=grid.tensor) for sequence "
            "shards, or drop out before the tensor is cut",
        )
    elif _drops(at):
        yield Cause(
            "dropout of a part",
            "the zeros are at other places than on one process",
            "the mask does not follow the element's place in the whole tensor: tell Dropout the axis or the rows",
        )
    elif facts.factor is not None and _is_size(facts.factor, sizes):
        axis = _is_size(facts.factor, sizes)
        counted = "divided by" if facts.factor < 1 else "multiplied by"
        yield Cause(
            "summed once too often" if facts.factor > 1 else "averaged over a shard",
            f"each rank has the value of one process {counted} {sizes[axis]}, the size of {axis}",
            f"a whole value is summed over {axis}, or a sum is divided by its size: sum terms only, and divide by the "
            "whole length",
        )
    elif facts.begins_alike and "context" in axes:
        yield Cause(
            "positions restart",
            "the first token agrees, and later ones do not",
            "positions count from 0 on each part of the sequence: take those of triax.context.positions(length, "
            f"{c}, grid.context.rank)",
        )
    elif at.op and any(word in at.op for word in ("embedding", "index_select")):
        yield Cause(
            "unmasked embedding",
            "a row lookup in a shard of the table differs",
            "ids outside of a rank's shard must give zeros before the all-reduce: use triax.VocabParallelEmbedding, or "
            "mask them",
        )
    elif any(word in at.op for word in _REDUCTIONS) and facts.kind != "":
        yield Cause(
            "reduction over a shard",
            f"{at.op} runs over what a rank holds alone, and its inputs agree",
            f"a mean, norm or maximum over a sharded dim needs the other ranks' values: reduce over grid.{_axis(axes)} "
            "too, or over a dim that is not sharded",
        )
    elif "expert" in axes:
        yield Cause(
            "experts",
            "only grids with an expert axis differ",
            "tokens come back from other ranks' experts with other weights or in another order: multiply each by its "
            "combine weight, in the order in which it was sent",
        )
    elif _has_table(at, alone):
        yield Cause(
            "unmasked embedding",
            "a lookup of ids in a shard of a table differs",
            "ids outside of a rank's shard must give zeros before the all-reduce: use triax.VocabParallelEmbedding, or "
            "mask them",
        )
    elif facts.disagree:
        yield Cause(
            "ranks disagree",
            "tensor ranks that should have equal values have unlike ones",
            "a value of a rank's own shard is used as if it were the whole: end the sharded part with all_reduce_copy "
            "or gather_split",
        )
    else:
        yield Cause(
            "reduction over a shard" if set(axes) & {"tensor", "context"} else "depends on the grid",
            "the inputs agree and the output does not",
            "look for sizes, ranks and means of a shard in this code: what it computes must not depend on the grid",
        )


_REDUCTIONS = ("mean", "sum", "norm", "amax", "amin", "max", "min", "var", "std", "softmax", "logsumexp", "cumsum")


def _of_loss(
    at: Location, facts: Facts, alone: Observed, sizes: dict[str, int], axes: Sequence[str]
) -> Iterator[Cause]:
    relation = at.largest or at.inputs
    if "tensor" in axes or ("tensor" in sizes and not axes):
        if relation == "whole":
            yield Cause(
                "gathered logits in a sharded loss",
                "the loss gets whole logits on each tensor rank, and differs",
                "the loss takes them for a shard of the vocabulary: give it this rank's logits, or use a loss of whole "
                "logits such as torch's",
            )
        else:
            yield Cause(
                "loss over a shard",
                "all layers agree, and the loss of sharded logits differs",
                "a term of the loss, such as label smoothing or a mean over the vocabulary, sees this rank's shard "
                "alone: sum it over grid.tensor and divide by the whole vocabulary",
            )
    elif "context" in axes:
        yield Cause(
            "loss averaged over parts",
            "all layers agree, and the losses of the parts of the sequence do not add up",
            "each context rank returns a mean of its own tokens: return the pair (sum, number of labels), which the "
            "engine divides once",
        )
    else:
        yield Cause(
            "loss depends on the grid",
            "all layers agree, and the loss differs",
            "return the sum of a microbatch's losses and its weight, without the sizes of the grid",
        )


def _of_backward(
    at: Location, facts: Facts, alone: Observed, sizes: dict[str, int], axes: Sequence[str]
) -> Iterator[Cause]:
    axis = "" if facts.factor is None else _is_size(facts.factor, sizes)
    if axis:
        yield Cause(
            "gradient summed once too often" if (facts.factor or 0) > 1 else "gradient divided",
            f"the gradient is that of one process times {facts.factor:g}, and {axis} has the size {sizes[axis]}",
            "a whole gradient is summed over the ranks, or a sum is divided: a region's backward pass must be the "
            "transpose of its forward pass",
        )
    elif facts.factor is not None:
        yield Cause(
            "scaled gradient",
            f"the gradient is that of one process times {facts.factor:g}",
            "a hook or a backward pass of your own multiplies it: make the factor independent of the grid",
        )
    elif "tensor" in sizes and (facts.terms or facts.disagree):
        yield Cause(
            "missing copy region",
            "the tensor ranks have unlike gradients of a value that each of them has whole",
            "each rank has only its shard's part: begin the sharded part with triax.tensor_parallel.copy_all_reduce(x, "
            "grid.tensor), as ColumnParallelLinear does",
        )
    else:
        yield Cause(
            "backward pass",
            "the forward pass agrees, and the gradient of its input does not",
            "a collective without its transposed backward pass, a detach or a hook on this path depends on the grid",
        )


def _of_parameter(
    name: str, alone: Observed, ranks: Sequence[Observed], sizes: dict[str, int], axes: Sequence[str]
) -> Iterator[Cause]:
    pairs = {rank: pair for rank, each in enumerate(ranks) if (pair := local_pair(alone, each, ranks, name))}
    ratios = {_ratio(*pair) for pair in pairs.values()}
    ratio = next(iter(ratios)) if len(ratios) == 1 else None
    held = next(iter(pairs), None)
    layout = ranks[held].local[name][0] if held is not None else None
    tied = alone.ties.get(name) or max((each.ties.get(name, 0) for each in ranks), default=0)
    mine = [
        pair[0]
        for rank, pair in pairs.items()
        if ranks[rank].place["data"] == 0 and ranks[rank].place.get("context", 0) == 0
    ]
    whole = alone.gradients[name]
    if layout is not None and not layout.sharded and len(mine) > 1 and close(sum_of(mine), whole):
        yield Cause(
            "gradient not summed over tensor",
            f"the {len(mine)} tensor ranks have unlike gradients, whose sum is that of one process",
            "each rank computes it from its own tokens or shard: a norm on sequence shards needs a Layout with "
            "partial=True, as triax's norms with sequence_parallel=True have",
        )
    elif tied > 1 and "pipe" in sizes:
        factor = "" if ratio is None else f", and the gradient is that of one process times {ratio:g}"
        yield Cause(
            "tied weight",
            f"{tied} stages share the weight{factor}",
            "the gradient of a tied weight is summed over its stages once: do not add or scale it yourself",
        )
    elif ratio is not None:
        axis = _is_size(ratio, sizes)
        seen = f", and {axis} has the size {sizes[axis]}" if axis else ""
        yield Cause(
            "scaled gradient",
            f"the gradient is that of one process times {ratio:g}{seen}",
            "a hook on the parameter, or a second sum over the ranks, multiplies it: the engine sums gradients itself",
        )
    elif set(axes) == {"data"}:
        yield Cause(
            "depends on the replica",
            "only grids with a data axis differ",
            "the layer computes otherwise on another replica: look for the rank, or for a statistic of the batch",
        )
    else:
        yield Cause(
            "gradient of the parameter",
            "outputs and their gradients agree, and this gradient does not",
            "a hook on the parameter, a detach, or a weight that is used in two ways depends on the grid",
        )


def _is_size(factor: float, sizes: dict[str, int]) -> str:
    """Return the axis whose size, or one over it, a factor is; empty if none."""
    near = (name for name, n in sizes.items() if min(abs(factor - n), abs(factor - 1 / n), abs(factor - n * n)) < 1e-7)
    return next(near, "")


def _added_bias(at: Location, facts: Facts, alone: Observed) -> str:
    """Return the name of the module's parameter that the offset is a multiple of."""
    if facts.offset is None:
        return ""
    for name, (_, value) in alone.initial.items():
        if name.startswith(f"{at.name}.") and value.dim() == 1 and value.shape == facts.offset.shape:
            factor = _ratio(facts.offset, value) or (1.0 if close(facts.offset, value, 1e-7) else None)
            if factor is not None and abs(factor - round(factor)) < 1e-6 and round(factor) >= 1:
                return name
    return ""


def _drops(at: Location) -> bool:
    """Return True if zeros stand at other places in the output than on one process, and not in the input."""
    zeros = [int((piece == 0).sum()) for piece in at.pieces.values()]
    inputs = [int((x == 0).sum()) for record in at.records.values() for x in record.inputs]
    return bool((at.whole == 0).any()) and any(zeros) and not any(inputs) and "embed" not in at.op


def _has_table(at: Location, alone: Observed) -> bool:
    """Return True if the module looks rows up: it gets no floating-point input and has a matrix."""
    floats = any(record.inputs for record in at.records.values())
    return (
        bool(at.records)
        and not floats
        and any(name.startswith(f"{at.name}.") and value.dim() == 2 for name, (_, value) in alone.initial.items())
    )


def _axis(axes: Sequence[str]) -> str:
    return next((axis for axis in axes if axis in ("tensor", "context")), "tensor")
