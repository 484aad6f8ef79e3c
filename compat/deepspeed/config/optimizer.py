"""Sections ``optimizer`` and ``scheduler``: a type and its arguments."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from .base import Section, idle


class OptimizerConfig(Section):
    """``optimizer``: its name and arguments."""

    type: str = Field(description="Name, as in DeepSpeed or torch.optim. Adafactor needs whole tensors: ZeRO stage 0.")
    params: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the optimizer: lr, betas, weight_decay, ..."
    )
    legacy_fusion: Any = idle("torch's fused kernels are used where torch has them")

    def notes(self) -> list[str]:
        """Return notes on the arguments that have no effect, with the reason."""
        sent = "compressed data is sent by the grid's own backend: NCCL with CUDA, else gloo"
        why = {"cuda_aware": sent, "comm_backend_name": sent, "ns_method": "there is one way to the same matrix"}
        return [
            f"params.{name} does nothing: {why[name]}" for name in sorted(why.keys() & self.params)
        ] + super().notes()


class SchedulerConfig(Section):
    """``scheduler``: learning-rate schedule, stepped after each optimizer step."""

    type: str = Field(
        description="WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, ReduceLROnPlateau (which follows "
        "the loss), or another class of torch.optim.lr_scheduler."
    )
    params: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the schedule, with DeepSpeed's or torch's names."
    )
