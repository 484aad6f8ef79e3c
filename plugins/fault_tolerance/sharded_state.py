"""Optimizer state that is sharded over replicas, with copies: the step on parts, and parts that move (ZeRO stage 1).

Each rank cuts the range that it owns within its replica among the ranks at its place of the other replicas. All of them
have the summed gradients, so a replica that holds a copy of a part keeps it up to date by the same step, and no copy is
sent. Then the new weights are gathered. If the owner of a part is lost, weights and state come from a copy.

step      own part, then copies, which lie in host memory and pass through the device
prepare   before the sum of a round: gather the weights of the last step, move state to the cut of the present one
adopt     after the meeting in which the step is taken: the moved state takes the place of the last
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...base.errors import AgreedError
from ...base.json_values import decode, encode
from ...base.threads import BackgroundCall
from ...zero.bucket import Bucket
from ...zero.data_axis import ZeroDataAxis
from ...zero.optimizer_state import is_elementwise, is_number
from ...zero.state_shards import state_number
from .peer_state import packed, receive_state, send_state
from .replica_group import ReplicaGroup
from .shard_cut import ShardCut, Span

_MASTER = ""  # key of the master weights among the tensors of a fragment


@dataclass
class _StatePart:
    """Master weights and optimizer state of elements ``start`` to ``stop`` of the owned range of a bucket.

    Attributes:
        start, stop: the elements.
        own: True if this replica owns them, False if they are a copy.
        master: their master weights; a view of the bucket's weights, unless these are in another dtype.
        state: the optimizer's state of ``master``.
    """

    start: int
    stop: int
    own: bool
    master: nn.Parameter
    state: dict[str, Any] = field(default_factory=dict)


class _Fragment(NamedTuple):
    """Elements ``start`` to ``stop`` of a bucket's state: tensors by key, and numbers, encoded for JSON."""

    start: int
    stop: int
    tensors: dict[str, Tensor]
    numbers: dict[str, Any]


_StateParts = dict[tuple[int, int], _StatePart]  # (number of the bucket, part) -> piece
_Wanted = Mapping[str, Mapping[int, Sequence[Span]]]  # replica -> number of the bucket -> spans


