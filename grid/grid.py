"""Grid: the topology bound to this process, with its device and its communicators."""

from __future__ import annotations

import atexit
import contextlib
import gc
import math
import os
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

# Its functions keep, as default arguments, the process group that there is when it is imported; torch's optimizers
# import it. Imported here, before there is one, it keeps none, and `close` can close them all.
import torch.distributed.nn.functional
from torch.distributed.device_mesh import DeviceMesh

from .axis import Axis
from .environment import Environment, leave_name, read_environment, resident_peak, timeline_folder
from .logged import Log, attach
from .meeting import meet
from .threads import unobtrusive
from .topology import DEFAULT_AXES, Topology
from .traffic import Traffic
from .watch import Place, Watch, timed_out, within

if TYPE_CHECKING:
    from .timeline import Recorder

_FAILURE = "triax/failure"
_STORE = 5.0  # seconds that the store gets to answer, where a link may be down


class Grid:
    """This process's place on a grid of processes, and the groups it communicates in.

    Under torchrun (or mpirun, or srun) every process builds the same ``Grid``; it initialises torch's process
    group if nobody has: NCCL where there is CUDA, gloo elsewhere. Without a launcher, ``Grid()`` is one process
    and needs no process group.

    Args:
        pipe: stages of layers.
        data: replicas; None takes all the processes that pipe and tensor leave.
        tensor: shards of one layer.
        order: the axes, outermost first. The last one's groups are neighbouring ranks.
        device: where this rank computes; by default its GPU, else the CPU.
        timeout: seconds that any wait may take before it is an error.

    Attributes:
        pipe, data, tensor: the ``Axis`` of that name: ``.rank``, ``.size``, ``.group``, ``.ranks``.
        world: all ranks of the grid, joined.
        rank, size: this process and their number.
        coordinate: named tuple, e.g. ``Coordinate(pipe=1, data=0, tensor=1)``.
        traffic: bytes that this rank sends, by axis and collective.
        log: what times its communication, see ``log_communication``; None: nothing does.
        timeline: what records it, under ``triax run --timeline``; None: nothing does.
        place: what this rank is doing: an engine writes it, and it is told where a rank hangs.
        mesh: torch's ``DeviceMesh``, for DTensor or FSDP2 beside triax; None on one process.

    Raises:
        ValueError: the sizes do not multiply to the number of processes.
    """

    def __init__(
        self,
        pipe: int = 1,
        data: int | None = None,
        tensor: int = 1,
        *,
        order: Sequence[str] = DEFAULT_AXES,
        device: torch.device | str | None = None,
        timeout: float = 600.0,
    ) -> None:
        environment = None if dist.is_initialized() else read_environment()
        self.rank, self.size = _place(environment)
        sizes = {"pipe": pipe, "data": data, "tensor": tensor}
        if sorted(order) != sorted(sizes):
            raise ValueError(f"order={tuple(order)} must name pipe, data and tensor once each")
        sizes["data"] = _replicas(pipe, data, tensor, self.size)
        self.topology = Topology(**{name: sizes[name] or 1 for name in order})
        self.coordinate = self.topology.coordinate(self.rank)
        leave_name(self.rank, self.describe())
        self.device = _device(device, environment)
        self.timeout = timeout
        self._subgroups: dict[tuple[str, tuple[int, ...]], Axis | None] = {}
        self._store: dist.Store | None = None
        self._number, self._meetings = 0, 0
        self.traffic = Traffic()
        self.log: Log | None = None
        self.timeline: Recorder | None = None
        self.place = Place()
        self._watch: Watch | None = None

        if self.size > 1:
            if environment is not None:
                self._store = _initialise(environment, self.device, timeout)
                atexit.register(self.close)
            else:
                self._store = dist.distributed_c10d._get_default_store()
        self._require_same_sizes()
        self.mesh = self._mesh()
        world = dist.group.WORLD if self.size > 1 else None
        self.world = Axis("world", range(self.size), self.rank, world, self.traffic)
        self.pipe, self.data, self.tensor = (self._axis(name) for name in DEFAULT_AXES)
        for axis in (self.world, self.pipe, self.data, self.tensor):
            axis.grid = self
            self._connect(axis)
        if (folder := timeline_folder()) is not None:
            from .timeline import record  # nobody else pays for it

            record(self, folder)

    @property
    def replica(self) -> int:
        """Which replica this is: the part of a batch that is its own goes by it."""
        return self.data.rank

    @property
    def replicas(self) -> int:
        """Of how many, whether or not they talk at every step."""
        return self.data.size

    def axis(self, name: str) -> Axis:
        """The axis of that name."""
        if name not in DEFAULT_AXES:
            raise ValueError(f"no axis {name!r}; the axes are {', '.join(DEFAULT_AXES)}")
        axis: Axis = getattr(self, name)
        return axis

    def axes(self) -> list[Axis]:
        """All the groups that this rank is in so far, the world's too."""
        joined = [axis for axis in self._subgroups.values() if axis is not None]
        return [self.world, self.pipe, self.data, self.tensor, *joined]

    def joint(self, *axes: str) -> Axis:
        """Several axes as one group: ``joint("pipe", "tensor")`` is one replica's ranks.

        Making a group is collective: every rank of the grid must call this, in the same order.
        """
        key = ("x".join(axes), ())
        if key not in self._subgroups:
            self._subgroups[key] = self._make(key[0], self.topology.groups(*axes))
        joint = self._subgroups[key]
        assert joint is not None  # every rank is in one of an axis's groups
        return joint

    def subgroup(self, axis: str, members: Sequence[int], purpose: str = "") -> Axis | None:
        """The ranks at positions ``members`` of an axis, e.g. the stages that hold a tie; None for the others.

        Making a group is collective: every rank of the grid must call this, in the same order. Another
        ``purpose`` makes another group of the same ranks, whose operations wait for none of this one's.
        """
        key = (axis + purpose, tuple(members))
        if key not in self._subgroups:
            groups = [[group[i] for i in members] for group in self.topology.groups(axis)]
            self._subgroups[key] = self._make(axis, groups)
        return self._subgroups[key]

    def log_communication(self, log: Log) -> None:
        """Time what goes through this rank's axes from now on, those included that are made later."""
        self.log = log
        for axis in (self.world, self.pipe, self.data, self.tensor, *self._subgroups.values()):
            if axis is not None:
                attach(axis, log)

    def describe(self, rank: int | None = None) -> str:
        """A rank by name: ``rank 5 (pipe 1, data 0, tensor 1)``."""
        rank = self.rank if rank is None else rank
        place = self.topology.coordinate(rank)
        return f"rank {rank} ({', '.join(f'{axis} {at}' for axis, at in place._asdict().items())})"

    def synchronise(self) -> None:
        """Wait until the device has done all it was given: for measuring."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_memory(self) -> int:
        """Bytes: the most that tensors took of the GPU so far; on a CPU, that this whole process was resident in."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else resident_peak()

    def device_name(self) -> str:
        """The GPU's name as its maker has it, ``NVIDIA H100 80GB HBM3``; ``cpu`` on a CPU."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type

    def random_state(self) -> torch.Tensor | None:
        """The state of the GPU's generator; None on a CPU, where torch has one for the process."""
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None

    def set_random_state(self, state: torch.Tensor) -> None:
        """Put back what ``random_state`` returned."""
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)

    def report_failure(self, message: str) -> None:
        """Tell the other ranks why this one stops; the first message stays."""
        try:
            store = self._store
            if store is not None:
                within(_STORE, lambda: store.compare_set(_FAILURE, "", message))
        except (RuntimeError, TimeoutError):
            return  # the process that held the store is gone, and with it whoever would read this

    def reported_failure(self) -> str | None:
        """What the first rank that failed said, if one did and its word can still be read."""
        try:
            store = self._store
            if store is not None and within(_STORE, lambda: store.check([_FAILURE])):
                return str(store.get(_FAILURE).decode())
        except (RuntimeError, TimeoutError):
            # The store went away with the process that held it: then there is nothing to read.
            return None
        return None

    def watch(self) -> None:
        """From now on this rank can say where it stands, when another one has waited for too long."""
        if self._watch is None and self._store is not None:
            self._watch = Watch(self, self._store)

    def cause(self, error: BaseException) -> str | None:
        """Why this rank fails, where another one is the reason: it failed first, or hangs."""
        reported = self.reported_failure()
        if reported is None and self._watch is not None and timed_out(error):
            reported = self._watch.find()
        return reported

    def meeting(self) -> str:
        """A name for the next meeting of all ranks, alike on each: they ask for names in the same order."""
        if not self._number and self._store is not None:
            self._number = self._store.add(f"triax/grids/{self.rank}", 1)  # several grids may share a store
        self._meetings += 1
        return f"triax/meetings/{self._number}/{self._meetings}"

    def meet(self, name: str, text: str, seconds: float) -> list[str | None]:
        """What each rank says at a meeting; None for those that do not come within ``seconds``, or ever: one failed.

        No collective: it may run in a thread, beside the training, under a name of its own. See ``meeting.py``.
        """
        if self._store is None:
            return [text]
        over = self.reported_failure
        return meet(self._store, name, self.rank, self.size, text, seconds, lambda: over() is not None)

    def close(self) -> None:
        """Leave the process group. Called at exit where the grid initialised it, and when a step fails.

        A connection closes when nothing refers to its group any more; ranks that wait on it then stop at once.
        """
        if self._watch is not None:
            self._watch.end()
        for axis in self.axes():
            axis.group = None
        self.mesh = None
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()

    def _require_same_sizes(self) -> None:
        """Ranks that ask for different grids would make different groups, and wait for each other.

        Raises:
            ValueError: on every rank alike.
        """
        if self.size == 1:
            return
        shape = zlib.crc32(repr(self.topology.axes).encode())
        both = torch.tensor([shape, -shape], device=self.device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        if int(both[0]) != -int(both[1]):
            found: list[Any] = [None] * self.size
            dist.all_gather_object(found, list(self.topology.axes.items()))
            other = next(rank for rank in range(self.size) if found[rank] != found[0])
            said = [" x ".join(f"{name} {size}" for name, size in found[rank]) for rank in (0, other)]
            raise ValueError(
                f"rank {other} asks for a grid of {said[1]}, and rank 0 for one of {said[0]}: give all ranks the same "
                "sizes and order"
            )

    def _mesh(self) -> DeviceMesh | None:
        if self.size == 1:
            return None
        # Not by init_device_mesh: its groups have torch's own limit, half an hour on gloo, and what is set later
        # does not hold for sends and receives.
        limit, mine = timedelta(seconds=self.timeout), []
        for name in self.topology.names:
            made = {ranks: _group(ranks, limit, name) for ranks in map(tuple, self.topology.groups(name))}
            mine += [group for ranks, group in made.items() if self.rank in ranks]
        ranks = torch.arange(self.size).view(self.topology.shape)
        return DeviceMesh.from_group(mine, self.device.type, mesh=ranks, mesh_dim_names=self.topology.names)

    def _axis(self, name: str) -> Axis:
        ranks = next(group for group in self.topology.groups(name) if self.rank in group)
        group = self.mesh.get_group(name) if self.mesh and len(ranks) > 1 else None
        return Axis(name, ranks, self.rank, group, self.traffic)

    def _make(self, name: str, groups: list[list[int]]) -> Axis | None:
        mine = None
        for ranks in groups:
            group = _group(ranks, timedelta(seconds=self.timeout), name) if len(ranks) > 1 else None
            if self.rank in ranks:
                mine = Axis(name, ranks, self.rank, group, self.traffic)
        if mine is not None:
            self._connect(mine)
            if self.timeline is not None:
                self.timeline.attach(mine)
            if self.log is not None:
                attach(mine, self.log)
        return mine

    def _connect(self, axis: Axis) -> None:
        """NCCL makes a communicator at its first collective, which every rank of it must join.

        So do it where the group is made, in the same order everywhere, and not in the middle of a schedule, where
        two ranks may come to two channels in another order.
        """
        if self.device.type == "cuda" and axis.size > 1:
            axis.all_reduce(torch.zeros(1, device=self.device))

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.topology.axes.items())
        return f"Grid({sizes}; {self.describe()}, {self.device})"


