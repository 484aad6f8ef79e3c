"""Local SGD, DiLoCo and asynchronous DiLoCo against plain loops of N replicas in one process, in float64."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import triax
from triax import Grid, initialize
from triax.base.errors import ConfigError
from triax.compat.deepspeed.from_config import read_config
from triax.data.dataloader import make_loader
from triax.models.gpt import GPTConfig, GPTLoss, gpt_layers

from pool import RankFailure
from reference import gpt_logits

VOCABULARY, LENGTH, SAMPLES, STEPS = 13, 5, 48, 7
SIZES = GPTConfig(VOCABULARY, LENGTH, 8, 2, 2)
ADAMW: dict[str, Any] = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
SGD: dict[str, Any] = {"type": "SGD", "params": {"lr": 0.2, "momentum": 0.9}}
OUTER = {"outer_lr": 0.6, "outer_momentum": 0.8}
Weights = dict[str, Tensor]
Case = tuple[tuple[int, int, int], dict[str, Any], dict[str, Any]]  # grid, local_updates, optimizer


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
    labels = text[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100  # batches of unlike weight
    return TensorDataset(text[:, :-1], labels)


def settings(local: dict[str, Any] | None, optimizer: dict[str, Any], replicas: int, **more: Any) -> dict[str, Any]:
    found = {
        "train_batch_size": 4 * replicas,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": optimizer,
        "zero_optimization": {"reduce_bucket_size": 300},
        **more,
    }
    return found if local is None else {**found, "local_updates": local}


def make(
    shape: tuple[int, int, int],
    local: dict[str, Any] | None,
    optimizer: dict[str, Any],
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float64,
    **more: Any,
) -> Any:
    grid = Grid(*shape, timeout=30)
    sizes = GPTConfig(VOCABULARY, LENGTH, 8, 2, 2, dropout=dropout)
    loss = GPTLoss(grid, vocab_size=VOCABULARY)
    model = triax.PipelineModule(gpt_layers(sizes), grid=grid, loss_fn=loss, seed=3, dtype=dtype)
    config = settings(local, optimizer, shape[1], **more)
    return initialize(model=model, config=config, training_data=dataset())[0]


def trained(shape: tuple[int, int, int], local: dict[str, Any] | None, optimizer: dict[str, Any], **more: Any) -> Any:
    """Results of a rank: first weights, its replica's weights and loss after each step, common weights, accounts."""
    engine = make(shape, local, optimizer, **more)
    before, trace = engine.gather(), []
    for _ in range(STEPS):
        loss = engine.train_batch().item()
        trace.append((engine.gather(), loss))
    with engine.common_weights():
        common = engine.gather()
    same(engine.gather(), trace[-1][0])
    report = engine.traffic_report()
    assert local is None or engine.leave()  # a replica that is still receiving needs this engine's messages
    return engine.grid.data.rank, before, trace, common, report


def all_trained(cases: list[Case]) -> list[Any]:
    return [trained(*case) for case in cases]


# --------------------------------------------------------------------------------------------------- the references


