"""Loops of the engine of plain modules: DeepSpeed's loop, with data, schedules and modes, and wrong calls."""

from __future__ import annotations

import copy
import gc
import os
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, initialize
from triax.base.errors import ConfigError
from triax.grid.randomness.random import Dropout

from support.module_jobs import loss_of, one, weights
from support.module_training import MICRO, WIDTH, config, groups, microbatch, net
from support.paths import DOCS
from support.rank_checks import assert_every_rank_raises
from support.readme_blocks import blocks, steps_of_program


class Noted(nn.Module):
    """Remembers what it saw, and drops some of it."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.drop = nn.Linear(1, 1, dtype=torch.float64), Dropout(0.5)
        self.seen: list[list[float]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.flatten().tolist())
        return self.line(self.drop(x))


def samples() -> list[tuple[Tensor, Tensor]]:
    return [(torch.full((1,), float(i), dtype=torch.float64), torch.zeros(1, dtype=torch.float64)) for i in range(40)]


def from_data(start: int, stop: int, workers: int = 0) -> tuple[list[list[float]], Tensor]:
    """Steps start .. stop - 1; what was seen of each global batch, sorted, and the last step's gradient."""
    settings: dict[str, Any] = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "seed": 3}
    settings |= {"optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
    torch.manual_seed(0)
    engine, _, loader, _ = initialize(model=Noted(), config=settings, training_data=samples())
    assert loader is not None and len(loader) == 5 * engine.gradient_accumulation_steps()
    if workers:
        loader = engine.deepspeed_io(samples(), num_local_io_workers=workers)  # type: ignore[arg-type]
    loader.seek(start)
    engine.global_steps = start

    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    source = batches()
    while engine.global_steps < stop:
        x, y = next(source)
        engine.backward((engine(x) - y).square().mean())
        engine.step()
    everyone = engine.grid.data.all_gather_json(engine.module.seen)
    each = engine.gradient_accumulation_steps()
    starts = range(0, len(everyone[0]), each)
    found = [sorted(i for seen in everyone for part in seen[at : at + each] for i in part) for at in starts]
    return found, engine.gather("gradients")["line.weight"]


def test_training_data_has_one_order_and_resumes_on_another_grid(ranks: Any) -> None:
    whole, gradient = from_data(0, 8)
    assert len(whole) == 8 and sorted(i for part in whole[:5] for i in part) == [float(i) for i in range(40)]
    for seen, g in ranks(2, from_data, 0, 8):
        assert seen == whole
        torch.testing.assert_close(g, gradient, rtol=1e-12, atol=0)  # the same elements dropped
    for seen, _ in ranks(4, from_data, 3, 8):
        assert seen == whole[3:]
    assert from_data(6, 8, workers=2)[0] == whole[6:]


def test_wrong_calls_of_a_module_engine_name_the_right_call() -> None:
    engine = one()
    with pytest.raises(RuntimeError, match=re.escape("step() without a backward pass: call engine.backward(loss)")):
        engine.step()
    loss_of(engine)
    with pytest.raises(RuntimeError, match="without a backward pass"):
        engine.step()
    for wrong, said in ((3.0, "a float"), (torch.ones(()), "without a graph"), (engine(microbatch(0, 0, 0)[0]), "6")):
        with pytest.raises(RuntimeError, match=f"backward takes a loss.*{said}"):
            engine.backward(wrong)
    engine.backward(loss_of(engine))
    loss = (engine.module(microbatch(0, 0, 0)[0]) - 1.0).square().mean()  # the engine does not see this pass begin
    with pytest.raises(RuntimeError, match=r"call the model as engine\(\.\.\.\).*add the losses and call backward"):
        loss.backward()
    engine.zero_grad()
    with pytest.raises(RuntimeError, match=re.escape("call engine.step(), not optimizer.step()")):
        engine.optimizer.step()
    with (
        pytest.raises(RuntimeError, match=r"no_sync.. does not work in ZeRO stage 2.*reduce_each_microbatch"),
        one(config(stage=2)).no_sync(),
    ):
        pytest.fail("not reached")
    with pytest.raises(AttributeError, match="neither ConfiguredModuleEngine nor its Net has 'wieghts'"):
        engine.wieghts  # noqa: B018
    untrained = one({"train_batch_size": 4})
    with pytest.raises(RuntimeError, match="there is no optimizer"):
        untrained.step()
    assert untrained(microbatch(0, 0, 0)[0]).shape == (MICRO, WIDTH)
    late = one()
    late.module.blocks[0].frozen.requires_grad_()
    late.backward(loss_of(late))
    with pytest.raises(RuntimeError, match="1 parameters were frozen when the optimizer was made"):
        late.step()


RECOMPUTE, ON = "activation_checkpointing", {"enabled": True}


@pytest.mark.parametrize(
    ("more", "others", "words"),
    [
        ({}, {"mpu": object()}, "pass grid=triax.compat.megatron.mpu.grid_of_mpu"),
        ({"tensor_parallel": {"autotp_size": 2}}, {}, "make grid = triax.Grid(tensor=2)"),
        ({RECOMPUTE: {"interval": 2}}, {}, "interval 2 groups the layers of a PipelineModule"),
        ({RECOMPUTE: ON}, {"model": nn.Linear(2, 2)}, "no repeated blocks that can be recomputed"),
        ({RECOMPUTE: ON | {"checkpointable_layers": ["Blok"]}}, {}, "no layer of the model is a Blok; there are Block"),
        ({}, {"model": "a name"}, "not an nn.Module"),
    ],
)
def test_a_plain_module_refuses_what_it_cannot_do(more: dict[str, Any], others: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, TypeError), match=re.escape(words)):
        one(config(**more), **others)


