"""Rules of types: which type the result of an op has on an axis, and which inputs do not fit.

An op is of a family, by its name in aten. Its result is partial where it sums over a sliced dim, varying where an
input varies, else equal on all ranks. The gradient follows from the types of the inputs (``settled``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from ...base.foreign_tables import read_table
from .sharding import (
    CONSTANT,
    INVARIANT,
    PARTIAL,
    REPLICATED,
    VARYING,
    Dims,
    Sharding,
    reshaped,
    varying,
)

# Name of an op -> its family.
FAMILY = {op: family for family, ops in read_table(__file__, "ops.toml").items() for op in ops.split()}
# Families whose plain numbers say which elements a rank takes, or what it computes.
NUMBERED = ("keep", "add", "place", "scale", "compare", "cut", "create")
_PLACES = ("index_copy", "index_add", "scatter_add", "scatter", "index_put", "_index_put_impl")
_SUMMED = ("tensor", "context")  # axes on which ranks compute one loss together; others have samples of their own


class Call(NamedTuple):
    """Call of an op.

    Attributes:
        name: of the op, as ``mean``.
        args, kwargs: as aten has them.
        inputs, outputs: tensors.
        differentiable: which inputs need a gradient of this call.
        axis: the axis of the types.
        differs: True if numbers among the arguments are others on another rank of the axis.
        here: the op and the user's line, as ``str`` shows them.
        report: told of what does not fit: its name in findings.toml, what arrived, and the name of what it is about.
    """

    name: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    differentiable: Sequence[bool]
    axis: str
    differs: bool
    here: Any
    report: Callable[..., None]

    @property
    def family(self) -> str:
        """The family of the op; "" if it has none."""
        return "attention" if "scaled_dot_product" in self.name else FAMILY.get(self.name, "")

    @property
    def grad(self) -> bool:
        """True if the result needs a gradient."""
        return any(self.differentiable)

    def arg(self, at: int, name: str, default: Any = None) -> Any:
        """Return an argument that may be given by its name."""
        return self.args[at] if len(self.args) > at else self.kwargs.get(name, default)


def judged(call: Call, given: Sequence[Sharding]) -> list[Sharding]:
    """Return the types of the outputs of a call, and report inputs that do not fit."""
    found = _typed(call, given)
    found = replace(settled(call, given, found), parameter="")
    if found.kind == PARTIAL and not any(each.kind == PARTIAL for each in given):
        found = replace(found, since=str(call.here))
    return [found] * len(call.outputs)


def chosen(call: Call, value: Sharding, dim: int | None) -> Sharding:
    """Return the type of a piece of an equal tensor, if each rank takes another piece; report its gradient.

    Args:
        call: an op on the piece.
        value: the type of the whole.
        dim: the dim along which there are pieces; None: it is gone, or not known.
    """
    if call.axis not in _SUMMED:
        return varying()
    if call.grad and value.kind == INVARIANT:
        _unsummed(call, [value])
    return varying({} if dim is None else {dim: 0})


def settled(call: Call, given: Sequence[Sharding], found: Sharding) -> Sharding:
    """Return the type of a result with the kind of its gradient, and report gradients that miss a sum."""
    needed = [each for each, needs in zip(given, call.differentiable, strict=True) if needs]
    whole, terms = ([each for each in needed if each.kind == kind] for kind in (INVARIANT, REPLICATED))
    if not found.equal:
        if whole:
            _unsummed(call, whole)
        return found
    if whole and terms:
        if all(each.parameter for each in terms) and not all(each.parameter for each in whole):
            call.report("summed_twice", f"{terms[0]}, and {whole[0]}", terms[0].parameter)
        else:
            _unsummed(call, whole)
    kind = REPLICATED if terms else INVARIANT if call.grad and found.role != "uniform" else CONSTANT
    return replace(found, kind=kind)


def _unsummed(call: Call, whole: Sequence[Sharding]) -> None:
    """Report an input whose gradient is computed in terms, one on each rank, that nothing sums."""
    named = next((each for each in whole if each.parameter), None)
    if named is None:
        call.report("unsummed_value", f"{whole[0]}, in a computation in which each rank has a part")
    else:
        call.report("unsummed_parameter", str(named), named.parameter)


def _typed(call: Call, given: Sequence[Sharding]) -> Sharding:
    """Return the type of the result, equal ones without the kind of their gradient."""
    family = call.family
    if family == "create":
        return _created(call)
    if family == "random":
        if call.grad:
            call.report("random", "random numbers of this process")
        return given[0] if given else varying({}, role="random") if call.axis in _SUMMED else varying()
    if family == "counted" and call.axis != "tensor":  # how many there are depends on the tokens of a rank
        return varying()
    if all(each.equal for each in given) and not call.differs:
        return Sharding(role="uniform" if given and all(each.role == "uniform" for each in given) else "")
    return _RULES.get(family, _elementwise)(call, given)


def _created(call: Call) -> Sharding:
    if not call.differs:
        return Sharding(role="" if call.name == "arange" else "uniform")
    return varying({-1: 0} if call.name == "arange" else {}) if call.axis in _SUMMED else varying()


def _cut(call: Call, given: Sequence[Sharding]) -> Sharding:
    """Slices: of a dim, by numbers that may differ between the ranks."""
    value, x, out = given[0], call.inputs[0], call.outputs[0]
    if call.name == "constant_pad_nd":
        pads = call.args[1]
        touched = {-1 - i // 2 for i, pad in enumerate(pads) if pad}
        dim: int = next(iter(touched & value.levels.keys()), 0)  # 0 is no dim from the end
        removed = False
    else:
        dim = call.arg(1, "dim", 0) if call.name in ("select", "slice", "unbind", "narrow") else call.arg(2, "dim", 0)
        dim, removed = dim - x.dim() if dim >= 0 else dim, call.name in ("select", "unbind")
    whole = call.name != "constant_pad_nd" and not removed and out.shape[dim] == x.shape[dim]
    if value.kind == PARTIAL or whole:
        return value
    if value.equal:  # by other numbers on another rank
        return varying({} if removed or call.name == "constant_pad_nd" else {dim: 0}) if call.differs else value
    if value.dims is None:
        return value
    levels = value.levels
    if dim in levels:
        if call.axis == "context" and call.grad and not call.differs:
            call.report("tokens_of_part", str(value))
        if removed or (levels[dim] and out.shape[dim] % levels[dim]):
            return replace(value, dims=None)
        levels[dim] = levels[dim] if levels[dim] and out.shape[dim] > levels[dim] else 0
    if removed:
        levels = {at + (at < dim): level for at, level in levels.items() if at != dim}
    return replace(value, dims=levels)


def _shaped(call: Call, given: Sequence[Sharding]) -> Sharding:
    """Views with another shape."""
    value = given[0]
    if value.kind != VARYING or value.dims is None:
        return value
    dims = reshaped(value.levels, call.inputs[0].shape, call.outputs[0].shape)
    return replace(value, dims=dims)


def _moved(call: Call, given: Sequence[Sharding]) -> Sharding:
    """Views with the dims in other places."""
    value, x, after = given[0], call.inputs[0], call.outputs[0].dim()
    if value.kind != VARYING or value.dims is None:
        return value
    places, before = list(range(x.dim())), x.dim()  # the dims in the order of the output's, from its last one back
    if call.name in ("t", "transpose") and before > 1:
        a, b = call.args[1:3] if call.name == "transpose" else (-2, -1)
        places[a], places[b] = places[b], places[a]
    elif call.name == "permute":
        places = [dim % before for dim in call.args[1]]
    elif call.name == "squeeze":
        asked = call.arg(1, "dim", range(before))
        gone = {dim % before for dim in ([asked] if isinstance(asked, int) else asked) if x.shape[dim] == 1}
        places = [dim for dim in places if dim not in gone]
    elif call.name in ("unsqueeze", "unfold"):
        places.insert(call.args[1] % after if call.name == "unsqueeze" else before, -1)
    to = {dim: at - len(places) for at, dim in enumerate(places)}
    levels = {to[dim + before]: level for dim, level in value.levels.items() if dim + before in to}
    return replace(value, dims=levels)


def _product(call: Call, given: Sequence[Sharding]) -> Sharding:
    """Products of matrices and vectors, with a summand for ``addmm`` and ``baddbmm``."""
    first = 1 if call.name in ("addmm", "baddbmm") else 0
    (a, b), (x, y) = given[first : first + 2], call.inputs[first : first + 2]
    inner = (-1, -1 if call.name in ("mv", "dot") else -2)
    rows = "rows" in (a.role, b.role)
    if rows and "experts" in (a.role, b.role):
        call.report("rows_of_others", "rows of this replica, and a weight of this rank's experts")
    if PARTIAL in (a.kind, b.kind):
        found = _multiplied(call, [a, b])
    elif inner[0] in a.levels or inner[1] in b.levels:
        for value, tensor, dim in ((a, x, inner[0]), (b, y, inner[1])):
            if value.equal and value.role != "uniform" and tensor.shape[dim] > 1:
                call.report("taken_for_slice", str(value))
        found = Sharding(PARTIAL)
    elif VARYING in (a.kind, b.kind):
        unknown = any(value.kind == VARYING and value.dims is None for value in (a, b))
        levels: Dims = {}
        if call.name in ("mv", "dot"):
            levels |= {dim + 1: level for dim, level in a.levels.items() if dim == -2}
        else:
            levels |= {dim: level for dim, level in a.levels.items() if dim != -1}
            levels |= {dim: level for dim, level in b.levels.items() if dim != -2}
        found = varying(None if unknown else levels, role="rows" if rows else "")
    else:
        found = Sharding()
    return _added(call, [given[0], found]) if first and call.inputs[0].numel() else found


def _along(call: Call, given: Sequence[Sharding]) -> Sharding:
    """Reductions, and ops that compute along some dims."""
    value, x, name, family = given[0], call.inputs[0], call.name, call.family
    extreme = name.removeprefix("a") if family == "extreme" else ""
    if value.kind == PARTIAL:
        return value if family == "sum" or value.reduction == extreme else _nonlinear(call, value)
    if value.kind != VARYING:
        return _elementwise(call, given)
    if value.dims is None:
        return value
    levels, dims = value.levels, _dims_of(call)
    met, gone = levels.keys() & dims, dims if call.outputs[0].dim() < x.dim() else set()
    if met and family in ("sum", "extreme"):
        return Sharding(PARTIAL, reduction=extreme or "sum")
    if met:
        return _over_slices(call, value)
    if family == "nll" and not call.outputs[0].dim():
        return Sharding(PARTIAL)
    levels = {dim + sum(1 for each in gone if each > dim): level for dim, level in levels.items()}
    return replace(value, dims=levels)


def _dims_of(call: Call) -> set[int]:
    """Return the dims along which an op computes, from the end."""
    dims, name = call.inputs[0].dim(), call.name
    if call.family == "norm":
        return set(range(-len(call.args[1]), 0))
    if call.family == "nll":
        return {1 - dims if dims > 1 else -1}
    asked = call.arg(2 if name in ("topk", "norm", "linalg_vector_norm") else 1, "dim")
    if name in ("topk", "sort", "argsort") and (asked is None or isinstance(asked, bool)):
        asked = -1 if len(call.args) < 3 else call.args[2]
    asked = [asked] if isinstance(asked, int) and not isinstance(asked, bool) else asked
    return {dim - dims if dim >= 0 else dim for dim in asked or range(dims)}


def _over_slices(call: Call, value: Sharding) -> Sharding:
    if call.grad:
        call.report("over_slices", str(value), call.name.strip("_"))
    return value if call.outputs and call.outputs[0].shape == call.inputs[0].shape else varying()


def _looked_up(call: Call, given: Sequence[Sharding]) -> Sharding:
    """Rows or elements of a tensor by indices."""
    if any(each.kind == PARTIAL for each in given):
        return next(each for each in given if each.kind == PARTIAL)
    source, others = given[0], given[1:]
    if any(each.kind == VARYING and each.dims is None for each in given) or call.name == "index":
        return varying(role="rows" if any(each.role == "rows" for each in given) else "")
    x, out = call.inputs[0], call.outputs[0]
    levels: Dims = {}
    for each in others:
        if call.name == "embedding":
            levels |= {dim - 1: level for dim, level in each.levels.items()}
        elif call.name == "index_select" and each.levels:
            at = call.args[1] - x.dim() if call.args[1] >= 0 else call.args[1]
            if at in source.levels:  # in an order of each rank's own
                return varying()
            levels[at] = each.levels[-1]
        elif call.name != "index_select":
            levels |= each.levels
    if call.name == "embedding":
        levels |= {dim: level for dim, level in source.levels.items() if dim == -1}
    else:
        at = call.args[1] - x.dim() if call.args[1] >= 0 else call.args[1]
        levels |= {dim: level for dim, level in source.levels.items() if dim != at and out.shape[dim] > 0}
    return varying(levels)


def _attention(call: Call, given: Sequence[Sharding]) -> Sharding:
    """Attention of (B, H, T, D): along the keys' tokens and the features."""
    q, k, v = given[:3]
    for each in (q, k, v):
        if each.kind == PARTIAL:
            return _nonlinear(call, each)
    if {-2, -1} & k.levels.keys() or -1 in q.levels or -2 in v.levels:
        return _over_slices(call, k if {-2, -1} & k.levels.keys() else q)
    unknown = any(each.kind == VARYING and each.dims is None for each in (q, k, v))
    return varying(None if unknown else {**k.levels, **v.levels, **q.levels})