def batches(replicas: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Each replica's part of the global batch of each step, read from a plain run's loader on one process."""
    loader = make_loader(dataset(), 4 * replicas, 4, 0, 1, seed=0)
    found: list[list[tuple[Tensor, Tensor]]] = []
    parts: Iterator[Any] = (batch for _ in range(9) for batch in loader)
    while len(found) < STEPS:
        found.append([tuple(next(parts)) for _ in range(replicas)])
    return found


def inner_step(weights: Weights, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor) -> float:
    optimizer.zero_grad(set_to_none=False)
    loss = F.cross_entropy(gpt_logits(weights, inputs, 2, 2).flatten(0, 1), labels.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(weights.values(), 0.5)
    optimizer.step()
    return loss.item()


def reference(before: Weights, replicas: int, local: dict[str, Any], optimizer: dict[str, Any]) -> Any:
    """N models, N optimizers, and the papers' outer step every H steps; the replicas' weights and losses of each step.

    Before ``start_step`` all of them take the step of one process with the whole batch.
    """
    models = [{name: w.clone().requires_grad_() for name, w in before.items()} for _ in range(replicas)]
    kind = getattr(torch.optim, optimizer["type"])
    optimizers = [kind(model.values(), **optimizer["params"]) for model in models]
    common = {name: w.clone() for name, w in before.items()}
    velocity = {name: torch.zeros_like(w) for name, w in before.items()}
    trace, start = [], local.get("start_step", 0)
    for step, parts in enumerate(batches(replicas)):
        if step < start:
            inputs, labels = (torch.cat(each) for each in zip(*parts, strict=True))
            parts = [(inputs, labels)] * replicas
        losses = [inner_step(m, o, *part) for m, o, part in zip(models, optimizers, parts, strict=True)]
        if step < start:
            common = {name: w.detach().clone() for name, w in models[0].items()}
        elif (step + 1 - start) % local["every"] == 0:
            for name, weight in common.items():
                mean = torch.stack([model[name].detach() for model in models]).mean(0)
                if local["type"] == "local_sgd":
                    weight.copy_(mean)
                else:
                    gradient = weight - mean
                    velocity[name] = local["outer_momentum"] * velocity[name] + gradient
                    weight -= local["outer_lr"] * (gradient + local["outer_momentum"] * velocity[name])
                for model in models:
                    model[name].data.copy_(weight)
            if local.get("average_optimizer"):  # of AdamW and SGD
                for each in zip(*(model.values() for model in models), strict=True):
                    states = [o.state[w] for o, w in zip(optimizers, each, strict=True)]
                    for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
                        if key in states[0]:
                            mean = torch.stack([state[key] for state in states]).mean(0)
                            for state in states:
                                state[key].copy_(mean)
        trace.append(([{n: w.detach().clone() for n, w in model.items()} for model in models], losses))
    return trace


def same(one: Weights, other: Weights) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-10, atol=1e-10, msg=name)


CASES: list[Case] = [
    ((1, 2, 1), {"type": "local_sgd", "every": 2, "average_optimizer": True}, ADAMW),
    ((1, 2, 1), {"type": "async_diloco", "every": 2, "max_staleness": 0, **OUTER}, SGD),
    ((1, 4, 1), {"type": "local_sgd", "every": 2}, ADAMW),
    ((2, 2, 1), {"type": "diloco", "every": 2, **OUTER}, ADAMW),
    ((1, 2, 2), {"type": "diloco", "every": 2, "average_optimizer": True, **OUTER}, SGD),
    ((1, 2, 1), {"type": "diloco", "every": 2, "start_step": 3, **OUTER}, ADAMW),
    ((2, 2, 1), {"type": "async_diloco", "every": 2, "start_step": 2, "max_staleness": 0, **OUTER}, SGD),
]
MORE: list[Case] = [
    ((1, 2, 1), {"type": "local_sgd", "every": 2}, SGD),
    ((1, 4, 1), {"type": "diloco", "every": 2, **OUTER}, ADAMW),
    ((2, 2, 1), {"type": "local_sgd", "every": 2}, ADAMW),
    ((1, 2, 2), {"type": "local_sgd", "every": 2}, ADAMW),
    ((2, 2, 1), {"type": "async_diloco", "every": 2, "max_staleness": 0, **OUTER}, ADAMW),
    ((1, 2, 2), {"type": "async_diloco", "every": 2, "max_staleness": 0, **OUTER}, SGD),
    ((1, 2, 1), {"type": "async_diloco", "every": 3, "start_step": 1, "max_staleness": 0, **OUTER}, ADAMW),
    ((1, 4, 1), {"type": "local_sgd", "every": 2, "start_step": 2}, SGD),
    ((1, 2, 2), {"type": "local_sgd", "every": 3, "start_step": 4}, ADAMW),
    ((2, 2, 1), {"type": "diloco", "every": 2, "start_step": STEPS, **OUTER}, ADAMW),
]


@pytest.mark.parametrize(
    ("size", "listed"), [(2, CASES), (4, CASES), *(pytest.param(n, MORE, marks=pytest.mark.exhaustive) for n in (2, 4))]
)
def test_replicas_step_and_meet_as_the_papers_say(ranks: Any, size: int, listed: list[Case]) -> None:
    """Weights and loss of each replica after every step; right after a synchronization the bits are equal."""
    cases = [case for case in listed if case[0][0] * case[0][1] * case[0][2] == size]
    everyone = ranks(size, all_trained, cases)
    for number, (shape, local, optimizer) in enumerate(cases):
        found = [each[number] for each in everyone]
        start, every, after = found[0][1], local["every"], local.get("start_step", 0)
        expected = reference(start, shape[1], local, optimizer)
        for replica, before, trace, common, report in found:
            same(before, start)
            for step, (weights, loss) in enumerate(trace):
                models, losses = expected[step]
                same(weights, models[replica])
                assert loss == pytest.approx(losses[replica], rel=1e-10)
                first = found[0][2][step][0]
                equal = all(torch.equal(weights[name], first[name]) for name in weights)
                meets = step < after or (step + 1 - after) % every == 0
                assert equal == (replica == found[0][0] or meets)
            same(common, trace[after + (STEPS - after) // every * every - 1][0])
            check_bytes(report, local, shape[1], STEPS)


def check_bytes(report: dict[str, Any], local: dict[str, Any], replicas: int, steps: int) -> None:
    """Counted bytes equal the formula's, for these sums of gradients and synchronizations on the data axis."""
    account, summed = report["local"], local.get("start_step", 0)
    meetings, over = divmod(steps - summed, local["every"])
    factor = replicas / 2 if local["type"] == "async_diloco" else 1.0  # a message to each
    assert (account["steps"], account["meetings"]) == (steps, meetings)
    if not local.get("average_optimizer"):
        expected = factor * meetings * local["every"] * account["formula"] + summed * account["uncompressed"]
        expected += 16 * (replicas - 1) if summed else 0  # once, how many samples each of them has
        assert account["sent"] == pytest.approx(expected, rel=1e-12)
        assert account["formula"] == pytest.approx(account["uncompressed"] / local["every"], rel=1e-12)
    assert ("data" in report["sent"]) == (over == 0)


# ----------------------------------------------------------------------------------------------------- plain modules


def network() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), nn.BatchNorm1d(3)).double()


