"""Checkpoints of replicas that step alone: saved and resumed on other grids, and when steps become synchronous."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from support.local_training import (
    ADAMW,
    OUTER,
    SGD,
    STEPS,
    Case,
    make,
    same,
)
from support.rank_checks import triax_warnings


def resumed(cases: list[tuple[Case, int, dict[str, Any]]], folder: str) -> list[Any]:
    """Save and continue; then continue from the checkpoint with another engine of other weights."""
    found = []
    for number, ((shape, local, optimizer), stop, more) in enumerate(cases):
        there = f"{folder}/{number}"
        engine = make(shape, local, optimizer, dropout=0.1, **more)
        for _ in range(stop):
            engine.train_batch()
        at_save = engine.gather()
        assert engine.save_checkpoint(there)
        same(engine.gather(), at_save)
        engine.save_16bit_model(f"{there}-16bit")
        losses = [engine.train_batch().item() for _ in range(STEPS - stop)]
        other = make(shape, local, optimizer, dropout=0.1, **more)
        other.train_batch()
        other.load_checkpoint(there)
        theirs = [other.train_batch().item() for _ in range(STEPS - stop)]
        ends, again = engine.gather(), other.gather()
        bitwise = losses == theirs and all(torch.equal(ends[name], again[name]) for name in ends)
        accounts = [each.traffic_report()["local"]["meetings"] for each in (engine, other)]
        found.append((engine.grid.data.rank, bitwise, accounts, at_save))
        assert engine.leave() and other.leave()
    return found


HALF: dict[str, Any] = {"bf16": {"enabled": True}, "communication_data_type": "bf16", "dtype": torch.float32}


RESUMED: list[tuple[Case, int, dict[str, Any]]] = [
    (((1, 2, 1), {"type": "diloco", "every": 3, **OUTER}, ADAMW), 4, {}),
    (((1, 2, 1), {"type": "local_sgd", "every": 3, "average_optimizer": True}, SGD), 2, {}),
    (((1, 2, 1), {"type": "diloco", "every": 2}, {"type": "Adafactor", "params": {"lr": 1e-2}}), 4, {}),
    (((1, 2, 1), {"type": "diloco", "every": 3}, ADAMW), 4, HALF),
    (((1, 2, 1), {"type": "async_diloco", "every": 2, "start_step": 3, "max_staleness": 0, **OUTER}, SGD), 1, {}),
]
# On pipe 2 x data 2, data 2 x tensor 2, and four replicas.
ON_FOUR = [
    ((shape, *case[1:]), stop, more)
    for shape, (case, stop, more) in zip([(2, 2, 1), (1, 2, 2), (1, 4, 1), (2, 2, 1), (1, 4, 1)], RESUMED, strict=True)
]


MORE_RESUMED: list[tuple[Case, int, dict[str, Any]]] = [
    (((1, 2, 2), {"type": "diloco", "every": 3}, ADAMW), 4, {"fp16": {"enabled": True}, "dtype": torch.float32}),
    (((2, 2, 1), {"type": "async_diloco", "every": 3, "max_staleness": 0, **OUTER}, ADAMW), 3, {}),
    (((2, 2, 1), {"type": "diloco", "every": 2, "start_step": 3, **OUTER}, ADAMW), 2, {}),
]


def load_on_another_grid(folder: str, number: int, shape: tuple[int, int, int], local: dict[str, Any] | None) -> Any:
    engine = make(shape, local, RESUMED[number][0][2], train_batch_size=8)
    engine.load_checkpoint(f"{folder}/{number}", load_lr_scheduler_states=False)
    weights = engine.gather()
    engine.train_batch()
    return weights, engine.traffic_report().get("local", {}).get("meetings")


def resumed_bitwise(ranks: Any, folder: Path, cases: list[tuple[Case, int, dict[str, Any]]]) -> list[Any]:
    everyone: list[Any] = ranks(math.prod(cases[0][0][0]), resumed, cases, str(folder), timeout=120)
    for number, case in enumerate(cases):
        for _, bitwise, (meetings, again), _ in (each[number] for each in everyone):
            assert bitwise and meetings == again, case
    return everyone


@pytest.mark.exhaustive
def test_more_kinds_of_local_updates_resume_bitwise(ranks: Any, tmp_path: Path) -> None:
    resumed_bitwise(ranks, tmp_path, MORE_RESUMED)


@pytest.mark.parametrize("cases", [RESUMED, pytest.param(ON_FOUR, marks=pytest.mark.exhaustive)], ids=["2", "4"])
def test_local_updates_resume_at_any_step_and_replica_count(
    ranks: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, cases: list[tuple[Case, int, dict[str, Any]]]
) -> None:
    """Bitwise on the same number of replicas, at any step of a round; on another number from the replicas' mean."""
    everyone = resumed_bitwise(ranks, tmp_path, cases)
    for number, local in ((0, {"type": "diloco", "every": 3, **OUTER}), (2, {"type": "diloco", "every": 2}), (0, None)):
        saved = {replica: weights for replica, _, _, weights in (each[number] for each in everyone)}
        mean = {name: sum(each[name] for each in saved.values()) / len(saved) for name in saved[0]}
        caplog.clear()
        weights, meetings = load_on_another_grid(str(tmp_path), number, (1, 1, 1), local)
        same(weights, mean)
        if local is None:
            continue
        assert meetings == (1 if number == 0 else 2)
        noted = [record.getMessage() for record in caplog.records if "continue from the mean" in record.getMessage()]
        assert len(noted) == (number == 0)  # the other was saved at a meeting