def _elementwise(call: Call, given: Sequence[Sharding]) -> Sharding:
    """Ops on elements, and all that has no rule of its own."""
    given = list(given)
    shapes = {tuple(out.shape) for out in call.outputs}
    known = call.family in ("keep", "add", "place", "compare", "logic", "scale") or any(
        tuple(x.shape) in shapes for x in call.inputs
    )
    if call.differs:
        if call.axis not in _SUMMED and call.grad and call.family in ("add", "scale"):
            call.report("rank_number", f"a number that differs between the {call.axis} ranks")
        given.append(varying({}) if call.axis in _SUMMED else varying())
    if any(each.role == "random" for each in given):
        if call.grad:
            call.report("random", "random numbers of this process")
        elif call.family in ("compare", "keep", "logic"):
            return varying({}, role="random")
    if any(each.kind == PARTIAL for each in given):
        if call.family == "keep":
            return given[0] if given[0].kind == PARTIAL else given[-1]
        if call.family in ("add", "place"):
            return _added(call, given)
        if call.family == "scale":
            return _multiplied(call, given)
        return _nonlinear(call, next(each for each in given if each.kind == PARTIAL))
    if masked := _masked(call, given):
        return masked
    if call.name == "copy" and len(given) > 1:
        given = given[1:]
    if all(each.equal for each in given):
        return Sharding()
    role = next((role for role in ("rows", "experts") if any(each.role == role for each in given)), "")
    masks = any(each.role == "mask" for each in given)
    if call.family == "compare" or (call.family in ("logic", "keep") and masks):
        role = role or "mask"
    if not known or any(each.kind == VARYING and each.dims is None for each in given):
        return varying(role=role)
    levels: Dims = {}
    for each in given:
        levels |= each.levels
    if call.grad and call.axis in _SUMMED:
        for value, x in zip(given, call.inputs):
            own = any(x.dim() >= -dim and x.shape[dim] > 1 for dim in levels)
            if own and value.equal and value.role != "uniform" and call.name not in ("cat", "stack", *_PLACES):
                call.report("taken_for_slice", str(value))
                break
    if call.name == "stack":
        at = call.arg(1, "dim", 0)
        at = at - call.outputs[0].dim() if at >= 0 else at
        levels = {dim - (dim <= at): level for dim, level in levels.items()}
    return varying(levels, role=role)


