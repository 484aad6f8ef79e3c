"""Check of a model on grids: which axis changes a number, where it does first, and what usually does that.

One process is the reference. It runs twice, from another state of torch's generator, to see whether the model is
deterministic, and once with its microbatches in another order, to see whether one changes the next. Then each axis runs
alone, and then several together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from ..grid import Grid
from ..grid.agreement.hang_watch import is_ours
from ..pipe.fields import item_of
from ..pipe.module import PipelineModule
from .deferral import not_deferred
from .equality import Build, Data, Step, Steps, difference, reference_of, sizes_of, steps_of
from .grids import Composition
from .kept_bytes import kept_bytes
from .pool import RankFailure, run_ranks
from .recording import LOSS, ModuleCall, OpCall, first_difference, first_op, record, record_ops

_IN_TRAINING = (
    "only training differs: dropout whose masks do not follow the shards, as those of triax's Dropout do, or another "
    "layer that acts in training alone"
)
# What usually makes a number differ on an axis alone.
_CAUSES = {
    "tensor": "a mean or a norm over a shard, whole values in a sharded loss or a shard in a whole one, or randomness "
    "that differs between the ranks",
    "data": "a loss that depends on the number of rows, or a layer whose values depend on the batch, such as "
    "BatchNorm. If the loss covers the rows of all replicas together, give --over-replicas (over_replicas=True)",
    "pipe": "a value that layers share besides their inputs and outputs, such as an attribute or a cache",
    "expert": "rows that do not come back to their places, or a weight that the combination leaves out",
    "context": "a mean over the tokens of a part, positions that start again in each part, or attention within a part",
}


@dataclass(frozen=True)
class CheckRow:
    """Result of one run.

    Attributes:
        what: the run in words.
        holds: True if all numbers are those of one process.
        difference: the first number that differs; "" if none does.
        where: the first module or code that computes something else, or the parameter's factor; "" if unknown.
        cause: what usually does that; "" if unknown.
        notes: what is no fault and worth knowing, as parameters without a gradient.
        sent: axis -> bytes that rank 0 sent in the first step, without those by which the ranks agree on a step.
        formula: axis -> bytes that ZeRO's paper counts for the step.
    """

    what: str
    holds: bool
    difference: str = ""
    where: str = ""
    cause: str = ""
    notes: tuple[str, ...] = ()
    sent: Mapping[str, float] = field(default_factory=dict)
    formula: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return asdict(self)


def check(
    build: Build,
    data: Data,
    axes: Sequence[str] = ("pipe", "data", "tensor"),
    ranks: int = 4,
    timeout: float = 120,
    rtol: float = 1e-10,
    over_replicas: bool = False,
    **options: Any,
) -> Iterator[CheckRow]:
    """Compare a model on grids with one process, and yield a row for each run.

    Args:
        build, data: as for ``assert_equals_one_process``.
        axes: axes to try, of ``pipe``, ``data``, ``context``, ``tensor`` and ``expert`` (the experts of 2 replicas):
            each alone with 2 ranks, then several together as far as ``ranks`` suffice.
        ranks: number of ranks, at most.
        timeout: seconds that a run may take.
        rtol: largest difference of a tensor, relative to its largest element.
        over_replicas: as for ``assert_equals_one_process``.
        options: options of ``triax.Engine`` for every run, as for ``assert_equals_one_process``.
    """
    alone = partial(run_ranks, 1, timeout=timeout)
    try:
        layers, microbatches = alone(sizes_of, build, data)[0]
        reference = reference_of(build, data, options, timeout, over_replicas)
        wanted = reference(Composition())
        (again,) = alone(_reseeded, build, data, options)
        (notes,) = alone(_notes, build, data, wanted[0])
        straight, turned = alone(_turned, build, data, options)[0]
    except RankFailure as failure:
        yield CheckRow("one process", False, failure.first.summary, _last_place(failure.first.text))
        return
    if text := _compared([again], wanted, 0.0):
        cause = "randomness that no seed keys, as torch's default generator"
        yield CheckRow("one process, twice", False, text, cause=cause)
        return
    yield CheckRow("one process, twice", True, notes=notes)
    if text := difference(turned, straight, rtol):
        cause = "a state that one microbatch leaves for the next, or a mean over microbatches of different weights"
        yield CheckRow("microbatches in another order", False, text, cause=cause)
    else:
        yield CheckRow("microbatches in another order", True)
    failed: set[str] = set()
    untried = {axis: why for axis in axes if (why := _cannot_run(axis, ranks, layers, microbatches))}
    for name, why in untried.items():
        yield CheckRow(f"axis {name}", False, f"not run: {why}")
    for at, axis in _runs([axis for axis in axes if axis not in untried], ranks):
        if axis is None and failed:
            yield CheckRow(str(at), False, "not run, as an axis alone differs", cause="see the rows above")
            continue
        row = _row(build, data, at, axis, options, reference(at), rtol, timeout)
        if not row.holds and axis is not None:
            failed.add(axis)
        yield row


def layer_costs(build: Build, data: Data, timeout: float = 120) -> tuple[str, dict[str, int]]:
    """Measure the first step on one process.

    Returns:
        The profile of parameters, FLOPs and times of each layer, as a text; and layer -> bytes that it keeps of a
        microbatch for the backward pass.

    Raises:
        RankFailure: one process cannot train the model.
    """
    return run_ranks(1, _measured, build, data, timeout=timeout)[0]


def _measured(build: Build, data: Data) -> tuple[str, dict[str, int]]:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "profile.txt"
        steps_of(build, data, Composition(), None, {"monitor": {"profile": {"step": 0, "file": str(file)}}})
        text = file.read_text()
    model, inputs, _, fields = _first_microbatch(build, data, Composition(), True)
    return text, kept_bytes(model, inputs, fields)


def _cannot_run(axis: str, ranks: int, layers: int, microbatches: int) -> str:
    """Return why an axis cannot have 2 ranks, and what to change; "" if it can."""
    if ranks < 2:
        return f"an axis needs 2 ranks, and ranks={ranks}. Give 2 or more"
    if axis == "pipe" and layers < 2:
        return "two stages need a model of at least 2 layers"
    if axis in ("data", "expert") and microbatches % 2:
        return f"2 replicas cannot share a batch of {microbatches} microbatches. Give an even number"
    return ""


def _runs(axes: Sequence[str], ranks: int) -> Iterator[tuple[Composition, str | None]]:
    """Yield compositions, each with its one axis, or None for several: all pairs, and all axes, that fit."""
    for axis in axes:
        sizes = (("data", 2), ("expert", 2)) if axis == "expert" else ((axis, 2),)
        yield Composition(sizes), axis
        if axis == "pipe":
            yield Composition(((axis, 2),), "zb-h1"), axis
        if axis == "data":
            yield Composition(((axis, 2),), stage=3), axis
    usable = [axis for axis in axes if axis != "expert"]
    for count in range(2, min(len(usable), ranks.bit_length() - 1) + 1):
        for chosen in combinations(usable, count):
            yield Composition(tuple((axis, 2) for axis in chosen), stage=1), None


def _row(
    build: Build,
    data: Data,
    at: Composition,
    axis: str | None,
    options: Mapping[str, Any],
    wanted: Steps,
    rtol: float,
    timeout: float,
) -> CheckRow:
    """Run one composition, and compare it with one process."""
    try:
        steps = run_ranks(at.ranks, steps_of, build, data, at, None, options, timeout=timeout)
    except RankFailure as failure:
        first = failure.first
        return CheckRow(
            str(at), False, f"rank {first.rank} {_verb(first.kind)}: {first.summary}", _last_place(first.text)
        )
    text = _compared(steps, wanted, rtol)
    if not text:
        step = steps[0][0]
        sent = {name: size for name, size in step.sent.items() if name != "world"}
        return CheckRow(str(at), True, sent=sent, formula=step.formula)
    where = cause = ""
    if axis in ("tensor", "context"):
        trains = "the loss differs" in text  # and the loss of an evaluation does not
        (calls_of_one,) = run_ranks(1, _recorded, build, data, Composition(), trains, timeout=timeout)
        parts = run_ranks(at.ranks, _recorded, build, data, at, trains, timeout=timeout)
        where, module = first_difference(calls_of_one, parts, rtol)
        if not where and "the loss of an evaluation" in text:
            where, module = f"{LOSS}, as no module before it differs", LOSS
        if module:
            (ops,) = run_ranks(1, _recorded_ops, build, data, Composition(), trains, module, timeout=timeout)
            ops_of_ranks = run_ranks(at.ranks, _recorded_ops, build, data, at, trains, module, timeout=timeout)
            op, cause = first_op(ops, ops_of_ranks, rtol)
            where += f"; first op: {op}" if op else ""
        if module == LOSS:
            return CheckRow(str(at), False, text, where, cause or _CAUSES[axis])
    if axis is not None and "the loss differs" in text:
        return CheckRow(str(at), False, text, where, cause or _IN_TRAINING)
    return CheckRow(str(at), False, text, where, cause or _cause(steps, wanted, axis, at, bool(where)))


def _compared(found: Sequence[Steps], wanted: Steps, rtol: float) -> str:
    """Return the first difference of any rank, or ""."""
    for rank, steps in enumerate(found):
        for number, (step, own) in enumerate(zip(steps, wanted, strict=True)):
            if text := difference(step, own, rtol):
                return f"step {number}, rank {rank}: {text}"
    return ""


def _cause(found: Sequence[Steps], wanted: Steps, axis: str | None, at: Composition, forward: bool) -> str:
    """Return what usually makes numbers differ so: from ratios of gradients, else from the axis."""
    if axis is None:
        return "each axis alone is right: a collective over the wrong axis, or over all ranks"
    size = dict(at.axes)[axis]
    gradients, own = found[0][0].gradients, wanted[0].gradients
    factors = {name: _factor(gradients[name], own[name]) for name in own if name in gradients}
    off = {name: factor for name, factor in factors.items() if factor != 1.0}
    if not forward and off and all(factor is not None for factor in off.values()):
        known = {factor for factor in off.values() if factor is not None}
        if len(known) == 1:
            (factor,) = known
            names = f"{len(off)} of {len(own)} gradients, first {next(iter(off))}, are {factor:g} times one process's"
            if abs(factor - size) < 1e-6:
                return f"{names}: counted by each of {size} {axis} ranks, as a sum in a backward pass that comes twice"
            if abs(factor * size - 1) < 1e-6:
                return f"{names}: divided once too often by the {size} {axis} ranks, or the sum over them is missing"
            return names
    if not forward and off and axis == "tensor":
        return (
            f"the forward pass is right, and {len(off)} of {len(own)} gradients are not, first {next(iter(off))}: a "
            "gradient of a weight that is whole on each rank is not summed over the ranks, or an input enters sharded "
            "layers without triax.tensor_parallel's copy region"
        )
    return _CAUSES[axis]


def _factor(found: Tensor, wanted: Tensor) -> float | None:
    """Return the number by which one tensor is the other times; None if there is none."""
    if found.shape != wanted.shape:
        return None
    largest = wanted.abs().max() if wanted.numel() else wanted.new_zeros(())
    if not largest > 0:
        return 1.0
    factor = float((found * wanted).sum() / wanted.square().sum())
    if (found - factor * wanted).abs().max() > 1e-8 * largest:
        return None
    return 1.0 if abs(factor - 1) < 1e-9 else round(factor, 9)


def _notes(build: Build, data: Data, step: Step) -> tuple[str, ...]:
    """Return what one process shows of a model's gradients."""
    notes = []
    if missing := [name for name, gradient in step.gradients.items() if not bool(gradient.any())]:
        notes.append(f"no gradient in the first step: {_listed(missing)}")
    model, inputs, labels, fields = _first_microbatch(build, data, Composition(), True)
    at_once = not_deferred(model, inputs, labels, fields)
    if at_once:
        matrices = sum(parameter.dim() > 1 and parameter.requires_grad for parameter in model.parameters())
        notes.append(
            f"zero-bubble schedules defer the gradients of {matrices - len(at_once)} of {matrices} matrices, and not "
            f"of {_listed(at_once)}"
        )
    return tuple(notes)


