"""MFU, model FLOPs utilization: the model's FLOP/s over the peak of the devices (Chowdhery et al. 2022, appendix B).

The model's FLOPs of a step are those of a forward pass, counted, times three: a backward pass takes twice as many.
Recomputation does not count. Matrix products, convolutions and attention count; other operations do not. Attention
counts as if it were not masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...grid import Grid
from ...grid.agreement.agreement import totals
from ...grid.comm.spans import OpenSpan, Spans
from .profiler.flop_counter import FlopCounter

# Dense peak in TFLOP/s from NVIDIA's data sheets: in 16 bits, in TF32, in fp32. A longer name precedes its prefix.
PEAKS = {
    "H200": (989.4, 494.7, 66.9),
    "H100 PCIe": (756.0, 378.0, 51.2),
    "H100 80GB HBM3": (989.4, 494.7, 66.9),
    "A100": (312.0, 156.0, 19.5),
    "L40S": (362.0, 183.0, 91.6),
    "L4": (121.0, 60.0, 30.3),
}


def known_peak(device: str, dtype: torch.dtype) -> float | None:
    """Return the peak TFLOP/s of a device in a dtype; None if it is not known.

    Args:
        device: name of the device, as the driver gives it.
        dtype: dtype of the model's matrix products. For fp32, TF32's peak where torch's settings allow TF32.

    >>> known_peak("NVIDIA H100 80GB HBM3", torch.bfloat16), known_peak("cpu", torch.float32)
    (989.4, None)
    """
    peaks_of_device = next((peaks for name, peaks in PEAKS.items() if name in device), None)
    if peaks_of_device is None or dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return None
    if dtype == torch.float32:
        return peaks_of_device[1] if torch.get_float32_matmul_precision() != "highest" else peaks_of_device[2]
    return peaks_of_device[0]


def slowest_peak(grid: Grid, module: nn.Module) -> float | None:
    """Return the peak TFLOP/s of the slowest rank's device; None if a rank's is not known. Collective."""
    parameter = next((p for p in module.parameters() if p.is_floating_point()), None)
    own_peak = known_peak(grid.device_name(), torch.float32 if parameter is None else parameter.dtype)
    least = torch.tensor([own_peak or 0.0], dtype=torch.float64, device=grid.device)
    grid.world.all_reduce(least, op="min")
    return float(least) or None


class MfuMeter:
    """Counter of the model's FLOPs in the first step, from which it gives the MFU of any step.

    The FLOPs of later steps are in proportion to their samples.

    Args:
        grid: the ranks that compute the model.
        peak: TFLOP/s of one device.
        module: only its forward passes in training mode, and with a gradient, count.
        spans: the engine's stream.

    Attributes:
        flops: FLOPs of the whole model in the last step; None before the end of the first one.
    """

    def __init__(self, grid: Grid, peak: float, module: nn.Module, spans: Spans) -> None:
        self._grid, self.peak, self._module = grid, peak, module
        self.flops: float | None = None
        self._forward_flops, self._per_sample = 0, 0.0  # of this rank in the first step; of the whole model
        self._stop = spans.read(self._counting, "stage", "forward")

    def end_step(self, samples: int) -> None:
        """After the first step, sum the FLOPs over all ranks and count no more. Collective then.

        ``samples`` is the number of samples of the step that ends, over all replicas.
        """
        if self.flops is None:
            self._stop()
            (total,) = totals(self._grid, [float(self._forward_flops)])
            self._per_sample = 3.0 * total / samples
        self.flops = self._per_sample * samples

    def utilization(self, seconds: float) -> float | None:
        """Return the MFU of a step that took so long; None if no FLOPs were counted."""
        return self.flops / seconds / (self.peak * 1e12 * self._grid.size) if self.flops else None

    @contextmanager
    def _counting(self, span: OpenSpan) -> Iterator[None]:
        if not (self._module.training and torch.is_grad_enabled()):
            yield
            return
        with FlopCounter() as counter:
            yield
        self._forward_flops += counter.flops


def tokens_in(inputs: Any) -> int:
    """Return the number of tokens in a microbatch: the elements of its first integer tensor with two or more dims.

    A batch of texts is (B, T) integers; images and targets are floating-point or have one dim. 0 if there is none.
    """
    if isinstance(inputs, torch.Tensor):
        integers = not inputs.is_floating_point() and not inputs.is_complex() and inputs.dtype != torch.bool
        return inputs.numel() if integers and inputs.dim() >= 2 else 0
    if isinstance(inputs, dict):
        inputs = list(inputs.values())
    if isinstance(inputs, (list, tuple)):
        return next((n for value in inputs if (n := tokens_in(value))), 0)
    return 0
