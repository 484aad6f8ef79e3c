"""Replicas that are killed at random moments, beside a run that starts again from a checkpoint.

    python -m triax.benchmarks.replica_faults --kills 100

A run of N replicas on this host trains a small GPT. A replica is killed (SIGKILL) at a random moment, then started
again; the next kill follows once it is back. Printed, in seconds, median and worst: the time from a kill to the end of
the next step of the others, the time of a plain step, the step in which the replica enters again, and the time from its
start until it is a member. With --restart: one job of the same ranks that saves every step and is started again by
triax run --max-restarts, from a kill to the next step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

PROGRAM = """
import json, os, sys, time
from functools import partial
import torch, triax

folder, replicas, steps, width = sys.argv[1], sys.argv[2] == "replicas", int(sys.argv[3]), int(sys.argv[4])


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        ids = torch.randint(0, 256, (33,), generator=torch.Generator().manual_seed(index))
        return ids[:-1], ids[1:]


if __name__ == "__main__":
    grid = triax.Grid()
    model = triax.PipelineModule(
        triax.gpt_layers(triax.GPTConfig(256, 32, width, 4, 4), grid), loss_fn=triax.CausalLMLoss(grid=grid), grid=grid
    )
    own = {"fault_tolerance": triax.FaultTolerance(folder=folder)} if replicas else {}
    if not replicas:
        own = {"checkpoint": triax.Checkpoints(folder=folder + "/saved", every=1, keep=2, resume=True)}
    engine = triax.Engine(
        model, optimizer=partial(torch.optim.AdamW, lr=1e-3), batch=triax.Batch(size=8 * grid.replicas, microbatch=8),
        training_data=Data(), **own,
    )
    name = os.environ.get("TRIAX_REPLICA", str(grid.rank))
    with open(f"{folder}/{name}.steps", "a", buffering=1) as file:
        print(json.dumps({"pid": os.getpid()}), file=file)
        while engine.global_steps < steps:
            loss = float(engine.train_batch())
            members = engine.replicas.members if replicas else []
            print(json.dumps({"step": engine.global_steps, "time": time.time(), "members": members}), file=file)
