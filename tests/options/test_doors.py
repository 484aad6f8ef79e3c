"""One engine from three inputs: options in Python, a training file, and DeepSpeed's JSON."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.compat.deepspeed import older_members
from triax.compat.deepspeed.config.table import key_of, keys
from triax.compat.deepspeed.config.to_options import options_of, parse_config
from triax.options.base import walk
from triax.options.engine import EngineOptions
from triax.plugins.gradient_compression import PowerSGD

from support.toys import mean_loss

SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
BASE = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "optimizer": SGD}
# Options, and the configuration with the same meaning.
PAIRS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"zero": 1, "clip": 0.5}, {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5}),
    (
        {"zero": triax.Zero(stage=2, bucket_size=5, overlap_comm=False), "recompute": "full"},
        {
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 5, "overlap_comm": False},
            "activation_checkpointing": {"granularity": "full"},
        },
    ),
    (
        {"zero": triax.Zero(stage=3, keep_gathered=True, persistence_threshold=4), "precision": "bf16"},
        {
            "zero_optimization": {
                "stage": 3,
                "stage3_keep_gathered": True,
                "stage3_param_persistence_threshold": 4,
            },
            "bf16": {"enabled": True},
        },
    ),
    (
        {
            "compression": PowerSGD(rank=1, min_compression=1.0),
            "reduction": {"op": "sum", "prescale": True},
            "lr_scheduler": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5),
        },
        {
            "gradient_compression": {"type": "powersgd", "rank": 1, "min_compression": 1.0},
            "gradient_allreduce_op": "sum",
            "prescale_gradients": True,
            "scheduler": {"type": "ExponentialLR", "params": {"gamma": 0.5}},
        },
    ),
    (
        {"precision": triax.Precision(weights="fp16", loss_scale=triax.LossScale(fixed=128.0)), "zero": 1},
        {"fp16": {"enabled": True, "loss_scale": 128}, "zero_optimization": {"stage": 1}},
    ),
]


def trained(engine: Any, grid: Grid) -> tuple[list[float], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(grid.data.rank)
    rows = [(torch.randn(2, 6, generator=generator), torch.randn(2, 6, generator=generator)) for _ in range(12)]
    batches = iter(rows)
    return [float(engine.train_batch(batches)) for _ in range(3)], engine.gather()


def by_both_doors(pipe: int, data: int, options: dict[str, Any], config: dict[str, Any]) -> bool:
    """True if the bits of losses and weights are equal."""
    found = []
    for door in ("options", "json"):
        grid = Grid(pipe, data)
        torch.manual_seed(0)
        layers = [LayerSpec(nn.Linear, 6, 6) for _ in range(4)]
        module = PipelineModule(layers, grid=grid, loss_fn=mean_loss, seed=3)
        if door == "options":
            sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
            engine: Any = triax.Engine(module, optimizer=sgd, batch=triax.Batch(size=8, microbatch=2), **options)
        else:
            engine = triax.initialize(model=module, config={**BASE, **config})[0]
        found.append(trained(engine, grid))
    (losses, weights), (others, theirs) = found
    return losses == others and all(torch.equal(weights[name], theirs[name]) for name in weights)


@pytest.mark.parametrize("pair", PAIRS)
def test_options_and_configuration_train_bitwise_equal(ranks: Any, pair: Any) -> None:
    assert ranks(1, by_both_doors, 1, 1, *pair) == [True]
    assert ranks(4, by_both_doors, 2, 2, *pair) == [True] * 4


# Keys that the adapter itself reads: sizes of axes, which are checked, and other names of keys.
OWN = {
    *("data_parallel_size", "sequence_parallel_size", "expert_parallel_size", "moe.ep_size", "pipeline.stages"),
    *("tensor_parallel.autotp_size", "tensor_parallel.tp_size", "bf16.bf16_optimizer_states"),
    *("data_types.grad_accum_dtype", "steps_per_print"),
}
# Keys that act beside another one alone.
BESIDE: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "amp": {"amp": {"enabled": True}},
    "torch_autocast": {"torch_autocast": {"enabled": True}},
    "local_updates": {"local_updates": {"type": "async_diloco", "every": 4}},
    "local_updates.average_optimizer": {"local_updates": {"type": "diloco", "every": 4}},
    "gradient_compression": {"gradient_compression": {"type": "topk"}},
    "gradient_compression.rank": {"gradient_compression": {"type": "powersgd"}},
    "gradient_compression.min_compression": {"gradient_compression": {"type": "powersgd"}},
    "gradient_compression.warm_start": {"gradient_compression": {"type": "powersgd"}},
    "checkpoint": {"checkpoint": {"dir": "x", "every": 3}},
    "comms_logger": {"comms_logger": {"enabled": True}},
    **{
        f"comms_logger.{key}": {"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["send"]}}
        for key in ("prof_ops", "prof_all")
    },
    "lora": {"lora": {}},
    "scheduler": {"scheduler": {"type": "StepLR"}},
    "optimizer": {"optimizer": {"type": "SGD"}},
    **{name: {name: {"enabled": True}} for name in ("flops_profiler", "wandb", "elasticity", "compile")},
    "autotuning": {"autotuning": {"enabled": True}},
    **{name: {name: {"enabled": True}} for name in ("tensorboard", "csv_monitor", "json_monitor")},
    "sparse_attention": {"sparse_attention": {"mode": "fixed"}},
    "activation_checkpointing.contiguous_memory_optimization": {
        "activation_checkpointing": {"partition_activations": True, "number_checkpoints": 2}
    },
}
VALUES: dict[str, Any] = {
    "gradient_compression.values": "fp16",
    "optimizer.type": "Adam",
    "scheduler.type": "OneCycle",
    "optimizer.params": {"lr": 3.0},
    "scheduler.params": {"step_size": 3},
    "comms_logger.prof_ops": ["receive"],
    "pipeline.costs": [1, 2, 3],
    "zero_optimization.offload_optimizer.device": "cpu",
    "zero_optimization.offload_param.device": "cpu",
    "zero_optimization.mics_shard_size": 2,
    "sparse_attention.mode": "dense",
    "torch_autocast.dtype": "float16",
    "torch_autocast.lower_precision_safe_modules": ["torch.nn.Linear"],
    "local_updates.type": "diloco",
    "log_level": "ERROR",
    "amp.opt_level": "O0",
    "compile.kwargs": {"dynamic": True},
    "compile.backend": "eager",
    "activation_checkpointing.granularity": "full",
    "pipeline.labels": "sent",
    "gradient_allreduce_op": "sum",
    "nan_loss": "skip",
    "checkpoint.tag_validation": "Fail",
    "checkpoint.on_failure": "stop",
    "checkpoint.resume": "auto",
    "lora.base": "int8",
    "lora.targets": ["a"],
    "checkpoint.dir": "y",
    "local_updates.meet_early": False,
    "sparse_attention.attention": "unidirectional",
    "comms_logger.prof_all": True,
    "autotuning.start_profile_step": 2,
}


def other(key: str, field: Any) -> Any:
    """A value of a key that is not its default."""
    if key in VALUES:
        return VALUES[key]
    default, text = field.default, str(field.hint)
    if isinstance(default, bool) or "bool" in text:
        return not default
    if "list" in text or "tuple" in text:
        return [3] if "int" in text else ["x"]
    if isinstance(default, int) or (isinstance(default, float) and default > 1.0):
        return default + 1
    if isinstance(default, float):
        return 0.5
    if "int" in text:
        return 5
    if "float" in text:
        return 0.5
    return "bf16" if "bf16" in text else "x"


# The option that each key sets. By hand, from DeepSpeed's documentation and docs/configuration.md, not from the table.
SECTIONS = {  # section -> where its keys are options of the same name, unless NAMES or CONVERTED has the key
    "zero_optimization": "zero",
    "pipeline": "schedule",
    "activation_checkpointing": "recompute",
    "flops_profiler": "monitor.profile",
    "histograms": "monitor.histograms",
    "timeline": "monitor.trace",
    "wandb": "monitor.wandb",
    "fp16": "precision.loss_scale",
    **{same: same for same in ("local_updates", "lora", "sparse_attention", "checkpoint", "compile")},
}
NAMES = {
    "train_batch_size": "batch.size",
    "train_micro_batch_size_per_gpu": "batch.microbatch",
    "gradient_accumulation_steps": "batch.microbatches",
    "managed_gradient_accumulation": "batch.counted",
    "gradient_clipping": "clip",
    "prescale_gradients": "reduction.prescale",
    "gradient_predivide_factor": "reduction.predivide",
    "gradient_allreduce_op": "reduction.op",
    "communication_data_type": "reduction.dtype",
    "seed": "seed",
    "nan_loss": "nan_loss",
    "log_level": "monitor.log_level",
    "dump_state": "monitor.state",
    "memory_breakdown": "monitor.memory",
    "wall_clock_breakdown": "monitor.breakdown",
    "peak_tflops": "monitor.peak_tflops",
    "dataloader_drop_last": "drop_last",
    "optimizer.params": "optimizer.arguments",
    "scheduler.type": "lr_scheduler.type",
    "scheduler.params": "lr_scheduler.arguments",
    "zero_optimization.reduce_bucket_size": "zero.bucket_size",
    "zero_optimization.ignore_unused_parameters": "zero.allow_unused",
    "zero_optimization.stage3_keep_gathered": "zero.keep_gathered",
    "zero_optimization.stage3_prefetch_bucket_size": "zero.prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold": "zero.persistence_threshold",
    "zero_optimization.stage3_max_live_parameters": "zero.max_live_parameters",
    "zero_optimization.stage3_max_reuse_distance": "zero.max_reuse_distance",
    "zero_optimization.zero_quantized_weights": "zero.quantized_weights",
    "zero_optimization.zero_quantized_nontrainable_weights": "zero.quantized_frozen_weights",
    "zero_optimization.zero_quantized_gradients": "zero.quantized_gradients",
    "zero_optimization.zero_hpz_partition_size": "zero.hpz_partition_size",
    "zero_optimization.mics_shard_size": "zero.shard_size",
    "zero_optimization.offload_optimizer.nvme_path": "zero.offload_optimizer.path",
    "zero_optimization.offload_param.device": "zero.offload_parameters.device",
    "zero_optimization.offload_param.nvme_path": "zero.offload_parameters.path",
    "zero_optimization.offload_param.pin_memory": "zero.offload_parameters.pin_memory",
    "zero_optimization.leaf_module.classes": "zero.leaf_modules.classes",
    "zero_optimization.leaf_module.names": "zero.leaf_modules.names",
    "zero_optimization.leaf_module.name_suffixes": "zero.leaf_modules.name_suffixes",
    "pipeline.schedule": "schedule.name",
    "pipeline.activation_checkpoint_interval": "recompute.interval",
    "pipeline.labels": "batch.labels",
    "activation_checkpointing.checkpointable_layers": "recompute.layers",
    "activation_checkpointing.number_checkpoints": "recompute.groups",
    "activation_checkpointing.contiguous_memory_optimization": "recompute.contiguous",
    "activation_checkpointing.synchronize_checkpoint_boundary": "recompute.synchronize",
    "fp16.loss_scale": "precision.loss_scale.fixed",
    "fp16.initial_scale_power": "precision.loss_scale.initial_power",
    "fp16.loss_scale_window": "precision.loss_scale.window",
    "fp16.min_loss_scale": "precision.loss_scale.minimum",
    "amp.loss_scale": "precision.loss_scale.fixed",
    "amp.min_loss_scale": "precision.loss_scale.minimum",
    "data_types.buffer_dtype": "precision.buffers",
    "torch_autocast.lower_precision_safe_modules": "reduction.low_precision_modules",
    "flops_profiler.recompute_fwd_factor": "monitor.profile.recompute_factor",
    "flops_profiler.profile_step": "monitor.profile.step",
    "flops_profiler.module_depth": "monitor.profile.depth",
    "flops_profiler.output_file": "monitor.profile.file",
    "comms_logger.verbose": "monitor.communication.verbose",
    "comms_logger.prof_ops": "monitor.communication.operations",
    "comms_logger.debug": "monitor.communication.callers",
    "tensorboard.job_name": "monitor.tensorboard",
    "csv_monitor.job_name": "monitor.csv",
    "json_monitor.job_name": "monitor.json",
    "checkpoint.async": "checkpoint.background",
    "checkpoint.dir": "checkpoint.folder",
    "autotuning.memory": "tuning.memory",
    "autotuning.min_train_micro_batch_size_per_gpu": "tuning.least",
    "autotuning.max_train_micro_batch_size_per_gpu": "tuning.most",
    "autotuning.num_tuning_micro_batch_sizes": "tuning.sizes",
    "autotuning.start_profile_step": "tuning.first_step",
    "autotuning.end_profile_step": "tuning.last_step",
    "autotuning.results_dir": "tuning.results",
}
TOPK = {"ratio": 0.01, "momentum": 0.0, "clip": 0.0, "warmup_steps": 0, "start_step": 0, "values": None}
POWERSGD = {"start_step": 0, "rank": 4, "min_compression": 2.0, "warm_start": True}
CONVERTED: dict[str, dict[str, Any]] = {  # keys whose value is another one as an option, or which set several options
    "sparse_gradients": {
        "compression": "GradientCompression",
        "compression.type": "sparse_rows",
        "compression.arguments": {},
    },
    "optimizer.type": {"optimizer.type": "AdamW", "optimizer.arguments": {"weight_decay": 0.0}},
    "compile.enabled": {"compile": "Compile", "compile.backend": "inductor", "compile.kwargs": {}},
    "bf16.enabled": {"precision.weights": "bf16"},
    "bf16.bf16_master_weights_and_grads": {"precision.master_weights": False},
    "fp16.enabled": {"precision.weights": "fp16"},
    "local_updates.type": {"local_updates": "DiLoCo"},
    "gradient_compression.type": {"compression": None, "reduction.dtype": "bf16"},
    "torch_autocast.enabled": {"precision.autocast": "bf16"},
    "torch_autocast.dtype": {"precision.autocast": "fp16"},
    "amp.enabled": {
        "precision.autocast": "fp16",
        "precision.loss_scale.window": 2000,
        "precision.loss_scale.hysteresis": 1,
    },
    "amp.opt_level": {
        "precision.autocast": None,
        "precision.loss_scale.window": 1000,
        "precision.loss_scale.hysteresis": 2,
    },
    "flops_profiler.enabled": {
        "monitor.profile": "Profile",
        "monitor.profile.step": 1,
        "monitor.profile.recompute_factor": 0.0,
        "monitor.profile.depth": -1,
        "monitor.profile.top_modules": 1,
        "monitor.profile.detailed": True,
        "monitor.profile.file": None,
    },
    "comms_logger.enabled": {
        "monitor.communication": "CommunicationLog",
        "monitor.communication.operations": None,
        "monitor.communication.verbose": False,
        "monitor.communication.callers": False,
    },
    "comms_logger.prof_all": {"monitor.communication.operations": None},
    "tensorboard.enabled": {"monitor.tensorboard": "triax"},
    "tensorboard.output_path": {"monitor.tensorboard": "x/triax"},
    "csv_monitor.enabled": {"monitor.csv": "triax"},
    "csv_monitor.output_path": {"monitor.csv": "x/triax"},
    "json_monitor.enabled": {"monitor.json": "triax"},
    "json_monitor.output_path": {"monitor.json": "x/triax"},
    "wandb.enabled": {
        "monitor.wandb": "Wandb",
        "monitor.wandb.project": "triax",
        "monitor.wandb.group": None,
        "monitor.wandb.team": None,
    },
    "checkpoint.tag_validation": {"checkpoint.tag_validation": "fail"},
    "checkpoint.resume": {"checkpoint.resume": True},
    "autotuning.enabled": {
        "zero.stage": "auto",
        "tuning": "Tuning",
        "tuning.memory": None,
        "tuning.least": 1,
        "tuning.most": 1024,
        "tuning.sizes": 3,
        "tuning.first_step": 1,
        "tuning.last_step": 3,
        "tuning.results": None,
    },
    **{
        f"gradient_compression.{name}": {"compression.arguments": TOPK | {name: value}}
        for name, value in (("ratio", 0.5), ("momentum", 0.5), ("clip", 0.5), ("warmup_steps", 1), ("start_step", 1))
    },
    "gradient_compression.values": {"compression.arguments": TOPK | {"values": "fp16"}},
    "gradient_compression.rank": {"compression.arguments": POWERSGD | {"rank": 5}},
    "gradient_compression.min_compression": {"compression.arguments": POWERSGD | {"min_compression": 3.0}},
    "gradient_compression.warm_start": {"compression.arguments": POWERSGD | {"warm_start": False}},
}


def leaves(options: Any, path: str = "") -> dict[str, Any]:
    """Path -> value of every option in a nest of dataclasses, and the name of the class of each dataclass."""
    if not dataclasses.is_dataclass(options):
        return {path: options}
    found: dict[str, Any] = {path: type(options).__name__} if path else {}
    for field in dataclasses.fields(options):
        found |= leaves(getattr(options, field.name), f"{path}.{field.name}" if path else field.name)
    return found


def options_that_a_key_sets(key: str, value: Any) -> dict[str, Any]:
    if key in CONVERTED:
        return CONVERTED[key]
    section, _, name = key.partition(".")
    path = NAMES[key] if key in NAMES else f"{SECTIONS[section]}.{name}"
    return {path: tuple(value) if isinstance(value, list) else value}


def test_options_of_keeps_every_key_of_a_configuration() -> None:
    """A key with another value than its default sets the options that the lists above give, and no other option."""
    wrong, checked = [], 0
    for key, field in keys():
        if field.status != "acts" or key in OWN:
            continue
        section = key.partition(".")[0]
        if section == "elasticity":  # it chooses batch sizes for a number of replicas: batch_of
            continue
        beside = {} if key.endswith(".enabled") else BESIDE.get(key, BESIDE.get(section, {}))
        config: dict[str, Any] = {section: dict(beside[section])} if section in beside else {}
        config |= {"train_batch_size": 8} if section == "autotuning" else {}
        before = leaves(options_of(parse_config(config)))
        inner = config
        *outer, last = key.split(".")
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = other(key, field)
        after = leaves(options_of(parse_config(config)))
        found = {path: value for path, value in after.items() if path not in before or before[path] != value}
        checked += 1
        if found != (wanted := options_that_a_key_sets(key, inner[last])):
            wrong.append(f"{key} = {inner[last]!r} sets {found}, not {wanted}")
    assert not wrong, "\n".join(wrong)
    assert checked >= 150


def test_each_engine_option_has_a_configuration_key() -> None:
    known = {key for key, _ in keys()} | {key.rpartition(".")[0] for key, _ in keys()}
    missing = {path: key_of(path) for path, _, _ in walk(EngineOptions) if key_of(path) not in known}
    # Options that several keys set, or that Python alone has.
    several = {"precision", "reduction", "batch", "monitor", "compression", "tuning", "checkpoint", "schedule"}
    several |= {"fault_tolerance"}
    assert {path for path in missing if path.partition(".")[0] not in several} == set(), missing


def test_deepspeeds_members_warn_on_a_native_engine() -> None:
    engine: Any = triax.Engine(
        nn.Linear(2, 2), optimizer=partial(torch.optim.SGD, lr=0.1), batch=triax.Batch(microbatch=3)
    )
    for name, new in older_members.NEW.items():
        with pytest.warns(DeprecationWarning, match=re.escape(f"engine.{name} is DeepSpeed's name")) as warned:
            getattr(engine, name)
        assert str(warned[0].message).endswith(f"write {new}") and warned[0].filename == __file__
        if "(...)" not in new and "group" not in new:
            eval(new, {"engine": engine})
    assert engine.get_lr() == engine.lr == [0.1] and engine.train_micro_batch_size_per_gpu() == 3
    with pytest.raises(AttributeError, match="has 'no_such'"):
        _ = engine.no_such
