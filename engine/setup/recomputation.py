"""Activation checkpointing of a ``PipelineModule`` or a plain module, from ``options.recompute``."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ...base.option_error import Note, OptionError, refusal
from ...grid import Grid
from ...grid.randomness.random import DropoutState
from ...options.engine import EngineOptions
from ...options.recomputation import Recomputation
from ...pipe.module import PipelineModule
from ...pipe.program.schedule import Schedule
from ...pipe.recompute.kept_inputs import Inputs
from ...pipe.recompute.recompute import Group, Recompute, module_of, stateful
from ...pipe.recompute.tiles import dropout_in_tiles, install_tiles
from ...zero.modules.units import find_units

_NONE_SELECTIVE = (
    "granularity is selective, but no module of the model has a class attribute recompute, as Attention of "
    "triax.models has: set granularity to full or matmul"
)

_NONE_IN_TILES = (
    "no module of the model has a class attribute in_tiles, as the MLPs of triax.models have: give yours one "
    "(in_tiles = None, and in forward self.in_tiles(function, x) if it is set), or leave mlp_tile out"
)


def configure_recomputation(module: PipelineModule, section: Recomputation, schedule: Schedule) -> list[Note]:
    """Install the recomputation that the options ask for.

    Args:
        module: with its stages on the ranks of the schedule.
        section: the options.
        schedule: gives the number of microbatches whose inputs are held at a time.

    Returns:
        Notes on options that have no effect here, with the reason.

    Raises:
        OptionError: an option contradicts an argument of the model, or names a layer class that is not in the model.
    """
    interval = _interval(module, section)
    names = section.layers or module.checkpointable_layers
    _check_names(module, names)
    groups = bool(interval or section.groups)
    notes = _notes(module.grid, section, groups)
    layers = sum(module.boundaries[s + 1] - module.boundaries[s] for s in module.stages)
    if section.groups and not len(module.stages) <= section.groups <= layers:
        notes.append(
            f"<recompute.groups> {section.groups}: a rank with {len(module.stages)} stages of {layers} "
            f"layers has at least {len(module.stages)} groups and at most {layers}"
        )
    recompute = _make(module.grid, module.dropout_state, section, interval, section.groups, names)
    slots = max_inputs_held(module, recompute, schedule) if section.contiguous else 0
    recompute.inputs = _inputs(module.grid, section, slots)
    module.recompute = recompute
    asking = [recompute.install(module), _install_tiles(module, module.grid, module.dropout_state, section)]
    everyone = module.grid.world.all_gather_json(asking)
    if section.granularity == "selective" and not any(selective for selective, _ in everyone):
        raise OptionError("recompute", reason=_NONE_SELECTIVE)
    _check_tiles(section, module.grid, module, any(tiles for _, tiles in everyone))
    return [Note("recompute", f": {note}") for note in notes]


def recompute_layer(module: PipelineModule, section: Recomputation) -> None:
    """Install the recomputation of a single layer, taken from the model that the options are for.

    Raises:
        OptionError: the options ask for groups of several layers.
    """
    if section.groups or (section.interval or 1) > 1:
        raise refusal(
            "<recompute.groups> and <recompute.interval> recompute several layers together, and layers are measured "
            "one by one: leave them out, or give boundaries"
        )
    interval = int(section.granularity != "selective")
    recompute = _make(module.grid, module.dropout_state, section, interval, None, section.layers)
    recompute.inputs = _inputs(module.grid, section)
    module.recompute = recompute
    recompute.install(module)


def _install_tiles(module: nn.Module, grid: Grid, dropout: DropoutState, section: Recomputation) -> int:
    """Make modules run in tiles of tokens, if the options ask for it; return their number."""
    if section.mlp_tile is None:
        return 0
    ungranular = replace(section, granularity=None)
    return install_tiles(module, _make(grid, dropout, ungranular, 0, None, None), section.mlp_tile)


def _check_tiles(section: Recomputation, grid: Grid, module: nn.Module, found: bool) -> None:
    """Check, for tiles of tokens, that some module runs in tiles and that no such module has dropout. Collective."""
    if section.mlp_tile is None:
        return
    dropped = [name for name in grid.world.all_gather_json(dropout_in_tiles(module)) if name]
    reason = None if found else _NONE_IN_TILES
    if dropped:
        reason = (
            f"{dropped[0]} is a dropout in a module that runs in tiles, and its masks depend on the place in its "
            "input: set its p to 0, or leave mlp_tile out"
        )
    if reason is not None:
        raise OptionError("recompute.mlp_tile", section.mlp_tile, reason)


def recompute_blocks(module: nn.Module, options: EngineOptions, grid: Grid, dropout: DropoutState) -> Recompute | None:
    """Make a plain module recompute its repeated blocks, if the options ask for it.

    The blocks are the units of ZeRO stage 3. Their ``forward`` is replaced, which must happen before stage 3 replaces
    it, so that a block's weights are gathered before it runs again.

    Args:
        module: the module, on the grid's device.
        options: the engine's options.
        grid: the grid of the engine.
        dropout: the key of the module's ``triax`` dropouts.

    Returns:
        The recomputation; None if none is asked for.

    Raises:
        OptionError: the options ask for groups of layers, or there is no block to recompute.
    """
    section = options.recompute
    notes = _notes(grid, section, section.asked)
    recompute = None
    _check_tiles(section, grid, module, bool(_install_tiles(module, grid, dropout, section)))
    if section.asked:
        if (section.interval or 0) > 1:
            raise refusal(
                f"<recompute.interval> {section.interval} groups the layers of a PipelineModule, but this model "
                "is not one, and each of its blocks is recomputed by itself: set interval to 1, or list the layers in "
                "a PipelineModule",
            )
        given = [f"<recompute.{key}>" for key in ("groups", "contiguous") if getattr(section, key)]
        if given:
            notes.append(f"{', '.join(given)}: each block of a plain module is a group of its own")
        recompute = _make(grid, dropout, section, 1, None, section.layers)
        recompute.inputs = _inputs(grid, section)
        problem = _install(module, recompute)
        if problem is not None and (section.enabled or section.interval or section.granularity):
            raise OptionError("recompute", reason=problem)
        notes += [] if problem is None else [problem]
    for note in notes if grid.rank == 0 else ():
        logging.getLogger("triax").warning("%s", Note("recompute", f": {note}").spelled(options.names))
    return recompute


def _install(module: nn.Module, recompute: Recompute) -> str | None:
    """Make the blocks of a plain module recompute; return the reason if there is none to recompute."""
    asking = recompute.install(module)
    if recompute.granularity == "selective":
        return None if asking else _NONE_SELECTIVE
    units = find_units(module)[1:]
    names = recompute.names
    if units:
        _check_there(names, {type(unit).__name__ for _, unit in units})
    chosen = {unit: name for name, unit in units if names is None or type(unit).__name__ in names}
    others = {unit for _, unit in units} - chosen.keys()
    # Models of transformers have a flag, and a function that runs their blocks; they then keep no KV cache.
    families = [submodule for submodule in module.modules() if hasattr(submodule, "supports_gradient_checkpointing")]
    theirs = {submodule for family in families for submodule in family.modules()}
    flags = [submodule for submodule in theirs if hasattr(submodule, "gradient_checkpointing")]
    if not any(submodule.gradient_checkpointing for submodule in flags):
        able = {part for family in families if family.supports_gradient_checkpointing for part in family.modules()}
        for part in flags:
            if part in able and part not in others:
                part._gradient_checkpointing_func = functools.partial(_run_block, recompute, part, {})  # type: ignore[assignment]
                part.gradient_checkpointing = True  # type: ignore[assignment]
    for block, name in chosen.items():
        if block not in theirs:
            group = Group(0, 1, True, f"block {name}", (), stateful([block]))
            forward = block.forward
            block.forward = functools.wraps(forward)(functools.partial(recompute.run_block, group, forward))
    if any(unit not in theirs or getattr(unit, "gradient_checkpointing", False) for unit in chosen):
        return None
    return (
        "the model has no repeated blocks that can be recomputed, so nothing is: put its blocks into a ModuleList, or "
        "call torch.utils.checkpoint.checkpoint(..., use_reentrant=False) in its forward and leave this section out"
    )


def _run_block(
    recompute: Recompute,
    model: nn.Module,
    groups: dict[nn.Module, Group],
    function: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a block of a model of transformers, which is given as a function, with recomputation."""
    block = module_of(function) or model
    if block not in groups:
        groups[block] = Group(0, 1, True, f"a {type(model).__name__}", (), stateful([block]))
    return recompute.run_block(groups[block], function, *args, **kwargs)


