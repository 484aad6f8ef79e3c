"""Collectives of the simulated device by NCCL's rules: streams, one order, and results after ``wait`` alone.

Each communicator has a stream: a thread that runs its operations one after the other, each after a random delay. Two
ranks that begin operations of one communicator in different orders get an error that names both lines. Between two
ranks all messages go through one stream, in order, as tags mean nothing to NCCL.

An operation's output is NaN until ``wait``. At ``wait`` its input must be as it was, and nothing may have been written
into its output. Tensors of the host go through gloo, as with the backend "cpu:gloo,cuda:nccl".
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from support.simulated_device import DEVICE, NAME, on_cpu, place, poison

BACKEND = "simnccl"
_DELAY = 1e-3  # seconds before an operation, at most
_TEXT = 256  # bytes of an operation's description


class Stream:
    """Thread that runs the operations of one communicator, in order.

    Args:
        connect: makes the gloo group that carries them; called in the thread, as NCCL connects at the first operation.
        name: name of the communicator in errors.
    """

    def __init__(self, connect: Callable[[], Any], name: str) -> None:
        self._connect, self._name, self._group = connect, name, None
        self._tasks: queue.SimpleQueue[tuple[Work, Callable[[Any], None]]] = queue.SimpleQueue()
        threading.Thread(target=self._loop, name=f"simulated {name}", daemon=True).start()

    def add(self, work: Work, run: Callable[[Any], None]) -> None:
        """Queue an operation."""
        self._tasks.put((work, run))

    def _loop(self) -> None:
        while True:
            work, run = self._tasks.get()
            try:
                if self._group is None:
                    self._group = self._connect()
                time.sleep(random.uniform(0, _DELAY))
                self._compare(work)
                run(self._group)
            except Exception as error:  # to the rank that waits
                work.error = error
            work.done.set()
            del work, run

    def _compare(self, work: Work) -> None:
        """Raise an error unless all ranks of the communicator run the same operation now."""
        group: Any = self._group
        text = torch.frombuffer(bytearray(work.text.encode()[:_TEXT].ljust(_TEXT)), dtype=torch.uint8)
        texts = [[torch.empty_like(text) for _ in range(group.size())]]
        group.allgather(texts, [text]).wait()
        found = [bytes(each.tolist()).decode().strip() for each in texts[0]]
        kinds = {each.partition(" at ")[0] for each in found}
        if len(kinds) > 1:
            ranks = "; ".join(f"rank {rank} of {self._name} runs {each}" for rank, each in enumerate(found))
            raise RuntimeError(f"NCCL would hang or mix up values: {ranks}")


class Work:
    """An operation under way.

    Args:
        text: what all ranks of the communicator must agree on, and " at " with the line.
        reads, writes: tensors of the device.
        limit: seconds that ``wait`` waits.
    """

    def __init__(self, text: str, reads: Sequence[Tensor], writes: Sequence[Tensor], limit: float) -> None:
        self.text, self.error, self.done = text, None, threading.Event()
        self._limit, self._reads, self._writes = limit, list(reads), list(writes)
        self.inputs = [on_cpu(tensor).clone() for tensor in reads]
        self.outputs = [on_cpu(tensor).clone() for tensor in writes]
        self._ended = False
        for write, tensors in enumerate((reads, writes)):
            for tensor in tensors:
                DEVICE.access(tensor, bool(write))
        self._started = DEVICE.order.clocks[DEVICE.order.current].copy()
        for tensor in writes:
            poison(on_cpu(tensor))
        # As bytes: a copy of a boolean may have others. An input may share memory with the output.
        self._before = [_bytes(on_cpu(tensor)).clone() for tensor in reads]
        self._poisoned = [_bytes(on_cpu(tensor)).clone() for tensor in writes]

    error: Exception | None

    def wait(self, timeout: Any = None) -> bool:
        """Make the results visible to what the device runs from now on."""
        if self._ended:
            return True
        if not self.done.wait(self._limit):
            raise RuntimeError(f"{self.text}: not all ranks of the communicator came to it in {self._limit:g} s")
        self._ended = True
        if self.error is not None:
            raise self.error
        for what, tensors, before in (
            ("the input was changed", self._reads, self._before),
            ("the output was written to", self._writes, self._poisoned),
        ):
            for tensor, seen in zip(tensors, before, strict=True):
                if not torch.equal(_bytes(on_cpu(tensor)), seen):
                    DEVICE.faults.append(f"{what} before wait: {self.text}")
        DEVICE.order.clocks[DEVICE.order.current] |= self._started
        for tensor, value in zip(self._writes, self.outputs, strict=True):
            DEVICE.access(tensor, True)
            on_cpu(tensor).copy_(value)
        self._reads.clear()
        return True

    def is_completed(self) -> bool:
        """Return True if the operation has run; its results are visible after ``wait`` alone."""
        return self.done.is_set()

    is_success = is_completed
    synchronize = wait

    def get_future(self) -> Any:
        """Return a future that has the outputs."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._writes)
        return future

    def __del__(self) -> None:
        if not self._ended:
            DEVICE.faults.append(f"never waited for: {self.text}")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


_Group: Any = dist.ProcessGroup


