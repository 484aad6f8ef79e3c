"""A failure on one rank ends the run on all ranks, with a message that names the rank, its place and its op."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.base.errors import ConfigError
from triax.grid.agreement.hang_watch import timed_out, with_timeout
from triax.grid.comm.equal_facts import same
from triax.grid.launcher.launch import Outcome, outcome_of

from support.paths import ROOT
from support.toys import mean_loss

WIDTH = 4
ENGINES = ("pipe", "module")


def made(grid: Grid, layer: Callable[[], nn.Module], kind: str, **config: Any) -> Any:
    """Either engine over two layers, SGD, two microbatches of two samples."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **config,
    }
    if kind == "pipe":
        model: Any = PipelineModule([LayerSpec(layer), LayerSpec(layer)], grid=grid, loss_fn=mean_loss)
        return triax.initialize(model=model, config=config)[0]
    return triax.initialize(model=nn.Sequential(layer(), layer()), config=config, grid=grid)[0]


def step(engine: Any, batches: Iterator[tuple[Tensor, Tensor]]) -> Any:
    """Run one training step of a pipeline engine or a module engine."""
    if isinstance(engine, triax.PipelineEngine):
        return engine.train_batch(batches)
    for _ in range(engine.gradient_accumulation_steps()):
        x, y = next(batches)
        engine.backward(mean_loss(engine(x), y))
        engine.step()
    return None


def grid_of(kind: str, **sizes: Any) -> Grid:
    return Grid(pipe=2 if kind == "pipe" else 1, **sizes)


def batches(value: float = 1.0) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield torch.full((2, WIDTH), value), torch.zeros(2, WIDTH)


# ------------------------------------------------------------------------------ a rank that hangs, or is killed


