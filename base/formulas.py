"""Formulas of the papers: bytes of model states and of ZeRO's communication, per rank.

Reports show them beside the counted bytes. The ZeRO paper's figure 1 has 7.5 billion parameters on 64 replicas, with
Adam and gradients in fp16:

    >>> [round(model_states(7.5e9, 64, stage, "fp16", "adam", "fp16").total / 1e9, 1) for stage in range(4)]
    [120.0, 31.4, 16.6, 1.9]
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}

# Tokens of a chunk in which a pipeline runs its output layer and loss (pipe/chunked_loss.py).
CHUNK_TOKENS = 1024

# Number of state tensors of parameter size that an optimizer keeps, with its default options.
STATES = {
    "adadelta": 2,
    "adagrad": 1,
    "adam": 2,
    "adamax": 2,
    "adamw": 2,
    "asgd": 1,
    "lamb": 2,
    "lion": 1,
    "nadam": 2,
    "onebitadam": 3,  # this and the next 1-bit optimizers: with the residuals of compression
    "onebitlamb": 4,
    "radam": 2,
    "rmsprop": 1,
    "rprop": 2,
    "sgd": 0,
    "uncorrectedadam": 2,
    "zerooneadam": 3,
}


# Bytes of an element of optimizer state in fewer bits; codes have a scale of 4 bytes for each 64 elements.
STATE_BYTES = {"bf16": 2.0, "int8": 1 + 4 / 64, "int4": 0.5 + 4 / 64}


def optimizer_states(name: str, options: Mapping[str, Any]) -> int:
    """Return the number of state tensors of an optimizer; of an unknown one, AdamW's."""
    return STATES.get(name.lower(), STATES["adamw"]) + sum(
        bool(options.get(key)) for key in ("momentum", "centered", "amsgrad")
    )


class ModelStates(NamedTuple):
    """Bytes of model states on one rank: parameters, gradients, master parameters and optimizer state."""

    parameters: float
    gradients: float
    masters: float
    optimizer: float

    @property
    def total(self) -> float:
        """Sum of the bytes of all model states."""
        return sum(self)


def model_states(
    parameters: float,
    data: int = 1,
    stage: int = 0,
    precision: str = "fp32",
    optimizer: str | int = "adamw",
    gradients: str | None = None,
) -> ModelStates:
    """Return the bytes of model states on one rank between two steps (Rajbhandari et al. 2020, section 3.1, figure 1).

    With fp16 or bf16 a parameter takes 2 bytes, its master 4 and each state tensor of the optimizer 4: the paper's K is
    12 for Adam. The paper's gradients are fp16; here they are fp32 unless ``gradients`` gives another dtype. Stage 1
    divides masters and optimizer state by the size of the data axis, stage 2 also gradients, stage 3 everything.

    Args:
        parameters: elements on this rank before the data axis shards them.
        data: size of the data axis.
        stage: stage of ZeRO.
        precision: ``fp64``, ``fp32``, ``bf16`` or ``fp16``.
        optimizer: name of the optimizer, or the number of its state tensors of parameter size.
        gradients: dtype in which gradients are accumulated; by default fp32 with fp16 and bf16.

    Raises:
        ValueError: the stage, precision or optimizer does not exist; the message lists those that do.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage is {stage}, but the stages of ZeRO are 0, 1, 2 and 3.")
    if data < 1 or parameters < 0:
        raise ValueError(f"parameters is {parameters:g} and data is {data}, but they must be at least 0 and 1.")
    known("precision", precision, BYTES)
    known("gradients", gradients or precision, BYTES)
    if isinstance(optimizer, str):
        known("optimizer", optimizer.lower(), STATES)
        optimizer = STATES[optimizer.lower()]
    half = BYTES[precision] == 2
    wide = 4 if half else BYTES[precision]
    share = [1 if stage < needed else data for needed in (3, 2, 1)]
    return ModelStates(
        parameters * BYTES[precision] / share[0],
        parameters * (wide if gradients is None else BYTES[gradients]) / share[1],
        parameters * (wide if half else 0) / share[2],
        parameters * wide * optimizer / share[2],
    )


def zero_traffic(
    stage: int,
    weights: int,
    gradients: int,
    backward_passes: int,
    trained: bool = True,
    partitioned: bool = False,
    reduces_every_backward: bool = False,
) -> int:
    """Return the bytes that ZeRO reduces and gathers in one step: Rajbhandari et al. 2020, section 7.

    Each of N replicas sends (N-1)/N of them.

    | stage | per step |
    |---|---|
    | 0 | an all-reduce of gradients, which counts as 2 x gradients |
    | 1 | a reduce-scatter of gradients and an all-gather of weights |
    | 2 | a reduce-scatter after every backward pass, and one all-gather of weights |
    | 3 | an all-gather before every forward and every backward pass, a reduce-scatter after every backward pass |

    Stage 3 sends less where weights stay gathered from one pass to the next: in the first layer of a pipeline stage
    that turns from a backward to a forward pass, in all layers if they are kept gathered within the step, and in frozen
    layers below the first trained layer, which no backward pass reaches.

    Args:
        stage: stage of ZeRO.
        weights: bytes of weights.
        gradients: bytes of their gradients as they are sent.
        backward_passes: number of backward passes of these weights in one step.
        trained: False for frozen weights, which are gathered if they are partitioned, and not sent otherwise.
        partitioned: the weights are shards, gathered for each pass.
        reduces_every_backward: gradients are reduced after every backward pass, not once per step.
    """
    total = 2 * backward_passes * weights if partitioned else 0
    if trained and stage == 0:
        total += 2 * gradients
    elif trained:
        total += (backward_passes if reduces_every_backward else 1) * gradients + (0 if partitioned else weights)
    return total


def known(kind: str, name: str, names: Collection[str]) -> None:
    if name not in names:
        raise ValueError(f"{kind} is {name!r}, but it must be one of {', '.join(names)}.")
