"""Evaluation mode for a while: each module's own mode comes back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Context in which a module is in evaluation mode. Parts that were in this mode before stay in it afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            if part.training != training:
                part.train(training)  # not the attribute alone: a class may do more, as LoRA's that merge weights
