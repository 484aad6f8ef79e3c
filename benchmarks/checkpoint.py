"""Checkpoints beside those of torch and DeepSpeed, and what one that is written behind a run costs its steps.

    python benchmarks/checkpoint.py                  # 25 million parameters on 2 ranks: time and bytes
    python benchmarks/checkpoint.py --behind         # steps with a save under way beside steps without
    python benchmarks/checkpoint.py --main-job       # the same for a GPT of bytes on 2 x 2 x 2
    python benchmarks/checkpoint.py --width 256 --layers 4 --rounds 2

One run, the same disk, the same model (blocks of two linears) and AdamW in fp32, sharded over the ranks: triax in stage
3 of ZeRO, torch as FSDP2 with ``torch.distributed.checkpoint``, DeepSpeed in its stage 3 where it is installed. Rounds
take turns; what is quoted is the median of the slowest rank's time. All have their files on the disk (fsync) before
they return. After the last round each has been loaded into other weights, which must then be those that were saved.

With ``--behind`` a round is a block of steps without a save and one that begins with a save, in turn in either order,
each of as many steps as a save needs, and half as many more. "cost of a step" is what is left of the second block's
time without the copy for which the first step waits, over the first block's: 1.05 is 5 %.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from limits import ratios
from measuring import slowest
from rounds import NotRunning, on_ranks
from savers import MICRO, Saver, batch, engine, savers, step

import triax
from triax.train.job import resolve
from triax.train.model import build_module, parameter_groups
from triax.train.sections import TrainingFile


def measure(options: Any, folder: str) -> dict[str, Any]:
    """Return time and bytes of all. On each rank."""
    grid, running, missing = triax.Grid(), dict[str, Saver](), []
    for name, make in savers(options):
        if options.only and name not in options.only:
            continue
        try:
            running[name] = make()
        except NotRunning as error:
            missing.append(f"{name}: {error}")
    found: dict[str, list[float]] = {}
    for turn in range(options.rounds + 1):
        if grid.rank == 0:
            for name in running:
                shutil.rmtree(f"{folder}/{name}", ignore_errors=True)
        names = [*running]
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            for what in ("save", "load"):
                took = slowest(grid, partial(getattr(running[name], what), f"{folder}/{name}"))
                if turn:  # the first one warms up
                    found.setdefault(f"{name} {what}", []).append(took)
    for saver in running.values():
        saver.check()
    parameters = options.layers * (8 * options.width**2 + 5 * options.width)
    sizes = {name: sum(p.stat().st_size for p in Path(folder, name).rglob("*")) for name in running}
    ranks = grid.size
    grid.close()
    return {
        "parameters": parameters,
        "ranks": ranks,
        "median seconds": {name: round(median(times), 4) for name, times in found.items()},
        "bytes a parameter": {name: round(size / parameters, 3) for name, size in sizes.items()},
        "rounds": {name: [round(each, 4) for each in times] for name, times in found.items()},
        "not there": missing,
    }


def blocks(options: Any) -> tuple[triax.Grid, Any, int, Callable[[], None]]:
    """Blocks of two linears in stage 3 of ZeRO: the grid, the engine, how many parameters, and what a step is."""
    grid, x = triax.Grid(), batch(options)
    trained = engine(options, **{"async": True})
    return grid, trained, options.layers * (8 * options.width**2 + 5 * options.width), lambda: step(trained, x)


def main_job(_: Any) -> tuple[triax.Grid, Any, int, Callable[[], None]]:
    """A GPT of bytes, on 2 stages x 2 replicas x 2 tensor shards."""
    grid = triax.Grid(pipe=2, data=2, tensor=2)
    shape = {"max_position_embeddings": 128, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    values = {
        "model": {"preset": "bytes-small", "overrides": {"vocab_size": 256, **shape}},
        "data": {"training": "none"},
        "grid": {"pipe": 2, "data": 2, "tensor": 2},
        "training": {"steps": 600},
        "batch": {"size": 32, "microbatch": 4},
        "zero": 1,
        "clip": 1.0,
    }
    job = resolve(TrainingFile.of(values))
    options = job.options.changed(checkpoint=triax.Checkpoints(background=True), monitor=triax.Monitoring())
    module = build_module(job, grid)
    trained = triax.Engine(module, options, parameters=parameter_groups(job, module))
    rows = torch.randint(256, (job.batch.micro, job.sequence + 1), generator=torch.Generator().manual_seed(0))
    batches = iter(lambda: (rows[:, :-1], rows[:, 1:]), None)

    def one() -> None:
        trained.train_batch(batches)

    return grid, trained, job.model.parameter_count, one


def behind(options: Any, folder: str) -> dict[str, Any]:
    """Return what an asynchronous save costs the steps beside it. On each rank."""
    grid, trained, parameters, one = main_job(options) if options.main_job else blocks(options)

    def steps(count: int) -> None:
        for _ in range(count):
            one()

    def save() -> None:
        trained.save_checkpoint(folder, "a")

    def saved() -> bool:
        """On every rank: the thread that writes is done."""
        work = trained.checkpointer.writer.work
        done = torch.tensor([work is None or work.done()], dtype=torch.int64)
        grid.world.all_reduce(done, op="min")
        return bool(done)

    steps(3)
    count = 0
    for _ in range(2):  # the second time there is room for the copy
        save()
        count = 0
        while not saved():
            steps(1)
            count += 1
    count = options.steps or count + count // 2 + 1
    found: dict[str, list[float]] = {"alone": [], "saving": [], "copy": [], "left": []}

    def alone() -> None:
        found["alone"].append(slowest(grid, partial(steps, count)))

    def saving() -> None:
        found["copy"].append(slowest(grid, save))
        found["saving"].append(slowest(grid, partial(steps, count)))
        found["left"].append(slowest(grid, trained.wait_for_checkpoint))

    for turn in range(options.rounds):
        for block in (alone, saving) if turn % 2 else (saving, alone):
            block()
    ranks = grid.size
    grid.close()
    costs = ratios(found["saving"], found["alone"])
    return {
        "parameters": parameters,
        "ranks": ranks,
        "steps a block": count,
        "a step, in ms": round(1e3 * median(found["alone"]) / count, 3),
        "the copy, in ms": round(1e3 * median(found["copy"]), 3),
        "cost of a step": round(median(costs), 4),
        "left at the end of a block, in ms": round(1e3 * median(found["left"]), 3),
        "rounds": {"cost of a step": [round(each, 4) for each in costs]},
    }


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--samples", type=int, default=MICRO, help="of a microbatch: more make a step longer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[], help="of triax, DCP, DeepSpeed")
    parser.add_argument("--behind", action="store_true", help="the cost of a step while a save is written")
    parser.add_argument("--main-job", action="store_true", help="that of a GPT of bytes, on 8 ranks")
    parser.add_argument("--steps", type=int, default=0, help="of a block, with --behind")
    parser.add_argument("--folder", default=None, help="on the disk to measure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        job = behind if options.behind or options.main_job else measure
        ranks = 8 if options.main_job else options.ranks
        print(json.dumps(on_ranks(job, options, folder, ranks=ranks)[0], indent=1))


if __name__ == "__main__":
    main()
