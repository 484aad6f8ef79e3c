"""Check of types: the forward pass of one rank of a grid of any size, without values, and what does not fit in it."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...base.nest import tensors_of
from ...base.torch_private import tree_map
from ...grid import Grid, layout_of
from ...grid.topology import AXES, Topology
from ...pipe.fields import item_of
from ...pipe.module import PipelineModule
from ..dry_run.values import OF_AUTOCAST, MetaValues, without_meta
from .group import listen, typed_grid
from .sharding import PARTIAL, VARYING
from .tracer import Finding, Tracer

Build = Callable[[Grid], PipelineModule]


class TypeCheck(NamedTuple):
    """Result of a check of types.

    Attributes:
        findings: what does not fit.
        ranks, layers: number of ranks of the grid, and of layers.
        ops: ops that were typed.
        seconds: time of the check.
    """

    findings: list[Finding]
    ranks: int
    layers: int
    ops: int
    seconds: float

    @property
    def holds(self) -> bool:
        """True if all types fit."""
        return not self.findings

    def as_json(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return self._asdict() | {"findings": [asdict(finding) for finding in self.findings]}


def check_types(build: Build, data: Callable[[], Any], axes: Mapping[str, int]) -> TypeCheck:
    """Type the forward pass of the last rank of a grid, in this process, on the meta device.

    Args:
        build: makes the model for a grid.
        data: returns batches; of the first microbatch the shapes count, and the values of small integer tensors.
        axes: sizes of the axes, by name: pipe, data, context, tensor, expert.

    Raises:
        ValueError: the sizes make no grid, or the model has fewer layers than stages.
        RuntimeError: this process has a process group already.
    """
    begun = time.monotonic()
    if axes.get("expert", 1) > 1 and max(axes.get("data", 1), axes.get("context", 1)) == 1:
        raise ValueError(
            f"expert={axes['expert']} needs replicas or parts that hold the experts: give data= or context="
        )
    sizes = {name: axes.get(name, 1) for name in AXES if name in axes or name != "context"}
    several = [name for name in ("data", "context", "tensor", "expert") if axes.get(name, 1) > 1]
    last = {name: size - 1 for name, size in sizes.items() if name != "pipe"}
    run = _TypedRanks(build, data, sizes, axes.get("expert", 1))
    noted: dict[str, Any] = {}
    for axis in several:
        if axis in last:
            other = Tracer((), {})
            run.trace(other, last | {axis: 0}, pipe=1)
            noted[axis] = other.noted
    if "expert" in several:
        noted["expert"] = noted["data" if "data" in noted else "context"]
    tracer = Tracer(several, noted)
    run.trace(tracer, last, sizes["pipe"])
    seconds = time.monotonic() - begun
    return TypeCheck(tracer.findings, math.prod(sizes.values()), run.layers, tracer.ops, seconds)


class _TypedRanks:
    """Forward passes of single ranks."""

    def __init__(self, build: Build, data: Callable[[], Any], sizes: dict[str, int], expert: int) -> None:
        self._build, self._data, self._sizes = build, data, sizes
        self._axes = {**sizes, "expert": expert}
        self.layers = 0
        self._shapes: dict[str, tuple[int, ...]] = {}  # of the parameters on one process, if slices are possible
        if max(self._axes["tensor"], expert) > 1:
            with _on_meta(), typed_grid(0, 1, {}) as grid:
                self._shapes = {name: tuple(each.shape) for name, each in build(grid).named_parameters()}

    def trace(self, tracer: Tracer, at: dict[str, int], pipe: int) -> None:
        """Run all stages of the ranks with these coordinates, one after the other, on a pipe axis of this size."""
        topology = Topology(expert=self._axes["expert"], **(self._sizes | {"pipe": pipe}))
        stage, placement, x = 0, [0], None
        while stage < len(placement):
            # Which rank holds the stage is known from the first model.
            rank = topology.ranks(**at, pipe=placement[stage])[0]
            with _on_meta(), typed_grid(rank, math.prod(topology.shape), self._axes | {"pipe": pipe}) as grid:
                model = self._build(grid)
                placement, self.layers = list(model.placement), len(model.layer_specs)
                listen(grid, tracer.collective)
                tracer.take(model)
                if tracer.others:
                    self._compare_shapes(tracer, model)
                model.run_hook = partial(_run_layer, tracer)
                taken = {name for spec in model.layer_specs for name in getattr(spec, "takes", ())}
                item = item_of(self._data()[0][0], taken)
                inputs, labels = _without_values(item.inputs), _without_values(item.labels)
                fields = {name: _without_values(item.field(name)) for name in taken}
                tracer.take_inputs([inputs, labels, *fields.values()])
                with tracer.run():
                    x = model.run_stage(stage, inputs if stage == 0 else x, fields)
                    if stage == len(placement) - 1:
                        tracer.layer = "loss_fn"
                        _judge_loss(tracer, model, model.loss(x, labels))
            stage += 1

    def _compare_shapes(self, tracer: Tracer, model: PipelineModule) -> None:
        """Report parameters that are slices on this rank, though their layouts say that they are whole."""
        sharded = "tensor" if self._axes["tensor"] > 1 else "expert"
        for name, parameter in model.named_parameters():
            whole, (owner, _, own_name) = layout_of(parameter).shape, name.rpartition(".")
            if self._shapes.get(name, whole) != whole:
                arrived = f"the shape {whole} as its whole, which is {self._shapes[name]} on one process"
                place = _place_of(type(model.get_submodule(owner)))
                tracer.keep("undeclared", sharded, owner, place, f"the parameter {own_name}", arrived)


def _run_layer(tracer: Tracer, stage: int, index: int, call: Any, value: Any) -> Any:
    tracer.layer = f"layers.{index} ({type(getattr(call, '__wrapped__', call)).__name__})"
    return call(value)


def _judge_loss(tracer: Tracer, model: PipelineModule, loss: Any) -> None:
    """Report a loss that is not whole on each rank of the tensor axis."""
    value = next((each for each in tensors_of(loss) if each.requires_grad), None)
    found = None if value is None or "tensor" not in tracer.axes else tracer.read(value)["tensor"]
    if found is not None and found.kind in (PARTIAL, VARYING):
        place = _place_of(model.loss_fn)
        tracer.keep("loss", "tensor", "loss_fn", place, "the backward pass", f"{found}, as the loss")


@contextmanager
def _on_meta() -> Iterator[None]:
    """Context in which torch runs without values, autocast too."""
    before = {name: getattr(torch, name) for name in OF_AUTOCAST}
    try:
        for name, function in before.items():
            setattr(torch, name, without_meta(function))
        with MetaValues(1.0):
            yield
    finally:
        for name, function in before.items():
            setattr(torch, name, function)


def _without_values(value: Any) -> Any:
    return tree_map(lambda each: each.to("meta") if isinstance(each, Tensor) else each, value)


def _place_of(code: Any) -> str:
    """Return file and line of a class or function, and its first line."""
    while hasattr(code, "func"):
        code = code.func
    if not inspect.isclass(code) and not inspect.isroutine(code):
        code = type(code)
    try:
        file, (lines, line) = inspect.getsourcefile(code), inspect.getsourcelines(code)
    except (OSError, TypeError):
        return getattr(code, "__name__", "")
    return f"{Path(file or '').name}:{line}: {lines[0].strip()}"
