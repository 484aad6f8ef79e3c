"""Horovod's ``DistributedOptimizer`` and the broadcasts at the start, against torch's optimizers in one process."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import triax.compat.horovod as hvd
from triax.compat.horovod import optimizer as horovod_optimizer
from triax.zero import ShardedOptimizer

from horovod_example import EXAMPLE, plain_example
from paths import DOCS
from pool import RankFailure

WIDTH = 5


@contextlib.contextmanager
def started() -> Iterator[None]:
    hvd.init(timeout=60)
    try:
        yield
    finally:
        hvd.shutdown()


# --------------------------------------------------------------------------------------------- Horovod's own example


def example(*options: str) -> tuple[dict[str, Tensor], Any]:
    sys.argv = [str(EXAMPLE), "--double", *options]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            model, results = runpy.run_path(str(EXAMPLE))["main"]()
        return model.state_dict(), results
    finally:
        hvd.shutdown()


@pytest.mark.parametrize(("count", "clip", "factor"), [(1, 0.0, 1.0), (2, 0.3, 2.0), (4, 0.0, 1.0)])
def test_horovods_own_example(ranks: Any, count: int, clip: float, factor: float) -> None:
    options = f"--samples 128 --batch-size {32 // count} --epochs 2 --lr 0.1 --clip {clip}"
    found = ranks(count, example, *options.split(), "--gradient-predivide-factor", str(factor))
    weights, results = plain_example(count, 128, 32 // count, 2, 0.1, clip)
    for state, seen in found:
        assert list(state) == list(weights)
        for name, tensor in weights.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(torch.tensor(seen), torch.tensor(results), rtol=1e-10, atol=1e-12)
    assert results[0] != results[1]


# ------------------------------------------------------------------------------------------------ one process's steps


class Net(nn.Module):
    """``rare`` is used on rank 0 alone, ``never`` nowhere, and ``frozen`` is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, 4), nn.Linear(4, 1)
        self.rare, self.never = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: Tensor, rare: bool) -> Tensor:
        y: Tensor = self.leave(self.enter(x).tanh()) * self.frozen
        return y + self.rare(x) if rare else y


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def loss_of(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    x = torch.randn(
        3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    )
    y: Tensor = model(x, rank == 0)
    return (y - x.sum(1, keepdim=True)).square().mean()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.02}]


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.05, weight_decay=0.1),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
}


def plain(kind: str, ranks: int, passes: int, steps: int, scale: float) -> list[Tensor]:
    """Every rank's loss in one process, one after the other."""
    model = net()
    optimizer = MAKERS[kind](groups(model))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(passes):
            for rank in range(ranks):
                (scale * loss_of(model, step, micro, rank)).backward()
        optimizer.step()
        scheduler.step()
    return [p.detach() for p in model.parameters()]


def distributed(kind: str, passes: int, steps: int, how: str, **options: Any) -> list[Tensor]:
    with started():
        if "capacity" in options:
            horovod_optimizer._BUCKET_BYTES = options.pop("capacity")
        try:
            model = net(hvd.rank())
            hvd.broadcast_parameters(model.named_parameters())
            inner: Any = MAKERS[kind](groups(model))
            early = torch.optim.lr_scheduler.StepLR(inner, 2, 0.5) if how == "scheduler" else None
            if options.get("groups") == "lists":
                options["groups"] = [[model.leave.weight, model.enter.weight], [model.rare.bias, model.never.bias]]
            optimizer: Any = hvd.DistributedOptimizer(
                inner, model.named_parameters(), backward_passes_per_step=passes, **options
            )
            assert isinstance(optimizer, type(inner)) and type(optimizer).__name__ == type(inner).__name__
            assert optimizer.param_groups is inner.param_groups and optimizer.state is inner.state
            scheduler = early or torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if how == "scaler" else None

            def run(step: int) -> Tensor:
                optimizer.zero_grad()
                total = torch.zeros((), dtype=torch.float64)
                for micro in range(passes):
                    loss = loss_of(model, step, micro, hvd.rank())
                    (loss if scaler is None else scaler.scale(loss)).backward()
                    total += loss.detach()
                return total

            for step in range(steps):
                if how == "closure":
                    assert isinstance(optimizer.step(partial(run, step)), Tensor)
                    scheduler.step()
                    continue
                run(step)
                if how == "synchronize":
                    optimizer.synchronize()
                    optimizer.synchronize()  # sends nothing more
                    with optimizer.skip_synchronize():
                        optimizer.step()
                elif how == "twice":
                    optimizer.synchronize()
                    optimizer.step()
                elif scaler is not None:
                    optimizer.synchronize()
                    scaler.unscale_(optimizer)
                    with optimizer.skip_synchronize():
                        scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
                scheduler.step()
            return [p.detach() for p in model.parameters()]
        finally:
            horovod_optimizer._BUCKET_BYTES = 2**24


