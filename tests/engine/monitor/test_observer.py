"""Observer of steps: slices, breakdown, trace, monitors, MFU, on real runs."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import shutil
from collections import Counter
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import triax
from triax.base.errors import ConfigError
from triax.models.gpt import GPTConfig, GPTLoss, gpt_layers
from triax.pipe.program.ops import SENDS, Op

from support.command_line import output_of
from support.paths import DOCS
from support.processes import program
from support.readme_blocks import commands, programs
from support.toys import error_text
from support.training import small_config

MODEL = GPTConfig(vocab_size=32, max_position_embeddings=16, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
MICRO, STEPS, TRACED = 4, 4, 3


def engine(grid: triax.Grid, schedule: str, zero: int, **config: Any) -> Any:
    chunks = 2 if schedule == "zb-v" else 1
    model = triax.PipelineModule(
        gpt_layers(MODEL), grid=grid, loss_fn=GPTLoss(grid, vocab_size=32), chunks=chunks, dtype=torch.float64
    )
    given = small_config("AdamW", lr=0.01, micro=2, accumulation=MICRO, stage=zero, schedule=schedule)
    return triax.initialize(model=model, config={**given, **config})[0]


def batches(grid: triax.Grid) -> Any:
    generator = torch.Generator().manual_seed(grid.data.rank)
    ids = torch.randint(32, (MICRO, 2, 17), generator=generator)
    return cycle([(row[:, :-1], row[:, 1:]) for row in ids])


def seen(grid: triax.Grid, folder: str, schedule: str, zero: int) -> dict[str, Any]:
    """A run with everything on, and the same one with everything off."""
    config = {
        "wall_clock_breakdown": True,
        "steps_per_print": 2,
        "json_monitor": {"enabled": True, "output_path": folder, "job_name": schedule},
        "timeline": {"step": TRACED},
        "peak_tflops": 0.5,
    }
    made, data = engine(grid, schedule, zero, **config), batches(grid)
    losses, reports = [], []
    for _ in range(STEPS):
        made.record_timeline = made.global_steps + 1 == TRACED
        losses.append(float(made.train_batch(data)))
        reports.append(made.time_report())
    made.monitor.write_events([("Validation/loss", 1.5, made.global_samples)])
    timeline = made.timeline
    plain, data = engine(grid, schedule, zero), batches(grid)
    unseen = [float(plain.train_batch(data)) for _ in range(STEPS)]
    return {
        "losses": losses,
        "unseen": unseen,
        "reports": reports,
        "bubble": timeline.bubble if timeline is not None else None,
        "program": [str(op) for op in made.program.ops[grid.pipe.rank]],
        "memory": made.memory_report(),
        "traffic": made.traffic_report(),
        "read": (len(grid.spans.readers), len(plain.spans.readers)),
        "observed": plain.monitor.enabled or plain.observer._active,
    }


def on_2x2x2(folder: str) -> dict[str, Any]:
    return seen(triax.Grid(2, 2, 2), folder, "1f1b", 1)


def on_2x2(folder: str) -> dict[str, Any]:
    return seen(triax.Grid(2, 2, 1), folder, "zb-v", 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seen")


@pytest.fixture(scope="module")
def whole(ranks: Any, folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ranks(8, on_2x2x2, str(folder))
    return found


@pytest.fixture(scope="module")
def sharded(ranks: Any, folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ranks(4, on_2x2, str(folder))
    return found


@pytest.fixture(params=["whole", "sharded"])
def run(request: pytest.FixtureRequest, folder: Path) -> tuple[list[dict[str, Any]], Path]:
    """Results of the ranks of a run, and its folder."""
    found = request.getfixturevalue(request.param)
    return found, folder / ("1f1b" if request.param == "whole" else "zb-v")


def test_recording_changes_no_loss_and_removes_its_readers(run: tuple[list[dict[str, Any]], Path]) -> None:
    for rank in run[0]:
        assert rank["losses"] == rank["unseen"] and len(set(rank["losses"])) == STEPS
        assert rank["read"] == (0, 0)
    assert not any(rank["observed"] for rank in run[0])


def test_time_parts_of_a_rank_add_up_to_its_step(run: tuple[list[dict[str, Any]], Path]) -> None:
    for rank in run[0]:
        for number, report in enumerate(rank["reports"], 1):
            parts = {axis: row for axis, row in report.items() if isinstance(row, dict)}
            assert report["step"] == number
            assert sum(sum(row.values()) for row in parts.values()) == pytest.approx(report["seconds"], rel=1e-9)
            assert all(seconds >= -1e-9 for row in parts.values() for seconds in row.values())
            assert parts["compute"]["forward"] > 0 and parts["compute"]["optimizer"] > 0 and "idle" in parts["pipe"]
            split = {"input gradient", "weight gradient"} <= parts["compute"].keys()
            assert split == ("zb-v" in str(run[1])) and split != ("backward" in parts["compute"])
            assert ("tensor" in parts) == (len(run[0]) == 8) and parts["data"]["gather"] > 0


def test_the_bubble_equals_that_of_all_timelines(run: tuple[list[dict[str, Any]], Path]) -> None:
    """The bubble is computed from one small message of each rank; it equals that of all timelines together."""
    replicas = {(rank["bubble"], rank["reports"][TRACED - 1]["bubble"]) for rank in run[0]}
    assert all(mine == pytest.approx(whole, abs=1e-9) and 0 < whole < 1 for whole, mine in replicas)


def trace_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "timeline.json").read_text())
    return found


def test_the_trace_has_every_op_of_the_program_once_on_each_rank(run: tuple[list[dict[str, Any]], Path]) -> None:
    trace = trace_of(run[1])
    events = trace["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    tensor = len(run[0]) // 4
    assert names == {
        rank: f"rank {rank} (pipe {rank // (2 * tensor)}, data {rank // tensor % 2}, tensor {rank % tensor})"
        for rank in range(len(run[0]))
    }
    for rank, told in enumerate(run[0]):
        mine = [e for e in events if e["ph"] == "X" and e["pid"] == rank]
        drawn = Counter(e["name"] for e in mine if re.fullmatch(r"\d+[A-Z_]+\d*", e["name"]))
        assert drawn == Counter(told["program"])
        (step,) = [e for e in mine if e["name"] == f"step {TRACED}"]
        assert step["dur"] == pytest.approx(1e6 * told["reports"][TRACED - 1]["seconds"])
        assert all(e["dur"] >= 0 for e in mine)
        # One row: each slice lies within another or beside it, and all within the step.
        assert all(step["ts"] - 1e-3 <= e["ts"] and e["ts"] + e["dur"] <= step["ts"] + step["dur"] + 1e-3 for e in mine)
        ops = sorted((e for e in mine if e["name"] in drawn), key=lambda e: e["ts"])
        assert [e["name"] for e in ops] == told["program"]
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(ops))


def test_no_message_is_read_before_it_is_sent(run: tuple[list[dict[str, Any]], Path]) -> None:
    """All ranks use one clock, and every message has an arrow."""
    trace = trace_of(run[1])
    events = trace["traceEvents"]
    assert trace["otherData"]["clock"] == "one clock for all ranks" and trace["otherData"]["clock_error_us"] == 0
    begins = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    sends = sum(Op.parse(op).kind in SENDS for rank in run[0] for op in rank["program"])
    assert begins.keys() == ends.keys() and len(begins) == sends > 0
    for key, begin in begins.items():
        end = ends[key]
        assert begin["ts"] < end["ts"] and begin["pid"] != end["pid"]
        stage, microbatch = Op.parse(begin["name"])[1:]
        (reader,) = [e for e in events if e["ph"] == "X" and e["pid"] == end["pid"] and e["ts"] == end["ts"]]
        read = Op.parse(reader["name"])
        assert (abs(read.stage - stage), read.microbatch) == (1, microbatch)


def test_collectives_are_in_the_trace_with_their_bytes(run: tuple[list[dict[str, Any]], Path]) -> None:
    events = trace_of(run[1])["traceEvents"]
    for rank, told in enumerate(run[0]):
        for axis, kinds in told["traffic"]["sent"].items():
            for kind, sent in kinds.items():
                if kind == "send":
                    continue
                found = [e for e in events if e["ph"] == "X" and (e["pid"], e["cat"]) == (rank, f"{axis}:{kind}")]
                # The step that was counted is a later one, and alike; small numbers (a broadcast of shapes) are not.
                assert len(found) == sent["calls"], (rank, axis, kind)
                assert sum(e["args"]["bytes"] for e in found) == pytest.approx(sent["bytes"])
        waits = {e["id"] for e in events if e["ph"] == "b" and e["pid"] == rank}
        assert waits == {e["id"] for e in events if e["ph"] == "e" and e["pid"] == rank}


class Failing(nn.Module):
    """Layer whose sixth call fails on one replica."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.calls, self.fails = 0, fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.fails and self.calls == 6:
            raise ArithmeticError("boom")
        return x


