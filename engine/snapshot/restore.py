"""Loads into an engine the weights, buffers, optimizer state, counters and schedules that ``capture.py`` saved."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...base.errors import CorruptError
from ...base.json_values import decode
from ...checkpoint.convert.formats import shared_names
from ...checkpoint.generator_states import set_random_states
from ...checkpoint.matching import Shape, listed, match_model
from ...checkpoint.reader import LoadOptions
from ...checkpoint.snapshot import BUFFERS, OPTIMIZER, RANDOM, WEIGHTS, Snapshot
from ...grid import Grid, layout_of
from ...grid.agreement.agreement import agreed
from ...zero.optimizer_entries import NOT_SAVED, load_own_entries
from ...zero.optimizer_state import copied
from ...zero.state_shards import StateShards
from ..optim.closed_form import ClosedFormSchedule
from ..optim.schedulers import follow
from . import residuals
from .adapted import require_same_base
from .capture import GROUPS, Checkpointed, buffers, state_shards
from .kept_state import kept_state

_ADAM = ("Adam", "AdamW", "UncorrectedAdam")  # they keep equal state, and use it in three ways


@torch.no_grad()
def apply(engine: Checkpointed, snapshot: Snapshot, options: LoadOptions) -> None:
    """Load a snapshot's state into an engine. Collective.

    Args:
        engine: the engine, between two steps.
        snapshot: read from a checkpoint that any grid may have written.
        options: which parts of the state to load.

    Raises:
        DamagedError: on every rank, before anything was changed, if the engine cannot use the snapshot's values.
        CheckpointError: on every rank, before anything was changed, if the snapshot is of another model and
            ``options.strict`` is set, or if it cannot be loaded at this point of the run.
    """
    grid, shards, run = engine.grid, state_shards(engine), dict(snapshot.header["run"])
    if "param_groups" in run:
        groups = enumerate(run["param_groups"])
        run["param_groups"] = [snapshot.numbers.get(f"{GROUPS}/{number}", group) for number, group in groups]
    loads_optimizer = options.optimizer and not options.weights_only and engine.data_axis.optimizer is not None
    with agreed(grid):
        gathered = shards.gathered_parameter()
        if gathered is not None:
            raise ValueError(
                f"{gathered} is gathered now: call load_checkpoint outside of whole_weights() and gathered()"
            )
        if not options.weights_only:
            check_values(engine, snapshot, options)
        if engine.replica_state is not None:
            engine.replica_state.require_loadable(snapshot, options)
        own = {f"{WEIGHTS}/{named.layout.name}": named.parameter.dtype for named in shards.parameters}
        require_same_base(own, snapshot.tensors, snapshot.source)
    shapes = {f"{WEIGHTS}/{named.layout.name}": named.layout.shape for named in shards.parameters}
    shapes |= {
        f"{BUFFERS}/{name}": layout_of(buffer).shape
        for name, buffer, _ in buffers(engine.module, grid.pipe.rank)
        # Class weights of a loss, for instance: checkpoints did not have them before.
        if not name.startswith("loss_fn.") or f"{BUFFERS}/{name}" in snapshot.tensors
    }
    problems = []
    if loads_optimizer and not same_optimizer_state(snapshot, engine):
        problems.append(
            f"the optimizer that was saved is {run['optimizer']}, but this engine has "
            f"{type(engine.data_axis.optimizer).__name__} (load_optimizer_states=False loads the rest)"
        )
    with agreed(grid):
        second_names = _second_names(engine, snapshot, problems)
    usable = match_model(grid, snapshot, shapes, options.strict, problems, second_names)
    notes = note_rounding(engine, snapshot, read_weights(engine, shards, snapshot, usable))
    if not options.weights_only:
        if loads_optimizer:
            if not problems:
                read_optimizer(shards, snapshot, usable, grid)
                notes += set_optimizer(engine, run)
                engine.kept_state, kept = kept_state(shards, snapshot, grid, hasattr(engine.module, "lora_options"))
                notes += kept
            else:
                notes.append(f"the state of the optimizer is not loaded, because it was saved by {run['optimizer']}")
            notes += residuals.restore(grid, engine.data_axis, shards, snapshot)
        if options.schedule:
            notes += set_schedule(engine, run)
        with agreed(grid):  # a loader may be of other data
            notes += set_position(engine, run)
    if engine.replica_state is not None:
        notes += engine.replica_state.restore(snapshot, options, usable)
    if not options.weights_only and snapshot.header["grid"] == grid.topology.sizes:
        states = snapshot.under(f"{RANDOM}/").tensors.items()
        by_kind = {name.split("/")[0]: state.read_all() for name, state in states if name.endswith(f"/{grid.rank:05}")}
        set_random_states(grid, by_kind)
    if grid.rank == 0:
        for note in notes:
            logging.getLogger("triax").warning("%s: %s", snapshot.source, note)


def check_values(engine: Checkpointed, snapshot: Snapshot, options: LoadOptions) -> None:
    """Check that the options of parameter groups and the schedule's state have the types of the engine's own.

    Raises:
        CorruptError: naming the first value of another type.
    """
    schedule = engine.lr_scheduler
    if options.optimizer and isinstance(engine.data_axis.optimizer, torch.optim.Adam):
        for name in snapshot.under(f"{OPTIMIZER}/exp_avg/").tensors:
            if "step" not in snapshot.numbers.get(name, ()):
                raise CorruptError(f"{snapshot.source}: the optimizer's state of {name} has moments, but no step")
    for section, run in (("run", snapshot.header["run"]), *snapshot.numbers.items()):
        saved = run.get("lr_scheduler")
        if options.schedule and schedule is not None and saved is not None and saved["type"] == type(schedule).__name__:
            state, own_state = decode(saved["state"]), schedule.state_dict()
            for key in own_state.keys() & {"last_epoch", "last_batch_iteration"} - state.keys():
                raise CorruptError(f"{snapshot.source}: {section}.lr_scheduler has no {key}")
            _check_alike(snapshot, f"{section}.lr_scheduler", state, own_state)
        groups = decode(run.get("param_groups") or [])
        own = [] if engine.optimizer is None else engine.optimizer.param_groups
        for number, (group, own_state) in enumerate(zip(groups, own, strict=True) if len(groups) == len(own) else ()):
            saved_keys = {key: value for key, value in own_state.items() if key not in NOT_SAVED}
            _check_alike(snapshot, f"{section}.param_groups.{number}", group, saved_keys)


def _check_alike(snapshot: Snapshot, place: str, saved: Any, own: Any) -> None:
    """Check that a saved value is of a type that can take the place of an own one, and that no number is NaN."""
    if isinstance(own, dict) and isinstance(saved, dict):
        for key in saved.keys() & own.keys():
            _check_alike(snapshot, f"{place}.{key}", saved[key], own[key])
        return
    lists = isinstance(own, (list, tuple)) and isinstance(saved, (list, tuple))
    if lists and (len(own) == len(saved) or type(own) is type(saved) is list):
        for number, (saved_item, own_item) in enumerate(zip(saved, own, strict=False)):
            _check_alike(snapshot, f"{place}.{number}", saved_item, own_item)
        return
    kinds = (int, float, Tensor)
    numbers = isinstance(own, kinds) and isinstance(saved, kinds) and isinstance(own, bool) == isinstance(saved, bool)
    if own is not None and not numbers and (lists or not isinstance(saved, type(own))):
        raise CorruptError(f"{snapshot.source}: {place} is {saved!r}, but it must be like {own!r}")
    if numbers and saved != saved:
        raise CorruptError(f"{snapshot.source}: {place} is NaN")


def _second_names(engine: Checkpointed, snapshot: Snapshot, problems: list[str]) -> list[str]:
    """Return the tensors of a snapshot that are a shared parameter under its second name, as in an imported checkpoint.

    Adds to ``problems`` if the two names have different values.
    """
    pairs = [(f"{WEIGHTS}/{name}", f"{WEIGHTS}/{first}") for name, first in shared_names(engine.module).items()]
    tied = [(name, first) for name, first in pairs if {name, first} <= snapshot.tensors.keys()]
    for name, first in tied:
        if not torch.equal(snapshot.tensors[name].read_all(), snapshot.tensors[first].read_all()):
            problems.append(
                f"{name.partition('/')[2]} and {first.partition('/')[2]} have different values, but are one parameter "
                "of the model"
            )
    return [name for name, _ in tied]


def read_weights(
    engine: Checkpointed, shards: StateShards, snapshot: Snapshot, usable: Mapping[str, Shape]
) -> dict[str, torch.dtype]:
    """Load the weights and buffers named in ``usable`` from a snapshot. Collective over the data axis.

    Returns:
        name -> dtype of each tensor into which this rank has read, for a weight that of its master.
    """
    grid = engine.grid
    names = usable.keys() & snapshot.tensors.keys()
    own = {}
    engine.data_axis.written.take()  # what this snapshot lacks stays as it is
    for shard_range in shards.values(mine=False):
        if (name := f"{WEIGHTS}/{shard_range.name}") in names:
            snapshot.tensors[name].read_range(shard_range, grid)
            own[name] = shard_range.value.dtype
    shards.publish()
    for short, buffer, _ in buffers(engine.module, grid.pipe.rank):
        if (name := f"{BUFFERS}/{short}") in names:
            snapshot.tensors[name].read_shard(buffer, layout_of(buffer), grid)
            own[name] = buffer.dtype
    return own


def note_rounding(engine: Checkpointed, snapshot: Snapshot, own: Mapping[str, torch.dtype]) -> list[str]:
    """Return a note if the model's dtype cannot hold the loaded values. Collective.

    A dtype that the option ``precision`` names is there to round, and gives no note.

    Args:
        engine: the engine into which the values were loaded.
        snapshot: read from a checkpoint.
        own: as ``read_weights`` returned it.
    """
    options = engine.data_axis.options
    rounded = {
        name: f"{saved} in the checkpoint, {dtype} in the model"
        for name, dtype in own.items()
        if dtype not in (options.weight_dtype, options.buffer_dtype)
        and _rounds(saved := snapshot.tensors[name].dtype, dtype)
    }
    everywhere = {name: text for texts in engine.grid.world.all_gather_json(rounded) for name, text in texts.items()}
    return [
        f"{len(everywhere)} tensors are rounded to the model's dtype, such as {name.partition('/')[2]}: {text}"
        for name, text in [*everywhere.items()][:1]
    ]


def _rounds(saved: torch.dtype, own: torch.dtype) -> bool:
    """Return True if some floating-point numbers of the first dtype do not exist in the second one."""
    if not (saved.is_floating_point and own.is_floating_point):
        return False
    saved_range, own_range = torch.finfo(saved), torch.finfo(own)
    return saved_range.eps < own_range.eps or saved_range.max > own_range.max


def read_optimizer(shards: StateShards, snapshot: Snapshot, usable: Mapping[str, Shape], grid: Grid) -> None:
    """Load the optimizer state of the parameters named in ``usable``; all other parameters start with empty state.

    Args:
        shards: this rank's shards of the optimizer state, which are overwritten.
        snapshot: read from a checkpoint.
        usable: name -> shape of the snapshot's weights and buffers that the model has.
        grid: the grid of this rank.
    """
    tensors = snapshot.tensors
    shapes = {name.partition("/")[2]: shape for name, shape in usable.items() if name.startswith(f"{WEIGHTS}/")}
    keys = list(dict.fromkeys(name.split("/", 2)[1] for name in tensors if name.startswith(f"{OPTIMIZER}/")))

    master_dtypes = {name: master.dtype for master, names in shards.stepper.masters() for name in names}

    def state_dtype(name: str, key: str) -> torch.dtype | None:
        tensor, own = tensors.get(f"{OPTIMIZER}/{key}/{name}"), master_dtypes[name]
        if tensor is None or shapes.get(name) != tensor.shape:
            return None
        # The masters' dtype, unless the optimizer has chosen another one: whole numbers, less than the weights have, or
        # more than they have, there and here.
        weight = tensors.get(f"{WEIGHTS}/{name}")
        size, weight_size = tensor.dtype.itemsize, (own if weight is None else weight.dtype).itemsize
        chosen = size < weight_size or size > max(weight_size, own.itemsize)
        return tensor.dtype if chosen or not tensor.dtype.is_floating_point else own

    shards.reset_optimizer()
    for key, state_range in shards.stepper.load_targets(shards.ranges, state_dtype, keys):
        tensors[f"{OPTIMIZER}/{key}/{state_range.name}"].read_range(state_range, grid)
    for name, shape in shapes.items():
        for key in keys:
            tensor = tensors.get(f"{OPTIMIZER}/{key}/{name}")
            if tensor is not None and tensor.shape != shape:
                shards.stepper.set_odd_shaped_state(name, key, tensor.read_all())
    saved = snapshot.numbers
    unlike = shards.set_scalars({name: decode(saved[name]) for name in shapes if name in saved})
    shards.stepper.resume()
    if unlike:
        logging.getLogger("triax").warning(
            "%s: the parameters that share a bucket with %s had different numbers of steps, or none: all of them now "
            "have the largest number",
            snapshot.source,
            listed(unlike),
        )


def same_optimizer_state(snapshot: Snapshot, engine: Checkpointed) -> bool:
    """Return True if the engine's optimizer can use the optimizer state in the snapshot."""
    saved, own = snapshot.header["run"].get("optimizer"), type(engine.data_axis.optimizer).__name__
    return saved is None or saved == own or (saved in _ADAM and own in _ADAM)


