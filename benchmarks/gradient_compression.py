"""Loss and bytes of compressed gradients and local updates: one GPT, trained by each method.

    python benchmarks/gradient_compression.py                             # every method without a result yet
    python benchmarks/gradient_compression.py --methods none,topk         # these
    python benchmarks/gradient_compression.py --table docs/compression.md # and put the table there

A GPT learns the bytes of Python's standard library, on replicas alone, in stage 0 of ZeRO but for "zero-3"
and "zero++". Each method's result is kept in a file as soon as it is there, so that a run that ended goes on; results
of other settings are not used. Bytes are those that one rank sent over the data axis, counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import torch
from corpus import find, tokens

from triax import DiLoCo, GradientReduction, LocalSGD, Optimizer, Zero
from triax.base.errors import ConfigError
from triax.grid.environment import read_environment
from triax.grid.launcher.launch import launch
from triax.plugins.gradient_compression import PowerSGD, TopK
from triax.train.job import Job, resolve
from triax.train.loop import TrainingRun
from triax.train.sections import TrainingFile

BEGIN, END = "<!-- benchmarks/gradient_compression.py -->", "<!-- end -->"


def changed(adam: Optimizer, name: str = "AdamW", **arguments: Any) -> Optimizer:
    """An optimizer with the arguments of another one, and some more."""
    return Optimizer(name, **adam.arguments | arguments)


# name -> options in place of those of the uncompressed run, given its Adam and the number of steps. Top-k clips each
# replica's gradient before it is kept, as its paper does, and its Adam has a variance that lasts as long as elements
# wait for their turn. Each of DiLoCo's replicas has the batch that the run beside it has in all, as Douillard et al.
# have it; "shared": a part of that, as in the other rows. "lamb" is 1-bit LAMB that never leaves its warm-up.
METHODS: dict[str, Callable[[Optimizer, int], dict[str, Any]]] = {
    "none": lambda adam, steps: {},
    "none (seed 1)": lambda adam, steps: {"seed": 1},
    "none (seed 2)": lambda adam, steps: {"seed": 2},
    "none (seed 3)": lambda adam, steps: {"seed": 3},
    "fp16": lambda adam, steps: {"reduction": GradientReduction(dtype="fp16")},
    "bf16": lambda adam, steps: {"reduction": GradientReduction(dtype="bf16")},
    "topk": lambda adam, steps: {
        "optimizer": changed(adam, betas=[0.9, 0.999]),
        "clip": None,
        "compression": TopK(
            ratio=0.01, start_step=2 * steps // 3, warmup_steps=steps // 6, clip=1.0, values=torch.float16
        ),
    },
    "powersgd": lambda adam, steps: {"compression": PowerSGD(rank=4, start_step=steps // 10)},
    "onebit-adam": lambda adam, steps: {"optimizer": changed(adam, "OneBitAdam", freeze_step=steps // 3)},
    "zero-one-adam": lambda adam, steps: {"optimizer": changed(adam, "ZeroOneAdam")},
    "lamb": lambda adam, steps: {"optimizer": changed(adam, "OneBitLamb", freeze_step=steps)},
    "onebit-lamb": lambda adam, steps: {"optimizer": changed(adam, "OneBitLamb", freeze_step=steps // 3)},
    "zero-3": lambda adam, steps: {"zero": Zero(stage=3)},
    "zero++": lambda adam, steps: {"zero": Zero(stage=3, quantized_weights=True, quantized_gradients=True)},
    "local-sgd": lambda adam, steps: {"local_updates": LocalSGD(every=10)},
    "diloco": lambda adam, steps: {"local_updates": DiLoCo(every=50)},
    "diloco (shared)": lambda adam, steps: {"local_updates": DiLoCo(every=50, outer_lr=0.8, outer_momentum=0.4)},
    "diloco (shared; from a third on)": lambda adam, steps: {
        "local_updates": DiLoCo(every=50, start_step=steps // 3, outer_lr=1.0, outer_momentum=0.5)
    },
}
WHOLE_BATCH = ("diloco",)  # each replica has a whole batch
SETTINGS = ("data", "layers", "width", "heads", "sequence", "steps", "batch", "microbatch", "validation", "text")


def main() -> None:
    """Train by each method, and show the table."""
    given = parse()
    data = tokens(find(given.text), given.runs / "corpus")  # here once, before there are ranks
    settings = json.loads(json.dumps({key: getattr(given, key) for key in SETTINGS}, default=str))
    file = given.results or given.runs / "compression.json"
    wanted = given.methods.split(",") if given.methods else [*METHODS]
    unknown = [name for name in wanted if name not in METHODS]
    if unknown:
        raise SystemExit(f"there is no method {unknown[0]!r}: choose from {', '.join(METHODS)}")
    for name in wanted:
        job = configured(given, data, name)
        if read(file, settings).get(name, {}).get("options") == plain(job) and not given.again:
            continue
        code = launch(train, job, name, file, settings, ranks=given.data, topology=job.topology)
        if code:
            keep(file, settings, name, {"options": plain(job), "refused": f"it failed, with exit code {code}"})
    text = table(read(file, settings))
    print(text)
    if given.table is not None:
        put(given.table, text, settings)


def parse() -> argparse.Namespace:
    """The command line; by default the main job, for 600 steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--methods", metavar="A,B", help="of: " + ", ".join(METHODS))
    add("--again", action="store_true", help="those too that are in the file of results")
    add("--steps", type=int, default=600)
    add("--data", type=int, default=4, help="size of the data axis")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--sequence", type=int, default=128)
    add("--batch", type=int, default=32)
    add("--microbatch", type=int, default=4)
    add("--validation", type=int, default=256, help="held-out sequences")
    add("--text", nargs="+", default=[], metavar="PATH", help="files and folders (Python's standard library)")
    add("--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="where text and results are kept (runs)")
    add("--results", type=Path, metavar="FILE", help="of results (compression.json in --runs)")
    add("--table", type=Path, metavar="FILE", help="a Markdown file, between whose two marks the table goes")
    return parser.parse_args()


def training_file(given: argparse.Namespace, data: dict[str, Any], seed: int, batch: int) -> TrainingFile:
    """The training that all methods share."""
    shape = {
        "vocab_size": 256,
        "max_position_embeddings": given.sequence,
        "hidden_size": given.width,
        "num_hidden_layers": given.layers,
        "num_attention_heads": given.heads,
    }
    values = {
        "name": "compression",
        "runs": str(given.runs),
        "seed": seed,
        "model": {"preset": "bytes-small", "overrides": shape},
        "data": {**data, "document_mask": False},
        "grid": {"data": given.data},
        "training": {
            "steps": given.steps,
            "learning_rate": {"peak": 4e-3, "warmup_steps": min(50, given.steps // 2)},
        },
        "batch": {"size": batch, "microbatch": given.microbatch},
        "precision": "fp32",
        "optimizer": {"type": "AdamW", "weight_decay": 0.1},
        "clip": 1.0,
        "zero": 0,
        "evaluate": {"every": 100, "sequences": given.validation},
        "checkpoint": False,
        "monitor": {"trace": False},
    }
    return TrainingFile.of(values)


def configured(given: argparse.Namespace, data: dict[str, Any], name: str) -> Job:
    """The run of a method, with all options of its engine."""
    batch = given.batch * (given.data if name in WHOLE_BATCH else 1)
    job = resolve(training_file(given, data, 0, batch))
    adam = job.options.optimizer
    assert isinstance(adam, Optimizer)
    silent = job.options.monitor.changed(json=None)
    found = job.options.changed(monitor=silent, **METHODS[name](adam, given.steps))
    return replace(resolve(training_file(given, data, found.seed, batch)), options=found)


def plain(job: Job) -> dict[str, Any]:
    """The options of a run's engine, as a JSON file has them."""
    found: dict[str, Any] = json.loads(json.dumps(job.options.plain(given=True)))
    return found


def train(job: Job, name: str, file: Path, settings: dict[str, Any]) -> None:
    """Train one row of the table on this rank; rank 0 keeps the result."""
    try:
        run = TrainingRun(job)
    except ConfigError as error:
        environment = read_environment()
        if environment is None or environment.rank == 0:
            keep(file, settings, name, {"options": plain(job), "refused": str(error)})
        return

    engine, first = run.engine, run.grid.rank == 0
    sent, losses, start = [], [], time.monotonic()
    for step in range(1, job.steps + 1):
        losses.append(float(engine.train_batch()))
        sent.append(on_data(engine.traffic_report()["sent"]))
        if first and (step % 50 == 0 or step == job.steps):
            took = time.monotonic() - start
            print(f"{name}: step {step}, loss {losses[-1]:.4f}, {sent[-1]:.0f} bytes, {took:.0f} s", flush=True)
    engine.leave()  # under local updates: what is measured is what all have
    assert run.evaluation is not None
    validation = run.evaluation.loss()
    if first:
        late = sent[-max(1, job.steps // 3) :]
        result = {
            "options": plain(job),
            "validation": validation,
            "training": sum(losses[-20:]) / len(losses[-20:]),
            "bytes": sum(sent) / len(sent),
            "late": sum(late) / len(late),
            "seconds": time.monotonic() - start,
            "parameters": job.model.parameter_count,
        }
        keep(file, settings, name, result)
    run.grid.close()


def on_data(sent: dict[str, Any]) -> float:
    """Bytes of a step on the data axis, and on its parts: "data within" and "data between" hosts."""
    axes = [collectives for axis, collectives in sent.items() if axis.startswith("data")]
    return float(sum(entry["bytes"] for collectives in axes for entry in collectives.values()))


# ------------------------------------------------------------------------------------- results, table


def read(file: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The results that were kept, if they are of these settings."""
    if not file.exists():
        return {}
    kept = json.loads(file.read_text())
    found: dict[str, Any] = kept["results"] if kept["settings"] == settings else {}
    return found


def keep(file: Path, settings: dict[str, Any], name: str, result: dict[str, Any]) -> None:
    """Put one result to the others."""
    results = {**read(file, settings), name: result}
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".part")
    temporary.write_text(json.dumps({"settings": settings, "results": results}, indent=1))
    temporary.replace(file)


def table(results: dict[str, Any]) -> str:
    """The results in Markdown, in the order of ``METHODS``."""
    base = results.get("none", {})
    lines = [
        "| method | validation loss | to none | bytes a step | in the last third | of none's |",
        "|---|---|---|---|---|---|",
    ]
    for name in METHODS:
        row = results.get(name)
        if row is None:
            continue
        if "refused" in row:
            lines.append(f"| {name} | refused: {shorten(row['refused'].replace('|', '/'), 150)} | | | | |")
            continue
        loss = to = ""
        if "validation" in base:
            loss = f"{100 * (row['validation'] / base['validation'] - 1):+.2f} %"
            to = f"1/{base['late'] / row['late']:.1f}" if row["late"] else "0"
        lines.append(f"| {name} | {row['validation']:.4f} | {loss} | {row['bytes']:,.0f} | {row['late']:,.0f} | {to} |")
    return "\n".join(lines)


def put(file: Path, text: str, settings: dict[str, Any]) -> None:
    """Write the table between the two marks of a file."""
    before, found, rest = file.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not found or not end:
        raise SystemExit(f"{file} has no line {BEGIN} with a line {END} behind it: write both where the table belongs")
    said = (
        f"{settings['layers']} layers of width {settings['width']}, {settings['steps']} steps of {settings['batch']} "
        f"sequences of {settings['sequence']} bytes on {settings['data']} replicas."
    )
    file.write_text(f"{before}{BEGIN}\n{said}\n\n{text}\n{END}{after}")


if __name__ == "__main__":
    main()