def staged() -> None:
    initialize(model=net(), config=config(), grid=Grid(pipe=2))


def test_a_plain_module_is_refused_on_a_pipe_axis(ranks: Any) -> None:
    assert_every_rank_raises(ranks, 2, "list its layers in a PipelineModule", staged)


def one_fails() -> str:
    engine = one(grid=Grid(timeout=30))
    if engine.grid.rank == 1:
        engine.module.blocks[1].forward = lambda x: x @ torch.ones(1, 1)
    try:
        for _ in range(2):
            engine.backward(loss_of(engine))
            engine.step()
    except RuntimeError as error:
        return str(error)
    return "went on"


def test_a_failing_rank_stops_the_other_with_its_error(ranks: Any) -> None:
    other, failed = ranks(2, one_fails, timeout=20)
    assert failed.startswith("rank 1 (pipe 0, data 1, tensor 0) failed at forward of microbatch 0: RuntimeError: ")
    assert failed in other


@pytest.mark.parametrize("accumulation", [1, 3])
def test_optimizer_hooks_see_the_last_microbatch(accumulation: int) -> None:
    engine = one(config(accumulation=accumulation))
    seen = []

    def look(*_: Any) -> None:
        seen.append((engine.is_gradient_accumulation_boundary(), engine.microbatch))
        with pytest.raises(ConfigError, match=f"after {accumulation - 1} of its {accumulation} microbatches"):
            engine.set_train_batch_size(12)

    engine.optimizer.register_step_post_hook(look)
    for step in range(2 * accumulation):
        engine.backward(loss_of(engine, step))
        engine.step()
    assert seen == [(True, accumulation - 1)] * 2
    assert engine.microbatch == 0


