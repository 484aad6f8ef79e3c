"""Horovod's MNIST example on one process, in plain PyTorch."""

from __future__ import annotations

import runpy
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data.distributed import DistributedSampler

from support.paths import EXAMPLES

EXAMPLE = EXAMPLES / "from_horovod" / "mnist.py"


def plain_example(ranks: int, samples: int, batch: int, epochs: int, lr: float, clip: float) -> tuple[Any, Any]:
    """Reference run: one process with the batches of all ranks at once."""
    space = runpy.run_path(str(EXAMPLE))
    data, held_out = space["digits"](samples, 1, torch.float64), space["digits"](samples // 4, 2, torch.float64)
    torch.manual_seed(42)
    model = space["Net"]().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr * ranks, momentum=0.5)
    samplers: list[DistributedSampler[int]] = [DistributedSampler(data, ranks, rank) for rank in range(ranks)]
    results = []
    for epoch in range(1, epochs + 1):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        shares = [list(sampler) for sampler in samplers]
        for start in range(0, len(shares[0]), batch):
            chosen = [index for share in shares for index in share[start : start + batch]]
            x, y = (torch.stack(part) for part in zip(*(data[index] for index in chosen), strict=True))
            optimizer.zero_grad()
            functional.nll_loss(model(x), y).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        with torch.no_grad():
            output = model(held_out.tensors[0])
            loss = functional.nll_loss(output, held_out.tensors[1]).item()
            results.append((loss, output.argmax(1).eq(held_out.tensors[1]).double().mean().item()))
    return model.state_dict(), results
