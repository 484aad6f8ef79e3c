"""Optimizer state in fewer bits between two steps: bf16, or codes of 8 or 4 bits and a scale for each block.

A step reads a piece of the state at full precision, and writes it back:

    block of 64 elements   ->   scale = max |x|, and for each element the code whose value is nearest to x / scale

A block belongs to the elements of the whole parameter, 0 to 63, 64 to 127, ..., never to a shard: ZeRO's ranges begin
and end at blocks, and so do tensor shards (``require_blocks``). So each grid has the codes of one process.

8 bits: the dynamic map of Dettmers et al. 2022, arXiv:2110.02861, section 2. Values fall by powers of ten, with more of
them near the largest. 4 bits: for values of both signs the same map; for squares 1/16 to 1 (Li et al. 2023,
arXiv:2309.01507, section 4). Two codes differ from the first paper's:

- The lowest of both signs is -1, not -0.993. So the scale is one of the coded values, and what a checkpoint holds, at
  full precision, gets the same codes again.
- The lowest of squares is 1e-7, not 0. A step divides by their root, and would be huge for a square that became 0.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cache

import torch
from torch import Tensor

from ..grid.layout import Layout
from .flat import BLOCK, LEAST_CODED
from .offload import Memory

_BITS = {"int8": 8, "int4": 4}
# Keys of state that is never negative: squares, and sums and maxima of them.
_UNSIGNED = {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum", "exp_inf"}


class StoredState(ABC):
    """State under one key of the elements that a rank owns of a bucket.

    Attributes:
        filled: False until the first ``write``.
    """

    filled = False

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Return the tensors that hold the state."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Tensor:
        """Return elements ``start`` to ``stop`` at full precision, as a copy."""

    @abstractmethod
    def write(self, start: int, values: Tensor) -> None:
        """Store values (n,) as elements ``start`` to ``start + n``."""

    def clear(self) -> None:
        """Forget the state."""
        self.filled = False
        for tensor in self.tensors():
            tensor.zero_()


class CastState(StoredState):
    """State in bf16.

    Args:
        numel: number of elements.
        dtype: dtype of the state at full precision.
        memory: allocates it.
    """

    def __init__(self, numel: int, dtype: torch.dtype, memory: Memory) -> None:
        self._values, self._dtype = memory.zeros(numel, torch.bfloat16), dtype

    def tensors(self) -> list[Tensor]:
        return [self._values]

    def read(self, start: int, stop: int) -> Tensor:
        return self._values[start:stop].to(self._dtype)

    def write(self, start: int, values: Tensor) -> None:
        self._values[start : start + values.numel()].copy_(values)
        self.filled = True


class CodedState(StoredState):
    """State in codes of 8 or 4 bits. ``start`` and the number of values are multiples of ``BLOCK``.

    Args:
        numel: number of elements.
        dtype: dtype of the state at full precision.
        memory: allocates codes and scales.
        bits: of a code.
        signed: True if values may be negative.
    """

    def __init__(self, numel: int, dtype: torch.dtype, memory: Memory, bits: int, signed: bool) -> None:
        self._dtype, self._bits, self._signed = dtype, bits, signed
        self._codes = memory.zeros(numel * bits // 8, torch.uint8)
        self._scales = memory.zeros(numel // BLOCK, torch.float32)

    def tensors(self) -> list[Tensor]:
        return [self._codes, self._scales]

    def read(self, start: int, stop: int) -> Tensor:
        if start == stop:
            return self._scales.new_zeros(0, dtype=self._dtype)
        codes = self._codes[start * self._bits // 8 : stop * self._bits // 8]
        if self._bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], -1).view(-1)
        values = code_values(self._bits, self._signed).to(codes.device, self._dtype)
        units = values[codes.int()].view(-1, BLOCK)
        return units.mul_(self._scales[start // BLOCK : stop // BLOCK, None]).view(-1)

    def write(self, start: int, values: Tensor) -> None:
        self.filled = True
        if not values.numel():
            return
        stop = start + values.numel()
        blocks = values.to(self._scales.device).view(-1, BLOCK)
        scales = blocks.abs().amax(1).float()
        units = blocks / torch.where(scales > 0, scales, 1.0).to(blocks.dtype)[:, None]
        levels = code_values(self._bits, self._signed).to(units.device, units.dtype)
        codes = torch.bucketize(units.view(-1), (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)
        if self._bits == 4:
            codes = codes[::2] | codes[1::2] << 4
        self._codes[start * self._bits // 8 : stop * self._bits // 8] = codes
        self._scales[start // BLOCK : stop // BLOCK] = scales


@cache
def code_values(bits: int, signed: bool) -> Tensor:
    """Return the values of the codes in rising order, (2**bits,): from -1, or from 0, to 1."""
    if bits == 4 and not signed:
        return torch.arange(1, 17) / 16
    values = [0.0, 1.0]
    decades = 7 if bits == 8 else 3
    for decade in range(decades):
        # Midpoints of equal parts of 0.1 to 1, twice as many in each higher power of ten.
        count = 2 ** (decade + (not signed))
        middles = [10.0 ** (decade + 1 - decades) * (0.1 + 0.9 * (part + 0.5) / count) for part in range(count)]
        values += [*middles, *(-middle for middle in middles if signed)]
    values.sort()
    values[0] = -1.0 if signed else 1e-7
    return torch.tensor(values)


def stored_state(kind: str, key: str, numel: int, dtype: torch.dtype, memory: Memory) -> StoredState:
    """Return empty state of a kind (``bf16``, ``int8`` or ``int4``) for a key of an optimizer's state."""
    if kind == "bf16":
        return CastState(numel, dtype, memory)
    return CodedState(numel, dtype, memory, _BITS[kind], key not in _UNSIGNED)


def kind_of_state(kind: str | None, layout: Layout, dtype: torch.dtype, tensor: int, expert: int) -> str | None:
    """Return the kind of state that a parameter has; None: the optimizer's own, at full precision.

    Small parameters, whose state is small, keep full precision under codes, as do integers and complex numbers.

    Args:
        kind: the kind that the user asks for.
        layout, dtype: of the parameter.
        tensor, expert: sizes of these axes.

    Raises:
        ValueError: a shard begins or ends within a block.
    """
    if kind is None or not dtype.is_floating_point or (kind in _BITS and math.prod(layout.shape) < LEAST_CODED):
        return None
    if kind in _BITS:
        require_blocks(layout, tensor, expert)
    return kind


def require_blocks(layout: Layout, tensor: int, expert: int) -> None:
    """Require that the shards of a parameter on the tensor and expert axes begin and end at multiples of ``BLOCK``.

    Raises:
        ValueError: one does not.
    """
    cut = ((layout.shard_dim, tensor), (layout.expert_dim, expert))
    for dim in (dim for dim, size in cut if dim is not None and size > 1):
        run = math.prod(layout.shape[dim + 1 :])
        for rank in range(tensor):
            for box in (box for e in range(expert) for box in layout.boxes(rank, tensor, (e, expert))):
                if box.whole[dim].start * run % BLOCK or box.whole[dim].stop * run % BLOCK:
                    raise ValueError(
                        f"optimizer.state in 8 or 4 bits has a scale for each {BLOCK} elements, and a shard of "
                        f"{layout.name} of shape {list(layout.shape)} begins or ends within them, because dim {dim} is "
                        f"cut into {tensor if dim == layout.shard_dim else expert}: use a smaller axis, a size of the "
                        f"model whose shards are multiples of {BLOCK}, or state='bf16'"
                    )
