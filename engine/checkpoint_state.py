"""From an engine to what a checkpoint holds of it, and back: values, optimizer state, buffers, the run's numbers."""

from __future__ import annotations

import bisect
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..grid import Layout, layout_of
from ..pipe.module import PipelineModule
from ..zero.held import Held, Named, Range
from . import checkpoint_exchange
from .checkpoint_boxes import Spans, everything, pieces
from .checkpoint_values import decode, encode
from .schedulers import follow

if TYPE_CHECKING:
    from .compat import Compat

WEIGHTS, BUFFERS, OPTIMIZER, RANDOM, CLIENT = "weights", "buffers", "optimizer", "random", "client"
# How an optimizer is computed, and not what: the grid, the machine and its class decide.
_MEANS = (
    "params",
    "param_names",
    "fused",
    "foreach",
    "capturable",
    "differentiable",
    "decoupled_weight_decay",
    "decoupled",
)
_ADAM = ("Adam", "AdamW", "UncorrectedAdam")  # one state, and three ways to use it


class Part(NamedTuple):
    """A box of a whole tensor that this rank writes. One without elements says that there is such a tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Spans
    value: Tensor


def held_by(engine: Compat) -> Held:
    """An engine's parameters."""
    if engine.local is not None:
        return engine.local.held()
    return Held(engine._replicas, list(_named(engine)), engine.grid)


def _named(engine: Compat) -> Iterator[Named]:
    module = engine.module
    if isinstance(module, PipelineModule):
        yield from (Named(each.parameter, each.layout, each.counted) for each in module.placed())
        return
    seen = set()
    for name, parameter in module.named_parameters():
        seen.add(parameter)
        layout = layout_of(parameter)
        yield Named(parameter, replace(layout, name=layout.name or name), True)
    for bucket in engine._replicas.buckets:
        for member in bucket.members:
            if member.parameter not in seen:  # the optimizer's, and not the module's
                yield Named(member.parameter, member.layout, True)


def frozen(held: Held) -> set[str]:
    """The parameters that are not trained, as a checkpoint calls them."""
    return {f"{WEIGHTS}/{named.layout.name}" for named in held.parameters if not named.parameter.requires_grad}


def buffers(module: nn.Module, rank: int) -> Iterator[tuple[str, Tensor, bool]]:
    """The buffers that a state dict has, by their whole-model names, and whether this pipe rank stands for them."""
    if not isinstance(module, PipelineModule):
        yield from ((name, buffer, True) for name, buffer in _persistent(module))
        return
    for source, layer in module.layers.items():
        stage = bisect.bisect_right(module.boundaries, int(source)) - 1
        for name, buffer in _persistent(layer):
            yield f"layers.{source}.{name}", buffer, module.placement[stage] == rank


def _persistent(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    known = module.state_dict(keep_vars=True)
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in known)


def parts(engine: Compat, held: Held) -> Iterator[Part]:
    """What this rank writes of the engine's tensors: over all ranks, each element once."""
    grid, place = engine.grid, (engine.grid.tensor.rank, engine.grid.tensor.size)

    def boxes(kind: str, part: Range) -> Iterator[Part]:
        name, shape, dtype = f"{kind}/{part.name}", part.layout.shape, part.value.dtype
        if part.start == part.stop:
            yield Part(name, shape, dtype, tuple((0, 0) for _ in shape), part.value[:0])
        for box, value in pieces(part, *place):
            yield Part(name, shape, dtype, box, value)

    for part in held.values(mine=True):
        yield from boxes(WEIGHTS, part)
    for key, part in held.states():
        yield from boxes(f"{OPTIMIZER}/{key}", part)
    for kind, part in checkpoint_exchange.ranges(engine, held):
        yield from boxes(kind, part)
    for name, value in checkpoint_exchange.whole(engine, held):
        yield _whole(name, value)
    for name, key, value in held.others():
        yield _whole(f"{OPTIMIZER}/{key}/{name}", value)
    for name, buffer, stands in buffers(engine.module, grid.pipe.rank):
        layout = layout_of(buffer)
        if stands and grid.data.is_first and (layout.sharded or grid.tensor.is_first):
            flat = buffer.detach().contiguous().view(-1)
            yield from boxes(BUFFERS, Range(name, layout, 0, flat.numel(), flat))
    for name, state in _generators(engine).items():
        yield _whole(f"{RANDOM}/{name}/{grid.rank:05}", state)
    if engine.local is not None:
        yield from engine.local.parts()


