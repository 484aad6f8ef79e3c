"""A model, its optimizers and its plain training, for tests of Horovod's API."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import triax.compat.horovod as hvd

WIDTH = 5


@contextlib.contextmanager
def started() -> Iterator[None]:
    hvd.init(timeout=60)
    try:
        yield
    finally:
        hvd.shutdown()


class Net(nn.Module):
    """``rare`` is used on rank 0 alone, ``never`` nowhere, and ``frozen`` is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, 4), nn.Linear(4, 1)
        self.rare, self.never = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: Tensor, rare: bool) -> Tensor:
        y: Tensor = self.leave(self.enter(x).tanh()) * self.frozen
        return y + self.rare(x) if rare else y


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def loss_of(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    x = torch.randn(
        3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    )
    y: Tensor = model(x, rank == 0)
    return (y - x.sum(1, keepdim=True)).square().mean()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.02}]


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.05, weight_decay=0.1),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
}


def has_batch(how: str, step: int, rank: int) -> bool:
    """Return False for rank 1 in the second step of an idle run."""
    return not (how.startswith("idle") and step == rank == 1)


def plain(kind: str, ranks: int, passes: int, steps: int, scale: float, how: str = "") -> list[Tensor]:
    """Every rank's loss in one process, one after the other."""
    model = net()
    optimizer = MAKERS[kind](groups(model))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=how != "zeroed in place")
        for micro in range(passes):
            for rank in range(ranks):
                if has_batch(how, step, rank):
                    (scale * loss_of(model, step, micro, rank)).backward()
        optimizer.step()
        scheduler.step()
    return [p.detach() for p in model.parameters()]


def held() -> None:
    with started():
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
        inner = torch.optim.Adam(model.parameters())
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        elements = sum(p.numel() for p in model.parameters())
        gradients = [p.grad for p in model.parameters()]
        storages = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in gradients if g is not None}
        assert sum(storages.values()) == 4 * elements  # one buffer, and no copy beside it
        state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor) and t.dim()]
        assert sum(t.numel() for t in state) == 2 * elements
        assert optimizer.state is inner.state
        # In place: the buffer is used again.
        optimizer.zero_grad(set_to_none=False)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        assert [p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None] == [
            *storages
        ] * len(gradients)
        gradients.clear()
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        held_still = [t for bucket in optimizer._hvd.reducer._buckets for t in vars(bucket).values()]
        assert not any(isinstance(value, Tensor) for value in held_still)


class Halves:
    """A compression of the script's own; it counts on whole gradients."""

    seen: ClassVar[list[tuple[int, ...]]] = []

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        cls.seen.append(tuple(tensor.shape))
        return 0.5 * tensor, tensor.shape

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return 2.0 * tensor.view(ctx)


def hvd_grid() -> Any:
    from triax.compat.horovod.context import context

    return context().grid