class Trap(nn.Module):
    """A layer that, on rank 1 and from its fifth call on, does what it is told."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear, self.what, self.calls = nn.Linear(WIDTH, WIDTH), what, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls >= 4 and torch.distributed.get_rank() == 1:
            if self.what == "sleeps":
                time.sleep(1000)
            if self.what == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.what == "is stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
        y: Tensor = self.linear(x)
        return y


def trapped(kind: str, what: str) -> None:
    """Program of each rank under the launcher."""
    engine = made(grid_of(kind, timeout=2), lambda: Trap(what), kind)
    data = batches()
    if what == "reads for ever" and engine.grid.rank == 1:
        data = (time.sleep(1000) or pair for pair in batches())  # type: ignore[func-returns-value]
    for _ in range(5):
        step(engine, data)


@pytest.fixture
def launched(ranks: Any, tmp_path: Path) -> Callable[..., tuple[Outcome, str]]:
    """Function that launches two ranks and returns their exit and output; `ranks` has loaded torch before."""

    def go(function: Callable[..., object], *args: Any, **options: Any) -> tuple[Outcome, str]:
        outcome = outcome_of(function, *args, ranks=2, logs=tmp_path / "logs", tee=(), **options)
        return outcome, "".join(path.read_text() for path in sorted((tmp_path / "logs").glob("rank-*.log")))

    return go


OP = {"pipe": "1F1", "module": "forward of microbatch 1"}
NAME = {"pipe": "rank 1 (pipe 1, data 0, tensor 0)", "module": "rank 1 (pipe 0, data 1, tensor 0)"}


@pytest.mark.parametrize("kind", ["pipe", pytest.param("module", marks=pytest.mark.exhaustive)])
def test_a_rank_that_hangs_is_named_with_its_op_and_its_line(launched: Any, kind: str) -> None:
    outcome, printed = launched(trapped, kind, "sleeps")
    assert outcome.code == 1
    assert outcome.line.startswith("rank 0 (pipe 0, data 0, tensor 0) stopped at ")
    assert f", because {NAME[kind]} hangs: it is at {OP[kind]} for " in outcome.line
    assert "in test_failures.py:" in outcome.line and "(forward)" in outcome.line
    # And each rank said where it stood.
    assert (
        printed.count(" stands at ") == 2
        and f"{NAME[kind]} stands at {outcome.line.partition('is at ')[2][:3]}" in printed
    )


@pytest.mark.parametrize("kind", [pytest.param("pipe", marks=pytest.mark.exhaustive), "module"])
def test_a_rank_that_is_killed_is_named_with_its_place(launched: Any, kind: str) -> None:
    outcome, _ = launched(trapped, kind, "is killed")
    assert outcome.code == 128 + signal.SIGKILL
    assert outcome.line.startswith(f"{NAME[kind]} died: SIGKILL")


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("what", ["is stopped", "reads for ever"])
def test_a_rank_that_does_not_answer_is_named(launched: Any, kind: str, what: str) -> None:
    outcome, _ = launched(trapped, kind, what)
    assert outcome.code == 1
    said = "does not answer" if what == "is stopped" else "hangs: it is"
    assert f"because {NAME[kind]} {said}" in outcome.line


def left_alone(folder: str, guilty: int, stopped: bool, saves: bool, **config: Any) -> tuple[str, str | None]:
    """Train on replicas, of which one stops or leaves after two steps; return this rank's name and its error.

    Rank 0 serves the store, as under mpirun and srun. ``saves``: the others save a checkpoint then.
    """
    grid = Grid(timeout=2)
    engine = made(grid, Wide, "module", checkpoint={"patience": 1}, **config)
    pids, me, data = Path(folder, "pids"), engine.grid.rank, batches()
    for _ in range(2):
        step(engine, data)
    grid.world.barrier()
    if me == guilty and stopped:
        pids.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        return engine.grid.describe(), None
    if me == guilty:
        engine.grid.close()
        return engine.grid.describe(), None
    try:
        for _ in range(50):
            engine.save_checkpoint(folder) if saves else step(engine, data)
    except RuntimeError as error:
        return engine.grid.describe(), str(error)
    finally:
        if stopped:
            os.kill(int(pids.read_text()), signal.SIGCONT)
    return engine.grid.describe(), "no error"


@pytest.mark.parametrize(("guilty", "stopped", "saves"), [(0, True, False), (0, True, True), (1, False, False)])
def test_errors_name_the_rank_that_left_or_stopped(
    ranks: Any, tmp_path: Path, guilty: int, stopped: bool, saves: bool
) -> None:
    size = 2 if stopped else 3
    said = ranks(size, left_alone, str(tmp_path), guilty, stopped, saves, init_group=False, timeout=60)
    how = "failed at" if saves else "stopped"  # at an op, or where it reduces gradients
    gone = f" {said[guilty][0]} does not answer: it has ended, was killed or was stopped, or its host is gone"
    for rank, (name, error) in enumerate(said):
        assert rank == guilty or (error.startswith(f"{name} {how} ") and gone in error), error


def waits_for_a_stopped_replica(folder: str) -> tuple[str, str | None]:
    local = {"type": "async_diloco", "every": 1, "max_staleness": 1, "meet_early": False}
    return left_alone(folder, 0, True, False, local_updates=local)


def test_async_diloco_names_a_stopped_rank_that_serves_the_store(ranks: Any, tmp_path: Path) -> None:
    """Asynchronous DiLoCo asks the store for the others' rounds, and waited without an end."""
    (first, _), (_, error) = ranks(2, waits_for_a_stopped_replica, str(tmp_path), init_group=False, timeout=60)
    assert f"{first} does not answer: it has ended, was killed or was stopped" in error, error


