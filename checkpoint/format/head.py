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

from ...base.json_values import decode

LARGEST = 2**62  # of the numbers in an index
_MOST_RANKS = 10**6

Natural = Annotated[int, Field(ge=0, le=LARGEST)]
Count = Annotated[int, Field(ge=1, le=_MOST_RANKS)]
Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _SavedPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", hide_input_in_errors=True)


class _SavedLossScale(_SavedPart):
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    skipped: Natural
    good: Natural
    patience: int
    steps: Natural = 0  # not in files of older versions


class _SavedSchedule(_SavedPart):
    type: str
    state: dict[str, Any]


class _SavedLocalUpdates(_SavedPart):
    type: str
    replicas: Count
    since: Natural
    parted: bool = True
    steps: Natural
    meetings: Natural


class _SavedMembership(_SavedPart):
    next_share: Natural
    owed: list[Natural]
    members: list[str]
    changes: list[str]
    counted: Natural


class _SavedCompression(_SavedPart):
    type: str
    replicas: Count
    steps: Natural | None


class _SavedReplica(_SavedPart):
    param_groups: list[dict[str, Any]] = []
    optimizer_entries: dict[str, Any] = {}
    lr_scheduler: _SavedSchedule | None = None
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    skipped: Natural = 0


class _SavedRun(_SavedPart):
    global_steps: Natural
    global_samples: Natural = 0
    train_batch_size: Natural = 0
    seed: int = 0
    optimizer: str | None = None
    param_groups: list[dict[str, Any]] = []
    optimizer_entries: dict[str, Any] = {}
    loss_scaler: _SavedLossScale | None = None
    lr_scheduler: _SavedSchedule | None = None
    local_updates: _SavedLocalUpdates | None = None
    membership: _SavedMembership | None = None
    exchange: _SavedCompression | None = None


class _SavedParent(_SavedPart):
    run: str
    step: Natural
    checksum: str


class _SavedIdentity(_SavedPart):
    run: str
    save: Natural
    order: Natural
    parent: _SavedParent | None


class SavedHead(_SavedPart):
    """The entries of an index beside ``files`` and ``tensors``, as ``Snapshot`` documents them."""

    tag: str = ""
    step: Natural
    written: Finite = 0.0
    versions: dict[str, str]
    grid: dict[str, Count]
    config: dict[str, Any]
    model: dict[str, Any] | None = None
    identity: _SavedIdentity | None = None
    run: _SavedRun
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
        checked = SavedHead.model_validate(dict(head))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    _decode("client_state", checked.client_state, client_tensor)
    for place, run in _runs(checked):
        _decode(f"{place}.param_groups", run.param_groups)
        _decode(f"{place}.optimizer_entries", run.optimizer_entries)
        if run.lr_scheduler is not None:
            state = _decode(f"{place}.lr_scheduler", run.lr_scheduler.state)
            for key in ("last_batch_iteration", "last_epoch"):
                _check_number(f"{place}.lr_scheduler.{key}", state.get(key, 0), -1)
    for name, state in checked.numbers.items():
        if not name.startswith("replica/") or "/" in name.removeprefix("replica/"):
            _check_number(f"numbers.{name}.step", _decode(f"numbers.{name}", state).get("step", 0), 0)


def _runs(head: SavedHead) -> list[tuple[str, _SavedRun | _SavedReplica]]:
    """Return the places that have options of parameter groups and a schedule: the run, and each replica."""
    runs: list[tuple[str, _SavedRun | _SavedReplica]] = [("run", head.run)]
    for name, state in head.numbers.items():
        if name.startswith("replica/") and "/" not in name.removeprefix("replica/"):
            try:
                runs.append((f"numbers.{name}", _SavedReplica.model_validate(state)))
            except ValidationError as error:
                first = error.errors(include_url=False, include_context=False)[0]
                raise ValueError(f"numbers.{name}.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return runs


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
