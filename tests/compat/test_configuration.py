"""The configuration file: accepted keys, warnings of keys without effect, refused values, and effects."""

from __future__ import annotations

import copy
import csv
import json
import logging
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.base.errors import ConfigError
from triax.cli.main import app
from triax.compat.deepspeed.config.config import batch_sizes
from triax.compat.deepspeed.config.resolved import json_schema, keys, markdown
from triax.compat.deepspeed.config.schema import Config
from triax.compat.deepspeed.config.to_options import notes_of, options_of
from triax.compat.deepspeed.from_config import read_config, resolve_config
from triax.engine.setup.precision import make_loss_scaler

from paths import ROOT
from toys import mean_loss

WIDTH = 3

TUTORIAL = """{
  // as DeepSpeed's pages have it; "a comment" is none: {
  "train_batch_size": 16,  # sixteen samples // a step
  "train_micro_batch_size_per_gpu": "auto",
  "steps_per_print": 2000, /* two
  lines, "and an odd quote */
  "optimizer": {
    "type": "Adam",
    "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
  },
  "scheduler": {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}
  },
  "gradient_clipping": 1.0,
  "prescale_gradients": false,
  "fp16": {
    "enabled": true, "fp16_master_weights_and_grads": false, "loss_scale": 0, "loss_scale_window": 500,
    "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 15
  },
  "wall_clock_breakdown": false,
  "zero_optimization": {
    "stage": 2, "allgather_partitions": true, "reduce_scatter": true, "allgather_bucket_size": 50000000,
    "reduce_bucket_size": 5e7, "overlap_comm": true, "contiguous_gradients": true, "cpu_offload": true,
  },
}"""


def engine(grid: Grid | None = None, **config: Any) -> triax.PipelineEngine:
    layers: list[Any] = [LayerSpec(nn.Linear, WIDTH, WIDTH), torch.tanh, LayerSpec(nn.Linear, WIDTH, WIDTH)]
    dtype = torch.float32 if "fp16" in config else torch.float64
    model = PipelineModule(layers, grid=grid, loss_fn=mean_loss, dtype=dtype)
    base = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    return triax.initialize(model=model, config={**base, **config})[0]


