"""Common part of the layers of Mamba2 and Gated DeltaNet, sharded by heads over the tensor axis.

Both project each token to a value and a gate of H heads, to two vectors that G groups of heads have in common (as
grouped queries share keys and values), and to a few numbers for each head. A short causal convolution mixes
neighbouring tokens, a recurrence carries a state of N x P numbers for each head along the sequence, the gate
multiplies, and a projection leads back to the residual stream.

The value's heads are sharded over the tensor-parallel ranks, unevenly if the number of ranks does not divide H. If it
divides G, the groups are sharded too; else each rank holds the weights of all groups, computes those that its heads
use, and the gradients are summed over the tensor axis.

On a grid with a context axis a rank has two pieces of each sequence, in zigzag order (``context/order.py``), which run
side by side. ``context/previous.py`` fetches what is in front of them for the convolution, and ``context/scan.py``
passes the state on.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...context.order import gather
from ...context.previous import previous
from ...context.slices import Slices
from ...grid import Axis, Grid
from ...grid.layout import Layout
from ...grid.randomness.random import Constant, Distribution, Uniform, sharded_parameter
from ...grid.ranges import split
from ...tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from ..head_groups import HeadGroups, WholeKV, project_together
from ..packed import token_positions
from .convolution import causal_convolution

_ZERO = Constant(0.0)
CHUNK = 64  # tokens whose products are computed at once; it does not change what is computed


class MixerSizes(NamedTuple):
    """Sizes of a ``RecurrentMixer``.

    Attributes:
        heads: H, the number of heads of the value, at least the number of tensor-parallel ranks.
        head_dim: P, the width of a head of the value.
        groups: G, a divisor of H.
        state: N, the width of the two vectors of a group.
        numbers: how many numbers a head has.
        kernel: w, the width of the convolution.
        conv_bias: add a bias to the convolution.
        bias: add biases to the projections.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    numbers: int
    kernel: int
    conv_bias: bool = False
    bias: bool = False


