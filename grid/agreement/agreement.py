"""Agreement between ranks: sums of a step's numbers, equality of facts, and errors that every rank raises."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ...base.errors import CheckpointError, ConfigError, CorruptError, DamagedError
from ..comm.axis import Axis
from ..comm.equal_facts import same
from .failure import all_or_none

if TYPE_CHECKING:
    from ..grid import Grid
    from .call_order import CallOrder

SAME_CALLS = "make the same call on every rank, and none under `if rank == 0`"

_SHOWN = 3  # differences in one message
_FAILURES = (CorruptError, OSError, ValueError, TypeError, KeyError, RuntimeError)


class AgreeingGrid(Protocol):
    """Protocol: the attributes and methods of a ``Grid`` that agreement between ranks uses."""

    rank: int
    size: int
    device: torch.device
    world: Axis

    def describe(self, rank: int | None = None) -> str: ...


def totals(grid: AgreeingGrid, values: Sequence[Tensor | float]) -> list[float]:
    """Sum each value over all ranks of the grid, in float64 and in one all-reduce. Collective.

    On a GPU the call waits once for the device, to return the sums as Python floats.

    Args:
        grid: the grid over whose ranks the values are summed.
        values: 0-dim tensors or numbers, equally many on every rank.
    """
    if grid.size == 1 and grid.device.type == "cpu":
        return [float(value) for value in values]
    sums = torch.stack([_on_device(value, grid.device) for value in values])
    grid.world.all_reduce(sums)
    sums_of_ranks: list[float] = sums.tolist()
    return sums_of_ranks


def _on_device(value: Tensor | float, device: torch.device) -> Tensor:
    """Return a value as a 0-dim float64 tensor of the device, without a copy for which the host would wait."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)


def largest(grid: AgreeingGrid, values: Sequence[float]) -> list[float]:
    """Return the largest of each value over all ranks of the grid. Collective.

    Args:
        grid: the grid.
        values: numbers, equally many on every rank.
    """
    most = torch.tensor(values, dtype=torch.float64, device=grid.device)
    if grid.size > 1 and len(values):
        grid.world.all_reduce(most, op="max")
    return [float(value) for value in most.tolist()]


def number(value: Tensor) -> Tensor | float:
    """Copy the value of a one-element tensor, in float64: a float on a CPU, a 0-dim tensor on a GPU.

    On a GPU nothing waits for the device. The result shares no memory with ``value``, because training scripts often
    reduce a loss tensor in place after the step, in order to print it.
    """
    return float(value) if value.device.type == "cpu" else value.to(torch.float64, copy=True).reshape(())


def mean(grid: AgreeingGrid, total: float, weight: float) -> Tensor:
    """Return ``total / weight`` as a 0-dim float64 tensor on the grid's device; NaN if the weight is 0.

    Args:
        grid: gives the device.
        total, weight: sums over all ranks, as ``totals`` returns them, e.g. of losses and of their weights.
    """
    return _on_device(total / weight if weight else math.nan, grid.device)


def enter_call(grid: Grid, call: str, ends: CallOrder | None = None) -> None:
    """Check that the ranks of each axis whose order of calls is checked make the same call.

    Args:
        grid: the grid.
        call: name of the call, with what must be equal in its arguments.
        ends: the order in which the call ends a step.

    Raises:
        RuntimeError: a rank makes another call.
    """
    for order in grid.call_orders.values():
        order.enter(f"calls {call}", order is ends)


def begin_call(grid: Grid, call: str, flags: Sequence[int] = ()) -> list[int]:
    """Begin a call that all ranks make, and return the largest of each flag. Collective.

    Each such call begins with the same all-reduce, so that ranks that make different ones find out here.

    Args:
        grid: the grid of the ranks.
        call: name of the call, with what must be equal in its arguments.
        flags: at most three numbers of at least 0.

    Raises:
        RuntimeError: on every rank, if a rank makes another call.
    """
    if grid.size == 1:
        return [*flags]
    digest = int.from_bytes(hashlib.sha256(call.encode()).digest()[:7], "big")
    values = torch.tensor([digest, -digest, *flags, *[0] * (3 - len(flags))])
    with nullcontext() if grid.activity.what else all_or_none(grid, lambda: None, call):
        enter_call(grid, call)
        grid.world.all_reduce(values, op="max")
    high, low, *most = values.tolist()
    if high != -low:
        calls = grid.world.all_gather_json(call)
        other = next(rank for rank, call_of_rank in enumerate(calls) if call_of_rank != calls[0])
        raise RuntimeError(
            f"{grid.describe(0)} calls {calls[0]}, but {grid.describe(other)} calls {calls[other]}: {SAME_CALLS}"
        )
    return most[: len(flags)]