def data(grid: Grid | None = None, micro: int = 2) -> Iterator[tuple[Tensor, Tensor]]:
    x, y = torch.randn(2, 64, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rank, size = (0, 1) if grid is None else (grid.data.rank, grid.data.size)
    while True:
        for start in range(rank * micro, 64 - micro + 1, micro * size):
            yield x[start : start + micro], y[start : start + micro]


# ------------------------------------------------------------------------------------------------------ the text


def test_the_tutorials_file_with_its_comments(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(TUTORIAL)
    config = read_config(path)
    assert config.zero_optimization.offload_optimizer.device == "cpu" and config.zero_optimization.stage == 2
    assert config.zero_optimization.reduce_bucket_size == 50_000_000 and config.fp16.initial_scale_power == 15
    assert notes_of(config) == []
    assert batch_sizes(config, 4).micro == 4
    for name in ("SGD // no comment", "SGD # none", "SGD /* none */", 'a "quote" //', "comma,]", "comma , }"):
        read_config({"train_batch_size": 1, "optimizer": None})
        path.write_text(json.dumps({"tensorboard": {"job_name": name}}))
        assert read_config(path).tensorboard.job_name == name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"seed": 1, "seed": 2}', "has 'seed' twice in one section"),
        ('{"seed": 1 /* and so on }', "has a comment /* in line 1 that does not end"),
        ('{\n// one\n"seed": }', "is not JSON: Expecting value: line 3"),
        ('{"gradient_clipping": NaN}', "has NaN, which is not a number in JSON"),
        ("[1]", "the configuration is a list"),
        ("[" * 100_000, "nested too deeply"),
        ("", "is not JSON"),
        ('{"seed": ' + "9" * 5000 + "}", "config.json is not JSON: Exceeds the limit"),
        (b"\xff\xfe", "is not text in UTF-8: byte 0"),
    ],
)
def test_texts_refused(text: str | bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as error:
        read_config(path)
    assert words in str(error.value)


# ------------------------------------------------------------------------------------------------------ the keys


def test_auto_is_what_follows_from_the_rest_or_an_error() -> None:
    sizes = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    zero = {"stage": 3, "overlap_comm": "auto", "reduce_bucket_size": "auto", "sub_group_size": "auto"}
    config = read_config({**sizes, "gradient_clipping": "auto", "zero_optimization": zero})
    assert batch_sizes(config, 4).micro == 8 and config.gradient_clipping == 1.0
    assert config.zero_optimization.overlap_comm is True and config.zero_optimization.reduce_bucket_size == 2**22
    with pytest.raises(ConfigError, match="no batch size: give train_batch_size"):
        batch_sizes(read_config(dict.fromkeys(sizes, "auto")), 1)
    for given, key in (
        ({"fp16": {"enabled": "auto"}}, "fp16.enabled"),
        ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage"),  # autotuning is not enabled
        ({"seed": "auto"}, "seed"),
    ):
        with pytest.raises(ConfigError, match=f'^{key} is "auto", which a trainer fills in'):
            read_config(given)


def test_what_does_nothing_is_taken_and_said(caplog: pytest.LogCaptureFixture) -> None:
    idle: dict[str, Any] = {
        "zero_optimization": {"stage": 1, "stage3_max_act_size": 1e9, "offload_param": {"device": "cpu"}},
        "pipeline": {"micro_batch_size": 4, "stages": "auto"},
        "sparse_attention": False,
        "zero_allow_untested_optimizer": True,
        "flops_profiler": {"enabled": False, "profile_step": 1},
    }
    with caplog.at_level(logging.WARNING, logger="triax"):
        engine(**idle)
    for words in (
        "zero_optimization.stage3_max_act_size does nothing: DeepSpeed has no such key",
        "zero_optimization.offload_param stores shards of the weights, and in stage 1 they are whole: it does nothing",
        "pipeline.micro_batch_size does nothing: microbatches have train_micro_batch_size_per_gpu samples",
        "zero_allow_untested_optimizer does nothing",
    ):
        assert words in caplog.text
    assert len(caplog.records) == 4


@pytest.mark.parametrize(
    ("given", "note"),
    [
        (
            {"fp16": {"loss_scale": 128}},
            "fp16.loss_scale does nothing without enabled: write enabled, or leave loss_scale out",
        ),
        ({"fp16": {"initial_scale_power": 8}}, "fp16.initial_scale_power does nothing without enabled"),
        ({"torch_autocast": {"dtype": "float16"}}, "torch_autocast.dtype does nothing without enabled"),
        ({"amp": {"opt_level": "O0"}}, "amp.opt_level does nothing without enabled"),
        ({"csv_monitor": {"output_path": "x"}}, "csv_monitor.output_path does nothing without enabled"),
        ({"wandb": {"project": "x"}}, "wandb.project does nothing without enabled"),
        ({"flops_profiler": {"profile_step": 5}}, "flops_profiler.profile_step does nothing without enabled"),
        ({"comms_logger": {"verbose": True}}, "comms_logger.verbose does nothing without enabled"),
        ({"timeline": {"file": "x"}}, "timeline.file does nothing without step"),
        ({"checkpoint": {"dir": "x"}}, "checkpoint.dir does nothing without every or resume"),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "nvme_path": "x"}}},
            "zero_optimization.offload_optimizer.nvme_path does nothing without device nvme",
        ),
    ],
)
def test_a_key_without_the_one_that_switches_it_on_is_noted(given: dict[str, Any], note: str) -> None:
    notes = notes_of(read_config({"train_batch_size": 4, **given}))
    assert len(notes) == 1 and notes[0].startswith(note), notes


def test_what_a_trainer_writes_with_its_defaults_is_not_noted() -> None:
    """The section fp16 as Hugging Face's guide has it, and fp16's loss scale under autocast to float16."""
    scale = {
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    }
    assert notes_of(read_config({"train_batch_size": 4, "fp16": {"enabled": False, **scale}})) == []
    autocast = {"torch_autocast": {"enabled": True, "dtype": "float16"}, "fp16": {"loss_scale": 128}}
    assert notes_of(read_config({"train_batch_size": 4, **autocast})) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fp16": {"enabled": True, "loss_scale": 1e308}}, "fp16.loss_scale = 1e+308"),
        ({"fp16": {"enabled": True, "initial_scale_power": 200}}, "fp16.initial_scale_power = 200"),
        ({"fp16": {"enabled": True, "loss_scale": 8, "min_loss_scale": 16}}, "min_loss_scale 16 is above loss_scale 8"),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 3, "min_loss_scale": 16}},
            "min_loss_scale 16 is above 2 ** initial_scale_power 3 = 8",
        ),
        (
            {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.2, "cycle_max_lr": 0.1}}},
            "cycle_min_lr = [0.2] is above cycle_max_lr = [0.1]",
        ),
        ({"scheduler": {"type": "StepLR", "params": {"step_size": -3}}}, "scheduler.params.step_size = -3"),
    ],
)
def test_values_that_cannot_be_right_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_config({"train_batch_size": 4, **given})
    assert message in str(error.value)


