"""Random numbers that do not depend on the grid: each is a function of a key.

| numbers | key |
|---|---|
| weights | (seed, the layer's whole-model name): torch's CPU generator is seeded with it while the layer is built |
| shards of a weight | (one number drawn from that generator, first row of a block of rows) |
| dropout masks | (seed, step, sample, layer, element) |
| others, e.g. the order of data | a seed that ``derive`` makes from the numbers and names on which it should depend |

The seed of weights is ``PipelineModule(seed=...)``. That of dropout is ``EngineOptions.seed``, which
engine/pipeline_engine.py and engine/module_engine.py set. The values of a whole weight are drawn in blocks of rows. A
rank draws only the blocks that its shard needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...base.nest import tensors_of
from ...base.seeds import derive
from ...base.torch_private import backward_task
from ...base.uncompiled import uncompiled
from ..comm.axis import Axis
from ..layout import Layout, set_layout

# Weights are drawn in blocks of rows, whose size depends on the whole shape only, never on the shard.
_BLOCK_ELEMENTS = 2**16


@contextmanager
def seeded(*keys: int | str) -> Iterator[None]:
    """Seed torch's CPU generator with ``derive(*keys)`` in this context, and restore its state afterwards."""
    state = torch.random.get_rng_state()
    torch.default_generator.manual_seed(derive(*keys))
    try:
        yield
    finally:
        torch.random.set_rng_state(state)


class Distribution(Protocol):
    """Distribution of initial values: ``Normal``, ``Uniform``, ``Constant``, or a class of yours with this method."""

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return a new fp32 tensor on the CPU, with values that depend on the shape and the generator's state only.

        The shape is that of some rows of the whole weight, not of a shard.
        """


@dataclass(frozen=True)
class Normal:
    """Initial values from a normal distribution with mean 0."""

    std: float

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return a new tensor with values drawn from this normal distribution."""
        return torch.empty(shape, device="cpu", dtype=torch.float32).normal_(0.0, self.std, generator=generator)


