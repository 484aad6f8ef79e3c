"""``triax plan``: the fastest layouts that fit on a cluster, and the reasons."""

from __future__ import annotations

import copy
import json
import math
import shlex
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.columns import Columns
from rich.text import Text

from ..base.errors import ConfigError
from ..base.tables import table, terminal
from .output import bar
from .plan_inputs import TRAINING_FILES, model_of, parse_layout

# All else is imported where it is used: `triax --help` needs none of it.
if TYPE_CHECKING:
    from rich.console import Console

    from ..models.config import TransformerConfig
    from ..plugins.plan.cost import Work
    from ..plugins.plan.parallel_layout import ParallelLayout
    from ..plugins.plan.search import Search, Searcher
    from ..train.file import ReadFile
    from ..train.schema import TrainingFile


def plan(
    model: Annotated[
        str | None,
        typer.Option(
            help="A preset such as llama3-70b, a Hugging Face folder or id, a JSON file of fields, or a training file."
        ),
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Number of GPUs. Default: those of --layout.")] = None,
    machine: Annotated[
        str, typer.Option(help="a100-80g, h100-80g, h200, b200, cpu, or a .json or .toml file.")
    ] = "h100-80g",
    measure: Annotated[
        Path | None,
        typer.Option(
            help="Time this machine for a minute, and write its description to this .json file, for --machine."
        ),
    ] = None,
    fit: Annotated[
        Path | None,
        typer.Option(
            help="Fit the efficiencies of --machine to the measured runs of this .csv file, and print each run's "
            "leave-one-out error. --write then writes the machine file (.json)."
        ),
    ] = None,
    sequence: Annotated[int | None, typer.Option(min=1, help="Tokens of a sequence.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences of a step, over all replicas.")] = None,
    precision: Annotated[str, typer.Option(help="bf16, fp16, fp32 or fp64.")] = "bf16",
    products: Annotated[
        str | None,
        typer.Option(
            help="fp8 or mxfp8: dtype of the blocks' matrix products, to compare; triax does not train with it."
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="GB (1e9 bytes) of each GPU, or of each rank of the pipe axis: 80,80,40. Default: the machine's."
        ),
    ] = None,
    speeds: Annotated[
        str | None,
        typer.Option(help="Speed of each rank of the pipe axis, relative to the machine's, such as 1,1,0.5."),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(help="Keys of the layout, such as pipe=8,tensor=8,recompute=full. The others are searched."),
    ] = None,
    why: Annotated[
        tuple[str, str] | None, typer.Option(help="Two layouts: print where the first loses time against the second.")
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens of the whole run, such as 1T: prints its days.")] = None,
    time: Annotated[str | None, typer.Option(help="Time of the whole run, such as 3d: prints its tokens.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of layouts to list.")] = 10,
    write: Annotated[Path | None, typer.Option(help="Write a training file (.yaml) of the best layout.")] = None,
    sbatch: Annotated[
        Path | None, typer.Option(help="Write a Slurm script that runs the training file of --write, too.")
    ] = None,
    layer_costs: Annotated[
        Path | None,
        typer.Option(
            help="Write the costs of each layer of the best layout to this .json file, for `triax schedule --layers`."
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw memory and time to this .png, .svg or .pdf file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with the table and the bars.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the fastest layouts of a training run that fit into a cluster's memory."""
    from ..plugins.plan.cost import CostModel, Work
    from ..plugins.plan.machine import machine as machine_of
    from ..plugins.plan.page import page
    from ..plugins.plan.picture import picture
    from ..plugins.plan.search import Searcher, Space
    from ..train.schema import count, seconds

    try:
        if measure is not None:
            _measure(measure)
            if model is None:
                return
            machine = str(measure)
        if fit is not None:
            from .fit import fit_rows

            fit_rows(fit, machine, write, as_json)
            return
        if sbatch is not None and write is None:
            raise ValueError("--sbatch runs the training file of --write. Give --write run.yaml too.")
        if model is None:
            raise ValueError("--model is missing. Give a preset such as llama3-8b, a folder, or a training file.")
        config, file, source = model_of(model)
        if file is not None:
            sequence, batch = sequence or file.training.sequence, batch or file.batch.size
        sequence = sequence or config.max_position_embeddings
        if batch is None:
            raise ValueError("--batch is missing. Give the sequences of a step, such as --batch 512.")
        work = Work(
            *(config, machine_of(machine), batch, sequence, precision, products),
            speeds=tuple(_numbers("--speeds", speeds)),
            document_mask=file is not None and file.method is None and file.data.document_mask,
        )
        limits = [1e9 * each for each in _numbers("--memory", memory)] or [work.machine.memory]
        limit = max(limits)
        run_seconds, run_tokens = seconds(time), count(tokens)
        if why is not None:
            _why(work, gpus, limit, why, as_json)
            return
        given = parse_layout(layout or "")
        if file is not None and _needs_sequences(file, config, given):
            given["slices"] = [1]
        space = Space(gpus or _gpus(given), given, limits if len(limits) > 1 else limit)
        searcher = Searcher(work, space)
        found = searcher.run(top)
        if not found.layouts:
            _none_fits(searcher, found, asked=layout is not None, as_json=as_json)
        result = _result(found, searcher)
        if given:
            result["chosen"] = _chosen(found.layouts[0].layout, given)
        if as_json:
            typer.echo(json.dumps(result))
        else:
            lines = [*_tight(searcher, found), *_without(result, limit), *_days(work, found, run_tokens, run_seconds)]
            _print(result, limit, lines)
        if plot is not None:
            picture(result["layouts"][:5], plot, limit / 2**30, result["trust"]["line"])
        title = f"{model} on {space.gpus:,} x {work.machine.name}, batch {batch:,} of {sequence:,} tokens"
        if html is not None:
            html.write_text(page(result, title), encoding="utf-8")
        if layer_costs is not None:
            layer_costs.write_text(CostModel(work).layer_costs(found.layouts[0].layout).to_json(), encoding="utf-8")
        if write is not None:
            best = found.layouts[0].layout
            _write(write, model, source, work, best, result["trust"]["line"])
            needed = "" if source is not None else f"; {_TO_SET.format(write)}"
            typer.echo(f"wrote {write}: {best}{needed}", err=as_json)
            if sbatch is not None:
                nodes = _sbatch(sbatch, write, best.gpus)
                typer.echo(f"wrote {sbatch}: {best.gpus} GPUs on {nodes} nodes; sbatch {sbatch}", err=as_json)
    except ConfigError:
        raise
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(str(error)) from error


def _measure(path: Path) -> None:
    """Time this machine, and write a machine file."""
    if path.suffix != ".json":
        raise ValueError(f"--measure is {path}, but it must end in .json.")
    from .measure import measure  # imports torch

    found = measure(path.stem, say=lambda line: typer.echo(line, err=True))
    path.write_text(json.dumps(found.to_dict(), indent=1) + "\n", encoding="utf-8")
    typer.echo(f"{path}: {found.sources['measured']}")


def _numbers(option: str, text: str | None) -> list[float]:
    """Return the numbers of an option, which stand with commas."""
    try:
        found = [float(each) for each in (text or "").split(",") if each.strip()]
    except ValueError:
        found = [0.0]
    if not all(0 < each < math.inf for each in found):
        raise ValueError(f"{option} is {text!r}. Give a number above 0, or one for each rank of the pipe axis: 2,2,1.")
    return found


def _needs_sequences(file: TrainingFile, config: TransformerConfig, given: dict[str, list[Any]]) -> bool:
    """Return True if the run of a training file cannot cut sequences into slices."""
    from ..train.job import needs_sequences

    reason = needs_sequences(file) or config.refuses_slices(file.model.experts.arguments)
    if reason is not None and given.get("slices", [1]) != [1]:
        raise ValueError(f"--layout has slices, but {reason}. Leave them out.")
    return reason is not None


def _gpus(given: dict[str, list[Any]]) -> int:
    if "data" not in given:
        raise ValueError("--gpus is missing. Give the number of GPUs, or a --layout with data.")
    return math.prod(given.get(axis, [1])[0] for axis in ("pipe", "data", "context", "tensor"))


def _chosen(layout: ParallelLayout, given: dict[str, list[Any]]) -> dict[str, Any]:
    """Return the keys of a layout that ``--layout`` left to the search."""
    return {each.name: getattr(layout, each.name) for each in fields(layout) if each.name not in given}


def _trust(work: Work, seconds: float | None) -> dict[str, Any]:
    """Return the first entry of a JSON object: how far the times can be trusted."""
    from ..plugins.plan.trust import trust

    return trust(work.machine, work.config, work.products or work.precision).to_dict(work.machine.name, seconds)


def _result(found: Search, searcher: Searcher) -> dict[str, Any]:
    """Return the object that ``--json`` prints."""
    from ..plugins.plan.search import to_dict

    work = searcher.work
    layouts = [to_dict(planned, work) for planned in found.layouts]
    for layout, planned in zip(layouts, found.layouts, strict=True):
        if (plain := searcher.without_changes(planned.layout)) is not None:
            layout["without"] = to_dict(plain, work)
    trusted = _trust(work, layouts[0]["step_s"] if layouts else None)
    for layout in layouts:
        layout["interval_s"] = [layout["step_s"] * trusted["low"], layout["step_s"] * trusted["high"]]
    return {
        "trust": trusted,
        "layouts": layouts,
        "considered": found.considered,
        "excluded": found.excluded,
        "seconds": found.seconds,
    }


def _none_fits(searcher: Searcher, found: Search, asked: bool, as_json: bool) -> None:
    """Say what is short and the nearest change; of a given layout, go on with what it would take."""
    from ..plugins.plan.search import Searcher, Space

    space, work, limit = searcher.space, searcher.work, searcher.limit
    if found.nearest is None:
        raise ValueError(
            f"no layout is possible: {space.gpus} GPUs, batch {work.batch} and sequence {work.sequence} do not go "
            f"together with {searcher.impossible()}."
        )
    least = found.nearest
    short = (least.memory.total - limit) / 2**30
    states, rest = least.memory.states / 2**30, (least.memory.total - least.memory.states) / 2**30
    message = (
        f"no layout fits. The smallest, {least.layout}, needs {least.memory.total / 2**30:.1f} GiB of "
        f"{limit / 2**30:.1f} GiB on a GPU ({states:.1f} of model states, {rest:.1f} of activations, temporaries and "
        f"margin), which is {short:.1f} GiB short. {_change(searcher)}"
    )
    if not asked:
        if as_json:
            typer.echo(json.dumps(_result(found, searcher)))
        raise ValueError(message)
    typer.echo(f"triax plan: {message}", err=True)
    given = {"pipe", "tensor", "zero", "recompute"} <= set(space.given)
    found.layouts = Searcher(work, Space(space.gpus, space.given, math.inf)).run(1).layouts if given else [least]


def _change(searcher: Searcher) -> str:
    """Return the nearest change with which a layout fits: more GPUs, fewer keys given, or more memory."""
    from ..plugins.plan.search import Searcher, Space

    space, work = searcher.space, searcher.work
    if space.given and not searcher.unequal:
        free = Searcher(work, Space(space.gpus, {}, searcher.limit)).run(1).layouts
        if free:
            return f"Without --layout, {free[0].layout} fits."
    for factor in (2, 4, 8, 16):
        gpus = space.gpus * factor
        if Searcher(work, Space(gpus, space.given, searcher.limit)).run(1).layouts:
            return f"It fits on {gpus} GPUs."
    return "Give GPUs with more memory, a shorter --sequence, or a smaller model."


def _tight(searcher: Searcher, found: Search) -> list[str]:
    """Return a line about a first layout that fits, but leaves less than ``ROOM`` of the memory free."""
    from ..plugins.plan.page import figure
    from ..plugins.plan.search import ROOM, Searcher, Space

    first, limit, space = found.layouts[0], searcher.limit, searcher.space
    enough = (1 - ROOM) * limit
    if searcher.unequal or not enough < first.memory.total <= limit:
        return []
    others = Searcher(searcher.work, Space(space.gpus, space.given, enough)).run(1).layouts
    line = f"the first leaves {figure((limit - first.memory.total) / 2**30)} GiB free, less than {ROOM:.0%}: "
    if not others:
        return [line + "so do all that fit. Try it with triax train --dry before you have the GPUs"]
    other = others[0]
    takes = f"takes {figure(other.time.seconds)} s and {figure(other.memory.total / 2**30)} GiB"
    return [f"{line}{other.layout} {takes}; --memory {enough / 1e9:.1f} puts it first"]


def _without(result: dict[str, Any], limit: float) -> list[str]:
    """Return a line about what the options of the best layout's schedule save."""
    from ..plugins.plan.page import figure
    from ..plugins.plan.parallel_layout import CHANGES
    from ..plugins.plan.picture import name_of

    best = result["layouts"][0]
    plain = best.get("without")
    if plain is None:
        return []
    changed = [f"{name}={best[name]}" for name in (*CHANGES, "schedule") if best[name] != plain[name]]
    held, other = (sum(each["memory_gib"].values()) for each in (best, plain))
    fits = "" if other <= limit / 2**30 else ", which does not fit"
    line = (
        f"chosen for the first: {', '.join(changed)}, which takes {figure(best['step_s'])} s and {figure(held)} GiB; "
        f"{name_of(plain)} takes {figure(plain['step_s'])} s and {figure(other)} GiB{fits}"
    )
    return [line, "these times are simulated: no run from which the interval is made has such an option"]


def _days(work: Work, found: Search, tokens: int | None, given: float | None) -> list[str]:
    """Return lines about the time of the whole run."""
    from ..plugins.plan.page import figure

    step, each = found.layouts[0].time.seconds, work.batch * work.sequence
    lines = []
    if tokens is not None:
        steps = math.ceil(tokens / each)
        lines.append(f"{tokens:.4g} tokens: {steps:,} steps, {figure(steps * step / 86400)} days")
        if given is not None:
            needed = steps * step / given
            fits = "within" if needed <= 1 else f"{figure(needed)} times as long as"
            lines.append(f"that is {fits} the given {figure(given / 86400)} days")
    elif given is not None:
        lines.append(f"{figure(given / 86400)} days: {figure(given / step * each)} tokens")
    return lines


def _why(work: Work, gpus: int | None, limit: float, pair: tuple[str, str], as_json: bool) -> None:
    """Compare two layouts, term by term."""
    from ..plugins.plan.page import figure
    from ..plugins.plan.picture import name_of
    from ..plugins.plan.search import Searcher, Space, to_dict

    found = []
    for text in pair:
        given = parse_layout(text)
        searcher = Searcher(work, Space(gpus or _gpus(given), given, limit))
        best = searcher.run(1).layouts or Searcher(work, Space(searcher.space.gpus, given, math.inf)).run(1).layouts
        if not best:
            raise ValueError(f"no layout is possible with {text}, because {searcher.impossible()}.")
        found.append(to_dict(best[0], work))
    (a, b), trusted = found, _trust(work, None)
    if as_json:
        times = {kind: a["time_s"][kind] - b["time_s"][kind] for kind in a["time_s"]}
        sizes = {kind: a["memory_gib"][kind] - b["memory_gib"][kind] for kind in a["memory_gib"]}
        typer.echo(
            json.dumps({"trust": trusted, "layouts": found, "difference": {"time_s": times, "memory_gib": sizes}})
        )
        return
    console = terminal()
    console.print(trusted["line"], f"A: {name_of(a)}", f"B: {name_of(b)}", sep="\n")
    for key, unit in (("time_s", "seconds a step"), ("memory_gib", "GiB on the fullest GPU")):
        kinds = sorted(a[key], key=lambda kind: -abs(a[key][kind] - b[key][kind]))
        pairs = {kind: (a[key][kind], b[key][kind]) for kind in kinds if a[key][kind] or b[key][kind]}
        pairs["all"] = sum(a[key].values()), sum(b[key].values())
        rows = ((kind, figure(x), figure(y), f"{x - y:+.4g}") for kind, (x, y) in pairs.items())
        console.print(table(("", "A", "B", "A - B"), rows, unit))


def _print(result: dict[str, Any], limit: float, lines: list[str]) -> None:
    """Print the table, and the bars of the best layout."""
    from ..plugins.plan.page import HEADS, cells

    console = terminal()
    console.print(result["trust"]["line"])
    console.print(table(HEADS, map(cells, result["layouts"])))
    best = result["layouts"][0]
    _bar(console, "memory of the first, GiB", best["memory_gib"], limit / 2**30)
    _bar(console, "time of the first, seconds", best["time_s"], None)
    excluded = ", ".join(f"{number:,} {_plural(reason, number)}" for reason, number in result["excluded"].items())
    searched = f"{result['considered']:,} layouts in {result['seconds']:.2f} s: {excluded or 'none excluded'}"
    if "chosen" in result:
        lines = [
            *lines,
            f"chosen by the search: {', '.join(f'{name}={value}' for name, value in result['chosen'].items())}",
        ]
    console.print(*lines, searched, sep="\n")


def _plural(reason: str, number: int) -> str:
    return reason if number == 1 else reason.replace("does not", "do not")


def _bar(console: Console, title: str, kinds: dict[str, float], limit: float | None) -> None:
    """Print one bar of colored parts, and its key."""
    from ..plugins.plan.page import figure
    from ..plugins.plan.picture import COLORS

    shown, total = {kind: value for kind, value in kinds.items() if value > 0}, sum(kinds.values())
    share = {kind: f" ({value / total:.1%})" if kind == "bubble" else "" for kind, value in shown.items()}
    names = {kind: f" {kind} {figure(value)}{share[kind]}" for kind, value in shown.items()}
    key = Columns([Text("█", COLORS[kind]) + Text(name) for kind, name in names.items()])
    of = "" if limit is None else f" of {figure(limit)}"
    parts = bar(shown, max(total, limit or 0.0), console.width - 2)
    console.print(f"{title}: {figure(total)}{of}", parts, key, sep="\n", soft_wrap=False)


_WRITTEN = "# written by triax plan"  # first line of its training files, which it may write again
_TO_SET = (
    "set training.steps, training.learning_rate and data.training in it. Its data.document_mask is false; if you set "
    "it to true, triax plan --model {} counts the mask's bytes"
)


def _write(path: Path, model: str, source: ReadFile | None, work: Work, layout: ParallelLayout, note: str) -> None:
    """Write a training file of a layout; other keys are those of the training file that was given."""
    import yaml

    from ..plugins.plan.cost import CostModel
    from ..plugins.plan.parallel_layout import RECOMPUTATION

    if path.suffix not in TRAINING_FILES[:2]:
        raise ValueError(f"--write is {path}, but it must end in .yaml.")
    if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(_WRITTEN):
        raise ValueError(f"--write is {path}, which exists and is not a file of triax plan. Give another name.")
    if layout.recompute not in RECOMPUTATION or work.products:
        raise ValueError(
            f"The plan has recompute={layout.recompute} and --products {work.products}, which triax train cannot run. "
            "Leave them out with --write."
        )
    content: dict[str, Any] = {} if source is None else copy.deepcopy(source.values)
    if source is None:
        shape: dict[str, Any] = {"preset": model}
        if Path(model).is_dir():  # of a folder without weights only the shape can be trained
            shape = {"folder": model, "weights": any(Path(model).glob("*.safetensors"))}
        if model.endswith(".json"):
            raise ValueError("--write needs a model that triax train can build. Give a preset or a folder.")
        data = {"training": "tokens", "document_mask": work.document_mask}
        content = {"model": shape, "data": data, "training": {"steps": 1000}}
    sizes = ("pipe", "data", "context", "tensor", "expert")
    content["grid"] = {name: getattr(layout, name) for name in sizes}
    content["grid"]["sequence_parallel"] = bool(layout.sequence_parallel)
    costs = CostModel(work)
    section = costs.schedule_options(layout).plain(given=True)
    content["schedule"] = {"name": layout.schedule, "chunks": layout.chunks, **section}
    if work.speeds:  # a cut that no run makes by itself
        content["schedule"]["partition"] = costs.memory.cuts(layout.pipe)
    zero: Any = layout.zero
    if layout.offload:
        zero = {"stage": layout.zero, "offload_optimizer": {"device": "cpu"}}
    content |= {
        "training": {**content.get("training", {}), "sequence": work.sequence},
        "batch": {"size": work.batch, "microbatch": layout.microbatch},
        "precision": work.precision,
        "recompute": layout.recompute,
        "zero": zero,
    }
    path.write_text(f"{_WRITTEN}\n# {note}\n" + yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def _sbatch(path: Path, training: Path, gpus: int, node: int = 8) -> int:
    """Write a Slurm script that runs a training file, and return its number of nodes."""
    each = min(gpus, node)
    if gpus % each:
        raise ValueError(f"--sbatch uses nodes of {node} GPUs, but {gpus} GPUs are not a whole number of nodes.")
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={training.stem}",
        f"#SBATCH --nodes={gpus // each}",
        f"#SBATCH --ntasks-per-node={each}",
        f"#SBATCH --gpus-per-node={each}",
        "#SBATCH --time=24:00:00",
        "#SBATCH --signal=USR1@300",
        "#SBATCH --requeue",
        "#SBATCH --output=%x-%j.log",
        "",
        "# SIGUSR1 comes 300 s before the time limit: the run saves a checkpoint and puts the job back into the queue.",
        f"srun --cpu-bind=cores triax train {shlex.quote(str(training))}",
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return gpus // each
