"""``triax machine measure FILE``: times of this machine's kernels, links and of Python, as a machine file, in a minute.

One process times products, attention, norms and other kernels by size, AdamW, and the engine's Python (tiny models, in
which nothing else takes time). Then ranks, 2, 4 and 8 of them or one for each GPU, time collectives and messages, and
what becomes of a layer's speed while as many processes compute at once. A layer of a middle size is timed as a check.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...engine.pipeline_engine import PipelineEngine
from ...grid import Grid
from ...grid.comm.axis import Axis
from ...grid.devices import accelerators, default_accelerator, gpu_sizes, wait_for
from ...grid.environment import given_threads
from ...grid.launcher.launch import cores as own_cores
from ...grid.launcher.launch import launch
from ...grid.randomness.random import Dropout
from ...models.config import GPTConfig, LlamaConfig, MixtralConfig, TransformerConfig
from ...models.gpt import gpt_layers
from ...models.layers import NextTokenLoss
from ...models.llama import llama_layers
from ...models.mixtral import mixtral_layers
from ...models.rope import Rope
from ...options.batch import Batch
from ...options.zero import Zero
from ...pipe.module import PipelineModule
from ...tensor_parallel.norm import LayerNorm, RMSNorm
from ...zero.gradient_norm import square
from .cost import CostModel, StepTime
from .machine import Machine, NetworkLink
from .measured import MeasuredTimes, Row, Table
from .parallel_layout import ParallelLayout
from .work import Work

Say = Callable[[str], None]
Timed = tuple[Callable[[], Any], tuple[Tensor, ...]]  # a function, and its inputs
Kernel = Callable[[int], Timed]  # of a number of elements

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
_RANKS = 8  # the most that are started on one machine
_ROUNDS = 5  # of the steps of small models
_MODELS: dict[str, tuple[Any, Any]] = {
    "GPTBlock": (GPTConfig, gpt_layers),
    "LlamaBlock": (LlamaConfig, llama_layers),
    "MixtralBlock": (MixtralConfig, mixtral_layers),  # of 4 experts; each token goes to 2 of them
}


def measure(name: str, say: Say = print) -> Machine:
    """Time this machine, and return its description.

    Args:
        name: name of the description.
        say: called with a line about each part.

    Raises:
        RuntimeError: the ranks that time the links failed.
    """
    on_gpu = accelerators() > 0
    device = default_accelerator() or torch.device("cpu")
    before, threads = torch.get_num_threads(), given_threads() or 1
    torch.set_num_threads(threads)
    try:
        alone = _Alone(device, say)
        found = alone.run(("bf16", "fp32") if on_gpu else ("fp32", "bf16"))
    finally:
        torch.set_num_threads(before)
    cores = 0 if on_gpu else max(1, own_cores() // threads)
    say("links and crowding: starting ranks")
    together = _together(min(_RANKS, accelerators() or 1) if on_gpu else _RANKS, cores, threads)
    measured = MeasuredTimes(
        cores=cores,
        threads=threads,
        crowding=together["crowding"],
        in_step=dict.fromkeys(_MODELS, 1.0),
        collectives=together["collectives"],
        calls=_calls(threads, found["measured"]["layers"], together) if together["collectives"] else {},
        **found["measured"],
    )
    described = _description(name, device, measured, found["peak"], found["bandwidth"], alone.host_bandwidth())
    torch.set_num_threads(threads)
    try:
        measured = replace(measured, in_step=alone.in_step(described))
        described = replace(described, measured=measured)
        alone.check(described)
    finally:
        torch.set_num_threads(before)
    return described


def _description(
    name: str, device: torch.device, measured: MeasuredTimes, peak: Mapping[str, float], bandwidth: float, host: float
) -> Machine:
    """Return the machine of measured figures."""
    threads, cores = measured.threads, measured.cores
    if cores:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        memory, units = whole // cores, 1
        processor = f"{platform.processor() or platform.machine()}, {cores * threads} cores, {threads} threads a rank"
        of = f"the machine's {whole / 2**30:.1f} GiB, divided by {cores} ranks that compute at once"
    else:
        processor, memory, units = gpu_sizes(device)
        of = "of the device"
    messages = measured.collectives.get("message", ((2.0, 0.0, 1e-5), (2.0, host, 1.0)))
    latency, each = messages[0][2], (messages[-1][2] - messages[0][2]) / (messages[-1][1] - messages[0][1])
    alone = "" if measured.collectives else "assumed, as there is one GPU: as fast as to the host; "
    measurement = f"measured by triax machine measure: {processor}, torch {torch.__version__}"
    shared = "the transport computes on the ranks' cores, and hides behind nothing" if cores else "NCCL's own streams"
    sources = {
        "peak": f"the fastest product, {measurement}",
        "memory": of,
        "bandwidth": f"copy of 64 MiB, {measurement}",
        "links": f"{alone}messages between two ranks of this machine, {measurement}",
        "measured": f"{measurement}, PyTorch's collectives as triax calls them",
        "overlap_gradients": shared,
        "overlap_weights": "triax gathers weights between the steps",
    }
    return Machine(
        name=name,
        peak=peak,
        memory=memory,
        bandwidth=bandwidth,
        links=(NetworkLink("node", 0, 1 / max(each, 1e-13), latency, 1.0),),
        units=units,
        tile=(1, 1),
        product_efficiency=1.0,
        bandwidth_efficiency=1.0,
        attention_efficiency=1.0,
        fused_attention=True,
        overlap_gradients=not cores,
        overlap_weights=False,
        host_bandwidth=host,
        host_memory_bandwidth=bandwidth if cores else host,
        measured=measured,
        sources=sources,
    )


# ------------------------------------------------------------------------------------------------- one process


class _Alone:
    """Measurements of one process on a device."""

    def __init__(self, device: torch.device, say: Say) -> None:
        self.device, self.say = device, say
        self.small = device.type == "cpu"
        self._pools: dict[tuple[torch.dtype, bool], Tensor] = {}

    def run(self, dtypes: tuple[str, ...]) -> dict[str, Any]:
        """Return the figures of ``MeasuredTimes``, the peaks and the bandwidth."""
        peak, products, attention, kernels = {}, {}, {}, {}
        for name in dtypes:
            self.say(f"{name}: products, attention, kernels")
            dtype = _DTYPES[name]
            speeds = self.products(dtype)
            peak[name] = max(max(row[3:]) for row in speeds)
            products[name] = tuple((*row[:3], *(each / peak[name] for each in row[3:])) for row in speeds)
            attention[name] = tuple(
                (*row[:2], *(each / peak[name] for each in row[2:])) for row in self.attention(dtype)
            )
            sizes = (2**20, 2**24, 2**27) if not self.small else (2**14, 2**17, 2**20)[: 3 if name == "fp32" else 2]
            kernels[name] = {kernel: self.kernel(make, sizes) for kernel, make in self.kernels(dtype).items()}
        self.say("AdamW and the engine's Python")
        optimizer = self.optimizer()
        layers, microbatch, step = self.python()
        measured = {
            "products": products,
            "attention": attention,
            "kernels": kernels,
            "optimizer": optimizer,
            "layers": layers,
            "microbatch": microbatch,
            "step": step,
        }
        copied = torch.empty(2**24, device=self.device)
        to = torch.empty_like(copied)
        bandwidth = 2 * 4 * copied.numel() / self.seconds(lambda: to.copy_(copied))
        return {"measured": measured, "peak": peak, "bandwidth": bandwidth}

    def seconds(self, run: Callable[[], object], least: float = 0.01, repeats: int = 5) -> float:
        """Return the median of the seconds of a call, over repeats of at least ``least`` seconds each."""
        run()
        count, taken = 1, self._timed(run, 1)
        while taken < least:
            count = max(count + 1, min(1000 * count, round(1.2 * count * least / max(taken, 1e-6))))
            taken = self._timed(run, count)
        return median([taken, *(self._timed(run, count) for _ in range(repeats - 1))]) / count

    def _timed(self, run: Callable[[], object], count: int) -> float:
        wait_for(self.device)
        begin = time.perf_counter()
        for _ in range(count):
            run()
        wait_for(self.device)
        return time.perf_counter() - begin

    def _random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.float32).to(dtype)

    def _cold(self, dtype: torch.dtype, *shape: int, written: bool = False) -> list[Tensor]:
        """Return tensors of a shape which together are larger than the caches, as weights and saved inputs are."""
        key = dtype, written
        if key not in self._pools:
            self._pools[key] = self._random(2**24 if self.small else 2**28, dtype=dtype)
        size = math.prod(shape)
        return [part.view(shape) for part in self._pools[key].split(size)[:256] if part.numel() == size]

    def products(self, dtype: torch.dtype) -> list[Row]:
        """Return (m, k, n, operations a second forward, of the gradient of the inputs, of that of the weights).

        Weights, and in the last the inputs, come from memory: between two uses a step reads all others.
        """
        lengths: tuple[int, ...] = (64, 256, 1024) if self.small else (512, 2048, 8192)
        widths: tuple[int, ...] = (64, 256, 1024) if self.small else (1024, 4096, 16384)
        if self.small and dtype != torch.float32:  # a CPU may be slow
            lengths, widths = (64, 512), (64, 512)
        found = []
        tiny = self._random(1, 8, dtype=dtype), self._random(8, 8, dtype=dtype)
        call = self.seconds(cycled([partial(F.linear, *tiny)]))  # counts among Python's figures
        for m, k, n in itertools.product(lengths, widths, widths):
            x, dy = self._random(m, k, dtype=dtype), self._random(m, n, dtype=dtype)
            inputs, turns = self._cold(dtype, m, k), itertools.cycle(self._cold(dtype, n, k, written=True))
            runs = (
                cycled([partial(F.linear, x, w) for w in self._cold(dtype, n, k)]),
                cycled([partial(torch.matmul, dy, w) for w in self._cold(dtype, n, k)]),
                cycled([partial(torch.mm, dy.t(), saved, out=grad) for saved, grad in zip(inputs, turns)]),
            )
            times = [self.seconds(run, 0.005, 3) for run in runs]
            found.append((float(m), float(k), float(n), *(2 * m * k * n / max(t - call, t / 2) for t in times)))
        return found

    def attention(self, dtype: torch.dtype) -> list[Row]:
        """Return (sequence, width of a head, operations a second forward, backward), of causal attention."""
        found: list[Row] = []
        lengths = (1024, 4096) if not self.small else (64, 256, 1024) if dtype == torch.float32 else (128, 512)
        for length, width in itertools.product(lengths, (32, 64, 128)):
            heads = max(1, 2048 // length) * (1 if self.small else 16)
            q, k, v = (self._random(1, heads, length, width, dtype=dtype).requires_grad_() for _ in range(3))
            attend = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
            forward, backward = self._both(attend, (q, k, v))
            operations = 2 * heads * length * (length / 2) * 2 * width
            found.append((float(length), float(width), operations / forward, operations / backward))
        return found

    def _both(self, run: Callable[[], Any], inputs: tuple[Tensor, ...]) -> tuple[float, float]:
        """Return the seconds of a function's forward pass and of its backward pass, 0 if it has no inputs."""
        forward = self.seconds(run, 0.005, 3)
        if not inputs:
            return forward, 0.0
        found = run()
        outputs = [found] if isinstance(found, Tensor) else [each for each in found if each.requires_grad]
        dys = [torch.randn_like(each) for each in outputs]
        return forward, self.seconds(lambda: torch.autograd.grad(outputs, inputs, dys, retain_graph=True), 0.005, 3)

    def kernel(self, make: Kernel, sizes: tuple[int, ...]) -> Table:
        """Return (elements, seconds an element forward, backward), without the launch."""
        launch = self._both(*make(64))
        rows = []
        for elements in sizes:
            times = self._both(*make(elements))
            each = ((mine - its) / elements for mine, its in zip(times, launch, strict=True))
            rows.append((float(elements), *(max(value, 1e-14) for value in each)))
        return tuple(rows)

    def kernels(self, dtype: torch.dtype) -> dict[str, Kernel]:
        """Return the kernels: number of elements -> a function, and the tensors of which it gives gradients."""
        grid, width = Grid(), 64

        def random(*shape: int) -> Tensor:
            return self._random(*shape, dtype=dtype).requires_grad_()

        def rows(elements: int, last: int = width) -> Tensor:
            return random(elements // last, last)

        def trained(function: Callable[..., Any], *inputs: Tensor) -> Timed:
            return partial(function, *inputs), inputs

        def forward(function: Callable[..., Any], x: Tensor) -> Timed:
            return partial(function, x.detach()), ()

        def norm(kind: Any, elements: int) -> Timed:
            last = min(256, elements)
            module, x = kind(last, grid=grid).to(self.device, dtype), rows(elements, last)
            return partial(module, x), (x, *module.parameters())

        def gated(x: Tensor) -> Tensor:
            gate, up = x.chunk(2, -1)
            return F.silu(gate) * up

        def accumulate(elements: int) -> Timed:
            x = rows(elements).detach().view(-1)
            return cycled([partial(torch.Tensor.add_, y, x) for y in self._cold(dtype, elements, written=True)]), ()

        def loss(elements: int) -> Timed:
            vocabulary = min(1024, elements)
            x, function = rows(elements, vocabulary), NextTokenLoss(grid, vocabulary)
            labels = torch.randint(vocabulary, (x.shape[0],), device=self.device)
            return lambda: function(x[None], labels[None]), (x,)

        def embedding(elements: int) -> Timed:
            table, count = random(1024, 256), max(1, elements // 256)
            return partial(F.embedding, torch.randint(1024, (count,), device=self.device), table), (table,)

        return {
            "layer_norm": partial(norm, LayerNorm),
            "rms_norm": partial(norm, RMSNorm),
            "gelu": lambda n: trained(partial(F.gelu, approximate="tanh"), rows(n)),
            "gated": lambda n: trained(gated, rows(2 * n, 2 * width)),
            "add": lambda n: trained(partial(torch.add, rows(n)), rows(n)),
            "accumulate": accumulate,
            "square": lambda n: forward(square, rows(n).view(-1)),
            "bias": lambda n: forward(partial(torch.sum, dim=0), rows(n)),
            "by_heads": lambda n: trained(lambda x: x.transpose(1, 2).contiguous(), random(1, max(1, n // 256), 4, 64)),
            "rotated": lambda n: trained(Rope(64), *(random(1, 4, max(1, n // 512), 64) for _ in range(2))),
            "dropout": lambda n: trained(Dropout(0.1), random(1, n // width, width)),
            "loss": loss,
            "embedding": embedding,
        }

    def optimizer(self) -> Table:
        """Return (parameters, seconds a parameter of a gradient's division by the batch and of AdamW)."""
        rows = []
        for count in (2**16, 2**20, 2**23) if self.small else (2**22, 2**26):
            weight = torch.nn.Parameter(self._random(count))
            weight.grad = self._random(count)
            adam = torch.optim.AdamW([weight], fused=True)

            def step(adam: Any = adam, gradient: Tensor = weight.grad) -> None:
                gradient.mul_(0.5)
                adam.step()

            rows.append((float(count), self.seconds(step) / count))
        return tuple(rows)

    def python(self) -> tuple[dict[str, Row], Row, float]:
        """Return Python's seconds of layers, of a microbatch and of a step, from steps of tiny models on one process.

        With L layers and M microbatches, an op takes L x layer + microbatch, and a step M x ops + step.
        """
        layers: dict[str, Row] = {}
        for name in _MODELS:
            steps: list[float] = []
            ops: dict[int, Row] = {}
            for count in (2, 8):
                engine, batch = small_engine(name, self.device, count)
                ops[count] = op_seconds(engine, batch)
                engine.record_timeline = False
                steps.append(self.seconds(partial(engine.train_batch, itertools.repeat(batch)), 0.02))
            layers[name] = tuple((a - b) / 6 for a, b in zip(ops[8], ops[2], strict=True))
            microbatch = tuple(a - 2 * b for a, b in zip(ops[2], layers[name], strict=True))
            step = steps[0] - 4 * sum(ops[2])
        return layers, tuple(max(each, 1e-7) for each in microbatch), max(step, 1e-7)

    def in_step(self, machine: Machine) -> dict[str, float]:
        """Return by how much kernels are slower in steps of small models than in loops of their own, for each block."""
        width, sequence = (256, 128) if self.small else (2048, 2048)
        found: dict[str, list[float]] = {name: [] for name in _MODELS}
        for name in [*_MODELS] * _ROUNDS:  # in turn, because a machine's speed changes within seconds
            taken, step = self._step(name, machine, width, sequence)
            kernels = sum(step.kinds[kind] for kind in ("products", "attention", "elementwise"))
            found[name].append(max(1.0, (taken - step.seconds + kernels) / kernels))
        return {name: median(each) for name, each in found.items()}

    def check(self, machine: Machine) -> None:
        """Say how far off the description is in steps of models of another size, which it was not made from."""
        width, sequence = (384, 64) if self.small else (3072, 1024)
        for name in _MODELS:
            taken, step = self._step(name, machine, width, sequence)
            self.say(
                f"check: 4 layers of a {name}, width {width}, 4 microbatches of {sequence} tokens take "
                f"{1e3 * taken:.1f} ms, by the description {1e3 * step.seconds:.1f} ms"
            )

    def _step(self, name: str, machine: Machine, width: int, sequence: int) -> tuple[float, StepTime]:
        """Return the seconds of a step of 4 layers and 4 microbatches in fp32, and the time by a description."""
        engine, batch = small_engine(name, self.device, 4, width, sequence)
        taken = self.seconds(partial(engine.train_batch, itertools.repeat(batch)), 0.05, 5)
        work = Work(_config(name, 4, width, sequence), machine, 4, sequence, "fp32")
        return taken, CostModel(work).step(ParallelLayout())

    def host_bandwidth(self) -> float:
        """Return the bytes a second between the device and the CPU's memory."""
        there = torch.empty(2**24, pin_memory=not self.small)
        here = torch.empty(2**24, device=self.device)
        return 4 * there.numel() / self.seconds(lambda: here.copy_(there))


def cycled(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """Return a function that calls the next of several functions each time."""
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def small_engine(
    name: str, device: torch.device, layers: int, width: int = 16, sequence: int = 8, zero: Any = 0, **axes: Any
) -> tuple[PipelineEngine, tuple[Tensor, Tensor]]:
    """Return an engine of a model with 4 microbatches, and one of them; by default nothing but Python takes time.

    Args:
        name: class of its blocks.
        device: device of the microbatch.
        layers, width, sequence: number of blocks, hidden width, and tokens of the microbatch.
        zero: stage of ZeRO.
        axes: sizes of the grid's axes.
    """
    config = _config(name, layers, width, sequence)
    grid = Grid(**axes)
    model = PipelineModule(_MODELS[name][1](config), grid=grid, loss_fn=NextTokenLoss(grid, config.vocab_size))
    engine = PipelineEngine(
        model,
        optimizer=partial(torch.optim.AdamW, lr=1e-4),
        batch=Batch(microbatch=1, microbatches=4),
        zero=Zero(stage=zero),
    )
    ids = torch.zeros((1, sequence), dtype=torch.long, device=device)
    return engine, (ids, ids)


def _config(name: str, layers: int, width: int, sequence: int) -> TransformerConfig:
    heads = max(2, width // 64)
    sizes = {"vocab_size": width, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    if name == "LlamaBlock":
        sizes |= {"intermediate_size": 4 * width, "num_key_value_heads": heads}
    if name == "MixtralBlock":
        sizes |= {"intermediate_size": 2 * width, "num_key_value_heads": heads}
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2}
    found: TransformerConfig = _MODELS[name][0](max_position_embeddings=sequence, **sizes)
    return found


def op_seconds(engine: PipelineEngine, batch: tuple[Tensor, Tensor]) -> Row:
    """Return the medians of the seconds of forward and of backward ops, over 10 steps behind 3 others."""
    engine.record_timeline = True
    found: dict[str, list[float]] = {"F": [], "B": []}
    for number in range(13):
        engine.train_batch(itertools.repeat(batch))
        assert engine.timeline is not None
        for span in engine.timeline.rows[0] if number > 2 else ():
            found[span.op.kind].append(span.end - span.start)
    return tuple(median(each) for each in found.values())


# -------------------------------------------------------------------------------------------------- several ranks


def _together(ranks: int, cores: int, threads: int) -> dict[str, Any]:
    """Return ``crowding`` and ``collectives`` of ``MeasuredTimes``."""
    if ranks == 1:
        return {"crowding": ((1.0, 1.0),), "collectives": {}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "links.json"
        if code := launch(time_links, cores, str(path), ranks=ranks, threads=threads):
            raise RuntimeError(f"the {ranks} ranks that time the links failed with code {code}.")
        found = json.loads(path.read_text())
    return {
        "crowding": tuple(map(tuple, found["crowding"])),
        "collectives": {name: tuple(map(tuple, rows)) for name, rows in found["collectives"].items()},
    }


# A block's collectives on 2 ranks: axis -> the block, sizes of its engine, and how often it calls which collective.
_CALLS: dict[str, tuple[str, dict[str, int], dict[str, int]]] = {
    "tensor": ("GPTBlock", {"tensor": 2}, {"all_reduce": 4}),
    "data": ("GPTBlock", {"zero": 3}, {"all_gather": 2, "reduce_scatter": 1}),
    "context": ("GPTBlock", {"context": 2}, {"reduce_scatter": 3}),  # the ring's messages are counted as one
    "expert": ("MixtralBlock", {"data": 2, "expert": 2}, {"all_to_all": 4}),
}


def _calls(threads: int, layers: Mapping[str, Row], together: Mapping[str, Any]) -> dict[str, float]:
    """Return ``calls`` of ``MeasuredTimes``: time of a tiny block's passes beyond its Python and its collectives."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "blocks.json"
        if code := launch(time_blocks, str(path), ranks=2, threads=threads):
            raise RuntimeError(f"the 2 ranks that time the engine's collectives failed with code {code}.")
        found = json.loads(path.read_text())
    once = {name: rows[0][2] for name, rows in together["collectives"].items()}
    calls = {}
    for axis, (block, _, counts) in _CALLS.items():
        counted = sum(layers[block]) + sum(count * once[name] for name, count in counts.items())
        calls[axis] = max(0.0, found[axis] - counted) / sum(counts.values())
    return calls


def time_blocks(path: str) -> None:
    """Time passes of a tiny block on 2 ranks of each axis, under ZeRO stage 3 on that of data. On each rank."""
    found = {}
    grid = Grid(timeout=120)
    for axis, (block, sizes, _) in _CALLS.items():
        few, many = (sum(op_seconds(*small_engine(block, grid.device, count, **sizes))) for count in (2, 8))
        found[axis] = (many - few) / 6
    if grid.rank == 0:
        Path(path).write_text(json.dumps(found))


def time_links(cores: int, path: str) -> None:
    """Time collectives of 2, 4, ... ranks, and how a layer's speed falls while as many processes compute. On each rank.

    Args:
        cores: processes that run at full speed at once; 0: each rank has a processor of its own.
        path: file that rank 0 writes.
    """
    world = Grid(timeout=120)
    sizes = [size for size in (2, 4, 8) if size <= world.size]
    found: dict[str, Any] = {"crowding": _crowding(world, cores) if cores else [(1.0, 1.0)], "collectives": {}}
    for size in sizes:
        grid = Grid(pipe=world.size // size, data=size, timeout=120)
        share = min(1.0, cores / size) if cores else 1.0  # of a core, while all ranks of the collective compute
        for name, run in _collectives(grid.data).items():
            if name == "message" and size > 2:
                continue
            for elements in (2**7, 2**13, 2**17, 2**20) if cores else (2**7, 2**17, 2**22, 2**26):
                seconds = _in_group(world, grid, run, torch.ones(elements, device=grid.device))
                row = (float(size), 4.0 * elements * _SENT[name](size), seconds * share)
                found["collectives"].setdefault(name, []).append(row)
    if world.rank == 0:
        Path(path).write_text(json.dumps(found))


_SENT: dict[str, Callable[[int], float]] = {  # bytes that a rank sends, over those of the tensor
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "message": lambda n: 1.0,
}


def _collectives(axis: Axis) -> dict[str, Callable[[Tensor], object]]:
    """Return functions of a tensor, of which the ranks of an axis call one at the same time."""

    def all_gather(tensor: Tensor) -> None:
        axis.all_gather(torch.empty_like(tensor), tensor.view(axis.size, -1)[axis.rank]).wait()

    def reduce_scatter(tensor: Tensor) -> None:
        axis.reduce_scatter(torch.empty(tensor.numel() // axis.size, device=tensor.device), tensor).wait()

    def all_to_all(tensor: Tensor) -> None:
        rows = tensor.view(axis.size, -1)
        axis.all_to_all(torch.empty_like(rows), rows).wait()

    def message(tensor: Tensor) -> None:  # there and back
        if axis.rank == 0:
            axis.send(tensor, 1, 7).wait()
            axis.receive(tensor, 1, 7).wait()
        else:
            axis.receive(tensor, 0, 7).wait()
            axis.send(tensor, 0, 7).wait()

    return {
        "all_reduce": lambda tensor: axis.all_reduce(tensor).wait(),
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_to_all": all_to_all,
        "message": message,
    }


def _in_group(world: Grid, grid: Grid, run: Callable[[Tensor], object], tensor: Tensor) -> float:
    """Return the seconds of a collective of the first group, while the other ranks wait; the same on every rank."""
    world.world.barrier()
    seconds = torch.zeros(1, dtype=torch.float64, device=grid.device)
    if grid.pipe.rank == 0:
        times = []
        count = 20 if tensor.numel() < 2**16 else 3
        for _ in range(6):
            grid.data.barrier()
            begin = time.perf_counter()
            for _ in range(count):
                run(tensor)
            wait_for(grid.device)
            times.append((time.perf_counter() - begin) / count)
        seconds += median(times[1:])
        grid.data.all_reduce(seconds, op="max")
    world.world.all_reduce(seconds, op="max")
    return float(seconds) / (2 if run.__name__ == "message" else 1)


def _crowding(world: Grid, cores: int) -> list[Row]:
    """Return (processes, their speed together over that of ``min(processes, cores)`` alone), of a layer's products."""
    x, w = torch.randn(256, 256), torch.randn(1024, 256)

    def work() -> None:
        y = F.linear(x, w)
        F.gelu(y, approximate="tanh")
        _ = y @ w, y.t() @ x

    rates = []
    sizes = sorted({1, cores, *(size for size in (2, 4, 8) if size <= world.size)})
    for size in (each for each in sizes if each <= world.size):
        best = []
        for _ in range(3):
            world.world.barrier()
            done = torch.zeros(1, dtype=torch.float64)
            if world.rank < size:
                begin, count = time.perf_counter(), 0
                while (now := time.perf_counter()) - begin < 0.4:
                    work()
                    count += 1
                done += count / (now - begin)
            world.world.all_reduce(done)
            best.append(float(done))
        rates.append((float(size), median(best)))
    return [(size, rate / rates[0][1] / min(size, cores)) for size, rate in rates]
