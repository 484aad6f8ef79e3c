"""Pictures: every op is there, in a file of the right kind, at any size."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from itertools import chain, combinations, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from triax.pipe.program.costs import Costs
from triax.pipe.program.draw import chrome_trace, picture, text
from triax.pipe.program.offload import offload_pass
from triax.pipe.program.ops import Op
from triax.pipe.program.schedule import Schedule
from triax.pipe.program.simulate import timeline_of
from triax.pipe.program.timeline import Span, Timeline
from triax.pipe.schedules.choose import make_schedule
from triax.pipe.schedules.registry import RECIPES

from support.command_line import output_of
from support.paths import DOCS
from support.readme_blocks import blocks, programs


def text_lines(*subject: Any, **options: Any) -> list[str]:
    """Return the lines of a picture in text, without its colors."""
    console = Console(width=500, no_color=True, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(text(*subject, **options))
    return console.export_text().splitlines()


def test_a_text_picture_shows_each_op_in_cells() -> None:
    lines = text_lines(make_schedule("1f1b", 2, 3))
    assert lines[:2] == [
        "rank 0 F0=F1=......B0====F2=B1====...B2====",
        "rank 1 ...F0=B0====F1=B1====F2=B2====......",
    ]
    assert "forward" in lines[2] and "weight gradient" not in lines[2]
    assert lines[3].strip() == "= the op goes on, . idle"
    assert "\n".join(lines[:2]) in (DOCS / "schedules.md").read_text()


def test_pictures_of_the_pages_equal_the_output_of_the_commands() -> None:
    listed = blocks((DOCS / "schedules.md").read_text())
    pairs = [(a.text, b.text) for a, b in pairwise(listed) if a.language == "console" and b.language == "text"]
    assert len(pairs) >= 5
    for command, shown in pairs:
        output = output_of(*shlex.split(command.removeprefix("$ "))[1:], columns=120)
        printed = [line.rstrip() for line in output.splitlines()]
        pictured = [line.rstrip() for line in shown.splitlines() if line.startswith(("rank", "copies"))]
        assert [line for line in pictured if line not in printed] == [], command


PAGE = (DOCS / "schedules.md").read_text()
# torch runs the first one: tests/pipe/test_schedules.py; cut.py measures: tests/engine/test_measured_layers.py.
PROGRAMS = [name for name, source in programs(PAGE).items() if "_load_csv" not in source and name != "cut.py"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_schedules_page_shows_what_its_programs_print(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(programs(PAGE)[name], {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert printed in [block.text for block in blocks(PAGE)] or name.startswith("line_")


def test_a_narrow_text_picture_has_letters_above_numbers() -> None:
    lines = text_lines(make_schedule("zb-v", 2, 2), width=20)
    assert [line.rstrip() for line in lines[:4]] == [
        "rank 0 FF.fifiIwIwWW",
        "       01 0011001101",
        "rank 1 .FfFfiIiIwWwW",
        "        001100110011",
    ]
    assert "lower case and light: a rank's later stages" in lines[-2]


@pytest.mark.parametrize(("name", "pipe", "microbatches"), [("1f1b", 4, 8), ("gpipe", 4, 4), ("zb-v", 4, 8)])
@pytest.mark.parametrize("width", [60, 72, 120, None])
def test_a_text_picture_without_color_shows_the_bubble(
    name: str, pipe: int, microbatches: int, width: int | None
) -> None:
    """A rank has as many dots as its idle time is long, and each op is as wide as its time."""
    times = timeline_of(make_schedule(name, pipe, microbatches))
    rows = [line[7:] for line in text_lines(times, width) if line.startswith("rank")]
    assert len(rows) == pipe and len({len(row) for row in rows}) == 1
    column = times.makespan / len(rows[0])
    for row, spans in zip(rows, times.rows, strict=True):
        assert row.count(".") * column == pytest.approx(times.makespan - sum(s.end - s.start for s in spans))
        ops = re.findall(r"[A-Za-z]\d*=*", row)
        assert [op[0].upper() for op in ops] == [span.op.kind for span in spans]
        assert [len(op) * column for op in ops] == pytest.approx([span.end - span.start for span in spans])


@pytest.mark.parametrize(("name", "pipe", "microbatches"), [("1f1b", 16, 64), ("zb-v", 8, 32), ("gpipe", 3, 1000)])
def test_a_long_schedule_is_drawn_in_80_columns(name: str, pipe: int, microbatches: int) -> None:
    """The letters F and the dots have shares of the columns near the shares of the time, as columns are rounded."""
    times, columns = timeline_of(make_schedule(name, pipe, microbatches)), 72
    lines = text_lines(times, columns, " ms")
    assert max(map(len, lines)) <= 80 and lines[-1].endswith(f" a column is {times.makespan / columns:.3g} ms")
    for line, spans in zip(lines[:pipe], times.rows, strict=True):
        seconds: defaultdict[str, float] = defaultdict(float)
        for span in spans:
            seconds[span.op.kind] += span.end - span.start
        letters = line[-columns:].upper()
        idle = 1 - sum(seconds.values()) / times.makespan
        assert letters.count(".") / columns == pytest.approx(idle, abs=0.1)
        assert letters.count("F") / columns == pytest.approx(seconds["F"] / times.makespan, abs=0.1)


def test_a_text_picture_colors_each_kind_of_op() -> None:
    console = Console(width=200, force_terminal=True, color_system="standard", record=True)
    drawn = text(make_schedule("zb-v", 2, 2))
    assert len({str(span.style) for span in drawn.spans}) >= 6
    console.print(drawn)


def test_a_text_picture_is_equal_in_any_unit_of_time() -> None:
    schedule = make_schedule("zb-v", pipe=2, microbatches=4)
    in_ms, in_s = (
        text_lines(timeline_of(schedule, Costs(F=1.25 * unit, I=unit, W=0.75 * unit, COMM=0.125 * unit)), width=90)
        for unit in (1.0, 2.0**-10)
    )
    assert in_ms[:2] == in_s[:2] and in_ms[:2] != text_lines(timeline_of(schedule), width=90)[:2]
    for rank, row in enumerate(in_s[:2]):
        assert len(row) <= len("rank 0 ") + 90
        assert re.findall("[FIW]", row[7:].upper()) == [op.kind for op in schedule.orders[rank]]


def test_a_text_picture_of_an_empty_timeline_says_so() -> None:
    assert text_lines(Timeline(((),))) == ["no op runs"]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_pictures_stack_timelines_on_one_axis(suffix: str, tmp_path: Path) -> None:
    schedule = make_schedule("zb-v", 4, 8)
    ideal, measured = timeline_of(schedule), timeline_of(schedule, Costs(1, 1.2, 0.8, 0.1))
    path = tmp_path / f"run{suffix}"
    picture([ideal, measured], path, ["ideal", "measured"])
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
    assert len(content) > 10_000
    with pytest.raises(ValueError, match="1 titles for 2 timelines"):
        picture([ideal, measured], path, ["ideal"])


def test_a_title_names_the_ranks_that_wait_least_and_most(tmp_path: Path) -> None:
    op = make_schedule("1f1b", 1, 1).orders[0][0]
    picture(Timeline(((Span(op, 0.0, 1.0),), (Span(op, 1.0, 4.0),))), tmp_path / "two.svg", unit=" s")
    title = "makespan 4 s, idle for 50.0% on average (pipe 1: 25.0%, pipe 0: 75.0%)"
    assert title in (tmp_path / "two.svg").read_text()


def bars(picture_file: Path) -> list[list[tuple[float, float]]]:
    """Left and right edge, in points, of each bar of an SVG file, for each row that has bars, from the top."""
    corner = r"[ML] ([\d.-]+) ([\d.-]+) \n"
    shape = rf'd="{corner}{corner}{corner}{corner}z\n"[^>]*stroke: #ffffff; stroke-width: 0.4"'
    rows: dict[float, list[tuple[float, float]]] = {}
    for left, top, _, _, right, *_ in re.findall(shape, picture_file.read_text()):
        rows.setdefault(float(top), []).append((float(left), float(right)))
    return [sorted(rows[top]) for top in sorted(rows)]


def require_bars_at_times(picture_file: Path, times: Timeline) -> None:
    """Compare the edges of all bars with the start and the end of the ops: the first op begins at the axis's 0."""
    drawn = bars(picture_file)
    spans = [sorted((span.start, span.end) for span in row) for row in times.rows if row]
    assert [len(row) for row in drawn] == [len(row) for row in spans]
    axis = re.search(r'id="patch_2">\s*<path d="M ([\d.]+)', picture_file.read_text())
    assert axis is not None
    left, right = float(axis[1]), max(row[-1][1] for row in drawn)
    begin, end = spans[0][0][0], max(row[-1][1] for row in spans)
    scale = (right - left) / (end - begin)
    for bar, span in zip(chain(*drawn), chain(*spans), strict=True):
        assert [(edge - left) / scale for edge in bar] == pytest.approx([time - begin for time in span], abs=1e-3)


