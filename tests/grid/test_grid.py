"""Grid on real ranks: groups of each axis, joint groups, launchers, time limits, and errors."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
import weakref
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import triax
from triax import LayerSpec, PipelineModule
from triax.grid import Grid, Topology
from triax.grid.agreement.store_barrier import store_barrier
from triax.grid.comm import host_transport
from triax.grid.comm.axis import Axis
from triax.grid.comm.host_transport import HostTransport
from triax.grid.comm.transport import Transport
from triax.testing.pool import slowdown

from support.toys import error_text

AXES = ("pipe", "data", "tensor")
SHAPES = [(2, 2, 2), (8, 1, 1), (1, 8, 1), (1, 1, 8), (4, 2, 1), (1, 2, 4)]


def reached(axis: Axis | None) -> tuple[int, ...]:
    """The ranks that a collective over the axis reaches, and in which order."""
    if axis is None:
        return ()
    mine, all_ranks = torch.tensor([dist.get_rank()]), torch.zeros(axis.size, dtype=torch.long)
    axis.all_gather(all_ranks, mine)
    return tuple(all_ranks.tolist())


def axes_on_rank(shape: tuple[int, int, int], order: tuple[str, ...]) -> dict[str, Any]:
    grid = Grid(*shape, order=order)
    found: dict[str, Any] = {"coordinate": grid.coordinate._asdict(), "rank": grid.rank, "size": grid.size}
    for name in AXES:
        axis = grid.axis(name)
        assert axis is getattr(grid, name)
        found[name] = (axis.ranks, axis.rank, axis.size, reached(axis))
        assert (axis.group is None) == (axis.size == 1)
        assert axis.is_first == (axis.rank == 0) and axis.is_last == (axis.rank == axis.size - 1)
    assert grid.mesh is not None
    found["mesh"] = (tuple(grid.mesh.shape), grid.mesh.mesh_dim_names)
    found["world"] = reached(grid.world)
    found["joint"] = reached(grid.joint("pipe", "tensor"))
    assert grid.joint("pipe", "tensor") is grid.joint("pipe", "tensor")  # made once
    found["ends"] = reached(grid.subgroup("pipe", [0, grid.pipe.size - 1])) if grid.pipe.size > 1 else None
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("order", [AXES, ("data", "tensor", "pipe")])
def test_each_axis_reaches_exactly_its_ranks(ranks: Any, shape: tuple[int, int, int], order: tuple[str, ...]) -> None:
    topology = Topology(**{name: dict(zip(AXES, shape, strict=True))[name] for name in order})
    for rank, found in enumerate(ranks(8, axes_on_rank, shape, order)):
        assert (found["rank"], found["size"]) == (rank, 8)
        assert found["coordinate"] == topology.coordinate(rank)._asdict()
        for name in AXES:
            group = tuple(next(g for g in topology.groups(name) if rank in g))
            assert found[name] == (group, group.index(rank), len(group), group)
        assert found["world"] == tuple(range(8))
        assert found["joint"] == tuple(next(g for g in topology.groups("pipe", "tensor") if rank in g))
        assert found["mesh"] == (topology.shape, topology.names)
        pipe = next(g for g in topology.groups("pipe") if rank in g)
        if len(pipe) > 1:
            ends = (pipe[0], pipe[-1])
            assert found["ends"] == (ends if rank in ends else ())


def test_one_process_needs_no_process_group(ranks: Any) -> None:
    grid = Grid()
    assert (grid.rank, grid.size, grid.mesh) == (0, 1, None)
    assert not dist.is_initialized()
    x = torch.arange(3.0)
    for axis in (grid.pipe, grid.data, grid.tensor, grid.world, grid.joint("pipe", "data"), grid.subgroup("pipe", [0])):
        assert axis is not None
        axis.all_reduce(x).wait()
        axis.broadcast(x).wait()
        out = torch.zeros(3)
        axis.all_gather(out, x, async_op=True).wait()
        assert torch.equal(out, x)
        axis.reduce_scatter(out.zero_(), x).wait()
        assert torch.equal(out, x) and torch.equal(x, torch.arange(3.0))
        assert axis.all_gather_json({"a": 1}) == [{"a": 1}]
        axis.barrier()
    assert repr(grid) == "Grid(pipe=1, data=1, tensor=1; rank 0 (pipe 0, data 0, tensor 0), cpu)"
    assert grid.reported_failure() is None
    grid.report_failure("nobody is there to read it")


# ---------------------------------------------------------------------------------------------- collectives


def copied() -> Any:
    """Context in which tensors of the CPU are taken for tensors of a GPU, to test the copies without one."""
    return patch.object(host_transport, "is_on_host", lambda tensor: False)


def collectives_on_rank(by_host: bool) -> None:
    with copied() if by_host else nullcontext():
        collectives(by_host)


def collectives(by_host: bool) -> None:
    """Each collective against what it should give, plain and asynchronous, in the dtypes that training uses."""
    grid = Grid(data=1, tensor=4)
    axis: Axis = grid.tensor
    if by_host:
        axis = Axis("tensor", axis.ranks, grid.rank, axis.group, transport=HostTransport)
        seen: list[str] = []
        axis.spans.read(lambda span: seen.append(span.kind))
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        for async_op in (False, True):
            x = torch.arange(8).to(dtype) + axis.rank
            total = x.clone()
            axis.all_reduce(total, async_op=async_op).wait()
            assert total.tolist() == [4 * i + 6 for i in range(8)]
            for op, extreme in (("max", 3), ("min", 0)):
                y = x.clone()
                axis.all_reduce(y, op, async_op).wait()
                assert y.tolist() == [i + extreme for i in range(8)]
            part = torch.zeros(2, dtype=dtype)
            axis.reduce_scatter(part, x, async_op).wait()
            assert part.tolist() == [4 * i + 6 for i in (2 * axis.rank, 2 * axis.rank + 1)]
            whole = torch.zeros(8, dtype=dtype)
            axis.all_gather(whole, part, async_op).wait()
            assert torch.equal(whole, total)
            axis.broadcast(x, 2, async_op).wait()
            assert x.tolist() == [i + 2 for i in range(8)]
    assert axis.all_gather_json(axis.rank) == [0, 1, 2, 3]
    after, before = (axis.rank + 1) % 4, (axis.rank - 1) % 4
    received = torch.zeros(2)
    works = [axis.send(torch.full((2,), float(axis.rank)), after, 5), axis.receive(received, before, 5)]
    for work in works:
        work.wait()
    assert received.tolist() == [before, before]
    output, rows = torch.zeros(4), torch.arange(4.0) + 10 * axis.rank
    for async_op in (False, True):
        axis.all_to_all(output, rows, async_op).wait()
        assert output.tolist() == [10 * source + axis.rank for source in range(4)]
    axis.barrier()
    if by_host:
        assert {"all_reduce", "send", "receive", "all_to_all"} < set(seen)


@pytest.mark.parametrize("by_host", [False, True])
def test_collectives_compute_the_same_over_both_transports(ranks: Any, by_host: bool) -> None:
    """``HostTransport`` is what ranks that share a GPU have."""
    ranks(4, collectives_on_rank, by_host)


def trained_on_rank(by_host: bool) -> tuple[list[float], type[Transport]]:
    """Losses of three steps on 2 stages x 2 replicas in ZeRO stage 3, and the class of the axes' transport."""
    with patch.object(Grid, "_gpus_are_shared", lambda self: by_host), copied() if by_host else nullcontext():
        return trained(Grid(pipe=2, data=2, timeout=60))


