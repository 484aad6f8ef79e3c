"""ZeRO over replicas that are killed, against a replay, one process of plain torch in float64, and formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import triax
from triax.plugins.fault_tolerance.membership import History
from triax.plugins.fault_tolerance.shard_cut import ShardCut

from support.replica_jobs import (
    ask_to_leave,
    coordinator,
    finish,
    held,
    in_one_process,
    kill,
    kill_after_sum,
    kill_in_gather,
    kill_in_move,
    kill_in_sum,
    losses,
    replayed,
    require_equal,
    start,
    start_in_order,
    stop_for_a_while,
)

KILLED = -9
NUMEL = 352  # elements of the model's bucket


def test_training_survives_the_loss_of_optimizer_state_owners(tmp_path: Path) -> None:
    faults: dict[str, Any] = {
        "b": {"after": 1, "fault": kill},
        "d": {"after": 1, "fault": kill_in_move},  # it sends nothing when b is lost, and dies when b is back
    }
    job: dict[str, Any] = {"options": {"zero": 1}}
    with coordinator(min_replicas=1) as address:
        common = {"gather": "abcd", "final": "abc", "pause": 0.05, **job}
        run = start_in_order(tmp_path, "abcd", address, faults=faults, **common)
        assert finish(run["b"]) == [KILLED]
        again = start(tmp_path, "b", address, faults="bd", **common)  # its state comes from the others
        assert finish([*run["a"], *again, *run["c"], *run["d"]]) == [0, 0, 0, KILLED]
    steps = require_equal(tmp_path, "abcd", **job)
    past = History.from_file(tmp_path / "a.jsonl")
    lost = [name for step in range(steps) for name in set(past.members(step)) - set(past.counted(step))]
    assert lost == ["b", "d"]
    cut = ShardCut(past.members(steps - 1), 1)
    for name in "abc":
        found, (own, copies) = held(tmp_path, name), cut.held(name, NUMEL)
        assert (found["optimizer"], found["copies"]) == (2 * 8 * own, 2 * 8 * copies)  # exp_avg, exp_avg_sq in float64


def test_lost_owner_and_copy_end_the_run_with_a_reason(tmp_path: Path) -> None:
    saved = triax.Checkpoints(folder=str(tmp_path), every=2, resume=True)
    job: dict[str, Any] = {"options": {"zero": 1}, "checkpoint": saved, "log": str(tmp_path / "log")}
    with coordinator(min_replicas=1) as address:
        faults = {"b": {"after": 5, "fault": kill}, "c": {"after": 5, "fault": kill}}
        run = start_in_order(tmp_path, "abc", address, gather="abc", final="abc", faults=faults, **job)
        assert [finish(processes) for processes in run.values()] == [[1], [KILLED], [KILLED]]
        reason = (tmp_path / "log").read_text()
        assert "of 3 parts of the optimizer state are lost with replicas b, c" in reason and str(tmp_path) in reason
    with coordinator(min_replicas=3) as address:
        again = [process for name in "abc" for process in start(tmp_path, name, address, steps=10, **job)]
        assert finish(again) == [0, 0, 0]
    found, (expected, _) = losses(tmp_path, "a"), in_one_process(tmp_path / "a.jsonl", 10)
    assert [float.fromhex(found[step]) for step in range(10)] == pytest.approx(expected, rel=1e-10)
    assert losses(tmp_path, "b").items() <= found.items()


def test_a_leaving_replica_hands_over_its_optimizer_state(tmp_path: Path) -> None:
    job: dict[str, Any] = {"options": {"zero": 1, "copies": 0}}
    with coordinator(min_replicas=1) as address:
        faults = {"c": {"after": 2, "fault": ask_to_leave}}
        run = start_in_order(tmp_path, "abc", address, gather="abc", final="ab", faults=faults, pause=0.05, **job)
        assert [finish(processes) for processes in run.values()] == [[0], [0], [0]]
    require_equal(tmp_path, "abc", **job)
    assert not any("lost" in line for line in (tmp_path / "a.jsonl").read_text().splitlines())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "grid", "zero", "names", "copies", "killed", "fault"),
    [
        ("plain", {"pipe": 2}, 0, "abc", 1, "b", kill),
        ("plain", {"data": 2}, 3, "abc", 1, "b", kill),
        ("plain", {"data": 2}, 2, "ab", 1, "b", kill_in_gather),
        ("plain", {}, 0, "abcd", 2, "bc", kill),
        ("plain", {}, 0, "abc", 1, "c", kill_in_gather),
        ("plain", {}, 0, "abc", 1, "b", kill_in_sum),
        ("plain", {}, 0, "abc", 1, "b", kill_after_sum),
        ("named", {}, 0, "abc", 1, "b", kill_in_gather),
        ("module", {}, 0, "abc", 1, "b", kill_in_gather),
        ("module", {"data": 2}, 3, "ab", 1, "b", kill),
    ],
)
def test_grids_survive_the_loss_of_optimizer_state_owners(
    kind: str, grid: dict[str, int], zero: int, names: str, copies: int, killed: str, fault: Any, tmp_path: Path
) -> None:
    job: dict[str, Any] = {"options": {"zero": 1, "copies": copies}, "grid": grid, "zero": zero, "kind": kind}
    with coordinator(min_replicas=1) as address:
        common = {"gather": names, "final": names, "pause": 0.05, **job}
        faults = {name: {"after": 2, "fault": fault} for name in killed}
        run = start_in_order(tmp_path, names, address, faults=faults, **common)
        assert all(KILLED in finish(run[name]) for name in killed)
        again = [process for name in killed for process in start(tmp_path, name, address, faults=killed, **common)]
        left = [process for name in names if name not in killed for process in run[name]]
        assert set(finish([*left, *again])) == {0}
    require_equal(tmp_path, names, **job)


@pytest.mark.exhaustive
def test_a_paused_owner_gets_a_part_of_the_state_again(tmp_path: Path) -> None:
    job: dict[str, Any] = {"options": {"zero": 1, "timeout": 1.5}}
    with coordinator(min_replicas=1) as address:
        faults = {"c": {"after": 2, "fault": stop_for_a_while}}
        run = start_in_order(tmp_path, "abc", address, gather="abc", final="abc", faults=faults, pause=0.05, **job)
        assert [finish(processes) for processes in run.values()] == [[0], [0], [0]]
    require_equal(tmp_path, "abc", **job)


@pytest.mark.exhaustive
def test_master_weights_are_sharded_over_replicas(tmp_path: Path) -> None:
    job: dict[str, Any] = {"kind": "narrow", "precision": triax.Precision(weights="bf16")}
    with coordinator(min_replicas=1) as address:
        common = {"gather": "abc", "final": "abc", "pause": 0.05, "options": {"zero": 1}, **job}
        run = start_in_order(tmp_path, "abc", address, faults={"b": {"after": 3, "fault": kill}}, **common)
        assert finish(run["b"]) == [KILLED]
        again = start(tmp_path, "b", address, faults="b", **common)
        assert finish([*run["a"], *again, *run["c"]]) == [0, 0, 0]
    taken = losses(tmp_path, "a")
    history, steps = tmp_path / "a.jsonl", 1 + max(taken)
    assert replayed(tmp_path / "again", history, "abc", steps, options={"zero": 1}, **job) == taken
    whole = replayed(tmp_path / "whole", history, "abc", steps, **job)  # each replica holds all
    assert [float.fromhex(whole[step]) for step in taken] == pytest.approx([float.fromhex(x) for x in taken.values()])
    own, copies = ShardCut(History.from_file(history).members(steps - 1), 1).held("a", NUMEL)
    found = held(tmp_path, "a")
    assert (found["masters"], found["optimizer"], found["copies"]) == (4 * own, 2 * 4 * own, 3 * 4 * copies)
