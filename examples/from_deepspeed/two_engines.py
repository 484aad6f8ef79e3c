"""Several engines and one loss, as in DeepSpeed's documentation of the training API.

python examples/from_deepspeed/two_engines.py
torchrun --nproc-per-node 4 examples/from_deepspeed/two_engines.py
"""

from __future__ import annotations

import argparse

import numpy
import torch
from torch import Tensor, nn

import triax.compat.deepspeed as deepspeed  # was: import deepspeed

WIDTH, SAMPLES = 8, 64
CONFIGS = (
    {
        "train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_optimization": {"stage": 1},
    },
    {
        "train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 2},
    },
)


def dataset() -> torch.utils.data.TensorDataset:
    """Random vectors, and a function of them as targets."""
    x = torch.from_numpy(numpy.random.default_rng(0).standard_normal((SAMPLES, WIDTH)))
    return torch.utils.data.TensorDataset(x, x.square().sum(1, keepdim=True).log())


def nets() -> list[nn.Module]:
    """Return two models with different activations."""
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), activation, nn.Linear(2 * WIDTH, 1)).double()
        for activation in (nn.Tanh(), nn.GELU())
    ]


def main() -> list[dict[str, Tensor]]:
    """Train; return the weights of both models."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    steps = parser.parse_args().steps
    engines = [
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        for model, config in zip(nets(), CONFIGS, strict=True)
    ]
    batches = iter(deepspeed.RepeatingLoader(engines[0].deepspeed_io(dataset())))
    while engines[0].global_steps < steps:
        x, y = (tensor.to(engines[0].device) for tensor in next(batches))
        losses = [(engine(x) - y).square().mean() for engine in engines]
        loss = losses[0] + losses[1]
        loss.backward()  # one pass, through both
        for engine in engines:
            engine.step()  # each at its own boundary
    if engines[0].grid.rank == 0:
        print(f"{steps} steps, the last loss {loss.item():.4f}")
    return [engine.module_state_dict() for engine in engines]


if __name__ == "__main__":
    main()
