"""Models that once had wrong gradients, and engines for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import triax
from triax import Grid, LayerSpec, PipelineModule

from support.toys import mean_loss

WIDTH, MICROBATCHES = 6, 4


def linear() -> LayerSpec:
    return LayerSpec(nn.Linear, WIDTH, WIDTH)


def pairs() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, MICROBATCHES, 3, 4, WIDTH, generator=generator, dtype=torch.float64)
    return list(zip(x[0], x[1], strict=True))


def engine_of(
    layers: list[Any], grid: Grid | None = None, loss: Any = mean_loss, **config: Any
) -> triax.PipelineEngine:
    chunks = config.pop("chunks", 1)
    optimizer = config.pop("with_optimizer", None)
    module = PipelineModule(layers, grid=grid, loss_fn=loss, dtype=torch.float64, partition="uniform", chunks=chunks)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICROBATCHES,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **config,
    }
    return triax.initialize(model=module, config=config, optimizer=optimizer)[0]


class Checkpointed(nn.Module):
    """Recomputes its first half in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(checkpoint(lambda y: torch.tanh(self.a(y)), x, use_reentrant=False))


class Mixed(nn.Module):
    """A linear, a convolution and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.conv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Conv1d(4, 4, 1)
        self.table = nn.Embedding(5, WIDTH, padding_idx=0)

    def inner(self, x: Tensor) -> Tensor:
        y = self.conv(torch.tanh(self.a(x)))
        ids = (x.detach().abs() * 3).long() % 5
        return torch.tanh(y + F.embedding(ids, self.table.weight, padding_idx=-5).sum(-2))  # row 0, as in the table

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.inner(x))


class Offloaded(Mixed):
    """Layer whose saved tensors are moved to the CPU and come back as copies."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().forward(x)


class Force(Mixed):
    """Differentiates an energy by its input."""

    def forward(self, x: Tensor) -> Tensor:
        z = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.b(self.inner(z)).sum(), z, create_graph=True)
        return x + force


class Sensitivity(Mixed):
    """Differentiates by its own weights."""

    def forward(self, x: Tensor) -> Tensor:
        own = [*self.a.parameters(), *self.conv.parameters(), *self.table.parameters()]
        gradients = torch.autograd.grad(self.inner(x).sum(), own, create_graph=True)
        return self.b(x) + sum(g.square().sum() for g in gradients)


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = torch.fft.fft(self.a(x))
        return y, y.conj()


class Real(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Tensor:
        return self.a(torch.fft.ifft(x[0]).real + x[1].imag)


class SparseRows(Mixed):
    """An embedding whose gradients are sparse tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, padding_idx=0, sparse=True)


def listed_again() -> list[Any]:
    one, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    other.weight = one.weight
    return [one, other, linear(), one]


def between(layer: type[nn.Module]) -> Callable[[], list[Any]]:
    return lambda: [linear(), LayerSpec(layer), LayerSpec(layer), linear()]


MODELS: dict[str, Callable[[], list[Any]]] = {
    "listed again": listed_again,
    "checkpointed": between(Checkpointed),
    "offloaded": between(Offloaded),
    "force": between(Force),
    "sensitivity": between(Sensitivity),
    "sparse": between(SparseRows),
    "complex": lambda: [linear(), LayerSpec(Spectrum), LayerSpec(Real), linear()],
}


def built(name: str) -> list[Any]:
    torch.manual_seed(5)
    return MODELS[name]()
