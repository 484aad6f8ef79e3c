"""Dtypes of weights, master weights, buffers and computation, and the loss scale of float16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..base.checks import LARGEST
from ..base.option_error import refusal
from .base import Options, option

Dtype = Literal["fp32", "fp16", "bf16"]


@dataclass(frozen=True, kw_only=True)
class LossScale(Options):
    """Factor of the loss under float16, which keeps small gradients from becoming zero.

    If gradients overflow, the engine skips the step and halves the scale. After ``window`` steps without an overflow
    it doubles the scale.

    >>> precision = triax.Precision(weights="fp16", loss_scale=triax.LossScale(initial_power=10))
    >>> triax.Engine(nn.Linear(4, 1), optimizer=triax.Optimizer("Adam"), batch=1, precision=precision).loss_scale()
    1024.0
    """

    MAIN: ClassVar = "fixed"

    fixed: float | None = option(None, "A scale that never changes; None: a dynamic one.", above=0, most=LARGEST)
    initial_power: int = option(16, "The dynamic scale starts at 2 to this power.", least=0, most=126)
    window: int = option(1000, "Steps without overflow after which the scale doubles.", least=1)
    hysteresis: int = option(2, "Overflows after which the scale halves.", least=1)
    consecutive_hysteresis: bool = option(False, "A step without overflow resets the count of hysteresis.")
    minimum: float = option(1.0, "Lowest loss scale.", above=0, most=LARGEST)

    @property
    def first(self) -> float:
        """The scale of the first step."""
        return float(self.fixed or 2.0**self.initial_power)

    def check(self) -> None:
        """Check that the scale does not start below its minimum."""
        if self.minimum > max(self.first, self.default_of("minimum")):
            name = "<fixed>" if self.fixed else f"2 ** <initial_power> {self.initial_power} ="
            raise refusal(
                f"<minimum> {self.minimum:g} is above {name} {self.first:g}, where the scale starts: lower "
                "<minimum>, or raise the other",
            )


@dataclass(frozen=True, kw_only=True)
class Precision(Options):
    """Dtypes of a model in training.

    >>> precision = triax.Precision(weights="bf16")
    >>> engine = triax.Engine(nn.Linear(64, 64), optimizer=triax.Optimizer("Adam"), batch=1, precision=precision)
    >>> held = engine.memory_report()["held"]  # bytes of 64 * 65 numbers
    >>> engine.module.weight.dtype, held["parameters"], held["masters"]
    (torch.bfloat16, 8320, 16640)
    """

    MAIN: ClassVar = "weights"

    weights: Literal["fp32", "bf16", "fp16", "fp64"] | None = option(
        None,
        "Dtype of the weights. bf16, fp16: master weights, optimizer state and accumulated gradients are fp32. None: "
        "each weight keeps its own.",
    )
    master_weights: bool = option(
        True,
        "False, with bf16: no fp32 master weights; accumulated gradients and optimizer state are bfloat16 too. Updates "
        "below 1/256 of a weight are lost in rounding.",
    )
    buffers: Dtype | None = option(
        None, "Dtype of floating-point buffers; None: the weights' dtype, except for inv_freq and correction_bias."
    )
    autocast: Literal["bf16", "fp16"] | None = option(
        None, "Run forward passes under torch.autocast to this dtype; weights keep their own."
    )
    loss_scale: LossScale = option(LossScale(), "Loss scale, where weights or autocast are fp16.")

    @property
    def half(self) -> bool:
        """True if the weights have a dtype of 16 bits."""
        return self.weights in ("bf16", "fp16")

    @property
    def scaled(self) -> bool:
        """True if the model computes in float16, so that the loss is scaled."""
        return "fp16" in (self.weights, self.autocast)

    def check(self) -> None:
        """Check that the options set one dtype of computation."""
        # bfloat16 weights under autocast: norms and softmaxes are computed in fp32.
        if self.half and self.autocast and (self.weights, self.autocast) != ("bf16", "bf16"):
            raise refusal(
                f"<weights> {self.weights} stores the weights in that dtype, and <autocast> {self.autocast} "
                "keeps fp32 weights and casts in the forward pass: give one of them",
            )
        if not self.master_weights and self.weights != "bf16":
            raise refusal(
                "<master_weights> is false, which is for <weights> bf16: squares of gradients are too small for fp16, "
                "and fp32 weights are their own master weights; leave it out",
            )
