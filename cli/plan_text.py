"""Text and JSON object of ``triax plan`` about the layouts of a search."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rich.columns import Columns
from rich.text import Text

from ..base.tables import table, terminal
from .output import bar

# All else is imported where it is used: `triax --help` needs none of it.
if TYPE_CHECKING:
    from rich.console import Console

    from ..plugins.plan.parallel_layout import ParallelLayout
    from ..plugins.plan.search import Search, Searcher
    from ..plugins.plan.work import Work


def trust_of(work: Work, seconds: float | None) -> dict[str, Any]:
    """Return the first entry of a JSON object: how far the times can be trusted."""
    from ..plugins.plan.trust import trust

    return trust(work.machine, work.config, work.products or work.precision).to_dict(work.machine.name, seconds)


def result_of(found: Search, searcher: Searcher) -> dict[str, Any]:
    """Return the object that ``--json`` prints."""
    from ..plugins.plan.search import to_dict

    work = searcher.work
    layouts = [to_dict(planned, work) for planned in found.layouts]
    for layout, planned in zip(layouts, found.layouts, strict=True):
        if (plain := searcher.without_changes(planned.layout)) is not None:
            layout["without"] = to_dict(plain, work)
    trusted = trust_of(work, layouts[0]["step_s"] if layouts else None)
    for layout in layouts:
        layout["interval_s"] = [layout["step_s"] * trusted["low"], layout["step_s"] * trusted["high"]]
    return {
        "trust": trusted,
        "layouts": layouts,
        "considered": found.considered,
        "excluded": found.excluded,
        "seconds": found.seconds,
    }


def chosen(layout: ParallelLayout, given: dict[str, list[Any]]) -> dict[str, Any]:
    """Return the keys of a layout that ``--layout`` left to the search, which has no ``shard_size``."""
    searched = [field.name for field in fields(layout) if field.name not in {*given, "shard_size"}]
    return {name: getattr(layout, name) for name in searched}


def short_of_memory(searcher: Searcher, found: Search) -> str:
    """Return what is short if no layout fits, and the nearest change.

    Raises:
        ValueError: no layout is possible with any memory.
    """
    space, work, limit = searcher.space, searcher.work, searcher.limit
    if found.nearest is None:
        raise ValueError(
            f"no layout is possible: {space.gpus} GPUs, batch {work.batch} and sequence {work.sequence} do not go "
            f"together with {searcher.impossible()}."
        )
    least = found.nearest
    short = (least.memory.total - limit) / 2**30
    states, rest = least.memory.states / 2**30, (least.memory.total - least.memory.states) / 2**30
    return (
        f"no layout fits. The smallest, {least.layout}, needs {least.memory.total / 2**30:.1f} GiB of "
        f"{limit / 2**30:.1f} GiB on a GPU ({states:.1f} of model states, {rest:.1f} of activations, temporaries and "
        f"margin), which is {short:.1f} GiB short. {_change(searcher)}"
    )


def _change(searcher: Searcher) -> str:
    """Return the nearest change with which a layout fits: more GPUs, fewer keys given, or more memory."""
    from ..plugins.plan.search import Searcher, Space

    space, work = searcher.space, searcher.work
    if space.given and not searcher.unequal:
        free = Searcher(work, Space(space.gpus, {}, searcher.limit)).run(1).layouts
        if free:
            return f"Without --layout, {free[0].layout} fits."
    for factor in (2, 4, 8, 16):
        gpus = space.gpus * factor
        if Searcher(work, Space(gpus, space.given, searcher.limit)).run(1).layouts:
            return f"It fits on {gpus} GPUs."
    return "Give GPUs with more memory, a shorter --sequence, or a smaller model."


def tight(searcher: Searcher, found: Search) -> list[str]:
    """Return a line about a first layout that fits, but leaves less than ``ROOM`` of the memory free."""
    from ..plugins.plan.page import figure
    from ..plugins.plan.search import ROOM, Searcher, Space

    first, limit, space = found.layouts[0], searcher.limit, searcher.space
    enough = (1 - ROOM) * limit
    if searcher.unequal or not enough < first.memory.total <= limit:
        return []
    others = Searcher(searcher.work, Space(space.gpus, space.given, enough)).run(1).layouts
    line = f"the first leaves {figure((limit - first.memory.total) / 2**30)} GiB free, less than {ROOM:.0%}: "
    if not others:
        return [line + "so do all that fit. Try it with triax train --dry-run before you have the GPUs"]
    other = others[0]
    takes = f"takes {figure(other.time.seconds)} s and {figure(other.memory.total / 2**30)} GiB"
    return [f"{line}{other.layout} {takes}; --memory {enough / 1e9:.1f} puts it first"]


def without(result: dict[str, Any], limit: float) -> list[str]:
    """Return a line about what the options of the best layout's schedule save."""
    from ..plugins.plan.page import figure
    from ..plugins.plan.parallel_layout import CHANGES
    from ..plugins.plan.picture import name_of

    best = result["layouts"][0]
    plain = best.get("without")
    if plain is None:
        return []
    changed = [f"{name}={best[name]}" for name in (*CHANGES, "schedule") if best[name] != plain[name]]
    held, other = (sum(layout["memory_gib"].values()) for layout in (best, plain))
    fits = "" if other <= limit / 2**30 else ", which does not fit"
    line = (
        f"chosen for the first: {', '.join(changed)}, which takes {figure(best['step_s'])} s and {figure(held)} GiB; "
        f"{name_of(plain)} takes {figure(plain['step_s'])} s and {figure(other)} GiB{fits}"
    )
    return [line, "these times are simulated: no run from which the interval is made has such an option"]


