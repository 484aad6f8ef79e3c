"""What recomputation keeps of a group's input: it as it is, this tensor rank's slice of it, in one buffer, on the host.

Slices over the tensor axis: Rajbhandari et al. 2020, arXiv:1910.02054, section 6.1 (partitioned activations).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..grid import Grid

_ALIGNED = 64  # bytes


def save(tensors: list[Tensor]) -> Tensor:
    """Save tensors as autograd does (whoever hooks into that sees them); ``.grad_fn.saved_tensors`` has them."""
    saver: Tensor = _Save.apply(torch.empty(0, requires_grad=True), *tensors)
    return saver


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("nothing is computed from what holds saved tensors")


class _Part(NamedTuple):
    """What is kept of one tensor, and how to have the tensor back from it."""

    kept: Tensor
    whole: torch.Size | None  # of the tensor with its dims in the order of memory; None: it is kept as it is
    order: tuple[int, ...]  # those dims
    sliced: bool
    slot: _Slot | None


class Kept:
    """A nest that is kept."""

    def __init__(self, inputs: Inputs, key: Hashable, nest: Any) -> None:
        self._inputs = inputs
        leaves, self._spec = tree_flatten(nest)
        parts: list[_Part] = []
        known: dict[int, int] = {}  # a tensor that is there twice is kept once
        # (number of its part, whether it wants a gradient, it or None); -1 for what is no tensor.
        self._leaves: list[tuple[int, bool, Any]] = []
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                self._leaves.append((-1, False, leaf))
                continue
            if id(leaf) not in known:
                known[id(leaf)] = len(parts)
                parts.append(inputs.part((key, place), leaf))
            # Integers come back as the same object: a model may have attached to it what it computed from them.
            self._leaves.append((known[id(leaf)], leaf.requires_grad, None if leaf.is_floating_point() else leaf))
        self._saver = save([part.kept for part in parts])
        self._parts = [part._replace(kept=part.kept.new_empty(0)) for part in parts]

    def restore(self) -> Any:
        """The nest: its tensors are leaves of a new graph. Collective over the tensor axis where slices are kept."""
        kept = self._saver.grad_fn.saved_tensors  # type: ignore[union-attr]
        tensors = [self._inputs.whole(tensor, part) for tensor, part in zip(kept, self._parts, strict=True)]
        leaves = [
            leaf if number < 0 or leaf is not None else tensors[number].detach().requires_grad_(wanted)
            for number, wanted, leaf in self._leaves
        ]
        return tree_unflatten(leaves, self._spec)


class Inputs:
    """Keeps inputs of recomputed groups.

    Only floating-point tensors that want gradients are kept in another way than as they are: ids and masks go through
    many layers as one tensor, which is there anyway.

    Args:
        grid: whose tensor axis shares the slices.
        partition: keep a slice of 1/t of what all t tensor ranks hold alike, and gather it when it is needed. Whether
            they do is compared the first time (bit by bit, in two sums); sequence shards, say, are not alike.
        host: keep it in the host's memory, pinned, where the model is on a GPU.
        slots: copy it into one buffer that has so many places, made when there is nothing in it; 0: no buffer.
    """

    def __init__(self, grid: Grid, partition: bool = False, host: bool = False, slots: int = 0) -> None:
        self._axis, self._device = grid.tensor, grid.device
        self._partition = partition and grid.tensor.size > 1
        self._host = host and grid.device.type != "cpu"
        self._arena = _Arena(slots, torch.device("cpu") if self._host else grid.device, self._host) if slots else None
        self._alike: dict[Hashable, bool] = {}
        self._speaks = grid.data.is_first and grid.tensor.is_first

    def keep(self, key: Hashable, nest: Any) -> Kept:
        """Keep a nest of tensors, of the group with that key."""
        return Kept(self, key, nest)

    def part(self, key: Hashable, tensor: Tensor) -> _Part:
        """Keep one tensor. Collective over the tensor axis, the first time."""
        kept = tensor.detach()
        if not (tensor.requires_grad and tensor.is_floating_point() and tensor.layout == torch.strided):
            return _Part(kept, None, (), False, None)
        sliced = self._partition and self._same(key, kept)
        if not sliced and self._arena is None and not self._host:
            return _Part(kept, None, (), False, None)
        order = tuple(sorted(range(kept.dim()), key=kept.stride, reverse=True))
        dense = kept.permute(order)  # contiguous, but where the tensor has gaps
        flat = dense.reshape(-1)
        if sliced:
            size, rank = self._axis.size, self._axis.rank
            length = -(-flat.numel() // size)
            flat = flat[min(rank * length, flat.numel()) : (rank + 1) * length]
        else:
            length = flat.numel()
        slot = None
        if self._arena is not None and (slot := self._arena.take(length * flat.element_size())) is not None:
            room = slot.view(length, flat.dtype)
        else:
            where = torch.device("cpu") if self._host else flat.device
            room = torch.empty(length, dtype=flat.dtype, device=where, pin_memory=self._host)
        room[: flat.numel()].copy_(flat, non_blocking=True)
        room[flat.numel() :].zero_()
        return _Part(room, dense.shape, order, sliced, slot)

    def whole(self, kept: Tensor, part: _Part) -> Tensor:
        """What ``part`` kept. Collective over the tensor axis where that is a slice."""
        if part.whole is None:
            return kept
        here = kept.to(self._device, non_blocking=True)
        if part.sliced:
            flat = here.new_empty(self._axis.size * here.numel())
            self._axis.all_gather(flat, here)
        else:
            # The slot may be used again while something (a deferred weight gradient) still holds what is returned.
            flat = here.clone() if part.slot is not None and here.data_ptr() == kept.data_ptr() else here
        inverse = [0] * len(part.order)
        for place, dim in enumerate(part.order):
            inverse[dim] = place
        return flat[: part.whole.numel()].view(part.whole).permute(inverse)

    def _same(self, key: Hashable, tensor: Tensor) -> bool:
        """Whether all tensor ranks hold the same; decided once for each group, and of a tensor that is not constant."""
        if key in self._alike:
            return self._alike[key]
        words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        bits = tensor.contiguous().view(-1).view(words).to(torch.int64)
        places = torch.arange(bits.numel(), device=bits.device) * 2 + 1
        constant = bits.numel() == 0 or bool((bits == bits[0]).all())
        shape = [(tensor.shape[i] if i < tensor.dim() else -1) for i in range(8)]
        sums = torch.stack([bits.sum(), (bits * places).sum(), torch.tensor(int(constant), device=bits.device)])
        low = torch.cat([sums, torch.tensor(shape, device=bits.device)])
        high = low.clone()
        self._axis.all_reduce(low, op="min")
        self._axis.all_reduce(high, op="max")
        if high[2]:
            return False  # shards of zeros, say, are alike by chance: ask again
        alike = self._alike[key] = torch.equal(low, high)
        if not alike and self._speaks and list(self._alike.values()).count(False) == 1:
            logging.getLogger("triax").warning(
                "partition_activations: the input of %s differs between tensor ranks (sequence shards do): it is kept "
                "as it is there, and wherever else it does",
                key[0] if isinstance(key, tuple) else key,
            )
        return alike


class _Arena:
    """One buffer of equal places. It is made for the largest tensor so far, and goes when nothing is in it."""

    def __init__(self, slots: int, device: torch.device, pin: bool) -> None:
        self._slots, self._device, self._pin = slots, device, pin
        self._size = 0
        self._buffer: weakref.ReferenceType[_Buffer] | None = None

    def take(self, size: int) -> _Slot | None:
        """A place for so many bytes; None if the buffer has none, or only smaller ones."""
        self._size = max(self._size, -(-size // _ALIGNED) * _ALIGNED)
        buffer = self._buffer() if self._buffer is not None else None
        if buffer is None:
            memory = torch.empty(self._slots * self._size, dtype=torch.uint8, device=self._device, pin_memory=self._pin)
            buffer = _Buffer(memory, list(range(0, memory.numel(), self._size or 1))[::-1], self._size)
            self._buffer = weakref.ref(buffer)
        return _Slot(buffer) if buffer.free and size <= buffer.size else None


class _Buffer:
    def __init__(self, memory: Tensor, free: list[int], size: int) -> None:
        self.memory, self.free, self.size = memory, free, size


class _Slot:
    """A place in the buffer, free again when this object is gone."""

    def __init__(self, buffer: _Buffer) -> None:
        self._buffer, self._start = buffer, buffer.free.pop()

    def view(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The place as a tensor, which is no view: what is written to other places is not written to it."""
        memory = self._buffer.memory
        room = torch.empty(0, dtype=dtype, device=memory.device)
        return room.set_(memory.untyped_storage(), self._start // dtype.itemsize, (numel,), (1,))

    def __del__(self) -> None:
        self._buffer.free.append(self._start)
