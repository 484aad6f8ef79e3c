"""Rules of types: which type the result of an op has on an axis, and which inputs do not fit.

An op is one of a few families, by its name in aten. Its result is partial where it sums over a sliced dim, varying where
an input varies, else equal on all ranks. The gradient follows from the types of the inputs (``settled``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

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
    without,
)

_KEEP = "neg clone _to_copy copy alias detach contiguous lift_fresh lift_fresh_copy conj real imag view_as_real".split()
_KEEP += "view_as_complex to set_ resolve_conj resolve_neg triu tril pin_memory flip roll _conj".split()
_ADD = "add sub rsub cat stack where masked_fill index_copy index_add scatter_add scatter index_put _index_put_impl".split()
_SHAPED = "view _unsafe_view _reshape_alias reshape view_dtype".split()
_COMPARE = "eq ne lt le gt ge isnan isinf".split()
_LOGIC = "logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not logical_xor".split()
_EXTREME = {"amax": "max", "max": "max", "amin": "min", "min": "min"}
_REDUCE = "sum mean prod var std var_mean norm linalg_vector_norm logsumexp argmax argmin any all median count_nonzero"
_REDUCE = [*_REDUCE.split(), *_EXTREME]  # type: ignore[assignment]
_ALONG = "_softmax _log_softmax softmax log_softmax cumsum cumprod sort topk argsort logcumsumexp _safe_softmax".split()
_PRODUCT = "mm bmm addmm baddbmm mv dot".split()
_NORM = "native_layer_norm layer_norm rms_norm _fused_rms_norm".split()
_NLL = "nll_loss_forward nll_loss2d_forward".split()
_CUT = "slice select split split_with_sizes narrow unbind chunk unsafe_split unsafe_chunk constant_pad_nd".split()
_COUNTED = ("repeat_interleave", "nonzero", "masked_select", "unique_consecutive", "_unique2")
_RANDOM = "rand randn bernoulli native_dropout uniform normal randint randperm rand_like randn_like exponential".split()
_UNIFORM = ("empty", "zeros", "ones", "full", "new_empty", "new_zeros", "new_ones", "new_full", "zero", "fill")
CREATE = (*_UNIFORM, "arange", "scalar_tensor", "empty_like", "zeros_like", "ones_like", "full_like", "eye")
CREATE += ("empty_strided", "new_empty_strided", "empty_permuted")
# Ops whose plain numbers say which elements a rank takes or what it computes; shapes differ on uneven shards anyway.
NUMBERED = {*_ADD, *_COMPARE, *_CUT, "mul", "div", "pow", "arange", "full", "scalar_tensor", "clamp", "roll", "fill"}
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
        here: the op and the user's line.
        report: told of what does not fit: what arrived, what is missing, and what mends it.
    """

    name: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    differentiable: Sequence[bool]
    axis: str
    differs: bool
    here: str
    report: Callable[[str, str, str], None]

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
        found = replace(found, since=call.here)
    return [found] * len(call.outputs)