def test_boundary_flags_and_counted_steps_accumulate_alike() -> None:
    boundary, counted = one(config(accumulation=2)), one(config(accumulation=2))
    for step in range(2):
        boundary.set_gradient_accumulation_boundary(step == 1)
        boundary.backward(loss_of(boundary, step))
        counted.backward(loss_of(counted, step))
        counted.step()
    boundary.step()
    first, second = boundary.gather(), counted.gather()
    assert all(torch.equal(first[name], second[name]) for name in first)
    counted.set_train_batch_size(12)
    assert counted.get_batch_info() == (12, MICRO, 3)
    counted.backward(loss_of(counted))
    counted.step()
    with pytest.raises(ConfigError, match="after 1 of its 3 microbatches"):
        counted.set_train_batch_size(8)
    assert not counted.is_gradient_accumulation_boundary()
    assert counted.backward(loss_of(counted), scale_wrt_gas=False) > counted.backward(loss_of(counted))


def test_step_after_all_microbatches_at_once_warns(caplog: pytest.LogCaptureFixture) -> None:
    late, early = one(config(accumulation=2)), one(config(accumulation=2))
    words = "engine.step() was called after 2 forward and backward passes, which it counts as one microbatch"
    for _ in range(2):
        early.backward(loss_of(early) + loss_of(early))  # two forward passes of one microbatch
        early.step()
    assert words not in caplog.text
    for _ in range(4):
        for step in range(2):
            late.backward(loss_of(late, step))
        late.step()
    assert caplog.text.count(words) == 1


def test_accelerates_loop_gets_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """accelerate says which microbatch is the last one, and calls step() behind this one alone."""
    wrapper = pytest.importorskip("accelerate.utils.deepspeed").DeepSpeedEngineWrapper
    whole, engine = one(config(accumulation=8)), one(config(accumulation=8))
    accelerated = wrapper(engine)
    for step in range(16):
        accelerated.backward(loss_of(engine, step), sync_gradients=step % 8 == 7)
        whole.backward(loss_of(whole, step))
        whole.step()
    assert "engine.step() was called after" not in caplog.text
    weights, wanted = engine.gather(), whole.gather()
    assert all(torch.equal(weights[name], value) for name, value in wanted.items())


def test_a_plateau_schedule_needs_the_loss_of_each_step() -> None:
    plateau = {"type": "ReduceLROnPlateau", "params": {"patience": 0, "factor": 0.5, "threshold": 0.5}}
    engine = one(config(scheduler=plateau))
    for _ in range(2):
        engine.backward(loss_of(engine))
        engine.step()
    assert engine.get_lr() == [0.025]
    loss_of(engine).backward()
    with pytest.raises(RuntimeError, match="ReduceLROnPlateau needs the loss"):
        engine.step()


def test_an_engine_follows_a_given_learning_rate_schedule() -> None:
    given = torch.optim.SGD(groups(model := net()), lr=0.1, momentum=0.9)
    engine, optimizer, loader, scheduler = initialize(
        model=model,
        optimizer=given,
        config={"train_batch_size": MICRO},
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    )
    assert optimizer is engine.optimizer and scheduler is engine.lr_scheduler and loader is None
    engine.backward(loss_of(engine))
    engine.step()
    assert engine.get_lr() == [0.05, 0.0015] and engine.get_mom() == [0.9, 0.9]
    given = torch.optim.SGD(groups(other := net()), lr=0.1)
    over = torch.optim.lr_scheduler.StepLR(given, 1, 0.5)
    followed = one({"train_batch_size": MICRO}, model=other, optimizer=given, lr_scheduler=over)
    for rates in ([0.05, 0.0015], [0.025, 0.00075]):
        followed.backward(loss_of(followed))
        before = followed.module.enter.weight.detach().clone()
        rate = followed.get_lr()[0]
        followed.step()
        moved = followed.module.enter.weight - before + rate * 0.2 * before  # with the weight decay
        torch.testing.assert_close(moved, -rate * followed.gather("gradients")["enter.weight"])
        assert followed.get_lr() == rates and followed.lr_scheduler is over
    with pytest.raises(TypeError, match="neither a function nor a schedule of the optimizer that is passed with it"):
        one(lr_scheduler=over)


