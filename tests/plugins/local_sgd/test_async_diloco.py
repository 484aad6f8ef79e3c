"""Rounds of asynchronous DiLoCo: their order, their bound, replicas that are slow, fail or leave."""

from __future__ import annotations

import contextlib
import io
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from triax.testing.pool import RankFailure

from support.local_training import (
    ADAMW,
    OUTER,
    SGD,
    make,
    microbatch,
    module_engine,
    module_step,
    network,
    same,
    weights_of,
)


def wait_for(folder: Path, name: str) -> None:
    deadline = time.monotonic() + 30
    while not (folder / name).exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.002)


ASYNC = {"type": "async_diloco", "every": 2, "max_staleness": 2, "meet_early": False, **OUTER}


# Who ends which round after which other round was begun, by replica: replica 0 runs ahead by two rounds, and in the
# end replica 1 does.
ORDER = [(0, 1), (0, 2), (1, 1), (1, 2), (0, 3), (1, 3), (1, 4), (1, 5), (0, 4), (0, 5)]


def in_order(folder: str) -> Any:
    """Rounds of two replicas in the order of ``ORDER``."""
    there, engine = Path(folder), module_engine(ASYNC, gradient_clipping=0.1)
    replica, trace, lags = engine.grid.data.rank, [], []
    for turn, (who, number) in enumerate(ORDER):
        if who == replica:
            if turn:
                wait_for(there, f"{turn - 1}")
            for step in (2 * number - 2, 2 * number - 1):
                module_step(engine, step)
            trace.append(weights_of(engine))
            lags.append(engine.traffic_report()["local"]["staleness"])
            (there / f"{turn}").touch()
    assert engine.leave()
    return replica, trace, lags, weights_of(engine)


def order_reference() -> tuple[dict[int, list[list[Tensor]]], list[Tensor]]:
    """Weights of each replica after each of its rounds, and of all at the end, by the definition."""
    models = [network() for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), **SGD["params"]) for model in models]
    start = [p.detach().clone() for p in models[0].parameters()]
    differences: dict[tuple[int, int], list[Tensor]] = {}
    found: dict[int, list[list[Tensor]]] = {0: [], 1: []}

    def after(rounds: int) -> list[Tensor]:
        """DiLoCo from the start with the differences that have arrived; missing ones are zero."""
        weights = [w.clone() for w in start]
        outer = torch.optim.SGD(weights, lr=OUTER["outer_lr"], momentum=OUTER["outer_momentum"], nesterov=True)
        for number in range(1, rounds + 1):
            here = [differences[i, number] for i in range(2) if (i, number) in differences]
            for n, weight in enumerate(weights):
                weight.grad = sum((each[n] for each in here), torch.zeros_like(weight)) / 2
            outer.step()
        return weights

    for replica, number in ORDER:
        before = [p.detach().clone() for p in models[replica].parameters()]
        for step in (2 * number - 2, 2 * number - 1):
            optimizers[replica].zero_grad()
            for index in range(2):
                x, y = microbatch(step, index, replica)
                ((models[replica](x) - y).square().mean() / 2).backward()
            nn.utils.clip_grad_norm_(models[replica].parameters(), 0.1)
            optimizers[replica].step()
        now = [p.detach().clone() for p in models[replica].parameters()]
        differences[replica, number] = [a - b for a, b in zip(before, now, strict=True)]
        known = after(max(number for _, number in differences))
        for parameter, weight in zip(models[replica].parameters(), known, strict=True):
            parameter.data.copy_(weight)
        found[replica].append(known)
    return found, after(max(number for _, number in ORDER))


def test_late_rounds_count_in_the_round_they_belong_to(ranks: Any, tmp_path: Path) -> None:
    """Two replicas, each ahead of the other by up to two rounds, in a fixed order; at the end the same bits."""
    expected, end = order_reference()
    last = None
    for replica, trace, lags, after in ranks(2, in_order, str(tmp_path)):
        for mine, theirs in zip(trace, expected[replica], strict=True):
            same(mine, dict(zip(mine, theirs, strict=True)))
        assert lags == [[1, 2, 1, 0, 0], [0, 0, 0, 1, 2]][replica]
        same(after, dict(zip(after, end, strict=True)))
        last = last or after
        assert all(torch.equal(last[name], after[name]) for name in after)


