"""Offload of activations: the O and R ops of a program, which copy what autograd keeps to the host and back.

While a stage that offloads runs its forward pass, autograd saves tensors. Hooks keep the storages of these tensors,
without parameters and buffers, in a ``KeptActivations``. O copies the storages to host memory or a file and frees them;
R allocates them anew and copies back. On an accelerator the copies run on a stream of their own, on a CPU in a thread.
Wan et al. 2025 (PipeOffload, arXiv:2503.01328), section 3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ..base.accelerators import is_accelerator
from ..base.autograd import saved_through
from ..base.torch_private import storage_id

_CHANGED = (
    "a tensor of shape {} that the backward pass needs was changed in place after a layer had used it, so its "
    "activations cannot be offloaded: write the change without in-place operations, or do not offload this stage"
)


class HostMemory(Protocol):
    """Allocator of the buffers to which activations are offloaded; ``zero/offload.py`` has those for RAM and disk."""

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor in host memory."""

    def prefetch(self, tensor: Tensor) -> None:
        """Prefetch a tensor that is read soon."""

    def evict(self, tensor: Tensor) -> None:
        """Evict a tensor that is not read for a while."""


class _OffloadedStorage:
    """One storage: on the device (``data``, its bytes), in host memory (``host``), or both."""

    def __init__(self, data: Tensor) -> None:
        self.data: Tensor | None = data
        self.host: Tensor | None = None
        self.numel = data.numel()


class _Saved:
    """Tensor that autograd saved: a view of a piece."""

    def __init__(self, tensor: Tensor, piece: _OffloadedStorage) -> None:
        self.alias: Tensor | None = tensor.detach()  # shares the version, not the graph
        self.version, self.piece, self.dtype = tensor._version, piece, tensor.dtype
        self.geometry = tensor.storage_offset(), tensor.shape, tensor.stride()
        self.conjugate, self.negative = tensor.is_conj(), tensor.is_neg()  # bits of a view; its storage lacks both

    def require_unchanged(self) -> None:
        if self.alias is not None and self.alias._version != self.version:
            raise RuntimeError(_CHANGED.format(tuple(self.alias.shape)))

    def tensor(self) -> Tensor:
        self.require_unchanged()
        assert self.piece.data is not None, "verify refuses a backward without a reload"
        data = self.piece.data
        view = torch.empty(0, dtype=self.dtype, device=data.device).set_(data.untyped_storage(), *self.geometry)
        view = view.conj() if self.conjugate else view
        return view.neg() if self.negative else view


class KeptActivations:
    """Activations that autograd saves for the backward pass of one stage and microbatch.

    Args:
        weights: returns the storages of weights and buffers, which stay.
    """

    def __init__(self, weights: Callable[[], set[int]]) -> None:
        self._weights = weights
        self._pieces: dict[int, _OffloadedStorage] = {}
        self._saved: list[_Saved] = []
        self.back: Callable[[], None] | None = None  # waits for the reload

    def recording(self) -> AbstractContextManager[Any]:
        """Return the context of the stage's forward pass."""
        what = "offload of a stage's activations"
        return saved_through(self._pack, _unpack, what, "leave offload of triax.ScheduleOptions out")

    def pieces(self) -> list[_OffloadedStorage]:
        """Return all storages, for an offload; from now on they have no other owner here.

        Raises:
            RuntimeError: one was changed in place since autograd saved it.
        """
        for saved in self._saved:
            saved.require_unchanged()
            saved.alias = None
        return [*self._pieces.values()]

    def _pack(self, tensor: Tensor) -> Any:
        if type(tensor) is not Tensor or tensor.layout != torch.strided or not tensor.numel():
            return tensor
        storage = tensor.untyped_storage()
        piece = self._pieces.get(storage_id(storage))  # no address: on the meta device there is none
        if piece is None:
            if storage_id(storage) in self._weights():
                return tensor
            data = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            self._pieces[storage_id(storage)] = piece = _OffloadedStorage(data.set_(storage, 0, (storage.nbytes(),)))  # type: ignore[call-overload]
        saved = _Saved(tensor, piece)
        self._saved.append(saved)
        return saved


