"""Changes of gradients by user code between backward and step: which are refused, in other dtypes and grids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, PipelineModule

from support.gradient_loops import LIMIT, MICRO, OPTIONS, REFUSED, WIDTH, batch, compared, engine_of, net


def low_precision(stage: int, dtype: str) -> None:
    """Gradients in fp32, of weights in 16 bits, multiplied by a loss scale: torch clips what the engine clips."""
    grid, found = Grid(timeout=60), []
    for way in ("engine", "torch", "clip_grad_norm_"):
        half = {dtype: {"enabled": True, **({"initial_scale_power": 6} if dtype == "fp16" else {})}}
        clipping = {"gradient_clipping": LIMIT} if way == "engine" else {}
        engine = engine_of(grid, stage, 2, **half, **clipping)
        for step in range(2):
            for index in range(2):
                x = batch(step, index, grid.data.rank)
                engine.backward(engine(x).float().square().mean())
                if index and way == "torch":
                    norm = nn.utils.clip_grad_norm_(engine.module.parameters(), LIMIT)
                    assert engine.module.enter.weight.grad.norm().dtype == torch.float32
                elif index and way == "clip_grad_norm_":
                    norm = engine.clip_grad_norm_(LIMIT)
                engine.step()
            if way == "engine":
                found.append(engine.get_global_grad_norm())
            else:
                torch.testing.assert_close(float(norm), found[step], rtol=1e-5, atol=0)
        found.append(engine.module_state_dict())
    for other in found[3:]:
        torch.testing.assert_close(other, found[2], rtol=1e-2, atol=1e-4)


def refusals(stage: int) -> None:
    grid = Grid(timeout=60)
    engine = engine_of(grid, stage, 2)
    parameter = engine.module.enter.weight

    def backward(index: int) -> None:
        engine.backward(engine(batch(0, index, grid.data.rank)).square().mean())

    backward(0)
    early = r"gradients of 1 of 2 microbatches: do it if engine.is_last_microbatch\(\)"
    with pytest.raises(RuntimeError, match=early if stage < 2 else REFUSED):
        nn.utils.clip_grad_norm_(engine.module.parameters(), LIMIT)
    with pytest.raises(RuntimeError, match=early):
        engine.clip_grad_norm_(LIMIT)
    engine.step()
    backward(1)
    if stage == 0 and grid.rank == 0:
        assert parameter.grad.norm() > 0  # on one rank alone, for a log
    engine.step()
    if stage:
        with pytest.raises(RuntimeError, match="the step has taken the gradients"):
            parameter.grad.norm()
        engine.module.to("cpu").zero_grad(set_to_none=False)
    with pytest.raises(RuntimeError, match="no backward pass has run since the last"):
        engine.clip_grad_norm_(LIMIT)


def replicas_differ(stage: int, how: str) -> None:
    grid = Grid(timeout=60)
    engine = engine_of(grid, stage)
    engine.backward(engine(batch(0, 0, grid.data.rank)).square().mean())
    gradient: Any = None if how == "assigned" else engine.module.enter.weight.grad
    if how == "noise":
        gradient.add_(torch.full_like(gradient, float(grid.rank)))
    elif how == "dropped" and grid.rank:
        engine.module.enter.weight.grad = None
    elif how == "assigned":
        engine.module.enter.weight.grad = torch.ones(2 * WIDTH, WIDTH, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="was assigned, but" if how == "assigned" else "changed differently"):
        engine.step()


def shards() -> None:
    """Tensor ranks: the norm over the shards of this rank would be the norm of a part of the gradients."""
    grid, found = Grid(tensor=2, timeout=60), []
    for way in ("config", "call"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)).double()
        triax.parallelize(model, grid, {"0": "column", "2": "row"})
        config = {"train_micro_batch_size_per_gpu": MICRO, "optimizer": {"type": "SGD", "params": OPTIONS}}
        clipping = {"gradient_clipping": LIMIT} if way == "config" else {}
        engine = triax.initialize(model=model, config={**config, **clipping}, grid=grid)[0]
        for step in range(2):
            engine.backward(engine(batch(step, 0, 0)).square().mean())
            if way == "call":
                with pytest.raises(RuntimeError, match=r"this rank holds one of 2 tensor shards.*clip_grad_norm_"):
                    nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
                engine.clip_grad_norm_(LIMIT)
            engine.step()
        found.append(engine.module_state_dict())
    compared(found[1], found[0], "tensor shards")


def pipelines(stage: int) -> None:
    grid = Grid(pipe=2, timeout=60) if stage == 0 else Grid(data=2, timeout=60)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    model = PipelineModule(layers, grid=grid, loss_fn=nn.MSELoss())
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": OPTIONS},
        "zero_optimization": {"stage": stage},
    }
    engine = triax.initialize(model=model, config=config)[0]
    batches = iter(lambda: (torch.ones(MICRO, WIDTH), torch.zeros(MICRO, WIDTH)), None)
    for _ in range(2):
        engine.train_batch(batches)
        said = "train_batch has taken the step already, so that a change has no effect. Set gradient_clipping"
        with pytest.raises(RuntimeError, match=said):
            nn.utils.clip_grad_norm_(engine.module.parameters(), LIMIT)
        with pytest.raises(RuntimeError, match=r"already: set gradient_clipping to 1\.0"):
            engine.clip_grad_norm_(1.0)
        engine.module.zero_grad(set_to_none=False)
        engine.module.zero_grad()


def other_cases() -> None:
    for stage in range(4):
        refusals(stage)
        pipelines(stage)
    low_precision(0, "fp16")
    low_precision(1, "bf16")
    shards()


def adversaries(stage: int) -> None:
    """The loop of PyTorch's DCGAN example: ``discriminator.zero_grad()`` discards what the generator's pass left."""
    grid = Grid(timeout=60)
    makes, judges = engine_of(grid, stage), engine_of(grid, stage)
    models = [net(), net()]
    optimizers = [torch.optim.SGD(model.parameters(), **OPTIONS) for model in models]
    logged: list[Any] = []
    after_step = judges.observer.after_step

    def log(grid: Any, loss: Any) -> None:
        logged.append(float(loss))
        after_step(grid, loss)

    judges.observer.after_step = log
    for step in range(3):
        judges.module.zero_grad(set_to_none=step != 1)
        x, mine = batch(step, 0, grid.rank), []
        made = makes(x)
        for y, target in ((x, 0.0), (made.detach(), 1.0)):
            mine.append(judges.backward((judges(y) - target).square().mean()))
        judges.step()
        makes.backward(judges(made).square().mean())
        makes.step()

        total = torch.tensor(0.0, dtype=torch.float64)
        made = [models[0](batch(step, 0, replica)) for replica in range(grid.size)]
        for turn, (own, other) in enumerate(((1, 0), (0, 1))):
            models[own].zero_grad()
            for replica, y in enumerate(made):
                if turn:
                    loss = models[1](y).square().mean()
                else:
                    loss = models[1](batch(step, 0, replica)).square().mean()
                    loss = loss + (models[1](y.detach()) - 1.0).square().mean()
                    total += loss.detach() / grid.size
                (loss / grid.size).backward()
            optimizers[own].step()
            models[other].zero_grad()
        compared(logged[-1], float(total), f"stage {stage}, the logged loss of step {step}")
    for engine, model in zip((makes, judges), models, strict=True):
        compared(engine.module_state_dict(), dict(model.state_dict()), f"stage {stage}, weights of a GAN")


@pytest.mark.parametrize("size", [1, 2])
def test_zero_grad_of_a_module_discards_a_generators_pass(ranks: Any, size: int) -> None:
    for stage in range(4):
        ranks(size, adversaries, stage)


def test_a_hook_within_a_backward_pass_is_refused() -> None:
    engine = engine_of(Grid(), 0, 2)

    def mask(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2.0)

    engine.module.enter.weight.register_post_accumulate_grad_hook(mask)
    engine.backward(engine(batch(0, 0, 0)).square().mean())  # autograd's own tensor
    engine.step()
    with pytest.raises(RuntimeError, match="a backward pass is running"):
        engine.backward(engine(batch(0, 1, 0)).square().mean())


def test_gradient_changes_act_or_are_refused_on_two_ranks(ranks: Any) -> None:
    ranks(2, other_cases)


@pytest.mark.parametrize(("stage", "how"), [(0, "noise"), (1, "noise"), (0, "dropped"), (2, "assigned")])
def test_gradients_changed_differently_by_replicas_are_refused(ranks: Any, stage: int, how: str) -> None:
    ranks(2, replicas_differ, stage, how)
