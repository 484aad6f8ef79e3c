"""``engine.offload_states`` and ``reload_states``: what an engine holds on its device waits in host memory meanwhile.

Tensors keep their storage, which is emptied, and filled again with the same values, so that views of it stay.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from enum import StrEnum

import torch
from torch import Tensor

from ...base.errors import AgreedError
from ...base.torch_private import storage_id
from ...engine.base import Engine
from .configuration import OffloadDeviceEnum


class OffloadStateTypeEnum(StrEnum):
    """Kinds of state that ``offload_states`` moves."""

    optim_states = "optim_states"  # state of the optimizer
    hp_params = "hp_params"  # master weights
    lp_params = "lp_params"  # the model's weights
    lp_grads = "lp_grads"  # reduced gradients
    contiguous_grad_buffer = "contiguous_grad_buffer"  # gradients before they are reduced


KINDS = tuple(OffloadStateTypeEnum)


def tensors_of(engine: Engine, kind: OffloadStateTypeEnum) -> Iterator[Tensor]:
    """Yield the tensors of one kind that this rank holds."""
    axis, kinds = engine.data_axis, OffloadStateTypeEnum
    if kind == kinds.optim_states and axis.optimizer is not None:
        values = [value for state in axis.optimizer.state.values() for value in state.values()]
        for bucket in axis.buckets:
            values += axis.stepper.sub_group_state(bucket) if bucket.trained else []
        yield from (value for value in values if isinstance(value, Tensor))
    for bucket in axis.buckets:
        if kind == kinds.hp_params and bucket.master is not None:
            yield bucket.master
        if kind == kinds.lp_params:
            yield from (bucket.weights, bucket.shard)
        if kind == kinds.lp_grads and bucket.trained:
            yield bucket.owned_gradient
        if kind == kinds.contiguous_grad_buffer and bucket.gradients is not None:
            yield bucket.gradients
    if kind == kinds.lp_params:
        known = {member.parameter for bucket in axis.buckets for member in bucket.members}
        yield from (parameter for parameter in engine.module.parameters() if parameter not in known)


def get_state_devices(model: Engine, state: OffloadStateTypeEnum) -> set[torch.device]:
    """Return the devices on which an engine holds the tensors of one kind; the host's for those that were moved."""
    moved = getattr(model, "offloaded_states", None)
    host = torch.device("cpu")
    held = tensors_of(model, OffloadStateTypeEnum(state))
    return {host if moved is not None and moved.holds(tensor) else tensor.device for tensor in held if tensor.numel()}


class OffloadedStates:
    """Storages of an engine whose bytes are in host memory.

    Attributes:
        kinds: the kinds that were asked for, also where there was nothing to move.
    """

    def __init__(self) -> None:
        self.kinds: set[OffloadStateTypeEnum] = set()
        self._held: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}

    def offload(
        self,
        engine: Engine,
        include: Container[OffloadStateTypeEnum] | None,
        device: str,
        pin_memory: bool,
        non_blocking: bool,
        moves: frozenset[str] = frozenset({"cuda", "xpu"}),
    ) -> None:
        """Move states to host memory. A storage is moved if all kinds of state in it are.

        Args:
            engine: the engine.
            include: the kinds; None: all.
            device: ``cpu``; ``none``: move nothing.
            pin_memory: take pinned memory.
            non_blocking: do not wait for the copies.
            moves: types of the devices from which states are moved: those that are in host memory stay.

        Raises:
            ValueError: another device.
        """
        if device == OffloadDeviceEnum.none:
            return
        if device != OffloadDeviceEnum.cpu:
            raise ValueError(f"offload_states(device={str(device)!r}): states can move only to host memory: give 'cpu'")
        chosen = {kind for kind in KINDS if include is None or kind in include} | self.kinds
        staying = {_id(tensor) for kind in KINDS if kind not in chosen for tensor in tensors_of(engine, kind)}
        for storage in _storages(tensor for kind in KINDS if kind in chosen for tensor in tensors_of(engine, kind)):
            if storage_id(storage) in staying or storage_id(storage) in self._held or storage.device.type not in moves:
                continue
            values = _bytes(storage)
            kept = torch.empty_like(values, device="cpu", pin_memory=pin_memory and storage.device.type == "cuda")
            kept.copy_(values, non_blocking=non_blocking)
            self._held[storage_id(storage)] = (storage, kept)
        if non_blocking and self._held:
            engine.grid.synchronize()  # before the memory is another tensor's
        for storage, _ in self._held.values():
            storage.resize_(0)
        self.kinds = chosen

    def reload(self, non_blocking: bool) -> None:
        """Move all states back."""
        for storage, kept in self._held.values():
            storage.resize_(kept.numel())
            _bytes(storage).copy_(kept, non_blocking=non_blocking)
        self._held.clear()
        self.kinds.clear()

    def holds(self, tensor: Tensor) -> bool:
        """Return True if a tensor's storage was emptied."""
        return _id(tensor) in self._held

    def require_here(self, call: str, *kinds: str) -> None:
        """Check that states which a call needs were not moved.

        Raises:
            AgreedError: they were. Every rank raises it, as every rank has moved them.
        """
        missing = [kind for kind in KINDS if kind in self.kinds and (not kinds or kind in kinds)]
        if missing:
            raise AgreedError(
                f"{call} was called after offload_states, which has moved {', '.join(missing)} to host memory: call "
                "engine.reload_states() first"
            )


def _id(tensor: Tensor) -> int:
    return storage_id(tensor.untyped_storage())


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of tensors, each once, without empty ones."""
    storages = {_id(tensor): tensor.untyped_storage() for tensor in tensors}
    return [storage for storage in storages.values() if storage.size()]


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