def test_with_timeout_ends_calls_that_take_too_long() -> None:
    assert with_timeout(5, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        with_timeout(5, lambda: 1 // 0)
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        with_timeout(0.05, lambda: time.sleep(5))


def test_timed_out_recognizes_errors_of_time_limits() -> None:
    assert timed_out(RuntimeError("[...]unbound_buffer.cc:90] Timed out waiting 3000ms for recv operation to complete"))
    wrapped = RuntimeError("rank 0, 0F1: failed")
    wrapped.__cause__ = RuntimeError("Timed out waiting 2000ms")
    assert timed_out(wrapped) and not timed_out(RuntimeError("Connection reset by peer"))


# ------------------------------------------------------------------------------------------------- nan and infinity


class Poison(nn.Module):
    """A layer whose output, in one microbatch of one rank, is of the kind it is told; or whose gradient is."""

    def __init__(self, where: str, value: float) -> None:
        super().__init__()
        self.linear, self.where, self.value, self.on = nn.Linear(WIDTH, WIDTH), where, value, False
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.calls += 1
        if self.on and self.calls % 2 == 0:  # the second microbatch
            if self.where == "loss":
                y = y + self.value
            else:
                y.register_hook(lambda gradient: gradient * self.value)
        return y


def poisoned(kind: str, where: str, value: float, config: dict[str, Any]) -> tuple[list[Any], list[bool], Any]:
    """Three steps, the second one poisoned on the last rank: what each said, whether weights moved, the counts."""
    torch.manual_seed(0)
    engine = made(grid_of(kind, timeout=20), lambda: Poison(where, value), kind, **config)
    layers = [module for module in engine.module.modules() if isinstance(module, Poison)]
    said: list[str | None] = []
    moved: list[bool] = []
    data = batches()
    for number in range(3):
        if engine.grid.rank == engine.grid.size - 1:
            layers[-1].on, layers[-1].calls = number == 1, 0
        before = engine.gather()
        try:
            step(engine, data)
            said.append(None)
        except RuntimeError as error:
            said.append(str(error))
        after = engine.gather()
        moved.append(any(not torch.equal(before[name], after[name]) for name in before))
    whole = all(bool(torch.isfinite(tensor).all()) for tensor in engine.gather().values())
    return said, moved, (engine.skipped_steps, engine.loss_scale(), whole)


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize(("where", "value"), [("loss", float("nan")), ("gradient", float("inf"))])
def test_a_loss_that_is_nan_stops_every_rank_before_a_weight_moves(
    ranks: Any, kind: str, where: str, value: float
) -> None:
    name = {"pipe": "rank 1 (pipe 1, data 0, tensor 0)", "module": "rank 1 (pipe 0, data 1, tensor 0)"}[kind]
    for said, moved, (skipped, _, whole) in ranks(2, poisoned, kind, where, value, {}, timeout=40):
        assert said[0] is None and said[2] is None  # the engine goes on
        assert ("the loss is nan" if where == "loss" else "the norm of the gradient is ") in said[1]
        # Gradients are looked at when they are summed: of which replica they were is known no more.
        if where == "loss":  # before the gradients that it made
            assert said[1].startswith(f"the loss is nan: {name}: the loss of microbatch 1 is nan")
        else:
            assert re.search(r": the gradient of \S+(, summed over the replicas,)? is not finite", said[1])
        assert moved == [True, False, True] and whole and skipped == 0


def with_a_weight_of_nan(kind: str, stage: int) -> tuple[str, str]:
    """A step after a weight of the last rank became nan: the error, and the weight's name as this rank has it."""
    torch.manual_seed(0)
    grid = grid_of(kind, timeout=20)
    engine = made(grid, lambda: nn.Linear(WIDTH, WIDTH), kind, zero_optimization={"stage": stage})
    data = batches()
    step(engine, data)
    bucket = engine.data_axis.buckets[-1]
    if grid.rank == grid.size - 1:
        bucket.shard[-1] = float("nan")
        if stage < 3:
            bucket.members[-1].parameter.data.fill_(float("nan"))
    with pytest.raises(RuntimeError) as error:
        step(engine, data)
    return str(error.value), bucket.members[-1].layout.name


@pytest.mark.parametrize(("kind", "stage"), [("pipe", 0), ("module", 0), ("module", 3)])
def test_errors_name_a_nan_weight_before_losses_and_gradients(ranks: Any, kind: str, stage: int) -> None:
    """A nan weight also makes losses and gradients nan on the other ranks; the error names the weight first."""
    (first, _), (second, name) = ranks(2, with_a_weight_of_nan, kind, stage, timeout=40)
    assert first == second
    assert f"is nan: {NAME[kind]}: the value of {name} is not finite" in first, first
    others = first.partition("not finite")[2]
    assert "the value of" not in others


@pytest.mark.parametrize("kind", ENGINES)
def test_a_step_with_a_nan_loss_can_be_skipped_or_taken(ranks: Any, kind: str) -> None:
    nan = float("nan")
    for said, moved, (skipped, _, whole) in ranks(2, poisoned, kind, "loss", nan, {"nan_loss": "skip"}, timeout=40):
        assert said == [None] * 3 and moved == [True, False, True] and whole and skipped == 1
    for said, moved, (skipped, _, whole) in ranks(2, poisoned, kind, "loss", nan, {"nan_loss": "ignore"}, timeout=40):
        assert said == [None] * 3 and moved[:2] == [True, True] and not whole and skipped == 0


@pytest.mark.parametrize("kind", ENGINES)
def test_fp16_overflow_halves_the_scale_and_nan_loss_is_an_error(ranks: Any, kind: str) -> None:
    """A gradient that overflows halves the scale, and is no error; a loss that is nan is one, and halves nothing."""
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}
    for said, moved, (skipped, scale, whole) in ranks(2, poisoned, kind, "gradient", float("inf"), fp16, timeout=40):
        assert said == [None] * 3 and moved == [True, False, True] and (skipped, scale, whole) == (1, 8.0, True)
    for said, moved, (skipped, scale, whole) in ranks(2, poisoned, kind, "loss", float("nan"), fp16, timeout=40):
        assert "the loss is nan" in said[1] and moved == [True, False, True]
        assert (skipped, scale, whole) == (0, 16.0, True)


# ------------------------------------------------------------------------------------------- ranks that differ


class Shaped(nn.Linear):
    """Layer that has a bias or not, by a value that only one rank has read."""

    with_bias = True

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=self.with_bias)


