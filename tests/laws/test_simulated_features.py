"""Features of engines on the simulated accelerator: they have the numbers of the CPU, and no fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid
from triax.options.zero import Offload, OffloadOptimizer
from triax.pipe.program.ops import Op
from triax.pipe.schedules.choose import make_schedule

from support.module_training import net
from support.training import microbatches, text_batches, tiny_gpt, train

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
Found = dict[str, Tensor]


def _gpt(device: str, *, pipe: int = 1, tensor: int = 1, model: Any = None, **options: Any) -> triax.PipelineEngine:
    """Return an engine for a GPT in float64."""
    grid = Grid(pipe=pipe, tensor=tensor, device=device, timeout=60)
    given = {"optimizer": ADAMW, "batch": triax.Batch(size=8, microbatch=2), "clip": 0.5, **options}
    engine = triax.Engine(tiny_gpt(grid, num_hidden_layers=2, **(model or {})), **given)
    assert isinstance(engine, triax.PipelineEngine)
    return engine


def _data(engine: triax.PipelineEngine, steps: int) -> Any:
    batches = text_batches(37, 8, 8, steps)
    return microbatches(engine.grid, [tuple(x.to(engine.grid.device) for x in batch) for batch in batches], 2)


def _trained(device: str, steps: int = 2, **options: Any) -> Found:
    """Return losses, norms, gradients and weights of all steps."""
    engine = _gpt(device, **options)
    found: Found = {}
    for number, step in enumerate(train(engine, _data(engine, steps), steps)):
        found |= {f"{number} loss": torch.tensor(step.loss), f"{number} norm": torch.tensor(step.norm)}
        found |= {f"{number} gradient {name}": value for name, value in step.gradients.items()}
        found |= {f"{number} weight {name}": value for name, value in step.weights.items()}
    return found


def _offloaded(device: str, stage: Any, *, parameters: bool = False, **options: Any) -> Found:
    place = Offload(device="cpu", pin_memory=parameters) if parameters else None
    more: dict[str, Any] = {} if place is None else {"offload_parameters": place}
    optimizer = OffloadOptimizer(device="cpu", pin_memory=True)
    return _trained(device, zero=triax.Zero(stage=stage, offload_optimizer=optimizer, **more), **options)


def _saved_behind(device: str, folder: str) -> Found:
    """Save in the background, step on while it is written, and return what a new engine loads."""
    engine = _gpt(device, zero=triax.Zero(stage=2), checkpoint=triax.Checkpoints(background=True))
    data = _data(engine, 3)
    engine.train_batch(data)
    wanted = {name: value.clone() for name, value in engine.gather().items()}
    engine.save_checkpoint(Path(folder) / device)
    for _ in range(2):
        engine.train_batch(data)
    engine.wait_for_checkpoint()
    resumed = _gpt(device, pipe=2, zero=triax.Zero(stage=1))
    resumed.load_checkpoint(Path(folder) / device, tag="global_step1")
    found = resumed.gather()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    resumed.train_batch(_data(resumed, 1))
    return resumed.gather()


def _generated(device: str) -> Found:
    engine = _gpt(device, tensor=2, zero=triax.Zero(stage=1))
    engine.train_batch(_data(engine, 1))
    drawn = triax.init_inference(engine).generate([[1, 2, 3], [5]], 4, temperature=0.8, seed=3, logprobs=True)
    return {str(number): torch.tensor([*each.tokens, *each.logprobs]) for number, each in enumerate(drawn)}


def _timed(device: str) -> Found:
    engine = _gpt(device, pipe=2, schedule="zb-h1")
    engine.record_timeline = engine.record_memory = True
    loss = engine.train_batch(_data(engine, 1))
    assert engine.timeline is not None
    assert [len(row) for row in engine.timeline.rows] == [12, 12]  # F, B and W of each of four microbatches
    return {"loss": loss}


def _module(device: str, **options: Any) -> Found:
    """Train a plain module over two replicas."""
    grid = Grid(device=device, timeout=60)
    batch = triax.Batch(size=8, microbatch=2)
    engine: Any = triax.Engine(net().to(grid.device), optimizer=ADAMW, batch=batch, grid=grid, **options)
    x = torch.randn(2, 2, 2, 6, generator=torch.Generator().manual_seed(grid.data.rank), dtype=torch.float64)
    for number in range(4):
        engine.backward(engine(x[number // 2, number % 2].to(grid.device)).square().mean())
        engine.step()
    return dict(engine.gather())


def _normed(device: str) -> Found:
    """Train batch norm, whose statistics the replicas share."""
    grid = Grid(device=device, timeout=60)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).double().to(grid.device)
    batch = triax.Batch(size=8, microbatch=4)
    engine: Any = triax.Engine(module, optimizer=ADAMW, batch=batch, grid=grid, zero=triax.Zero(stage=2))
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(grid.data.rank), dtype=torch.float64)
    for _ in range(3):
        engine.backward(engine(x.to(grid.device)).square().mean())
        engine.step()
    return dict(engine.module_state_dict())


def _reloaded_at_once(device: str) -> Found:
    """Offload each microbatch's activations and reload them before any other op, on both stages of a pipeline."""
    plain = make_schedule("1f1b", 2, 4)
    orders = tuple(
        tuple(each for op in order for each in ((op, Op("O", *op[1:]), Op("R", *op[1:])) if op.kind == "F" else (op,)))
        for order in plain.orders
    )
    return _trained(device, pipe=2, schedule=replace(plain, name="mine", orders=orders))


