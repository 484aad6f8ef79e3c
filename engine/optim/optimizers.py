"""Optimizers by name: from a name and arguments to a class, torch's, triax's or another package's."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from ...base.entry_points import offered
from ...base.errors import describe, nearest
from ...base.option_error import refusal
from .elementwise import Lion, UncorrectedAdam
from .layerwise import Lamb, Muon
from .signature import check_arguments, defaults_of, trial

# Classes that torch lacks, or has for whole tensors only.
_OWN: dict[str, type[torch.optim.Optimizer]] = {cls.__name__: cls for cls in (Lion, Lamb, Muon, UncorrectedAdam)}
_OTHERS = "triax.optimizers"  # the entry points of further classes
# Optimizers that cannot step flat ranges, or are not supported: (reason, what to use instead).
_REFUSED = {
    "LBFGS": ("it evaluates the loss several times a step", "AdamW"),
    "SparseAdam": ("it steps sparse gradients, and gradients are dense here", "Adam"),
}
# Optimizers that need whole tensors, and run where every rank has them: (reason, what to use instead).
WHOLE_TENSOR = {
    "Adafactor": ("its second moments are sums over rows and columns of a tensor", "Lion, with half of Adam's state"),
}
# Optimizers that sum norms or assemble matrices over the shards of a tensor.
LAYERWISE = ("Lamb", "Muon")
_TORCH = tuple(
    name
    for name, member in vars(torch.optim).items()
    if isinstance(member, type) and issubclass(member, torch.optim.Optimizer) and name not in ("Optimizer", *_REFUSED)
)


def names() -> list[str]:
    """Return the names of all optimizers: torch's, triax's, and those that packages offer."""
    return list(dict.fromkeys((*_TORCH, *_OWN, *offered(_OTHERS).names)))


def resolve(kind: str, params: Mapping[str, Any]) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class that a name stands for, and its arguments.

    Args:
        kind: name of the optimizer, in any case of letters.
        params: its arguments.

    Raises:
        ConfigError: an optimizer or an argument that does not exist, or one that cannot be used.
    """
    for name, (reason, instead) in _REFUSED.items():
        if name.lower() == kind.lower():
            raise refusal(
                f"<optimizer.type> = {kind!r}: {reason}, and triax keeps the optimizer state in flat ranges: use "
                f"{instead}"
            )
    name = {known.lower(): known for known in names()}.get(kind.lower(), "")
    if not name:
        raise refusal(f"<optimizer.type> = {describe(kind)}: there is no such optimizer; {nearest(kind, names())}")
    cls: type[torch.optim.Optimizer]
    if name in _OWN:
        cls = _OWN[name]
    elif name in _TORCH:
        cls = getattr(torch.optim, name)
    else:
        cls = offered(_OTHERS)[name].load()
    given = dict(params)
    check_arguments("optimizer", name, cls, given, ("self", "params"))
    if given.get("differentiable"):
        raise refusal("<optimizer.differentiable> is true, but steps change weights in place: leave it out")
    if "betas" in given:
        given["betas"] = tuple(given["betas"])
    return cls, given


def make(kind: str, params: Mapping[str, Any], groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Make an optimizer by name over parameter groups.

    Raises:
        ConfigError: as ``resolve``, or a value that the class refuses; the message names the argument.
    """

    def made(given: Mapping[str, Any]) -> torch.optim.Optimizer:
        cls, arguments = resolve(kind, given)
        return cls(fused(cls, groups, arguments), **arguments)

    return trial("optimizer", params, made)


def resolved(kind: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer in full: the class's name and all its arguments, by default those of the class."""
    cls, given = resolve(kind, params)
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
    if "fp32_optimizer_states" in known:  # the masters have the dtype of the state
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


def require_whole_tensors(cls: type[torch.optim.Optimizer], stage: int, offload: bool, tensor: int = 1) -> None:
    """Check that an optimizer that needs whole tensors, or the whole optimizer state, has them on each replica.

    Args:
        cls: class of the optimizer. Its attributes ``needs_whole_state`` and ``needs_whole_tensors`` are pairs of
            the reason and what to use instead. Optimizers without such a need pass the check.
        stage: stage of ZeRO; 0 leaves tensors whole.
        offload: the optimizer state is offloaded or stepped in sub-groups.
        tensor: size of the tensor axis; 1 leaves tensors whole.

    Raises:
        ConfigError: the optimizer cannot run in this setup.
    """
    name = cls.__name__
    tensors = WHOLE_TENSOR.get(name) or getattr(cls, "needs_whole_tensors", None)
    state = WHOLE_TENSOR.get(name) or getattr(cls, "needs_whole_state", None)
    for applies, refused, problem in (
        (stage > 0, state, f"<zero.stage> {stage} shards the optimizer state into flat ranges: set stage 0"),
        (
            offload,
            state,
            (
                "<zero.offload_optimizer>, <zero.offload_parameters> and <zero.sub_group_size> step flat ranges: "
                "leave them out"
            ),
        ),
        (tensor > 1, tensors, f"the grid's tensor axis of {tensor} shards tensors: make a grid of tensor 1"),
    ):
        if applies and refused is not None:
            reason, instead = refused
            raise refusal(f"<optimizer.type> = {name!r}: {reason}, and {problem}, or use {instead}")


def require_steps_on(device: str, params: Mapping[str, Any]) -> None:
    """Check that an optimizer with these arguments steps on a kind of device.

    Raises:
        ConfigError: ``capturable`` on a CPU, where torch's optimizers fail in their first step.
    """
    if params.get("capturable") and device == "cpu":
        raise refusal("<optimizer.capturable> is true, but the model is on the CPU: leave it out, or use a GPU")
