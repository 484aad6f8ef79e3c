"""Layers of users have the numbers of plain PyTorch, on every schedule and stage.

A program is a list of layers, drawn from ``LAYERS``, a grid, a schedule, a stage of ZeRO and recomputation. It takes
two steps with an evaluation between them. ``plainly`` does the same by plain autograd: each replica is a model of its
own, and their gradients are averaged.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.base.evaluating import evaluating
from triax.inference.engine import init_inference
from triax.models.gpt import GPTConfig, GPTLoss, gpt_layers
from triax.testing import RankFailure

WIDTH, ROWS, STEPS, RATE = 4, 3, 2, 0.02
MASK = torch.tensor([1.0, 0.0, 1.0, 0.5], dtype=torch.float64)
LAYERS: dict[str, type[Part]] = {}


class Part(nn.Module):
    """Layer (B, WIDTH) -> (B, WIDTH) with a linear layer in it. Subclasses are in ``LAYERS``, by name."""

    def __init_subclass__(cls) -> None:
        LAYERS[cls.__name__] = cls

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen = 0.0  # sum of the gradients that hooks have seen
        self.begin()

    def begin(self) -> None:
        """Make what the layer has besides the linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + x

    def see(self, *gradients: Tensor | None) -> None:
        self.seen += sum(gradient.sum().item() for gradient in gradients if gradient is not None)


class Plain(Part):
    """Layer without anything special."""


# ------------------------------------------------------------------------------------------------------------- hooks


class TensorHook(Part):
    def begin(self) -> None:
        self.linear.weight.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))


class BiasHook(Part):
    def begin(self) -> None:
        assert self.linear.bias is not None
        self.linear.bias.register_hook(lambda gradient: self.see(gradient))


class AfterAccumulation(Part):
    def begin(self) -> None:
        def mask(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self.see(parameter.grad)
            parameter.grad *= (MASK > 0).to(parameter.dtype)

        for parameter in self.linear.parameters():
            parameter.register_post_accumulate_grad_hook(mask)


class SeveralGradients(Part):
    def begin(self) -> None:
        register_multi_grad_hook([*self.linear.parameters()], lambda gradients: self.see(*gradients))


class FirstOfSeveralGradients(Part):
    def begin(self) -> None:
        register_multi_grad_hook([self.linear.weight], self.see, mode="any")


class BackwardHook(Part):
    def begin(self) -> None:
        self.linear.register_full_backward_hook(self.halve)

    def halve(self, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        self.see(*outputs)
        return tuple(None if gradient is None else gradient * 0.5 for gradient in inputs)


class BackwardPreHook(Part):
    def begin(self) -> None:
        self.linear.register_full_backward_pre_hook(self.mask)

    def mask(self, module: nn.Module, outputs: Any) -> Any:
        return (outputs[0] * MASK,)


class ForwardHooks(Part):
    def begin(self) -> None:
        self.linear.register_forward_pre_hook(lambda module, inputs: (inputs[0] * MASK,))
        self.linear.register_forward_hook(lambda module, inputs, output: output * 2)


class OutputHook(Part):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * MASK)
        return torch.tanh(y) + x


class HooksOfItsOwn(Part):
    def begin(self) -> None:
        self.register_full_backward_hook(lambda module, inputs, outputs: self.see(*outputs))
        self.register_forward_hook(lambda module, inputs, output: output * 0.5)


# ------------------------------------------------------------------------------------------- torch.func and autograd


class Vmap(Part):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.func.vmap(lambda row: F.linear(row, self.linear.weight, self.linear.bias).tanh())(x)


class Gradient(Part):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: self.linear(x).tanh().square().sum())(x) + x


class Jacobian(Part):
    def forward(self, x: Tensor) -> Tensor:
        y, slope, *_ = torch.func.jvp(lambda x: self.linear(x).tanh(), (x,), (torch.ones_like(x),))
        return y + slope + x


class FunctionalCall(Part):
    def forward(self, x: Tensor) -> Tensor:
        scaled = {"weight": self.linear.weight * 0.5, "bias": self.linear.bias}
        y: Tensor = torch.func.functional_call(self.linear, scaled, x)
        return y + x