def microbatch(step: int, index: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * index + replica)
    x, y = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64)
    return x, y[:, :3]


def module_engine(local: dict[str, Any] | None, optimizer: dict[str, Any] = SGD, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 5,
        "gradient_accumulation_steps": 2,
        "optimizer": optimizer,
        **({} if local is None else {"local_updates": local}),
        **more,
    }
    torch.manual_seed(torch.distributed.get_rank())  # weights that differ, until they are made the same
    model = network()
    if torch.distributed.get_rank():
        nn.init.normal_(next(model.parameters()))
    return initialize(model=model, config=config, grid=Grid(timeout=20))[0]


def module_step(engine: Any, step: int, factor: float = 1.0) -> None:
    for index in range(2):
        x, y = microbatch(step, index, engine.grid.data.rank)
        engine.backward(factor * (engine(x) - y).square().mean())
        engine.step()


def weights_of(engine: Any) -> Weights:
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def module_trained(local: dict[str, Any], clip: float) -> Any:
    engine, trace = module_engine(local, gradient_clipping=clip), []
    for step in range(STEPS):
        module_step(engine, step)
        trace.append(weights_of(engine))
    account = engine.traffic_report()["local"]
    assert engine.leave()
    return trace, account


def module_reference(replicas: int, local: dict[str, Any], clip: float) -> list[list[Weights]]:
    models = [network() for _ in range(replicas)]
    optimizers = [torch.optim.SGD(model.parameters(), **SGD["params"]) for model in models]
    common = [p.detach().clone() for p in models[0].parameters()]
    outer = torch.optim.SGD(common, lr=OUTER["outer_lr"], momentum=OUTER["outer_momentum"], nesterov=True)
    trace, start = [], local.get("start_step", 0)
    for step in range(STEPS):
        for replica, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            for index in range(2):
                x, y = microbatch(step, index, replica)
                ((model(x) - y).square().mean() / 2).backward()
        if step < start:
            for each in zip(*(model.parameters() for model in models), strict=True):
                mean = sum(parameter.grad for parameter in each) / replicas
                for parameter in each:
                    parameter.grad = mean.clone()
        for model, optimizer in zip(models, optimizers, strict=True):
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        if step < start:
            for weight, parameter in zip(common, models[0].parameters(), strict=True):
                weight.copy_(parameter.detach())
        elif (step + 1 - start) % local["every"] == 0:
            for weight, *theirs in zip(common, *(model.parameters() for model in models), strict=True):
                weight.grad = weight - sum(each.detach() for each in theirs) / replicas
            outer.step()  # torch's own
            for model in models:
                for parameter, weight in zip(model.parameters(), common, strict=True):
                    parameter.data.copy_(weight)
        trace.append([{name: p.detach().clone() for name, p in model.named_parameters()} for model in models])
    return trace