def trained(grid: Grid) -> tuple[list[float], type[Transport]]:
    layers: list[Any] = [LayerSpec(nn.Linear, 6, 6), torch.tanh, LayerSpec(nn.Linear, 6, 6), torch.tanh]
    engine = triax.initialize(
        model=PipelineModule(layers, grid=grid, loss_fn=nn.functional.mse_loss, seed=3),
        config={
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 3},
        },
    )[0]
    made = torch.Generator().manual_seed(grid.data.rank)
    batches = [(torch.randn(2, 6, generator=made), torch.randn(2, 6, generator=made)) for _ in range(6)]
    found = iter(batches)
    return [engine.train_batch(found).item() for _ in range(3)], type(grid.pipe.transport)


def test_training_over_the_host_transport_is_bitwise_the_same(ranks: Any) -> None:
    """In a pipeline with ZeRO stage 3, with the plain transport and with the host transport."""
    plain = ranks(4, trained_on_rank, False)
    assert all(kind is Transport for _, kind in plain)
    by_host = ranks(4, trained_on_rank, True)
    assert all(kind is HostTransport for _, kind in by_host)
    assert [losses for losses, _ in by_host] == [losses for losses, _ in plain]


def exchange_on_rank() -> None:
    axis = Grid(data=4).data
    values: list[Any] = [
        (None, True, 3, -(2**70), 0.1, float("inf"), "é\ud800", [], (1, (2,)), {"$tuple": [1]}),
        {1: "x", (2, "y"): {3}, None: torch.bfloat16},
        "long " * 1000,
        "",
    ]
    assert axis.all_gather_json(values[axis.rank]) == values
    assert axis.all_gather_json(values[-1 - axis.rank]) == values[::-1]
    for size in range(490, 520):  # around the size of the first message
        assert axis.all_gather_json("x" * (size + axis.rank)) == ["x" * (size + rank) for rank in range(4)]
    assert all(math.isnan(each) for each in axis.all_gather_json(float("nan")))
    assert axis.traffic.bytes("data", "all_gather") == 0  # no report counts it
    for wrong in (object(), b"bytes", nn.Linear(1, 1), [torch.ones(2)], {"f": print}):
        with pytest.raises(TypeError, match=r"^a value for the other ranks\S* is a "):
            axis.all_gather_json(wrong)


