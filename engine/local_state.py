"""Checkpoints of replicas that step on their own.

weights/..., optimizer/...             the replicas' mean: what any other run goes on from
replica/00001/weights/..., ...         what each replica had: the same number of replicas goes on from these, bitwise
outer/common/..., outer/velocity/...   the weights of the last meeting, and the outer step's momentum
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..grid import Layout, layout_of
from ..zero.held import Held, Range
from ..zero.local_async import AsyncMeetings
from ..zero.local_held import MeanHeld
from . import checkpoint_state as states
from .checkpoint_boxes import pieces
from .checkpoint_index import Index
from .checkpoint_read import Reader, Wanted, read_optimizer
from .checkpoint_values import encode

if TYPE_CHECKING:
    from .compat import Compat
    from .local import Local

REPLICA, OUTER = "replica", "outer"


def held(engine: Compat, local: Local) -> MeanHeld:
    """An engine's parameters, as the whole grid's."""
    return MeanHeld(engine._replicas, list(states._named(engine)), local.grid.whole, local.since)


def _own(engine: Compat, local: Local) -> Held:
    """The same, as this replica's."""
    return Held(engine._replicas, list(states._named(engine)), local.grid)


def parts(engine: Compat, local: Local) -> list[states.Part]:
    """What this rank writes beside the mean."""
    place = engine.grid.tensor.rank, engine.grid.tensor.size
    told = {states.RANDOM} | ({states.WEIGHTS} if local.since == 0 else set())  # once for all replicas
    with local.alone():
        own = [part for part in states.parts(engine, _own(engine, local)) if part.name.partition("/")[0] not in told]
    found = [part._replace(name=f"{_title(local)}/{part.name}") for part in own]
    kinds = {"velocity": local.meetings.velocity, **({"common": local.meetings.common} if local.since else {})}
    for kind, flats in kinds.items():
        for part in held(engine, local).flats(flats, True) if flats else ():
            for box, value in pieces(part, *place):
                title = f"{OUTER}/{kind}/{part.name}"
                found.append(states.Part(title, part.layout.shape, part.value.dtype, box, value))
    return found


def numbers(engine: Compat, local: Local) -> dict[str, Any]:
    """What is one number a parameter, of this replica; and where its schedule and its loss scale are.

    Steps that one replica skips move neither, so that those of replicas may differ.
    """
    found: dict[str, Any] = {}
    if engine.grid.tensor.is_first:
        for name, state in _own(engine, local).numbers().items():
            found[f"{_title(local)}/{name}"] = encode(state, None, f"the optimizer's state of {name}")
    if local.grid.world.is_first:
        run = states.run_state(engine)
        kept = {key: run[key] for key in ("param_groups", "lr_scheduler") if key in run}
        found[_title(local)] = kept | ({} if engine._scaler is None else states.vars_of(engine._scaler))
    return found


def run_state(local: Local) -> dict[str, Any]:
    """Where the meetings are: alike on every rank."""
    return {
        "type": local.section.type,
        "replicas": local.grid.replicas,
        "since": local.since,
        "parted": local.parted,
        "steps": local.steps,
        "meetings": local.meetings.met,
    }


def require(engine: Compat, local: Local, reader: Reader, wanted: Wanted) -> None:
    """Refuse what would have replicas step together that are not alike.

    Raises:
        ValueError: they have stepped on their own, the checkpoint is from before ``start_step``, and what their
            optimizers and schedules keep is not loaded.
    """
    step, start = reader.index.head["run"]["global_steps"], local.section.start_step
    if local.parted and step < start and not (wanted.weights_only or _loads(engine, reader, wanted)):
        raise ValueError(
            f"{reader.path} is of step {step}, before local_updates.start_step {start}, and these replicas have "
            "stepped on their own: load the optimizer and the schedule too, which differ between them"
        )


def _loads(engine: Compat, reader: Reader, wanted: Wanted) -> bool:
    """Whether what optimizers and schedules keep is loaded."""
    return wanted.optimizer and wanted.schedule and states.same_state(reader.index.head["run"].get("optimizer"), engine)


