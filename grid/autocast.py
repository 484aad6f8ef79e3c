"""What ``torch.autocast`` asks of a product: for functions whose backward pass is their own.

Autocast casts where a product is called, so autograd sees the casts. A function of one's own is called once, and its
backward pass runs outside of autocast: it must cast by itself, to the dtype that was in force in the forward pass.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T", Tensor, Tensor | None)


def product_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype in which autocast has products with ``x`` computed; None where it does not act."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def cast(tensor: T, dtype: torch.dtype | None) -> T:
    """As autocast casts: floating-point tensors, but float64. With None, and for None, what is given."""
    if dtype is None or tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)