def test_all_gather_json_gathers_the_values_of_all_ranks(ranks: Any) -> None:
    ranks(4, exchange_on_rank)


# ------------------------------------------------------------------------------------------------ launchers


def launched_on_rank(launcher: str) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    rank, size, port = (os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if launcher == "torchrun":
        os.environ.update(RANK=rank, WORLD_SIZE=size, MASTER_PORT=port)
    elif launcher == "mpirun":
        os.environ.update(
            OMPI_COMM_WORLD_RANK=rank,
            OMPI_COMM_WORLD_SIZE=size,
            OMPI_COMM_WORLD_LOCAL_RANK=rank,
            OMPI_COMM_WORLD_LOCAL_SIZE=size,
            MASTER_PORT=port,
        )
    else:
        del os.environ["MASTER_ADDR"]
        os.environ.update(
            SLURM_PROCID=rank,
            SLURM_STEP_NUM_TASKS=size,
            SLURM_LOCALID=rank,
            SLURM_STEP_NODELIST="127.0.0.1",
            MASTER_PORT=port,
        )
    assert not dist.is_initialized()
    grid = Grid(pipe=2)
    assert dist.is_initialized() and dist.get_backend() == "gloo"
    found = repr(grid), reached(grid.pipe), reached(grid.data)
    grid.close()
    assert not dist.is_initialized()
    return found


def made_again_on_rank(launchers_port: int | None) -> tuple[list[float], bool]:
    if launchers_port is not None:
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", MASTER_PORT=str(launchers_port))
    sums = []
    for _ in range(3):
        grid = Grid(data=2, timeout=20)
        x = torch.full((5000,), 1.0 + grid.rank)
        grid.data.all_reduce(x).wait()
        sums.append(x.mean().item())
        grid.close()
        kept = weakref.ref(grid)
        del grid
    return sums, kept() is None


@pytest.mark.parametrize("by_launcher", [False, True], ids=["rank 0 serves the store", "the launcher serves it"])
def test_a_process_makes_another_grid_after_it_closed_one(ranks: Any, by_launcher: bool) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if by_launcher else None
    found = ranks(2, made_again_on_rank, store and store.port, init_group=False)
    assert found == [([3.0, 3.0, 3.0], True)] * 2


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun", "srun"])
def test_a_grid_joins_the_processes_of_each_launcher(ranks: Any, launcher: str) -> None:
    found = ranks(4, launched_on_rank, launcher, init_group=False)
    assert found[3] == ("Grid(pipe=2, data=2, tensor=1; rank 3 (pipe 1, data 1, tensor 0), cpu)", (1, 3), (2, 3))
    assert found[0][1:] == ((0, 2), (0, 1))


# -------------------------------------------------------------------------------------- limits and failures


def late_on_rank() -> list[tuple[str, float]]:
    grid = Grid(data=2, tensor=2, timeout=2.0)
    axes = (grid.world, grid.tensor, grid.joint("pipe", "tensor"))
    if grid.tensor.rank == 1:
        time.sleep(2.5)  # alive, but not there; its sockets stay open until all ranks are done
        return []
    start = time.monotonic()
    works = [axis.all_reduce(torch.ones(1), async_op=True) for axis in axes]
    said = []
    for work in works:
        try:
            work.wait()
            said.append(("no error", time.monotonic() - start))
        except RuntimeError as error:
            said.append((str(error), time.monotonic() - start))
    return said


def test_no_wait_is_longer_than_the_grids_timeout(ranks: Any) -> None:
    """The groups of the mesh have the timeout of the grid too, not torch's default of half an hour."""
    found = ranks(4, late_on_rank, init_group=False, timeout=30)
    for message, seconds in found[0] + found[2]:
        assert "Timed out waiting 2000ms" in message
        assert seconds < 4 * slowdown()
    assert len(found[0]) == 3


def policies_on_rank() -> tuple[dict[int, int], dict[int, int]]:
    """The scheduler's policies of this process's threads, before and after the grid made its groups."""

    def policies() -> dict[int, int]:
        found = {}
        for thread in [int(folder.name) for folder in Path("/proc/self/task").glob("*")]:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                found[thread] = os.sched_getscheduler(thread)
        return found

    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # a rank of the pool has SCHED_BATCH
    before = policies()
    try:
        Grid(pipe=2)
        return before, policies()
    finally:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def test_only_threads_of_gloo_get_a_lower_priority(ranks: Any) -> None:
    for before, after in ranks(2, policies_on_rank):
        assert all(
            after[thread] == policy for thread, policy in before.items() if thread in after
        )  # some may have ended
        made = [policy for thread, policy in after.items() if thread not in before]
        assert not made or made.count(os.SCHED_BATCH) >= 3  # on Linux; elsewhere no thread is seen


def report_on_rank() -> tuple[str | None, str | None]:
    grid = Grid(data=2)
    before = grid.reported_failure()
    grid.world.barrier()
    if grid.rank == 1:
        grid.report_failure(f"{grid.describe()} ran out of memory")
    grid.world.barrier()
    if grid.rank == 0:
        grid.report_failure("this one comes second, as a consequence")
    grid.world.barrier()
    return before, grid.reported_failure()


def test_every_rank_reads_the_first_reported_failure(ranks: Any) -> None:
    said = "rank 1 (pipe 0, data 1, tensor 0) ran out of memory"
    assert ranks(2, report_on_rank) == [(None, said)] * 2


def refused_on_rank(sizes: dict[str, Any]) -> str:
    return error_text(lambda: Grid(**sizes))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"pipe": 3},
            (
                "a grid of pipe 3 x data ? x tensor 1 needs a multiple of 3 processes, and there are 4: start it with "
                "torchrun --nproc-per-node 6, or give other sizes"
            ),
        ),
        (
            {"pipe": 2, "data": 2, "tensor": 2},
            "a grid of pipe 2 x data 2 x tensor 2 needs 8 processes, and there are 4: start it with torchrun --nproc",
        ),
        ({"tensor": 0}, "the tensor axis has the size 0"),
        ({"order": ("pipe", "data")}, "order=('pipe', 'data') does not name each axis once"),
    ],
)
def test_grid_sizes_that_do_not_fit_the_processes_are_refused(ranks: Any, sizes: dict[str, Any], message: str) -> None:
    for said in ranks(4, refused_on_rank, sizes, init_group=False):
        assert said.startswith(message)


