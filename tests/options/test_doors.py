"""One engine from three inputs: options in Python, a training file, and DeepSpeed's JSON."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.base.errors import ConfigError
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


def test_options_of_keeps_every_key_of_a_configuration() -> None:
    lost = []
    for key, field in keys():
        if field.status != "acts" or key in OWN:
            continue
        section = key.partition(".")[0]
        if section == "elasticity":  # it chooses batch sizes for a number of replicas: batch_of
            continue
        beside = {} if key.endswith(".enabled") else BESIDE.get(key, BESIDE.get(section, {}))
        config: dict[str, Any] = {section: dict(beside[section])} if section in beside else {}
        config |= {"train_batch_size": 8} if section == "autotuning" else {}
        before = options_of(parse_config(config))
        inner = config
        *outer, last = key.split(".")
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = other(key, field)
        try:
            after = options_of(parse_config(config))
        except ConfigError as error:
            lost.append(f"{key}: {error}")
            continue
        if after == before:
            lost.append(f"{key} = {inner[last]}")
    assert not lost, "\n".join(lost)


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
