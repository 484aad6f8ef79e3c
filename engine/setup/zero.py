"""ZeRO's options, from the sections ``zero_optimization``, ``bf16``, ``fp16`` and ``torch_autocast``."""

from __future__ import annotations

import torch
from torch import nn

from ...config.schema import Config
from ...config.zero import OffloadConfig, ZeroConfig
from ...grid.dtypes import dtype_of
from ...grid.errors import ConfigError
from ...grid.grid import Grid
from ...zero.data_axis import ZeroDataAxis
from ...zero.offload import Offload, OffloadTarget
from ...zero.options import ZeroOptions
from ...zero.zeropp.options import ZeroPlusPlus
from .compression import communication_dtype, make_exchange
from .precision import autocast_dtype, low_precision_parameters, weight_dtype


def zero_options(config: Config, grid: Grid, module: nn.Module) -> ZeroOptions:
    """Return the options of the grid's data axis for the parameters of a module. Collective over the grid.

    With bf16 or fp16, weights have that dtype. Master weights, optimizer state and accumulated gradients are fp32
    (unless ``bf16_master_weights_and_grads`` is set), in which gradients are reduced too by default.

    Raises:
        ConfigError: a key does not fit the module or the number of replicas.
    """
    half, zero, data = weight_dtype(config), config.zero_optimization, grid.data_context.size
    low_precision = low_precision_parameters(config, module, grid)
    return ZeroOptions(
        stage=zero.stage,
        weight_dtype=half,
        buffer_dtype=None if config.data_types.buffer_dtype is None else dtype_of(config.data_types.buffer_dtype),
        accumulation_dtype=None if half is None or config.bf16.bf16_master_weights_and_grads else torch.float32,
        communication_dtype=communication_dtype(config) if low_precision is None else autocast_dtype(config),
        low_precision_parameters=low_precision,
        prescale=_prescale(config, data),
        divisor=_prescale(config, data) / (grid.replicas if config.gradient_allreduce_op == "sum" else 1),
        reduce_every_backward=zero.reduce_each_microbatch,
        reduce_scatter=zero.reduce_scatter,
        allgather_partitions=zero.allgather_partitions,
        overlap_comm=zero.overlap_comm,
        allgather_bucket_size=zero.allgather_bucket_size,
        ignore_unused_parameters=zero.ignore_unused_parameters,
        persistence_threshold=zero.stage3_param_persistence_threshold or 0,
        prefetch_bucket_size=zero.stage3_prefetch_bucket_size,
        max_live_parameters=zero.stage3_max_live_parameters,
        max_reuse_distance=zero.stage3_max_reuse_distance or 0,
        offload=_offload(zero),
        exchange=make_exchange(config, module, grid),
        zeropp=_zeropp(zero, data),
    )


def one_replica_note(zero: ZeroConfig, data: int) -> str | None:
    """Return a note if a second shard of the weights is asked for, and one replica has all weights; else None."""
    size = zero.zero_hpz_partition_size
    if data > 1 or zero.stage < 3 or size == 1:
        return None
    return (
        f"zero_optimization.zero_hpz_partition_size {size} does nothing on one replica, which has all weights; on more "
        f"replicas, their number must be a multiple of {size}"
    )


def unsharded_note(data_axis: ZeroDataAxis) -> str | None:
    """Return a note if stage 3 shards none of this rank's weights, because all are below the threshold; else None."""
    options, buckets = data_axis.options, data_axis.buckets
    if options.stage < 3 or data_axis.axis.size == 1 or not buckets or any(bucket.partitioned for bucket in buckets):
        return None
    largest = max(member.parameter.numel() for bucket in buckets for member in bucket.members)
    return (
        f"stage 3 of ZeRO keeps all weights whole on every replica: none has more than "
        f"stage3_param_persistence_threshold = {options.persistence_threshold:,} elements (the largest has "
        f"{largest:,}); a threshold of 0 shards all"
    )


def _prescale(config: Config, data: int) -> float:
    """Return the factor of gradients before they are summed over ``data`` replicas; 1 on a single replica."""
    factor = config.gradient_predivide_factor * (data if config.prescale_gradients else 1)
    return 1.0 / factor if data > 1 else 1.0


def _zeropp(zero: ZeroConfig, data: int) -> ZeroPlusPlus | None:
    """Return the options of ZeRO++ that act in this stage; None: none do, or a single replica sends nothing.

    Raises:
        ConfigError: ``zero_hpz_partition_size`` does not divide the data axis.
    """
    stage3 = zero.stage == 3
    # Weights that stay whole to the end of the step are gathered once: a second shard would not be used.
    once = zero.stage3_keep_gathered and zero.stage3_max_live_parameters is None
    zeropp = ZeroPlusPlus(
        weights=zero.zero_quantized_weights and stage3,
        frozen=zero.zero_quantized_nontrainable_weights and stage3,
        gradients=zero.zero_quantized_gradients and zero.stage > 0,
        secondary=zero.zero_hpz_partition_size if stage3 and not once else 1,
        host=zero.zero_hpz_partition_size if stage3 else 1,
    )
    if data == 1 or not (zeropp.weights or zeropp.frozen or zeropp.gradients or zeropp.secondary > 1):
        return None
    try:
        zeropp.check(data)
    except ValueError as error:
        raise ConfigError(f"zero_optimization.zero_hpz_partition_size: {error}") from error
    return zeropp


def _offload(zero: ZeroConfig) -> Offload:
    states = zero.offload_optimizer
    parameters = zero.offload_param if zero.stage == 3 else OffloadConfig()  # weights have shards in stage 3 only
    return Offload(
        states=OffloadTarget(states.device, states.nvme_path, states.pin_memory),
        parameters=OffloadTarget(parameters.device, parameters.nvme_path, parameters.pin_memory),
        sub_group_size=zero.sub_group_size or Offload.sub_group_size,
        pipeline_read=states.pipeline_read,
        pipeline_write=states.pipeline_write,
        always=zero.sub_group_size is not None,
    )
