"""Import of a DeepSpeed universal checkpoint. Its files are pickles, so the user has to ask for it.

DeepSpeed's ds_to_universal.py writes this format (Lian et al. 2024, arXiv:2406.18820), each parameter whole, in fp32:

zero/NAME/fp32.pt, exp_avg.pt, ...   {"param": tensor}; from stage 3 of ZeRO the flat tensor itself
zero/NAME/step.pt                    steps of its optimizer; not from stage 3
*model_states.pt                     shapes, names of buffers and of shared parameters, counters of the run
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

from ...base.json_values import encode
from ...checkpoint.convert.whole_tensors import renamed, write_whole
from ...checkpoint.snapshot import BUFFERS, OPTIMIZER, WEIGHTS, Snapshot
from .lr_schedules import VALID_LR_SCHEDULES

STATES = "model_states.pt"
_REASON = "not read, because it holds objects, whose reading could run code"


def import_universal(
    source: Path,
    folder: Path,
    tag: str,
    buffers: Sequence[str] = (),
    renames: Mapping[str, str] | None = None,
) -> list[str]:
    """Read a universal checkpoint on one process, and write it in triax's format.

    Args:
        source: the folder that contains ``zero``. Its files are unpickled by torch's restricted reader, which makes
            only tensors, numbers and text.
        folder, tag: folder of checkpoints to write to, and the new checkpoint's name.
        buffers: patterns of the names of buffers, if the folder does not have them.
        renames: replacements of the beginnings of names: old -> new. A layer of DeepSpeed's ``PipelineModule``,
            "3.weight", always becomes "layers.3.weight".

    Returns:
        The names that were left out, with the reason.

    Raises:
        ValueError: if there is no parameter, or if a file cannot be read.
        RuntimeError: if the checkpoint could not be written.
    """
    states, left = _states(source)
    shapes = {name: tuple(shape) for group in states.get("param_shapes") or [] for name, shape in group.items()}
    shared, module = states.get("shared_params") or {}, states.get("module") or {}
    kept = [name for name in dict.fromkeys(states.get("buffer_names") or []) if isinstance(module.get(name), Tensor)]
    snapshot = Snapshot()

    def named(name: str) -> str:
        """Return triax's name of a tensor. A layer of DeepSpeed's ``PipelineModule`` begins with its number."""
        new = renamed(name, renames or {})
        return f"layers.{new}" if new.partition(".")[0].isdigit() else new

    for name in kept:
        snapshot.add(f"{BUFFERS}/{named(name)}", module[name])
    numbers = snapshot.numbers
    taken = states.get("global_steps", 0) - states.get("skipped_steps", 0)
    for values in sorted(path for path in (source / "zero").iterdir() if path.is_dir()):
        if values.name in shared:
            left.append(f"{values.name} (the same as {shared[values.name]})")
            continue
        if values.name in kept:  # there it is fp32, whatever the buffer's dtype
            continue
        name = named(values.name)
        if any(fnmatchcase(name, pattern) for pattern in buffers):
            snapshot.add(f"{BUFFERS}/{name}", _tensor(values, "fp32", shapes))
            continue
        keys = sorted(file.stem for file in values.glob("*.pt"))
        if "fp32" not in keys:
            raise ValueError(
                f"{values} has no file fp32.pt with the parameter's values, but {', '.join(keys) or 'nothing'}: the "
                "universal checkpoint is incomplete; write it again with DeepSpeed's ds_to_universal.py"
            )
        snapshot.add(f"{WEIGHTS}/{name}", _tensor(values, "fp32", shapes))
        moments = [key for key in keys if key not in ("fp32", "step")]
        for key in moments:
            value = _tensor(values, key, shapes)
            if value.dim():
                snapshot.add(f"{OPTIMIZER}/{key}/{name}", value)
            else:
                numbers.setdefault(name, {})[key] = encode(value)
        step = _read(values / "step.pt") if "step" in keys else taken
        if moments:
            numbers.setdefault(name, {})["step"] = encode(torch.tensor(float(step)))
    for name, shape in (states.get("frozen_param_shapes") or {}).items():
        if not (source / "zero" / name).is_dir():  # stage 3 has it in padded parts
            joined = torch.cat(states["fragments"][name]).reshape(-1)[: math.prod(shape)].view(tuple(shape))
            snapshot.add(f"{WEIGHTS}/{named(name)}", joined)
    if not snapshot.of_kinds(WEIGHTS):
        raise ValueError(
            f"{source / 'zero'} has no folder of a parameter, such as zero/0.weight with fp32.pt in it: give the "
            "folder that DeepSpeed's ds_to_universal.py wrote"
        )
    if (source / "zero" / "optimizer_state.pt").is_file():
        left.append("zero/optimizer_state.pt (options of the optimizer: the configuration has them)")
    counted = (float(entry["step"]["$number"][1]) for entry in numbers.values())
    step = states.get("global_steps") or max(counted, default=0)
    run = {"global_steps": int(step)}
    if "global_samples" in states:
        run["global_samples"] = int(states["global_samples"])
    run |= _schedule(states)
    write_whole(folder, tag, snapshot, run, f"DeepSpeed universal, {source}")
    return left


def _states(source: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the content of the ``*model_states.pt`` files, merged in the order of ranks, and those not readable."""
    merged: dict[str, Any] = {}
    left = []
    for file in sorted(source.glob(f"*{STATES}"), key=lambda path: [*map(int, re.findall(r"\d+", path.name))]):
        try:
            states = _read(file)
        except ValueError:
            left.append(f"{file.name} ({_REASON})")
            continue
        for key in ("param_shapes", "buffer_names"):
            states[key] = [*(merged.get(key) or []), *(states.get(key) or [])]
        for key in ("shared_params", "module"):
            states[key] = {**(merged.get(key) or {}), **(states.get(key) or {})}
        fragments = states["fragments"] = merged.get("fragments", {})
        for name, fragment in (states.pop("frozen_param_fragments", None) or {}).items():
            fragments.setdefault(name, []).append(fragment)
        merged = states
    return merged, left


def _schedule(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's learning-rate schedule: its state is one number, equal in both libraries."""
    state, config = states.get("lr_scheduler"), states.get("ds_config")
    kind = (config.get("scheduler") or {}).get("type") if isinstance(config, dict) else None
    if kind not in VALID_LR_SCHEDULES or not isinstance(state, dict) or "last_batch_iteration" not in state:
        return {}
    number = {"last_batch_iteration": int(state["last_batch_iteration"])}
    return {"lr_scheduler": {"type": kind, "state": number}}


def _tensor(place: Path, key: str, shapes: Mapping[str, tuple[int, ...]]) -> Tensor:
    value = _read(place / f"{key}.pt")
    if isinstance(value, dict) and isinstance(value.get("param"), Tensor):
        tensor: Tensor = value["param"]
        return tensor
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{place / key}.pt is not a file of a universal checkpoint, because it holds a {type(value).__name__} and "
            "not a tensor"
        )
    if place.name not in shapes:
        raise ValueError(
            f"the shape of {place.name} is unknown, because {place / key}.pt is flat, as ZeRO stage 3 writes it, and "
            f"no *{STATES} in {place.parent.parent} has the shape. Copy these files of the DeepSpeed checkpoint there"
        )
    return value.view(shapes[place.name])


def _read(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)  # large tensors stay on the disk
    except Exception as error:  # of torch's reader, of zip files, of the disk
        said = str(error).strip().partition("\n")[0]
        raise ValueError(f"{file} cannot be read: {said}") from error
