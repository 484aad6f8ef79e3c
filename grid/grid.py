"""Grid: the topology bound to this process, with its device and its communicators."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import math
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from types import NoneType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

# The default arguments of its functions keep the process group that exists when it is imported, and torch's optimizers
# import it. Imported here, before there is a group, it keeps none, so that `close` can close them all.
import torch.distributed.nn.functional
from torch.distributed.device_mesh import DeviceMesh

from ..base.accelerators import functions_of, is_accelerator
from ..base.checks import check_kind, check_positive
from ..base.html import html_table
from ..base.ports import is_loopback, resolve
from ..base.torch_private import default_store
from .agreement.call_order import CallOrder
from .agreement.hang_watch import GONE, Activity, HangWatch, LimitedCalls, lost_peer, timed_out, with_timeout
from .agreement.mailbox import Mailbox
from .agreement.store_barrier import store_barrier
from .comm.axis import Axis
from .comm.equal_facts import same
from .comm.host_transport import HostTransport
from .comm.simulated import is_simulated
from .comm.spans import Spans
from .comm.tcp_store import serve_store
from .comm.thread_priority import batch_threads
from .comm.traffic import Traffic
from .comm.transport import Transport
from .devices import backends_of, take_device, wait_for
from .environment import (
    Environment,
    absent_processes,
    leave_name,
    local_rank,
    read_environment,
    resident_peak,
    stay_on_this_host,
    timeline_folder,
)
from .topology import AXES, DERIVED_AXES, Topology

R = TypeVar("R")

_FAILURE, _ENDED = "triax/failure", "triax/ended"
_LONGEST = 1e9  # seconds of a time limit, about 30 years
_LINGER = 3.0  # seconds that the rank which serves the store waits at its end for the others
_PATIENCE = 20.0  # seconds after which a process says for which others it waits
_STORE = 5.0  # seconds in which the store must answer; a link may be down
STOPPED = 30.0  # seconds without an answer after which it is taken for stopped, where nothing has failed


class Grid:
    """Grid of processes: this process's coordinate and its process groups.

    Under torchrun (or mpirun, or srun) every process builds the same ``Grid``. It initializes torch's process group if
    that has not been done: gloo for the CPU, and for an accelerator the backend that torch has for it, as NCCL for
    CUDA. Without a launcher, ``Grid()`` is one process and needs no process group.

    >>> grid = triax.Grid()  # on 8 processes, for instance Grid(pipe=2, data=2, tensor=2)
    >>> grid.coordinate, grid.tensor.rank, grid.tensor.size
    (Coordinate(pipe=0, data=0, tensor=0), 0, 1)

    Args:
        pipe: size of the pipe axis, along which the list of layers is cut into stages.
        data: number of replicas; None: the number of processes divided by pipe x context x tensor.
        tensor: number of shards of each layer.
        context: number of ranks that share each sequence (context parallelism).
        expert: number of shards of each layer's experts (expert parallelism). It divides data x context, whose ranks
            hold different experts in turn.
        order: names of the axes, outermost first. Groups of the last axis are consecutive ranks. By default pipe, data,
            context, tensor.
        device: device of this rank: ``cpu``, or an accelerator that torch knows, such as ``cuda``, ``xpu`` or ``npu``;
            without an index, each rank of a host takes the next one. By default an accelerator, or the CPU if there is
            none.
        timeout: seconds after which any wait fails.

    Attributes:
        pipe, data, context, tensor: the ``Axis`` of that name: ``.rank``, ``.size``, ``.group``, ``.ranks``.
        expert: the ``Axis`` of the ranks that hold the shards of the experts of this rank's layers.
        data_context: the ``Axis`` of data and context joined, over which all other parameters are replicated. It is
            ``data`` itself if context = 1.
        expert_data: the ``Axis`` over which this rank's experts are replicated: ``data_context``, divided by expert. It
            is ``data_context`` itself if expert = 1.
        world: the ``Axis`` of all ranks.
        rank, size: rank of this process, and number of processes.
        coordinate: named tuple, e.g. ``Coordinate(pipe=1, data=0, tensor=1)``.
        traffic: bytes that this rank sends, by axis and collective.
        spans: stream of the operations of all axes, and of the parts and ops of the engines.
        activity: the op or call that this rank executes; an engine writes it, the hang watch reports it.
        call_orders: the orders of calls that are checked, by axis.
        mesh: torch's ``DeviceMesh``, for DTensor or FSDP2 in the same script; None on one process.

    Raises:
        ValueError: the product of the sizes is not the number of processes, ``expert`` does not divide data x context,
            or ranks ask for different grids.
    """

    def __init__(
        self,
        pipe: int = 1,
        data: int | None = None,
        tensor: int = 1,
        *,
        context: int = 1,
        expert: int = 1,
        order: Sequence[str] | None = None,
        device: torch.device | str | None = None,
        timeout: float = 600.0,
    ) -> None:
        check_positive("Grid", _LONGEST, timeout=timeout)
        check_kind("Grid", (Sequence, NoneType), "the names of all axes", order=order)
        environment = None if dist.is_initialized() else read_environment()
        self.rank, self.size = _rank_and_size(environment)
        sizes = {"pipe": pipe, "data": data, "tensor": tensor} | ({} if context == 1 else {"context": context})
        sizes["data"] = _replicas(sizes, self.size)
        order = [name for name in AXES if name in sizes] if order is None else order
        if sorted(order) != sorted(sizes):
            raise ValueError(f"order={tuple(order)} does not name each axis once: give {', '.join(sizes)} in any order")
        self.topology = Topology(expert=expert, **{name: sizes[name] or 1 for name in order})
        self.coordinate = self.topology.coordinate(self.rank)
        leave_name(self.rank, self.describe())
        self.local_rank = local_rank()
        outer: Any = dist.group.WORLD if dist.is_initialized() else None
        self.device = torch.device("meta") if is_simulated(outer) else take_device(device, self.local_rank)
        self.timeout = timeout
        self._subgroups: dict[tuple[str, tuple[int, ...]], Axis | None] = {}
        self._store: dist.Store | None = None
        self._serves = environment is not None and environment.rank == 0 and not environment.agent_store
        self._store_lost: str | None = None  # message about the process that served it, once it does not answer
        self._number, self._barriers = 0, 0
        self.traffic = Traffic()
        self.spans = Spans()
        self._transport: type[Transport] = Transport
        self.activity = Activity()
        self._watch: HangWatch | None = None
        self.call_orders: dict[Axis, CallOrder] = {}

        if self.size > 1:
            if environment is not None:
                self._store = _initialize(environment, self.device, timeout)
            elif is_simulated(outer):
                outer.announce(self.topology)
            else:
                self._store = default_store()
        if self._store is not None:
            self._calls = LimitedCalls()  # to the store, about failures: its thread is there before memory is short
            weakref.finalize(self, self._calls.end).atexit = False
        world = dist.group.WORLD if self.size > 1 else None
        self.world: Axis = Axis("world", range(self.size), self.rank, world, self.traffic, spans=self.spans)
        if self._gpus_are_shared():
            self._transport = HostTransport
            self.world = Axis("world", range(self.size), self.rank, world, self.traffic, HostTransport, self.spans)
        self._require_same_sizes()
        self.mesh = self._mesh()
        self.pipe, self.data, self.context, self.tensor = (self._axis(name) for name in AXES)
        for axis in (self.world, self.pipe, self.data, self.context, self.tensor):
            self._connect(axis)
        self.data_context = self.data if self.context.size == 1 else self.joint("data_context")
        self.expert, self.expert_data = self._alone("expert"), self.data_context
        if expert > 1:
            self.expert, self.expert_data = self.joint("expert"), self.joint("expert_data")
        if (folder := timeline_folder()) is not None:
            from .comm.timeline_recorder import TimelineRecorder  # imported only where it is used

            self.spans.read(TimelineRecorder(folder, self.rank, self.describe()))
        if is_simulated(outer):
            outer.made(self)
        if environment is not None and self.size > 1:
            atexit.register(_close, weakref.ref(self))

    def _init_view(self, whole: Grid, topology: Topology, world: Axis, data: Axis) -> None:
        """Initialize a grid of some ranks of another, in place of ``__init__``: it makes no process group.

        Args:
            whole: the other grid. A method that makes axes, numbers barriers, watches for hangs or closes the grid must
                call the one of this grid: their state is not shared.
            topology, world, data: those of the view.
        """
        self.topology, self.world, self.size, self.data, self.mesh = topology, world, world.size, data, None
        self.pipe, self.context, self.tensor, self.expert = whole.pipe, whole.context, whole.tensor, whole.expert
        self.data_context = self.expert_data = data if whole.context.size == 1 else whole.context
        self.rank, self.coordinate, self.local_rank = whole.rank, whole.coordinate, whole.local_rank
        self.device, self.timeout = whole.device, whole.timeout
        self.traffic, self.spans = whole.traffic, whole.spans
        self.activity, self.call_orders = whole.activity, whole.call_orders
        self._store, self._store_lost = whole._store, whole._store_lost
        if self._store is not None:
            self._calls = whole._calls

    @property
    def replica(self) -> int:
        """Index of this replica, which selects the samples of a batch that this rank trains on."""
        return self.data.rank

    @property
    def replicas(self) -> int:
        """Number of replicas, including replicas that synchronize only every few steps (local SGD)."""
        return self.data.size

    def axis(self, name: str) -> Axis:
        """Return the axis of a name: pipe, data, context, tensor, expert, data_context or expert_data."""
        if name not in (*AXES, *DERIVED_AXES):
            raise ValueError(f"a grid has no axis {name!r}: give one of {', '.join((*AXES, *DERIVED_AXES))}")
        axis: Axis = getattr(self, name)
        return axis

    def axes(self) -> list[Axis]:
        """Return the axes of all groups of this rank that exist so far, including the world."""
        joined = [axis for axis in self._subgroups.values() if axis is not None]
        return [self.world, self.pipe, self.data, self.context, self.tensor, self.expert, *joined]

    def joint(self, *axes: str) -> Axis:
        """Return several axes joined as one: ``joint("pipe", "tensor")`` is the ranks of one replica.

        Collective when it makes a group: every rank of the grid must call this, in the same order.
        """
        key = ("x".join(axes), ())
        if key not in self._subgroups:
            self._subgroups[key] = self._make(key[0], self.topology.groups(*axes))
        joint = self._subgroups[key]
        assert joint is not None  # every rank is in one of an axis's groups
        return joint

    def group(self, axis: Axis) -> dist.ProcessGroup | None:
        """Return torch's process group of an axis, also of an axis of one rank; None without ``torch.distributed``.

        ``axis.group`` is None on an axis of one rank, and torch takes None for all processes.
        """
        if axis.group is None and dist.is_initialized():
            if self.mesh is not None and axis.name in self.topology.names:
                return self.mesh.get_group(axis.name)
            return dist.group.WORLD if self.size == 1 else None
        return axis.group

    def subgroup(self, axis: str, members: Sequence[int], purpose: str = "") -> Axis | None:
        """Return the axis of the ranks at positions ``members`` of an axis, e.g. of the stages that hold a tied weight.

        None on ranks that are not among them. Collective when it makes a group: every rank of the grid must call this,
        in the same order. A call with the same arguments returns the same axis again.

        Args:
            axis: the name of an axis.
            members: positions on that axis.
            purpose: a name. Another purpose makes another group of the same ranks, whose operations do not wait for
                those of this group.
        """
        axis = self.axis(axis).name if axis in DERIVED_AXES else axis  # it may be another one: data, if context = 1
        key = (axis + purpose, tuple(members))
        if key not in self._subgroups:
            groups = [[group[i] for i in members] for group in self.topology.groups(axis)]
            self._subgroups[key] = made = self._make(axis, groups)
            if made is not None:
                made.purpose = purpose or "subgroup"
        return self._subgroups[key]

    def describe(self, rank: int | None = None) -> str:
        """Return a rank's name: ``rank 5 (pipe 1, data 0, tensor 1)``."""
        rank = self.rank if rank is None else rank
        coordinates = self.topology.coordinate(rank)
        return f"rank {rank} ({', '.join(f'{axis} {at}' for axis, at in coordinates._asdict().items())})"

    def synchronize(self) -> None:
        """Wait until the device has finished all its work: for measurements."""
        wait_for(self.device)

    def peak_memory(self) -> int:
        """Return bytes: the peak of the tensors on the GPU; on a CPU, the peak resident memory of the process."""
        if is_accelerator(self.device):
            return int(functions_of(self.device).max_memory_allocated(self.device))
        return resident_peak()

    def device_name(self) -> str:
        """Return the GPU's name, e.g. ``NVIDIA H100 80GB HBM3``; ``cpu`` on a CPU."""
        if is_accelerator(self.device):
            return str(functions_of(self.device).get_device_name(self.device))
        return self.device.type

    def random_state(self) -> torch.Tensor | None:
        """Return the state of the GPU's random generator; None on a CPU, where torch has one for the process."""
        if not is_accelerator(self.device):
            return None
        state: torch.Tensor = functions_of(self.device).get_rng_state(self.device)
        return state

    def set_random_state(self, state: torch.Tensor) -> None:
        """Restore the state that ``random_state`` returned."""
        if is_accelerator(self.device):
            functions_of(self.device).set_rng_state(state, self.device)

    def report_failure(self, message: str) -> None:
        """Write to the store the reason for which this rank stops. The first message of any rank is kept."""
        store = self._store
        if store is not None and self._store_lost is None:
            # The process that held the store may have ended: then no rank can read the message.
            with contextlib.suppress(RuntimeError, TimeoutError):
                self._calls.within(_STORE, lambda: store.compare_set(_FAILURE, "", message))

    def reported_failure(self) -> str | None:
        """Return the message of the first rank that reported a failure; None if none did, or if the store is gone."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            return self._read_failure()
        return None

    def reason_to_stop(self) -> str | None:
        """Return ``reported_failure`` or, if the store does not answer, the name of the process that serves it.

        This is for a rank that has failed, or waits for too long: otherwise the store may only be slow.
        """
        if self._store_lost is None:
            try:
                return self._read_failure()
            except (RuntimeError, TimeoutError):
                self._lose_store()
        return self._store_lost

    def _read_failure(self) -> str | None:
        store = self._store
        if store is None or not self._calls.within(_STORE, lambda: store.check([_FAILURE])):
            return None
        return self._calls.within(_STORE, lambda: store.get(_FAILURE)).decode()

    def _ask_store(self, seconds: float, call: Callable[[], R]) -> R:
        """Return the result of a call of the store, which has no time limit of its own.

        Raises:
            RuntimeError: the store does not answer; the message names the process that serves it.
        """
        try:
            return with_timeout(seconds, call)
        except TimeoutError:
            raise RuntimeError(self._lose_store()) from None

    def _lose_store(self) -> str:
        """Record that the store does not answer; return a message that names the process that serves it."""
        environment = read_environment()
        server = "the process that serves the store of all ranks"
        if environment is not None:
            server = "the launcher" if environment.agent_store else self.describe(0)
        self._store_lost = f"{server} {GONE}"
        return self._store_lost

    def start_hang_watch(self) -> None:
        """Start the thread that reports what this rank executes when another rank has waited for too long."""
        if self._watch is None and self._store is not None:
            self._watch = HangWatch(self, self._store)

    def call_order(self, axis: Axis, advice: str) -> CallOrder | None:
        """Return the check that the ranks of an axis make the same calls in the same order. Collective when it is made.

        None if there is nothing to check: on an axis of one rank, and in a dry run.

        Args:
            axis: the axis.
            advice: the end of the error message: the rule, and what to do.
        """
        if axis.size == 1 or self._store is None:
            return None
        if axis not in self.call_orders:
            self.call_orders[axis] = CallOrder(self, axis, self._store, self.barrier_name(), advice)
            self.start_hang_watch()  # its thread answers the other ranks
        return self.call_orders[axis]

    def failure_cause(self, error: BaseException) -> str | None:
        """Return a message about the other rank that caused an error on this one; None if this rank failed by itself.

        The other rank reported a failure first; or, if ``error`` is an expired time limit or a lost connection, its
        program has ended, or it is found to hang or to be gone.
        """
        reported, waited, lost = self.reason_to_stop(), timed_out(error), lost_peer(error)
        if self._store_lost is not None:
            return reported if waited or lost else None
        if reported is None and (waited or lost):
            reported = self._ended_rank()
        if reported is None and self._watch is not None and (waited or lost):
            reported = self._watch.find_cause(lost=not waited)
        return reported

    def _ended_rank(self) -> str | None:
        """Report the ranks whose programs have ended while this one waits, and return the message; None without one."""
        store, ended = self._store, list[str]()
        with contextlib.suppress(RuntimeError, TimeoutError):
            for rank in range(self.size) if store is not None else ():
                key = f"{_ENDED}/{rank}"
                if rank != self.rank and self._calls.within(_STORE, partial(store.check, [key])):  # type: ignore[union-attr]
                    how = self._calls.within(_STORE, partial(store.get, key)).decode()  # type: ignore[union-attr]
                    ended.append(f"{self.describe(rank)} has ended its program, {how}")
        if not ended:
            return None
        message = (
            f"{'; '.join(ended[:4])}; {self.describe()} still waits for it, after {self.activity.counts()}: let every "
            "rank take the same number of steps"
        )
        self.report_failure(message)
        return self.reported_failure() or message

    def end(self) -> None:
        """Leave the process group at the end of the program, and tell ranks that still wait for this one.

        The rank that serves the store waits a moment for the others, which may need to read it.
        """
        store = self._store
        with contextlib.suppress(RuntimeError, TimeoutError):
            if store is not None:
                error = getattr(sys, "last_exc", getattr(sys, "last_value", None))
                how = "" if error is None else f"by {type(error).__name__}: {error}, "
                text = f"{how}after {self.activity.counts()}"
                self._calls.within(_STORE, lambda: store.set(f"{_ENDED}/{self.rank}", text))
        self.close()
        if store is not None and self._serves:
            keys = [f"{_ENDED}/{rank}" for rank in range(self.size)]
            deadline = time.monotonic() + _LINGER
            with contextlib.suppress(RuntimeError):
                while not store.check(keys) and time.monotonic() < deadline:
                    time.sleep(0.02)

    def barrier_name(self) -> str:
        """Return a new name for ``store_barrier``, equal on all ranks if they ask in the same order."""
        if not self._number and self._store is not None:
            store, key = self._store, f"triax/grids/{self.rank}"  # several grids may share a store
            self._number = self._ask_store(self.timeout, lambda: store.add(key, 1))
        self._barriers += 1
        return f"triax/barriers/{self._number}/{self._barriers}"

    def mailbox(self) -> Mailbox:
        """Return a new mailbox, in which any rank posts texts for rank 0. Every rank calls this, in the same order."""
        return Mailbox(self._store, f"{self.barrier_name()}/mail")

    def store_barrier(
        self, name: str, text: str, seconds: float, stop: Callable[[], bool] = lambda: False
    ) -> list[str | None]:
        """Exchange texts with all ranks through the store; return the text of each rank, in rank order.

        The text is None for ranks that do not arrive within ``seconds``, or after a rank has reported a failure. It
        uses no process group, so it may run in a thread beside the training.

        Args:
            name: name of this barrier, from ``barrier_name``.
            text: the text that this rank sends.
            seconds: time limit.
            stop: called about once a second. If it returns True, the wait ends.

        Raises:
            RuntimeError: the store does not answer.
        """
        store, me, failed = self._store, self.rank, self.reported_failure
        if store is None:
            return [text] * self.size
        return self._ask_store(
            seconds + min(self.timeout, STOPPED),
            lambda: store_barrier(store, name, me, self.size, text, seconds, lambda: failed() is not None or stop()),
        )

    def close(self) -> None:
        """Leave the process group. Called at exit if the grid initialized it, and when a step fails.

        A connection closes once nothing refers to its group any more. Ranks that wait for this one then stop at once.
        """
        if self._watch is not None:
            self._watch.end()
        for axis in self.axes():
            axis.close()
        self.mesh = None
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()

    def _require_same_sizes(self) -> None:
        """Check that all ranks ask for the same grid: otherwise they would make different groups, and hang.

        Raises:
            ValueError: on every rank.
        """
        if self.size > 1 and not same(self.world, self.topology.sizes, self.device):
            sizes = self.world.all_gather_json(list(self.topology.sizes.items()))
            other = next(rank for rank in range(self.size) if sizes[rank] != sizes[0])
            said = [" x ".join(f"{name} {size}" for name, size in sizes[rank]) for rank in (0, other)]
            raise ValueError(
                f"rank {other} asks for a grid of {said[1]}, rank 0 for a grid of {said[0]}: give all ranks the same "
                "sizes and order"
            )

    def _gpus_are_shared(self) -> bool:
        """Return whether any GPU has several ranks, which NCCL refuses. Collective, in host memory."""
        if self.size == 1 or not is_accelerator(self.device):
            return False
        properties = functions_of(self.device).get_device_properties(self.device)
        host_device = f"{socket.gethostname()} {self.device}"  # of a kind of device whose properties have no UUID
        devices = self.world.all_gather_json(str(getattr(properties, "uuid", host_device)))
        most = max(map(devices.count, devices))
        if most > 1 and self.rank == 0:
            logging.getLogger("triax").warning(
                "%s ranks share a GPU: NCCL refuses that, so their tensors pass through host memory, which is slow. "
                "Start %s processes, one for each GPU, unless this is a test",
                most,
                len(set(devices)),
            )
        return most > 1

    def _mesh(self) -> DeviceMesh | None:
        if self.size == 1:
            return None
        # Not by init_device_mesh: its groups have torch's own time limit, half an hour on gloo, and a limit that is set
        # later does not apply to sends and receives.
        limit, own_groups = timedelta(seconds=self.timeout), []
        for name in self.topology.names:
            if self.topology.sizes[name] == 1 and getattr(dist.group.WORLD, "bound_device_id", None) is None:
                # Alone, without the others: at 16 stages and 64 replicas it would be a call on 1,024 ranks for each.
                own_groups.append(dist.new_group([self.rank], timeout=limit, use_local_synchronization=True))
                continue
            made = {ranks: _group(ranks, limit) for ranks in map(tuple, self.topology.groups(name))}
            own_groups += [group for ranks, group in made.items() if self.rank in ranks]
        ranks = torch.arange(self.size).view(self.topology.shape)
        return DeviceMesh.from_group(own_groups, self.device.type, mesh=ranks, mesh_dim_names=self.topology.names)

    def _alone(self, name: str) -> Axis:
        return Axis(name, [self.rank], self.rank, None, self.traffic)

    def _axis(self, name: str) -> Axis:
        if name not in self.topology.axes:
            return self._alone(name)
        ranks = next(group for group in self.topology.groups(name) if self.rank in group)
        group = self.mesh.get_group(name) if self.mesh and len(ranks) > 1 else None
        return Axis(name, ranks, self.rank, group, self.traffic, self._transport, self.spans)

    def _make(self, name: str, groups: list[list[int]]) -> Axis | None:
        own_axis = None
        for ranks in groups:
            group = _group(ranks, timedelta(seconds=self.timeout)) if len(ranks) > 1 else None
            if self.rank in ranks:
                own_axis = Axis(name, ranks, self.rank, group, self.traffic, self._transport, self.spans)
        if own_axis is not None:
            self._connect(own_axis)
        return own_axis

    def _connect(self, axis: Axis) -> None:
        """Run a first collective, at which NCCL makes the communicator; every rank of the axis must take part.

        It runs where the group is made, in the same order on all ranks. In the middle of a schedule two ranks might
        reach two groups in different orders, and hang.
        """
        if is_accelerator(self.device) and axis.size > 1:
            axis.all_reduce(torch.zeros(1, device=self.device))

    def __deepcopy__(self, memo: object) -> Self:
        """Return the grid itself, whose process groups copies of a model share."""
        return self

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.topology.sizes.items())
        return f"Grid({sizes}; {self.describe()}, {self.device})"

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows: a row for each axis."""
        axes = ((name, size, getattr(self, name).rank) for name, size in self.topology.sizes.items())
        return html_table(f"rank {self.rank} of {self.world.size}", ("axis", "size", "coordinate of this rank"), axes)