def _make(
    grid: Grid,
    dropout: DropoutState,
    section: Recomputation,
    interval: int,
    number: int | None,
    names: Sequence[str] | None,
) -> Recompute:
    return Recompute(
        grid,
        dropout,
        interval,
        number,
        names,
        section.granularity or "full",
        preserve_rng_state=section.preserve_rng_state,
        synchronize=section.synchronize,
        profile=section.profile,
    )


def _inputs(grid: Grid, section: Recomputation, slots: int = 0) -> Inputs:
    partition = section.partition_activations and section.granularity != "selective"
    return Inputs(grid, partition, section.cpu_checkpointing, slots)


def max_inputs_held(module: PipelineModule, recompute: Recompute, schedule: Schedule) -> int:
    """Return the largest number of recomputed groups of layers whose inputs this rank holds at the same time."""
    counts = {stage: sum(g.recomputed for g in recompute.groups(module, stage)) for stage in module.stages}
    held = most = 0
    for op in schedule.orders[module.grid.pipe.rank]:
        held += counts[op.stage] * {"F": 1, "B": -1, "I": -1}.get(op.kind, 0)
        most = max(most, held)
    return most


def log_profile(recompute: Recompute | None) -> None:
    """Log the number and time of this step's recomputations, if ``profile`` is set."""
    report = None if recompute is None else recompute.report()
    if recompute is not None and report is not None:
        count, seconds = report
        logging.getLogger("triax").warning(
            "%s: %d recomputations took %.1f ms of this step", recompute.grid.describe(), count, seconds * 1e3
        )