class Wide(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


def differs(kind: str, what: str) -> str:
    torch.manual_seed(0)
    odd = int(os.environ["RANK"]) == 2
    sizes: dict[str, Any] = {"pipe": 2, "timeout": 20} if kind == "pipe" else {"timeout": 20}
    if what == "grid" and odd:
        sizes["tensor"] = 2
    if what == "order" and odd:
        sizes["order"] = ("tensor", "data", "pipe")
    config = {"gradient_clipping": 2.0} if what == "config" and odd else {}
    if what == "code" and odd:
        # As if the file had been edited on one host.
        Wide.__module__ = "test_hosts_copy"
        import sys
        import types

        copy = types.ModuleType("test_hosts_copy")
        copy.__file__ = str(ROOT / "tests" / "support" / "reference.py")
        sys.modules["test_hosts_copy"] = copy
    layer: Any = partial(nn.Linear, WIDTH, WIDTH) if what == "model" and odd else Wide
    if what == "shape":
        layer, Shaped.with_bias = Shaped, not odd
    try:
        made(Grid(**sizes), layer, kind, **config)
    except (ConfigError, ValueError) as error:
        return str(error)
    finally:
        Wide.__module__ = differs.__module__
    return "no error"


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("config", "gradient_clipping is 2.0 on rank 2 ("),
        ("model", "the class of "),
        ("shape", "the parameter "),
        ("code", "rank 2 ("),
        ("grid", "rank 2 asks for a grid of "),
        ("order", "rank 2 asks for a grid of "),
    ],
)
def test_ranks_that_differ_are_refused_before_they_hang(ranks: Any, kind: str, what: str, words: str) -> None:
    said = ranks(4, differs, kind, what, init_group=False, timeout=40)
    assert len(set(said)) == 1, said  # one message
    assert words in said[0], said[0]


