"""Fixed bugs of triax, each described in a line."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.base.errors import AgreedError, ConfigError
from triax.randomness.random import Dropout
from triax.zero import gathered

from processes import slowdown
from toys import mean_loss

WIDTH, MICROBATCHES = 6, 4


def linear() -> LayerSpec:
    return LayerSpec(nn.Linear, WIDTH, WIDTH)


def pairs() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, MICROBATCHES, 3, 4, WIDTH, generator=generator, dtype=torch.float64)
    return list(zip(x[0], x[1], strict=True))


def endless() -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from pairs()


def engine_of(
    layers: list[Any], grid: Grid | None = None, loss: Any = mean_loss, **config: Any
) -> triax.PipelineEngine:
    chunks = config.pop("chunks", 1)
    optimizer = config.pop("with_optimizer", None)
    module = PipelineModule(layers, grid=grid, loss_fn=loss, dtype=torch.float64, partition="uniform", chunks=chunks)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICROBATCHES,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **config,
    }
    return triax.initialize(model=module, config=config, optimizer=optimizer)[0]


# ------------------------------------------------------------------------------------------------------- gradients


class Checkpointed(nn.Module):
    """Recomputes its first half in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(checkpoint(lambda y: torch.tanh(self.a(y)), x, use_reentrant=False))


class Mixed(nn.Module):
    """A linear, a convolution and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.conv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Conv1d(4, 4, 1)
        self.table = nn.Embedding(5, WIDTH, padding_idx=0)

    def inner(self, x: Tensor) -> Tensor:
        y = self.conv(torch.tanh(self.a(x)))
        return torch.tanh(y + self.table((x.detach().abs() * 3).long() % 5).sum(-2))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.inner(x))


class Offloaded(Mixed):
    """Layer whose saved tensors are moved to the CPU and come back as copies."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().forward(x)


class Force(Mixed):
    """Differentiates an energy by its input."""

    def forward(self, x: Tensor) -> Tensor:
        z = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.b(self.inner(z)).sum(), z, create_graph=True)
        return x + force


class Sensitivity(Mixed):
    """Differentiates by its own weights."""

    def forward(self, x: Tensor) -> Tensor:
        own = [*self.a.parameters(), *self.conv.parameters(), *self.table.parameters()]
        gradients = torch.autograd.grad(self.inner(x).sum(), own, create_graph=True)
        return self.b(x) + sum(g.square().sum() for g in gradients)


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = torch.fft.fft(self.a(x))
        return y, y.conj()


