"""Formulas of papers for the activations of a block, beside which the tests count."""

from __future__ import annotations

from triax.base.formulas import known
from triax.plugins.plan.activations import block_activations


def paper_activations(
    batch: int,
    sequence: int,
    width: int,
    heads: int,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Return the bytes of a transformer layer's activations in 16 bits (Korthikanti et al. 2022, table 2).

    The paper is arXiv:2205.05198. Without recomputation they are sbh (10 + 24/t + 5as/(ht)); sequence parallelism
    divides all of it by t. ``selective`` recomputes the attention's s x s part, 5as/(ht). ``full`` keeps the layer's
    input only, 2sbh on every rank.

    >>> [paper_activations(1, 2048, 12288, 96, 8, *rest) / 2**20 for rest in ((), (True,), (True, "selective"))]
    [552.0, 342.0, 102.0]
    """
    known("recompute", recompute, ("none", "selective", "full"))
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
    """Return the bytes that a block of ``triax.models.gpt`` keeps of a microbatch until its backward pass.

    Korthikanti et al. count the same tensors (34 sbh bytes in 16 bits, their equation 1) and the s x s ones of
    attention. Attention is fused here: it saves q, k, v and the output, as in the paper, and the logarithm of the
    softmax's denominator, one number per row and head. A LayerNorm saves two numbers per token, which the paper leaves
    out. With s sequence, b batch, h width, a heads, e bytes per element, in units of e sbh:

    - divided by sequence parallelism only: each norm's input and output 4, its statistics 4/h, and two dropout masks
      of one byte per element, 2/e;
    - divided by the tensor axis: q, k, v and the output 4/t, GELU's input and output 8/t, the softmax's denominator
      a/(ht) (4 bytes each in 16 bits).

    Args:
        batch, sequence: samples and tokens of a microbatch.
        width, heads: of the model; tensor divides heads and sequence.
        tensor: size of the tensor axis.
        sequence_parallel: True if hidden states are sharded over the sequence.
        recompute: what is kept. ``none``: everything. ``selective``: everything but the core of attention. ``full``:
            the block's input. ``matmul``: its input and the outputs of matrix products and attention.
        partitioned: the input that ``full`` and ``matmul`` keep is sliced over the tensor axis.
        dropout: True if the block has dropout.
        precision: precision of activations.
        mlp_ratio: hidden width of the MLP over ``width``.

    Raises:
        ValueError: the precision or the kind of recomputation does not exist.
    """
    one = width / tensor  # elements of a token on this rank
    return block_activations(
        *(sequence * batch, width),
        attention=4 * one,
        heads=heads / tensor,
        product=mlp_ratio * one,
        activation=mlp_ratio * one,
        tensor=tensor,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        partitioned=partitioned,
        dropout=dropout,
        precision=precision,
    )
