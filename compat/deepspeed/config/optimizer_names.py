"""Optimizers by DeepSpeed's names and arguments, as triax's: the class, and the arguments that it takes.

As in DeepSpeed, ``Adam`` decouples its weight decay (it is AdamW) unless ``adam_w_mode`` is false. ``FusedAdam`` and
``DeepSpeedCPUAdam`` are other names for ``Adam``: every optimizer runs fused where torch has a fused kernel, and on the
CPU if the optimizer state is offloaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....base.errors import describe
from ....base.foreign_tables import answers, read_table
from ....base.option_error import refusal
from ....options.named import Optimizer

_TABLE = read_table(__file__, "optimizers.toml")
NAMES: Mapping[str, str] = _TABLE["names"]
_REFUSED, _ONE_BIT = answers(_TABLE["refused"]), _TABLE["one_bit"]
_KINDS = {"true or false": bool, "a text in quotes": str}


def native_optimizer(kind: str, params: Mapping[str, Any]) -> Optimizer:
    """Return the optimizer that ``optimizer.type`` and ``optimizer.params`` name, in any case of letters.

    Raises:
        OptionError: an optimizer that triax does not have, or an argument that triax's class cannot follow.
    """
    lower, given = kind.lower(), dict(params)
    for name, reason in _REFUSED.items():
        if name.lower() == lower:
            raise refusal(f"<optimizer.type> = {kind!r}: {reason}")
    if "max_grad_norm" in given:
        raise refusal("<optimizer.max_grad_norm>: write <clip>, outside of <optimizer>, instead")
    name = {theirs.lower(): ours for theirs, ours in NAMES.items()}.get(lower, kind)
    if name in ("Adam", "AdamW"):
        name = _adam(name, given)
    one_bit = lower in _ONE_BIT["names"].split()
    for key, reason in (_ONE_BIT["off"] if one_bit else _TABLE["off"].get(name.lower(), {})).items():
        if _drop(given, key):
            raise refusal(f"<optimizer.{key}> is true, but {reason}: leave it out")
    for key, wanted in _ONE_BIT["idle"].items() if one_bit else ():
        if key in given and not isinstance(value := given.pop(key), _KINDS[wanted]):
            raise refusal(f"<optimizer.{key}>: give {wanted}, not {describe(value)}")
    if lower == "muon":
        _drop(given, "torch_adam")  # always torch's formula
        if _drop(given, "adam_w_mode") is False:
            raise refusal("<optimizer.adam_w_mode> is false, but weight decay is decoupled: leave it out")
        if given.pop("ns_method", "gram") not in ("gram", "standard"):
            raise refusal("<optimizer.ns_method>: give gram or standard, two ways to the same matrix")
    _drop(given, "set_grad_none")
    if _drop(given, "fp32_optimizer_states") is False:
        raise refusal(
            "<optimizer.fp32_optimizer_states> is false, but the optimizer state always has the dtype of the "
            "master weights, fp32: leave it out"
        )
    for key in [key for key, value in given.items() if isinstance(value, str) and value == "auto"]:
        if key == "lr":
            raise refusal('<optimizer.lr> is "auto", which a trainer fills in: write the learning rate')
        del given[key]  # the optimizer's own default
    return Optimizer(name, **given)


def _adam(name: str, params: dict[str, Any]) -> str:
    """Return the class's name for Adam or AdamW; remove DeepSpeed's switches from the arguments, in place."""
    _drop(params, "torch_adam")  # always torch's
    modes = {key: value for key in ("adam_w_mode", "adamw_mode") if (value := _drop(params, key)) is not None}
    if len(set(modes.values())) > 1:
        raise refusal(
            "<optimizer.adam_w_mode> and adamw_mode are two names of one switch, and differ: give one of them"
        )
    decoupled = name == "AdamW" or next(iter(modes.values()), True)
    if name != "AdamW":
        params.setdefault("weight_decay", 0.0)  # torch's AdamW has another default
    if _drop(params, "bias_correction") is False:
        if params.pop("amsgrad", False):
            raise refusal(
                "<optimizer.amsgrad> needs the bias correction that bias_correction: false turns off: leave out "
                "one of them"
            )
        params["decoupled"] = decoupled
        return "UncorrectedAdam"
    return "AdamW" if decoupled else "Adam"


def _drop(params: dict[str, Any], key: str) -> bool | None:
    """Remove one of DeepSpeed's switches from the arguments and return its value; None if it is missing or "auto"."""
    value = params.pop(key, None)
    if value is None or value == "auto":
        return None
    if not isinstance(value, bool):
        raise refusal(f"<optimizer.{key}>: give true or false, not {value!r}")
    return value
