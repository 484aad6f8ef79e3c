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

_RETURNS = {"copy": REPLICATED, "all_reduce": INVARIANT}


def crossed(forward: str, backward: str, value: Sharding, dim: int, report: Callable[..., None]) -> Sharding:
    """Return the type behind a border on its axis, and report a value that it does not take.

    Args:
        forward, backward: the border's operations.
        value: the type in front of it.
        dim: the dim that it slices, from the end.
        report: told of the finding, what arrived, and the border's name.
    """
    if (finding := _finding(forward, value, dim)) is not None:
        report(finding, str(value), f"{forward}_{backward}")
    if forward == "gather":
        return Sharding(REPLICATED if backward == "reduce_scatter" else INVARIANT)
    return Sharding(_RETURNS[forward]) if forward in _RETURNS else varying({dim: 0})


def _finding(forward: str, value: Sharding, dim: int) -> str | None:
    """Return the name of what is wrong with a value in front of a border; None if it fits."""
    if forward in ("copy", "split"):
        return {REPLICATED: "summed_already", VARYING: "mixed_gradients", PARTIAL: "not_summed"}.get(value.kind)
    if forward in ("all_reduce", "reduce_scatter"):
        if value.equal or value.kind == PARTIAL:
            return "whole_summed" if value.equal else None
        if value.levels:
            return "slices_summed"
        return "not_masked" if value.dims is not None and value.role != "mask" else None
    if value.equal or value.kind == PARTIAL:
        return "whole_gathered" if value.equal else "not_summed"
    return "another_dim" if value.levels and dim not in value.levels else None
