"""Horovod's operations, each against its formula: every rank knows what all of them have."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import triax.compat.horovod as hvd
from triax.compat.horovod.context import HorovodContext, context
from triax.testing import pool
from triax.testing.pool import RankFailure

from support.sweeps import some

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)


@contextlib.contextmanager
def started(**options: Any) -> Iterator[HorovodContext]:
    hvd.init(**options)
    hvd.init()  # a second one does nothing
    try:
        yield context()
    finally:
        hvd.shutdown()


def of(rank: int, *shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Return the tensor of a rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return values.to(dtype) if dtype.is_floating_point else (10 * values).abs().to(dtype)


def all_of(*shape: int, **options: Any) -> Tensor:
    return torch.stack([of(rank, *shape, **options) for rank in range(hvd.size())])


def close(found: Tensor, wanted: Tensor, bound: float = 1e-12) -> None:
    torch.testing.assert_close(found, wanted, rtol=bound, atol=bound)


# --------------------------------------------------------------------------------------------------------- reductions


def reductions() -> None:
    with started() as made:
        assert (hvd.rank(), hvd.size()) == (made.grid.rank, made.grid.size)
        n, me = hvd.size(), hvd.rank()
        for shape in ((), (5,), (2, 3), (40, 50), (0, 3)):
            mine, everyone = of(me, *shape), all_of(*shape)
            formulas = {
                hvd.Average: everyone.sum(0) / n,
                hvd.Sum: everyone.sum(0),
                hvd.Min: everyone.amin(0),
                hvd.Max: everyone.amax(0),
                hvd.Product: everyone.prod(0),
            }
            for op, wanted in formulas.items():
                before = mine.clone()
                close(hvd.allreduce(mine, op=op, name=f"{op.name} of {shape}"), wanted)
                assert torch.equal(mine, before)
                handle = hvd.allreduce_async(mine, op=op)
                close(hvd.synchronize(handle), wanted)
                assert hvd.poll(handle)
                assert hvd.allreduce_(before, op=op) is before
                close(before, wanted)
            close(hvd.allreduce(mine), formulas[hvd.Average])
            close(hvd.allreduce(mine, average=True), formulas[hvd.Average])
            close(hvd.allreduce(mine, average=False), formulas[hvd.Sum])
            scaled = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
            close(scaled, 1.5 * formulas[hvd.Sum])
            found = hvd.allreduce(mine, prescale_factor=0.5, postscale_factor=3.0)
            close(found, 1.5 * formulas[hvd.Average])

        for dtype in DTYPES:
            mine, everyone = of(me, 7, dtype=dtype), all_of(7, dtype=dtype)
            found = hvd.allreduce(mine, op=hvd.Sum)
            assert found.dtype == dtype
            if dtype.is_floating_point:
                bound = 8 * torch.finfo(dtype).eps
                torch.testing.assert_close(found.double(), everyone.double().sum(0), rtol=bound, atol=4 * bound)
            else:
                assert torch.equal(found, everyone.sum(0).to(dtype))
                whole = torch.div(everyone.sum(0), n, rounding_mode="trunc").to(dtype)
                assert torch.equal(hvd.allreduce(mine), whole)

        a, b, c = (of(me, *s, seed=i) for i, s in enumerate([(3,), (2, 2), (4,)]))
        means = [all_of(*s, seed=i).mean(0) for i, s in enumerate([(3,), (2, 2), (4,)])]
        means[2] = means[2].float()
        for several in (
            hvd.grouped_allreduce([a, b, c.float()]),
            hvd.synchronize(hvd.grouped_allreduce_async([a, b, c.float()])),
            hvd.grouped_allreduce_([a, b, c.float()]),
        ):
            for one, other in zip(several, means, strict=True):
                torch.testing.assert_close(one, other)
        close(a, means[0])  # in place

        # Parts of tensors, which are not one piece of memory.
        wide = of(me, 4, 6)
        close(hvd.allreduce(wide[:, ::2]), all_of(4, 6).mean(0)[:, ::2])
        hvd.allreduce_(wide.t())
        close(wide, all_of(4, 6).mean(0))

        mine = of(me, 30)
        for compression, bound in ((hvd.Compression.fp16, 2**-9), (hvd.Compression.bf16, 2**-6)):
            found = hvd.allreduce(mine, compression=compression)
            assert found.dtype == mine.dtype and not torch.equal(found, all_of(30).mean(0))
            torch.testing.assert_close(found, all_of(30).mean(0), rtol=bound, atol=bound)
            whole = torch.tensor([3, 4])
            assert torch.equal(hvd.allreduce(whole, compression=compression, op=hvd.Sum), n * whole)


def gradients() -> None:
    """Horovod's conventions, see docs/horovod.md."""
    with started():
        n, me = hvd.size(), hvd.rank()

        def pushed(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
            (gradient,) = torch.autograd.grad((y * weight).sum(), x)
            return gradient

        x = of(me, 3, 2).requires_grad_()
        weight, weights = of(me, 3, 2, seed=1), all_of(3, 2, seed=1)
        close(pushed(x, hvd.allreduce(x), weight), weights.mean(0))
        close(pushed(x, hvd.allreduce(x, op=hvd.Sum), weight), weights.sum(0))
        found = pushed(x, hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0), weight)
        close(found, 1.5 * weights.sum(0))
        for one in hvd.grouped_allreduce([x, x.exp()], op=hvd.Sum)[:1]:
            close(pushed(x, one, weight), weights.sum(0))
        # Twice: the gradient of a gradient.
        (once,) = torch.autograd.grad(hvd.allreduce(x, op=hvd.Sum).pow(3).sum(), x, create_graph=True)
        (twice,) = torch.autograd.grad(once.sum(), x)
        close(twice, n * n * 6 * all_of(3, 2).sum(0))
        with pytest.raises(RuntimeError, match=r"op=Max\) has no gradient here"):
            hvd.allreduce(x, op=hvd.Max).sum().backward()

        x = of(me, me + 1, 2).requires_grad_()
        total = n * (n + 1) // 2
        weight = of(me, total, 2, seed=2)
        start = me * (me + 1) // 2
        mean = all_of(total, 2, seed=2).mean(0)
        close(pushed(x, hvd.allgather(x), weight), mean[start : start + me + 1])

        x = of(me, 3).requires_grad_()
        weight, mean = of(me, 3, seed=3), all_of(3, seed=3).mean(0)
        close(pushed(x, hvd.broadcast(x, n - 1), weight), mean if me == n - 1 else torch.zeros(3).double())

        # Of rank s to rank r go s + r rows; the gradients come back to where the rows were.
        splits = [me + r for r in range(n)]
        x = of(me, sum(splits), 2).requires_grad_()
        y, received = hvd.alltoall(x, splits)
        assert received.tolist() == splits
        parts = [of(r, sum(r + s for s in range(n)), 2, seed=4).split([r + s for s in range(n)])[me] for r in range(n)]
        close(pushed(x, y, of(me, sum(splits), 2, seed=4)), torch.cat(parts))

        for op, factor in ((hvd.Sum, n), (hvd.Average, 1)):
            for rows in (2 * n, 2 * n + 1):
                x = of(me, rows, 2).requires_grad_()
                mine = [rows // n + (r < rows % n) for r in range(n)]
                wanted = factor * torch.cat([of(r, mine[r], 2, seed=5) for r in range(n)])
                close(pushed(x, hvd.reducescatter(x, op=op), of(me, mine[me], 2, seed=5)), wanted)


def moves() -> None:
    with started():
        n, me = hvd.size(), hvd.rank()
        for dtype in (*DTYPES, torch.bool):
            rows = [of(r, r % 3, 2, dtype=dtype) for r in range(n)]
            found = hvd.allgather(rows[me], name="uneven")
            assert torch.equal(found, torch.cat(rows)) and found.dtype == dtype
            even = [of(r, 2, 3, dtype=dtype) for r in range(n)]
            assert torch.equal(hvd.allgather(even[me]), torch.cat(even))
            assert torch.equal(hvd.synchronize(hvd.allgather_async(rows[me])), torch.cat(rows))
            for root in (0, n - 1):
                mine = even[me].clone()
                assert torch.equal(hvd.broadcast(mine, root), even[root]) and torch.equal(mine, even[me])
                assert torch.equal(hvd.synchronize(hvd.broadcast_async(mine, root)), even[root])
                assert hvd.broadcast_(mine, root) is mine and torch.equal(mine, even[root])
            tensors = [of(r, 2 * n, 3, dtype=dtype) for r in range(n)]
            wanted = torch.cat([tensor[2 * me : 2 * me + 2] for tensor in tensors])
            assert torch.equal(hvd.alltoall(tensors[me]), wanted)
            whole, received = hvd.synchronize(hvd.alltoall_async(tensors[me]))
            assert torch.equal(whole, wanted) and received.tolist() == [2] * n
        assert [t.shape[0] for t in hvd.grouped_allgather([torch.ones(me, 1), torch.ones(1)])] == [n * (n - 1) // 2, n]

        for count in (2 * n, 2 * n + 1, 1):
            shares = [count // n + (r < count % n) for r in range(n)]
            start = sum(shares[:me])
            for op, full in ((hvd.Sum, all_of(count, 3).sum(0)), (hvd.Average, all_of(count, 3).mean(0))):
                part = full[start : start + shares[me]]
                close(hvd.reducescatter(of(me, count, 3), op=op), part)
                close(hvd.synchronize(hvd.reducescatter_async(of(me, count, 3), op=op)), part)
                close(hvd.grouped_reducescatter([of(me, count, 3)], op=op, prescale_factor=2.0)[0], 2 * part)

        assert hvd.broadcast_object({"from": me, "list": [1]}, n - 1) == {"from": n - 1, "list": [1]}
        assert hvd.allgather_object(("of", me)) == [("of", r) for r in range(n)]
        hvd.barrier()
        # Started one after the other, waited for in another order.
        handles = [hvd.allreduce_async(torch.full((100,), float(i)), name=f"tensor {i}", op=hvd.Sum) for i in range(8)]
        for i in (5, 0, 7, 1, 2, 3, 4, 6):
            assert torch.equal(hvd.synchronize(handles[i]), torch.full((100,), float(n * i)))
        late = hvd.allreduce_async(torch.ones(1), op=hvd.Sum)
        deadline = time.monotonic() + 30
        while not hvd.poll(late):
            assert time.monotonic() < deadline
        assert float(hvd.synchronize(late)) == n


def conjugates() -> None:
    """Complex tensors, and views with a lazy conjugate or negative bit, which is no part of their memory."""
    with started():
        n, me = hvd.size(), hvd.rank()
        values = [torch.complex(of(r, 2 * n), of(r, 2 * n, seed=1)) for r in range(n)]
        everyone = torch.stack(values).conj().resolve_conj()

        def mine() -> Tensor:
            view = values[me].clone().conj()
            assert view.is_conj()
            return view

        for found in (hvd.allreduce(mine()), hvd.allreduce_(mine())):
            close(found, everyone.mean(0))
        close(hvd.allreduce(mine(), op=hvd.Sum, prescale_factor=0.5), 0.5 * everyone.sum(0))
        close(hvd.reducescatter(mine()), everyone.mean(0)[2 * me : 2 * me + 2])
        close(hvd.allgather(mine()), everyone.flatten())
        close(hvd.alltoall(mine()), everyone[:, 2 * me : 2 * me + 2].flatten())
        for found in (hvd.broadcast(mine(), n - 1), hvd.broadcast_(mine(), n - 1)):
            close(found, everyone[n - 1])
        view = mine()
        hvd.broadcast_parameters([view], n - 1)
        close(view, everyone[n - 1])
        for op, wanted in ((None, everyone.imag[n - 1, :1]), (hvd.Max, everyone.imag[:, :1].amax(0))):
            negative = values[me][:1].clone().conj().imag
            assert negative.is_neg() and negative.is_contiguous()
            close(hvd.broadcast_(negative, n - 1) if op is None else hvd.allreduce_(negative, op=op), wanted)


@pytest.mark.parametrize("count", some([1, 2, 4], [0, 1]))
def test_every_horovod_operation_equals_its_formula(ranks: Any, count: int) -> None:
    for work in (reductions, gradients, moves, conjugates):
        ranks(count, work)


# ------------------------------------------------------------------------------------------------------- what differs


def early_and_late() -> float:
    """An operation beside the script does not hold it up, however late another rank is."""
    with started():
        hvd.barrier()
        if hvd.rank() == 1:
            time.sleep(0.3)
        began = time.perf_counter()
        handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum)
        beside = hvd.poll(handle)
        took = time.perf_counter() - began
        assert torch.equal(hvd.synchronize(handle), torch.full((3,), 2.0))
        assert hvd.rank() == 1 or (not beside and time.perf_counter() - began > took)
        return took


def test_asynchronous_operations_run_beside_the_script(ranks: Any) -> None:
    ranks(2, early_and_late)


def unlike() -> list[str]:
    said = []
    with started():
        me = hvd.rank()
        for call in (
            lambda: hvd.allreduce(torch.ones(2 + me), name="loss"),
            lambda: hvd.allreduce(torch.ones(2), name=f"loss of {me}"),
            lambda: hvd.allreduce(torch.ones(2).to(torch.float64 if me else torch.float32), name="dtypes"),
            lambda: hvd.allreduce(torch.ones(2), op=hvd.Sum if me else hvd.Average, name="ops"),
            lambda: hvd.broadcast(torch.ones(2), me, name="roots"),
            lambda: hvd.allgather(torch.ones(2, 1 + me), name="columns"),
            lambda: hvd.allgather(torch.ones(2)) if me else hvd.barrier(),
            lambda: hvd.synchronize(hvd.allreduce_async(torch.ones(1 + me), name="later")),
            lambda: hvd.broadcast_parameters(torch.nn.Linear(2, 2 + me).state_dict()),
            lambda: hvd.broadcast_optimizer_state(
                torch.optim.SGD(torch.nn.Linear(2, 2, bias=bool(me)).parameters(), lr=0.1)
            ),
        ):
            with pytest.raises(ValueError) as error:
                call()
            said.append(str(error.value))
        assert float(hvd.allreduce(torch.tensor(1.0), op=hvd.Sum)) == hvd.size()  # and on it goes
    return said


def test_calls_that_differ_between_ranks_are_an_error_on_each(ranks: Any) -> None:
    first, *others = ranks(2, unlike)
    assert all(said == first for said in others)
    assert first[0].startswith(
        "rank 1 calls allreduce of 'loss': average of (3,) float32; rank 0 calls allreduce of 'loss': average of (2,)"
    )
    for said, words in zip(
        first,
        ("(2,)", "loss of 1", "float64", "sum of", "rank 1", "(any, 2)", "barrier", "later", "weight (3, 2)", "[2]"),
        strict=True,
    ):
        assert words in said


def fails_alone() -> None:
    with started(timeout=30):
        hvd.allreduce(torch.ones(1))
        if hvd.rank() == 1:
            raise ArithmeticError("planted")
        hvd.allreduce(torch.ones(1), name="the loss")


def test_ranks_do_not_wait_for_a_rank_that_failed(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "GRACE", 20.0)  # the other rank asks for seconds which rank is gone
    with pytest.raises(RankFailure) as error:
        ranks(2, fails_alone)
    assert "planted" in str(error.value)
    assert "allreduce of the loss" in error.value[0].summary


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: hvd.allreduce(torch.ones(1), op=hvd.Adasum), "op=Adasum"),
        (lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum), "give only op"),
        (lambda: hvd.allreduce(torch.tensor([True])), "tensor.to(torch.uint8)"),
        (lambda: hvd.allreduce(torch.tensor([1]), prescale_factor=0.5), "reduce tensor.double()"),
        (lambda: hvd.allreduce(torch.eye(2).to_sparse()), "tensor.to_dense()"),
        (lambda: hvd.allreduce(cast(Any, 0.5)), "give torch.tensor(value)"),
        (lambda: hvd.allgather(torch.tensor(1.0)), "tensor.view(1)"),
        (lambda: hvd.allreduce(torch.ones(1, device="meta")), "a tensor on meta"),
        (lambda: hvd.broadcast(torch.ones(1), 3), "root_rank=3, but there are 1 ranks: give a rank from 0 to 0"),
        (
            lambda: hvd.alltoall(torch.ones(3), [1]),
            "splits=[1] for 3 rows: give 1 numbers of at least 0 that add",
        ),
        (lambda: hvd.reducescatter(torch.ones(2), op=hvd.Max), "reducescatter(op=Max)"),
        (lambda: hvd.synchronize(cast(Any, 7)), "7 is not a handle"),
        (lambda: hvd.broadcast_parameters(3), "give model.state_dict()"),
        (lambda: hvd.add_process_set([0]), "groups of processes are the axes of a grid"),
        (lambda: hvd.ProcessSet([0]), "groups of processes are the axes of a grid"),
        (lambda: hvd.barrier(cast(Any, object())), "groups of processes are the axes of a grid"),
        (lambda: hvd.init([0, 1]), "groups of processes are the axes of a grid"),
        (lambda: hvd.start_timeline("t.json", mark_cycles=True), "triax has no cycles"),
        (lambda: hvd.stop_timeline(), "call start_timeline(file) before"),
    ],
)
def test_horovod_operations_refuse_wrong_arguments(call: Any, words: str) -> None:
    with started():
        with pytest.raises((ValueError, TypeError), match=re.escape(words)):
            call()
        assert hvd.join() == 0 and hvd.allreduce(torch.ones(1), process_set=hvd.global_process_set).item() == 1.0


