"""Replicas of a small run as processes, each with a grid of its own, that tests kill, stop and replay."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax.data.dataloader import make_loader
from triax.engine.step_observer import StepObserver
from triax.moe import MoE
from triax.plugins.fault_tolerance.coordinator import Coordinator
from triax.plugins.fault_tolerance.membership import Change, History, Ledger, read_changes
from triax.plugins.fault_tolerance.replica_group import ReplicaGroup

from support.network_namespaces import enter
from support.processes import free_port

SAMPLES, SHARE, MICRO, WIDTH = 60, 4, 2, 6
SECRET = "the secret of the tests"


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


class NamedLoss:
    """Two pairs with weights of their own, and a mean."""

    def __call__(self, outputs: Tensor, labels: Tensor) -> dict[str, Any]:
        total, count = loss_fn(outputs, labels)
        size, odd = outputs.pow(2).sum(-1), labels[:, 0] % 2
        return {"ce": (total, count), "odd": (0.1 * (size * odd).sum(), odd.sum()), "size": 0.01 * size.mean()}

    def weight(self, labels: Tensor) -> dict[str, Tensor]:
        return {"ce": (labels != -100).sum(), "odd": (labels[:, 0] % 2).sum()}


class CountedLoss:
    """``loss_fn`` with the weight of labels, which auxiliary losses need."""

    def __call__(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return loss_fn(outputs, labels)

    def weight(self, labels: Tensor) -> Tensor:
        return (labels != -100).sum()


class Experts(nn.Module):
    """A mixture of experts over the samples as tokens of sequences of length 2."""

    def __init__(self, grid: triax.Grid) -> None:
        super().__init__()
        balance = ("sequence", "bias")
        self.moe = MoE(12, 4, 2, grid=grid, width=8, balance=balance, balance_coefficient=0.1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.moe(x.unsqueeze(1)).squeeze(1)
        return y


def layers(dropout: float, experts: bool = False, dtype: torch.dtype = torch.float64) -> list[Any]:
    """Return the layers of the model, with a mixture of experts if asked for."""
    make = partial(nn.Linear, dtype=dtype)
    middle = nn.Dropout(dropout) if not experts else triax.LayerSpec(Experts)
    return [triax.LayerSpec(make, WIDTH, 12), torch.tanh, middle, triax.LayerSpec(make, 12, 3 * WIDTH)]


def model_of(kind: str, grid: triax.Grid, seed: int, dropout: float = 0.0) -> triax.PipelineModule:
    """Return the model of a kind: plain, narrow (in float32), named or experts."""
    if kind == "narrow":
        return triax.PipelineModule(layers(dropout, dtype=torch.float32), loss_fn=loss_fn, grid=grid, seed=seed)
    if kind == "plain":
        return triax.PipelineModule(layers(dropout), loss_fn=loss_fn, grid=grid, seed=seed)
    if kind == "experts":
        return triax.PipelineModule(layers(dropout, True), loss_fn=CountedLoss(), grid=grid, seed=seed)
    return triax.PipelineModule(layers(dropout), loss_fn=NamedLoss(), grid=grid, seed=seed)


def plain_module(seed: int) -> nn.Sequential:
    """Return the model as a module of torch's, which returns a loss."""
    torch.manual_seed(seed)
    make = partial(nn.Linear, dtype=torch.float64)
    return nn.Sequential(make(WIDTH, 12), nn.Tanh(), make(12, 3 * WIDTH))


def optimizer(groups: Any) -> torch.optim.Optimizer:
    """Return the optimizer of the run."""
    return torch.optim.AdamW(groups, lr=0.05)


