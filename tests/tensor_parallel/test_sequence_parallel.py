"""Sequence parallelism: layers on shards of the sequence are the plain layers, and keep no more than a shard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import triax
from triax.base.deferred import Deferred
from triax.grid import Grid
from triax.grid.comm.axis import Axis
from triax.grid.layout import Layout, layout_of
from triax.models.gpt import GPTBlock, GPTConfig
from triax.pipe.backward import SplitBackward, deferring
from triax.tensor_parallel import (
    ColumnParallelLinear,
    LayerNorm,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    gather_logits,
)
from triax.tensor_parallel.column import column_linears

from support.gpt_batches import SAMPLES, VOCABULARY, assert_close, batches, microbatches
from support.reference import train_gpt
from support.training import small_config, tiny_gpt

CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}
BATCH, TOKENS, DIM, HEAD, HEADS, VOCAB = 3, 8, 12, 3, 9, 37  # 9 heads over 2, 4 and 8 ranks, 37 words: all uneven
INNER = HEAD * HEADS


class Branch(nn.Module):
    """norm, column, gelu, row, norm: shards of a sequence to shards, heads of 3 shared out whole."""

    def __init__(self, grid: Grid, sequence_parallel: bool) -> None:
        super().__init__()
        common: dict[str, Any] = {"grid": grid, "sequence_parallel": sequence_parallel}
        self.norm = LayerNorm(DIM, **common)
        self.gate_up = ColumnParallelLinear(DIM, 2 * INNER, parts=(INNER, INNER), unit=HEAD, **common)
        self.down = RowParallelLinear(INNER, DIM, unit=HEAD, **common)
        self.last = RMSNorm(DIM, **common)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, dim=-1)
        y: Tensor = self.last(x + self.down(F.gelu(gate) * up))
        return y


class Model(nn.Module):
    """Embedding, two branches, and a head of its own or tied."""

    def __init__(self, grid: Grid, sequence_parallel: bool, tied: bool) -> None:
        super().__init__()
        common: dict[str, Any] = {"grid": grid, "sequence_parallel": sequence_parallel}
        self.embedding = VocabParallelEmbedding(VOCAB, DIM, **common)
        self.branches = nn.Sequential(Branch(grid, sequence_parallel), Branch(grid, sequence_parallel))
        self.head = None if tied else VocabParallelHead(DIM, VOCAB, bias=True, **common)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.branches(self.embedding(ids))
        y: Tensor = self.embedding.attend(x) if self.head is None else self.head(x)
        return y


def plain_branch(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    h = F.layer_norm(x, (DIM,), w["norm.weight"], w["norm.bias"])
    gate, up = F.linear(h, w["gate_up.weight"], w["gate_up.bias"]).chunk(2, dim=-1)
    y = x + F.linear(F.gelu(gate) * up, w["down.weight"], w["down.bias"])
    return F.rms_norm(y, (DIM,), w["last.weight"], 1e-6)


def plain_model(ids: Tensor, w: dict[str, Tensor]) -> Tensor:
    x = F.embedding(ids, w["embedding.weight"])
    for i in (0, 1):
        prefix = f"branches.{i}."
        x = plain_branch(x, {name.removeprefix(prefix): p for name, p in w.items() if name.startswith(prefix)})
    return F.linear(x, w.get("head.weight", w["embedding.weight"]), w.get("head.bias"))


def build(kind: str, grid: Grid, sequence_parallel: bool = True) -> nn.Module:
    torch.manual_seed(7)  # initial values do not depend on the grid
    if kind == "branch":
        layer: nn.Module = Branch(grid, sequence_parallel)
    else:
        layer = Model(grid, sequence_parallel, tied=kind == "tied model")
    layer.double()
    with torch.no_grad():  # a norm's initial 1 and 0, and a bias, could hide a mistake
        for i, parameter in enumerate(layer.parameters()):
            if parameter.dim() == 1 and not layout_of(parameter).sharded:
                parameter.add_(numbers(tuple(parameter.shape), 100 + i), alpha=0.1)
    return layer


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ids() -> Tensor:
    return torch.randint(VOCAB, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))


def sequence(x: Tensor, grid: Grid) -> Tensor:
    """This rank's shard of dim 1."""
    return x.chunk(grid.tensor.size, dim=1)[grid.tensor.rank]


