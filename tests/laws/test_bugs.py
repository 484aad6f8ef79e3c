"""Fixed bugs of triax, each described in a line."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import triax
from triax import Grid, LayerSpec
from triax.zero import gathered

from support.bug_models import (
    WIDTH,
    SparseRows,
    built,
    engine_of,
    pairs,
)
from support.toys import mean_loss


class InPlaceBlock(nn.Module):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x *= 0.5
        return self.b(torch.tanh(self.a(x)))


def step(name: str, schedule: str, chunks: int) -> Any:
    grid = Grid(pipe=2, timeout=60)
    engine = engine_of(built(name), grid, pipeline={"schedule": schedule}, chunks=chunks)
    return engine.train_batch(iter(pairs())).item(), engine.gather("gradients")


@pytest.mark.parametrize(
    ("name", "schedule", "chunks"),
    [
        # Its last place in the list was forgotten: that stage's part of the gradient was lost.
        ("listed again", "1f1b", 1),
        # What is recomputed was not split as the forward pass was: an error about other saved tensors.
        ("checkpointed", "zb-h1", 1),
        ("checkpointed", "zb-v", 2),
        # The weight that came back from the hooks wanted no gradient, so it got none.
        ("offloaded", "zb-h1", 1),
        # What a layer differentiated for itself was added to its weights' gradients.
        ("force", "zb-h1", 1),
        ("sensitivity", "zb-h1", 1),
        # gloo carries no complex numbers.
        ("complex", "1f1b", 1),
        # A sparse gradient was copied to a dense bucket: torch's error about copy_().
        ("sparse", "1f1b", 1),
        ("sparse", "zb-h1", 1),
    ],
)
def test_gradients_of_each_layer_equal_those_of_autograd(ranks: Any, name: str, schedule: str, chunks: int) -> None:
    engine = engine_of(built(name))
    module, weights = engine.module, {p.layout.name: p.parameter for p in engine.module.local_parameters()}
    loss = torch.stack([mean_loss(module(x), y) for x, y in pairs()]).mean()
    gradients = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
    wanted = {name: gradient.to_dense() for name, gradient in zip(weights, gradients, strict=True)}
    for found, gradients in ranks(2, step, name, schedule, chunks):
        assert found == pytest.approx(loss.item(), rel=1e-10)
        torch.testing.assert_close(gradients, wanted, rtol=1e-10, atol=1e-13)


def plain_engine(model: nn.Module, grid: Grid, stage: int, accumulation: int, **more: Any) -> triax.ModuleEngine:
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 50, "stage3_param_persistence_threshold": 0},
        **more,
    }
    return triax.initialize(model=model, config=config, grid=grid)[0]


def sparse_model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(SparseRows(), nn.Linear(WIDTH, WIDTH)).double()


def sparse_on_replicas() -> list[dict[str, Tensor]]:
    """Gradients in each stage of ZeRO, of a plain module and of a pipeline."""
    grid, found = Grid(timeout=60), []
    mine = pairs()[grid.data.rank :: grid.data.size]
    for stage in range(4):
        plain = plain_engine(sparse_model(), grid, stage, len(mine), sparse_gradients=stage < 2)
        for x, y in mine:
            plain.backward(mean_loss(plain(x), y))
            plain.step()
        listed = engine_of(
            [*sparse_model()], grid, zero_optimization={"stage": stage}, gradient_accumulation_steps=len(mine)
        )
        listed.train_batch(iter(mine))
        gradients = listed.gather("gradients")
        found += [plain.gather("gradients"), {name.removeprefix("layers."): g for name, g in gradients.items()}]
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_sparse_gradients_are_summed_dense(ranks: Any, size: int) -> None:
    """A sparse gradient was copied to a dense bucket: torch's error about copy_()."""
    model = sparse_model()
    torch.stack([mean_loss(model(x), y) for x, y in pairs()]).mean().backward()
    wanted = {name: p.grad.to_dense() for name, p in model.named_parameters() if p.grad is not None}
    for found in ranks(size, sparse_on_replicas):
        assert len(found) == 8
        for gradients in found:
            torch.testing.assert_close(gradients, wanted, rtol=1e-10, atol=1e-13)


