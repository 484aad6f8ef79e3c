"""`triax report`: the page of a whole run, of a run that died, and of a folder with few files."""

from __future__ import annotations

import http.client
import json
import math
import re
import shutil
import socket
import struct
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import triax
from triax.base.errors import ConfigError
from triax.engine.monitor.records import Slice, StepRecord
from triax.engine.monitor.report.page import _wait_bars, chart
from triax.engine.monitor.report.run_folder import read_run, read_trace
from triax.engine.monitor.report.serve import report_server
from triax.engine.monitor.report.svg import Curve, number, thinned, ticks
from triax.engine.monitor.report.write import write_report
from triax.engine.monitor.trace.clock_offsets import Offset
from triax.engine.monitor.trace.trace import chrome_trace
from triax.pipe.program.colors import COLORS
from triax.pipe.program.costs import Costs
from triax.pipe.program.measured_costs import costs_of, simulated
from triax.pipe.program.simulate import simulate
from triax.pipe.schedules.choose import make_schedule

from support.command_line import output_of, run_triax
from support.training import small_config, tiny_gpt


class Page(HTMLParser):
    """Parser of a page. An end tag that does not match is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.count: dict[str, int] = {}
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.attributes += attrs
        if tag not in ("br", "meta"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, (tag, self.open)
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def trace(schedule: str = "1f1b", pipe: int = 2, replicas: int = 2) -> dict[str, Any]:
    """Trace of a run on that grid, with the times of a simulation: F 2, B 3, messages 0.5 ms."""
    made = make_schedule(schedule, pipe, 4)
    stages = len(made.placement)
    times = simulate(made, Costs(F=[2e-3] * stages, I=[3e-3] * stages, W=0.0, COMM=5e-4)).timeline
    end = max(s.end for row in times.rows for s in row) + 1e-3
    records: list[StepRecord] = []
    places: list[dict[str, int]] = []
    for row in times.rows:
        for replica in range(replicas):
            ops = [Slice(str(s.op), s.op.kind, 7 + s.start, 7 + s.end, {}) for s in row]
            reduce = Slice("all_reduce", "tensor:all_reduce", ops[0].start, ops[0].start + 5e-4, {})
            program = Slice("program", "program", 7.0, 7 + end, {})
            inner = sorted([program, *ops, reduce], key=lambda s: (s.start, -s.end))
            records.append(StepRecord(3, (Slice("step 3", "step", 7.0, 7 + end, {}), *inner), ()))
            places.append({"pipe": len(places) // replicas, "data": replica, "tensor": 0})
    names = [f"rank {r} (pipe {p['pipe']}, data {p['data']}, tensor 0)" for r, p in enumerate(places)]
    about = {"step": 3, "schedule": made.to_dict()}
    return chrome_trace(records, names, places, [Offset(0.0, 0.0)] * len(records), about)


def write(folder: Path, steps: int = 30) -> Path:
    """A whole run's folder."""
    folder.mkdir(exist_ok=True)
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        told = {"train_loss": 5 / step, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_second": 1000.0 + step}
        rows.append({"step": step, "samples": 8 * step, **{f"Train/Samples/{k}": v for k, v in told.items()}})
        if step % 10 == 0:
            rows.append({"step": step, "samples": 8 * step, "Validation/loss": 5.5 / step})
    rows.append({"step": steps, "samples": 8 * steps, "Validation/bigram_loss": 2.42})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    memory = {
        "held": {"parameters": 1_000_000, "gradients": 2_000_000, "masters": 0, "optimizer": 3_000_000}
        | {"buffers": 0, "activations": 123_456, "working": 7},
        "formula": {"parameters": 1e6, "gradients": 2e6, "masters": 0.0, "optimizer": 2e6},
        "peak": 9e8,
    }
    sent = {"data": {"all_reduce": {"calls": 3, "bytes": 4_500_000.0}}, "pipe": {"send": {"calls": 8, "bytes": 1e6}}}
    rank = {"name": "rank 0 (pipe 0, data 0, tensor 0)", "pipe": 0, "data": 0, "tensor": 0, "parameters": 250_000}
    record = {
        "grid": {"pipe": 2, "data": 2, "tensor": 1},
        "parameters": 1_234_567,
        "zero": 1,
        "after_steps": 2,
        "config": {"note": "</pre><script>alert(1)</script>"},
        "ranks": [rank | {"memory": memory, "traffic": {"sent": sent, "formula": {"data": 4_500_000.0}}}],
    }
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "timeline.json").write_text(json.dumps(trace()))
    return folder