class Rows(Part):
    """Gradients of each sample by themselves: vmap over grad over functional_call."""

    def forward(self, x: Tensor) -> Tensor:
        weights: dict[str, Tensor] = dict(self.linear.named_parameters())

        def energy(row: Tensor) -> Tensor:
            return torch.func.functional_call(self.linear, weights, row).tanh().sum()

        return torch.func.vmap(torch.func.grad(energy))(x) + x


class OneDim(Part):
    def begin(self) -> None:
        self.row = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * F.linear(x, self.row)[:, None].tanh()


class Penalty(Part):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self.linear(x).square().sum(), self.linear.weight, create_graph=True)
        return x * slope.sum(0).tanh()


class Twice(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.linear(x).tanh()) + x @ self.linear.weight


class Checkpointed(Part):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


class Normed(Part):
    def begin(self) -> None:
        nn.utils.parametrizations.weight_norm(self.linear)


# ---------------------------------------------------------------------------------------------------- random numbers


class PythonRandom(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * random.random()) + x


class NumpyRandom(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * torch.from_numpy(np.random.rand(WIDTH))) + x  # noqa: NPY002


class TorchRandom(Part):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), 0.3, training=self.training) + x


class OwnPythonRandom(Part):
    def begin(self) -> None:
        self.random = random.Random(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.random.random()) + x


class OwnNumpyRandom(Part):
    def begin(self) -> None:
        self.random, self.older = np.random.default_rng(3), np.random.RandomState(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * torch.from_numpy(self.random.random(WIDTH))) + x * self.older.rand()


class OwnTorchRandom(Part):
    def begin(self) -> None:
        self.random = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * torch.rand(x.shape, generator=self.random, dtype=x.dtype)) + x


class ForeignRandom(Part):
    """Layer with a generator that it does not hold, so that recomputation cannot restore it."""

    def begin(self) -> None:
        self.draw = random.Random(3).random

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.draw()) + x


# ------------------------------------------------------------------------------------------------ in place, and views


class InPlace(Part):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y += x
        y.mul_(0.9)
        return y.relu_()


class InPlaceOnView(Part):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y[:, :2] *= 0.5
        y.view(-1)[::3] += 1.0
        return y.tanh()


class View(Part):
    def forward(self, x: Tensor) -> Tensor:
        left, right = self.linear(x).chunk(2, dim=1)
        return torch.stack([left, right], dim=2).flip(1).transpose(1, 2).reshape(x.shape)[:, :]


class ViewOfInput(Part):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x.unsqueeze(0).expand(2, -1, -1))
        return (y[0].tanh() * y[1].sigmoid() + x[:, :]).view_as(x)


class InputInPlace(Part):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 1.0
        return self.linear(y.add_(1.0)) + y.detach()


class ComplexProduct(Part):
    """Product of complex numbers, whose gradients need conjugates."""

    def begin(self) -> None:
        self.mix = nn.Linear(WIDTH, WIDTH, dtype=torch.complex128)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(torch.complex(self.linear(x), x))
        return torch.tanh(y.real * y.imag) + x


class Spectrum(Part):
    """Product with a conjugate, which autograd saves as a view with a bit, of a negated view too."""

    def forward(self, x: Tensor) -> Tensor:
        y, z = torch.fft.fft(self.linear(x)), torch.fft.fft(x)
        return torch.tanh((y * z.conj()).real + y.real * z.conj().imag) + x


# ---------------------------------------------------------------------------------------- buffers, modes, lazy parts


class Counter(Part):
    count: Tensor

    def begin(self) -> None:
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return self.linear(x) * (1 + 0.1 * self.count) + x


class ReplacedBuffer(Part):
    mean: Tensor

    def begin(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return (y - self.mean).tanh() + x


class Attributes(Part):
    def begin(self) -> None:
        self.calls, self.past = 0, list[float]()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.past.append(self.calls * 0.1)
        return self.linear(x) * (1 + sum(self.past)) + x


class Norm(Part):
    def begin(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.linear(x))
        return y + x


class FrozenNorm(Norm):
    """Batch norm in eval mode, and dropout that is off, within a model that trains."""

    def begin(self) -> None:
        super().begin()
        self.norm.eval()


class LazyBuffer(Part):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.full((WIDTH,), 0.5, dtype=x.dtype))
        return self.linear(x) * self.scale + x