def facts_that_are_same() -> list[bool]:
    grid = Grid(timeout=20)
    grid.traffic.add("tensor", "send", 3.0)
    found = [same(grid.world, facts, grid.device) for facts in ("x", grid.rank, grid.rank // 2, [1, {"a": 2}])]
    assert grid.traffic.report() == {"tensor": {"send": (1, 3.0)}}  # checks are not counted
    return found


EVERY_ENGINE: dict[str, Callable[[Any, str], Any]] = {
    "gather('weights')": lambda engine, _: engine.gather(),
    "save_checkpoint": lambda engine, folder: engine.save_checkpoint(folder),
    "load_checkpoint": lambda engine, folder: engine.load_checkpoint(folder),
    "save_hf": lambda engine, folder: triax.save_hf(engine, folder, config={}, names={}),
}
CALLS: dict[str, dict[str, Callable[[Any, str], Any]]] = {
    "pipe": {
        "train_batch of 2 microbatches": lambda engine, _: engine.train_batch(batches()),
        "eval_batch of 2 microbatches": lambda engine, _: engine.eval_batch(batches()),
        "eval_batch of 3 microbatches": lambda engine, _: engine.eval_batch(batches(), num_micro_batches=3),
        **EVERY_ENGINE,
    },
    "module": {
        "step": lambda engine, _: step(engine, batches()),
        **EVERY_ENGINE,
        "clip_grad_norm_": lambda engine, _: clipped(engine),
    },
}


def clipped(engine: Any) -> None:
    data = batches()
    for _ in range(2):
        x, y = next(data)
        engine.backward(mean_loss(engine(x), y))
        if engine.is_last_microbatch():
            engine.clip_grad_norm_(1.0)
        engine.step()


def other_calls(kind: str, stage: int, folder: str, calls: Sequence[str]) -> str:
    """Make another call on each rank, and return the error."""
    engine = made(grid_of(kind), partial(nn.Linear, WIDTH, WIDTH), kind, zero_optimization={"stage": stage})
    step(engine, batches())
    try:
        CALLS[kind][calls[engine.grid.rank]](engine, folder)
    except RuntimeError as error:
        return str(error)
    return ""


def around(kind: str) -> Iterator[tuple[str, str]]:
    yield from pairwise([*CALLS[kind], next(iter(CALLS[kind]))])


@pytest.mark.parametrize(
    ("kind", "stage", "calls"),
    [
        *(("pipe", 0, calls) for calls in around("pipe")),
        *(("module", 0, calls) for calls in around("module")),
        ("module", 3, ("gather('weights')", "clip_grad_norm_")),
        ("module", 3, ("save_checkpoint", "load_checkpoint")),
    ],
    ids=lambda each: " and ".join(each) if isinstance(each, tuple) else str(each),
)
def test_ranks_that_call_different_methods_are_named(
    ranks: Any, tmp_path: Path, kind: str, stage: int, calls: Any
) -> None:
    """Replicas of a plain module waited for the time limit, or a rank was aborted by gloo."""
    texts = ranks(2, other_calls, kind, stage, str(tmp_path), calls, timeout=30)
    for text in texts:
        if stage < 3:
            assert f"rank 0 (pipe 0, data 0, tensor 0) calls {calls[0]}" in text and f"calls {calls[1]}" in text, texts
            assert "make the same call on every rank, and none under `if rank == 0`" in text
        else:  # one of them gathers a layer before
            assert f"calls {calls[0]}" in text and "rank 0 (" in text and "rank 1 (" in text, texts


def test_facts_that_differ_between_ranks_are_detected(ranks: Any) -> None:
    assert ranks(4, facts_that_are_same) == [[True, False, False, True]] * 4


# ---------------------------------------------------------------------------------- a batch of another shape


def other_shape(kind: str, what: str) -> str:
    """Tensor ranks with unlike batches: rank 1's second step has one sample less, or other labels."""
    grid = Grid(tensor=2, timeout=20)
    engine = made(grid, Wide, kind)

    def data() -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(8):
            odd = number >= 2 and grid.rank == 1
            rows = 1 if odd and what == "samples" else 2
            x = torch.ones(rows, WIDTH)
            yield (x.double() if odd and what == "dtype" else x), torch.zeros(rows, WIDTH)

    batches = data()
    try:
        for _ in range(3):
            step(engine, batches)
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("what", ["samples", "dtype"])
def test_tensor_ranks_with_unlike_batches_are_named(ranks: Any, kind: str, what: str) -> None:
    """gloo would have filled a part of a buffer without a word, or ended the process."""
    there, here = ("float32[1, 4]", "float32[2, 4]") if what == "samples" else ("float64[2, 4]", "float32[2, 4]")
    for said in ranks(2, other_shape, kind, what, timeout=40):
        assert "the shape of the inputs" in said and "on rank 1 (pipe 0, data 0, tensor 1) and " in said, said
        assert there in said and here in said and "take the same samples" in said


def wrong_width(kind: str) -> str:
    """A replica, or the first stage, is given samples that its layer cannot take."""
    engine = made(grid_of(kind, timeout=20), Wide, kind)
    guilty = 0 if kind == "pipe" else 1
    data = iter([(torch.ones(2, WIDTH + (engine.grid.rank == guilty)), torch.zeros(2, WIDTH))] * 8)
    try:
        step(engine, data)
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("kind", ENGINES)
def test_a_batch_that_the_layer_cannot_take_is_named_on_every_rank(ranks: Any, kind: str) -> None:
    name, at = {
        "pipe": ("rank 0 (pipe 0, data 0, tensor 0)", "0F0"),
        "module": ("rank 1 (pipe 0, data 1, tensor 0)", "forward of microbatch 0"),
    }[kind]
    for said in ranks(2, wrong_width, kind, timeout=40):
        assert f"{name} failed at {at}: RuntimeError: " in said, said
