"""Speed on one GPU: a GPT in bf16 with fp32 masters, triax beside the bare PyTorch loop, FSDP2 and DeepSpeed.

    python benchmarks/device.py                               # 1.3 billion parameters
    python benchmarks/device.py --size 2.7b --microbatch 8 --only bare train_batch
    python benchmarks/device.py --compile                     # each block compiled, in every contender
    python benchmarks/device.py --overhead                    # microseconds of a step whose layers take next to none
    python benchmarks/device.py --device cpu --size smoke     # to see that it runs

Utilisation is model FLOPs (Narayanan et al. 2021, equation 3 without recomputation) over time, as a share of the rate
of the best plain bf16 matrix product of the same run. Before any of it all contenders have trained the same weights.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from measuring import in_turn
from rounds import Row, beside, load_deepspeed, parser, print_json, show, trained_alike
from stacks import Batch, Stack
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import triax

SIZES = {  # heads of 128 elements, which flash attention likes best
    "smoke": Stack(entries=2, width=32, microbatch=2, heads=2, length=16, vocabulary=64),
    "0.4b": Stack(entries=24, width=1024, microbatch=8, heads=8, length=2048, vocabulary=50304),
    "1.3b": Stack(entries=24, width=2048, microbatch=8, heads=16, length=2048, vocabulary=50304),
    "2.7b": Stack(entries=32, width=2560, microbatch=8, heads=20, length=2048, vocabulary=50304),
}
SMALL = Stack(entries=8, width=64, microbatch=1)  # of --overhead
PRODUCTS = (4096, 8192, 16384)
LR, CLIP = 1e-4, 1.0
CHECKED, TOLERANCE = 3, 2e-2  # steps, and how far weights in bf16 may be apart after them

Step = Callable[[], object]
Made = tuple[Step, Callable[[], dict[str, Tensor]]]  # a step, and the weights in fp32


@dataclass
class Job:
    """The model, its batch, and what all contenders do alike."""

    stack: Stack
    microbatches: int
    device: torch.device
    compiled: bool

    def model(self, compiled: bool | None = None) -> nn.Sequential:
        """The model in fp32 on the device, its blocks compiled if asked."""
        made = self.stack.whole().to(self.device)
        for entry in made if (self.compiled if compiled is None else compiled) else ():
            entry.compile()
        return made

    def batch(self) -> Batch:
        def there(tensor: Tensor) -> Tensor:
            return tensor.to(self.device, torch.bfloat16 if tensor.is_floating_point() else tensor.dtype)

        return [(there(x), there(y)) for x, y in self.stack.batch(self.microbatches)]

    def config(self, **zero: Any) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": self.stack.microbatch,
            "gradient_accumulation_steps": self.microbatches,
            "gradient_clipping": CLIP,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": LR}},
            "zero_optimization": zero,
        }

    def flops(self) -> float:
        """Model FLOPs of a step: 96 B s l h^2 (1 + s / 6h + V / 16lh), without recomputation three quarters of it."""
        stack = self.stack
        if not stack.heads:
            return 6.0 * stack.entries * stack.width**2 * stack.microbatch * self.microbatches
        layers, width, length = stack.entries, stack.width, stack.length
        extra = length / (6 * width) + stack.vocabulary / (16 * layers * width) * 4 / 3
        return 72.0 * stack.microbatch * self.microbatches * length * layers * width**2 * (1 + extra)


def bare(job: Job) -> Made:
    """Plain loop: bf16 weights, fp32 masters and gradients, clipping, fused AdamW."""
    model, batch = job.model(), job.batch()
    names = [name for name, _ in model.named_parameters()]
    masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    parameters: list[Tensor] = list(model.bfloat16().parameters())
    optimizer = torch.optim.AdamW(masters, lr=LR, fused=True)
    sums = [torch.zeros_like(master) for master in masters]
    for master, gradient in zip(masters, sums, strict=True):
        master.grad = gradient

    def step() -> None:
        torch._foreach_zero_(sums)
        for x, y in batch:
            (job.stack.loss(model(x), y) / len(batch)).backward()
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            torch._foreach_add_(sums, gradients)
            for parameter in parameters:
                parameter.grad = None
        nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)

    return step, lambda: dict(zip(names, masters, strict=True))


def triax_config(job: Job, stage: int) -> dict[str, Any]:
    """The configuration of triax's engines, which compile the layers themselves."""
    return {**job.config(stage=stage), "compile": job.compiled}


