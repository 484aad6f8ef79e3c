"""Formulas of the bytes that one step sends on the data axis: ZeRO's, a gradient compressor's, ZeRO++'s."""

from __future__ import annotations

from collections import Counter

from ...pipe.program.program import Program
from ...plan.formulas import zero_traffic
from ...zero.compression.compressor import Compressor
from ...zero.data_axis import ZeroDataAxis
from ...zero.zeropp.gradient_reduce import QuantizedReduction
from ...zero.zeropp.weight_gather import WeightRoute


def traffic_formulas(
    data_axis: ZeroDataAxis, replicas: int, stage: int, program: Program, rank: int
) -> dict[str, dict[str, float]]:
    """Return the bytes that each rank sends in one step: ``formula`` and ``uncompressed``, axis -> bytes.

    ``formula`` is the number of bytes with the configured compression or ZeRO++. ``uncompressed`` is the number by
    ZeRO's formula, if gradients were sent in the dtype in which they are accumulated.

    Args:
        data_axis: this rank's buckets, with the compressor or the collectives that reduce their gradients.
        replicas: size of the data axis.
        stage: stage of ZeRO.
        program: the program of one step.
        rank: position on the pipe axis.
    """
    passes = Counter(op.stage for op in program.ops[rank] if op.kind in "BW")  # stage -> its backward passes
    if data_axis.options.zeropp is not None:
        formula = zeropp_formula(data_axis, passes)
    elif isinstance(data_axis.exchange, Compressor):
        trained = [bucket for bucket in data_axis.buckets if bucket.trained] if stage else []
        weights = sum(bucket.flat.numel * bucket.weights.element_size() for bucket in trained)
        formula = {"data": data_axis.exchange.formula() + weights * (replicas - 1) / replicas}
    else:
        formula = {"data": zero_formula(data_axis, replicas, stage, passes)}
    return {"formula": formula, "uncompressed": {"data": zero_formula(data_axis, replicas, stage, passes, False)}}


def zero_formula(
    data_axis: ZeroDataAxis, replicas: int, stage: int, passes: Counter[int], communication_dtype: bool = True
) -> float:
    """Return ZeRO's bytes: ``plan.formulas.zero_traffic``, summed over the buckets of a rank.

    Args:
        data_axis: this rank's buckets.
        replicas: size of the data axis.
        stage: stage of ZeRO.
        passes: stage of the pipeline -> its backward passes in one step.
        communication_dtype: True if gradients are sent in the communication dtype, False if in the accumulation dtype.
    """
    volume = 0.0
    for bucket in data_axis.buckets:
        dtype = bucket.communication_dtype if communication_dtype else bucket.owned_gradient.dtype
        volume += zero_traffic(
            stage,
            weights=bucket.flat.numel * bucket.weights.element_size(),
            gradients=bucket.flat.numel * dtype.itemsize,
            backward_passes=sum(passes[stage] for stage in bucket.stages),
            trained=bucket.trained,
            partitioned=bucket.partitioned,
            reduces_every_backward=bucket.reduces_every_backward,
        )
    return volume * (replicas - 1) / replicas


def zeropp_formula(data_axis: ZeroDataAxis, passes: Counter[int]) -> dict[str, float]:
    """Return ZeRO++'s bytes by axis: Wang et al. 2023 (arXiv:2306.10209), with the scales of quantization blocks.

    Of M bytes of fp16 weights, ZeRO's stage 3 sends 3 M per microbatch, and (N-1)/N of it from each of N replicas: two
    all-gathers, before the forward and the backward pass, and a reduce-scatter. Quantized, an all-gather is M / 2 and a
    reduce-scatter M / 4 (of fp32 gradients, an eighth). With secondary shards one all-gather per step is on ``data``
    and the others are on ``data within``. A reduction in two hops over hosts of L ranks sends (L-1)/L of its bytes on
    ``data within``, and of the rest one part per host on ``data between``. It is less where weights stay gathered from
    one pass to the next, as in ``plan.formulas.zero_traffic``.
    """
    size = data_axis.axis.size
    total: dict[str, float] = {"data": 0.0}

    def add(times: float, sent: dict[str, float]) -> None:
        for axis, count in sent.items():
            total[axis] = total.get(axis, 0.0) + times * count

    for bucket in data_axis.buckets:
        runs = sum(passes[stage] for stage in bucket.stages)
        numel, reduction = bucket.flat.numel, bucket.reduction
        route = None if data_axis.gatherer is None else data_axis.gatherer.routes.get(bucket)
        if isinstance(route, WeightRoute):
            first, further = route.sent()
            add(1, first)
            add(2 * runs - 1, further)
        elif bucket.trained:
            add(1, {"data": numel * bucket.weights.element_size() * (size - 1) / size})
        if not bucket.trained:
            continue
        if isinstance(reduction, QuantizedReduction):
            reduced = reduction.sent(numel, bucket.communication_dtype)
        else:
            reduced = {"data": numel * bucket.communication_dtype.itemsize * (size - 1) / size}
        add(runs if bucket.reduces_every_backward else 1, reduced)
    return total
