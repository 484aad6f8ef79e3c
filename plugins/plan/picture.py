"""Pictures of a plan: memory and time of the best layouts as bars, from the numbers that ``--json`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...base.errors import to_install
from .parallel_layout import CHANGES

# One color for each kind, in the terminal, in the picture and on the page.
COLORS = {
    "parameters": "#4269d0",
    "gradients": "#97bbf5",
    "masters": "#6cc5b0",
    "optimizer": "#3ca951",
    "buffers": "#9498a0",
    "activations": "#efb118",
    "temporaries": "#ff725c",
    "margin": "#c9c9c9",
    "products": "#4269d0",
    "attention": "#97bbf5",
    "elementwise": "#6cc5b0",
    "overhead": "#8c6d31",
    "recompute": "#a463f2",
    "tensor": "#efb118",
    "context": "#f5d689",
    "expert": "#9c6b4e",
    "pipe": "#ff8ab7",
    "bubble": "#c9c9c9",
    "imbalance": "#5f6b6d",
    "cores": "#7f7f7f",
    "data": "#ff725c",
    "offload": "#9498a0",
}


def name_of(layout: Mapping[str, Any]) -> str:
    """Return a short name of a layout of ``--json``: its axes above 1, microbatch, schedule, ZeRO and recomputation."""
    parts = [f"{name}={layout[name]}" for name in ("pipe", "data", "context", "tensor", "expert") if layout[name] > 1]
    parts.append(f"microbatch={layout['microbatch']}")
    if layout["pipe"] > 1:
        parts.append(layout["schedule"] + (f"({layout['chunks']})" if layout["chunks"] > 1 else ""))
    parts.append(f"zero={layout['zero']}")
    parts += [f"shard_size={size}" for size in [layout.get("shard_size")] if size is not None]
    parts += [f"recompute={layout['recompute']}"] * (layout["recompute"] != "none")
    parts += [f"{name}={layout[name]}" for name, value in CHANGES.items() if layout[name] != value]
    return " ".join(parts + ["offload"] * layout["offload"])


def picture(layouts: Sequence[Mapping[str, Any]], path: Path, limit_gib: float, note: str = "") -> None:
    """Draw memory and time of layouts, as ``--json`` prints them, to a .png, .svg or .pdf file.

    ``note`` is a line above them.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(f"pictures need matplotlib: {to_install('plot')}", name="matplotlib") from None
    figure = Figure(figsize=(11, 2.2 + 0.8 * len(layouts)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 1)
    figure.suptitle(note, fontsize=7, wrap=True)
    names = [name_of(layout).replace(" microbatch", "\nmicrobatch") for layout in layouts]
    for axis, key, unit in ((axes[0], "memory_gib", "GiB on the fullest GPU"), (axes[1], "time_s", "seconds a step")):
        kinds = [kind for kind in layouts[0][key] if any(layout[key][kind] > 0 for layout in layouts)]
        left = [0.0] * len(layouts)
        for kind in kinds:
            values = [layout[key][kind] for layout in layouts]
            axis.barh(range(len(layouts)), values, 0.62, left, color=COLORS[kind], label=kind)
            left = [a + b for a, b in zip(left, values, strict=True)]
        for row, total in enumerate(left):
            axis.text(total, row, f" {total:.4g}", va="center", fontsize=8)
        axis.set_yticks(range(len(layouts)), names, fontsize=7)
        axis.invert_yaxis()
        axis.set_xlabel(unit)
        axis.spines[["top", "right"]].set_visible(False)
        most = max(left)
        if key == "memory_gib":
            axis.axvline(limit_gib, color="black", linewidth=1, linestyle="--")
            axis.text(limit_gib, -0.62, f"limit {limit_gib:.4g}", fontsize=7, ha="center")
            most = max(most, limit_gib)
        axis.set_xlim(0, most * 1.12)
        axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(path, dpi=130)
