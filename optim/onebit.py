"""1-bit optimizers by DeepSpeed's names: their further arguments, and the setups in which they can run.

The classes themselves need the data axis and are in ``zero/onebit/``; ``engine/setup/optimizer.py`` hands them in.
"""

from __future__ import annotations

from typing import Any

from ..base.errors import describe
from ..base.option_error import refusal

NAMES = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb", "OneBitSGD")

# DeepSpeed's arguments that have no effect here, with their types.
_IDLE = {"cuda_aware": bool, "comm_backend_name": str}
# Arguments that must be off, with the reason.
_REFUSED = {
    "eps_inside_sqrt": "eps is added to the root of the variance, as in the papers, and DeepSpeed ignores this "
    "argument: leave it out",
    "amsgrad": "the variance is frozen after the warmup, so that it has no maximum to follow: leave it out",
}
# (reason, what to use instead) where ZeRO shards the optimizer state, and where the tensor axis shards tensors.
WHOLE_STATE = ("each replica holds the whole optimizer state, and its own errors of compression", "AdamW")
WHOLE_TENSOR = {"OneBitLamb": ("its coefficients are of whole tensors", "OneBitAdam")}


def drop_deepspeed_arguments(params: dict[str, Any]) -> None:
    """Remove from ``params``, in place, the arguments of DeepSpeed's 1-bit optimizers that triax's classes do not take.

    Raises:
        ConfigError: an argument turns on an option that triax does not support, or has a value of another type.
    """
    for key, kind in _IDLE.items():
        value = params.pop(key, kind())
        if not isinstance(value, kind):
            wanted = "true or false" if kind is bool else "a text in quotes"
            raise refusal(f"<optimizer.{key}>: give {wanted}, not {describe(value)}")
    for key, reason in _REFUSED.items():
        value = params.pop(key, False)
        if value is not False and value != "auto":
            raise refusal(f"<optimizer.{key}>: {reason}")
