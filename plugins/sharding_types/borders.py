"""Types of borders: what each of the six takes and returns (grid/comm/regions.py).

| border | takes | returns |
|---|---|---|
| copy_all_reduce | invariant | replicated |
| all_reduce_copy | partial | invariant |
| split_gather | invariant | varying along the dim |
| gather_split | varying along the dim | invariant |
| gather_reduce_scatter | varying along the dim | replicated |
| reduce_scatter_gather | partial | varying along the dim |
"""

from __future__ import annotations

from collections.abc import Callable

from .sharding import INVARIANT, PARTIAL, REPLICATED, VARYING, Sharding, varying

_RETURNS = {"copy": REPLICATED, "all_reduce": INVARIANT, "reduce_scatter": "", "split": ""}


def crossed(
    forward: str, backward: str, value: Sharding, axis: str, dim: int, report: Callable[[str, str, str], None]
) -> Sharding:
    """Return the type behind a border on its axis, and report a value that it does not take.

    Args:
        forward, backward: the border's operations.
        value: the type in front of it.
        axis: the axis's name.
        dim: the dim that it slices, from the end.
        report: told of what arrived, what is missing, and what mends it.
    """
    name, arrived = f"{forward}_{backward}", str(value)
    if forward in ("copy", "split"):
        if value.kind == REPLICATED:
            report(
                arrived,
                f"its gradient is summed over the {axis} ranks already: a second sum counts it once for each rank",
                f"leave {name} out, or take the value from before the first border",
            )
        elif value.kind == VARYING:
            report(
                arrived,
                f"{name} is for values that are equal on all {axis} ranks: its backward pass would mix the gradients "
                "of different values",
                "leave it out",
            )
        elif value.kind == PARTIAL:
            report(arrived, f"the sum over the {axis} ranks", f"all_reduce_copy(x, grid.{axis}) before this line")
    elif forward in ("all_reduce", "reduce_scatter"):
        if value.equal:
            report(
                arrived,
                f"each rank has the whole value, which the sum over the {axis} ranks counts once for each of them",
                "leave it out" if forward == "all_reduce" else f"split_gather(x, grid.{axis}, dim)",
            )
        elif value.kind == VARYING and value.levels:
            report(
                arrived,
                "slices of different elements are added",
                f"gather_split(x, grid.{axis}, dim), or gather_reduce_scatter if each rank goes on with its own part",
            )
        elif value.kind == VARYING and value.dims is not None and value.role != "mask":
            report(
                arrived,
                "what a rank has of elements of others is not set to zero, so it counts in the sum",
                "masked_fill(of others, 0) before this line",
            )
    elif value.equal:
        report(
            arrived,
            f"each rank has the whole value: the result has it once for each of the {axis} ranks",
            "leave it out",
        )
    elif value.kind == PARTIAL:
        report(arrived, f"the sum over the {axis} ranks", f"reduce_scatter, or all_reduce_copy(x, grid.{axis})")
    elif value.levels and dim not in value.levels:
        report(arrived, f"it is sliced along another dim than {dim}", "the dim that is sliced, as dim=")
    if forward == "gather":
        return Sharding(REPLICATED if backward == "reduce_scatter" else INVARIANT)
    return Sharding(_RETURNS[forward]) if _RETURNS[forward] else varying({dim: 0})
