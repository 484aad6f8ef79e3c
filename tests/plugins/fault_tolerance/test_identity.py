"""What replicas must have in common: each difference that changes what a replica computes is seen, and no other one."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import triax
from triax.data import TokenData
from triax.models.gpt import GPTConfig, gpt_layers
from triax.plugins.fault_tolerance.identity import identity

from support.replica_jobs import coordinator, finish, has_stepped, losses, start, until
from support.tokenized import folder

# A program of a user, in whose text a test changes one thing.
PROGRAM = """
SCALE = 2.0

def shrink(x):
    return x / SCALE

class Layer(nn.Module):
    def __init__(self, grid=None):
        super().__init__()
        self.linear, self.act, self.slope = nn.Linear(4, 4), torch.tanh, 0.5

    def forward(self, x):
        return shrink(self.act(self.linear(x))) * self.slope

class Loss:
    power = 2

    def __init__(self):
        self.weight_of = {"a": 1.0}

    def __call__(self, outputs, labels):
        return (outputs - labels).abs().pow(2).mean()

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((4,), float(index)), torch.ones(4)

layers = [Layer(), nn.GELU(), torch.tanh]
schedule = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
options = {"clip": 1.0, "seed": 0}
loss, optimizer = Loss(), partial(torch.optim.SGD, lr=0.1)
collate = None
"""


def identity_of(program: str) -> dict[str, str]:
    """Identity of the engine of a program."""
    return identity(engine_of(program))


def engine_of(program: str) -> Any:
    """Engine of a program."""
    names: dict[str, Any] = {"nn": nn, "torch": torch, "np": np, "partial": partial, "__name__": "program"}
    exec(compile(textwrap.dedent(program), "program.py", "exec"), names)
    module = triax.PipelineModule(names["layers"], loss_fn=names["loss"])
    return triax.Engine(
        module,
        optimizer=names["optimizer"],
        lr_scheduler=names["schedule"],
        batch=triax.Batch(size=4, microbatch=2),
        training_data=names["Samples"](),
        collate_fn=names["collate"],
        **names["options"],
    )


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        ("torch.tanh, 0.5", "torch.relu, 0.5", {"model"}),
        ("torch.tanh, 0.5", "nn.functional.gelu, 0.5", {"model"}),
        ("torch.tanh, 0.5", "torch.tanh, 0.25", {"model"}),
        ("nn.GELU()", "nn.GELU('tanh')", {"model"}),
        ("nn.GELU(), torch.tanh", "nn.GELU(), torch.relu", {"model"}),
        ("* self.slope", "+ self.slope", {"model"}),
        ("return x / SCALE", "return x * SCALE", {"model"}),
        ("SCALE = 2.0", "SCALE = 3.0", {"model"}),
        (".abs().pow(2)", ".abs().pow(3)", {"loss function", "model"}),
        ('"a": 1.0', '"a": 1.5', {"loss function", "model"}),
        ("return 64", "return 60", {"data", "samples"}),
        ("float(index))", "float(index % 9))", {"samples"}),
        ("torch.ones(4)", "torch.zeros(4)", {"samples"}),
        ("collate = None", "collate = lambda rows: [torch.stack(each) for each in zip(*rows)]", {"collation"}),
        ('"clip": 1.0', '"clip": 2.0', {"options"}),
        ("lr=0.1", "lr=0.2", {"optimizer", "learning-rate schedule", "options"}),
        ("SGD, lr=0.1", "SGD, lr=0.1, momentum=0.9", {"optimizer", "options"}),
        ("1 / (1 + step)", "1 / (2 + step)", {"learning-rate schedule", "optimizer"}),
        ("nn.Linear(4, 4)", "nn.Linear(4, 4, bias=False)", {"model", "parameters"}),
        ("nn.Linear(4, 4)", "nn.Linear(4, 4, dtype=torch.float64)", {"model", "parameters"}),
        ("def shrink", "# a comment\n\ndef shrink", set()),
        ("power = 2", "elsewhere = 2", set()),
        ("float(index))", "float(torch.rand(())))", {"samples"}),
    ],
)  # fmt: skip
def test_identities_differ_in_the_changed_part_only(before: str, after: str, names: set[str]) -> None:
    assert before in PROGRAM
    mine, other = identity_of(PROGRAM), identity_of(PROGRAM.replace(before, after))
    assert {name for name in mine if mine[name] != other[name]} == names


def test_an_identity_ignores_samples_that_are_drawn_anew() -> None:
    drawn = PROGRAM.replace("torch.full((4,), float(index))", "torch.from_numpy(GENERATOR.random(4))")
    one, other = (identity_of("GENERATOR = np.random.default_rng()\n" + drawn) for _ in range(2))
    assert one == other and one["samples"] == "drawn anew in each reading"


def test_computing_an_identity_draws_no_random_numbers() -> None:
    engine = engine_of(PROGRAM.replace("float(index))", "float(torch.rand(())) + np.random.rand())"))
    before, drawn = torch.get_rng_state(), str(np.random.get_state())  # noqa: NPY002
    identity(engine)
    assert torch.equal(before, torch.get_rng_state())
    assert drawn == str(np.random.get_state())  # noqa: NPY002


@pytest.mark.parametrize("change", ["weights", "texts", "length"])
def test_identities_of_token_data_differ_in_weights_texts_and_length(tmp_path: Path, change: str) -> None:
    tokens = {name: str(folder(tmp_path, 60, seed, name)) for seed, name in enumerate("abc")}
    kinds: dict[str, Callable[[], TokenData]] = {
        "": lambda: TokenData({tokens["a"]: 0.7, tokens["b"]: 0.3}, length=16),
        "weights": lambda: TokenData({tokens["a"]: 0.7, tokens["b"]: 0.35}, length=16),
        "texts": lambda: TokenData({tokens["a"]: 0.7, tokens["c"]: 0.3}, length=16),
        "length": lambda: TokenData({tokens["a"]: 0.7, tokens["b"]: 0.3}, length=8),
    }
    config = GPTConfig(256, 16, 8, 2, 1)
    found = []
    for kind in ("", "", change):
        grid = triax.Grid()
        module = triax.PipelineModule(gpt_layers(config), loss_fn=triax.CausalLMLoss(grid=grid), grid=grid)
        optimizer = partial(torch.optim.SGD, lr=0.1)
        batch = triax.Batch(size=4, microbatch=2)
        found.append(identity(triax.Engine(module, optimizer=optimizer, batch=batch, training_data=kinds[kind]())))
    one, same, other = found
    assert one == same and {name for name in one if one[name] != other[name]} == {"data"}


def test_a_run_refuses_replicas_with_other_data_or_another_secret(tmp_path: Path) -> None:
    """Otherwise replicas with other data would train together, and samples would be missed or read twice."""
    hold = tmp_path / "hold"
    hold.touch()
    with coordinator(min_replicas=2) as address:
        run = [each for name in "ab" for each in start(tmp_path, name, address, steps=4, hold=str(hold))]
        until(lambda: has_stepped(tmp_path, "a") and has_stepped(tmp_path, "b"))  # the first says what the run is
        (other,) = start(tmp_path, "c", address, kind="narrow", log=str(tmp_path / "log"), steps=4)
        (stranger,) = start(tmp_path, "d", address, secret="a guess", log=str(tmp_path / "log"), steps=4)
        assert finish([other, stranger]) == [1, 1]
        hold.unlink()
        assert finish(run) == [0, 0]
    said = (tmp_path / "log").read_text()
    assert "does not know the secret of replica d: set TRIAX_SECRET" in said
    assert "replica c is not one of this run, because it differs from replica" in said
    assert "parameters (" in said and "samples (" in said and "data (" not in said
    assert losses(tmp_path, "a") == losses(tmp_path, "b")
