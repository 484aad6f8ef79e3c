"""Train the model on any grid, which does not change its losses.

python train.py                                              # one process
triax run --nproc 4 train.py --pipe 2 --tensor 2             # 2 stages x 2 shards
"""

import argparse

import torch
from own_model import batches, build

import triax

parser = argparse.ArgumentParser()
parser.add_argument("--pipe", type=int, default=1, help="stages of layers")
parser.add_argument("--tensor", type=int, default=1, help="shards of each layer")
parser.add_argument("--steps", type=int, default=10, help="optimizer steps")
options = parser.parse_args()

grid = triax.Grid(pipe=options.pipe, tensor=options.tensor)
engine = triax.Engine(
    build(grid),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    batch=triax.Batch(size=8, microbatch=2),
)
data = batches()
for step in range(options.steps):
    loss = engine.train_batch(iter(data[step % len(data)]))
    if grid.rank == 0:
        print(f"step {step + 1} loss {float(loss):.6f}", flush=True)
