"""Replicas of a small run as processes, each with a grid of its own, that tests kill, stop and replay."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax.data.dataloader import make_loader
from triax.fault_tolerance.membership import Change, History, Ledger

from processes import free_port

SAMPLES, SHARE, MICRO, WIDTH = 60, 4, 2, 6


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Inputs and labels; every third label of a sample is ignored, so samples have unlike weights."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        self.labels = torch.randint(0, WIDTH, (SAMPLES, 3), generator=generator)
        self.labels[::3, 1:] = -100

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.labels[index]


def loss_fn(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return (sum of the losses of labels that count, their number)."""
    logits = outputs.view(-1, 3, WIDTH).flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
    return loss, (labels != -100).sum()


def layers(dropout: float, dtype: torch.dtype = torch.float64) -> list[Any]:
    """Return the layers of the model."""
    make = partial(nn.Linear, dtype=dtype)
    return [triax.LayerSpec(make, WIDTH, 12), torch.tanh, nn.Dropout(dropout), triax.LayerSpec(make, 12, 3 * WIDTH)]


def optimizer(groups: Any) -> torch.optim.Optimizer:
    """Return the optimizer of the run."""
    return torch.optim.AdamW(groups, lr=0.05)


def train(job: Mapping[str, Any]) -> None:
    """Train as one rank of a replica; write a line for each step: step, loss as hex, time, members."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    grid_sizes = job.get("grid", {})
    size = 1
    for each in grid_sizes.values():
        size *= each
    if size > 1:
        os.environ |= {"RANK": str(job["rank"]), "WORLD_SIZE": str(size), "LOCAL_RANK": str(job["rank"])}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"]), "LOCAL_WORLD_SIZE": str(size)}
    grid = triax.Grid(**grid_sizes)
    dtype = job.get("dtype", torch.float64)
    model = triax.PipelineModule(layers(job.get("dropout", 0.0), dtype), loss_fn=loss_fn, grid=grid, seed=job["seed"])
    engine: Any = triax.Engine(
        model,
        optimizer=optimizer,
        batch=triax.Batch(size=SHARE, microbatch=MICRO if grid.replicas == 1 else SHARE // grid.replicas),
        clip=1.0,
        precision=job.get("precision", triax.Precision()),
        training_data=Samples(dtype),
        zero=job.get("zero", 0),
        checkpoint=job.get("checkpoint", triax.Checkpoints()),
        fault_tolerance={"replica": job["name"], "folder": job["folder"], **job["options"]},
    )
    with Path(job["folder"], f"{job['name']}.{grid.rank}.losses").open("a") as file:
        while not _is_over(engine, job):
            since = _since(engine, job.get("gather", ()))
            if since is not None and job.get("fault") is not None and since >= job["after"]:
                job["fault"](engine)
                job = {**job, "fault": None}
            time.sleep(job.get("pause", 0.0))
            try:
                loss = engine.train_batch()
            except RuntimeError as error:
                Path(job["folder"], f"{job['name']}.error").write_text(str(error))
                raise
            line = [engine.global_steps - 1, float(loss).hex(), time.monotonic(), engine.replicas.members]
            file.write(json.dumps(line) + "\n")
            file.flush()
    _write_end(engine, job)
    engine.leave()


def _write_end(engine: Any, job: Mapping[str, Any]) -> None:
    """Write a rank's weights as hex, and the bytes that it holds."""
    weights = {
        name: [each.hex() for each in value.double().flatten().tolist()] for name, value in engine.gather().items()
    }
    found = {"weights": weights, "held": engine.memory_report()["held"]}
    Path(job["folder"], f"{job['name']}.{engine.grid.rank}.end").write_text(json.dumps(found))


def _since(engine: Any, names: Sequence[str]) -> int | None:
    """Return the number of steps since these replicas were first members together; None if they were not."""
    for change in engine.replicas.ledger.changes:
        if set(names) <= set(change.members or ()):
            return int(engine.global_steps - change.step)
    return None


