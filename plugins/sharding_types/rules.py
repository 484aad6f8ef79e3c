"""Rules of types: which type the result of an op has on an axis, and which inputs do not fit.

Where the slices of an input are in the result, torch says itself: the op runs again on the meta device with the sliced
dim twice as long, and the dims of the result that became longer are the sliced ones. If torch refuses the longer input,
another input has to be longer with it: this one must be sliced too. If no dim became longer, the op has computed along
the slices, and the result of a sum is a term of the whole sum. How an op treats terms of sums and masks follows from
its family, in ops.toml. The gradient follows from the types of the inputs (``settled``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...base.foreign_tables import read_table
from ...base.nest import map_tensors
from ...base.torch_private import without_dispatch_modes
from .sharding import CONSTANT, INVARIANT, PARTIAL, REPLICATED, VARYING, Dims, Sharding, reshaped, varying

# Name of an op -> its family.
FAMILY = {op: family for family, ops in read_table(__file__, "ops.toml").items() for op in ops.split()}
# Families whose plain numbers say which elements a rank takes, or what it computes.
NUMBERED = ("keep", "add", "place", "scale", "compare", "cut", "create")
SUMMED = ("tensor", "context")  # axes on which ranks compute one loss together; others have samples of their own
_LINEAR = ("keep", "move", "shape", "cut", "look_up", "sum")  # families that are linear in their first input


class Longer(NamedTuple):
    """Dims that became longer together with a dim of an input.

    Attributes:
        dims: of the first output.
        beside: pairs (number of another input, its dim) that had to be longer too.
    """

    dims: Sequence[int]
    beside: Sequence[tuple[int, int]]


class Call(NamedTuple):
    """Call of an op.

    Attributes:
        func: the op.
        name: of the op, as ``mean``.
        args, kwargs: as aten has them.
        inputs, outputs: tensors.
        differentiable: which inputs need a gradient of this call.
        axis: the axis of the types.
        differs: True if numbers among the arguments are others on another rank of the axis.
        here: the op and the user's line.
        report: told of what does not fit: its name in findings.toml, what arrived, and the name of what it is about.
    """

    func: Callable[..., Any]
    name: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    differentiable: Sequence[bool]
    axis: str
    differs: bool
    here: str
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

    def longer(self, at: int, dim: int) -> Longer | None:
        """Return what becomes longer with a dim of an input; None if torch refuses it."""
        size = self.inputs[at].shape[dim]
        others = [
            (other, place)
            for other, x in enumerate(self.inputs)
            for place in range(-x.dim(), 0)
            if other != at and x.shape[place] == size
        ]
        aligned = [(other, place) for other, place in others if place == dim]
        tries: list[list[tuple[int, int]]] = [[], *([each] for each in others), aligned]
        for beside in tries[::-1] if self.name == "gather" else tries:
            try:
                shape = self._shape_with([(at, dim), *beside])
            except (RuntimeError, ValueError, IndexError):
                continue
            before = self.outputs[0].shape
            same = len(shape) == len(before)
            return Longer([place for place in range(-len(shape), 0) if same and shape[place] > before[place]], beside)
        return None

    def _shape_with(self, longer: Sequence[tuple[int, int]]) -> torch.Size:
        """Return the shape of the first output, if these dims of the inputs are twice as long."""
        number = iter(range(len(self.inputs)))

        def made(x: Tensor) -> Tensor:
            at = next(number)
            shape = [size * (2 if (at, dim - x.dim()) in longer else 1) for dim, size in enumerate(x.shape)]
            return torch.empty(shape, dtype=x.dtype, device="meta")

        with without_dispatch_modes():
            result = self.func(*map_tensors(made, list(self.args)), **map_tensors(made, self.kwargs))
        shape: torch.Size = (result if isinstance(result, Tensor) else result[0]).shape
        return shape


def judged(call: Call, given: Sequence[Sharding]) -> Sharding:
    """Return the type of the outputs of a call, and report inputs that do not fit."""
    found = replace(settled(call, given, _typed(call, given)), parameter="")
    made = found.kind == PARTIAL and not any(value.kind == PARTIAL for value in given)
    return replace(found, since=call.here) if made else found


def chosen(call: Call, value: Sharding, dim: int | None) -> Sharding:
    """Return the type of a piece of an equal tensor, if each rank takes another piece; report its gradient.

    Args:
        call: an op on the piece.
        value: the type of the whole.
        dim: the dim along which there are pieces; None: it is gone, or not known.
    """
    if call.axis not in SUMMED:
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
    family, first = call.family, given[0] if given else None
    if family == "create":
        return _created(call)
    if family == "random":
        if call.grad:
            call.report("random", "random numbers of this process")
        return first or _different(call, {}, role="random")
    if family == "counted" and call.axis != "tensor":  # how many there are depends on the tokens of a rank
        return varying()
    if first is None or (all(value.equal for value in given) and not call.differs):
        return Sharding(role="uniform" if given and all(value.role == "uniform" for value in given) else "")
    if call.name in ("copy", "expand"):
        return given[-1]
    if call.name in ("addmm", "baddbmm"):
        return _product_and_sum(call, given)
    if any(value.kind == PARTIAL for value in given):
        return _of_terms(call, given)
    if family == "cut":
        return _cut(call, first)
    if family == "shape":
        dims = first.dims
        return replace(first, dims=dims and reshaped(dims, call.inputs[0].shape, call.outputs[0].shape))
    return _attention(call, given) if family == "attention" else _combined(call, given)


def _different(call: Call, dims: Dims | None, **more: str) -> Sharding:
    """Return the type of what differs between ranks; between replicas it is not known in which dims."""
    return varying(dims, **more) if call.axis in SUMMED else varying()


def _created(call: Call) -> Sharding:
    arange = call.name == "arange"
    return _different(call, {-1: 0} if arange else {}) if call.differs else Sharding(role="" if arange else "uniform")


def _product_and_sum(call: Call, given: Sequence[Sharding]) -> Sharding:
    """Return the type of ``addmm`` and ``baddbmm``: of a product, and of its sum with a summand."""
    summand, *factors = call.inputs
    product = call._replace(func=torch.matmul, name="mm", args=factors, kwargs={}, inputs=factors)
    both = [summand, *call.outputs]
    total = call._replace(func=torch.add, name="add", args=both, kwargs={}, inputs=both)
    return _typed(total, [given[0], _typed(product, given[1:])])


def _combined(call: Call, given: Sequence[Sharding]) -> Sharding:
    """Return where the slices of the inputs are in the result, or that it is a term of a sum."""
    family = call.family
    if call.differs:
        if call.axis not in SUMMED and call.grad and family in ("add", "scale"):
            call.report("rank_number", f"a number that differs between the {call.axis} ranks")
        given = [*given, _different(call, {})]
    roles = {value.role for value in given}
    if "random" in roles:
        if call.grad:
            call.report("random", "random numbers of this process")
        elif family in ("compare", "keep", "logic"):
            return varying({}, role="random")
    if family == "product" and {"rows", "experts"} <= roles:
        call.report("rows_of_others", "rows of this replica, and a weight of this rank's experts")
    if _is_masked(call, given):
        return Sharding(PARTIAL)
    masks = family == "compare" or (family in ("logic", "keep", "move") and "mask" in roles)
    role = next((role for role in ("rows", "experts") if role in roles), "mask" if masks else "")
    dims: Dims | None = {}
    for at, dim, level in [(at, *each) for at, value in enumerate(given) for each in value.levels.items()]:
        longer = call.longer(at, dim)
        if (longer is None and family == "norm") or (family in ("along", "nll") and dim == _dim_along(call)):
            return _over_slices(call, given[at])
        if longer is None or (family == "place" and not longer.dims):
            dims = None
            continue
        _check_beside(call, given, longer.beside)
        if longer.dims:
            dims = dims if dims is None else dims | dict.fromkeys(longer.dims, level)
        elif family in ("sum", "product", "nll", "extreme"):
            return Sharding(PARTIAL, reduction=call.name.removeprefix("a") if family == "extreme" else "sum")
        elif family not in ("move", "look_up"):
            return _over_slices(call, given[at])
    if call.name in ("index", "index_select") or any(value.kind == VARYING and value.dims is None for value in given):
        dims = None
    return varying(dims, role=role)


def _check_beside(call: Call, given: Sequence[Sharding], beside: Iterable[tuple[int, int]]) -> None:
    """Report an equal input that meets slices of another as if it were one."""
    for other, dim in beside:
        value = given[other]
        taken = value.equal and value.role != "uniform" and call.inputs[other].shape[dim] > 1
        if taken and call.grad and call.axis in SUMMED and call.family != "place" and call.name not in ("cat", "stack"):
            call.report("taken_for_slice", str(value))


def _dim_along(call: Call) -> int:
    """Return the dim along which an op computes, from the end."""
    dims = call.inputs[0].dim()
    if call.family == "nll":
        return 1 - dims if dims > 1 else -1
    dim: int = call.arg(1, "dim", -1)
    return dim - dims if dim >= 0 else dim


def _over_slices(call: Call, value: Sharding) -> Sharding:
    if call.grad:
        call.report("over_slices", str(value), call.name.strip("_"))
    return value if call.outputs and call.outputs[0].shape == call.inputs[0].shape else varying()


def _cut(call: Call, value: Sharding) -> Sharding:
    """Return the type of slices of a dim, by numbers that may differ between the ranks."""
    x, out, name, levels = call.inputs[0], call.outputs[0], call.name, value.levels
    removed, padded = name in ("select", "unbind"), name == "constant_pad_nd"
    if padded:
        dims = [-1 - number // 2 for number, pad in enumerate(call.args[1]) if pad]
        dim = next((dim for dim in dims if dim in levels), 0)  # 0 is no dim from the end
    else:
        dim = call.arg(1 if removed or name == "slice" else 2, "dim", 0)
        dim = dim - x.dim() if dim >= 0 else dim
    if not (padded or removed) and out.shape[dim] == x.shape[dim]:
        return value
    if value.equal:  # by other numbers on another rank
        return varying({} if removed or padded else {dim: 0}) if call.differs else value
    if value.dims is None:
        return value
    if dim in levels:
        if call.axis == "context" and call.grad and not call.differs:
            call.report("tokens_of_part", str(value))
        if removed or (levels[dim] and out.shape[dim] % levels[dim]):
            return replace(value, dims=None)
        levels[dim] = levels[dim] if levels[dim] and out.shape[dim] > levels[dim] else 0
    return replace(value, dims={at + (removed and at < dim): level for at, level in levels.items()})


def _attention(call: Call, given: Sequence[Sharding]) -> Sharding:
    """Attention of (B, H, T, D): along the keys' tokens and the features."""
    q, k, v = given[:3]
    if {-2, -1} & k.levels.keys() or -1 in q.levels or -2 in v.levels:
        return _over_slices(call, k if {-2, -1} & k.levels.keys() else q)
    unknown = any(each.kind == VARYING and each.dims is None for each in (q, k, v))
    return varying(None if unknown else {**k.levels, **v.levels, **q.levels})


