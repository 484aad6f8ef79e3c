"""Older names of a training file's keys, which are read until the version in which they end."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from ..base.errors import ConfigError

ENDS = "0.3"  # version of triax that reads them no more

Values = TypeVar("Values", bound=dict[str, Any])
Moved = Callable[[dict[str, Any], str, dict[str, Any], str], None]

_ZERO = {
    "reduce_bucket_size": "bucket_size",
    "ignore_unused_parameters": "allow_unused",
    "stage3_keep_gathered": "keep_gathered",
    "stage3_prefetch_bucket_size": "prefetch_bucket_size",
    "stage3_param_persistence_threshold": "persistence_threshold",
    "stage3_max_live_parameters": "max_live_parameters",
    "stage3_max_reuse_distance": "max_reuse_distance",
    "leaf_module": "leaf_modules",
    "offload_optimizer.nvme_path": "offload_optimizer.path",
    "offload_param": "offload_parameters",
    "offload_parameters.nvme_path": "offload_parameters.path",
    "zero_quantized_weights": "quantized_weights",
    "zero_quantized_nontrainable_weights": "quantized_frozen_weights",
    "zero_quantized_gradients": "quantized_gradients",
    "zero_hpz_partition_size": "hpz_partition_size",
}
_RECOMPUTE = {
    "number_checkpoints": "groups",
    "checkpointable_layers": "layers",
    "contiguous_memory_optimization": "contiguous",
    "synchronize_checkpoint_boundary": "synchronize",
}
_LORA = {"r": "rank", "lora_alpha": "alpha", "target_modules": "targets", "use_rslora": "rslora"}

# Older name -> name, of keys and of whole sections; an older name within a section stands after the section's.
MOVED = {
    "training.batch": "batch.size",
    "training.batch_tokens": "batch.tokens",
    "training.microbatch": "batch.microbatch",
    "training.optimizer": "optimizer",
    "training.zero": "zero",
    "training.precision": "precision",
    "training.clip": "clip",
    "training.recompute": "recompute",
    "training.compile": "compile",
    "model.lora": "lora",
    "monitor.log_every": "monitor.print_every",
    "checkpoint.async": "checkpoint.background",
    **{f"zero.{older}": f"zero.{name}" for older, name in _ZERO.items()},
    **{f"recompute.{older}": f"recompute.{name}" for older, name in _RECOMPUTE.items()},
    **{f"lora.{older}": f"lora.{name}" for older, name in _LORA.items()},
}
# Keys that 0 switched off, and what does so now.
_OFF = {"clip": None, "monitor.trace": False, "monitor.histograms": False}


def new_name(key: str) -> str:
    """Return the name of a dotted key, or of the section that it is in, where its older one is given."""
    for older, name in MOVED.items():
        if key == older or key.startswith(f"{older}."):
            key = name + key[len(older) :]
    return key


def renamed(values: Mapping[str, Any], short_forms: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a file under the names of today; a warning in the log names each older one.

    Args:
        values: the keys and values of the file.
        short_forms: section -> the key of which a plain value in place of the section is the value.

    Raises:
        ConfigError: a key stands there under both names.
    """
    made = _copied(values)
    for note in rename(made, short_forms):
        warn_of_older(note)
    return made


def warn_of_older(note: str) -> None:
    """Log a warning about an older name."""
    text = "%s, which triax %s removes: write the new name, or rewrite the file with triax config FILE --upgrade"
    logging.getLogger("triax").warning(text, note, ENDS)


def rename(values: Values, short_forms: Mapping[str, str], moved: Moved = lambda *_: None) -> Iterator[str]:
    """Give the keys of a file their names of today, in place, and yield a note on each change.

    Args:
        values: the keys and values, changed.
        short_forms: as of ``renamed``.
        moved: called with the older section, the older key, the section and the key, after each move.

    Raises:
        ConfigError: a key stands there under both names.
    """
    for older, name in MOVED.items():
        *outer, last = older.split(".")
        holder = _section(values, outer)
        if holder is None or last not in holder:
            continue
        *sections, key = name.split(".")
        target: dict[str, Any] = values
        for number, section in enumerate(sections):
            found = target.get(section)
            if not isinstance(found, dict):
                main = short_forms.get(".".join(sections[: number + 1]), "")
                target[section] = made = type(values)()
                made.update({} if found is None else {main: found})
                found = made
            target = found
        if key in target:
            raise ConfigError(f"{older} is an older name of {name}: give the second alone")
        target[key] = holder.pop(last)
        moved(holder, last, target, key)
        if not holder:
            del values[outer[0]]
        yield f"{older} is an older name of {name}"
    for key, off in _OFF.items():
        *outer, last = key.split(".")
        holder = _section(values, outer)
        given = None if holder is None else holder.get(last)
        if holder is not None and isinstance(given, (int, float)) and not isinstance(given, bool) and given == 0:
            holder[last] = off
            yield f"{key}: 0 is an older spelling of {key}: {json.dumps(off)}"


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in values.items()}


def _section(values: dict[str, Any], path: list[str]) -> dict[str, Any] | None:
    """Return the section at a path; None if there is none."""
    found: Any = values
    for part in path:
        found = found.get(part) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None
