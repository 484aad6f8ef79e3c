"""Runs with 1-bit optimizers: resumed, on other replicas, after overflows, in plain loops, and refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.base.errors import ConfigError
from triax.compat.deepspeed.config.to_options import notes_of
from triax.compat.deepspeed.configuration import read_config
from triax.models.gpt import GPTConfig, GPTLoss, gpt_layers
from triax.plugins.gradient_compression import OneBitAdam, OneBitLamb, ZeroOneAdam
from triax.tensor_parallel import VocabParallelEmbedding
from triax.zero import ShardedOptimizer

from support.onebit_references import (
    BATCH,
    HALF,
    PARAMS,
    STEPS,
    WIDTH,
    Reference,
    chunks,
    compare,
    grouped,
    layers,
    made,
    rate,
    share,
    step,
)
from support.toys import mean_loss


def interrupted(
    folder: str, kind: str, shape: tuple[int, int, int], at: int, resume: bool, to: int, **config: Any
) -> Any:
    engine = made(shape, kind, **config)
    if resume:
        step(engine, 1)  # state of its own, which is forgotten
        engine.load_checkpoint(folder)
    for number in range(at + 1 if resume else 1, to + 1):
        step(engine, number)
        if number == at and not resume:
            engine.save_checkpoint(folder)
    kept = {}
    for member, master, *_ in engine.data_axis.stepper.views:
        state = {k: v.clone() if isinstance(v, Tensor) else v for k, v in engine.optimizer.state[master].items()}
        kept[member.layout.name] = (member.parameter.detach().clone(), master.detach().clone(), state)
    return kept


@pytest.mark.parametrize(
    ("kind", "at", "config"),
    [
        pytest.param("OneBitAdam", 2, {}, marks=pytest.mark.exhaustive),
        ("OneBitAdam", 7, {"bf16": HALF}),
        ("ZeroOneAdam", 8, {}),
        ("ZeroOneAdam", 11, {"bf16": HALF}),  # between two meetings: replicas are apart
        ("OneBitLamb", 6, {}),
    ],
)
def test_1_bit_optimizers_resume_bitwise(
    ranks: Any, tmp_path: Path, kind: str, at: int, config: dict[str, Any]
) -> None:
    whole = ranks(2, interrupted, str(tmp_path), kind, (1, 2, 1), at, False, STEPS, **config)
    resumed = ranks(2, interrupted, str(tmp_path), kind, (1, 2, 1), at, True, STEPS, **config)
    for mine, theirs in zip(resumed, whole, strict=True):
        for name, (parameter, master, state) in theirs.items():
            assert torch.equal(mine[name][0], parameter) and torch.equal(mine[name][1], master)
            assert mine[name][2].keys() == state.keys()
            for key, value in state.items():
                there = mine[name][2][key]
                same = torch.equal(there, value) if isinstance(value, Tensor) else there == value
                assert same, (name, key)
    if kind == "ZeroOneAdam":
        assert "moved" in whole[0]["layers.0.weight"][2]  # the run ended apart, too
        assert not torch.equal(whole[0]["layers.0.weight"][0], whole[1]["layers.0.weight"][0])


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.exhaustive), 4])
def test_1_bit_errors_carry_over_to_another_number_of_replicas(ranks: Any, tmp_path: Path, replicas: int) -> None:
    """Errors add the same to the next mean; replicas with local updates all resume from the mean."""
    for kind, at in (("OneBitAdam", 7), ("ZeroOneAdam", 11)):
        folder = str(tmp_path / kind)
        saved = ranks(2, interrupted, folder, kind, (1, 2, 1), at, False, at)
        found = ranks(replicas, interrupted, folder, kind, (1, replicas, 1), at, True, at)
        for name, (_, _, state) in saved[0].items():
            for key in [key for key in ("worker_error", "moved", "local_avg") if key in state]:
                wanted = (saved[0][name][2][key] + saved[1][name][2][key]) / 2
                for each in found:
                    torch.testing.assert_close(each[name][2][key], wanted, rtol=1e-14, atol=1e-16)
            wanted = torch.cat([each[name][2]["server_error"] for each in saved])
            assert torch.equal(torch.cat([each[name][2]["server_error"] for each in found]), wanted)
            for key in ("exp_avg_sq", "step", "rates"):
                torch.testing.assert_close(found[0][name][2].get(key), state.get(key), rtol=0, atol=0)
            if kind == "ZeroOneAdam":
                apart = torch.stack([each[name][1] for each in saved])
                assert replicas == 1 or not torch.equal(apart[0], apart[1]) or not state["moved"].any()
                torch.testing.assert_close(found[0][name][1], apart.mean(0), rtol=1e-12, atol=1e-14)


def overflowed() -> Any:
    engine = made((1, 2, 1), "OneBitAdam", fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1})
    for number in range(1, 7):
        step(engine, number)
    before = {id(p): copy.deepcopy(s) for p, s in _states(engine)}
    weights = engine.gather()
    x, y = share(7, engine.grid.data.rank, 2)
    scale = 1e5 if engine.grid.data.rank == 1 else 1.0  # one replica's gradients do not fit
    engine.train_batch(iter([(x.half(), y * scale)]))
    skipped = engine.skipped_steps
    kept = all(bool((v == torch.as_tensor(before[id(p)][k])).all()) for p, s in _states(engine) for k, v in s.items())
    step(engine, 8)
    dtypes = {v.dtype for _, s in _states(engine) for v in s.values() if isinstance(v, Tensor)}
    after = engine.gather()
    same = all(torch.equal(weights[name], after[name]) for name in weights)
    return skipped, kept, dtypes, same, engine.optimizer.steps, after


def _states(engine: Any) -> list[tuple[Any, dict[str, Any]]]:
    return list(engine.optimizer.state.items())


def test_an_overflow_changes_no_1_bit_errors_or_momenta(ranks: Any) -> None:
    for skipped, kept, dtypes, same, steps, _ in ranks(2, overflowed):
        assert skipped == 1 and kept and not same
        assert dtypes == {torch.float32} and steps == 7


class Branch(nn.Module):
    """A model with a layer that is used in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.rare, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, rare: bool) -> Tensor:
        y: Tensor = self.always(x)
        return y + self.rare(y) if rare else y


