"""Formula of the bytes that one step sends under ZeRO++."""

from __future__ import annotations

from collections import Counter

from ..data_axis import ZeroDataAxis
from .gradient_reduce import QuantizedReduction
from .weight_gather import WeightRoute


def zeropp_formula(data_axis: ZeroDataAxis, passes: Counter[int]) -> dict[str, float]:
    """Return the bytes that each rank sends in one step under ZeRO++: axis -> bytes.

    The formulas are from Wang et al. 2023, arXiv:2306.10209. The table has the bytes of each collective, per
    microbatch, for M bytes of fp16 weights in stage 3. Each of N replicas sends (N-1)/N of these bytes:

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