def _listed(names: Sequence[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


def _reseeded(build: Build, data: Data, options: Mapping[str, Any]) -> Steps:
    """Train on one process from another state of the default generator."""
    torch.manual_seed(1234)
    return steps_of(build, data, Composition(), None, options)


def _turned(build: Build, data: Data, options: Mapping[str, Any]) -> tuple[Step, Step]:
    """Train a step on one process with the microbatches as they are, and in the opposite order.

    Dropout is switched off, because its masks depend on a sample's place in the batch.
    """

    def still(grid: Grid) -> PipelineModule:
        model = build(grid)
        module: Any
        for module in model.modules():
            if "Dropout" in type(module).__name__ and hasattr(module, "p"):
                module.p = 0.0
        return model

    straight = steps_of(still, lambda: data()[:1], Composition(), None, options)
    turned = steps_of(still, lambda: [data()[0][::-1]], Composition(), None, options)
    return straight[0], turned[0]


def _recorded(build: Build, data: Data, at: Composition, trains: bool) -> list[ModuleCall]:
    """Return the calls of the modules for the first microbatch, in training or in evaluation."""
    model, inputs, _, fields = _first_microbatch(build, data, at, trains)
    return record(model, inputs, fields)


def _recorded_ops(build: Build, data: Data, at: Composition, trains: bool, module: str) -> list[OpCall]:
    """Return the ops of a module's code, or of the loss function's, for the first microbatch."""
    return record_ops(*_first_microbatch(build, data, at, trains), module)


def _first_microbatch(
    build: Build, data: Data, at: Composition, trains: bool
) -> tuple[PipelineModule, Any, Any, dict[str, Any]]:
    """Return (model in training or in evaluation, inputs, labels, fields) on this rank of a grid."""
    axes: dict[str, Any] = dict(at.axes)
    model = build(Grid(**axes))
    taken = {name for spec in model.layer_specs for name in getattr(spec, "takes", ())}
    item = item_of(data()[0][0], taken)
    return model.train(trains), item.inputs, item.labels, {name: item.field(name) for name in taken}


def _verb(kind: str) -> str:
    return {"raised": "raised", "died": "died", "stuck": "did not end"}.get(kind, kind)


def _last_place(text: str) -> str:
    """Return the last line of a traceback that names a file of the user; "" if none does."""
    lines = [line for line in re.findall(r'File ".+", line .+', text) if not is_ours(line.split('"')[1])]
    return lines[-1] if lines else ""
