"""Indices with a right checksum and wrong content: ``resume: auto`` passes over them, with a line each."""

from __future__ import annotations

import copy
import json
import logging
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import triax
from triax.base.errors import CorruptError
from triax.checkpoint.format.index import read_index

from support.small_checkpoints import write_index, write_index_text

BAD: tuple[Any, ...] = (None, "x", -1, 10**30, float("nan"), True, [], {})
GONE = object()


def engine() -> Any:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 3}},
        "fp16": {"enabled": True, "initial_scale_power": 4},
    }
    data = TensorDataset(torch.ones(8, 4), torch.ones(8, 3))
    return triax.initialize(model=nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), config=config, training_data=data)[
        0
    ]


def train(trained: Any) -> None:
    trained.backward((trained(torch.ones(2, 4).half()).float() - 1).square().mean())
    trained.step()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two checkpoints, of steps 1 and 2."""
    trained = engine()
    for _ in range(2):
        train(trained)
        assert trained.save_checkpoint(tmp_path / "runs", client_state={"epoch": 1, "best": torch.ones(3)})
    return tmp_path / "runs"


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a nest of dicts and lists."""
    if path:
        yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in pairs:
        yield from places(each, (*path, key))


def changed(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of the content with another value at one place."""
    found = copy.deepcopy(content)
    inside = found
    for key in path[:-1]:
        inside = inside[key]
    if value is GONE:
        del inside[path[-1]]
    else:
        inside[path[-1]] = value
    return found


def state_in_file(saved: Path, step: int) -> dict[str, torch.Tensor]:
    """Read the weights, in fp16 as the module has them, and the buffers of a checkpoint without triax."""
    held = load_file(saved / f"global_step{step}" / "rank-00000.safetensors")
    weights = {name: value.half() for name, value in held.items() if name.startswith("weights/")}
    kept = weights | {name: value for name, value in held.items() if name.startswith("buffers/")}
    return {name.partition("/")[2]: value for name, value in kept.items()}


def resume_all(saved: Path, cases: list[tuple[tuple[Any, ...], Any]], caplog: pytest.LogCaptureFixture) -> int:
    """Resume after each change of the newer index: from the older one with a line, or from the newer one. Train.

    Either way the engine has every weight and buffer that the checkpoint's file has. Returns the number of cases in
    which the older one was taken.
    """
    content = json.loads((saved / "global_step2/index.json").read_text())
    states = {step: state_in_file(saved, step) for step in (1, 2)}
    assert all(not torch.equal(value, states[2][name]) for name, value in states[1].items() if "running" in name)
    other, passed = engine(), 0
    caplog.set_level(logging.WARNING)
    for path, value in cases:
        write_index(saved / "global_step2", changed(content, path, value))
        caplog.clear()
        other.checkpointer.resume(saved)
        step, state = other.global_steps, other.module_state_dict()
        assert step in (1, 2), (path, value)
        assert state.keys() == states[step].keys()
        assert all(torch.equal(state[name], states[step][name]) for name in state), (path, value, step)
        train(other)
        assert other.global_steps == step + 1, (path, value)
        if step == 1:
            passed += 1
            lines = [each for each in caplog.messages if "is not used" in each]
            assert len(lines) == 1 and "global_step2" in lines[0] and "\n" not in lines[0], (path, value, lines)
    write_index(saved / "global_step2", content)
    other.checkpointer.resume(saved)
    assert other.global_steps == 2 and other.client_state is None
    return passed


def all_cases(saved: Path) -> list[tuple[tuple[Any, ...], Any]]:
    content = json.loads((saved / "global_step2/index.json").read_text())
    # Well-formed all the same: the name of another optimizer, another value of an option that is true or false.
    left = (("checksum",), ("run", "optimizer"), ("run", "param_groups", 0, "amsgrad"))
    return [(path, value) for path in places(content) if path not in left for value in (*BAD, GONE)]


def test_resuming_skips_indices_with_malformed_values(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The run resumes from an older checkpoint, or from this one, and trains."""
    cases = all_cases(saved)
    by_hand: list[tuple[tuple[Any, ...], Any]] = [
        (("step",), float("nan")),
        (("step",), -4),
        (("run",), GONE),
        (("run", "global_steps"), -1),
        (("run", "param_groups", 0, "lr"), "fast"),
        (("run", "lr_scheduler", "state"), {}),
        (("run", "loss_scaler", "scale"), 0),
        (("grid",), GONE),
        (("numbers", "0.weight", "step"), {"$number": ["torch.float32", {"$float": "nan"}]}),
        (("numbers", "0.weight", "step"), {"$number": ["torch.float32", -3]}),
        (("files", "rank-00000.safetensors", "header"), [0, 10**30]),
        (("files", "rank-00000.safetensors", "bytes"), -1),
        (("tensors", "weights/0.weight", "shape"), [10**30, 0]),
        (("tensors", "weights/0.weight", "boxes", 0, "slices"), [[0, 4], [0, 3]]),
        (("tensors", "weights/0.weight"), GONE),
        (("client_state",), {"$code": "import os"}),
    ]
    assert resume_all(saved, by_hand, caplog) == len(by_hand)
    assert resume_all(saved, random.Random(1).sample(cases, 40), caplog) > 30


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_resuming_survives_a_malformed_value_at_any_place(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The run goes on with the whole state of the older or of the newer checkpoint, never with a part of it."""
    cases = all_cases(saved)
    assert resume_all(saved, cases, caplog) > len(cases) // 2


def test_reading_a_broken_index_raises_one_error(saved: Path) -> None:
    """Duplicate keys, a list, deep nests, numbers of ten thousand digits: one error, which names the file."""
    path = saved / "global_step2"
    good = (path / "index.json").read_text()
    body = good[: good.index('"checksum"')]
    first = '{\n"format"'
    for text in (
        body.replace(first, '{"step": 1,\n"format"'),
        body.replace('"step": 2', f'"step": {"9" * 10_000}'),
        body.replace('"step": 2', f'"step": {"[" * 100_000}{"]" * 100_000}'),
        body.replace('"written": ', '"written": 1e'),
        "[\n",
        "",
    ):
        assert text != body
        write_index_text(path, text)
        with pytest.raises(CorruptError, match=r"index\.json"):
            read_index(path)


def test_an_index_with_overlapping_boxes_is_refused(saved: Path) -> None:
    """Two boxes of 6 elements, one of them twice: the sum of 12 is right, and half of the tensor was never read."""
    shutil.rmtree(saved / "global_step1")
    path = saved / "global_step2"
    content = json.loads((path / "index.json").read_text())
    entry = content["tensors"]["weights/0.weight"]
    (box,) = entry["boxes"]
    start = box["bytes"][0]
    half = {**box, "slices": [[0, 3], [0, 2]], "bytes": [start, start + 24], "key": "weights/0.weight[0:3, 0:2]"}
    entry["boxes"] = [half, half]
    write_index(path, content)
    with pytest.raises(CorruptError, match="overlap"):
        read_index(path)
