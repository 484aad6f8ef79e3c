"""``triax plan``: the fastest layouts that fit on a cluster, and the reasons."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from ..base.errors import ConfigError
from ..base.files import PICTURES
from ..options.base import REQUIRED, Options, option
from .flags import one_line_errors, with_flags
from .foreign_options import Command
from .plan_files import write_sbatch, write_training_file
from .plan_inputs import model_of, parse_layout
from .plan_text import (
    chosen,
    print_difference,
    print_plan,
    result_of,
    run_lines,
    short_of_memory,
    tight,
    trust_of,
    without,
)
from .verbs import VerbGroup, group

# All else is imported where it is used: `triax --help` needs none of it.
if TYPE_CHECKING:
    from ..models.config import TransformerConfig
    from ..plugins.plan.work import Work
    from ..train.file import ReadFile
    from ..train.sections import TrainingFile

plan = group("plan", VerbGroup, "triax plan --model ... is triax plan search --model ....")


@dataclass(frozen=True, kw_only=True)
class RunFlags(Options):
    """Flags of ``triax plan`` about the run and the cluster."""

    model: str = option(
        REQUIRED, "A preset such as llama3-70b, a Hugging Face folder or id, a JSON file of fields, or a training file."
    )
    gpus: int | None = option(None, "Number of GPUs. Default: those of the layout.", least=1)
    machine: str = option("h100-80g", "a100-80g, h100-80g, h200, b200, cpu, or a .json or .toml file.")
    sequence: int | None = option(None, "Tokens of a sequence. Default: the model's maximum.", least=1)
    batch: int | None = option(None, "Sequences of a step, over all replicas.", least=1)
    precision: Literal["bf16", "fp16", "fp32", "fp64"] = option("bf16", "Dtype of the weights.")
    products: str | None = option(
        None, "fp8 or mxfp8: dtype of the blocks' matrix products, to compare; triax does not train with it."
    )
    memory: float | tuple[float, ...] | None = option(
        None, "GB (1e9 bytes) of each GPU, or of each rank of the pipe axis: 80,80,40. Default: the machine's.", above=0
    )
    speeds: tuple[float, ...] | None = option(
        None, "Speed of each rank of the pipe axis, relative to the machine's, such as 1,1,0.5.", above=0
    )
    json: bool = option(False, "Print one JSON object.")


@dataclass(frozen=True, kw_only=True)
class SearchFlags(RunFlags):
    """Flags of ``triax plan search``."""

    layout: str | None = option(
        None, "Keys of the layout, such as pipe=8,tensor=8,recompute=full. The others are searched."
    )
    tokens: str | None = option(None, "Tokens of the whole run, such as 1T: prints its days.")
    time: str | None = option(None, "Time of the whole run, such as 3d: prints its tokens.")
    top: int = option(10, "Number of layouts to list.", least=1)
    output: Path | None = option(None, "Write a training file (.yaml) of the best layout.", writes=(".yaml", ".yml"))
    sbatch: Path | None = option(
        None,
        "With --output: write a Slurm script that runs the training file, too.",
        needs="output",
        writes=("",),
    )
    layer_costs: Path | None = option(
        None,
        "Write the costs of each layer of the best layout to this .json file, for triax schedule cuts.",
        writes=(".json",),
    )
    plot: Path | None = option(None, "Draw memory and time to this .png, .svg or .pdf file.", writes=PICTURES)
    html: Path | None = option(None, "Write a page with the table and the bars.", writes=(".html",))


class _PlannedRun(NamedTuple):
    """Run to plan: the work, the GB of each GPU, and the training file that it comes from, checked and as read."""

    work: Work
    limits: list[float]
    file: TrainingFile | None
    source: ReadFile | None


@plan.command(cls=Command)
@with_flags
@one_line_errors
def search(flags: SearchFlags) -> None:
    """Print the fastest layouts of a training run that fit into a cluster's memory."""
    from ..plugins.plan.cost import CostModel
    from ..plugins.plan.page import page
    from ..plugins.plan.picture import picture
    from ..plugins.plan.search import Searcher, Space
    from ..train.sections import count, seconds

    run_seconds, run_tokens = seconds(flags.time), count(flags.tokens)
    run, given = _run(flags), parse_layout(flags.layout or "")
    work, limit = run.work, max(run.limits)
    if run.file is not None and _needs_sequences(run.file, work.config, given):
        given["slices"] = [1]
    space = Space(flags.gpus or _gpus(given), given, run.limits if len(run.limits) > 1 else limit)
    searcher = Searcher(work, space)
    found = searcher.run(flags.top)
    if not found.layouts:
        said = short_of_memory(searcher, found)
        if flags.layout is None:
            if flags.json:
                typer.echo(json.dumps(result_of(found, searcher)))
            raise ConfigError(said)
        typer.echo(f"triax plan: {said}", err=True)
        fixed = {"pipe", "tensor", "zero", "recompute"} <= set(given)
        assert found.nearest is not None
        found.layouts = Searcher(work, Space(space.gpus, given, math.inf)).run(1).layouts if fixed else [found.nearest]
    result, best = result_of(found, searcher), found.layouts[0].layout
    if given:
        result["chosen"] = chosen(best, given)
    if flags.json:
        typer.echo(json.dumps(result))
    else:
        lines = [*tight(searcher, found), *without(result, limit), *run_lines(work, found, run_tokens, run_seconds)]
        print_plan(result, limit, lines)
    trust = result["trust"]["line"]
    if flags.plot is not None:
        picture(result["layouts"][:5], flags.plot, limit / 2**30, trust)
    if flags.html is not None:
        size = f"batch {work.batch:,} of {work.sequence:,} tokens"
        title = f"{flags.model} on {space.gpus:,} x {work.machine.name}, {size}"
        flags.html.write_text(page(result, title), encoding="utf-8")
    if flags.layer_costs is not None:
        flags.layer_costs.write_text(CostModel(work).layer_costs(best).to_json(), encoding="utf-8")
    if flags.output is not None:
        write_training_file(flags.output, flags.model, run.source, work, best, trust)
        needed = "" if run.source is not None else "; set training.steps, training.learning_rate, data.training"
        typer.echo(f"wrote {flags.output}: {best}{needed}", err=flags.json)
        if flags.sbatch is not None:
            nodes = write_sbatch(flags.sbatch, flags.output, best.gpus)
            said = f"wrote {flags.sbatch}: {best.gpus} GPUs on {nodes} nodes; sbatch {flags.sbatch}"
            typer.echo(said, err=flags.json)