def _is_masked(call: Call, given: Sequence[Sharding]) -> bool:
    """Return True if each rank keeps its own elements of a value, so that the result is a term of a sum."""
    if call.name not in ("mul", "masked_fill", "where") or not call.outputs[0].is_floating_point():
        return False
    masks = [value for value in given if value.role == "mask" and value.kind == VARYING and not value.levels]
    others = [value for value in given if value.role != "mask"]
    filled = call.name != "masked_fill" or call.args[2] == 0 or isinstance(call.args[2], Tensor)
    return bool(masks and filled and others) and not any(value.levels for value in others)


def _of_terms(call: Call, given: Sequence[Sharding]) -> Sharding:
    """Return the type of a result of terms of sums, and report an op that is not linear in them."""
    term, family = next(value for value in given if value.kind == PARTIAL), call.family
    if family in _LINEAR or (family == "extreme" and term.reduction == call.name.removeprefix("a")):
        return term
    if family in ("add", "place"):
        return _added(call, term, given)
    factor = family in ("scale", "product") and not (call.name == "div" and given[0].kind != PARTIAL)
    if factor and term.reduction == "sum" and all(value.equal or value is term for value in given):
        return term
    if not call.grad:
        return varying({})
    call.report("not_linear" if term.reduction == "sum" else "not_extreme", str(term), call.name.strip("_"))
    return Sharding(since=call.here)


def _added(call: Call, term: Sharding, given: Sequence[Sharding]) -> Sharding:
    """Return the type of a sum of a term and others, which must be terms too or may be."""
    whole = [value for value in given if value.equal and value.role != "uniform"]
    slices = [value for value in given if value.levels]
    number = call.name in ("add", "sub", "rsub") and not isinstance(call.args[1], Tensor) and call.args[1] != 0
    if call.family == "place" or not call.grad or not (whole or slices or number):
        return term
    call.report("added_to_term", f"{term}, and {[*slices, *whole, 'a number'][0]}")
    return slices[0] if slices else Sharding(since=call.here)
