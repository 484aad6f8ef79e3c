"""Code that reads a sharded layer's weight outside of the layer: right numbers or an error."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import triax
from triax.grid import Grid
from triax.grid.layout import layout_of
from triax.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding
from triax.zero import ShardedOptimizer

WIDTH, VOCAB = 8, 13  # 13 rows over 2 ranks are 7 and 6
X = torch.linspace(-1, 1, 3 * WIDTH, dtype=torch.float64).view(3, WIDTH)
IDS = torch.tensor([0, 5, 12])


def language_model(tied: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH))
    model.append(nn.Linear(WIDTH, VOCAB, bias=not tied))
    if tied:
        model[3].weight = model[0].weight
    return model.double()


PLAN = {"0": "vocab", "1": "column", "2": "row", "3": "column_gather"}


def sharded(tensor: int, tied: bool = False) -> Any:
    return triax.parallelize(language_model(tied), Grid(tensor=tensor), PLAN)


class Chunked(torch.autograd.Function):
    """A fused output layer and loss as kernel libraries have them: slices of the weight, products by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.cat([x @ weight[start : start + 4].to(x.dtype).t() for start in range(0, len(weight), 4)], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x


# What other code does with a weight that it takes for the whole one.
MISUSES: dict[str, Callable[[Any], Any]] = {
    "a product": lambda model: X @ model[3].weight.T,
    "a product with .data": lambda model: X @ model[3].weight.data.t(),
    "a product with a detached copy": lambda model: torch.mm(X, model[3].weight.detach().clone().mT),
    "a cast": lambda model: X.float() @ model[3].weight.float().t(),
    "F.linear": lambda model: F.linear(X, model[3].weight),
    "F.linear by name": lambda model: F.linear(X, model.get_parameter("3.weight")),
    "einsum": lambda model: torch.einsum("td,vd->tv", X, model[3].weight),
    "a fused loss": lambda model: Chunked.apply(X, model[3].weight),
    "a table": lambda model: F.embedding(IDS % 6, model[0].weight),
    "a table by index": lambda model: model[0].weight[IDS % 6],
    "a table by list": lambda model: model[0].weight[[0, 1]],
    "rows": lambda model: model[0].weight.index_select(0, IDS % 6),
    "a mean of all rows": lambda model: model[0].weight.mean(dim=0),
    "a norm": lambda model: model[0].weight.norm(),
    "more rows": lambda model: torch.cat([model[0].weight, torch.zeros(2, WIDTH)]),
    "a column-parallel layer": lambda model: F.linear(X, model[1].weight),
    "a row-parallel layer": lambda model: F.linear(torch.ones(3, model[2].weight.shape[1]).double(), model[2].weight),
    "a singular value": lambda model: torch.linalg.svdvals(model[1].weight),
    # of what was made of it element by element
    "a sum of squares": lambda model: model[3].weight.pow(2).sum(),
    "a product with an average": lambda model: X @ model[3].weight.lerp(model[3].weight, 0.5).T,
    "a product with a masked copy": lambda model: X @ torch.where(model[3].weight > 0, model[3].weight, 0).T,
    "a product with a filled tensor": lambda model: X @ torch.zeros_like(model[3].weight).copy_(model[3].weight).T,
    "a product of chunks": lambda model: [X @ part.T for part in model[3].weight.chunk(3)],
    "a product of rows": lambda model: [X @ row for row in model[3].weight],
    "a row by its number": lambda model: X @ model[0].weight[5],
    "a greatest value": lambda model: model[3].weight.amax(0),
    "a broadcast product": lambda model: (X[:, None] * model[3].weight).sum(-1),
    # by functions that no list names
    "a convolution": lambda model: F.conv1d(X[None].mT, model[3].weight[:, :, None]),
    "an array": lambda model: X.numpy() @ model[3].weight.detach().numpy().T,
    "a vector": lambda model: nn.utils.parameters_to_vector([model[3].weight]).norm(),
    # by code of torch that calls, or is called, for others
    "another layer": lambda model: torch.func.functional_call(
        nn.Linear(WIDTH, VOCAB, bias=False), {"weight": model[3].weight}, X
    ),
    "a layer tied by hand": lambda model: tied_by_hand(model[3].weight)(X),
    "a copy as a parameter": lambda model: X @ nn.Parameter(model[3].weight).T,
    "recomputation": lambda model: checkpoint(F.linear, X, model[3].weight, use_reentrant=False),
    "vmap": lambda model: torch.vmap(lambda x: model[3].weight @ x)(X),
    "a compiled product": lambda model: torch.compile(lambda x: x @ model[3].weight.T, backend="eager")(X),
    "a compiled loss": lambda model: torch.compile(lambda x, w: (x @ w.T).sum(), backend="eager")(X, model[3].weight),
    # writes to rows by their numbers
    "a written row": lambda model: model[0].weight.data[5:6].fill_(0.0),
    "an assigned row": lambda model: model[0].weight.data.__setitem__(5, 0.0),
}


if hasattr(F, "linear_cross_entropy"):  # from torch 2.13 on
    MISUSES["a fused loss of torch"] = lambda model: F.linear_cross_entropy(X, model[3].weight, IDS % 6)


def tied_by_hand(weight: Any) -> nn.Linear:
    layer = nn.Linear(WIDTH, len(weight), bias=False)
    layer.weight = weight
    return layer


def complaints() -> dict[str, str]:
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 14, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    with pytest.raises(RuntimeError, match="resize_token_embeddings was called after parallelize"):
        triax.parallelize(theirs, Grid(tensor=2)).resize_token_embeddings(7)  # the rows of a shard
    model, found = sharded(2), {}
    for name, misuse in MISUSES.items():
        try:
            found[name] = f"no error, {misuse(model)}"
        except RuntimeError as error:
            found[name] = str(error)
    tied = VocabParallelEmbedding(VOCAB, WIDTH, grid=Grid(tensor=2), dtype=torch.float64)
    try:
        F.linear(X, tied.weight)
    except RuntimeError as error:
        found["a tied head by hand"] = str(error)
    return found


def test_reading_a_shard_as_the_whole_weight_is_an_error(ranks: Any) -> None:
    for found in ranks(2, complaints):
        assert len(found) == len(MISUSES) + 1
        for name, message in found.items():
            assert "shard" in message and "full_weight()" in message, (name, message)
        assert "takes 3.weight for the whole weight (13, 8), but it is this rank's shard (" in found["F.linear"]


def test_weights_on_one_tensor_rank_are_plain_parameters() -> None:
    model = sharded(1)
    for misuse in MISUSES.values():
        misuse(model)
    layer = VocabParallelEmbedding(VOCAB, WIDTH, grid=Grid())
    assert type(layer.weight) is nn.Parameter and torch.equal(layer.full_weight(), layer.weight)


class Own(ColumnParallelLinear):
    """A user's layer, which knows what its weight is."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(triax.tensor_parallel.copy_all_reduce(x, self.axis), self.weight) * self.weight.mean().sign()


def trained(tensor: int, tied: bool, read: bool) -> dict[str, Tensor]:
    """Train for two steps with a loss that multiplies by the head's whole weight; return gradients and weights."""
    grid = Grid(tensor=max(tensor, 1))
    model: Any = language_model(tied) if tensor == 0 else triax.parallelize(language_model(tied), grid, PLAN)
    if read:  # as code does that asks for types and sizes, or keeps an average
        for layer in model:
            assert layer.weight.dtype == torch.float64 and layer.weight.grad is None
            assert layer.weight.numel() == layer.weight.shape[0] * len(layer.weight[0]) and "ShardedWeight" in repr(
                layer.weight
            )
        average = [parameter.detach().clone() for parameter in model.parameters()]
        torch._foreach_lerp_(average, list(model.parameters()), 0.5)
        assert all(map(torch.equal, average, model.parameters()))
        assert layout_of(copy.deepcopy(model[3].weight)) == layout_of(model[3].weight)
        file = io.BytesIO()
        torch.save({**model.state_dict(), "copy": model[3].weight.detach().clone()}, file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=True)["copy"], model[3].weight)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    found: dict[str, Tensor] = {}
    for step in range(2):
        optimizer.zero_grad()
        hidden = model[:3](IDS)
        weight, bias = (model[3].full_weight(), model[3].full_bias()) if tensor else (model[3].weight, model[3].bias)
        logits = Chunked.apply(hidden, weight) + (0 if bias is None else bias)
        loss = F.cross_entropy(logits, IDS) + F.cross_entropy(model(IDS), IDS)  # outside of the layer, and inside
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        optimizer.step()
    for name, parameter in model.named_parameters():
        layout = layout_of(parameter)
        for what, value in (("weight", parameter), ("gradient", parameter.grad)):
            value = value.detach().as_subclass(Tensor)
            found[f"{what} {name}"] = layout.gather(grid.tensor, value) if layout.sharded else value
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_a_loss_with_the_full_weight_trains_as_on_one_process(ranks: Any, tied: bool) -> None:
    wanted = trained(0, tied, False)
    for read in (False, True):
        for found in ranks(2, trained, 2, tied, read):
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10, msg=name)