FEATURES: dict[str, Callable[..., Found]] = {
    "optimizer state in host memory, stage 1": partial(_offloaded, stage=1),
    "optimizer state in host memory, stage 2": partial(_offloaded, stage=2),
    "weights and optimizer state in host memory": partial(_offloaded, stage=3, parameters=True),
    "weights in host memory under a pipeline": partial(_offloaded, stage=3, parameters=True, pipe=2),
    "weights alone in host memory": partial(
        _trained,
        zero=triax.Zero(stage=3, offload_parameters=Offload(device="cpu", pin_memory=True)),
    ),
    "activations in host memory": partial(
        _trained, pipe=2, schedule={"name": "gpipe", "offload": {"device": "cpu", "copy_time": 0.01}}
    ),
    "activations in host memory for no time": _reloaded_at_once,
    "LoRA": partial(_trained, lora=triax.Lora(rank=2, targets=("c_attn", "c_fc")), zero=triax.Zero(stage=3)),
    "labels that are sent": partial(
        _trained, pipe=2, batch=triax.Batch(size=8, microbatch=2, labels="sent"), zero=triax.Zero(stage=3)
    ),
    "PowerSGD": partial(_trained, compression=triax.gradient_compression.PowerSGD(rank=1, min_compression=1.0)),
    "TopK": partial(_trained, compression=triax.gradient_compression.TopK(ratio=0.1)),
    "DiLoCo": partial(_trained, local_updates=triax.DiLoCo(every=2), steps=3),
    "dropout and recomputation": partial(_trained, model={"dropout": 0.1}, recompute={"interval": 1}),
    "no overlap of collectives": partial(_trained, zero=triax.Zero(stage=3, overlap_comm=False)),
    "a checkpoint written in the background": _saved_behind,
    "generation": _generated,
    "a timeline and a memory record": _timed,
    "a plain module, stage 0": partial(_module, zero=triax.Zero(stage=0)),
    "a plain module, stage 3": partial(_module, zero=triax.Zero(stage=3)),
    "batch norm": _normed,
}


# Of which others have the copies and the waits: stage 2, a pipeline, activations and stage 3.
SIMILAR = [
    "optimizer state in host memory, stage 1",
    "weights and optimizer state in host memory",
    "a plain module, stage 0",
    "no overlap of collectives",
]


def found_on(device: str, folder: str, names: list[str]) -> tuple[dict[str, Found], dict[str, list[str]]]:
    """Return what some features find on a device, as tensors of the CPU, and the faults."""
    from support.simulated_device import simulated

    with simulated() as sim:
        found, faults = {}, {}
        for name in names:
            feature = FEATURES[name]
            sim.faults.clear()
            made = feature(device, folder) if feature is _saved_behind else feature(device)
            found[name] = {key: value.detach().cpu() for key, value in made.items()}
            faults[name] = list(sim.faults)
        return found, faults


@pytest.mark.parametrize(
    "names",
    [[name for name in FEATURES if name not in SIMILAR], pytest.param(SIMILAR, marks=pytest.mark.exhaustive)],
    ids=len,
)
def test_features_on_the_simulated_device_equal_the_cpu(ranks: Any, tmp_path: Path, names: list[str]) -> None:
    both = [
        ranks(2, found_on, device, str(tmp_path), names, init_group=False, new_processes=True, timeout=200)
        for device in ("cpu", "sim")
    ]
    for (wanted, _), (found, faults) in zip(*both, strict=True):
        for name in names:
            assert not faults[name], name
            assert found[name].keys() == wanted[name].keys() != set()
            for key, value in wanted[name].items():
                torch.testing.assert_close(found[name][key], value, rtol=1e-10, atol=1e-12, msg=f"{name}: {key}")