def test_every_key_acts_or_says_why_not() -> None:
    """Every key has a description; a refused key says what to write, and its default value is accepted."""
    statuses: dict[str, int] = {}
    for key, field in keys():
        status = (field.json_schema_extra or {}).get("x-status", "acts")
        statuses[status] = statuses.get(status, 0) + 1
        assert field.description, key
        if status != "refused":
            continue
        *sections, last = key.split(".")
        for value, fine in ((None, True), (False, True), ({"enabled": False}, True), ({"enabled": True}, False)):
            given: Any = {last: value}
            for section in reversed(sections):
                given = {section: given}
            if fine:
                assert notes_of(read_config(given)) == []
            else:
                with pytest.raises(ConfigError) as error:
                    read_config(given)
                assert str(error.value) == f"{key}: refused: {field.description}"
                assert (
                    "leave it out" in str(error.value) or "write " in str(error.value) or "enable" in str(error.value)
                )
    assert statuses["acts"] > 60 and statuses["idle"] > 25 and statuses["refused"] >= 40


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"pipeline": {"stages": 2}}, "pipeline.stages is 2, but the model's grid has 1 on its pipe axis"),
        ({"tensor_parallel": {"autotp_size": 4}}, "make it with Grid(tensor=4), or leave the key out"),
        ({"bfloat16": {"enabled": True}, "bf16": {}}, "bfloat16 is an older name of bf16"),
        (
            {"pipeline": {"activation_checkpoint_interval": 2}, "activation_checkpointing": {"interval": 1}},
            "another name",
        ),
        ({"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "nvme"}}}, "is an older name of"),
        (
            {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3},
            "10 is no multiple of train_micro_batch_size_per_gpu 2 * gradient_accumulation_steps 3 = 6",
        ),
        ({"fp16": True}, "fp16 = true: a section {...} belongs here"),
        ({"optimizer": {"type": "Adam", "params": [1]}}, "optimizer.params = [1]: a section {...} belongs here"),
        ({"optimizer": {"params": {}}}, "optimizer.type is missing: write it"),
    ],
)
def test_refused(config: Any, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        engine(**config)
    assert words in str(error.value)


def test_older_names() -> None:
    assert read_config({"bfloat16": {"enabled": True}}).bf16.enabled
    assert read_config({"zero_optimization": True}).zero_optimization.stage == 1
    assert read_config({"steps_per_print": float("inf")}).steps_per_print is None
    zero = {"cpu_offload": True, "cpu_offload_use_pin_memory": True, "cpu_offload_params": True, "stage": 3}
    made = read_config({"zero_optimization": zero}).zero_optimization
    assert made.offload_optimizer.pin_memory and made.offload_param.device == "cpu"
    assert read_config({"pipeline": {"activation_checkpoint_interval": 2}}).recomputation.interval == 2
    assert read_config({"$schema": "triax.schema.json", "seed": 3}).seed == 3


def test_config_params_is_config() -> None:
    model = PipelineModule([LayerSpec(nn.Linear, 1, 1)], loss_fn=mean_loss)
    with pytest.raises(ConfigError, match="config_params is an older name of config"):
        triax.initialize(model=model, config={}, config_params={})
    assert triax.initialize(model=model, config_params={"train_batch_size": 3})[0].train_batch_size() == 3


def tutorial(path: str) -> tuple[list[bool], list[float], str, int]:
    grid = Grid(timeout=60)
    layers: list[Any] = [LayerSpec(nn.Linear, WIDTH, WIDTH), torch.tanh, LayerSpec(nn.Linear, WIDTH, WIDTH)]
    model = PipelineModule(layers, grid=grid, loss_fn=mean_loss)
    made, optimizer, _, _ = triax.initialize(
        args=type("Args", (), {"deepspeed_config": path})(), model=model, model_parameters=model.parameters()
    )
    batches = ((x.float(), y.float()) for x, y in data(grid, 16 // grid.data.size))
    finite = [bool(torch.isfinite(made.train_batch(batches))) for _ in range(4)]
    return finite, made.get_lr(), type(optimizer).__name__, made.skipped_steps


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_tutorials_file_trains(ranks: Any, replicas: int, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(TUTORIAL)
    for finite, rates, name, skipped in ranks(replicas, tutorial, str(path)):
        assert all(finite) and name == "AdamW" and skipped == 0
        assert rates == [pytest.approx(0.001 * math.log(4) / math.log(1000))]  # the fifth step's


# --------------------------------------------------------------------------------------------- 200 random corruptions

VALID: dict[str, Any] = {
    "train_batch_size": 48,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 10, "total_num_steps": 100},
    },
    "gradient_clipping": 1.0,
    "prescale_gradients": True,
    "gradient_predivide_factor": 2.0,
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 1000,
        "reduce_scatter": True,
        "allgather_bucket_size": 1000,
        "overlap_comm": True,
        "stage3_max_live_parameters": 1000,
        "stage3_prefetch_bucket_size": 10,
        "sub_group_size": 100,
        "offload_optimizer": {"device": "cpu", "pin_memory": True, "pipeline_read": True},
        "offload_param": {"device": "cpu"},
    },
    "pipeline": {"schedule": "zb-v", "costs": [1, 1, 1], "memory": 2.5, "stages": 1},
    "activation_checkpointing": {"interval": 1, "granularity": "matmul", "partition_activations": False},
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 8, "hysteresis": 2, "min_loss_scale": 1},
    "communication_data_type": "fp32",
    "seed": 1,
    "steps_per_print": 10,
    "dump_state": False,
    "memory_breakdown": False,
    "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1, "top_modules": 1, "detailed": True},
    "comms_logger": {"enabled": False, "prof_all": True, "debug": False},
    "torch_autocast": {"enabled": False, "dtype": "bfloat16"},
    "amp": {"enabled": False, "opt_level": "O1", "loss_scale": 128.0},
    "csv_monitor": {"enabled": True, "output_path": "runs", "job_name": "one"},
}

