"""Horovod's optimizer: calls in a wrong order, arguments, state on all ranks, and the programs of the docs."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax.compat.horovod as hvd
from triax.testing.pool import RankFailure
from triax.zero import ShardedOptimizer

from support.horovod_models import MAKERS, Halves, groups, hvd_grid, loss_of, net, started
from support.paths import DOCS

require_equal = partial(torch.testing.assert_close, rtol=0, atol=0)  # of nests of tensors and numbers


def clips_too_early() -> None:
    with started():
        model = nn.Linear(3, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for early in (False, True):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            if not early:
                optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            with contextlib.nullcontext() if early else optimizer.skip_synchronize():
                optimizer.step()


def test_clipping_before_gradients_are_averaged_is_refused(ranks: Any) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks(2, clips_too_early)
    assert "call optimizer.synchronize() before" in failure.value.first.text


def separate_losses() -> list[Tensor]:
    """Two losses of other parameters each, and a group that is added later."""
    with started():
        a, b, late = (nn.Linear(3, 1, dtype=torch.float64) for _ in range(3))
        hvd.broadcast_parameters({f"{i}.{n}": p for i, m in enumerate((a, b, late)) for n, p in m.named_parameters()})
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1))
        start = [p.detach().clone() for m in (a, b, late) for p in m.parameters()]
        x = torch.full((1, 3), 1.0 + hvd.rank(), dtype=torch.float64)
        for step in range(2):
            optimizer.zero_grad()
            a(x).sum().backward()
            b(2 * x).sum().backward()
            if step == 1:
                late(3 * x).sum().backward()
            optimizer.step()
            if step == 0:
                optimizer.add_param_group({"params": list(late.parameters()), "lr": 0.01})
        moved = [p.detach() - s for p, s in zip((p for m in (a, b, late) for p in m.parameters()), start, strict=True)]
        assert len(optimizer.param_groups) == 2
        return moved


def test_separate_losses_and_later_parameters_are_averaged(ranks: Any) -> None:
    for moved in ranks(2, separate_losses):
        for found, wanted in zip(moved, (-0.3, -0.2, -0.6, -0.2, -0.045, -0.01), strict=True):
            torch.testing.assert_close(found, torch.full_like(found, wanted), rtol=1e-12, atol=1e-12)


def states_around_broadcasts(kind: str) -> list[Any]:
    """Return weights and optimizer state: at first, with the optimizer state of rank 1, and with its weights too.

    Rank 1 alone has trained at first, and has a learning rate of its own.
    """

    def now() -> Any:
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    with started():
        model = net(hvd.rank())
        optimizer = MAKERS[kind](groups(model))
        if hvd.rank() == 1:
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model, step, 0, 0).backward()
                optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.123
        found = [now()]
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        found.append(now())
        hvd.broadcast_parameters(model.state_dict(), root_rank=1)
        return [*found, now()]


def scheduled(how: str) -> tuple[list[list[float]], list[Tensor]]:
    """The scheduler is of the optimizer that is wrapped afterwards, and older than the state that comes."""
    with started():
        model = net(hvd.rank())
        hvd.broadcast_parameters(model.state_dict())
        inner = MAKERS["SGD"](groups(model))
        scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
        held = [*optimizer.param_groups]
        if how == "loaded":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        else:
            hvd.broadcast_optimizer_state(inner if how == "wrapped" else optimizer)
        assert optimizer.param_groups is inner.param_groups and optimizer.state is inner.state
        assert all(a is b for a, b in zip(held, optimizer.param_groups, strict=True))
        rates = []
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, 0, hvd.rank()).backward()
            optimizer.step()
            scheduler.step()
            rates.append([group["lr"] for group in optimizer.param_groups])
        return rates, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("how", ["distributed", "wrapped", "loaded"])
def test_a_scheduler_goes_on_after_optimizer_state_is_loaded(ranks: Any, how: str) -> None:
    first, second = ranks(2, scheduled, how)
    assert first[0] == second[0] == [[0.025, 0.01], [0.0125, 0.005], [0.00625, 0.0025]]
    require_equal(first[1], second[1])


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_broadcasts_copy_optimizer_state_from_rank_1_to_rank_0(ranks: Any, kind: str) -> None:
    (untrained, with_state, with_all), (trained, _, kept) = ranks(2, states_around_broadcasts, kind)
    assert not untrained[1]["state"] and len(trained[1]["state"]) > 4
    require_equal(with_state, (untrained[0], trained[1]))  # Horovod makes a step to create state; it must not show
    require_equal(with_all, trained)
    require_equal(kept, trained)


def wide_momentum(steps: int) -> tuple[Tensor, Tensor]:
    """Weights in bf16 with momentum in fp32; rank 1 has none before the first ``steps`` steps are broadcast."""
    weight = nn.Parameter(torch.linspace(1, 2, 5).bfloat16())
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)

    def step(number: int) -> None:
        weight.grad = torch.linspace(-0.3, number + 0.1, 5).bfloat16()
        optimizer.step()
        optimizer.state[weight]["momentum_buffer"] = optimizer.state[weight]["momentum_buffer"].float()

    for number in range(steps if not hvd.is_initialized() or hvd.rank() == 0 else 0):
        step(number)
    if hvd.is_initialized():
        hvd.broadcast_parameters([weight])
        hvd.broadcast_optimizer_state(optimizer)
    step(steps)
    return weight.detach(), optimizer.state[weight]["momentum_buffer"]


def wide_momentum_of_a_rank(steps: int) -> tuple[Tensor, Tensor]:
    with started():
        return wide_momentum(steps)


def test_broadcasts_do_not_round_fp32_state_of_bf16_weights(ranks: Any) -> None:
    for found in ranks(2, wide_momentum_of_a_rank, 3):
        require_equal(found, wide_momentum(3))


def test_broadcast_parameters_takes_buffers_and_numbers() -> None:
    with started():
        model = nn.BatchNorm1d(3)
        hvd.broadcast_parameters({**model.state_dict(), "version": 3})
        hvd.broadcast_parameters(model.parameters())
        hvd.broadcast_parameters(list(model.named_parameters()))
        hvd.broadcast_parameters(nn.Tanh().state_dict())
        with pytest.raises(ValueError, match=r"call hvd\.broadcast_optimizer_state\(optimizer\)"):
            hvd.broadcast_parameters(torch.optim.SGD(model.parameters()).state_dict())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"named_parameters": lambda m: [("a", p) for p in m.parameters()]}, "named_parameters has a twice"),
        ({"named_parameters": lambda m: list(m.parameters())}, "must give pairs (name, parameter)"),
        ({"named_parameters": lambda m: m.enter.named_parameters()}, "names 2 of the optimizer's 9 parameters"),
        ({"backward_passes_per_step": 0}, "is 0: give at least 1"),
        ({"op": hvd.Adasum}, "op=Adasum is not supported"),
        ({"op": hvd.Max}, "op=Max: gradients are averaged or summed"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "leave it out, or give op=Average"),
        ({"gradient_predivide_factor": 0.0}, "is 0.0: give a number above 0"),
        ({"num_groups": 2, "groups": 2}, "give one of them"),
        ({"groups": 2, "compression": Halves}, "one gradient at a time"),
        ({"process_set": "even"}, "axes of a grid"),
        ({"optimizer": lambda m: torch.optim.LBFGS(m.parameters())}, "LBFGS evaluates the loss"),
        (
            {"optimizer": lambda m: hvd.DistributedOptimizer(torch.optim.SGD(m.parameters()))},
            "the optimizer is a DistributedOptimizer already",
        ),
        (
            {"optimizer": lambda m: ShardedOptimizer(torch.optim.SGD, m.parameters(), hvd_grid(), lr=0.1)},
            "a ShardedOptimizer averages its gradients itself",
        ),
    ],
)
def test_distributed_optimizer_refuses_wrong_arguments(options: dict[str, Any], words: str) -> None:
    with started():
        model = net()
        optimizer = options.pop("optimizer", lambda m: torch.optim.SGD(m.parameters()))(model)
        if "named_parameters" in options:
            options["named_parameters"] = options["named_parameters"](model)
        with pytest.raises(ValueError, match=re.escape(words)):
            hvd.DistributedOptimizer(optimizer, **options)


def orders() -> None:
    with started():
        model = net()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())

        def backward() -> None:
            loss_of(model, 0, 0, 0).backward()

        backward()
        with pytest.raises(RuntimeError, match=r"\w+.bias has got more gradients than backward_passes_per_step=1"):
            backward()
        with pytest.raises(RuntimeError, match=r"zero_grad\(\) after backward\(\) and before step\(\)"):
            optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="allowed between two steps only"):
            optimizer.set_backward_passes_per_step(2)
        with pytest.raises(RuntimeError, match=r"add_param_group\(\) between backward\(\) and step\(\)"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        assert len(optimizer.param_groups) == 1
        with pytest.raises(RuntimeError, match=r"call optimizer.synchronize\(\) before"), optimizer.skip_synchronize():
            optimizer.step()
        optimizer.synchronize()
        optimizer.zero_grad()
        optimizer.set_backward_passes_per_step(2)
        backward()
        backward()
        optimizer.step()
        optimizer.zero_grad()
        model.frozen.requires_grad_()
        with pytest.raises(RuntimeError, match="1 parameters were frozen when DistributedOptimizer was made"):
            optimizer.step()
        sparse = nn.Embedding(4, 2, sparse=True)
        weights = nn.Embedding(4, 2)
        weights.load_state_dict(sparse.state_dict())
        for dense in (False, True):
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(sparse.parameters(), lr=0.1), sparse_as_dense=dense)
            sparse.zero_grad()
            rows = torch.tensor([1, 1, 2])
            with contextlib.nullcontext() if dense else pytest.raises(RuntimeError, match="sparse_as_dense=True"):
                sparse(rows).sum().backward()
        optimizer.step()
        assert torch.allclose(sparse.weight[1], weights.weight[1] - 0.2)
        plain = nn.Linear(2, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(plain.parameters()))
        with pytest.raises(RuntimeError, match="create_graph=True"):
            plain(torch.ones(1, 2)).sum().square().backward(create_graph=True)


@pytest.mark.parametrize("count", [1, 2])
def test_horovod_calls_in_a_wrong_order_are_refused(ranks: Any, count: int) -> None:
    ranks(count, orders)


def unlike() -> str:
    with started():
        model = nn.Linear(2, 3 + hvd.rank())
        with pytest.raises(ValueError, match="all ranks must train one model") as error:
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        return str(error.value)


def test_horovod_models_that_differ_are_refused_on_every_rank(ranks: Any) -> None:
    first, second = ranks(2, unlike)
    assert first == second and "('weight', (3, 2)" in first and "('weight', (4, 2)" in first


def documented() -> list[float]:
    """The loop of docs/horovod.md."""
    text = (DOCS / "horovod.md").read_text()
    (loop,) = re.findall(r"```python\n(# loop\.py\n.*?)```", text, re.DOTALL)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            exec(loop, {})
    finally:
        hvd.shutdown()
    return [float(line.split()[2]) for line in said.getvalue().splitlines()]


def test_the_horovod_loop_of_the_docs_lowers_its_loss(ranks: Any) -> None:
    for count in (1, 2):
        losses, *others = ranks(count, documented)
        assert len(losses) == 20 and losses[-1] < losses[0] and others == [[]] * (count - 1)


def test_the_horovod_page_lists_the_names_of_the_module() -> None:
    """Each name in the table's left column exists in triax.compat.horovod, and each name there is in the table."""
    text = (DOCS / "horovod.md").read_text()
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    told = {name for row in rows for name in re.findall(r"`\.?([A-Za-z_]+)", row)}
    homes = set(dir(hvd))
    variants = {f"grouped_{name}" for name in homes if f"grouped_{name}" in homes}
    assert homes - variants <= told
    aside = {"grouped_", "horovodrun", "HOROVOD_", "hvd", "SyncBatchNorm", "none", "fp", "bf"}
    aside |= {"grouped_allgather_async", "grouped_reducescatter_async", "check_extension"}
    aside |= {f"{library}_built" for library in ("cuda", "rocm", "ccl", "ddl")}
    phases = {name for name in told if name.isupper()}
    methods = {"synchronize", "skip_synchronize", "set_backward_passes_per_step", "zero_grad", "add_param_group"}
    assert told - homes - aside - phases - methods - {"process_set"} == set()


def by_mpirun(variables: dict[str, str]) -> tuple[int, ...]:
    """Start a process as Open MPI or MPICH does: without torchrun's variables."""
    rank, port = os.environ["RANK"], os.environ["MASTER_PORT"]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        os.environ.pop(name)
    os.environ.update({name: value.replace("?", rank) for name, value in variables.items()}, MASTER_PORT=port)
    with started():
        total = hvd.allreduce(torch.tensor([1.0 + hvd.rank()]), op=hvd.Sum)
        return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), int(total)


@pytest.mark.parametrize(
    "variables",
    [
        {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), "?2?2")},
        dict(zip(("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), "?2?2")),
    ],
    ids=["Open MPI", "MPICH"],
)
def test_hvd_init_reads_the_ranks_of_mpirun(ranks: Any, variables: dict[str, str]) -> None:
    assert ranks(2, by_mpirun, variables, init_group=False) == [(0, 2, 0, 2, 3), (1, 2, 1, 2, 3)]
