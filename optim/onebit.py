"""1-bit optimizers by DeepSpeed's names: their further arguments, and the setups in which they can run.

The classes themselves need the data axis and are in ``zero/onebit/``; ``engine/setup/optimizer.py`` hands them in.
"""

from __future__ import annotations

from typing import Any

from ..grid.errors import ConfigError, describe

NAMES = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")

# DeepSpeed's arguments that have no effect here, with their types.
_IDLE = {"cuda_aware": bool, "comm_backend_name": str}
# Arguments that must be off, with the reason.
_REFUSED = {
    "eps_inside_sqrt": "eps is added to the root of the variance, as in the papers, and DeepSpeed ignores this "
    "argument: leave it out",
    "amsgrad": "the variance is frozen after the warmup, so that it has no maximum to follow: leave it out",
}


def drop_deepspeed_arguments(params: dict[str, Any]) -> None:
    """Remove from ``params``, in place, DeepSpeed's arguments that the classes do not take.

    Raises:
        ConfigError: an argument asks for what is not supported, or is of another type.
    """
    for key, kind in _IDLE.items():
        value = params.pop(key, kind())
        if not isinstance(value, kind):
            wanted = "true or false" if kind is bool else "a text in quotes"
            raise ConfigError(f"optimizer.params.{key}: give {wanted}, not {describe(value)}")
    for key, reason in _REFUSED.items():
        value = params.pop(key, False)
        if value is not False and value != "auto":
            raise ConfigError(f"optimizer.params.{key}: {reason}")


def require_whole_replicas(name: str, stage: int, offload: bool, tensor: int = 1) -> None:
    """Raise ConfigError for a 1-bit optimizer if a replica does not hold the whole optimizer state.

    Args:
        name: name of the optimizer's class.
        stage: stage of ZeRO.
        offload: the optimizer state is offloaded or stepped in sub-groups.
        tensor: size of the tensor axis.

    Raises:
        ConfigError: the optimizer cannot run in this setup.
    """
    reason = (
        f"optimizer.type = {name!r}: every replica holds the whole optimizer state, and its own errors of compression"
    )
    if stage > 0:
        raise ConfigError(
            f"{reason}, so zero_optimization.stage {stage} has nothing to shard: set stage 0, or use AdamW"
        )
    if offload:
        raise ConfigError(
            f"{reason}, and steps them at once: leave zero_optimization.offload_optimizer and sub_group_size out, or "
            "use AdamW"
        )
    if name == "OneBitLamb" and tensor > 1:
        raise ConfigError(
            f"optimizer.type = {name!r}: its coefficients are of whole tensors, and the grid's tensor axis of "
            f"{tensor} shards tensors: use OneBitAdam"
        )
