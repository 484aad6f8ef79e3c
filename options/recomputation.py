"""Activations that the backward pass recomputes (activation checkpointing)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from ..base.option_error import refusal
from .base import Options, option


@dataclass(frozen=True, kw_only=True)
class Recomputation(Options):
    """Activations that the backward pass recomputes, and those that it keeps."""

    MAIN: ClassVar = "granularity"
    SWITCHED: ClassVar = True

    enabled: bool | None = option(
        None,
        "True: recompute (each layer separately, unless another option groups them); False: recompute nothing; None: "
        "recompute if another option asks for it.",
    )
    granularity: Literal["full", "selective", "matmul"] | None = option(
        None,
        "full: keep the inputs of groups only; matmul: keep also the outputs of matrix products; selective: recompute "
        "only the core of attention. Without an interval, every layer is a group. In place of the section: none, for "
        "no recomputation.",
    )
    interval: int | None = option(
        None, "Recompute groups of this many layers of a stage; 0: none; None: the model's own.", least=0
    )
    groups: int | None = option(
        None, "Number of groups into which the layers of a rank are cut, instead of an interval.", least=1
    )
    layers: tuple[str, ...] | None = option(None, "Classes of layers to recompute; None: the model's own, or all.")
    mlp_tile: int | None = option(
        None,
        "Run MLPs on this many tokens of each sequence at a time, and recompute each such tile in the backward pass; "
        "None: on all tokens at once. For long sequences.",
        least=1,
    )
    partition_activations: bool = option(False, "Keep 1/tensor of each input that all tensor ranks hold.")
    cpu_checkpointing: bool = option(False, "Keep inputs in host memory.")
    contiguous: bool = option(False, "Copy inputs into one buffer; needs partition_activations and groups.")
    synchronize: bool = option(False, "Synchronize with the device at the start and end of a group.")
    profile: bool = option(False, "Log the time of recomputation after each step.")
    preserve_rng_state: bool = option(
        True, "Restore the states of random generators for recomputation. triax's Dropout does not need it."
    )

    @classmethod
    def of(cls, value: Any) -> Self:
        """Return the section for a mapping, a granularity, or ``none``."""
        return cls() if value == "none" else super().of(value)

    @property
    def asked(self) -> bool:
        """True if an option asks for recomputation: ``enabled``, or one that says how."""
        how = (self.interval, self.granularity, self.groups, self.partition_activations, self.cpu_checkpointing)
        return self.enabled is not False and self.interval != 0 and any((self.enabled, *how))

    def check(self) -> None:
        """Check the options that group layers against one another."""
        if self.enabled and self.interval == 0:
            raise refusal(
                "<enabled> is true, but <interval> 0 recomputes nothing: set <interval> to 1, or leave it out",
            )
        if self.contiguous and not (self.partition_activations and self.groups):
            raise refusal(
                "<contiguous> is true, but it needs two other options, because it makes one buffer for slices "
                "of <groups> inputs: set <partition_activations> to true, and give <groups>",
            )
        if self.interval and self.groups:
            raise refusal(
                f"<interval> {self.interval} and <groups> {self.groups} both set how layers are grouped: give "
                "one of them",
            )
        if self.granularity == "selective" and (self.interval or self.groups):
            raise refusal(
                "<granularity> selective recomputes a part of each layer, and groups none: leave out <interval> "
                "and <groups>",
            )