def train_batch(job: Job, stage: int) -> Made:
    """A ``PipelineModule`` of one stage."""
    grid = triax.Grid(device=job.device)
    model = triax.PipelineModule(list(job.model(compiled=False)), grid=grid, loss_fn=job.stack.loss)
    engine = triax.initialize(model=model, config=triax_config(job, stage))[0]
    batch = job.batch()
    return lambda: engine.train_batch(iter(batch)), lambda: {
        name.removeprefix("layers."): value for name, value in engine.gather().items()
    }


def module(job: Job, stage: int) -> Made:
    """A plain module, and DeepSpeed's loop."""
    model, grid = job.model(compiled=False), triax.Grid(device=job.device)
    engine = triax.initialize(model=model, config=triax_config(job, stage), grid=grid)[0]
    return _loop(engine, job), engine.gather


def fsdp2(job: Job) -> Made:
    """FSDP2 on one rank: fp32 shards, bf16 in forward and backward, fused AdamW."""
    model, batch = job.model(), job.batch()
    if not dist.is_initialized():
        backend = "nccl" if job.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(job.device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for entry in model:
        fully_shard(entry, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step() -> None:
        for x, y in batch:
            (job.stack.loss(model(x), y) / len(batch)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    def whole(tensor: Any) -> Tensor:
        found: Tensor = tensor.full_tensor()
        return found

    return step, lambda: {name: whole(parameter) for name, parameter in model.named_parameters()}


def deepspeed(job: Job, stage: int) -> Made:
    """DeepSpeed's engine of a plain module.

    Raises:
        NotRunning: it is not installed.
    """
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "WORLD_SIZE": "1"})
    os.environ.setdefault("LOCAL_RANK", "0")
    ds = load_deepspeed("nccl" if job.device.type == "cuda" else "gloo")
    made = job.model()
    config = {**job.config(stage=stage), "train_batch_size": job.stack.microbatch * job.microbatches}
    engine = ds.initialize(model=made, model_parameters=made.parameters(), config=config)[0]
    return _loop(engine, job), lambda: dict(engine.module.named_parameters())


def _loop(engine: Any, job: Job) -> Step:
    batch = job.batch()

    def step() -> None:
        for x, y in batch:
            engine.backward(job.stack.loss(engine(x), y))
            engine.step()

    return step


CONTENDERS: dict[str, Callable[[Job], Made]] = {
    "bare": bare,
    "triax train_batch, stage 0": lambda job: train_batch(job, 0),
    "triax train_batch, stage 1": lambda job: train_batch(job, 1),
    "triax train_batch, stage 3": lambda job: train_batch(job, 3),
    "triax plain module, stage 1": lambda job: module(job, 1),
    "FSDP2": fsdp2,
    "DeepSpeed, stage 1": lambda job: deepspeed(job, 1),
}


def main() -> None:
    options = parse()
    device = torch.device(options.device)
    stack = SMALL if options.overhead else SIZES[options.size]
    if options.microbatch:
        stack = replace(stack, microbatch=options.microbatch)
    job = Job(stack, options.microbatches, device, options.compile)
    rate = product_rate(device, options.products)
    rows = measure(job, options)
    if options.json:
        print_json(rows, device=name_of(device), product_flops=rate, flops=job.flops())
    else:
        show_device(rows, job, rate, options)


def parse() -> argparse.Namespace:
    arguments = parser(__doc__, ranks=False)
    arguments.add_argument("--size", choices=list(SIZES), default="1.3b", help="parameters of the model")
    arguments.add_argument("--microbatch", type=int, help="samples; by default the size's own")
    arguments.add_argument("--microbatches", type=int, default=1, help="of a step")
    arguments.add_argument("--device", default="cuda")
    arguments.add_argument("--compile", action="store_true", help="compile each block with torch.compile")
    arguments.add_argument("--overhead", action="store_true", help="a model that costs next to nothing")
    arguments.add_argument("--only", nargs="+", help="contenders whose name begins with, or holds, one of these")
    arguments.add_argument("--steps", type=int, default=5, help="of each contender in a round")
    arguments.add_argument("--products", type=int, nargs="+", help="sizes of the square products of the rate")
    return arguments.parse_args()


def product_rate(device: torch.device, sizes: list[int] | None) -> float:
    """The best rate of a bf16 matrix product on random values, in FLOP/s."""
    best = 0.0
    for size in sizes or (PRODUCTS if device.type == "cuda" else (256,)):
        a, b = torch.randn(2, size, size, device=device, dtype=torch.bfloat16)
        clocked(device, partial(torch.mm, a, b), 3)
        best = max(best, 2 * size**3 / clocked(device, partial(torch.mm, a, b), 10))
    return best


def clocked(device: torch.device, work: Callable[[], object], repeats: int) -> float:
    """Seconds that the device takes for a piece of work, the mean of several in a row."""
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize(device)
    return (time.perf_counter() - begin) / repeats


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def allocated(device: torch.device, peak: bool = False) -> int:
    """Bytes of tensors on a GPU, now or at their peak; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)


def measure(job: Job, options: argparse.Namespace) -> list[Row]:
    """Build every contender, compare what they learn, and time them in turn."""
    asked = ((name, partial(make, job)) for name, make in CONTENDERS.items())
    makers = (pair for pair in asked if not options.only or any(wanted in pair[0] for wanted in options.only))
    rows: list[Row] = []
    running: list[tuple[Row, Step]] = []
    before = allocated(job.device)
    for row, step in trained_alike(makers, CHECKED, rtol=TOLERANCE, atol=CHECKED * 2 * LR):
        rows.append(row)
        if row.problem:
            continue
        gc.collect()
        now = allocated(job.device)
        row.held = [now - before]
        if job.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(job.device)
        step()
        synchronize(job.device)
        row.peak = [allocated(job.device, peak=True) - now]
        before = allocated(job.device)
        running.append((row, step))
    for row, step in in_turn(running, options.rounds):
        step()
        row.times.append(clocked(job.device, step, options.steps))
    return rows


def show_device(rows: list[Row], job: Job, rate: float, options: argparse.Namespace) -> None:
    """Print a table."""
    parameters = sum(parameter.numel() for parameter in job.stack.build(1).parameters()) * job.stack.entries
    title = f"{parameters / 1e9:.2f} billion parameters in blocks, {job.microbatches} x {job.stack.microbatch} samples"
    title += f" of {job.stack.length} tokens, bf16{', compiled' if job.compiled else ''}; {name_of(job.device)}, "
    title += f"torch {torch.__version__}; plain product {rate / 1e12:.0f} TFLOP/s"
    unit, factor = ("us", 1e6) if options.overhead else ("ms", 1e3)
    first = next((row.times for row in rows if row.times), [])
    columns = {
        f"step, {unit}": lambda row: f"{row.step * factor:.1f}",
        "of bare": lambda row: beside(first, row.times),
        "TFLOP/s": lambda row: f"{job.flops() / row.step / 1e12:.1f}",
        "of product": lambda row: f"{job.flops() / row.step / rate:.3f}",
        "held, GiB": lambda row: f"{row.held[0] / 2**30:.1f}",
        "step, GiB": lambda row: f"{row.peak[0] / 2**30:.1f}",
    }
    show(title, rows, columns)


if __name__ == "__main__":
    main()
