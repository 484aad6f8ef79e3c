"""Measurement of each layer of a list: seconds of its passes, bytes, and messages, from which a cut is searched.

Each layer is built alone, on every rank, and freed before the next one is built, so that no rank needs the whole model.
Equal specs with equal inputs are measured once. Ranks measure at the same time, as they will run, and so tell which of
them are slower.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ...base.dtypes import dtype_of, short_name
from ...base.errors import ConfigError
from ...base.formulas import BYTES, model_states
from ...base.nest import map_tensors, tensors_of
from ...base.option_error import refusal
from ...grid import Grid
from ...grid.loss_terms import NamedLosses, is_named, named_losses
from ...options.engine import EngineOptions
from ...pipe.fields import MicrobatchItem, item_of
from ...pipe.module import PipelineModule
from ...pipe.program.layer_costs import LayerCost, LayerCosts
from ...pipe.schema import flatten
from ...pipe.spec import LayerSpec, TiedLayerSpec
from ...pipe.ties import typename
from ..monitor.profiler.memory_meter import MemoryMeter
from .optimizer import state_tensors
from .recomputation import recompute_layer

SAME_SPEED = 0.9  # of the slowest rank over the fastest: nearer ones differ by chance
_SECONDS = ("forward", "inputs", "weights")
_TAG = 1


def measure_layers(
    layers: Sequence[Any],
    microbatch: Any,
    *,
    grid: Grid | None = None,
    loss_fn: Any = None,
    options: EngineOptions | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    repeats: int = 5,
) -> LayerCosts:
    """Measure the costs of layers on this machine, for ``PipelineModule(partition="time", costs=...)``. Collective.

    Every rank of the grid calls it with the same arguments, and all get the same costs.

    Args:
        layers, grid, loss_fn, dtype, seed: as for ``PipelineModule``.
        microbatch: ``(inputs, labels)``, or a dict, as the engine's data has them; on every rank.
        options: the engine's options; precision, ZeRO, optimizer and recomputation change the costs.
        repeats: number of timed passes; the least time counts, because other programs only add to it.

    Raises:
        OptionError: an option with which layers cannot be measured one by one.
        ConfigError: the grid has no devices, as in a dry run.
    """
    grid, options = grid or Grid(), options or EngineOptions()
    if grid.device.type == "meta":
        raise ConfigError("the layers of a dry run take no time: read their costs from a file, or give boundaries")
    if options.lora is not None:
        raise refusal("<lora> changes what a layer computes, and layers are measured without it: give boundaries")
    alone, listed = _without_stages(grid), list(layers)
    names = {name for entry in listed if isinstance(entry, LayerSpec) for name in entry.takes}
    item = item_of(map_tensors(lambda tensor: tensor.to(grid.device), microbatch), names)
    wanted = dtype_of(options.precision.weights) or dtype
    x = map_tensors(partial(_cast, wanted), item.inputs)
    known: dict[Any, tuple[LayerCost, Any]] = {}
    costs = []
    for index, entry in enumerate(listed):
        last = index == len(listed) - 1
        key = (_identity(entry), flatten(x)[1].encode(), index > 0, last)
        if key not in known:
            module = PipelineModule([entry], alone, loss_fn if last else None, "uniform", seed=seed, dtype=wanted)
            if options.recompute.asked:
                recompute_layer(module, options.recompute)
            states = sum(_states(parameter, options, grid) for parameter in module.parameters())
            cost, output = _measure(module, x, item, index > 0, last, options, repeats)
            known[key] = replace(cost, states=states), output
            del module
        cost, x = known[key]
        costs.append(replace(cost, name=typename(entry)))
    return _agreed(grid, costs)


def _without_stages(grid: Grid) -> Grid:
    """Return a grid whose pipe ranks are replicas. Collective."""
    if grid.pipe.size == 1:
        return grid
    sizes: dict[str, Any] = {name: grid.axis(name).size for name in ("tensor", "context", "expert")}
    return Grid(data=grid.pipe.size * grid.data.size, device=grid.device, timeout=grid.timeout, **sizes)


def _cast(dtype: torch.dtype | None, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _identity(entry: Any) -> Any:
    """Return a value that is equal for specs of equal layers."""
    if not isinstance(entry, LayerSpec):
        return id(entry)
    return entry.cls, repr(entry), id(entry.forward_fn) if isinstance(entry, TiedLayerSpec) else None


def _measure(
    module: PipelineModule, x: Any, item: MicrobatchItem, inner: bool, last: bool, options: EngineOptions, repeats: int
) -> tuple[LayerCost, Any]:
    """Measure a model of one layer, and return its costs and its output, without a graph."""
    grid, device = module.grid, module.grid.device
    own = {name: item.field(name) for name in module.taken(0)}
    lower = dtype_of(options.precision.autocast)

    def forward(leaves: Any) -> tuple[Any, list[Tensor]]:
        module.dropout_state.begin()
        losses: list[NamedLosses] = []
        with torch.autocast(device.type, dtype=lower, enabled=lower is not None):
            with_head = last and module.loss_takes_head
            y = module.run_stage(0, leaves, own, losses, without_head=with_head)
            value = module.loss(y, item.labels, with_head) if last else y
        value = named_losses(value, "loss_fn returned", "return") if is_named(value) else value
        return y, [tensor for tensor in tensors_of((value, losses)) if tensor.requires_grad]

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_(inner and tensor.is_floating_point())

    def marked() -> float:
        grid.synchronize()
        return time.perf_counter()

    meter = MemoryMeter(lambda: 0)
    with meter.counting():
        y, _ = forward(map_tensors(leaf, x))
    kept, output = meter.saved, map_tensors(Tensor.detach, y)
    del y
    least = [math.inf] * 3  # of the forward pass, the input gradient and the whole backward pass
    grid.world.barrier()
    for _ in range(repeats + 1):
        leaves = map_tensors(leaf, x)
        wanted = [tensor for tensor in tensors_of(leaves) if tensor.requires_grad]
        start = marked()
        _, roots = forward(leaves)
        passed = marked()
        inputs = 0.0
        if wanted and roots:
            torch.autograd.grad(roots, wanted, [torch.ones_like(root) for root in roots], allow_unused=True)
            inputs = marked() - passed
            _, roots = forward(leaves)
        begin = marked()
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        taken = passed - start, inputs, marked() - begin
        least = [min(pair) for pair in zip(least, taken, strict=True)]
    first, second, both = least
    sent = sum(tensor.nbytes for tensor in tensors_of(output))
    cost = LayerCost(first, min(second, both), max(0.0, both - second), kept=float(kept), output=float(sent))
    return cost, output


def _states(parameter: nn.Parameter, options: EngineOptions, grid: Grid) -> float:
    """Return the bytes of a parameter, its gradient and the optimizer's state on a rank."""
    precision = short_name(parameter.dtype)
    precision = precision if precision in BYTES else "fp32"
    shards, stage = grid.data_context.size, options.zero.known_stage
    if not parameter.requires_grad:
        return model_states(parameter.numel(), shards, stage, precision).parameters
    return model_states(parameter.numel(), shards, stage, precision, state_tensors(options.optimizer)).total