class Real(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Tensor:
        return self.a(torch.fft.ifft(x[0]).real + x[1].imag)


class SparseRows(Mixed):
    """An embedding whose gradients are sparse tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, padding_idx=0, sparse=True)


def listed_again() -> list[Any]:
    one, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    other.weight = one.weight
    return [one, other, linear(), one]


def between(layer: type[nn.Module]) -> Callable[[], list[Any]]:
    return lambda: [linear(), LayerSpec(layer), LayerSpec(layer), linear()]


MODELS: dict[str, Callable[[], list[Any]]] = {
    "listed again": listed_again,
    "checkpointed": between(Checkpointed),
    "offloaded": between(Offloaded),
    "force": between(Force),
    "sensitivity": between(Sensitivity),
    "sparse": between(SparseRows),
    "complex": lambda: [linear(), LayerSpec(Spectrum), LayerSpec(Real), linear()],
}


class InPlaceBlock(nn.Module):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x *= 0.5
        return self.b(torch.tanh(self.a(x)))


def built(name: str) -> list[Any]:
    torch.manual_seed(5)
    return MODELS[name]()


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
def test_gradients_of(ranks: Any, name: str, schedule: str, chunks: int) -> None:
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
def test_reentrant_checkpoints_in_a_plain_module(ranks: Any, size: int) -> None:
    """Their backward pass was taken for one of its own: "the last backward pass failed half way"."""
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


def test_limits_of_stage_3_are_refused_by_name(ranks: Any) -> None:
    """Released weights were NaN without a word, or ended in messages about storages and setup_context."""
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


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2)], ids=str)
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


# ----------------------------------------------------------------------------------------- what is and is not trained


@pytest.mark.parametrize(
    "optimizer",
    [{"type": "AdamW", "params": {"lr": 0.1}}, {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}],
)
def test_what_is_frozen_later_stands_still(optimizer: Any) -> None:
    """Decay and momentum went on moving it."""
    engine = engine_of([linear(), linear()], optimizer=optimizer)
    data, (frozen, _, other, _) = endless(), engine.module.parameters()
    engine.train_batch(data)
    before = frozen.clone(), other.clone()
    frozen.requires_grad_(False)
    engine.train_batch(data)
    assert torch.equal(frozen, before[0]) and not torch.equal(other, before[1])
    frozen.requires_grad_(True)
    engine.train_batch(data)
    assert not torch.equal(frozen, before[0])


def unfreeze(engine: triax.PipelineEngine) -> None:
    next(engine.module.parameters()).requires_grad_(True)


def second_engine(engine: triax.PipelineEngine) -> None:
    triax.initialize(model=engine.module, config=engine.config)


def cast(engine: triax.PipelineEngine) -> None:
    engine.module.to(torch.float32)


def assign(engine: triax.PipelineEngine) -> None:
    engine.module.load_state_dict({k: v.clone() for k, v in engine.module.state_dict().items()}, assign=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (unfreeze, "layers.0.weight was frozen when the engine was made"),
        (second_engine, "is no longer where this engine steps it"),
        (cast, "is no longer where this engine steps it"),
        (assign, "was replaced after the engine was made"),
    ],
)
def test_nothing_is_left_untrained_in_silence(change: Callable[[triax.PipelineEngine], None], words: str) -> None:
    """Steps went on, on buffers that the model no longer looked at, or without what had been unfrozen."""
    built = nn.Linear(WIDTH, WIDTH)
    built.weight.requires_grad_(False)
    engine = engine_of([built, linear()])
    engine.train_batch(iter(pairs()))
    change(engine)
    with pytest.raises(AgreedError, match=words):
        engine.train_batch(iter(pairs()))


def behind_the_counters() -> str:
    grid = Grid(pipe=2, timeout=60)
    module = PipelineModule([linear() for _ in range(4)], grid, mean_loss, "uniform", chunks=2)
    for parameter in module.parameters():
        parameter.data.fill_(0.5)
    with pytest.raises(RuntimeError) as error:
        triax.initialize(model=module, config={"train_batch_size": 4, "pipeline": {"schedule": "zb-v"}})
    return str(error.value)


def test_stages_do_not_move_when_weights_were_set_through_data(ranks: Any) -> None:
    """Stages that moved were built again without the values set by `parameter.data`, which no version counter sees."""
    assert all("was changed since it was built" in message for message in ranks(2, behind_the_counters))


def test_optimizers_and_groups_that_cannot_be_followed() -> None:
    """A stepped Adam lost its moments without a word; of two groups with one parameter the last one won."""
    module = PipelineModule([linear(), linear()], loss_fn=mean_loss)
    adam = torch.optim.Adam(module.parameters())
    module(torch.ones(1, WIDTH)).sum().backward()
    adam.step()
    with pytest.raises(ConfigError, match="this Adam has state already"):
        triax.initialize(model=module, optimizer=adam, config={"train_batch_size": 1})
    groups = [{"params": list(module.parameters())}, {"params": [next(module.parameters())], "lr": 1.0}]
    with pytest.raises(ConfigError, match="1 parameters are in more than one parameter group"):
        triax.initialize(model=module, model_parameters=groups, config={"train_batch_size": 1})


class Rates(nn.Module):
    """Reads numbers from tensors while it is built, which the meta device has not."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]


def test_a_layer_that_cannot_be_built_on_meta() -> None:
    """The layer was built on meta even if no partition needs it, and torch's error did not mention partitions."""
    PipelineModule([LayerSpec(Rates)])
    with pytest.raises(ValueError, match="pass partition='uniform' or boundaries"):
        PipelineModule([LayerSpec(Rates), linear()], chunks=2)


# ------------------------------------------------------------------------------------------------ data and losses


def test_labels_may_be_none() -> None:
    """Without labels the loss was not computed, in training either: `the batch's weight is 0`."""
    engine = engine_of([linear(), linear()], loss=lambda outputs, labels: outputs.square().mean())
    losses = [engine.train_batch((x, None) for x, _ in pairs()).item() for _ in range(2)]
    assert losses[1] < losses[0] and engine.eval_batch((x, None) for x, _ in pairs()).item() < losses[1]


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (
            lambda outputs, labels: (outputs.sum(), outputs),
            r"that loss_fn returned has the shape \(3, 4, 6\)",
        ),
        (lambda outputs, labels: outputs.detach().mean(), "the loss depends on no parameter"),
    ],
)
def test_losses_that_train_nothing(loss: Any, words: str) -> None:
    """torch refuses to differentiate such a loss; here a step went by, and nothing moved."""
    with pytest.raises(RuntimeError, match=words):
        engine_of([linear(), linear()], loss=loss).train_batch(iter(pairs()))