def train_with_a_slow_replica_that_leaves(staleness: int) -> Any:
    """Replica 3 sleeps in each step and stops after fewer steps; the others do not."""
    engine = module_engine({**ASYNC, "every": 2, "max_staleness": staleness})
    replica, lags = engine.grid.data.rank, []
    for step in range(6 if replica == 3 else 12):
        time.sleep(0.03 if replica == 3 else 0.0)
        module_step(engine, step)
        lags.append(engine.traffic_report()["local"]["staleness"])
    present = len(engine.present)
    complete = engine.leave()
    with pytest.raises(RuntimeError, match="has left"):
        module_step(engine, step)
    return complete, max(lags), present, engine.traffic_report()["local"]["meetings"], weights_of(engine)


@pytest.mark.parametrize("staleness", [1, 3])
def test_staleness_stays_bounded_when_a_slow_replica_leaves(ranks: Any, staleness: int) -> None:
    """The slow replica leaves first, the others have more rounds to run, and all end with the same weights."""
    found = ranks(4, train_with_a_slow_replica_that_leaves, staleness)
    for complete, lag, present, meetings, weights in found:
        assert complete and lag <= staleness and 1 <= present <= 4
        assert meetings == (3 if weights is found[3][-1] else 6)
        assert all(torch.equal(weights[name], found[0][-1][name]) for name in weights)


def train_beside_a_slow_replica(shape: tuple[int, int, int]) -> Any:
    """A slow replica of several ranks, and one that is ahead of it."""
    engine = make(shape, {**ASYNC, "max_staleness": 1}, ADAMW)
    lags = []
    for _ in range(6):
        time.sleep(0.03 * engine.grid.data.rank)
        engine.train_batch()
        lags.append(engine.traffic_report()["local"]["staleness"])
    assert engine.leave() and max(lags) <= 1
    whole = {name: w for name, (layout, w) in engine.shards().items() if not layout.sharded}
    return engine.gather(), whole, engine.memory_report()["held"]


@pytest.mark.parametrize("shape", [(2, 2, 1), (1, 2, 2)])
def test_ranks_of_a_replica_apply_the_same_differences(ranks: Any, shape: tuple[int, int, int]) -> None:
    """Stages and shards of a replica apply the same differences in every round; at the end all replicas are equal."""
    found = ranks(4, train_beside_a_slow_replica, shape)
    for weights, whole, held in found:
        assert all(torch.equal(weights[name], found[0][0][name]) for name in weights)
        assert all(torch.equal(w, weights[name]) for name, w in whole.items())
        assert held["common"] == 3 * held["parameters"]  # the common weights, the start of a round, and velocity


def end_a_round_early(folder: str) -> Any:
    """Replica 0 ends its round of four steps while replica 1 has taken one."""
    there, engine = Path(folder), module_engine({"type": "async_diloco", "every": 4, "max_staleness": 1})
    meetings = []
    for step in range(8 if engine.grid.data.rank == 0 else 3):
        if (engine.grid.data.rank, step) in ((0, 3), (1, 1)):
            wait_for(there, "0" if engine.grid.data.rank else "1")
        module_step(engine, step)
        meetings.append(engine.traffic_report()["local"]["meetings"])
        if (engine.grid.data.rank, step) in ((0, 3), (1, 0)):
            (there / str(engine.grid.data.rank)).touch()
    return engine.leave(), meetings


def test_a_slow_replica_ends_its_round_early(ranks: Any, tmp_path: Path) -> None:
    fast, slow = ranks(2, end_a_round_early, str(tmp_path))
    assert fast == (True, [0, 0, 0, 1, 1, 1, 1, 2]) and slow[0]
    assert slow[1][:2] == [0, 1]  # at the first step after it heard