@dataclass(frozen=True)
class Uniform:
    """Initial values from the uniform distribution over [-bound, bound)."""

    bound: float

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return a new tensor with values drawn from this uniform distribution."""
        values = torch.empty(shape, device="cpu", dtype=torch.float32)
        return values.uniform_(-self.bound, self.bound, generator=generator)


@dataclass(frozen=True)
class Constant:
    """Initial values that are all the same, as those of a norm's weight (1) and of many biases (0)."""

    value: float

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return a new tensor of this value; nothing is drawn."""
        return torch.full(shape, self.value, device="cpu", dtype=torch.float32)


@torch.no_grad()
def initialize(
    parameter: Tensor, layout: Layout, rank: int, size: int, init: Distribution, expert: tuple[int, int] = (0, 1)
) -> None:
    """Fill this rank's shard of a parameter with its slice of the whole tensor's initial values.

    It takes exactly one number from torch's CPU generator, for any shard, so that the numbers drawn next do not depend
    on the grid either. On the meta device it fills nothing.

    Args:
        parameter: the shard, filled in place.
        layout: the parameter's layout.
        rank, size: this process's rank on the tensor axis, and the size of the tensor axis.
        init: distribution of the values.
        expert: this process's rank on the expert axis, and the size of that axis.
    """
    seed = int(torch.randint(2**62, (), device="cpu"))
    if parameter.is_meta or parameter.numel() == 0:
        return
    rows, *rest = layout.shape
    block_rows = max(1, _BLOCK_ELEMENTS // max(1, math.prod(rest)))
    generator = torch.Generator()
    for box in layout.boxes(rank, size, expert):
        start, stop = box.whole[0].start, box.whole[0].stop
        shift = box.local[0].start - start
        for first in range(start // block_rows * block_rows, stop, block_rows):
            last = min(first + block_rows, rows)
            block = init.draw((last - first, *rest), generator.manual_seed(derive(seed, first)))
            low, high = max(first, start), min(last, stop)
            values = block[(slice(low - first, high - first), *box.whole[1:])]
            parameter[(slice(low + shift, high + shift), *box.local[1:])] = values


def sharded_parameter(
    layout: Layout,
    init: Distribution,
    rank: int,
    size: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    expert: tuple[int, int] = (0, 1),
) -> nn.Parameter:
    """Make a new parameter that is one rank's shard, with its slice of the whole tensor's initial values.

    Args:
        layout: layout of the parameter, which is set on it.
        init: distribution of the initial values.
        rank, size: rank on the tensor axis, and size of this axis; 0 and 1 for a replicated parameter.
        device, dtype: device and dtype of the parameter.
        expert: rank on the expert axis, and size of this axis.
    """
    parameter = nn.Parameter(torch.empty(layout.local_shape(rank, size, expert), device=device, dtype=dtype))
    set_layout(parameter, layout)
    initialize(parameter, layout, rank, size, init, expert)
    return parameter


class DropoutState:
    """Step and samples of the microbatch that a model computes now: the part of dropout's key that changes.

    Attributes:
        seed: seed of the run.
        step: optimizer steps taken; in a loop without an engine, forward passes.
        samples: the index of each of the microbatch's samples in the global batch; None outside a step of the engine,
            where samples count from 0.
        first_token: place of the first token in its sequence, if a pipeline cuts sequences into slices.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.step = 0
        self.samples: range | None = None
        self.first_token = 0
        self._drawn = False  # True once a mask was drawn
        self._last_step: int | None = None  # of the last forward pass outside the engine
        self._recomputed = (-1, 0)  # autograd's number of a backward pass, and the step of its forward pass

    def begin(self) -> None:
        """Begin a forward pass without an engine: advance the step by one.

        The step stays if this is the first forward pass, if the caller has set it since the last one, or if a backward
        pass is running, which recomputes an earlier forward pass.
        """
        if self._last_step is not None and self.step == self._last_step and backward_task() == -1:
            self.step += 1

    def end(self, value: Any) -> Any:
        """End a forward pass without an engine; return its output ``value``.

        In the backward pass of this output, layers that ``torch.utils.checkpoint`` recomputes draw the masks of this
        forward pass again.
        """
        if self._drawn and backward_task() == -1:
            step = self._last_step = self.step

            def enter(_: object) -> None:
                self._recomputed = backward_task(), step

            for node in {tensor.grad_fn for tensor in tensors_of(value) if tensor.grad_fn is not None}:
                node.register_prehook(enter)
        return value

    def draw(self) -> int:
        """Return the step that keys the mask drawn now: in a recomputation, the step of the recomputed forward pass."""
        self._drawn = True
        task, step = self._recomputed
        return step if task != -1 and task == backward_task() else self.step


class SampleRandom(nn.Module):
    """Base of modules that draw the same numbers on every grid: keyed by (seed, step, sample, layer, element).

    A ``PipelineModule`` and an engine of a plain module bind each to its layer's name and to the current step; a
    ``PipelineModule`` without an engine counts each forward pass as a step. Without ``bind``, all forward passes have
    the same numbers.

    Args:
        kind: a word of the key.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind, self._layer = kind, ""
        self._state = DropoutState()

    def bind(self, layer: str, state: DropoutState) -> None:
        """Set the layer's name and the state, which are parts of the key of this module's numbers."""
        self._layer, self._state = layer, state

    def key(self) -> int:
        """Return the key of the numbers drawn now: of the seed, the step and the layer."""
        return derive(self._state.seed, self._kind, self._state.draw(), self._layer)

    def samples_of(self, x: Tensor) -> range:
        """Return the microbatch's samples in the global batch; outside a step of the engine, the rows of a tensor."""
        return self._state.samples or range(x.shape[0])


