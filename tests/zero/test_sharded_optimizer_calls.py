"""ShardedOptimizer: arguments, orders of calls, schedulers, what user code reads, and the programs of the docs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, OneCycleLR, SequentialLR

from triax import Grid, PipelineModule, initialize
from triax.zero import ShardedOptimizer

from support.processes import program
from support.readme_blocks import block_of
from support.sharded_loops import WIDTH, Net, backward, microbatch, net, sharded_sgd


def test_zero_grad_of_a_module_discards_earlier_gradients() -> None:
    """``module.zero_grad()`` replaces the gradients' tensors; nothing is lost, and nothing old is kept."""
    for stage in (0, 1):
        model, wanted = net(), net()
        optimizer = ShardedOptimizer(
            torch.optim.SGD, model.parameters(), Grid(), stage=stage, lr=0.1, backward_passes_per_step=2
        )
        optimizer.zero_grad()
        backward(model, microbatch(0, 0, 1))
        model.zero_grad()
        backward(model, microbatch(0, 1, 1))
        backward(wanted, microbatch(0, 1, 1))
        gradients = dict(optimizer.gradients())
        for a, b in zip(model.parameters(), wanted.parameters()):
            if b.grad is not None:
                torch.testing.assert_close(gradients[a], b.grad, rtol=1e-12, atol=0)


def make(**changes: Any) -> ShardedOptimizer:
    model = changes.pop("model", None) or net()
    arguments: dict[str, Any] = {
        "optimizer_class": torch.optim.SGD,
        "params": model.parameters(),
        "grid": Grid(),
        "lr": 0.1,
        **changes,
    }
    return ShardedOptimizer(**arguments)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"grid": "data"}, "'data' is not a grid: pass grid = triax.Grid"),
        ({"optimizer_class": torch.optim.LBFGS}, "LBFGS needs whole tensors"),
        ({"optimizer_class": "SGD"}, "pass the class itself"),
        ({"stage": 4}, "stage=4 is no stage of ZeRO: give 0, 1, 2 or 3"),
        ({"stage": 3}, "pass module=model"),
        ({"stage": 3, "module": nn.Linear(2, 2)}, "parameter 0 of group 0 is not one of module's parameters"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step=0 is too small: give at least 1"),
        ({"reduction": "avg"}, "'mean' or 'sum', not 'avg'"),
        ({"params": []}, "empty parameter list"),
        ({"params": [nn.Parameter(torch.zeros(2, device="meta"))]}, "is on meta, and the grid on cpu"),
        ({"bucket_size": 0}, "a bucket of 0 elements holds nothing"),
    ],
)
def test_a_sharded_optimizer_refuses_wrong_arguments(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        make(**changes)


@pytest.mark.parametrize("stage", [0, 3])
def test_torchs_grad_scaler_is_refused(stage: int) -> None:
    """The scaler unscales `.grad`, which is not what the step reads."""
    model = nn.Linear(WIDTH, 1)
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    for kind in ("plain loop", "engine"):
        if kind == "engine":
            optimizer: Any = initialize(model=model, config={**config, "zero_optimization": {"stage": stage}})[1]
        else:
            optimizer = sharded_sgd(model, Grid(), stage=stage)
        scaler = torch.amp.GradScaler("cpu")
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, WIDTH)).mean()).backward()
        before = model.weight.detach().clone()
        with pytest.raises(RuntimeError, match=r"GradScaler unscales \.grad, .* precision='fp16'"):
            scaler.step(optimizer)
        assert torch.equal(model.weight, before)


