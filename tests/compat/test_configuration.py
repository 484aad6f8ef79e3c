"""The configuration file: accepted keys, warnings of keys without effect, refused values, and effects."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.base.errors import ConfigError
from triax.cli.main import app
from triax.compat.deepspeed.config.document import markdown
from triax.compat.deepspeed.config.table import keys
from triax.compat.deepspeed.config.to_options import batch_sizes, notes_of, options_of
from triax.compat.deepspeed.from_config import read_config, resolve_config
from triax.engine.setup.precision import make_loss_scaler

from support.configuration_files import TUTORIAL, WIDTH, data, engine
from support.toys import mean_loss


def test_the_tutorials_file_with_comments_is_read(tmp_path: Path) -> None:
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


def test_auto_values_follow_from_other_keys_or_are_refused() -> None:
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


def test_keys_without_effect_are_accepted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
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
        "zero_optimization.offload_param does nothing in stage 1, where weights are whole",
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
def test_keys_of_a_section_that_is_off_are_noted(given: dict[str, Any], note: str) -> None:
    notes = notes_of(read_config({"train_batch_size": 4, **given}))
    assert len(notes) == 1 and notes[0].startswith(note), notes


def test_default_values_that_trainers_write_are_not_noted() -> None:
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


def test_every_refused_key_says_what_to_write() -> None:
    """Every key has a description; a refused key says what to write, and its default value is accepted."""
    statuses: dict[str, int] = {}
    for key, field in keys():
        status = field.status
        statuses[status] = statuses.get(status, 0) + 1
        assert field.doc, key
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
                assert str(error.value) == f"{key}: refused: {field.doc}"
                assert (
                    "leave it out" in str(error.value) or "write " in str(error.value) or "enable" in str(error.value)
                )
    assert statuses["acts"] > 60 and statuses["idle"] > 25 and statuses["refused"] >= 38


def test_older_names_of_keys_are_read() -> None:
    assert read_config({"bfloat16": {"enabled": True}}).bf16.enabled
    assert read_config({"zero_optimization": True}).zero_optimization.stage == 1
    assert read_config({"steps_per_print": float("inf")}).steps_per_print is None
    zero = {"cpu_offload": True, "cpu_offload_use_pin_memory": True, "cpu_offload_params": True, "stage": 3}
    made = read_config({"zero_optimization": zero}).zero_optimization
    assert made.offload_optimizer.pin_memory and made.offload_param.device == "cpu"
    assert options_of(read_config({"pipeline": {"activation_checkpoint_interval": 2}})).recompute.interval == 2
    assert read_config({"$schema": "triax.schema.json", "seed": 3}).seed == 3


def test_config_params_is_accepted_in_place_of_config() -> None:
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


def test_triax_compat_config_prints_the_table_of_keys() -> None:
    assert CliRunner().invoke(app, ["compat", "config", "--table"]).stdout.strip() == markdown()


@pytest.mark.parametrize("section", ["fp16", "amp"])
def test_a_loss_scale_below_one_is_accepted(section: str) -> None:
    """Also in a resolved file, though the default of min_loss_scale is larger than 0.5."""
    config = read_config({"train_batch_size": 2, section: {"enabled": True, "loss_scale": 0.5}})
    again = read_config(resolve_config(config, batch_sizes(config, 1)))
    for each in (config, again):
        scaler = make_loss_scaler(options_of(each).precision)
        assert scaler is not None and scaler.scale == 0.5
