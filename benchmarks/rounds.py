"""Parts of all benchmarks: arguments, ranks, contenders that take turns, peers that may be missing, and tables."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol, TypeVar

import torch
from limits import ratios, spread
from measuring import compare, in_turn, timed_and_carried
from torch import Tensor

import triax
from triax.base.tables import table, terminal
from triax.grid.launcher.launch import launch

WARM_UP = 2
ALONE = "one process"


class NotRunning(Exception):
    """A contender does not run here; the message says why."""


class Contender(Protocol):
    """One rank of a contender."""

    def step(self) -> None:
        """Everything that is timed."""

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of a step, by the names of plain autograd's."""


C = TypeVar("C", bound=Contender)
Makers = Iterable[tuple[str, Callable[[], C]]]  # names of contenders, and how to make them


@dataclass
class Row:
    """Figures of one contender; a list is empty in a benchmark that does not measure it."""

    name: str
    problem: str = ""  # why it did not run
    times: list[float] = field(default_factory=list)  # of each round's step, in seconds: the slowest rank's
    limits: list[float] = field(default_factory=list)  # of each round: the least time of a step of this method
    sent: list[float] = field(default_factory=list)  # of each round: bytes per rank that the loopback carried
    counted: float = 0.0  # bytes per rank and step, by triax's own count
    held: list[int] = field(default_factory=list)  # per rank: bytes that are held between two passes or steps
    peak: list[float] = field(default_factory=list)  # per rank: the most bytes that a step takes at once
    scores: list[int] = field(default_factory=list)  # per rank: computed by the attention of a forward pass

    @property
    def step(self) -> float:
        """Median of the times, in seconds."""
        return median(self.times)


# ---------------------------------------------------------------------------------------------- arguments


def parser(document: str | None, rounds: int = 9, ranks: bool = True) -> argparse.ArgumentParser:
    """Return a parser with the arguments that benchmarks share.

    Args:
        document: the benchmark's docstring, whose first line describes it.
        rounds: default of ``--rounds``.
        ranks: several contenders are measured on several ranks: ``--only`` and ``--patience`` too.
    """
    made = argparse.ArgumentParser(description=(document or "").split("\n")[0])
    made.add_argument("--rounds", type=int, default=rounds)
    made.add_argument("--json", action="store_true", help="one object, with every round's times, instead of tables")
    if ranks:
        made.add_argument(
            "--only", nargs="+", default=[], help="contenders whose names contain one of these; and the first one"
        )
        made.add_argument("--patience", type=float, default=0.0, help="seconds, in all, to repeat disturbed turns")
    return made


# -------------------------------------------------------------------------------------------------- ranks


