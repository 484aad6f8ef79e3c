"""The data axis: flat buckets, ranges, the norm, partial gradients, unused parameters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, Layout, PipelineModule
from triax.grid.layout import set_layout
from triax.zero.flat import Item, plan

from support.toys import random_pair, replica_inputs
from support.training import SGD, mean_square, small_config, train_plain, whole_batches

WIDTH = 6


@settings(max_examples=200)
@given(st.data())
def test_a_bucket_plan_places_each_parameter_once(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=20))
    shards, capacity = data.draw(st.sampled_from([1, 2, 3, 8])), data.draw(st.integers(1, 500))
    drawn = [(data.draw(st.integers(0, 2)), data.draw(st.sampled_from("ab"))) for _ in sizes]
    items = [Item(i, n, run, key, shards=shards) for i, (n, (run, key)) in enumerate(zip(sizes, drawn, strict=True))]
    buckets = plan(items, capacity)
    assert sorted(slot.number for b in buckets for slot in b.slots) == list(range(len(sizes)))
    for bucket in buckets:
        assert bucket.numel % shards == 0
        assert [bucket.owned(r)[0] for r in range(shards)] == [r * bucket.numel // shards for r in range(shards)]
        assert bucket.owned(shards - 1)[1] == bucket.numel
        at = 0
        for slot in bucket.slots:
            item = items[slot.number]
            assert item.key == bucket.key and slot.stop - slot.start == item.numel
            assert slot.start >= at and slot.start % 16 == 0
            start, stop = bucket.runs[item.run]
            assert start <= slot.start and slot.stop <= stop
            at = slot.stop
        assert at <= bucket.numel
        if len(bucket.slots) > 1:
            assert sum(items[slot.number].numel for slot in bucket.slots) <= capacity
    # Within a key the order is the backward pass's: from the last parameter to the first.
    # Buckets come in the order in which they become complete: with the first of their parameters.
    ends = [min(slot.number for slot in b.slots) for b in buckets]
    assert ends == sorted(ends, reverse=True)
    for key in "ab":
        firsts = [max(slot.number for slot in b.slots) for b in buckets if b.key == key]
        assert firsts == sorted(firsts, reverse=True)


def test_uneven_shards_are_laid_out_alike_on_every_tensor_rank() -> None:
    """Partial gradients are summed over the tensor axis bucket by bucket, so all its ranks have the same buckets."""
    for local in (48, 52):  # of 100 elements over two ranks, never cut within 4
        items = [Item(i, local, 0, "key", size=52) for i in range(4)]
        assert [[slot.number for slot in bucket.slots] for bucket in plan(items, 100)] == [[3], [2], [1], [0]]
        assert [len(bucket.slots) for bucket in plan(items, 104)] == [2, 2]


class PartialNorm(nn.Module):
    """A replicated scale whose gradient is a partial sum on each tensor rank, as a norm's on sequence shards."""

    def __init__(self, *, grid: Grid) -> None:
        super().__init__()
        self.tensor = grid.tensor
        self.scale = nn.Parameter(torch.linspace(1, 2, WIDTH))
        set_layout(self.scale, Layout((WIDTH,), partial=True))

    def forward(self, x: Tensor) -> Tensor:
        # Each tensor rank adds its own part of the sequence to the gradient; together, all of it.
        part = torch.zeros(x.shape[1], 1, dtype=x.dtype)
        part[self.tensor.rank :: self.tensor.size] = 1.0
        return x * (part * self.scale + (1 - part) * self.scale.detach())


