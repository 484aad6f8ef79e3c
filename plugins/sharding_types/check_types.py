"""Check of types: the forward pass of one rank of a grid of any size, without values, and all that does not fit in it."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
    sizes = {name: axes.get(name, 1) for name in AXES if name in axes or name != "context"}
    topology = Topology(expert=axes.get("expert", 1), **sizes)
    several = [name for name in ("data", "context", "tensor", "expert") if axes.get(name, 1) > 1]
    last = {name: size - 1 for name, size in sizes.items() if name != "pipe"}
    run = _Run(build, data, topology, {**sizes, "expert": topology.expert}, last)
    noted: dict[str, Any] = {}
    for axis in several:
        if axis in last:
            other = Tracer((), {})
            run.trace(other, last | {axis: 0})
            noted[axis] = other.noted
    if "expert" in several:
        noted["expert"] = noted["data" if "data" in noted else "context"]
    tracer = Tracer(several, noted)
    if several:
        run.trace(tracer, last)
    findings = run.undeclared() + tracer.findings
    return TypeCheck(findings, math.prod(sizes.values()), run.layers, len(tracer.noted), time.monotonic() - begun)


class _Run:
    """Forward passes of single ranks."""

    def __init__(
        self, build: Build, data: Callable[[], Any], topology: Topology, axes: dict[str, int], last: dict[str, int]
    ) -> None:
        self._build, self._data, self._topology, self._axes, self._last = build, data, topology, axes, last
        self.layers = 0

    def trace(self, tracer: Tracer, at: dict[str, int]) -> None:
        """Run all stages of the ranks with these coordinates, one after the other."""
        stage, stages, x = 0, 1, None
        while stage < stages:
            # Which rank holds the stage is known from the first model.
            rank = self._topology.ranks(**at, pipe=self._placement[stage] if stage else 0)[0]
            with _on_meta(), typed_grid(rank, self._topology_size, self._axes) as grid:
                model = self._build(grid)
                self._placement, stages, self.layers = model.placement, len(model.placement), len(model.layer_specs)
                listen(grid, tracer.collective)
                tracer.take(model)
                model.run_hook = lambda _, index, call, value: self._layer(tracer, model, index, call, value)
                taken = {name for spec in model.layer_specs for name in getattr(spec, "takes", ())}
                item = item_of(self._data()[0][0], taken)
                inputs, labels = _without_values(item.inputs), _without_values(item.labels)
                fields = {name: _without_values(item.field(name)) for name in taken}
                tracer.take_inputs([inputs, labels, *fields.values()])
                with tracer.run():
                    x = model.run_stage(stage, inputs if stage == 0 else x, fields)
                    if stage == stages - 1:
                        tracer.layer = "loss_fn"
                        self._judge_loss(tracer, model, model.loss(x, labels))
            stage += 1

    def _layer(self, tracer: Tracer, model: PipelineModule, index: int, call: Any, value: Any) -> Any:
        name = type(getattr(call, "__wrapped__", call)).__name__
        tracer.layer = f"layers.{index} ({name})"
        return call(value)

    def _judge_loss(self, tracer: Tracer, model: PipelineModule, loss: Any) -> None:
        value = next((each for each in tensors_of(loss) if each.requires_grad), None)
        if value is None or not tracer.others:
            return
        for axis, found in tracer.read(value).items():
            if axis == "tensor" and found.kind in (PARTIAL, VARYING):
                place = _place_of(model.loss_fn)
                tracer.findings.append(
                    Finding(
                        axis,
                        "loss_fn",
                        place,
                        "the backward pass",
                        f"{found}, as the loss",
                        "each tensor rank has another loss, where all need the whole one",
                        "all_reduce_copy(loss, grid.tensor), or triax.tensor_parallel.vocab_parallel_cross_entropy",
                    )
                )

    def undeclared(self) -> list[Finding]:
        """Return a finding for each parameter of which a rank has a slice that its layout does not tell of."""
        if self._axes.get("tensor", 1) == 1 and self._axes.get("expert", 1) == 1:
            return []
        shapes: dict[str, Any] = {}
        with _on_meta(), typed_grid(0, 1, {}) as grid:
            shapes = {name: tuple(parameter.shape) for name, parameter in self._build(grid).named_parameters()}
        findings = []
        for pipe in range(self._axes["pipe"]):
            rank = self._topology.ranks(**self._last, pipe=pipe)[0]
            with _on_meta(), typed_grid(rank, self._topology_size, self._axes) as grid:
                model = self._build(grid)
                for name, parameter in model.named_parameters():
                    whole = layout_of(parameter).shape
                    if name in shapes and shapes[name] != whole:
                        owner = model.get_submodule(name.rpartition(".")[0])
                        sharded = next(axis for axis in ("tensor", "expert") if self._axes.get(axis, 1) > 1)
                        findings.append(
                            Finding(
                                sharded,
                                name.rpartition(".")[0],
                                _place_of(type(owner)),
                                f"the parameter {name.rpartition('.')[2]}",
                                f"the shape {whole} as its whole, which is {shapes[name]} on one process",
                                "its layout: triax takes the slice of each rank for equal copies",
                                "Layout(whole shape, shard_dim=...) for a slice of the tensor axis, "
                                "Layout(whole shape, expert_dim=...) for experts, by set_layout or sharded_parameter",
                            )
                        )
        return findings

    @property
    def _topology_size(self) -> int:
        return math.prod(size for name, size in self._axes.items() if name != "expert")


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