# What is wrong where, by kind of value. (Text for a number is wrong too: a file says 16, not "16".)
WRONG: dict[str, list[Any]] = {
    "int": ["16", True, 1.5, [1], {"a": 1}],
    "float": ["1.0", True, [1], {"a": 1}],
    "rate": ["1.0", True, ["1"], {"a": 1}],  # a list has one for each parameter group
    "bool": ["true", 1, 0, [True], {}],
    "text": [1, True, ["a"], {"a": 1}, "no-such-choice"],
    "path": [1, True, ["a"], {"a": 1}],
    "section": [1, "on", [1], 2.5],
    "pair": ["0.9", 0.9, [0.9], [0.9, "0.95"], [0.9, True], {"a": 1}],
    "costs": ["1", 1, [1, "1", 1], [1, 1], {"a": 1}],
}
RANGES: dict[str, list[Any]] = {
    "train_batch_size": [0, -4],
    "train_micro_batch_size_per_gpu": [0, -1],
    "gradient_accumulation_steps": [0, -2],
    "optimizer.params.lr": [-1e-3, -1],
    "optimizer.params.betas": [[0.9, 1.0], [-0.1, 0.9], [1.5, 0.9]],
    "optimizer.params.eps": [-1, -1e-8],
    "optimizer.params.weight_decay": [-0.1],
    "scheduler.params.warmup_num_steps": [0, -3],
    "scheduler.params.warmup_max_lr": [-1],
    "scheduler.params.total_num_steps": [0, -1],
    "gradient_clipping": [-1, float("inf"), float("nan")],
    "gradient_predivide_factor": [0, -2, float("inf")],
    "zero_optimization.stage": [4, -1, 7],
    "zero_optimization.reduce_bucket_size": [0, -5],
    "zero_optimization.stage3_max_live_parameters": [-1],
    "zero_optimization.sub_group_size": [0, -1],
    "pipeline.costs": [[-1, 1, 1], [1, 1, 1, 1, 1]],
    "pipeline.memory": [0, -1],
    "pipeline.stages": [0, -2],
    "activation_checkpointing.interval": [-1],
    "fp16.loss_scale": [-2],
    "fp16.initial_scale_power": [-1, 5000],
    "fp16.hysteresis": [0],
    "fp16.min_loss_scale": [0, -1],
    "steps_per_print": [0, -10],
    "flops_profiler.profile_step": [-1],
    "flops_profiler.module_depth": [-2],
    "flops_profiler.top_modules": [0],
    "amp.loss_scale": [0, -1],
}


def kind_of(path: str, value: Any) -> str:
    if path == "optimizer.params.betas":
        return "pair"
    if path == "pipeline.costs":
        return "costs"
    if path.startswith("scheduler") and path.endswith("_lr"):
        return "rate"
    if isinstance(value, dict):
        return "section"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, str):
        return "path" if path.endswith(("output_path", "job_name")) else "text"
    known = dict(keys())
    params = {"warmup_num_steps", "total_num_steps"}
    whole = path.rsplit(".", 1)[-1] in params if ".params." in path else "int" in str(known[path].annotation)
    return "int" if whole else "float"


