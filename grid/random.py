"""Randomness that does not depend on the grid: every number is a function of what it is for.

- Weights: a layer is built with torch's CPU generator seeded by (seed, the layer's whole-model name), so that
  it starts alike on whichever rank it is built, whatever else that rank builds. A parallel layer takes one
  number from that generator and draws its weight by row blocks keyed by it: a shard draws only what it needs.
- Dropout: an element is dropped by a hash of (seed, step, sample, layer, element).
- Anything else (data order): ``derive`` a seed from the things it should depend on.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .axis import Axis
from .layout import Layout
from .nest import map_tensors

# A block of rows is the unit a weight is drawn in. It depends on the whole shape only, never on the shard.
_BLOCK_ELEMENTS = 2**16


def derive(*keys: int | str) -> int:
    """A 63-bit seed from numbers and names; other keys give unrelated seeds. The same on every machine."""
    digest = hashlib.blake2b(repr(keys).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def seeded(*keys: int | str) -> Iterator[None]:
    """Within it, torch's CPU generator starts from ``derive(*keys)``; behind it, it is as it was before."""
    state = torch.random.get_rng_state()
    torch.default_generator.manual_seed(derive(*keys))
    try:
        yield
    finally:
        torch.random.set_rng_state(state)


@dataclass(frozen=True)
class Normal:
    """Initial values drawn from a normal distribution of mean 0."""

    std: float

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """A new tensor of these values."""
        return torch.empty(shape, device="cpu", dtype=torch.float32).normal_(0.0, self.std, generator=generator)


@dataclass(frozen=True)
class Uniform:
    """Initial values drawn evenly from [-bound, bound)."""

    bound: float

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """A new tensor of these values."""
        values = torch.empty(shape, device="cpu", dtype=torch.float32)
        return values.uniform_(-self.bound, self.bound, generator=generator)


@torch.no_grad()
def initialise(parameter: Tensor, layout: Layout, rank: int, size: int, init: Normal | Uniform) -> None:
    """Fill this tensor rank's part of a parameter with its part of the whole tensor's initial values.

    Takes exactly one number from torch's CPU generator, whatever the shard, so that what is drawn next does not
    depend on the grid either. On the meta device there is nothing to fill.
    """
    seed = int(torch.randint(2**62, (), device="cpu"))
    if parameter.is_meta or parameter.numel() == 0:
        return
    rows, *rest = layout.shape
    block_rows = max(1, _BLOCK_ELEMENTS // max(1, math.prod(rest)))
    generator = torch.Generator()
    for box in layout.boxes(rank, size):
        start, stop = box.whole[0].start, box.whole[0].stop
        shift = box.local[0].start - start
        for first in range(start // block_rows * block_rows, stop, block_rows):
            last = min(first + block_rows, rows)
            block = init.draw((last - first, *rest), generator.manual_seed(derive(seed, first)))
            low, high = max(first, start), min(last, stop)
            part = block[(slice(low - first, high - first), *box.whole[1:])]
            parameter[(slice(low + shift, high + shift), *box.local[1:])] = part


class DropoutState:
    """Which samples of which step a model is at: the part of dropout's key that moves.

    Attributes:
        seed: of the run.
        step: optimizer steps taken; in a loop without an engine, forwards.
        samples: the number of each of the microbatch's samples within the global batch; None outside a step of
            the engine, where samples count from 0.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.step = 0
        self.samples: range | None = None
        self._drawn = False  # a mask was
        self._spent: int | None = None  # the step of the last forward outside the engine
        self._again = (-1, 0)  # a backward pass (autograd's number of it), and the step of the forward that it is at

    def begin(self) -> None:
        """A forward outside the engine begins: a step further than the last one, unless somebody set the step."""
        if self._spent is not None and self.step == self._spent and _backward() == -1:
            self.step += 1

    def end(self, value: Any) -> Any:
        """It returns this, whose backward pass has what ``torch.utils.checkpoint`` runs again draw as it drew."""
        if self._drawn and _backward() == -1:
            step = self._spent = self.step

            def come(_: object) -> None:
                self._again = _backward(), step

            tensors: list[Tensor] = []
            map_tensors(tensors.append, value)
            for node in {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}:
                node.register_prehook(come)
        return value

    def draw(self) -> int:
        """The step whose masks are to be drawn now."""
        self._drawn = True
        task, step = self._again
        return step if task != -1 and task == _backward() else self.step


class Dropout(nn.Module):
    """Dropout that drops the same elements on every grid: keyed by (seed, step, sample, layer, element).

    ``nn.Dropout`` draws from the process's generator, so that another grid drops other elements.
    A ``PipelineModule`` binds each ``Dropout`` to its layer's name and to the step that runs; without an engine each of
    its forwards is one. An engine of a plain module binds too. Bound by nobody, it drops the same in every forward.

    Args:
        p: the probability that an element is set to 0; the others are scaled by 1 / (1 - p).
        axis: where the input is a sequence shard, the axis that shards dim 1, evenly (sequence parallelism): the
            mask is then this rank's part of the whole sequence's. None: the input is whole.

    Shape:
        (B, ...) -> (B, ...), the first dim counting samples.
    """

    def __init__(self, p: float, axis: Axis | None = None) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"a dropout probability lies in [0, 1), not {p}")
        self.p = p
        self.axis = axis
        self._layer = ""
        self._state = DropoutState()

    def bind(self, layer: str, state: DropoutState) -> None:
        """Name the layer and the state that key this module's masks."""
        self._layer, self._state = layer, state

    def forward(self, x: Tensor) -> Tensor:
        """Drop and scale, in training only."""
        if not self.training or self.p == 0.0:
            return x
        samples = self._state.samples or range(x.shape[0])
        if len(samples) != x.shape[0]:
            raise ValueError(
                f"dropout in {self._layer or 'a layer'}: dim 0 of the input is {x.shape[0]}, but the microbatch has "
                f"{len(samples)} samples; put the samples on dim 0"
            )
        key = derive(self._state.seed, "dropout", self._state.draw(), self._layer)
        ids = torch.tensor(samples, device=x.device)  # (B,)
        count = math.prod(x.shape[1:])
        first = 0 if self.axis is None else self.axis.rank * count  # dim 1 is a sample's first: its shards are runs
        elements = torch.arange(first, first + count, device=x.device)  # (N,)
        bits = _mix(_mix(ids + key)[:, None] + elements)  # (B, N)
        # 31 bits decide: p is met to within 2**-31.
        keep = ((bits >> 33) & 0x7FFFFFFF) >= round(self.p * 2**31)
        return x * keep.view_as(x) / (1.0 - self.p)  # what autograd saves of it is a byte an element

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return f"p={self.p}"


def _backward() -> int:
    """Autograd's number of the backward pass that runs in this thread; -1: none."""
    return torch._C._current_graph_task_id()


def uniform(keys: Tensor, elements: Tensor) -> Tensor:
    """A number in (0, 1) for each key and element, a hash of the two: the same on every rank that asks for it.

    Args:
        keys: integers (B,), of ``derive``.
        elements: integers (N,).

    Returns:
        (B, N) float64, multiples of 2**-52 but for half of one: never 0 or 1.
    """
    bits = _mix(_mix(keys)[:, None] + elements)
    return ((bits >> 12) & ((1 << 52) - 1)).double().add_(0.5).mul_(2.0**-52)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finalizer (Steele, Lea and Flood 2014) on int64, which wraps: the same bits on every device."""
    x = x + _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        # torch's >> keeps the sign: clear the bits that a logical shift would.
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >= 1 << 63 else bits