class Dropout(SampleRandom):
    """Dropout that drops the same elements on every grid: keyed by (seed, step, sample, layer, element).

    ``nn.Dropout`` draws from the process's generator, so that its masks depend on the grid.

    >>> triax.Dropout(0.5)(torch.ones(1, 6))  # the same elements in each process
    tensor([[2., 2., 2., 0., 2., 2.]])

    Args:
        p: the probability that an element is set to 0; the others are scaled by 1 / (1 - p).
        axis: the axis that shards dim 1 of the input evenly (sequence parallelism): the mask is then this rank's part
            of the mask of the whole sequence. None: the input is whole.
        rows: in place of ``axis``, a function from the length n of dim 1 to the places of its rows in the whole
            sequence, integers (n,) on the CPU.
        columns: the places of the input's last dim in the whole one, integers on the CPU, and the length of the whole
            one, if the tensor axis shards it. None: it is whole.

    Shape:
        (B, ...) -> (B, ...), the first dim counting samples.
    """

    def __init__(
        self,
        p: float,
        axis: Axis | None = None,
        rows: Callable[[int], Tensor] | None = None,
        columns: tuple[Tensor, int] | None = None,
    ) -> None:
        super().__init__("dropout")
        if not 0.0 <= p < 1.0:
            raise ValueError(f"the dropout probability p is {p}: give a number of at least 0 and less than 1")
        self.p = p
        self.axis, self.rows, self.columns = axis, rows, columns

    def forward(self, x: Tensor) -> Tensor:
        """Drop and scale elements, in training mode only."""
        return x if not self.training or self.p == 0.0 else self._drop(x)

    @uncompiled  # the key changes in each step
    def _drop(self, x: Tensor) -> Tensor:
        samples = self.samples_of(x)
        if len(samples) != x.shape[0]:
            raise ValueError(
                f"the input of the Dropout {self._layer or 'of a layer'} has {x.shape[0]} rows on dim 0, but the "
                f"microbatch has {len(samples)} samples: put the samples on dim 0"
            )
        key = self.key()
        ids = torch.tensor(samples, device=x.device)  # (B,)
        elements = self._elements(x)  # (N,)
        bits = _mix(_mix(ids + key)[:, None] + elements)  # (B, N)
        # 31 bits decide: the probability equals p to within 2**-31.
        keep = ((bits >> 33) & 0x7FFFFFFF) >= round(self.p * 2**31)
        return x * keep.view_as(x) / (1.0 - self.p)  # autograd saves one byte for each element

    def _elements(self, x: Tensor) -> Tensor:
        """Return the number of each element of one sample of x among those of the whole sample: integers (N,)."""
        count, length = math.prod(x.shape[1:]), x.shape[1] if x.dim() > 1 else 1
        # Dim 1 is the outermost dim of a sample: its shards are contiguous.
        first = self._state.first_token + (0 if self.axis is None else self.axis.rank * length)
        rows = torch.arange(first, first + length, device=x.device)
        if self.rows is not None:
            rows = self.rows(length).to(x.device)
        width = count // max(length, 1)
        elements = torch.arange(width, device=x.device)  # of a row
        if self.columns is not None:
            places, columns = self.columns
            outer = width // len(places)  # dims between the rows and the last dim
            elements = (torch.arange(outer, device=x.device)[:, None] * columns + places.to(x.device)).view(-1)
            width = outer * columns
        return (rows[:, None] * width + elements).view(-1)

    def extra_repr(self) -> str:
        """Return the text that ``print`` shows."""
        return f"p={self.p}"


def bind_dropout(module: nn.Module, seed: int) -> DropoutState | None:
    """Bind the module's ``SampleRandom`` modules, dropouts for instance, to a common state; return that state.

    The state is a part of the key of their numbers. The result is None if the module has none of them.
    """
    named_sources = [(name, part) for name, part in module.named_modules() if isinstance(part, SampleRandom)]
    state = DropoutState(seed)
    for name, part in named_sources:
        part.bind(name, state)
    return state if named_sources else None


def set_dropout_samples(state: DropoutState, inputs: Any, first: int, step: int) -> None:
    """Set the keys of the dropout masks: the step, and the indices of the microbatch's samples in the global batch.

    Args:
        state: the key that the module's dropouts share.
        inputs: the module's inputs. The size of dim 0 of the first tensor is the number of samples.
        first: index of the microbatch's first sample in the global batch.
        step: number of the step.
    """
    tensors = tensors_of(inputs)
    state.step = step
    state.samples = range(first, first + tensors[0].shape[0]) if tensors and tensors[0].dim() else None


def uniform(keys: Tensor, elements: Tensor) -> Tensor:
    """Return a number in (0, 1) for each pair of key and element: a hash of the two, equal on every rank.

    Args:
        keys: integers (B,), as ``derive`` makes them.
        elements: integers (N,), indices of elements.

    Returns:
        (B, N) float64: (k + 1/2) 2**-52 with an integer k, so never 0 or 1.
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