WAITS: list[dict[str, Any]] = [
    {"type": "diloco"},
    {"type": "async_diloco", "max_staleness": 0},
    {"type": "diloco", "start_step": 3},
]


@pytest.mark.parametrize(
    ("replicas", "waits"),
    [
        *((2, waits) for waits in WAITS),
        (4, WAITS[1]),  # a message to each other replica
        *(pytest.param(4, WAITS[number], marks=pytest.mark.exhaustive) for number in (0, 2)),
    ],
)
def test_a_plain_module(ranks: Any, replicas: int, waits: dict[str, Any]) -> None:
    """DiLoCo around any module in DeepSpeed's loop; the outer step of the reference is torch's."""
    local = {**waits, "every": 2, **OUTER}
    expected = module_reference(replicas, local, clip=0.1)
    for replica, (trace, account) in enumerate(ranks(replicas, module_trained, local, 0.1)):
        for step, weights in enumerate(trace):
            same(weights, expected[step][replica])
        numel = sum(p.numel() for p in network().parameters())
        # Bytes an element of three synchronizations (of two, and of three sums of gradients): an all-reduce each, or a
        # message to each other replica.
        start = local.get("start_step", 0)
        few = (start + (STEPS - start) // 2) * 8 * (replicas - 1) * (1 if "max_staleness" in local else 2 / replicas)
        assert few * numel <= account["sent"] <= few * (numel + 6 * 16)  # six parameters, with their padding


def beside_synchronous(steps: int) -> Any:
    found = []
    for local in ({"type": "local_sgd", "every": 1}, None):
        engine = module_engine(local)
        for step in range(steps):
            engine.grid.traffic.clear()
            module_step(engine, step)
        found.append((weights_of(engine), engine.grid.traffic.bytes("data", "all_reduce")))
    seldom = module_engine({"type": "diloco", "every": 50}, communication_data_type="fp32")
    for step in range(50):
        module_step(seldom, step)
    return found, seldom.traffic_report()["local"]


def test_meeting_at_every_step_is_synchronous_sgd(ranks: Any) -> None:
    """For SGD, also with momentum, the mean of the weights equals a step with the mean gradient.

    A synchronization sends as much as a synchronous step: one in 50 steps sends a 50th (in fp32 for fp64, a 100th).
    """
    for (alone, together), account in ranks(2, beside_synchronous, 5):
        same(alone[0], together[0])
        few = 2 * 2 * 8  # the loss and the count of parameters without gradient, which all ranks learn of
        assert account["uncompressed"] <= together[1] <= account["uncompressed"] + few
        assert alone[1] == account["uncompressed"]
        assert account["per_step"] == account["uncompressed"] / 100


def partly_used(local: dict[str, Any] | None) -> Weights:
    """Both replicas use layer 0; every other step replica 1 uses layer 1 instead; no replica uses layer 2."""
    torch.manual_seed(4)
    model = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]).double()
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAMW, "gradient_clipping": 0.1}
    engine = initialize(model=model, config={**config, **({"local_updates": local} if local else {})}, grid=Grid())[0]
    replica = engine.grid.data.rank
    for step in range(4):
        x, _ = microbatch(step, 0, replica)
        engine.backward(engine.module[step % 2 * replica](x).square().mean())
        engine.step()
    return weights_of(engine)