def _whole(name: str, value: Tensor) -> Part:
    return Part(name, tuple(value.shape), value.dtype, everything(value.shape), value)


def _generators(engine: Compat) -> dict[str, Tensor]:
    """The states of this process's generators: torch's, Python's, numpy's. Nothing of triax draws from them."""
    version, words, gauss = random.getstate()
    _, keys, position, has, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64),
        "numpy": torch.tensor([*map(int, keys), position, has], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    device = engine.grid.random_state()
    return states if device is None else {**states, "device": device}


def set_generators(engine: Compat, states: Mapping[str, Tensor]) -> None:
    """Put back what ``parts`` had of this process's generators."""
    torch.set_rng_state(states["torch"].clone())
    version, *words = states["python"].tolist()
    has, gauss = states["python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss if has else None))
    *keys, position, has_gauss = states["numpy"].tolist()
    legacy = ("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, states["numpy_gauss"].item())
    np.random.set_state(legacy)  # noqa: NPY002
    if "device" in states:
        engine.grid.set_random_state(states["device"].clone())


def numbers(engine: Compat, held: Held) -> dict[str, Any]:
    """What is one number a parameter, of those that this rank stands for."""
    more = {} if engine.local is None else engine.local.numbers()
    if not (engine.grid.data.is_first and engine.grid.tensor.is_first):
        return more
    return more | {
        name: encode(state, None, f"the optimizer's state of {name}") for name, state in held.numbers().items()
    }


def run_state(engine: Compat) -> dict[str, Any]:
    """Where the run is: alike on every rank, in JSON."""
    scaler, schedule, loader = engine._scaler, engine.lr_scheduler, engine.training_dataloader
    optimizer, inner = engine.optimizer, engine._replicas.optimizer
    state: dict[str, Any] = {
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "train_batch_size": engine.batch.train,
        "seed": engine.config.seed,
        **checkpoint_exchange.numbers(engine),
    }
    if optimizer is not None:
        groups = [{k: v for k, v in group.items() if k not in _MEANS} for group in optimizer.param_groups]
        state["optimizer"] = type(inner).__name__
        state["param_groups"] = encode(groups, None, "optimizer.param_groups")
    if scaler is not None:
        state["loss_scaler"] = vars_of(scaler)
    if schedule is not None:
        state["lr_scheduler"] = {
            "type": type(schedule).__name__,
            "state": encode(schedule.state_dict(), None, f"the state of {type(schedule).__name__}"),
        }
    if engine.local is not None:
        state["local_updates"] = engine.local.run_state()
    if hasattr(loader, "state_dict"):
        state["loader"] = encode(loader.state_dict(), None, "the state of training_dataloader")
    return state


def vars_of(scaler: Any) -> dict[str, Any]:
    """A loss scaler's numbers."""
    return {"scale": scaler.scale, "skipped": scaler.skipped, "good": scaler._good, "patience": scaler._patience}


def set_optimizer(engine: Compat, state: Mapping[str, Any]) -> list[str]:
    """Put back the groups' options and the loss scale; returns what did not fit."""
    notes = []
    saved = decode(state.get("param_groups") or [])
    for groups in _all_groups(engine) if "param_groups" in state else ():
        if len(groups) != len(saved):
            notes = [f"{len(saved)} parameter groups were saved, and there are {len(groups)}: their options stay"]
            continue
        for group, options in zip(groups, saved, strict=True):
            for key, value in options.items():
                if key in group and key not in _MEANS:
                    _set(group, key, value)
    if engine._scaler is not None and "loss_scaler" in state:
        set_scaler(engine, state["loss_scaler"])
    return notes


def set_scaler(engine: Compat, theirs: Mapping[str, Any]) -> None:
    """Put back a loss scaler's numbers."""
    scaler = engine._scaler
    assert scaler is not None
    scaler.scale, scaler.skipped = theirs["scale"], theirs["skipped"]
    scaler._good, scaler._patience = theirs["good"], theirs["patience"]
    if (executor := getattr(engine, "_executor", None)) is not None:
        executor.loss_scale = scaler.scale


def set_schedule(engine: Compat, state: Mapping[str, Any]) -> list[str]:
    """Put back the learning-rate schedule; returns what did not fit."""
    schedule, saved = engine.lr_scheduler, state.get("lr_scheduler")
    if schedule is None or saved is None:
        return [] if schedule is None else ["no lr_scheduler was saved: this one begins anew"]
    if saved["type"] != type(schedule).__name__:
        return [f"the lr_scheduler was a {saved['type']}, and this one is a {type(schedule).__name__}: it begins anew"]
    schedule.load_state_dict(decode(saved["state"]))
    groups = decode(state.get("param_groups") or [])
    for mine in _all_groups(engine):
        if len(mine) == len(groups):
            for group, options in zip(mine, groups, strict=True):
                for key in ("lr", "initial_lr", "betas", "momentum"):  # what schedules write
                    if key in options and key in group:
                        _set(group, key, options[key])
    if engine.optimizer is not None:
        follow(schedule, engine.optimizer)
    return []


def set_position(engine: Any, state: Mapping[str, Any]) -> list[str]:
    """Put back where the run is: steps, samples, the loader's place; returns what is other than it was."""
    notes = []
    for key, now in (("seed", engine.config.seed), ("train_batch_size", engine.batch.train)):
        if state.get(key, now) != now:
            notes.append(f"{key} was {state[key]}, and is {now}: what comes is not what would have come")
    engine.global_steps = state["global_steps"]
    samples = state.get("global_samples", state["global_steps"] * engine.batch.train)
    engine._samples, engine._since = samples, state["global_steps"]
    if not isinstance(type(engine).micro_steps, property):
        engine.micro_steps = state["global_steps"] * engine.batch.accumulation
    loader = engine.training_dataloader
    if loader is None:
        engine.rewind()
        return notes
    try:
        if "loader" not in state or not hasattr(loader, "load_state_dict"):
            loader.seek(samples // engine.batch.train)
        else:
            loader.load_state_dict(decode(state["loader"]))
    except ValueError as error:  # other data: the weights are loaded all the same
        notes.append(f"training_data begins anew: {error}")
    engine.rewind()
    return notes


def _all_groups(engine: Compat) -> Iterator[list[dict[str, Any]]]:
    """Every list of parameter groups: those that users see, those that are stepped, those that a schedule is over."""
    schedule = engine.lr_scheduler
    optimizers = (engine.optimizer, engine._replicas.optimizer, None if schedule is None else schedule.optimizer)
    for optimizer in dict.fromkeys(each for each in optimizers if each is not None):
        yield optimizer.param_groups


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(group[key], Tensor):
        group[key].fill_(value)
    else:
        group[key] = value.item() if isinstance(value, Tensor) and not isinstance(group[key], Tensor) else value


def same_state(theirs: str | None, engine: Compat) -> bool:
    """Whether one optimizer can use what another kept."""
    ours = type(engine._replicas.optimizer).__name__
    return theirs is None or theirs == ours or (theirs in _ADAM and ours in _ADAM)


def layouts(engine: Compat, held: Held) -> dict[str, Layout]:
    """What this rank looks for in a checkpoint: the whole shapes of its parameters and buffers, by kind and name."""
    found = {f"{WEIGHTS}/{named.layout.name}": named.layout for named in held.parameters}
    for name, buffer, _ in buffers(engine.module, engine.grid.pipe.rank):
        found[f"{BUFFERS}/{name}"] = layout_of(buffer)
    return found