class LazyModule(Part):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "activation"):
            self.activation = nn.Hardtanh(-0.5, 0.5)
        y: Tensor = self.activation(self.linear(x))
        return y + x


class LateModule(Part):
    """Layer whose first forward pass makes a part with weights: a step would not train them."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Linear(WIDTH, WIDTH, dtype=x.dtype)
        y: Tensor = self.late(self.linear(x))
        return y


class LateParameter(Part):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(WIDTH, dtype=x.dtype))
        return self.linear(x) * self.scale


# --------------------------------------------------------------------------------------------------------- programs


class Program(NamedTuple):
    """One program: names of layers, sizes of the grid, schedule (``module``: an ``nn.Sequential``), and options."""

    layers: tuple[str, ...]
    pipe: int
    data: int
    schedule: str
    stage: Any
    recompute: str
    microbatches: int
    seed: int

    @property
    def ranks(self) -> int:
        return self.pipe * self.data

    @property
    def refusals(self) -> list[str]:
        """Texts of the errors of which the program must end with one; empty if it must give the numbers of PyTorch."""
        several = self.schedule == "module" and self.microbatches > 1
        recomputed = self.recompute != "none"
        reasons = {
            "p.grad of": "AfterAccumulation" in self.layers and several,
            "has a hook of register_post_accumulate_grad_hook": "AfterAccumulation" in self.layers
            and self.stage >= 2
            and self.data > 1,
            "calls torch.func.grad, vjp, jacrev or hessian": recomputed and {"Gradient", "Rows"} & {*self.layers},
            " was added after its engine or optimizer was made": {"LateModule", "LateParameter"} & {*self.layers},
            "did something else when computed again": recomputed and "ForeignRandom" in self.layers,
        }
        return [text for text, applies in reasons.items() if applies]


SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-min", "dualpipe-v", "wave", "module")
RECOMPUTE: dict[str, Any] = {
    "none": {},
    "each": {"interval": 1},
    "pairs": {"interval": 2},
    "matmul": {"interval": 1, "granularity": "matmul"},
}
PASSES: dict[str, Any] = {  # passes over the schedule
    "op": {"recompute": 1.0},
    "offload": {"offload": triax.OffloadActivations(device="cpu", copy_time=0.1)},
}
GRIDS = ((1, 1), (2, 1), (1, 2), (2, 2))
REFUSED = ("ForeignRandom", "LateModule", "LateParameter")  # in some programs, or in all
GLOBAL = ("PythonRandom", "NumpyRandom", "TorchRandom")  # the layers of one process share the generator


def double(name: str) -> nn.Module:
    """Make a layer of ``LAYERS`` in double precision; complex weights stay complex."""
    return LAYERS[name]().double()


def drawn(seed: int) -> Program:
    """Draw a program."""
    draw = random.Random(seed)
    names = [*LAYERS]
    layers = [names[seed % len(names)], *draw.choices([name for name in names if name not in REFUSED], k=4)]
    draw.shuffle(layers)
    taken = [name for name in GLOBAL if name in layers]
    layers = [name for i, name in enumerate(layers) if name not in taken or layers.index(name) == i]
    layers += ["Plain"] * (4 - len(layers))
    schedule = draw.choice(SCHEDULES)
    pipe, data = draw.choice(GRIDS)
    pipe = 1 if schedule == "module" else pipe
    microbatches = draw.choice((4, 5)) if schedule == "dualpipe-v" else draw.choice((2, 4))
    recompute = draw.choice([*RECOMPUTE, *PASSES])
    recompute = "each" if schedule == "module" and recompute in ("pairs", *PASSES) else recompute
    if recompute in PASSES:  # whether a layer runs again depends on the schedule
        layers = ["Plain" if name in ("Gradient", "Rows", "ForeignRandom") else name for name in layers]
        microbatches = max(microbatches, 4)
    return Program(tuple(layers), pipe, data, schedule, draw.randrange(4), recompute, microbatches, seed)


def microbatches(program: Program, step: int, replica: int) -> Iterator[tuple[Tensor, Tensor]]:
    for number in range(program.microbatches):
        generator = torch.Generator().manual_seed(1000 * program.seed + 100 * step + 10 * replica + number)
        x, y = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)
        yield x, y


def seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def generator_states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002


def set_generators(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])


class Record(NamedTuple):
    """What a program gives: initial weights; losses, gradients and weights of each step; modes and sums of hooks."""

    replica: int
    initial: dict[str, Tensor]
    losses: list[float]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]
    modes: dict[str, bool]
    seen: dict[str, float]


def modes_of(layers: list[tuple[str, nn.Module]]) -> dict[str, bool]:
    return {f"{name}.{inner}": part.training for name, layer in layers for inner, part in layer.named_modules()}


def on_a_grid(program: Program) -> Record:
    """Run a program with triax, on this rank."""
    grid = Grid(pipe=program.pipe, data=program.data, timeout=30)
    common: Any = {
        "optimizer": partial(torch.optim.SGD, lr=RATE),
        "batch": triax.Batch(size=ROWS * program.microbatches * program.data, microbatch=ROWS),
        "zero": triax.Zero(stage=program.stage),
        "recompute": triax.Recomputation(**RECOMPUTE.get(program.recompute, {})),
    }
    model: Any
    losses: list[float] = []
    gradients = []
    if program.schedule == "module":
        torch.manual_seed(program.seed)
        model = nn.Sequential(*(double(name) for name in program.layers))
        engine: Any = triax.Engine(model, grid=grid, **common)
        layers = [(f"layers.{name}", layer) for name, layer in model.named_children()]
        train, evaluate = partial(loop, engine), partial(evaluated, engine, engine)
    else:
        specs = [LayerSpec(double, name) for name in program.layers]
        model = PipelineModule(specs, grid=grid, loss_fn=F.mse_loss, partition="uniform", seed=program.seed)
        schedule = triax.ScheduleOptions(name=program.schedule, **PASSES.get(program.recompute, {}))
        engine = triax.Engine(model, schedule=schedule, **common)
        layers = [(name, layer) for _, name, layer in model.named_layers()]
        train, evaluate = engine.train_batch, engine.eval_batch
    replica = grid.data.rank
    whole = lambda found: {f"layers.{k.removeprefix('layers.')}": v.clone() for k, v in found.items()}  # noqa: E731
    initial = whole(engine.gather())
    seed_generators(program.seed)
    for step in range(STEPS):
        losses.append(float(train(microbatches(program, step, replica))))
        gradients.append(whole(engine.gather("gradients")))
        losses.append(float(evaluate(microbatches(program, STEPS + step, replica))))
    if program.schedule == "module":  # of this replica
        sums = torch.tensor(losses, dtype=torch.float64)
        grid.data.all_reduce(sums)
        losses = [loss.item() / program.data for loss in sums]
    seen = {name: layer.seen for name, layer in layers if isinstance(layer, Part)}
    return Record(replica, initial, losses, gradients, whole(engine.gather()), modes_of(layers), seen)


def loop(engine: Any, batches: Iterator[tuple[Tensor, Tensor]]) -> float:
    total, count = 0.0, 0
    for x, y in batches:
        loss = F.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        total, count = total + loss.item(), count + 1
    return total / count


@torch.no_grad()
def evaluated(model: Any, call: Any, batches: Iterator[tuple[Tensor, Tensor]]) -> float:
    """Return the loss in eval mode; each module gets its own mode back."""
    parts = list(getattr(model, "module", model).modules())
    modes = [part.training for part in parts]
    model.eval()
    losses = [F.mse_loss(call(x), y).item() for x, y in batches]
    for part, mode in zip(parts, modes, strict=True):
        part.training = mode
    return sum(losses) / len(losses)


def plainly(program: Program, initial: dict[str, Tensor]) -> list[Record]:
    """Run a program by plain autograd: each replica by itself, with the mean of all replicas' gradients."""
    models = []
    for _ in range(program.data):
        model = nn.Sequential(*(double(name) for name in program.layers))
        model.load_state_dict({k.removeprefix("layers."): v for k, v in initial.items()}, strict=False)
        models.append(model)
    seed_generators(program.seed)
    states = [generator_states()] * program.data
    losses: list[float] = []
    gradients: list[dict[str, Tensor]] = []
    for step in range(STEPS):
        trained, tested = [], []
        for replica, model in enumerate(models):
            set_generators(states[replica])
            model.zero_grad()
            for x, y in microbatches(program, step, replica):
                loss = F.mse_loss(model(x), y)
                loss.backward()
                trained.append(loss.item())
            states[replica] = generator_states()
        for each in zip(*(model.parameters() for model in models), strict=True):
            if each[0].grad is not None:
                mean = sum(p.grad for p in each) / (program.microbatches * program.data)
                for p in each:
                    p.grad = mean.clone()
        gradients.append(
            {f"layers.{n}": torch.zeros_like(p) if p.grad is None else p.grad for n, p in models[0].named_parameters()}
        )
        for replica, model in enumerate(models):
            torch.optim.SGD(model.parameters(), lr=RATE).step()
            if replica:
                model.load_state_dict(dict(models[0].named_buffers()), strict=False)
            set_generators(states[replica])
            tested.append(evaluated(model, model, microbatches(program, STEPS + step, replica)))
            states[replica] = generator_states()
        losses += [sum(trained) / len(trained), sum(tested) / len(tested)]
    weights = {f"layers.{name}": p.detach() for name, p in models[0].named_parameters()}
    records = []
    for replica, model in enumerate(models):
        layers = [(f"layers.{name}", layer) for name, layer in model.named_children()]
        seen = {name: layer.seen for name, layer in layers if isinstance(layer, Part)}
        records.append(Record(replica, initial, losses, gradients, weights, modes_of(layers), seen))
    return records