def leaves(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        yield prefix + key, value
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")


def put(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    made = copy.deepcopy(config)
    *sections, last = path.split(".")
    inner = made
    for name in sections:
        inner = inner.setdefault(name, {})
    inner[last] = value
    return made


def rename(config: dict[str, Any], path: str, name: str) -> dict[str, Any]:
    made = copy.deepcopy(config)
    *sections, last = path.split(".")
    inner = made
    for section in sections:
        inner = inner[section]
    inner[name] = inner.pop(last)
    return made


def misspelt(draw: random.Random, name: str) -> str:
    at = draw.randrange(len(name) - 1)
    ways = [
        name[:at] + name[at + 1 :],
        name[:at] + name[at + 1] + name[at] + name[at + 2 :],
        name[:at] + name[at] + name[at:],
        name[:at] + "q" + name[at + 1 :],
    ]
    return draw.choice(ways)


def contradictions(draw: random.Random) -> tuple[dict[str, Any], list[str]]:
    """Values that are each fine, and not together; and the keys of which the message must name one."""
    two, three = draw.randint(2, 9), draw.randint(2, 9)
    choices: list[tuple[dict[str, Any], list[str]]] = [
        (put(VALID, "train_batch_size", 8 * two + draw.randint(1, 7)), ["train_batch_size"]),
        (put(VALID, "train_micro_batch_size_per_gpu", 49 + two), ["train_batch_size"]),
        (put(VALID, "gradient_accumulation_steps", 25 + three), ["train_batch_size"]),
        (put(VALID, "fp16.enabled", True), ["bf16.enabled", "fp16.enabled"]),
        (put(VALID, "pipeline.activation_checkpoint_interval", 1 + two), ["activation_checkpoint_interval"]),
        (put(VALID, "activation_checkpointing.number_checkpoints", two), ["number_checkpoints"]),
        (put(VALID, "activation_checkpointing.granularity", "selective"), ["granularity"]),
        (
            put(VALID, "activation_checkpointing.contiguous_memory_optimization", True),
            ["contiguous_memory_optimization"],
        ),
        (put(VALID, "zero_optimization.offload_param.device", "nvme"), ["nvme_path"]),
        (put(VALID, "zero_optimization.cpu_offload", True), ["cpu_offload"]),
        (put(VALID, "bfloat16", {"enabled": False}), ["bfloat16"]),
        (put(VALID, "optimizer.params.max_grad_norm", float(two)), ["max_grad_norm"]),
        (put(VALID, "optimizer.params.fp32_optimizer_states", False), ["fp32_optimizer_states"]),
        (put(VALID, "optimizer.params.adamw_mode", draw.choice(["no", 3])), ["adamw_mode"]),
        (put(VALID, "scheduler.params.warmup_max_lr", [0.1] * two + [-1.0]), ["warmup_max_lr"]),
        (put(VALID, "tensor_parallel.dtype", draw.choice(["bf16", "fp16"])), ["tensor_parallel.dtype"]),
        (put(VALID, "amp", {"enabled": True, "opt_level": f"O{two}"}), ["amp"]),
        (put(VALID, "timeline", {"step": 0}), ["timeline.step"]),
        (put(VALID, "amp", {"enabled": True, "opt_level": "O1"}), ["amp.enabled"]),
        (put(VALID, "torch_autocast", {"enabled": True, "dtype": "float16"}), ["torch_autocast.enabled"]),
        (put(VALID, "comms_logger", {"enabled": True, "prof_all": False}), ["prof_ops"]),
        (put(VALID, "data_types", {"grad_accum_dtype": draw.choice(["float", "int8"])}), ["grad_accum_dtype"]),
    ]
    return draw.choice(choices)


def corruption(seed: int) -> tuple[dict[str, Any], list[str]]:
    """A corrupted configuration, and the keys of which the message must name one."""
    draw = random.Random(seed)
    how = seed % 4
    if how == 0:
        path, value = draw.choice(list(leaves(VALID)))
        return put(VALID, path, draw.choice(WRONG[kind_of(path, value)])), [path]
    if how == 1:
        path, _ = draw.choice(list(leaves(VALID)))
        last = path.rsplit(".", 1)[-1]
        name = misspelt(draw, last)
        while name == last:
            name = misspelt(draw, last)
        return rename(VALID, path, name), [name]
    if how == 2:
        path = draw.choice(list(RANGES))
        return put(VALID, path, draw.choice(RANGES[path])), [path]
    return contradictions(draw)


def complaint(config: dict[str, Any]) -> str:
    """Text of the error for a configuration, empty if the configuration is accepted."""
    try:
        read_config(config)
    except ConfigError as error:
        return str(error)
    return ""


def test_200_corruptions_are_refused_each_by_its_key() -> None:
    assert complaint(VALID) == ""
    right = {path.rsplit(".", 1)[-1] for path, _ in leaves(VALID)}
    for seed in range(400):
        config, names = corruption(seed)
        said = complaint(config)
        assert said, f"corruption {seed} was taken: {names}"
        assert any(name in said for name in names), (seed, names, said)
        assert len(said) < 1500, (seed, said)
        if seed % 4 == 1:  # misspelt: and the right one is named
            assert any(key in said for key in right), (seed, said)
    assert not torch.distributed.is_initialized()


def test_a_corrupt_file_is_one_line_on_the_terminal(tmp_path: Path) -> None:
    for seed in range(8):
        config, names = corruption(seed)
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        result = CliRunner().invoke(app, ["config", str(path)])
        assert isinstance(result.exception, ConfigError) and result.stdout == ""
        assert any(name in str(result.exception) for name in names)


# ----------------------------------------------------------------------------------------------- the command, the docs


def test_the_command_prints_what_was_resolved(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(TUTORIAL.replace('"cpu_offload": true', '"cpu_offload": true, "legacy_stage1": false'))
    result = CliRunner().invoke(app, ["config", str(path), "--data", "4"])
    assert result.exit_code == 0
    made = json.loads(result.stdout)
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [made[key] for key in sizes] == [16, 4, 1]
    assert made["optimizer"]["type"] == "AdamW" and made["optimizer"]["params"]["amsgrad"] is False
    assert made["scheduler"]["params"]["warmup_type"] == "log"
    assert "zero_optimization.legacy_stage1 does nothing: there is one stage 1" in result.stderr
    assert 'train_micro_batch_size_per_gpu is "auto": for a PipelineModule the largest that fits' in result.stderr
    # What was printed is a configuration again, and the same.
    again = read_config(made)
    assert json.loads(json.dumps(resolve_config(again, batch_sizes(again, 4)))) == made
    assert json.loads(json.dumps(resolve_config(read_config(VALID), batch_sizes(read_config(VALID), 6))))
    assert isinstance(CliRunner().invoke(app, ["config"]).exception, ConfigError)


def test_the_schema_knows_every_key() -> None:
    result = CliRunner().invoke(app, ["config", "--schema"])
    schema = json.loads(result.stdout)
    assert schema == json.loads(json.dumps(json_schema())) and not result.stdout.count("x-")
    assert set(schema["properties"]) == {*Config.model_fields, "$schema"} and schema["additionalProperties"] is False
    assert valid(VALID, schema, schema) and valid({}, schema, schema)
    assert valid({"train_batch_size": "auto", "comet": {"enabled": False}}, schema, schema)
    for bad in ({"sed": 1}, {"comet": {"enabled": True}}, {"fp16": {"hysteresis": 0}}, {"bf16": {"enabled": 1}}):
        assert not valid(bad, schema, schema), bad


def valid(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Check of a value against the part of JSON schema that our schema uses."""
    if "$ref" in schema:
        return valid(value, root["$defs"][schema["$ref"].rsplit("/", 1)[-1]], root)
    if "anyOf" in schema and not any(valid(value, each, root) for each in schema["anyOf"]):
        return False
    if "const" in schema and not same(value, schema["const"]):
        return False
    if "enum" in schema and not any(same(value, each) for each in schema["enum"]):
        return False
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    kinds: dict[str, Callable[[], bool]] = {
        "object": lambda: isinstance(value, dict),
        "array": lambda: isinstance(value, list),
        "string": lambda: isinstance(value, str),
        "boolean": lambda: isinstance(value, bool),
        "null": lambda: value is None,
        "number": lambda: number,
        "integer": lambda: number and float(value).is_integer(),
    }
    if "type" in schema and not kinds[schema["type"]]():
        return False
    if number and not (schema.get("minimum", value) <= value <= schema.get("maximum", value)):
        return False
    if isinstance(value, dict):
        inside = schema.get("properties", {})
        if schema.get("additionalProperties") is False and set(value) - set(inside):
            return False
        if set(schema.get("required", ())) - set(value) or len(value) > schema.get("maxProperties", len(value)):
            return False
        return all(valid(each, inside[key], root) for key, each in value.items() if key in inside)
    return True


def same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def test_the_table_in_the_docs_is_the_models() -> None:
    text = (ROOT / "docs" / "config.md").read_text()
    assert markdown() in text, "renew it: triax config --table"
    assert CliRunner().invoke(app, ["config", "--table"]).stdout.strip() == markdown()


# ------------------------------------------------------------------------------------------------------ what acts


def scaled(replicas: int, config: dict[str, Any]) -> tuple[Any, float | None, float, list[float]]:
    """Gradients, norm and loss of a second step, and the largest gradient that the first collective of it summed."""
    grid = Grid(data=replicas, timeout=60)
    made = engine(grid, gradient_accumulation_steps=2, gradient_clipping=0.01, **config)
    batches, summed = data(grid), []
    made.train_batch(batches)
    for bucket in made.data_axis.buckets:
        reduce = bucket.reduce

        def spy(axis: Any, bucket: Any = bucket, reduce: Any = reduce) -> Any:
            pending = reduce(axis)
            summed.append(float(bucket._prescale))
            return pending

        bucket.reduce = spy  # type: ignore[method-assign,assignment]
    loss = made.train_batch(batches)
    return made.gather("gradients"), made.get_global_grad_norm(), loss.item(), summed


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_predividing_changes_what_is_summed_and_not_what_is_stepped(ranks: Any, stage: int) -> None:
    zero = {"stage": stage}
    wanted = ranks(2, scaled, 2, {"zero_optimization": zero})
    for config, factor in (
        ({"prescale_gradients": True}, 1 / 2),
        ({"gradient_predivide_factor": 3.0}, 1 / 3),
        ({"gradient_predivide_factor": 4.0, "prescale_gradients": True}, 1 / 8),
    ):
        for found, want in zip(ranks(2, scaled, 2, {**config, "zero_optimization": zero}), wanted, strict=True):
            torch.testing.assert_close(found[0], want[0], rtol=1e-10, atol=1e-13)
            assert found[1] == pytest.approx(want[1], rel=1e-10) and found[2] == pytest.approx(want[2], rel=1e-10)
            assert set(found[3]) == {factor} and set(want[3]) == {1.0}


def overflowing(config: dict[str, Any]) -> float | None:
    """The norm of a step whose gradients are 40,000 on each of two replicas, summed in fp16, which ends at 65,504."""
    grid = Grid(data=2, timeout=60)
    model = PipelineModule(
        [LayerSpec(nn.Linear, 1, 1, bias=False)], grid=grid, loss_fn=lambda out, _: 40000.0 * out.sum()
    )
    base = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
    base |= {"communication_data_type": "fp16", "nan_loss": "ignore"}
    made = triax.initialize(model=model, config={**base, **config})[0]
    made.train_batch(iter([(torch.ones(1, 1), torch.ones(1, 1))]))
    return made.get_global_grad_norm()


def test_prescaling_keeps_a_sum_in_fp16_from_overflowing(ranks: Any) -> None:
    assert ranks(2, overflowing, {}) == [float("inf")] * 2
    assert ranks(2, overflowing, {"prescale_gradients": True}) == [pytest.approx(40000, rel=1e-3)] * 2


def test_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    made, batches = engine(steps_per_print=2), data()
    losses = [made.train_batch(batches).item() for _ in range(4)]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"step 2: loss {losses[1]:.4f}, lr 0.1, ") and lines[0].endswith(" samples/s")
    assert lines[1].startswith(f"step 4: loss {losses[3]:.4f}, lr 0.1, ")
    half = engine(steps_per_print=1, fp16={"enabled": True, "loss_scale": 8})
    half.train_batch((x.float(), y.float()) for x, y in data())
    assert "loss scale 8, 0 steps skipped" in capsys.readouterr().out


def test_the_resolved_configuration_is_dumped(capsys: pytest.CaptureFixture[str]) -> None:
    made = engine(dump_state=True)
    first, _ = json.JSONDecoder().raw_decode(capsys.readouterr().out)  # what every rank holds is behind it
    assert first == json.loads(json.dumps(resolve_config(made.config, made.batch)))


def test_csv_files_have_deepspeeds_names(tmp_path: Path) -> None:
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    losses, norms = [], []
    for _ in range(2):  # a run that goes on adds to the files
        made, batches = engine(csv_monitor=monitor, gradient_accumulation_steps=3), data()
        for _ in range(2):
            losses.append(made.train_batch(batches).item())
            norms.append(made.get_global_grad_norm())
    found = {file.name: list(csv.reader(file.open())) for file in (tmp_path / "job").iterdir()}
    told = ("train_loss", "lr", "grad_norm", "step_time_ms", "samples_per_second", "peak_memory_gb")
    assert set(found) == {f"Train_Samples_{name}.csv" for name in told}
    assert found["Train_Samples_lr.csv"] == [["step", "lr"], *([str(step), "0.1"] for step in (6, 12, 6, 12))]
    assert [float(row[1]) for row in found["Train_Samples_train_loss.csv"][1:]] == losses
    assert [float(row[1]) for row in found["Train_Samples_grad_norm.csv"][1:]] == norms


def unwritable(folder: str) -> str:
    try:
        engine(Grid(data=2, timeout=60), csv_monitor={"enabled": True, "output_path": folder})
    except ConfigError as error:
        return str(error)
    return "nothing"


def test_what_cannot_be_written_is_said_on_every_rank(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = ranks(2, unwritable, str(tmp_path / "file"))
    assert said[0] == said[1] and "Not a directory" in said[0]


# ------------------------------------------------------------------------------------- DeepSpeed's small methods


def test_what_an_engine_says_of_itself() -> None:
    made = engine(gradient_accumulation_steps=3, gradient_clipping=0.5, zero_optimization={"stage": 2})
    assert (
        made.get_batch_info()
        == (6, 2, 3)
        == (
            made.train_batch_size(),
            made.train_micro_batch_size_per_gpu(),
            made.gradient_accumulation_steps(),
        )
    )
    assert made.get_lr() == [0.1] and made.get_mom() == [0] and made.get_global_grad_norm() is None
    assert made.zero_optimization() and made.zero_optimization_stage() == 2 and made.gradient_clipping() == 0.5
    assert not made.fp16_enabled() and not made.bfloat16_enabled() and made.loss_scale() is None
    made.train_batch(data())
    assert made.is_gradient_accumulation_boundary() and made.skipped_steps == 0
    assert made.global_steps == 1 and made.global_samples == 6 and made.micro_steps == 3
    torch.testing.assert_close(made.module_state_dict(), made.gather(), rtol=0, atol=0)
    with FlopCounterMode(display=False) as counter:
        made.train_batch(data())
    assert counter.get_total_flops() == 3 * (2 + 3) * 2 * 2 * WIDTH * WIDTH  # microbatches x products x 2 * B * W^2


def resized(shape: tuple[int, int, int], schedule: str) -> Any:
    grid = Grid(*shape, timeout=60)
    made = engine(grid, gradient_accumulation_steps=2, pipeline={"schedule": schedule})
    batches, losses = data(grid), []
    for size in (None, 8 * grid.data.size, 2 * grid.data.size):
        if size is not None:
            made.set_train_batch_size(size)
        losses.append(made.train_batch(batches).item())
    info = made.get_batch_info(), made.global_samples
    for wrong in (2 * grid.data.size + 1, 0):
        with pytest.raises(ConfigError):
            made.set_train_batch_size(wrong)
    return losses, made.gather(), info


@pytest.mark.parametrize(("shape", "schedule"), [((1, 1, 1), "1f1b"), ((2, 1, 1), "zb-h1"), ((1, 2, 1), "gpipe")])
def test_a_batch_of_another_size(ranks: Any, shape: tuple[int, int, int], schedule: str) -> None:
    layers: list[Any] = [LayerSpec(nn.Linear, WIDTH, WIDTH), torch.tanh, LayerSpec(nn.Linear, WIDTH, WIDTH)]
    model = PipelineModule(layers, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(2, 64, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted, start = [], 0
    for size in (4 * shape[1], 8 * shape[1], 2 * shape[1]):
        optimizer.zero_grad()
        loss = mean_loss(model(x[start : start + size]), y[start : start + size])
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
        start += size
    for losses, weights, info in ranks(shape[0] * shape[1], resized, shape, schedule):
        assert losses == pytest.approx(wanted, rel=1e-10)
        torch.testing.assert_close(
            weights, {n: p.detach() for n, p in model.named_parameters()}, rtol=1e-10, atol=1e-13
        )
        assert info == ((2 * shape[1], 2, 1), 14 * shape[1])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"min_compression": 3},
            "the configuration: there is no 'min_compression' here, but in gradient_compression: write it there",
        ),
        ({"bf16": {"loss_scale": 0}}, "bf16: there is no 'loss_scale' here, but in fp16 and amp: write it there"),
        ({"zero_optimization": {"qwerty": 1}}, "no key like it: `triax config --table` lists all keys"),
        ({"optimizer": {"type": "z" * 5000}}, "there is no such optimizer; known are"),
        ({"z" * 5000: 1}, "no key like it: `triax config --table` lists all keys"),
    ],
)
def test_a_key_of_another_section_is_sent_there(config: dict[str, Any], words: str) -> None:
    """The message listed all 70 keys of the section."""
    with pytest.raises(ConfigError) as error:
        read_config({"train_batch_size": 2, **config})
    assert words in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize("section", ["fp16", "amp"])
def test_a_loss_scale_below_one_is_the_users_own(section: str) -> None:
    """A scale of 0.5 was refused for the default of min_loss_scale: in a resolved file, and for amp by pydantic."""
    config = read_config({"train_batch_size": 2, section: {"enabled": True, "loss_scale": 0.5}})
    again = read_config(resolve_config(config, batch_sizes(config, 1)))
    for each in (config, again):
        scaler = make_loss_scaler(options_of(each).precision)
        assert scaler is not None and scaler.scale == 0.5