def print_times_of_a_fast_replica(folder: str) -> bool:
    """Replica 0 takes four steps, and prints what they took, before replica 1 takes its first."""
    there, trace = Path(folder), f"{folder}/trace.json"
    engine = module_engine(ASYNC, wall_clock_breakdown=True, steps_per_print=2, timeline={"step": 3, "file": trace})
    if engine.grid.data.rank == 1:
        wait_for(there, "0")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for step in range(4):
            module_step(engine, step)
    if engine.grid.data.rank == 0:
        assert Path(trace).exists() and "step 2: wall clock of 2 steps" in printed.getvalue()
        assert re.search(r"step 4: [\d.]+ ms a step: ", printed.getvalue())
        (there / "0").touch()
    return bool(engine.leave())


def test_printing_times_does_not_wait_for_other_replicas(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, print_times_of_a_fast_replica, str(tmp_path)) == [True, True]


def fail_on_one_replica(local: dict[str, Any]) -> Any:
    engine = module_engine(local)
    for step in range(6):
        if step == 3 and engine.grid.data.rank == 1:
            with engine.all_or_none("step"):
                raise ValueError("the disk is full")
        module_step(engine, step)


@pytest.mark.parametrize(
    "kind", [{"type": "local_sgd"}, {"type": "async_diloco", "max_staleness": 1, "meet_early": False}]
)
def test_an_error_of_one_replica_ends_the_run_with_its_message(ranks: Any, kind: dict[str, Any]) -> None:
    """The other replicas stop when they would wait for it, with its message."""
    with pytest.raises(RankFailure) as failure:
        ranks(2, fail_on_one_replica, {**kind, "every": 2})
    assert "the disk is full" in failure.value[0].text and failure.value[0].kind == "raised"


def stops_alone(local: dict[str, Any], how: str) -> None:
    """An error that all ranks of one replica raise, and no rank of the other."""
    if how == "nan":
        engine = module_engine(local)
        for step in range(8):
            module_step(engine, step, math.nan if step == 2 and engine.grid.data.rank == 1 else 1.0)
    else:
        engine = make((1, 2, 1), local, ADAMW)
        for step in range(8):
            engine.train_batch(iter([]) if step == 2 and engine.grid.data.rank == 1 else None)


@pytest.mark.parametrize("how", ["nan", "no data"])
@pytest.mark.parametrize(
    "kind", [{"type": "diloco"}, {"type": "async_diloco", "max_staleness": 1, "meet_early": False}]
)
def test_a_nan_loss_or_lack_of_data_on_one_replica_ends_the_run(ranks: Any, kind: dict[str, Any], how: str) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks(2, stops_alone, {**kind, "every": 2}, how)
    for report in failure.value.reports:
        assert report.kind == "raised" and report.when < 15  # the grids' time limits are 20 s and 30 s
        assert "replica 1 of 2 cannot continue" in report.text
        assert ("the loss is nan" if how == "nan" else "the data ended after 0") in report.text


def last_to_leave() -> Any:
    """Replica 1 reads that the other one has left; then the store, which the other one held, is gone."""
    engine = module_engine(ASYNC)
    for step in range(4):
        module_step(engine, step)
    heard: list[str] = []
    if (replica := engine.grid.data.rank) == 1:
        grid = engine.replicas.grid
        tell, told = grid.store_set, grid.store_get

        def reaches() -> None:
            if heard:
                raise torch.distributed.DistNetworkError("Connection reset by peer")

        def tells(key: str, text: str) -> None:
            tell(key, text)
            reaches()

        def hears(key: str) -> str | None:
            reaches()
            if (text := told(key)) is None:
                return None
            rounds, steps, left, taken, _ = text.split()
            if left != "0":
                heard.append(text)
            return " ".join((rounds, steps, left, taken, "0"))  # it has not said yet that it has this one's rounds

        grid.store_set, grid.store_get = tells, hears
    assert engine.leave() and len(heard) == replica
    return weights_of(engine)


def test_replicas_end_with_equal_weights_after_the_store_is_gone(ranks: Any) -> None:
    """Replica 0 has ended, and with it the store of all ranks; replica 1, the last to leave, takes the same weights."""
    first, second = ranks(2, last_to_leave)
    assert all(torch.equal(first[name], second[name]) for name in first)
    start = dict(network().named_parameters())
    assert start.keys() == first.keys() and not any(torch.equal(first[name], start[name]) for name in first)