def require_equal(grid: AgreeingGrid, axis: Axis, facts: Mapping[str, str]) -> None:
    """Check that the ranks of an axis have equal facts, by name. Collective over the grid.

    Raises:
        ConfigError: on every rank of the grid; the message names a rank that differs, and the difference.
    """
    if (mismatch := difference(grid, axis, facts, grid.world)) is not None:
        raise ConfigError(f"ranks differ: {mismatch}. Give every rank the same files, configuration and model")


def difference(grid: AgreeingGrid, axis: Axis, facts: Mapping[str, str], over: Axis) -> str | None:
    """Describe how the ranks of an axis differ in their facts; None if all are equal. Collective over ``over``.

    Args:
        grid: grid of the ranks.
        axis: the axis whose ranks must have equal facts.
        facts: name -> value, as text, on this rank.
        over: the ranks that get the result: the axis itself, or an axis that contains it.

    Returns:
        A text for an error message, with the rank that differs, the fact and both values; equal on all ranks of
        ``over``.
    """
    differs = torch.tensor([0 if same(axis, sorted(facts.items()), grid.device) else 1], device=grid.device)
    with over.traffic.uncounted():
        over.all_reduce(differs, op="max")
    if not int(differs):
        return None
    gathered = over.all_gather_json((grid.rank, axis.ranks, dict(facts)))
    everyone: dict[int, dict[str, str]] = {rank: theirs for rank, _, theirs in gathered}
    for _, ranks, _ in gathered:
        others = {rank: everyone[rank] for rank in ranks}
        names = dict.fromkeys(name for theirs in others.values() for name in theirs)
        different = [name for name in names if len({theirs.get(name) for theirs in others.values()}) > 1]
        if different:
            return _differences(grid, others, different)
    return "in what they run"  # the hashes alone differ: not reached


def _differences(grid: AgreeingGrid, facts: Mapping[int, Mapping[str, str]], different: Sequence[str]) -> str:
    """Describe which rank differs, and in which facts.

    The rank is one that differs from the majority or, if there is no majority, from the first rank.

    Args:
        grid: gives the ranks' names.
        facts: rank -> its facts.
        different: the names of the facts that are not equal on all ranks.
    """
    lines = []
    for name in different[:_SHOWN]:
        values = {rank: theirs.get(name) for rank, theirs in facts.items()}
        ((usual, count), *_) = Counter(values.values()).most_common(1)
        if 2 * count <= len(values):
            usual = values[next(iter(values))]
        rank, value = next((rank, value) for rank, value in values.items() if value != usual)
        like = next(rank for rank, value in values.items() if value == usual)
        if name.endswith(".py") or name == "triax":  # hashes of files
            lines.append(f"{grid.describe(rank)} runs another {name} than rank {like}")
        else:
            lines.append(
                f"{name} is {value or 'missing'} on {grid.describe(rank)} and {usual or 'missing'} on rank {like}"
            )
    more = f" (and {len(different) - _SHOWN} more)" if len(different) > _SHOWN else ""
    return f"{'; '.join(lines)}{more}"


@contextmanager
def agreed(
    grid: AgreeingGrid,
    error: type[Exception] | None = CheckpointError,
    catch: tuple[type[Exception], ...] = _FAILURES,
    name_rank: bool = False,
) -> Iterator[None]:
    """Raise on every rank what fails in this context on any rank. Collective.

    Args:
        grid: all its ranks enter this context.
        error: the class to raise, with the message of the first rank that failed. ``CheckpointError`` becomes
            ``DamagedError`` where that rank found corrupt data. None: ranks that failed raise their own error, the
            others a ``RuntimeError``.
        catch: errors of other classes are raised at once, by the rank that failed alone.
        name_rank: begin the message with the name of the rank that failed.
    """
    failed: Exception | None = None
    try:
        yield
    except catch as caught:
        failed = caught
    own_failure = None if failed is None else (type(failed).__name__, str(failed), isinstance(failed, CorruptError))
    told: list[tuple[str, str, bool] | None] = grid.world.all_gather_json(own_failure)
    rank, first = next(((rank, failure) for rank, failure in enumerate(told) if failure is not None), (0, None))
    if first is None:
        return
    kind, text, corrupt = first
    if error is None:
        raise failed or RuntimeError(f"on another rank: {kind}: {text}")
    if corrupt and issubclass(DamagedError, error):
        error = DamagedError
    raise error(f"{grid.describe(rank)}: {text}" if name_rank else text) from failed