@plan.command(cls=Command)
@with_flags
@one_line_errors
def compare(
    a: Annotated[str, typer.Argument(help="A layout, such as tensor=8,zero=1. The search chooses its other keys.")],
    b: Annotated[str, typer.Argument(help="Another layout.")],
    flags: RunFlags,
) -> None:
    """Print where one layout of a run loses time against another, term by term."""
    from ..plugins.plan.search import Searcher, Space, to_dict

    run, pair = _run(flags), []
    for text in (a, b):
        given = parse_layout(text)
        gpus = flags.gpus or _gpus(given)
        searcher = Searcher(run.work, Space(gpus, given, max(run.limits)))
        best = searcher.run(1).layouts or Searcher(run.work, Space(gpus, given, math.inf)).run(1).layouts
        if not best:
            raise ValueError(f"no layout is possible with {text}, because {searcher.impossible()}.")
        pair.append(to_dict(best[0], run.work))
    trust = trust_of(run.work, None)
    if flags.json:
        kinds = ("time_s", "memory_gib")
        difference = {key: {kind: pair[0][key][kind] - pair[1][key][kind] for kind in pair[0][key]} for key in kinds}
        typer.echo(json.dumps({"trust": trust, "layouts": pair, "difference": difference}))
    else:
        print_difference(pair[0], pair[1], trust["line"])


def _run(flags: RunFlags) -> _PlannedRun:
    """Return the run that flags describe."""
    from ..plugins.plan.machine import machine
    from ..plugins.plan.work import Work
    from ..train.data import rows_here

    config, file, source = model_of(flags.model)
    sequence, batch, run = flags.sequence, flags.batch, dict[str, Any]()
    if file is not None:
        sequence, batch = sequence or file.training.sequence, batch or file.batch.size
        rows = rows_here(file, sequence or config.max_position_embeddings)
        run = {"rows": rows, "balanced": file.batch.balance, "lend": file.model.experts.lend or 0}
    if batch is None:
        raise ValueError("--batch is missing. Give the sequences of a step, such as --batch 512.")
    work = Work(
        *(config, machine(flags.machine), batch, sequence or config.max_position_embeddings),
        *(flags.precision, flags.products),
        speeds=flags.speeds or (),
        **run,
    )
    memory = flags.memory if isinstance(flags.memory, tuple) else (flags.memory or work.machine.memory / 1e9,)
    return _PlannedRun(work, [1e9 * size for size in memory], file, source)


def _needs_sequences(file: TrainingFile, config: TransformerConfig, given: dict[str, list[Any]]) -> bool:
    """Return True if the run of a training file cannot cut sequences into slices."""
    from ..train.model_choice import needs_sequences

    reason = needs_sequences(file) or config.refuses_slices(file.model.experts.arguments)
    if reason is not None and given.get("slices", [1]) != [1]:
        raise ValueError(f"--layout has slices, but {reason}. Leave them out.")
    return reason is not None


def _gpus(given: dict[str, list[Any]]) -> int:
    if "data" not in given:
        raise ValueError("--gpus is missing. Give the number of GPUs, or a layout with data.")
    return math.prod(given.get(axis, [1])[0] for axis in ("pipe", "data", "context", "tensor"))