def failing() -> str:
    grid = triax.Grid(2, 2, 1, timeout=60)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), Failing(grid.data.rank == 1), nn.Linear(4, 4)]
    model = triax.PipelineModule(layers, grid=grid, loss_fn=lambda y, _: y.square().mean(), partition="uniform")
    config = small_config(
        micro=2, accumulation=MICRO, zero={"stage": 2, "reduce_bucket_size": 16}, wall_clock_breakdown=True
    )
    made, *_ = triax.initialize(model=model, config=config)
    data = cycle([(torch.ones(2, 4), torch.ones(2))])
    made.train_batch(data)
    return error_text(lambda: made.train_batch(data), RuntimeError)


def test_a_rank_that_fails_while_it_is_recorded_stops_the_others(ranks: Any) -> None:
    """The record of the step keeps no connection open that other ranks would wait for."""
    words = "rank 3 (pipe 1, data 1, tensor 0) failed at 1F1: ArithmeticError: boom"
    messages = ranks(4, failing, timeout=30)
    assert messages[3] == words and all(words in message for message in messages)


def test_monitors_write_every_number_of_each_step(run: tuple[list[dict[str, Any]], Path]) -> None:
    rows = [json.loads(line) for line in (run[1] / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1), STEPS]
    batch = 2 * MICRO * 2  # samples: 2 in each of 4 microbatches of 2 replicas
    for number, row in enumerate(rows[:STEPS], 1):
        told = {key.removeprefix("Train/Samples/"): value for key, value in row.items()}
        assert told["samples"] == number * batch and told["train_loss"] == run[0][0]["losses"][number - 1]
        assert told["lr"] == 0.01 and told["grad_norm"] > 0 and told["peak_memory_gb"] > 0.05
        seconds = told["step_time_ms"] / 1e3
        assert told["samples_per_second"] == pytest.approx(batch / seconds)
        assert told["tokens_per_second"] == pytest.approx(16 * batch / seconds)
        assert told["bubble"] == run[0][0]["reports"][number - 1]["bubble"]
        # Forward: products of all weights but embeddings, with two attention products of T x T x width each block.
        width, length = MODEL.hidden_size, MODEL.max_position_embeddings
        weights = MODEL.num_hidden_layers * 12 * width**2 + MODEL.vocab_size * width
        flops = 3 * batch * length * 2 * (weights + MODEL.num_hidden_layers * 2 * length * width)
        assert told["mfu"] == pytest.approx(flops / seconds / (0.5e12 * len(run[0])))
        report = run[0][0]["reports"][number - 1]
        assert told["elapsed_time_ms_forward"] == pytest.approx(1e3 * report["compute"]["forward"])
        inner, reduce = told["elapsed_time_ms_backward_inner"], told["elapsed_time_ms_backward_allreduce"]
        assert told["elapsed_time_ms_backward"] == pytest.approx(inner + reduce)
    assert rows[-1] == {"step": STEPS, "samples": STEPS * batch, "time": rows[-1]["time"], "Validation/loss": 1.5}


