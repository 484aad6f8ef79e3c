"""examples/from_deepspeed: the programs of DeepSpeed's tutorials, with another import, against plain PyTorch."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Topology
from triax.compat.deepspeed import PipelineModule
from triax.compat.deepspeed.from_config import read_config
from triax.compat.deepspeed.lr_schedules import WarmupLR
from triax.data.dataloader import make_loader
from triax.grid import Grid

from support.paths import EXAMPLES
from support.sweeps import some

FOLDER = EXAMPLES / "from_deepspeed"


def run(script: str, *options: str) -> Any:
    """A tutorial's ``main`` on this rank, and what it printed."""
    sys.argv = [str(FOLDER / script), *options]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        result = runpy.run_path(sys.argv[0])["main"]()
    return result, said.getvalue()


def load(script: str) -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / script))


def batches(dataset: Any, train: int, seed: int, steps: int) -> list[Any]:
    """Global batches, as one process reads them."""
    loader = make_loader(dataset, train, train, 0, 1, seed)
    found: list[Any] = []
    while len(found) < steps:
        found += list(loader)
    return found[:steps]


# -------------------------------------------------------------------------------------- the getting-started loop


def plain_simple(config: str, skipped: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The initial and the last weights of torch's own loop, in fp32; the first steps are skipped, as overflows are."""
    space, settings = load("simple_model.py"), read_config(str(FOLDER / config))
    torch.manual_seed(0)
    model = space["SimpleModel"](space["HIDDEN"])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert settings.optimizer is not None and isinstance(settings.train_batch_size, int)
    params = dict(settings.optimizer.params)
    optimizer = torch.optim.AdamW(model.parameters(), **{"weight_decay": 0.0, **params})  # DeepSpeed's Adam is AdamW
    scheduler = WarmupLR(optimizer, **settings.scheduler.params) if settings.scheduler else None
    steps = space["SAMPLES"] // settings.train_batch_size
    for x, y in batches(space["dataset"](), settings.train_batch_size, settings.seed, steps)[skipped:]:
        optimizer.zero_grad()
        model(x, y).backward()
        if settings.gradient_clipping:
            nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_clipping)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return before, {name: p.detach() for name, p in model.named_parameters()}


CONFIGS = ["getting_started.json", "stage2.json", "offload.json"]


# Each file on one number of ranks, in turn.
@pytest.mark.parametrize(("config", "size"), some([*product(CONFIGS, (1, 2, 4))], [0, 5, 7]))
def test_getting_started_trains_as_plain_pytorch(ranks: Any, config: str, size: int) -> None:
    """An epoch of simple_model.py ends at the weights of torch's loop in fp32.

    The norm of the difference is at most 1e-4 of the norm of what training changed, or 5 % of it in fp16, where the
    first steps are skipped while the loss scale falls. Rank 0 alone prints.
    """
    options = ("--deepspeed_config", str(FOLDER / config), "--epochs", "1")
    results = ranks(size, run, "simple_model.py", *options)
    fp16 = config != "stage2.json"
    (_, skipped, weights), printed = results[0]
    assert printed.startswith("epoch 0: step ") and all(not others for _, others in results[1:])
    assert skipped < 4 if fp16 else skipped == 0
    before, wanted = plain_simple(config, skipped)
    change = torch.stack([(wanted[name] - before[name]).norm() for name in wanted]).norm()
    for (losses, skipped_here, found), _ in results:
        assert skipped_here == skipped and all(0 < loss < 5 for loss in losses)
        difference = torch.stack([(wanted[name] - found[name].float()).norm() for name in wanted]).norm()
        assert difference < change * (0.05 if fp16 else 1e-4)
        assert all(torch.equal(found[name], weights[name]) for name in weights)


# ------------------------------------------------------------------------------------------ the pipeline tutorial