def chosen(call: Call, value: Sharding, dim: int | None) -> Sharding:
    """Return the type of a piece of an equal tensor, of which another rank takes another one; report its gradient.

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
    whole, terms = ([each for each in needs_of if each.kind == kind] for needs_of, kind in
                    ((needed, INVARIANT), (needed, REPLICATED)))
    if not found.equal:
        if whole:
            _unsummed(call, whole)
        return found
    if whole and terms:
        if all(each.parameter for each in terms) and not all(each.parameter for each in whole):
            name = terms[0].parameter
            call.report(
                f"{terms[0]}, and {whole[0]}",
                f"each rank has the whole gradient of {name} already, and its layout (partial=True) sums it again over "
                f"the {call.axis} ranks",
                "leave partial=True out of its Layout",
            )
        else:
            _unsummed(call, whole)
    kind = REPLICATED if terms else INVARIANT if call.grad and found.role != "uniform" else CONSTANT
    return replace(found, kind=kind)


def _unsummed(call: Call, whole: Sequence[Sharding]) -> None:
    """Report an input of which each rank computes a term of the gradient, which nothing sums."""
    named = next((each for each in whole if each.parameter), None)
    if named is not None:
        call.report(
            str(named),
            f"each rank computes a term of the gradient of {named.parameter}, and nothing sums the terms over the "
            f"{call.axis} ranks",
            "set_layout(parameter, Layout(shape, partial=True)), or its shard_dim if it is a shard; or use "
            f"copy_all_reduce(parameter, grid.{call.axis})",
        )
        return
    call.report(
        f"{whole[0]}, in a computation in which each rank has a part",
        f"each rank computes a term of its gradient, and nothing sums the terms over the {call.axis} ranks",
        f"copy_all_reduce(x, grid.{call.axis}) before this line, or gather_reduce_scatter where the value was gathered",
    )


def _typed(call: Call, given: Sequence[Sharding]) -> Sharding:
    """Return the type of the result, equal ones without the kind of their gradient."""
    name = call.name
    if name in CREATE:
        return _created(call)
    if name in _RANDOM:
        if name == "native_dropout" and call.grad:
            _random(call)
        return _same_kind(given) if given else varying({}, role="random") if call.axis in _SUMMED else varying()
    if name in _COUNTED and call.axis != "tensor":  # how many there are depends on the tokens of a rank
        return varying()
    if all(each.equal for each in given) and not call.differs:
        role = "uniform" if all(each.role == "uniform" for each in given) and given else ""
        return Sharding(role=role)
    if name in _CUT:
        return _cut(call, given[0])
    if name in _SHAPED:
        return _shaped(call, given[0])
    if name in _PRODUCT:
        return _product(call, given)
    if name in _REDUCE or name in _ALONG or name in _NORM or name in _NLL:
        return _along(call, given[0])
    if name in ("embedding", "index_select", "gather", "index", "take_along_dim"):
        return _looked_up(call, given)
    if "scaled_dot_product" in name:
        return _attention(call, given)
    if (moved := _moved(call)) is not None:
        value = given[0]
        if value.kind != VARYING or value.dims is None:
            return value
        before = call.inputs[0].dim()
        return replace(
            value, dims=tuple(sorted((moved[dim + before], level) for dim, level in value.dims if dim + before in moved))
        )
    return _elementwise(call, given)


def _created(call: Call) -> Sharding:
    if not call.differs:
        return Sharding(role="" if call.name == "arange" else "uniform")
    return varying({-1: 0} if call.name == "arange" else {}) if call.axis in _SUMMED else varying()


def _same_kind(given: Sequence[Sharding]) -> Sharding:
    return without(given[0], "")


def _random(call: Call) -> None:
    call.report(
        "random numbers of this process",
        f"the {call.axis} ranks draw other numbers for one tensor, or equal numbers for other elements",
        "triax.Dropout, or triax.context.dropout for a sequence in parts, whose masks do not depend on the grid",
    )


def _cut(call: Call, value: Sharding) -> Sharding:
    """Slices: of a dim, by numbers that may differ between the ranks."""
    x, out = call.inputs[0], call.outputs[0]
    if call.name == "constant_pad_nd":
        pads = call.args[1]
        touched = {-1 - i // 2 for i, pad in enumerate(pads) if pad}
        dim = next(iter(touched & value.levels.keys()), None)
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
            call.report(
                str(value),
                "each rank takes the tokens at the same places of its own part, which are other places of the sequence",
                "triax.context.gather(x, grid.context, length, partial=True) before this line",
            )
        if removed or (levels[dim] and out.shape[dim] % levels[dim]):
            return replace(value, dims=None)
        levels[dim] = levels[dim] if levels[dim] and out.shape[dim] > levels[dim] else 0
    if removed:
        levels = {at + (at < dim): level for at, level in levels.items() if at != dim}
    return replace(value, dims=tuple(sorted(levels.items())))


def _shaped(call: Call, value: Sharding) -> Sharding:
    """Views with another shape."""
    if value.kind != VARYING or value.dims is None:
        return value
    dims = reshaped(value.levels, call.inputs[0].shape, call.outputs[0].shape)
    return replace(value, dims=None if dims is None else tuple(sorted(dims.items())))


def _moved(call: Call) -> dict[int, int] | None:
    """Return for each dim of the input its place in the output, from the end; None if the op does not move dims."""
    if call.name not in ("t", "transpose", "permute", "expand", "repeat", "unfold", "squeeze", "unsqueeze"):
        return None
    before, after = call.inputs[0].dim(), call.outputs[0].dim()
    if call.name in ("squeeze", "unsqueeze"):
        asked = call.arg(1, "dim", [dim for dim, size in enumerate(call.inputs[0].shape) if size == 1])
        asked = {dim % max(before, after) for dim in ([asked] if isinstance(asked, int) else asked)}
        more = call.name == "unsqueeze"
        kept = [dim for dim in range(max(before, after)) if dim not in asked or (not more and call.inputs[0].shape[dim] > 1)]
        return {old: new - after for new, old in enumerate(kept)} if not more else dict(enumerate(dim - after for dim in kept))
    order = list(range(before))
    if call.name in ("t", "transpose") and before > 1:
        a, b = (call.args[1], call.args[2]) if call.name == "transpose" else (-2, -1)
        order[a], order[b] = order[b], order[a]
    elif call.name == "permute":
        order = [dim % before for dim in call.args[1]]
    place = {dim: at - before for at, dim in enumerate(order)}
    return place if call.name != "unfold" else {dim: at - 1 + (before - after + 1) for dim, at in place.items()}


def _product(call: Call, given: Sequence[Sharding]) -> Sharding:
    """Products of matrices and vectors, with a summand for ``addmm`` and ``baddbmm``."""
    first = 1 if call.name in ("addmm", "baddbmm") else 0
    (a, b), (x, y) = given[first : first + 2], call.inputs[first : first + 2]
    inner = (-1, -1 if call.name in ("mv", "dot") else -2)
    rows = "rows" in (a.role, b.role)
    if rows and "experts" in (a.role, b.role):
        call.report(
            "rows of this replica, and a weight of this rank's experts",
            "each row meets the experts of its own rank alone",
            "triax.moe.MoE, or gather_reduce_scatter(x, grid.expert, dim=0) before the experts and "
            "reduce_scatter_gather(y, grid.expert, dim=0) behind them",
        )
    if PARTIAL in (a.kind, b.kind):
        found = _multiplied(call, [a, b])
    elif inner[0] in a.levels or inner[1] in b.levels:
        for value, tensor, dim in ((a, x, inner[0]), (b, y, inner[1])):
            if value.equal and value.role != "uniform" and tensor.shape[dim] > 1:
                _taken_for_slice(call, value)
        found = Sharding(PARTIAL)
    elif VARYING in (a.kind, b.kind):
        unknown = any(value.kind == VARYING and value.dims is None for value in (a, b))
        levels: Dims = {}
        if call.name in ("mv", "dot"):
            levels |= {-1: level for dim, level in a.levels.items() if dim == -2}
        else:
            levels |= {dim: level for dim, level in a.levels.items() if dim != -1}
            levels |= {dim: level for dim, level in b.levels.items() if dim != -2}
        found = varying(None if unknown else levels, role="rows" if rows else "")
    else:
        found = Sharding()
    return _added(call, [given[0], found]) if first and call.inputs[0].numel() else found


def _taken_for_slice(call: Call, value: Sharding) -> None:
    call.report(
        str(value),
        f"it is equal on all {call.axis} ranks, and taken for the slice of each",
        "a slice of it for this rank: triax.context.positions or shard for tokens; Layout(shape, shard_dim=...) and "
        "sharded_parameter for a parameter; split_gather for a value",
    )


def _along(call: Call, value: Sharding) -> Sharding:
    """Reductions, and ops that compute along some dims."""
    x, name = call.inputs[0], call.name
    if name in _NORM:
        dims = list(range(-len(call.args[1]), 0))
    elif name in _NLL:
        dims = [-x.dim() + (1 if x.dim() > 1 else 0)]
    else:
        asked = call.arg(1, "dim") if name not in ("topk",) else call.arg(2, "dim", -1)
        if name in ("norm", "linalg_vector_norm"):
            asked = call.arg(2, "dim")
        if isinstance(asked, bool) or (asked is None and name in ("sort", "argsort")):
            asked = call.arg(1 if name != "sort" or len(call.args) < 3 else 2, "dim", -1)
        asked = [asked] if isinstance(asked, int) and not isinstance(asked, bool) else asked
        dims = [dim - x.dim() if dim >= 0 else dim for dim in asked or range(x.dim())]
    if value.kind == PARTIAL:
        return value if name in ("sum", "mean") or value.reduction == _EXTREME.get(name) else _nonlinear(call, value)
    if value.kind != VARYING or value.dims is None:
        return value if value.kind == VARYING else _elementwise(call, [value])
    levels = value.levels
    if name in _NLL:
        if levels.keys() & set(dims):
            return _over_slices(call, value)
        if not call.outputs[0].dim():
            return Sharding(PARTIAL)
        return varying({dim + sum(1 for gone in dims if gone > dim): level for dim, level in levels.items()})
    met = sorted(levels.keys() & set(dims))
    if met:
        if name in ("sum", "mean", "count_nonzero") or name in _EXTREME:
            return Sharding(PARTIAL, reduction=_EXTREME.get(name, "sum"))
        return _over_slices(call, value)
    if call.outputs[0].dim() < x.dim():
        levels = {dim + sum(1 for gone in dims if gone > dim): level for dim, level in levels.items()}
    return replace(value, dims=tuple(sorted(levels.items())))


def _over_slices(call: Call, value: Sharding) -> Sharding:
    if call.grad:
        call.report(
            str(value),
            f"{call.name.strip('_')} runs along a dim of which each {call.axis} rank has a slice, so each rank has the "
            "result of its own slice",
            f"gather_reduce_scatter(x, grid.{call.axis}, dim) before this line; or sums over the slices, each through "
            f"copy_all_reduce(all_reduce_copy(sum, grid.{call.axis}), grid.{call.axis})",
        )
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
        elif call.name == "index_select":
            at = call.args[1] - x.dim() if call.args[1] >= 0 else call.args[1]
            levels |= {at: level for level in each.levels.values()}
        else:
            levels |= each.levels
    if call.name == "embedding":
        levels |= {-1: level for dim, level in source.levels.items() if dim == -1}
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
    known = call.name in (*_KEEP, *_ADD, *_COMPARE, *_LOGIC, "mul", "div") or any(
        tuple(x.shape) in shapes for x in call.inputs
    )
    if call.differs:
        if call.axis not in _SUMMED and call.grad and call.name in ("add", "sub", "mul", "div", "pow"):
            call.report(
                f"a number that differs between the {call.axis} ranks",
                "each replica computes another function, so that the sum over the replicas is no sum over the batch",
                f"a number that does not depend on grid.{call.axis}.rank",
            )
        given.append(varying({}) if call.axis in _SUMMED else varying())
    if any(each.role == "random" for each in given):
        if call.grad:
            _random(call)
        elif call.name in (*_COMPARE, *_KEEP, *_LOGIC):
            return varying({}, role="random")
    if any(each.kind == PARTIAL for each in given):
        if call.name in _KEEP:
            return given[0] if given[0].kind == PARTIAL else given[-1]
        if call.name in _ADD:
            return _added(call, given)
        if call.name in ("mul", "div"):
            return _multiplied(call, given)
        return _nonlinear(call, next(each for each in given if each.kind == PARTIAL))
    if masked := _masked(call, given):
        return masked
    if call.name == "copy" and len(given) > 1:
        given = given[1:]
    if all(each.equal for each in given):
        return Sharding()
    role = next((role for role in ("rows", "experts") if any(each.role == role for each in given)), "")
    if call.name in _COMPARE or (call.name in (*_LOGIC, *_KEEP) and any(each.role == "mask" for each in given)):
        role = role or "mask"
    if not known or any(each.kind == VARYING and each.dims is None for each in given):
        return varying(role=role)
    levels: Dims = {}
    for each in given:
        levels |= each.levels
    if call.grad and call.axis in _SUMMED:
        for value, x in zip(given, call.inputs):
            if value.equal and value.role != "uniform" and call.name not in ("cat", "stack", "index_put", "index_copy"):
                if any(x.dim() >= -dim and x.shape[dim] > 1 for dim in levels):
                    _taken_for_slice(call, value)
                    break
    if call.name == "stack":
        at = call.arg(1, "dim", 0)
        at = at - call.outputs[0].dim() if at >= 0 else at
        levels = {dim - (dim <= at): level for dim, level in levels.items()}
    return varying(levels, role=role)


def _masked(call: Call, given: Sequence[Sharding]) -> Sharding | None:
    """Return the type of a value of which each rank keeps its own elements: a term of a sum; None if it is not one."""
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
    other = next((each for each in given if each.kind != PARTIAL and each.role != "uniform" and not _may_be_term(each)), None)
    number = call.name in ("add", "sub", "rsub") and any(isinstance(each, (int, float)) and each for each in call.args[1:2])
    if call.name in ("index_copy", "index_add", "scatter_add", "scatter", "masked_fill", "where", "index_put"):
        other = None
    if call.grad and (other is not None or number):
        call.report(
            f"{terms[0]}, and {other or 'a number'}",
            f"a term of a sum is added to what is no term: the sum over the {call.axis} ranks is missing before this "
            f"line, or counts the other summand on each rank",
            f"all_reduce_copy(x, grid.{call.axis}) before this line",
        )
        return Sharding(since=call.here)
    return without(terms[0], "")


def _may_be_term(value: Sharding) -> bool:
    return value.kind == VARYING and not value.levels


def _multiplied(call: Call, given: Sequence[Sharding]) -> Sharding:
    """Products of a term of a sum and a value that is equal on all ranks."""
    terms = [each for each in given if each.kind == PARTIAL]
    divided = call.name == "div" and given[0].kind != PARTIAL
    if len(terms) == 1 and terms[0].reduction == "sum" and not divided and all(
        each.equal or each is terms[0] for each in given
    ):
        return without(terms[0], "")
    return _nonlinear(call, terms[0])


def _nonlinear(call: Call, value: Sharding) -> Sharding:
    """Report a partial value in an op that is not linear in it."""
    if not call.grad:
        return varying({})
    mend = f"all_reduce_copy(x, grid.{call.axis}) before this line"
    if any(not each for each in ()) or value.reduction != "sum":
        mend = f"the {value.reduction} over grid.{call.axis} of the detached value before this line"
    call.report(
        str(value),
        f"{call.name.strip('_')} is not linear: of the sum over the {call.axis} ranks it would be another value",
        f"{mend}; copy_all_reduce(all_reduce_copy(x, grid.{call.axis}), grid.{call.axis}) if each rank goes on with "
        "its own part",
    )
    return Sharding(since=call.here)
