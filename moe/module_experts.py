"""ModuleMoE: a mixture of copies of any module, which returns its load-balancing loss.

``MoE`` computes its experts by one product each, and its losses enter the division of the batch, with the same numbers
on every grid. Here the experts are modules, and the caller adds the loss to that of the model, so that its value is
that of a microbatch on one rank and changes with the grid.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ..grid import Grid
from ..grid.auxiliary import AuxiliaryLayer
from ..grid.layout import Layout, set_layout
from ..grid.randomness.random import SampleRandom
from ..grid.ranges import split
from .capacity import within_capacity
from .dispatch import Dispatch
from .grouped import Groups
from .router import Router


class ModuleMoE(nn.Module):
    """Mixture of experts: each of E experts is a copy of a module.

    Args:
        grid: the grid, whose expert axis the experts are spread over.
        hidden: D.
        expert: the module that is copied, (N, D) -> (N, D).
        experts: E.
        top_k: number of experts of a token.
        capacity: an expert takes at most this number x k x T / E tokens of a sequence of T tokens, in the order of the
            sequence, in training mode. None: no limit.
        eval_capacity: the same in evaluation mode.
        min_capacity: smallest number of tokens that an expert may take.
        noise: of the router in training, ``jitter`` or ``gumbel``; None: none.
        residual: add the output of a dense copy of ``expert``; a softmax of a linear layer weighs the two.

    Raises:
        ValueError: the expert axis does not divide E; the expert has buffers, a ``triax.Dropout`` or an ``MoE``; or the
            context axis would shard noise.
    """

    def __init__(
        self,
        grid: Grid,
        hidden: int,
        expert: nn.Module,
        experts: int,
        top_k: int = 1,
        capacity: float | None = None,
        eval_capacity: float | None = None,
        min_capacity: int = 1,
        residual: bool = False,
        noise: str | None = None,
    ) -> None:
        super().__init__()
        size = grid.expert.size
        if experts % size:
            raise ValueError(f"{size} ranks of the expert axis do not divide {experts} experts: give a divisor of it")
        if noise is not None and grid.context.size > 1:
            raise ValueError(
                f"noise={noise!r} is drawn for the tokens of whole sequences, but the context axis of "
                f"{grid.context.size} ranks shards them: leave it out, or make the grid with context=1"
            )
        self.grid, self.num_experts, self.k = grid, experts, top_k
        self.capacities, self.min_capacity = (eval_capacity, capacity), min_capacity
        self.gate = Router(hidden, experts, top_k, normalize=top_k > 1, noise=noise)
        self.experts = ModuleExperts(expert, experts, (grid.expert.rank, size))
        self.mlp = copy.deepcopy(expert) if residual else None
        self.coefficient = nn.Linear(hidden, 2) if residual else None

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
        factor = self.capacities[self.training]
        if factor is not None:
            least = self.min_capacity * self.num_experts / (self.k * max(rows.shape[1], 1))
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
        tokens = max(len(firsts), 1) if valid is None else valid.sum().clamp(min=1)
        return self.num_experts * (firsts.sum(0) / tokens * (shares.sum(0) / tokens)).sum()


class ModuleExperts(nn.Module):
    """E copies of a module, of which this rank holds some; each parameter is one tensor (E, ...) over all copies.

    Args:
        expert: the module; all copies begin with its values. It must have no buffers, no ``triax.Dropout`` and no
            ``MoE``.
        experts: E.
        place: rank on the expert axis, and size of the axis.

    Raises:
        ValueError: the module has buffers, such as running statistics, which copies cannot share, or a layer that the
            engine binds to its name and to the step.
    """

    def __init__(self, expert: nn.Module, experts: int, place: tuple[int, int]) -> None:
        super().__init__()
        if buffers := [name for name, _ in expert.named_buffers()]:
            raise ValueError(
                f"the expert has the buffer {buffers[0]}, of which its copies would need one each: give a module "
                "without buffers"
            )
        for name, part in expert.named_modules():
            if isinstance(part, (SampleRandom, AuxiliaryLayer)) and getattr(part, "p", True):
                layer = f"has the {type(part).__name__} {name!r}" if name else f"is of class {type(part).__name__}"
                raise ValueError(
                    f"the expert {layer}, which the engine binds to one layer and to the step, but its copies would "
                    "draw the same numbers in each step, and their losses would be lost: put it before or after the "
                    "mixture. An nn.Dropout may be within the expert"
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
