"""Replicas as processes that are killed and restarted, against a replay and one process of plain torch in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import triax
from triax.fault_tolerance.membership import History

from replica_jobs import (
    changes,
    coordinator,
    finish,
    kill,
    kill_after_sum,
    kill_in_sum,
    losses,
    require_equal,
    start,
)

pytest.importorskip("torchft")

KILLED = -9


def test_steps_of_killed_replicas_are_taken_by_the_rest(tmp_path: Path) -> None:
    faults: dict[str, tuple[int, Callable[[Any], None]]] = {
        "c": (1, kill),
        "d": (4, kill_in_sum),
        "e": (7, kill_after_sum),
    }
    with coordinator(least=2) as address:
        common = {"gather": "abcde", "final": "abc", "faults": "cde", "pause": 0.05}
        run = {
            name: start(tmp_path, name, address, after=after, fault=fault, **common)
            for name, (after, fault) in {"a": (0, None), "b": (0, None), **faults}.items()
        }
        assert finish(run["c"]) == [KILLED]
        again = start(tmp_path, "c", address, seed=9, **common)  # its weights come from a peer
        assert finish([*run["a"], *run["b"], *again]) == [0, 0, 0]
        assert finish([*run["d"], *run["e"]]) == [KILLED, KILLED]
    found = [losses(tmp_path, name) for name in "abcde"]
    steps = 1 + max(found[0])
    assert all(steps - 1 in each for each in found[:3])
    past = History.read(tmp_path / "a.jsonl")
    assert changes(tmp_path / "a.jsonl") == changes(tmp_path / "b.jsonl") == changes(tmp_path / "c.jsonl")
    lost = {name for step in range(steps) for name in set(past.members(step)) - set(past.counted(step))}
    assert lost == {"c", "d"}  # a gradient that all have is in the step of e, though e died
    require_equal(tmp_path, "abcde", steps)


@pytest.mark.parametrize(("grid", "zero"), [({"pipe": 2}, 0), ({"data": 2}, 3)])
def test_replicas_are_grids_with_zero_inside(grid: dict[str, int], zero: int, tmp_path: Path) -> None:
    with coordinator(least=1) as address:
        common = {"gather": "ab", "final": "ab", "faults": "b", "pause": 0.05, "grid": grid, "zero": zero}
        a = start(tmp_path, "a", address, **common)
        b = start(tmp_path, "b", address, after=2, fault=kill, **common)
        assert KILLED in finish(b)
        again = start(tmp_path, "b", address, seed=9, **common)
        assert finish([*a, *again]) == [0, 0, 0, 0]
    steps = 1 + max(losses(tmp_path, "a"))
    whole = require_equal(tmp_path, "ab", steps, grid=grid, zero=zero)
    assert losses(tmp_path, "b", 1).items() <= whole.items() and steps - 1 in losses(tmp_path, "b")


def test_a_run_starts_again_from_files_with_the_samples_that_follow(tmp_path: Path) -> None:
    def run(folder: str, steps: int) -> dict[int, str]:
        where = tmp_path / folder
        where.mkdir(exist_ok=True)
        saved = triax.Checkpoints(folder=str(where), every=3, resume=True)
        with coordinator(least=2) as address:
            started = [p for name in "ab" for p in start(where, name, address, steps=steps, checkpoint=saved)]
            assert finish(started) == [0, 0]
        assert losses(where, "a") == losses(where, "b")
        return losses(where, "a")

    run("cut", 6)
    assert run("cut", 10) == run("whole", 10)
    assert changes(tmp_path / "cut" / "a.jsonl") == changes(tmp_path / "whole" / "b.jsonl")