class Empty:
    """An iterator that is false."""

    def __init__(self) -> None:
        self.data = iter(pairs())

    def __len__(self) -> int:
        return 0

    def __next__(self) -> Any:
        return next(self.data)


def test_an_iterator_may_be_false() -> None:
    """`data_iter or ...` took one of length 0 for none at all."""
    assert engine_of([linear()]).train_batch(Empty()).item() > 0  # type: ignore[arg-type]


def numbered() -> list[int]:
    grid = Grid(data=2, timeout=60)
    engine = engine_of([linear(), LayerSpec(Dropout, 0.5)], grid)
    run, seen = engine.executor.run, list[int]()

    def spy(program: Any, microbatches: Any, **options: Any) -> Any:
        seen.extend(i for microbatch in microbatches for i in microbatch.samples)
        return run(program, microbatches, **options)

    engine.executor.run = spy  # type: ignore[method-assign, assignment]
    x = torch.ones(3 - 2 * grid.rank, WIDTH, dtype=torch.float64)
    engine.train_batch(iter([(x, x)] * MICROBATCHES))
    return seen


def test_replicas_of_unlike_size_number_their_samples_apart(ranks: Any) -> None:
    """Each took the others to be as large as itself: two samples had one number, and one dropout mask."""
    assert ranks(2, numbered) == [list(range(12)), list(range(12, 16))]


class Counting(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return {"x": x, "n": int((x > 0).sum())}


class Uncounting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Any) -> Any:
        return self.linear(batch["x"])


def uncounted() -> str:
    """Each rank's message. The next stage takes the first sample as it is, so that the sender is the first to fail."""
    engine = engine_of([linear(), LayerSpec(Counting), LayerSpec(Uncounting), linear()], Grid(pipe=2, timeout=60))
    with pytest.raises(RuntimeError) as error:
        engine.train_batch(iter(pairs()))
    return str(error.value)


def test_a_message_that_changed_is_shown_whole(ranks: Any) -> None:
    """A number among the tensors had changed, and the message showed two equal tensors."""
    assert "changed from ({'x': float64[3, 4, 6], 'n': " in ranks(2, uncounted)[0]


# ----------------------------------------------------------------------------------------------- stops and hangs


class Trips(nn.Module):
    """Layer that fails on one rank, at the third microbatch."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.calls, self.linear = what, 0, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        if self.calls == 3 and dist.get_rank() == 1:
            if self.what == "interrupt":
                raise KeyboardInterrupt
            if self.what == "forward":
                raise ArithmeticError("boom")
            if self.what == "backward":
                return Bang.apply(self.linear(x))
        return self.linear(x)


class Bang(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("boom")


def boom(*_: Any) -> None:
    raise ArithmeticError("boom")


def tripping(grid: Grid, what: str) -> triax.PipelineEngine:
    def make(groups: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(groups, lr=0.1)
        if what == "optimizer" and grid.rank == 1:
            optimizer.step = boom  # type: ignore[method-assign, assignment]
        return optimizer

    engine = engine_of([LayerSpec(Trips, what), LayerSpec(Trips, what)], grid, with_optimizer=make)
    if what == "outputs":
        engine.module.output_fn = lambda outputs: {1}  # no nest of tensors
    return engine


def trip(what: str, sizes: tuple[int, int, int]) -> tuple[str, str, float]:
    engine, data = tripping(Grid(*sizes, timeout=60), what), endless()
    start = time.perf_counter()
    with pytest.raises(BaseException) as error:  # noqa: PT012 (an optimizer that fails is met in the next step)
        for _ in range(2):
            engine.eval_batch(data, return_logits=True) if what == "outputs" else engine.train_batch(data)
    return error.type.__name__, str(error.value), time.perf_counter() - start


STOPS = list(product([(1, 4, 1), (2, 2, 1), (1, 1, 4)], ["forward", "backward", "optimizer", "interrupt"]))


@pytest.mark.parametrize(("sizes", "what"), [*STOPS, ((2, 2, 1), "outputs")], ids=str)
def test_every_rank_stops_when_one_does(ranks: Any, sizes: tuple[int, int, int], what: str) -> None:
    """Failures outside of a program's ops, and interrupts, closed no connection: some ranks waited for the others."""
    results = ranks(4, trip, what, sizes, timeout=45)
    said = {"interrupt": "KeyboardInterrupt", "outputs": "a set cannot be sent between stages"}.get(what, "boom")
    for rank, (kind, message, seconds) in enumerate(results):
        assert seconds < 30 * slowdown()
        if what == "interrupt" and rank == 1:
            assert kind == "KeyboardInterrupt"
        else:
            assert kind == "RuntimeError" and message.startswith(f"rank {rank} (") and said in message