class SimulatedNCCL(_Group):
    """Process group of tensors of the simulated device, and of the host by gloo."""

    def __init__(self, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        self._ranks = list(options.global_ranks_in_group) or list(range(size))
        self._me, self._store, self._timeout = rank, options.store, options.timeout
        self._limit = options.timeout.total_seconds()
        self._gloo = self._connected("host", rank, size)
        self._stream = Stream(lambda: self._connected("device", rank, size), f"ranks {self._ranks}")
        self._pairs: dict[int, Stream] = {}
        self._name = options.group_id

    def _connected(self, name: str, rank: int, size: int) -> Any:
        # A client of the store is locked while it waits for a key: two streams that connect at once need one each, or
        # two ranks wait for each other if they connect their streams in different orders.
        store = dist.PrefixStore(f"simulated {name}", self._store.clone())
        return dist.ProcessGroupGloo(store, rank, size, self._timeout)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device(NAME)]

    @property
    def group_name(self) -> str:
        return str(self._name)

    @property
    def bound_device_id(self) -> None:
        return None

    def size(self) -> int:
        return len(self._ranks)

    def rank(self) -> int:
        return int(self._me)

    def getBackendName(self) -> str:
        return BACKEND

    # ------------------------------------------------------------------------------------------------- collectives

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        if _on_host(tensors):
            return self._gloo.allreduce(tensors, opts)

        def run(group: Any, work: Work) -> None:
            for output in work.outputs:
                group.allreduce([output], opts).wait()

        return self._start(f"all_reduce {_reduction(opts)}", [], tensors, run)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        if _on_host(tensors):
            return self._gloo.broadcast(tensors, opts)

        def run(group: Any, work: Work) -> None:
            group.broadcast(work.outputs, opts).wait()

        return self._start(f"broadcast from {opts.rootRank}", [], tensors, run)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        if _on_host([output, tensor]):
            return self._gloo._allgather_base(output, tensor)
        _require(output.numel() == tensor.numel() * self.size(), "all_gather", output, tensor)

        def run(group: Any, work: Work) -> None:
            rows = list(work.outputs[0].view(group.size(), -1))
            group.allgather([rows], [work.inputs[0].view(-1)]).wait()

        return self._start("all_gather", [tensor], [output], run)

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        if _on_host([output, tensor]):
            return self._gloo._reduce_scatter_base(output, tensor, opts)
        _require(tensor.numel() == output.numel() * self.size(), "reduce_scatter", output, tensor)

        def run(group: Any, work: Work) -> None:
            whole = work.inputs[0].clone()
            group.allreduce([whole], dist.AllreduceOptions() if opts is None else _allreduce_options(opts)).wait()
            work.outputs[0].view(-1).copy_(whole.view(group.size(), -1)[self._me])

        return self._start(f"reduce_scatter {_reduction(opts)}", [tensor], [output], run)

    _reduce_scatter_base = reduce_scatter_single

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, receive: list[int], send: list[int], opts: Any = None
    ) -> Any:
        if _on_host([output, tensor]):
            return self._gloo.alltoall_base(output, tensor, receive, send)

        def run(group: Any, work: Work) -> None:
            group.alltoall_base(work.outputs[0], work.inputs[0], receive, send).wait()

        even = not (receive or send)
        return self._start("all_to_all", [tensor], [output], run, sized=even)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Any:
        DEVICE.wait("barrier")
        return self._gloo.barrier()

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Any:
        if _on_host(tensors):
            return self._gloo.send(tensors, to, tag)

        def run(group: Any, work: Work) -> None:
            group.send([work.inputs[0]], 1 - group.rank(), 0).wait()

        return self._start(self._message(self._me, to), tensors, [], run, self._pair(to))

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        if _on_host(tensors):
            return self._gloo.recv(tensors, source, tag)

        def run(group: Any, work: Work) -> None:
            group.recv([work.outputs[0]], 1 - group.rank(), 0).wait()

        return self._start(self._message(source, self._me), [], tensors, run, self._pair(source))

    def _message(self, source: int, to: int) -> str:
        return f"message {self._ranks[source]} to {self._ranks[to]}"

    def _pair(self, other: int) -> Stream:
        if other not in self._pairs:
            low, high = sorted((self._me, other))
            name = f"ranks {self._ranks[low]} and {self._ranks[high]}"
            place_of_mine = int(self._me == high)
            self._pairs[other] = Stream(lambda: self._connected(f"pair {low} {high}", place_of_mine, 2), name)
        return self._pairs[other]

    def _start(
        self,
        kind: str,
        reads: list[Tensor],
        writes: list[Tensor],
        run: Callable[[Any, Work], None],
        stream: Stream | None = None,
        sized: bool = True,
    ) -> Work:
        for tensor in (*reads, *writes):
            _require(tensor.is_contiguous(), f"{kind} of a tensor that is not contiguous", tensor)
        numel = f" of {sum(t.numel() for t in (reads or writes))} {(*reads, *writes)[0].dtype}" if sized else ""
        work = Work(f"{kind}{numel} at {place()}", reads, writes, self._limit)
        (stream or self._stream).add(work, lambda group: run(group, work))
        return work


def _reduction(opts: Any) -> str:
    """Name of the reduction that options ask for."""
    kinds = ("SUM", "PRODUCT", "MIN", "MAX", "AVG")
    return "SUM" if opts is None else next(kind for kind in kinds if opts.reduceOp == getattr(dist.ReduceOp, kind))


def _allreduce_options(opts: Any) -> Any:
    found = dist.AllreduceOptions()
    found.reduceOp = opts.reduceOp
    return found


def _on_host(tensors: Sequence[Tensor]) -> bool:
    places = {tensor.device.type for tensor in tensors}
    if len(places) > 1:
        raise RuntimeError(f"a collective over tensors of two devices, {places}, at {place()}")
    return places == {"cpu"}


def _require(fits: bool, what: str, *tensors: Tensor) -> None:
    if not fits:
        raise RuntimeError(f"NCCL refuses {what}: {[tuple(t.shape) for t in tensors]}, at {place()}")


dist.Backend.register_backend(BACKEND, lambda options, _: SimulatedNCCL(options), extended_api=True, devices=[NAME])
