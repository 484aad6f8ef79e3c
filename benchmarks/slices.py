"""Memory of a pipeline over slices of sequences beside 1F1B over whole ones, at the same tokens, grid and model.

    python benchmarks/slices.py                              # 8,192 tokens, 4 ranks, 4 sequences a step
    python benchmarks/slices.py --length 2048 --ranks 2

Each row trains a Llama of two layers a rank in fp32, on gloo processes of one thread each, and counts the third step:
the bytes that autograd keeps between forward and backward, and the most that a step allocates at once beside weights,
gradients and optimizer state, keys and values of earlier slices included; both on the rank with most. Beside them is
the simulated peak, in sequences through 1/pipe of the model (Seq1F1B and SlimPipe: 1 + (p-1)/n and 1 + 2(p-1)/(nv)).
Losses of all rows must be equal to 1e-5. The counters slow a step down, so times are of the second step, without them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from rounds import on_ranks

import triax
from triax.base.tables import table, terminal
from triax.models.layers import NextTokenLoss
from triax.models.llama import LlamaConfig, llama_layers

VOCABULARY = 512


def measured(
    cases: Sequence[tuple[str, int]], length: int, sequences: int, width: int, ranks: int
) -> list[dict[str, Any]]:
    """Train three steps of each case on this rank; return losses, seconds, bytes and simulated peaks."""
    grid, rows = triax.Grid(pipe=ranks), []
    heads = width // 64
    sizes = (VOCABULARY, length, width, 2 * ranks, heads)
    config = LlamaConfig(*sizes, num_key_value_heads=heads, intermediate_size=4 * width)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(VOCABULARY, (sequences, length + 1), generator=generator)
    for name, slices in cases:
        chunks = 2 if name == "interleaved" else 1
        model = triax.PipelineModule(
            llama_layers(config), grid=grid, loss_fn=NextTokenLoss(grid, VOCABULARY), chunks=chunks, seed=1
        )
        engine: Any = triax.Engine(
            model,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            batch=triax.Batch(microbatch=1, microbatches=sequences),
            schedule=triax.ScheduleOptions(name=name, slices=slices),
        )
        losses, seconds = [], 0.0
        for step in range(3):
            engine.record_memory = step == 2
            begin = time.perf_counter()
            losses.append(engine.train_batch(iter([(row[None, :-1], row[None, 1:]) for row in text])).item())
            seconds = time.perf_counter() - begin if step == 1 else seconds
        held = engine.memory_report()["held"]
        row = {"losses": losses, "seconds": seconds, "activations": held["activations"]}
        row["working"] = held["activations"] + held["working"]
        row["simulated"] = triax.simulate(engine.program.schedule).peak_activations[grid.pipe.rank]
        rows.append(row)
    return rows


def main() -> None:
    """Print a row for each schedule."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--length", type=int, default=8192, help="tokens of a sequence")
    options.add_argument("--sequences", type=int, default=4, help="sequences of a step")
    options.add_argument("--ranks", type=int, default=4, help="size of the pipe axis")
    options.add_argument("--width", type=int, default=128, help="width of the model, a multiple of 64")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    given = options.parse_args()
    p = given.ranks
    cases = [("1f1b", 1), ("interleaved", 1), ("1f1b", p), ("1f1b", 4 * p), ("interleaved", p), ("zb-h1", p)]
    ranks = on_ranks(measured, cases, given.length, given.sequences, given.width, p, ranks=p)
    rows, first = [], ranks[0][0]["losses"]
    for (name, slices), found in zip(cases, zip(*ranks, strict=True), strict=True):
        if any(abs(a - b) > 1e-5 * abs(b) for a, b in zip(found[0]["losses"], first, strict=True)):
            raise SystemExit(f"{name} over {slices} slices has the losses {found[0]['losses']}, and 1f1b {first}")
        most = {key: max(each[key] for each in found) for key in ("seconds", "activations", "working", "simulated")}
        rows.append({"schedule": name, "slices": slices, **most})
    if given.json:
        print(json.dumps({"options": vars(given), "rows": rows}))
        return
    cells = [
        (
            *(row["schedule"], row["slices"], f"{row['simulated']:.3g}", f"{row['activations'] / 1e6:,.0f}"),
            *(f"{row['working'] / 1e6:,.0f}", f"{row['seconds']:.2f}"),
        )
        for row in rows
    ]
    heads = ("schedule", "slices", "simulated peak", "activations, MB", "with working memory, MB", "s")
    terminal().print(table(heads, cells, f"{given.sequences} sequences of {given.length:,} tokens, {p} ranks"))


if __name__ == "__main__":
    main()
