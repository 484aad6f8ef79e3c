"""Column, row and vocab-parallel layers are the plain layers, whatever the tensor axis's size."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from triax.grid import Grid
from triax.grid.comm.axis import Axis
from triax.grid.comm.regions import gather_split, split_gather
from triax.grid.layout import Layout, layout_of
from triax.grid.randomness.random import Normal
from triax.grid.ranges import split
from triax.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    gather_logits,
)
from triax.tensor_parallel.column import column_linears

from support.toys import error_text

CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}
DIM, OUT, VOCAB = 12, 24, 37  # 37 over 2 or 4 ranks is uneven

# One entry a layer: how it is built, what it is fed, and the plain torch it must equal, given its whole weights.
Weights = dict[str, Tensor]


def build(kind: str, grid: Grid) -> nn.Module:
    torch.manual_seed(7)  # the initial values must then be the same on every grid
    match kind:
        case "column":
            layer: nn.Module = ColumnParallelLinear(DIM, OUT, grid=grid)
        case "column, gathered":
            layer = ColumnParallelLinear(DIM, OUT, grid=grid, gather_output=True)
        case "column, fused":
            layer = ColumnParallelLinear(DIM, OUT, grid=grid, parts=(16, 4, 4))
        case "column, fused, gathered, no bias":
            layer = ColumnParallelLinear(DIM, OUT, False, grid=grid, parts=(16, 4, 4), gather_output=True)
        case "row":
            layer = RowParallelLinear(OUT, DIM, grid=grid)
        case "row, whole input, no bias":
            layer = RowParallelLinear(OUT, DIM, bias=False, grid=grid, input_is_parallel=False)
        case "embedding":
            layer = VocabParallelEmbedding(VOCAB, DIM, grid=grid)
        case "tied head":
            layer = VocabParallelEmbedding(VOCAB, DIM, grid=grid, init=Normal(0.02))
        case "head":
            layer = VocabParallelHead(DIM, VOCAB, bias=True, grid=grid)
        case "mlp":
            layer = nn.Sequential(
                ColumnParallelLinear(DIM, OUT, grid=grid), nn.GELU(), RowParallelLinear(OUT, DIM, grid=grid)
            )
        case _:
            raise AssertionError(kind)
    return layer.double()


def forward(layer: nn.Module, kind: str, x: Tensor) -> Tensor:
    if kind == "tied head":
        assert isinstance(layer, VocabParallelEmbedding)
        return layer.attend(x)
    out: Tensor = layer(x)
    return out


def plain(kind: str, x: Tensor, w: Weights) -> Tensor:
    if kind == "embedding":
        return F.embedding(x, w["weight"])
    if kind == "mlp":
        hidden = F.gelu(F.linear(x, w["0.weight"], w["0.bias"]))
        return F.linear(hidden, w["2.weight"], w["2.bias"])
    return F.linear(x, w["weight"], w.get("bias"))


KINDS = [
    "column",
    "column, gathered",
    "column, fused",
    "column, fused, gathered, no bias",
    "row",
    "row, whole input, no bias",
    "embedding",
    "tied head",
    "head",
    "mlp",
]
# Where the input or the output is sharded on its last dim: its layout, else None.
SHARDED_INPUT = {"row": Layout((3, 5, OUT), shard_dim=2)}
SHARDED_OUTPUT = {
    "column": Layout((3, 5, OUT), shard_dim=2),
    "column, fused": Layout((3, 5, OUT), shard_dim=2, parts=(16, 4, 4)),
    "tied head": Layout((3, 5, VOCAB), shard_dim=2),
    "head": Layout((3, 5, VOCAB), shard_dim=2),
}


def inputs(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if kind == "embedding":
        return torch.randint(VOCAB, (3, 5), generator=generator)
    width = OUT if kind.startswith("row") else DIM
    return torch.randn(3, 5, width, generator=generator, dtype=torch.float64)


def cotangent(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def run_on_rank(kind: str, size: int) -> dict[str, Any]:
    grid = Grid(tensor=size)
    rank = grid.tensor.rank
    layer = build(kind, grid)
    x = inputs(kind)
    if kind in SHARDED_INPUT:
        x = SHARDED_INPUT[kind].shard(x, rank, size).clone()
    x.requires_grad_(x.is_floating_point())
    out = forward(layer, kind, x)
    whole = SHARDED_OUTPUT.get(kind)
    if whole is None:
        weight = cotangent(tuple(out.shape))
    else:
        weight = whole.shard(cotangent(whole.shape), rank, size)
    out.backward(weight)
    return {
        "out": out.detach(),
        "x.grad": x.grad,
        "weights": {name: p.detach() for name, p in layer.named_parameters()},
        "grads": {name: p.grad for name, p in layer.named_parameters()},
        "layouts": {name: layout_of(p) for name, p in layer.named_parameters()},
        "next": float(torch.rand(())),
    }


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_parallel_layers_equal_plain_torch(ranks: Any, kind: str, size: int) -> None:
    found = ranks(size, run_on_rank, kind, size)
    layouts: dict[str, Layout] = found[0]["layouts"]

    def whole(what: str) -> Weights:
        return {name: layouts[name].assemble([r[what][name] for r in found]) for name in layouts}

    weights = {name: w.requires_grad_() for name, w in whole("weights").items()}
    x = inputs(kind)
    x.requires_grad_(x.is_floating_point())
    out = plain(kind, x, weights)
    out.backward(cotangent(tuple(out.shape)))

    output = SHARDED_OUTPUT.get(kind)
    for part in found if output is None else [{"out": output.assemble([r["out"] for r in found])}]:
        torch.testing.assert_close(part["out"], out.detach(), **CLOSE)
    if kind in SHARDED_INPUT:
        torch.testing.assert_close(SHARDED_INPUT[kind].assemble([r["x.grad"] for r in found]), x.grad, **CLOSE)
    else:
        for r in found:
            torch.testing.assert_close(r["x.grad"], x.grad, **CLOSE)
    grads = whole("grads")
    for name, w in weights.items():
        torch.testing.assert_close(grads[name], w.grad, **CLOSE, msg=f"{kind}: gradient of {name}")
        if not layouts[name].sharded:  # replicated: each rank has the whole gradient, so nobody sums it again
            for r in found:
                torch.testing.assert_close(r["grads"][name], w.grad, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_initial_values_do_not_depend_on_the_tensor_axis(ranks: Any, kind: str) -> None:
    (alone,) = ranks(1, run_on_rank, kind, 1)
    for size in (2, 4):
        found = ranks(size, run_on_rank, kind, size)
        for name, layout in found[0]["layouts"].items():
            assembled = layout.assemble([r["weights"][name] for r in found])
            assert torch.equal(assembled, alone["weights"][name]), (size, name)
        # What is drawn next does not depend on the grid either.
        assert {r["next"] for r in found} == {alone["next"]}


def test_initial_values_have_torchs_distributions() -> None:
    grid = Grid()
    torch.manual_seed(0)
    for layer in (ColumnParallelLinear(400, 300, grid=grid), RowParallelLinear(400, 300, grid=grid)):
        for values in (p.detach() for p in layer.parameters()):
            bound = 1 / math.sqrt(400)  # nn.Linear's: of the whole fan-in
            assert 0.97 * bound < float(values.abs().max()) <= bound
            assert abs(float(values.std()) / (bound / math.sqrt(3)) - 1) < 0.1
    table = VocabParallelEmbedding(1000, 100, grid=grid).weight.detach()
    assert abs(float(table.std()) - 1) < 0.02


def test_parallel_layers_on_one_rank_equal_torch_bitwise() -> None:
    grid, x = Grid(), torch.randn(6, 16)
    torch.manual_seed(0)
    for layer in (ColumnParallelLinear(16, 8, grid=grid), RowParallelLinear(16, 8, grid=grid)):
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    ids = torch.randint(10, (4,))
    embedding = VocabParallelEmbedding(10, 3, grid=grid)
    assert torch.equal(embedding(ids), embedding.weight[ids])


# ------------------------------------------------------------------------------------- what is communicated


def count_on_rank(kind: str) -> tuple[list[str], list[str], list[str]]:
    """The collectives of a forward and of its backward, and the products that a mode sees."""
    grid, calls = Grid(tensor=2), []
    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        real = getattr(Axis, name)

        def counted(*args: Any, _name: str = name, _real: Callable[..., Any] = real, **kwargs: Any) -> Any:
            calls.append(f"{_name} {args[1].numel()}")
            return _real(*args, **kwargs)

        setattr(grid.tensor, name, counted.__get__(grid.tensor))
    layer, x = build(kind, grid), inputs(kind)
    if kind in SHARDED_INPUT:
        x = SHARDED_INPUT[kind].shard(x, grid.rank, 2).clone()
    x.requires_grad_(x.is_floating_point())
    products: list[str] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (F.linear, column_linears):
                products.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Watch():
        out = forward(layer, kind, x)
    sent = calls.copy()
    calls.clear()
    out.sum().backward()
    return sent, calls, products


B = 3 * 5


@pytest.mark.parametrize(
    ("kind", "forward", "backward", "products"),
    [
        ("column", [], [f"all_reduce {B * DIM}"], ["column_linears"]),
        ("column, fused", [], [f"all_reduce {B * DIM}"], ["column_linears"]),
        ("row", [f"all_reduce {B * DIM}"], [], ["linear"]),
        # As the paper counts.
        ("mlp", [f"all_reduce {B * DIM}"], [f"all_reduce {B * DIM}"], ["column_linears", "linear"]),
        ("embedding", [f"all_reduce {B * DIM}"], [], []),
        ("tied head", [], [f"all_reduce {B * DIM}"], ["column_linears"]),
        ("head", [], [f"all_reduce {B * DIM}"], ["column_linears"]),
    ],
)
def test_parallel_layers_run_the_collectives_of_the_paper(
    ranks: Any, kind: str, forward: list[str], backward: list[str], products: list[str]
) -> None:
    for found in ranks(2, count_on_rank, kind):
        # A mode sees every product: the split backward swaps it there.
        assert found == (forward, backward, products)


def penalty_on_rank(size: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The gradient of a gradient's norm, through both kinds of linear layer."""
    layer = build("mlp", Grid(tensor=size))
    x = inputs("mlp").requires_grad_()
    (grad,) = torch.autograd.grad(layer(x).pow(2).sum(), x, create_graph=True)
    grad.pow(2).sum().backward()
    assert x.grad is not None
    return x.grad, {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("size", [2, 4])
def test_gradient_penalties_on_shards_equal_those_of_one_rank(ranks: Any, size: int) -> None:
    ((expected, grads),) = ranks(1, penalty_on_rank, 1)
    layouts = {name: layout_of(p) for name, p in build("mlp", Grid()).named_parameters()}
    found = ranks(size, penalty_on_rank, size)
    for name, layout in layouts.items():
        if name in grads:
            assembled = layout.assemble([r[1][name] for r in found])
            torch.testing.assert_close(assembled, grads[name], **CLOSE, msg=name)
    for r in found:
        torch.testing.assert_close(r[0], expected, **CLOSE)


def in_place_on_rank(size: int, shape: tuple[int, ...], sequence: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """The gradients of x and of the weights, where what layers return is changed in place."""
    grid = Grid(tensor=size)
    torch.manual_seed(7)
    up = ColumnParallelLinear(DIM, OUT, grid=grid, sequence_parallel=sequence).double()
    down = RowParallelLinear(OUT, DIM, grid=grid, sequence_parallel=sequence).double()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    mine = split_gather(x, grid.tensor, dim=1) if sequence else x
    h = up(mine)
    h *= 3.0
    y = down(F.relu(h, inplace=True))
    y += mine
    whole = gather_split(y, grid.tensor, dim=1) if sequence else y
    whole.tanh().square().sum().backward()
    assert x.grad is not None
    gradients = {}
    for name, p in nn.ModuleDict({"up": up, "down": down}).named_parameters():
        assert p.grad is not None
        if layout_of(p).partial:
            grid.tensor.all_reduce(p.grad)
        parts = [torch.tensor(part, dtype=p.dtype) for part in grid.tensor.all_gather_json(p.grad.tolist())]
        gradients[name] = layout_of(p).assemble(parts)
    return x.grad, gradients


@pytest.mark.parametrize(
    ("shape", "sequence"),
    [((4, DIM), False), ((3, 4, DIM), False), ((2, 3, 4, DIM), False), ((3, 4, DIM), True)],
)
def test_outputs_of_parallel_linears_may_change_in_place(ranks: Any, shape: tuple[int, ...], sequence: bool) -> None:
    ((dx, gradients),) = ranks(1, in_place_on_rank, 1, shape, sequence)
    for found_dx, found in ranks(2, in_place_on_rank, 2, shape, sequence):
        torch.testing.assert_close(found_dx, dx, **CLOSE)
        torch.testing.assert_close(found, gradients, **CLOSE)


# ------------------------------------------------------------------------------------------ the vocabulary


def gathered_on_rank(size: int, vocab: int) -> tuple[Tensor, list[int]]:
    grid = Grid(tensor=size)
    torch.manual_seed(0)
    head = VocabParallelHead(8, vocab, grid=grid)
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
    return gather_logits(head(x), grid=grid, vocab_size=vocab).detach(), list(head.weight.shape)


@pytest.mark.parametrize(("size", "vocab"), [(2, 257), (4, 257), (4, 5), (4, 4), (3, 50)])
def test_output_heads_shard_any_vocabulary_size_without_padding(ranks: Any, size: int, vocab: int) -> None:
    ((expected, _),) = ranks(1, gathered_on_rank, 1, vocab)
    found = ranks(size, gathered_on_rank, size, vocab)
    for rank, (logits, shape) in enumerate(found):
        torch.testing.assert_close(logits, expected)
        start, stop = split(vocab, size, rank)
        assert shape == [stop - start, 8]
    assert sum(shape[0] for _, shape in found) == vocab


def out_of_range_on_rank(ids: list[int]) -> list[str]:
    grid = Grid(tensor=2)
    embedding = VocabParallelEmbedding(10, 4, grid=grid)
    embedding(torch.empty(0, dtype=torch.long))  # no ids, no error
    try:
        embedding(torch.tensor([[0, *ids]]))
    except IndexError as error:
        return grid.tensor.all_gather_json(str(error))
    return ["no error"]


@pytest.mark.parametrize("wrong", [10, -1, 1 << 40])
def test_an_id_outside_the_vocabulary_is_an_error_on_every_rank(ranks: Any, wrong: int) -> None:
    low, high = min(0, wrong), max(0, wrong)
    message = "a token id lies outside the vocabulary of 10 (0 to 9)"
    for said in ranks(2, out_of_range_on_rank, [wrong]):
        assert said == [f"{message}: the ids run from {low} to {high}"] * 2
    with pytest.raises(IndexError, match="outside the vocabulary of 10"):
        VocabParallelEmbedding(10, 4, grid=Grid())(torch.tensor([wrong]))


def test_embedding_error_for_hidden_states_names_the_tied_head() -> None:
    with pytest.raises(
        TypeError, match=r"of torch\.float32: a tied head is .*forward_fn=VocabParallelEmbedding\.attend"
    ):
        VocabParallelEmbedding(10, 4, grid=Grid())(torch.zeros(2, 4))


# --------------------------------------------------------------------------------------------------- errors


def refused_on_rank(what: str) -> str:
    return error_text(lambda: build_wrongly(what, Grid(tensor=4)))


def build_wrongly(what: str, grid: Grid) -> None:
    match what:
        case "column":
            ColumnParallelLinear(8, 10, grid=grid)
        case "part":
            ColumnParallelLinear(8, 12, grid=grid, parts=(6, 6))
        case "parts":
            ColumnParallelLinear(8, 12, grid=grid, parts=(4, 4))
        case "row":
            RowParallelLinear(2, 8, grid=grid)
        case "vocabulary":
            VocabParallelEmbedding(3, 8, grid=grid)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "column",
            "ColumnParallelLinear: out_features is 10, which tensor=4 does not divide. Make it 8 or 12, or give the",
        ),
        ("part", "one of the parts is 6, which tensor=4 does not divide. Make it 4 or 8"),
        ("parts", "parts=(4, 4) add up to 8, but dim 0 of the shape (12, 8) is 12 long"),
        ("row", "RowParallelLinear: in_features is 2, which tensor=4 does not divide. Make it 4, or"),
        ("vocabulary", "num_embeddings is 3, but tensor=4 needs at least 4. Give tensor=3 at most."),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_their_numbers(ranks: Any, what: str, message: str) -> None:
    for said in ranks(4, refused_on_rank, what):
        assert message in said


def test_repr_of_a_sharded_layer_shows_whole_sizes() -> None:
    layer = ColumnParallelLinear(8, 12, grid=Grid(), parts=(4, 4, 4))
    shown = "ColumnParallelLinear(in_features=8, out_features=12, bias=True, parts=(4, 4, 4), tensor=1)"
    assert repr(layer) == shown


def test_the_factor_of_an_embedding_is_rounded_to_its_dtype() -> None:
    """As transformers multiplies Gemma's: sqrt(3072) = 55.43 is 55.5 in bf16, and products differ by a unit."""
    layer = VocabParallelEmbedding(50, 8, grid=Grid(), scale=3072**0.5, dtype=torch.bfloat16)
    ids = torch.arange(50)[None]
    vectors = F.embedding(ids, layer.weight)
    assert torch.equal(layer(ids), vectors * torch.tensor(55.5, dtype=torch.bfloat16))
    assert not torch.equal(layer(ids), vectors * 3072**0.5)