def branched(kind: str) -> Any:
    torch.manual_seed(0)
    model = Branch().double()
    optimizer = {"type": kind, "params": {"lr": 0.01, **PARAMS[kind]}}
    config = {"train_micro_batch_size_per_gpu": BATCH // 2, "optimizer": optimizer}
    grid = Grid(timeout=60)
    engine = triax.initialize(model=model, grid=grid, config=config)[0]
    seen = []
    for number in range(1, 10):
        x, y = share(number, grid.data.rank, 2)
        rare = number != 7 and (number != 5 or grid.data.rank == 1)  # on one replica, on none
        state = {key: value.clone() for key, value in engine.module_state_dict().items()}
        errors = [{k: v.clone() for k, v in s.items() if isinstance(v, Tensor)} for _, s in _states(engine)]
        engine.backward((engine(x, rare) - y).square().mean())
        engine.step()
        after = [{k: v for k, v in s.items() if isinstance(v, Tensor)} for _, s in _states(engine)]
        stood = [
            a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
            for a, b in zip(errors or after, after, strict=True)
        ]
        still = {name: torch.equal(value, engine.module_state_dict()[name]) for name, value in state.items()}
        seen.append((still, stood))
    return seen


@pytest.mark.parametrize("kind", ["OneBitAdam", "OneBitLamb"])
def test_1_bit_steps_skip_parameters_without_a_gradient(ranks: Any, kind: str) -> None:
    for seen in ranks(2, branched, kind):
        for number, (still, stood) in enumerate(seen, start=1):
            assert still == {name: "never" in name or (number == 7 and "rare" in name) for name in still}
            if number == 7:
                assert sum(stood) == 4 and len(stood) == 6


def joined_late(kind: str, folder: Path) -> tuple[nn.Module, nn.Module]:
    """Train a model whose layer joins after 10 steps and leaves again; and each parameter with an optimizer of its own.

    Return the engine's model, which is resumed from a checkpoint on its way, and the other one.
    """
    torch.manual_seed(0)
    plain = Branch().double()
    model, options = copy.deepcopy(plain), {"lr": 0.01, "weight_decay": 0.0}
    cls: Any = OneBitLamb if kind == "OneBitLamb" else torch.optim.AdamW
    alone: list[tuple[nn.Parameter, Any]] = [(p, cls([p], **options)) for p in plain.parameters()]
    config = {"train_batch_size": BATCH, "optimizer": {"type": kind, "params": options}}
    engine = triax.initialize(model=copy.deepcopy(model), config=config)[0]
    for number in range(1, 17):
        (x, y), rare = share(number, 0, 1), number > 10 and number != 13
        if number == 12:
            engine.save_checkpoint(folder)
            engine = triax.initialize(model=copy.deepcopy(model), config=config)[0]
            engine.load_checkpoint(folder)
        engine.backward((engine(x, rare) - y).square().mean())
        engine.step()
        (plain(x, rare) - y).square().mean().backward()
        for p, optimizer in alone:
            if p.grad is not None:
                optimizer.step()
                p.grad = None
    return engine.module, plain


@pytest.mark.parametrize("kind", [*PARAMS])
def test_a_parameter_that_joins_late_has_its_own_bias_correction(kind: str, tmp_path: Path) -> None:
    found, plain = joined_late(kind, tmp_path)
    for mine, theirs in zip(found.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {"0": nn.Linear(WIDTH, 2 * WIDTH), "2": nn.Linear(2 * WIDTH, WIDTH), "4": nn.Linear(WIDTH, WIDTH)}
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers["4"](torch.tanh(self.layers["2"](torch.tanh(self.layers["0"](x)))))
        return y


def standalone(weights: dict[str, Tensor], how: str) -> Any:
    grid = Grid(timeout=60)
    model = Plain().double()
    model.load_state_dict(weights)
    options = {"lr": 0.01, "betas": (0.8, 0.95), **PARAMS["OneBitAdam"]}
    groups = grouped(model.named_parameters())
    engine: Any = None
    if how == "sharded":
        optimizer: Any = ShardedOptimizer(OneBitAdam, groups, grid, stage=0, module=model, **options)
        replicas = optimizer.backward_passes.data_axis
    else:
        config = {"train_micro_batch_size_per_gpu": BATCH // grid.data.size, "gradient_clipping": 0.4}
        engine, optimizer, *_ = triax.initialize(
            model=model, grid=grid, config=config, optimizer=OneBitAdam(groups, **options)
        )
        replicas = engine.data_axis
    trace = []
    for number in range(1, STEPS + 1):
        for group, its in enumerate(optimizer.param_groups):
            its["lr"] = rate(number, group)
        x, y = share(number, grid.data.rank, grid.data.size)
        optimizer.zero_grad()
        loss = mean_loss(model(x), y)
        if engine is not None:
            engine.backward(loss)
            engine.step()
        else:
            loss.backward()
            optimizer.clip_grad_norm_(0.4)
            optimizer.step()
        trace.append({name: p.detach().clone() for name, p in model.named_parameters()})
        if how == "sharded" and number == 6:
            saved = optimizer.state_dict()
            optimizer = ShardedOptimizer(OneBitAdam, groups, grid, stage=0, module=model, **options)
            optimizer.load_state_dict(saved)
    return trace, chunks(replicas, grid)


@pytest.mark.parametrize("how", ["sharded", "an instance"])
def test_onebit_adam_in_a_plain_loop_equals_the_equations(ranks: Any, how: str) -> None:
    model = PipelineModule(layers(Grid()), loss_fn=mean_loss).double()
    start = {name: p.detach() for name, p in model.named_parameters()}
    found = ranks(2, standalone, start, how)
    wanted = Reference("OneBitAdam", 2, found[0][1], True, 0.4).run()
    for trace, _ in found:
        compare(trace, wanted)


def resume_between_synchronizations(resumed: bool) -> Any:
    """A plain loop of 0/1 Adam, made again and loaded between two synchronizations, on the first replica's weights."""
    grid = Grid(timeout=60)
    torch.manual_seed(0)
    model = Plain().double()

    def made() -> Any:
        options: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), **PARAMS["ZeroOneAdam"]}
        groups = grouped(model.named_parameters())
        return ShardedOptimizer(ZeroOneAdam, groups, grid, stage=0, module=model, **options)

    optimizer, met = made(), []
    for number in range(1, STEPS + 1):
        x, y = share(number, grid.data.rank, grid.data.size)
        optimizer.zero_grad()
        mean_loss(model(x), y).backward()
        optimizer.step()
        met.append(optimizer.inner.synchronizes(number))
        if resumed and not met[-1] and number > 7:
            saved, resumed = optimizer.state_dict(), False
            for parameter in model.parameters():
                grid.data.broadcast(parameter.data)
            optimizer = made()
            optimizer.load_state_dict(saved)
    return [p.detach().clone() for p in model.parameters()], met


def test_zero_one_adam_resumes_between_synchronizations(ranks: Any) -> None:
    for (found, met), (wanted, _) in zip(
        ranks(2, resume_between_synchronizations, True), ranks(2, resume_between_synchronizations, False), strict=True
    ):
        assert not all(met[7:])
        for mine, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, want, rtol=1e-12, atol=1e-14)


