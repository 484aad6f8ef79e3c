"""Configurations that are refused: corrupt files, values that cannot be right, keys in wrong sections."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from triax.base.errors import ConfigError
from triax.cli.main import app
from triax.compat.deepspeed.config.document import json_schema
from triax.compat.deepspeed.config.table import keys, table
from triax.compat.deepspeed.config.to_options import batch_sizes
from triax.compat.deepspeed.from_config import read_config, resolve_config

from support.configuration_files import TUTORIAL, engine


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
def test_texts_that_are_no_json_object_are_refused(text: str | bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as error:
        read_config(path)
    assert words in str(error.value)


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
def test_impossible_configuration_values_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_config({"train_batch_size": 4, **given})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"pipeline": {"stages": 2}}, "pipeline.stages is 2, but the model's grid has 1 on its pipe axis"),
        ({"tensor_parallel": {"autotp_size": 4}}, "make it with Grid(tensor=4), or leave the key out"),
        ({"bfloat16": {"enabled": True}, "bf16": {}}, "bfloat16 is another name of bf16"),
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
def test_configurations_with_mistakes_are_refused(config: Any, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        engine(**config)
    assert words in str(error.value)


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
    "scheduler.params.warmup_num_steps": [-1, -3],
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
    whole = path.rsplit(".", 1)[-1] in params if ".params." in path else "int" in str(known[path].hint)
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


def error_of_configuration(config: dict[str, Any]) -> str:
    """Text of the error for a configuration, empty if the configuration is accepted."""
    try:
        read_config(config)
    except ConfigError as error:
        return str(error)
    return ""


def test_corrupted_configurations_are_refused_by_their_key() -> None:
    assert error_of_configuration(VALID) == ""
    right = {path.rsplit(".", 1)[-1] for path, _ in leaves(VALID)}
    for seed in range(400):
        config, names = corruption(seed)
        said = error_of_configuration(config)
        assert said, f"corruption {seed} was taken: {names}"
        assert any(name in said for name in names), (seed, names, said)
        assert len(said) < 1500, (seed, said)
        if seed % 4 == 1:  # misspelt: and the right one is named
            assert any(key in said for key in right), (seed, said)
    assert not torch.distributed.is_initialized()


def test_triax_config_refuses_corrupt_files_by_their_key(tmp_path: Path) -> None:
    for seed in range(8):
        config, names = corruption(seed)
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        result = CliRunner().invoke(app, ["compat", "config", str(path)])
        assert isinstance(result.exception, ConfigError) and result.stdout == ""
        assert any(name in str(result.exception) for name in names)


def test_triax_config_prints_the_resolved_configuration(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(TUTORIAL.replace('"cpu_offload": true', '"cpu_offload": true, "legacy_stage1": false'))
    result = CliRunner().invoke(app, ["compat", "config", str(path), "--data", "4"])
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
    assert isinstance(CliRunner().invoke(app, ["compat", "config"]).exception, ConfigError)


def test_the_schema_knows_every_key() -> None:
    result = CliRunner().invoke(app, ["compat", "config", "--schema"])
    schema = json.loads(result.stdout)
    assert schema == json.loads(json.dumps(json_schema())) and not result.stdout.count("x-")
    assert set(schema["properties"]) == {*table().names, *table().other_names, "$schema"}
    assert schema["additionalProperties"] is False
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


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"min_compression": 3},
            "the configuration: there is no 'min_compression' here, but in gradient_compression: write it there",
        ),
        ({"bf16": {"loss_scale": 0}}, "bf16: there is no 'loss_scale' here, but in fp16 and amp: write it there"),
        ({"zero_optimization": {"qwerty": 1}}, "no key like it: `triax compat config --table` lists all keys"),
        ({"optimizer": {"type": "z" * 5000}}, "there is no such optimizer; known are"),
        ({"z" * 5000: 1}, "no key like it: `triax compat config --table` lists all keys"),
    ],
)
def test_an_error_for_a_misplaced_key_names_its_section(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_config({"train_batch_size": 2, **config})
    assert words in str(error.value) and len(str(error.value)) < 500
