"""Arguments that are no path: every function of the API says so at once, on every rank, and writes nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import triax
import triax.compat.deepspeed as deepspeed
from triax.base.errors import ConfigError

from support.toys import error_text

CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
CONFIG |= {"checkpoint": {"patience": 60.0}}
WRONG: list[Any] = [None, "", 3, b"folder", "a\0b"]


def errors(engine: Any, wrong: Any, name: Any) -> list[str]:
    calls = (
        lambda: engine.save_checkpoint(wrong),
        lambda: engine.load_checkpoint(wrong),
        lambda: engine.save_16bit_model(wrong),
        lambda: engine.save_16bit_model("there", name),
        lambda: engine.record_trace(wrong),
    )
    return [error_text(call, ConfigError) for call in calls]


def every_call(folder: str) -> list[str]:
    """Errors of the engines' calls, on each rank: all ranks give no path, then the last one alone."""
    os.chdir(folder)
    found = []
    grid = triax.Grid()
    first = grid.rank < grid.size - 1
    for make in (triax.initialize, deepspeed.initialize):
        engine: Any = make(model=nn.Linear(2, 2), config=CONFIG)[0]
        for wrong in WRONG:
            found += errors(engine, wrong, wrong)
        found += errors(engine, folder if first else None, "x" if first else None)
        engine.backward(engine(torch.ones(2, 2)).sum())
        engine.step()  # nothing was lost
        assert engine.global_steps == 1
    grid.close()
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_engine_calls_refuse_wrong_paths_on_every_rank(ranks: Any, tmp_path: Path, size: int) -> None:
    """``save_checkpoint(None)`` of the DeepSpeed adapter wrote a folder named None."""
    for found in ranks(size, every_call, str(tmp_path)):
        assert all(
            "was given save_dir=" in text or "load_dir=" in text or "save_filename=" in text or "file=" in text
            for text in found
        )
        if size == 2:  # of the last round, in which rank 1 alone gave no path
            assert all("rank 1 (" in text for text in found[-5:-1]), found[-5:]
    assert not any(tmp_path.iterdir())


def test_functions_without_an_engine_refuse_wrong_paths() -> None:
    model = triax.PipelineModule([nn.Linear(2, 2)])
    for call in (
        lambda wrong: triax.load_weights(model, wrong),
        lambda wrong: triax.save_hf(model, wrong),
        lambda wrong: triax.save_lora(model, wrong),
        lambda wrong: triax.load_lora(wrong, model),
        lambda wrong: triax.lora_config(wrong),
    ):
        for wrong in WRONG:
            assert "give the path of a folder" in error_text(lambda: call(wrong), ConfigError)  # noqa: B023


def errors_of_two_engines(folder: str) -> list[str]:
    """Save two engines of unlike models into one folder, and two of equal models; return the errors."""
    grid = triax.Grid(timeout=60)
    options = triax.EngineOptions(optimizer=torch.optim.SGD, batch=triax.Batch(size=2), zero=triax.Zero(stage=3))
    first, unlike, restarted = (triax.Engine(nn.Linear(4, width), options, grid=grid) for width in (2, 1, 2))
    first.save_checkpoint(folder)
    found = error_text(lambda: unlike.save_checkpoint(folder), ConfigError)
    unlike.save_checkpoint(folder, tag="unlike")
    first.load_checkpoint(folder, tag="global_step0")
    restarted.save_checkpoint(folder)  # of the same model: a run that starts again
    return [found]


def test_a_second_engine_cannot_save_over_the_first(ranks: Any, tmp_path: Path) -> None:
    for (found,) in ranks(2, errors_of_two_engines, str(tmp_path / "runs")):
        assert "runs/global_step0, which another engine of this process has saved" in found
        assert "Give each engine a folder of its own" in found