@pytest.mark.parametrize(
    ("count", "kind", "passes", "how", "options"),
    [
        (1, "AdamW", 2, "step", {}),
        (2, "SGD", 1, "step", {}),
        (2, "AdamW", 3, "synchronize", {"capacity": 100}),
        (2, "Rprop", 1, "twice", {"groups": 3}),
        (2, "SGD", 2, "closure", {"capacity": 1}),
        (2, "SGD", 1, "scheduler", {"num_groups": 2}),
        (2, "AdamW", 1, "scaler", {"groups": "lists"}),
        (4, "SGD", 2, "step", {"op": hvd.Sum, "capacity": 100}),
        (4, "AdamW", 1, "synchronize", {"gradient_predivide_factor": 3.0}),
    ],
)
def test_weights_are_those_of_one_process(
    ranks: Any, count: int, kind: str, passes: int, how: str, options: dict[str, Any]
) -> None:
    wanted = plain(kind, count, passes, 5, 1.0 if options.get("op") == hvd.Sum else 1.0 / count)
    for found in ranks(count, distributed, kind, passes, 5, how, **options):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-13)


def test_gradients_that_are_zeroed_in_place(ranks: Any) -> None:
    """Zeros are gradients, as in torch: weight decay and momentum still act."""
    model = net()
    optimizer = MAKERS["SGD"](groups(model))
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        for rank in range(2):
            (0.5 * loss_of(model, step, 0, rank)).backward()
        optimizer.step()
    for found in ranks(2, zeroed_in_place):
        torch.testing.assert_close(found, [p.detach() for p in model.parameters()], rtol=1e-10, atol=1e-13)


def zeroed_in_place() -> list[Tensor]:
    with started():
        model = net()
        optimizer = hvd.DistributedOptimizer(MAKERS["SGD"](groups(model)), model.named_parameters())
        for step in range(4):
            optimizer.zero_grad(set_to_none=False)
            loss_of(model, step, 0, hvd.rank()).backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]


# ------------------------------------------------------------------------------------------------------ what is held


def held() -> None:
    with started():
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
        inner = torch.optim.Adam(model.parameters())
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        elements = sum(p.numel() for p in model.parameters())
        gradients = [p.grad for p in model.parameters()]
        storages = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in gradients if g is not None}
        assert sum(storages.values()) == 4 * elements  # one buffer, and no copy beside it
        state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor) and t.dim()]
        assert sum(t.numel() for t in state) == 2 * elements
        assert optimizer.state is inner.state
        # In place: the buffer is used again.
        optimizer.zero_grad(set_to_none=False)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        assert [p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None] == [
            *storages
        ] * len(gradients)
        gradients.clear()
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        held_still = [t for bucket in optimizer._hvd.reducer._buckets for t in vars(bucket).values()]
        assert not any(isinstance(value, Tensor) for value in held_still)


