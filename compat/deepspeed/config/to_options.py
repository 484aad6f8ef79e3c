"""The configuration as triax's own options, and the key of each option."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

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
from ....options.schedule import ScheduleOptions
from ....options.sparse_attention import SparseAttention
from ....options.tuning import Tuning
from ....options.zero import LeafModules, Offload, OffloadOptimizer, Zero
from .base import Section
from .monitoring import MonitorConfig
from .optimizer_names import native_optimizer
from .schema import Config
from .zero import OffloadConfig

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
    "batch.size": "train_batch_size",
    "batch.microbatch": "train_micro_batch_size_per_gpu",
    "batch.microbatches": "gradient_accumulation_steps",
    "batch.counted": "managed_gradient_accumulation",
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
    scheduler, optimizer, lora = config.scheduler, config.optimizer, config.lora
    sparse, compiled, tuning = config.sparse_attention, config.compile, config.autotuning
    return EngineOptions(
        batch=_batch(config),
        optimizer=None if optimizer is None else native_optimizer(optimizer.type, optimizer.params),
        lr_scheduler=None if scheduler is None else LRSchedule(scheduler.type, **scheduler.params),
        schedule=ScheduleOptions(
            name=config.pipeline.schedule, costs=config.pipeline.costs, memory=config.pipeline.memory
        ),
        zero=_zero(config),
        precision=_precision(config),
        clip=config.gradient_clipping or None,
        nan_loss=config.nan_loss,
        reduction=_reduction(config),
        compression=_compression(config),
        recompute=_renamed(
            Recomputation,
            config.recomputation,
            groups="number_checkpoints",
            layers="checkpointable_layers",
            contiguous="contiguous_memory_optimization",
            synchronize="synchronize_checkpoint_boundary",
        ),
        compile=Compile(backend=compiled.backend, kwargs=compiled.kwargs) if compiled.enabled else None,
        checkpoint=_checkpoint(config),
        monitor=_monitoring(config),
        local_updates=None if config.local_updates is None else _local_updates(config.local_updates),
        lora=None if lora is None else Lora.of(lora.model_dump()),
        sparse_attention=None if sparse.mode is None else SparseAttention.of(sparse.given),
        tuning=Tuning(
            memory=tuning.memory,
            least=tuning.min_train_micro_batch_size_per_gpu,
            most=tuning.max_train_micro_batch_size_per_gpu,
            sizes=tuning.num_tuning_micro_batch_sizes,
            first_step=tuning.start_profile_step,
            last_step=tuning.end_profile_step,
            results=tuning.results_dir,
        )
        if tuning.enabled
        else None,
        drop_last=config.dataloader_drop_last,
        seed=config.seed,
        names=key_of,
    )


def _renamed(kind: type[S], section: Section, **keys: str) -> S:
    """Return an option section from a configuration's section, whose keys have the same names but for ``keys``."""
    return kind(**{each.name: getattr(section, keys.get(each.name, each.name)) for each in declared(kind)})


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
    counted = config.managed_gradient_accumulation
    if config.elasticity.enabled:  # it chooses them for a number of replicas
        return Batch(counted=counted)
    return Batch(
        size=config.train_batch_size,
        microbatch=config.train_micro_batch_size_per_gpu,
        microbatches=config.gradient_accumulation_steps,
        counted=counted,
    )


def _zero(config: Config) -> Zero:
    zero = config.zero_optimization
    stage: Any = "auto" if config.tunes_stage else zero.stage
    given = {
        each.name: getattr(zero, _ZERO.get(each.name, each.name))
        for each in declared(Zero)
        if each.name not in ("stage", "leaf_modules", "offload_optimizer", "offload_parameters")
    }
    return Zero(
        **given | {name: given[name] or 0 for name in ("persistence_threshold", "max_reuse_distance")},
        stage=stage,
        leaf_modules=_renamed(LeafModules, zero.leaf_module),
        offload_optimizer=OffloadOptimizer(
            **_offload(zero.offload_optimizer),
            pipeline_read=zero.offload_optimizer.pipeline_read,
            pipeline_write=zero.offload_optimizer.pipeline_write,
        ),
        offload_parameters=Offload(**_offload(zero.offload_param)),
    )


