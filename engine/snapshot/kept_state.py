"""Optimizer state of parameters that are frozen in this run: kept from the checkpoint that was loaded to the next one.

A parameter that was frozen before the engine is made has no state in the optimizer. Without this its state would be
lost in the next checkpoint, and its training could not go on where it ended.
"""

from __future__ import annotations

from ...base.seeds import derive
from ...checkpoint.matching import listed
from ...checkpoint.snapshot import OPTIMIZER, Snapshot
from ...grid import Grid
from ...zero.state_shards import StateShards


def kept_state(shards: StateShards, snapshot: Snapshot, grid: Grid, lora: bool) -> tuple[Snapshot, list[str]]:
    """Return the optimizer state in a checkpoint of the parameters that are not trained here, and a note for the log.

    Each tensor is kept in host memory by one rank, which writes it to the next checkpoint.

    Args:
        shards: this rank's parameters.
        snapshot: read from the checkpoint.
        grid: the grid of this rank.
        lora: the model has LoRA adapters, so that its frozen parameters are never trained again: nothing is kept.
    """
    trained = {member.layout.name for bucket in shards.trained for member in bucket.members}
    frozen = {entry.layout.name: entry for entry in shards.parameters if entry.layout.name not in trained}
    kept, names = Snapshot(), set()
    axis = grid.data_context
    for title, tensor in snapshot.tensors.items():
        kind, _, rest = title.partition("/")
        named = frozen.get(rest.partition("/")[2]) if kind == OPTIMIZER else None
        if named is None:
            continue
        name = named.layout.name
        names.add(name)
        if not lora and named.counted and grid.tensor.is_first and derive(name) % axis.size == axis.rank:
            kept.add(title, tensor.read_all())
            kept.numbers |= {name: snapshot.numbers[name]} if name in snapshot.numbers else {}
    if not names:
        return kept, []
    frozen_state = f"the optimizer's state of {len(names)} parameters that are frozen here ({listed(sorted(names))})"
    kept_or_not = "not loaded, because LoRA trains the adapters alone" if lora else "kept, and saved with the next one"
    return kept, [f"{frozen_state} is {kept_or_not}"]
