"""Section ``activation_checkpointing``: which activations are recomputed in the backward pass."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Strict, model_validator

from .base import Section, setting


class ActivationCheckpointingConfig(Section):
    """``activation_checkpointing``: which activations the backward pass recomputes, and which it keeps."""

    enabled: bool | None = setting(
        None,
        "true: recompute, each layer by itself if no other key says how; false: recompute nothing; null: if a key asks "
        "for it, which is one of interval, granularity, number_checkpoints, partition_activations, cpu_checkpointing.",
    )
    interval: int | None = setting(
        None, "Recompute groups of so many layers of a stage; 0: none; null: the model's own.", ge=0
    )
    granularity: Literal["full", "selective", "matmul"] | None = setting(
        None,
        "full: keep the inputs of groups only; matmul: keep also the outputs of matrix products; selective: recompute "
        "only the core of attention. Without an interval, every layer is a group.",
    )
    checkpointable_layers: tuple[Annotated[str, Strict()], ...] | None = setting(
        None, "Classes of layers to recompute; null: the model's own, or all."
    )
    number_checkpoints: int | None = setting(
        None, "Number of groups into which the layers of a rank are cut, instead of an interval.", ge=1
    )
    partition_activations: bool = setting(False, "Keep 1/tensor of each input that all tensor ranks hold.")
    cpu_checkpointing: bool = setting(False, "Keep inputs in host memory.")
    contiguous_memory_optimization: bool = setting(
        False, "Copy inputs into one buffer; needs partition_activations and number_checkpoints."
    )
    synchronize_checkpoint_boundary: bool = setting(
        False, "Synchronize with the device at the start and end of a group."
    )
    profile: bool = setting(False, "Log the time of recomputation after each step.")
    preserve_rng_state: bool = setting(
        True, "Restore the state of torch's generators for recomputation. triax's Dropout does not need it."
    )

    @property
    def asked(self) -> bool:
        """True if the section asks for recomputation: by ``enabled``, or by a key that says how."""
        how = (self.interval, self.granularity, self.number_checkpoints, self.partition_activations)
        return self.enabled is not False and self.interval != 0 and any((self.enabled, *how, self.cpu_checkpointing))

    def _missing(self, key: str) -> str | None:
        return None  # the other keys act without ``enabled``

    @model_validator(mode="after")
    def _agrees(self) -> ActivationCheckpointingConfig:
        if self.enabled and self.interval == 0:
            raise ValueError("enabled is true, but interval 0 recomputes nothing: set interval to 1, or leave it out")
        if self.contiguous_memory_optimization and not (self.partition_activations and self.number_checkpoints):
            raise ValueError(
                "contiguous_memory_optimization is true, but it needs two other keys, because it makes one buffer for "
                "slices of number_checkpoints inputs: set partition_activations to true, and give number_checkpoints"
            )
        if self.interval and self.number_checkpoints:
            raise ValueError(
                f"interval {self.interval} and number_checkpoints {self.number_checkpoints} both set how layers are "
                "grouped: give one of them"
            )
        if self.granularity == "selective" and (self.interval or self.number_checkpoints):
            raise ValueError(
                "granularity selective recomputes a part of each layer, and groups none: leave out interval and "
                "number_checkpoints"
            )
        return self