def left_alone() -> str:
    grid = Grid(data=2, timeout=30)
    engine = engine_of([linear()], grid)
    if grid.rank == 1:
        grid.close()
        return ""
    with pytest.raises(RuntimeError) as error:
        engine.train_batch(iter(pairs()))
    return str(error.value)


def test_a_rank_that_leaves_before_the_first_step_is_named_as_later(ranks: Any) -> None:
    """The other ranks released objects that only the first step makes, and failed with an AttributeError."""
    assert ranks(2, left_alone)[0].startswith("rank 0 (pipe 0, data 0, tensor 0)")


def closed() -> list[bool]:
    grid = Grid(data=2, timeout=60)
    groups = [weakref.ref(axis.group) for axis in (grid.world, grid.data)]
    engine = engine_of([linear()], grid)
    engine.train_batch(iter(pairs()))
    del engine
    grid.close()
    gc.collect()
    return [group() is None for group in groups]


def test_a_closed_group_is_gone(ranks: Any) -> None:
    """torch's optimizers import functions whose default argument is the default group: it stayed open for good."""
    import torch.distributed.nn.functional as functions

    assert functions.all_reduce.__defaults__ == (dist.ReduceOp.SUM, None)
    assert ranks(2, closed) == [[True, True]] * 2


def waits() -> str:
    grid = Grid(pipe=2, data=2, timeout=1)
    if grid.rank:
        return ""
    with pytest.raises(RuntimeError) as error:
        grid.pipe.receive(torch.empty(1), 1, tag=7).wait()
    return str(error.value)


def test_the_time_limit_holds_for_messages_between_stages(ranks: Any) -> None:
    """The mesh's groups had torch's half hour, and a limit that was set later did not hold for them."""
    assert "Timed out waiting 1000ms" in ranks(4, waits, timeout=30)[0]


class FailsOnRank1(nn.Linear):
    def __init__(self, *, grid: Grid) -> None:
        super().__init__(600, 600)
        self.rank = grid.rank

    def forward(self, x: Tensor) -> Tensor:
        if self.rank == 1:
            raise MemoryError("boom")
        return super().forward(x)


def fails_while_it_gathers() -> tuple[str, float]:
    grid = Grid(timeout=60)
    wide = LayerSpec(nn.Linear, 600, 600)
    engine = engine_of([wide, LayerSpec(FailsOnRank1), wide], grid, zero_optimization={"stage": 3})
    x = torch.ones(1, 600, dtype=torch.float64)
    start = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        engine.train_batch(iter([(x, x)] * MICROBATCHES))
    return str(error.value), time.monotonic() - start


def test_a_rank_that_fails_lets_go_of_the_next_layers_gather(ranks: Any) -> None:
    """Stage 3 gathers a layer ahead: that gather kept the connections open, and the others waited for the limit."""
    for rank, (message, seconds) in enumerate(ranks(2, fails_while_it_gathers, timeout=40)):
        assert message.startswith(f"rank {rank} (") and "boom" in message and seconds < 20


def failing_layer() -> bool:
    """Return True if the error of a failing layer leads, by its causes, to the layer's own error."""

    def fail(x: Tensor) -> Tensor:
        raise ZeroDivisionError("the layer's own")

    grid = Grid(pipe=2, timeout=20)
    model = PipelineModule([LayerSpec(nn.Linear, 4, 4), fail], grid=grid, loss_fn=mean_loss)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = triax.initialize(model=model, config=config)[0]
    try:
        engine.train_batch(iter([(torch.ones(1, 4), torch.ones(1, 4))]))
    except Exception as error:
        cause: BaseException | None = error
        for _ in range(9):
            if cause is None or isinstance(cause, ZeroDivisionError):
                break
            cause = cause.__cause__
        return cause is None or isinstance(cause, ZeroDivisionError)
    return False


def test_an_error_is_not_its_own_cause(ranks: Any) -> None:
    """A program that follows the causes of a failed step's error never came to an end."""
    assert ranks(2, failing_layer) == [True, True]