def test_gradients_and_state_are_held_once(ranks: Any) -> None:
    ranks(2, held)


def overlapped() -> list[str]:
    with started():
        horovod_optimizer._BUCKET_BYTES = 80
        try:
            model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), backward_passes_per_step=2
            )
        finally:
            horovod_optimizer._BUCKET_BYTES = 2**24
        calls: list[str] = []
        axis = optimizer._hvd._axis
        start = axis.all_reduce

        def spy(tensor: Tensor, op: str = "sum", async_op: bool = False) -> Any:
            calls.append("reduce")
            return start(tensor, op, async_op)

        axis.all_reduce = spy
        for number, layer in enumerate(model):
            layer.register_full_backward_hook(lambda *_, n=number: calls.append(f"backward {n}"))
        for _ in range(2):
            calls.append("pass")
            model(torch.randn(2, 4, requires_grad=True)).sum().backward()
        calls.append("step")
        optimizer.step()
        return calls


def test_the_reduction_overlaps_the_backward_pass(ranks: Any) -> None:
    for calls in ranks(2, overlapped):
        first, last = " ".join(calls).split(" step")[0].split("pass")[1:]
        assert first.count("reduce") == 0 and last.count("reduce") == 3
        assert last.index("reduce") < last.index("backward 0")
        assert calls[calls.index("step") :] == ["step", "reduce"]  # which parameters had gradients


# -------------------------------------------------------------------------------------------------------- compression


class Halves:
    """A compression of the script's own; it counts on whole gradients."""

    seen: ClassVar[list[tuple[int, ...]]] = []

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        cls.seen.append(tuple(tensor.shape))
        return 0.5 * tensor, tensor.shape

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return 2.0 * tensor.view(ctx)


def compressed(compression: Any) -> tuple[list[Tensor], list[Tensor], float]:
    with started():
        model = net().float()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=compression
        )
        traffic = hvd_grid().traffic
        Halves.seen.clear()
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(hvd.rank()))
        model(x, True).square().mean().backward()
        own = copy.deepcopy(net().float())
        own(x, True).square().mean().backward()
        optimizer.synchronize()
        if compression is Halves:
            assert sorted(Halves.seen) == sorted(tuple(p.shape) for p in model.parameters() if p.requires_grad)
        sent = sum(entry.bytes for entry in traffic.report()["data"].values())
        had = [p.grad for p in model.parameters() if p.grad is not None]
        return had, [p.grad for p in own.parameters() if p.grad is not None], sent


def hvd_grid() -> Any:
    from triax.compat.horovod.context import context

    return context().grid


def test_compression(ranks: Any) -> None:
    sent = {}
    for name, compression, narrow in (
        ("none", hvd.Compression.none, torch.float32),
        ("fp16", hvd.Compression.fp16, torch.float16),
        ("bf16", hvd.Compression.bf16, torch.bfloat16),
        ("own", Halves, torch.float32),
    ):
        (found, first, sent[name]), (_, second, _) = ranks(2, compressed, compression)
        for gradient, a, b in zip(found, first, second, strict=True):
            wanted = (a.to(narrow) + b.to(narrow)).float() / 2
            torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-7)
    flags = 8  # one byte for each parameter that is trained
    assert sent["none"] - flags == 2 * (sent["fp16"] - flags) == 2 * (sent["bf16"] - flags) > 0


# --------------------------------------------------------------------------------- ranks that do less, and what changes


