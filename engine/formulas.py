"""What the papers say a rank holds. Arithmetic only, no torch and no process: for planning, and beside the counts.

The ZeRO paper's figure 1, 7.5 billion parameters on 64 replicas, Adam and gradients in fp16:

    >>> [round(model_states(7.5e9, 64, stage, "fp16", "adam", "fp16").total / 1e9, 1) for stage in range(4)]
    [120.0, 31.4, 16.6, 1.9]
"""

from __future__ import annotations

from typing import NamedTuple

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}

# Tensors as large as the parameters that an optimizer of torch keeps, with its default options.
STATES = {
    "adadelta": 2,
    "adagrad": 1,
    "adam": 2,
    "adamax": 2,
    "adamw": 2,
    "asgd": 1,
    "nadam": 2,
    "radam": 2,
    "rmsprop": 1,
    "rprop": 2,
    "sgd": 0,
}


class ModelStates(NamedTuple):
    """Bytes on one rank."""

    parameters: float
    gradients: float
    masters: float
    optimizer: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


def model_states(
    parameters: float,
    replicas: int = 1,
    stage: int = 0,
    precision: str = "fp32",
    optimizer: str | int = "adamw",
    gradients: str | None = None,
) -> ModelStates:
    """Bytes of model states that one rank holds between two steps: Rajbhandari et al. 2020, section 3.1 and figure 1.

    With fp16 or bf16 a parameter takes 2 bytes, its master 4 and each state of the optimizer 4: the paper's K is 12
    for Adam. The paper's gradients are fp16 too; here they are accumulated in fp32 unless ``gradients`` says
    otherwise. Stage 1 divides masters and optimizer state by the replicas, stage 2 gradients too, stage 3 everything.

    Args:
        parameters: elements on this rank before the data axis shards them.
        replicas: the size of the data axis.
        stage: of ZeRO.
        precision: ``fp64``, ``fp32``, ``bf16`` or ``fp16``.
        optimizer: a name, or how many tensors as large as the parameters it keeps.
        gradients: the dtype in which gradients are accumulated; by default fp32 with fp16 and bf16.

    Raises:
        ValueError: a stage, precision or optimizer that does not exist; the message names those that do.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage {stage}: the stages of ZeRO are 0, 1, 2 and 3")
    if replicas < 1 or parameters < 0:
        raise ValueError(f"{parameters:g} parameters on {replicas} replicas: give at least 0 and 1")
    for name in (precision, gradients):
        if name is not None and name not in BYTES:
            raise ValueError(f"precision {name!r}: known are {', '.join(BYTES)}")
    if isinstance(optimizer, str):
        if optimizer.lower() not in STATES:
            raise ValueError(f"optimizer {optimizer!r}: known are {', '.join(STATES)}")
        optimizer = STATES[optimizer.lower()]
    half = BYTES[precision] == 2
    wide = 4 if half else BYTES[precision]
    share = [1 if stage < needed else replicas for needed in (3, 2, 1)]
    return ModelStates(
        parameters * BYTES[precision] / share[0],
        parameters * (wide if gradients is None else BYTES[gradients]) / share[1],
        parameters * (wide if half else 0) / share[2],
        parameters * wide * optimizer / share[2],
    )