class ReplicaShards:
    """Master weights and optimizer state of this rank, sharded over the ranks at its place of all replicas.

    Before the first round each replica has the whole state, from a checkpoint or from a peer.

    Args:
        data_axis: the data axis of this replica, with its optimizer.
        name: this replica's name.
        copies: number of further replicas that hold each part.

    Attributes:
        cut: the cut by which this replica holds parts; None: its state is whole.
    """

    def __init__(self, data_axis: ZeroDataAxis, name: str, copies: int) -> None:
        self.name, self.copies = name, copies
        self.cut: ShardCut | None = None
        self._optimizer = data_axis.stepper.optimizer
        self._buckets = [bucket for bucket in data_axis.buckets if bucket.trained]
        self._apart = [bucket.master_is_copy for bucket in self._buckets]
        self._pieces: _StateParts = {}
        self._next: tuple[ShardCut, _StateParts] | None = None
        self._is_whole = True

    def of(self, names: Sequence[str]) -> ShardCut:
        """Return the cut among replicas."""
        return ShardCut(tuple(names), self.copies)

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of the copies, and of own master weights, which are not the bucket's."""
        own = [piece.master for (number, _), piece in self._pieces.items() if piece.own and self._apart[number]]
        copies = [
            each.nbytes
            for (number, _), piece in self._pieces.items()
            if not piece.own
            for each in self._tensors(number, piece, piece.start, piece.stop).values()
        ]
        found = {"copies": sum(copies)} if self.copies else {}
        return found | ({"masters": sum(each.nbytes for each in own)} if own else {})

    # ------------------------------------------------------------------------------------------ a step

    def step(self, without: Collection[Tensor]) -> None:
        """Step the parts that this replica holds, with the gradients of the buckets, and write the new weights.

        Args:
            without: parameters that had no gradient on any replica.

        Raises:
            AgreedError: there is such a parameter, or one that was frozen after the engine was made.
        """
        for bucket in self._buckets:
            standing = bucket.standing(without)
            names = [member.layout.name for member in bucket.members if member.parameter in standing]
            if names:
                raise AgreedError(
                    f"{names[0]} had no gradient on any replica, or was frozen after the engine was made, and "
                    "fault_tolerance.zero steps whole parts of its bucket: freeze it before, or leave "
                    "fault_tolerance.zero out"
                )
        self._step([(number, piece) for (number, _), piece in self._pieces.items() if piece.own])
        for number in range(len(self._buckets)):  # one after the other: copies take memory of the device
            self._step([(at, piece) for (at, _), piece in self._pieces.items() if at == number and not piece.own])
        self._show()

    def _step(self, pieces: Sequence[tuple[int, _StatePart]]) -> None:
        """Step some pieces at once."""
        groups: Any = self._optimizer.param_groups
        for group in groups:
            group["params"] = []
        stepped = []
        for number, piece in pieces:
            bucket, master = self._buckets[number], piece.master
            written = bucket.shard[piece.start : piece.stop]
            if self._apart[number]:  # a weight that was written takes the place of a master that differs from it
                weight = written.to(master.device)
                same = master.detach().to(weight.dtype) == weight
                master.data.copy_(torch.where(same, master.detach(), weight.to(master.dtype)))
            device = bucket.owned_gradient.device
            if master.device != device:
                master = nn.Parameter(master.detach().to(device))
            master.grad = bucket.owned_gradient[piece.start : piece.stop]
            self._optimizer.state[master] = _placed(piece.state, master, device)
            groups[bucket.group]["params"].append(master)
            stepped.append(master)
        if not stepped:
            return
        self._optimizer.step()
        for (number, piece), master in zip(pieces, stepped, strict=True):
            master.grad = None
            home = _home(piece.own, self._buckets[number])
            piece.state = _placed(self._optimizer.state.pop(master), master, home)
            if self._apart[number]:
                self._buckets[number].shard[piece.start : piece.stop].copy_(master.detach())
            if master is not piece.master:
                piece.master.data.copy_(master.detach())

    def _show(self) -> None:
        """Let the optimizer have the own pieces, for who reads its state, and nothing else."""
        groups: Any = self._optimizer.param_groups
        self._optimizer.state.clear()
        for group in groups:
            group["params"] = []
        for (number, _), piece in self._pieces.items():
            if piece.own:
                groups[self._buckets[number].group]["params"].append(piece.master)
                self._optimizer.state[piece.master] = piece.state

    # ------------------------------------------------------------------------------------------ parts that move

    def prepare(
        self, group: ReplicaGroup, names: Sequence[str], owners: ShardCut, keepers: Sequence[str], cut: ShardCut
    ) -> None:
        """Gather the weights of the last step, and move the state to the cut of the present one. Collective.

        What this replica held before is kept until ``adopt``, so that a failure loses nothing.

        Args:
            group: the group of the round.
            names: the replicas of the group, in its order.
            owners: cut of the last step; without names if all replicas have the whole state.
            keepers: the replicas that hold their parts of it.
            cut: cut of the present step.

        Raises:
            RuntimeError: another replica is gone, or did not come within the time limit.
        """
        if not owners.names:
            self._next = cut, self._cut_whole(cut)
            return
        self.gather_weights(group, names, owners, keepers)
        if owners == cut:
            self._next = cut, self._pieces  # none, in a newcomer
            return
        wanted = {
            name: {number: [cut.span(part, bucket.owned_numel) for part in cut.parts(name)]
                   for number, bucket in enumerate(self._buckets)}
            for name in cut.names
            if name in names
        }  # fmt: skip
        found = self._exchange(group, names, owners, keepers, wanted)
        made = ((number, part, span) for number, part, span in self._spans(cut))
        self._next = (
            cut,
            {(number, part): self._assemble(number, part, span, cut, found[number]) for number, part, span in made},
        )

    def adopt(self) -> None:
        """Take the moved state in the place of the last."""
        if self._next is None:
            return
        self.cut, self._pieces = self._next
        self._next = None
        self.drop_whole()

    def forget(self) -> None:
        """Hold nothing: this replica waits for the state of the others."""
        self.cut, self._pieces, self._next = self.of(()), {}, None
        self.drop_whole()

    @torch.no_grad()
    def gather_weights(self, group: ReplicaGroup, names: Sequence[str], cut: ShardCut, keepers: Sequence[str]) -> None:
        """Gather the weights of this rank's ranges from those that have stepped them. Collective.

        Each rank sends the parts for which it is the source, in slots of equal size.
        """
        if group.size == 1:
            return
        slots: dict[str, list[int]] = defaultdict(list)
        for part, source in enumerate(cut.sources(keepers)):
            slots[source].append(part)
        most = max(len(parts) for parts in slots.values())
        for bucket in self._buckets:
            spans = [cut.span(part, bucket.owned_numel) for part in range(len(cut.names))]
            size = max(stop - start for start, stop in spans)
            mine = torch.zeros(most, size, dtype=bucket.shard.dtype)
            for row, part in zip(mine, slots[self.name], strict=False):
                start, stop = spans[part]
                row[: stop - start] = bucket.shard[start:stop]
            found = group.gather(mine.view(-1)).view(group.size, most, size)
            for name, parts in slots.items():
                for place, part in enumerate(parts if name != self.name else ()):
                    start, stop = spans[part]
                    bucket.shard[start:stop] = found[names.index(name), place, : stop - start].to(bucket.shard.device)

    def gather_whole(
        self, group: ReplicaGroup, names: Sequence[str], members: Sequence[str], keepers: Sequence[str]
    ) -> None:
        """Give each member the whole state, until the next step begins. Collective over the members.

        Raises:
            RuntimeError: another replica is gone, or did not come within the time limit.
        """
        if self._is_whole or self.cut is None:
            return
        if not self.cut.names:
            raise RuntimeError("this replica has no state yet")
        spans = {number: [(0, bucket.owned_numel)] for number, bucket in enumerate(self._buckets)}
        found = self._exchange(group, names, self.cut, keepers, dict.fromkeys(members, spans))
        for number, bucket in enumerate(self._buckets):
            assert bucket.master is not None
            piece = self._joined(number, (0, bucket.owned_numel), found[number], bucket.shard.device)
            if self._apart[number]:
                bucket.master.data = piece.master.data
            self._optimizer.state[bucket.master] = piece.state
        self._is_whole = True

    def take_whole(self) -> None:
        """Cut the whole state anew, after a checkpoint was loaded into it."""
        if self.cut is not None:
            self._pieces = self._cut_whole(self.cut)
            if self._next is not None:
                self._next = self._next[0], self._cut_whole(self._next[0])
            self.drop_whole()

    def drop_whole(self) -> None:
        """Hold the own parts and the copies alone."""
        if not self._is_whole or self.cut is None:
            return
        self._is_whole = False
        for bucket, apart in zip(self._buckets, self._apart, strict=True):
            assert bucket.master is not None
            if apart:
                bucket.put_master_away()
            bucket.master.grad = None
        self._show()

    def _cut_whole(self, cut: ShardCut) -> _StateParts:
        """Return the pieces that this replica holds, cut out of the whole state."""
        found = {}
        for number, part, (start, stop) in self._spans(cut):
            bucket = self._buckets[number]
            assert bucket.master is not None
            state = self._optimizer.state.get(bucket.master, {})
            whole = _StatePart(0, bucket.owned_numel, True, bucket.master, state)
            given = _Fragment(start, stop, self._tensors(number, whole, start, stop), _numbers(whole))
            found[number, part] = self._assemble(number, part, (start, stop), cut, [given])
        return found

    def _spans(self, cut: ShardCut) -> Iterator[tuple[int, int, Span]]:
        """Yield (number of the bucket, part, span) of what this replica holds by a cut."""
        for number, bucket in enumerate(self._buckets):
            for part in cut.parts(self.name):
                start, stop = cut.span(part, bucket.owned_numel)
                if start < stop:
                    yield number, part, (start, stop)

    def _assemble(
        self, number: int, part: int, span: Span, cut: ShardCut, fragments: Sequence[_Fragment]
    ) -> _StatePart:
        own = cut.parts(self.name)[0] == part
        piece = self._joined(number, span, fragments, _home(own, self._buckets[number]))
        piece.own = own
        return piece

    def _joined(self, number: int, span: Span, fragments: Sequence[_Fragment], device: torch.device) -> _StatePart:
        """Return a piece, joined from fragments, on a device."""
        bucket, (start, stop) = self._buckets[number], span
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, Any] = {}
        count = 0
        for given in fragments:
            low, high = max(start, given.start), min(stop, given.stop)
            if low >= high:
                continue
            numbers, count = given.numbers, count + high - low
            for key, value in given.tensors.items():
                if key not in tensors:
                    tensors[key] = torch.empty(stop - start, dtype=value.dtype, device=device)
                tensors[key][low - start : high - start] = value[low - given.start : high - given.start]
        if count != stop - start:
            raise RuntimeError(f"{count} of {stop - start} elements of the optimizer state of bucket {number} came")
        master = tensors.pop(_MASTER) if self._apart[number] else bucket.shard[start:stop]
        piece = _StatePart(start, stop, True, nn.Parameter(master), dict(tensors))
        group = self._optimizer.param_groups[bucket.group or 0]
        decoded: Mapping[str, Any] = decode(numbers)
        piece.state |= {key: state_number(key, value, piece.master, group) for key, value in decoded.items()}
        return piece

    def _tensors(self, number: int, piece: _StatePart, start: int, stop: int) -> dict[str, Tensor]:
        """Return the tensors of elements of a piece, which are views: master weights apart, and optimizer state."""
        found = {_MASTER: piece.master.detach()} if self._apart[number] else {}
        found |= {k: v for k, v in piece.state.items() if is_elementwise(v, piece.master)}
        return {key: value[start - piece.start : stop - piece.start] for key, value in found.items()}

    def _exchange(
        self, group: ReplicaGroup, names: Sequence[str], cut: ShardCut, keepers: Sequence[str], wanted: _Wanted
    ) -> dict[int, list[_Fragment]]:
        """Send to other replicas the state that they want, and return what this one wants. Collective over ``wanted``.

        Targets are served, and sources are awaited, in the order of the group: so no two wait for each other.

        Returns:
            Number of the bucket -> fragments.
        """
        given: dict[str, list[tuple[int, _Fragment]]] = defaultdict(list)
        sources = set()
        for number, bucket in enumerate(self._buckets):
            spans = {name: each.get(number, ()) for name, each in wanted.items()}
            for move in cut.moves(keepers, spans, bucket.owned_numel):
                if move.source == self.name:
                    given[move.target].append((number, self._fragment(number, cut, move.start, move.stop)))
                elif move.target == self.name:
                    sources.add(move.source)

        def serve() -> None:
            try:
                for target in sorted(set(given) - {self.name}, key=names.index):
                    send_state(*_packed(given[target]), group, names.index(target))
            except BaseException:
                group.abort()  # else this replica would wait for the others, which wait for it
                raise

        served = BackgroundCall(serve, "triax shards")
        found: dict[int, list[_Fragment]] = defaultdict(list)
        try:
            for number, fragment in given[self.name]:
                found[number].append(fragment)
            for source in sorted(sources, key=names.index):
                for number, fragment in _unpacked(*receive_state(group, names.index(source))):
                    found[number].append(fragment)
        except BaseException as error:
            group.abort()  # so that this replica's thread and the others do not wait for it
            if isinstance(error, (RuntimeError, OSError)):
                served.result()  # may raise the cause
            raise
        served.result()
        return found

    def _fragment(self, number: int, cut: ShardCut, start: int, stop: int) -> _Fragment:
        """Return elements of the state that this replica holds by a cut."""
        numel = self._buckets[number].owned_numel
        part = next(p for p in cut.parts(self.name) if cut.span(p, numel)[0] <= start < cut.span(p, numel)[1])
        piece = self._pieces[number, part]
        return _Fragment(start, stop, self._tensors(number, piece, start, stop), _numbers(piece))


