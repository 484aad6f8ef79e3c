"""Replicas as processes that are killed and restarted, against a replay and one process of plain torch in float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import triax
from triax.base.errors import ConfigError
from triax.data.dataloader import make_loader
from triax.plugins.fault_tolerance.membership import History, Ledger

from support.replica_jobs import (
    MICRO,
    SHARE,
    Samples,
    changes,
    coordinator,
    finish,
    in_one_process,
    kill,
    kill_after_sum,
    kill_in_sum,
    losses,
    model_of,
    optimizer,
    replayed,
    start,
)

KILLED = -9


def in_one_engine(history: Path, steps: int) -> tuple[list[float], dict[str, Tensor], dict[str, list[int]]]:
    """Losses, last weights and last expert loads of an engine of one process without replicas: a mixture of experts."""
    ledger, past = Ledger(), History.from_file(history)
    model = model_of("experts", triax.Grid(), 0)
    engine = triax.Engine(model, optimizer=optimizer, batch=triax.Batch(size=SHARE, microbatch=MICRO), clip=1.0)
    loader, found = make_loader(Samples(), SHARE, MICRO, 0, 1, 0), []
    for step in range(steps):
        members, counted = past.members(step), past.counted(step)
        shares, batches = ledger.plan(members), []
        for name in counted:
            loader.seek(shares[name])
            batches += [*islice(loader, SHARE // MICRO)]
        ledger.record(step, members, counted)
        engine.set_batch_size(len(counted) * SHARE)
        found.append(float(engine.train_batch(iter(batches))))
    return found, engine.gather(), engine.expert_loads()


@pytest.mark.parametrize(
    ("kind", "grid", "zero", "fault"),
    [
        ("named", {}, 0, kill_in_sum),
        pytest.param("named", {"pipe": 2}, 0, kill, marks=pytest.mark.exhaustive),
        ("experts", {}, 0, kill_in_sum),
        pytest.param("experts", {"data": 2}, 2, kill, marks=pytest.mark.exhaustive),
        pytest.param("module", {}, 0, kill_in_sum, marks=pytest.mark.exhaustive),
        pytest.param("module", {"data": 2}, 3, kill, marks=pytest.mark.exhaustive),
    ],
)
def test_runs_with_each_kind_of_loss_survive_a_killed_replica(
    kind: str, grid: dict[str, int], zero: int, fault: Callable[[Any], None], tmp_path: Path
) -> None:
    with coordinator(min_replicas=2) as address:
        common = {"gather": "abc", "final": "ab", "faults": "bc", "pause": 0.05, "grid": grid, "zero": zero}
        a = start(tmp_path, "a", address, kind=kind, **common)
        b = start(tmp_path, "b", address, kind=kind, after=2, fault=fault, **common)
        c = start(tmp_path, "c", address, kind=kind, after=4, fault=kill_in_sum, **common)
        assert KILLED in finish(b)
        again = start(tmp_path, "b", address, kind=kind, **common)
        assert {*finish([*a, *again])} == {0} and KILLED in finish(c)
    found = [losses(tmp_path, name) for name in "abc"]
    whole = {step: loss for each in found for step, loss in each.items()}
    steps = len(whole)
    assert all(each.items() <= whole.items() for each in found) and all(steps - 1 in each for each in found[:2])
    past = History.from_file(tmp_path / "a.jsonl")
    assert {n for step in range(steps) for n in set(past.members(step)) - set(past.counted(step))} == {"b", "c"}
    assert replayed(tmp_path / "again", tmp_path / "a.jsonl", "abc", steps, kind=kind, grid=grid, zero=zero) == whole
    weights, same = (torch.load(tmp_path / f"{name}.weights") for name in "ab")
    facts, equal = (torch.load(tmp_path / f"{name}.facts") for name in "ab")
    assert facts == equal and all(torch.equal(weights[name], same[name]) for name in weights)
    expected: Any
    if kind == "experts":
        losses_alone, expected, loads = in_one_engine(tmp_path / "a.jsonl", steps)
        assert facts["loads"] == loads
        expected = [expected[name] for name in weights]
    else:
        losses_alone, expected = in_one_process(tmp_path / "a.jsonl", steps, kind)
    assert [float.fromhex(whole[step]) for step in range(steps)] == pytest.approx(losses_alone, rel=1e-10)
    for one, other in zip(weights.values(), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_remaining_replicas_take_the_steps_of_killed_ones(tmp_path: Path) -> None:
    faults: dict[str, tuple[int, Callable[[Any], None]]] = {
        "c": (1, kill),
        "d": (4, kill_in_sum),
        "e": (7, kill_after_sum),
    }
    with coordinator(min_replicas=2) as address:
        common = {"gather": "abcde", "final": "abc", "faults": "cde", "pause": 0.05}
        run = {
            name: start(tmp_path, name, address, after=after, fault=fault, **common)
            for name, (after, fault) in {"a": (0, None), "b": (0, None), **faults}.items()
        }
        assert finish(run["c"]) == [KILLED]
        again = start(tmp_path, "c", address, **common)  # its weights come from a peer
        assert finish([*run["a"], *run["b"], *again]) == [0, 0, 0]
        assert finish([*run["d"], *run["e"]]) == [KILLED, KILLED]
    found = [losses(tmp_path, name) for name in "abcde"]
    whole = {step: loss for each in found for step, loss in each.items()}
    steps = len(whole)
    assert sorted(whole) == list(range(steps)) and all(each.items() <= whole.items() for each in found)
    assert all(steps - 1 in each for each in found[:3])
    past = History.from_file(tmp_path / "a.jsonl")
    assert changes(tmp_path / "a.jsonl") == changes(tmp_path / "b.jsonl") == changes(tmp_path / "c.jsonl")
    lost = {name for step in range(steps) for name in set(past.members(step)) - set(past.counted(step))}
    assert lost == {"c", "d"}  # a gradient that all have is in the step of e, though e died
    assert replayed(tmp_path / "again", tmp_path / "a.jsonl", "abcde", steps) == whole
    expected, _ = in_one_process(tmp_path / "a.jsonl", steps)
    assert [float.fromhex(whole[step]) for step in range(steps)] == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(
    ("grid", "zero"),
    [
        ({"pipe": 2}, 0),
        ({"data": 2}, {"stage": 3, "shard_size": 1}),
        pytest.param({"data": 2}, 3, marks=pytest.mark.exhaustive),
        pytest.param({"data": 4}, {"stage": 2, "shard_size": 2}, marks=pytest.mark.exhaustive),
    ],
)
def test_replicas_of_several_ranks_survive_a_kill(grid: dict[str, int], zero: int, tmp_path: Path) -> None:
    with coordinator(min_replicas=1) as address:
        common = {"gather": "ab", "final": "ab", "faults": "b", "pause": 0.05, "grid": grid, "zero": zero}
        a = start(tmp_path, "a", address, **common)
        b = start(tmp_path, "b", address, after=2, fault=kill, **common)
        assert KILLED in finish(b)
        again = start(tmp_path, "b", address, **common)
        assert {*finish([*a, *again])} == {0}
    whole = losses(tmp_path, "a") | losses(tmp_path, "b")
    steps = len(whole)
    assert losses(tmp_path, "b", 1).items() <= whole.items() and steps - 1 in losses(tmp_path, "b")
    assert replayed(tmp_path / "again", tmp_path / "a.jsonl", "ab", steps, grid=grid, zero=zero) == whole
    expected, _ = in_one_process(tmp_path / "a.jsonl", steps)
    assert [float.fromhex(whole[step]) for step in range(steps)] == pytest.approx(expected, rel=1e-10)


def test_two_processes_with_one_replica_name_are_refused(tmp_path: Path) -> None:
    with coordinator(min_replicas=2) as address:
        common = {"steps": 8, "pause": 0.2, "log": str(tmp_path / "log")}
        first, second, other = (start(tmp_path, name, address, **common)[0] for name in "aab")
        assert set(finish([first, second])) == {0, 1} and finish([other]) == [0]
    assert "two processes have the name of replica a, and this one came later" in (tmp_path / "log").read_text()


def test_replicas_resume_from_checkpoint_files_at_the_next_sample(tmp_path: Path) -> None:
    def run(folder: str, steps: int) -> dict[int, str]:
        where = tmp_path / folder
        where.mkdir(exist_ok=True)
        saved = triax.Checkpoints(folder=str(where), every=3, resume=True)
        with coordinator(min_replicas=2) as address:
            started = [p for name in "ab" for p in start(where, name, address, steps=steps, checkpoint=saved)]
            assert finish(started) == [0, 0]
        assert losses(where, "a") == losses(where, "b")
        return losses(where, "a")

    run("cut", 6)
    assert run("cut", 10) == run("whole", 10)
    again, *rest = changes(tmp_path / "cut" / "a.jsonl")[1:]
    assert (again.step, again.members, again.facts["resumed"], rest) == (6, ("a", "b"), True, [])
    assert changes(tmp_path / "cut" / "a.jsonl")[:1] == changes(tmp_path / "whole" / "b.jsonl")


def remove_obstacle(engine: Any) -> None:
    """Make it possible to write the history."""
    Path(engine.options.fault_tolerance.folder).parent.unlink()


def test_a_run_continues_if_its_history_cannot_be_written(tmp_path: Path) -> None:
    """The history is written as soon as that is possible."""
    (tmp_path / "disk").touch()  # a file in the place of a folder
    options, log = {"folder": str(tmp_path / "disk" / "history")}, tmp_path / "log"
    with coordinator(min_replicas=1) as address:
        common = {"gather": "a", "final": "a", "options": options, "log": str(log)}
        assert finish(start(tmp_path, "a", address, after=1, fault=remove_obstacle, **common)) == [0]
    assert log.read_text().count("cannot be written") == 1
    (change,) = changes(tmp_path / "disk" / "history" / "a.jsonl")
    assert (change.step, change.members) == (0, ("a",))


def test_replica_names_with_a_slash_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIAX_REPLICA", "../x")
    model = model_of("plain", triax.Grid(), 0)
    with pytest.raises(ConfigError, match=r"TRIAX_REPLICA is '../x': give a name without a slash"):
        triax.Engine(
            model,
            optimizer=optimizer,
            batch=triax.Batch(size=SHARE, microbatch=MICRO),
            training_data=Samples(),
            fault_tolerance=triax.FaultTolerance(folder="history", coordinator="127.0.0.1:1"),
        )