def idle(set_to_none: bool) -> list[Tensor]:
    """Rank 1 has no batch in the second step."""
    with started():
        model = net()
        optimizer = hvd.DistributedOptimizer(MAKERS["SGD"](groups(model)), model.named_parameters())
        for step in range(3):
            optimizer.zero_grad(set_to_none)
            if hvd.rank() == 0 or step != 1:
                loss_of(model, step, 0, hvd.rank()).backward()
            # A call of the script's between: it is on a group of its own, whatever was started before it.
            assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == 2.0
            optimizer.step()
        return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_rank_without_a_batch_takes_part_with_zeros(ranks: Any, set_to_none: bool) -> None:
    model = net()
    optimizer = MAKERS["SGD"](groups(model))
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            if rank == 0 or step != 1:
                (0.5 * loss_of(model, step, 0, rank)).backward()
        optimizer.step()
    for found in ranks(2, idle, set_to_none):
        torch.testing.assert_close(found, [p.detach() for p in model.parameters()], rtol=1e-10, atol=1e-13)


def steps_too_much() -> None:
    """Rank 1 has no batch in the second step, and does not zero its gradients."""
    with started():
        model = net()
        optimizer = hvd.DistributedOptimizer(MAKERS["SGD"](groups(model)), model.named_parameters())
        for step in range(2):
            if hvd.rank() == 0 or step == 0:
                optimizer.zero_grad()
                loss_of(model, step, 0, hvd.rank()).backward()
            optimizer.step()


def test_gradients_of_the_step_before_are_not_sent_again(ranks: Any) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks(2, steps_too_much)
    assert "call optimizer.zero_grad(); optimizer.step()" in failure.value[1].text
    assert failure.value[0].kind == "raised"


def by_hand() -> list[float]:
    """Step with gradients that the script writes without a backward pass, in place and as new tensors."""
    with started():
        weight = nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
        for step in range(6):
            gradient = torch.full((3,), float(hvd.rank() + step))
            if step in (1, 2):
                assert weight.grad is not None
                weight.grad.copy_(gradient)
            else:
                weight.grad = None
                weight.grad = gradient
            optimizer.step()
        found: list[float] = weight.tolist()
        return found


def test_gradients_that_are_written_by_hand(ranks: Any) -> None:
    assert ranks(2, by_hand) == [[-18.0] * 3] * 2  # 0.5 + 1.5 + ... + 5.5


