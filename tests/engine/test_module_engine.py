"""`initialize` of a plain module with DeepSpeed's loop, against a plain float64 loop of torch in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, initialize
from triax.base.errors import ConfigError

from support.module_jobs import Trace, plain
from support.module_training import CLIP, MICRO, OPTIMIZERS, STEPS, WIDTH, config, groups, microbatch, net


def engined(settings: dict[str, Any], grid: Grid) -> Trace:
    model = net(seed=grid.rank)
    engine, *_ = initialize(model=model, model_parameters=groups(model), config=settings, grid=grid)
    trace = []
    for step in range(STEPS):
        for index in range(engine.gradient_accumulation_steps()):
            x, y = microbatch(step, index, engine.grid.data.rank)
            loss = (engine(x, times=0.9) - y).square().mean()
            engine.backward(loss)
            assert engine.is_gradient_accumulation_boundary() == (index + 1 == engine.gradient_accumulation_steps())
            engine.step()
        norm = engine.get_global_grad_norm()
        assert norm is not None
        gradients = {name: gradient.clone() for name, gradient in engine.gather("gradients").items()}
        with engine.whole_weights():
            weights = {name: p.detach().clone() for name, p in engine.named_parameters()}
        trace.append((gradients, weights, norm))
    assert engine.global_steps == STEPS and engine.micro_steps == STEPS * engine.gradient_accumulation_steps()
    assert engine.global_samples == STEPS * engine.train_batch_size()
    return trace


CASES = [(kind, stage, accumulation) for kind in OPTIMIZERS for stage in range(4) for accumulation in (1, 3)]
LAST = (("AdamW", 3, 3), ("AdamW", 3, 3))  # with everything on disk, and reduced once a step


def every_case(cases: list[tuple[str, int, int]], folder: str) -> list[Trace]:
    grid = Grid(timeout=60)
    traces = [engined(config(kind, accumulation, stage), grid) for kind, stage, accumulation in cases]
    disk = {"device": "nvme", "nvme_path": folder}
    offloaded = config("AdamW", 3, 3, zero={"offload_optimizer": disk, "offload_param": disk, "sub_group_size": 100})
    once = config("AdamW", 3, 2, zero={"reduce_each_microbatch": False}, prescale_gradients=True)
    return [*traces, engined(offloaded, grid), engined(once, grid)]


def require_equal_to_plain(ranks: Any, size: int, cases: list[tuple[str, int, int]], folder: Path) -> None:
    expected = {(kind, a): plain(kind, size, a) for kind in OPTIMIZERS for a in (1, 3)}
    for traces in ranks(size, every_case, cases, str(folder), timeout=120):
        for trace, (kind, _, accumulation) in zip(traces, [*cases, *LAST], strict=True):
            torch.testing.assert_close(trace, expected[kind, accumulation], rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [1, 2])
def test_module_engine_steps_equal_plain_pytorch(ranks: Any, size: int, tmp_path: Path) -> None:
    few = CASES[::4] + CASES[3::4]  # each optimizer in each stage, with one or several microbatches in turn
    require_equal_to_plain(ranks, size, few, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_module_engine_cases_equal_plain_pytorch(ranks: Any, size: int, tmp_path: Path) -> None:
    require_equal_to_plain(ranks, size, CASES, tmp_path)


def clipped_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Clip the gradients of a plain model, and return them with zeros where there are none."""
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}


def without_sync(stage: int) -> dict[str, Tensor]:
    engine, *_ = initialize(model=net(), config=config("SGD", 2, stage, zero={"reduce_each_microbatch": False}))
    for index in range(2):
        with engine.no_sync():
            for part in range(2):
                x, y = microbatch(part, index, engine.grid.data.rank)
                engine.backward((engine(x) - y).square().mean())
            with pytest.raises(RuntimeError, match="inside no_sync"):
                engine.step()
        if index == 0:  # in the other microbatch, all passes were silent
            x, y = microbatch(2, index, engine.grid.data.rank)
            engine.backward((engine(x) - y).square().mean())
        engine.step()
    return engine.gather("gradients")


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_no_sync_accumulates_without_a_reduction(ranks: Any, stage: int) -> None:
    model = net()
    for replica in range(2):
        for index in range(2):
            for part in range(2 if index else 3):
                x, y = microbatch(part, index, replica)
                ((model(x) - y).square().mean() / 4).backward()
    wanted = clipped_gradients(model)
    for gradients in ranks(2, without_sync, stage):
        torch.testing.assert_close(gradients, wanted, rtol=0, atol=1e-10)


def without_gradient(stage: int, zero: dict[str, Any]) -> dict[str, Tensor]:
    """Training in which, for each microbatch, one replica's loss does not depend on the module."""
    engine, *_ = initialize(model=net(), config=config("SGD", 2, stage, zero=zero), grid=Grid(timeout=30))
    rank = engine.grid.data.rank
    for index in range(2):
        x, y = microbatch(0, index, rank)
        loss = (engine(x) - y).square().mean()
        if (index, rank) in ((0, 1), (1, 0)):
            loss = torch.ones(1, requires_grad=True).sum()
        engine.backward(loss)
        engine.step()
    return engine.gather("gradients")