def _masked(call: Call, given: Sequence[Sharding]) -> Sharding | None:
    """Return the type of a masked value, a term of a sum, if each rank keeps its own elements; else None."""
    if call.name not in ("mul", "masked_fill", "where"):
        return None
    masks = [each for each in given if each.role == "mask" and each.kind == VARYING and not each.levels]
    others = [each for each in given if each.role != "mask"]
    filled = call.name != "masked_fill" or call.args[2] == 0 or isinstance(call.args[2], Tensor)
    fits = masks and filled and others and call.outputs[0].is_floating_point()
    return Sharding(PARTIAL) if fits and not any(each.levels for each in others) else None


def _added(call: Call, given: Sequence[Sharding]) -> Sharding:
    """Sums: terms are added to terms alone."""
    terms = [each for each in given if each.kind == PARTIAL]
    if not terms:
        return _elementwise(call._replace(name="add"), given) if any(not each.equal for each in given) else Sharding()
    other = next(
        (each for each in given if each.kind != PARTIAL and each.role != "uniform" and not _may_be_term(each)), None
    )
    number = call.name in ("add", "sub", "rsub") and any(
        isinstance(each, (int, float)) and each for each in call.args[1:2]
    )
    if call.family == "place":
        other = None
    if call.grad and (other is not None or number):
        call.report("added_to_term", f"{terms[0]}, and {other or 'a number'}")
        return other if other is not None and other.kind == VARYING else Sharding(since=str(call.here))
    return replace(terms[0], parameter="")


def _may_be_term(value: Sharding) -> bool:
    return value.kind == VARYING and not value.levels


def _multiplied(call: Call, given: Sequence[Sharding]) -> Sharding:
    """Products of a term of a sum and a value that is equal on all ranks."""
    terms = [each for each in given if each.kind == PARTIAL]
    divided = call.name == "div" and given[0].kind != PARTIAL
    alone = all(each.equal or each is terms[0] for each in given)
    if alone and terms[0].reduction == "sum" and not divided:
        return replace(terms[0], parameter="")
    return _nonlinear(call, terms[0])


def _nonlinear(call: Call, value: Sharding) -> Sharding:
    """Report a partial value in an op that is not linear in it."""
    if not call.grad:
        return varying({})
    call.report("not_linear" if value.reduction == "sum" else "not_extreme", str(value), call.name.strip("_"))
    return Sharding(since=str(call.here))


_RULES = {
    "cut": _cut,
    "shape": _shaped,
    "move": _moved,
    "product": _product,
    "look_up": _looked_up,
    "attention": _attention,
} | dict.fromkeys(("sum", "extreme", "reduce", "along", "norm", "nll"), _along)