"""


def lines(folder: Path, name: str) -> list[dict[str, object]]:
    """Return the lines that a process has written so far."""
    try:
        text = (folder / f"{name}.steps").read_text()
    except OSError:
        return []
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def ends(folder: Path, name: str) -> list[float]:
    """Return the times at which the steps of a process ended."""
    return [float(str(line["time"])) for line in lines(folder, name) if "time" in line]


def told(name: str, values: list[float]) -> None:
    """Print median and worst of some seconds."""
    if values:
        print(f"{name:<58}{statistics.median(values):>8.3f} s{max(values):>8.3f} s  ({len(values)})", flush=True)


def wait(condition: object, seconds: float = 120.0) -> None:
    """Wait until a function returns something true.

    Raises:
        TimeoutError: it does not.
    """
    deadline = time.time() + seconds
    assert callable(condition)
    while not condition():
        if time.time() > deadline:
            raise TimeoutError("the run does not go on")
        time.sleep(0.01)


def more(folder: Path, name: str, since: float) -> bool:
    """Return True if a process has ended two steps since a time."""
    return sum(each > since for each in ends(folder, name)) > 1


def longer(folder: Path, count: int) -> bool:
    """Return True if rank 0 has ended more steps than a number."""
    return len(ends(folder, "0")) > count


def kill_replicas(folder: Path, replicas: int, kills: int, width: int, silence: float, seed: int) -> None:
    """Kill replicas one after the other, and print how long the others waited."""
    choose = random.Random(seed)
    names = [str(each) for each in range(replicas)]
    words = [
        "run",
        "--replicas",
        str(replicas),
        "--nproc",
        "1",
        "--max-restarts",
        "1000000",
        "--least",
        "2",
        "--threads",
    ]
    words += ["1", "--silence", str(silence), "--log-dir", str(folder / "logs"), str(folder / "program.py")]
    words += [str(folder), "replicas", "1000000000", str(width)]
    run = subprocess.Popen(
        [sys.executable, "-m", "triax.cli.main", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def all_there() -> bool:
        last = [lines(folder, name)[-1:] for name in names]
        return all(each and len(list(each[0].get("members", ()))) == replicas for each in last)  # type: ignore[call-overload]

    gaps, plain, entered, back = list[float](), list[float](), list[float](), list[float]()
    try:
        for number in range(kills):
            wait(all_there)
            if number and number % 10 == 0:
                told(f"{number} kills: from a kill to the next step of the others", gaps)
            begun = time.time()
            time.sleep(choose.uniform(0.5, 1.0))
            name = choose.choice(names)
            other = next(each for each in names if each != name)
            pid = next(line["pid"] for line in reversed(lines(folder, name)) if "pid" in line)
            seen = [each for each in ends(folder, other) if each > begun]
            plain += [b - a for a, b in pairwise(seen)]
            killed = time.time()
            os.kill(int(str(pid)), signal.SIGKILL)
            wait(partial(more, folder, other, killed))
            # The first step that ends after the kill may have had all gradients already: the longest wait counts.
            after = [killed, *(each for each in ends(folder, other) if each > killed)][:3]
            gaps.append(max(b - a for a, b in pairwise(after)))
            again = time.time()
            wait(all_there)
            back.append(time.time() - again)
            steps = [line for line in lines(folder, other) if "time" in line]
            for before, now in pairwise(steps):
                grew = len(list(before["members"])) < len(list(now["members"]))  # type: ignore[call-overload]
                if grew and float(str(now["time"])) > killed:
                    index = steps.index(now)
                    entered.append(
                        max(
                            float(str(b["time"])) - float(str(a["time"]))
                            for a, b in zip(steps[index - 1 : index + 1], steps[index : index + 2], strict=False)
                        )
                    )
    finally:
        run.terminate()
        run.wait()
    print(f"{replicas} replicas, {kills} kills, silence {silence:g} s{'':<27}median     worst")
    told("a step", plain)
    told("from a kill to the next step of the others", gaps)
    told("the longest step while it enters again", entered)
    told("until it is a member again", back)


def restart(folder: Path, ranks: int, kills: int, width: int, seed: int) -> None:
    """Kill a rank of one job that saves each step, and print how long it took until the next step."""
    choose = random.Random(seed)
    words = [
        "run",
        "--nproc",
        str(ranks),
        "--max-restarts",
        "1000",
        "--threads",
        "1",
        "--log-dir",
        str(folder / "logs"),
    ]
    words += [str(folder / "program.py"), str(folder), "restart", "1000000000", str(width)]
    run = subprocess.Popen(
        [sys.executable, "-m", "triax.cli.main", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    gaps = list[float]()
    try:
        for _ in range(kills):
            count = len(ends(folder, "0"))
            wait(partial(longer, folder, count + 3))
            time.sleep(choose.uniform(0.1, 0.5))
            pid = next(line["pid"] for line in reversed(lines(folder, "1")) if "pid" in line)
            killed = time.time()
            os.kill(int(str(pid)), signal.SIGKILL)
            time.sleep(0.5)
            begun = len(ends(folder, "0"))
            wait(partial(longer, folder, begun))
            gaps.append(ends(folder, "0")[begun] - killed)
    finally:
        run.terminate()
        run.wait()
    told(f"a job of {ranks} ranks, restarted from a checkpoint", gaps)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--silence", type=float, default=2.0)
    parser.add_argument("--restarts", type=int, default=3, help="kills of the job that restarts; 0: leave it out")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for each in ("replicas", "restart"):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "program.py").write_text(PROGRAM)
            if each == "replicas":
                kill_replicas(folder, given.replicas, given.kills, given.width, given.silence, given.seed)
            elif given.restarts:
                restart(folder, given.replicas, given.restarts, given.width, given.seed)


if __name__ == "__main__":
    main()
