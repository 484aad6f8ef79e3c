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
    "lion": 1,
    "nadam": 2,
    "onebitadam": 3,  # with what a replica's compression left out; and so the other two
    "onebitlamb": 4,
    "radam": 2,
    "rmsprop": 1,
    "rprop": 2,
    "sgd": 0,
    "uncorrectedadam": 2,
    "zerooneadam": 3,
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


RECOMPUTE = ("none", "selective", "matmul", "full")


def paper_activations(
    batch: int,
    sequence: int,
    width: int,
    heads: int,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Bytes of a transformer layer's activations in 16 bits: Korthikanti et al. 2022, arXiv:2205.05198, table 2.

    Without recomputation sbh (10 + 24/t + 5as/(ht)), under sequence parallelism all of it over t; ``selective``
    leaves out the attention's s x s part, 5as/(ht); ``full`` leaves the layer's input, 2sbh (on every rank, as in
    the table).

    >>> [paper_activations(1, 2048, 12288, 96, 8, *rest) / 2**20 for rest in ((), (True,), (True, "selective"))]
    [552.0, 342.0, 102.0]
    """
    _known("recompute", recompute, ("none", "selective", "full"))
    one = sequence * batch * width
    if recompute == "full":
        return 2.0 * one
    core = 5 * heads * sequence / width / tensor if recompute == "none" else 0.0
    return one * ((10 / tensor if sequence_parallel else 10) + 24 / tensor + core)


def gpt_activations(
    batch: int,
    sequence: int,
    width: int,
    heads: int,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
    partitioned: bool = False,
    dropout: bool = True,
    precision: str = "fp32",
    mlp_ratio: int = 4,
) -> float:
    """Bytes that a rank holds of a block of ``triax.models.gpt`` for a microbatch, from its forward to its backward.

    Korthikanti et al. count the same tensors (34 sbh bytes in 16 bits, their equation 1) and the s x s ones of
    attention. Ours is fused: of the core it saves q, k, v and the output (which the paper counts too), and the
    logarithm of the softmax's denominator, one number a row and head. Of a LayerNorm there are two numbers a token,
    which the paper leaves out. With s sequence, b batch, h width, a heads, e bytes an element, all in e sbh:

    - shared by sequence parallelism alone: each norm's input and output 4, its numbers 4/h, and two dropout masks of
      a byte an element, 2/e;
    - shared by the tensor axis: q, k, v and the output 4/t, GELU's input and output 8/t, the softmax's a/(ht) (of 4
      bytes in 16 bits).

    Args:
        batch, sequence, width, heads: of a microbatch and of the model; tensor divides heads and sequence.
        tensor: the size of the tensor axis.
        sequence_parallel: whether hidden states are shards of the sequence.
        recompute: ``none``; ``selective``: but the core; ``full``: the block's input alone; ``matmul``: and what
            matrix products (and attention) return.
        partitioned: with ``full`` and ``matmul``: the input is kept in slices over the tensor axis.
        dropout: whether it has any.
        precision: of activations.
        mlp_ratio: the MLP's hidden width over ``width``.

    Raises:
        ValueError: a precision or a way to recompute that does not exist.
    """
    _known("recompute", recompute, RECOMPUTE)
    _known("precision", precision, tuple(BYTES))
    size = BYTES[precision]
    one = sequence * batch * width
    apart = tensor if sequence_parallel else 1  # over how many ranks hidden states are shared
    statistics = sequence * batch * heads / tensor * max(size, 4)
    products = size * one * (3 + 1 + mlp_ratio) / tensor + statistics  # q, k, v; attention; up
    kept = size * one / (tensor if partitioned else apart)
    if recompute == "full":
        return kept
    if recompute == "matmul":
        # A row-parallel product is a term of a sum, whole on each rank, and where it is summed in place it is not kept.
        # The last one is needed up to its dropout.
        in_place = tensor > 1 and not sequence_parallel
        return kept + products + (0 if in_place else size * one * (1 + dropout))
    outside = 4 * size * (one + sequence * batch) + (2 * one if dropout else 0)
    activation = size * one * mlp_ratio / tensor  # GELU's output
    return outside / apart + products + activation - (statistics if recompute == "selective" else 0.0)


def _known(what: str, name: str, names: tuple[str, ...]) -> None:
    if name not in names:
        raise ValueError(f"{what} {name!r}: known are {', '.join(names)}")
