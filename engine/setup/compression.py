"""The compressor that replaces the plain sum of gradients over replicas, from ``options.compression``."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import nn

from ...base.errors import no_such
from ...base.option_error import OptionError, refusal
from ...grid import Grid
from ...options.engine import EngineOptions
from ...options.named import GradientCompression
from ...zero.protocols import MakeExchange
from .extensions import compressors


def make_exchange(options: EngineOptions, module: nn.Module, grid: Grid) -> MakeExchange | None:
    """Return the compressor that replaces the plain sum of gradients, or None if there is none.

    Collective over the grid if the compressor needs the model.

    Raises:
        OptionError: on every rank, if ``compression`` is no compressor, or does not fit the model.
    """
    made = named_compressor(options)
    exchange: MakeExchange | None = made.of(module, grid) if hasattr(made, "of") else made
    return exchange


def named_compressor(options: EngineOptions) -> Any:
    """Return the options of the compressor, as given or made from a name and its arguments; None if there is none.

    Raises:
        OptionError: there is no such compressor or argument, or a value is out of range.
    """
    given = options.compression
    if not isinstance(given, GradientCompression):
        if given is not None and not callable(given):
            reason = "give TopK(...) or PowerSGD(...) of triax.gradient_compression, or a name"
            raise OptionError("compression", given, reason)
        return given
    known = compressors()
    if given.type not in known:
        raise refusal(no_such("<compression>", given.type, known))
    kind = known[given.type].load()
    names = [field.name for field in fields(kind)]
    for name in given.arguments:
        if name not in names or name == "seed":
            raise refusal(no_such(f"<compression> {given.type}", name, [other for other in names if other != "seed"]))
    try:
        return kind(**given.arguments, **({"seed": options.seed} if "seed" in names else {}))
    except ValueError as error:
        raise OptionError("compression", reason=str(error)) from error


def require_fitting(compressor: Any, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse an optimizer that a compressor cannot be used with, such as one with a second momentum.

    Args:
        compressor: result of ``named_compressor``.
        optimizer: the optimizer; None if there is none.

    Raises:
        OptionError: the compressor refuses the optimizer.
    """
    if optimizer is not None and hasattr(compressor, "require_fitting"):
        try:
            compressor.require_fitting(getattr(optimizer, "inner", optimizer))
        except ValueError as error:
            raise OptionError("compression", reason=str(error)) from error
