"""Parts of models with an encoder and a decoder, T5 and Whisper: input of the decoder, cross attention, and blocks.

The encoder reads a source, the decoder a target text, and the decoder's blocks also attend to the encoder's output.
This output, (B, S, D), travels past the decoder's stages with the decoder's activations, and its gradient comes back.

Shapes: B rows of S source tokens and T target tokens, D the width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ..context.dropout import dropout
from ..grid import Grid
from ..grid.randomness.random import Constant, Normal
from ..tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from .attention import ShardedAttention
from .attention_options import ScoreOptions
from .config import T5Config, WhisperConfig
from .head_groups import project_together
from .layers import normalized
from .mlp import MLP, GatedMLP

Mask = Tensor | None


def source_and_target(config: T5Config | WhisperConfig, names: Sequence[str], inputs: Any, labels: Any) -> list[Any]:
    """Return the fields of a microbatch. The last field is the decoder's input, integers (B, T).

    Without this last field it is the labels (B, T), moved by one token, as in transformers.

    Args:
        config: the model's configuration.
        names: names of the fields; inputs that are no dict are the first one.
        inputs: the fields by name.
        labels: the labels, alone, in a dict, or before what else a loss takes.

    Returns:
        The fields in the order of ``names``; None for one that is missing.

    Raises:
        ValueError: the inputs have another field, or there are neither labels nor ids for the decoder.
    """
    fields = inputs if isinstance(inputs, Mapping) else {names[0]: inputs}
    if unknown := [name for name in fields if name not in names]:
        known = f"{', '.join(names)} and labels"
        raise ValueError(f"{config.title} takes {known}, not the field {unknown[0]!r}. Leave it out.")
    *source, target = (fields.get(name) for name in names)
    if target is None:
        if labels is None:
            raise ValueError(f"{config.title} needs labels or {names[-1]}, which the decoder reads. Give one of them.")
        labels = labels["labels"] if isinstance(labels, Mapping) else labels
        target = F.pad(labels[0] if isinstance(labels, (tuple, list)) else labels, (1, -1))
        target = target.masked_fill(target == -100, config.pad_token_id)
        target[:, 0] = config.decoder_start_token_id
    return [*source, target]


class CrossAttention(ShardedAttention):
    """Attention to the tokens themselves or to those of another sequence. Keys have no bias.

    Args:
        config: the model's configuration.
        head_dim: width of a head.
        options: options of mask and scores.
        stds: standard deviations of the initial weights of q, of k and v, and of out.
        bias: q, v and out have biases.
        common: grid and sequence_parallel, as for ``ShardedAttention``.

    Attributes:
        q, k, v: (H dim, D), sharded by heads.
        out: (D, H dim), sharded by heads.
    """

    def __init__(
        self, config: Any, head_dim: int, options: ScoreOptions, stds: Sequence[float], bias: bool, **common: Any
    ) -> None:
        super().__init__(config.num_attention_heads, options, **common)
        self.title, self.head_dim, inner = config.title, head_dim, config.num_attention_heads * head_dim
        of_queries, of_pairs, of_output = map(Normal, stds)
        common |= {"unit": head_dim, "bias_init": Constant(0.0)}
        make = partial(ColumnParallelLinear, config.hidden_size, inner, **common)
        self.q, self.k = make(bias=bias, init=of_queries), make(bias=False, init=of_pairs)
        self.v = make(bias=bias, init=of_pairs)
        self.out = RowParallelLinear(inner, config.hidden_size, bias, init=of_output, **common)

    def forward(self, x: Tensor, seen: Mask = None, bias: Mask = None, other: Mask = None) -> Tensor:
        """Attend.

        Args:
            x: (B, T, D), or this rank's shard of the tokens.
            seen: True where a query attends to a key, broadcast to (B, heads, T, S); None: as the options say.
            bias: biases of the scores, broadcast to (B, heads, T, S), with ``seen``; None: none.
            other: sequence that is attended to, (B, S, D), or this rank's shard; None: x.

        Raises:
            ValueError: the engine's option ``sparse_attention`` is set.
        """
        if self.sparsity is not None:
            raise ValueError(f"{self.title} has no sparse attention. Leave out sparse_attention.")
        project = partial(project_together, axis=self.axis, sequence_parallel=self.sequence_parallel)
        if other is None:
            projected = project(x, (self.q, self.k, self.v))
        else:
            projected = (self.q(x), *project(other, (self.k, self.v)))
        q, k, v = (rearrange(y, "b t (heads dim) -> b heads t dim", dim=self.head_dim) for y in projected)
        mask = None
        if seen is not None:
            bias = q.new_zeros(()) if bias is None else bias.to(q.dtype)
            mask = torch.where(seen, bias, torch.finfo(q.dtype).min)  # no row is infinite everywhere
        attend = self.attend if self.recompute is None else partial(self.recompute, self.attend)
        out: Tensor = self.out(rearrange(attend(q, k, v, mask), "b heads t dim -> b t (heads dim)"))
        return out


class EncoderDecoderBlock(nn.Module):
    """Block: self-attention, in the decoder attention to the encoder's output, and MLP, each behind a norm.

    A subclass has ``make_norm``, the class of its norms, and ``make_attention``.

    Args:
        config: the model's configuration.
        decodes: the block is one of the decoder, in which a token attends to itself and to earlier ones only.
        grid, sequence_parallel: as for ``ResidualBlock``.
        inits: distributions of the initial weights of the MLP, as for ``MLP``.

    Attributes:
        attention, cross, mlp: the branches; cross is None in the encoder.

    Raises:
        ValueError: the grid has a context axis, or the tensor axis is larger than the number of heads.
    """

    make_norm: ClassVar[type[nn.Module]]

    def __init__(
        self, config: Any, decodes: bool, *, grid: Grid, sequence_parallel: bool = False, **inits: Any
    ) -> None:
        super().__init__()
        config.check_tensor(grid.tensor.size)
        if grid.context.size > 1:
            raise ValueError(
                f"{config.title} needs context=1, but the grid has context={grid.context.size}. Change it."
            )
        common: dict[str, Any] = {"grid": grid, "sequence_parallel": sequence_parallel}
        norm = partial(self.make_norm, config.hidden_size, config.norm_epsilon, **common)
        drop = partial(dropout, config.dropout, grid, sequence_parallel)
        self.norm1, self.attention, self.dropout1 = norm(), self.make_attention(config, decodes, **common), drop()
        self.norm2 = norm() if decodes else None
        self.cross = self.make_attention(config, False, **common) if decodes else None
        self.dropout2, self.norm3, self.dropout3 = drop(), norm(), drop()
        mlp = GatedMLP if config.gated else MLP
        self.mlp = mlp(config, activation=config.hidden_act, bias=config.mlp_bias, **inits, **common)

    def make_attention(self, config: Any, causal: bool, **common: Any) -> CrossAttention:
        """Make an attention of the model."""
        raise NotImplementedError

    def run(self, x: Tensor, other: Tensor, seen: Mask = None, bias: Mask = None, source: Mask = None) -> Tensor:
        """Run the block: (B, T, D) -> (B, T, D).

        Args:
            x: the residual stream.
            other: the encoder's output, of a block of the decoder.
            seen, bias: as for the self-attention.
            source: True where a query attends to a token of the source; None: to all.
        """
        x = x + self.dropout1(self.attention(self.norm1(x), seen, bias))
        if self.cross is not None:
            x = x + self.dropout2(self.cross(normalized(x, self.norm2), source, other=other))
        y: Tensor = x + self.dropout3(self.mlp(self.norm3(x)))
        return y
