"""DeepSpeed's module ``deepspeed.moe``: ``MoE``, which is ``triax.moe``'s ``ModuleMoE`` with DeepSpeed's arguments."""

from __future__ import annotations

from torch import nn

from ...moe.module_experts import ModuleMoE
from .context import CONTEXT
from .modules import rest_of
from .utils import logger


class DeepSpeedMoE(ModuleMoE):
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
        noisy_gate_policy: ``Jitter`` multiplies a token's inputs of the router by factors from 0.99 to 1.01,
            ``RSample`` draws the expert (of k=1; without effect, which a warning says, for more), in training mode. The
            numbers are those of the seed, the step and the sample, equal on every grid.
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
        if noisy_gate_policy not in (None, "None", "Jitter", "RSample"):
            raise ValueError(f"noisy_gate_policy={noisy_gate_policy!r} is unknown: give 'Jitter', 'RSample' or None")
        noise = {"Jitter": "jitter", "RSample": "gumbel"}.get(noisy_gate_policy or "")
        if noise == "gumbel" and k > 1:
            logger.warning("noisy_gate_policy='RSample' has no effect with k=%d, as in DeepSpeed: it acts with k=1", k)
            noise = None
        refused = {"use_tutel": use_tutel, "enable_expert_tensor_parallelism": enable_expert_tensor_parallelism}
        for name, given in refused.items():
            if given:
                raise ValueError(f"{name}={given!r} is not implemented: leave it out, or use triax.moe.MoE")
        if num_experts % ep_size:
            raise ValueError(f"ep_size={ep_size} does not divide num_experts={num_experts}: give a divisor of it")
        first, second = (capacity_factor, eval_capacity_factor) if drop_tokens else (None, None)
        grid = CONTEXT.expert_grid(ep_size)
        super().__init__(grid, hidden_size, expert, num_experts, k, first, second, min_capacity, use_residual, noise)


__getattr__, __path__ = rest_of(__name__)
