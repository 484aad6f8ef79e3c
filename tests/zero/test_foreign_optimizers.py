"""Optimizers of other packages: plain PyTorch on one process, over every stage and a resume, or refused at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.base.errors import ConfigError

from support.foreign_optimizers import (
    ELEMENTS,
    MODEL,
    REFUSED,
    WHOLE,
    CountsInGroup,
    CountsWhereItSteps,
    Draws,
    Foreign,
    ScheduleFree,
)
from support.toys import error_text, mean_loss
from support.training import train_plain

# (stage, pipe) before and after a checkpoint, on two ranks; pipe 0 is a plain module.
Resume = tuple[tuple[int, int], tuple[int, int]]
WIDTH, BATCH, STEPS = 6, 8, 4


class Start(nn.Linear):
    """A layer whose weights depend on its number alone."""

    def __init__(self, number: int) -> None:
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)


def layers() -> list[Any]:
    return [LayerSpec(Start, 0), torch.tanh, LayerSpec(Start, 2), torch.tanh, LayerSpec(Start, 4)]


def samples(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, BATCH, WIDTH, generator=generator, dtype=torch.float64) * (1 + step)
    return x, y


class Plain(nn.Module):
    """The pipeline's layers, with the names that it gives them."""

    def __init__(self) -> None:
        super().__init__()
        for name in "024":
            self.add_module(name, Start(int(name)))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.children()
        y: Tensor = c(torch.tanh(b(torch.tanh(a(x)))))
        return y


def switch(optimizer: Any, mode: str) -> None:
    if callable(change := getattr(optimizer, mode, None)):
        change()