def named_gradients(layer: nn.Module) -> dict[str, tuple[Layout, Tensor | None]]:
    return {name: (layout_of(p), p.grad) for name, p in layer.named_parameters()}


def whole(found: list[dict[str, tuple[Layout, Tensor]]]) -> dict[str, Tensor]:
    """Whole gradients from every tensor rank's: sharded ones assembled, partial ones summed, the others equal."""
    made = {}
    for name, (layout, gradient) in found[0].items():
        parts = [one[name][1] for one in found]
        if layout.partial:
            made[name] = torch.stack(parts).sum(0)
        elif layout.sharded:
            made[name] = layout.assemble(parts)
        else:
            assert all(torch.equal(part, gradient) for part in parts), name
            made[name] = gradient
    return made


def plain(kind: str) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """Output, gradient of the input and of the weights, by torch's own functions in one process."""
    weights = {n: p.detach().clone().requires_grad_() for n, p in build(kind, Grid()).named_parameters()}
    if kind == "branch":
        x = numbers((BATCH, TOKENS, DIM), 1).requires_grad_()
        out = plain_branch(x, weights)
    else:
        x = ids()
        out = plain_model(x, weights)
    out.backward(numbers(tuple(out.shape), 2))
    return out.detach(), x.grad, {n: w.grad for n, w in weights.items() if w.grad is not None}


# ------------------------------------------------------------------------------------ outputs and gradients


def run_on_rank(kind: str, size: int, split: bool) -> tuple[Tensor, Tensor | None, Any, Any]:
    grid = Grid(tensor=size)
    layer, deferred = build(kind, grid), Deferred()
    x = ids() if kind != "branch" else sequence(numbers((BATCH, TOKENS, DIM), 1), grid).clone().requires_grad_()
    if not split:
        out = layer(x)
    else:
        with SplitBackward(deferred):
            out = layer(x)
    if kind == "branch":
        weight = sequence(numbers((BATCH, TOKENS, DIM), 2), grid)
    else:
        weight = Layout((BATCH, TOKENS, VOCAB), shard_dim=2).shard(
            numbers((BATCH, TOKENS, VOCAB), 2), grid.tensor.rank, size
        )
    if not split:
        out.backward(weight)
    else:
        with deferring(deferred):
            out.backward(weight)
        early = [n for n, p in layer.named_parameters() if p.grad is not None and p.dim() == 2]
        assert early == [], "products' weight gradients wait"
        deferred.run(lambda parameter: None, lambda parameter: None)
    if kind != "branch":
        out = gather_logits(out, grid=grid, vocab_size=VOCAB)
    return out.detach(), x.grad, named_gradients(layer), {n: layout_of(p).partial for n, p in layer.named_parameters()}


