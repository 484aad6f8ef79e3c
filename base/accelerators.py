"""Accelerators that torch knows (CUDA, ROCm, XPU, NPU, HPU, ...), and torch's functions for each kind."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from .torch_private import extension_device

M = TypeVar("M", bound=nn.Module)


def is_accelerator(device: torch.device) -> bool:
    """Return True if a device computes beside the host, which must wait for it before it reads a result."""
    return device.type not in ("cpu", "meta")


def functions_of(device: torch.device) -> Any:
    """Return torch's functions for a kind of device: the module ``torch.cuda`` for ``cuda:0``.

    Raises:
        RuntimeError: this torch has none for it.
    """
    return torch.get_device_module(device)


def move_module(module: M, device: torch.device, dtype: torch.dtype | None = None) -> M:
    """Return ``module.to(device, dtype)``, whose parameters stay the objects that they are, with their attributes.

    ``nn.Module.to`` alone makes new parameters where torch cannot exchange a tensor's memory for memory of the device:
    on devices of other packages than torch (NPU).
    """
    kept = [(parameter, dict(vars(parameter))) for parameter in module.parameters()]
    swaps = device.type == extension_device()
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swaps or before)
    try:
        module.to(device=device, dtype=dtype)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    for parameter, attributes in kept if swaps else ():
        vars(parameter).update(attributes)
    return module
