"""Predicted and measured step times of 44 layouts on this machine, with experts, context, offload and recomputation.

    triax machine measure here.json
    python benchmarks/plan.py here.json                        # all layouts, of 1, 2, 4 and 8 processes: 4 minutes
    python benchmarks/plan.py here.json --processes 1 2 --results times.jsonl
    python benchmarks/plan.py here.json --processes 4 8 --results times.jsonl   # adds to the file, and prints all of it
    python benchmarks/plan.py here.json --processes --results times.jsonl       # prints the file
    python benchmarks/plan.py before.json after.json --processes --results times.jsonl

A layout's time is the median of its steps on the slowest rank; a layout that is measured again, at another time, has
the steps of both. The machine files come from ``triax machine measure`` alone: nothing in them or in the model is
fitted to these times. A prediction by several files, measured before and after, is the mean of theirs: the speed of a
shared machine drifts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import correlation, fmean, median
from typing import Any

import torch
from limits import spread
from measuring import slowest
from rounds import on_ranks, print_json
from torch import Tensor

import triax
from triax.base.tables import table, terminal
from triax.models.config import GPTConfig, LlamaConfig, MixtralConfig, TransformerConfig
from triax.models.gpt import gpt_layers
from triax.models.layers import NextTokenLoss
from triax.models.llama import llama_layers
from triax.models.mixtral import mixtral_layers
from triax.pipe.schedules.registry import RECIPES
from triax.plugins.plan.cost import CostModel
from triax.plugins.plan.machine import machine
from triax.plugins.plan.parallel_layout import ParallelLayout
from triax.plugins.plan.picture import name_of
from triax.plugins.plan.work import Work

BATCH, WARM_UP = 8, 2
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
    "mixtral": (
        MixtralConfig(
            hidden_size=192,
            num_attention_heads=6,
            num_key_value_heads=2,
            intermediate_size=256,
            max_position_embeddings=256,
            num_experts=4,
            num_experts_per_tok=2,
            **SMALL,
        ),
        mixtral_layers,
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
        ("llama", {"microbatch": 8, "recompute": "full"}),
        ("mixtral", {"microbatch": 2}),
        ("mixtral", {"microbatch": 8}),
        ("mixtral", {"microbatch": 4, "recompute": "full"}),
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
        ("gpt", {"data": 2, "microbatch": 2, "zero": 1, "offload": True}),
        ("gpt", {"data": 2, "microbatch": 4, "zero": 2, "offload": True}),
        ("gpt", {"pipe": 2, "microbatch": 2, "recompute": "selective"}),
        ("gpt", {"context": 2, "microbatch": 2}),
        ("llama", {"context": 2, "microbatch": 4, "zero": 1}),
        ("llama", {"context": 2, "microbatch": 2, "recompute": "full"}),
        ("mixtral", {"data": 2, "expert": 2, "microbatch": 2, "zero": 1}),
        ("mixtral", {"data": 2, "expert": 2, "microbatch": 4, "recompute": "full"}),
        ("mixtral", {"data": 2, "microbatch": 2, "zero": 1}),
        ("mixtral", {"pipe": 2, "microbatch": 2}),
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
        for name, fields in LAYOUTS[processes]:  # each in processes of its own, as a run is
            row = on_ranks(measure, processes, name, fields, options.steps, ranks=processes)[0]
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(row)}\n")
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in map(json.loads, path.read_text().splitlines()):
        found.setdefault((row["model"], row["layout"]), {**row, "times": []})["times"] += row["times"]
    rows = list(found.values())
    for row in rows:
        predict(row, options.machines)
    if options.json:
        print_json(rows, **summary(rows))
    else:
        show(rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("machines", nargs="+", help="machine files of triax machine measure")
    parser.add_argument("--processes", type=int, nargs="*", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--steps", type=int, default=7, help="steps of each layout")
    parser.add_argument("--results", type=Path, help="file to which the measured times are added")
    parser.add_argument("--json", action="store_true", help="one object instead of a table")
    return parser.parse_args()


# ---------------------------------------------------------------------------------------- on each rank


def measure(processes: int, name: str, fields: dict[str, Any], steps: int) -> dict[str, Any]:
    """Time a layout."""
    layout = ParallelLayout(**fields)
    engine, batch = build(name, layout)
    step = partial(engine.train_batch, itertools.repeat(batch))
    times = [slowest(engine.grid, step) for _ in range(WARM_UP + steps)][WARM_UP:]
    return {"model": name, "processes": processes, "layout": str(layout), "fields": asdict(layout), "times": times}


def build(name: str, layout: ParallelLayout) -> tuple[Any, tuple[torch.Tensor, torch.Tensor]]:
    """Return the engine of a layout, and a microbatch."""
    config, maker, sequence = MODELS[name]
    axes = layout.pipe, layout.data, layout.tensor
    grid = triax.Grid(*axes, context=layout.context, expert=layout.expert, timeout=120)
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
        zero=triax.Zero.of(
            {"stage": layout.zero, "offload_optimizer": {"device": "cpu"}} if layout.offload else layout.zero
        ),
        recompute=triax.Recomputation.of({} if layout.recompute == "none" else layout.recompute),
    )
    rows = torch.randint(config.vocab_size, (layout.microbatch, sequence + 1))
    return engine, (rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


# --------------------------------------------------------------------------------------------- the table


def predict(row: dict[str, Any], files: Sequence[str]) -> None:
    """Add the prediction, and its ratio to the measured median, to a row."""
    config, _, sequence = MODELS[row["model"]]
    layout = ParallelLayout(**row["fields"])
    steps = [CostModel(Work(config, machine(file), BATCH, sequence, "fp32")).step(layout) for file in files]
    row["predicted"] = fmean(step.seconds for step in steps)
    kinds = {kind: fmean(step.kinds[kind] for step in steps) for kind in steps[0].kinds}
    row["kinds"] = {kind: value for kind, value in kinds.items() if value}
    row["median"] = median(row["times"])
    row["ratio"] = row["predicted"] / row["median"]


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return mean and worst errors by number of processes, and Spearman's rank correlation."""
    found = {}
    for processes in sorted({row["processes"] for row in rows}):
        errors = [abs(row["ratio"] - 1) for row in rows if row["processes"] == processes]
        found[f"{processes} processes, mean error"] = sum(errors) / len(errors)
        found[f"{processes} processes, worst error"] = max(errors)
    places = [torch.tensor([row[key] for row in rows]).argsort().argsort() for key in ("predicted", "median")]
    return {**found, "rank correlation": correlation(*map(Tensor.tolist, places)) if len(rows) > 1 else 1.0}


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    cells = (
        (
            f"{row['processes']}  {row['model']} {name_of(asdict(ParallelLayout(**row['fields'])))}",
            *(f"{1e3 * row['predicted']:.0f}", spread([1e3 * each for each in row["times"]], ".0f")),
            f"{row['ratio']:.2f}",
        )
        for row in sorted(rows, key=lambda row: row["processes"])
    )
    heads = ("layout", "predicted, ms", "measured, ms", "ratio")
    terminal().print(table(heads, cells, f"a step of {BATCH} sequences, fp32"))
    for name, value in summary(rows).items():
        print(f"{name}: {value:.3f}")


if __name__ == "__main__":
    main()