CASES: list[tuple[dict[str, Any], str]] = [
    ({"zero_optimization": {"stage": 1}}, "into flat ranges: set stage 0, or use AdamW"),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        "sub_group_size step flat ranges: leave them out",
    ),
    ({"freeze_step": 0}, "freeze_step=0 is too small: give at least 1"),
    ({"freeze_step": 2.5}, "optimizer.params.freeze_step: give a whole number"),
    ({"amsgrad": True}, "optimizer.params.amsgrad is true, but the variance is frozen after the warmup"),
    ({"eps_inside_sqrt": True}, "optimizer.params.eps_inside_sqrt is true, but eps is added to the root"),
    ({"max_grad_norm": 1.0}, "write gradient_clipping"),
    ({"cuda_aware": "no"}, "optimizer.params.cuda_aware: give true or false"),
    ({"comm_backend_name": 1}, "optimizer.params.comm_backend_name: give a text in quotes"),
    ({"betas": [0.9, 1.0]}, "both numbers must be at least 0 and less than 1"),
    ({"coeff_beta": 0.9}, "OneBitAdam has no coeff_beta; it takes lr, freeze_step"),
]


@pytest.mark.parametrize(("given", "words"), CASES, ids=[str(given) for given, _ in CASES])
def test_invalid_1_bit_options_are_refused(given: dict[str, Any], words: str) -> None:
    params = {} if "zero_optimization" in given else given
    more = given if "zero_optimization" in given else {}
    with pytest.raises(ConfigError) as error:
        read_config(
            {"train_batch_size": 4, "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, **params}}, **more}
        )
    assert words in str(error.value)


def test_notes_name_1_bit_options_without_effect() -> None:
    params = {"lr": 1e-3, "freeze_step": 5, "cuda_aware": False, "comm_backend_name": "nccl", "eps_inside_sqrt": False}
    notes = notes_of(read_config({"train_batch_size": 4, "optimizer": {"type": "onebitadam", "params": params}}))
    assert [note.split(":")[0] for note in notes] == [
        "optimizer.params.comm_backend_name does nothing",
        "optimizer.params.cuda_aware does nothing",
    ]


def refused_on_ranks() -> list[str]:
    said = []
    grid = Grid(1, 1, 2, timeout=60)
    model = PipelineModule(layers(grid), grid=grid, loss_fn=mean_loss)
    config = {"train_batch_size": 4, "optimizer": {"type": "OneBitLamb", "params": {"lr": 0.1}}}
    cases: list[Callable[[], Any]] = [
        lambda: triax.initialize(model=model, config=config),
        lambda: triax.initialize(
            model=nn.Linear(2, 2),
            config={"train_micro_batch_size_per_gpu": 4},
            optimizer=lambda groups: OneBitAdam(groups),
        ),
        lambda: ShardedOptimizer(OneBitAdam, nn.Linear(2, 2).parameters(), Grid(timeout=60), stage=1),
        lambda: OneBitAdam([{"params": [nn.Parameter(torch.zeros(2))], "exp_avg_mask": None}]),
        lambda: OneBitAdam([{"params": [nn.Parameter(torch.zeros(2))], "freeze_step": 7}]),
        lambda: triax.initialize(
            model=PipelineModule([LayerSpec(VocabParallelEmbedding, 7, 4, grid=grid)], grid=grid, loss_fn=mean_loss),
            config={**config, "optimizer": {"type": "OneBitAdam"}},
        ),
    ]
    for case in cases:
        try:
            case()
        except ValueError as error:
            said.append(str(error))
    return said


def test_unsupported_1_bit_setups_are_refused_on_every_rank(ranks: Any) -> None:
    for said in ranks(2, refused_on_ranks):
        wanted = [
            "the grid's tensor axis of 2 shards tensors: make a grid of tensor 1, or use OneBitAdam",
            "a function made a OneBitAdam",
            "pass stage=0, not 1",
            "exp_avg_mask marks elements",
            "freeze_step must be equal in all parameter groups",
            "needs shards of equal size on all 2 tensor ranks",
        ]
        assert len(said) == len(wanted) and all(words in text for words, text in zip(wanted, said, strict=True)), said


def tied_ends(kind: str) -> Any:
    """Train a weight that the first and the last stage share; return the losses, its bucket and the names in it."""
    grid = Grid(2, 2, 1, timeout=60)
    sizes = GPTConfig(
        vocab_size=9,
        max_position_embeddings=4,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model = PipelineModule(gpt_layers(sizes), grid=grid, loss_fn=GPTLoss(grid, vocab_size=9))
    optimizer = {"type": kind, "params": {"lr": 0.01, **PARAMS[kind]}}
    settings = {"train_batch_size": 8, "gradient_accumulation_steps": 2, "optimizer": optimizer}
    engine = triax.initialize(model=model, config=settings)[0]
    generator = torch.Generator().manual_seed(grid.data.rank)
    losses = []
    for _ in range(12):
        ids = torch.randint(8, (4, 5), generator=generator)
        pairs = zip(ids[:, :-1].split(2), ids[:, 1:].split(2), strict=True)
        losses.append(engine.train_batch(iter(list(pairs))).item())
    tie = next(bucket for bucket in engine.data_axis.buckets if bucket.tie is not None)
    return losses, tie.weights.clone(), {m.layout.name for m in tie.members}


@pytest.mark.parametrize(
    "kind", ["OneBitAdam", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in list(PARAMS)[1:])]
)
def test_1_bit_steps_keep_tied_weights_equal(ranks: Any, kind: str) -> None:
    first, *others = ranks(4, tied_ends, kind)
    for losses, weights, names in others:
        assert (losses, names) == (first[0], first[2]) and torch.equal(weights, first[1])


def written_apart() -> Any:
    """Between two synchronizations one parameter is written on every replica, and the others are not."""
    engine = made((1, 2, 1), "ZeroOneAdam", params={"lr": 0.01})
    number = 0
    while number < 7 or engine.optimizer.synchronizes(engine.optimizer.steps):
        number += 1
        step(engine, number)
    parameters = dict(engine.module.named_parameters())
    name = next(iter(parameters))
    others = {other: p.detach().clone() for other, p in parameters.items() if other != name}
    with triax.zero.gathered(parameters[name], modifier_rank=0):
        parameters[name].data.fill_(3.0)
    same = all(torch.equal(others[other], parameters[other]) for other in others)
    step(engine, number + 1)
    return parameters[name].detach().clone(), same, {other: p.detach().clone() for other, p in others.items()}


def test_a_weight_set_between_synchronizations_keeps_its_value(ranks: Any) -> None:
    first, second = ranks(2, written_apart)
    assert any(not torch.equal(first[2][name], second[2][name]) for name in first[2])  # they were apart
    for weight, same, _ in (first, second):
        assert same and (weight - 3.0).abs().max() < 0.2