def test_alltoall_works_on_a_single_gpu_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single process on a GPU has no process group through which NCCL could exchange."""
    with started():
        monkeypatch.setattr(Tensor, "is_cuda", True)
        assert torch.equal(hvd.alltoall(torch.arange(3)), torch.arange(3))


def refused_on_several() -> None:
    with started():
        with pytest.raises(ValueError, match=r"call optimizer\.zero_grad\(\); optimizer\.step\(\) as often as the"):
            hvd.join()
        with pytest.raises(ValueError, match="3 rows cannot be divided evenly among 2 ranks: give splits"):
            hvd.alltoall(torch.ones(3))


def again() -> float:
    """``init`` joins a process group if the script has made none."""
    total = 0.0
    for _ in range(2):
        with started(timeout=30):
            total += float(hvd.allreduce(torch.ones(1), op=hvd.Sum))
    return total


def test_hvd_init_works_again_after_shutdown(ranks: Any) -> None:
    assert ranks(2, again, init_group=False) == [4.0, 4.0]


def test_wrong_horovod_calls_are_refused_on_several_ranks(ranks: Any) -> None:
    ranks(2, refused_on_several)


def test_calls_before_init_say_that_init_is_missing() -> None:
    assert not hvd.is_initialized()
    for call in (hvd.rank, hvd.size, hvd.local_rank, lambda: hvd.allreduce(torch.ones(1)), hvd.barrier):
        with pytest.raises(ValueError, match=r"hvd\.init\(\) was not called"):
            call()
    hvd.shutdown()
    with started():
        assert hvd.is_initialized()
        assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
        assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
        assert not (hvd.mpi_built() or hvd.mpi_enabled() or hvd.mpi_threads_supported())
        assert hvd.gloo_built() and hvd.gloo_enabled() and hvd.nccl_built() in (0, 1)
    assert not hvd.is_initialized()


def places(sizes: list[int]) -> tuple[int, ...]:
    """Ranks and local ranks on hosts with the given numbers of processes."""
    import os

    here, rank = [(i, local) for i, size in enumerate(sizes) for local in range(size)], int(os.environ["RANK"])
    os.environ.update(LOCAL_RANK=str(here[rank][1]), LOCAL_WORLD_SIZE=str(sizes[here[rank][0]]))
    with started():
        found = (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), int(hvd.is_homogeneous()))
    os.environ.pop("LOCAL_WORLD_SIZE")  # then they are told by the hosts' names
    with started():
        assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (rank, 4, 0, 1)
    return found


def test_local_and_cross_ranks_follow_the_hosts(ranks: Any) -> None:
    assert ranks(4, places, [2, 2]) == [(0, 2, 0, 2, 1), (1, 2, 0, 2, 1), (0, 2, 1, 2, 1), (1, 2, 1, 2, 1)]
    assert ranks(4, places, [3, 1]) == [(0, 3, 0, 2, 0), (1, 3, 0, 1, 0), (2, 3, 0, 1, 0), (0, 1, 1, 2, 0)]
