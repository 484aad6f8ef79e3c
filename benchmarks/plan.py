"""Predicted and measured step times of 30 layouts on this machine.

    triax plan --measure here.json
    python benchmarks/plan.py here.json                        # all layouts, of 1, 2, 4 and 8 processes: 3 minutes
    python benchmarks/plan.py here.json --processes 1 2 --results times.jsonl
    python benchmarks/plan.py here.json --processes 4 8 --results times.jsonl   # adds to the file, and prints all of it
    python benchmarks/plan.py here.json --processes --results times.jsonl       # prints the file

A layout's time is the median of its steps on the slowest rank. The machine file comes from ``--measure`` alone: nothing
in it or in the model is fitted to these times. Bytes held and sent are those that the ranks counted: ``=`` stands for
those of ``plan/``.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import triax
from triax.launcher.launch import launch
from triax.models.config import GPTConfig, LlamaConfig, TransformerConfig
from triax.models.gpt import gpt_layers
from triax.models.layers import NextTokenLoss
from triax.models.llama import llama_layers
from triax.pipe.schedules.registry import RECIPES
from triax.plan.cost import CostModel, Work
from triax.plan.machine import machine
from triax.plan.memory import ModelMemory
from triax.plan.parallel_layout import ParallelLayout
from triax.plan.picture import name_of
from triax.plan.traffic import sent_bytes

BATCH, WARM_UP = 8, 2
KINDS = ("parameters", "gradients", "masters", "optimizer", "buffers")
SMALL: dict[str, Any] = {"vocab_size": 512, "num_hidden_layers": 8}
MODELS: dict[str, tuple[TransformerConfig, Any, int]] = {  # configuration, maker of its layers, tokens of a sequence
    "gpt": (
        GPTConfig(hidden_size=256, num_attention_heads=4, max_position_embeddings=128, dropout=0.0, **SMALL),
        gpt_layers,
        128,
    ),
    "llama": (
        LlamaConfig(
            hidden_size=192,
            num_attention_heads=6,
            num_key_value_heads=2,
            intermediate_size=512,
            max_position_embeddings=256,
            **SMALL,
        ),
        llama_layers,
        256,
    ),
}
LAYOUTS: dict[int, list[tuple[str, dict[str, Any]]]] = {
    1: [
        ("gpt", {"microbatch": 1}),
        ("gpt", {"microbatch": 4}),
        ("gpt", {"microbatch": 8}),
        ("gpt", {"microbatch": 2, "recompute": "full"}),
        ("llama", {"microbatch": 1}),
        ("llama", {"microbatch": 4, "recompute": "selective"}),
    ],
    2: [
        ("gpt", {"pipe": 2, "microbatch": 1}),
        ("gpt", {"pipe": 2, "microbatch": 2, "schedule": "gpipe"}),
        ("gpt", {"pipe": 2, "microbatch": 1, "schedule": "zb-h1"}),
        ("gpt", {"data": 2, "microbatch": 1, "zero": 0}),
        ("gpt", {"data": 2, "microbatch": 4, "zero": 1}),
        ("gpt", {"data": 2, "microbatch": 1, "zero": 3}),
        ("gpt", {"tensor": 2, "microbatch": 2, "sequence_parallel": False}),
        ("llama", {"pipe": 2, "microbatch": 1, "schedule": "interleaved", "chunks": 2}),
        ("llama", {"data": 2, "microbatch": 2, "zero": 2, "recompute": "full"}),
        ("llama", {"tensor": 2, "microbatch": 4}),
    ],
    4: [
        ("gpt", {"pipe": 4, "microbatch": 1}),
        ("gpt", {"pipe": 4, "microbatch": 2, "recompute": "full"}),
        ("gpt", {"pipe": 2, "data": 2, "microbatch": 1, "zero": 1}),
        ("gpt", {"data": 4, "microbatch": 2, "zero": 3}),
        ("gpt", {"data": 2, "tensor": 2, "microbatch": 4, "zero": 1}),
        ("gpt", {"tensor": 4, "microbatch": 4}),
        ("llama", {"pipe": 2, "tensor": 2, "microbatch": 2}),
        ("llama", {"pipe": 4, "microbatch": 1, "schedule": "interleaved", "chunks": 2}),
    ],
    8: [
        ("gpt", {"pipe": 8, "microbatch": 1}),
        ("gpt", {"pipe": 4, "data": 2, "microbatch": 1, "zero": 1}),
        ("gpt", {"data": 8, "microbatch": 1, "zero": 1}),
        ("gpt", {"data": 8, "microbatch": 1, "zero": 3}),
        ("llama", {"pipe": 2, "data": 2, "tensor": 2, "microbatch": 1}),
        ("llama", {"pipe": 2, "data": 4, "microbatch": 1, "zero": 2}),
    ],
}


def main() -> None:
    options = parse()
    path = options.results or Path(tempfile.mkdtemp()) / "times.jsonl"
    for processes in options.processes:
        code = launch(measure, processes, options.steps, str(path), ranks=processes, threads=1)
        if code:
            sys.exit(code)
    # The last measurement of each layout.
    rows = list({(row["model"], row["layout"]): row for row in map(json.loads, path.read_text().splitlines())}.values())
    for row in rows:
        predict(row, options.machine)
    if options.json:
        print(json.dumps({"torch": torch.__version__, "rows": rows, **summary(rows)}, indent=1))
    else:
        show(rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("machine", help="machine file of triax plan --measure")
    parser.add_argument("--processes", type=int, nargs="*", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--steps", type=int, default=7, help="steps of each layout")
    parser.add_argument("--results", type=Path, help="file to which the measured times are added")
    parser.add_argument("--json", action="store_true", help="one object instead of a table")
    return parser.parse_args()


# ---------------------------------------------------------------------------------------- on each rank


def measure(processes: int, steps: int, path: str) -> None:
    """Time every layout of this number of processes; rank 0 adds a line for each to the file."""
    for name, fields in LAYOUTS[processes]:
        layout = ParallelLayout(**fields)
        engine, batch = build(name, layout)
        times = []
        for number in range(WARM_UP + steps):
            engine.grid.world.barrier()
            begin = time.perf_counter()
            engine.train_batch(itertools.repeat(batch))
            elapsed = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
            engine.grid.world.all_reduce(elapsed, op="max")
            times += [float(elapsed)] * (number >= WARM_UP)
        held = {kind: engine.memory_report()["held"][kind] for kind in KINDS}
        sent = {
            axis: sum(each["bytes"] for each in kinds.values())
            for axis, kinds in engine.traffic_report()["sent"].items()
        }
        mine = {"pipe": engine.grid.pipe.rank, "tensor": engine.grid.tensor.rank, "held": held, "sent": sent}
        everyone = engine.grid.world.all_gather_json(mine)
        if engine.grid.rank == 0:
            row = {"model": name, "processes": processes, "layout": str(layout), "fields": asdict(layout)}
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps({**row, "times": times, "ranks": everyone}) + "\n")
        del engine
        gc.collect()


def build(name: str, layout: ParallelLayout) -> tuple[Any, tuple[torch.Tensor, torch.Tensor]]:
    """Return the engine of a layout, and a microbatch."""
    config, maker, sequence = MODELS[name]
    grid = triax.Grid(layout.pipe, layout.data, layout.tensor, timeout=120)
    model = triax.PipelineModule(
        maker(config, sequence_parallel=bool(layout.sequence_parallel)),
        grid=grid,
        loss_fn=NextTokenLoss(grid, config.vocab_size),
        chunks=layout.chunks,
        placement=RECIPES[layout.schedule].place(layout.pipe, layout.chunks),
    )
    engine = triax.Engine(
        model,
        batch=triax.Batch(microbatch=layout.microbatch, microbatches=layout.microbatches(BATCH)),
        optimizer=triax.Optimizer("AdamW", lr=1e-4),
        schedule=layout.schedule,
        zero=triax.Zero.of(layout.zero),
        recompute=triax.Recomputation.of({} if layout.recompute == "none" else layout.recompute),
    )
    rows = torch.randint(config.vocab_size, (layout.microbatch, sequence + 1))
    return engine, (rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


# --------------------------------------------------------------------------------------------- the table


def predict(row: dict[str, Any], file: str) -> None:
    """Add the prediction, its ratio to the measured median, and whether the bytes are equal to a row."""
    config, _, sequence = MODELS[row["model"]]
    layout = ParallelLayout(**row["fields"])
    model = CostModel(Work(config, machine(file), BATCH, sequence, "fp32"))
    step = model.step(layout)
    row["predicted"], row["kinds"] = step.seconds, {kind: value for kind, value in step.kinds.items() if value}
    row["median"] = median(row["times"])
    row["ratio"] = row["predicted"] / row["median"]
    memory = ModelMemory(config, "fp32")
    row["held_equal"] = row["sent_equal"] = True
    for each in row["ranks"]:
        held = memory.states(layout, each["tensor"])[each["pipe"]]._asdict()
        row["held_equal"] &= each["held"] == {kind: held[kind] for kind in KINDS}
        sent = sent_bytes(config, layout, BATCH, sequence, "fp32", each["tensor"])[each["pipe"]]
        row["sent_equal"] &= all(each["sent"].get(axis, 0.0) == size for axis, size in sent.items())


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return mean and worst errors by number of processes, and Spearman's rank correlation."""
    found = {}
    for processes in sorted({row["processes"] for row in rows}):
        errors = [abs(row["ratio"] - 1) for row in rows if row["processes"] == processes]
        found[f"{processes} processes, mean error"] = sum(errors) / len(errors)
        found[f"{processes} processes, worst error"] = max(errors)
    orders = [ranks([row[key] for row in rows]) for key in ("predicted", "median")]
    squares = sum((a - b) ** 2 for a, b in zip(*orders, strict=True))
    n = len(rows)
    return {**found, "rank correlation": 1 - 6 * squares / (n * (n * n - 1)) if n > 1 else 1.0}


def ranks(values: Iterable[float]) -> list[int]:
    """Return the place of each value in their order."""
    found = list(values)
    places = {index: place for place, index in enumerate(sorted(range(len(found)), key=found.__getitem__))}
    return [places[index] for index in range(len(found))]


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table(title=f"a step of {BATCH} sequences, fp32")
    table.add_column("layout", overflow="fold")
    for head in ("predicted, ms", "median, ms", "quartiles", "ratio", "held", "sent"):
        table.add_column(head, justify="right")
    for row in sorted(rows, key=lambda row: row["processes"]):
        low, _, high = (1e3 * each for each in quantiles(row["times"], n=4))
        table.add_row(
            f"{row['processes']}  {row['model']} {name_of(row['fields'])}",
            *(f"{1e3 * row['predicted']:.0f}", f"{1e3 * row['median']:.0f}", f"{low:.0f} to {high:.0f}"),
            *(f"{row['ratio']:.2f}", *("=" if row[key] else "differs" for key in ("held_equal", "sent_equal"))),
        )
    console = Console()
    console.print(table)
    for name, value in summary(rows).items():
        console.print(f"{name}: {value:.3f}", highlight=False)


if __name__ == "__main__":
    main()
