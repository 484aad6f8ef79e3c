"""Checkpoints loaded into a model of another dtype: values that are rounded are named, and no others."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import triax

from support.foreign_optimizers import Foreign
from support.rank_checks import triax_warnings

WIDTH = 4
KINDS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {  # dtype of the model, options of its precision
    "float64": (torch.float64, {}),
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {}),
    "bf16": (torch.float32, {"weights": "bf16"}),
    "fp16": (torch.float32, {"weights": "fp16"}),
    "bf16 from the beginning": (torch.bfloat16, {"weights": "bf16"}),  # as a Hugging Face folder with torch_dtype
}


def engine_of(kind: str, seed: int) -> Any:
    dtype, precision = KINDS[kind]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).to(dtype)
    model[1].requires_grad_(False)
    optimizer = partial(torch.optim.Adam, lr=0.1)
    return triax.Engine(model, optimizer=optimizer, batch=1, precision=triax.Precision(**precision))


def trained(kind: str) -> Any:
    """Return an engine after a step, whose weights use all digits of their dtype."""
    engine = engine_of(kind, 1)
    x = torch.ones(1, WIDTH, dtype=KINDS[kind][0])
    engine.backward(engine(x).float().square().mean() * 1e-4)  # small, so that nothing overflows in fp16
    engine.step()
    assert engine.global_steps == 1 and not engine.skipped_steps
    return engine


def trained_values(folder: Path) -> dict[str, torch.Tensor]:
    """Return the values in a checkpoint of the layer that is trained."""
    stored = safetensors.torch.load_file(folder / "global_step1" / "rank-00000.safetensors")
    return {name: value.double() for name, value in stored.items() if name.startswith("weights/0.")}


@pytest.mark.parametrize("saved", KINDS)
def test_loading_warns_when_values_are_rounded(saved: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(saved).save_checkpoint(tmp_path / "saved")
    for loaded in KINDS:
        caplog.clear()
        engine = engine_of(loaded, 2)
        engine.load_checkpoint(tmp_path / "saved")
        said = [record.message for record in caplog.records if "rounded" in record.message]
        engine.save_checkpoint(tmp_path / loaded)
        before, after = trained_values(tmp_path / "saved"), trained_values(tmp_path / loaded)
        assert len(before) == 2 and before.keys() == after.keys()
        rounded = any(not torch.equal(value, after[name]) for name, value in before.items())
        assert bool(said) == rounded and len(said) <= 1, (saved, loaded, said)


class Momentum(Foreign):
    """Keeps its momentum in a dtype of its own, whatever the dtype of what it steps."""

    def __init__(self, params: Any, dtype: torch.dtype) -> None:
        super().__init__(params)
        self.dtype = dtype

    def update(self, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
        momentum = state.setdefault("momentum", torch.zeros_like(p, dtype=self.dtype))
        p.sub_(momentum.mul_(0.9).add_(g).to(p.dtype), alpha=group["lr"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("state", [torch.bfloat16, torch.float32, torch.float64])
def test_optimizer_state_keeps_its_own_dtype_after_a_resume(
    tmp_path: Path, dtype: torch.dtype, state: torch.dtype
) -> None:
    """Momentum narrower or wider than the weights: a run that resumes after two steps has the weights of PyTorch."""

    def model() -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(WIDTH, WIDTH).to(dtype)

    def train(engine: triax.ModuleEngine, steps: Tensor) -> None:
        for x in steps:
            engine.backward(engine(x).square().mean())
            engine.step()

    xs = torch.randn(4, 2, WIDTH, dtype=torch.float64).to(dtype)
    plain = model()
    optimizer = Momentum(plain.parameters(), state)
    for x in xs:
        optimizer.zero_grad()
        plain(x).square().mean().backward()
        optimizer.step()
    bound = 1e-10 if dtype == torch.float64 else 2 * torch.finfo(dtype).eps  # weights are below 1: two roundings
    for stage in range(3):
        common: Any = {"optimizer": partial(Momentum, dtype=state), "batch": 2, "zero": stage}
        first, resumed = (triax.Engine(model(), **common) for _ in range(2))
        train(first, xs[:2])
        first.save_checkpoint(tmp_path)
        resumed.load_checkpoint(tmp_path)
        for engine in (first, resumed):
            train(engine, xs[2:])
            assert engine.optimizer is not None
            assert {entries["momentum"].dtype for entries in engine.optimizer.state.values()} == {state}
        for weight, same, wanted in zip(*(each.parameters() for each in (resumed.module, first.module, plain))):
            assert torch.equal(weight, same)
            torch.testing.assert_close(weight, wanted, rtol=0, atol=bound)


def messages_of(folder: str, dtype: torch.dtype, loads: bool) -> list[str]:
    """Save or load a model of two stages on this rank; return what the rank logs."""
    grid = triax.Grid(pipe=2, timeout=60)
    layers = [triax.LayerSpec(nn.Linear, WIDTH, WIDTH), triax.LayerSpec(nn.BatchNorm1d, WIDTH)]
    model = triax.PipelineModule(layers, grid=grid, loss_fn=nn.functional.mse_loss, dtype=dtype, partition="uniform")
    engine = triax.Engine(model, optimizer=partial(torch.optim.Adam, lr=0.1), batch=triax.Batch(size=2, microbatch=2))
    if not loads:
        engine.save_checkpoint(folder)
        return []
    with triax_warnings() as found:
        engine.load_checkpoint(folder)
    return found


def test_rank_0_names_one_rounded_tensor_and_counts_all(ranks: Any, tmp_path: Path) -> None:
    ranks(2, messages_of, str(tmp_path), torch.float64, False)
    first, second = ranks(2, messages_of, str(tmp_path), torch.float32, True)
    assert second == [] and len(first) == 1
    assert first[0].endswith(  # the integer num_batches_tracked is no seventh
        "global_step0: 6 tensors are rounded to the model's dtype, such as layers.0.bias: torch.float64 in the "
        "checkpoint, torch.float32 in the model"
    )
    assert ranks(2, messages_of, str(tmp_path), torch.float64, True) == [[], []]
