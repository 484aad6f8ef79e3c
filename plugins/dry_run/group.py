"""Process group of a dry run: it sends nothing, records what it is asked for, and exchanges small values.

Unlike torch's fake process group it leaves no received value to chance. Each collective and message is recorded, with
its size, dtype and place in the program. Small values (flags, the schema of a message) are exchanged with the ranks
that run at the same time, or ran before. What else is received has these values:

| operation | values |
|---|---|
| collective to which every rank gives a part | as if every rank gave what this one gives |
| broadcast, scatter from another rank | those of this rank's own tensor, which is taken to be equal already |
| receive, uneven all-to-all | zeros on a CPU, the stand-in on the meta device |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...base.torch_private import group_names
from ...grid.topology import Topology
from .exchange import NOT_RUN, HangError, RankSocket
from .places import calling_place
from .values import known, set_known

BACKEND = "triax_dry"
_SMALL = 4096  # elements of the largest tensor whose values are exchanged, besides bytes
_BYTES = 2**20
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class RecordedOperation(NamedTuple):
    """One collective or message of one rank.

    Attributes:
        group: index into ``Recorder.groups``.
        kind: e.g. ``all_reduce sum``, ``broadcast from 0``, ``send``.
        size: elements of this rank's tensor. -1 where ranks may send different numbers.
        dtype: name of the dtype; empty for a barrier.
        peer, tag: of a message: rank of the other end in the group, and its tag. Else -1.
        op: the op of the pipeline program, or the call of the engine, in which it was made.
        place: the place in triax that made it, and the user's place from which triax was called.
    """

    group: int
    kind: str
    size: int
    dtype: str
    peer: int
    tag: int
    op: str
    place: str


class Recorder:
    """Record of one rank's operations, and its exchange with the ranks that run at the same time.

    Attributes:
        groups: the global ranks of each process group, and how many groups of the same ranks were made before it.
        operations: collectives and messages in the order in which they began.
        topology: the grid, once it is known.
        grids: the grids that the script made.
        column: ranks that run at the same time: this rank's pipeline.
        microbatches: of a step, and how many of them are run; None: all.
    """

    def __init__(self, rank: int, size: int, link: RankSocket) -> None:
        self.rank, self.size, self.link = rank, size, link
        self.groups: list[tuple[tuple[int, ...], int]] = []
        self.operations: list[RecordedOperation] = []
        self.topology: Topology | None = None
        self.grids: list[Any] = []
        self.microbatches: tuple[int, int] | None = None
        self.column: tuple[int, ...] = (rank,)  # ranks that run at the same time

    def announce(self, topology: Topology) -> None:
        """Take the grid that this rank asks for. The other stages of its pipeline are started now."""
        if self.topology is None:
            self.topology = topology
            self.column = tuple(column(topology, self.rank))
            self.link.send({"kind": "grid", "axes": topology.axes, "expert": topology.expert})

    def note(
        self, group: int, kind: str, tensor: Tensor | None, peer: int = -1, tag: int = -1, even: bool = True
    ) -> None:
        """Record an operation."""
        inner, outer = calling_place()
        activity = self.grids[-1].activity.what if self.grids else None
        size = -1 if tensor is None or not even else tensor.numel()
        dtype = "" if tensor is None else str(tensor.dtype).removeprefix("torch.")
        place = f"{outer or inner}{f' through {inner}' if inner and outer else ''}"
        self.operations.append(RecordedOperation(group, kind, size, dtype, peer, tag, str(activity or ""), place))


def column(topology: Topology, rank: int) -> list[int]:
    """Return the ranks of a rank's pipeline: those with its coordinates on all axes but pipe."""
    fixed = {name: at for name, at in topology.coordinate(rank)._asdict().items() if name != "pipe"}
    return topology.ranks(**fixed)


class RecordedWork:
    """Handle of a recorded operation. ``wait`` runs what has to be done with the values of other ranks."""

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self._finish = finish

    def wait(self, timeout: Any = None) -> bool:
        """Finish the operation."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True

    def is_completed(self) -> bool:
        """Return True, after finishing the operation."""
        return self.wait()

    def is_success(self) -> bool:
        """Return True, after finishing the operation."""
        return self.wait()

    def synchronize(self) -> None:
        """Finish the operation."""
        self.wait()

    def result(self) -> list[Tensor]:
        """Return no tensors: the arguments have the result."""
        return []

    def get_future(self) -> Any:
        """Return a finished future."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(None)
        return future


_Group: Any = dist.ProcessGroup  # its methods are overloaded: with options, or with their values