class Sometimes(nn.Module):
    """A layer that uses a parameter for some inputs only: some replicas get no gradient for it."""

    def __init__(self) -> None:
        super().__init__()
        self.rare, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.empty = nn.Parameter(torch.zeros(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.rare(x) if x[0, 0, 0] > 0 else x
        return y


def layers() -> list[Any]:
    linear = LayerSpec(nn.Linear, WIDTH, WIDTH)
    return [linear, LayerSpec(PartialNorm), LayerSpec(Sometimes), linear]


def loss_fn(outputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    return (outputs - labels).pow(4).sum(), labels.numel()


def batch() -> tuple[Tensor, Tensor]:
    return random_pair(2, 8, 5, WIDTH)


def reduced(grid: tuple[int, int, int], stage: int, bucket: int) -> Any:
    here = Grid(*grid, timeout=60)
    model = PipelineModule(layers(), grid=here, loss_fn=loss_fn, dtype=torch.float64, partition="uniform")
    config = small_config("AdamW", lr=0.01, batch=8, micro=1, zero={"stage": stage, "reduce_bucket_size": bucket})
    engine, optimizer, *_ = triax.initialize(model=model, config=config)

    def data() -> Iterator[tuple[Tensor, Tensor]]:
        x, y = batch()
        share = 8 // here.data.size
        for i in range(here.data.rank * share, (here.data.rank + 1) * share):
            yield x[i : i + 1], y[i : i + 1]

    engine.train_batch(data())
    assert optimizer is not None
    state = sum(t.numel() for s in optimizer.state.values() for t in s.values() if t.dim())
    # As in torch, what no replica has a gradient for has no state.
    untrained = {p.parameter for p in model.local_parameters() if ".never." in p.layout.name}
    whole = sum(
        b.weights.numel() for b in engine.data_axis.buckets if not {m.parameter for m in b.members} <= untrained
    )
    moments = 2 * whole // (here.data.size if stage else 1)
    return engine.gather("gradients"), engine.get_global_grad_norm(), state == moments


@pytest.mark.parametrize(
    ("grid", "stage"),
    [
        *(((1, 1, 1), 0), ((1, 4, 1), 1), ((1, 1, 4), 0), ((2, 2, 1), 1), ((1, 2, 2), 0), ((1, 2, 2), 1)),
        *(
            pytest.param(grid, stage, marks=pytest.mark.exhaustive)
            for grid, stage in (((1, 1, 1), 1), ((1, 4, 1), 0), ((1, 1, 4), 1), ((2, 2, 1), 0))
        ),
    ],
)
def test_buckets_hold_the_plain_gradients_and_norm(ranks: Any, grid: tuple[int, int, int], stage: int) -> None:
    """Partial, unused and empty parameters; the norm counts each element once; the state is 1/N of the whole."""
    model = PipelineModule(layers(), dtype=torch.float64, partition="uniform")
    named = {p.layout.name: p.parameter for p in model.local_parameters()}
    x, y = batch()
    terms = [loss_fn(model(a), b) for a, b in zip(x.split(1), y.split(1), strict=True)]
    (torch.stack([t for t, _ in terms]).sum() / y.numel()).backward()
    wanted = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.items()}
    norm = torch.stack([g.norm() for g in wanted.values()]).norm().item()
    for bucket in (20, 10**6):
        for gradients, found, sharded in ranks(grid[0] * grid[1] * grid[2], reduced, grid, stage, bucket):
            torch.testing.assert_close(gradients, wanted, rtol=1e-10, atol=1e-13)
            assert found == pytest.approx(norm, rel=1e-10, abs=0)
            assert sharded


def overlapped() -> list[str]:
    """Return the calls, in order, in the last backward of a rank that has three buckets."""
    here = Grid(data=2, timeout=60)
    model = PipelineModule([LayerSpec(nn.Linear, 4, 4) for _ in range(3)], grid=here, loss_fn=loss_fn)
    config = small_config(micro=1, accumulation=2, zero={"stage": 1, "reduce_bucket_size": 20})
    engine, *_ = triax.initialize(model=model, config=config)
    calls: list[str] = []
    start = here.data.reduce_scatter

    def spy(output: Tensor, tensor: Tensor, async_op: bool = False) -> Any:
        calls.append(f"reduce {next(i for i, b in enumerate(engine.data_axis.buckets) if b.gradients is tensor)}")
        return start(output, tensor, async_op)

    here.data.reduce_scatter = spy  # type: ignore[method-assign]
    for i, layer in enumerate(model.layers.values()):
        layer.register_full_backward_hook(lambda *_, i=i: calls.append(f"backward {i}"))
    x = torch.randn(1, 4, requires_grad=True)
    engine.train_batch(iter([(x, x.detach())] * 2))
    return calls


def test_reduction_starts_within_the_last_backward(ranks: Any) -> None:
    for calls in ranks(2, overlapped):
        assert calls[:3] == ["backward 2", "backward 1", "backward 0"]  # of the first microbatch: nothing reduced
        last = calls[3:]
        assert [c for c in last if c.startswith("reduce")] == ["reduce 0", "reduce 1", "reduce 2"]
        assert last.index("reduce 0") < last.index("backward 0")


def gradients_at_the_step(stages: list[int]) -> list[int]:
    """Return for each stage the number of parameters whose ``.grad`` keeps memory when the optimizer steps."""
    here, kept = Grid(data=2, timeout=60), list[int]()
    for stage in stages:
        model = PipelineModule([LayerSpec(nn.Linear, 4, 4) for _ in range(3)], grid=here, loss_fn=loss_fn)
        zero = {"stage": stage, "reduce_each_microbatch": False, "stage3_param_persistence_threshold": 0}
        engine, optimizer, *_ = triax.initialize(model=model, config=small_config(micro=1, accumulation=2, zero=zero))
        assert optimizer is not None
        parameters = list(model.parameters())
        optimizer.register_step_pre_hook(lambda *_, p=parameters: kept.append(sum(x.grad is not None for x in p)))
        x = torch.randn(1, 4)
        engine.train_batch(iter([(x, x)] * 2))
    return kept


def test_sharded_gradients_leave_no_whole_ones_at_the_step(ranks: Any) -> None:
    assert ranks(2, gradients_at_the_step, [1, 2, 3]) == [[6, 0, 0]] * 2


class Quantised(nn.Module):
    """A layer with frozen 8-bit weights, indices, and trained weights."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.enter = nn.Linear(WIDTH, WIDTH)
        packed = torch.randint(256, (WIDTH, WIDTH), generator=generator).byte()
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.order = nn.Parameter(torch.arange(1000) + 2**40 + seed, requires_grad=False)
        self.on = nn.Parameter(torch.rand(WIDTH, generator=generator) > 0.5, requires_grad=False)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.frozen = nn.Parameter(torch.full((WIDTH,), 0.75), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x) * self.on
        for block in self.blocks:
            x = torch.tanh(block(x @ (self.packed.to(x.dtype) / 256))) * self.frozen
        return x + (self.order[1] - self.order[0])


def quantised_engine(grid: Grid, seed: int, stage: int, bf16: bool) -> triax.ModuleEngine:
    torch.manual_seed(seed)
    config = small_config(micro=4, stage=stage, bf16={"enabled": bf16})
    made = triax.initialize(model=Quantised(seed).double(), config=config, grid=grid)[0]
    assert isinstance(made, triax.ModuleEngine)
    return made


def integers(stage: int, bf16: bool, folder: str) -> dict[str, Tensor]:
    """Replicas draw different integers; they train with the first one's, save them, and load them on another grid."""
    grid = Grid(timeout=60)
    made = quantised_engine(grid, grid.data.rank, stage, bf16)
    for step in range(2):
        made.backward(made(replica_inputs(step, grid.data.rank)).square().mean())
        made.step()
    found = made.gather()
    assert made.save_checkpoint(folder)
    other = quantised_engine(grid, 7, stage, bf16)
    other.load_checkpoint(folder)
    for name, value in other.gather().items():
        assert value.dtype == found[name].dtype and torch.equal(value, found[name]), name
    with triax.zero.gathered(made.module, modifier_rank=grid.data.size - 1), torch.no_grad():
        made.module.order.fill_(grid.data.rank)
    assert made.gather()["order"].eq(grid.data.size - 1).all()
    return found


@pytest.mark.parametrize(("stage", "bf16"), [(0, False), (1, True), (3, False), (3, True)])
@pytest.mark.parametrize("replicas", [1, 2])
def test_integer_parameters_of_a_module_do_not_change(
    ranks: Any, tmp_path: Path, replicas: int, stage: int, bf16: bool
) -> None:
    torch.manual_seed(0)
    made = Quantised(0).double()
    train_plain(made, SGD, whole_batches(replica_inputs, 2, replicas), mean_square)
    for found in ranks(replicas, integers, stage, bf16, str(tmp_path)):
        for name, wanted in made.state_dict().items():
            if wanted.is_floating_point():
                rtol, atol = (0.03, 0.03) if bf16 else (1e-10, 1e-13)
                torch.testing.assert_close(found[name].double(), wanted, rtol=rtol, atol=atol)
            else:
                assert found[name].dtype == wanted.dtype and torch.equal(found[name], wanted), name


def pipelined_integers(stage: int) -> None:
    grid = Grid(pipe=2, data=2, timeout=60)

    class Shifted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.order = nn.Parameter(torch.arange(1000), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x) + (self.order[999] - self.order[998])
            return y

    for device in (None, "meta"):
        model = PipelineModule(
            [LayerSpec(Shifted) for _ in range(2)],
            grid=grid,
            loss_fn=lambda o, y: (o - y).square().mean(),
            device=device,
        )
        config = small_config(micro=2, stage=stage, bf16={"enabled": True})
        made = triax.initialize(model=model, config=config)[0]
        x = torch.randn(2, 2, WIDTH).bfloat16()
        made.train_batch(iter([(x[0], x[1])]))
        for name, value in made.gather().items():
            assert value.is_floating_point() or torch.equal(value, torch.arange(1000)), name
            assert value.is_floating_point() != name.endswith("order")


def test_integer_parameters_of_a_pipeline_do_not_change(ranks: Any) -> None:
    for stage in (0, 3):
        ranks(4, pipelined_integers, stage)