def test_grid_errors_on_one_process_say_what_to_give() -> None:
    with pytest.raises(ValueError, match=r"needs a multiple of 2 processes, and there is 1: .*--nproc-per-node 2"):
        Grid(tensor=2)
    with pytest.raises(ValueError, match="no axis 'model': give one of pipe, data, context, tensor, expert"):
        Grid().axis("model")


def test_a_barrier_returns_if_a_rank_gives_up_during_the_read() -> None:
    class Store:
        """A store in which rank 1 gives up just after rank 0 has seen that rank 1 is there."""

        def __init__(self) -> None:
            self.values = {"save/1": b"+left"}

        def set(self, key: str, value: str) -> None:
            self.values[key] = value.encode()

        def check(self, keys: list[str]) -> bool:
            here = all(key in self.values for key in keys)
            if keys == ["save/1"]:
                store_barrier(Other(self), "save", 1, 3, "left", 0.0)
            return here

        def get(self, key: str) -> bytes:
            assert key in self.values, f"waits for {key}, which comes no more"
            return self.values[key]

    class Other(Store):
        def __init__(self, store: Store) -> None:
            self.values = store.values

        def check(self, keys: list[str]) -> bool:
            return all(key in self.values for key in keys)

    store = Store()
    assert store_barrier(store, "save", 0, 3, "first", 0.0) == ["first", None, None]
    assert store_barrier(Other(store), "save", 2, 3, "late", 0.0) == [None, None, "late"]