def test_the_page_of_a_whole_run_has_all_sections(tmp_path: Path) -> None:
    text = write_report(write(tmp_path / "a & b")).read_text()
    page = Page(text)
    for words in (
        *("a & b", "2 pipe × 2 data × 1 tensor", "1.235M parameters", "training loss, last step", "bigram loss 2.42"),
        *("Measured", "Simulated with its costs", "All 4 ranks, the whole step", "Time of step 3 by part"),
        *("rank 3 (pipe 1, data 1, tensor 0)", "1.000", "0.123", "4.500", "in 3", "Configuration, resolved"),
    ):
        assert words in page.text, words
    assert "1.200" in page.text  # held over formula: 6 / 5 MB
    # Nothing comes from elsewhere, and what the run says is text.
    assert not {name for name, _ in page.attributes} & {"src", "href", "srcset"}
    assert "url(" not in text and "@import" not in text and "<script>alert" not in text
    for holder in text.split('<script type="application/json">')[1:]:
        lines = json.loads(holder.partition("</script>")[0])
        assert all(line["points"] for line in lines)


def test_report_draws_each_curve_for_two_screen_widths(tmp_path: Path) -> None:
    text = write_report(write(tmp_path / "run")).read_text()
    wide, narrow = text.count('<svg class="w"'), text.count('<svg class="n"')
    assert wide == narrow == 4  # loss, learning rate, norm, speed
    assert 'name="viewport"' in text and "@media (max-width: 700px)" in text
    assert "prefers-color-scheme: dark" in text and 'viewBox="0 0 362 220"' in text  # 390 pixels less the margins


def test_a_run_that_died_half_way_has_a_page(tmp_path: Path) -> None:
    folder = write(tmp_path / "died")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "samples": 248, "Train/Samples/train_loss": null}\n{"step": 32, "sam')
    (folder / "run.json").unlink()
    (folder / "timeline.json").write_text((folder / "timeline.json").read_text()[:1000])
    (folder / "rank-1.log").write_text("\n".join(f"line {i}" for i in range(30)) + "\nRuntimeError: <rank 1> failed")
    (folder / "rank-2.log").write_text("")
    page = Page(write_report(folder).read_text())
    for words in (
        *("The loss was not finite at step 31", "1 line of metrics.jsonl could not be read", "no run.json"),
        *("timeline.json could not be read", "rank-1.log", "RuntimeError: <rank 1> failed", "line 29"),
    ):
        assert words in page.text, words
    assert "rank-2.log" not in page.text and "line 3\n" not in page.text and "Memory" not in page.text


@pytest.mark.parametrize("only", ["metrics.jsonl", "run.json", "timeline.json"])
def test_report_works_with_any_one_of_its_files(tmp_path: Path, only: str) -> None:
    folder = write(tmp_path / "run")
    for file in ("metrics.jsonl", "run.json", "timeline.json"):
        if file != only:
            (folder / file).unlink()
    text = Page(write_report(folder).read_text()).text
    wanted = {"metrics.jsonl": "Curves", "run.json": "Memory", "timeline.json": "Simulated with its costs"}
    assert {file for file, words in wanted.items() if words in text} == {only}


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"traceEvents": []}', '{"otherData": {"ranks": [{}]}, "traceEvents": [{"ph": "X"}]}']
)
def test_a_file_of_another_kind_is_named_and_left_out(tmp_path: Path, content: str) -> None:
    folder = write(tmp_path / "run")
    (folder / "timeline.json").write_text(content)
    page = Page(write_report(folder).read_text())
    assert "timeline.json" in page.text.partition("Left out")[2] and "Simulated" not in page.text


