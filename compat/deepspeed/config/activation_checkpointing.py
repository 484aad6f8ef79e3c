"""Section ``activation_checkpointing``: which activations are recomputed in the backward pass."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Strict

from .base import Section, setting


class ActivationCheckpointingConfig(Section):
    """``activation_checkpointing``: which activations the backward pass recomputes, and which it keeps."""

    enabled: bool | None = setting(
        None,
        "true: recompute (each layer separately, unless another key groups them); false: recompute nothing; null: "
        "recompute if interval, granularity, number_checkpoints, partition_activations or cpu_checkpointing is set.",
    )
    interval: int | None = setting(
        None, "Recompute groups of this many layers of a stage; 0: none; null: the model's own.", ge=0
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
    mlp_tile: int | None = setting(
        None, "Run MLPs on this many tokens of each sequence at a time, and recompute each such tile.", ge=1
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
        True, "Restore the states of random generators for recomputation. triax's Dropout does not need it."
    )

    def _missing(self, key: str) -> str | None:
        return None  # the other keys act without ``enabled``