def restore(engine: Compat, local: Local, reader: Reader, wanted: Wanted, usable: Mapping[str, Layout]) -> list[str]:
    """After the mean was loaded: what each replica had, if it is so many replicas' own. Collective; returns notes.

    Args:
        usable: what of the checkpoint's weights and buffers is loaded, with its layouts.
    """
    local.meetings.adopt()
    local.since = 0
    saved = reader.index.head["run"].get("local_updates")
    if wanted.weights_only:
        return []
    loads = _loads(engine, reader, wanted)
    if saved is None:
        local.parted = local.parted and not loads
        return []
    everything, notes = held(engine, local), []
    same, parted = saved["replicas"] == local.grid.replicas, saved.get("parted", True)
    if local.together and parted:
        same = False
        notes.append(
            f"replicas had stepped on their own, and local_updates.start_step {local.section.start_step} has them step "
            "together again: all go on from their mean"
        )
    elif not same and saved["since"]:
        notes.append(
            f"{saved['replicas']} replicas had taken {saved['since']} steps since they met, and here are "
            f"{local.grid.replicas}: all go on from their mean, as after a meeting"
        )
    if wanted.optimizer:
        _flats(engine, everything, reader, "velocity", local.meetings.velocity, usable)
    if same:
        _flats(engine, everything, reader, "common", local.meetings.common, usable)
        if isinstance(local.meetings, AsyncMeetings):  # the round under way began there
            for base, common in zip(local.meetings.base, local.meetings.common, strict=True):
                base.copy_(common)
        _replica(engine, local, reader, wanted, usable)
        local.since = saved["since"]
    if loads:
        local.parted = same and parted
    local.steps, local.meetings.met = saved["steps"], saved["meetings"]
    local.restored, local.sent = saved["steps"], 0.0
    return notes


def _flats(
    engine: Compat, held: MeanHeld, reader: Reader, kind: str, flats: list[Tensor], usable: Mapping[str, Layout]
) -> None:
    for part in held.flats(flats, False) if flats else ():
        name = f"{OUTER}/{kind}/{part.name}"
        if name in reader.index.tensors and f"{states.WEIGHTS}/{part.name}" in usable:
            reader.fill(name, part, engine.grid.tensor.rank, engine.grid.tensor.size)


def _replica(engine: Compat, local: Local, reader: Reader, wanted: Wanted, usable: Mapping[str, Layout]) -> None:
    """What this replica had."""
    prefix, index, place = f"{_title(local)}/", reader.index, (engine.grid.tensor.rank, engine.grid.tensor.size)
    tensors = {name.removeprefix(prefix): e for name, e in index.tensors.items() if name.startswith(prefix)}
    told = {n.removeprefix(prefix): each for n, each in index.head["numbers"].items() if n.startswith(prefix)}
    mine = Reader(reader.path, Index({**index.head, "numbers": told}, tensors, index.files))
    own = _own(engine, local)
    for part in own.values(mine=False):
        if f"{states.WEIGHTS}/{part.name}" in usable and f"{states.WEIGHTS}/{part.name}" in tensors:
            mine.fill(f"{states.WEIGHTS}/{part.name}", part, *place)
    own.settle()
    for name, buffer, _ in states.buffers(engine.module, engine.grid.pipe.rank):
        if f"{states.BUFFERS}/{name}" in usable:
            value = torch.empty_like(buffer, memory_format=torch.contiguous_format)
            whole = Range(name, layout_of(buffer), 0, buffer.numel(), value.view(-1))
            mine.fill(f"{states.BUFFERS}/{name}", whole, *place)
            buffer.copy_(value)
    run, kept = index.head["run"], index.head["numbers"].get(_title(local), {})
    if wanted.optimizer and states.same_state(run.get("optimizer"), engine):
        read_optimizer(own, mine, usable, place)
        states.set_optimizer(engine, kept)
        if engine._scaler is not None and "scale" in kept:
            states.set_scaler(engine, kept)
    if wanted.schedule and "lr_scheduler" in kept:
        states.set_schedule(engine, kept)


def _title(local: Local) -> str:
    return f"{REPLICA}/{local.grid.replica:05}"
