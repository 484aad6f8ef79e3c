"""Stage 3 of plain modules: which modules are units, when weights are gathered; gradients equal torch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from triax import Grid
from triax.zero import ShardedOptimizer, gathered
from triax.zero.modules.units import find_units, users

from support.sharded_loops import sharded_sgd
from support.toys import replica_inputs
from support.training import mean_square, train_plain, whole_batches

VOCABULARY, WIDTH, LENGTH, LAYERS = 11, 8, 5, 5


@dataclass
class Output:
    """Output object as libraries return it: a dataclass."""

    logits: Tensor
    hidden: dict[str, list[Tensor]]


class Opaque:
    """Output whose tensors cannot be found."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.checkpoints = False

    def forward(self, hidden: Tensor, *, mask: Tensor, opaque: bool = False) -> Any:
        q, k, v = self.qkv(self.norm1(hidden)).chunk(3, dim=-1)
        with sdpa_kernel(SDPBackend.MATH):  # which can be differentiated twice in every version of torch
            hidden = hidden + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        inside = self.norm2(hidden)
        hidden = hidden + (checkpoint(self.mlp, inside, use_reentrant=False) if self.checkpoints else self.mlp(inside))
        return Opaque(hidden) if opaque else (hidden, {"mask": mask})


class Transformer(nn.Module):
    """A model like GPT-2: positions, blocks in a ModuleList, a last norm; ``how`` it is run is set from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.how = ""

    def forward(self, ids: Tensor) -> list[Tensor]:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        every = []
        for number, block in enumerate(self.h):
            if self.how == "checkpoint around":
                x, _ = checkpoint(block, x, mask=mask, use_reentrant=False)
            elif self.how == "reentrant":
                x = checkpoint(lambda x, block=block: block(x, mask=mask)[0], x, use_reentrant=True)
            elif self.how == "opaque":
                x = block(x, mask=mask, opaque=True).hidden
            else:
                x, _ = block(x, mask=mask)
            if self.how == "twice" and number == 1:
                x, _ = self.h[0](x, mask=mask)
            if self.how == "in place":
                x *= 0.9
            every.append(x)
        return [*every[:-1], self.norm(every[-1])]


class Model(nn.Module):
    """A transformer and a head tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = Transformer()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.transformer.tokens.weight

    def forward(self, *, ids: Tensor) -> Output:
        hidden = self.transformer(ids)
        return Output(self.head(hidden[-1]), {"hidden": hidden})


def blocks_of(made: Model) -> list[Block]:
    return [block for block in made.transformer.h if isinstance(block, Block)]


def model(how: str = "") -> Model:
    torch.manual_seed(0)
    made = Model().double()
    made.transformer.how = how
    for block in blocks_of(made):
        block.checkpoints = how == "checkpoint inside"
    if how == "frozen":
        made.transformer.tokens.requires_grad_(False)
        made.transformer.positions.requires_grad_(False)
        for block in blocks_of(made)[:2]:
            block.requires_grad_(False)
    return made


