"""Bytes of activations that a transformer block keeps for its backward pass, by formula."""

from __future__ import annotations

from ...base.formulas import BYTES, known

RECOMPUTE = ("none", "selective", "matmul", "full")


def block_activations(
    tokens: float,
    width: int,
    *,
    attention: float,
    heads: float,
    product: float,
    activation: float,
    hidden: float = 4,
    statistics: float = 4,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
    partitioned: bool = False,
    dropout: bool = False,
    precision: str = "fp32",
) -> float:
    """Return the bytes that a transformer block keeps of a microbatch until its backward pass.

    Korthikanti et al. 2022 (arXiv:2205.05198) count the same tensors; attention is fused here. A gated MLP keeps gate
    and up (``product``), the activation of the gate and the product of the two (``activation``). Grouped queries keep
    fewer keys and values.

    Args:
        tokens: tokens of a microbatch on this rank, before sequence parallelism divides them.
        width: width of the hidden states.
        attention: elements per token of queries, keys, values and output on this rank.
        heads: heads on this rank.
        product: elements per token of the output of the MLP's first product on this rank.
        activation: elements per token of what follows it, up to the input of its last product.
        hidden: number of tensors of the hidden width: inputs and outputs of norms.
        statistics: numbers per token that the norms save.
        tensor: size of the tensor axis.
        sequence_parallel: True if hidden states are sharded over the sequence.
        recompute: what is kept. ``none``: everything. ``selective``: everything but the core of attention. ``full``:
            the block's input. ``matmul``: its input and the outputs of matrix products and attention.
        partitioned: the input that ``full`` and ``matmul`` keep is sliced over the tensor axis.
        dropout: True if the block has dropout.
        precision: precision of activations.

    Raises:
        ValueError: the precision or the kind of recomputation does not exist.
    """
    known("recompute", recompute, RECOMPUTE)
    known("precision", precision, BYTES)
    size, one = BYTES[precision], tokens * width
    apart = tensor if sequence_parallel else 1  # ranks that share the hidden states
    softmax = tokens * heads * max(size, 4)
    products = size * tokens * (attention + product) + softmax
    kept = size * one / (tensor if partitioned else apart)
    if recompute == "full":
        return kept
    if recompute == "matmul":
        # A row-parallel product has the full size on each rank. It is not kept if it is summed in place. The last
        # product is kept for its dropout.
        in_place = tensor > 1 and not sequence_parallel
        return kept + products + (0 if in_place else size * one * (1 + dropout))
    outside = size * (hidden * one + statistics * tokens) + (2 * one if dropout else 0)
    return outside / apart + products + size * tokens * activation - (softmax if recompute == "selective" else 0.0)
