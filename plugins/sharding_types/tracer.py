"""Types of all tensors of one rank's forward pass: modes that see each op, border and collective, and type its results.

A tensor is known by its place in its storage, so that aliases have one type. What a rank computes from its own rank
shows in the numbers of its ops (the bounds of a slice, the start of an ``arange``), which are compared with those that
another rank of the axis has noted before at the same line.
"""

from __future__ import annotations

import linecache
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...base.foreign_tables import read_table
from ...base.nest import tensors_of
from ...base.torch_private import TorchDispatchMode, storage_id
from ...context.order import gather
from ...grid import layout_of
from ...grid.comm.axis import Axis
from ...grid.comm.regions import border
from ...pipe.module import PipelineModule
from ...tensor_parallel.column import column_linears
from ..dry_run.places import owner
from ..dry_run.values import known
from .borders import crossed
from .group import TypedGroup
from .rules import FAMILY, NUMBERED, SUMMED, Call, chosen, judged
from .sharding import CONSTANT, INVARIANT, PARTIAL, REPLICATED, VARYING, Sharding, varying

_TEXTS = read_table(__file__, "findings.toml")
_HERE = str(Path(__file__).parent)
Types = dict[str, Sharding]  # by axis
_Key = tuple[int, int, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Finding:
    """Op whose inputs do not fit.

    Attributes:
        axis: the axis.
        layer: name of the layer.
        place: file and line of the user's code, and the line.
        op: the op.
        arrived, missing, mend: the types of its inputs, what is missing, and what mends it.
    """

    axis: str
    layer: str
    place: str
    op: str
    arrived: str
    missing: str
    mend: str

    def __str__(self) -> str:
        return (
            f"{self.layer}, axis {self.axis}: {self.place}\n  {self.op} is given {self.arrived}\n"
            f"  missing: {self.missing}\n  mend: {self.mend}"
        )


class Tracer:
    """Types of one rank's tensors.

    Args:
        axes: the axes of several ranks.
        others: axis -> what another rank of this axis has noted; empty for a rank that only notes.

    Attributes:
        findings: ops whose inputs do not fit, the first of each line.
        noted: numbers of each op, by layer, line and how often this line has called it.
        layer: name of the layer that runs.
        ops: number of ops that were typed.
    """

    def __init__(self, axes: Sequence[str], others: Mapping[str, Mapping[Any, Any]]) -> None:
        self.axes, self.others = axes, others
        self.findings: list[Finding] = []
        self.noted: dict[Any, Any] = {}
        self.layer, self.ops = "", 0
        self._counts: Counter[Any] = Counter()
        self._types: dict[_Key, Types] = {}
        self._places: dict[int, list[_Key]] = {}
        self._kept: list[Any] = []  # so that no storage's number is used twice
        self._states: dict[int, str] = {}  # storages of parameters and buffers
        self._cuts: dict[_Key, int | None] = {}  # the dim along which a tensor is one of several pieces
        self._tracked: set[_Key] = set()  # tensors that need a gradient

    def run(self) -> AbstractContextManager[Any]:
        """Return the context in which ops are typed."""
        stack = ExitStack()
        apply = torch.autograd.Function.__dict__["apply"]
        typed = classmethod(lambda cls, *args: self.function(apply.__get__(None, cls), args))
        torch.autograd.Function.apply = typed  # type: ignore[assignment]
        stack.callback(setattr, torch.autograd.Function, "apply", apply)
        stack.enter_context(_TypedFunctions(self))
        stack.enter_context(_TypedOps(self))
        return stack

    # --------------------------------------------------------------------------------------------- what is known

    def take(self, model: PipelineModule) -> None:
        """Type the parameters and buffers of a model by their layouts."""
        for name, parameter in model.named_parameters():
            layout, types = layout_of(parameter), Types()
            for axis in self.axes:
                kind = REPLICATED
                if axis == "tensor":
                    kind = REPLICATED if layout.partial else INVARIANT
                types[axis] = Sharding(kind, parameter=name)
                if axis == "tensor" and layout.shard_dim is not None:
                    fused = len(layout.parts or ()) if len(set(layout.parts or ())) == 1 else 1
                    level = parameter.shape[layout.shard_dim] // fused if fused > 1 else 0
                    types[axis] = varying({layout.shard_dim - len(layout.shape): level}, parameter=name)
                elif axis in ("expert", "data") and layout.expert_dim is not None and "expert" in self.axes:
                    types[axis] = varying(role="experts" if axis == "expert" else "", parameter=name)
            self.write(parameter, types)
            self._states[storage_id(parameter.untyped_storage())] = f"parameter {name}"
        for name, buffer in model.named_buffers():
            self.write(buffer, {axis: Sharding() for axis in self.axes})
            self._states[storage_id(buffer.untyped_storage())] = f"buffer {name}"

    def take_inputs(self, values: Any) -> None:
        """Type a microbatch: rows of this replica, whole on the ranks of the other axes."""
        rows = varying(role="rows")
        for tensor in tensors_of(values):
            self.write(tensor, {axis: rows if axis in ("data", "expert") else Sharding() for axis in self.axes})

    def read(self, tensor: Tensor) -> Types:
        """Return the types of a tensor."""
        key = _key(tensor)
        found = self._types.get(key)
        if found is None:
            beside = [self._types[other] for other in self._places.get(key[0], ())]
            found = {axis: _any_of([types[axis] for types in beside]) for axis in self.axes}
            if not beside:
                found = self._source(tensor)
            self.write(tensor, found)
        return {axis: _with_gradient(tensor, axis, value) for axis, value in found.items()}

    def write(self, tensor: Tensor, types: Types, in_place: bool = False) -> None:
        """Set the types of a tensor; ``in_place``: its elements were written, and other views of them may exist."""
        key = _key(tensor)
        if key[0] not in self._places:
            self._places[key[0]] = []
            self._kept.append(tensor.untyped_storage())
        if key not in self._types:
            self._places[key[0]].append(key)
        self._types[key] = types
        if not in_place:
            return
        for other in self._places[key[0]]:
            if other != key:
                before = self._types[other]
                self._types[other] = {
                    axis: _written(before[axis], each, len(other[2]) == len(key[2])) for axis, each in types.items()
                }

    def _source(self, tensor: Tensor) -> Types:
        """Return the types of a tensor that no op has made: equal, unless its values differ on another rank."""
        values = known(tensor)
        note = None if values is None or values.numel() > 4096 else str(values.detach().reshape(-1).tolist())
        key = self._note("source", _lines()[0], note)
        return {
            axis: varying() if self.others.get(axis, {}).get(key, note) != note else Sharding() for axis in self.axes
        }

    # -------------------------------------------------------------------------------------------------- what runs

    def op(self, func: Any, full: str, args: Any, kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        """Run an op, and type its results.

        Args:
            func: runs the op on other tensors.
            full: the op's name in aten, with a ``_`` at the end if it writes its first argument.
            args, kwargs: its arguments.
            run: runs it.
        """
        self.ops += 1
        name, out = full.rstrip("_"), kwargs.get("out")
        mutates = full.endswith("_") and bool(args)
        plain = {word: value for word, value in kwargs.items() if word != "out"}
        inputs = [*tensors_of(list(args)), *tensors_of(list(plain.values()))]
        if full == "copy_" or (mutates and FAMILY.get(name) in ("create", "random")):
            inputs = inputs[1:]
        numbers = None
        if FAMILY.get(name) in NUMBERED:
            numbers = str([value for value in (*args, *kwargs.values()) if not tensors_of(value)])
        offsets, lines = [tensor.storage_offset() for tensor in inputs], _lines()
        key = self._note(name, lines[0], (numbers, offsets))
        given = [self.read(tensor) for tensor in inputs] if self.others else []
        result = run()
        if not self.others:
            return result
        outputs = tensors_of([result])
        needs = [torch.is_grad_enabled() and tensor.requires_grad for tensor in inputs]
        here = f"{name.strip('_')} in {_short(lines[1] or lines[0])}"
        types: Types = {}
        for axis in self.axes:
            their_numbers, their_offsets = self.others.get(axis, {}).get(key, (numbers, offsets))
            differs, report = their_numbers != numbers, self.report(axis, name)
            call = Call(func, name, args, plain, inputs, outputs, needs, axis, differs, here, report)
            for tensor, known_types, offset in zip(inputs, given, their_offsets):
                if offset != tensor.storage_offset() and known_types[axis].equal:
                    known_types[axis] = chosen(call, known_types[axis], self._cuts.get(_key(tensor)))
            types[axis] = judged(call, [known_types[axis] for known_types in given])
        places = [] if mutates else [_key(tensor) for tensor in inputs]
        for tensor in outputs:
            if _key(tensor) not in places:  # else it is a view of all elements, which has their types
                self.write(tensor, types, mutates or out is not None)
            if any(needs):
                self._tracked.add(_key(tensor))
            if name in ("split", "split_with_sizes", "unbind", "chunk"):
                dim = args[1 if name == "unbind" else 2] if len(args) > 1 + (name != "unbind") else 0
                self._cuts[_key(tensor)] = None if name == "unbind" else dim - (args[0].dim() if dim >= 0 else 0)
        if mutates and (state := self._states.get(storage_id(args[0].untyped_storage()))):
            self._changed_state(name, state, types)
        return result

    def function(self, apply: Callable[..., Any], args: Any) -> Any:
        """Run an autograd function, whose ops have typed its results but for their gradients."""
        inputs = tensors_of(list(args)) if self.others else []
        given = [(tensor.shape, self.read(tensor), tensor.requires_grad) for tensor in inputs]
        result = apply(*args)
        for tensor in tensors_of([result]) if self.others else ():
            if tensor.requires_grad:
                found = self.read(tensor)
                for axis, value in found.items():
                    of_inputs = [(shape, types[axis], needs) for shape, types, needs in given]
                    found[axis] = _of_function(value, tensor.shape, of_inputs)
                self.write(tensor, found)
        return result

    def border(
        self,
        types: Types,
        result: Tensor,
        forward: str,
        backward: str,
        x: Tensor,
        axis: Axis,
        dim: int | None = None,
        *_: Any,
        **__: Any,
    ) -> Tensor:
        """Type the result of a border; return it, as a tensor of its own."""
        dim = -1 if dim is None else dim
        result = result.clone() if forward == "copy" else result
        for name in {axis.name, *(["data"] if axis.name == "expert" else [])} & set(self.axes):
            dim = dim - x.dim() if dim >= 0 else dim
            report = self.report(name, f"{forward}_{backward}")
            types[name] = crossed(forward, backward, types[name], dim, report)
        self.write(result, types)
        return result

    def columns(self, outs: Sequence[Tensor], x: Tensor, weights: Any, axis: Axis, sequence: bool = False) -> None:
        """Type the results of column-parallel products."""
        if axis.name not in self.axes:
            return
        types, enters = self.read(x), ("gather", "reduce_scatter") if sequence else ("copy", "all_reduce")
        crossed(*enters, types[axis.name], 1 - x.dim(), self.report(axis.name, "_".join(enters)))
        for out, (weight, _) in zip(outs, weights, strict=True):
            kind = self.read(weight)[axis.name]
            rows = varying({-1: kind.levels.get(-2, 0)}) if kind.kind == VARYING else Sharding(REPLICATED)
            self.write(out, types | {axis.name: rows})

    def collective(self, name: str, group: TypedGroup, tensor: Tensor, output: Tensor) -> None:
        """Type the output of a collective that has no gradient."""
        before = self.read(tensor)
        over = [axis for axis in self.axes if axis in group.axis or group.axis == "world"]
        over += ["data"] if group.axis == "expert" and "data" in self.axes else []
        for axis in over:
            if name == "allreduce" and torch.is_grad_enabled() and _key(tensor) in self._tracked:
                self.report(axis, "all_reduce")("no_gradient", f"{before[axis]} that needs a gradient")
        known_type = Sharding() if name in ("allreduce", "broadcast", "all_gather_single") else varying()
        if output.dim() != tensor.dim() and name != "allreduce":
            before = {axis: each if each.kind != VARYING else varying(role=each.role) for axis, each in before.items()}
        self.write(output, {axis: known_type if axis in over else before[axis] for axis in self.axes}, True)

    def report(self, axis: str, op: str) -> Callable[..., None]:
        """Return the function that keeps a finding of an op, with the line that runs now."""

        def keep(kind: str, arrived: str, name: str = "") -> None:
            inner, user = _lines()
            self.keep(kind, axis, self.layer, _shown(user or inner), op, arrived, name)

        return keep

    def keep(self, kind: str, axis: str, layer: str, place: str, op: str, arrived: str, name: str = "") -> None:
        """Keep a finding of a kind of findings.toml, if it is the first of its line."""
        if not any((axis, layer, place) == (each.axis, each.layer, each.place) for each in self.findings):
            texts = (_TEXTS[kind][text].format(axis=axis, name=name) for text in ("missing", "mend"))
            self.findings.append(Finding(axis, layer, place, op, arrived, *texts))

    def _note(self, name: str, line: str, numbers: Any) -> Any:
        """Note the numbers of an op; return the key under which another rank has noted its own."""
        place = self.layer, name, line
        self._counts[place] += 1
        key = (place, self._counts[place])
        self.noted[key] = numbers
        return key

    def _changed_state(self, name: str, state: str, types: Types) -> None:
        for axis, value in types.items():
            if value.kind in (VARYING, PARTIAL):
                self.report(axis, name)("changed_state", f"{value}, for the {state}", state)


class _TypedOps(TorchDispatchMode):
    """Mode that types the results of ops."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op."""
        packet, kwargs = func.overloadpacket, kwargs or {}
        return self._tracer.op(packet, packet.__name__, args, kwargs, lambda: func(*args, **kwargs))


class _TypedFunctions(TorchFunctionMode):
    """Mode that types the results of borders, and of functions of torch that the meta device runs in another way."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function."""
        tracer, kwargs = self._tracer, kwargs or {}
        if not tracer.others:
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") == "rms_norm" and isinstance(args[0], Tensor):
            return tracer.op(func, "rms_norm", args, kwargs, lambda: func(*args, **kwargs))
        before = tracer.read(args[2]) if func is border else {}  # which it may overwrite
        result = func(*args, **kwargs)
        if func is border:
            return tracer.border(before, result, *args, **kwargs)
        if func is gather:
            x, axis, dim = args[0], args[1], kwargs.get("dim", args[3] if len(args) > 3 else 1)
            partial = kwargs.get("partial", len(args) > 4 and args[4])
            return tracer.border(
                tracer.read(x), result, "gather", "reduce_scatter" if partial else "split", x, axis, dim
            )
        if func is column_linears:
            tracer.columns(result, *args, **kwargs)
        return result


def _key(tensor: Tensor) -> _Key:
    place = storage_id(tensor.untyped_storage())
    return place, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())


def _with_gradient(tensor: Tensor, axis: str, value: Sharding) -> Sharding:
    """Return a type with the kind of gradient that a tensor can have."""
    if not value.equal or (tensor.requires_grad and (value.kind != CONSTANT or value.role == "uniform")):
        return value
    # Each replica's loss is a term of the sum.
    kind = INVARIANT if axis in SUMMED else REPLICATED
    return replace(value, kind=kind if tensor.requires_grad else CONSTANT)


def _of_function(value: Sharding, shape: Sequence[int], given: Sequence[tuple[Any, Sharding, bool]]) -> Sharding:
    """Return the type of an autograd function's result, sliced as an input of this shape (but for the last dim)."""
    if value.kind == VARYING:
        alike = [sharding for other, sharding, _ in given if sharding.kind == VARYING and other[:-1] == shape[:-1]]
        dims = [sharding.dims for sharding in alike if sharding.dims and -1 not in sharding.dims]
        return replace(value, dims=dims[0] if dims else value.dims)
    kinds = {sharding.kind for _, sharding, needs in given if needs}
    kind = next((kind for kind in (INVARIANT, REPLICATED) if kind in kinds), value.kind)
    return replace(value, kind=kind) if value.equal and value.role != "uniform" else value


def _any_of(values: Sequence[Sharding]) -> Sharding:
    """Return the type of elements of a storage, by the types of its other views."""
    for kind in (PARTIAL, VARYING):
        if found := [each for each in values if each.kind == kind]:
            return found[0] if kind == PARTIAL else varying(role=found[0].role)
    return values[-1] if values else Sharding()


def _written(before: Sharding, value: Sharding, same_dims: bool) -> Sharding:
    """Return the type of a tensor after some of its elements were written."""
    if value.equal:
        return before if not before.equal and before.kind != PARTIAL else value
    if value.kind == VARYING and not same_dims:
        return varying(role=value.role) if value.dims else value
    return value


def _lines() -> tuple[str, str]:
    """Return the place in triax or in the user's code that calls torch now, and the user's; "" if there is none."""
    frame, inner = sys._getframe(2), ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_HERE):
            if file.endswith("check_types.py"):
                break
        elif (whose := owner(file)) not in ("python", "dry run", "axis"):
            inner = inner or f"{file}:{frame.f_lineno}"
            if whose == "user":
                return inner, f"{file}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return inner, ""


def _short(place: str) -> str:
    return place.rpartition("/")[2]


def _shown(place: str) -> str:
    """Return file and line, and the line's code."""
    file, _, line = place.rpartition(":")
    return f"{_short(place)}: {linecache.getline(file, int(line or 0)).strip()}"
