"""One random composition: its model, how a grid trains it, and how one process of plain PyTorch does.

A case is a dict of JSON values; absent keys have the values of ``DEFAULT``. ``tests/laws/fuzz.py`` draws cases.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import linecache
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule, TiedLayerSpec
from triax.base.nest import map_tensors
from triax.grid import Topology
from triax.grid.assemble import Shard, assemble_ranks
from triax.models.gpt import GPTConfig, GPTLoss, gpt_layers
from triax.models.llama import LlamaConfig, llama_layers
from triax.plugins.gradient_compression import PowerSGD, TopK
from triax.zero import ShardedOptimizer, gathered

from support.paths import ROOT
from support.torch_layers import FAMILIES, FUNCTIONS, LONGEST, TOKENS, WIDTH, Head, Table, mean_of, summed

Case = dict[str, Any]

DEFAULT: Case = {
    "engine": "pipeline",  # module: the engine of plain modules; optimizer: ShardedOptimizer in a plain loop
    "grid": [1, 1, 1],
    "layers": [["linear"]],  # [family], [family, key of a tie], or [family, "built", number of the object]
    "model": None,  # gpt or llama, in place of layers; a dict of its options
    "inputs": "float",  # or tuple, dict, ids
    "loss": "mean",  # or summed
    "ragged": False,  # microbatches of different lengths
    "micro": 1,
    "accumulation": 1,
    "steps": 1,
    "optimizer": "SGD",
    "clip": 0.0,
    "schedule": "gpipe",
    "chunks": 1,
    "slices": 1,  # of each sequence of a model
    "partition": "uniform",
    "meta": False,  # built on the meta device
    "precision": "fp64",  # fp32, bf16, fp16, autocast
    "config": {},  # further keys of the configuration, sections by name
    "compression": None,  # of the plain loop
    "then": None,  # grid, schedule, chunks, stage of a second job, which goes on from a checkpoint of the first
    "generate": False,
    "seed": 0,
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05},
    "momentum": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
    "AdamW": {"lr": 0.01, "eps": 1e-3},
    "Adam": {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1},
    "RMSprop": {"lr": 0.01, "eps": 1e-3},
    "Adagrad": {"lr": 0.05, "eps": 1e-3},
    "NAdam": {"lr": 0.01, "eps": 1e-3},
}
VOCABULARY = 37
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def full(case: Case) -> Case:
    """Return the case with all its keys."""
    unknown = case.keys() - DEFAULT.keys()
    if unknown:
        raise ValueError(f"a case has no key {sorted(unknown)[0]!r}; its keys are {', '.join(DEFAULT)}")
    return {**DEFAULT, **case}


def optimizer_of(case: Case) -> tuple[str, dict[str, Any]]:
    name = case["optimizer"]
    return "SGD" if name == "momentum" else name, OPTIMIZERS[name]


# ----------------------------------------------------------------------------------------------------------- model


def entries(case: Case) -> list[Any]:
    """Return the list of layers of a ``PipelineModule``."""
    built: dict[int, nn.Module] = {}
    found: list[Any] = []
    for number, (family, *tie) in enumerate(case["layers"]):
        if family in FUNCTIONS:
            found.append(FUNCTIONS[family])
        elif not tie:
            found.append(LayerSpec(FAMILIES[family]))
        elif tie[0] == "built":
            if tie[1] not in built:
                torch.manual_seed(1000 * case["seed"] + number)
                made = FAMILIES[family]()
                built[tie[1]] = made if case["precision"] != "fp64" else made.double()
            found.append(built[tie[1]])
        else:
            cls: Any = {"table": Table, "head": Head}.get(family, FAMILIES[family])
            found.append(TiedLayerSpec(tie[0], cls))
    return found


def pipeline_module(case: Case, grid: Grid) -> PipelineModule:
    """Return the model as a list of layers."""
    common: dict[str, Any] = {
        "grid": grid,
        "seed": case["seed"],
        "dtype": torch.float64 if case["precision"] == "fp64" else torch.float32,
        "chunks": case["chunks"],
        "partition": case["partition"],
        "device": "meta" if case["meta"] else None,
    }
    if case["model"] is None:
        loss: Any = mean_of if case["loss"] == "mean" else summed
        return PipelineModule(entries(case), loss_fn=loss, **common)
    options = dict(case["model"])
    family, sequence_parallel = options.pop("family"), options.pop("sequence_parallel", False)
    sizes = (VOCABULARY, LONGEST, 16, options.pop("layers", 2), options.pop("heads", 4))
    if family == "gpt":
        layers = gpt_layers(GPTConfig(*sizes, **options), sequence_parallel=sequence_parallel)
    else:
        config = LlamaConfig(*sizes, head_dim=4, intermediate_size=21, **options)
        layers = llama_layers(config, sequence_parallel=sequence_parallel)
    return PipelineModule(layers, loss_fn=GPTLoss(grid, vocab_size=VOCABULARY), **common)


class Chain(nn.Module):
    """Plain module of a case's layers."""

    def __init__(self, case: Case, grid: Grid) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.order: list[Any] = []
        tied: dict[Any, int] = {}
        shared: dict[str, Any] = {}
        for number, (family, *tie) in enumerate(case["layers"]):
            if family in FUNCTIONS:
                self.order.append(FUNCTIONS[family])
                continue
            key = (family, *tie) if tie else number
            if key not in tied:
                torch.manual_seed(1000 * case["seed"] + number)
                layer = FAMILIES[family](grid=grid) if family == "sharded" else FAMILIES[family]()
                if case["precision"] == "fp64":
                    layer = layer.double()
                if family in ("table", "head") and tie:
                    layer.weight = shared.setdefault(tie[0], layer.weight)
                tied[key] = len(self.layers)
                self.layers.append(layer)
            self.order.append(tied[key])

    def forward(self, value: Any) -> Any:
        for each in self.order:
            value = self.layers[each](value) if isinstance(each, int) else each(value)
        return value


