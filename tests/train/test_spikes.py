"""train/spikes.py: the definition of a spike; runs that skip or rewind equal runs without the spike's batch."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import triax
from triax.base.errors import AgreedError, ConfigError
from triax.checkpoint.format.folder import tags
from triax.train import loop
from triax.train.spikes import SpikeDetector, SpikeGuard

from support.file_runs import Recorder, run_watched
from support.tokenized import folder
from support.toys import error_text, mean_loss, same

WIDTH, BATCH, STEPS = 4, 4, 16


def test_the_spike_detector_follows_its_definition() -> None:
    """numpy computes the definition over the last values of a random walk with jumps, nan and infinity."""
    draw = random.Random(3)
    detector = SpikeDetector(6.0, 10.0, 30)
    losses: list[float] = []
    norms: list[float] = []
    found = 0
    for _ in range(400):
        loss = draw.gauss(3, 0.1) + draw.choice((0, 0, 0, 0, 0, 0, 0.5, 1, 9))
        norm = math.exp(draw.gauss(0, 0.5)) * draw.choice((1, 1, 1, 1, 5, 20))
        loss, norm = draw.choice(((loss, norm),) * 30 + ((math.nan, norm), (loss, math.inf)))
        spike = not (math.isfinite(loss) and math.isfinite(norm))
        if len(losses) >= 20 and math.isfinite(loss):
            middle = np.median(losses[-30:])
            deviation = 1.4826 * np.median(np.abs(np.array(losses[-30:]) - middle))
            spike |= bool(loss > middle + 6 * max(deviation, 0.01 * middle))
        if len(norms) >= 20 and math.isfinite(norm):
            spike |= norm > 10 * statistics.median(norms[-30:])
        assert bool(detector.judge(loss, norm)) == spike
        losses += [loss] * math.isfinite(loss)
        norms += [norm] * math.isfinite(norm)
        found += spike
    assert 50 < found < 200 and len(detector.losses) == len(detector.norms) == 30


def test_noise_of_constant_losses_is_no_spike() -> None:
    detector = SpikeDetector(6.0, 10.0, 10)
    assert not any(detector.judge(2.0 + 1e-9 * step, None) for step in range(50))
    assert "the loss is 2.2, and the 10 steps before have a median of 2 and" in detector.judge(2.2, None)
    assert detector.judge(None, math.nan) == "the norm of the gradient is nan"


class Batches(IterableDataset[tuple[Tensor, Tensor]]):
    """Batches in their order, numbered from 1; labels of the given ones are multiplied."""

    def __init__(self, jumps: dict[int, float], only: list[int] | None = None) -> None:
        self._jumps, self._only = jumps, only or [*range(1, 40)]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in self._only:
            generator = torch.Generator().manual_seed(number)
            x, y = torch.randn(2, BATCH, WIDTH, generator=generator, dtype=torch.float64)
            yield from zip(x, y * self._jumps.get(number, 1.0), strict=True)


def engine_of(grid: tuple[int, int], data: Batches, **config: Any) -> Any:
    model = triax.PipelineModule(
        [triax.LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)],
        grid=triax.Grid(pipe=grid[0], data=grid[1]),
        loss_fn=mean_loss,
        seed=3,
        dtype=torch.float64,
    )
    settings = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 4, "total_num_steps": 60}},
        **config,
    }
    return triax.initialize(model=model, config=settings, training_data=data)[0]


def options(action: str, **more: Any) -> Any:
    return SimpleNamespace(**{"action": action, "loss": 20.0, "norm": 30.0, "window": 8, "limit": 3} | more)


Trace = tuple[list[tuple[int, float]], dict[str, Tensor], dict[str, Any], int]


def train(
    grid: tuple[int, int],
    jumps: dict[int, float],
    action: str,
    folder: str,
    steps: int = STEPS,
    damage_at: int | None = None,
    **more: Any,
) -> Trace:
    """Train with a guard: the steps that stayed with their losses, weights, the guard's state, spikes."""
    section = {"dir": folder, "every": 4, "resume": "auto"} if folder else {}
    engine = engine_of(grid, Batches(jumps), checkpoint=section)
    guard = SpikeGuard(engine, options(action, **more), folder or None)
    engine.client_state = {"spikes": guard.state}
    guard.load(engine.resumed[1])
    losses: list[tuple[int, float]] = []
    while engine.global_steps < steps:
        if engine.global_steps == damage_at:
            for file in Path(folder).glob("*/rank-00000.safetensors"):
                file.write_bytes(file.read_bytes()[:-3] + b"\xff\xfe\xfd")
        loss = float(engine.train_batch())
        if guard.rewind():
            losses = [each for each in losses if each[0] <= engine.global_steps]
        else:
            losses.append((engine.global_steps, loss))
    return losses, engine.gather(), dict(guard.state), guard.spikes


