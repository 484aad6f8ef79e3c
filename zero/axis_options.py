"""Options of ZeRO: stage, dtypes, and when and how much to communicate."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .offload import OffloadPlan
from .protocols import CommunicationSavings, MakeExchange


@dataclass(frozen=True, kw_only=True)
class ZeroOptions:
    """Options of the data axis.

    Attributes:
        stage: ZeRO stage, 0 to 3.
        shard_size: number of consecutive replicas that shard among themselves; None: all.
        weight_dtype: dtype of the parameters; None keeps the dtype of each.
        buffer_dtype: dtype of floating-point buffers; None: ``weight_dtype``, but for some names (``cast``).
        accumulation_dtype: dtype of gradients summed over microbatches, of master weights and of the optimizer's
            state; None is the parameters' own.
        communication_dtype: dtype in which gradients are summed over the data axis; None is ``accumulation_dtype``.
        low_precision_parameters: the parameters to which ``communication_dtype`` applies; None: all.
        prescale: factor applied to gradients before they are summed over the data axis. It is not undone here.
        divisor: number by which the optimizer's step divides the sums, beside the batch's weight: ``prescale``; and
            1 / replicas, if the mean over each replica's batch is summed over the replicas.
        reduce_every_backward: in stages 2 and 3, reduce after every backward pass; if False, gradients stay whole
            until the last backward pass of a step.
        reduce_scatter: reduce-scatter gradients; if False, all-reduce them and keep the owned range.
        allgather_partitions: all-gather new weights; if False, every rank broadcasts its range.
        overlap_comm: overlap collectives with computation; if False, wait for each where it starts.
        ignore_unused_parameters: allow steps in which a parameter gets no gradient; if False, that is an error.
        allgather_bucket_size: elements of new weights in flight at once, after a step; None: 2**22.
        persistence_threshold: in stage 3, parameters of at most so many elements are not sharded (0: all are).
        prefetch_bucket_size: in stage 3, elements of the next layers that are gathered ahead; None: the next layer.
        max_live_parameters: in stage 3, limit of the gathered elements. The running layer is always gathered; beyond
            the limit nothing is kept or prefetched. None: no limit.
        max_reuse_distance: in stage 3, keep a layer gathered if it runs again before so many elements of other
            layers have run.
        offload: what is kept in host memory or on disk.
        state: kind of the optimizer's state between two steps: ``bf16``, ``int8`` or ``int4``; None: the optimizer's.
        exchange: makes what combines the replicas' gradients in place of a plain sum, in stages 0 and 1; None: sum.
        zeropp: options of ZeRO++; None: off.
    """

    stage: int = 0
    shard_size: int | None = None
    weight_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    accumulation_dtype: torch.dtype | None = None
    communication_dtype: torch.dtype | None = None
    low_precision_parameters: Collection[Tensor] | None = None
    prescale: float = 1.0
    divisor: float = 1.0
    reduce_every_backward: bool = True
    reduce_scatter: bool = True
    allgather_partitions: bool = True
    overlap_comm: bool = True
    ignore_unused_parameters: bool = True
    allgather_bucket_size: int | None = None
    persistence_threshold: int = 0
    prefetch_bucket_size: int | None = None
    max_live_parameters: int | None = None
    max_reuse_distance: int = 0
    state: str | None = None
    offload: OffloadPlan = field(default_factory=OffloadPlan)
    exchange: MakeExchange | None = None
    zeropp: CommunicationSavings | None = None

    def sharding(self, replicas: int) -> int:
        """Return the stage in effect: 0 on a single replica, unless something is offloaded."""
        return self.stage if replicas > 1 or self.offload.portions else 0