class Reentrant(nn.Module):
    """Blocks in reentrant checkpoints, which run a backward pass within the backward pass; ``how`` nests them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first = how, nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))

    def inner(self, x: Tensor) -> Tensor:
        return checkpoint(self.blocks[1], checkpoint(self.blocks[0], x, use_reentrant=True), use_reentrant=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.how == "nested":
            return self.blocks[2](checkpoint(self.inner, x, use_reentrant=True))
        if self.how == "one block twice":
            x = checkpoint(lambda x: self.blocks[1](self.blocks[0](self.blocks[1](x))), x, use_reentrant=True)
            return self.blocks[2](x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.blocks[0](x) if self.how == "mixed" else x


REENTRANT = ["last", "nested", "one block twice"]


def reentrant_model(how: str) -> Reentrant:
    torch.manual_seed(6)
    return Reentrant(how).double()


def reentrant_on_replicas() -> dict[tuple[str, int, bool], dict[str, Tensor]]:
    """Gradients of ``loss.backward()`` and of ``engine.backward(loss)``, in each stage of ZeRO."""
    grid, found = Grid(timeout=60), {}
    mine = pairs()[grid.data.rank :: grid.data.size]
    for how, stage, own in product(REENTRANT, range(4), [False, True]):
        engine = plain_engine(reentrant_model(how), grid, stage, len(mine))
        for x, y in mine:
            loss = mean_loss(engine(x), y)
            engine.backward(loss) if own else loss.backward()
            held = sum(b.weights.untyped_storage().nbytes() for b in engine.data_axis.buckets if b.partitioned)
            assert held == 0, "weights are left whole after a backward pass"
            engine.step()
        found[how, stage, own] = engine.gather("gradients")
    return found


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoints_have_the_gradients_of_plain_pytorch(ranks: Any, size: int) -> None:
    """The backward pass of a checkpoint was taken for one of the engine: "the last backward pass failed half way"."""
    wanted = {}
    for how in REENTRANT:
        model = reentrant_model(how)
        torch.stack([mean_loss(model(x), y) for x, y in pairs()]).mean().backward()
        wanted[how] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for found in ranks(size, reentrant_on_replicas, timeout=60):
        for (how, stage, own), gradients in found.items():
            message = f"{how}, stage {stage}, engine.backward: {own}"
            torch.testing.assert_close(gradients, wanted[how], rtol=1e-10, atol=1e-13, msg=message)


def mixed_reentrant() -> list[str]:
    """Errors of a block that is used in a reentrant checkpoint and outside, in each stage of ZeRO."""
    grid, found = Grid(timeout=60), []
    for stage in range(4):
        engine = plain_engine(reentrant_model("mixed"), grid, stage, 1)
        x, y = pairs()[grid.data.rank]
        with pytest.raises(RuntimeError) as error:
            mean_loss(engine(x), y).backward()
        found.append(str(error.value))
    return found


def test_a_weight_also_used_outside_its_checkpoint_is_refused(ranks: Any) -> None:
    for messages in ranks(2, mixed_reentrant, timeout=60):
        assert all("blocks.0.0." in m and "use_reentrant=False" in m for m in messages), messages


def penalty(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Loss with a gradient in it: a second backward pass through the graph of the first."""
    x = x.clone().requires_grad_()
    loss = mean_loss(model(x), y)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().sum()