def _unpack(saved: Any) -> Tensor:
    return saved.tensor() if isinstance(saved, _Saved) else saved


class OffloadLane:
    """Lane of one rank, in which offloads and reloads run one after the other, beside the compute ops.

    Args:
        device: of the activations.
        memory: allocator of the buffers, which are used again.

    Attributes:
        peak_bytes: most bytes of the host that were taken at once.
    """

    def __init__(self, device: torch.device, memory: HostMemory) -> None:
        self._memory = memory
        self._stream = torch.Stream(device) if is_accelerator(device) else None
        self._thread = None if self._stream else ThreadPoolExecutor(1, thread_name_prefix="triax-offload")
        self._device = device
        self._free: dict[int, list[Tensor]] = {}  # by bytes
        self._leaving: deque[tuple[int, KeptActivations, Callable[[], None]]] = deque()
        self._bytes = self.peak_bytes = 0

    def offload(self, kept: KeptActivations, computed: int) -> None:
        """O: start to copy to the host. ``computed``: compute ops of this rank before it."""
        pieces = kept.pieces()
        self._bytes += sum(piece.numel for piece in pieces)
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        done = self._start(partial(self._copy_out, pieces), partial(self._drop, pieces))
        self._leaving.append((computed, kept, done))

    def reload(self, kept: KeptActivations) -> None:
        """R: start to copy back. The backward waits by ``kept.back``."""
        pieces = kept.pieces()
        if self._stream is not None:
            while any(leaving is kept for _, leaving, _ in self._leaving):  # its old memory is not free before
                self._leaving.popleft()[2]()
            self._allocate(pieces)
        kept.back = self._start(partial(self._copy_in, pieces), partial(self._return, pieces))

    def wait(self, before: int) -> None:
        """Wait for the offloads that were issued before fewer compute ops, and free their memory."""
        while self._leaving and self._leaving[0][0] < before:
            self._leaving.popleft()[2]()

    def clear(self) -> None:
        """Forget all transfers, after a failure or before a step."""
        self._leaving.clear()
        self._bytes = 0

    def _start(self, copy: Callable[[], None], finish: Callable[[], None]) -> Callable[[], None]:
        """Start a copy; return a function that waits for it."""
        if self._stream is None:
            assert self._thread is not None
            future = self._thread.submit(copy)

            def wait() -> None:
                future.result()
                finish()

            return wait
        compute = torch.accelerator.current_stream(self._device)
        self._stream.wait_stream(compute)
        with self._stream:
            copy()
        done = self._stream.record_event()

        def order() -> None:
            # Memory that is freed here is used again by later kernels of this stream only.
            torch.accelerator.current_stream(self._device).wait_event(done)
            finish()

        return order

    def _copy_out(self, pieces: list[_OffloadedStorage]) -> None:
        for piece in pieces:
            assert piece.data is not None
            free = self._free.get(piece.numel)
            piece.host = free.pop() if free else self._memory.zeros(piece.numel, torch.uint8)
            piece.host.copy_(piece.data, non_blocking=self._stream is not None)
            if self._stream is None:
                piece.data = None
                self._memory.evict(piece.host)

    def _drop(self, pieces: list[_OffloadedStorage]) -> None:
        if self._stream is not None:
            for piece in pieces:
                piece.data = None

    def _allocate(self, pieces: list[_OffloadedStorage]) -> None:
        for piece in pieces:
            piece.data = torch.empty(piece.numel, dtype=torch.uint8, device=self._device)

    def _copy_in(self, pieces: list[_OffloadedStorage]) -> None:
        if self._stream is None:
            self._allocate(pieces)
        for piece in pieces:
            assert piece.host is not None and piece.data is not None
            self._memory.prefetch(piece.host)
            piece.data.copy_(piece.host, non_blocking=self._stream is not None)

    def _return(self, pieces: list[_OffloadedStorage]) -> None:
        for piece in pieces:
            assert piece.host is not None
            self._free.setdefault(piece.numel, []).append(piece.host)
            self._bytes -= piece.numel
            piece.host = None