# ------------------------------------------------------------------------------------------------------------ data


def microbatch(case: Case, step: int, index: int) -> tuple[Any, Tensor]:
    """Return inputs and labels of one microbatch of the global batch."""
    generator = torch.Generator().manual_seed(10_000 * case["seed"] + 100 * step + index)
    rows = case["micro"]
    if case["model"] is not None:
        text = torch.randint(VOCABULARY, (rows, LONGEST + 1), generator=generator)
        labels = text[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
        labels[0, 0] = text[0, 1]
        return text[:, :-1], labels
    length = 3 + int(torch.randint(4, (1,), generator=generator)) if case["ragged"] else 4
    dtype = torch.float64 if case["precision"] == "fp64" else torch.float32
    x, y = torch.randn(2, rows, length, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    y[0, 0, 0] = 0.5  # at least one label that ``summed`` counts
    ids = torch.randint(TOKENS, (rows, length), generator=generator)
    kinds = {"float": x, "tuple": (x, x * 2, ids), "dict": {"y": x * 2, "x": x}, "ids": ids}
    return kinds[case["inputs"]], y


def batches(case: Case, grid: Grid, first: int, last: int) -> Iterator[tuple[Any, Tensor]]:
    """Yield this replica's microbatches of the steps from ``first`` on."""
    for step in range(first, last):
        for index in range(case["accumulation"]):
            yield microbatch(case, step, grid.data.rank * case["accumulation"] + index)


# ------------------------------------------------------------------------------------------------------- on a grid


class CaseError(Exception):
    """An error of one rank, as JSON: see ``describe``."""


def describe(error: BaseException) -> dict[str, Any]:
    """Return kind, text and place of an error, and whether triax raised it in words of its own."""
    root = error
    while root.__cause__ is not None and " failed at " in str(root):  # a rank's name and op around another error
        root = root.__cause__
    frame = root.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    file, line = ("", 0) if frame is None else (frame.tb_frame.f_code.co_filename, frame.tb_lineno)
    ours = Path(file).is_relative_to(ROOT) and not Path(file).is_relative_to(ROOT / "tests")
    raised = linecache.getline(file, line).strip().startswith("raise ") or _raises(file, line)
    plain = isinstance(root, (ValueError, TypeError, RuntimeError, NotImplementedError))
    return {
        "type": type(root).__name__,
        "text": str(error)[:1500],
        "root": str(root)[:600],
        "at": f"{Path(file).name}:{line}",
        "clear": bool(ours and raised and plain and len(str(root)) > 15),
        "follows": ", because rank " in str(error) or "stopped at" in str(error),
    }


def _raises(file: str, line: int) -> bool:
    """Return True if a statement ``raise`` of several lines ends or contains this line."""
    return any(linecache.getline(file, number).strip().startswith("raise ") for number in range(max(line - 4, 1), line))


def on_rank(case: Case, first: int, last: int, load: str = "", save: str = "", scratch: str = "") -> dict[str, Any]:
    """Train the steps from ``first`` to ``last`` of a case on this rank; what it saw."""
    logging.getLogger("triax").setLevel(logging.CRITICAL)
    case = full(case)
    try:
        pipe, data, tensor = case["grid"]
        grid = Grid(pipe, data, tensor, timeout=25)
        run = {"pipeline": _pipeline, "module": _module, "optimizer": _optimizer}[case["engine"]]
        with contextlib.redirect_stdout(io.StringIO()):
            return run(case, grid, first, last, load, save, scratch)
    except Exception as error:
        raise CaseError(json.dumps(describe(error))) from error


def configuration(case: Case, scratch: str) -> dict[str, Any]:
    """Return the configuration of a case."""
    name, params = optimizer_of(case)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": case["micro"],
        "gradient_accumulation_steps": case["accumulation"],
        "optimizer": {"type": name, "params": params},
        "gradient_clipping": case["clip"],
        "seed": 11,
    }
    if case["engine"] == "pipeline":
        config["pipeline"] = {"schedule": case["schedule"]}
    if case["precision"] in HALF:
        config[case["precision"]] = {"enabled": True}
    if case["precision"] == "fp16":
        config["fp16"]["initial_scale_power"] = 6
    if case["precision"] == "autocast":
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    if name == "Adam":
        config["optimizer"]["params"] = {**params, "adam_w_mode": False}  # DeepSpeed's Adam is AdamW otherwise
    more = json.loads(json.dumps(case["config"]).replace("SCRATCH", scratch))
    for key, value in more.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) and key in config else value
    return config


