"""A GPT as a list of layers, sharded by hand, on a grid of pipe x data x tensor ranks.

    python examples/gpt_3d.py                                  # one process
    python examples/gpt_3d.py --pipe 2 --data 2 --tensor 2     # starts eight
    torchrun --nproc-per-node 2 examples/gpt_3d.py --pipe 2    # torchrun starts two
    python examples/gpt_3d.py --pipe 2 --resume                # continues, on any grid

It learns to add. 58+67=521 stands for 58 + 67 = 125: the last digit comes first, as
carries go. The losses are equal on every grid, with every --schedule ("triax schedule"
names them) and every --zero stage (0 to 3), and, from the same weights, in
gpt_plain.py, which is the same in plain PyTorch.
Comments: B rows, T tokens of a row, D width, H heads, d width of a head, V vocabulary,
t tensor ranks.
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
from triax.tensor_parallel import gather_logits

SHAPE = triax.GPTConfig(12, 8, 64, 2, 4)  # V, T, D, blocks, H


class Positions(nn.Module):
    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(length, width))

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        return x + self.weight[: x.shape[1]]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, grid: triax.Grid) -> None:
        super().__init__()  # LayerSpec passes the grid
        self.d = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        column = partial(triax.ColumnParallelLinear, grid=grid)
        row = partial(triax.RowParallelLinear, grid=grid)
        self.qkv = column(width, 3 * width, parts=[width] * 3, unit=self.d)
        self.out = row(width, width, unit=self.d)
        self.up, self.down = column(width, 4 * width), row(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        qkv = self.qkv(self.norm1(x))  # (B, T, 3 D / t): q, k and v, in whole heads
        q, k, v = rearrange(qkv, "B T (three H d) -> three B H T d", three=3, d=self.d)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H / t, T, d)
        x = x + self.out(rearrange(y, "B H T d -> B T (H d)"))  # (B, T, D), summed
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # (B, T, D)


def logits(table: triax.VocabParallelEmbedding, x: Tensor) -> Tensor:  # (B, T, D)
    return table.attend(x * x.shape[-1] ** -0.5)  # (B, T, V / t)


def layers(shape: triax.GPTConfig = SHAPE) -> list[triax.LayerSpec]:
    """Return the model as a list. Each rank builds the layers of its own stages."""
    width, embedding = shape.hidden_size, triax.VocabParallelEmbedding
    table = partial(triax.TiedLayerSpec, "table", embedding, shape.vocab_size, width)
    block = triax.LayerSpec(Block, width, shape.num_attention_heads)
    return [
        table(),
        triax.LayerSpec(Positions, shape.max_position_embeddings, width),
        *[block] * shape.num_hidden_layers,
        triax.LayerSpec(nn.LayerNorm, width),
        table(forward_fn=logits),  # the embedding's weight again, on the last stage
    ]


def sums() -> tuple[Tensor, Tensor]:
    """Return all sums of two numbers below 100 as rows: 9500 to learn, 500 held out."""
    order = torch.randperm(10_000, generator=torch.Generator().manual_seed(0))
    a, b = torch.unravel_index(order, (100, 100))
    plus, equals, s = torch.full_like(a, 10), torch.full_like(a, 11), a + b
    left = [a // 10, a % 10, plus, b // 10, b % 10, equals]
    rows = torch.stack([*left, s % 10, s // 10 % 10, s // 100], dim=1)
    return rows[500:], rows[:500]  # (9500, 9), (500, 9)


def microbatch(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs and labels. Only the result's digits have labels that count."""
    return rows[:, :-1], rows[:, 1:].where(torch.arange(8) >= 5, -100)  # each (B, T)


def results(engine: triax.PipelineEngine, rows: Tensor) -> Tensor:
    """Return the three digits of each result, each the likeliest after those before."""
    data = map(microbatch, [rows])
    _, outputs = engine.eval_batch(data, return_logits=True, num_micro_batches=1)
    return outputs[0][:, 5:].argmax(-1).cpu()  # (B, 3)


