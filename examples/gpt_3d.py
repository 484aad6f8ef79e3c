"""A GPT as a list of layers, sharded by hand, trained in three dimensions: pipe (stages) x data (replicas) x tensor.

    python examples/gpt_3d.py                                                      # one process
    python examples/gpt_3d.py --pipe 2 --data 2 --tensor 2                         # starts eight
    torchrun --nproc-per-node 8 examples/gpt_3d.py --pipe 2 --data 2 --tensor 2    # the same
    python examples/gpt_3d.py --pipe 2 --resume                # continues a run that was stopped, on another grid

It learns to add. 58+67=521 stands for 58 + 67 = 125: the last digit comes first, as carries go. The losses are equal on
every grid, with every --schedule ("triax schedule" names them) and every --zero stage (0 to 3), and, from the same
weights, in gpt_plain.py, which is the same in plain PyTorch.
Comments: B rows, T tokens of a row, D width, H heads, d width of a head, V vocabulary, t tensor ranks.
"""

import argparse
import os
import time
from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import triax

SHAPE = triax.GPTConfig(12, 8, 64, 2, 4)  # vocabulary V, length T, width D, blocks, heads H


class Positions(nn.Module):
    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(length, width))

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        return x + self.weight[: x.shape[1]]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, grid: triax.Grid) -> None:  # LayerSpec passes the grid
        super().__init__()
        self.d, self.norm1, self.norm2 = width // heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = triax.ColumnParallelLinear(width, 3 * width, grid=grid, parts=[width] * 3, unit=self.d)
        self.out = triax.RowParallelLinear(width, width, grid=grid, unit=self.d)
        self.up = triax.ColumnParallelLinear(width, 4 * width, grid=grid)
        self.down = triax.RowParallelLinear(4 * width, width, grid=grid)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        qkv = self.qkv(self.norm1(x))  # (B, T, 3 D / t): parts q, k and v, each in whole heads
        q, k, v = rearrange(qkv, "B T (three H d) -> three B H T d", three=3, d=self.d)  # each (B, H / t, T, d)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H / t, T, d)
        x = x + self.out(rearrange(y, "B H T d -> B T (H d)"))  # (B, T, D): summed over the tensor ranks
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # up: (B, T, 4 D / t), down: (B, T, D)


def logits(table: triax.VocabParallelEmbedding, x: Tensor) -> Tensor:  # (B, T, D)
    return table.attend(x * x.shape[-1] ** -0.5)  # (B, T, V / t)


def layers(shape: triax.GPTConfig = SHAPE) -> list[triax.LayerSpec]:
    """Return the model as a list. Each rank builds the layers of its own stages."""
    table = partial(triax.TiedLayerSpec, "table", triax.VocabParallelEmbedding, shape.vocab_size, shape.hidden_size)
    return [
        table(),
        triax.LayerSpec(Positions, shape.max_position_embeddings, shape.hidden_size),
        *[triax.LayerSpec(Block, shape.hidden_size, shape.num_attention_heads)] * shape.num_hidden_layers,
        triax.LayerSpec(nn.LayerNorm, shape.hidden_size),
        table(forward_fn=logits),  # the embedding's weight again, on the last stage
    ]


