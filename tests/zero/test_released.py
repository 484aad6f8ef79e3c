"""Stage 3 with code that uses weights: hooks, writes in a forward pass, losses, averages and copies of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.optim.swa_utils import AveragedModel

import triax
from triax import Grid
from triax.zero import gathered

from support.toys import error_text, replica_inputs
from support.training import SGD, module_engine, train_plain

WIDTH = 6


class Own:
    """An output of a class of the user's own."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class OwnBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Own:
        return Own(x + torch.tanh(self.linear(x)))


class Shared(nn.Module):
    """A block that is used twice, and the model itself, return objects of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([OwnBlock(), OwnBlock()])

    def forward(self, x: Tensor) -> Own:
        for index in (0, 1, 0):
            x = self.blocks[index](x).hidden
        return Own(x)


class Recurrent(nn.Module):
    """Units that take and return packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        packed: PackedSequence = pack_padded_sequence(
            self.enter(x).view(-1, 2, WIDTH), torch.tensor([2, 1] * (len(x) // 4)), True, enforce_sorted=False
        )
        for layer in self.layers:
            packed, _ = layer(packed)
        return pad_packed_sequence(packed, batch_first=True)[0]


class Limited(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, WIDTH, max_norm=0.5)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x + self.embedding.weight[0] + self.embedding(torch.arange(len(x))))


@torch.no_grad()
def clamp(module: nn.Module, *_: Any) -> None:
    module.get_parameter("weight").clamp_(-0.1, 0.1)


def scale_data(module: nn.Module, *_: Any) -> None:
    module.get_parameter("weight").data.mul_(0.9)


def add_product(module: nn.Module, inputs: Any, y: Tensor) -> Tensor:
    return y + F.linear(inputs[0], module.get_parameter("weight")) ** 2


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    model: nn.Module = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
    if kind == "old weight norm":
        nn.utils.weight_norm(layers[1])
        nn.utils.weight_norm(layers[0])
    elif kind == "old spectral norm":
        nn.utils.spectral_norm(layers[1])
    elif kind == "weight norm":
        nn.utils.parametrizations.weight_norm(layers[1])
    elif kind == "spectral norm":
        nn.utils.parametrizations.spectral_norm(layers[1])
    elif kind == "hook that uses the weight":
        layers[1].register_forward_hook(add_product)
    elif kind == "packed sequence":
        model = Recurrent()
    elif kind == "own class":
        model = Shared()
    elif kind == "max_norm":
        model = Limited()
    elif kind in WRITES:
        WRITES[kind](model, layers)
    return model.double()


WRITES: dict[str, Callable[[Any, list[nn.Linear]], object]] = {
    "clamp before a unit": lambda model, layers: layers[1].register_forward_pre_hook(clamp),
    "clamp after a unit": lambda model, layers: layers[1].register_forward_hook(clamp),
    "data in a unit": lambda model, layers: layers[2].register_forward_pre_hook(scale_data),
}


def loss_of(output: Any, labels: object = None) -> Tensor:
    return (output.hidden if isinstance(output, Own) else output).square().mean()


def train(engine: triax.ModuleEngine, steps: int = 3) -> None:
    for step in range(steps):
        engine.backward(loss_of(engine(replica_inputs(step, engine.grid.data.rank))))
        engine.step()


KINDS = ["old weight norm", "old spectral norm", "weight norm", "spectral norm", "hook that uses the weight"]
KINDS += ["packed sequence", "own class"]


def trained() -> list[dict[str, Tensor]]:
    found = []
    for kind in KINDS:
        model = made(kind)
        train(module_engine(model, Grid(timeout=60), 4))
        with gathered(model):
            found.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    return found


def test_weight_norm_and_packed_inputs_train_in_stage_3(ranks: Any) -> None:
    """Hooks of a unit saw released weights: NaN. Packed sequences failed, and outputs of a class were refused."""
    everything = ranks(2, trained)
    for index, kind in enumerate(KINDS):
        model = made(kind)
        batches = [[(torch.cat([replica_inputs(step, 0), replica_inputs(step, 1)]), None)] for step in range(3)]
        wanted = train_plain(model, SGD, batches, loss_of)[-1].weights
        for found in everything:
            torch.testing.assert_close(found[index], wanted, rtol=1e-10, atol=1e-13)


def written(kind: str) -> str:
    return error_text(lambda: train(module_engine(made(kind), Grid(timeout=60), 4), steps=1), RuntimeError)


@pytest.mark.parametrize(("kind", "name"), [("max_norm", "embedding.weight"), *((kind, "weight") for kind in WRITES)])
def test_a_write_to_a_weight_in_the_forward_pass_is_refused(ranks: Any, kind: str, name: str) -> None:
    """Such a write was lost without an error when the weight was released."""
    for message in ranks(2, written, kind):
        assert f"{name} was written in place while its module ran" in message
        assert "within triax.zero.gathered(parameters, modifier_rank=0)" in message


def used() -> None:
    model = made("")
    engine = module_engine(model, Grid(timeout=60), 4)
    weight = model.get_parameter("2.weight")
    with gathered(model):
        average, twin = AveragedModel(model), copy.deepcopy(model)
    train(engine, 1)
    x = replica_inputs(0, engine.grid.data.rank)

    # Read outside of their module: NaN without a word.
    uses: dict[str, Callable[[], object]] = {
        "square": lambda: engine(x).square().mean() + weight.square().sum(),
        "linear": lambda: F.linear(engine(x), weight),
        "add_": lambda: torch.zeros(WIDTH, WIDTH).add_(weight.detach(), alpha=0.1),
        "lerp_": lambda: torch.zeros(WIDTH, WIDTH).lerp_(weight.data, 0.1),
        "norm": lambda: weight.norm(),
        "clamp_": lambda: weight.data.clamp_(-1, 1),
        "copy_|lerp_": lambda: average.update_parameters(model),
        "deepcopy": lambda: copy.deepcopy(engine.module),
        "numpy": lambda: weight.detach().numpy(),
    }
    for function, use in uses.items():
        with pytest.raises(RuntimeError, match=rf"of \(6,.*({function})\(\) while stage 3 of ZeRO has released it"):
            use()
    with pytest.raises(RuntimeError, match=r"0\.weight of .* was used by deepcopy\(\) while stage 3 of ZeRO"):
        copy.deepcopy(model.get_submodule("0"))
    assert weight.isnan().all() and weight.shape == (WIDTH, WIDTH) and isinstance(weight, nn.Parameter)
    assert not torch.zeros_like(weight).any() and weight.requires_grad and weight.grad is None

    # The copies are plain modules.
    with gathered(model):
        average.update_parameters(model)
        wanted = {name: value.clone() for name, value in model.state_dict().items()}
    torch.testing.assert_close(average.module.state_dict(), wanted, rtol=0, atol=0)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    optimizer.zero_grad()
    (sum(twin(replica_inputs(0, replica)).square().mean() for replica in range(2)) / 2).backward()
    optimizer.step()
    torch.testing.assert_close(twin.state_dict(), wanted, rtol=1e-10, atol=1e-13)
    train(engine, 1)  # and the model trains on


def test_an_error_names_a_released_weight_that_is_used(ranks: Any) -> None:
    ranks(2, used)