def test_a_large_picture_has_a_bar_for_each_op(tmp_path: Path) -> None:
    times = timeline_of(make_schedule("interleaved", 8, 24), Costs(1, 1.25, 0.75, 0.1))
    picture(times, tmp_path / "large.svg")
    # F and B of 2 stages and 24 microbatches on each of 8 ranks.
    assert [len(row) for row in bars(tmp_path / "large.svg")] == [2 * 2 * 24] * 8
    require_bars_at_times(tmp_path / "large.svg", times)


def test_a_picture_shows_a_rank_without_ops_as_an_empty_row(tmp_path: Path) -> None:
    op = make_schedule("1f1b", 1, 1).orders[0][0]
    times = Timeline(((Span(op, 2.0, 3.0),), (), (Span(op, 3.0, 5.0),)))
    picture(times, tmp_path / "three.svg")
    require_bars_at_times(tmp_path / "three.svg", times)
    shown = (tmp_path / "three.svg").read_text()
    assert [f"<!-- pipe {rank} -->" in shown for rank in range(4)] == [True, True, True, False]


def test_a_chrome_trace_holds_every_op_once() -> None:
    times = timeline_of(make_schedule("zb-h1", 3, 4))
    events = chrome_trace(times, scale=1000)["traceEvents"]
    ops = [event for event in events if event["ph"] == "X"]
    assert {(e["tid"], e["name"]) for e in ops} == {(r, str(s.op)) for r, row in enumerate(times.rows) for s in row}
    assert max(e["ts"] + e["dur"] for e in ops) == pytest.approx(1000 * times.makespan)
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["rank 0", "rank 1", "rank 2"]