def differences(program: Program, found: list[Record]) -> list[str]:
    """Return what differs between the ranks of a program and plain PyTorch."""
    told: list[str] = []
    expected = plainly(program, found[0].initial)
    for rank in found:
        wanted = expected[rank.replica]
        for number, (mine, theirs) in enumerate(zip(rank.losses, wanted.losses, strict=True)):
            told += unequal(f"loss {number}", {"": torch.tensor(mine)}, {"": torch.tensor(theirs)})
        for step, (some, others) in enumerate(zip(rank.gradients, wanted.gradients, strict=True)):
            told += unequal(f"gradient {step} of", some, others)
        told += unequal("weight", rank.weights, wanted.weights)
        seen = {name: torch.tensor(value) for name, value in rank.seen.items()}
        told += unequal("sum of hooks of", seen, {name: torch.tensor(wanted.seen[name]) for name in seen})
        told += [f"mode of {name}" for name, mode in rank.modes.items() if mode != wanted.modes[name]]
    return list(dict.fromkeys(told))


def unequal(what: str, mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    if [*mine] != [*theirs]:  # the order too: users zip them
        return [f"{what} {[*mine]}, not {[*theirs]}"]
    far = {name: (mine[name] - theirs[name]).abs().max().item() for name in mine}
    return [f"{what} {name}: off by {by:.1e}" for name, by in far.items() if not by < 1e-10]


def judge(ranks: Any, program: Program) -> list[str]:
    """Return what is wrong with a program: differences, an error, or that it was not refused."""
    try:
        found = ranks(program.ranks, on_a_grid, program)
    except RankFailure as failure:
        return [] if any(text in str(failure) for text in program.refusals) else [str(failure)]
    if program.refusals:
        return [f"was not refused ({program.refusals})"]
    return differences(program, found)


def require_equal_to_plain(ranks: Any, seeds: Iterable[int]) -> None:
    failed = {program: told for seed in seeds if (told := judge(ranks, program := drawn(seed)))}
    assert not failed


def few() -> list[int]:
    """Return seeds of which each layer is in a program, each stage, each grid, and each schedule with recomputation.

    Drawn by the first ``len(LAYERS)`` seeds, of which the sweep has the others too. All refusals are among them.
    """
    programs = {seed: drawn(seed) for seed in range(len(LAYERS))}
    kept = [seed for seed, program in programs.items() if program.refusals]
    missing = set[Any]().union(*map(parts_of, programs.values()))
    missing -= set[Any]().union(*(parts_of(programs[seed]) for seed in kept))
    while missing:
        kept.append(max(programs, key=lambda seed: len(parts_of(programs[seed]) & missing)))
        missing -= parts_of(programs[kept[-1]])
    return kept


def parts_of(program: Program) -> set[Any]:
    return {*program.layers, program.stage, (program.pipe, program.data), (program.schedule, program.recompute)}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_layers_of_users_train_as_plain_pytorch(ranks: Any) -> None:
    require_equal_to_plain(ranks, few())


@pytest.mark.parametrize("layer", ["ComplexProduct", "Spectrum"])
@pytest.mark.parametrize(("schedule", "recompute"), [("zb-h1", "none"), ("gpipe", "offload"), ("zb-v", "matmul")])
def test_complex_layers_train_as_plain_pytorch(ranks: Any, layer: str, schedule: str, recompute: str) -> None:
    assert not judge(ranks, Program((layer,) * 4, 1, 1, schedule, 1, recompute, 8, seed=0))


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_random_programs_of_layers_train_as_plain_pytorch(ranks: Any) -> None:
    require_equal_to_plain(ranks, [seed for seed in range(300) if seed not in few()])


def refused(kind: str) -> str:
    """Return the error of an engine whose model has a weight without a shape, or one that another library shards."""
    grid = Grid(data=2, timeout=30)
    modules: list[Any] = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    if kind.startswith("lazy"):
        modules[1] = LayerSpec(nn.LazyLinear, WIDTH) if kind == "lazy spec" else nn.LazyLinear(WIDTH)
    else:
        mesh = init_device_mesh("cpu", (2,))
        modules[1].weight = nn.Parameter(distribute_tensor(modules[1].weight.data, mesh, [Shard(0)]))
    make: dict[str, Callable[[], object]] = {
        "module": lambda: triax.Engine(nn.Sequential(*modules), grid=grid, batch=4),
        "optimizer": lambda: triax.zero.ShardedOptimizer(
            torch.optim.SGD, nn.Sequential(*modules).parameters(), grid, lr=0.1
        ),
    }
    with pytest.raises(ValueError) as error:
        make.get(kind.split()[1], lambda: PipelineModule(modules, grid=grid))()
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("lazy module", "1.weight of Sequential has no shape yet"),
        ("lazy spec", "weight of LayerSpec(LazyLinear, 4) has no shape yet"),
        ("lazy layer", "weight of layer 1 (LazyLinear) has no shape yet"),
        ("lazy optimizer", "parameter 2 of group 0 of the optimizer has no shape yet"),
        ("DTensor module", "1.weight of Sequential is a DTensor"),
        ("DTensor layer", "weight of layer 1 (Linear) is a DTensor"),
    ],
)
def test_lazy_and_dtensor_weights_are_refused_by_name(ranks: Any, kind: str, words: str) -> None:
    assert all(words in text for text in ranks(2, refused, kind))