def on_ranks(function: Callable[..., Any], *arguments: Any, ranks: int) -> list[Any]:
    """Run a function on ranks of one thread each, and return what each of them returned. Ends if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        if code := launch(_kept, folder, function, *arguments, ranks=ranks, threads=1):
            sys.exit(code)
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(ranks)]


def _kept(folder: str, function: Callable[..., Any], *arguments: Any) -> None:
    warnings.simplefilter("ignore")  # torch's own, of what its newer parts call
    found = function(*arguments)
    Path(folder, os.environ["RANK"]).write_text(json.dumps(found, default=vars))


# --------------------------------------------------------------------------------------------- contenders


def prepared(
    makers: Makers[C], only: Sequence[str] = (), expected: dict[str, Tensor] | None = None
) -> tuple[list[Row], list[tuple[Row, C]]]:
    """Make the contenders, and compare their gradients.

    Args:
        makers: the contenders.
        only: parts of the names of those that are asked for, beside the first; all if there are none.
        expected: plain autograd's gradients. None: the first one's.

    Returns:
        A row of each contender, and those that run.
    """
    rows: list[Row] = []
    running: list[tuple[Row, C]] = []
    for name, make in makers:
        if only and rows and not any(part in name for part in only):
            continue
        rows.append(Row(name))
        try:
            contender = make()
            found = contender.gradients()
        except NotRunning as error:
            rows[-1].problem = str(error)
            continue
        expected = expected or {parameter: gradient.clone() for parameter, gradient in found.items()}
        compare(name, found, expected)
        running.append((rows[-1], contender))
    return rows, running


def time_in_turn(grid: triax.Grid, running: Sequence[tuple[Row, Contender]], options: argparse.Namespace) -> None:
    """Warm up the contenders, and add to each row the times of its steps and the bytes that they sent. Collective."""
    for _, contender in running:
        for _ in range(WARM_UP):
            contender.step()
    deadline = time.monotonic() + options.patience
    for row, contender in in_turn(running, options.rounds):
        elapsed, sent = timed_and_carried(grid, contender.step, deadline)
        row.times.append(elapsed)
        row.sent.append(sent)


def trained_alike(
    makers: Iterable[tuple[str, Callable[[], tuple[Callable[[], object], Callable[[], dict[str, Tensor]]]]]],
    steps: int,
    rtol: float,
    atol: float,
) -> Iterator[tuple[Row, Callable[[], object]]]:
    """Make contenders of one process that are a step and a reading of weights, and compare the weights after steps.

    Yields:
        A row of each contender, and its step. The row of one that does not run has a problem.

    Raises:
        AssertionError: the weights are not the first one's.
    """
    expected: dict[str, Tensor] = {}
    for name, make in makers:
        try:
            step, weights = make()
        except NotRunning as error:
            yield Row(name, str(error)), lambda: None
            continue
        for _ in range(steps):
            step()
        found = {key: value.detach().float().cpu().clone() for key, value in weights().items()}
        expected = expected or found
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key], rtol=rtol, atol=atol, msg=f"{name}: {key} differs")
        yield Row(name), step


# -------------------------------------------------------------------------------------------- peers


def quiet() -> contextlib.AbstractContextManager[Any]:
    """Context without a standard output."""
    return contextlib.redirect_stdout(io.StringIO())


def load_deepspeed(backend: str = "gloo") -> Any:
    """Return the module ``deepspeed``, made ready. It reports through a logger of its own and through print.

    Raises:
        NotRunning: it is not installed.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise NotRunning("not installed: pip install -e '.[bench]'")
    with quiet():
        import deepspeed
        from deepspeed.utils.logging import logger

        logger.setLevel(logging.ERROR)
        deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False)
    return deepspeed


def deepspeed_engine(model: Any, optimizer: Any, microbatch: int, **config: Any) -> Any:
    """Return DeepSpeed's engine of a model.

    Raises:
        NotRunning: DeepSpeed is not installed.
    """
    config |= {"train_micro_batch_size_per_gpu": microbatch, "steps_per_print": 10**9}
    deepspeed = load_deepspeed()
    with quiet():
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


# --------------------------------------------------------------------------------------------------- tables


def show(
    title: str,
    rows: Sequence[Row],
    columns: Mapping[str, Callable[[Row], str]],
    caption: str | None = None,
    width: int = 160,
) -> None:
    """Print a table: a line of each contender that ran, then why the others did not.

    Args:
        title, caption: lines above and below.
        rows: the contenders.
        columns: head of a column -> its cell of a row.
        width: columns of the output.
    """
    console = terminal(width=width)
    cells = ((row.name, *(cell(row) for cell in columns.values())) for row in rows if not row.problem)
    console.print(table(("", *columns), cells, title, caption=caption))
    for row in rows:
        if row.problem:
            console.print(f"{row.name}: {row.problem}")


def beside(values: Sequence[float], others: Sequence[float]) -> str:
    """Return the median of the ratios of two contenders' rounds with the middle half, as a cell."""
    return spread(ratios(values, others)) if values and others else ""


def print_json(results: Any, **about: Any) -> None:
    """Print one object."""
    print(json.dumps({"torch": torch.__version__, **about, "results": results}, indent=1, default=vars))
