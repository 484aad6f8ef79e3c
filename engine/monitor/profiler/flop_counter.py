"""Counter of floating-point operations: torch's ``FlopCounterMode`` without its tracking of modules."""

from __future__ import annotations

from typing import Any

from torch.utils.flop_counter import FlopCounterMode

from ....base.torch_private import flash_cpu


class FlopCounter(FlopCounterMode):
    """Counter of the FLOPs of what runs within it. Entering it again starts from 0.

    Matrix products, convolutions and attention count, by torch's own formulas. ``FlopCounterMode`` has no formula for
    the fused attention of CPUs, so one is given here.
    """

    def __init__(self) -> None:
        fused = {flash_cpu: _attention}
        super().__init__(display=False, custom_mapping=fused)
        self.mod_tracker = _NoModules()  # type: ignore[assignment]

    @property
    def flops(self) -> int:
        """FLOPs so far."""
        return sum(self.flop_counts["Global"].values())


class _NoModules:
    """Replacement of torch's module tracker, which adds hooks to the backward pass too."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        return None

    def __exit__(self, *args: object) -> None:
        return None


def _attention(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of attention, softmax(q kᵀ) v, from the shapes of its inputs.

    Args:
        q: (B, heads, T, dim)
        k: (B, kv_heads, S, dim)
        v: (B, kv_heads, S, dim_v)
    """
    batch, heads, rows, dim = q
    return int(2 * batch * heads * rows * k[2] * (dim + v[3]))
