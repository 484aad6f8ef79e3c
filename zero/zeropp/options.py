"""Options of ZeRO++: quantized weights (qwZ), quantized gradients (qgZ), secondary shards (hpZ).

Wang et al. 2023 (arXiv:2306.10209).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...grid import Axis
from ...grid.grid import Grid
from ..flat import require_equal_groups
from ..protocols import GatherRoute, GradientBucket
from ..shard_groups import inner, outer
from .blocks import BLOCK, scale_dtype
from .gradient_reduce import QuantizedReduction
from .host_groups import ranks_per_host
from .weight_gather import WeightRoute


@dataclass(frozen=True)
class ZeroPlusPlus:
    """Options of ZeRO++, which implement ``CommunicationSavings`` of ``zero/protocols.py``.

    Attributes:
        weights: in stage 3, all-gather weights quantized to 8 bits (qwZ).
        frozen: in stage 3, all-gather weights that are not trained quantized to 8 bits, even without ``weights``.
        gradients: in stages 1 to 3, reduce gradients quantized to 4 bits (qgZ).
        secondary: in stage 3, size of the groups of consecutive replicas (usually those of one host) that keep a
            second copy of the weights, sharded over the group (hpZ). The copy is stored at the first gather of a step,
            and later gathers of the step read it. 1 switches hpZ off.
        host: number of consecutive replicas on each host, by which qgZ splits its reduce-scatter into two hops; with
            1, the number is detected.
    """

    weights: bool = False
    frozen: bool = False
    gradients: bool = False
    secondary: int = 1
    host: int = 1

    def check(self, replicas: int) -> None:
        """Check that the number of replicas is a multiple of ``secondary`` and of ``host``.

        Raises:
            ValueError: a size does not divide the number of replicas; the message names the sizes that do.
        """
        for size in (self.secondary, self.host):
            require_equal_groups(replicas, size)

    def fitting(self, stage: int, replicas: int, dtype: torch.dtype | None, keep: bool) -> ZeroPlusPlus | None:
        """Check these options for a ZeRO stage, and return them, or None if no option is switched on.

        Args:
            stage: ZeRO stage.
            replicas: number of replicas.
            dtype: dtype in which the user asks to sum gradients; None if the user names none.
            keep: True if gathered weights are kept until the end of a step.

        Raises:
            ValueError: an option has no effect in this stage, ``gradients`` and ``dtype`` contradict each other, or a
                size does not divide the number of replicas.
        """
        if stage < 3 and (self.weights or self.secondary != 1):
            raise ValueError(
                f"quantized_weights and hpz_partition_size are about gathering weights, and in stage {stage} they are "
                "whole: set stage=3, or leave them out"
            )
        if keep and self.secondary != 1:
            raise ValueError(
                "keep_gathered gathers weights once a step, so hpz_partition_size saves nothing: leave one of them out"
            )
        if stage == 0 and self.gradients:
            raise ValueError(
                "quantized_gradients is for the reduce-scatter of gradients, but stage 0 shards nothing: set stage=1"
            )
        if self.gradients and dtype is not None:
            raise ValueError(
                "quantized_gradients and communication_dtype both set the dtype in which gradients are sent: give one"
            )
        if self == ZeroPlusPlus() or replicas == 1:
            return None
        self.check(replicas)
        return self

    def quantizes(self, dtype: torch.dtype, trained: bool) -> bool:
        """Return True if weights of this dtype (floats of 16 bits or more) are gathered quantized to 8 bits."""
        wanted = self.weights or (self.frozen and not trained)
        return wanted and dtype.is_floating_point and dtype.itemsize > 1

    def kept(self, numel: int, dtype: torch.dtype, trained: bool) -> float:
        """Return the bytes of a rank's secondary shard of ``numel`` weights, without padding."""
        size = float(dtype.itemsize)
        if self.quantizes(dtype, trained):
            size = 1 + scale_dtype(dtype).itemsize / BLOCK
        return numel * size / self.secondary

    def gather_routes(self, buckets: Sequence[GradientBucket], axis: Axis, grid: Grid) -> list[GatherRoute]:
        """Make the quantized or hierarchical all-gather of each bucket's weights in stage 3. Collective."""
        within = inner(grid, self.secondary, " gather") if self.secondary > 1 else None
        return [
            WeightRoute(bucket, axis, within, self.quantizes(bucket.weights.dtype, bucket.trained))
            for bucket in buckets
        ]

    def replace_reductions(self, buckets: Sequence[GradientBucket], grid: Grid, plain: bool) -> None:
        """Replace the buckets' reduce-scatter by one that quantizes gradients to 4 bits. Collective."""
        if not self.gradients:
            return
        if not plain:
            raise ValueError(
                "quantized gradients (zero_quantized_gradients) are sent in 4 bits, but another dtype or compression "
                "is given for them too: leave one of the two out"
            )
        host = self.host if self.host > 1 else ranks_per_host(grid)
        hops: tuple[Axis, Axis] | tuple[None, None] = (None, None)
        if 1 < host < grid.data_context.size:
            hops = inner(grid, host, " reduce"), outer(grid, host, " reduce")
        reduction = QuantizedReduction(grid.data_context, *hops)
        for bucket in buckets:
            if bucket.trained and bucket.communication_dtype.is_floating_point:
                bucket.reduction = reduction
