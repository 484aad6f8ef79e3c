"""The configuration as triax's own options, and the key of each option."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ....base.option_error import OptionError
from ....options.base import Options, declared
from ....options.batch import Batch
from ....options.checkpoints import Checkpoints
from ....options.compilation import Compile
from ....options.engine import EngineOptions
from ....options.local_updates import LocalSGD
from ....options.lora import Lora
from ....options.monitoring import CommunicationLog, Histograms, Monitoring, Profile, Trace, Wandb
from ....options.named import GradientCompression, LRSchedule
from ....options.precision import LossScale, Precision
from ....options.recomputation import Recomputation
from ....options.reduction import GradientReduction
from ....options.schedule import OffloadActivations, ScheduleOptions
from ....options.sparse_attention import SparseAttention
from ....options.tuning import Tuning
from ....options.zero import LeafModules, Offload, OffloadOptimizer, Zero
from .monitoring import MonitorConfig
from .optimizer_names import native_optimizer
from .schema import Config

S = TypeVar("S", bound=Options)

_ZERO = {  # option of Zero -> key of zero_optimization, where the names differ
    "bucket_size": "reduce_bucket_size",
    "allow_unused": "ignore_unused_parameters",
    "keep_gathered": "stage3_keep_gathered",
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "persistence_threshold": "stage3_param_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
    "leaf_modules": "leaf_module",
    "offload_parameters": "offload_param",
    "quantized_weights": "zero_quantized_weights",
    "quantized_frozen_weights": "zero_quantized_nontrainable_weights",
    "quantized_gradients": "zero_quantized_gradients",
    "hpz_partition_size": "zero_hpz_partition_size",
}
KEYS = {  # option -> key
    **dict.fromkeys(("batch", "precision", "reduction"), Config.TITLE),  # their keys are in no section
    "batch.size": "train_batch_size",
    "batch.microbatch": "train_micro_batch_size_per_gpu",
    "batch.microbatches": "gradient_accumulation_steps",
    "batch.counted": "managed_gradient_accumulation",
    "batch.labels": "pipeline.labels",
    "optimizer.arguments": "optimizer.params",
    "lr_scheduler": "scheduler",
    "lr_scheduler.arguments": "scheduler.params",
    "schedule": "pipeline",
    "schedule.name": "pipeline.schedule",
    "zero": "zero_optimization",
    "zero.offload_optimizer.path": "zero_optimization.offload_optimizer.nvme_path",
    "zero.offload_parameters.path": "zero_optimization.offload_param.nvme_path",
    **{f"zero.{name}": f"zero_optimization.{key}" for name, key in _ZERO.items()},
    "precision.weights": "bf16.enabled or fp16.enabled",
    "precision.master_weights": "bf16.bf16_master_weights_and_grads",
    "precision.buffers": "data_types.buffer_dtype",
    "precision.autocast": "torch_autocast",
    "precision.loss_scale": "fp16",
    "precision.loss_scale.fixed": "fp16.loss_scale",
    "precision.loss_scale.initial_power": "fp16.initial_scale_power",
    "precision.loss_scale.window": "fp16.loss_scale_window",
    "precision.loss_scale.minimum": "fp16.min_loss_scale",
    "clip": "gradient_clipping",
    "reduction.op": "gradient_allreduce_op",
    "reduction.dtype": "communication_data_type",
    "reduction.low_precision_modules": "torch_autocast.lower_precision_safe_modules",
    "reduction.prescale": "prescale_gradients",
    "reduction.predivide": "gradient_predivide_factor",
    "compression": "gradient_compression",
    "recompute": "activation_checkpointing",
    "recompute.groups": "activation_checkpointing.number_checkpoints",
    "recompute.layers": "activation_checkpointing.checkpointable_layers",
    "recompute.contiguous": "activation_checkpointing.contiguous_memory_optimization",
    "recompute.synchronize": "activation_checkpointing.synchronize_checkpoint_boundary",
    "checkpoint.folder": "checkpoint.dir",
    "checkpoint.background": "checkpoint.async",
    "monitor.print_every": "steps_per_print",
    "monitor.json": "json_monitor",
    "monitor.tensorboard": "tensorboard",
    "monitor.csv": "csv_monitor",
    "monitor.wandb": "wandb",
    "monitor.histograms": "histograms",
    "monitor.breakdown": "wall_clock_breakdown",
    "monitor.trace": "timeline",
    "monitor.profile": "flops_profiler",
    "monitor.profile.step": "flops_profiler.profile_step",
    "monitor.profile.recompute_factor": "flops_profiler.recompute_fwd_factor",
    "monitor.profile.depth": "flops_profiler.module_depth",
    "monitor.profile.file": "flops_profiler.output_file",
    "monitor.communication": "comms_logger",
    "monitor.communication.operations": "comms_logger.prof_ops",
    "monitor.communication.callers": "comms_logger.debug",
    "monitor.memory": "memory_breakdown",
    "monitor.state": "dump_state",
    "monitor.peak_tflops": "peak_tflops",
    "monitor.log_level": "log_level",
    "tuning": "autotuning",
    "tuning.least": "autotuning.min_train_micro_batch_size_per_gpu",
    "tuning.most": "autotuning.max_train_micro_batch_size_per_gpu",
    "tuning.sizes": "autotuning.num_tuning_micro_batch_sizes",
    "tuning.first_step": "autotuning.start_profile_step",
    "tuning.last_step": "autotuning.end_profile_step",
    "tuning.results": "autotuning.results_dir",
    "drop_last": "dataloader_drop_last",
    # methods of an engine
    "set_last_microbatch": "set_gradient_accumulation_boundary",
    "set_batch_size": "set_train_batch_size",
    "save_weights": "save_16bit_model",
}


def key_of(path: str) -> str:
    """Return the key of an option: ``zero.stage`` is ``zero_optimization.stage``."""
    if path in KEYS:
        return KEYS[path]
    section, _, last = path.rpartition(".")
    if section in ("optimizer", "lr_scheduler") and last != "type":
        return f"{key_of(section)}.params.{last}"
    return f"{key_of(section)}.{last}" if section else path


def options_of(config: Config) -> EngineOptions:
    """Return the options of a configuration.

    The batch sizes of ``elasticity`` depend on the number of replicas: ``batch_of`` has them.

    Raises:
        OptionError: options contradict each other; ``key_of`` spells them.
    """
    scheduler, optimizer, lora, sparse = config.scheduler, config.optimizer, config.lora, config.sparse_attention
    compiled, tuning = _read(Compile, "compile", config), _read(Tuning, "tuning", config)
    return EngineOptions(
        batch=_batch(config),
        optimizer=None if optimizer is None else native_optimizer(optimizer.type, optimizer.params),
        lr_scheduler=None if scheduler is None else LRSchedule(scheduler.type, **scheduler.params),
        schedule=_read(
            ScheduleOptions,
            "schedule",
            config,
            value=None,
            chunks=None,
            limit=None,
            pairs=None,
            offload=OffloadActivations(),
        ),
        zero=_zero(config),
        precision=_precision(config),
        clip=config.gradient_clipping or None,
        nan_loss=config.nan_loss,
        reduction=_reduction(config),
        compression=_compression(config),
        recompute=_read(
            Recomputation, "recompute", config.model_copy(update={"activation_checkpointing": config.recomputation})
        ),
        compile=compiled if config.compile.enabled else None,
        checkpoint=_read(
            Checkpoints,
            "checkpoint",
            config,
            tag_validation=config.checkpoint.tag_validation.lower(),
            resume=config.checkpoint.resume == "auto",
            background=config.checkpoint.async_,
        ),
        monitor=_monitoring(config),
        local_updates=None if config.local_updates is None else _local_updates(config.local_updates),
        lora=None if lora is None else Lora.of(lora.model_dump()),
        sparse_attention=None if sparse.mode is None else SparseAttention.of(sparse.given),
        tuning=tuning if config.autotuning.enabled else None,
        drop_last=config.dataloader_drop_last,
        seed=config.seed,
        names=key_of,
    )


def _read(kind: type[S], path: str, config: Config, **given: Any) -> S:
    """Return a section of options: the values of their keys, and those that are given.

    Args:
        kind: class of the section.
        path: the section's path in the options.
        config: the configuration.
        given: values of the options that are not, one for one, the value of a key.
    """
    for each in declared(kind):
        if each.name not in given:
            key = key_of(f"{path}.{each.name}")
            given[each.name] = functools.reduce(getattr, key.split("."), config)
    with errors_of(path):
        return kind(**given)


@contextmanager
def errors_of(path: str) -> Iterator[None]:
    """Make the errors of a section those of the options at its path."""
    try:
        yield
    except OptionError as error:
        raise error.within(path) from error


def notes_of(config: Config) -> list[str]:
    """Return notes on the keys of a configuration that have no effect, and on its options that have none."""
    notes = config.notes()
    noted = {note.partition(" ")[0] for note in notes}
    others = [note.spelled(key_of) for note in options_of(config).notes()]
    return notes + [note for note in others if note.partition(" ")[0] not in noted]


def batch_of(config: Config, replicas: int) -> Batch:
    """Return the batch sizes for a number of replicas, by which ``elasticity`` chooses them.

    Raises:
        ConfigError: no batch size fits this number.
    """
    if not config.elasticity.enabled:
        return _batch(config)
    size, micro = config.elasticity.sizes(replicas)
    return Batch(size=size, microbatch=micro, counted=config.managed_gradient_accumulation)


def _batch(config: Config) -> Batch:
    if config.elasticity.enabled:  # it chooses them for a number of replicas
        return Batch(counted=config.managed_gradient_accumulation)
    return _read(Batch, "batch", config)


def _zero(config: Config) -> Zero:
    zero = config.zero_optimization
    return _read(
        Zero,
        "zero",
        config,
        stage="auto" if config.tunes_stage else zero.stage,
        persistence_threshold=zero.stage3_param_persistence_threshold or 0,
        max_reuse_distance=zero.stage3_max_reuse_distance or 0,
        leaf_modules=_read(LeafModules, "zero.leaf_modules", config),
        offload_optimizer=_read(OffloadOptimizer, "zero.offload_optimizer", config),
        offload_parameters=_read(Offload, "zero.offload_parameters", config),
    )


def _precision(config: Config) -> Precision:
    autocast, amp, half = config.torch_autocast, config.amp, config.fp16
    scale = _read(LossScale, "precision.loss_scale", config, fixed=half.loss_scale or None)
    to = None
    if autocast.enabled:
        to = {"bfloat16": "bf16", "float16": "fp16"}.get(autocast.dtype, autocast.dtype)
    elif amp.enabled and amp.opt_level == "O1":
        # apex: starts at 2^16, doubled after 2000 steps without overflow, halved at each overflow
        to = "fp16"
        scale = LossScale(fixed=amp.loss_scale, window=2000, hysteresis=1, minimum=amp.min_loss_scale or 1.0)
    return _read(
        Precision,
        "precision",
        config,
        weights="bf16" if config.bf16.enabled else "fp16" if half.enabled else None,
        master_weights=not (config.bf16.enabled and config.bf16.bf16_master_weights_and_grads),
        autocast=to,
        loss_scale=scale,
    )


def _reduction(config: Config) -> GradientReduction:
    kind, autocast = config.gradient_compression.type, config.torch_autocast
    return _read(
        GradientReduction,
        "reduction",
        config,
        dtype=config.communication_data_type or (kind if kind in ("fp16", "bf16") else None),
        low_precision_modules=autocast.lower_precision_safe_modules or None if autocast.enabled else None,
    )


def _compression(config: Config) -> GradientCompression | None:
    section = config.gradient_compression
    if config.sparse_gradients:
        return GradientCompression("sparse_rows")
    if section.type in ("topk", "powersgd"):
        return GradientCompression(
            section.type, **{key: getattr(section, key) for key in section.OPTIONS[section.type]}
        )
    return None


def _monitoring(config: Config) -> Monitoring:
    def folder(section: MonitorConfig) -> str | None:
        return str(section.folder) if section.enabled else None

    log = config.comms_logger
    operations = None if log.prof_all else tuple(sorted(log.wanted))
    return _read(
        Monitoring,
        "monitor",
        config,
        json=folder(config.json_monitor),
        tensorboard=folder(config.tensorboard),
        csv=folder(config.csv_monitor),
        wandb=_read(Wandb, "monitor.wandb", config) if config.wandb.enabled else None,
        histograms=_read(Histograms, "monitor.histograms", config),
        trace=_read(Trace, "monitor.trace", config),
        profile=_read(Profile, "monitor.profile", config) if config.flops_profiler.enabled else None,
        communication=_read(CommunicationLog, "monitor.communication", config, operations=operations)
        if log.enabled
        else None,
    )


def _local_updates(section: Any) -> LocalSGD:
    kept = ("type", *section.OPTIONS[section.type], "every", "start_step", "average_optimizer")
    with errors_of("local_updates"):
        return LocalSGD.of({key: getattr(section, key) for key in kept if getattr(section, key) is not None})
