"""ZeRO's options for a grid and a module, from ``options.zero``, ``options.precision`` and ``options.reduction``."""

from __future__ import annotations

import torch
from torch import nn

from ...base.dtypes import dtype_of
from ...base.option_error import Note, OptionError
from ...grid.grid import Grid
from ...options.engine import EngineOptions
from ...options.named import Optimizer
from ...options.reduction import GradientReduction
from ...options.zero import Offload, Zero
from ...zero.axis_options import ZeroOptions
from ...zero.data_axis import ZeroDataAxis
from ...zero.flat import require_equal_groups
from ...zero.offload import OffloadPlan, OffloadTarget
from ...zero.zeropp.options import ZeroPlusPlus
from .compression import make_exchange
from .precision import communication_dtype, low_precision_parameters


def zero_options(options: EngineOptions, grid: Grid, module: nn.Module) -> ZeroOptions:
    """Return the options of the grid's data axis for the parameters of a module. Collective over the grid.

    With bf16 or fp16, weights have that dtype. Master weights, optimizer state and accumulated gradients are fp32
    (unless ``precision.master_weights`` is False), in which gradients are reduced too by default.

    Raises:
        OptionError: an option does not fit the module or the number of replicas.
    """
    zero, precision, data = options.zero, options.precision, grid.data_context.size
    if zero.shard_size is not None and data > 1:
        try:
            require_equal_groups(data, zero.shard_size)
        except ValueError as error:
            raise OptionError("zero.shard_size", reason=str(error)) from error
    low_precision = low_precision_parameters(options, module, grid)
    kind = options.optimizer.state if isinstance(options.optimizer, Optimizer) else None
    prescale = _prescale(options.reduction, data)
    return ZeroOptions(
        stage=zero.known_stage,
        shard_size=zero.shard_size,
        weight_dtype=dtype_of(precision.weights),
        buffer_dtype=dtype_of(precision.buffers),
        accumulation_dtype=torch.float32 if precision.half and precision.master_weights else None,
        communication_dtype=communication_dtype(options, low_precision),
        low_precision_parameters=low_precision,
        prescale=prescale,
        divisor=prescale / (grid.replicas if options.reduction.op == "sum" else 1),
        reduce_every_backward=zero.reduce_each_microbatch,
        reduce_scatter=zero.reduce_scatter,
        allgather_partitions=zero.allgather_partitions,
        overlap_comm=zero.overlap_comm,
        allgather_bucket_size=zero.allgather_bucket_size,
        ignore_unused_parameters=zero.allow_unused,
        persistence_threshold=zero.persistence_threshold,
        prefetch_bucket_size=zero.prefetch_bucket_size,
        max_live_parameters=zero.max_live_parameters,
        max_reuse_distance=zero.max_reuse_distance,
        offload=_offload(zero, kind is not None),
        state=kind,
        exchange=make_exchange(options, module, grid),
        zeropp=_zeropp(zero, data),
    )


def one_replica_note(zero: Zero, grid: Grid) -> Note | None:
    """Return a note if options shard gradients or weights over replicas, and the grid has one replica; else None."""
    size = zero.hpz_partition_size
    if grid.data_context.size > 1 or zero.stage not in (2, 3):
        return None
    if zero.stage == 2 or size == 1:
        offloads = zero.stage == 3 and zero.offload_parameters.device != "none"  # which takes effect on one replica too
        if grid.size == 1 or offloads:
            return None
        text = f"{zero.stage} shards nothing, because the grid's {grid.size} ranks are one replica"
        return Note("zero.stage", text)
    return Note(
        "",
        f"<zero.hpz_partition_size> {size} does nothing on one replica, which has all weights; on more replicas, their "
        f"number must be a multiple of {size}",
    )


def unsharded_note(data_axis: ZeroDataAxis) -> Note | None:
    """Return a note if stage 3 shards none of this rank's weights, because all are below the threshold; else None."""
    options, buckets = data_axis.options, data_axis.buckets
    shards = max((bucket.shard_axis.size for bucket in buckets), default=1)
    if options.stage < 3 or shards == 1 or any(bucket.partitioned for bucket in buckets):
        return None
    largest = max(member.parameter.numel() for bucket in buckets for member in bucket.members)
    return Note(
        "",
        f"stage 3 of ZeRO keeps all weights whole on every replica: none has more than <zero.persistence_threshold> = "
        f"{options.persistence_threshold:,} elements (the largest has {largest:,}); a threshold of 0 shards all",
    )


def _prescale(reduction: GradientReduction, data: int) -> float:
    """Return the factor of gradients before they are summed over ``data`` replicas; 1 on a single replica."""
    factor = reduction.predivide * (data if reduction.prescale else 1)
    return 1.0 / factor if data > 1 else 1.0


def _zeropp(zero: Zero, data: int) -> ZeroPlusPlus | None:
    """Return the options of ZeRO++ that act in this stage; None: none do, or a single replica sends nothing.

    Raises:
        OptionError: ``hpz_partition_size`` does not divide the data axis.
    """
    stage3 = zero.stage == 3
    # Weights that stay whole to the end of the step are gathered once: a second shard would not be used.
    once = zero.keep_gathered and zero.max_live_parameters is None
    zeropp = ZeroPlusPlus(
        weights=zero.quantized_weights and stage3,
        frozen=zero.quantized_frozen_weights and stage3,
        gradients=zero.quantized_gradients and zero.stage != 0,
        secondary=zero.hpz_partition_size if stage3 and not once else 1,
        host=zero.hpz_partition_size if stage3 else 1,
    )
    if data == 1 or not (zeropp.weights or zeropp.frozen or zeropp.gradients or zeropp.secondary > 1):
        return None
    try:
        zeropp.check(data)
    except ValueError as error:
        raise OptionError("zero.hpz_partition_size", reason=str(error)) from error
    return zeropp


def _offload(zero: Zero, packed: bool) -> OffloadPlan:
    """Return the places of tensors; state that is ``packed`` in fewer bits is unpacked one sub-group after another."""
    states = zero.offload_optimizer
    parameters = zero.offload_parameters if zero.stage == 3 else Offload()  # weights have shards in stage 3 only
    return OffloadPlan(
        states=OffloadTarget(states.device, states.path, states.pin_memory),
        parameters=OffloadTarget(parameters.device, parameters.path, parameters.pin_memory),
        sub_group_size=zero.sub_group_size or OffloadPlan.sub_group_size,
        pipeline_read=states.pipeline_read,
        pipeline_write=states.pipeline_write,
        always=zero.sub_group_size is not None or packed,
    )