def sums() -> tuple[Tensor, Tensor]:
    """Return all sums of two numbers below 100 as rows of tokens: those to learn, and 500 that are held out."""
    a, b = torch.unravel_index(torch.randperm(10_000, generator=torch.Generator().manual_seed(0)), (100, 100))
    plus, equals, s = torch.full_like(a, 10), torch.full_like(a, 11), a + b
    rows = torch.stack([a // 10, a % 10, plus, b // 10, b % 10, equals, s % 10, s // 10 % 10, s // 100], dim=1)
    return rows[500:], rows[:500]  # (9500, 9), (500, 9)


def microbatch(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs and labels. Only the digits of the result have labels that count."""
    return rows[:, :-1], rows[:, 1:].where(torch.arange(8) >= 5, -100)  # (B, T), (B, T)


def results(engine: triax.PipelineEngine, rows: Tensor) -> Tensor:
    """Return the three digits of each result, each the likeliest one behind the tokens before it."""
    _, outputs = engine.eval_batch(map(microbatch, [rows]), return_logits=True, num_micro_batches=1)
    return outputs[0][:, 5:].argmax(-1).cpu()  # (B, 3)


def main(o: argparse.Namespace) -> None:  # on each rank
    torch.set_num_threads(1)  # of so small a model
    grid = triax.Grid(pipe=o.pipe, data=o.data, tensor=o.tensor)
    loss_fn = triax.NextTokenLoss(grid, SHAPE.vocab_size)
    output_fn = partial(triax.tensor_parallel.gather_logits, grid=grid, vocab_size=SHAPE.vocab_size)
    dtype = getattr(torch, o.dtype)
    model = triax.PipelineModule(layers(), grid=grid, loss_fn=loss_fn, output_fn=output_fn, seed=o.seed, dtype=dtype)
    engine = triax.Engine(
        model,
        batch=triax.Batch(size=o.batch, microbatch=o.microbatch),
        optimizer=partial(torch.optim.AdamW, lr=5e-3, betas=(0.9, 0.99), weight_decay=0.0),
        schedule=o.schedule,
        zero=o.zero,
        clip=1.0,
        lr_scheduler=partial(LambdaLR, lr_lambda=lambda step: min(1, (step + 1) / 50, 2 - 2 * step / o.steps)),
        monitor=triax.Monitoring(json=o.folder, trace=triax.Trace(step=min(20, o.steps))),
    )
    if o.resume and engine.load_checkpoint(o.folder)[0] is None:  # of any grid
        raise SystemExit(f"{o.folder} has no checkpoint to resume from")
    learned, held_out = sums()
    begin, late = time.monotonic(), torch.zeros(1, device=grid.device)
    while engine.global_steps < o.steps and not late:
        rows = learned[torch.arange(o.batch).add(engine.global_steps * o.batch) % len(learned)]  # (batch, 9)
        mine = rows.chunk(grid.data.size)[grid.data.rank]  # (batch / replicas, 9)
        loss = engine.train_batch(map(microbatch, mine.split(o.microbatch)))  # equal on every rank
        if (step := engine.global_steps) % 50 == 0 or step == o.steps:
            engine.save_checkpoint(o.folder)
            right = (results(engine, held_out) == held_out[:, 6:]).all(dim=1).double().mean().item()
            late.fill_(step < o.steps and time.monotonic() - begin > 60 * o.minutes)
            grid.world.broadcast(late)  # the clock of rank 0 decides
            if grid.rank == 0:
                engine.monitor.log(accuracy=right)
                print(f"step {step:4} of {o.steps}  loss {loss:.4f}  {right:6.1%} of held-out sums right", flush=True)
    if late and grid.rank == 0:
        print(f"stopped after {o.minutes} minutes, at step {engine.global_steps} of {o.steps}: --resume continues")
    shown = results(engine, held_out[:5]).tolist()
    if grid.rank == 0:
        for (a, b, _, c, d, *_), (ones, tens, hundreds) in zip(held_out.tolist(), shown, strict=False):
            total = 100 * hundreds + 10 * tens + ones
            print(f"{a}{b} + {c}{d} = {total:3}  {'right' if total == 10 * (a + c) + b + d else 'wrong'}")
        print(f"the report, beside pictures of a step and of the losses: {triax.draw_run(o.folder)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"pipe": 1, "data": 1, "tensor": 1, "zero": 1, "steps": 700, "batch": 128, "microbatch": 16, "seed": 0}
    others = {"minutes": 3.0, "schedule": "1f1b", "dtype": "float32", "folder": "runs/gpt_3d"}
    for name, default in (numbers | others).items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"({default})")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in the folder")
    options = parser.parse_args()
    ranks = options.pipe * options.data * options.tensor
    if ranks == 1 or "RANK" in os.environ:  # torchrun has started this rank
        main(options)
    else:
        raise SystemExit(triax.launch(main, options, ranks=ranks))