@pytest.mark.parametrize(
    "schedule",
    [
        *(make_schedule(name, 4, 12) for name in RECIPES if name != "auto"),
        offload_pass(make_schedule("1f1b", 4, 8), 0.5),
        make_schedule("1f1b", 2, 3, slices=2),
    ],
    ids=lambda schedule: f"{schedule.name}-{schedule.offloads}",
)
def test_a_notebook_shows_each_op_of_a_schedule_once(schedule: Schedule) -> None:
    """In the row of its rank, in its order, and nothing over another op of its row."""
    shown = ElementTree.fromstring(schedule._repr_svg_() or "")
    rows: dict[int, list[tuple[float, float, float, str]]] = {rank: [] for rank in range(schedule.pipe)}
    for each in shown.findall("{*}g"):
        box = each.find("{*}rect")
        assert box is not None
        x, y, width = (float(box.attrib[key]) for key in ("x", "y", "width"))
        rows[int(y - 24) // 26].append((x, y, width, each.findtext("{*}title") or ""))
        assert width > 0 and x + width <= float(shown.attrib["width"]) + 0.5
    for rank, row in rows.items():
        assert sorted(op for *_, op in row) == sorted(map(str, schedule.orders[rank]))
        for (x, y, width, op), (after, below, _, other) in combinations(sorted(row), 2):
            assert y != below or x + width <= after + 0.2, f"{op} lies over {other}"


def test_a_schedule_that_hangs_has_no_picture() -> None:
    orders = ((Op.parse("0F0"), Op.parse("0B0")), (Op.parse("1B0"), Op.parse("1F0")))
    assert Schedule("mine", 2, 1, 1, (0, 1), orders)._repr_svg_() is None
