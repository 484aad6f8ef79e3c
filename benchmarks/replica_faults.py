"""Replicas that are killed, stopped, asked to go, slowed down and cut off from their coordinator, and what it costs.

    python -m triax.benchmarks.replica_faults --forked --faults 100
    python -m triax.benchmarks.replica_faults --forked --faults 100 --pipe 2
    python -m triax.benchmarks.replica_faults --forked --faults 200 --pause 0.2 --kinds all
    python -m triax.benchmarks.replica_faults --faults 20 --restarts 3

A run of N replicas on this host trains a small GPT. A fault strikes a replica at a random moment; the next one follows
once all replicas are members again:

kill          SIGKILL of one rank
kills         SIGKILL of two replicas at once
stop          SIGSTOP of one rank until the others have gone on without its replica, then SIGCONT
drain         ``triax replicas drain``; the replica is started again when it has left
slow          SIGSTOP for 0.2 s, ten times: the replica stays a member
coordinator   SIGKILL of the coordinator, which is started again at its address after up to 2 s

Printed: seconds, median and worst, from a fault to the end of the next step of the others, of a plain step, and until
the replica is a member again. Then the command checks the run, and fails if one of these is not true:

- all replicas have the same loss in each step, bit for bit, and no step is missing;
- each sample was in the sums as often as the data order says: once in each epoch;
- the recorded history, replayed without faults, gives the same losses, bit for bit;
- with 50 or more faults, memory and open descriptors of the last replica, which is not killed, are flat.

--peer: beside it, the same kills of as many replicas of one process with torchft's Manager and DDP.
--restarts N: beside it, a job of as many ranks that saves each step and is started again by triax run --max-restarts.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import random
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import triax
from triax.grid.launcher.replica_jobs import drain
from triax.plugins.fault_tolerance.membership import History

SHARE, SAMPLES = 8, 2**16  # samples of a share and of the data set
LIMIT = 180.0  # seconds after which a run that does not go on hangs

PROGRAM = """
import json, sys
from triax.benchmarks.replica_faults import train

