"""compat/deepspeed/checkpointing.py: recomputed functions have the gradients, and the dropout, of plain ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import triax.compat.deepspeed as deepspeed
from triax.compat.deepspeed.context import CONTEXT


class Blocks(nn.Module):
    """Blocks with dropout from torch's generator, and from the state that differs between tensor ranks."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed, self.runs = checkpointed, 0
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def block(self, index: int) -> Any:
        def run(x: Tensor, *, scale: float = 1.0) -> Tensor:
            self.runs += 1
            y = F.dropout(torch.tanh(self.blocks[index](x)), 0.4)
            with deepspeed.checkpointing.get_cuda_rng_tracker().fork():
                return F.dropout(y, 0.3) * scale

        return run

    def forward(self, x: Tensor) -> Tensor:
        for index in range(len(self.blocks)):
            run = self.block(index)
            x = deepspeed.checkpointing.checkpoint(run, x, scale=1.5) if self.checkpointed else run(x, scale=1.5)
        return x


def gradients(checkpointed: bool) -> tuple[list[Tensor], int, Tensor]:
    torch.manual_seed(0)
    model = Blocks(checkpointed).double()
    deepspeed.checkpointing.model_parallel_cuda_manual_seed(3)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        model(x).square().sum().backward()
    assert x.grad is not None
    last = torch.rand(2)
    with deepspeed.checkpointing.get_cuda_rng_tracker().fork():
        last = last + torch.rand(2)
    return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)], model.runs, last


def require_equal_to_plain(**options: Any) -> None:
    CONTEXT.recompute = CONTEXT.recompute_options = None
    assert not deepspeed.checkpointing.is_configured()
    wanted, runs, after = gradients(False)
    found, again, then = gradients(True)
    assert (runs, again) == (6, 12) and torch.equal(after, then)  # the generators go on as without recomputation
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    deepspeed.checkpointing.configure(None, **options)
    assert deepspeed.checkpointing.is_configured()
    found, again, then = gradients(True)
    assert again == 12 and all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    deepspeed.checkpointing.partition_activations_in_checkpoint(False)
    deepspeed.checkpointing.reset()
    CONTEXT.recompute = CONTEXT.recompute_options = None


def test_recomputed_dropout_has_the_masks_of_the_forward_pass() -> None:
    require_equal_to_plain(checkpoint_in_cpu=True, profile=True)
    require_equal_to_plain(deepspeed_config={"activation_checkpointing": {"synchronize_checkpoint_boundary": True}})


def test_partitioned_checkpointing_on_two_ranks_equals_plain(ranks: Any) -> None:
    ranks(2, require_equal_to_plain, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=3)


def test_checkpointing_refuses_wrong_calls() -> None:
    for options, said in (({}, "partition_activations=True"), ({"partition_activations": True}, "num_checkpoints")):
        with pytest.raises(AssertionError, match=said):
            deepspeed.checkpointing.configure(None, contiguous_checkpointing=True, **options)
    tracker = deepspeed.checkpointing.get_cuda_rng_tracker()
    tracker.reset()
    with pytest.raises(ValueError, match="call add"), tracker.fork():
        pass
    tracker.add("a", 1)
    with pytest.raises(ValueError, match="that exists already"):
        tracker.add("a", 2)
    deepspeed.checkpointing.model_parallel_cuda_manual_seed(3)
    deepspeed.checkpointing.model_parallel_reconfigure_tp_seed(4)
