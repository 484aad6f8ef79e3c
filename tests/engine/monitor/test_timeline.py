"""``triax run --timeline``: what ranks write, the one file that is made of it, and what remains after a crash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import triax.compat.horovod as hvd
from triax import Grid, LayerSpec, PipelineModule, initialize
from triax.engine.monitor.trace.merge_timelines import merge, merged
from triax.grid.comm.comms_log import CommsLog
from triax.grid.comm.spans import Spans
from triax.grid.comm.timeline_recorder import TimelineRecorder
from triax.grid.environment import TIMELINE
from triax.testing.pool import RankFailure

from support.horovod_example import EXAMPLE, plain_example
from support.training import small_config

DRIVER = """
import runpy, sys
from safetensors.torch import save_file
import triax.compat.horovod as hvd
script, saved = sys.argv[1:3]
sys.argv[1:3] = []
model, results = runpy.run_path(script)["main"]()
if hvd.rank() == 0:
    save_file(model.state_dict(), saved)
"""


def bars(trace: dict[str, Any], rank: int) -> list[tuple[str, str, float, float, dict[str, Any]]]:
    """Bars of a rank's collectives: name, phase, start and end in microseconds, arguments. Every bar must be closed."""
    found: list[Any] = []
    open_: dict[str, list[Any]] = {}
    for event in trace["traceEvents"]:
        if event["pid"] != rank or event["ph"] not in "be":
            continue
        stack = open_.setdefault(event["id"], [])
        if event["ph"] == "b":
            stack.append(event)
            continue
        begun = stack.pop()
        assert begun["name"] == event["name"] and begun["ts"] <= event["ts"] and begun["cat"] == event["cat"]
        if stack:
            found.append((stack[0]["name"], begun["name"], begun["ts"], event["ts"], begun["args"]))
    assert not any(open_.values())
    return found


def spans(trace: dict[str, Any], rank: int, kind: str) -> list[str]:
    events = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == rank and e["cat"] == kind]
    return [event["name"] for event in sorted(events, key=lambda event: event["ts"])]


# -------------------------------------------------------------------------------------------------------- the one file


def part(rank: int, *entries: tuple[Any, ...], attempt: int = 0, grid: int = 0) -> str:
    head = [("rank", rank, f"rank {rank} (data {rank})", attempt, grid, 9.0), ("axis", 0, "data", [0, 1], 0)]
    return "".join(json.dumps(entry) + "\n" for entry in [*head, *entries])


def test_negotiation_ends_when_the_last_rank_arrives() -> None:
    """Two collectives, waited for in the other order, a message and a span, each to the microsecond."""
    first = part(
        0,
        ("begin", 0, 0, "all_reduce", 64, "", "", 10.0),
        ("begin", 1, 0, "reduce_scatter", 32, "fc1.weight", "", 10.001),
        ("end", 1, 10.005, 10.007, 77),
        ("end", 0, 10.007, 10.008, 77),
        ("begin", 2, 0, "send", 8, "", "", 10.0085),
        ("end", 2, 10.0085, 10.009, 77),
        ("span", "step 1", "step", 10.0, 10.01, 77),
    )
    second = part(
        1,
        ("begin", 0, 0, "all_reduce", 64, "", "", 10.003),
        ("begin", 1, 0, "reduce_scatter", 32, "fc1.weight", "", 10.0005),
        ("end", 1, 10.004, 10.006, 5),
        ("end", 0, 10.006, 10.008, 5),
        ("begin", 2, 0, "receive", 8, "", "", 10.008),
        ("end", 2, 10.008, 10.009, 6),
    )
    trace = merged([first, second])
    assert json.loads(json.dumps(trace)) == trace
    assert trace["otherData"] == {"ranks": ["rank 0 (data 0)", "rank 1 (data 1)"], "unfinished": []}

    def times(rank: int) -> list[tuple[str, str, int, int]]:
        return [(name, phase, round(start), round(end)) for name, phase, start, end, _ in bars(trace, rank)]

    assert times(0) == [
        ("data axis", "NEGOTIATE_ALLREDUCE", 0, 3000),
        ("data axis", "ALLREDUCE", 3000, 8000),
        ("fc1.weight", "NEGOTIATE_REDUCESCATTER", 1000, 1000),  # it came last
        ("fc1.weight", "REDUCESCATTER", 1000, 7000),
        ("data axis", "SEND", 8500, 9000),
    ]
    assert times(1)[:3] == [
        ("data axis", "NEGOTIATE_ALLREDUCE", 3000, 3000),
        ("data axis", "ALLREDUCE", 3000, 8000),
        ("fc1.weight", "NEGOTIATE_REDUCESCATTER", 500, 1000),
    ]
    negotiated = bars(trace, 0)[0][-1]
    assert negotiated["last"] == "rank 1" and {k: round(v) for k, v in negotiated["arrived_us"].items()} == {
        "rank 0": 0,
        "rank 1": 3000,
    }
    waits = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] == "wait" and e["pid"] == 0]
    assert [(e["name"], round(e["ts"]), round(e["dur"]), e["tid"]) for e in waits] == [
        ("ALLREDUCE data axis", 7000, 1000, 0),
        ("REDUCESCATTER fc1.weight", 5000, 2000, 0),
        ("SEND data axis", 8500, 500, 0),
    ]
    assert {e["tid"] for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 1} == {0, 1}  # two threads
    assert spans(trace, 0, "step") == ["step 1"]


