"""Formulas of the bytes that one step sends on the data axis: ZeRO's, a gradient compressor's, ZeRO++'s."""

from __future__ import annotations

from collections import Counter

from ...base.formulas import zero_traffic
from ...zero.data_axis import ZeroDataAxis
from ...zero.protocols import Compressing
from ...zero.zeropp.traffic_formula import zeropp_formula


def traffic_formulas(data_axis: ZeroDataAxis, stage: int, passes: Counter[int]) -> dict[str, dict[str, float]]:
    """Return the bytes that each rank sends in one step: ``formula`` and ``uncompressed``, axis -> bytes.

    ``formula`` is the number of bytes with the configured compression or ZeRO++. ``uncompressed`` is the number by
    ZeRO's formula, if gradients were sent in the dtype in which they are accumulated.

    Args:
        data_axis: this rank's buckets, with the compressor or the collectives that reduce their gradients.
        stage: stage of ZeRO.
        passes: stage of the pipeline -> its backward passes in one step.
    """
    if data_axis.options.zeropp is not None:
        formula = zeropp_formula(data_axis, passes)
    elif isinstance(data_axis.exchange, Compressing):
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
    """Return ZeRO's bytes, axis -> bytes: ``base.formulas.zero_traffic``, summed over the buckets of a rank.

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
            stage if bucket.shard_axis.size > 1 else 0,
            weights=bucket.flat.numel * bucket.weights.element_size(),
            gradients=bucket.flat.numel * dtype.itemsize,
            backward_passes=sum(passes[stage] for stage in bucket.stages),
            trained=bucket.trained,
            partitioned=bucket.partitioned,
            reduces_every_backward=bucket.reduces_every_backward,
        )
        axis = bucket.shard_axis if bucket.sharded else bucket.axis
        volumes[axis.name] = volumes.get(axis.name, 0.0) + volume * (axis.size - 1) / axis.size
        if bucket.sharded and bucket.trained and (copies := bucket.copies) is not None:
            # The groups all-reduce the sums of a step.
            sent = 2 * bucket.owned_numel * dtype.itemsize * (copies.size - 1) / copies.size
            volumes[copies.name] = volumes.get(copies.name, 0.0) + sent
    return volumes