def main(o: argparse.Namespace) -> None:  # on each rank
    grid = triax.Grid(pipe=o.pipe, data=o.data, tensor=o.tensor)
    model = triax.PipelineModule(
        layers(),
        grid=grid,
        loss_fn=triax.NextTokenLoss(grid, SHAPE.vocab_size),
        output_fn=partial(gather_logits, grid=grid, vocab_size=SHAPE.vocab_size),
        seed=o.seed,
        dtype=getattr(torch, o.dtype),
    )

    def rate(step: int) -> float:
        return min(1, (step + 1) / 50, 2 - 2 * step / o.steps)

    trace = triax.Trace(step=min(20, o.steps))
    engine = triax.Engine(
        model,
        batch=triax.Batch(size=o.batch, microbatch=o.microbatch),
        optimizer=partial(torch.optim.Adam, lr=5e-3, betas=(0.9, 0.99)),
        schedule=o.schedule,
        zero=o.zero,
        clip=1.0,
        lr_scheduler=partial(LambdaLR, lr_lambda=rate),
        monitor=triax.Monitoring(json=o.folder, trace=trace),
    )
    if o.resume and engine.load_checkpoint(o.folder)[0] is None:  # of any grid
        raise SystemExit(f"{o.folder} has no checkpoint to resume from")
    torch.set_num_threads(1)  # of so small a model
    learned, held_out = sums()
    begin, late = time.monotonic(), torch.zeros(1, device=grid.device)
    while engine.global_steps < o.steps and not late:
        places = torch.arange(o.batch) + engine.global_steps * o.batch
        rows = learned[places % len(learned)]  # (batch, 9)
        mine = rows.chunk(grid.data.size)[grid.data.rank]  # (batch / replicas, 9)
        loss = engine.train_batch(map(microbatch, mine.split(o.microbatch)))
        if (step := engine.global_steps) % 50 == 0 or step == o.steps:
            engine.save_checkpoint(o.folder)
            whole = (results(engine, held_out) == held_out[:, 6:]).all(dim=1)
            right = whole.double().mean().item()
            late.fill_(step < o.steps and time.monotonic() - begin > 60 * o.minutes)
            grid.world.broadcast(late)  # the clock of rank 0 decides
            if grid.rank == 0:
                engine.monitor.log(accuracy=right)
                said = f"loss {loss:.4f}  {right:6.1%} of held-out sums right"
                print(f"step {step:4} of {o.steps}  {said}", flush=True)
    if late and grid.rank == 0:
        place = f"at step {engine.global_steps} of {o.steps}"
        print(f"stopped after {o.minutes} minutes, {place}: --resume continues")
    shown = results(engine, held_out[:5]).tolist()
    if grid.rank == 0:
        for (a, b, _, c, d, *_), digits in zip(held_out.tolist(), shown, strict=False):
            total = sum(digit * 10**place for place, digit in enumerate(digits))
            word = "right" if total == 10 * (a + c) + b + d else "wrong"
            print(f"{a}{b} + {c}{d} = {total:3}  {word}")
        report = triax.draw_run(o.folder)
        print(f"the report, beside pictures of a step and of the losses: {report}")


if __name__ == "__main__":
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    numbers = {"pipe": 1, "data": 1, "tensor": 1, "zero": 1, "seed": 0}
    sizes = {"steps": 700, "batch": 128, "microbatch": 16, "minutes": 3.0}
    names = {"schedule": "1f1b", "dtype": "float32", "folder": "runs/gpt_3d"}
    for name, value in (numbers | sizes | names).items():
        kind = type(value)
        parser.add_argument(f"--{name}", type=kind, default=value, help=f"({value})")
    parser.add_argument("--resume", action="store_true", help="continue the last run")
    options = parser.parse_args()
    ranks = options.pipe * options.data * options.tensor
    if ranks == 1 or "RANK" in os.environ:  # torchrun has started this rank
        main(options)
    else:
        raise SystemExit(triax.launch(main, options, ranks=ranks))
