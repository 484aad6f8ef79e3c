"""Older names of a training file's keys, which are read until the version in which they end."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ..base.errors import ConfigError

ENDS = "0.3"  # version of triax that reads them no more
_ZERO = {
    "reduce_bucket_size": "bucket_size",
    "ignore_unused_parameters": "allow_unused",
    "stage3_keep_gathered": "keep_gathered",
    "stage3_prefetch_bucket_size": "prefetch_bucket_size",
    "stage3_param_persistence_threshold": "persistence_threshold",
    "stage3_max_live_parameters": "max_live_parameters",
    "stage3_max_reuse_distance": "max_reuse_distance",
    "leaf_module": "leaf_modules",
    "offload_param": "offload_parameters",
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
# Section -> older name of a key -> its name.
OLDER: dict[str, dict[str, str]] = {
    "training.zero": _ZERO,
    "training.zero.offload_optimizer": {"nvme_path": "path"},
    "training.zero.offload_parameters": {"nvme_path": "path"},
    "training.recompute": _RECOMPUTE,
    "model.lora": _LORA,
    "checkpoint": {"async": "background"},
}


def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a file in which older names of keys are replaced; a note in the log names each.

    Raises:
        ConfigError: a key stands there under both names.
    """
    made: dict[str, Any] = dict(values)
    for section, names in OLDER.items():
        *outer, last = section.split(".")
        holder: Any = made
        for part in outer:
            if isinstance(holder.get(part), Mapping):
                holder[part] = holder = dict(holder[part])
            else:
                holder = {}
        found = holder.get(last)
        if not isinstance(found, Mapping) or not names.keys() & found.keys():
            continue
        holder[last] = changed = dict(found)
        for older, name in names.items():
            if older in found:
                if name in found:
                    raise ConfigError(f"{section}.{older} is an older name of {section}.{name}: give the second alone")
                changed[name] = changed.pop(older)
                logging.getLogger("triax").warning(
                    "%s.%s is an older name of %s.%s, which triax %s removes: write the new name",
                    *(section, older, section, name, ENDS),
                )
    return made