if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
"""
# Of --forked: loaded once, by the server from which ranks are forked.
os.environ.setdefault("TRIAX_SECRET", secrets.token_hex(16))  # of the coordinator and all replicas, which inherit it
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch", "torch.distributed.device_mesh", "triax.engine.engines", "triax.data.dataloader"]
    + ["triax.plugins.fault_tolerance.strategy", "triax.models.gpt"]
)


class Data(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that are drawn by their index; what a member reads is written to a file, with the step.

    Args:
        given: arguments of ``train``.
        name: the replica's name.
        rank: rank of the replica.
    """

    def __init__(self, given: dict[str, Any], name: str, rank: int) -> None:
        self._pause, self._name, self.engine = given["pause"] / SHARE, name, None
        self._file = os.open(f"{given['folder']}/{name}.{rank}.reads", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        engine: Any = self.engine
        if engine is not None and self._name in getattr(engine.replicas, "members", ()):
            os.write(self._file, f"{engine.global_steps} {index}\n".encode())
        time.sleep(self._pause)
        ids = torch.randint(0, 256, (33,), generator=torch.Generator().manual_seed(index))
        return ids[:-1], ids[1:]


def train(given: dict[str, Any]) -> None:
    """Train as a rank of a replica, or of a job without replicas; write a line for each step."""
    os.environ.update(given.get("environment", {}))
    torch.set_num_threads(1)
    return_memory_when_asked()
    folder, options, name = given["folder"], given["options"], os.environ.get("TRIAX_REPLICA", "job")
    grid = triax.Grid(pipe=given["pipe"])
    data = Data(given, name, grid.rank)
    model = triax.PipelineModule(
        triax.gpt_layers(triax.GPTConfig(256, 32, given["width"], 4, 4)),
        loss_fn=triax.CausalLMLoss(grid=grid),
        grid=grid,
    )
    own: dict[str, Any] = {"fault_tolerance": triax.FaultTolerance(folder=folder, **(options or {}))}
    if options is None:
        own = {"checkpoint": triax.Checkpoints(folder=folder + "/saved", every=1, keep=2, resume=True)}
    engine: Any = triax.Engine(
        model,
        optimizer=partial(torch.optim.AdamW, lr=1e-4),
        training_data=data,
        batch=triax.Batch(size=SHARE * grid.replicas, microbatch=SHARE // given["pipe"]),
        **own,
    )
    data.engine = engine
    with Path(folder, f"{name}.{grid.rank}.steps").open("a", buffering=1) as file:
        file.write(json.dumps({"pid": os.getpid(), "time": time.time()}) + "\n")
        while engine.global_steps < given["steps"]:
            loss = float(engine.train_batch()).hex()
            members = [] if options is None else engine.replicas.members
            line = {"step": engine.global_steps - 1, "time": time.time(), "loss": loss, "members": members}
            file.write(json.dumps(line) + "\n")
    engine.leave()


def return_memory_when_asked() -> None:
    """Give memory that is free back to the system on SIGUSR2: the allocator keeps parts of each closed connection."""
    signal.signal(signal.SIGUSR2, lambda *_: ctypes.CDLL(None).malloc_trim(0))


class PeerModel(nn.Module):
    """Transformer of the size of the GPT that triax trains.

    Args:
        width: width of the model.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits, (batch, length, 256), of token ids, (batch, length)."""
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        logits: torch.Tensor = self.head(self.layers(self.embedding(ids), mask, is_causal=True))
        return logits


def train_with_torchft(given: dict[str, Any]) -> None:
    """Train as a replica of torchft, as in its example train_ddp.py; write a line for each step that is committed."""
    from torchft import Manager, Optimizer, ProcessGroupGloo
    from torchft.ddp import PureDistributedDataParallel

    os.environ.update(given["environment"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return_memory_when_asked()
    name, limit = os.environ["TRIAX_REPLICA"], timedelta(seconds=given["options"]["timeout"])
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    plain = PeerModel(given["width"])

    def load(state: Any) -> None:
        plain.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=load,
        state_dict=lambda: {"model": plain.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=given["least"],
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=f"http://{os.environ['TRIAX_COORDINATOR']}",
        replica_id=name,
        hostname="127.0.0.1",
    )
    # In torchft 0.2 DistributedDataParallel ends the survivors of a kill with an AssertionError in its hook (fut._fut).
    model = PureDistributedDataParallel(manager, plain)
    optimizer: Any = Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=1e-4))
    with Path(given["folder"], f"{name}.0.steps").open("a", buffering=1) as file:
        file.write(json.dumps({"pid": os.getpid(), "time": time.time()}) + "\n")
        number = 0
        while True:
            before, number = manager.current_step(), number + 1
            ids = torch.randint(0, 256, (8, 33), generator=torch.Generator().manual_seed(number))
            optimizer.zero_grad()
            logits = model(ids[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            if manager.current_step() > before:
                members = given["names"] if manager.num_participants() == len(given["names"]) else []
                line = {"step": before, "time": time.time(), "loss": float(loss.detach()).hex(), "members": members}
                file.write(json.dumps(line) + "\n")


class Tail:
    """Lines of JSON that a process appends to a file."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._found = path, 0, list[dict[str, Any]]()

    def lines(self) -> list[dict[str, Any]]:
        """Return all whole lines so far."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._at)
                whole = file.read().rpartition(b"\n")
            self._at += len(whole[0]) + len(whole[1])
            self._found += [json.loads(line) for line in whole[0].splitlines()]
        return self._found


def wait(condition: Callable[[], bool], what: str) -> None:
    """Wait until a function returns True.

    Raises:
        TimeoutError: it does not within ``LIMIT`` seconds.
    """
    deadline = time.time() + LIMIT
    while not condition():
        if time.time() > deadline:
            raise TimeoutError(f"{what}: not within {LIMIT:g} s")
        time.sleep(0.01)


def told(name: str, values: list[float], unit: str = "s") -> None:
    """Print median and worst of some numbers."""
    if values:
        line = f"{name:<64}{statistics.median(values):>9.3f} {unit}{max(values):>9.3f} {unit}  ({len(values)})"
        print(line, flush=True)


def free_port() -> int:
    """Return a free TCP port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def forked(target: Callable[[dict[str, Any]], None], job: dict[str, Any], log: str) -> None:
    """Train in a forked process, whose messages go to a file."""
    with Path(log).open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    target(job)


class Run:
    """Run of replicas on this host, with a launcher for each, and a coordinator.

    Args:
        folder: folder of the run.
        given: arguments of the command line.
        options: further options of ``FaultTolerance``.
        steps: number of steps; a run with faults goes on until it is stopped.
        min_replicas: number of replicas without which no step is taken.
        target: what a forked rank runs.
    """

    def __init__(
        self,
        folder: Path,
        given: argparse.Namespace,
        options: dict[str, Any],
        steps: int,
        min_replicas: int,
        target: Callable[[dict[str, Any]], None] = train,
    ) -> None:
        self._target = target
        self.folder, self.given, self._min_replicas, self._port = folder, given, min_replicas, free_port()
        self.names = [f"r{each}" for each in range(given.replicas)]  # a number would be the number of replicas
        folder.mkdir()
        (folder / "program.py").write_text(PROGRAM)
        self._job = {"folder": str(folder), "steps": steps, "pipe": given.pipe, "width": given.width}
        self._job |= {"pause": given.pause, "options": options, "names": self.names, "least": min_replicas}
        self._tails = {
            (name, rank): Tail(folder / f"{name}.{rank}.steps") for name in self.names for rank in range(given.pipe)
        }
        self._launchers: dict[str, subprocess.Popen[bytes]] = {}
        self._ranks: dict[str, list[Any]] = {}
        self._coordinator = self._start_coordinator()
        for name in self.names:
            self.start(name)

    def start(self, name: str) -> None:
        """Start a replica: by ``triax run``, which starts it again when it dies, or as forked processes."""
        address = f"127.0.0.1:{self._port}"
        if self.given.forked:
            variables = {"TRIAX_REPLICA": name, "TRIAX_COORDINATOR": address, "GLOO_SOCKET_IFNAME": "lo"}
            if self.given.pipe > 1:
                variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
                variables |= {key: str(self.given.pipe) for key in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
            self._ranks[name] = []
            for rank in range(self.given.pipe):
                numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if self.given.pipe > 1 else {}
                job = {**self._job, "environment": {**variables, **numbers}}
                self._ranks[name].append(
                    CONTEXT.Process(target=forked, args=(self._target, job, str(self.folder / f"{name}.log")))
                )
                self._ranks[name][-1].start()
            return
        words = ["run", "--replicas", name, "--nproc", str(self.given.pipe), "--max-restarts", "1000000", "--threads"]
        words += [
            "1",
            "--coordinator",
            address,
            "--log-dir",
            str(self.folder / "logs"),
            str(self.folder / "program.py"),
        ]
        with (self.folder / f"{name}.log").open("ab") as file:
            self._launchers[name] = subprocess.Popen(
                [sys.executable, "-m", "triax.cli.main", *words, json.dumps(self._job)], stdout=file, stderr=file
            )

    def revive(self, name: str) -> None:
        """Do what ``triax run`` does when a rank of a forked replica has died: kill the others, and start it again."""
        for process in self._ranks.get(name, ()):
            process.kill()
            process.join()
        if name in self._ranks:
            self.start(name)

    def drain(self, name: str) -> None:
        """Ask a replica to go, and wait until it has left."""
        for process in self._ranks.get(name, ()):
            process.terminate()
        if name in self._launchers:
            drain(name, self.folder / "logs", LIMIT)
        self.finish(name, LIMIT)

    def finish(self, name: str, seconds: float) -> None:
        """Wait for the end of a replica.

        Raises:
            TimeoutError: it does not end in time.
        """
        if name in self._launchers:
            self._launchers[name].wait(seconds)
        for process in self._ranks.get(name, ()):
            process.join(seconds)
            if process.exitcode != 0:
                raise TimeoutError(f"replica {name} has not ended well: {process.exitcode}")

    def _start_coordinator(self) -> subprocess.Popen[bytes]:
        words = [
            "replicas",
            "coordinator",
            "--port",
            str(self._port),
            "--min-replicas",
            str(self._min_replicas),
            "--heartbeat-timeout",
        ]
        words += [str(self.given.heartbeat_timeout), "--straggler-timeout", str(self.given.straggler_timeout)]
        with (self.folder / "coordinator.log").open("ab") as file:
            return subprocess.Popen([sys.executable, "-m", "triax.cli.main", *words], stdout=file, stderr=file)

    def restart_coordinator(self, after: float) -> None:
        """Kill the coordinator, and start it again after some seconds."""
        self._coordinator.kill()
        self._coordinator.wait()
        time.sleep(after)
        self._coordinator = self._start_coordinator()

    def steps(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of a replica's steps, of all its lives."""
        return [line for line in self._tails[name, 0].lines() if "step" in line]

    def pid(self, name: str, rank: int) -> int:
        """Return the number of a rank's process."""
        return int(next(line["pid"] for line in reversed(self._tails[name, rank].lines()) if "pid" in line))

    def pids(self, name: str) -> list[int]:
        """Return the numbers of a replica's processes, in rank order."""
        return [self.pid(name, rank) for rank in range(self.given.pipe)]

    def members(self, name: str) -> set[str]:
        """Return the members of the run, as a replica has written after its last step."""
        last = self._tails[name, 0].lines()[-1:]
        return set(last[0].get("members", ())) if last else set()

    def all_there(self) -> bool:
        """Return True if each replica has ended a step since its last start, with all replicas as members."""
        return all(self.members(name) == set(self.names) for name in self.names)

    def state(self) -> str:
        """Return what each replica has written last, for an error."""
        return "; ".join(f"{name}: {self._tails[name, 0].lines()[-1:]}" for name in self.names)

    def stop(self) -> None:
        """Stop all processes."""
        for process in (each for ranks in self._ranks.values() for each in ranks):
            process.kill()
        for launcher in self._launchers.values():
            launcher.terminate()
        for launcher in self._launchers.values():
            try:
                launcher.wait(60.0)
            except subprocess.TimeoutExpired:
                launcher.kill()
        self._coordinator.kill()
        self._coordinator.wait()


def strike(run: Run, kind: str, choose: random.Random) -> tuple[set[str], float]:
    """Let a fault strike; return the replicas that it struck, and the time at which it began."""
    exposed = run.names[:-1]  # the last replica is never killed: its memory is watched
    names = choose.sample(exposed, 2 if kind == "kills" else 1)
    if kind in ("stop", "slow"):
        names = [choose.choice(run.names)]
    if kind == "coordinator":
        begun = time.time()
        run.restart_coordinator(choose.uniform(0.0, 2.0))
        return set(), begun
    pids = [run.pid(name, choose.randrange(run.given.pipe)) for name in names]
    begun = time.time()
    if kind in ("kill", "kills"):
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        time.sleep(
            choose.choice((0.0, run.given.heartbeat_timeout + 0.5))
        )  # back before the others have missed it, or after
        for name in names:
            run.revive(name)
    elif kind == "slow":
        for _ in range(10):
            os.kill(pids[0], signal.SIGSTOP)
            time.sleep(0.2)
            os.kill(pids[0], signal.SIGCONT)
            time.sleep(0.05)
        return set(), begun
    elif kind == "stop":
        os.kill(pids[0], signal.SIGSTOP)
        other = next(name for name in run.names if name != names[0])
        try:
            wait(lambda: names[0] not in run.members(other), f"the others go on without replica {names[0]}")
        finally:
            os.kill(pids[0], signal.SIGCONT)
    else:
        run.drain(names[0])
        run.start(names[0])
    return set(names), begun


def usage(pids: list[int]) -> tuple[float, float]:
    """Return the resident memory (MiB), without free memory, and the number of open descriptors of some processes."""
    for pid in pids:
        os.kill(pid, signal.SIGUSR2)
    time.sleep(0.5)
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)


def with_faults(run: Run, kinds: list[str], count: int, choose: random.Random) -> None:
    """Let faults strike one after the other, print the times, and check memory and descriptors.

    Raises:
        AssertionError: the last replica's memory or number of descriptors grows.
    """
    gaps: dict[str, list[float]] = {kind: [] for kind in kinds}
    back, plain, used = list[float](), list[float](), list[tuple[float, float]]()
    for number in range(count):
        wait(run.all_there, f"all replicas are there before fault {number}")
        used.append(usage(run.pids(run.names[-1])))
        quiet = time.time()
        time.sleep(choose.uniform(0.3, 0.8))
        kind = kinds[number] if number < len(kinds) else choose.choice(kinds)
        names, begun = strike(run, kind, choose)
        struck = time.time()
        other = next(name for name in reversed(run.names) if name not in names)
        wait(lambda: sum(line["time"] > begun for line in run.steps(other)[-100:]) > 1, "the others go on")  # noqa: B023
        times = [line["time"] for line in run.steps(other)[-2000:]]
        # The first step that ends after a kill may have had all gradients already: the longest wait counts.
        after = [begun, *(each for each in times if each > begun)]
        gaps[kind].append(max(b - a for a, b in pairwise(after)))
        plain += [b - a for a, b in pairwise([each for each in times if quiet < each < begun])]
        if kind in ("kill", "stop"):
            wait(run.all_there, f"replica {names} is back after {kind}")
            back.append(time.time() - struck)
        if number % 10 == 9:
            memory, descriptors = used[-1]
            print(
                f"{number + 1} faults, step {run.steps(other)[-1]['step']}; replica {run.names[-1]}: {memory:.0f} MiB, "
                f"{descriptors:.0f} descriptors",
                flush=True,
            )
    wait(run.all_there, "all replicas are there at the end")
    ends = run.steps(run.names[-1])[-1]["step"] + 5
    wait(lambda: run.steps(run.names[-1])[-1]["step"] > ends, "the run goes on at its end")
    print(f"{run.given.replicas} replicas of {run.given.pipe} ranks{'':<45}median      worst")
    told("a step", plain)
    for kind, values in gaps.items():
        told(f"{kind}: from the fault to the end of the others' next step", values)
    told("until the replica is a member again", back)
    if count >= 50:  # both depend on a replica's part: the first member serves the store, and sends states
        for what, index, grows in (("MiB", 0, 1.05), ("descriptors", 1, 1.0)):
            before, now = (max(each[index] for each in half) for half in (used[: count // 2], used[count // 2 :]))
            print(
                f"replica {run.names[-1]}: at most {before:.0f} {what} in the first half of the faults, {now:.0f} later"
            )
            assert now <= before * grows, f"{what} grow from {before} to {now}"


def agreed(run: Run) -> dict[int, str]:
    """Return the loss of each step, after a check that all replicas have the same, and that none is missing.

    Raises:
        AssertionError: they differ.
    """
    whole: dict[int, str] = {}
    for name in run.names:
        for line in run.steps(name):
            found = whole.setdefault(line["step"], line["loss"])
            assert found == line["loss"], f"step {line['step']}: replica {name} has {line['loss']}, another {found}"
    assert sorted(whole) == list(range(len(whole))), "a step is missing"
    return whole


def samples_counted(run: Run, steps: int) -> int:
    """Check that each sample was summed once in each epoch, from what the replicas have read; return their number.

    Raises:
        AssertionError: a sample is missing, or was summed twice.
    """
    history = History.from_file(run.folder / f"{run.names[-1]}.jsonl")
    counted: Counter[int] = Counter()
    for name in run.names:
        reads: dict[int, list[int]] = {}
        for step, index in (
            map(int, line.split()) for line in (run.folder / f"{name}.0.reads").read_text().splitlines()
        ):
            reads.setdefault(step, []).append(index)
        for step in (step for step in range(steps) if name in history.counted(step)):
            assert len(reads[step]) == SHARE, f"replica {name} has read {len(reads[step])} samples in step {step}"
            counted.update(reads[step])
    owed = len(history.members(steps - 1)) - len(history.counted(steps - 1))
    epochs, total = sum(counted.values()) // SAMPLES, sum(counted.values())
    assert not owed and total % SHARE == 0, "shares are owed at the end"
    assert set(counted.values()) <= {epochs, epochs + 1} and len(counted) == min(total, SAMPLES), "a sample is missing"
    return total


def beside(folder: Path, given: argparse.Namespace) -> Iterator[float]:
    """Kill a rank of one job that saves each step; yield the seconds until its next step."""
    choose = random.Random(given.seed)
    folder.mkdir()
    (folder / "program.py").write_text(PROGRAM)
    plain = {"folder": str(folder), "steps": 10**9, "pipe": given.pipe, "width": given.width, "pause": given.pause}
    plain["options"] = None
    words = ["run", "--nproc", str(given.replicas * given.pipe), "--max-restarts", "1000", "--threads", "1"]
    words += ["--log-dir", str(folder / "logs"), str(folder / "program.py"), json.dumps(plain)]
    with (folder / "launcher").open("ab") as file:
        run = subprocess.Popen([sys.executable, "-m", "triax.cli.main", *words], stdout=file, stderr=file)
    first, second = Tail(folder / "job.0.steps"), Tail(folder / "job.1.steps")
    try:
        for _ in range(given.restarts):
            count = len(first.lines())
            wait(lambda: len(first.lines()) > count + 4, "the job trains")  # noqa: B023
            time.sleep(choose.uniform(0.1, 0.5))
            pid = next(line["pid"] for line in reversed(second.lines()) if "pid" in line)
            killed = time.time()
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.5)
            begun = sum("step" in line for line in first.lines())
            wait(lambda: sum("step" in line for line in first.lines()) > begun, "the job goes on")  # noqa: B023
            yield [line["time"] for line in first.lines() if "step" in line][begun] - killed
    finally:
        run.terminate()
        run.wait()


def main() -> None:
    """Run the benchmark."""
    kinds = ("kill", "kills", "stop", "drain", "slow", "coordinator")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--pipe", type=int, default=1, help="pipe ranks of a replica")
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--kinds", default="kill", help=f"all, or some of {','.join(kinds)}; each occurs")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that the data of a step takes")
    parser.add_argument("--heartbeat-timeout", type=float, default=2.0)
    parser.add_argument("--timeout", type=float, default=5.0)
    parser.add_argument("--straggler-timeout", type=float, default=5.0)
    parser.add_argument("--restarts", type=int, default=0, help="kills of a job that restarts from a checkpoint")
    parser.add_argument(
        "--forked", action="store_true", help="fork ranks from a process that has loaded torch, without triax run"
    )
    parser.add_argument(
        "--peer", action="store_true", help="beside it, the same kills of replicas of torchft's Manager"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", help="folder in which the files of the runs are kept")
    given = parser.parse_args()
    chosen = [*kinds] if given.kinds == "all" else given.kinds.split(",")
    if unknown := set(chosen) - set(kinds):
        parser.error(f"--kinds has {', '.join(sorted(unknown))}: give names of {', '.join(kinds)}")
    if given.peer and given.pipe > 1:
        parser.error("--peer compares replicas of one process: leave --pipe out")
    if given.replicas < 3:
        parser.error("--replicas must be at least 3: two stay when a fault strikes one")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(given.keep or temporary)
        folder.mkdir(exist_ok=True, parents=True)
        limits = {"timeout": given.timeout, "heartbeat_timeout": given.heartbeat_timeout}
        run = Run(folder / "faults", given, limits, 10**9, 2)
        try:
            with_faults(run, chosen, given.faults, random.Random(given.seed))
        except BaseException:
            print(run.state(), file=sys.stderr, flush=True)
            raise
        finally:
            run.stop()
        losses = agreed(run)
        print(f"{len(losses)} steps, each with one loss on all replicas", flush=True)
        print(f"{samples_counted(run, len(losses))} samples, each in the sums once in an epoch", flush=True)
        given.pause = 0.0
        past = str(run.folder / f"{run.names[-1]}.jsonl")
        again = Run(folder / "replay", given, {"replay": past}, len(losses), given.replicas)
        try:
            for name in again.names:
                again.finish(name, 3600.0)
        finally:
            again.stop()
        assert agreed(again) == losses, "the replay has other losses"
        print(f"the replay of the history has the same {len(losses)} losses, bit for bit", flush=True)
        if given.peer:
            given.forked = True
            peer = Run(folder / "torchft", given, limits, 10**9, 2, train_with_torchft)
            print("torchft's Manager with DDP:", flush=True)
            try:
                with_faults(peer, ["kill"], given.faults, random.Random(given.seed))
            finally:
                peer.stop()
        told(
            f"a job of {given.replicas * given.pipe} ranks, from a kill to its next step",
            [*beside(folder / "job", given)] if given.restarts else [],
        )


if __name__ == "__main__":
    main()