def test_what_some_replicas_use_is_stepped_by_all_together(ranks: Any) -> None:
    """Before ``start_step``, as without it, a parameter that no replica used does not change, nor decay."""
    wanted = ranks(2, partly_used, None)
    for before, after in zip(
        wanted, ranks(2, partly_used, {"type": "diloco", "every": 2, "start_step": 4}), strict=True
    ):
        same(before, after)


# ------------------------------------------------------------------------------------------------------- checkpoints


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
    (((2, 2, 1), {"type": "diloco", "every": 3, **OUTER}, ADAMW), 4, {}),
    (((1, 2, 2), {"type": "local_sgd", "every": 3, "average_optimizer": True}, SGD), 2, {}),
    (((1, 4, 1), {"type": "diloco", "every": 2}, {"type": "Adafactor", "params": {"lr": 1e-2}}), 4, {}),
    (((2, 2, 1), {"type": "diloco", "every": 3}, ADAMW), 4, HALF),
    (((1, 4, 1), {"type": "async_diloco", "every": 2, "start_step": 3, "max_staleness": 0, **OUTER}, SGD), 1, {}),
]
MORE_RESUMED: list[tuple[Case, int, dict[str, Any]]] = [
    (((1, 2, 2), {"type": "diloco", "every": 3}, ADAMW), 4, {"fp16": {"enabled": True}, "dtype": torch.float32}),
    (((2, 2, 1), {"type": "async_diloco", "every": 3, "max_staleness": 0, **OUTER}, ADAMW), 3, {}),
    (((2, 2, 1), {"type": "diloco", "every": 2, "start_step": 3, **OUTER}, ADAMW), 2, {}),
]


def elsewhere(folder: str, number: int, shape: tuple[int, int, int], local: dict[str, Any] | None) -> Any:
    engine = make(shape, local, RESUMED[number][0][2], train_batch_size=8)
    engine.load_checkpoint(f"{folder}/{number}", load_lr_scheduler_states=False)
    weights = engine.gather()
    engine.train_batch()
    return weights, engine.traffic_report().get("local", {}).get("meetings")


def resumed_bitwise(ranks: Any, folder: Path, cases: list[tuple[Case, int, dict[str, Any]]]) -> list[Any]:
    everyone: list[Any] = ranks(4, resumed, cases, str(folder), timeout=120)
    for number, case in enumerate(cases):
        for _, bitwise, (meetings, again), _ in (each[number] for each in everyone):
            assert bitwise and meetings == again, case
    return everyone


@pytest.mark.exhaustive
def test_saved_and_resumed_in_other_ways(ranks: Any, tmp_path: Path) -> None:
    resumed_bitwise(ranks, tmp_path, MORE_RESUMED)


