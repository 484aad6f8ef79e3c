"""What compressors of gradients have in common: the steps they count, what they keep, and the sum of the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..grid import Axis, Grid, Pending
from .compression import Exchange
from .mode import Managed

if TYPE_CHECKING:
    from .buckets import Bucket


class Place(NamedTuple):
    """A parameter in its bucket: elements ``start`` to ``stop`` of the bucket's number ``bucket``."""

    bucket: int
    member: Managed
    start: int
    stop: int

    def of(self, flats: Sequence[Tensor]) -> Tensor:
        """Its elements, (numel,), of flat tensors, one a bucket: a view."""
        return flats[self.bucket][self.start : self.stop]

    @property
    def matrix(self) -> tuple[int, int]:
        """Its shape on this rank with all dims but the first joined."""
        rows = self.member.parameter.shape[0]
        return rows, (self.stop - self.start) // rows if rows else 0

    @property
    def whole(self) -> bool:
        """Whether every tensor rank holds all of it."""
        return not self.member.layout.sharded


class Kept(NamedTuple):
    """A tensor that is alike on every replica, and no parameter's shape: ``key`` says which of a parameter's."""

    key: str
    member: Managed
    value: Tensor


class Compressor:
    """An ``Exchange`` that counts its steps. It compresses tensors of two dims and more, and sums the others.

    Args:
        grid: whose data axis the replicas lie on.
        buckets: the trained ones.

    Attributes:
        axis, device: of the replicas.
        steps: that it has made.
    """

    def __init__(self, grid: Grid, buckets: Sequence[Bucket]) -> None:
        self.axis, self.device, self.steps = grid.data, grid.device, 0

    def gradients(self, buckets: Sequence[Bucket]) -> None:
        """See ``Exchange``."""
        raise NotImplementedError

    def state(self) -> Mapping[str, Sequence[Tensor]]:
        """See ``Exchange``. A bucket of which nothing is compressed has an empty tensor."""
        return {}

    def kept(self) -> Iterator[Kept]:
        """What it keeps beside: tensors of other shapes, for checkpoints, to be written to as well."""
        yield from ()

    def formula(self) -> float:
        """Bytes that the step before sent from this rank over the data axis, on paper."""
        raise NotImplementedError


def places(buckets: Sequence[Bucket]) -> list[Place]:
    """The parameters of all buckets."""
    return [
        Place(number, member, slot.start, slot.stop)
        for number, bucket in enumerate(buckets)
        for slot, member in zip(bucket.flat.slots, bucket.members, strict=True)
    ]


def wide(dtype: torch.dtype) -> torch.dtype:
    """What residuals are kept in: a dtype that small numbers can be added up in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def rooms(buckets: Sequence[Bucket], chosen: Sequence[Place]) -> list[Tensor]:
    """Zeros, one flat tensor a bucket; empty where nothing of it is chosen."""
    some = {place.bucket for place in chosen}
    return [
        torch.zeros(
            bucket.flat.numel if number in some else 0,
            dtype=wide(bucket.owned_gradient.dtype),
            device=bucket.weights.device,
        )
        for number, bucket in enumerate(buckets)
    ]


def flats(buckets: Sequence[Bucket]) -> list[Tensor]:
    """The buckets' gradients."""
    found = [bucket.gradients for bucket in buckets]
    assert all(gradients is not None for gradients in found)
    return found  # type: ignore[return-value]


def moved(buckets: Sequence[Bucket]) -> set[Tensor]:
    """The parameters whose whole gradients are not all zero: by what is left of steps before, if by nothing else."""
    own = flats(buckets)
    return {place.member.parameter for place in places(buckets) if bool(place.of(own).any())}


class Kind(NamedTuple):
    """What may travel in one message: of one dtype, summed in one dtype, and of a tie nothing else.

    Where a ring begins to add an element up depends on where it lies in the message, and with it the last bit; a tie's
    weights must be the same on all its stages, whatever else these have.
    """

    dtype: torch.dtype
    communicate: torch.dtype
    tie: int | None

    @classmethod
    def of(cls, buckets: Sequence[Bucket], number: int) -> Kind:
        """That of the bucket of this number."""
        bucket = buckets[number]
        return cls(bucket.owned_gradient.dtype, bucket.communicate, None if bucket.tie is None else number)