def _interval(module: PipelineModule, section: Recomputation) -> int:
    """Return the number of layers of a recomputed group, from the options or the model. 0: not set.

    If recomputation is asked for, and no key says how layers are grouped, a group is one layer.
    """
    given, own = section.interval, module.activation_checkpoint_interval
    contradictions = {
        "<recompute.enabled> false": section.enabled is False,
        "<recompute.granularity> selective": section.granularity == "selective",
        f"<recompute.groups> {section.groups}": bool(section.groups),
        f"<recompute.interval> {given}": given not in (None, own),
    }
    for key, contradicts in contradictions.items():
        if own and contradicts:
            raise refusal(
                f"{key} was given, but the model has activation_checkpoint_interval={own}, which recomputes "
                "groups of that many whole layers: leave out one of them",
            )
    if given is None and not own:
        return int(section.asked and section.granularity != "selective" and not section.groups)
    return own if given is None else given


def _check_names(module: PipelineModule, names: Sequence[str] | None) -> None:
    _check_there(names, {name for stage in range(len(module.placement)) for name in module.typenames(stage)})


def _check_there(names: Iterable[str] | None, there: set[str]) -> None:
    unknown = sorted(set(names or ()) - there)
    if unknown:
        raise OptionError(
            "recompute",
            reason=f"no layer of the model is a {unknown[0]}; there are {', '.join(sorted(there))}. Give names of "
            "these classes in <recompute.layers>",
        )


def _notes(grid: Grid, section: Recomputation, groups: bool) -> list[str]:
    selective = section.granularity == "selective"
    given = [
        f"<recompute.{key}>"
        for key in ("partition_activations", "cpu_checkpointing", "contiguous", "profile")
        if getattr(section, key)
    ]
    if given and not groups and not selective:
        return [f"{', '.join(given)}: nothing is recomputed; set interval to 1, for example"]
    notes = []
    if section.partition_activations and selective:
        notes.append("<recompute.partition_activations>: q, k and v are sharded over the tensor ranks already")
    elif section.partition_activations and grid.tensor.size == 1:
        notes.append("<recompute.partition_activations>: the tensor axis has one rank, which keeps all of each input")
    if section.cpu_checkpointing and grid.device.type == "cpu":
        notes.append("<recompute.cpu_checkpointing>: the model is in the host's memory already, and so are its inputs")
    return notes