def _pipeline(case: Case, grid: Grid, first: int, last: int, load: str, save: str, scratch: str) -> dict[str, Any]:
    model = pipeline_module(case, grid)
    schedule = None
    if case["slices"] > 1:
        sizes = (grid.pipe.size, case["accumulation"], case["chunks"])
        schedule = triax.make_schedule(case["schedule"], *sizes, slices=case["slices"])
    engine, *_ = triax.initialize(model=model, config=configuration(case, scratch), schedule=schedule)
    if load:
        engine.load_checkpoint(load)
    found = Found(engine)
    source = batches(case, grid, first, last)
    for _ in range(first, last):
        loss = engine.train_batch(source).item()
        found.step(engine, loss)
    if save and not engine.save_checkpoint(save):
        raise AssertionError("the checkpoint was not written")
    if problem := engine.wait_for_checkpoint():
        raise AssertionError(problem)
    if case["generate"]:
        inference = triax.init_inference(engine, max_batch=2)
        prompts = [[1, 2, 3], [4], [5, 6]]
        found.generated = [
            inference.generate(prompts, 4, temperature=0), inference.generate(prompts, [3, 4, 2], seed=3, top_k=5)
        ]  # fmt: skip
    return found.result(grid)


def _module(case: Case, grid: Grid, first: int, last: int, load: str, save: str, scratch: str) -> dict[str, Any]:
    model = Chain(case, grid)
    engine, *_ = triax.initialize(model=model, config=configuration(case, scratch), grid=grid)
    if load:
        engine.load_checkpoint(load)
    found = Found(engine)
    source = batches(case, grid, first, last)
    for _ in range(first, last):
        total = 0.0
        for _ in range(case["accumulation"]):
            x, y = next(source)
            loss = mean_of(engine(x), y)
            total += loss.item() / case["accumulation"]
            engine.backward(loss)
            engine.step()
        losses = torch.tensor(total, dtype=torch.float64)
        grid.data.all_reduce(losses)
        found.step(engine, losses.item() / grid.data.size)
    if save and not engine.save_checkpoint(save):
        raise AssertionError("the checkpoint was not written")
    if problem := engine.wait_for_checkpoint():
        raise AssertionError(problem)
    return found.result(grid)


def _optimizer(case: Case, grid: Grid, first: int, last: int, load: str, save: str, scratch: str) -> dict[str, Any]:
    model = Chain(case, grid)
    name, params = optimizer_of(case)
    options = dict(case["config"])
    kind = case["compression"]
    compression: Any = kind
    if isinstance(kind, dict):
        words = dict(kind)
        compression = {"topk": TopK, "powersgd": PowerSGD}[words.pop("type")](**words)
    optimizer = ShardedOptimizer(
        getattr(torch.optim, name),
        model.parameters(),
        grid,
        module=model,
        backward_passes_per_step=case["accumulation"],
        compression=compression,
        weight_dtype=HALF.get(case["precision"]),
        **options,
        **params,
    )
    names = {p: n for n, p in model.named_parameters()}

    def weights() -> dict[str, Tensor]:
        with gathered(model):
            return {n: p.detach().clone() for n, p in model.named_parameters()}

    steps = []
    start = weights()
    source = batches(case, grid, first, last)
    for _ in range(first, last):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(case["accumulation"]):
            x, y = next(source)
            if case["precision"] in HALF:
                x = map_tensors(partial(_cast, dtype=HALF[case["precision"]]), x)
            loss = mean_of(model(x), y) / case["accumulation"]
            total += loss.item()
            loss.backward()
        norm = optimizer.clip_grad_norm_(case["clip"] or float("inf")).item()
        gradients = {names[p]: g.clone() for p, g in optimizer.gradients()}
        optimizer.step()
        losses = torch.tensor(total, dtype=torch.float64)
        grid.data.all_reduce(losses)
        steps.append((losses.item() / grid.data.size, norm, gradients, weights()))
    held = {"": digest(steps[-1][3])} if steps else {}
    mine = {"initial": start, "steps": steps} if grid.rank == 0 else {}
    return {"digests": held, "tensor": grid.tensor.rank, "generated": None, "skipped": 0, **mine}


