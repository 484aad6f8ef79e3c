"""What an exchange of gradients keeps, in a checkpoint: residuals, one of each replica, under that replica's number.

``exchange/residual/00002/layers.0.weight`` is what replica 2 had not sent. What counts of residuals is their sum, which
is still to be stepped. So another number of replicas shares them out: old replica i's go to new replica i modulo their
number, which adds up what it gets, or begins with zeros. On as many replicas each has its own back, bitwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..zero.compressor import Compressor, Kept
from ..zero.held import Held, Range

if TYPE_CHECKING:
    from .checkpoint_read import Reader
    from .compat import Compat

EXCHANGE = "exchange"


def ranges(engine: Compat, held: Held) -> Iterator[tuple[str, Range]]:
    """What this rank writes of its own replica's: kinds, and ranges of parameters' shapes."""
    for key, part in held.exchanged():
        yield f"{EXCHANGE}/{key}/{engine.grid.data.rank:05}", part


def whole(engine: Compat, held: Held) -> Iterator[tuple[str, torch.Tensor]]:
    """What it writes that is alike on every replica, of shapes of its own."""
    for kept, mine in held.kept():
        if mine:
            yield _title(engine, kept), kept.value


def numbers(engine: Compat) -> dict[str, Any]:
    """What it is, in JSON; alike on every rank."""
    exchange = engine._replicas.exchanges
    if exchange is None:
        return {}
    steps = exchange.steps if isinstance(exchange, Compressor) else None
    return {EXCHANGE: {"type": type(exchange).__name__, "replicas": engine.grid.data.size, "steps": steps}}


@torch.no_grad()
def restore(engine: Compat, held: Held, reader: Reader, place: tuple[int, int]) -> list[str]:
    """Give an exchange what a checkpoint has for it; returns what did not fit.

    Args:
        engine, held: whose it is.
        reader: of the checkpoint.
        place: this rank's on the tensor axis, and its size.
    """
    entries, saved = reader.index.tensors, reader.index.head["run"].get(EXCHANGE)
    exchange, axis = engine._replicas.exchanges, engine.grid.data
    there_are = {name.split("/")[1].partition(".")[0] for name in entries if name.startswith(f"{EXCHANGE}/")}
    if exchange is None and not there_are:
        return []
    used: set[str] = set()
    theirs = 0 if saved is None else int(saved["replicas"])
    new: set[str] = set()
    for key, part in held.exchange_rooms():
        part.value.zero_()
        names = [f"{EXCHANGE}/{key}/{replica:05}/{part.name}" for replica in range(axis.rank, theirs, axis.size)]
        there = [name for name in names if name in entries and entries[name].shape == part.layout.shape]
        for number, name in enumerate(there):
            into = part.value if not number else torch.empty_like(part.value)
            reader.fill(name, part._replace(value=into), *place)
            if number:
                part.value.add_(into)
        (used if f"{EXCHANGE}/{key}/00000/{part.name}" in entries else new).add(key)
    for kept, _ in held.kept():
        name = _title(engine, kept)
        fits = name in entries and entries[name].shape == tuple(kept.value.shape)
        if fits:
            kept.value.copy_(reader.whole(name))
        (used if fits else new).add(kept.key)
    if isinstance(exchange, Compressor) and saved is not None and saved["steps"] is not None:
        exchange.steps = int(saved["steps"])
    told = engine.grid.world.all_gather_object((used, new))
    gone = there_are.difference(*(each for each, _ in told))
    missing = set().union(*(each for _, each in told))
    notes = []
    if gone:
        what = "compression" if saved is None else saved["type"]
        notes.append(f"what {what} kept ({', '.join(sorted(gone))}) has no place here: it is left out")
    if missing:
        notes.append(
            f"{', '.join(sorted(missing))} of {type(exchange).__name__} is not there, or not all: it begins anew"
        )
    return notes


def _title(engine: Compat, kept: Kept) -> str:
    """A shard's are of its tensor rank: on another number of them, they begin anew."""
    axis, layout = engine.grid.tensor, kept.member.layout
    of = f".{axis.rank}of{axis.size}" if layout.sharded and axis.size > 1 else ""
    return f"{EXCHANGE}/{kept.key}{of}/{layout.name}"