def test_damaged_values_are_text_and_damaged_parts_are_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    record = json.loads((folder / "run.json").read_text())
    record |= {"parameters": "<b>many</b>", "flops_per_step": [1], "peak_tflops": "fast", "schedule": {}}
    record["ranks"][0] |= {"name": None, "parameters": "?"}
    record["ranks"][0]["memory"]["held"] |= {"parameters": "1 MB", "gradients": None, "working": 10**400}
    record["ranks"][0]["traffic"]["sent"]["data"]["all_reduce"] = {"bytes": "most"}
    (folder / "run.json").write_text(json.dumps(record))
    page = Page(write_report(folder).read_text())
    for words in ("<b>many</b> parameters", "[1]", "fast TFLOP/s", "1 MB", "most", "0.600"):
        assert words in page.text, words
    # A form that the page cannot show.
    (folder / "run.json").write_text(json.dumps(record | {"ranks": 5}))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "Train/Samples/train_loss": "low"}\n[31]\n')
    broken = trace()
    broken["otherData"]["ranks"] = [{} for _ in broken["otherData"]["ranks"]]
    (folder / "timeline.json").write_text(json.dumps(broken))
    left_out = Page(write_report(folder).read_text()).text.partition("Left out")[2]
    for words in ("2 lines of metrics.jsonl", "run.json could not be read because ranks", "timeline.json could not"):
        assert words in left_out, words


def test_infinite_numbers_and_cut_files_are_left_out(tmp_path: Path) -> None:
    """Such files ended the command with an OverflowError or a RecursionError."""
    folder = write(tmp_path / "run")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row, value in zip(rows, (1e308, -1e308, 1e308, 1e155), strict=False):
        row |= {"Train/Samples/train_loss": value, "own": value, "Train/Samples/grad_norm": -value}
    rows += [{**rows[-1], "step": 1e308}, {**rows[-1], "step": -1}, {**rows[-1], "Train/Experts/a": [10**400]}]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n" + '{"a":' * 100_000)
    (folder / "run.json").write_text("[" * 100_000)
    (folder / "timeline.json").write_text('{"a":' * 100_000)
    left_out = Page(write_report(folder).read_text()).text.partition("Left out")[2]
    for words in (
        "4 lines of metrics.jsonl",
        "run.json could not be read: it is nested too deeply",
        "timeline.json could",
    ):
        assert words in left_out, words


def test_the_report_command_writes_one_page(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    page = tmp_path / "page.html"
    assert output_of("report", folder, "--output", page).strip() == str(page)
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("none", "There is no folder"),
        (".", "Did you mean .*run"),
        ("empty", "Enable json_monitor in the config"),
    ],
)
def test_a_missing_run_is_an_error_with_the_next_command(tmp_path: Path, where: str, words: str) -> None:
    write(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=words):
        write_report(tmp_path / where)


def test_a_written_trace_is_read_back_equal() -> None:
    """The timeline is the simulation's that it was made of; its costs simulate to it again."""
    made = make_schedule("1f1b", 2, 4)
    traced = read_trace(trace())
    assert traced is not None and traced.schedule == made and traced.step == 3
    wanted = simulate(made, Costs(F=[2e-3] * 2, I=[3e-3] * 2, W=0.0, COMM=5e-4)).timeline
    for replica in range(2):
        times = traced.timeline(replica)
        assert [[s.op for s in row] for row in times.rows] == [[s.op for s in row] for row in wanted.rows]
        assert times.makespan == pytest.approx(wanted.makespan) and times.bubble == pytest.approx(wanted.bubble)
    costs = costs_of([traced.timeline()], made.placement)
    assert pytest.approx((2e-3, 2e-3)) == costs.F and pytest.approx((3e-3, 3e-3)) == costs.I and costs.W == (0.0, 0.0)
    assert pytest.approx((5e-4,)) == costs.COMM
    for rank in range(4):
        parts = traced.parts(rank)
        step = traced.slices[rank][0]
        assert sum(parts.values()) == pytest.approx(step.end - step.start)
        assert parts["tensor", "collectives"] == pytest.approx(5e-4)
        assert parts["compute", "forward"] == pytest.approx(4 * 2e-3 - 5e-4)
        assert parts["compute", "backward"] == pytest.approx(4 * 3e-3)


def test_imbalance_is_the_busiest_ranks_computing_over_the_mean(tmp_path: Path) -> None:
    """Each rank computes 4 x (2 + 3) ms less 0.5 ms of a collective; then two ranks lose a forward pass of 2 ms."""
    made = trace()
    whole = read_trace(made)
    assert whole is not None and whole.imbalance() == pytest.approx(1.0)
    lost = [next(e for e in made["traceEvents"] if e.get("cat") == "F" and e["pid"] == rank) for rank in (1, 2)]
    less = read_trace(made | {"traceEvents": [e for e in made["traceEvents"] if e not in lost]})
    shorter = [sum(t for (axis, _), t in less.parts(r).items() if axis == "compute") for r in range(4)] if less else []
    assert shorter[::3] == [pytest.approx(19.5e-3)] * 2 and max(shorter[1:3]) < 18.1e-3
    assert less is not None and less.imbalance() == pytest.approx(19.5e-3 / (sum(shorter) / 4))
    folder = write(tmp_path / "run")
    (folder / "timeline.json").write_text(json.dumps(made))
    assert "The busiest rank computes 1.00 times as long" in Page(write_report(folder).read_text()).text


