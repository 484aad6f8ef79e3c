"""DiLoCo whose replicas come and go between outer steps, against a replay and plain torch in one process in float64."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax.data.dataloader import make_loader
from triax.plugins.fault_tolerance.membership import History, Ledger

from support.replica_jobs import (
    SHARE,
    Samples,
    coordinator,
    finish,
    kill,
    kill_after_sum,
    kill_in_sum,
    layers,
    loss_fn,
    losses,
    optimizer,
    start,
)

EVERY = 3
LOCAL = triax.DiLoCo(every=EVERY)
Losses = dict[tuple[str, int], float]  # of a replica and a step


def in_one_process(history: Path, rounds: int) -> tuple[Losses, dict[str, Tensor]]:
    """Losses of the replicas whose differences counted, and the last common weights, of plain torch."""
    ledger, past = Ledger(), History.from_file(history)
    model = triax.PipelineModule(layers(0.0), loss_fn=loss_fn, grid=triax.Grid(), seed=0)
    common = nn.ModuleList(module for module in model.modules() if isinstance(module, nn.Linear))
    outer = torch.optim.SGD(common.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    loader, found = make_loader(Samples(), SHARE, SHARE, 0, 1, 0), {}
    own: dict[str, tuple[Any, torch.optim.Optimizer]] = {}
    for name in past.members(0):
        replica = copy.deepcopy(common)
        own[name] = replica, optimizer([*replica.parameters()])
    for number in range(rounds):
        members, counted = past.members(number), past.counted(number)
        shares, inner = ledger.plan(members), copy.deepcopy(own[members[0]][1].state_dict())
        total, weights = [torch.zeros_like(p) for p in common.parameters()], 0
        for name in counted:
            (first, last), adamw = own[name]
            loader.seek(shares[name] * EVERY)
            batches, seen = iter(loader), 0
            for step in range(number * EVERY, (number + 1) * EVERY):
                inputs, labels = next(batches)
                loss, count = loss_fn(last(torch.tanh(first(inputs))), labels)
                adamw.zero_grad()
                (loss / count).backward()
                nn.utils.clip_grad_norm_([*first.parameters(), *last.parameters()], 1.0)
                adamw.step()
                found[name, step], seen = float(loss.detach() / count), seen + int(count)
            for each, before, after in zip(total, common.parameters(), own[name][0].parameters(), strict=True):
                each += seen * (before - after).detach()
            weights += seen
        ledger.record(number, members, counted)
        for parameter, each in zip(common.parameters(), total, strict=True):
            parameter.grad = each / weights
        outer.step()
        for name in past.members(number + 1):
            if name not in members:
                replica = copy.deepcopy(common)
                own[name] = replica, optimizer([*replica.parameters()])
                own[name][1].load_state_dict(copy.deepcopy(inner))
            own[name][0].load_state_dict(common.state_dict())
    return found, {f"{i}.{k}": v.detach() for i, m in enumerate(common) for k, v in m.named_parameters()}


def of_member(folder: Path, name: str) -> dict[int, str]:
    """Losses of a replica in the steps at whose end it was a member, as hex: not of those in which it joined."""
    lines = [json.loads(line) for line in (folder / f"{name}.0.losses").read_text().splitlines()]
    return {step: loss for step, loss, _, members in lines if name in members}


def train_with_faults(folder: Path, faults: dict[str, Callable[[Any], None]], **job: Any) -> None:
    """Train replicas a to c, of which some are killed once in a round, and started again."""
    with coordinator(min_replicas=2) as address:
        common = {"gather": "abc", "final": "abc", "faults": [*faults], "pause": 0.02, "local": LOCAL, **job}
        started = {n: start(folder, n, address, after=2, fault=faults.get(n), **common) for n in "abc"}
        for name in faults:
            assert -9 in finish(started[name])
            started[name] = start(folder, name, address, **common)  # its state comes from a peer
        assert {code for each in started.values() for code in finish(each)} == {0}


def require_equal_to_replay_and_torch(folder: Path, **job: Any) -> None:
    """Compare a run with a replay of its history, bit for bit, and with plain torch."""
    history = folder / "a.jsonl"
    past, steps = History.from_file(history), 1 + max(losses(folder, "a"))
    rounds = steps // EVERY
    assert steps % EVERY == 0 and any(len(past.members(each)) < 3 for each in range(rounds))
    taken = {(n, s): loss for n in "abc" for s, loss in of_member(folder, n).items() if n in past.counted(s // EVERY)}
    again = folder / "again"
    again.mkdir()
    with coordinator(min_replicas=3) as address:
        options = {"replay": str(history)}
        replay = [p for n in "abc" for p in start(again, n, address, steps=steps, options=options, local=LOCAL, **job)]
        assert set(finish(replay)) == {0}
    replayed = {name: losses(again, name) for name in "abc"}
    assert {(name, step): replayed[name][step] for name, step in taken} == taken
    expected, weights = in_one_process(history, rounds)
    assert taken.keys() <= expected.keys() and {step for _, step in taken} == set(range(steps))
    for key, loss in taken.items():
        assert float.fromhex(loss) == pytest.approx(expected[key], rel=1e-10), key
    for each in (folder, again):
        for name in "abc":
            found = torch.load(each / f"{name}.weights")
            for value, other in zip(found.values(), weights.values(), strict=True):
                torch.testing.assert_close(value, other, rtol=1e-10, atol=1e-12)


def test_diloco_replicas_leave_and_join_between_outer_steps(tmp_path: Path) -> None:
    train_with_faults(tmp_path, {"b": kill})
    require_equal_to_replay_and_torch(tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", [kill_in_sum, kill_after_sum])
@pytest.mark.parametrize(("grid", "zero"), [({}, 0), ({"pipe": 2}, 0), ({"data": 2}, 1), ({"data": 2}, 3)])
def test_diloco_replicas_of_several_ranks_survive_a_kill(
    fault: Callable[[Any], None], grid: dict[str, int], zero: int, tmp_path: Path
) -> None:
    train_with_faults(tmp_path, {"a": fault}, grid=grid, zero=zero)
    require_equal_to_replay_and_torch(tmp_path, grid=grid, zero=zero)


def test_a_diloco_run_resumes_from_checkpoint_files(tmp_path: Path) -> None:
    def losses_of(folder: str, steps: int) -> dict[int, str]:
        where = tmp_path / folder
        where.mkdir(exist_ok=True)
        saved = triax.Checkpoints(folder=str(where), every=EVERY, resume=True)
        with coordinator(min_replicas=1) as address:
            assert finish(start(where, "a", address, steps=steps, local=LOCAL, checkpoint=saved)) == [0]
        return losses(where, "a")

    losses_of("cut", 2 * EVERY)
    resumed = losses_of("cut", 4 * EVERY)
    assert resumed == losses_of("whole", 4 * EVERY)
    expected, _ = in_one_process(tmp_path / "whole" / "a.jsonl", 4)
    found = {("a", step): float.fromhex(loss) for step, loss in resumed.items()}
    assert found == pytest.approx(expected, rel=1e-10) and len(found) == 4 * EVERY
    assert not History.from_file(tmp_path / "whole" / "a.jsonl").restarted
    job = {"local": LOCAL, "steps": EVERY, "log": str(tmp_path / "log")}
    with coordinator(min_replicas=1) as address:
        options = {"replay": str(tmp_path / "cut" / "a.jsonl")}
        assert finish(start(tmp_path, "a", address, options=options, **job)) == [1]
    assert "has started again from files" in (tmp_path / "log").read_text()