def _close(grid: weakref.ref[Grid]) -> None:
    """Close a grid at exit, if it still exists: until then, one that nothing refers to keeps no connection."""
    current = grid()
    if current is not None:
        current.end()


def _leave(store: dist.Store) -> None:
    """Leave the process group at exit, if no grid has left it.

    The store lives until then: if this rank serves it, another rank may still need it for its next grid.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def _rank_and_size(environment: Environment | None) -> tuple[int, int]:
    """Return this process's rank, and the number of processes."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return (environment.rank, environment.world_size) if environment else (0, 1)


def _replicas(sizes: Mapping[str, int | None], processes: int) -> int:
    """Return the size of the data axis.

    Raises:
        ValueError: the sizes do not fit the number of processes.
    """
    known = Topology(**{name: 1 if size is None else size for name, size in sizes.items()})  # refuses sizes below 1
    data = sizes["data"]
    replica = known.world_size // (data or 1)
    if data is None and processes % replica == 0:
        return processes // replica
    if data is not None and replica * data == processes:
        return data
    asked = " x ".join(f"{name} {'?' if size is None else size}" for name, size in sizes.items())
    nearest = replica * (math.ceil(processes / replica) if data is None else data)
    need = f"a multiple of {replica} processes" if data is None else f"{nearest} processes"
    raise ValueError(
        f"a grid of {asked} needs {need}, and there "
        f"{'is 1' if processes == 1 else f'are {processes}'}: start it with torchrun --nproc-per-node {nearest}, "
        "or give other sizes"
    )