def test_saved_anywhere_and_resumed(ranks: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bitwise on the same number of replicas, at any step of a round; on another number from the replicas' mean."""
    everyone = resumed_bitwise(ranks, tmp_path, RESUMED)
    for number, local in ((0, {"type": "diloco", "every": 3, **OUTER}), (2, {"type": "diloco", "every": 2}), (0, None)):
        saved = {replica: weights for replica, _, _, weights in (each[number] for each in everyone)}
        mean = {name: sum(each[name] for each in saved.values()) / len(saved) for name in saved[0]}
        caplog.clear()
        weights, meetings = elsewhere(str(tmp_path), number, (1, 1, 1), local)
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


def test_a_round_goes_on_asynchronously(ranks: Any, tmp_path: Path) -> None:
    for wanted, found in ranks(2, becomes_asynchronous, str(tmp_path)):
        same(found, wanted)


def together_again(folder: str, stop: int) -> Any:
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
def test_steps_together_after_steps_of_their_own(ranks: Any, tmp_path: Path, stop: int) -> None:
    """Replicas continue from their mean, as a run without local updates does, and stay equal."""
    everyone = ranks(2, together_again, str(tmp_path), stop)
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


def test_replicas_that_are_unlike_do_not_step_together(ranks: Any, tmp_path: Path) -> None:
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
    told = io.StringIO()
    handler = logging.StreamHandler(told)
    logging.getLogger("triax").addHandler(handler)
    other.load_checkpoint(folder)
    logging.getLogger("triax").removeHandler(handler)
    plain = make((1, 3, 1), None, ADAMW)
    for _ in range(3):
        plain.train_batch()
    other.train_batch()
    same(other.gather(), plain.gather())
    return told.getvalue()


def test_nobody_had_stepped_alone(ranks: Any, tmp_path: Path) -> None:
    """Without local steps, nothing is averaged and nothing is logged."""
    assert ranks(3, saved_at_the_boundary, str(tmp_path)) == [""] * 3


def spoilt(nan_loss: str, steps: tuple[int, ...]) -> Any:
    """Replica 1 has a nan loss in these steps; the third step taken is the last before ``start_step``."""
    engine, said = module_engine({"type": "diloco", "every": 2, "start_step": 3}, nan_loss=nan_loss), []
    for step in range(5):
        factor = math.nan if step in steps and engine.grid.data.rank == 1 else 1.0
        try:
            module_step(engine, step, factor)
        except triax.AgreedError as error:
            said.append(str(error))
    return said, engine.skipped_steps, weights_of(engine)


def test_a_loss_that_is_nan_is_everybodys_while_they_step_together(ranks: Any) -> None:
    """All skip the step, or all raise an error and can continue; after ``start_step`` only the replica itself does."""
    (_, both, first), (_, more, second) = ranks(2, spoilt, "skip", (1, 4))
    assert (both, more) == (1, 2)
    same(first, second)
    (said, _, _), (theirs, _, _) = ranks(2, spoilt, "raise", (1,))
    assert said == theirs and "microbatch 0 is nan" in said[0]


def between(start_step: int, kind: str) -> Any:
    """Results of the engine's calls before ``start_step`` and after it."""
    section = {"type": kind, "every": 2, "start_step": start_step, **OUTER}
    engine = make((1, 2, 1), section, ADAMW)
    found = []
    for _ in range(3):
        engine.train_batch()
        with engine.common_weights():
            common = engine.gather()
        parts = [next(iter(make_loader(dataset(), 2, 1, engine.grid.data.rank, 2, seed=1)))]
        found.append((engine.gather(), common, parts[0], engine.eval_batch(iter(parts), num_micro_batches=1).item()))
    engine.synchronize()
    met = engine.gather()
    assert engine.leave()
    return found, met, engine.gather()


@pytest.mark.parametrize("kind", ["diloco", "async_diloco"])
def test_what_replicas_are_asked_for(ranks: Any, kind: str) -> None:
    """The evaluated loss is that of all data, each replica with its own weights.

    Before ``start_step`` the common weights are the weights. The last of three steps is a local one.
    """
    both = ranks(2, between, 2, kind)
    for step in range(3):
        sums, weights = [], []
        for found, _, _ in both:
            own, common, (inputs, labels), _ = found[step]
            logits = gpt_logits(own, inputs, 2, 2).flatten(0, 1)
            sums.append(F.cross_entropy(logits, labels.flatten(), reduction="sum").item())
            weights.append(int((labels != -100).sum()))
            same(common, both[0][0][min(step, 1)][0])
        for replica, (found, _, _) in enumerate(both):
            alone = kind == "async_diloco"
            expected = sums[replica] / weights[replica] if alone else sum(sums) / sum(weights)
            assert found[step][3] == pytest.approx(expected, rel=1e-10)
        apart = [found[step][0] for found, _, _ in both]
        assert all(torch.equal(a, b) for a, b in zip(*(each.values() for each in apart), strict=True)) == (step < 2)
    for _, met, left in both:
        same(met, both[0][1])
        same(left, met)


def own_schedules(folder: str) -> Any:
    """Replica 1 skips a step, so that its schedule is one step behind."""
    schedule = {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}
    options: dict[str, Any] = {"nan_loss": "skip", "scheduler": schedule}
    engine, other = (module_engine({"type": "local_sgd", "every": 2}, **options) for _ in range(2))
    for step in range(3):
        module_step(engine, step, math.nan if step == 1 and engine.grid.data.rank == 1 else 1.0)
    assert engine.save_checkpoint(folder)
    other.load_checkpoint(folder)
    rates = [engine.get_lr(), other.get_lr()]
    for each in (engine, other):
        module_step(each, 3)
        rates.append(each.get_lr())
    ends = weights_of(engine), weights_of(other)
    return rates, all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_each_replica_has_its_own_schedule(ranks: Any, tmp_path: Path) -> None:
    for (rates, bitwise), skipped in zip(ranks(2, own_schedules, str(tmp_path)), (0, 1), strict=True):
        rate = 0.2 * 0.5 ** (3 - skipped)
        assert bitwise and rates == [[rate], [rate], [rate / 2], [rate / 2]]


def unlike_steps(folder: str, kind: str) -> list[str]:
    """Replica 1 has taken one step less, and none since the last synchronization."""
    engine, said = module_engine({"type": kind, "every": 3}), []
    for step in range(3 + 1 - engine.grid.data.rank):
        module_step(engine, step)
    for call in (engine.synchronize, engine.leave, lambda: engine.save_checkpoint(folder)):
        with pytest.raises(RuntimeError) as error:
            call()
        said.append(str(error.value))
    if engine.grid.data.rank == 1:
        module_step(engine, 3)
    assert engine.leave()
    return [*said, str(weights_of(engine))]


@pytest.mark.parametrize("kind", ["local_sgd", "diloco"])
def test_unlike_numbers_of_steps_are_told(ranks: Any, tmp_path: Path, kind: str) -> None:
    """Every rank raises before anything is sent; after equal numbers of steps the replicas synchronize."""
    first, second = ranks(2, unlike_steps, str(tmp_path), kind)
    assert first[-1] == second[-1]
    for said in (*first[:-1], *second[:-1]):
        assert "one replica has taken 1 steps and another 0" in said


def by_itself(folder: str) -> Any:
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


def test_saved_by_itself_and_told_to_end(ranks: Any, tmp_path: Path) -> None:
    """All ranks learn of it at a synchronization or when a checkpoint is due. Then the run is resumed."""
    assert {each[:3] for each in ranks(2, by_itself, str(tmp_path))} == {(0, 8, 143)}
    again = ranks(2, by_itself, str(tmp_path))
    assert {each[:3] for each in again} == {(8, 9, 0)}


# ------------------------------------------------------------------------------------------------- who does not wait


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


def test_rounds_that_come_late_count_in_their_own(ranks: Any, tmp_path: Path) -> None:
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


def bounded(staleness: int) -> Any:
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
def test_the_bound_holds_and_nobody_is_waited_for_who_left(ranks: Any, staleness: int) -> None:
    """The slow replica leaves first, the others have more rounds to run, and all end with the same weights."""
    found = ranks(4, bounded, staleness)
    for complete, lag, present, meetings, weights in found:
        assert complete and lag <= staleness and 1 <= present <= 4
        assert meetings == (3 if weights is found[3][-1] else 6)
        assert all(torch.equal(weights[name], found[0][-1][name]) for name in weights)


def ahead(shape: tuple[int, int, int]) -> Any:
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
def test_the_ranks_of_a_replica_take_the_same(ranks: Any, shape: tuple[int, int, int]) -> None:
    """Stages and shards of a replica apply the same differences in every round; at the end all replicas are equal."""
    found = ranks(4, ahead, shape)
    for weights, whole, held in found:
        assert all(torch.equal(weights[name], found[0][0][name]) for name in weights)
        assert all(torch.equal(w, weights[name]) for name, w in whole.items())
        assert held["common"] == 3 * held["parameters"]  # the common weights, the start of a round, and velocity


def early(folder: str) -> Any:
    """Replica 0 ends its round of four steps while replica 1 has taken one."""
    there, engine = Path(folder), module_engine({"type": "async_diloco", "every": 4, "max_staleness": 1})
    meetings = []
    for step in range(8 if engine.grid.data.rank == 0 else 3):
        if engine.grid.data.rank == 1 and step == 1:
            wait_for(there, "0")
        module_step(engine, step)
        meetings.append(engine.traffic_report()["local"]["meetings"])
        if engine.grid.data.rank == 0 and step == 3:
            (there / "0").touch()
    return engine.leave(), meetings


def test_a_slow_replica_ends_its_round_early(ranks: Any, tmp_path: Path) -> None:
    fast, slow = ranks(2, early, str(tmp_path))
    assert fast == (True, [0, 0, 0, 1, 1, 1, 1, 2]) and slow[0]
    assert slow[1][:2] == [0, 1]  # at the first step after it heard


def timed(folder: str) -> bool:
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


def test_figures_wait_for_nobody(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, timed, str(tmp_path)) == [True, True]


def one_fails(local: dict[str, Any]) -> Any:
    engine = module_engine(local)
    for step in range(6):
        if step == 3 and engine.grid.data.rank == 1:
            with engine.all_or_none("step"):
                raise ValueError("the disk is full")
        module_step(engine, step)


@pytest.mark.parametrize(
    "kind", [{"type": "local_sgd"}, {"type": "async_diloco", "max_staleness": 1, "meet_early": False}]
)
def test_a_replica_that_fails_ends_the_run(ranks: Any, kind: dict[str, Any]) -> None:
    """The other replicas stop when they would wait for it, with its message."""
    with pytest.raises(RankFailure) as failure:
        ranks(2, one_fails, {**kind, "every": 2})
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
def test_what_one_replica_raises_ends_the_run(ranks: Any, kind: dict[str, Any], how: str) -> None:
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


def test_the_store_is_gone_when_all_have_left(ranks: Any) -> None:
    first, second = ranks(2, last_to_leave)
    assert all(torch.equal(first[name], second[name]) for name in first)


# ------------------------------------------------------------------------------------------------------ the settings


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"local_updates": {"type": "diloco"}}, "local_updates.every is missing"),
    ({"local_updates": {"type": "diloco", "every": 0}}, "every"),
    ({"local_updates": {"type": "diloco", "every": 2, "start_step": -1}}, "start_step"),
    ({"local_updates": {"type": "easgd", "every": 2}}, "local_updates.type"),
    ({"local_updates": {"type": "local_sgd", "every": 2, "outer_lr": 0.5}}, "outer_lr is an option of type diloco"),
    (
        {"local_updates": {"type": "diloco", "every": 2, "max_staleness": 1}},
        "max_staleness is an option of type async_diloco",
    ),
    ({"local_updates": {"type": "async_diloco", "every": 2, "average_optimizer": True}}, "or take diloco"),
    (
        {"local_updates": {"type": "async_diloco", "every": 2, "max_staleness": 0, "meet_early": True}},
        "meet_early with max_staleness 0",
    ),
    ({"zero_optimization": {"stage": 1}}, "set the stage to 0"),
    ({"prescale_gradients": True}, "gradients that are summed over replicas"),
    ({"scheduler": {"type": "ReduceLROnPlateau", "params": {}}}, "each replica has its own"),
]


@pytest.mark.parametrize(("wrong", "words"), REFUSED)
def test_refused(wrong: dict[str, Any], words: str) -> None:
    config = {**settings({"type": "diloco", "every": 2}, ADAMW, 1), **wrong}
    with pytest.raises(ConfigError, match=words):
        read_config(config)
    read_config(settings({"type": "diloco", "every": 2}, ADAMW, 1))


def test_without_an_optimizer_there_is_nothing_to_step() -> None:
    config = {"train_batch_size": 4, "local_updates": {"type": "diloco", "every": 2}}
    with pytest.raises(ConfigError, match="local_updates needs an optimizer"):
        initialize(model=network(), config=config)


def test_one_replica_alone() -> None:
    """With one replica, local SGD is SGD."""
    engine = make((1, 1, 1), {"type": "local_sgd", "every": 2}, ADAMW)
    plain = make((1, 1, 1), None, ADAMW)
    for _ in range(4):
        assert engine.train_batch().item() == pytest.approx(plain.train_batch().item(), rel=1e-12)
    same(engine.gather(), plain.gather())
    assert engine.leave() and engine.traffic_report()["local"]["sent"] == 0.0