def becomes_asynchronous(folder: str) -> Any:
    """Saved within a round of diloco, and continued as async_diloco with max_staleness 0, which is diloco."""
    more: dict[str, Any] = {"every": 3, **OUTER}
    engine = make((1, 2, 1), {"type": "diloco", **more}, ADAMW)
    for _ in range(5):
        engine.train_batch()
    assert engine.save_checkpoint(folder)
    for _ in range(2):
        engine.train_batch()
    other = make((1, 2, 1), {"type": "async_diloco", "max_staleness": 0, **more}, ADAMW)
    other.load_checkpoint(folder)
    other.train_batch()
    account = other.traffic_report()["local"]
    other.train_batch()
    assert account["sent"] > 0 and account["steps"] == 6
    assert account["per_step"] == account["sent"]  # of the one step that this run took
    weights = engine.gather(), other.gather()
    assert other.leave()
    return weights


def test_a_diloco_round_resumes_as_asynchronous_diloco(ranks: Any, tmp_path: Path) -> None:
    for wanted, found in ranks(2, becomes_asynchronous, str(tmp_path)):
        same(found, wanted)


def load_before_start_step(folder: str, stop: int) -> Any:
    """A checkpoint of local steps, loaded before ``start_step``, and loaded by a plain engine."""
    local: dict[str, Any] = {"type": "diloco", "every": 2, **OUTER}
    engine = make((1, 2, 1), local, ADAMW)
    for _ in range(stop):
        engine.train_batch()
    assert engine.save_checkpoint(folder)
    found = []
    for section in ({**local, "start_step": STEPS}, None):
        engine = make((1, 2, 1), section, ADAMW)
        engine.load_checkpoint(folder)
        losses = [engine.train_batch().item() for _ in range(2)]
        found.append((losses, engine.gather()))
    return found


@pytest.mark.parametrize("stop", [3, 4])  # between two meetings, and at one, where optimizers' states differ still
def test_synchronous_steps_after_local_ones_begin_at_the_mean(ranks: Any, tmp_path: Path, stop: int) -> None:
    """Replicas continue from their mean, as a run without local updates does, and stay equal."""
    everyone = ranks(2, load_before_start_step, str(tmp_path), stop)
    for (losses, weights), (plain_losses, plain) in everyone:
        assert losses == pytest.approx(plain_losses, rel=1e-10)
        same(weights, plain)
        assert all(torch.equal(weights[name], everyone[0][0][1][name]) for name in weights)


def unlike_optimizers(folder: str) -> Any:
    """Saved before ``start_step`` by an engine that takes local steps afterwards, and then loads it."""
    local: dict[str, Any] = {"type": "local_sgd", "every": 2, "start_step": 2}
    engine, said = make((1, 2, 1), local, ADAMW), []
    for _ in range(4):
        if engine.global_steps == 1:
            assert engine.save_checkpoint(folder)
        engine.train_batch()
    before = engine.gather()
    for left_out in ("load_optimizer_states", "load_lr_scheduler_states"):
        with pytest.raises(RuntimeError) as error:
            engine.load_checkpoint(folder, **{left_out: False})
        said.append(str(error.value))
    same(engine.gather(), before)
    engine.load_checkpoint(folder, load_module_only=True)
    engine.load_checkpoint(folder)
    engine.train_batch()
    return said, engine.gather()


def test_loading_before_start_step_needs_optimizer_and_schedule(ranks: Any, tmp_path: Path) -> None:
    (said, weights), (_, others) = ranks(2, unlike_optimizers, str(tmp_path))
    assert all("It was saved at step 1, before local updates begin (start_step 2)" in each for each in said)
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def saved_at_the_boundary(folder: str) -> Any:
    """Saved at step 2, the ``start_step``; the engine that loads it has ``start_step`` 3."""
    local: dict[str, Any] = {"type": "diloco", "every": 2, **OUTER}
    engine, other = (make((1, 3, 1), {**local, "start_step": start}, ADAMW) for start in (2, 3))
    for _ in range(2):
        engine.train_batch()
    assert engine.save_checkpoint(folder)
    with triax_warnings() as warnings:
        other.load_checkpoint(folder)
    plain = make((1, 3, 1), None, ADAMW)
    for _ in range(3):
        plain.train_batch()
    other.train_batch()
    same(other.gather(), plain.gather())
    return warnings


def test_a_checkpoint_without_local_steps_loads_without_notes(ranks: Any, tmp_path: Path) -> None:
    """Without local steps, nothing is averaged and nothing is logged."""
    assert ranks(3, saved_at_the_boundary, str(tmp_path)) == [[]] * 3


def train_until_sigterm(folder: str) -> Any:
    """Saved automatically; one rank gets SIGTERM within a round; then resumed."""
    more: dict[str, Any] = {"checkpoint": {"dir": folder, "every": 2, "resume": "auto"}}
    engine = make((1, 2, 1), {"type": "local_sgd", "every": 3}, ADAMW, **more)
    begun = engine.global_steps
    try:
        while engine.global_steps < 9:
            if begun == 0 and engine.global_steps == 6 and engine.grid.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            engine.train_batch()
    except SystemExit as left:
        return begun, engine.global_steps, left.code, engine.gather()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return begun, engine.global_steps, 0, engine.gather()


def test_sigterm_within_a_round_saves_and_the_run_resumes(ranks: Any, tmp_path: Path) -> None:
    """All ranks learn of the signal at a synchronization, or when a checkpoint is due."""
    assert {each[:3] for each in ranks(2, train_until_sigterm, str(tmp_path))} == {(0, 8, 143)}
    again = ranks(2, train_until_sigterm, str(tmp_path))
    assert {each[:3] for each in again} == {(8, 9, 0)}