def _initialize(environment: Environment, device: torch.device, timeout: float) -> Any:
    """Initialize the process group; return its store.

    The store's keys are prefixed by the number of restarts, and by how often this rank has been here: torchrun keeps
    one store over a restart, and a process may make another grid after it closed one. Ranks would read the addresses of
    the old connections.
    """
    limit = timedelta(seconds=timeout)
    rank, size = environment.rank, environment.world_size
    waits = f"triax still waits: {absent_processes(environment)}"
    told = threading.Timer(_PATIENCE, lambda: print(waits, file=sys.stderr, flush=True))
    told.daemon = True
    told.start()
    try:
        tcp = _tcp_store(environment, limit)
    except dist.DistError as error:  # a time limit, or no connection
        raise RuntimeError(f"{absent_processes(environment)} ({str(error).splitlines()[0]})") from error
    finally:
        told.cancel()
    attempt_store = dist.PrefixStore(f"triax/{environment.restarts}", tcp)
    store: dist.Store = dist.PrefixStore(str(attempt_store.add(f"groups of rank {rank}", 1)), attempt_store)
    with batch_threads():
        dist.init_process_group(backends_of(device), store=store, rank=rank, world_size=size, timeout=limit)
    atexit.register(_leave, store)
    return store


def _tcp_store(environment: Environment, limit: timedelta) -> dist.TCPStore:
    """Return the store of all ranks. If rank 0 serves it, it listens on the address of MASTER_ADDR alone.

    It listens on all addresses of its host, as torch's own does, where that address is not one of this host (that of a
    service of Kubernetes), or is a loopback address though ranks are on other hosts (a line of ``/etc/hosts``).
    """
    host, port, size = environment.master_addr, environment.master_port, environment.world_size
    alone, serves = stay_on_this_host(size), environment.rank == 0 and not environment.agent_store
    with contextlib.suppress(OSError):
        address = resolve(host)
        if serves and (alone or address == host or not is_loopback(address)):
            return serve_store(address, port, limit, size, wait=True)
    return dist.TCPStore(host, port, size, is_master=serves, timeout=limit, multi_tenant=serves)


def _group(ranks: Sequence[int], limit: timedelta) -> Any:
    with batch_threads():
        return dist.new_group(ranks, timeout=limit)
