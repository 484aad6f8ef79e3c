"""Attention of packed rows beside a mask of T x T numbers, and steps of balanced batches beside rows in their order.

    python benchmarks/documents.py                             # rows of 2,048 tokens, 2 replicas, 9 rounds
    python benchmarks/documents.py --length 1024 --rounds 3

Lengths of documents are lognormal. In the first table, one process computes attention and its gradients on 2 rows; in
the second, replicas train a Llama in fp32 on gloo, on equal documents in each step. Contenders take turns, and their
losses and gradients must be equal. Seconds of the first table are of the process's CPU.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from limits import ratios, spread
from measuring import in_turn
from rounds import on_ranks, parser
from torch import Tensor

import triax
from triax.base.tables import table, terminal
from triax.context import attention
from triax.data import TokenData, tokenize

HEADS, DIM, SIGMA = 8, 64, 1.0


def cut(length: int, documents: int, seed: int) -> Tensor:
    """Return the document numbers of a row: lognormal lengths that add up to ``length``."""
    shares = np.random.default_rng(seed).lognormal(0, SIGMA, documents).cumsum()
    ends = np.ceil(shares / shares[-1] * length).astype(np.int64)
    return torch.from_numpy(np.searchsorted(ends, np.arange(length), "right"))


def attended(length: int, documents: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of attention with gradients: by documents, and with a mask."""
    torch.set_num_threads(1)
    numbers = torch.stack([cut(length, documents, row) for row in range(2)])
    q, k, v, dout = (torch.randn(2, HEADS, length, DIM, requires_grad=name < 3) for name in range(4))
    grid = triax.Grid()

    def masked() -> Tensor:
        seen = (numbers[:, None, :, None] == numbers[:, None, None, :]).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(seen.shape).masked_fill_(~seen, -math.inf))

    def by_document() -> Tensor:
        return attention(q, k, v, grid=grid, documents=numbers)

    makers: list[tuple[str, Callable[[], Tensor]]] = [("mask of T x T", masked), ("by documents", by_document)]
    expected = [torch.autograd.grad(make(), (q, k, v), dout) for _, make in makers]
    torch.testing.assert_close(*expected, rtol=1e-4, atol=1e-5)
    found: dict[str, list[float]] = {}
    for name, make in in_turn(makers, rounds):
        begin = time.process_time()
        torch.autograd.grad(make(), (q, k, v), dout)
        found.setdefault(name, []).append(time.process_time() - begin)
    return found


def trained(folder: str, length: int, rounds: int, replicas: int) -> dict[str, list[float]]:
    """Train on this rank with rows in their order and balanced; return seconds of steps."""
    grid, sizes = triax.Grid(data=replicas), {"hidden_size": 128, "num_hidden_layers": 4}
    config = triax.LlamaConfig.preset("llama-tiny", **sizes, max_position_embeddings=length)
    engines: list[tuple[str, Any]] = []
    seconds: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    for name, balance in (("rows in order", False), ("balanced", True)):
        loss = triax.NextTokenLoss(grid, config.vocab_size)
        module = triax.PipelineModule(triax.llama_layers(config), grid=grid, loss_fn=loss, seed=1)
        batch = triax.Batch(size=4 * grid.data.size, microbatch=1, balance=balance)
        data, optimizer = TokenData(folder, length), triax.Optimizer("SGD", lr=0.01)
        engines.append((name, triax.Engine(module, training_data=data, optimizer=optimizer, batch=batch)))
    for name, engine in in_turn(engines, rounds + 1):
        grid.world.barrier()
        begin = time.perf_counter()
        losses.setdefault(name, []).append(engine.train_batch().item())
        grid.world.barrier()
        seconds.setdefault(name, []).append(time.perf_counter() - begin)
    torch.testing.assert_close(*(torch.tensor(values) for values in losses.values()), rtol=1e-4, atol=0)
    return {name: times[1:] for name, times in seconds.items()}


def write_documents(folder: Path, tokens: int, typical: int) -> str:
    """Write a folder of tokens whose documents have lognormal lengths, and return its path."""
    draw, left = np.random.default_rng(0), tokens
    with (folder / "text.jsonl").open("w") as lines:
        while left > 0:
            size = int(draw.lognormal(math.log(typical), 2 * SIGMA)) + 1
            lines.write(json.dumps({"text": "".join(map(chr, draw.integers(97, 123, size)))}) + "\n")
            left -= size
    return str(tokenize([folder / "text.jsonl"], "bytes", folder / "tokens").folder.path)


def main() -> None:
    """Print both tables."""
    options = parser(__doc__, ranks=False)
    options.add_argument("--length", type=int, default=2048, help="tokens of a row")
    options.add_argument("--replicas", type=int, default=2)
    given = options.parse_args()
    rows = {f"{count} documents": attended(given.length, count, given.rounds) for count in (4, 16, 64)}
    with tempfile.TemporaryDirectory() as place:
        tokens = 4 * given.replicas * (given.rounds + 2) * given.length
        folder = write_documents(Path(place), tokens, given.length // 16)
        first, *_ = on_ranks(trained, folder, given.length, given.rounds, given.replicas, ranks=given.replicas)
    if given.json:
        print(json.dumps({"attention": rows, "training": first}))
        return
    cells = [
        (name, *(f"{1000 * median(times):.1f}" for times in found.values()), spread(ratios(*[*found.values()][::-1])))
        for name, found in [*rows.items(), ("a step", first)]
    ]
    heads = ("", "mask of T x T, or rows in order, ms", "by documents, or balanced, ms", "ratio")
    terminal().print(table(heads, cells, f"rows of {given.length:,} tokens, {given.replicas} replicas"))


if __name__ == "__main__":
    main()