def test_unfinished_calls_of_ended_ranks_are_listed() -> None:
    """Killed while it wrote; and started again: attempts are not mixed, nor a script's grids."""
    hanging = part(0, ("begin", 0, 0, "all_reduce", 64, "loss", "", 10.0))
    killed = part(1, ("span", "step 1", "step", 9.5, 10.2, 1)) + '["begin", 0, 0, "all_re'
    again = [part(rank, ("begin", 0, 0, "all_reduce", 64, "", "", 20.0 + rank), attempt=1) for rank in range(2)]
    other = [part(rank, ("begin", 0, 0, "barrier", 0, "", "", 20.0 + rank), attempt=1, grid=1) for rank in range(2)]
    trace = merged([hanging, killed, "", '["ra', *again, *other])
    lost = trace["otherData"]["unfinished"]
    assert [(entry["rank"], entry["op"]) for entry in lost] == [
        *((0, "ALLREDUCE"),),
        *((0, "ALLREDUCE"), (1, "ALLREDUCE")),
        *((0, "BARRIER"), (1, "BARRIER")),
    ]
    assert lost[0]["name"] == "loss"
    phases = [(phase, start, args.get("unfinished")) for _, phase, start, _, args in bars(trace, 0)]
    assert [(phase, unfinished) for phase, _, unfinished in phases] == [
        ("ALLREDUCE", True),  # nobody else came to it
        *(("NEGOTIATE_ALLREDUCE", True), ("ALLREDUCE", True)),
        *(("NEGOTIATE_BARRIER", True), ("BARRIER", True)),
    ]
    assert merged([]) == {"traceEvents": [], "displayTimeUnit": "ms", "otherData": {"ranks": [], "unfinished": []}}


# ------------------------------------------------------------------------------------------------------ what is written


def engines(folder: str) -> dict[str, Any]:
    """A pipeline of two stages, then a plain module on two replicas, with a log of messages beside."""
    os.environ[TIMELINE] = folder
    grid = Grid(pipe=2, timeout=60)
    layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(4)]
    module = PipelineModule(layers, grid=grid, loss_fn=lambda o, y: (o - y).square().mean())
    config = small_config({"type": "SGD"}, batch=8, accumulation=4, comms_logger={"enabled": True})
    engine, *_ = initialize(model=module, config=config)
    assert grid.spans.reader(CommsLog) is not None
    batch = (torch.ones(2, 4), torch.zeros(2, 4))
    for _ in range(2):
        engine.train_batch(iter([batch] * 4))

    replicas = Grid(timeout=60)
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 1}}
    plain, *_ = initialize(model=nn.Linear(4, 1), config=config, grid=replicas)
    replicas.traffic.clear()
    for _ in range(3):
        plain.backward(plain(torch.ones(2, 4)).sum())
        plain.step()
    report = replicas.traffic.report()["data"]
    return {name: sent.calls for name, sent in report.items()}


