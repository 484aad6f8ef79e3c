"""MoE: a layer of experts, in place of a transformer block's MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.autograd import runs_again
from ..base.uncompiled import uncompiled
from ..grid import Grid
from ..grid.auxiliary import AuxiliaryLayer
from ..grid.comm.axis import Axis
from ..grid.comm.regions import (
    all_reduce_copy,
    begin,
    copy_all_reduce,
    gather_reduce_scatter,
    reduce_scatter_gather,
)
from ..grid.layout import Layout
from ..grid.randomness.random import Distribution, Uniform, sharded_parameter
from .balance import Statistics, balance_loss, fractions, z_loss
from .capacity import within_capacity
from .dispatch import Dispatch
from .experts import ACTIVATIONS, Activation, Experts, SharedExperts, SwiGLU
from .router import Router, Routing

BALANCES = ("sequence", "batch", "bias", "microbatch")


class MoE(AuxiliaryLayer):
    """Mixture of experts: each token goes to k of E experts, and their outputs are summed with the router's weights.

    The experts are sharded over the grid's expert axis: tokens travel by all-to-all. Every number is that of one
    process, on every grid. By default no token is dropped.

    Args:
        hidden: D.
        experts: E. The size of the expert axis must divide it.
        top_k: k, the number of experts of a token.
        grid: the grid.
        expert: kind of the experts' MLP: ``SwiGLU``, ``GEGLU``, ``GELU``, ``ReLU``, their name, or an ``Activation``.
        width: W, the hidden dim of an expert; by default 4 D, or 8/3 D if the MLP is gated.
        bias: add biases to the router and to the linear layers of the experts, but not to those of shared experts.
        router: ``softmax`` or ``sigmoid``, see ``router.py``.
        normalize: divide the weights of a token's experts by their sum.
        scale: factor of these weights.
        weigh_inputs: the weights are factors of the experts' inputs, not of their outputs (Llama 4).
        groups, groups_limit: limit a token to the experts of ``groups_limit`` out of ``groups`` groups.
        shared_experts: number of experts that every token goes to; they are one dense MLP.
        shared_width: hidden dim of that MLP; by default ``shared_experts`` x W.
        shared_gate: multiply its output by the sigmoid of a linear function of the token (Qwen2-MoE).
        capacity: limit each expert to ``capacity`` x k x T / E tokens of a sequence of T tokens, see ``capacity.py``.
            A token beyond the limit gets nothing from this expert. None: no limit.
        balance: ``sequence``, ``batch``, ``bias`` or ``microbatch``, see ``balance.py``, or several. None: none.
        balance_coefficient: factor of the load-balancing loss.
        bias_rate: step of the bias under ``bias``.
        z_loss: factor of the z-loss; 0: no z-loss.
        sequence_parallel: the input is this tensor-parallel rank's contiguous part of the rank's tokens.
        shard_tensor: shard the hidden dim of experts and shared experts over the tensor axis. Otherwise each
            tensor-parallel rank holds whole experts, and computes all tokens that it is given.
        lend: largest number of experts that a rank borrows from others of the expert axis, so that all compute equally
            many tokens, see ``lending.py``; 0: experts are not lent.
        init: distribution of all weights; by default ``nn.Linear``'s.
        device, dtype: of the weights.

    Attributes:
        router: ``Router``.
        routed: ``Experts``.
        shared: ``SharedExperts``; None without shared experts.
        shared_gate: (1, D); None without one.
        past_loads: buffer, int64 (E,): tokens that each expert was given in the step before, under ``batch``.

    Raises:
        ValueError: an argument is not possible with the others or with the grid.
    """

    past_loads: Tensor | None

    def __init__(
        self,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        grid: Grid,
        expert: Activation | str = SwiGLU,
        width: int | None = None,
        bias: bool = False,
        router: str = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        weigh_inputs: bool = False,
        groups: int = 1,
        groups_limit: int | None = None,
        shared_experts: int = 0,
        shared_width: int | None = None,
        shared_gate: bool = False,
        capacity: float | None = None,
        balance: str | Sequence[str] | None = "sequence",
        balance_coefficient: float = 0.01,
        bias_rate: float = 0.001,
        z_loss: float = 0.0,
        sequence_parallel: bool = False,
        shard_tensor: bool = False,
        lend: int = 0,
        init: Distribution | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kind = _activation(expert)
        self.balance = _balances(balance)
        if experts % grid.expert.size:
            raise ValueError(
                f"expert={grid.expert.size} does not divide the {experts} experts of a layer: give the grid an expert "
                "axis of a size that divides it"
            )
        if capacity is not None and capacity <= 0:
            raise ValueError(f"capacity={capacity} leaves no token to any expert: give a positive factor, or None")
        if lend < 0:
            raise ValueError(f"lend={lend} is no number of experts: give 0, or how many a rank may borrow")
        width = width or (hidden * 8 // 3 if kind.gated else 4 * hidden)
        self.shard_tensor = shard_tensor and grid.tensor.size > 1
        self.sequence_parallel = sequence_parallel and grid.tensor.size > 1
        for what, length in (("width", width), ("shared_width", shared_width or shared_experts * width)):
            if self.shard_tensor and length % grid.tensor.size:
                raise ValueError(
                    f"{what}={length} cannot be sharded over tensor={grid.tensor.size}: give a multiple of it, or "
                    "leave out shard_tensor"
                )
        self.grid, self.capacity, self.weigh_inputs, self.lend = grid, capacity, weigh_inputs, lend
        self.balance_coefficient, self.bias_rate, self.z_coefficient = balance_coefficient, bias_rate, z_loss
        partial = self.sequence_parallel
        weights: dict[str, Any] = {"init": init, "device": device, "dtype": dtype}
        self.router = Router(
            *(hidden, experts, top_k),
            kind=router,
            normalize=normalize,
            scale=scale,
            groups=groups,
            groups_limit=groups_limit,
            partial=partial,
            bias=bias,
            biased="bias" in self.balance,
            replicas=None if partial else grid.tensor,
            **weights,
        )
        options: dict[str, Any] = {
            "grid": grid,
            "activation": kind,
            "shard_tensor": shard_tensor,  # on one rank too, where it makes no difference but in the layouts
            "partial": partial and not self.shard_tensor,
        }
        self.routed = Experts(hidden, width, experts, bias=bias, **options, **weights)
        shared = shared_width or shared_experts * width
        self.shared = SharedExperts(hidden, shared, **options, **weights) if shared else None
        self.shared_gate: nn.Parameter | None = None
        if shared_gate and shared:
            layout = Layout((1, hidden), partial=partial)
            self.shared_gate = sharded_parameter(layout, init or Uniform(hidden**-0.5), 0, 1, device, dtype)
        past = torch.zeros(experts, dtype=torch.int64, device=device) if "batch" in self.balance else None
        self.register_buffer("past_loads", past)

    @property
    def experts(self) -> int:
        """Number of experts."""
        return self.router.experts

    @property
    def refuses_slices(self) -> str | None:
        """Reason why the layer cannot run slices of sequences; None if it can."""
        if self.loss_names or self.capacity is not None:
            return (
                "has a mixture of experts with a loss or a limit of whole sequences: leave out capacity and z_loss, "
                "and give balance='bias' or None"
            )
        return None

    @property
    def loss_names(self) -> list[str]:
        """Names of the auxiliary losses."""
        names = ["balance"] if self._balances_by_loss else []
        return [self._loss_name(name) for name in [*names, *(["z_loss"] if self.z_coefficient else [])]]

    @uncompiled  # the numbers of tokens of the experts change in each call
    def forward(self, x: Tensor, valid: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Compute the layer.

        Args:
            x: (B, T, D), this rank's tokens.
            valid: bool (B, T), False for padding. Such a token goes to no expert, counts in no load and no loss, and
                its output is 0. None: all tokens are valid.
            positions: int64 (T,), positions of these tokens in their sequence. Needed with ``capacity`` if the sequence
                is sharded over the context axis.

        Returns:
            (B, T, D).
        """
        routing = self.router(x, valid)
        chosen = routing.experts
        if self.capacity is not None:
            kept = within_capacity(chosen, self.experts, self.capacity, self._axes, self._positions(x, positions))
            chosen = chosen.masked_fill(~kept, self.experts)
        y = self._mix(x, chosen, routing.weights, valid)
        return self._balanced(y, routing, valid) if self.training and torch.is_grad_enabled() else y

    @torch.no_grad()
    def end_step(self, loads: Tensor) -> None:
        """End a step: keep its loads for the next one (``batch``), and move the bias (``bias``)."""
        self.loads = None
        if self.past_loads is not None:
            self.past_loads.copy_(loads)
        if "bias" in self.balance:
            assert self.router.correction_bias is not None
            behind = loads.sum() - loads * self.experts  # mean load - load, times E, in integers
            self.router.correction_bias.add_(behind.sign().to(self.router.correction_bias), alpha=self.bias_rate)

    @property
    def _axes(self) -> list[Axis]:
        """Axes over which the tokens of a sequence are sharded."""
        axes = [self.grid.context, self.grid.tensor] if self.sequence_parallel else [self.grid.context]
        return [axis for axis in axes if axis.size > 1]

    @property
    def _balances_by_loss(self) -> bool:
        return any(kind != "bias" for kind in self.balance)

    def _positions(self, x: Tensor, positions: Tensor | None) -> Tensor | None:
        if positions is not None or not self._axes:
            return positions
        if self.grid.context.size > 1:
            raise ValueError(
                f"the sequence is sharded over context={self.grid.context.size}, and capacity={self.capacity} drops "
                "tokens in the order of the sequence: give forward the positions of this rank's tokens"
            )
        return torch.arange(x.shape[1], device=x.device) + self.grid.tensor.rank * x.shape[1]

    def _mix(self, x: Tensor, chosen: Tensor, weights: Tensor, valid: Tensor | None) -> Tensor:
        """Return the sum of the experts' outputs, with the shared experts': (B, T, D)."""
        if self.shared_gate is not None:  # one more weight per token
            weights = torch.cat([weights, F.linear(x, self.shared_gate).sigmoid().to(weights.dtype)], dim=-1)
        complete = valid is None and self.capacity is None
        counted = valid  # of the tokens that the shared experts are given
        if self.shard_tensor:
            axis = self.grid.tensor
            if self.sequence_parallel:
                x, weights = gather_reduce_scatter(x, axis, 1), gather_reduce_scatter(weights, axis, 1)
                chosen = begin("gather", chosen, axis, 1)()
                if valid is not None:
                    counted = begin("gather", valid.to(torch.uint8), axis, 1)().bool()
            else:
                x, weights = copy_all_reduce(x, axis), copy_all_reduce(weights, axis)
        k = chosen.shape[-1]
        tokens, given, factors = x.flatten(0, 1), chosen.flatten(0, 1), weights[..., :k].flatten(0, 1)
        if self.weigh_inputs:  # a token is as many as its experts, each with a factor of its own
            tokens = (tokens[:, None] * factors[..., None].to(x.dtype)).flatten(0, 1)
            given, factors = given.reshape(-1, 1), torch.ones_like(factors).reshape(-1, 1)
        dispatch = Dispatch(given, self.experts, self.grid.expert, complete, self.lend)
        y = dispatch.gather(self.routed(dispatch.scatter(tokens), dispatch.groups), factors)
        y = (y.unflatten(0, (-1, k)).sum(1) if self.weigh_inputs else y).view_as(x)
        if self.shared is not None:
            dense = self.shared(x)
            if self.shared_gate is not None:
                dense = dense * weights[..., k:].to(dense.dtype)
            y = y + (dense if counted is None else dense * counted[..., None])
        if self.shard_tensor:
            y = reduce_scatter_gather(y, axis, 1) if self.sequence_parallel else all_reduce_copy(y, axis)
        return y

    def _balanced(self, y: Tensor, routing: Routing, valid: Tensor | None) -> Tensor:
        """Count the loads, and attach the auxiliary losses to the output."""
        by_loss = [kind for kind in self.balance if kind != "bias"]
        # The loads of whole sequences are needed for their fractions f and, with padding, for their lengths.
        own_fractions = any(kind != "batch" for kind in by_loss)
        needs_lengths = bool(by_loss) or self.z_coefficient > 0
        needs_all_counts = own_fractions or (needs_lengths and valid is not None)
        counts = Statistics(routing, valid, self._axes, needs_all_counts)
        counted = self.sequence_parallel or self.grid.tensor.is_first
        if counted and not runs_again():
            self.loads = counts.own if self.loads is None else self.loads + counts.own
        tokens = counts.tokens
        if not needs_all_counts:
            for axis in self._axes:
                tokens = tokens * axis.size
        for kind in by_loss:
            if kind == "microbatch":
                every = tokens.sum().expand_as(tokens)
                loss = balance_loss(routing.shares, fractions(counts.loads.sum(0)), every, valid) * y.shape[0]
            elif kind == "batch":
                assert self.past_loads is not None
                loss = balance_loss(routing.shares, fractions(self.past_loads), tokens, valid)
            else:
                loss = balance_loss(routing.shares, fractions(counts.loads), tokens, valid)
            y = self.auxiliary.attach(y, self._loss_name("balance"), loss, self.balance_coefficient, counted)
        if self.z_coefficient:
            loss = z_loss(routing.logits, tokens, valid)
            y = self.auxiliary.attach(y, self._loss_name("z_loss"), loss, self.z_coefficient, counted)
        return y

    def _loss_name(self, name: str) -> str:
        return f"{self.name}.{name}" if self.name else name


def _activation(expert: Activation | str) -> Activation:
    if isinstance(expert, Activation):
        return expert
    if expert.lower() not in ACTIVATIONS:
        raise ValueError(f"expert={expert!r} is unknown: give one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[expert.lower()]


def _balances(balance: str | Sequence[str] | None) -> tuple[str, ...]:
    chosen = () if balance is None else (balance,) if isinstance(balance, str) else tuple(balance)
    unknown = [kind for kind in chosen if kind not in BALANCES]
    if unknown:
        raise ValueError(f"balance={unknown[0]!r} is unknown: give one of {', '.join(BALANCES)}, or None")
    losses = [kind for kind in chosen if kind != "bias"]
    if len(losses) > 1:
        raise ValueError(
            f"balance={chosen} has {len(losses)} load-balancing losses: give one of {', '.join(losses)}, with or "
            "without 'bias'"
        )
    return chosen