MANY_WATCHES = """
import time
from types import SimpleNamespace
from torch.distributed import TCPStore
from triax.grid.agreement.hang_watch import Activity, HangWatch
class Grid(SimpleNamespace):
    pass
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
grids = [Grid(rank=0, size=2, timeout=0.01, activity=Activity()) for _ in range(16)]
watches = [HangWatch(grid, store) for grid in grids]  # each looks into the store 1,000 times a second
time.sleep(0.2)
print("done")
"""


def test_a_program_whose_grids_still_exist_ends_in_order() -> None:
    """Otherwise Python would abort it: a thread is in a call of the store while Python ends the thread."""
    done = subprocess.run(
        [sys.executable, "-c", MANY_WATCHES], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


def collectives_of_a_graph(count: int, size: int) -> list[bool]:
    """Call each collective with a tensor that requires gradients; return which results have a graph."""
    axis, graphs = Grid(data=count, timeout=60).data, list[bool]()
    ones = torch.ones(axis.size, size, requires_grad=True)
    for asynchronous in (False, True):
        flat, row = torch.zeros(axis.size * size), torch.zeros(size)
        axis.all_reduce(ones, async_op=asynchronous).wait()
        axis.all_gather(flat, ones[0], async_op=asynchronous).wait()
        axis.reduce_scatter(row, ones.flatten(), async_op=asynchronous).wait()
        whole = torch.zeros(axis.size, size)
        axis.all_to_all(whole, ones, async_op=asynchronous).wait()
        graphs += [flat.requires_grad, row.requires_grad, whole.requires_grad]
    return graphs


@pytest.mark.parametrize("size", [4, 5000, 2**19])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_collectives_pass_no_gradients(ranks: Any, count: int, size: int) -> None:
    assert not any(graph for found in ranks(count, collectives_of_a_graph, count, size) for graph in found)


def calls_on_all_ranks(sizes: dict[str, Any]) -> int:
    """Make a grid, and return how many groups were made by a call on every rank."""
    calls, make = [], dist.new_group

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(not options.get("use_local_synchronization"))
        return make(*args, **options)

    with patch.object(dist, "new_group", counted):
        grid = Grid(timeout=20, **sizes)
    x = torch.ones(1)
    grid.data.all_reduce(x)
    own = grid.group(grid.tensor)
    assert x.item() == grid.data.size and own is not None and own.size() == grid.tensor.size
    return sum(calls)


def test_groups_of_one_rank_need_no_call_on_other_ranks(ranks: Any) -> None:
    """A call on all ranks for each would be 1,024 calls for ``tensor=1`` at 16 stages and 64 replicas."""
    cases: list[tuple[dict[str, Any], int]] = [({"pipe": 2, "data": 2}, 4), ({}, 1), ({"data": 2, "tensor": 2}, 4)]
    for sizes, calls in cases:
        assert ranks(4, calls_on_all_ranks, sizes) == [calls] * 4


def bytes_of_collectives() -> dict[str, float]:
    """Return the bytes that this rank counts in each collective of 9 float64 numbers, 72 bytes, in all."""
    axis, x = Grid(data=3, timeout=60).data, torch.ones(9, dtype=torch.float64)
    axis.traffic.clear()
    axis.all_reduce(x)
    axis.all_gather(torch.empty_like(x), x[:3])
    axis.reduce_scatter(torch.empty_like(x[:3]), x)
    axis.broadcast(x, source=1)
    # From rank r, r + 1 rows go to each rank.
    rank = axis.rank
    received, sent = torch.empty(6), torch.ones(3 * (rank + 1))
    axis.all_to_all(received, sent, receive=[1, 2, 3], send=[rank + 1] * 3)
    return {name: axis.traffic.bytes("data", name) for name in axis.traffic.report()["data"]}


def test_each_rank_counts_the_bytes_that_a_ring_sends(ranks: Any) -> None:
    for rank, sent in enumerate(ranks(3, bytes_of_collectives)):
        ring = 72 * 2 / 3
        assert sent == {
            "all_reduce": 2 * ring,
            "all_gather": ring,
            "reduce_scatter": ring,
            "broadcast": 72 if rank == 1 else 0,
            "all_to_all": 2 * (rank + 1) * 4,
        }