def gpus() -> int:
    """How many GPUs this process sees."""
    return torch.cuda.device_count()


def _place(environment: Environment | None) -> tuple[int, int]:
    """This process's rank, and the number of processes."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return (environment.rank, environment.world_size) if environment else (0, 1)


def _replicas(pipe: int, data: int | None, tensor: int, processes: int) -> int:
    """The data axis's size, once the sizes are known to fit the processes."""
    Topology(pipe=pipe, data=1 if data is None else data, tensor=tensor)  # refuses sizes below 1
    replica = pipe * tensor
    if data is None and processes % replica == 0:
        return processes // replica
    if data is not None and replica * data == processes:
        return data
    asked = f"pipe {pipe} x data {data if data is not None else '?'} x tensor {tensor}"
    if data is None:
        need = f"a multiple of {replica} processes"
        nearest = math.ceil(processes / replica) * replica
    else:
        nearest = replica * data
        need = f"{nearest} processes"
    raise ValueError(
        f"a grid of {asked} needs {need}, and there "
        f"{'is 1' if processes == 1 else f'are {processes}'}: start it with torchrun --nproc-per-node {nearest}, "
        "or give other sizes"
    )


def _device(device: torch.device | str | None, environment: Environment | None) -> torch.device:
    if device is None and torch.cuda.is_available():
        local = environment.local_rank if environment else int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cuda", local % torch.cuda.device_count())
    chosen = torch.device(device or "cpu")
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    return chosen


def _initialise(environment: Environment, device: torch.device, timeout: float) -> Any:
    """Join the process group; returns its store.

    The store's keys are prefixed by the number of restarts: torchrun keeps one store over a restart, and new
    workers would read the addresses of the dead ones.
    """
    limit = timedelta(seconds=timeout)
    url = f"tcp://{environment.master_addr}:{environment.master_port}"
    if environment.launcher == "torchrun":
        url = "env://"  # torchrun may hold the store itself; only env:// knows
    rendezvous = dist.rendezvous(url, environment.rank, environment.world_size, timeout=limit)
    store, rank, size = next(iter(rendezvous))
    store = dist.PrefixStore(f"triax/{environment.restarts}", store)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with unobtrusive():
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    return store


def _group(ranks: Sequence[int], limit: timedelta, name: str) -> Any:
    # The data axis moves much at a time, while everybody computes: its threads take their turn like others. (2 ranks
    # on 2 cores: steps of ZeRO 1 to 3 take 3 to 7 % less. It is small messages that a pipeline waits for.)
    with contextlib.nullcontext() if name == "data" else unobtrusive():
        return dist.new_group(ranks, timeout=limit)
