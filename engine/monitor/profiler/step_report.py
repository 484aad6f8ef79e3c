"""Report of ``flops_profiler`` about one step of an engine: the head lines, and the module tree of the whole model."""

from __future__ import annotations

from typing import NamedTuple

from ....grid import Grid
from .. import format as units
from .tree_report import ModuleNode, merged, tree


class RankProfile(NamedTuple):
    """Measurements of one rank, in seconds.

    Attributes:
        entries: one entry for each module on this rank.
        params: number of elements of this rank's parameters.
        forward, backward: seconds of one microbatch's forward and backward pass on this rank. ``backward`` is None if
            there was no backward pass.
        update: seconds of the optimizer step.
        step: seconds of the complete training step.
    """

    entries: list[ModuleNode]
    params: int
    forward: float
    backward: float | None
    update: float
    step: float


def whole_model(grid: Grid, everyone: list[RankProfile]) -> ModuleNode:
    """Return the module tree of the whole model. Operations of stages and shards add up; replicas count once."""
    return tree(merged([[profile.entries for profile in shards] for shards in _first_replica(grid, everyone)]))


def head(
    grid: Grid, everyone: list[RankProfile], root: ModuleNode, batch: tuple[int, int, int], factor: float
) -> list[tuple[str, str]]:
    """Return the head lines of the report as (label, value). Values of one rank are those of rank 0.

    Args:
        grid: the ranks.
        everyone: profile of each rank.
        root: the whole model.
        batch: samples per step, samples per microbatch, microbatches per step.
        factor: forward passes that a backward pass recomputes (``recompute_fwd_factor``).
    """
    samples, micro, accumulation = batch
    first = everyone[0]
    here = tree(first.entries).flops
    model = sum(max(profile.forward for profile in shards) for shards in _first_replica(grid, everyone))
    both = None if first.backward is None else first.forward + first.backward
    step_flops = (3 + factor) * root.flops * accumulation * grid.data.size
    return [
        ("world size:", str(grid.size)),
        ("data parallel size:", str(grid.data.size)),
        ("model parallel size (tensor):", str(grid.tensor.size)),
        ("pipeline stages (pipe):", str(grid.pipe.size)),
        ("batch size per GPU (a microbatch):", str(micro)),
        ("microbatches a step:", str(accumulation)),
        ("params per GPU (rank 0):", units.count(first.params)),
        ("params of model:", units.count(root.params)),
        ("fwd MACs per GPU (rank 0):", units.count(here / 2, "MACs")),
        ("fwd flops per GPU (rank 0):", units.count(here)),
        ("fwd MACs of model, one microbatch:", units.count(root.macs, "MACs")),
        ("fwd flops of model, one microbatch:", units.count(root.flops)),
        (f"flops of a step = {3 + factor:g} * fwd flops * microbatches * replicas:", units.count(step_flops)),
        ("fwd latency (rank 0):", units.duration(first.forward)),
        ("fwd latency of all stages:", units.duration(model)),
        ("bwd latency (rank 0):", "-" if first.backward is None else units.duration(first.backward)),
        ("fwd FLOPS per GPU = fwd flops per GPU / fwd latency:", units.rate(here, first.forward)),
        (
            f"bwd FLOPS per GPU = {2 + factor:g} * fwd flops per GPU / bwd latency:",
            units.rate((2 + factor) * here, first.backward),
        ),
        (
            f"fwd+bwd FLOPS per GPU = {3 + factor:g} * fwd flops per GPU / (fwd+bwd latency):",
            units.rate((3 + factor) * here, both),
        ),
        ("step latency (the update):", units.duration(first.update)),
        ("iter latency:", units.duration(first.step)),
        ("samples/second:", f"{samples / first.step:.4g}"),
    ]


def _first_replica(grid: Grid, everyone: list[RankProfile]) -> list[list[RankProfile]]:
    """Return the profiles of the first replica's ranks, by position on the pipe axis, then on the tensor axis."""
    pipe, tensor = range(grid.pipe.size), range(grid.tensor.size)
    return [[everyone[grid.topology.rank(pipe=p, data=0, tensor=t)] for t in tensor] for p in pipe]