def plain_alexnet(specs: bool, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    space = load("alexnet.py")
    torch.manual_seed(1138)
    if specs:
        model: nn.Module = space["AlexNetPipe"](dropout=0.0, dtype=torch.float64, base_seed=1138)
    else:
        model = nn.Sequential(*_modules(space["join_layers"](space["AlexNet"](dropout=0.0).double())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, weight_decay=0.0)
    losses = []
    for x, y in batches(space["trainset"](torch.float64), 16, read_config({"train_batch_size": 1}).seed, steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name.removeprefix("layers."): p.detach() for name, p in model.named_parameters()}


def _modules(layers: list[Any]) -> list[nn.Module]:
    """The tutorial's function among the layers, as a module."""
    return [layer if isinstance(layer, nn.Module) else nn.Flatten() for layer in layers]


ALEXNET = [
    (1, ("-p", "1")),
    (2, ("-p", "2")),
    (2, ("-p", "1", "--specs")),
    (4, ("-p", "2", "--specs")),
    (4, ("-p", "4", "--partition", "uniform")),
    (4, ("-p", "2", "--partition", "type:conv")),
]


@pytest.mark.parametrize(("size", "options"), some(ALEXNET, [1, 2, 5]))
def test_the_pipeline_tutorial_trains_as_plain_pytorch(ranks: Any, size: int, options: tuple[str, ...]) -> None:
    losses, wanted = plain_alexnet("--specs" in options, 3)
    config = ("--deepspeed_config", str(FOLDER / "alexnet.json"))
    results = ranks(size, run, "alexnet.py", *options, *config, "-s", "3", "--double", "--dropout", "0")
    for (found, weights), _ in results:
        assert found == pytest.approx(losses, rel=1e-10, abs=0)
        assert {name.removeprefix("layers.") for name in weights} == set(wanted)
        for name, value in weights.items():
            torch.testing.assert_close(value, wanted[name.removeprefix("layers.")], rtol=1e-9, atol=1e-10)
    assert results[0][1].startswith("loss 2.")


def test_the_tutorial_without_a_pipeline_equals_plain_pytorch(ranks: Any) -> None:
    config = ("--deepspeed_config", str(FOLDER / "alexnet.json"))
    _, wanted = plain_alexnet(specs=False, steps=2)
    for (_, weights), _ in ranks(2, run, "alexnet.py", "-p", "0", *config, "-s", "2", "--double", "--dropout", "0"):
        assert len(weights) == len(wanted)
        for value, want in zip(weights.values(), wanted.values(), strict=True):
            torch.testing.assert_close(value, want, rtol=1e-9, atol=1e-10)


def test_ranks_of_the_tutorial_with_dropout_see_equal_losses(ranks: Any) -> None:
    config = ("--deepspeed_config", str(FOLDER / "alexnet.json"))
    (first, _), *others = (result for result, _ in ranks(4, run, "alexnet.py", "-p", "2", *config, "-s", "2"))
    assert len(first) == 2 and all(losses == first for losses, _ in others)


# --------------------------------------------------------------------------------------------- one loss, two engines


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_two_engine_example_trains_as_plain_pytorch(ranks: Any, size: int) -> None:
    space = load("two_engines.py")
    models = space["nets"]()
    optimizers = [
        torch.optim.SGD(models[0].parameters(), lr=0.1, momentum=0.9),
        torch.optim.AdamW(models[1].parameters(), lr=0.01, weight_decay=0.0),
    ]
    for x, y in batches(space["dataset"](), 16, read_config({"train_batch_size": 1}).seed, 8):
        torch.stack([(model(x) - y).square().mean() for model in models]).sum().backward()
        nn.utils.clip_grad_norm_(models[1].parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for states, _ in ranks(size, run, "two_engines.py"):
        for state, model in zip(states, models, strict=True):
            for name, value in model.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-10)


# ------------------------------------------------------------------------------- the arguments of the pipeline module


class TheirTopology:
    """Object with the attributes of DeepSpeed's topologies that give the sizes of the axes."""

    def __init__(self, **sizes: int) -> None:
        self._sizes = sizes

    def get_axis_names(self) -> list[str]:
        return list(self._sizes)

    def get_dim(self, axis: str) -> int:
        return self._sizes[axis]


def layers() -> list[nn.Module]:
    return [nn.Linear(2, 2) for _ in range(4)]


def shapes() -> Any:
    made = [
        PipelineModule(layers(), num_stages=2),
        PipelineModule(layers(), topology=Topology(pipe=2, data=2), partition_method="uniform"),
        PipelineModule(layers(), topology=TheirTopology(pipe=1, data=2, model=2), num_stages=1),
        PipelineModule(layers(), Grid(pipe=4), num_stages=4, partition_method=[0, 1, 2, 3, 4], seed_layers=True),
    ]
    said = []
    wrong: list[dict[str, Any]] = [{"num_stages": 3}, {"topology": TheirTopology(pipe=2, data=1)}]
    for arguments in wrong:
        with pytest.raises(ValueError) as caught:
            PipelineModule(layers(), **arguments)
        said.append(str(caught.value))
    return [m.grid.topology.axes for m in made], [m.boundaries for m in made], said


def test_num_stages_and_topology_make_the_grid(ranks: Any) -> None:
    for axes, boundaries, said in ranks(4, shapes):
        assert axes == [
            {"pipe": 2, "data": 2, "tensor": 1},
            {"pipe": 2, "data": 2, "tensor": 1},
            {"pipe": 1, "data": 2, "tensor": 2},
            {"pipe": 4, "data": 1, "tensor": 1},
        ]
        assert boundaries == [[0, 2, 4], [0, 2, 4], [0, 4], [0, 1, 2, 3, 4]]
        assert all("4" in text for text in said)  # of how many processes they do not fit


def test_impossible_deepspeed_pipeline_arguments_are_refused() -> None:
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"grid": 2}, TypeError, r"grid is 2, not a triax.Grid: pass grid=triax.Grid\(pipe=2\)"),
        ({"num_stages": 0}, ValueError, "num_stages is 0: give a whole number of at least 1"),
        ({"grid": Grid(), "num_stages": 2}, ValueError, "num_stages is 2, and the grid has 1 ranks on its pipe axis"),
        ({"grid": Grid(), "topology": Topology(pipe=2)}, ValueError, "leave one of them out"),
        ({"topology": {"pipe": 2}}, TypeError, r"a dict: pass topology=triax.Topology\(pipe=2, data=2\)"),
        ({"topology": TheirTopology(pipe=1, expert=1)}, ValueError, "topology has the axes expert"),
        ({"partition": "uniform", "partition_method": "parameters"}, ValueError, "give one of them"),
        ({"seed": 1, "base_seed": 2}, ValueError, "seed is 1 and base_seed is 2: give one of them"),
        ({"seed_fn": print}, TypeError, r"seed_fn is DeepSpeed's; .* leave it out"),
        ({"activation_checkpoint_func": print}, TypeError, "recomputation is activation_checkpoint_interval="),
        ({"num_stage": 2}, TypeError, "no argument 'num_stage': did you mean num_stages?"),
    ]
    for arguments, kind, said in wrong:
        with pytest.raises(kind, match=said):
            PipelineModule(layers(), **arguments)
    assert PipelineModule(layers(), base_seed=5).seed == 5 and PipelineModule(layers()).seed == 0


def test_deepspeeds_arguments_warn_outside_of_its_api(recwarn: pytest.WarningsRecorder) -> None:
    assert triax.PipelineModule(layers(), seed=5).seed == 5
    assert isinstance(PipelineModule(layers(), num_stages=1, seed_layers=True), triax.PipelineModule)
    assert not [warning for warning in recwarn if "PipelineModule" in str(warning.message)]
    arguments: dict[str, Any] = {"topology": Topology(pipe=1), "partition_method": "uniform", "base_seed": 5}
    said = r"until triax 0.3: write grid=triax.Grid\(\), partition='uniform', seed=5, and leave seed_layers out"
    with pytest.warns(DeprecationWarning, match=said) as caught:
        module = triax.PipelineModule(layers(), seed_layers=False, **arguments)  # type: ignore[arg-type]
    assert (module.partition, module.seed) == ("uniform", 5)
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.raises(TypeError, match=r"no argument 'num_stage': did you mean num_stages?"):
        triax.PipelineModule(layers(), num_stage=2)  # type: ignore[arg-type]