def set_optimizer(engine: Checkpointed, run: Mapping[str, Any]) -> list[str]:
    """Load what the optimizer keeps beside its state, and the loss scale. Returns notes about values that did not fit.

    That is the options and numbers of the parameter groups, and the optimizer's own entries of ``state_dict()``.
    """
    notes = _set_options(engine, run, lambda key: key not in NOT_SAVED)
    if run.get("optimizer_entries"):
        load_own_entries(engine.data_axis.stepper.optimizer, decode(run["optimizer_entries"]))
    if engine.loss_scaler is not None and run.get("loss_scaler") is not None:
        engine.loss_scaler.load_state_dict(run["loss_scaler"])
    return notes


def set_schedule(engine: Checkpointed, run: Mapping[str, Any]) -> list[str]:
    """Load the state of the learning-rate schedule. Returns notes about values that did not fit."""
    schedule, saved = engine.lr_scheduler, run.get("lr_scheduler")
    if schedule is None or saved is None:
        return [] if schedule is None else ["no lr_scheduler was saved: this one starts from its first step"]
    former = schedule.former if isinstance(schedule, ClosedFormSchedule) else ()
    if saved["type"] not in (type(schedule).__name__, *former):
        return [f"a {saved['type']} was saved, but the lr_scheduler is a {type(schedule).__name__}: it starts anew"]
    schedule.load_state_dict(decode(saved["state"]))
    if isinstance(schedule, ClosedFormSchedule):
        schedule.step(schedule.last_batch_iteration)  # rates of its own arguments, which may have changed
    else:
        _set_options(engine, run, ("lr", "initial_lr", "betas", "momentum").__contains__)  # what schedules set
    if engine.optimizer is not None:
        follow(schedule, engine.optimizer)
    return []