class Merged(nn.Linear):
    """Linear layer that merges an adapter while it evaluates, as LoRA layers do."""

    merged = False

    def train(self, mode: bool = True) -> Merged:
        self.merged ^= mode != self.training
        return super().train(mode)


def generate(model: PipelineModule, engine: Any) -> None:
    init_inference(engine, max_batch=1).generate([[1, 2]], 3)


def stop_a_stream(model: PipelineModule, engine: Any) -> None:
    next(init_inference(engine, max_batch=1).stream([[1, 2]], 3))
    model.train()
    model.layers["1"].eval()


def fail_to_evaluate(model: PipelineModule, engine: Any) -> None:
    with pytest.raises(RuntimeError, match="failed at"):
        engine.eval_batch(iter([("no tensor", torch.zeros(1, 2, dtype=torch.long))]))


@pytest.mark.parametrize("use", [generate, stop_a_stream, fail_to_evaluate])
def test_evaluation_restores_the_mode_of_each_module(use: Callable[[PipelineModule, Any], None]) -> None:
    """What the user had put in evaluation mode was in training mode after an evaluation."""
    grid = Grid()
    model = PipelineModule(gpt_layers(GPTConfig(11, 8, 8, 2, 2)), grid=grid, loss_fn=GPTLoss(grid, vocab_size=11))
    engine = triax.Engine(model, optimizer=partial(torch.optim.SGD, lr=0.1), batch=1)
    model.layers["1"].eval()
    before = [module.training for module in model.modules()]
    use(model, engine)
    assert [module.training for module in model.modules()] == before and len({*before}) == 2


def test_evaluating_restores_modes_by_the_modules_own_methods() -> None:
    parts = [Merged(2, 2), Merged(2, 2).eval()]
    with evaluating(nn.ModuleList(parts)):
        assert [(part.training, part.merged) for part in parts] == [(False, True)] * 2
    assert [(part.training, part.merged) for part in parts] == [(True, False), (False, True)]