class RecordingGroup(_Group):
    """Process group that records its operations.

    Args:
        recorder: this rank's record.
        ranks: global ranks of the group.
    """

    def __init__(self, recorder: Recorder, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self._me = self._ranks.index(recorder.rank)
        super().__init__(self._me, len(self._ranks))
        self._recorder = recorder
        self._number = len(recorder.groups)
        same = sum(1 for other, _ in recorder.groups if other == self._ranks)
        recorder.groups.append((self._ranks, same))
        self._key = f"{hash(self._ranks)}.{same}"
        self._counts: dict[str, int] = {}

    # ------------------------------------------------------------------------------------- what a grid tells

    def announce(self, topology: Topology) -> None:
        """Take the grid that this rank asks for, before its first collective."""
        self._recorder.announce(topology)

    def made(self, grid: Any) -> None:
        """Take the finished ``Grid`` of this rank."""
        self._recorder.grids.append(grid)

    def gather_texts(self, text: bytes) -> list[bytes]:
        """Return the texts of all ranks, in rank order."""
        self._note("all_gather_json", None)
        joined = self._join("all_gather_json", torch.tensor(list(text), dtype=torch.uint8))
        return [bytes([] if found is None else found.tolist()) for found in joined()]

    @property
    def number(self) -> int:
        """Index of this group in ``Recorder.groups``."""
        return self._number

    @property
    def _device_types(self) -> list[torch.device]:  # read by Axis.all_gather_json, and by torch's barrier
        return [torch.device("cpu")]

    @property
    def group_name(self) -> str:
        """Name under which torch knows the group."""
        return group_names()[self]

    def size(self) -> int:
        """Return the number of ranks."""
        return len(self._ranks)

    def rank(self) -> int:
        """Return this rank's place in the group."""
        return self._me

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return BACKEND

    # ---------------------------------------------------------------------------------------------- collectives

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> RecordedWork:
        """Record all-reduces."""
        op = _reduction(opts)
        return _all([self._reduce_one(f"all_reduce {op}", tensor, op) for tensor in tensors])

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> RecordedWork:
        """Record all-reduces."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> RecordedWork:
        """Record reductions to one rank."""
        return _all([self._reduce_one(f"reduce {_reduction(opts)}", tensor, _reduction(opts)) for tensor in tensors])

    def _reduce_one(self, kind: str, tensor: Tensor, op: str) -> RecordedWork:
        self._note(kind, tensor)
        values = known(tensor)
        mine = None if values is None else values.detach().clone()
        if tensor.numel() > _SMALL:
            return RecordedWork(lambda: set_known(tensor, self._combined(op, [mine] * self.size())))
        joined = self._join(kind, mine)
        return RecordedWork(lambda: set_known(tensor, self._combined(op, joined())))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> RecordedWork:
        """Record broadcasts; the source's values arrive if they are small."""
        source = opts.rootRank if opts is not None else 0
        return _all([self._broadcast_one(tensor, source) for tensor in tensors])

    def _broadcast_one(self, tensor: Tensor, source: int) -> RecordedWork:
        self._note(f"broadcast from {source}", tensor)
        key = self._next("broadcast")
        if not _is_small(tensor):
            return RecordedWork()
        if source == self._me:
            self._post(key, tensor)
            return RecordedWork()
        return RecordedWork(lambda: self._get(key, tensor, source, "a broadcast"))

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> RecordedWork:
        """Record an all-gather."""
        self._note("all_gather", tensor)
        self._require(output.numel() == tensor.numel() * self.size(), "all_gather", output, tensor)
        if output.is_meta:
            values = known(tensor)
            set_known(output, None if values is None else torch.cat([values.detach().reshape(-1)] * self.size()))
            return RecordedWork()
        return self._gathered(list(output.view(self.size(), -1)), tensor)

    _allgather_base = all_gather_single  # its name before torch 2.13

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> RecordedWork:
        """Record all-gathers into lists."""
        works = []
        for rows, tensor in zip(outputs, tensors, strict=True):
            self._note("all_gather", tensor)
            works.append(self._gathered(rows, tensor))
        return _all(works)

    def _gathered(self, rows: list[Tensor], tensor: Tensor) -> RecordedWork:
        small = _is_small(tensor) and rows[0].is_cpu
        joined = self._join("all_gather", tensor) if small else lambda: [known(tensor)] * len(rows)

        def fill() -> None:
            for row, value in zip(rows, joined(), strict=True):
                set_known(row, value)

        return RecordedWork(fill)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = None
    ) -> RecordedWork:
        """Record all-gathers."""
        return _all([self.all_gather_single(o, t, opts) for o, t in zip(outputs, tensors, strict=True)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> RecordedWork:
        """Record a reduce-scatter."""
        self._note(f"reduce_scatter {_reduction(opts)}", tensor)
        self._require(tensor.numel() == output.numel() * self.size(), "reduce_scatter", output, tensor)
        values = known(tensor)
        return self._reduced(output, None if values is None else values.view(self.size(), -1)[self._me], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(self, outputs: list[Tensor], tensors: list[list[Tensor]], opts: Any = None) -> RecordedWork:
        """Record reduce-scatters of lists."""
        for output, parts in zip(outputs, tensors, strict=True):
            self._note(f"reduce_scatter {_reduction(opts)}", parts[0])
            self._reduced(output, known(parts[self._me]), opts)
        return RecordedWork()

    def _reduced(self, output: Tensor, part: Tensor | None, opts: Any) -> RecordedWork:
        """Set the output of a reduce-scatter to the sum of as many equal parts as there are ranks."""
        part = None if part is None else part.detach().clone()
        set_known(output, self._combined(_reduction(opts), [part] * self.size()))
        return RecordedWork()

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = None
    ) -> RecordedWork:
        """Record reduce-scatters."""
        return _all([self.reduce_scatter_single(o, t, opts) for o, t in zip(outputs, tensors, strict=True)])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, receive: list[int] | None, send: list[int] | None, opts: Any = None
    ) -> RecordedWork:
        """Record an all-to-all."""
        even = len({*(receive or ()), *(send or ())}) < 2
        self._note("all_to_all", tensor, even=even)
        values = known(tensor) if even else None
        if values is not None:  # each rank sends this one what this one sends itself
            parts = values.detach().view(self.size(), -1)
            values = parts[self._me].expand(parts.shape).clone()
        _fill(output, values)
        return RecordedWork()

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = None) -> RecordedWork:
        """Record an all-to-all of lists."""
        self._note("all_to_all", tensors[0], even=False)
        for output in outputs:
            mine = tensors[self._me]
            _fill(output, known(mine) if mine.shape == output.shape else None)
        return RecordedWork()

    def gather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> RecordedWork:
        """Record a gather to one rank."""
        self._note(f"gather to {opts.rootRank}", tensors[0])
        for rows, tensor in zip(outputs, tensors, strict=False):  # no outputs but on the root
            for row in rows:
                set_known(row, known(tensor))
        return RecordedWork()

    def scatter(self, outputs: list[Tensor], tensors: list[list[Tensor]], opts: Any = None) -> RecordedWork:
        """Record a scatter from one rank."""
        self._note(f"scatter from {opts.rootRank}", outputs[0])
        for output, parts in zip(outputs, tensors, strict=False):  # no inputs but on the root
            set_known(output, known(parts[self._me]))
        return RecordedWork()

    def barrier(self, opts: Any = None) -> RecordedWork:
        """Record a barrier, and wait for the ranks that run at the same time."""
        self._note("barrier", None)
        joined = self._join("barrier", None)

        def wait() -> None:
            joined()

        return RecordedWork(wait)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Record a barrier."""
        self.barrier().wait()

    # ------------------------------------------------------------------------------------------------- messages

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> RecordedWork:
        """Record a send; small values reach the other end."""
        for tensor in tensors:
            self._note("send", tensor, to, tag)
            key = self._next(f"{self._me}>{to}.{tag}")
            if _is_small(tensor) and self._ranks[to] in self._recorder.column:
                self._post(key, tensor)
        return RecordedWork()

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> RecordedWork:
        """Record a receive; small values arrive when it is waited for."""
        works = []
        for tensor in tensors:
            self._note("receive", tensor, source, tag)
            key = self._next(f"{source}>{self._me}.{tag}")
            if _is_small(tensor) and self._ranks[source] in self._recorder.column:
                works.append(RecordedWork(partial(self._get, key, tensor, source, "a receive")))
            else:
                works.append(RecordedWork(partial(_fill, tensor, None)))
        return _all(works)

    # --------------------------------------------------------------------------------------------------- values

    def _note(self, kind: str, tensor: Tensor | None, peer: int = -1, tag: int = -1, even: bool = True) -> None:
        self._recorder.note(self._number, kind, tensor, peer, tag, even)

    def _next(self, what: str) -> str:
        """Return a name for the next exchange of this sort, equal on all ranks that take part."""
        count = self._counts[what] = self._counts.get(what, 0) + 1
        return f"{self._key} {what} {count}"

    def _post(self, key: str, tensor: Tensor) -> None:
        values = known(tensor)
        self._recorder.link.send({"kind": "post", "key": key, "value": _encode(values)})

    def _get(self, key: str, tensor: Tensor, source: int, what: str) -> None:
        source = self._ranks[source]
        kind = "get" if source in self._recorder.column else "look"  # wait only for a rank that runs now
        request = {"kind": kind, "key": key, "source": source, "what": self._described(what)}
        answer = self._recorder.link.ask(request)
        if answer == NOT_RUN:
            return
        values = _decode(answer)
        _fill(tensor, values if values is None or values.numel() == tensor.numel() else None)

    def _join(self, kind: str, values: Tensor | None) -> Callable[[], list[Tensor | None]]:
        """Give this rank's values; return a function that waits for the values of all ranks of the group."""
        recorder = self._recorder
        members = [rank for rank in self._ranks if rank in recorder.column]
        key = self._next("join")
        operation = recorder.operations[-1]
        what = [operation.kind, operation.size, operation.dtype]
        value = [what, operation.place, _encode(values)]
        recorder.link.send({"kind": "join", "key": key, "value": value})
        request = {"kind": "members", "key": key, "members": members, "what": self._described(kind)}

        def wait() -> list[Tensor | None]:
            found: dict[int, Tensor | None] = {}
            for rank, (theirs, place, given) in recorder.link.ask(request):
                if theirs == what and (rank in members or kind.startswith("all_reduce")):
                    found[rank] = _decode(given)
                elif rank in members:
                    raise HangError(
                        f"rank {recorder.rank} runs {' '.join(map(str, what))} ({operation.place}), where rank {rank} "
                        f"runs {' '.join(map(str, theirs))} ({place})"
                    )
            by_pipe = {self._pipe(rank): rank for rank in sorted(found, reverse=True)}
            stands = (rank if rank in found else by_pipe.get(self._pipe(rank), recorder.rank) for rank in self._ranks)
            return [found[rank] for rank in stands]

        return wait

    def _pipe(self, rank: int) -> int:
        """Return a rank's place on the pipe axis. Ranks with the same one stand for each other."""
        topology = self._recorder.topology
        return getattr(topology.coordinate(rank), "pipe", 0) if topology is not None else rank

    def _combined(self, op: str, values: list[Tensor | None]) -> Tensor | None:
        """Reduce the values of all ranks. Equal tensors are added once and multiplied."""
        counts: dict[int, tuple[Tensor, int]] = {}
        for value in values:
            if value is None:
                return None
            counts[id(value)] = value, counts.get(id(value), (value, 0))[1] + 1
        pairs = list(counts.values())
        if op in ("max", "min"):
            stacked = torch.stack([value for value, _ in pairs])
            return stacked.amax(0) if op == "max" else stacked.amin(0)
        total = pairs[0][0] * pairs[0][1] if op != "product" else pairs[0][0] ** pairs[0][1]
        for value, count in pairs[1:]:
            total = total * value**count if op == "product" else total + value * count
        return (total / self.size() if op == "avg" else total).to(pairs[0][0].dtype)

    def _require(self, fits: bool, kind: str, output: Tensor, tensor: Tensor) -> None:
        if not fits:
            raise RuntimeError(
                f"{kind} over {self.size()} ranks has an output of {output.numel()} elements for an input of "
                f"{tensor.numel()}: one must be {self.size()} times the other"
            )

    def _described(self, what: str) -> str:
        operation = self._recorder.operations[-1] if self._recorder.operations else None
        place = f" at {operation.place}" if operation is not None and operation.place else ""
        return f"{what} over {len(self._ranks)} ranks{place}"