def set_position(engine: Checkpointed, run: Mapping[str, Any]) -> list[str]:
    """Load the counters of steps and samples and the dataloader's position. Returns notes about differences."""
    notes = []
    for key, now in (("seed", engine.options.seed), ("train_batch_size", engine.batch.train)):
        if run.get(key, now) != now:
            notes.append(f"{key} was {run[key]} and now is {now}: the next batches are not those of the saved run")
    steps = run["global_steps"]
    samples = run.get("global_samples", steps * engine.batch.train)
    engine.set_position(steps, samples)
    loader = engine.training_dataloader
    try:
        if hasattr(loader, "load_state_dict") and "loader" in run:
            loader.load_state_dict(decode(run["loader"]))
        elif loader is not None:
            loader.seek(samples // engine.batch.train)
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # of other data: the weights are loaded
        notes.append(f"training_data starts from the beginning, because {error}")
    return notes


def _set_options(engine: Checkpointed, run: Mapping[str, Any], wanted: Callable[[str], bool]) -> list[str]:
    """Load the wanted options of the parameter groups of all optimizers. Returns notes about values that did not fit.

    The optimizers are the user's, the one over ZeRO's shards, and the one to which the schedule refers.

    Args:
        engine: the engine.
        run: the entry ``run`` of the snapshot's header, with the saved groups.
        wanted: returns True for the name of an option to load.
    """
    notes: list[str] = []
    saved, schedule = decode(run.get("param_groups") or []), engine.lr_scheduler
    optimizers = (engine.optimizer, engine.data_axis.optimizer, None if schedule is None else schedule.optimizer)
    for optimizer in dict.fromkeys(owned for owned in optimizers if owned is not None and "param_groups" in run):
        groups = optimizer.param_groups
        if len(groups) != len(saved):
            notes = [f"{len(saved)} parameter groups were saved, but there are {len(groups)}: their options are kept"]
            continue
        for group, options in zip(groups, saved, strict=True):
            for key in filter(wanted, options):
                value = options[key]
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                elif key in group:
                    group[key] = value.item() if isinstance(value, Tensor) else value
                else:  # a number that the optimizer adds in its first step
                    group[key] = copied(value)
    return notes