def _home(own: bool, bucket: Bucket) -> torch.device:
    """Return the device on which a piece's state lies between two steps."""
    return bucket.shard.device if own else torch.device("cpu")


def _placed(state: Mapping[str, Any], master: Tensor, device: torch.device) -> dict[str, Any]:
    """Return an optimizer's state with its elementwise tensors on a device."""
    return {key: value.to(device) if is_elementwise(value, master) else value for key, value in state.items()}


def _numbers(piece: _StatePart) -> dict[str, Any]:
    """Return the values of a piece's state that are one number, for JSON."""
    found = {key: value for key, value in piece.state.items() if is_number(value, piece.master)}
    return dict(encode(found, None, "the optimizer's state"))


def _packed(fragments: Sequence[tuple[int, _Fragment]]) -> tuple[Tensor, list[Tensor]]:
    """Return a header and tensors for ``send_state``."""
    rows = [(number, each.start, each.stop, [*each.tensors], each.numbers) for number, each in fragments]
    return packed({"rows": rows}, [tensor for _, each in fragments for tensor in each.tensors.values()])


def _unpacked(header: Mapping[str, Any], tensors: Sequence[Tensor]) -> Iterator[tuple[int, _Fragment]]:
    """Yield what ``_packed`` was given."""
    following = iter(tensors)
    for number, start, stop, keys, numbers in header["rows"]:
        yield number, _Fragment(start, stop, {key: next(following) for key in keys}, numbers)
