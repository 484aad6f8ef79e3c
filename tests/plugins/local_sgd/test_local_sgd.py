"""Local SGD, DiLoCo and asynchronous DiLoCo against plain loops of N replicas in one process, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import triax
from triax import Grid, initialize
from triax.base.errors import ConfigError
from triax.compat.deepspeed.from_config import read_config
from triax.data.dataloader import make_loader
from triax.models.gpt import GPTConfig

from support.local_training import (
    ADAMW,
    LENGTH,
    OUTER,
    SGD,
    STEPS,
    VOCABULARY,
    Case,
    Weights,
    dataset,
    make,
    microbatch,
    module_engine,
    module_step,
    network,
    same,
    settings,
    weights_of,
)
from support.reference import gpt_logits

SIZES = GPTConfig(VOCABULARY, LENGTH, 8, 2, 2)


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
def test_local_sgd_and_diloco_steps_equal_the_papers(ranks: Any, size: int, listed: list[Case]) -> None:
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


def trained_in_parts(locals_: list[dict[str, Any]]) -> list[Any]:
    """Train two replicas, each of two ranks that have a part of every sequence."""
    return [trained((1, 2, 1), local, ADAMW, context=2)[:3] for local in locals_]


def test_replicas_of_parts_of_sequences_step_as_the_papers(ranks: Any) -> None:
    locals_ = [{"type": "local_sgd", "every": 2, "start_step": 1}, {"type": "diloco", "every": 2, **OUTER}]
    everyone = ranks(4, trained_in_parts, locals_)
    for number, local in enumerate(locals_):
        expected = reference(everyone[0][number][1], 2, local, ADAMW)
        for replica, _, trace in (each[number] for each in everyone):
            for (weights, loss), (models, losses) in zip(trace, expected, strict=True):
                same(weights, models[replica])
                assert loss == pytest.approx(losses[replica], rel=1e-10)


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
def test_diloco_around_a_plain_module_equals_the_reference(ranks: Any, replicas: int, waits: dict[str, Any]) -> None:
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


def test_local_sgd_with_a_mean_at_each_step_is_synchronous_sgd(ranks: Any) -> None:
    """For SGD, also with momentum, the mean of the weights equals a step with the mean gradient.

    A synchronization sends as much as a synchronous step: one in 50 steps sends a 50th (in fp32 for fp64, a 100th).
    """
    for (alone, together), account in ranks(2, beside_synchronous, 5):
        same(alone[0], together[0])
        few = 2 * 2 * 8  # the loss and the count of parameters without gradient, which all ranks learn of
        assert account["uncompressed"] <= together[1] <= account["uncompressed"] + few
        assert alone[1] == account["uncompressed"]
        assert account["per_step"] == account["uncompressed"] / 100


def layer_used(step: int, replica: int) -> int:
    """Replica 0 uses layer 0, and replica 1 layer 1 in every other step; no replica uses layer 2."""
    return step % 2 * replica


def three_layers() -> nn.ModuleList:
    torch.manual_seed(4)
    return nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]).double()


def partly_used(start_step: int | None) -> Weights:
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAMW, "gradient_clipping": 0.1}
    if start_step is not None:
        config["local_updates"] = {"type": "diloco", "every": 2, "start_step": start_step}
    engine = initialize(model=three_layers(), config=config, grid=Grid())[0]
    replica = engine.grid.data.rank
    for step in range(4):
        x, _ = microbatch(step, 0, replica)
        engine.backward(engine.module[layer_used(step, replica)](x).square().mean())
        engine.step()
    return weights_of(engine)


@pytest.mark.parametrize("start_step", [4, None])
def test_before_start_step_all_replicas_update_the_used_layers(ranks: Any, start_step: int | None) -> None:
    """As one process with the mean of the replicas' losses; weights that no replica uses do not change or decay."""
    model = three_layers()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW["params"])
    for step in range(4):
        optimizer.zero_grad()
        for replica in range(2):
            x, _ = microbatch(step, 0, replica)
            (model[layer_used(step, replica)](x).square().mean() / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    for found in ranks(2, partly_used, start_step):
        same(found, {name: p.detach() for name, p in model.named_parameters()})
        assert torch.equal(found["2.weight"], three_layers().get_parameter("2.weight"))


def train_with_nan_losses(nan_loss: str, steps: tuple[int, ...]) -> Any:
    """Replica 1 has a nan loss in these steps; the third step taken is the last before ``start_step``."""
    engine, said = module_engine({"type": "diloco", "every": 2, "start_step": 3}, nan_loss=nan_loss), []
    for step in range(5):
        factor = math.nan if step in steps and engine.grid.data.rank == 1 else 1.0
        try:
            module_step(engine, step, factor)
        except triax.AgreedError as error:
            said.append(str(error))
    return said, engine.skipped_steps, weights_of(engine)


def test_before_start_step_a_nan_loss_affects_all_replicas(ranks: Any) -> None:
    """All replicas skip the step, or all raise; after ``start_step`` only the replica with the NaN loss does."""
    (_, both, first), (_, more, second) = ranks(2, train_with_nan_losses, "skip", (1, 4))
    assert (both, more) == (1, 2)
    same(first, second)
    (said, _, _), (theirs, _, _) = ranks(2, train_with_nan_losses, "raise", (1,))
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
def test_evaluation_uses_each_replicas_own_weights(ranks: Any, kind: str) -> None:
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


def test_each_replica_has_its_own_learning_rate_schedule(ranks: Any, tmp_path: Path) -> None:
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
def test_unequal_step_counts_of_replicas_are_an_error(ranks: Any, tmp_path: Path, kind: str) -> None:
    """Every rank raises before anything is sent; after equal numbers of steps the replicas synchronize."""
    first, second = ranks(2, unlike_steps, str(tmp_path), kind)
    assert first[-1] == second[-1]
    for said in (*first[:-1], *second[:-1]):
        assert "one replica has taken 1 steps and another 0" in said


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
def test_invalid_local_sgd_options_are_refused(wrong: dict[str, Any], words: str) -> None:
    config = {**settings({"type": "diloco", "every": 2}, ADAMW, 1), **wrong}
    with pytest.raises(ConfigError, match=words):
        read_config(config)
    read_config(settings({"type": "diloco", "every": 2}, ADAMW, 1))


def test_local_updates_without_an_optimizer_are_refused() -> None:
    config = {"train_batch_size": 4, "local_updates": {"type": "diloco", "every": 2}}
    with pytest.raises(ConfigError, match="local_updates needs an optimizer"):
        initialize(model=network(), config=config)


def test_local_sgd_of_one_replica_is_sgd() -> None:
    engine = make((1, 1, 1), {"type": "local_sgd", "every": 2}, ADAMW)
    plain = make((1, 1, 1), None, ADAMW)
    for _ in range(4):
        assert engine.train_batch().item() == pytest.approx(plain.train_batch().item(), rel=1e-12)
    same(engine.gather(), plain.gather())
    assert engine.leave() and engine.traffic_report()["local"]["sent"] == 0.0