def test_run_json_has_the_reports_of_every_rank(run: tuple[list[dict[str, Any]], Path]) -> None:
    record = json.loads((run[1] / "run.json").read_text())
    assert record["grid"] == {"pipe": 2, "data": 2, "tensor": len(run[0]) // 4}
    assert record["parameters"] == MODEL.parameter_count and record["after_steps"] == TRACED
    assert record["schedule"]["microbatches"] == MICRO and record["config"]["timeline"]["step"] == TRACED
    for written, told in zip(record["ranks"], run[0], strict=True):
        assert {**written["memory"], "peak": 0} == {**told["memory"], "peak": 0}
        assert written["memory"]["held"]["activations"] > 0 and written["traffic"] == told["traffic"]


def printed() -> str:
    made, data, said = engine(triax.Grid(), "1f1b", 0, wall_clock_breakdown=True), batches(triax.Grid()), io.StringIO()
    with contextlib.redirect_stdout(said):
        for _ in range(30):
            made.train_batch(data)
    assert made.wall_clock_breakdown() and not engine(triax.Grid(), "1f1b", 0).wall_clock_breakdown()
    return said.getvalue()


def test_wall_clock_breakdown_prints_a_table_then_lines(ranks: Any) -> None:
    """It prints once in 10 steps where steps_per_print is not given, as DeepSpeed does: first a table, then lines."""
    (said,) = ranks(1, printed)
    lines = re.findall(r"^step (20|30): ([\d.]+) ms a step, bubble [\d.]+%: (.*)$", said, re.MULTILINE)
    assert [step for step, _, _ in lines] == ["20", "30"]
    for _, whole, parts in lines:
        told = {name: float(ms) for name, ms in (part.rsplit(" ", 1) for part in parts.split(", "))}
        assert list(told.values()) == sorted(told.values(), reverse=True) and {"forward", "backward"} <= told.keys()
        assert 0.85 * float(whole) < sum(told.values()) <= 1.01 * float(whole)
    assert said.count("step 10: wall clock of 10 steps, ms a step, bubble") == 1 and said.count("wall clock") == 1
    for part in ("forward", "backward", "optimizer", "batch", "other", "step"):
        assert re.search(rf"{part}\W+[\d.]+\W+[\d.]+\W+0\W", said), (part, said)


def loop(grid: triax.Grid, folder: str, zero: int) -> dict[str, Any]:
    """DeepSpeed's loop over a plain module, seen and unseen."""
    found: list[Any] = []
    for extra in (
        {
            "wall_clock_breakdown": True,
            "json_monitor": {"enabled": True, "output_path": folder},
            "peak_tflops": 1.0,
            "timeline": {"step": 3, "file": f"{folder}/deep/trace.json"},
        },
        {},
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)).double()
        config = small_config("Adam", lr=0.01, micro=4, accumulation=2, stage=zero)
        made, *_ = triax.initialize(model=model, config={**config, **extra}, grid=grid)
        losses = []
        for micro in range(8):
            generator = torch.Generator().manual_seed(10 * micro + grid.data.rank)
            loss = made(torch.randn(4, 8, generator=generator, dtype=torch.float64)).square().mean()
            made.backward(loss)
            made.step()
            losses.append(loss.item())
        found.append((losses, made.time_report(), len(made.spans.readers), made.monitor.enabled))
    return {"seen": found[0], "unseen": found[1]}