def test_traces_correct_the_clock_of_a_rank_that_is_ahead() -> None:
    """Two ranks, the second one's clock 5 s ahead: the trace has them at the same time."""
    whole = [StepRecord(1, (Slice("step 1", "step", at, at + 1.0, {}),), ()) for at in (10.0, 15.25)]
    places = [{"pipe": r, "data": 0, "tensor": 0} for r in range(2)]
    made = chrome_trace(whole, ["a", "b"], places, [Offset(0.0, 0.0), Offset(5.25, 3e-5)], {})
    assert [e["ts"] for e in made["traceEvents"] if e["ph"] == "X"] == [0.0, 0.0]
    assert made["otherData"]["clock"] == "estimated, to 30 us"
    assert made["otherData"]["clock_error_us"] == pytest.approx(30)


def train(folder: str, steps: int, **axes: Any) -> None:
    """Train a small GPT on a grid, resumed from what is in the folder. Two stages trace their second step."""
    grid = triax.Grid(**axes)
    model = tiny_gpt(grid, vocab_size=32, num_hidden_layers=2, num_attention_heads=2, dtype=torch.float32)
    files: dict[str, Any] = {
        "json_monitor": {"enabled": True, "output_path": folder, "job_name": "run"},
        "checkpoint": {"dir": f"{folder}/saved", "every": 1, "resume": "auto"},
        **({"timeline": {"step": 2}} if grid.pipe.size == 2 else {}),
    }
    engine, *_ = triax.initialize(model=model, config=small_config(batch=8, micro=2, stage=1, **files))
    tokens = torch.arange(16).view(2, 8)
    while engine.global_steps < steps:
        engine.train_batch(iter([(tokens, tokens)] * 4))