def fast_weights(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Loss of weights after a step of gradient descent, as in MAML, differentiated through the step."""
    names, weights = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(mean_loss(model(x), y), weights, create_graph=True)
    fast = {name: w - 0.1 * g for name, w, g in zip(names, weights, gradients, strict=True)}
    return mean_loss(functional_call(model, fast, (x,)), y)


def replaced(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return mean_loss(functional_call(model, {name: w * 2 for name, w in model.named_parameters()}, (x,)), y)


def replaced_in_part(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return mean_loss(functional_call(model, {"2.bias": torch.ones(WIDTH, dtype=torch.float64)}, (x,)), y)


def transformed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    each: Tensor = torch.func.vmap(model, randomness="error")(x)
    return mean_loss(each, y)


LIMITS = {
    penalty: "create_graph=True in a backward pass through unit 2",
    fast_weights: "create_graph=True in a backward pass through unit 2",
    replaced: r"0.weight of \(6, 6\) was used by mul\(\)",
    replaced_in_part: r"functional_call replaced parameters of the module .* \(0.weight, ...\)",
    transformed: r"a transform of torch.func \(grad, vmap, jacrev, ...\) ran the module .* \(0.weight, ...\)",
}


def limits_model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()


def limits_of_stage_3() -> list[dict[str, Tensor]]:
    grid, found = Grid(data=2, timeout=60), []
    x, y = pairs()[grid.data.rank]
    for loss_of, words in LIMITS.items():
        engine = plain_engine(limits_model(), grid, 3, 1)
        with pytest.raises(RuntimeError, match=rf"{words}.*within triax.zero.gathered\("):
            loss_of(engine.module, x, y)
        engine.zero_grad()
        with gathered(engine.module):
            engine.backward(loss_of(engine.module, x, y))
        engine.step()
        found.append(engine.gather("gradients"))
    return found


def test_losses_that_stage_3_refuses_run_within_gathered(ranks: Any) -> None:
    """Outside of it each raises its error of ``LIMITS``; within, the gradients are those of plain PyTorch.

    Released weights were NaN without a word, or ended in messages about storages and setup_context.
    """
    wanted = []
    for loss_of in LIMITS:
        model = limits_model()
        torch.stack([loss_of(model, *pair) for pair in pairs()[:2]]).mean().backward()
        wanted.append({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()})
    for found in ranks(2, limits_of_stage_3):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-13)


def in_place_model() -> nn.Sequential:
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(InPlaceBlock() for _ in range(3))).double()


def recomputed_in_place(sizes: tuple[int, int, int], sections: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """Gradients of a model whose blocks change their input, in each stage of ZeRO; without a pipe axis, two models."""
    grid, found = Grid(*sizes, timeout=60), []
    mine = pairs()[grid.data.rank :: grid.data.size]
    for stage, section in product(range(4), sections):
        more: dict[str, Any] = {"activation_checkpointing": section, "gradient_accumulation_steps": len(mine)}
        more["optimizer"] = {"type": "SGD", "params": {"lr": 0.0}}
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        engine: Any = engine_of([*in_place_model()], grid, zero_optimization=zero, **more)
        for _ in range(2):  # inputs that change are found out in the first run
            engine.train_batch(iter([(x.clone(), y) for x, y in mine]))
        found.append({name.removeprefix("layers."): g for name, g in engine.gather("gradients").items()})
        if sizes[0] == 1:
            engine = plain_engine(in_place_model(), grid, stage, len(mine), activation_checkpointing=section)
            for x, y in mine:
                engine.backward(mean_loss(engine(x.clone()), y))
                engine.step()
            found.append(engine.gather("gradients"))
    return found


@pytest.mark.parametrize(
    "sizes",
    [(2, 1, 1), (1, 1, 2), *(pytest.param(sizes, marks=pytest.mark.exhaustive) for sizes in ((1, 1, 1), (1, 2, 1)))],
    ids=str,
)
def test_recomputed_blocks_may_change_their_input(ranks: Any, sizes: tuple[int, int, int]) -> None:
    """torch's errors about leaves and versions under recomputation, although a stage's boundary promises it."""
    sections = [{"enabled": True}, {"enabled": True, "partition_activations": True}][: 1 + (sizes[2] > 1)]
    model = in_place_model()
    torch.stack([mean_loss(model(x.clone()), y) for x, y in pairs()]).mean().backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    for found in ranks(sizes[0] * sizes[1] * sizes[2], recomputed_in_place, sizes, sections):
        for gradients in found:
            torch.testing.assert_close(gradients, wanted, rtol=1e-10, atol=1e-13)


class TwiceReentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return x


def twice_reentrant(zero: int) -> str:
    bucket = {"stage": zero, "reduce_bucket_size": 10}  # one parameter a bucket
    engine = engine_of([LayerSpec(TwiceReentrant)], Grid(data=2, timeout=60), zero_optimization=bucket)
    with pytest.raises(RuntimeError) as error:
        engine.train_batch(iter(pairs()))
    return str(error.value)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_gradient_is_not_reduced_before_it_is_complete(ranks: Any, zero: int) -> None:
    """Reentrant checkpoints report a shared weight once each: it was reduced after the first, the others lost."""
    for message in ranks(2, twice_reentrant, zero):
        assert "layers.0.shared." in message and "use torch.utils.checkpoint with use_reentrant=False" in message
