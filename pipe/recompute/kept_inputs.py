"""Inputs of recomputed groups between forward and backward: as they are, partitioned, in one buffer, or on the host.

Partitioned activations (a slice per tensor-parallel rank): Rajbhandari et al. 2020, arXiv:1910.02054, section 6.1.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...base.accelerators import is_accelerator
from ...base.torch_private import tree_flatten, tree_unflatten
from ...grid import Grid

_ALIGNMENT = 64  # bytes


def save_for_backward(tensors: list[Tensor]) -> Tensor:
    """Save tensors through autograd, so that saved-tensor hooks see them; read them from ``.grad_fn.saved_tensors``."""
    saver: Tensor = _Save.apply(torch.empty(0, requires_grad=True), *tensors)
    return saver


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError(
            "the node that stores a recomputed layer's inputs was differentiated: report this bug, with the model"
        )


class _KeptTensor(NamedTuple):
    """Memory that holds one tensor, and what is needed to rebuild the tensor from it.

    Attributes:
        kept: the memory: the tensor itself, or a flat copy of it or of this rank's slice.
        shape: shape of the tensor with its dims in the order of memory; None: the tensor is kept as it is.
        order: its dims in the order of memory.
        sliced: True if this is one rank's slice.
        slot: the place in the buffer, if there is one.
    """

    kept: Tensor
    shape: torch.Size | None
    order: tuple[int, ...]
    sliced: bool
    slot: _ArenaSlot | None


class _GivenTensor(NamedTuple):
    """Input of a group while the group runs: the tensor with its version, and how it is kept."""

    tensor: Tensor
    version: int
    place: int  # in the nest
    part: _KeptTensor
    copy: Tensor | None


class KeptNest:
    """A nest of tensors that is kept for the backward pass.

    Args:
        inputs: the options with which its tensors are kept.
        key: name of the group whose input it is.
        nest: the group's input.
        changed: places in the nest of the tensors that the group changes in place: the nest keeps copies of them. None:
            not known yet, so all tensors are copied until ``run_ended``.
    """

    def __init__(self, inputs: Inputs, key: Hashable, nest: Any, changed: Collection[int] | None = ()) -> None:
        self._inputs, self._key = inputs, key
        self._changed = changed
        leaves, self._spec = tree_flatten(nest)
        self._given: list[_GivenTensor] = []  # until ``run_ended``
        known: dict[int, int] = {}  # id -> part: a tensor that occurs twice is kept once
        # (index of its part, requires_grad, the leaf itself or None); index -1 for what is no tensor.
        self._leaves: list[tuple[int, bool, Any]] = []
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                self._leaves.append((-1, False, leaf))
                continue
            if id(leaf) not in known:
                known[id(leaf)] = len(known)
                input_part = inputs.part((key, index), leaf)
                copies = input_part.shape is None and (changed is None or index in changed)
                copy = leaf.detach().clone() if copies else None
                self._given.append(_GivenTensor(leaf, leaf._version, index, input_part, copy))
            # Integer tensors come back as the same object: a model may have attached attributes to it.
            self._leaves.append((known[id(leaf)], leaf.requires_grad, None if leaf.is_floating_point() else leaf))
        self._places = [given.place for given in self._given]
        self._keep(changed or ())

    def _keep(self, changed: Collection[int]) -> None:
        parts = [
            given.part._replace(kept=given.copy) if given.copy is not None and given.place in changed else given.part
            for given in self._given
        ]
        self._saver = save_for_backward([part.kept for part in parts])
        self._parts = [part._replace(kept=part.kept.new_empty(0)) for part in parts]

    def run_ended(self) -> Collection[int]:
        """Return the places of the tensors that the group changes in place; of these, copies are kept.

        Raises:
            RuntimeError: the group changed a tensor in place that it did not change in its first run, or one that
                shares its memory with another.
        """
        changed = self._changed_now()
        if self._changed is None:
            self._changed = {given.place for given in changed}
            if changed:
                self._keep(self._changed)
        for given in changed:
            if given.part.shape is None and given.place not in self._changed:
                raise RuntimeError(self._refusal(given, "and did not in its first run, so that no copy of it was kept"))
            memory = given.tensor.untyped_storage().data_ptr()
            if any(o is not given and o.tensor.untyped_storage().data_ptr() == memory for o in self._given):
                raise RuntimeError(self._refusal(given, "which shares its memory with another input"))
        self._given.clear()
        return self._changed

    def restore(self) -> Any:
        """Return the nest; its tensors are leaves of a new graph, and copies of leaves where the group changes them.

        Collective over the tensor axis if partitioned.
        """
        for given in self._changed_now() if self._changed is None else ():
            raise RuntimeError(self._refusal(given, "and then calls autograd itself"))
        kept = self._saver.grad_fn.saved_tensors  # type: ignore[union-attr]
        tensors = [self._inputs.restore(tensor, part) for tensor, part in zip(kept, self._parts, strict=True)]
        copies: dict[int, Tensor] = {}
        leaves = []
        for number, wanted, leaf in self._leaves:
            changes = number >= 0 and self._places[number] in (self._changed or ())
            if changes and number not in copies:
                # No leaf, and in other memory than what is kept; one copy, wherever the tensor occurs.
                copies[number] = tensors[number].detach().requires_grad_(wanted).clone()
                copies[number].__dict__.update({} if leaf is None else leaf.__dict__)
            if changes:
                leaf = copies[number]
            elif number >= 0 and leaf is None:
                leaf = tensors[number].detach().requires_grad_(wanted)
            leaves.append(leaf)
        return tree_unflatten(leaves, self._spec)

    def _changed_now(self) -> list[_GivenTensor]:
        return [given for given in self._given if given.tensor._version != given.version]

    def _refusal(self, given: _GivenTensor, why: str) -> str:
        return (
            f"{self._key} changes its input of shape {tuple(given.tensor.shape)} in place, {why}: it cannot be "
            "computed again. Change a copy of it instead, for instance x = x + 1 in place of x += 1"
        )


class Inputs:
    """Storage for the inputs of recomputed groups.

    The options apply to floating-point tensors that require gradients. Other tensors (ids, masks) are kept as they
    are: they go through many layers as one tensor, which stays in memory anyway.

    Args:
        grid: grid whose tensor axis partitions the tensors.
        partition: if all t ranks of the tensor axis hold equal tensors, keep a slice of 1/t on each and gather them
            when needed. Equality is tested the first time, by two sums over all bits. Tensors that differ (for example
            sequence shards) are kept as they are.
        host: keep the tensors in pinned host memory, if the model is on a GPU.
        slots: copy the tensors into one buffer of this many slots, allocated when it is empty; 0: no buffer.
    """

    def __init__(self, grid: Grid, partition: bool = False, host: bool = False, slots: int = 0) -> None:
        self._axis, self._device = grid.tensor, grid.device
        self._partition = partition and grid.tensor.size > 1
        self._host = host and is_accelerator(grid.device)
        self._arena = _Arena(slots, torch.device("cpu") if self._host else grid.device, self._host) if slots else None
        self._replicated: dict[Hashable, bool] = {}
        self._logs = grid.data_context.is_first and grid.tensor.is_first

    def part(self, key: Hashable, tensor: Tensor) -> _KeptTensor:
        """Store one tensor until the recomputation, on the device or the host, whole or as this rank's slice.

        With ``partition_activations`` the first call with a key is collective over the tensor axis: the ranks compare
        the tensor, and each stores a slice if all have the same one. ``key`` tells the tensors of a layer apart.
        """
        kept = tensor.detach()
        moves = tensor.requires_grad and tensor.is_floating_point() and tensor.layout == torch.strided
        sliced = moves and self._partition and self._is_replicated(key, kept)
        if not moves or not (sliced or self._host or self._arena is not None):
            return _KeptTensor(kept, None, (), False, None)
        order = tuple(sorted(range(kept.dim()), key=kept.stride, reverse=True))
        dense = kept.permute(order)  # contiguous, unless the tensor has gaps
        flat = dense.reshape(-1)
        if sliced:
            size, rank = self._axis.size, self._axis.rank
            length = -(-flat.numel() // size)
            flat = flat[min(rank * length, flat.numel()) : (rank + 1) * length]
        else:
            length = flat.numel()
        slot = None
        if self._arena is not None and (slot := self._arena.take(length * flat.element_size())) is not None:
            memory = slot.view(length, flat.dtype)
        else:
            where = torch.device("cpu") if self._host else flat.device
            memory = torch.empty(length, dtype=flat.dtype, device=where, pin_memory=self._host)
        memory[: flat.numel()].copy_(flat, non_blocking=True)
        memory[flat.numel() :].zero_()
        return _KeptTensor(memory, dense.shape, order, sliced, slot)

    def restore(self, kept: Tensor, part: _KeptTensor) -> Tensor:
        """Rebuild a tensor from the memory that ``part`` kept. Collective over the tensor axis if it is a slice."""
        if part.shape is None:
            return kept
        here = kept.to(self._device, non_blocking=True)
        if part.sliced:
            flat = here.new_empty(self._axis.size * here.numel())
            self._axis.all_gather(flat, here)
        else:
            # A copy: the slot may be reused while a deferred weight gradient still holds the tensor that is returned.
            flat = here.clone() if part.slot is not None and here.data_ptr() == kept.data_ptr() else here
        inverse = sorted(range(len(part.order)), key=part.order.__getitem__)
        return flat[: part.shape.numel()].view(part.shape).permute(inverse)

    def _is_replicated(self, key: Hashable, tensor: Tensor) -> bool:
        """Return True if all ranks of the tensor axis hold equal tensors. Collective the first time.

        It is tested once for each key (a tensor of a group's input), on the first tensor that is not constant.
        """
        if key in self._replicated:
            return self._replicated[key]
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
            return False  # constant shards (zeros) are equal by chance: test again next time
        replicated = self._replicated[key] = torch.equal(low, high)
        if not replicated and self._logs and list(self._replicated.values()).count(False) == 1:
            logging.getLogger("triax").warning(
                "partition_activations: the input of %s differs between tensor ranks (as sequence shards do), so it is "
                "not partitioned; the same holds for every other group whose input differs",
                key[0] if isinstance(key, tuple) else key,
            )
        return replicated


class _Arena:
    """One buffer of equal slots, sized for the largest tensor so far, and freed when all slots are free."""

    def __init__(self, slots: int, device: torch.device, pin: bool) -> None:
        self._slots, self._device, self._pin = slots, device, pin
        self._size = 0
        self._buffer: weakref.ReferenceType[_ArenaBuffer] | None = None

    def take(self, size: int) -> _ArenaSlot | None:
        """Return a free slot of at least ``size`` bytes, or None if there is no such slot."""
        self._size = max(self._size, -(-size // _ALIGNMENT) * _ALIGNMENT)
        buffer = self._buffer() if self._buffer is not None else None
        if buffer is None:
            memory = torch.empty(self._slots * self._size, dtype=torch.uint8, device=self._device, pin_memory=self._pin)
            buffer = _ArenaBuffer(memory, list(range(0, memory.numel(), self._size or 1))[::-1], self._size)
            self._buffer = weakref.ref(buffer)
        return _ArenaSlot(buffer) if buffer.free and size <= buffer.size else None


class _ArenaBuffer:
    """Memory of an arena, with the offsets of its free slots and their size in bytes."""

    def __init__(self, memory: Tensor, free: list[int], size: int) -> None:
        self.memory, self.free, self.size = memory, free, size


class _ArenaSlot:
    """A slot of the buffer, free again when this object is deleted."""

    def __init__(self, buffer: _ArenaBuffer) -> None:
        self._buffer, self._start = buffer, buffer.free.pop()

    def view(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the slot as a tensor that is no view, so that it does not share a version counter with other slots."""
        memory = self._buffer.memory
        tensor = torch.empty(0, dtype=dtype, device=memory.device)
        return tensor.set_(memory.untyped_storage(), self._start // dtype.itemsize, (numel,), (1,))

    def __del__(self) -> None:
        self._buffer.free.append(self._start)
