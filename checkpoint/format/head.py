"""Checks of the values in an index beside its tensors: the run's counters, schedules and client state.

A checksum shows that bytes are those that were written. It does not show that a program wrote what a run can use. All
that loading uses is therefore checked here before anything is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from ...grid.json_values import decode

LARGEST = 2**62  # of the numbers in an index
_MOST_RANKS = 10**6

Natural = Annotated[int, Field(ge=0, le=LARGEST)]
Count = Annotated[int, Field(ge=1, le=_MOST_RANKS)]
Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", hide_input_in_errors=True)


class _LossScale(_Part):
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    skipped: Natural
    good: Natural
    patience: int


class _Schedule(_Part):
    type: str
    state: dict[str, Any]


class _LocalUpdates(_Part):
    type: str
    replicas: Count
    since: Natural
    parted: bool = True
    steps: Natural
    meetings: Natural


class _Compression(_Part):
    type: str
    replicas: Count
    steps: Natural | None


class _Replica(_Part):
    param_groups: list[dict[str, Any]] = []
    lr_scheduler: _Schedule | None = None
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    skipped: Natural = 0


class _Run(_Part):
    global_steps: Natural
    global_samples: Natural = 0
    train_batch_size: Natural = 0
    seed: int = 0
    optimizer: str | None = None
    param_groups: list[dict[str, Any]] = []
    loss_scaler: _LossScale | None = None
    lr_scheduler: _Schedule | None = None
    local_updates: _LocalUpdates | None = None
    exchange: _Compression | None = None


class Head(_Part):
    """The entries of an index beside ``files`` and ``tensors``, as ``Snapshot`` documents them."""

    tag: str = ""
    step: Natural
    written: Finite = 0.0
    versions: dict[str, str]
    grid: dict[str, Count]
    config: dict[str, Any]
    model: dict[str, Any] | None = None
    run: _Run
    client_state: dict[str, Any] = {}
    numbers: dict[str, dict[str, Any]]


def check_head(head: Mapping[str, Any], client_tensor: Callable[[str], Tensor]) -> None:
    """Check the types and bounds of an index's values, and that all of them can be decoded.

    Args:
        head: the entries of the index.
        client_tensor: returns a tensor for the name of one in the client state, or raises KeyError.

    Raises:
        ValueError: naming the first entry that cannot be used.
    """
    try:
        checked = Head.model_validate(dict(head))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    _decode("client_state", checked.client_state, client_tensor)
    for place, each in _runs(checked):
        _decode(f"{place}.param_groups", each.param_groups)
        if each.lr_scheduler is not None:
            state = _decode(f"{place}.lr_scheduler", each.lr_scheduler.state)
            for key in ("last_batch_iteration", "last_epoch"):
                _check_number(f"{place}.lr_scheduler.{key}", state.get(key, 0), -1)
    for name, state in checked.numbers.items():
        if not name.startswith("replica/") or "/" in name.removeprefix("replica/"):
            _check_number(f"numbers.{name}.step", _decode(f"numbers.{name}", state).get("step", 0), 0)


def _runs(head: Head) -> list[tuple[str, _Run | _Replica]]:
    """Return the places that have options of parameter groups and a schedule: the run, and each replica."""
    found: list[tuple[str, _Run | _Replica]] = [("run", head.run)]
    for name, state in head.numbers.items():
        if name.startswith("replica/") and "/" not in name.removeprefix("replica/"):
            try:
                found.append((f"numbers.{name}", _Replica.model_validate(state)))
            except ValidationError as error:
                first = error.errors(include_url=False, include_context=False)[0]
                raise ValueError(f"numbers.{name}.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return found


def _decode(place: str, value: Any, get: Callable[[str], Tensor] | None = None) -> Any:
    try:
        return decode(value, get)
    except Exception as error:  # whatever a malformed value leads to
        raise ValueError(f"{place} cannot be decoded ({type(error).__name__}: {error})") from error


def _check_number(place: str, value: Any, least: int) -> None:
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise ValueError(f"{place} is {value!r}, but it must be a number")
    if not math.isfinite(number) or not least <= number <= LARGEST:
        raise ValueError(f"{place} is {number}, but it must be from {least} to {LARGEST}")