def _agreed(grid: Grid, found: Sequence[LayerCost]) -> LayerCosts:
    """Return the costs that all ranks take, with the time of messages. Collective."""
    latency, per_byte = _messages(grid, max(cost.output for cost in found))
    own_costs = [[getattr(cost, field.name) for field in fields(cost) if field.name != "name"] for cost in found]
    ranks = grid.world.all_gather_json([grid.pipe.rank, latency, per_byte, own_costs])
    totals = [sum(sum(row[: len(_SECONDS)]) for row in rows) for *_, rows in ranks]
    slowest = [
        max(t for t, (at, *_) in zip(totals, ranks, strict=True) if at == rank) for rank in range(grid.pipe.size)
    ]
    speeds = tuple(min(slowest) / seconds for seconds in slowest)
    if min(speeds) > SAME_SPEED:
        speeds = ()
    layers = []
    for index, cost in enumerate(found):
        rows = [rows[index] for *_, rows in ranks]
        speed = [speeds[at] if speeds else 1.0 for at, *_ in ranks]
        f, i, w = (median(row[k] * s for row, s in zip(rows, speed, strict=True)) for k in range(len(_SECONDS)))
        states, kept, output = (max(row[k] for row in rows) for k in range(len(_SECONDS), len(rows[0])))
        layers.append(LayerCost(f, i, w, states, kept, output, cost.name))
    return LayerCosts(tuple(layers), max(row[1] for row in ranks), max(row[2] for row in ranks), speeds)


def _messages(grid: Grid, size: float) -> tuple[float, float]:
    """Return seconds of a message without its bytes, and of each byte, between the first two pipe ranks. Collective."""
    if grid.pipe.size == 1:
        return 0.0, 0.0
    grid.world.barrier()
    seconds = []
    for length in (1, max(2, int(size))):
        data, taken = torch.zeros(length, dtype=torch.uint8, device=grid.device), []
        for _ in range(6 if grid.pipe.rank < 2 else 0):
            start, other = time.perf_counter(), 1 - grid.pipe.rank
            for sends in (grid.pipe.rank == 0, grid.pipe.rank == 1):
                (grid.pipe.send(data, other, _TAG) if sends else grid.pipe.receive(data, other, _TAG)).wait()
            grid.synchronize()
            taken.append((time.perf_counter() - start) / 2)
        seconds.append(min(taken, default=0.0))
    grid.world.barrier()
    return seconds[0], max(0.0, seconds[1] - seconds[0]) / max(2, int(size))
