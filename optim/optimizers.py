"""Optimizers by DeepSpeed's name or torch's: from a type and its arguments to a class and its own arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from ..base.errors import describe, nearest
from ..base.option_error import refusal
from . import onebit
from .elementwise import Lion, UncorrectedAdam
from .layerwise import Lamb, Muon
from .signature import check_arguments, defaults_of

Classes = Mapping[str, type[torch.optim.Optimizer]]

_ADAM = ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam")
_OTHER_NAMES = {
    "DeepSpeedCPUAdagrad": "Adagrad",
    "DeepSpeedCPULion": "Lion",
    "FusedLion": "Lion",
    "FusedLamb": "Lamb",
}
_OWN: Classes = {"Lion": Lion, "Lamb": Lamb, "Muon": Muon}  # classes that torch lacks, or has for whole tensors only
# Optimizers that cannot step flat ranges, or are not supported: (reason, what to use instead).
_REFUSED = {
    "LBFGS": ("it evaluates the loss several times a step", "AdamW"),
    "SparseAdam": ("it steps sparse gradients, and gradients are dense here", "Adam"),
    "MuAdam": ("its rates depend on the width of each layer", "Adam, with parameter groups of their own rates"),
    "MuAdamW": ("its rates depend on the width of each layer", "AdamW, with parameter groups of their own rates"),
    "MuSGD": ("its rates depend on the width of each layer", "SGD, with parameter groups of their own rates"),
}
# Optimizers that need whole tensors, and run where every rank has them: (reason, what to use instead).
WHOLE_TENSOR = {
    "Adafactor": ("its second moments are sums over rows and columns of a tensor", "Lion, with half of Adam's state"),
}
# Optimizers that sum norms or assemble matrices over the shards of a tensor, which are all in memory: the same pair.
LAYERWISE = {
    "Lamb": ("its coefficient is of a whole tensor", "AdamW"),
    "Muon": ("it makes a whole matrix orthogonal", "AdamW"),
}
_TORCH = tuple(
    name
    for name, each in vars(torch.optim).items()
    if isinstance(each, type) and issubclass(each, torch.optim.Optimizer) and name not in ("Optimizer", *_REFUSED)
)
KNOWN = (*_TORCH, "Lion", "Lamb", *onebit.NAMES, "FusedAdam", "DeepSpeedCPUAdam", *_OTHER_NAMES)


def resolve(
    kind: str, params: Mapping[str, Any], classes: Classes
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class that a configuration names, and its arguments under the class's own names.

    As in DeepSpeed, ``Adam`` decouples its weight decay (it is AdamW) unless ``adam_w_mode`` is false. ``FusedAdam``
    and ``DeepSpeedCPUAdam`` are other names for ``Adam``: every optimizer runs fused where torch has a fused kernel,
    and on the CPU if the optimizer state is offloaded.

    Args:
        kind: ``optimizer.type``, in any case of letters.
        params: ``optimizer.params``.
        classes: name -> class of the 1-bit optimizers, which are in ``zero/onebit/``.

    Raises:
        ConfigError: an optimizer or an argument that does not exist, or one that cannot be used.
    """
    for name, (reason, instead) in _REFUSED.items():
        if name.lower() == kind.lower():
            raise refusal(
                f"<optimizer.type> = {kind!r}: {reason}, and triax keeps the optimizer state in flat ranges: use "
                f"{instead}"
            )
    name = {each.lower(): each for each in KNOWN}.get(kind.lower(), "")
    if not name:
        raise refusal(f"<optimizer.type> = {describe(kind)}: there is no such optimizer; {nearest(kind, KNOWN)}")
    given = dict(params)
    if "max_grad_norm" in given:
        raise refusal("<optimizer.max_grad_norm>: write <clip>, outside of <optimizer>, instead")
    if name in _ADAM:
        cls = _adam(name, given)
    elif name in onebit.NAMES:
        onebit.drop_deepspeed_arguments(given)
        cls = classes[name]
    else:
        own = _OTHER_NAMES.get(name, name)
        cls = _OWN[own] if own in _OWN else getattr(torch.optim, own)
    if cls is Lamb:
        _require_off(given, "amsgrad", "LAMB has no maximum of the variance")
        _require_off(given, "eps_inside_sqrt", "eps is added to the root of the variance, as in the paper")
    if cls is Muon:
        _drop(given, "torch_adam")  # always torch's formula
        if _drop(given, "adam_w_mode") is False:
            raise refusal("<optimizer.adam_w_mode> is false, but weight decay is decoupled: leave it out")
        _require_off(given, "per_head_muon", "a matrix is made orthogonal as a whole, not head by head")
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
    check_arguments("optimizer", name, cls, given, ("self", "params"))
    if "betas" in given:
        given["betas"] = tuple(given["betas"])
    return cls, given