def test_engine_timelines_have_passes_steps_and_messages(ranks: Any, tmp_path: Path) -> None:
    found = ranks(2, engines, str(tmp_path / "parts"))
    assert merge(tmp_path / "parts", tmp_path / "t.json") == 2
    trace = json.loads((tmp_path / "t.json").read_text())
    assert trace["otherData"]["ranks"][1] == "rank 1 (pipe 0, data 1, tensor 0)"  # as the last grid calls it
    for rank, counted in enumerate(found):
        passes = spans(trace, rank, "compute")
        for microbatch in range(4):
            assert passes.count(f"{rank}F{microbatch}") == passes.count(f"{rank}B{microbatch}") == 2
        assert passes.count("forward") == passes.count("backward") == 3
        assert spans(trace, rank, "step") == ["step 1", "step 2", "step 1", "step 2", "step 3"]
        assert spans(trace, rank, "optimizer") == ["optimizer"] * 5
        sent = [args["bytes"] for name, phase, *_, args in bars(trace, rank) if (name, phase) == ("pipe axis", "SEND")]
        assert sent.count(2 * 4 * 4) == 2 * 4  # activations, or their gradients, of each microbatch in each step
        assert sum(1 for event in trace["traceEvents"] if event["pid"] == rank and event["ph"] == "M") == 2
        gathers = [args for _, phase, *_, args in bars(trace, rank) if phase == "ALLGATHER"]
        assert len(gathers) == counted["all_gather"] == 3
    assert trace["otherData"]["unfinished"] == []


def dies(folder: str) -> None:
    os.environ[TIMELINE] = folder
    grid = Grid(timeout=20)
    x = torch.ones(1000)
    for number in range(5):
        grid.world.all_reduce(x)
        if number == 3 and grid.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def test_the_timeline_shows_the_call_that_waits_for_a_killed_rank(ranks: Any, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="SIGKILL"):
        ranks(2, dies, str(tmp_path / "parts"))
    merge(tmp_path / "parts", tmp_path / "t.json")
    trace = json.loads((tmp_path / "t.json").read_text())
    (lost,) = trace["otherData"]["unfinished"]
    assert (lost["rank"], lost["op"], lost["axis"], lost["bytes"]) == (0, "ALLREDUCE", "world", 4000)
    assert [phase for _, phase, *_ in bars(trace, 0)].count("NEGOTIATE_ALLREDUCE") == 4
    assert len(bars(trace, 1)) == 8


def called(file: str) -> None:
    """Between ``start_timeline`` and ``stop_timeline``, and nothing beside."""
    hvd.init(timeout=60)
    try:
        hvd.allreduce(torch.ones(1), name="before")
        hvd.start_timeline(file)
        with pytest.raises(ValueError, match="recorded already"):
            hvd.start_timeline(file)
        hvd.allreduce(torch.ones(1), name="within")
        hvd.synchronize(hvd.allreduce_async(torch.ones(1), name="beside"))
        model = nn.Linear(2, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters()), model.named_parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        hvd.stop_timeline()
        hvd.allreduce(torch.ones(1), name="after")
    finally:
        hvd.shutdown()


def test_a_closed_timeline_recorder_writes_nothing(tmp_path: Path) -> None:
    """It does not write into another file either that got the file number of the closed one."""
    recorder, spans = TimelineRecorder(tmp_path, 0, "rank 0"), Spans()
    spans.read(recorder)
    late = spans("step", "late")
    late.__enter__()
    written, number = recorder.file.read_text(), recorder._out
    recorder.close()
    with (tmp_path / "other").open("wb", buffering=0) as other:
        assert other.fileno() == number
        late.__exit__(None, None, None)
        with spans("step", "later"):
            pass
    recorder.close()
    assert (tmp_path / "other").read_bytes() == b"" and recorder.file.read_text() == written


def under_way(folder: str) -> None:
    """Recording begins and ends while calls and gradients are under way."""
    hvd.init(timeout=60)
    try:
        model = nn.Linear(200, 40)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters()), model.named_parameters())
        for turn in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 200)).sum().backward()
            before = [hvd.allreduce_async(torch.ones(20_000), name=f"before {i}", op=hvd.Sum) for i in range(4)]
            hvd.start_timeline(f"{folder}/{turn}.json")
            within = [hvd.allreduce_async(torch.ones(20_000), name=f"within {i}", op=hvd.Sum) for i in range(4)]
            optimizer.step()
            optimizer.zero_grad()
            model(torch.ones(1, 200)).sum().backward()
            hvd.stop_timeline()
            optimizer.step()
            for handle in (*before, *within):
                assert torch.equal(hvd.synchronize(handle), torch.full((20_000,), 2.0))
    finally:
        hvd.shutdown()


