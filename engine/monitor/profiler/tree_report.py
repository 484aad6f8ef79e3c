"""Text of the flops profiler's report: summary by class and module tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ....base.records import Records, show
from .. import format as units


@dataclass
class ModuleNode:
    """A module's numbers in one forward pass, and the modules in it.

    Attributes:
        name: name of the module in the model, empty for the model itself; in a tree, its name in its parent.
        kind: name of its class.
        params: elements of its own parameters; in a tree, of all modules in it too.
        flops, seconds: of the module and all modules in it.
        called: False for a module that did not run itself, such as a container.
        children: modules in it, in a tree.
    """

    name: str
    kind: str
    params: int
    flops: float
    seconds: float
    called: bool
    children: list[ModuleNode] = field(default_factory=list)

    @property
    def macs(self) -> float:
        """Multiply-accumulates: two operations each."""
        return self.flops / 2


def tree(modules: Iterable[ModuleNode]) -> ModuleNode:
    """Return the module tree. A node has the parameters of all modules in it.

    If a module was not called itself, its operations and time are the sums over the modules in it.
    """
    nodes = {module.name: replace(module, name=module.name.rpartition(".")[2], children=[]) for module in modules}
    root = nodes[""]
    for name, node in nodes.items():
        if name:
            nodes[name.rpartition(".")[0]].children.append(node)
    _sum_up(root)
    return root


def merged(stages: Sequence[Sequence[Sequence[ModuleNode]]]) -> list[ModuleNode]:
    """Return the entries of the whole model from those of its ranks.

    Operations add up. The time of a module is that of the slowest rank of the tensor-parallel group. For a module on
    several stages it is the sum over the stages.

    Args:
        stages: entries of each rank, by position on the pipe axis, then on the tensor axis. A parameter counts with its
            unsharded size on each rank of the tensor axis, and on one stage only.
    """
    by_name: dict[str, ModuleNode] = {}
    for shards in stages:
        for entries in zip(*shards, strict=True):
            first = entries[0]
            entry = replace(
                first, flops=sum(node.flops for node in entries), seconds=max(node.seconds for node in entries)
            )
            if (other := by_name.get(entry.name)) is not None:
                entry = replace(
                    entry,
                    params=entry.params + other.params,
                    flops=entry.flops + other.flops,
                    seconds=entry.seconds + other.seconds,
                    called=entry.called or other.called,
                )
            by_name[entry.name] = entry
    return list(by_name.values())


def report(
    step: int,
    rows: Sequence[tuple[str, str]],
    root: ModuleNode,
    module_depth: int = -1,
    top_modules: int = 1,
    in_detail: bool = True,
) -> str:
    """Return the text of a report: head, summary by class, and the module tree if it is wanted."""
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


def aggregated(root: ModuleNode, module_depth: int = -1, top_modules: int = 1) -> list[str]:
    """Return, for each depth, the classes of modules with the most parameters, MACs and time."""
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


def detailed(root: ModuleNode) -> list[str]:
    """Return the module tree: each module's numbers and their share of the model's."""
    lines = [
        _ruled("Detailed Profile"),
        "Each module: params, percentage of total params, MACs, percentage of total MACs, fwd latency, percentage of",
        "total fwd latency, fwd FLOPS. What a function computes counts for the module that calls it.",
        "",
    ]
    _print(root, root, "", lines)
    return lines


def _print(node: ModuleNode, root: ModuleNode, indent: str, lines: list[str]) -> None:
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


def _sum_up(node: ModuleNode) -> None:
    for child in node.children:
        _sum_up(child)
        node.params += child.params
    if not node.called:
        node.flops = sum(child.flops for child in node.children)
        node.seconds = sum(child.seconds for child in node.children)


def _ruled(title: str) -> str:
    return f" {title} ".center(80, "-")


def publish(text: str, output_file: str | None) -> None:
    """Print a text, or write it to a file, whose folder is made. It is printed too if the file cannot be written."""
    if output_file is not None:
        path = Path(output_file)
        with Records().writing(str(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")
            return
    show(text)