def reference(make: Any) -> list[dict[str, Tensor]]:
    """The weights of plain PyTorch after half of the steps and after all, in the optimizer's eval mode."""
    model = Plain()
    optimizer = make(model.parameters())
    found = []
    for step in range(STEPS):
        switch(optimizer, "train")
        optimizer.zero_grad()
        x, y = samples(step)
        mean_loss(model(x), y).backward()
        optimizer.step()
        if step + 1 in (STEPS // 2, STEPS):
            switch(optimizer, "eval")
            found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return found


def new_engine(make: Any, stage: int, pipe: int) -> Any:
    """An engine of the model on this rank, a pipeline if ``pipe`` is not 0."""
    options = {"optimizer": make, "zero": stage, "batch": triax.Batch(size=BATCH, microbatches=2 if pipe else 1)}
    if not pipe:
        return triax.Engine(Plain(), grid=Grid(), **options)
    model = PipelineModule(
        layers(),
        grid=Grid(pipe=pipe),
        loss_fn=mean_loss,
        dtype=torch.float64,
        partition="uniform",
        device="meta" if stage else None,  # the weights come after the optimizer
    )
    return triax.Engine(model, schedule="1f1b", **options)


def engine_weights(engine: Any) -> dict[str, Tensor]:
    return {name.removeprefix("layers."): value.clone() for name, value in engine.gather().items()}


def train(engine: Any, steps: range) -> dict[str, Tensor]:
    """Train, and return the weights of the optimizer's eval mode."""
    grid = engine.grid
    for step in steps:
        switch(engine.optimizer, "train")
        x, y = (each.chunk(grid.data.size)[grid.data.rank] for each in samples(step))
        if grid.pipe.size > 1 or hasattr(engine, "train_batch"):
            engine.train_batch(iter(zip(x.chunk(2), y.chunk(2), strict=True)))
        else:
            engine.backward(mean_loss(engine(x), y))
            engine.step()
    switch(engine.optimizer, "eval")
    return engine_weights(engine)


def resumed(make: Any, first: tuple[int, int], second: tuple[int, int], folder: Path) -> list[dict[str, Tensor]]:
    """Train half of the steps in one stage and on one grid, and the others after a checkpoint on another one."""
    engine = new_engine(make, *first)
    half = train(engine, range(STEPS // 2))
    engine.save_checkpoint(folder)
    other = new_engine(make, *second)
    other.load_checkpoint(folder)
    return [half, train(other, range(STEPS // 2, STEPS))]


def every_way(make: Any, resumes: list[Resume], stages: Sequence[int], folder: Path) -> list[list[dict[str, Tensor]]]:
    """Train by engines, each resumed in another way, and by ShardedOptimizer in some stages."""
    runs = [resumed(make, *way, folder / str(number)) for number, way in enumerate(resumes)]
    return runs + [sharded(make, stage) for stage in stages]


def sharded(make: Any, stage: int) -> list[dict[str, Tensor]]:
    """The same without an engine: ShardedOptimizer, and its own state_dict."""
    grid = Grid()
    kind: Any
    kind, given = (make.func, make.keywords) if isinstance(make, partial) else (make, {})

    def fresh() -> tuple[Plain, Any]:
        model = Plain()
        return model, triax.ShardedOptimizer(kind, model.parameters(), grid, stage=stage, module=model, **given)

    def run(model: Plain, optimizer: Any, steps: range) -> dict[str, Tensor]:
        for step in steps:
            switch(optimizer, "train")
            optimizer.zero_grad()
            x, y = (each.chunk(grid.data.size)[grid.data.rank] for each in samples(step))
            mean_loss(model(x), y).backward()
            optimizer.step()
        switch(optimizer, "eval")
        with triax.zero.gathered(model):
            return {name: p.detach().clone() for name, p in model.named_parameters()}

    model, optimizer = fresh()
    half = run(model, optimizer, range(STEPS // 2))
    other, loaded = fresh()
    with triax.zero.gathered(other, modifier_rank=0):
        other.load_state_dict(half)
    loaded.load_state_dict(optimizer.state_dict())
    return [half, run(other, loaded, range(STEPS // 2, STEPS))]


def refusals(cases: list[Any]) -> list[str]:
    return [error_text(partial(job, *arguments), ConfigError) for job, *arguments in cases]


def require_equal(found: list[dict[str, Tensor]], wanted: list[dict[str, Tensor]]) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


RESUMES: list[Resume] = [((0, 0), (3, 0)), ((3, 0), (1, 0)), ((2, 0), (0, 0)), ((0, 2), (2, 1)), ((3, 1), (0, 2))]


BY_ELEMENTS = [*ELEMENTS, torch.optim.Adagrad]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["some", "all"])
@pytest.mark.parametrize("kind", BY_ELEMENTS, ids=lambda kind: kind.__name__)
def test_foreign_optimizers_train_and_resume_as_plain_pytorch(
    ranks: Any, kind: Any, every: bool, tmp_path: Path
) -> None:
    """Counters of groups were reset in each step, and lost by a resume; so were those of the object.

    By default with two of the resumes and in one stage, which change from one optimizer to the next.
    """
    make, number = partial(kind, lr=0.05), BY_ELEMENTS.index(kind)
    resumes = RESUMES if every else [RESUMES[(number + at) % 5] for at in (0, 3)]
    stages = range(4) if every else [number % 4]
    wanted = reference(make)
    for runs in ranks(2, every_way, make, resumes, stages, tmp_path):
        for found in runs:
            require_equal(found, wanted)


def last_layer_apart(engine: Any) -> list[dict[str, Any]]:
    """Parameter groups: the last layer, which only one pipe rank has, and the others."""
    named = [(triax.grid.layout_of(p).name, p) for p in engine.parameters()]
    return [
        {"params": [p for name, p in named if name.removeprefix("layers.").startswith("4") is last], "lr": rate}
        for last, rate in ((False, 0.05), (True, 0.1))
    ]


def in_groups(pipe: int, folder: str, half: bool) -> dict[str, Tensor]:
    model = PipelineModule(layers(), grid=Grid(pipe=pipe), loss_fn=mean_loss, dtype=torch.float64, partition="uniform")
    engine = triax.Engine(
        model,
        optimizer=CountsWhereItSteps,
        parameters=last_layer_apart(model),
        batch=triax.Batch(size=BATCH, microbatches=2),
    )
    if half:
        train(engine, range(STEPS // 2))
        engine.save_checkpoint(folder)
        return {}
    engine.load_checkpoint(folder)
    return train(engine, range(STEPS // 2, STEPS))


def test_a_parameter_group_of_one_stage_only_is_resumed(ranks: Any, tmp_path: Path) -> None:
    """The first rank has no tensor of a group, and its count, 0, went into the checkpoint's header."""
    model = Plain()
    first, last = list(model.parameters())[:4], list(model.parameters())[4:]
    batches, groups = [[samples(step)] for step in range(STEPS)], [{"params": first}, {"params": last, "lr": 0.1}]
    wanted = train_plain(model, CountsWhereItSteps, batches, parameters=groups)[-1].weights
    ranks(2, in_groups, 2, str(tmp_path / "a"), half=True)
    for pipe in (1, 2):
        for found in ranks(2, in_groups, pipe, str(tmp_path / "a"), half=False):
            require_equal([found], [wanted])


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["some", "all"])
@pytest.mark.parametrize("kind", [*WHOLE, *MODEL], ids=lambda kind: kind.__name__)
def test_optimizers_of_whole_tensors_need_stage_0(ranks: Any, kind: Any, every: bool, tmp_path: Path) -> None:
    """A number for each block, row or tensor was wrong from stage 0 on, without a word.

    By default a module, a pipeline and ShardedOptimizer in a stage each, which changes from one optimizer to the next.
    """
    whole, number = kind in WHOLE, [*WHOLE, *MODEL].index(kind)
    wanted = reference(kind)
    resumes: list[Resume] = [((0, 0), (0, 0)), ((0, 2 if whole else 1), (0, 1))]
    for runs in ranks(2, every_way, kind, resumes, range(1), tmp_path):
        for found in runs:
            require_equal(found, wanted)
    stages = {way: (1, 2, 3) if every else ((number + way) % 3 + 1,) for way in range(3)}
    cases: list[Any] = [(new_engine, kind, stage, pipe) for pipe in (0, 1) for stage in stages[pipe]]
    cases += [(sharded, kind, stage) for stage in stages[2]] + [(new_engine, kind, 0, 2)] * (not whole)
    for texts in ranks(2, refusals, cases):
        for (_, _, stage, *_), text in zip(cases, texts, strict=True):
            if stage:
                assert f"{kind.__name__} has to step" in text and f"stage {stage} shards them: set stage 0" in text
            else:
                assert "set pipe" in text or "make a grid of pipe 1" in text


@pytest.mark.parametrize(("kind", "words"), REFUSED.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_unsupported_optimizers_are_refused_when_engines_start(kind: Any, words: str) -> None:
    for text in refusals([(new_engine, kind, 0, 0), (new_engine, kind, 1, 1), (sharded, kind, 2)]):
        assert words in text


def test_random_updates_run_on_one_process_only(ranks: Any) -> None:
    for texts in ranks(2, refusals, [(new_engine, Draws, 0, 0)]):
        assert "draws random numbers" in texts[0]
    torch.manual_seed(7)
    wanted = reference(Draws)
    torch.manual_seed(7)
    engine = new_engine(Draws, 0, 0)  # the trial leaves the generator as it was
    found = train(engine, range(STEPS))
    require_equal([found], wanted[1:])


class Once(Foreign):
    """Keeps a setting in the object."""

    def __init__(self, params: Any, lr: float = 0.05, sign: bool = False) -> None:
        super().__init__(params, lr)
        self.sign = sign

    def update(self, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
        p.sub_(g.sign() if self.sign else g, alpha=group["lr"])


def test_an_optimizer_instance_keeps_its_settings() -> None:
    model = Plain()
    engine = triax.Engine(model, optimizer=Once(model.parameters(), sign=True), batch=BATCH)
    require_equal([train(engine, range(STEPS))], reference(partial(Once, sign=True))[1:])


def test_a_users_lr_schedule_keeps_the_optimizers_counters() -> None:
    """Each step of the schedule wrote the user's groups, with a count of 0, over those of the engine."""
    model, plain = Plain(), Plain()
    found, wanted = CountsInGroup(model.parameters()), CountsInGroup(plain.parameters())
    for optimizer in (found, wanted):
        optimizer.param_groups[0]["n"] = 0
    schedule, its = (torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8) for optimizer in (found, wanted))
    engine = triax.Engine(model, optimizer=found, lr_scheduler=schedule, batch=BATCH)
    for step in range(STEPS):
        x, y = samples(step)
        wanted.zero_grad()
        mean_loss(plain(x), y).backward()
        wanted.step()
        its.step()
    require_equal([train(engine, range(STEPS))], [dict(plain.named_parameters())])
    assert engine.optimizer is not None and engine.optimizer.param_groups[0]["n"] == STEPS


@pytest.mark.parametrize("optimizer", [ScheduleFree, torch.optim.AdamW, Draws])
def test_the_trial_of_an_optimizer_keeps_the_random_state(optimizer: Any) -> None:
    model = Plain()
    state = torch.get_rng_state()
    triax.Engine(model, optimizer=optimizer, batch=BATCH, zero=0)
    assert torch.equal(torch.get_rng_state(), state)
