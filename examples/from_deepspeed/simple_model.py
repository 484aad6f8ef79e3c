"""DeepSpeed's getting-started loop, with the import changed.

cd examples/from_deepspeed
python simple_model.py --deepspeed_config getting_started.json
torchrun --nproc-per-node 4 simple_model.py --deepspeed_config offload.json
"""

from __future__ import annotations

import argparse

import numpy
import torch
from torch import Tensor

import triax.compat.deepspeed as deepspeed  # was: import deepspeed

HIDDEN, SAMPLES = 10, 160


class SimpleModel(torch.nn.Module):
    """A few linear layers and their loss, as in DeepSpeed's own tests."""

    def __init__(self, hidden_dim: int, layers: int = 2) -> None:
        super().__init__()
        self.linears = torch.nn.ModuleList([torch.nn.Linear(hidden_dim, hidden_dim) for _ in range(layers)])
        self.cross_entropy_loss = torch.nn.CrossEntropyLoss()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for linear in self.linears:
            x = linear(x)
        loss: Tensor = self.cross_entropy_loss(x, y)
        return loss


def dataset() -> torch.utils.data.TensorDataset:
    """Random vectors; the class is the index of the largest element."""
    x = torch.from_numpy(numpy.random.default_rng(0).standard_normal((SAMPLES, HIDDEN), dtype="float32"))
    return torch.utils.data.TensorDataset(x, x.argmax(1))


def main() -> tuple[list[float], int, dict[str, Tensor]]:
    """Train; return this replica's losses, the number of steps skipped by overflows in fp16, and the weights."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1, help="as launchers pass it")
    parser.add_argument("--epochs", type=int, default=2)
    parser = deepspeed.add_config_arguments(parser)
    cmd_args = parser.parse_args()

    torch.manual_seed(0)
    model = SimpleModel(HIDDEN)
    params = [p for p in model.parameters() if p.requires_grad]
    model_engine, _, data_loader, _ = deepspeed.initialize(
        args=cmd_args, model=model, model_parameters=params, training_data=dataset()
    )
    assert data_loader is not None
    losses = []
    for epoch in range(cmd_args.epochs):
        for batch in data_loader:
            x, y = batch[0].to(model_engine.device), batch[1].to(model_engine.device)
            # forward() method
            loss = model_engine(x, y)
            # runs backpropagation
            model_engine.backward(loss)
            # weight update
            model_engine.step()
            losses.append(loss.item())
        if model_engine.grid.rank == 0:
            print(f"epoch {epoch}: step {model_engine.global_steps}, loss {losses[-1]:.4f}")
    return losses, model_engine.skipped_steps, model_engine.module_state_dict()


if __name__ == "__main__":
    main()