def plain(folder: str, zero: int) -> dict[str, Any]:
    return loop(triax.Grid(), folder, zero)


def test_a_plain_module_has_time_reports_and_traces(ranks: Any, tmp_path: Path) -> None:
    for number, told in enumerate(ranks(2, plain, str(tmp_path), 3)):
        losses, report, _, enabled = told["seen"]
        assert losses == told["unseen"][0] and enabled == (number == 0)
        assert told["unseen"][1:] == ({}, 0, False)
        parts = {axis: row for axis, row in report.items() if isinstance(row, dict)}
        assert report["step"] == 4 and report["bubble"] is None
        assert sum(sum(row.values()) for row in parts.values()) == pytest.approx(report["seconds"], rel=1e-9)
        assert all(parts["compute"][part] > 0 for part in ("forward", "backward", "optimizer"))
        assert parts["data"]["gather"] > 0 and parts["data"]["reduce"] > 0
    rows = [json.loads(line) for line in (tmp_path / "triax" / "metrics.jsonl").read_text().splitlines()]
    flops = 3 * 2 * (2 * 8 * 32) * 4 * 2 * 2  # samples: 4 in each of 2 microbatches of 2 replicas
    for row in rows:
        told = {key.removeprefix("Train/Samples/"): value for key, value in row.items()}
        assert told["mfu"] == pytest.approx(flops / (told["step_time_ms"] / 1e3) / 2e12)
        assert "tokens_per_second" not in told and "bubble" not in told
    events = json.loads((tmp_path / "deep" / "trace.json").read_text())["traceEvents"]
    for rank in range(2):
        names = Counter(e["name"] for e in events if e["ph"] == "X" and e["pid"] == rank)
        assert names["forward"] == names["backward"] == 2 and names["optimizer"] == names["step 3"] == 1


