"""Numbers, seeds and names of folders that would act otherwise than they say: each place refuses them."""

from __future__ import annotations

import math
import re
from typing import Any, get_args

import pytest
import torch

import triax
from triax.base.errors import ConfigError
from triax.base.option_error import OptionError
from triax.compat.deepspeed.config.document import resolved
from triax.compat.deepspeed.config.read import section
from triax.compat.deepspeed.config.table import keys
from triax.compat.deepspeed.config.to_options import batch_sizes, folder, parse_config
from triax.compat.deepspeed.from_config import read_config
from triax.data.dataloader import make_loader
from triax.engine.optim.nonfinite import MOST_IN_A_ROW
from triax.options.base import hints_of, walk
from triax.train.sections import TrainingFile

from support.toys import mean_loss


def test_training_file_numbers_outside_float32_are_refused() -> None:
    tried = 0
    for path, owner, found in walk(TrainingFile):
        if float in (hint := hints_of(owner)[found.name], *get_args(hint)):
            for value in (1e-320, 1e-40, 1e39, math.inf, math.nan):
                given = {"model": {"preset": "gpt2"}, "data": "x", "sample": {"prompt": "a"}}
                given |= {"method": {"name": "simpo"}}
                with pytest.raises(OptionError) as caught:
                    TrainingFile.of(placed(given, path, value))
                assert path in str(caught.value)
                tried += 1
    assert tried > 40


def placed(values: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Put a value at a path; folders and short forms on the way become sections."""
    section, _, rest = path.partition(".")
    inner = values.get(section, {}) if rest else value
    return {
        **values,
        section: placed(inner if isinstance(inner, dict) else {"training": inner}, rest, value) if rest else value,
    }


def test_configuration_numbers_outside_float32_are_refused() -> None:
    tried = 0
    for path, key in keys():
        if key.status == "acts" and float in key.kinds:
            for value in (1e-320, 1e-40, 1e39, math.inf, math.nan):
                with pytest.raises(ConfigError, match=rf"(^|; ){re.escape(path)} = "):
                    parse_config(placed({}, path, value))
                tried += 1
    assert tried > 40


ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"gradient_predivide_factor": 1e300}, "gradient_predivide_factor = 1e+300"),
        ({"pipeline": {"schedule": "auto", "costs": [1.0, 1e-320, 1.0]}}, "pipeline.costs"),
        ({"seed": 10**30}, "seed = 1000"),
        ({"seed": -1}, "seed = -1"),
        ({"optimizer": {"type": "Adam", "params": {"lr": 1e-320}}}, "optimizer.params.lr: give a number of 1.2e-38"),
        (
            {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "type": "x"}}},
            "optimizer.params: SGD has no type; it takes lr",
        ),
        ({"optimizer": {"type": "SGD", "params": {"lr": 1e308}}}, "optimizer.params.lr: give a number of 3.4e"),
        ({"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, math.nan]}}}, "give a finite number"),
        (
            {**ADAM, "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.1, "warmup_max_lr": 0.01}}},
            "warmup_min_lr = 0.1 is above warmup_max_lr = 0.01: exchange them",
        ),
        (
            {**ADAM, "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "warmup_min_ratio": 2}}},
            "warmup_min_ratio = 2: give a ratio from 0 to 1",
        ),
        ({"gradient_compression": {"type": "fp16", "rank": 4}}, "rank is an option of type powersgd"),
        ({"gradient_compression": {"rank": 4}}, "rank is an option of type powersgd, and the type is none"),
        ({"csv_monitor": {"enabled": True, "job_name": "../.."}}, "csv_monitor.job_name = '../..'"),
        ({"tensorboard": {"job_name": "/tmp/x"}}, "tensorboard.job_name"),
        ({"json_monitor": {"job_name": ""}}, "json_monitor.job_name"),
        ({"json_monitor": {"job_name": "a\\..\\b"}}, "json_monitor.job_name"),
    ],
)
def test_values_that_would_act_differently_are_refused(config: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config({"train_batch_size": 2, **config})
    assert expected in str(caught.value)


def test_allowed_extreme_values_are_kept() -> None:
    assert folder(section("json_monitor", job_name="a/b.c")).as_posix() == "a/b.c"
    assert section("gradient_compression", type="topk", start_step=3).start_step == 3
    config = parse_config({"train_batch_size": 2, "gradient_compression": {"type": "topk"}, "seed": 2**63 - 1})
    written = resolved(config, batch_sizes(config, 1))
    assert "rank" not in written["gradient_compression"] and written["gradient_compression"]["ratio"] == 0.01
    assert parse_config(written).gradient_compression == config.gradient_compression


def test_functions_refuse_impossible_seeds_and_numbers() -> None:
    with pytest.raises(ValueError, match=r"seed is 1000.*: give a whole number from 0 to 2\*\*63 - 1"):
        triax.PipelineModule([torch.nn.Linear(2, 2)], seed=10**30)
    with pytest.raises(ValueError, match="seed is -1"):
        make_loader([1, 2], 2, 1, 0, 1, -1)
    with pytest.raises(ValueError, match=r"seed is 1\.5"):
        triax.PipelineModule([torch.nn.Linear(2, 2)], seed=1.5)  # type: ignore[arg-type]
    optimizer = triax.ShardedOptimizer(torch.optim.SGD, torch.nn.Linear(2, 2).parameters(), triax.Grid(), lr=0.1)
    with pytest.raises(ValueError, match="max_norm is 1e-320"):
        optimizer.clip_grad_norm_(1e-320)


def test_steps_that_are_all_skipped_end_the_run() -> None:
    """Otherwise a run whose loss is always NaN would skip all steps without an error."""
    layers = [torch.nn.Linear(3, 3)]
    model = triax.PipelineModule(layers, loss_fn=mean_loss)
    engine, *_ = triax.initialize(model=model, config={**ADAM, "train_batch_size": 2, "nan_loss": "skip"})
    good, bad = torch.ones(2, 3), torch.full((2, 3), math.nan)
    for _ in range(MOST_IN_A_ROW - 1):
        engine.train_batch(iter([(bad, bad)]))
    engine.train_batch(iter([(good, good)]))  # begins the count anew
    for _ in range(MOST_IN_A_ROW - 1):
        engine.train_batch(iter([(bad, bad)]))
    with pytest.raises(triax.AgreedError, match=f"the {MOST_IN_A_ROW}th step in a row that is skipped"):
        engine.train_batch(iter([(bad, bad)]))
    assert engine.skipped_steps == 2 * MOST_IN_A_ROW - 1