@pytest.mark.parametrize("split", [False, True], ids=["whole backward", "split backward"])
@pytest.mark.parametrize("size", [2, 4, pytest.param(8, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", ["branch", "model", "tied model"])
def test_sequence_parallel_layers_equal_plain_torch(ranks: Any, kind: str, size: int, split: bool) -> None:
    out, dx, gradients = plain(kind)
    found = ranks(size, run_on_rank, kind, size, split)
    if kind == "branch":
        torch.testing.assert_close(torch.cat([r[0] for r in found], dim=1), out, **CLOSE)
        torch.testing.assert_close(torch.cat([r[1] for r in found], dim=1), dx, **CLOSE)
    else:
        for r in found:
            torch.testing.assert_close(r[0], out, **CLOSE)
    assert_close(whole([r[2] for r in found]), gradients, f"{kind} on {size}")
    partial = {name.split(".", 2)[-1] for name, is_partial in found[0][3].items() if is_partial}
    if kind != "branch":
        assert partial == {"norm.weight", "norm.bias", "last.weight", "down.bias"}


def penalty_on_rank(size: int, sequence_parallel: bool) -> tuple[Tensor, Any]:
    """The gradient of a gradient's norm; summed over shards, for the ranks hold parts of x."""
    grid = Grid(tensor=size)
    layer = build("branch", grid, sequence_parallel)
    x = numbers((BATCH, TOKENS, DIM), 1)
    x = (sequence(x, grid) if sequence_parallel else x).clone().requires_grad_()
    (grad,) = torch.autograd.grad(layer(x).pow(2).sum(), x, create_graph=True)
    grad.pow(2).sum().backward()
    assert x.grad is not None
    return x.grad, named_gradients(layer)


@pytest.mark.parametrize("size", [2, 4])
def test_sequence_parallel_linears_differentiate_twice(ranks: Any, size: int) -> None:
    ((expected, gradients),) = ranks(1, penalty_on_rank, 1, False)
    found = ranks(size, penalty_on_rank, size, True)
    torch.testing.assert_close(torch.cat([r[0] for r in found], dim=1), expected, **CLOSE)
    # The last bias does not move a gradient's norm: torch leaves None.
    with_gradient = {n for n, (_, gradient) in gradients.items() if gradient is not None}
    kept = [{n: v for n, v in r[1].items() if n in with_gradient} for r in found]
    assert_close(whole(kept), {n: gradients[n][1] for n in with_gradient}, f"penalty on {size}")


# --------------------------------------------------------------------------- what is kept, and what is sent


def kept_on_rank(sequence_parallel: bool) -> tuple[int, int, list[str], list[str]]:
    """Elements that autograd keeps of activations, in a column layer; and the collectives forward and backward."""
    grid = Grid(tensor=4)
    layer = ColumnParallelLinear(DIM, 16, grid=grid, sequence_parallel=sequence_parallel)
    x = numbers((BATCH, TOKENS, DIM), 1).float()
    x = (sequence(x, grid) if sequence_parallel else x).clone().requires_grad_()
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in {p.untyped_storage().data_ptr() for p in layer.parameters()}:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    calls = record(grid.tensor)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        out = layer(x)
    sent = calls.copy()
    calls.clear()
    out.sum().backward()
    return sum(kept.values()), out.numel(), sent, calls


def record(axis: Axis) -> list[str]:
    """The list that will hold this axis's collectives, as they are started and, if that is later, waited for."""
    calls: list[str] = []
    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        real = getattr(axis, name)

        def counted(*args: Any, _name: str = name, _real: Any = real, **kwargs: Any) -> Any:
            what = f"{_name} {args[-1].numel()}"
            calls.append(what)
            pending = _real(*args, **kwargs)
            return Waited(pending, what, calls) if kwargs.get("async_op") else pending

        setattr(axis, name, counted)
    return calls


class Waited:
    def __init__(self, pending: Any, what: str, calls: list[str]) -> None:
        self.pending, self.what, self.calls = pending, what, calls

    def wait(self) -> None:
        self.calls.append("wait " + self.what)
        self.pending.wait()


def test_a_column_layer_keeps_only_its_sequence_shard(ranks: Any) -> None:
    elements = BATCH * TOKENS * DIM
    gather, scatter = f"all_gather {elements // 4}", f"reduce_scatter {elements}"
    for kept, out, forward, backward in ranks(4, kept_on_rank, True):
        assert (kept, out) == (elements // 4, BATCH * TOKENS * 4)
        assert forward == [gather, "wait " + gather]
        assert backward == [gather, scatter, "wait " + gather, "wait " + scatter]
    for kept, _, forward, backward in ranks(4, kept_on_rank, False):
        assert (kept, forward) == (elements, [])
        assert backward == [f"all_reduce {elements}", f"wait all_reduce {elements}"]


def block_on_rank() -> int:
    """Bytes that autograd keeps of a transformer layer's forward, weights apart."""
    grid = Grid(tensor=torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1)
    config = GPTConfig(
        vocab_size=VOCABULARY, max_position_embeddings=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=4
    )
    block = GPTBlock(config, grid=grid, sequence_parallel=True)
    x = sequence(torch.randn(2, 8, 16), grid).clone().requires_grad_()
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        out = block(x)
    assert out.shape == x.shape
    return sum(kept.values())


def test_a_transformer_layer_keeps_its_share_of_activation_bytes(ranks: Any) -> None:
    (whole,) = ranks(1, block_on_rank)
    for size in (2, 4):
        assert ranks(size, block_on_rank) == [whole // size] * size


def split_on_rank() -> tuple[list[str], list[str]]:
    grid, deferred = Grid(tensor=2), Deferred()
    layers = [ColumnParallelLinear(DIM, n, grid=grid, bias=False, sequence_parallel=True) for n in (6, 4)]
    x = sequence(numbers((BATCH, TOKENS, DIM), 1), grid).float().clone().requires_grad_()
    with SplitBackward(deferred):
        a, b = column_linears(x, [(layer.weight, None) for layer in layers], grid.tensor, True)
    calls = record(grid.tensor)
    with deferring(deferred):
        (a.sum() + b.sum()).backward()
    now = calls.copy()
    calls.clear()
    deferred.run(lambda parameter: None, lambda parameter: None)
    return now, calls


def test_a_split_backward_gathers_again_for_weight_gradients(ranks: Any) -> None:
    elements = BATCH * TOKENS * DIM
    for now, later in ranks(2, split_on_rank):
        assert now == [f"reduce_scatter {elements}", f"wait reduce_scatter {elements}"]
        # Once for both layers.
        assert later == [f"all_gather {elements // 2}", f"wait all_gather {elements // 2}"]


def shared_on_rank(frozen: bool) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    """Two layers of one input, the second's weight frozen."""
    grid = Grid(tensor=2)
    torch.manual_seed(0)
    layers = [ColumnParallelLinear(DIM, n, grid=grid, dtype=torch.float64) for n in (6, 4)]
    layers[1].weight.requires_grad_(not frozen)
    x = numbers((BATCH, TOKENS, DIM), 1).requires_grad_()
    a, b = column_linears(x, [(layer.weight, layer.bias) for layer in layers], grid.tensor)
    ours = torch.autograd.grad(a.sum() + b.pow(2).sum(), [x, *layers[0].parameters()], retain_graph=True)
    (a.sum() + b.pow(2).sum()).backward()
    c, d = (layer(x.detach().requires_grad_()) for layer in layers)
    assert torch.equal(a, c) and torch.equal(b, d)
    y = x.detach().clone().requires_grad_()
    (layers[0](y).sum() + layers[1](y).pow(2).sum()).backward()
    return ours[0], y.grad, [p.grad for p in layers[1].parameters()]


@pytest.mark.parametrize("frozen", [False, True])
def test_layers_that_share_an_input_equal_separate_layers(ranks: Any, frozen: bool) -> None:
    for ours, apart, (weight, bias) in ranks(2, shared_on_rank, frozen):
        torch.testing.assert_close(ours, apart, **CLOSE)
        assert (weight is None) == frozen and bias is not None


def autocast_on_rank() -> tuple[torch.dtype, Tensor | None, Tensor | None]:
    grid = Grid(tensor=2)
    torch.manual_seed(0)
    layer = ColumnParallelLinear(DIM, 8, grid=grid)
    x = numbers((BATCH, TOKENS, DIM), 1).float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    y.float().pow(2).sum().backward()
    return y.dtype, x.grad, layer.weight.grad


def test_autocast_computes_sequence_shards_in_bfloat16(ranks: Any) -> None:
    for dtype, dx, dweight in ranks(2, autocast_on_rank):
        assert (dtype, dx.dtype, dweight.dtype) == (torch.bfloat16, torch.float32, torch.float32)


# ----------------------------------------------------------------------------------------- under the engine


def train(schedule: str, chunks: int, grid: tuple[int, int, int], stage: int) -> Any:
    here = Grid(*grid, timeout=60)
    module = tiny_gpt(here, sequence_parallel=True, num_attention_heads=8, chunks=chunks)
    zero, params = {"stage": stage, "reduce_bucket_size": 2000}, {"weight_decay": 0.1}
    config = small_config("AdamW", 1e-2, batch=SAMPLES, micro=2, zero=zero, clip=0.5, schedule=schedule, params=params)
    engine, *_ = triax.initialize(model=module, config=config)
    data, initial, steps = microbatches(here, 2), engine.gather(), []
    for _ in range(2):
        loss = engine.train_batch(data).item()
        steps.append((loss, engine.get_global_grad_norm(), engine.gather("gradients"), engine.gather()))
    return (initial, steps) if here.rank == 0 else None


@pytest.mark.parametrize(
    ("schedule", "chunks", "grid", "stage"),
    [
        pytest.param("zb-h1", 1, (2, 1, 2), 0, marks=pytest.mark.exhaustive),
        ("zb-v", 2, (2, 1, 2), 1),
        ("1f1b", 1, (1, 2, 2), 2),
        pytest.param("zb-h1", 1, (2, 2, 2), 3, marks=pytest.mark.exhaustive),
    ],
)
def test_a_gpt_on_sequence_shards_trains_as_plain_torch_does(
    ranks: Any, schedule: str, chunks: int, grid: tuple[int, int, int], stage: int
) -> None:
    initial, steps = ranks(grid[0] * grid[1] * grid[2], train, schedule, chunks, grid, stage)[0]
    wanted = train_gpt(initial, batches(), 4, 8, 1e-2, 0.5)
    for (loss, norm, gradients, weights), want in zip(steps, wanted, strict=True):
        assert loss == pytest.approx(want.loss, rel=1e-10) and norm == pytest.approx(want.norm, rel=1e-10)
        assert_close(gradients, want.gradients, f"{schedule} gradient")
        assert_close(weights, want.weights, f"{schedule} weight")


# --------------------------------------------------------------------------------------------------- errors


def refused_on_rank(what: str) -> str:
    grid = Grid(tensor=4)
    try:
        match what:
            case "row":
                RowParallelLinear(8, 8, grid=grid, sequence_parallel=True)(torch.zeros(2, 6, 2))
            case "embedding":
                VocabParallelEmbedding(8, 8, grid=grid, sequence_parallel=True)(torch.zeros(2, 6, dtype=torch.long))
            case "column":
                ColumnParallelLinear(8, 8, grid=grid, sequence_parallel=True)(torch.zeros(6, 8))
            case "alike":
                RowParallelLinear(8, 8, grid=grid, sequence_parallel=True, input_is_parallel=False)
            case "units":
                ColumnParallelLinear(8, 9, grid=grid, unit=3)
            case "unit":
                RowParallelLinear(9, 8, grid=grid, unit=2)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("row", "has shape (2, 6, 8), but sequence parallelism shards dim 1 in equal parts over tensor=4. Pad the"),
        ("embedding", "has shape (2, 6, 8), but sequence parallelism shards dim 1 in equal parts over tensor=4"),
        ("column", "the input has shape (6, 8), but sequence parallelism needs (B, T / t, K)"),
        ("alike", "got sequence_parallel=True and input_is_parallel=False"),
        ("units", "out_features is 9, which is 3 units of 3, but tensor=4 needs at least 4. Give tensor=3 at most"),
        ("unit", "RowParallelLinear: in_features is 9, not a multiple of unit=2"),
    ],
)
def test_sequence_parallel_errors_give_the_numbers(ranks: Any, what: str, message: str) -> None:
    for said in ranks(4, refused_on_rank, what):
        assert message in said