def scaled_loop(rank: int, size: int, wrap: Callable[[Any, nn.Module], Any], fused: bool) -> dict[str, Tensor]:
    """Train with torch's GradScaler on the batches of ``size`` ranks, or on this rank's part of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    optimizer = wrap(torch.optim.Adam(model.parameters(), lr=0.01, fused=fused), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step in range(5):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        if step == 2:
            x[3] = torch.inf  # an overflow, on the last rank alone: no rank may step
        optimizer.zero_grad()
        loss = model(x.chunk(size)[rank] if size > 1 else x).square().mean()
        scaler.scale(loss).backward()
        if step == 3:
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**11
    return model.state_dict()


def scaled(fused: bool) -> dict[str, Tensor]:
    with started():
        return scaled_loop(hvd.rank(), 2, lambda o, m: hvd.DistributedOptimizer(o, m.named_parameters()), fused)


@pytest.mark.parametrize("fused", [False, True])
def test_torchs_grad_scaler(ranks: Any, fused: bool) -> None:
    """The scaler unscaled gradients while they were being sent: weights were wrong, and unlike on every rank."""

    def plain(optimizer: Any, model: nn.Module) -> Any:
        optimizer.synchronize = lambda: None
        return optimizer

    wanted = scaled_loop(0, 1, plain, fused)
    for found in ranks(2, scaled, fused):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


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


def test_losses_of_their_own_and_parameters_added_later(ranks: Any) -> None:
    for moved in ranks(2, separate_losses):
        for found, wanted in zip(moved, (-0.3, -0.2, -0.6, -0.2, -0.045, -0.01), strict=True):
            torch.testing.assert_close(found, torch.full_like(found, wanted), rtol=1e-12, atol=1e-12)


def alike(kind: str) -> bool:
    """Broadcast weights, state and options from rank 1 to rank 0, which has none."""
    with started():
        model = net(hvd.rank())
        optimizer = MAKERS[kind](groups(model))
        if hvd.rank() == 1:
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model, step, 0, 0).backward()
                optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.123
        before = [p.detach().clone() for p in model.parameters()]
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))  # no step was made for it
        hvd.broadcast_parameters(model.state_dict(), root_rank=1)
        theirs = hvd.allgather_object((optimizer.state_dict(), model.state_dict()))
        assert optimizer.param_groups[0]["lr"] == 0.123
        return same(theirs[0], theirs[1]) and len(theirs[0][0]["state"]) > 4


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
def test_a_scheduler_outlives_the_state_that_is_loaded(ranks: Any, how: str) -> None:
    first, second = ranks(2, scheduled, how)
    assert first[0] == second[0] == [[0.025, 0.01], [0.0125, 0.005], [0.00625, 0.0025]]
    assert same(first[1], second[1])


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_state_from_one_rank(ranks: Any, kind: str) -> None:
    assert all(ranks(2, alike, kind))


def test_buffers_and_other_things_of_a_state_dict() -> None:
    with started():
        model = nn.BatchNorm1d(3)
        hvd.broadcast_parameters({**model.state_dict(), "version": 3})
        hvd.broadcast_parameters(model.parameters())
        hvd.broadcast_parameters(list(model.named_parameters()))
        hvd.broadcast_parameters(nn.Tanh().state_dict())
        with pytest.raises(ValueError, match=r"call hvd\.broadcast_optimizer_state\(optimizer\)"):
            hvd.broadcast_parameters(torch.optim.SGD(model.parameters()).state_dict())


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"named_parameters": lambda m: [("a", p) for p in m.parameters()]}, "named_parameters has a twice"),
        ({"named_parameters": lambda m: list(m.parameters())}, "must give pairs (name, parameter)"),
        ({"named_parameters": lambda m: m.enter.named_parameters()}, "names 2 of the optimizer's 9 parameters"),
        ({"backward_passes_per_step": 0}, "is 0: give at least 1"),
        ({"op": hvd.Adasum}, "op=Adasum"),
        ({"op": hvd.Max}, "op=Max: gradients are averaged or summed"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "leave it out, or give op=Average"),
        ({"gradient_predivide_factor": 0.0}, "is 0.0: give a number above 0"),
        ({"num_groups": 2, "groups": 2}, "give one of them"),
        ({"groups": 2, "compression": Halves}, "one gradient at a time"),
        ({"process_set": "even"}, "axes of a grid"),
        ({"optimizer": lambda m: torch.optim.LBFGS(m.parameters())}, "LBFGS evaluates the loss"),
        ({"optimizer": lambda m: hvd.DistributedOptimizer(torch.optim.SGD(m.parameters()))}, "already"),
        (
            {"optimizer": lambda m: ShardedOptimizer(torch.optim.SGD, m.parameters(), hvd_grid(), lr=0.1)},
            "a ShardedOptimizer averages its gradients itself",
        ),
    ],
)
def test_arguments_refused(options: dict[str, Any], words: str) -> None:
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
def test_orders_of_calls_refused(ranks: Any, count: int) -> None:
    ranks(count, orders)


def unlike() -> str:
    with started():
        model = nn.Linear(2, 3 + hvd.rank())
        with pytest.raises(ValueError, match="all ranks must train one model") as error:
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        return str(error.value)


def test_models_that_differ_are_refused_on_every_rank(ranks: Any) -> None:
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


def test_the_documented_loop(ranks: Any) -> None:
    for count in (1, 2):
        losses, *others = ranks(count, documented)
        assert len(losses) == 20 and losses[-1] < losses[0] and others == [[]] * (count - 1)


def test_the_documented_names_are_all_there() -> None:
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
def test_mpirun(ranks: Any, variables: dict[str, str]) -> None:
    assert ranks(2, by_mpirun, variables, init_group=False) == [(0, 2, 0, 2, 3), (1, 2, 1, 2, 3)]