def _fill(tensor: Tensor, values: Tensor | None) -> None:
    """Set what a rank has received; zeros on a CPU where it is not known."""
    set_known(tensor, torch.zeros_like(tensor) if values is None and not tensor.is_meta else values)


def _is_small(tensor: Tensor) -> bool:
    """Return True if the values of a tensor are exchanged: equal on both ends, which have the same shape and dtype."""
    return tensor.numel() <= (_BYTES if tensor.dtype == torch.uint8 and tensor.is_cpu else _SMALL)


def _reduction(opts: Any) -> str:
    """Return the name of a reduction, e.g. ``sum``."""
    names = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
    found = (name for name in names if opts is None or opts.reduceOp == getattr(dist.ReduceOp, name))
    return next(found, "premul_sum").lower()


def _all(works: list[RecordedWork]) -> RecordedWork:
    """Return a handle of several operations."""

    def wait() -> None:
        for work in works:
            work.wait()

    return works[0] if len(works) == 1 else RecordedWork(wait)


def _encode(values: Tensor | None) -> Any:
    if values is None:
        return None
    flat = values.detach().reshape(-1)
    if flat.dtype == torch.uint8:
        return ["uint8", list(values.shape), bytes(flat.tolist()).hex()]
    if flat.is_complex():
        return None
    return [str(flat.dtype).removeprefix("torch."), list(values.shape), flat.tolist()]


def _decode(value: Any) -> Tensor | None:
    if value is None:
        return None
    dtype, shape, numbers = value
    if dtype == "uint8":
        numbers = list(bytes.fromhex(numbers))
    return torch.tensor(numbers, dtype=_DTYPES[dtype]).view(shape)