def text(step: int, replica: int, which: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * which + replica)
    ids = torch.randint(VOCABULARY, (3, LENGTH + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def loss_of(made: Model, step: int, replica: int) -> Tensor:
    """Loss of a replica in a step; ``how`` selects a way of using the model."""
    how = made.transformer.how
    ids, labels = text(step, replica)
    output = made(ids=ids)
    loss = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
    if how == "two forwards":  # and one backward pass
        ids, labels = text(step, replica, which=1)
        loss = loss + F.cross_entropy(made(ids=ids).logits.flatten(0, 1), labels.flatten())
    if how == "early exit" and replica == 1:  # the last blocks ran here, and have no gradient
        loss = output.hidden["hidden"][1].square().mean()
    if how == "penalty":  # a gradient within the loss: a second backward pass through the same graph
        hidden = output.hidden["hidden"][0]
        (slope,) = torch.autograd.grad(loss, hidden, create_graph=True)
        loss = loss + slope.square().sum()
    if how == "evaluation":  # between a forward and its backward
        with torch.no_grad():
            made(ids=ids)
    return loss


Found = list[dict[str, Tensor]]
FAST_SGD = partial(torch.optim.SGD, lr=0.3)


def plain(how: str, replicas: int, steps: int = 3) -> tuple[Found, dict[str, Tensor]]:
    """Return the gradients of each step and the last weights of plain PyTorch."""
    made = model(how)
    batches = [[(step, replica, None) for replica in range(replicas)] for step in range(steps)]
    found = train_plain(made, FAST_SGD, batches, lambda loss, _: loss, forward=partial(loss_of, made))
    return [step.gradients for step in found], found[-1].weights


def whole_bytes(optimizer: ShardedOptimizer) -> int:
    return sum(b.weights.untyped_storage().nbytes() for b in optimizer.backward_passes.data_axis.buckets)


def sharded(how: str, units: list[str] | None, keep: bool = False) -> Any:
    grid = Grid(timeout=30)
    made = model(how)
    optimizer = ShardedOptimizer(
        torch.optim.SGD,
        made.parameters(),
        grid,
        stage=3,
        module=made,
        units=units,
        keep_gathered=keep,
        lr=0.3,
        bucket_size=10**6,
    )
    assert whole_bytes(optimizer) == 0
    names = {p: n for n, p in made.named_parameters()}
    gradients, most = [], 0

    def watch(*_: Any) -> None:
        nonlocal most
        most = max(most, whole_bytes(optimizer))

    for block in blocks_of(made):
        block.out.register_forward_hook(watch)
        if how != "penalty":  # torch refuses a hook there
            block.out.register_full_backward_hook(watch)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(made, step, grid.data.rank).backward()
        assert whole_bytes(optimizer) == 0, "weights are left whole after a backward pass"
        gradients.append({names[p]: g.clone() for p, g in optimizer.gradients()})
        optimizer.step()
        assert whole_bytes(optimizer) == 0
    assert all(p.isnan().all() for p in made.parameters())
    with gathered(made):
        weights = {n: p.detach().clone() for n, p in made.named_parameters()}
    sizes = {b.layers: b.flat.numel * 8 for b in optimizer.backward_passes.data_axis.buckets}
    return gradients, weights, most, sizes


HOWS = [
    "",
    "checkpoint inside",
    "checkpoint around",
    "reentrant",
    "opaque",
    "twice",
    "in place",
    "frozen",
    "two forwards",
    "early exit",
    "evaluation",
]


@pytest.mark.parametrize("how", HOWS)
def test_gradients_of_units_equal_torchs(ranks: Any, how: str) -> None:
    wanted, weights = plain(how, 2)
    for gradients, found, most, sizes in ranks(2, sharded, how, units=None):
        torch.testing.assert_close(gradients, wanted, rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(found, weights, rtol=1e-10, atol=1e-13)
        root, unit = sum(n for layers, n in sizes.items() if 0 in layers), max(sizes.values())
        if how in ("", "checkpoint inside", "checkpoint around", "reentrant", "early exit", "in place"):
            # The root, the running unit, and the prefetched one.
            assert most <= root + 2 * unit < sum(sizes.values())


@pytest.mark.parametrize(
    "units", [[], ["transformer"], ["transformer", "transformer.h.*"], ["transformer.h.[024]", "transformer.h.3.mlp"]]
)
def test_every_choice_of_units_trains_as_plain_pytorch(ranks: Any, units: list[str]) -> None:
    """Gathering the whole model, one submodule, units within one, and some blocks with a part of another."""
    wanted, weights = plain("", 2)
    for gradients, found, _, _ in ranks(2, sharded, "", units):
        torch.testing.assert_close(gradients, wanted, rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(found, weights, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("how", ["", "penalty", "opaque"])
def test_units_kept_gathered_train_as_plain_pytorch(ranks: Any, how: str) -> None:
    wanted, _ = plain(how, 4)
    for gradients, _, most, sizes in ranks(4, sharded, how, units=None, keep=True):
        torch.testing.assert_close(gradients, wanted, rtol=1e-10, atol=1e-13)
        assert most == sum(sizes.values())


def calls(keep: bool) -> tuple[list[str], float, float]:
    """Gathers and runs of one step, in order; bytes that it sends, and bytes of all weights."""
    grid = Grid(timeout=30)
    made = model()
    optimizer = sharded_sgd(made, grid, lr=0.3, keep_gathered=keep)
    seen: list[str] = []
    for bucket in optimizer.backward_passes.data_axis.buckets:
        restore: Callable[..., Any] = bucket.restore

        def spy(axis: Any, restore: Any = restore, bucket: Any = bucket) -> Any:
            if bucket.released:
                seen.append(f"gather {bucket.layers[0]}")
            return restore(axis)

        bucket.restore = spy  # type: ignore[method-assign]
    for number, block in enumerate(blocks_of(made), 1):
        block.out.register_forward_hook(lambda *_, n=number: seen.append(f"forward {n}"))
        block.out.register_full_backward_pre_hook(lambda *_, n=number: seen.append(f"backward {n}"))
    for step in range(2):
        seen.clear()
        grid.traffic.clear()
        optimizer.zero_grad()
        loss_of(made, step, grid.data.rank).backward()
        optimizer.synchronize()
        sent = grid.traffic.report()["data"]
        optimizer.step()
    total = sum(b.flat.numel for b in optimizer.backward_passes.data_axis.buckets) * 8
    root = sum(b.flat.numel for b in optimizer.backward_passes.data_axis.buckets if 0 in b.layers) * 8
    ring = (grid.data.size - 1) / grid.data.size
    return seen, sum(entry.bytes for entry in sent.values()) / ring, 3 * total - root if not keep else 2 * total


def test_the_next_unit_is_fetched_while_one_runs(ranks: Any) -> None:
    n = LAYERS
    forward = ["gather 0", "gather 1", *chain(*([f"gather {i + 1}", f"forward {i}"] for i in range(1, n)))]
    backward = [f"gather {n}", *chain(*([f"gather {i - 1}", f"backward {i}"] for i in range(n, 1, -1)))]
    for seen, sent, formula in ranks(2, calls, keep=False):
        assert seen == [*forward, f"forward {n}", *backward, "backward 1"]
        assert sent == formula  # gathered forward and backward, and reduced: 3 M; the root is gathered once
    for seen, sent, formula in ranks(2, calls, keep=True):
        assert [entry for entry in seen if entry.startswith("gather")] == [f"gather {i}" for i in range(n + 1)]
        assert sent == formula


def test_units_are_repeated_blocks_or_the_named_modules() -> None:
    made = model()
    names = [name for name, _ in find_units(made)]
    assert names == ["", *(f"transformer.h.{i}" for i in range(LAYERS))]
    assert [name for name, _ in find_units(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), made))] == ["", "0", "2"]
    named = find_units(made, ["transformer.h.*", made.transformer.norm, "transformer.h.0.*"])
    assert [name for name, _ in named][1 + LAYERS :] == [
        "transformer.norm",
        *(f"transformer.h.0.{part}" for part in ("norm1", "norm2", "qkv", "out", "mlp")),
    ]
    where: dict[Any, list[int]] = users(find_units(made, ["transformer.h.*", "transformer.tokens", "head"]))
    assert where[made.head.weight] == [LAYERS + 1, LAYERS + 2]  # tied: of two units
    assert where[blocks_of(made)[2].qkv.weight] == [3] and where[made.transformer.norm.bias] == [0]
    assert set(where) == set(made.parameters())


def test_find_units_refuses_names_and_modules_it_cannot_find() -> None:
    made = model()
    with pytest.raises(
        ValueError, match=r"the pattern 'h.\*' matches no submodule of the model. Its first submodules are tr"
    ):
        find_units(made, ["h.*"])
    with pytest.raises(ValueError, match="the Linear given matches no submodule"):
        find_units(made, [nn.Linear(2, 2)])


def failing_forward() -> Any:
    grid = Grid(timeout=30)
    made = model()
    optimizer = sharded_sgd(made, grid, lr=0.3)
    block = blocks_of(made)[2]
    handle = block.out.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(made, 0, 0)
    handle.remove()
    with torch.no_grad():
        assert not loss_of(made, 0, grid.data.rank).isnan()
    loss_of(made, 0, grid.data.rank).backward()
    names = {p: n for n, p in made.named_parameters()}
    return {names[p]: g.clone() for p, g in optimizer.gradients()}, whole_bytes(optimizer)


def test_a_failed_forward_releases_its_gathered_weights(ranks: Any) -> None:
    wanted, _ = plain("", 2, steps=1)
    for gradients, whole in ranks(2, failing_forward):
        torch.testing.assert_close(gradients, wanted[0], rtol=1e-10, atol=1e-13)
        assert whole == 0


def untied() -> Any:
    """A parameter tied between two units, neither of them the root."""
    grid = Grid(timeout=30)
    made = model()
    units = ["transformer.tokens", "transformer.h.*", "head"]
    optimizer = sharded_sgd(made, grid, lr=0.3, units=units)
    names = {p: n for n, p in made.named_parameters()}
    loss_of(made, 0, grid.data.rank).backward()
    return {names[p]: g.clone() for p, g in optimizer.gradients()}, whole_bytes(optimizer)


def test_a_weight_tied_between_two_units_has_torchs_gradient(ranks: Any) -> None:
    wanted, _ = plain("", 2, steps=1)
    for gradients, whole in ranks(2, untied):
        torch.testing.assert_close(gradients, wanted[0], rtol=1e-10, atol=1e-13)
        assert whole == 0


class Layer(nn.Module):
    """A container with a parameter of its own; the module that has it runs its entries."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.25))
        self.ff = nn.Linear(WIDTH, WIDTH)


class Held(nn.Module):
    """Layers as lists and dicts of modules, which have no forward: ``for attention, ff in self.layers``."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]) for _ in range(2))
        self.named = nn.ModuleList(nn.ModuleDict({"ff": nn.Linear(WIDTH, WIDTH)}) for _ in range(2))
        self.bare = nn.ModuleList(Layer() for _ in range(2))
        self.deep = nn.ModuleDict({"one": nn.ModuleList([nn.ModuleList([nn.ModuleList([nn.Linear(WIDTH, WIDTH)])])])})
        self.biases = nn.ModuleList([nn.ParameterList([torch.full((WIDTH,), 0.5)])])
        self.empty = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        for pair in self.pairs:
            assert isinstance(pair, nn.ModuleList)
            x = x + pair[1](torch.tanh(pair[0](x)))
        for entry in self.named:
            assert isinstance(entry, nn.ModuleDict)
            x = x + entry["ff"](x)
        for layer in self.bare:
            assert isinstance(layer, Layer)
            x = torch.tanh(layer.scale * layer.ff(x))
        (biases,) = self.biases
        assert isinstance(biases, nn.ParameterList)
        y: Tensor = self.get_submodule("deep.one.0.0.0")(x) + biases[0]
        return y


HELD_UNITS = [
    *(f"pairs.{i}.{j}" for i in range(2) for j in range(2)),
    *(f"named.{i}.ff" for i in range(2)),
    *(f"bare.{i}.ff" for i in range(2)),
    "deep.one.0.0.0",
]


def held() -> Held:
    torch.manual_seed(0)
    return Held().double()


held_inputs = partial(replica_inputs, width=WIDTH)


def containers() -> dict[str, Tensor]:
    grid = Grid(timeout=30)
    made = held()
    optimizer = sharded_sgd(made, grid, lr=0.3)
    for step in range(2):
        optimizer.zero_grad()
        made(held_inputs(step, grid.data.rank)).square().mean().backward()
        optimizer.step()
    assert whole_bytes(optimizer) == 0
    with gathered(made):
        return {n: p.detach().clone() for n, p in made.named_parameters()}


def test_modules_without_a_forward_are_no_units(ranks: Any) -> None:
    assert [name for name, _ in find_units(held())] == ["", *HELD_UNITS]
    wanted = train_plain(held(), FAST_SGD, whole_batches(held_inputs, 2, 2), mean_square)[-1].weights
    for found in ranks(2, containers):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-13)


def test_modules_without_a_forward_are_refused_as_units() -> None:
    made = held()
    assert [name for name, _ in find_units(made, ["pairs.*.*", "emp*"])] == ["", *HELD_UNITS[:4]]
    with pytest.raises(ValueError, match=r"pairs.0 is a ModuleList, which has no forward.*: pairs.0.0, pairs.0.1, or "):
        find_units(made, ["pairs.*"])
    with pytest.raises(ValueError, match=r"named.1 is a ModuleDict, .* name what it holds: named.1.ff, or named.1.\*$"):
        find_units(made, [made.named[1]])
    with pytest.raises(ValueError, match=r"biases.0 is a ParameterList, .* name the module around it"):
        find_units(made, ["biases.0"])
    pair = made.pairs[0]
    pair.forward = lambda x: x
    assert [name for name, _ in find_units(made)][:3] == ["", "pairs.0", "pairs.1.0"]
