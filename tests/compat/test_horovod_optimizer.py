"""Horovod's ``DistributedOptimizer`` and the broadcasts at the start, against torch's optimizers in one process."""

from __future__ import annotations

import contextlib
import copy
import io
import runpy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax.compat.horovod as hvd
from triax.compat.horovod import optimizer as horovod_optimizer
from triax.testing.pool import RankFailure

from support.horovod_example import EXAMPLE, plain_example
from support.horovod_models import (
    MAKERS,
    WIDTH,
    Halves,
    groups,
    has_batch,
    held,
    hvd_grid,
    loss_of,
    net,
    plain,
    started,
)


def example(*options: str) -> tuple[dict[str, Tensor], Any]:
    sys.argv = [str(EXAMPLE), "--double", *options]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            model, results = runpy.run_path(str(EXAMPLE))["main"]()
        return model.state_dict(), results
    finally:
        hvd.shutdown()


@pytest.mark.parametrize(("count", "clip", "factor"), [(1, 0.0, 1.0), (2, 0.3, 2.0), (4, 0.0, 1.0)])
def test_horovods_own_example_trains_as_plain_pytorch(ranks: Any, count: int, clip: float, factor: float) -> None:
    options = f"--samples 128 --batch-size {32 // count} --epochs 2 --lr 0.1 --clip {clip}"
    found = ranks(count, example, *options.split(), "--gradient-predivide-factor", str(factor))
    weights, results = plain_example(count, 128, 32 // count, 2, 0.1, clip)
    for state, seen in found:
        assert list(state) == list(weights)
        for name, tensor in weights.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(torch.tensor(seen), torch.tensor(results), rtol=1e-10, atol=1e-12)
    assert results[0] != results[1]


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
                optimizer.zero_grad(set_to_none=not how.endswith("zeroed in place"))
                total = torch.zeros((), dtype=torch.float64)
                for micro in range(passes if has_batch(how, step, hvd.rank()) else 0):
                    loss = loss_of(model, step, micro, hvd.rank())
                    (loss if scaler is None else scaler.scale(loss)).backward()
                    total += loss.detach()
                return total

            for step in range(steps):
                if how.startswith("closure"):

                    def closure(step: int = step) -> Tensor:
                        total = run(step)
                        if how == "closure that synchronizes":
                            optimizer.synchronize()
                        return total

                    assert isinstance(optimizer.step(closure), Tensor)
                    scheduler.step()
                    continue
                run(step)
                if how.startswith("idle"):  # a call of the script's: it is on a group of its own, whatever was started
                    assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == 2.0
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
        (2, "SGD", 1, "closure that synchronizes", {"op": hvd.Sum}),
        (2, "SGD", 1, "scheduler", {"num_groups": 2}),
        (2, "AdamW", 1, "scaler", {"groups": "lists"}),
        (4, "SGD", 2, "step", {"op": hvd.Sum, "capacity": 100}),
        (4, "AdamW", 1, "synchronize", {"gradient_predivide_factor": 3.0}),
        (2, "SGD", 1, "zeroed in place", {}),
        (2, "SGD", 1, "idle", {}),
        (2, "SGD", 1, "idle, zeroed in place", {}),
    ],
)
def test_horovod_weights_equal_those_of_one_process(
    ranks: Any, count: int, kind: str, passes: int, how: str, options: dict[str, Any]
) -> None:
    """Zeros are gradients, as in torch: weight decay and momentum still act. A rank without a batch gives zeros."""
    wanted = plain(kind, count, passes, 5, 1.0 if options.get("op") == hvd.Sum else 1.0 / count, how)
    for found in ranks(count, distributed, kind, passes, 5, how, **options):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-13)


def test_horovod_holds_gradients_and_state_once(ranks: Any) -> None:
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


def test_horovod_averaging_overlaps_the_backward_pass(ranks: Any) -> None:
    for calls in ranks(2, overlapped):
        first, last = " ".join(calls).split(" step")[0].split("pass")[1:]
        assert first.count("reduce") == 0 and last.count("reduce") == 3
        assert last.index("reduce") < last.index("backward 0")
        assert calls[calls.index("step") :] == ["step", "reduce"]  # which parameters had gradients


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


def test_compression_sends_narrow_gradients_within_rounding(ranks: Any) -> None:
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


class TwoClosureCalls(torch.optim.SGD):
    """Optimizer that moves the weights twice in a step, each time by new gradients."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return super().step(closure)


def closures_too_much() -> None:
    """Rank 1 has no batch in the second call of the closure, and does not zero its gradients."""
    with started():
        model = net()
        optimizer = hvd.DistributedOptimizer(TwoClosureCalls(model.parameters(), lr=0.1), model.named_parameters())
        calls = [0, 1] if hvd.rank() == 0 else [0]

        def closure() -> None:
            if calls:
                optimizer.zero_grad()
                loss_of(model, calls.pop(0), 0, hvd.rank()).backward()

        optimizer.step(closure)


@pytest.mark.parametrize("work", [steps_too_much, closures_too_much])
def test_old_gradients_without_a_backward_pass_are_an_error(ranks: Any, work: Callable[[], None]) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks(2, work)
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


def test_gradients_written_by_hand_are_averaged(ranks: Any) -> None:
    assert ranks(2, by_hand) == [[-18.0] * 3] * 2  # 0.5 + 1.5 + ... + 5.5


def views_and_conjugates(parameters: list[nn.Parameter], rank: int) -> Tensor:
    """Loss after which autograd leaves one memory in two ``.grad``, and on rank 0 a lazy conjugate bit in another."""
    a, b, z = parameters
    x = torch.tensor([1 + 2j, 3 - 1j], dtype=z.dtype) * (rank + 1)
    amplitude: Tensor = (((z.conj() if rank == 0 else z) * x).sum()).abs().square()
    return amplitude + (a.view(2, 2) + b.view(2, 2) - rank).square().sum()


def odd_parameters() -> list[nn.Parameter]:
    double = torch.float64
    pair = [nn.Parameter(torch.tensor(values, dtype=double)) for values in ([1.0, 2, 3, 4], [0.5, -1, 2, 0])]
    return [*pair, nn.Parameter(torch.tensor([1 + 1j, 2 - 1j], dtype=torch.complex128))]


def odd_gradients(capacity: int) -> list[Tensor]:
    with started():
        horovod_optimizer._BUCKET_BYTES = capacity
        try:
            parameters = odd_parameters()
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.01), op=hvd.Sum)
        finally:
            horovod_optimizer._BUCKET_BYTES = 2**24
        for _ in range(2):
            optimizer.zero_grad()
            views_and_conjugates(parameters, hvd.rank()).backward()
            optimizer.step()
        return [p.detach() for p in parameters]


@pytest.mark.parametrize("capacity", [1, 2**24])
def test_gradients_with_shared_memory_or_conjugates_are_averaged(ranks: Any, capacity: int) -> None:
    parameters = odd_parameters()
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    for _ in range(2):
        loss = views_and_conjugates(parameters, 0) + views_and_conjugates(parameters, 1)
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient.resolve_conj().clone()
        optimizer.step()
    for found in ranks(2, odd_gradients, capacity):
        torch.testing.assert_close(found, [p.detach() for p in parameters], rtol=1e-10, atol=1e-12)


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
def test_torchs_grad_scaler_waits_for_the_averages(ranks: Any, fused: bool) -> None:
    def plain(optimizer: Any, model: nn.Module) -> Any:
        optimizer.synchronize = lambda: None
        return optimizer

    wanted = scaled_loop(0, 1, plain, fused)
    for found in ranks(2, scaled, fused):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
