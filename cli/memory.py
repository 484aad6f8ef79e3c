"""``triax memory``: bytes of each pipe rank by kind, of a model on a grid, or of model states alone by their number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer
from rich.text import Text

from ..base.errors import ConfigError
from ..base.formulas import BYTES, STATES, ModelStates, model_states
from ..base.option_error import OptionError
from ..base.tables import table, terminal
from ..options.base import Options, option
from .flags import one_line_errors, with_flags
from .output import bar
from .plan_inputs import TRAINING_FILES, model_of, parse_layout

if TYPE_CHECKING:
    from ..plugins.plan.memory import ModelMemory, RankMemory
    from ..plugins.plan.parallel_layout import ParallelLayout

_FILL = 4  # microbatches for each pipe rank, if no batch is given: more hold no more, but under gpipe


class _Counted(NamedTuple):
    """Formulas, layout, batch and sequence to count, and a schedule of the run's own."""

    memory: ModelMemory
    layout: ParallelLayout
    batch: int
    sequence: int
    schedule: Any = None


@dataclass(frozen=True, kw_only=True)
class MemoryFlags(Options):
    """Flags of ``triax memory``."""

    named: str | None = option(None, "The model, as triax plan takes it.", flags=("--model",))
    layout: str | None = option(
        None, "Grid and options, such as pipe=8,data=4,tensor=8,microbatch=1,zero=1,recompute=full."
    )
    batch: int | None = option(None, "Sequences of a step. Default: 4 microbatches for each pipe rank.", least=1)
    sequence: int | None = option(None, "Tokens of a sequence. Default: the model's maximum.", least=1)
    machine: str | None = option(
        None, "Compare with the memory of a machine: a100-80g, h100-80g, h200, b200, or a machine file."
    )
    parameters: float | None = option(
        None, "Without a model: parameters of one rank's stages and tensor shards, such as 7.5e9.", above=0
    )
    processes: int | None = option(None, "With a training file: number of processes, for grid.data: auto.", least=1)
    data: int = option(1, "With --parameters: the number of replicas.", least=1)
    precision: Literal["bf16", "fp16", "fp32", "fp64"] | None = option(
        None, "Dtype of the weights. Default: bf16; with --parameters fp32."
    )
    optimizer: str | None = option(None, f"Optimizer: {', '.join(STATES)}. Default: adamw.")
    json: bool = option(False, "With a model: print one JSON object, with bytes.")

    def refuse(self, names: Sequence[str], why: str) -> None:
        """Raise an error if one of these flags was typed.

        Raises:
            OptionError: with the flag's name, and why it has no effect.
        """
        for name in sorted(self.given & {*names}):
            raise OptionError(name, getattr(self, name), why)


@with_flags
@one_line_errors
def memory(
    flags: MemoryFlags,
    model: Annotated[
        str | None,
        typer.Argument(
            help="A preset such as llama3-70b, a Hugging Face folder or id, a JSON file of fields, or a training file."
        ),
    ] = None,
) -> None:
    """Print the memory of each pipe rank of a model on a grid, with activations; or of a number of parameters."""
    from ..compat.deepspeed.config.optimizer_names import native_optimizer
    from ..plugins.plan.machine import machine as machine_of

    if [model, flags.named, flags.parameters].count(None) != 2:
        raise ConfigError("Give one of a MODEL (or --model), such as llama3-8b, and --parameters, such as 7.5e9.")
    if flags.optimizer is not None:
        flags = flags.changed(optimizer=native_optimizer(flags.optimizer, {}).type)  # FusedAdam is AdamW
    if flags.parameters is not None:
        only = ("layout", "batch", "sequence", "machine", "processes", "json")
        flags.refuse(only, "it is only for a MODEL. Name one in place of <parameters>")
        _states(flags.parameters, flags.data, flags.precision or "fp32", flags.optimizer or "adamw")
        return
    flags.refuse(("data",), f"it is only for <parameters>. Write <layout> data={flags.data}")
    name = str(model or flags.named)
    run = _run(name, flags)
    run.memory.check(run.layout, run.sequence)
    ranks = run.memory.ranks(run.layout, run.batch, run.sequence, run.schedule)
    limit = None if flags.machine is None else machine_of(flags.machine).memory
    if flags.json:
        rows = [{"pipe": pipe, **sizes._asdict(), "total": sizes.total} for pipe, sizes in enumerate(ranks)]
        shown = {"layout": str(run.layout), "batch": run.batch, "sequence": run.sequence, "ranks": rows, "limit": limit}
        typer.echo(json.dumps(shown))
    else:
        _print(name, run, ranks, limit)


