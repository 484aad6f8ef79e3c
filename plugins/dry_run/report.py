"""Report of a dry run as text: classes of ranks, memory and traffic of each pipe rank, and what would have failed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...base.tables import as_text, table
from .dry_run import DryRun

_KINDS = ("parameters", "gradients", "masters", "optimizer", "buffers", "activations", "working")
_SHOWN = 8


def report(run: DryRun) -> str:
    """Return the report of a dry run."""
    return "\n".join([*_head(run), *_classes(run), *_stages(run), *_values(run), *_end(run)])


def _head(run: DryRun) -> list[str]:
    made = any(record["axes"] for record in run.records.values())
    sizes = " x ".join(f"{name} {size}" for name, size in run.classes.topology.sizes.items()) if made else "no grid"
    return [f"dry run of {run.settings.ranks:,} ranks: {sizes}"]


def _classes(run: DryRun) -> list[str]:
    classes = run.classes
    members = classes.members()
    operations = sum(len(record["operations"]) for record in run.records.values())
    count = f"{len(members)} class{'' if len(members) == 1 else 'es'}"
    lines = [f"{count} of ranks; {len(run.records)} ranks were run, {operations:,} collectives and messages recorded"]
    for signature, ranks in list(members.items())[: 4 * _SHOWN]:
        done = [rank for rank in ranks if rank in run.records]
        as_ranks = f"as rank {', '.join(map(str, done[:3]))}" if done else "not run"
        lines.append(f"  {len(ranks):>6,} ranks, {as_ranks}: {classes.describe(signature, ranks)}")
    if classes.unexplored:
        lines.append(f"  {classes.unexplored} classes were not run, because the script compares ranks in too many ways")
    return lines


def _stages(run: DryRun) -> list[str]:
    """Return a line for each pipe rank: the rank of its stage that holds and sends most."""
    most: dict[int, dict[str, Any]] = {}
    for record in run.records.values():
        if "memory" in record:
            pipe = record["coordinate"].get("pipe", 0)
            if pipe not in most or _total(record) > _total(most[pipe]):
                most[pipe] = record
    if not most:
        return []
    kinds = [kind for kind in _KINDS if any(record["memory"].get(kind) for record in most.values())]
    axes = sorted({axis for record in most.values() for axis in record.get("sent", {})})
    heads, rows = ["pipe", "layers", *kinds, "total", *(f"sent {axis}" for axis in axes), "checkpoint"], []
    for pipe, record in sorted(most.items()):
        layers = " ".join(f"{start}-{stop - 1}" for start, stop in record.get("layers", []))
        memory = [_size(record["memory"].get(kind, 0)) for kind in kinds]
        sent = [_size(record.get("sent", {}).get(axis, 0)) for axis in axes]
        rows.append([pipe, layers, *memory, _size(_total(record)), *sent, _size(record["checkpoint"][1])])
    lines = [as_text(table(heads, rows, left=0))]
    places: dict[str, float] = {}
    for record in most.values():
        for place, held in record["offloaded"].items() if isinstance(record.get("offloaded"), dict) else ():
            places[place] = max(places.get(place, 0), sum(held.values()) if isinstance(held, dict) else held)
    lines += [f"offloaded to {place}: at most {_size(most)} a rank" for place, most in places.items() if most]
    fewer = next((record["microbatches"] for record in most.values() if record["microbatches"]), None)
    if fewer is not None:
        lines.append(
            f"the dry run ran {fewer[1]} of the {fewer[0]} microbatches of a step. The bytes in the table are of these "
            f"{fewer[1]}: a step sends {fewer[0] / fewer[1]:g} times as much for its microbatches"
        )
    return ["bytes held by a rank, and sent in a step:", *lines]


def _total(record: Mapping[str, Any]) -> int:
    return sum(value for value in record["memory"].values() if value)


def _values(run: DryRun) -> list[str]:
    asked: dict[str, tuple[str, str]] = {}
    mixed: dict[str, str] = {}
    for record in run.records.values():
        asked |= {place: (what, value) for place, (what, value) in record["asked"].items()}
        mixed |= record["mixed"]
    lines = []
    if any(record["outcome"] == "step" for record in run.records.values()):
        given = f"{run.settings.stand_in:g}"
        lines.append(f"loss and gradient norm are not computed: {given} stands for them (--dry-value NUMBER sets it)")
    for place, (what, value) in list(asked.items())[:_SHOWN]:
        lines.append(f"{place}: {what}() of a tensor without values; it was given {value} (--dry-value NUMBER sets it)")
    if len(asked) > _SHOWN:
        lines.append(f"... and in {len(asked) - _SHOWN} more places")
    untraced = sorted({place for record in run.records.values() for place in record["untraced"]})
    lines += [
        f"{place}: makes a number of the variable RANK, so ranks that the script treats differently are not seen: "
        "torch.distributed.get_rank() and grid.rank show them"
        for place in untraced[:_SHOWN]
    ]
    for place, what in list(mixed.items())[:_SHOWN]:
        lines.append(f"{place}: {what} is given a tensor of the CPU and one of the rank's device, which fails on a GPU")
    return lines


def _end(run: DryRun) -> list[str]:
    if not run.problems:
        stepped = all(record["outcome"] == "step" for record in run.records.values())
        what = (
            "nothing would have failed" if stepped else "the program ended without a training step, and without error"
        )
        return [f"{what} ({run.seconds:.1f} s)"]
    lines = [f"PROBLEM: {problem}" for problem in run.problems[:_SHOWN]]
    if len(run.problems) > _SHOWN:
        lines.append(f"... and {len(run.problems) - _SHOWN} more")
    failed = next((rank for rank, r in sorted(run.records.items()) if r["outcome"] == "error"), None)
    if failed is not None and run.logs.get(failed, "").strip():
        lines += [
            f"the end of what rank {failed} printed:",
            *("  " + line for line in run.logs[failed].splitlines()[-12:]),
        ]
    return [*lines, f"{len(run.problems)} problem{'' if len(run.problems) == 1 else 's'} ({run.seconds:.1f} s)"]


def _size(size: float) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 2**power:
            return f"{size / 2**power:.1f} {unit}"
    return f"{size:.0f} B"