def run_lines(work: Work, found: Search, tokens: int | None, given: float | None) -> list[str]:
    """Return lines about the time of the whole run."""
    from ..plugins.plan.page import figure

    step, tokens_per_step = found.layouts[0].time.seconds, work.batch * work.sequence
    lines = []
    if tokens is not None:
        steps = math.ceil(tokens / tokens_per_step)
        lines.append(f"{tokens:.4g} tokens: {steps:,} steps, {figure(steps * step / 86400)} days")
        if given is not None:
            needed = steps * step / given
            fits = "within" if needed <= 1 else f"{figure(needed)} times as long as"
            lines.append(f"that is {fits} the given {figure(given / 86400)} days")
    elif given is not None:
        lines.append(f"{figure(given / 86400)} days: {figure(given / step * tokens_per_step)} tokens")
    return lines


def print_plan(result: dict[str, Any], limit: float, lines: list[str]) -> None:
    """Print the table, and the bars of the best layout."""
    from ..plugins.plan.page import HEADS, cells

    console = terminal()
    console.print(result["trust"]["line"])
    console.print(table(HEADS, map(cells, result["layouts"])))
    best = result["layouts"][0]
    _bar(console, "memory of the first, GiB", best["memory_gib"], limit / 2**30)
    _bar(console, "time of the first, seconds", best["time_s"], None)
    excluded = ", ".join(f"{number:,} {_plural(reason, number)}" for reason, number in result["excluded"].items())
    searched = f"{result['considered']:,} layouts in {result['seconds']:.2f} s: {excluded or 'none excluded'}"
    if "chosen" in result:
        lines = [
            *lines,
            f"chosen by the search: {', '.join(f'{name}={value}' for name, value in result['chosen'].items())}",
        ]
    console.print(*lines, searched, sep="\n")


def _plural(reason: str, number: int) -> str:
    return reason if number == 1 else reason.replace("does not", "do not")


def _bar(console: Console, title: str, kinds: dict[str, float], limit: float | None) -> None:
    """Print one bar of colored parts, and its key."""
    from ..plugins.plan.page import figure
    from ..plugins.plan.picture import COLORS

    shown, total = {kind: value for kind, value in kinds.items() if value > 0}, sum(kinds.values())
    share = {kind: f" ({value / total:.1%})" if kind == "bubble" else "" for kind, value in shown.items()}
    names = {kind: f" {kind} {figure(value)}{share[kind]}" for kind, value in shown.items()}
    key = Columns([Text("█", COLORS[kind]) + Text(name) for kind, name in names.items()])
    of = "" if limit is None else f" of {figure(limit)}"
    parts = bar(shown, max(total, limit or 0.0), console.width - 2)
    console.print(f"{title}: {figure(total)}{of}", parts, key, sep="\n", soft_wrap=False)


def print_difference(a: dict[str, Any], b: dict[str, Any], trust: str) -> None:
    """Print the terms of two layouts, those that differ the most first."""
    from ..plugins.plan.page import figure
    from ..plugins.plan.picture import name_of

    console = terminal()
    console.print(trust, f"A: {name_of(a)}", f"B: {name_of(b)}", sep="\n")
    for key, unit in (("time_s", "seconds a step"), ("memory_gib", "GiB on the fullest GPU")):
        kinds = sorted(a[key], key=lambda kind: -abs(a[key][kind] - b[key][kind]))
        pairs = {kind: (a[key][kind], b[key][kind]) for kind in kinds if a[key][kind] or b[key][kind]}
        pairs["all"] = sum(a[key].values()), sum(b[key].values())
        rows = ((kind, figure(x), figure(y), f"{x - y:+.4g}") for kind, (x, y) in pairs.items())
        console.print(table(("", "A", "B", "A - B"), rows, unit))
