"""``triax memory``: bytes of each pipe rank by kind, of a model on a grid, or of model states alone by their number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.text import Text

from ..base.errors import ConfigError
from ..base.formulas import BYTES, STATES, ModelStates, model_states
from ..base.tables import table, terminal
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


def memory(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A preset such as llama3-70b, a Hugging Face folder or id, a JSON file of fields, or a training file."
        ),
    ] = None,
    named: Annotated[str | None, typer.Option("--model", help="The model, as triax plan takes it.")] = None,
    layout: Annotated[
        str | None,
        typer.Option(help="Grid and options, such as pipe=8,data=4,tensor=8,microbatch=1,zero=1,recompute=full."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences of a step. Default: 4 microbatches for each pipe rank.")
    ] = None,
    sequence: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence. Default: the model's maximum.")
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(help="Compare with the memory of a machine: a100-80g, h100-80g, h200, b200, or a machine file."),
    ] = None,
    parameters: Annotated[
        float | None,
        typer.Option(help="Without a model: parameters of one rank's stages and tensor shards, such as 7.5e9."),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="With a training file: number of processes, for grid.data: auto."),
    ] = None,
    data: Annotated[int, typer.Option(min=1, help="With --parameters: the number of replicas.")] = 1,
    precision: Annotated[
        str | None,
        typer.Option(help=f"Dtype of the weights: {', '.join(BYTES)}. Default: bf16; with --parameters fp32."),
    ] = None,
    optimizer: Annotated[str | None, typer.Option(help=f"Optimizer: {', '.join(STATES)}. Default: adamw.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With a model: print one JSON object, with bytes.")] = False,
) -> None:
    """Print the memory of each pipe rank of a model on a grid, with activations; or of a number of parameters."""
    from ..compat.deepspeed.config.optimizer_names import native_optimizer
    from ..plugins.plan.machine import machine as machine_of

    if [model, named, parameters].count(None) != 2:
        raise ConfigError("Give one of a MODEL (or --model), such as llama3-8b, and --parameters, such as 7.5e9.")
    model = model or named
    try:
        if optimizer is not None:
            optimizer = native_optimizer(optimizer, {}).type  # FusedAdam is AdamW
        if parameters is not None:
            if layout or batch or sequence or machine or processes or as_json:
                raise ValueError(
                    "--layout, --batch, --sequence, --machine, --processes and --json are only for a MODEL. Name one."
                )
            _states(parameters, data, precision or "fp32", optimizer or "adamw")
            return
        assert model is not None
        if data > 1:
            raise ValueError(f"--data is only for --parameters. Write --layout data={data}.")
        run = _run(model, layout or "", batch, sequence, precision, optimizer, processes)
        run.memory.check(run.layout, run.sequence)
        ranks = run.memory.ranks(run.layout, run.batch, run.sequence, run.schedule)
        limit = None if machine is None else machine_of(machine).memory
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    if as_json:
        rows = [{"pipe": pipe, **each._asdict(), "total": each.total} for pipe, each in enumerate(ranks)]
        shown = {"layout": str(run.layout), "batch": run.batch, "sequence": run.sequence, "ranks": rows, "limit": limit}
        typer.echo(json.dumps(shown))
    else:
        _print(model, run, ranks, limit)


def _run(
    model: str,
    text: str,
    batch: int | None,
    sequence: int | None,
    precision: str | None,
    optimizer: str | None,
    processes: int | None,
) -> _Counted:
    """Return what is to be counted, from a training file or from a model and the options."""
    from ..plugins.plan.memory import ModelMemory, StateOptions
    from ..plugins.plan.parallel_layout import ParallelLayout
    from ..train.file import read_training_file
    from ..train.job import resolve
    from .explain import layout_of_job, memory_of_job

    given = {key: values[0] for key, values in parse_layout(text).items()}
    if model.endswith(TRAINING_FILES):
        if batch or sequence or precision or optimizer or given:
            raise ValueError(
                f"{model} says grid, batch and training. Leave out --layout, --batch, --sequence, --precision and "
                "--optimizer, and change the file."
            )
        job = resolve(read_training_file(model)[0], processes)
        return _Counted(memory_of_job(job), layout_of_job(job), job.batch.train * job.rows, job.sequence, job.schedule)
    if processes is not None:
        raise ValueError(
            f"--processes is only for a training file, but {model} is not one. Write the grid as --layout."
        )
    config, *_ = model_of(model)
    layout = ParallelLayout(**given)
    options = StateOptions(precision=precision or "bf16", optimizer=optimizer or "adamw")
    count = batch or layout.data * layout.microbatch * (_FILL * layout.pipe if layout.pipe > 1 else 1)
    return _Counted(ModelMemory(config, options=options), layout, count, sequence or config.max_position_embeddings)


def _print(model: str, run: _Counted, ranks: Sequence[RankMemory], limit: float | None) -> None:
    """Print a table, and a bar of each pipe rank, whose letters are the kinds."""
    from ..plugins.plan.memory import RankMemory
    from ..plugins.plan.page import figure
    from ..plugins.plan.picture import COLORS

    console = terminal()
    kinds = [kind for kind in RankMemory._fields if any(getattr(each, kind) for each in ranks)]
    layout, counted = str(run.layout), ""
    if run.schedule is not None:  # of a file; its layout has 1F1B in the schedule's place
        counted = f"{run.layout.gpus} processes, "
        layout = layout.replace("schedule=1f1b", f"schedule={run.schedule.name},chunks={run.schedule.chunks}")
    console.print(f"{model} on {counted}{layout}, batch {run.batch:,} of {run.sequence:,} tokens: GiB of a rank")
    console.print(*(Text(f"{_letter(kind)}={kind}", COLORS[kind]) for kind in kinds), sep="  ")
    rows = (
        (pipe, *(figure(getattr(each, kind) / 2**30) for kind in kinds), figure(each.total / 2**30))
        for pipe, each in enumerate(ranks)
    )
    console.print(table(("pipe", *map(_letter, kinds), "total"), rows, left=0))
    most = max(each.total for each in ranks)
    for pipe, each in enumerate(ranks):
        parts = {kind: getattr(each, kind) for kind in kinds}
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
        (stage, *(f"{each / 1e9:.4g}" for each in (*row, row.total, *([narrow.total] if half else []))))
        for stage, (row, narrow) in enumerate(zip(rows, paper, strict=True))
    )
    terminal().print(table(heads, cells, title, left=0))
