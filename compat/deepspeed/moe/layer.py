"""DeepSpeed's layer ``MoE``: a mixture of copies of any module, which returns its load-balancing loss.

``triax.moe.MoE`` is triax's own: its experts are computed by one product each, and its losses enter the division of the
batch, with the same numbers on every grid. Here the caller adds the loss, as with DeepSpeed, so that its value is that
of a microbatch on one rank and changes with the grid.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ....grid.layout import Layout, set_layout
from ....grid.ranges import split
from ....moe.capacity import within_capacity
from ....moe.dispatch import Dispatch
from ....moe.grouped import Groups
from ....moe.router import Router
from ..context import CONTEXT


class ModuleMoE(nn.Module):
    """Mixture of experts with DeepSpeed's arguments: each of E experts is a copy of a module.

    Args:
        hidden_size: D.
        expert: the module that is copied, (N, D) -> (N, D).
        num_experts: E.
        ep_size: number of ranks over which the experts are spread: the grid's expert axis. The first layer makes the
            grid, ``Grid(expert=ep_size)``, if there is none; ``initialize`` then takes it.
        k: number of experts of a token.
        capacity_factor: with ``drop_tokens``, an expert takes at most this number x k x T / E tokens of a sequence of T
            tokens, in the order of the sequence, in training mode. (DeepSpeed counts over all tokens of a rank.)
        eval_capacity_factor: the same in evaluation mode.
        min_capacity: smallest number of tokens that an expert may take.
        use_residual: add the output of a dense copy of ``expert``; a softmax of a linear layer weighs the two.
        noisy_gate_policy: None.
        drop_tokens: limit experts to their capacity.
        use_rts: without effect: tokens are dropped in the order of the sequence, never at random.
        use_tutel: False.
        enable_expert_tensor_parallelism: False; ``triax.moe.MoE(shard_tensor=True)`` has it.
        top2_2nd_expert_sampling: without effect: the second expert is the second best one.

    Raises:
        ValueError: an argument asks for what is not implemented, or a number does not fit the others.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        for name, given in (
            ("noisy_gate_policy", noisy_gate_policy),
            ("use_tutel", use_tutel),
            ("enable_expert_tensor_parallelism", enable_expert_tensor_parallelism),
        ):
            if given:
                raise ValueError(f"{name}={given!r} is not implemented: leave it out, or use triax.moe.MoE")
        if num_experts % ep_size:
            raise ValueError(f"ep_size={ep_size} does not divide num_experts={num_experts}: give a divisor of it")
        self.grid = CONTEXT.expert_grid(ep_size)
        self.num_experts, self.k, self.drop_tokens = num_experts, k, drop_tokens
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.min_capacity = min_capacity
        self.gate = Router(hidden_size, num_experts, k, normalize=k > 1)
        self.experts = ModuleExperts(expert, num_experts, (self.grid.expert.rank, ep_size))
        self.mlp = copy.deepcopy(expert) if use_residual else None
        self.coefficient = nn.Linear(hidden_size, 2) if use_residual else None

    def forward(self, hidden_states: Tensor, used_token: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the layer.

        Args:
            hidden_states: (..., D); of three dims, (B, T, D), sequences have a capacity of their own.
            used_token: (number of tokens,), 0 for padding, which goes to no expert; None: all tokens count.

        Returns:
            The output (..., D); the load-balancing loss E sum_e f_e P_e of this rank's tokens, (), where f counts each
            token's best expert; and the number of this rank's tokens of each expert, int64 (E,).
        """
        rows = hidden_states if hidden_states.dim() == 3 else hidden_states.reshape(1, -1, hidden_states.shape[-1])
        valid = None if used_token is None else used_token.view(rows.shape[:2]).bool()
        routing = self.gate(rows, valid)
        chosen = routing.experts
        counts = torch.bincount(chosen.flatten(), minlength=self.num_experts + 1)[: self.num_experts]
        if self.drop_tokens:
            factor = self.capacity_factor if self.training else self.eval_capacity_factor
            least = self.min_capacity * self.num_experts / (self.k * rows.shape[1])
            kept = within_capacity(chosen, self.num_experts, max(factor, least))
            chosen = chosen.masked_fill(~kept, self.num_experts)
        dispatch = Dispatch(chosen.flatten(0, 1), self.num_experts, self.grid.expert)
        outputs = self.experts(dispatch.scatter(rows.flatten(0, 1)), dispatch.groups)
        y = dispatch.gather(outputs, routing.weights.flatten(0, 1)).view_as(hidden_states)
        if self.mlp is not None and self.coefficient is not None:
            weights = self.coefficient(hidden_states).softmax(-1)
            y = y * weights[..., :1] + self.mlp(hidden_states) * weights[..., 1:]
        return y, self._loss(routing.shares, routing.experts[..., 0], valid), counts

    def _loss(self, shares: Tensor, best: Tensor, valid: Tensor | None) -> Tensor:
        """Return E sum_e f_e P_e over the tokens of this rank: ()."""
        firsts = F.one_hot(best, self.num_experts + 1)[..., : self.num_experts].flatten(0, 1).to(shares.dtype)
        shares = shares.flatten(0, 1) if valid is None else shares.flatten(0, 1) * valid.flatten()[:, None]
        tokens = len(firsts) if valid is None else valid.sum().clamp(min=1)
        return self.num_experts * (firsts.sum(0) / tokens * (shares.sum(0) / tokens)).sum()


class ModuleExperts(nn.Module):
    """E copies of a module, of which this rank holds some; each parameter is one tensor (E, ...) over all copies.

    Args:
        expert: the module; all copies begin with its values. It must have no buffers.
        experts: E.
        place: rank on the expert axis, and size of the axis.

    Raises:
        ValueError: the module has buffers, such as running statistics, which copies cannot share.
    """

    def __init__(self, expert: nn.Module, experts: int, place: tuple[int, int]) -> None:
        super().__init__()
        if buffers := [name for name, _ in expert.named_buffers()]:
            raise ValueError(
                f"the expert has the buffer {buffers[0]}, of which its copies would need one each: give a module "
                "without buffers"
            )
        self._template = [copy.deepcopy(expert)]  # in a list: it is no sub-module, and has no values that count
        start, stop = split(experts, place[1], place[0])
        for name, parameter in expert.named_parameters():
            stacked = nn.Parameter(parameter.detach()[None].repeat(stop - start, *[1] * parameter.dim()))
            set_layout(stacked, Layout((experts, *parameter.shape), expert_dim=0))
            self.register_parameter(name.replace(".", "_"), stacked)
        self._names = [name for name, _ in expert.named_parameters()]

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        """Compute the outputs of this rank's experts: (N, D) from (N, D), rows sorted by expert."""
        weights = [getattr(self, name.replace(".", "_")) for name in self._names]
        self._template[0].train(self.training)
        return torch.cat(
            [
                functional_call(self._template[0], {name: w[i] for name, w in zip(self._names, weights)}, (rows,))
                for i, rows in enumerate(x.split(groups.lengths))
            ]
        )


MoE = ModuleMoE  # DeepSpeed's name