def train(job: Mapping[str, Any]) -> None:
    """Train as one rank of a replica; write a line for each step: step, loss as hex, time, members."""
    if "host" in job:
        enter(job["host"])
    if "log" in job:
        with Path(job["log"]).open("ab") as file:
            os.dup2(file.fileno(), 2)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "TRIAX_SECRET": job.get("secret", SECRET)}
    torch.set_num_threads(1)
    grid_sizes = job.get("grid", {})
    size = 1
    for each in grid_sizes.values():
        size *= each
    if size > 1:
        os.environ |= {"RANK": str(job["rank"]), "WORLD_SIZE": str(size), "LOCAL_RANK": str(job["rank"])}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"]), "LOCAL_WORLD_SIZE": str(size)}
    grid = triax.Grid(**grid_sizes)
    kind = job.get("kind", "plain")
    model: Any = plain_module(job["seed"]) if kind == "module" else None
    model = model or model_of(kind, grid, job["seed"], job.get("dropout", 0.0))
    engine: Any = triax.Engine(
        model,
        grid=grid if kind == "module" else None,
        optimizer=optimizer,
        batch=triax.Batch(size=SHARE, microbatch=MICRO if grid.replicas == 1 else SHARE // grid.replicas),
        clip=1.0,
        precision=job.get("precision", triax.Precision()),
        training_data=Samples(torch.float32 if kind == "narrow" else torch.float64),
        zero=job.get("zero", 0),
        local_updates=job.get("local"),
        checkpoint=job.get("checkpoint", triax.Checkpoints()),
        fault_tolerance={"replica": job["name"], "folder": job["folder"], **job["options"]},
    )
    microbatches = engine.replicas.microbatches()
    engine.observers.append(LastLoss())
    with Path(job["folder"], f"{job['name']}.{grid.rank}.losses").open("a") as file:
        while not _is_over(engine, job):
            since = _since(engine, job.get("gather", ()))
            if since is not None and job.get("fault") is not None and since >= job["after"]:
                job["fault"](engine)
                job = {**job, "fault": None}
            time.sleep(job.get("pause", 0.0))
            if engine.global_steps and "hold" in job:
                until(partial(_is_gone, Path(job["hold"])))
            loss = engine.train_batch() if kind != "module" else _module_step(engine, microbatches)
            line = [engine.global_steps - 1, float(loss).hex(), time.monotonic(), engine.replicas.members]
            file.write(json.dumps(line) + "\n")
            file.flush()
    weights, facts = engine.gather(), {"metrics": engine.metrics, "loads": engine.expert_loads()}
    held = Path(job["folder"], f"{job['name']}.{grid.rank}.held")
    held.write_text(json.dumps(engine.memory_report()["held"]))
    if grid.rank == 0:
        torch.save(weights, Path(job["folder"], f"{job['name']}.weights"))
        torch.save(facts, Path(job["folder"], f"{job['name']}.facts"))
    engine.leave()


def _rounds(engine: Any) -> int:
    """Return the number of steps; with local updates the number of rounds."""
    return int(engine.global_steps // engine.replicas.batches)


def _module_step(engine: Any, microbatches: Iterator[Any]) -> float:
    """Take a step of a plain module; return the loss of all replicas."""
    for _ in range(engine.batch.accumulation):
        inputs, labels = next(microbatches)
        engine.backward(loss_fn(engine(inputs), labels))
        engine.step()
    last: LastLoss = engine.observers[-1]
    return last.loss


class LastLoss(StepObserver):
    """Observer that keeps the loss of the last step."""

    loss = 0.0

    def after_step(self, grid: triax.Grid, loss: Tensor) -> None:
        self.loss = float(loss)


def _since(engine: Any, names: Sequence[str]) -> int | None:
    """Return the number of steps since these replicas were first members together; None if they were not."""
    for change in engine.replicas.ledger.changes:
        if set(names) <= set(change.members or ()):
            return _rounds(engine) - int(change.step)
    return None


def _is_over(engine: Any, job: Mapping[str, Any]) -> bool:
    """Return True at the end of the run: equal on all replicas, because it depends on the history alone."""
    if "steps" in job:
        return bool(engine.global_steps >= job["steps"])
    changes, step = engine.replicas.ledger.changes, _rounds(engine)
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
    group, count = engine.replicas.link.group, []
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
    engine.replicas.sharded.gather_weights = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def kill_in_move(engine: Any) -> None:
    """Kill this process within its next transfer of a part of the optimizer state."""
    from triax.plugins.fault_tolerance import sharded_state

    send = sharded_state.send_state

    def sent(header: Tensor, tensors: list[Tensor], group: ReplicaGroup, to: int) -> None:
        send(header, [], group, to)
        os.kill(os.getpid(), signal.SIGKILL)

    sharded_state.send_state = sent


def stop_for_a_while(engine: Any) -> None:
    """Stop this process for four seconds."""
    subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def ask_to_leave(engine: Any) -> None:
    """Send SIGTERM to this process, as triax replicas drain does."""
    os.kill(os.getpid(), signal.SIGTERM)


CONTEXT = multiprocessing.get_context("forkserver")
# Loaded once, by the server: each process would take seconds on two cores.
CONTEXT.set_forkserver_preload(
    ["torch", "torch.distributed.device_mesh", "triax.engine.engines", "triax.data.dataloader"]
    + ["triax.plugins.fault_tolerance.strategy", "triax.engine.optim.optimizers"]
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
        until(partial(has_stepped, folder, name))
    return started


def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until something holds, or for some seconds."""
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)


def _is_gone(path: Path) -> bool:
    return not path.exists()


def has_stepped(folder: Path, name: str) -> bool:
    """Return True if the first rank of a replica has taken a step."""
    file = Path(folder, f"{name}.0.losses")
    return file.exists() and file.stat().st_size > 0


@contextlib.contextmanager
def coordinator(
    min_replicas: int, heartbeat_timeout: float = 0.6, straggler_timeout: float = 20.0, host: str | None = None
) -> Iterator[str]:
    """Run a coordinator, in the network namespace ``host`` if that is given; yields its address."""
    port = free_port()
    process = CONTEXT.Process(target=_serve, args=(port, min_replicas, heartbeat_timeout, straggler_timeout, host))
    process.start()
    try:
        yield f"{host or '127.0.0.1'}:{port}"
    finally:
        process.kill()
        process.join()


def _serve(port: int, min_replicas: int, heartbeat_timeout: float, straggler_timeout: float, host: str | None) -> None:
    if host is not None:
        enter(host)
    Coordinator(port, min_replicas, heartbeat_timeout, straggler_timeout, SECRET.encode(), host or "127.0.0.1")
    signal.pause()


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


def losses(folder: Path, name: str, rank: int = 0) -> dict[int, str]:
    """Return the losses of a replica, as hex: step -> loss."""
    lines = Path(folder, f"{name}.{rank}.losses").read_text().splitlines()
    return {step: loss for step, loss, *_ in map(json.loads, lines)}


def held(folder: Path, name: str, rank: int = 0) -> dict[str, int]:
    """Return the bytes that a rank of a replica held at its end, by kind."""
    return dict(json.loads(Path(folder, f"{name}.{rank}.held").read_text()))


def changes(file: Path) -> list[Change]:
    """Changes of a history file."""
    return read_changes(file)


def replayed(folder: Path, history: Path, names: str, steps: int, **job: Any) -> dict[int, str]:
    """Replay a history without faults; return the losses."""
    folder.mkdir()
    options = {**job.pop("options", {}), "replay": str(history)}
    with coordinator(min_replicas=len(names)) as address:
        run = [p for name in names for p in start(folder, name, address, steps=steps, options=options, **job)]
        assert set(finish(run)) == {0}
    found = [losses(folder, name) for name in names]
    assert all(each == found[0] for each in found)
    return found[0]


def in_one_process(history: Path, steps: int, kind: str = "plain") -> tuple[list[float], list[Tensor]]:
    """Losses and last weights of one process of plain torch that takes the samples of a history."""
    ledger, past = Ledger(), History.from_file(history)
    model = plain_module(0) if kind == "module" else model_of(kind, triax.Grid(), 0)
    first, last = (module for module in model.modules() if isinstance(module, nn.Linear))
    adamw = optimizer([*first.parameters(), *last.parameters()])
    loader, found = make_loader(Samples(), SHARE, SHARE, 0, 1, 0), []
    for step in range(steps):
        members, counted = past.members(step), past.counted(step)
        shares = ledger.plan(members)
        batches = []
        for name in counted:
            loader.seek(shares[name])
            inputs, labels = next(iter(loader))
            batches.append((last(torch.tanh(first(inputs))), labels))
        ledger.record(step, members, counted)
        loss = whole_loss(batches, kind)
        adamw.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([*first.parameters(), *last.parameters()], 1.0)
        adamw.step()
        found.append(float(loss.detach()))
    return found, [p.detach() for p in (*first.parameters(), *last.parameters())]


def whole_loss(batches: list[tuple[Tensor, Tensor]], kind: str) -> Tensor:
    """Loss of a whole batch, of (outputs, labels) of each share."""
    if kind == "module":  # a mean over microbatches
        pairs = [loss_fn(*part) for each in batches for part in zip(*(x.split(MICRO) for x in each), strict=True)]
        return torch.stack([total / count for total, count in pairs]).mean()
    outputs, labels = (torch.cat(each) for each in zip(*batches, strict=True))
    if kind == "plain":
        total, count = loss_fn(outputs, labels)
        return total / count
    terms = NamedLoss()(outputs, labels)
    (total, count), (odd, odd_count) = terms["ce"], terms["odd"]
    return total / count + odd / odd_count.clamp(min=1) + terms["size"]  # a batch may have no odd label


def require_equal(folder: Path, names: str, **job: Any) -> int:
    """Check a run against a replay of the first replica's history, bit by bit, and against one process in float64.

    Args:
        folder: the folder of the run.
        names: the replicas that were ever members; the first one has the last step.
        job: of ``start``.

    Returns:
        The number of steps.
    """
    found = [losses(folder, name) for name in names]
    whole, history = {step: loss for each in found for step, loss in each.items()}, folder / f"{names[0]}.jsonl"
    steps = len(whole)
    assert max(found[0]) == steps - 1 and all(each.items() <= whole.items() for each in found)
    assert replayed(folder / "again", history, names, steps, **job) == whole
    weights, same = (torch.load(Path(each, f"{names[0]}.weights")) for each in (folder, folder / "again"))
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    expected, values = in_one_process(history, steps, job.get("kind", "plain"))
    assert [float.fromhex(whole[step]) for step in range(steps)] == pytest.approx(expected, rel=1e-10)
    for one, other in zip(weights.values(), values, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    return steps