def resolved(kind: str, params: Mapping[str, Any], classes: Classes) -> dict[str, Any]:
    """Return the configuration's section ``optimizer`` in full: the class's name and all its arguments.

    Arguments that the configuration leaves out get their defaults. The parameters are those of ``resolve``.
    """
    cls, given = resolve(kind, params, classes)
    return {"type": cls.__name__, "params": defaults_of(cls, "params") | given}


def fused(
    cls: type[torch.optim.Optimizer], groups: list[dict[str, Any]], params: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return parameter groups with ``fused=True``, if torch has a fused kernel for the optimizer and these parameters.

    Groups stay as they are if the user chose an implementation (``fused`` or ``foreach`` in ``params``), or if they
    have complex parameters. The fused kernel updates a flat range of parameters in one pass.

    Args:
        cls: the optimizer's class.
        groups: its parameter groups.
        params: its arguments.
    """
    choices = ("fused", "foreach", "capturable", "differentiable")
    if "fused" in inspect.signature(cls).parameters and not any(key in params for key in choices):
        real = [not any(parameter.is_complex() for parameter in group["params"]) for group in groups]
        return [{**group, "fused": True} if fits else group for group, fits in zip(groups, real, strict=True)]
    return groups


def sharded_form(
    cls: type[torch.optim.Optimizer], defaults: Mapping[str, Any]
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return an optimizer that steps shards as a class of torch steps whole tensors, with its arguments.

    The class and the defaults themselves, except for torch's Muon.

    Args:
        cls: the class of an instance.
        defaults: the defaults of the instance.

    Raises:
        ConfigError: the class needs an argument that is not among its defaults.
    """
    if cls is torch.optim.Muon:
        named = {"ns_eps" if key == "eps" else key: value for key, value in defaults.items()}
        cls, defaults = Muon, {**named, "use_muon": True}
    known = inspect.signature(cls).parameters
    given = {key: value for key, value in defaults.items() if key in known}
    if "fp32_optimizer_states" in known:  # DeepSpeedCPUAdam's; the masters have the dtype of the state
        given["fp32_optimizer_states"] = False
    needed = [
        name for name, p in known.items() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if missing := [name for name in needed[1:] if name not in given]:
        raise refusal(
            f"{cls.__name__} takes the argument {missing[0]}, which is not among its defaults, so that the engine "
            "cannot make another one over its flat shards: give it a default, or pass a function from parameter groups "
            "to an optimizer"
        )
    return cls, given


def require_whole_tensors(name: str, stage: int, offload: bool, tensor: int = 1) -> None:
    """Check that an optimizer that needs whole tensors, or the whole optimizer state, has them on each replica.

    Args:
        name: name of the optimizer's class. Optimizers without such a need pass the check.
        stage: stage of ZeRO; 0 leaves tensors whole.
        offload: the optimizer state is offloaded or stepped in sub-groups.
        tensor: size of the tensor axis; 1 leaves tensors whole.

    Raises:
        ConfigError: the optimizer cannot run in this setup.
    """
    state = WHOLE_TENSOR | dict.fromkeys(onebit.NAMES, onebit.WHOLE_STATE)
    tensors = WHOLE_TENSOR | onebit.WHOLE_TENSOR
    for applies, refused, problem in (
        (stage > 0, state, f"<zero.stage> {stage} shards the optimizer state into flat ranges: set stage 0"),
        (
            offload,
            state | LAYERWISE,
            "<zero.offload_optimizer> and <zero.sub_group_size> step flat ranges: leave them out",
        ),
        (tensor > 1, tensors, f"the grid's tensor axis of {tensor} shards tensors: make a grid of tensor 1"),
    ):
        if applies and name in refused:
            reason, instead = refused[name]
            raise refusal(f"<optimizer.type> = {name!r}: {reason}, and {problem}, or use {instead}")


def require_steps_on(device: str, params: Mapping[str, Any]) -> None:
    """Check that an optimizer with these arguments steps on a kind of device.

    Raises:
        ConfigError: ``capturable`` on a CPU, where torch's optimizers fail in their first step.
    """
    if params.get("capturable") and device == "cpu":
        raise refusal("<optimizer.capturable> is true, but the model is on the CPU: leave it out, or use a GPU")


def _adam(name: str, params: dict[str, Any]) -> type[torch.optim.Optimizer]:
    """Return the class for one of Adam's names; remove DeepSpeed's switches from the arguments, in place."""
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
        return UncorrectedAdam
    return torch.optim.AdamW if decoupled else torch.optim.Adam


def _require_off(params: dict[str, Any], key: str, reason: str) -> None:
    """Remove one of DeepSpeed's switches from the arguments; refuse it if it is on."""
    if _drop(params, key):
        raise refusal(f"<optimizer.{key}> is true, but {reason}: leave it out")


def _drop(params: dict[str, Any], key: str) -> bool | None:
    """Remove one of DeepSpeed's switches from the arguments and return its value; None if it is missing or "auto"."""
    value = params.pop(key, None)
    if value is None or value == "auto":
        return None
    if not isinstance(value, bool):
        raise refusal(f"<optimizer.{key}>: give true or false, not {value!r}")
    return value
