"""One slow replica among those that step on their own: how much of the others' throughput is left.

    python benchmarks/local_updates.py                  # 3 replicas; 4, one ten times slower; the same that wait
    python benchmarks/local_updates.py --every 5        # a round of the others is shorter than a step of the slow one

Each replica's step is a tiny model's and a sleep, so that what is measured is who waits for whom, and not the machine.
What is quoted: steps of all replicas a second, and of each replica.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from rounds import on_ranks, print_json
from torch import nn

import triax
from triax.base.tables import table, terminal

ASYNC, WAITS = "async_diloco", "diloco"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--every", type=int, default=20, help="steps between two meetings")
    parser.add_argument("--staleness", type=int, default=2, help="max_staleness")
    parser.add_argument("--step", type=float, default=0.05, help="seconds of a step")
    parser.add_argument("--slower", type=float, default=10.0, help="the slow replica's step takes so many times longer")
    parser.add_argument("--seconds", type=float, default=12.0, help="how long each case runs")
    parser.add_argument("--fast", type=int, default=3, help="replicas beside the slow one")
    parser.add_argument("--types", nargs="+", choices=(ASYNC, WAITS), default=[ASYNC, WAITS])
    parser.add_argument("--json", action="store_true", help="one object instead of a table")
    options = parser.parse_args()
    cases = [(ASYNC, options.fast, 1.0), *((kind, options.fast + 1, options.slower) for kind in options.types)]
    rows = [case(kind, replicas, slower, options) for kind, replicas, slower in cases]
    for row in rows:
        row["share"] = row["total"] / rows[0]["total"]
    if options.json:
        print_json(rows, options=vars(options))
        return
    heads = ("type", "replicas", "the last one", "steps/s", "of the fast", "each", "rounds", "at the bound")
    cells = (
        (
            *(row["type"], row["replicas"]),
            f"{row['slower']:g} times slower" if row["slower"] > 1 else "as the others",
            *(f"{row['total']:.1f}", f"{row['share']:.0%}", " ".join(f"{rate:.1f}" for rate in row["each"])),
            *(" ".join(map(str, row["rounds"])), f"{max(row['waited']):.1f} s"),
        )
        for row in rows
    )
    title = f"every {options.every}, max_staleness {options.staleness}, a step of {options.step:g} s"
    terminal(width=140).print(table(heads, cells, title))


def case(kind: str, replicas: int, slower: float, options: argparse.Namespace) -> dict[str, Any]:
    """Run one in processes of its own."""
    told = on_ranks(replica, kind, slower, vars(options), ranks=replicas)
    each = [one["steps"] / one["seconds"] for one in told]
    found = {"type": kind, "replicas": replicas, "slower": slower, "total": sum(each), "each": each}
    return {**found, "rounds": [one["meetings"] for one in told], "waited": [one["waited"] for one in told]}


def replica(kind: str, slower: float, options: dict[str, Any]) -> dict[str, Any]:
    """One replica's training."""
    grid = triax.Grid()
    torch.manual_seed(0)
    every, staleness = options["every"], options["staleness"]
    engine: Any = triax.Engine(
        nn.Linear(64, 64),
        grid=grid,
        batch=triax.Batch(microbatch=4),
        optimizer=triax.Optimizer("AdamW", lr=1e-3),
        local_updates=triax.AsyncDiLoCo(every=every, max_staleness=staleness)
        if kind == ASYNC
        else triax.DiLoCo(every=every),
    )
    nap = options["step"] * (slower if grid.rank == grid.size - 1 else 1.0)
    grid.world.barrier()
    began, steps = time.monotonic(), 0
    # Those that wait for each other take as many steps; the others as many as they can.
    while steps < options["every"] if kind == WAITS else time.monotonic() - began < options["seconds"]:
        time.sleep(nap)
        engine.backward(engine(torch.randn(4, 64)).square().mean())
        engine.step()
        steps += 1
    seconds = time.monotonic() - began
    account = engine.traffic_report()["local"]
    engine.leave()
    return {"steps": steps, "seconds": seconds, "meetings": account["meetings"], "waited": account.get("waited_s", 0.0)}


if __name__ == "__main__":
    main()
