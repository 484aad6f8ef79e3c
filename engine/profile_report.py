"""What the flops profiler prints, in the form of DeepSpeed's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from . import units


class Entry(NamedTuple):
    """One module in one forward pass.

    Attributes:
        name: of the module in the whole; empty for the whole.
        kind: its class.
        params: its own, without those of the modules in it.
        flops, seconds: of it and all in it.
        called: whether it was; a container is not.
    """

    name: str
    kind: str
    params: int
    flops: float
    seconds: float
    called: bool


@dataclass
class Node:
    """A module, and those in it."""

    name: str  # in its parent
    kind: str
    params: int
    flops: float
    seconds: float
    called: bool
    children: list[Node] = field(default_factory=list)

    @property
    def macs(self) -> float:
        """Multiply-accumulates: two operations each."""
        return self.flops / 2


def tree(entries: Iterable[Entry]) -> Node:
    """The modules as they hold each other; a module has the parameters of all in it, and so the rest if it was not
    called itself."""
    nodes = {entry.name: Node(entry.name.rpartition(".")[2], *entry[1:]) for entry in entries}
    root = nodes[""]
    for name, node in nodes.items():
        if name:
            nodes[name.rpartition(".")[0]].children.append(node)
    _sum_up(root)
    return root


def merged(stages: Sequence[Sequence[Sequence[Entry]]]) -> list[Entry]:
    """The entries of one whole model from those of its ranks.

    Args:
        stages: for each pipe rank, for each tensor rank: its entries. Parameters are whole on each, and not twice over
            the stages.

    Returns:
        Operations are added up; a module takes as long as it does on the slowest tensor rank, and, where several
        stages have it, on all of these.
    """
    found: dict[str, Entry] = {}
    for shards in stages:
        for entries in zip(*shards, strict=True):
            first = entries[0]
            entry = first._replace(
                flops=sum(each.flops for each in entries), seconds=max(each.seconds for each in entries)
            )
            if (other := found.get(entry.name)) is not None:
                entry = entry._replace(
                    params=entry.params + other.params,
                    flops=entry.flops + other.flops,
                    seconds=entry.seconds + other.seconds,
                    called=entry.called or other.called,
                )
            found[entry.name] = entry
    return list(found.values())


def report(
    step: int,
    rows: Sequence[tuple[str, str]],
    root: Node,
    module_depth: int = -1,
    top_modules: int = 1,
    in_detail: bool = True,
) -> str:
    """The whole text: head, summary by class, and the tree if wanted."""
    width = max(len(label) for label, _ in rows) + 4
    lines = [
        _ruled("triax Flops Profiler"),
        f"Profile Summary at step {step}:",
        "params: parameters; MACs: multiply-accumulates; flops: floating-point operations of matrix products,",
        "convolutions and attention; FLOPS: these a second; fwd, bwd: the forward and the backward pass",
        "",
        *(f"{label:<{width}}{value}".rstrip() for label, value in rows),
        "",
        *aggregated(root, module_depth, top_modules),
    ]
    if in_detail:
        lines += ["", *detailed(root)]
    return "\n".join([*lines, "-" * 80])


def aggregated(root: Node, module_depth: int = -1, top_modules: int = 1) -> list[str]:
    """The classes of modules that have, compute and take most, at each depth."""
    levels = [[root]]
    while below := [child for node in levels[-1] for child in node.children]:
        levels.append(below)
    lines = [
        _ruled("Aggregated Profile"),
        f"Top {top_modules} modules in terms of params, MACs or fwd latency at different model depths:",
    ]
    for depth, nodes in enumerate(levels):
        if module_depth >= 0 and depth > module_depth:
            break
        lines.append(f"depth {depth}:")
        for label, attribute, text in (
            ("params", "params", units.count),
            ("MACs", "macs", lambda value: units.count(value, "MACs")),
            ("fwd latency", "seconds", units.duration),
        ):
            sums: dict[str, float] = {}
            for node in nodes:
                sums[node.kind] = sums.get(node.kind, 0) + getattr(node, attribute)
            top = sorted(sums.items(), key=lambda item: -item[1])[:top_modules]
            lines.append(f"    {label:<12}- {{{', '.join(f'{kind!r}: {text(value)!r}' for kind, value in top)}}}")
    return lines


def detailed(root: Node) -> list[str]:
    """The tree: each module with its numbers and their share of the whole."""
    lines = [
        _ruled("Detailed Profile"),
        "Each module: params, percentage of total params, MACs, percentage of total MACs, fwd latency, percentage of",
        "total fwd latency, fwd FLOPS. A module that runs outside of modules (a function) is in what holds it.",
        "",
    ]
    _print(root, root, "", lines)
    return lines


def _print(node: Node, root: Node, indent: str, lines: list[str]) -> None:
    cells = [
        units.count(node.params),
        f"{_share(node.params, root.params)} Params",
        units.count(node.macs, "MACs"),
        f"{_share(node.macs, root.macs)} MACs",
        units.duration(node.seconds),
        f"{_share(node.seconds, root.seconds)} latency",
        units.rate(node.flops, node.seconds),
    ]
    label = f"({node.name}): " if node.name else ""
    lines.append(f"{indent}{label}{node.kind}({', '.join(cells)}{'' if node.children else ')'}")
    for child in node.children:
        _print(child, root, indent + "  ", lines)
    if node.children:
        lines.append(f"{indent})")


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.2f}%" if whole else "0.00%"


def _sum_up(node: Node) -> None:
    for child in node.children:
        _sum_up(child)
        node.params += child.params
    if not node.called:
        node.flops = sum(child.flops for child in node.children)
        node.seconds = sum(child.seconds for child in node.children)


def _ruled(title: str) -> str:
    return f" {title} ".center(80, "-")