def _is_over(engine: Any, job: Mapping[str, Any]) -> bool:
    """Return True at the end of the run: equal on all replicas, because it depends on the history alone."""
    if "steps" in job:
        return bool(engine.global_steps >= job["steps"])
    changes, step = engine.replicas.ledger.changes, engine.global_steps
    since = _since(engine, job["gather"])
    met = since is not None and set(job["final"]) == set(engine.replicas.ledger.members)
    later = [change for change in changes if since is not None and change.step >= step - since]
    lost = {name for change in later for name in change.lost} | {
        name for change in later for name in job["gather"] if change.members and name not in change.members
    }
    faults = all(name in lost for name in job.get("faults", ()))
    return bool(met and faults and step - changes[-1].step >= job.get("more", 3))


def kill(engine: Any) -> None:
    """Kill this process in the forward pass of the next step."""
    engine.module.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    layer = next(module for module in engine.module.modules() if isinstance(module, nn.Linear))
    layer.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def kill_in_sum(engine: Any) -> None:
    """Kill this process between the sums of two tensors of the next step."""
    group, count = engine.replicas._group, []
    sum_of = group.sum

    def summed(*arguments: Any) -> Tensor:
        count.append(1)
        if len(count) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return sum_of(*arguments)

    group.sum = summed


def kill_after_sum(engine: Any) -> None:
    """Kill this process when it has the whole sum of the next step, before it says so."""
    engine.replicas._meet = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def kill_in_gather(engine: Any) -> None:
    """Kill this process when it has stepped its part of the optimizer state, before it gives the weights."""
    engine.replicas.shards.gather_weights = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def kill_in_move(engine: Any) -> None:
    """Kill this process within its next transfer of a part of the optimizer state."""
    from triax.fault_tolerance import sharded_state

    send = sharded_state.send_state

    def sent(header: Tensor, *arguments: Any) -> None:
        send(header, [], *arguments[1:])
        os.kill(os.getpid(), signal.SIGKILL)

    sharded_state.send_state = sent


def stop_for_a_while(engine: Any) -> None:
    """Stop this process for four seconds."""
    subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def ask_to_leave(engine: Any) -> None:
    """Send SIGTERM to this process, as triax drain does."""
    os.kill(os.getpid(), signal.SIGTERM)


CONTEXT = multiprocessing.get_context("forkserver")
# Loaded once, by the server: each process would take seconds on two cores.
CONTEXT.set_forkserver_preload(
    ["torch", "torch.distributed.device_mesh", "torchft.coordination", "triax.engine.engines", "triax.data.dataloader"]
    + ["triax.fault_tolerance.strategy", "triax.optim.optimizers"]
)


def start(folder: Path, name: str, address: str, **job: Any) -> list[Any]:
    """Start the processes of a replica; return them in rank order."""
    size = 1
    for each in job.get("grid", {}).values():
        size *= each
    options = {"coordinator": address, "timeout": 20.0, "give_up": 20.0, **job.pop("options", {})}
    plain = {"seed": 0, "name": name, "folder": str(folder), "port": free_port(), **job}
    started = [CONTEXT.Process(target=train, args=({**plain, "rank": r, "options": options},)) for r in range(size)]
    for process in started:
        process.start()
    return started


def start_in_order(folder: Path, names: str, address: str, **job: Any) -> dict[str, list[Any]]:
    """Start replicas one after the other, each once the one before has taken a step: their order is that of ``names``.

    Args:
        folder: the folder of the run.
        names: the replicas.
        address: the coordinator's address.
        job: of ``start``; ``faults`` has a replica's ``after`` and ``fault`` by its name.
    """
    faults = job.pop("faults")
    started = {}
    for name in names:
        started[name] = start(folder, name, address, **job, faults="".join(faults), **faults.get(name, {}))
        deadline = time.monotonic() + 60.0
        while not _has_stepped(folder, name) and time.monotonic() < deadline:
            time.sleep(0.02)
    return started


def _has_stepped(folder: Path, name: str) -> bool:
    file = Path(folder, f"{name}.0.losses")
    return file.exists() and file.stat().st_size > 0


@contextlib.contextmanager
def coordinator(least: int, silence: float = 0.6, patience: float = 20.0) -> Iterator[str]:
    """Run a coordinator; yields its address."""
    port = free_port()
    process = CONTEXT.Process(target=_serve, args=(port, least, silence, patience))
    process.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.join()


def _serve(port: int, least: int, silence: float, patience: float) -> None:
    from triax.fault_tolerance.coordinator import serve

    with Path(os.devnull).open("w") as nothing:
        os.dup2(nothing.fileno(), 2)  # the Lighthouse logs every meeting
    server = serve(port, least, silence, patience, "127.0.0.1")
    signal.pause()
    server.shutdown()