def traced_by_hand(folder: str) -> list[Any]:
    grid = triax.Grid(2, 1, 1)
    made, data = engine(grid, "1f1b", 0), batches(grid)
    made.train_batch(data)
    before = made.observer._active
    made.record_trace(f"{folder}/hand.json")
    made.train_batch(data)
    after = len(made.spans.readers)
    made.train_batch(data)
    return [before, made.observer._active, after, made.time_report()["step"]]


def test_record_trace_traces_the_next_step(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, traced_by_hand, str(tmp_path)) == [[False, True, 0, 2]] * 2
    trace = json.loads((tmp_path / "hand.json").read_text())
    assert trace["otherData"]["step"] == 2 and len(trace["otherData"]["program"]) == 2


def test_a_resumed_run_traces_the_step_of_this_process(tmp_path: Path) -> None:
    """The option counts the steps of this process: a run resumed behind that step of all steps had no trace."""
    file = tmp_path / "trace.json"
    made = engine(triax.Grid(), "1f1b", 0, timeline={"step": 2, "file": str(file)})
    made.global_steps = 100
    for _ in range(2):
        assert not file.exists()
        made.train_batch(batches(triax.Grid()))
    assert json.loads(file.read_text())["otherData"]["step"] == 102


def test_unwritable_timeline_and_profile_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"the timeline .* cannot be written"):
        engine(triax.Grid(), "1f1b", 0, timeline={"step": 1, "file": f"{tmp_path}/file/trace.json"})
    for path in (f"{tmp_path}/file/profile.txt", str(tmp_path), "a\0b"):
        with pytest.raises(ConfigError, match=r"flops_profiler.output_file .* cannot be written"):
            engine(triax.Grid(), "1f1b", 0, flops_profiler={"enabled": True, "output_file": path})
    file = tmp_path / "new" / "profile.txt"
    engine(triax.Grid(), "1f1b", 0, flops_profiler={"enabled": True, "output_file": str(file)})
    assert file.parent.is_dir() and not file.exists()  # it is written in the step that is profiled


def counted(folder: str, interval: int) -> float:
    monitor = {"enabled": True, "output_path": folder}
    config = {"peak_tflops": 1.0, "activation_checkpointing": {"interval": interval}, "csv_monitor": monitor}
    made = engine(triax.Grid(), "1f1b", 0, **config)
    made.train_batch(batches(triax.Grid()))
    assert made.observer.mfu is not None and made.observer.mfu.flops is not None
    return made.observer.mfu.flops


def test_recomputation_is_not_counted_in_mfu_flops(ranks: Any, tmp_path: Path) -> None:
    (plain,), (again,) = (ranks(1, counted, str(tmp_path), interval) for interval in (0, 1))
    assert plain == again > 0


def test_the_docs_program_and_commands_work(ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run as typed, but in processes that have imported torch already."""
    text = (DOCS / "monitoring.md").read_text().partition("\n## Profiling options\n")[0]
    for name, source in programs(text).items():
        (tmp_path / name).write_text(source)
    monkeypatch.chdir(tmp_path)
    said = ""
    for _, command in commands(text):
        launcher, *words = shlex.split(command, comments=True)
        if "--serve" in words:  # test_report.py asks the server
            continue
        if launcher == "torchrun":
            assert words[0] == "--nproc-per-node"
            said += "".join(ranks(int(words[1]), program, words[2:], str(tmp_path), init_group=False))
        else:
            assert launcher == "triax"
            if words[1:] == ["runs/seen", "runs/other"]:
                shutil.copytree("runs/seen", "runs/other")
            said += output_of(*words)
    assert "step 10: wall clock of 10 steps" in said and re.search(r"step 20: [\d.]+ ms a step, rank \d", said)
    assert "runs/seen/report.html\npage.html\n" in said
    assert {path.name for path in (tmp_path / "runs" / "seen").iterdir()} == {
        *("metrics.jsonl", "run.json", "timeline.json", "report.html", "comparison.html")
    }
    assert (tmp_path / "page.html").read_text() == (tmp_path / "runs" / "seen" / "report.html").read_text()
    # The block that continues the program was run with it.
    assert json.loads((tmp_path / "next.json").read_text())["otherData"]["step"] == 21