class Rest:
    """The plain sum over the replicas of what is not compressed.

    Buckets of which nothing is are summed as they would be without a compressor: in stage 1 the owned range alone.
    What is left of the others travels together, as ``Kind`` allows.

    Args:
        axis: the data axis.
        buckets: the trained ones.
        compressed: what is left out.
    """

    def __init__(self, axis: Axis, buckets: Sequence[Bucket], compressed: Collection[Place]) -> None:
        self._axis = axis
        some, out = {place.bucket for place in compressed}, set(compressed)
        self._whole = [bucket for number, bucket in enumerate(buckets) if number not in some]
        self._parts: dict[Kind, list[Place]] = {}
        for place in places(buckets):
            if place.bucket in some and place not in out:
                self._parts.setdefault(Kind.of(buckets, place.bucket), []).append(place)
        self._under_way: list[Pending] = []
        self._flat: list[tuple[list[Place], Tensor]] = []

    def start(self, gradients: Sequence[Tensor]) -> None:
        """Start the sums."""
        if self._axis.size == 1:
            return
        self._under_way = [bucket.sum() for bucket in self._whole]
        for kind, parts in self._parts.items():
            flat = torch.cat([place.of(gradients) for place in parts]).to(kind.communicate)
            self._flat.append((parts, flat))
            self._under_way.append(self._axis.all_reduce(flat, async_op=True))

    def finish(self, gradients: Sequence[Tensor]) -> None:
        """Wait for them."""
        for pending in self._under_way:
            pending.wait()
        for parts, flat in self._flat:
            for place, summed in zip(parts, flat.split([p.stop - p.start for p in parts]), strict=True):
                place.of(gradients).copy_(summed)
        self._under_way, self._flat = [], []

    def formula(self) -> float:
        """Bytes that it sends from this rank: Rajbhandari et al. 2020, section 7."""
        total = 0.0
        for bucket in self._whole:
            scattered = bucket.owned != (0, bucket.flat.numel)
            total += bucket.flat.numel * bucket.communicate.itemsize * (1 if scattered else 2)
        for kind, parts in self._parts.items():
            total += 2 * sum(place.stop - place.start for place in parts) * kind.communicate.itemsize
        return total * (self._axis.size - 1) / self._axis.size


def kept_by(exchange: Exchange) -> dict[str, Any]:
    """What an exchange keeps, this replica's own: copies, for ``torch.save``."""
    found: dict[str, Any] = {"state": {key: [t.clone() for t in flat] for key, flat in exchange.state().items()}}
    if isinstance(exchange, Compressor):
        found["steps"] = exchange.steps
        found["kept"] = [(kept.key, kept.member.layout.name, kept.value.clone()) for kept in exchange.kept()]
    return found


def give_back(exchange: Exchange, saved: Mapping[str, Any] | None) -> None:
    """Let it go on with what ``kept_by`` returned.

    Raises:
        ValueError: that was of another exchange, or of other buckets.
    """
    now = kept_by(exchange)
    if saved is None or _shapes(saved) != _shapes(now):
        theirs = "none" if saved is None else "of other tensors"
        raise ValueError(f"the state that compression keeps is {theirs} there: make the optimizer as it was then")
    for key, flat in exchange.state().items():
        for tensor, value in zip(flat, saved["state"][key], strict=True):
            tensor.copy_(value)
    if isinstance(exchange, Compressor):
        exchange.steps = saved["steps"]
        for kept, (_, _, value) in zip(exchange.kept(), saved["kept"], strict=True):
            kept.value.copy_(value)


def _shapes(kept: Mapping[str, Any]) -> Any:
    state = {key: [t.shape for t in flat] for key, flat in kept["state"].items()}
    return state, [(key, name, value.shape) for key, name, value in kept.get("kept", ())]


def packed(numbers: Tensor, values: Tensor) -> Tensor:
    """Numbers, int32, and values of any dtype of two bytes and more, as one message: flat, int32."""
    if values.numel() * values.element_size() % 4:
        values = torch.cat([values, values.new_zeros(1)])
    parts = [values.view(torch.int32), numbers]
    if values.element_size() == 8 and numbers.numel() % 2:  # the next one's values must begin on a multiple of theirs
        parts.append(numbers.new_zeros(1))
    return torch.cat(parts)


def unpacked(message: Tensor, count: int, values: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``count`` numbers and so many values of a packed message."""
    start = -(-values * dtype.itemsize // 4)
    return message[start : start + count], message[:start].view(dtype)[:values]


def packed_bytes(count: int, values: int, dtype: torch.dtype) -> int:
    """Of such a message."""
    size = -(-values * dtype.itemsize // 4) + count
    return 4 * (size + size % 2 if dtype.itemsize == 8 else size)