@pytest.mark.parametrize(
    ("stage", "zero"),
    [(0, {}), (2, {}), (3, {}), (3, {"reduce_each_microbatch": False}), (3, {"stage3_keep_gathered": True})],
)
def test_gradients_are_right_when_a_replica_has_none(ranks: Any, stage: int, zero: dict[str, Any]) -> None:
    model = net()
    for index, replica in ((0, 0), (1, 1)):
        x, y = microbatch(0, index, replica)
        ((model(x) - y).square().mean() / 4).backward()
    wanted = clipped_gradients(model)
    for gradients in ranks(2, without_gradient, stage, zero, timeout=40):
        torch.testing.assert_close(gradients, wanted, rtol=0, atol=1e-10)


def without_gradient_after_two(stage: int) -> str:
    engine, *_ = initialize(model=net(), config=config("SGD", 1, stage), grid=Grid(timeout=30))
    x, y = microbatch(0, 0, engine.grid.data.rank)
    try:
        loss = (engine(x) + engine(x) - y).square().mean()
        engine.backward(loss if engine.grid.rank == 0 else torch.ones((), requires_grad=True))
        engine.step()
    except RuntimeError as error:
        return str(error)
    return "went on"


def test_two_passes_without_a_gradient_are_refused_in_stage_3(ranks: Any) -> None:
    for said in ranks(2, without_gradient_after_two, 3, timeout=20):
        assert "rank 1" in said and "exactly one forward pass ran before. Add 0.0 * output.sum() to the loss" in said
    assert ranks(2, without_gradient_after_two, 2, timeout=20) == ["went on"] * 2


def two_engines(stages: tuple[int, int], accumulation: int) -> list[dict[str, Tensor]]:
    grid = Grid(timeout=60)
    engines = [
        initialize(model=net(seed), config=config(kind, accumulation, stage), grid=grid)[0]
        for seed, (kind, stage) in enumerate(zip(OPTIMIZERS, stages, strict=True))
    ]
    for step in range(STEPS):
        for index in range(accumulation):
            x, y = microbatch(step, index, grid.data.rank)
            outputs = [engine(x) for engine in engines]
            loss = (outputs[0] * outputs[1] - y).square().mean()
            loss.backward()
            for engine in engines:
                engine.step()
        for engine in engines:
            assert engine.optimizer is not None
            engine.optimizer.zero_grad()
    return [engine.module_state_dict() for engine in engines]


@pytest.mark.parametrize("stages", [(0, 2), (3, 1)])
def test_two_engines_train_one_loss_as_plain_pytorch(ranks: Any, stages: tuple[int, int]) -> None:
    models = [net(seed) for seed in range(2)]
    optimizers = [
        cls(model.parameters(), **options) for model, (cls, options) in zip(models, OPTIMIZERS.values(), strict=True)
    ]
    for step in range(STEPS):
        for index in range(2):
            for replica in range(2):
                x, y = microbatch(step, index, replica)
                ((models[0](x) * models[1](x) - y).square().mean() / 4).backward()
        for model, optimizer in zip(models, optimizers, strict=True):
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    wanted = [dict(model.state_dict()) for model in models]
    for states in ranks(2, two_engines, stages, 2):
        torch.testing.assert_close(states, wanted, rtol=0, atol=1e-10)


def judge(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)).double()


def adversaries(torchs_backward: bool) -> list[list[dict[str, Tensor]]]:
    """A generator whose loss flows through a discriminator, in each stage, with and without ``zero_grad``."""
    grid, found = Grid(timeout=60), []
    for stage in range(4):
        settings = config(stage=stage)
        makers, judges = (initialize(model=judge(seed), config=settings, grid=grid)[0] for seed in range(2))

        def backward(engine: Any, loss: Tensor) -> None:
            loss.backward() if torchs_backward else engine.backward(loss)

        def forgetful(engine: Any, y: Tensor) -> None:
            backward(engine, engine(y).square().mean())
            engine.step()

        for step in range(STEPS):
            x, y = microbatch(step, 0, grid.data.rank)
            made = makers(x)
            if step == 1:  # forgotten once
                with pytest.raises(RuntimeError, match=r"gradients of Sequential.*Call zero_grad\(\) of this engine"):
                    forgetful(judges, y)
            judges.zero_grad()
            backward(judges, judges(y).square().mean())
            backward(judges, (judges(made.detach()) - 1.0).square().mean())
            judges.step()
            backward(makers, judges(made).square().mean())
            makers.step()
        found.append([makers.module_state_dict(), judges.module_state_dict()])
    return found