def _run(model: str, flags: MemoryFlags) -> _Counted:
    """Return what is to be counted, from a training file or from a model and the options."""
    from ..plugins.plan.memory import ModelMemory
    from ..plugins.plan.parallel_layout import ParallelLayout
    from ..plugins.plan.state_memory import StateOptions
    from ..train.file import read_training_file
    from ..train.job import resolve
    from .explain import layout_of_job, memory_of_job

    if model.endswith(TRAINING_FILES):
        flags.refuse(
            ("layout", "batch", "sequence", "precision", "optimizer"),
            f"{model} says grid, batch and training. Leave it out, and change the file",
        )
        job = resolve(read_training_file(model)[0], flags.processes)
        return _Counted(memory_of_job(job), layout_of_job(job), job.batch.train * job.rows, job.sequence, job.schedule)
    flags.refuse(("processes",), f"it is only for a training file, but {model} is not one. Write the grid as <layout>")
    config, *_ = model_of(model)
    layout = ParallelLayout(**{key: values[0] for key, values in parse_layout(flags.layout or "").items()})
    options = StateOptions(precision=flags.precision or "bf16", optimizer=flags.optimizer or "adamw")
    count = flags.batch or layout.data * layout.microbatch * (_FILL * layout.pipe if layout.pipe > 1 else 1)
    sequence = flags.sequence or config.max_position_embeddings
    return _Counted(ModelMemory(config, options=options), layout, count, sequence)


def _print(model: str, run: _Counted, ranks: Sequence[RankMemory], limit: float | None) -> None:
    """Print a table, and a bar of each pipe rank, whose letters are the kinds."""
    from ..plugins.plan.memory import RankMemory
    from ..plugins.plan.page import figure
    from ..plugins.plan.picture import COLORS

    console = terminal()
    kinds = [kind for kind in RankMemory._fields if any(getattr(sizes, kind) for sizes in ranks)]
    layout, counted = str(run.layout), ""
    if run.schedule is not None:  # of a file; its layout has 1F1B in the schedule's place
        counted = f"{run.layout.gpus} processes, "
        layout = layout.replace("schedule=1f1b", f"schedule={run.schedule.name},chunks={run.schedule.chunks}")
    console.print(f"{model} on {counted}{layout}, batch {run.batch:,} of {run.sequence:,} tokens: GiB of a rank")
    console.print(*(Text(f"{_letter(kind)}={kind}", COLORS[kind]) for kind in kinds), sep="  ")
    rows = (
        (pipe, *(figure(getattr(sizes, kind) / 2**30) for kind in kinds), figure(sizes.total / 2**30))
        for pipe, sizes in enumerate(ranks)
    )
    console.print(table(("pipe", *map(_letter, kinds), "total"), rows, left=0))
    most = max(sizes.total for sizes in ranks)
    for pipe, sizes in enumerate(ranks):
        parts = {kind: getattr(sizes, kind) for kind in kinds}
        console.print(Text(f"{pipe:>4}  ") + bar(parts, max(most, limit or 0.0), console.width - 6, _letter))
    if limit is not None:
        left, fullest = limit - most, max(range(len(ranks)), key=lambda pipe: ranks[pipe].total)
        what = f"{figure(left / 2**30)} GiB left" if left >= 0 else f"{figure(-left / 2**30)} GiB too much"
        console.print(f"pipe rank {fullest}: {figure(most / 2**30)} of {figure(limit / 2**30)} GiB, {what}")


def _letter(kind: str) -> str:
    """Return the letter of a kind in a bar, so that it is read without color."""
    return "+" if kind == "margin" else kind[0].upper()


def _states(parameters: float, data: int, precision: str, optimizer: str) -> None:
    """Print the model states of a number of parameters in each stage of ZeRO, in GB (1e9 bytes)."""
    rows = [model_states(parameters, data, stage, precision, optimizer) for stage in range(4)]
    paper = [model_states(parameters, data, stage, precision, optimizer, precision) for stage in range(4)]
    half = BYTES[precision] == 2
    title = f"{parameters:g} parameters, {data} replicas, {precision}, {optimizer}: GB on each rank"
    heads = ["stage", *ModelStates._fields, "all", *([f"with gradients in {precision}"] if half else [])]
    cells = (
        (stage, *(f"{size / 1e9:.4g}" for size in (*row, row.total, *([narrow.total] if half else []))))
        for stage, (row, narrow) in enumerate(zip(rows, paper, strict=True))
    )
    terminal().print(table(heads, cells, title, left=0))