def finish(processes: Sequence[Any], seconds: float = 150.0) -> list[int | None]:
    """Wait for processes, and return their exit codes; None for one that is still there, which is killed."""
    deadline = time.monotonic() + seconds
    codes: list[int | None] = []
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        codes.append(process.exitcode)
        if process.exitcode is None:
            process.kill()
    return codes


def end(folder: Path, name: str, rank: int = 0) -> dict[str, Any]:
    """Return the weights of a replica at its end, and the bytes that one of its ranks held."""
    return dict(json.loads(Path(folder, f"{name}.{rank}.end").read_text()))


def losses(folder: Path, name: str, rank: int = 0) -> dict[int, str]:
    """Return the losses of a replica, as hex: step -> loss."""
    lines = Path(folder, f"{name}.{rank}.losses").read_text().splitlines()
    return {step: loss for step, loss, *_ in map(json.loads, lines)}


def changes(file: Path) -> list[Change]:
    """Changes of a history file."""
    return [Change.of(line) for line in file.read_text().splitlines()]


def replayed(folder: Path, history: Path, names: str, steps: int, **job: Any) -> dict[int, str]:
    """Replay a history without faults; return the losses."""
    folder.mkdir()
    options = {**job.pop("options", {}), "replay": str(history)}
    with coordinator(least=len(names)) as address:
        run = [p for name in names for p in start(folder, name, address, steps=steps, options=options, **job)]
        assert set(finish(run)) == {0}
    found = [losses(folder, name) for name in names]
    assert all(each == found[0] for each in found)
    return found[0]


def in_one_process(history: Path, steps: int) -> tuple[list[float], dict[str, list[float]]]:
    """Losses and final weights of one process of plain torch that takes the samples of a history."""
    ledger, past = Ledger(), History.read(history)
    model = triax.PipelineModule(layers(0.0), loss_fn=loss_fn, grid=triax.Grid(), seed=0)
    first, last = (module for module in model.modules() if isinstance(module, nn.Linear))
    adamw = optimizer([*first.parameters(), *last.parameters()])
    loader, found = make_loader(Samples(), SHARE, SHARE, 0, 1, 0), []
    for step in range(steps):
        members, counted = past.members(step), past.counted(step)
        shares = ledger.plan(members)
        total, weight = torch.zeros((), dtype=torch.float64), 0
        for name in counted:
            loader.seek(shares[name])
            inputs, labels = next(iter(loader))
            loss, count = loss_fn(last(torch.tanh(first(inputs))), labels)
            total, weight = total + loss, weight + int(count)
        ledger.record(step, members, counted)
        adamw.zero_grad()
        (total / weight).backward()
        nn.utils.clip_grad_norm_([*first.parameters(), *last.parameters()], 1.0)
        adamw.step()
        found.append(float(total.detach() / weight))
    named = zip(("layers.0", "layers.3"), (first, last), strict=True)
    weights = {f"{at}.{name}": p.flatten().tolist() for at, layer in named for name, p in layer.named_parameters()}
    return found, weights


def require_equal(folder: Path, names: str, steps: int, **job: Any) -> dict[int, str]:
    """Check the steps of replicas against a replay of the first one's history, bit by bit, and against one process.

    Args:
        folder: the folder of the run.
        names: the replicas that were ever members.
        steps: the number of steps.
        job: of ``start``.

    Returns:
        The losses.
    """
    found = [losses(folder, name) for name in names]
    whole = {step: loss for each in found for step, loss in each.items()}
    assert sorted(whole) == list(range(steps)) and all(each.items() <= whole.items() for each in found)
    history = folder / f"{names[0]}.jsonl"
    assert replayed(folder / "again", history, names, steps, **job) == whole
    weights = end(folder, names[0])["weights"]
    assert end(folder / "again", names[0])["weights"] == weights
    expected, model = in_one_process(history, steps)
    assert [float.fromhex(whole[step]) for step in range(steps)] == pytest.approx(expected, rel=1e-10)
    for name, values in model.items():
        assert [float.fromhex(each) for each in weights[name]] == pytest.approx(values, rel=1e-10, abs=1e-12)
    return whole