def compiled() -> list[float]:
    """Compiled layers, and a compiled step, over weights that other code has read."""
    model = sharded(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wanted = model(IDS).detach()
    assert all(layer.weight.dtype == torch.float64 for layer in model)
    found: list[float] = []
    hidden = model[:3](IDS).detach()
    for backend, layers, inputs in (("eager", model[3], hidden), ("aot_eager", model, IDS)):
        torch.compiler.reset()
        outputs = torch.compile(layers, backend=backend)(inputs)
        outputs.sum().backward()
        found.append((outputs - wanted).abs().max().item())
    before = model[3].full_weight().detach()
    torch.compile(optimizer.step, backend="eager")()
    moved = (model[3].full_weight().detach() - before).abs().max().item()
    with pytest.raises(Exception, match="full_weight"):
        torch.compile(lambda x: x @ model[3].weight.T, backend="eager", fullgraph=True)(X)
    torch.compiler.reset()
    return [*found, float(moved == 0)]


def test_compiled_layers_use_weights_that_were_read(ranks: Any) -> None:
    assert ranks(2, compiled) == [[0.0, 0.0, 0.0]] * 2


def own_layers() -> tuple[float, str]:
    grid = Grid(tensor=2)
    layer = Own(WIDTH, 6, False, grid=grid, dtype=torch.float64)
    assert layer.weight.shape == (3, WIDTH)
    before = layer(X).sum()
    layer.weight.requires_grad_(True)
    # A pipeline's tied embedding by its own method, and an engine in each stage over weights that were read.
    embedding = VocabParallelEmbedding(VOCAB, WIDTH, grid=grid, dtype=torch.float64)
    assert embedding.weight.dim() == 2
    embedding.attend(X).sum().backward()
    assert embedding.weight.grad.shape == embedding.weight.shape
    kinds = set()
    for stage in range(4):
        model = sharded(2)
        assert model[3].weight.dim() == model[0].weight.dim() == 2
        optimizer = ShardedOptimizer(torch.optim.AdamW, model.parameters(), grid, stage=stage, module=model, lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(IDS), IDS).backward()
            optimizer.step()
        kinds.add(round(F.cross_entropy(model(IDS), IDS).item(), 10))
    assert len(kinds) == 1
    return (layer(X).sum() - before).item(), str(kinds)


def test_layers_and_engines_use_weights_that_were_read(ranks: Any) -> None:
    assert all(difference == 0 for difference, _ in ranks(2, own_layers))