def test_a_sharded_optimizer_refuses_calls_in_a_wrong_order() -> None:
    model = net()
    optimizer = make(model=model)
    batch = microbatch(0, 0, 1)
    backward(model, batch)
    with pytest.raises(RuntimeError, match="backward pass 2 of a step that has backward_passes_per_step=1"):
        backward(model, batch)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"call optimizer\.zero_grad\(\) before"):
        backward(model, batch)
    optimizer.zero_grad()

    def broken(gradient: Tensor) -> Tensor:
        raise ArithmeticError("planted")

    handle = model.enter.bias.register_hook(broken)
    with pytest.raises(ArithmeticError):
        backward(model, batch)
    handle.remove()
    with pytest.raises(RuntimeError, match=r"failed half way.*zero_grad\(\)"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"failed half way.*zero_grad\(\)"):
        backward(model, batch)
    optimizer.zero_grad()
    backward(model, batch)
    optimizer.step()
    with pytest.raises(RuntimeError, match="make it with all groups"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    model.blocks[0].frozen.requires_grad_()
    with pytest.raises(RuntimeError, match="1 parameters were frozen when the optimizer was made"):
        optimizer.step()


def unlike() -> str:
    grid = Grid(timeout=60)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3 + grid.rank))
    with pytest.raises(ValueError, match="replicas must have the same model") as error:
        ShardedOptimizer(torch.optim.SGD, model.named_parameters(), grid, lr=0.1)
    return str(error.value)


def test_sharded_models_that_differ_are_refused_on_every_rank(ranks: Any) -> None:
    first, second = ranks(2, unlike)
    assert first == second and "('1.weight', (3, 2)" in first and "('1.weight', (4, 2)" in first


def linear_then_cosine(optimizer: torch.optim.Optimizer) -> LRScheduler:
    parts = [LinearLR(optimizer, total_iters=2), CosineAnnealingLR(optimizer, 4)]
    return SequentialLR(optimizer, parts, milestones=[2])


@pytest.mark.parametrize("schedule", [partial(OneCycleLR, max_lr=0.1, total_steps=10), linear_then_cosine])
def test_torchs_schedulers_drive_a_sharded_optimizer(schedule: Callable[[Any], LRScheduler]) -> None:
    """Learning rates, and the momentum that OneCycleLR changes too, act as on torch's own SGD."""

    def train(model: Net, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        scheduler = schedule(optimizer)
        for step in range(6):
            optimizer.zero_grad()
            backward(model, microbatch(step, 0, 1))
            optimizer.step()
            scheduler.step()
        return [p.detach() for p in model.parameters()]

    plain, sharded = net(), net()
    wanted = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    torch.testing.assert_close(train(sharded, make(model=sharded, momentum=0.9)), wanted, rtol=1e-12, atol=0)


def test_the_sharded_optimizers_loop_of_the_docs_runs(ranks: Any, tmp_path: Path) -> None:
    """It runs in torchrun's environment, in processes with torch imported; torchrun itself is an exhaustive test."""
    (tmp_path / "plain.py").write_text(block_of("zero.md", "# plain.py"))
    said = ranks(2, program, ["plain.py"], str(tmp_path), init_group=False)
    check_documented("".join(said), 2, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("processes", [1, 2])
def test_the_documented_loop_runs_alone_and_under_torchrun(processes: int, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(block_of("zero.md", "# plain.py"))
    python = [sys.executable] if processes == 1 else [str(Path(sys.executable).parent / "torchrun")]
    options = [] if processes == 1 else ["--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*python, *options, "plain.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    check_documented(done.stdout, processes, tmp_path)


def check_documented(said: str, processes: int, tmp_path: Path) -> None:
    losses = [float(line.split()[2]) for line in said.splitlines() if line.startswith("step ")]
    assert len(losses) == 20 and losses[-1] < losses[0] - 1.5
    saved = load_file(tmp_path / "model.safetensors")
    assert not any(tensor.isnan().any() for tensor in saved.values())
    assert len(list(tmp_path.glob("optimizer-*.pt"))) == processes


def test_the_documented_program_of_gathered_runs() -> None:
    grid = Grid()
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    made = PipelineModule(layers, grid=grid, loss_fn=lambda o, y: (o - y).square().mean())
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 3}}
    engine, *_ = initialize(model=made, config=config)
    before = engine.gather()
    exec(block_of("zero.md", "from triax.zero import gathered"), {"engine": engine, "grid": grid, "torch": torch})
    after = engine.gather()
    assert torch.equal(after["layers.0.weight"], 0.5 * before["layers.0.weight"])
    assert torch.equal(after["layers.1.weight"], before["layers.1.weight"])
