"""ZeRO over replicas that are killed, against a replay, one process of plain torch in float64, and formulas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from triax.fault_tolerance.membership import History

from replica_jobs import (
    coordinator,
    finish,
    in_one_process,
    kill,
    kill_after_sum,
    kill_in_sum,
    losses,
    replayed,
    start,
)

pytest.importorskip("torchft")

KILLED = -9
SHARDED = {"zero": 1}


def test_owners_are_lost_and_the_rest_goes_on(tmp_path: Path) -> None:
    faults: dict[str, tuple[int, Callable[[Any], None]]] = {"c": (1, kill), "d": (4, kill_after_sum)}
    with coordinator(least=2) as address:
        common = {"gather": "abcd", "final": "abc", "faults": "cd", "pause": 0.05, "options": SHARDED}
        run = {
            name: start(tmp_path, name, address, after=after, fault=fault, **common)
            for name, (after, fault) in {"a": (0, None), "b": (0, None), **faults}.items()
        }
        assert finish(run["c"]) == [KILLED]
        again = start(tmp_path, "c", address, seed=9, **common)
        assert finish([*run["a"], *run["b"], *again, *run["d"]]) == [0, 0, 0, KILLED]
    found = [losses(tmp_path, name) for name in "abcd"]
    whole = {step: loss for each in found for step, loss in each.items()}
    steps = len(whole)
    assert sorted(whole) == list(range(steps)) and all(each.items() <= whole.items() for each in found)
    assert replayed(tmp_path / "again", tmp_path / "a.jsonl", "abcd", steps, options=SHARDED) == whole
    expected = in_one_process(tmp_path / "a.jsonl", steps)
    assert [float.fromhex(whole[step]) for step in range(steps)] == pytest.approx(expected, rel=1e-10)
