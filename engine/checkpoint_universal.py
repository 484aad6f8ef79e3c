"""From a folder in DeepSpeed's universal format to one of ours. Its files are pickles: only if one asks.

ds_to_universal.py of DeepSpeed writes it (Lian et al. 2024, arXiv:2406.18820): of each parameter, whole and in fp32,

zero/NAME/fp32.pt, exp_avg.pt, ...   {"param": tensor}; from stage 3 of ZeRO the flat tensor itself
zero/NAME/step.pt                    the steps that its optimizer has taken; not from stage 3
*model_states.pt                     shapes, names of buffers and of what is shared, where the run was
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoint_import import named, part, write
from .checkpoint_state import BUFFERS, OPTIMIZER, WEIGHTS, Part
from .checkpoint_values import encode
from .schedulers import OURS

STATES = "model_states.pt"
_REASON = "it holds objects, which would run code"


def import_universal(
    source: Path, folder: Path, tag: str, buffers: Sequence[str] = (), renames: Mapping[str, str] | None = None
) -> list[str]:
    """Read a universal checkpoint, on one process, and write it as one of ours.

    Args:
        source: with the folder ``zero``. Its files are unpickled by torch's restricted reader, which makes tensors,
            numbers and text alone.
        folder, tag: where to write.
        buffers: patterns of names, of what is a buffer, where the folder does not tell.
        renames: what names begin with -> what they begin with here. A layer of a ``PipelineModule`` of DeepSpeed's,
            "3.weight", becomes "layers.3.weight" in any case.

    Returns:
        The names of what was left out, with the reason.

    Raises:
        ValueError: there is no parameter, or a file cannot be read so.
        RuntimeError: it could not be written.
    """
    states, left = _states(source)
    shapes = {name: tuple(shape) for group in states.get("param_shapes") or [] for name, shape in group.items()}
    shared, module = states.get("shared_params") or {}, states.get("module") or {}
    kept = [name for name in dict.fromkeys(states.get("buffer_names") or []) if isinstance(module.get(name), Tensor)]
    parts: list[Part] = [part(f"{BUFFERS}/{_layers(named(name, renames or {}))}", module[name]) for name in kept]
    numbers: dict[str, dict[str, Any]] = {}
    taken = states.get("global_steps", 0) - states.get("skipped_steps", 0)
    for place in sorted(path for path in (source / "zero").iterdir() if path.is_dir()):
        if place.name in shared:
            left.append(f"{place.name} (the same as {shared[place.name]})")
            continue
        if place.name in kept:  # in fp32 there, whatever it is
            continue
        name = _layers(named(place.name, renames or {}))
        if any(fnmatchcase(name, pattern) for pattern in buffers):
            parts.append(part(f"{BUFFERS}/{name}", _tensor(place, "fp32", shapes)))
            continue
        keys = sorted(file.stem for file in place.glob("*.pt"))
        if "fp32" not in keys:
            raise ValueError(f"{place} has no fp32.pt, which is the parameter: it has {', '.join(keys) or 'no file'}")
        parts.append(part(f"{WEIGHTS}/{name}", _tensor(place, "fp32", shapes)))
        moments = [key for key in keys if key not in ("fp32", "step")]
        for key in moments:
            value = _tensor(place, key, shapes)
            if value.dim():
                parts.append(part(f"{OPTIMIZER}/{key}/{name}", value))
            else:
                numbers.setdefault(name, {})[key] = encode(value)
        step = _read(place / "step.pt") if "step" in keys else taken
        if moments:
            numbers.setdefault(name, {})["step"] = encode(torch.tensor(float(step)))
    for name, shape in (states.get("frozen_param_shapes") or {}).items():
        if not (source / "zero" / name).is_dir():  # stage 3 has it in parts, padded
            whole = torch.cat(states["fragments"][name]).reshape(-1)[: math.prod(shape)].view(tuple(shape))
            parts.append(part(f"{WEIGHTS}/{_layers(named(name, renames or {}))}", whole))
    if not any(each.name.startswith(f"{WEIGHTS}/") for each in parts):
        raise ValueError(f"{source / 'zero'} has no folder of a parameter")
    if (source / "zero" / "optimizer_state.pt").is_file():
        left.append("zero/optimizer_state.pt (options of the optimizer: the configuration has them)")
    step = states.get("global_steps") or max((_number(each) for each in numbers.values()), default=0)
    run = {"global_steps": int(step)}
    if "global_samples" in states:
        run["global_samples"] = int(states["global_samples"])
    write(folder, tag, parts, numbers, run | _schedule(states), {"from": f"DeepSpeed universal, {source}"})
    return left


def _states(source: Path) -> tuple[dict[str, Any], list[str]]:
    """What the model's files say of the run, in the order of their ranks; and which of them could not be read."""
    found: dict[str, Any] = {}
    left = []
    for file in sorted(source.glob(f"*{STATES}"), key=lambda path: [*map(int, re.findall(r"\d+", path.name))]):
        try:
            states = _read(file)
        except ValueError:
            left.append(f"{file.name} ({_REASON})")
            continue
        for key in ("param_shapes", "buffer_names"):
            states[key] = [*(found.get(key) or []), *(states.get(key) or [])]
        for key in ("shared_params", "module"):
            states[key] = {**(found.get(key) or {}), **(states.get(key) or {})}
        fragments = states["fragments"] = found.get("fragments", {})
        for name, fragment in (states.pop("frozen_param_fragments", None) or {}).items():
            fragments.setdefault(name, []).append(fragment)
        found = states
    return found, left


def _schedule(states: Mapping[str, Any]) -> dict[str, Any]:
    """The learning-rate schedule, where it is one that both have: its state is the same number in both."""
    state, config = states.get("lr_scheduler"), states.get("ds_config")
    kind = (config.get("scheduler") or {}).get("type") if isinstance(config, dict) else None
    if kind not in OURS or not isinstance(state, dict) or "last_batch_iteration" not in state:
        return {}
    number = {"last_batch_iteration": int(state["last_batch_iteration"])}
    return {"lr_scheduler": {"type": kind, "state": number}}


def _tensor(place: Path, key: str, shapes: Mapping[str, tuple[int, ...]]) -> Tensor:
    value = _read(place / f"{key}.pt")
    if isinstance(value, dict) and isinstance(value.get("param"), Tensor):
        whole: Tensor = value["param"]
        return whole
    if not isinstance(value, Tensor):
        raise ValueError(f"{place / key}.pt is no parameter of the universal format: it holds a {type(value).__name__}")
    if place.name not in shapes:
        raise ValueError(
            f"{place / key}.pt is flat, as stage 3 of ZeRO leaves it, and no *{STATES} in {place.parent.parent} tells "
            f"the shape of {place.name}"
        )
    return value.view(shapes[place.name])


def _layers(name: str) -> str:
    return f"layers.{name}" if name.partition(".")[0].isdigit() else name


def _number(state: Mapping[str, Any]) -> float:
    return float(state["step"]["$number"][1])


def _read(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)  # what is large stays on the disk
    except Exception as error:  # of torch's reader, of zip files, of the disk
        said = str(error).strip().partition("\n")[0]
        raise ValueError(f"{file} cannot be read: {said}") from error