def _offload(section: OffloadConfig) -> dict[str, Any]:
    return {"device": section.device, "path": section.nvme_path, "pin_memory": section.pin_memory}


def _precision(config: Config) -> Precision:
    autocast, amp, half = config.torch_autocast, config.amp, config.fp16
    scale = LossScale(
        fixed=half.loss_scale or None,
        initial_power=half.initial_scale_power,
        window=half.loss_scale_window,
        hysteresis=half.hysteresis,
        consecutive_hysteresis=half.consecutive_hysteresis,
        minimum=half.min_loss_scale,
    )
    to = None
    if autocast.enabled:
        to = {"bfloat16": "bf16", "float16": "fp16"}.get(autocast.dtype, autocast.dtype)
    elif amp.enabled and amp.opt_level == "O1":
        # apex: starts at 2^16, doubled after 2000 steps without overflow, halved at each overflow
        to = "fp16"
        scale = LossScale(fixed=amp.loss_scale, window=2000, hysteresis=1, minimum=amp.min_loss_scale or 1.0)
    made: Any = {
        "weights": "bf16" if config.bf16.enabled else "fp16" if half.enabled else None,
        "master_weights": not (config.bf16.enabled and config.bf16.bf16_master_weights_and_grads),
        "buffers": config.data_types.buffer_dtype,
        "autocast": to,
        "loss_scale": scale,
    }
    return Precision(**made)


def _reduction(config: Config) -> GradientReduction:
    kind = config.gradient_compression.type
    named = kind if kind in ("fp16", "bf16") else None
    made: Any = {"dtype": config.communication_data_type or named}
    return GradientReduction(
        **made,
        op=config.gradient_allreduce_op,
        low_precision_modules=config.torch_autocast.lower_precision_safe_modules or None
        if config.torch_autocast.enabled
        else None,
        prescale=config.prescale_gradients,
        predivide=config.gradient_predivide_factor,
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


def _checkpoint(config: Config) -> Checkpoints:
    section = config.checkpoint
    made: Any = {"tag_validation": section.tag_validation.lower()}
    return Checkpoints(
        **made,
        folder=section.dir,
        every=section.every,
        keep=section.keep,
        resume=section.resume == "auto",
        background=section.async_,
        on_failure=section.on_failure,
        verify=section.verify,
        patience=section.patience,
    )


def _monitoring(config: Config) -> Monitoring:
    def folder(section: MonitorConfig) -> str | None:
        return str(Path(section.output_path) / section.job_name) if section.enabled else None

    profile, log, wandb = config.flops_profiler, config.comms_logger, config.wandb
    return Monitoring(
        print_every=config.steps_per_print,
        json=folder(config.json_monitor),
        tensorboard=folder(config.tensorboard),
        csv=folder(config.csv_monitor),
        wandb=Wandb(project=wandb.project, group=wandb.group, team=wandb.team) if wandb.enabled else None,
        histograms=Histograms(every=config.histograms.every, bins=config.histograms.bins),
        breakdown=config.wall_clock_breakdown,
        trace=Trace(step=config.timeline.step, file=config.timeline.file),
        profile=Profile(
            step=profile.profile_step,
            recompute_factor=profile.recompute_fwd_factor,
            depth=profile.module_depth,
            top_modules=profile.top_modules,
            detailed=profile.detailed,
            file=profile.output_file,
        )
        if profile.enabled
        else None,
        communication=CommunicationLog(
            operations=None if log.prof_all else tuple(sorted(log.wanted)), verbose=log.verbose, callers=log.debug
        )
        if log.enabled
        else None,
        memory=config.memory_breakdown,
        state=config.dump_state,
        peak_tflops=config.peak_tflops,
        log_level=config.log_level,
    )


def _local_updates(section: Any) -> LocalSGD:
    kept = ("type", *section.OPTIONS[section.type], "every", "start_step")
    kept += () if section.type == "async_diloco" else ("average_optimizer",)
    return LocalSGD.of({key: getattr(section, key) for key in kept if getattr(section, key) is not None})
