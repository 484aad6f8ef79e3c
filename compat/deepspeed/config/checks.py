"""Checks of keys that are each valid alone, and contradict one another: within a section, and between sections.

What the options of triax check too is left to them: ``options/contradictions.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....base.errors import ConfigError, no_such
from ....base.foreign_tables import read_table
from ....options.monitoring import OPERATIONS
from .elasticity import check as elasticity

__all__ = ["amp", "bf16", "check_sections", "comms_logger", "elasticity", "local_updates", "nothing"]

# DeepSpeed's and torch's names of operations -> triax's.
OTHER_NAMES: Mapping[str, str] = read_table(__file__, "keys.toml")["names of operations"]


def nothing(section: Any) -> None:
    """Check a section whose keys agree in all cases."""


def bf16(section: Any) -> None:
    """Check that optimizer state has the dtype of the master weights."""
    if section.bf16_optimizer_states and not section.bf16_master_weights_and_grads:
        raise ValueError(
            "bf16_optimizer_states is true and bf16_master_weights_and_grads is not, but optimizer state has the "
            "dtype of the master weights: set both, or neither"
        )


def amp(section: Any) -> None:
    """Check that the level is one that torch's autocast has."""
    if section.enabled and section.opt_level in ("O2", "O3"):
        kept = "weights in float16 and master weights in fp32" if section.opt_level == "O2" else "everything in float16"
        raise ValueError(
            f'opt_level {section.opt_level} ({kept}) is not supported in amp: write "fp16": {{"enabled": true}}, with '
            "float16 weights, fp32 master weights and a loss scale, or opt_level O1"
        )


def local_updates(section: Any) -> None:
    """Check that a round that may end early does not wait for all."""
    if section.get("meet_early") and section.get("max_staleness") == 0:
        raise ValueError("meet_early with max_staleness 0, where every round waits for all: give 1 or more")


def comms_logger(section: Any) -> None:
    """Check the names of operations."""
    for name in section.prof_ops:
        if name not in OPERATIONS and name not in OTHER_NAMES:
            raise ValueError(no_such("prof_ops", name, OPERATIONS))


def check_sections(config: Any) -> None:
    """Check that the sections of a configuration agree.

    Raises:
        ConfigError: two keys contradict each other; the message names them and says which to change.
    """
    if config.elasticity.enabled:
        _check_elasticity(config)
    _check_precision(config)
    _check_compression(config)
    interval, other = config.activation_checkpointing.interval, config.pipeline.activation_checkpoint_interval
    if other and interval not in (None, other):
        raise ConfigError(
            f"pipeline.activation_checkpoint_interval {other} is another name of activation_checkpointing.interval "
            f"{interval}: give one of them"
        )


def _check_elasticity(config: Any) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = [key for key in keys if getattr(config, key) not in (None, "auto")]
    if given and not config.elasticity.ignore_non_elastic_batch_info:
        raise ConfigError(
            f"{' and '.join(given)} and elasticity both give batch sizes: leave {'it' if len(given) == 1 else 'them'} "
            "out, or set elasticity.ignore_non_elastic_batch_info, or elasticity.enabled to false"
        )
    if config.local_updates is not None:
        raise ConfigError(
            "elasticity and local_updates cannot act together, because a change of the number of replicas changes the "
            "algorithm of local updates: leave one of them out"
        )


def _check_precision(config: Any) -> None:
    enabled = [key for key in ("bf16", "fp16", "torch_autocast", "amp") if getattr(config, key).enabled]
    if enabled[:2] == ["bf16", "fp16"]:
        raise ConfigError("bf16.enabled and fp16.enabled are both true: a model computes in one of them")
    same = enabled == ["bf16", "torch_autocast"] and config.torch_autocast.dtype in ("bfloat16", "bf16")
    if len(enabled) > 1 and not same:  # bfloat16 weights under autocast: norms and softmaxes are computed in fp32
        raise ConfigError(
            f"{' and '.join(f'{key}.enabled' for key in enabled)} are both true, but only one can act, because "
            "bf16 and fp16 store the weights in that dtype, and torch_autocast and amp keep fp32 weights and cast in "
            "the forward pass: enable one of them"
        )
    if config.communication_data_type and config.torch_autocast.lower_precision_safe_modules:
        raise ConfigError(
            "communication_data_type and torch_autocast.lower_precision_safe_modules both set the dtype in which "
            "gradients are summed over replicas: give one of them"
        )


def _check_compression(config: Any) -> None:
    """Check that one key sets the dtype of the sum, and one what is sent of an embedding's gradient."""
    kind, dtype = config.gradient_compression.type, config.communication_data_type
    if kind in ("fp16", "bf16") and dtype not in (None, kind):
        raise ConfigError(
            f"gradient_compression.type {kind} and communication_data_type {dtype} both set the dtype of the sum: give "
            "one of them"
        )
    if kind != "none" and config.torch_autocast.lower_precision_safe_modules:
        raise ConfigError(
            "gradient_compression and torch_autocast.lower_precision_safe_modules both set how gradients are sent: "
            "give one of them"
        )
    if config.sparse_gradients and config.zero_optimization.stage in (2, 3):
        raise ConfigError(
            "sparse_gradients needs a replica's whole gradient of a step, and stage "
            f"{config.zero_optimization.stage} of ZeRO reduces gradients after each backward pass: set stage 1"
        )
    if kind in ("topk", "powersgd") and config.sparse_gradients:
        raise ConfigError(
            f"gradient_compression.type {kind} and sparse_gradients both set what is sent of an embedding's gradient: "
            "give one of them"
        )