@pytest.mark.parametrize(("size", "torchs_backward"), [(1, True), (2, False), (2, True)])
def test_a_step_does_not_add_the_loss_of_another_engine(ranks: Any, size: int, torchs_backward: bool) -> None:
    makers, judges = judge(0), judge(1)
    cls, options = OPTIMIZERS["SGD"]
    optimizers = [cls(model.parameters(), **options) for model in (makers, judges)]
    for step in range(STEPS):
        batches = [microbatch(step, 0, replica) for replica in range(size)]
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        made = makers(x)
        judges.zero_grad()
        (judges(y).square().mean() + (judges(made.detach()) - 1.0).square().mean()).backward()
        nn.utils.clip_grad_norm_(judges.parameters(), CLIP)
        optimizers[1].step()
        makers.zero_grad()
        judges(made).square().mean().backward()
        nn.utils.clip_grad_norm_(makers.parameters(), CLIP)
        optimizers[0].step()
    for found in ranks(size, adversaries, torchs_backward):
        for states in found:
            wanted = [dict(makers.state_dict()), dict(judges.state_dict())]
            torch.testing.assert_close(states, wanted, rtol=0, atol=1e-10)


def sharded(stage: int) -> dict[str, Tensor]:
    """Replicas of tensor ranks: two of the linears sharded, the rest whole."""
    grid = Grid(data=2, tensor=2, timeout=60)
    model = net(seed=grid.rank)
    for parameter in [*model.parameters(), *model.buffers()]:  # parallelize has rank 0's along the tensor axis alone
        whole = parameter.detach().clone()
        grid.world.broadcast(whole)
        parameter.data.copy_(whole)
    triax.parallelize(model, grid, {"blocks.*.up": "column", "blocks.*.down": "row"})
    settings = config("AdamW", 3, stage)
    engine, *_ = initialize(model=model, model_parameters=groups(model), config=settings, grid=grid)
    for step in range(STEPS):
        for index in range(3):
            x, y = microbatch(step, index, grid.data.rank)
            engine.backward((engine(x, times=0.9) - y).square().mean())
            engine.step()
    return engine.gather()


@pytest.mark.parametrize("stage", [1, 3])
def test_replicas_on_a_tensor_axis_train_as_one_process(ranks: Any, stage: int) -> None:
    *_, (_, wanted, _) = plain("AdamW", 2, 3)
    for weights in ranks(4, sharded, stage):
        torch.testing.assert_close(weights, wanted, rtol=0, atol=1e-10)


class Waves(nn.Module):
    """Complex parameters between real ones; one is used in its conjugate alone."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.waves = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128))
        self.conjugated = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.fft.fft(self.enter(x)) @ self.waves * self.conjugated.conj()
        return y.real * y.imag.tanh()


def waves(kind: str, zero: dict[str, Any] | None) -> list[Any]:
    torch.manual_seed(3)
    model = Waves().double()
    found: list[Any] = []
    cls, options = OPTIMIZERS[kind]
    if zero is None:
        optimizer = cls(model.parameters(), **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            for replica in range(2):
                (model(microbatch(step, 0, replica)[0]).square().mean() / 2).backward()
            for p in model.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad.resolve_conj()  # else clipping fails
            norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
            found.append((norm, gradients, {name: p.detach().clone() for name, p in model.named_parameters()}))
        return found
    settings = config(kind, stage=zero.get("stage", 0), zero=zero)
    engine = initialize(model=model, config=settings, grid=Grid(data=2, timeout=60))[0]
    for step in range(STEPS):
        engine.backward(engine(microbatch(step, 0, engine.grid.data.rank)[0]).square().mean())
        engine.step()
        found.append((engine.get_global_grad_norm(), engine.gather("gradients"), engine.gather()))
    return found


@pytest.mark.parametrize("kind", ["Muon", "Adafactor"])
def test_optimizers_of_real_tensors_refuse_complex_ones(kind: str) -> None:
    """torch's error at the first step named no parameter."""
    settings = {"train_batch_size": MICRO, "optimizer": {"type": kind, "params": {"lr": 0.1}}}
    with pytest.raises(ConfigError, match=rf"optimizer {kind} steps real tensors, and .* is complex128: take AdamW"):
        initialize(model=Waves(), config=settings)


def all_waves() -> list[Any]:
    offloaded = {"stage": 2, "sub_group_size": 17, "offload_optimizer": {"device": "cpu"}}
    cases: list[tuple[str, dict[str, Any]]] = [("AdamW", {"stage": 2}), ("AdamW", offloaded)]
    cases += [("SGD", {"stage": stage}) for stage in (0, 1, 3)]
    return [(kind, waves(kind, zero)) for kind, zero in cases]


def test_complex_parameters_train_as_in_plain_pytorch(ranks: Any) -> None:
    """The norm and clipping count real and imaginary parts, and fused optimizers take complex gradients."""
    wanted = {kind: waves(kind, zero=None) for kind in OPTIMIZERS}
    for found in ranks(2, all_waves):
        for kind, steps in found:
            torch.testing.assert_close(steps, wanted[kind], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"bf16": {"enabled": True}}, "waves is complex128, and fp16 or bf16 weights"),
        ({"communication_data_type": "fp16"}, "waves is complex128, and gradients sent in another dtype"),
    ],
)
def test_options_that_drop_the_imaginary_part_are_refused(more: dict[str, Any], words: str) -> None:
    settings = {"train_batch_size": MICRO, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **more}
    with pytest.raises(ValueError, match=words):
        initialize(model=Waves(), config=settings)