def test_timelines_have_only_the_calls_started_while_recording(ranks: Any, tmp_path: Path) -> None:
    ranks(2, under_way, str(tmp_path))
    for turn in range(3):
        trace = json.loads((tmp_path / f"{turn}.json").read_text())
        for rank in range(2):
            names = {name for name, phase, *_ in bars(trace, rank) if phase == "ALLREDUCE"}
            assert {name for name in names if name[:6] in ("before", "within")} == {f"within {i}" for i in range(4)}


def test_a_horovod_timeline_has_the_calls_between_start_and_stop(ranks: Any, tmp_path: Path) -> None:
    ranks(2, called, str(tmp_path / "t.json"))
    trace = json.loads((tmp_path / "t.json").read_text())
    for rank in range(2):
        names = [(name, phase) for name, phase, *_ in bars(trace, rank)]
        assert ("within", "NEGOTIATE_ALLREDUCE") in names and ("within", "ALLREDUCE") in names
        assert ("beside", "ALLREDUCE") in names
        assert ("gradients 0: bias, weight", "NEGOTIATE_ALLREDUCE") in names
        assert not {"before", "after"} & {name for name, _ in names}
        assert spans(trace, rank, "optimizer") == ["synchronize", "step"]


def off() -> None:
    grid = Grid(timeout=60)
    assert not grid.spans.readers and grid.world.spans is grid.data.spans is grid.spans


def test_spans_have_no_readers_without_a_timeline(ranks: Any) -> None:
    ranks(2, off)


# --------------------------------------------------------------------------------------------------------- as launched


def launched(folder: Path, *command: str) -> str:
    """The example, started so, ends with the weights of one process; returns what was printed."""
    (folder / "driver.py").write_text(DRIVER)
    options = ["--double", "--samples", "64", "--batch-size", "8", "--epochs", "1", "--lr", "0.1"]
    words = [*command, "driver.py", str(EXAMPLE), "saved.safetensors", *options]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = load_file(folder / "saved.safetensors")
    for name, tensor in plain_example(2, 64, 8, 1, 0.1, 0.0)[0].items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12)
    assert "epoch 1 held out: loss" in done.stdout
    return done.stderr


def test_horovods_example_writes_a_timeline_under_triax_run(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    launched(tmp_path, sys.executable, "-m", "triax.cli.main", "run", "--nproc", "2", "--timeline", "out/timeline.json")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["timeline.json"]
    trace = json.loads((tmp_path / "out" / "timeline.json").read_text())
    assert trace["otherData"]["unfinished"] == [] and len(trace["otherData"]["ranks"]) == 2
    for rank in range(2):
        found = [(name, phase) for name, phase, *_ in bars(trace, rank)]
        assert found.count(("gradients 0: fc2.bias, fc2.weight, fc1.bias, ...", "ALLREDUCE")) == 4  # one a step
        assert found.count(("avg_loss", "ALLREDUCE")) == found.count(("avg_loss", "NEGOTIATE_ALLREDUCE")) == 1
        assert spans(trace, rank, "optimizer") == ["synchronize", "step"] * 4


@pytest.mark.exhaustive
def test_horovods_example_trains_under_torchrun(tmp_path: Path) -> None:
    launched(tmp_path, str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", "2")


@pytest.mark.exhaustive
def test_triax_run_writes_a_timeline_when_a_rank_is_killed(tmp_path: Path) -> None:
    """The launcher writes the file all the same; and where no rank made a grid, it says so."""
    (tmp_path / "script.py").write_text(
        "import os, signal, sys\nimport torch\nimport triax.compat.horovod as hvd\n"
        "if sys.argv[1:]: sys.exit()\nhvd.init()\n"
        "hvd.allreduce(torch.ones(1), name='first')\n"
        "if hvd.rank() == 1: os.kill(os.getpid(), signal.SIGKILL)\nhvd.allreduce(torch.ones(1), name='second')\n"
    )
    words = [sys.executable, "-m", "triax.cli.main", "run", "--nproc", "2", "--timeline", "t.json", "script.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 128 + signal.SIGKILL and "rank 1" in done.stderr
    trace = json.loads((tmp_path / "t.json").read_text())
    assert [(lost["rank"], lost["name"]) for lost in trace["otherData"]["unfinished"]] == [(0, "second")]
    done = subprocess.run([*words, "no"], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0 and "no rank made a triax.Grid" in done.stderr
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"] == []