def plain(only: list[int]) -> tuple[list[float], dict[str, Tensor]]:
    """One process, without a guard, on these batches."""
    engine = engine_of((1, 1), Batches({}, only))
    return [float(engine.train_batch()) for _ in only], engine.gather()


@pytest.mark.parametrize(
    ("grid", "jump"),
    [
        ((2, 1), 300.0),
        ((1, 2), math.inf),
        pytest.param((2, 2), 300.0, marks=pytest.mark.exhaustive),
        pytest.param((2, 1), math.inf, marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_that_skips_or_rewinds_equals_one_without_the_batch(
    ranks: Any, tmp_path: Path, grid: tuple[int, int], jump: float
) -> None:
    """Skip leaves out batch 11; rewind, at batch 12, where a checkpoint is due, leaves out those since step 8."""
    for action, at, kept in (
        ("skip", 11, [*range(1, 11), *range(12, 17)]),
        ("rewind", 12, [*range(1, 9), *range(13, 21)]),
    ):
        wanted, weights = plain(kept)
        place = tmp_path / action
        for losses, found, state, spikes in ranks(
            math.prod(grid), train, grid, {at: jump}, action, str(place), timeout=60
        ):
            assert spikes == 1 and state["rewinds"] == (action == "rewind")
            same([loss for step, loss in losses if action == "rewind" or step != at], wanted)
            same(found, weights)
        assert tags(place)[-1] == "global_step16" and len(tags(place)) == 4


def test_action_warn_logs_the_spike_and_takes_the_step(caplog: pytest.LogCaptureFixture) -> None:
    losses, weights, _, spikes = train((1, 1), {11: 300.0}, "warn", "")
    assert spikes == 1 and "step 11 is a spike, because the loss is" in caplog.text
    assert "norm of the gradient is" in caplog.text
    none = train((1, 1), {11: 300.0}, "none", "")
    assert none[0] == losses and all(torch.equal(none[1][name], weights[name]) for name in weights)
    with pytest.raises(AgreedError, match="the loss is inf"):  # nan_loss decides, which raises
        train((1, 1), {11: math.inf}, "warn", "")


def test_a_resumed_run_skips_the_same_spikes(tmp_path: Path) -> None:
    """A run of 16 steps, stopped at step 9 and resumed at 8, skips steps 10 and 15, as without a stop.

    The window of losses is resumed, too: an empty one would hold too little at step 10 to find a spike.
    """
    jumps = {10: 300.0, 15: 300.0}
    _, _, wanted_state, _ = train((1, 1), jumps, "skip", "")
    train((1, 1), jumps, "skip", str(tmp_path), steps=9)
    _, weights, state, spikes = train((1, 1), jumps, "skip", str(tmp_path))
    assert spikes == 2 and state == wanted_state
    _, wanted = plain([number for number in range(1, STEPS + 1) if number not in jumps])
    same(weights, wanted)


def test_rewind_does_not_use_damaged_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The run said that it went back, took one of its rewinds for it, and had the state of the spike's step."""
    losses, weights, state, _ = train((1, 1), {11: 300.0}, "rewind", str(tmp_path), damage_at=10)
    wanted, plain_weights = plain([*range(1, 11), *range(12, 17)])
    same([loss for step, loss in losses if step != 11], wanted)
    same(weights, plain_weights)
    assert state["rewinds"] == 0 and "there is no checkpoint to go back to: step 11 was left out" in caplog.text


def test_rewinds_stop_at_their_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    jumps = dict.fromkeys((11, 12, 13), 300.0)
    with pytest.raises(AgreedError, match=r"All rewinds of training\.spikes\.limit are used \(2 of 2\)"):
        train((1, 1), jumps, "rewind", str(tmp_path), limit=2)
    assert "went back from step 11 to step 8, and leaves out the 3 batches between (1 of 2 rewinds)" in caplog.text
    assert tags(tmp_path) == ["global_step4", "global_step8"]
    train((1, 1), {3: math.nan}, "rewind", str(tmp_path / "other"), steps=6)
    assert "there is no checkpoint to go back to: step 3 was left out" in caplog.text


FILE = """\
name: one
model: {preset: bytes-tiny}
data: {training: tokens, threads: 0}
training:
  steps: 8
  sequence: 16
  learning_rate: {peak: 0.3, warmup_steps: 0, schedule: constant}
  spikes: {action: skip, window: 2, loss: 0.01}
checkpoint: {every: 4}
monitor: {trace: false}
export: false
batch: 4
optimizer: {type: AdamW, eps: 0.001}    # of keys' biases, whose gradients are zero but for rounding, also equal
precision: fp64
"""


def train_file(root: str, *changes: str) -> tuple[list[float], dict[str, Tensor], int]:
    """Be a rank of the run of ``root/run.yaml``: losses, weights, and steps that this process skipped."""
    recorder = Recorder()
    run_watched(recorder, root, "run.yaml", *changes)
    run: Any = recorder.run
    assert run.engine.skipped_steps == run.spikes.spikes
    return [loss for loss, *_ in recorder.steps], recorder.steps[-1][2], run.engine.skipped_steps


def test_a_run_resumes_its_spike_window_from_a_uri(ranks: Any, tmp_path: Path) -> None:
    """Almost every step is a spike: stopped after 4 steps and resumed on two ranks, it is one run."""
    folder(tmp_path, 40)
    (tmp_path / "run.yaml").write_text(FILE)
    uri = f"checkpoint.folder=file://{tmp_path}/there"
    whole, weights, spikes = train_file(str(tmp_path), "name=whole")
    first, _, some = train_file(str(tmp_path), uri, "training.steps=4")
    for losses, found, more in ranks(2, train_file, str(tmp_path), uri, "grid.data=2", timeout=60):
        same(first + losses, whole)
        same(found, weights)
        assert 0 < some < spikes == some + more
    back = ("name=back", "checkpoint.every=1", "training.spikes.action=rewind", "training.spikes.limit=1")
    assert "limit are used (1 of 1)" in error_text(lambda: train_file(str(tmp_path), *back), AgreedError)


def test_a_run_of_which_every_step_is_skipped_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a run "trained" to its end, and exited with 0."""
    folder(tmp_path, 40)
    (tmp_path / "run.yaml").write_text(FILE)

    build = loop.build_module

    def without_a_number(job: Any, grid: Any) -> Any:
        module = build(job, grid)
        plain: Any = module.loss_fn
        module.loss_fn = lambda *args: (plain(*args)[0] * math.nan, plain(*args)[1])
        return module

    with monkeypatch.context() as patch:
        patch.setattr(loop, "build_module", without_a_number)
        text = error_text(lambda: train_file(str(tmp_path), "training.steps=3", "checkpoint.every=2"), AgreedError)
    assert "all 3 steps of this run were skipped, so that it did not train" in text
    assert not (tmp_path / "runs" / "run" / "model").exists()


def test_impossible_spike_actions_are_refused() -> None:
    engine = engine_of((1, 1), Batches({}))
    with pytest.raises(ConfigError, match="the run saves no checkpoints to go back to"):
        SpikeGuard(engine, options("rewind"), None)
    engine = engine_of((1, 1), Batches({}), local_updates={"type": "local_sgd", "every": 2})
    with pytest.raises(ConfigError, match="under local_updates each replica has its own loss"):
        SpikeGuard(engine, options("skip"), None)
