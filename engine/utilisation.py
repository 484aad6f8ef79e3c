"""MFU: the model's FLOPs a second beside what the devices could do at most (Chowdhery et al. 2022, appendix B).

The model's FLOPs are those of a forward pass, counted, times three: a backward pass takes twice as many. What is
computed again for the backward pass does not count, nor does anything that is no matrix product, convolution or
attention. Attention counts whole, masked or not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

# Dense, in TFLOP/s, as NVIDIA's data sheets have them: in 16 bits, in TF32, in fp32. Longer names first.
PEAKS = {
    "H200": (989.4, 494.7, 66.9),
    "H100 PCIe": (756.0, 378.0, 51.2),
    "H100 80GB HBM3": (989.4, 494.7, 66.9),
    "A100": (312.0, 156.0, 19.5),
    "L40S": (362.0, 183.0, 91.6),
    "L4": (121.0, 60.0, 30.3),
}


def known_peak(device: str, dtype: torch.dtype) -> float | None:
    """TFLOP/s of a device by its maker's name, in the dtype that a model computes in; None: not known.

    >>> known_peak("NVIDIA H100 80GB HBM3", torch.bfloat16), known_peak("cpu", torch.float32)
    (989.4, None)
    """
    found = next((peaks for name, peaks in PEAKS.items() if name in device), None)
    if found is None or dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return None
    if dtype == torch.float32:
        return found[1] if torch.get_float32_matmul_precision() != "highest" else found[2]
    return found[0]


class FlopCount(TorchDispatchMode):
    """Counts the FLOPs of what runs within it, by torch's own formulas.

    Attributes:
        flops: so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and count it."""
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if func._overloadpacket is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:  # torch's list lacks it
            self.flops += sdpa_flop_count(*(tensor.shape for tensor in args[:3]))
        elif formula is not None:
            self.flops += int(formula(*args, **(kwargs or {}), out_val=result))
        return result


def tokens_in(inputs: Any) -> int:
    """The tokens of a microbatch: the elements of its first tensor of integers with two dims or more; 0: no tokens.

    (A batch of texts is (B, T) integers; images and targets are floating-point, or have one dim.)
    """
    if isinstance(inputs, torch.Tensor):
        whole = not inputs.is_floating_point() and not inputs.is_complex() and inputs.dtype != torch.bool
        return inputs.numel() if whole and inputs.dim() >= 2 else 0
    if isinstance(inputs, dict):
        inputs = list(inputs.values())
    if isinstance(inputs, (list, tuple)):
        return next((n for each in inputs if (n := tokens_in(each))), 0)
    return 0