def test_an_engine_has_the_modes_and_members_of_its_module() -> None:
    engine = one({"train_batch_size": MICRO, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    engine.backward(loss_of(engine))
    engine.step()
    assert engine.eval() is engine and not engine.module.training and engine.train().module.training
    assert engine.shift is engine.module.shift and [*engine.parameters()] == [*engine.module.parameters()]
    plain = net()
    plain.load_state_dict(engine.module_state_dict())
    x, _ = microbatch(0, 0, 0)
    assert torch.equal(plain(x), engine(x))


def test_set_train_batch_size_adds_microbatches_to_a_step() -> None:
    engine = one({"train_batch_size": MICRO, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    engine.backward(loss_of(engine))
    engine.step()
    engine.set_train_batch_size(2 * MICRO)
    before = weights(engine)
    for index in range(2):
        assert all(torch.equal(a, b) for a, b in zip(before, weights(engine), strict=True))
        engine.backward(loss_of(engine, index))
        engine.step()
    assert engine.global_steps == 2 and not torch.equal(before[0], weights(engine)[0])


@pytest.mark.parametrize("how", ["cast", "assigned", "swapped", "added", "unfrozen"])
def test_step_refuses_weights_replaced_after_the_engine(how: str) -> None:
    """A step would move what the model does not have any more, or leave out what it has since."""
    engine = one({"train_batch_size": MICRO, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    if how == "cast":
        engine.module.to(torch.float32).to(torch.float64)
    elif how == "swapped":
        name, last = [*engine.module.named_children()][-1]
        setattr(engine.module, name, copy.deepcopy(last))
    elif how in ("added", "unfrozen"):
        engine.module.late = nn.Linear(2, 2).requires_grad_(how == "added")
        if how == "unfrozen":  # a frozen part may be added, such as a teacher
            engine.backward(loss_of(engine))
            engine.step()
            engine.module.late.requires_grad_(True)
    else:
        engine.module.load_state_dict({k: v.clone() for k, v in engine.module.state_dict().items()}, assign=True)
    engine.backward(loss_of(engine))
    with pytest.raises(
        RuntimeError, match=r"\S+ (is no longer where it is stepped|was (replaced|added) after its engine)"
    ):
        engine.step()


@pytest.mark.parametrize("size", [1, 2])
def test_the_programs_of_the_docs_run(ranks: Any, size: int, tmp_path: Path) -> None:
    page = blocks((DOCS / "engine.md").read_text())
    source = "\n".join(block.text for block in page if block.language == "python")
    assert ranks(size, steps_of_program, source, str(tmp_path), "actor") == [2] * size
    assert torch.load(tmp_path / "model.pt")["linear.weight"].shape == (16, 16)


def test_dropped_engines_of_both_kinds_are_freed_at_once() -> None:
    """Without a garbage collection: an engine's members refer to it weakly."""
    freed = []
    for _ in range(2):  # torch's imports in the first optimizer step of a process keep frames alive
        model = triax.PipelineModule([nn.Linear(2, 2)], grid=Grid(), loss_fn=nn.MSELoss())
        settings = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        pipelined, *_rest = initialize(model=model, config=settings)
        plain_one, *_rest = initialize(model=nn.Linear(2, 2), config=settings)
        pipelined.train_batch(iter([(torch.ones(2, 2), torch.ones(2, 2))]))
        plain_one.backward(plain_one(torch.ones(2, 2)).sum())
        plain_one.step()
        watched: list[weakref.ref[Any]] = [weakref.ref(pipelined), weakref.ref(plain_one)]
        gc.disable()
        del pipelined, plain_one
        freed = [each() is None for each in watched]
        gc.enable()
    assert freed == [True, True]


def local_ranks() -> tuple[int, str]:
    engine = one({"train_batch_size": MICRO * 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    return engine.local_rank, os.environ["LOCAL_RANK"]


def test_local_rank_equals_the_launchers_variable(ranks: Any) -> None:
    """``local_rank`` was 0 on every rank without a GPU."""
    assert ranks(2, local_ranks) == [(0, "0"), (1, "1")]
