"""In which dtypes a model computes, accumulates and communicates, and fp16's loss scale."""

from __future__ import annotations

import logging

import torch
from torch import nn

from ..grid import Grid
from ..zero.mode import Mode
from ..zero.offload import Offload, Place
from ..zero.plus import Plus
from . import compression
from .autocast import autocast_dtype, narrow_gradients, scaling
from .config import Config, ConfigError, Fp16Config, OffloadConfig, ZeroConfig


def mode(config: Config, grid: Grid, module: nn.Module) -> Mode:
    """What the configuration asks of the grid's data axis, for the parameters of this module.

    With bf16 or fp16, weights are of that dtype, and fp32 holds the master weights, the optimizer's state and the
    gradients that are accumulated; they are reduced in fp32 too, unless ``communication_data_type`` says otherwise.
    """
    half, zero = half_dtype(config), config.zero_optimization
    narrow = narrow_gradients(config, module, grid)
    return Mode(
        stage=zero.stage,
        weights=half,
        accumulate=torch.float32 if half is not None else None,
        communicate=compression.communicate(config) if narrow is None else autocast_dtype(config),
        narrow=narrow,
        prescale=_prescale(config, grid.data.size),
        each=zero.reduce_each_microbatch,
        scatter=zero.reduce_scatter,
        gather=zero.allgather_partitions,
        overlap=zero.overlap_comm,
        together=zero.allgather_bucket_size,
        unused=zero.ignore_unused_parameters,
        persistence=zero.stage3_param_persistence_threshold or 0,
        prefetch=zero.stage3_prefetch_bucket_size,
        live=zero.stage3_max_live_parameters,
        reuse=zero.stage3_max_reuse_distance or 0,
        offload=_offload(zero),
        exchange=compression.exchange(config, module, grid),
        plus=_plus(zero, grid.data.size),
    )


def _prescale(config: Config, replicas: int) -> float:
    """What gradients are multiplied by before they are summed; a single replica sums nothing."""
    factor = config.gradient_predivide_factor * (replicas if config.prescale_gradients else 1)
    return 1.0 / factor if replicas > 1 else 1.0


def _plus(zero: ZeroConfig, replicas: int) -> Plus | None:
    """What of ZeRO++ acts in this stage; a single replica sends nothing.

    Raises:
        ConfigError: groups that do not divide the replicas.
    """
    third = zero.stage == 3
    # What stays whole to the end of the step is gathered once: there is nothing to keep a second shard for.
    once = zero.stage3_keep_gathered and zero.stage3_max_live_parameters is None
    plus = Plus(
        weights=zero.zero_quantized_weights and third,
        frozen=zero.zero_quantized_nontrainable_weights and third,
        gradients=zero.zero_quantized_gradients and zero.stage > 0,
        secondary=zero.zero_hpz_partition_size if third and not once else 1,
        host=zero.zero_hpz_partition_size if third else 1,
    )
    if replicas == 1 or not (plus.weights or plus.frozen or plus.gradients or plus.secondary > 1):
        return None
    try:
        plus.check(replicas)
    except ValueError as error:
        raise ConfigError(f"zero_optimization.zero_hpz_partition_size: {error}") from error
    return plus


def _offload(zero: ZeroConfig) -> Offload:
    states = zero.offload_optimizer
    parameters = zero.offload_param if zero.stage == 3 else OffloadConfig()  # below it, there are no shards of them
    return Offload(
        states=Place(states.device, states.nvme_path, states.pin_memory),
        parameters=Place(parameters.device, parameters.nvme_path, parameters.pin_memory),
        sub_group=zero.sub_group_size or Offload.sub_group,
        ahead=states.pipeline_read,
        behind=states.pipeline_write,
        always=zero.sub_group_size is not None,
    )


def dtype_of(name: str) -> torch.dtype:
    """By its name in the configuration: fp32, bf16, fp16."""
    return compression.DTYPES[name]


def half_dtype(config: Config) -> torch.dtype | None:
    """bf16 or fp16, if the configuration enables one."""
    return torch.bfloat16 if config.bf16.enabled else torch.float16 if config.fp16.enabled else None


def scaler(config: Config) -> LossScaler | None:
    """A new loss scale, if the configuration computes in float16."""
    section = scaling(config)
    return None if section is None else LossScaler(section)


class LossScaler:
    """fp16's loss scale: halved where gradients overflow, doubled after a while without. DeepSpeed's keys.

    A static scale (``loss_scale`` above 0) never moves; steps that overflow are skipped all the same.

    Attributes:
        scale: what the loss is multiplied by before the backward pass.
        skipped: the number of steps that overflowed.
    """

    def __init__(self, config: Fp16Config) -> None:
        self._config = config
        self.scale = float(config.loss_scale or 2**config.initial_scale_power)
        self.skipped = 0
        self._good = 0  # steps since the last overflow or doubling
        self._patience = config.hysteresis

    def update(self, overflow: bool, report: bool) -> None:
        """After each step, whether it overflowed anywhere on the grid; ``report`` on the rank that may say so."""
        before = self.scale
        if not overflow:
            self._good += 1
            if self._config.consecutive_hysteresis:
                self._patience = self._config.hysteresis
            if not self._config.loss_scale and self._good % self._config.loss_scale_window == 0:
                self.scale *= 2
                self._patience = self._config.hysteresis
            return
        self.skipped += 1
        self._good = 0
        if not self._config.loss_scale:
            if self._patience > 1:
                self._patience -= 1
            else:
                self.scale = max(self.scale / 2, self._config.min_loss_scale)
        if report:
            logging.getLogger("triax").warning(
                "overflow in fp16: step skipped on every rank (%d so far); loss scale %g -> %g",
                self.skipped,
                before,
                self.scale,
            )
