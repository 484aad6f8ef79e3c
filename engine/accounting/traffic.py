"""Formulas of the bytes that one step sends on the data axis: ZeRO's, a gradient compressor's, ZeRO++'s."""

from __future__ import annotations

from collections import Counter

from ...pipe.program.program import Program
from ...plan.formulas import zero_traffic
from ...zero.compression.compressor import Compressor
from ...zero.data_axis import ZeroDataAxis
from ...zero.zeropp.gradient_reduce import QuantizedReduction
from ...zero.zeropp.weight_gather import WeightRoute


def traffic_formulas(data_axis: ZeroDataAxis, stage: int, program: Program, rank: int) -> dict[str, dict[str, float]]:
    """Return the bytes that each rank sends in one step: ``formula`` and ``uncompressed``, axis -> bytes.

    ``formula`` is the number of bytes with the configured compression or ZeRO++. ``uncompressed`` is the number by
    ZeRO's formula, if gradients were sent in the dtype in which they are accumulated.

    Args:
        data_axis: this rank's buckets, with the compressor or the collectives that reduce their gradients.
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
        name, replicas = data_axis.axis.name, data_axis.axis.size
        formula = {name: data_axis.exchange.formula() + weights * (replicas - 1) / replicas}
    else:
        formula = zero_formula(data_axis, stage, passes)
    return {"formula": formula, "uncompressed": zero_formula(data_axis, stage, passes, False)}


def zero_formula(
    data_axis: ZeroDataAxis, stage: int, passes: Counter[int], communication_dtype: bool = True
) -> dict[str, float]:
    """Return ZeRO's bytes, axis -> bytes: ``plan.formulas.zero_traffic``, summed over the buckets of a rank.

    Args:
        data_axis: this rank's buckets.
        stage: stage of ZeRO.
        passes: stage of the pipeline -> its backward passes in one step.
        communication_dtype: True if gradients are sent in the communication dtype, False if in the accumulation dtype.
    """
    volumes = {data_axis.axis.name: 0.0}
    for bucket in data_axis.buckets:
        dtype = bucket.communication_dtype if communication_dtype else bucket.owned_gradient.dtype
        volume = zero_traffic(
            stage,
            weights=bucket.flat.numel * bucket.weights.element_size(),
            gradients=bucket.flat.numel * dtype.itemsize,
            backward_passes=sum(passes[stage] for stage in bucket.stages),
            trained=bucket.trained,
            partitioned=bucket.partitioned,
            reduces_every_backward=bucket.reduces_every_backward,
        )
        name, replicas = bucket.axis.name, bucket.axis.size
        volumes[name] = volumes.get(name, 0.0) + volume * (replicas - 1) / replicas
    return volumes


def zeropp_formula(data_axis: ZeroDataAxis, passes: Counter[int]) -> dict[str, float]:
    """Return the bytes that each rank sends in one step under ZeRO++: axis -> bytes.

    The formulas are those of Wang et al. 2023, arXiv:2306.10209. For M bytes of fp16 weights in stage 3, per
    microbatch; each of N replicas sends (N-1)/N of these bytes:

    | collective | ZeRO | ZeRO++ |
    |---|---|---|
    | all-gather before the forward pass | M | M / 2, weights in 8 bits |
    | all-gather before the backward pass | M | M / 2, weights in 8 bits |
    | reduce-scatter of gradients | M | M / 4, gradients in 4 bits |

    The scales of the quantization blocks are added. Two options move bytes to other axes:

    - Secondary shards: the step's first all-gather is on ``data``, all others are on ``data within``.
    - Reduction in two hops, over hosts of L ranks: (L-1)/L of the bytes are sent on ``data within``. The rest is summed
      within the host, and one part per host is sent on ``data between``.

    Args:
        data_axis: this rank's buckets.
        passes: stage of the pipeline -> its backward passes in one step.
    """
    size = data_axis.axis.size
    name = data_axis.axis.name
    total: dict[str, float] = {name: 0.0}

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
            add(1, {name: numel * bucket.weights.element_size() * (size - 1) / size})
        if not bucket.trained:
            continue
        if isinstance(reduction, QuantizedReduction):
            reduced = reduction.sent(numel, bucket.communication_dtype)
        else:
            reduced = {name: numel * bucket.communication_dtype.itemsize * (size - 1) / size}
        add(runs if bucket.reduces_every_backward else 1, reduced)
    return total
