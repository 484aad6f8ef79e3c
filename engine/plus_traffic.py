"""What ZeRO++ sends on the data axis in a step, as its paper counts it, beside what ZeRO would send without."""

from __future__ import annotations

from typing import Any

from ..pipe.passes import Program
from ..zero.quantized import QuantizedReduction
from ..zero.replicas import Replicas
from ..zero.secondary import PlusGatherer
from .accounts import backward_passes


def with_plus(report: dict[str, Any], replicas: Replicas, program: Program, rank: int) -> dict[str, Any]:
    """``Engine.traffic_report`` under ZeRO++: its formula, and the one without as ``uncompressed``."""
    if replicas.mode.plus is None:
        return report
    return {"uncompressed": report["formula"], **report, "formula": plus_formula(replicas, program, rank)}


def plus_formula(replicas: Replicas, program: Program, rank: int) -> dict[str, float]:
    """Bytes from each rank, by axis: Wang et al. 2023 (arXiv:2306.10209), with the scales of blocks.

    Of M bytes of fp16 weights ZeRO's stage 3 sends 3 M a microbatch, and (N-1)/N of it from each of N replicas: gathers
    before a forward and a backward pass, and a reduction. Quantised, a gather is M / 2 and a reduction M / 4 (of
    gradients that are fp32, an eighth). With secondary shards, one gather a step is over ``data``, and the others are
    ``data within``. A reduction in two hops over hosts of L ranks sends (L-1)/L of its bytes within, and of what is
    left one part a host, ``data between``. Where weights stay whole from one pass to the next it is less, as in
    ``accounts.data_axis_formula``.
    """
    backwards, size = backward_passes(program, rank), replicas.axis.size
    total: dict[str, float] = {"data": 0.0}

    def add(times: float, sent: dict[str, float]) -> None:
        for axis, count in sent.items():
            total[axis] = total.get(axis, 0.0) + times * count

    for bucket in replicas.buckets:
        runs = sum(backwards.get(s, 0) for s in bucket.stages)
        numel, reduction = bucket.flat.numel, bucket._axis
        if bucket.gathered and isinstance(replicas.gatherer, PlusGatherer):
            first, further = replicas.gatherer.sent(bucket)
            add(1, first)
            add(2 * runs - 1, further)
        elif bucket.trained:
            add(1, {"data": numel * bucket.weights.element_size() * (size - 1) / size})
        if not bucket.trained:
            continue
        if isinstance(reduction, QuantizedReduction):
            reduced = reduction.sent(numel, bucket.communicate)
        else:
            reduced = {"data": numel * bucket.communicate.itemsize * (size - 1) / size}
        add(runs if bucket.each else 1, reduced)
    return total