class RecurrentMixer(nn.Module):
    """Base class of the recurrent layers: all but the recurrence, the numbers of each head and the norm.

    A subclass has ``_rates``, ``_recur`` and ``_gated``.

    Args:
        width: D, the width of the residual stream.
        sizes: the other sizes.
        decay, step: distributions of ``a_log`` and ``dt_bias``.
        grid: grid whose tensor axis shards the heads, and whose context axis shards the sequence.
        init, out_init: distributions of the initial weights of the projections, and of the last one.
        sequence_parallel: input and output are this rank's shards of the sequence.

    Attributes:
        value, gate: projections to the value and the gate, (H P, D), sharded by heads.
        pair: projection to the two vectors of each group, (2 G N, D): all first ones, then all second ones.
        numbers: projection to the numbers of each head, (numbers H, D).
        conv_value, conv_pair: weights of the convolution, (H P, 1, w) and (2 G N, 1, w).
        conv_value_bias, conv_pair_bias: its biases, (H P,) and (2 G N,), or None.
        a_log, dt_bias: logarithm of the rate of each head's decay, and bias of its time step, (H,).
        out: projection back, (D, H P).
        cache: cache with the states of the sequences during generation, else None.
        slices: states behind earlier slices, if a pipeline cuts sequences into slices, else None.
        recompute: if set, it is called as ``recompute(mix, value, pair, numbers, documents)`` in place of ``mix``.

    Shape:
        (B, T, D) -> (B, T, D), equal on every tensor-parallel rank. With a context axis T counts this rank's tokens.
        With ``sequence_parallel``: (B, T / t, D) -> (B, T / t, D).

    Raises:
        ValueError: there are fewer heads than tensor-parallel ranks, or ``groups`` does not divide ``heads``.
    """

    cache: Any = None
    slices: Slices | None = None
    recompute: Any = None

    def __init__(
        self,
        width: int,
        sizes: MixerSizes,
        *,
        decay: Distribution,
        step: Distribution,
        grid: Grid,
        init: Distribution,
        out_init: Distribution,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.grid, self.axis, self.sequence_parallel = grid, grid.tensor, sequence_parallel
        heads, head_dim, groups, state, numbers, kernel, conv_bias, bias = sizes
        self.head_dim, self.state, self.kernel = head_dim, state, kernel
        self.groups = HeadGroups.on(grid.tensor, heads, groups)
        start, stop = split(heads, self.axis.size, self.axis.rank)
        self.heads = stop - start  # this rank's
        common: dict[str, Any] = {"grid": grid, "sequence_parallel": sequence_parallel}
        inward: dict[str, Any] = {**common, "bias": bias, "init": init, "bias_init": _ZERO}
        self.value = ColumnParallelLinear(width, heads * head_dim, unit=head_dim, **inward)
        self.gate = ColumnParallelLinear(width, heads * head_dim, unit=head_dim, **inward)
        self.numbers = ColumnParallelLinear(width, numbers * heads, parts=(heads,) * numbers, unit=1, **inward)
        self.pair = self.groups.projection(width, state, **inward)
        rows, make = groups * state, partial(sharded_parameter, rank=self.axis.rank, size=self.axis.size)
        if self.groups.held is None:
            kernels, make_pair = Layout((2 * rows, 1, kernel), shard_dim=0, parts=(rows, rows), unit=state), make
        else:
            kernels = Layout((2 * rows, 1, kernel), partial=True)
            make_pair = partial(sharded_parameter, rank=0, size=1)
        taps = Uniform(kernel**-0.5)  # as nn.Conv1d's
        channels = Layout((heads * head_dim, 1, kernel), shard_dim=0, unit=head_dim)
        self.conv_value, self.conv_pair = make(channels, taps), make_pair(kernels, taps)
        biases = [_without_taps(channels), _without_taps(kernels)]
        self.conv_value_bias = make(biases[0], taps) if conv_bias else None
        self.conv_pair_bias = make_pair(biases[1], taps) if conv_bias else None
        per_head = Layout((heads,), shard_dim=0)
        self.a_log, self.dt_bias = make(per_head, decay), make(per_head, step)
        self.out = RowParallelLinear(
            heads * head_dim, width, bias=bias, unit=head_dim, init=out_init, bias_init=_ZERO, **common
        )

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """Run the layer.

        Args:
            x: the normalized residual stream, of the shape in the class's docstring.
            documents: document number of each token, integers (B, T), for packed rows (see ``packed.py``): a document
                begins with an empty state. Every rank passes the numbers of the whole sequence.
        """
        value, gate, pair, numbers = self._project(x)
        if self.cache is not None:
            y = self.cache.recur(partial(self._resume, value, pair, numbers), self._empty(value, pair))
        elif self.recompute is not None:
            y = self.recompute(self.mix, value, pair, numbers, documents)
        else:
            y = self.mix(value, pair, numbers, documents)
        out: Tensor = self.out(self._gated(y, gate.unflatten(2, (-1, self.head_dim))).flatten(2))
        return out

    def mix(self, value: Tensor, pair: Tensor, numbers: Tensor, documents: Tensor | None = None) -> Tensor:
        """Convolution and recurrence of this rank's heads.

        Args:
            value, pair, numbers: the projections, (B, T, H P), (B, T, 2 G N) and (B, T, numbers H), of this rank.
            documents: (B, T_whole), of the whole sequence, or None.

        Returns:
            (B, T, H, P).
        """
        axis, places = self.grid.context, None
        if self.slices is not None and self.slices.active:
            places = None if documents is None else self.slices.positions(documents, value.device)
            resume = partial(self._resume, value, pair, numbers, places=places)
            return self.slices.recur(self, resume, self._empty(value, pair))
        if documents is not None:
            places = token_positions(value.shape[1], axis, documents, value.device)
        y, _ = self._run(torch.cat([value, pair], 2), numbers, axis, places=places)
        return y

    def _resume(
        self, value: Tensor, pair: Tensor, numbers: Tensor, states: list[Tensor], places: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the layer from states as ``_empty`` lists them; return its output and the new states."""
        inputs, cache, kept = torch.cat([value, pair], 2), self.cache, self.kernel - 1
        axis, valid = (None, None) if cache is None else (cache.axis, cache.valid(inputs.shape[1]))
        earlier, state = states
        y, state = self._run(inputs, numbers, axis, places=places, valid=valid, initial=state, earlier=earlier)
        if axis is not None:
            state = state.contiguous()
            axis.broadcast(state, source=0)
            inputs = gather(inputs, axis, self.cache.tokens)
        seen = torch.cat([earlier, inputs], 1)
        return y, [seen[:, seen.shape[1] - kept :], state]

    def _empty(self, value: Tensor, pair: Tensor) -> list[Tensor]:
        """Return the states of sequences without tokens: inputs of the convolution, and state of the recurrence."""
        rows, channels = len(value), value.shape[2] + pair.shape[2]
        state = value.new_zeros(rows, self.heads, self.state, self.head_dim, dtype=_wide(value))
        return [value.new_zeros(rows, self.kernel - 1, channels), state]

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        layers = (self.value, self.gate, self.pair, self.numbers)
        return project_together(x, layers, self.axis, self.sequence_parallel)

    def _run(
        self,
        inputs: Tensor,
        numbers: Tensor,
        axis: Axis | None,
        *,
        places: Tensor | None = None,
        valid: Tensor | None = None,
        initial: Tensor | None = None,
        earlier: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return y (B, T, H, P), and the state at the end as ``context.scan`` returns it.

        Args:
            inputs: of the convolution, (B, T, H P + 2 G N).
            numbers: (B, T, numbers H).
            axis: the context axis if the tokens are spread over it.
            places: place of each token in its document, (B, T).
            valid: which tokens are no padding, (T,).
            initial: state in front of the sequence.
            earlier: inputs in front of the sequence, (B, w - 1, channels).
        """
        pieces = 1 if axis is None or axis.size == 1 else 2
        if pieces == 2 and inputs.shape[1] % 2:
            raise ValueError(
                f"this rank has {inputs.shape[1]} tokens, but in zigzag order it has two pieces of equal length. Take "
                "its tokens with triax.context.shard, which pads them to an even number."
            )
        if pieces == 2:
            assert axis is not None
            before = previous(inputs, self.kernel - 1, axis)
        else:
            rows, _, channels = inputs.shape
            before = (inputs.new_zeros(rows, self.kernel - 1, channels) if earlier is None else earlier)[:, None]
        cut = partial(_cut, pieces=pieces)
        with torch.autocast(inputs.device.type, enabled=False):
            weight, bias = self._kernels()
            weight = weight.to(inputs.dtype)
            bias = None if bias is None else bias.to(inputs.dtype)
            at = None if places is None else cut(places)
            mixed = F.silu(causal_convolution(cut(inputs), before, weight, bias, at))  # (B, p, L, channels)
            wide = _wide(inputs)
            logarithms, strengths = self._rates(numbers.to(wide))  # (B, T, H)
            if valid is not None:
                logarithms, strengths = (rate * valid[:, None] for rate in (logarithms, strengths))
            length = mixed.shape[2]
            chunk = min(CHUNK, length)
            missing = -length % chunk  # padded by tokens that change no state
            mixed = F.pad(mixed.to(wide), (0, 0, 0, missing))
            rates = [F.pad(cut(rate), (0, 0, 0, missing)) for rate in (logarithms, strengths)]
            begins = None if at is None else F.pad(at == 0, (0, missing))
            sizes = (self.heads * self.head_dim, self.groups.count * self.state, self.groups.count * self.state)
            value, first, second = mixed.split(sizes, 3)
            value = value.unflatten(3, (-1, self.head_dim))
            first, second = (projected.unflatten(3, (-1, self.state)) for projected in (first, second))
            first, second = self.groups.for_heads(3, first, second)
            grouped = (first.shape[3], -1)
            y, state = self._recur(
                value.unflatten(3, grouped),
                first,
                second,
                *(rate.unflatten(3, grouped) for rate in rates),
                chunk=chunk,
                begins=begins,
                initial=initial,
                axis=axis,
            )
        return y.flatten(3, 4)[:, :, :length].flatten(1, 2), state

    def _kernels(self) -> tuple[Tensor, Tensor | None]:
        """Return weights and biases of the convolution, of the channels of ``inputs``."""
        pairs: list[Tensor | None] = [self.conv_pair, self.conv_pair_bias]
        if isinstance(self.pair, WholeKV):
            pairs = [None if kernel is None else self.pair.selected(kernel) for kernel in pairs]
        weight, bias = (
            None if value is None or pair is None else torch.cat([value, pair])
            for value, pair in zip((self.conv_value, self.conv_value_bias), pairs, strict=True)
        )
        assert weight is not None
        return weight, bias

    def _rates(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logarithm of each head's decay, and the strength of its update, (B, T, H) each."""
        raise NotImplementedError

    def _recur(
        self, value: Tensor, first: Tensor, second: Tensor, logarithms: Tensor, strengths: Tensor, **others: Any
    ) -> tuple[Tensor, Tensor]:
        """Return y (B, p, L, G, h, P), and the state at the end.

        Args:
            value: (B, p, L, G, h, P).
            first, second: the two vectors of each group, (B, p, L, G, N).
            logarithms, strengths: of ``_rates``, (B, p, L, G, h).
            others: chunk, begins, initial and axis, as for ``state_space``.
        """
        raise NotImplementedError

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """Return the normalized and gated y, (B, T, H, P) each, in the gate's dtype."""
        raise NotImplementedError


def _cut(x: Tensor, pieces: int) -> Tensor:
    """Return tokens by pieces: (B, T, ...) -> (B, p, T / p, ...)."""
    return x.unflatten(1, (pieces, -1))


def _wide(x: Tensor) -> torch.dtype:
    """Return the dtype of the recurrence: fp32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def _without_taps(layout: Layout) -> Layout:
    """Return the layout of the bias of a convolution whose weight has this layout."""
    return replace(layout, shape=layout.shape[:1])