class Found:
    """Record of an engine on one rank: its own parts of whole tensors, which ``whole`` puts together."""

    def __init__(self, engine: Any) -> None:
        self.steps: list[Any] = []
        self.generated: Any = None
        self.skipped = 0
        self.digests: dict[str, str] = {}
        self.first = engine.grid.data.is_first
        self.initial = self._held(engine, "weights")

    def _held(self, engine: Any, what: str) -> dict[str, Shard]:
        parts = engine.shards(what)
        if what == "weights":
            self.digests = {name: digest({"": part}) for name, (_, part) in parts.items()}
        return {name: (layout, part.clone()) for name, (layout, part) in parts.items()} if self.first else {}

    def step(self, engine: Any, loss: float) -> None:
        norm = engine.get_global_grad_norm()
        self.steps.append((loss, norm, self._held(engine, "gradients"), self._held(engine, "weights")))
        self.skipped = engine.skipped_steps

    def result(self, grid: Grid) -> dict[str, Any]:
        rest = {"digests": self.digests, "tensor": grid.tensor.rank, "generated": self.generated}
        return {**rest, "skipped": self.skipped, "initial": self.initial, "steps": self.steps, "shards": True}


def whole(sizes: list[int], ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the tensors of all ranks together, in what rank 0 found."""
    if "shards" not in ranks[0]:
        return ranks
    topology = Topology(**dict(zip(("pipe", "data", "tensor"), sizes, strict=True)))
    for rank in ranks:
        rank["losses"] = [step[:2] for step in rank["steps"]]
    first = ranks[0]
    steps = [
        (*step[:2], *(assemble_ranks(topology, [rank["steps"][number][part] for rank in ranks]) for part in (2, 3)))
        for number, step in enumerate(first["steps"])
    ]
    return [
        {**first, "initial": assemble_ranks(topology, [rank["initial"] for rank in ranks]), "steps": steps},
        *({**rank, "initial": {}, "steps": []} for rank in ranks[1:]),
    ]


def digest(tensors: dict[str, Tensor]) -> str:
    """Return a hash of the bytes of tensors."""
    found = hashlib.sha1()
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode())
        found.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


# ---------------------------------------------------------------------------------------------- on one, in PyTorch


def plainly(case: Case) -> dict[str, Any]:
    """Train a case in one process: plain autograd and torch's optimizer over the whole batch."""
    case = full(case)
    alone = {**case, "grid": [1, 1, 1], "chunks": 1, "meta": False, "partition": "uniform"}
    grid = Grid()
    model: Any
    if case["engine"] == "pipeline":
        model = pipeline_module(alone, grid)
        named = {p.layout.name: p.parameter for p in model.local_parameters()}
        loss_fn: Callable[[Any, Any], Any] = model.loss_fn
    else:
        model = Chain(alone, grid)
        named = dict(model.named_parameters())
        loss_fn = mean_of
    trained = {name: p for name, p in named.items() if p.requires_grad}
    cls, params = optimizer_of(case)
    optimizer = getattr(torch.optim, cls)(trained.values(), **params)
    initial = {name: p.detach().clone() for name, p in named.items()}
    steps = []
    count = case["accumulation"] * case["grid"][1]
    for step in range(case["steps"]):
        optimizer.zero_grad()
        terms = []
        for index in range(count):
            x, y = microbatch(case, step, index)
            found = loss_fn(model(x), y)
            terms.append(found if isinstance(found, tuple) else (found, 1))
        loss = sum(term for term, _ in terms) / sum(float(weight) for _, weight in terms)
        loss.backward()
        there = [p for p in trained.values() if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(there, case["clip"] or float("inf")).item()
        gradients = {n: torch.zeros_like(p) if p.grad is None else _dense(p.grad) for n, p in trained.items()}
        optimizer.step()
        steps.append((loss.item(), norm, gradients, {name: p.detach().clone() for name, p in named.items()}))
    return {"initial": initial, "steps": steps, "generated": None, "skipped": 0}


def _dense(gradient: Tensor) -> Tensor:
    return (gradient.to_dense() if gradient.is_sparse else gradient).clone()


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