@pytest.fixture(scope="module")
def resumed(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 10 steps, which was resumed twice, each time on another grid; its folder is ``run``."""
    folder = tmp_path_factory.mktemp("resumed")
    ranks(2, train, str(folder), steps=3, pipe=2)
    ranks(2, train, str(folder), steps=7, context=2)
    ranks(4, train, str(folder), steps=10, data=2, context=2)
    return folder


def test_run_json_of_a_resumed_run_lists_the_earlier_grids(resumed: Path) -> None:
    record = json.loads((resumed / "run" / "run.json").read_text())
    assert [(each["since_step"], each["ranks"]) for each in record["earlier"]] == [(1, 2), (4, 2)]
    assert record["since_step"] == 8 and record["grid"] == {"pipe": 1, "data": 2, "tensor": 1, "context": 2}


def test_run_json_has_parameters_traffic_and_activations(resumed: Path) -> None:
    record = json.loads((resumed / "run" / "run.json").read_text())
    assert record["parameters"] == 32 * 16 + 8 * 16 + 2 * (12 * 16**2 + 13 * 16) + 2 * 16
    first = record["ranks"][0]
    assert {"context", "data_context"} <= first["traffic"]["sent"].keys()
    assert first["memory"]["held"]["activations"] > 0


@pytest.fixture(scope="module")
def panels(resumed: Path) -> str:
    return " ".join(Page(write_report(resumed / "run").read_text()).text.split())


@pytest.mark.parametrize(
    "words",
    [
        # The table of grids: steps, grid, ranks, schedule, chunks, samples of a batch and of a microbatch.
        "1 to 3 2 pipe × 1 data × 1 tensor 2 1f1b 1 8, 2",
        "4 to 7 1 pipe × 1 data × 2 context × 1 tensor 2 1f1b 1 8, 2",
        "8 to 10 1 pipe × 2 data × 2 context × 1 tensor 4 1f1b 1 8, 2",
        "Bytes held after step 10 on 4 ranks",
        "are the peaks of step 9",
        "Bytes that 4 ranks sent in step 10",
        "data × context axis: formula",
        "2 ranks: 2 pipe × 1 data × 1 tensor",  # of the trace of step 2, on the first grid
    ],
)
def test_panels_of_a_resumed_run_name_their_steps_and_ranks(panels: str, words: str) -> None:
    assert words in panels, panels[:3000]


def test_a_run_from_the_beginning_has_no_earlier_grids(resumed: Path, tmp_path: Path, ranks: Any) -> None:
    """This holds also in the folder of another run, whose checkpoints are gone."""
    shutil.copytree(resumed / "run", tmp_path / "run")
    ranks(1, train, str(tmp_path), steps=1)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["earlier"] == []


def test_a_step_taken_again_counts_once(tmp_path: Path) -> None:
    rows = [{"step": s, "samples": s, "x": x} for s, x in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 2.5), (3, 3.5))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = read_run(tmp_path)
    assert run.series("x") == [(1, 1.0), (2, 2.5), (3, 3.5)] and run.last_step == 3


def test_duration_and_tokens_leave_out_the_time_between_runs(tmp_path: Path) -> None:
    """Steps of 2 s and 500 tokens: 3, then 2 again from step 3 an hour later; step 3 counts once as tokens."""
    times = [(1, 100.0), (2, 102.0), (3, 104.0), (3, 3700.0), (4, 3702.0)]
    told = {"Train/Samples/step_time_ms": 2000.0, "Train/Samples/tokens_per_second": 250.0}
    rows = [{"step": step, "samples": step, "time": at, **told} for step, at in times]
    rows.insert(4, {"step": 3, "samples": 3, "time": 3700.5, "Validation/loss": 2.0})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "run.json").write_text(json.dumps({"since_step": 3, "ranks": []}))
    run = read_run(tmp_path)
    assert run.tokens == 4 * 500
    # The second step 3 follows a step of the same number, as the validation's row does: only its file position tells.
    (tmp_path / "run.json").write_text(json.dumps({"since_step": 4, "ranks": []}))
    rows[3]["step"] = rows[4]["step"] = 2
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_run(tmp_path).seconds == pytest.approx(2 + 4 + 2 + 0.5 + 2)


def test_the_report_compares_two_runs(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a"), write(tmp_path / "b", 20)
    record = json.loads((second / "run.json").read_text())
    record |= {"command": "triax train <b>.yaml", "config": {"zero": {"stage": 2}, "note": "same"}}
    (second / "run.json").write_text(json.dumps(record))
    record |= {"command": "triax train a.yaml", "config": {"zero": {"stage": 1}, "note": "same"}}
    (first / "run.json").write_text(json.dumps(record))
    assert output_of("report", first, second).strip() == str(first / "comparison.html")
    page = Page((first / "comparison.html").read_text())
    words = " ".join(page.text.split())
    assert "a and b" in words and "triax train a.yaml triax train <b>.yaml" in words
    assert "steps 30 20" in words and "zero.stage 1 2" in words and "note" not in words
    charts = [json.loads(each.partition("</script>")[0]) for each in _data(first / "comparison.html")]
    assert [line["name"] for line in charts[0]] == ["a", "b"]
    assert [len(line["points"]) for line in charts[0]] == [30, 20] and len(charts) == 5
    with pytest.raises(ConfigError, match="5 runs cannot be compared: give 2 to 4"):
        write_report(*[first] * 5)
    with pytest.raises(ConfigError, match="There is no folder"):
        write_report(first, tmp_path / "none")


def _data(file: Path) -> list[str]:
    return file.read_text().split('<script type="application/json">')[1:]


def test_report_server_shows_new_steps_to_localhost_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "run", 5)
    with report_server([folder]) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert server.server_address[0] == "127.0.0.1"

            def get(path: str, host: str = f"localhost:{server.server_port}") -> tuple[int, str]:
                connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
                connection.request("GET", path, headers={"Host": host})
                answer = connection.getresponse()
                return answer.status, answer.read().decode()

            code, text = get("/")
            version = get("/version")
            assert code == 200 and "fetch('version')" in text and "steps" in Page(text).text and version[0] == 200
            assert get("/")[0] == 200 and get("/version") == version
            write(folder, 7)
            assert get("/version") != version and "7 steps" in " ".join(Page(get("/")[1]).text.split())
            assert get("/run.json")[0] == 404
            # A page of another site whose name leads to this address reads nothing.
            assert get("/", "evil.example:80")[0] == 403
            server.RequestHandlerClass.timeout = 0.2  # type: ignore[attr-defined]
            with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as idle:
                assert idle.recv(1) == b""  # closed: it had a thread as long as it was open
            leaves = socket.create_connection(("127.0.0.1", server.server_port))
            leaves.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            leaves.sendall(f"GET / HTTP/1.1\r\nHost: localhost:{server.server_port}\r\n\r\n".encode())
            leaves.close()  # with a reset
            assert get("/")[0] == 200
            with pytest.raises(ConfigError, match=f"Port {server.server_port} of 127.0.0.1 cannot be used"):
                report_server([folder], server.server_port)
        finally:
            server.shutdown()
            thread.join()
    assert "Traceback" not in capfd.readouterr().err
    assert "fetch(" not in write_report(folder).read_text()
    for words, said in (
        (["--port", "9"], "nothing without --serve"),
        (["--serve", "--output", "x.html"], "without --serve"),
    ):
        assert said in run_triax("report", folder, *words)[1]


def test_the_report_shows_the_measured_step_and_its_simulation(tmp_path: Path) -> None:
    """Colors are those of triax schedule, a rank's later stages lighter; waits end with the last op."""
    folder = write(tmp_path / "run")
    made = trace("interleaved")
    end = max(event["ts"] + event["dur"] for event in made["traceEvents"] if event["ph"] == "X")
    late = next(event for event in made["traceEvents"] if event.get("cat") == "tensor:all_reduce")
    made["traceEvents"].append({**late, "ts": end - 900.0, "dur": 5e5})
    (folder / "timeline.json").write_text(json.dumps(made))
    traced = read_trace(made)
    assert traced is not None and traced.schedule is not None
    measured = traced.timeline()
    text = write_report(folder).read_text()
    assert all(dark in text for dark in (COLORS["F"][0], COLORS["B"][0]))
    assert f'style="fill:{COLORS["F"][1]}"' in text and f'style="fill:{COLORS["B"][1]}"' in text
    (shown,) = {float(found) for found in re.findall(r"makespan [0-9.]+ ms, bubble ([0-9.]+)%", text)[:1]}
    assert shown == pytest.approx(100 * measured.bubble, abs=0.06)
    bars = _wait_bars(traced.slices[0], 0.0, measured.makespan)
    assert bars and max(bar.end for bar in bars) <= measured.makespan
    slow = simulated(traced.schedule, measured).makespan - measured.makespan
    assert ("longer than the measured one" in text) == (slow > 0)


def test_report_says_when_the_simulation_is_slower(tmp_path: Path) -> None:
    """One op on the critical path is shorter than the median of its stage."""
    folder, made = write(tmp_path / "run"), trace()
    for event in made["traceEvents"]:
        if event["ph"] == "X" and event["name"] == "0F0":
            event["ts"], event["dur"] = event["ts"] + 1900.0, 100.0
    (folder / "timeline.json").write_text(json.dumps(made))
    assert "The simulated step is 1.9 ms longer than the measured one" in write_report(folder).read_text()
    made = trace()
    (folder / "timeline.json").write_text(json.dumps(made))
    assert "longer than the measured one" not in write_report(folder).read_text()


def test_curves_keep_their_spikes_and_drop_nan_values() -> None:
    points = [(float(i), 1.0) for i in range(10_000)]
    points[5003] = (5003.0, 9.0)
    points[7001] = (7001.0, -9.0)
    few = thinned(points, 200)
    assert len(few) <= 200 and (5003.0, 9.0) in few and (7001.0, -9.0) in few
    assert [x for x, _ in few] == sorted(x for x, _ in few) and thinned(points[:5], 200) == points[:5]
    assert chart("Loss", "", [Curve("a", [(1, math.nan)], 0)]) is None
    made = chart("Loss", "", [Curve("a", [(1, 2.0), (2, math.nan), (3, 4.0)], 0)])
    assert made is not None and made["data"] == [{"name": "a", "points": [(1, 2.0), (3, 4.0)]}]
    assert all(len(points) == 2 for size in ("large", "small") for _, points in made[size]["curves"])


def test_axes_of_charts_have_round_numbers() -> None:
    assert ticks(0.3, 9.1, 5) == [0, 2, 4, 6, 8, 10] and ticks(2, 2, 4) == [1, 2, 3] and ticks(0, 0, 4) == [-1, 0, 1]
    assert ticks(1.0, 1.003, 3) == [1.0, 1.001, 1.002, 1.003]
    assert [number(x) for x in (0, 0.004, 2.5, 1200, 25_000, 3.1e6, 5e-5)] == [
        *("0", "0.004", "2.5", "1200", "25k", "3.1M", "5e-5")
    ]
