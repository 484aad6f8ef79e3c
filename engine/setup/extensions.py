"""Parts of an engine that packages beside the core offer by entry points: replica strategies, compressors, tuners."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint
from typing import Any

from ...base.entry_points import offered
from ...base.errors import ConfigError

_MEMBERS = "triax.engine_members"  # the entry points of other libraries' names of members -> functions of the engine
_COMPRESSORS = "triax.gradient_compression"  # the entry points of dataclasses that make an Exchange of buckets
_TUNERS = "triax.tuners"  # the entry points of modules with Tuner, Measured and model_of
_REPLICA_STRATEGIES = "triax.replica_strategies"  # the entry points of modules with step_grid and attach


def compressors() -> dict[str, EntryPoint]:
    """Return the gradient compressors by name."""
    return {entry.name: entry for entry in offered(_COMPRESSORS)}


def replica_strategy(name: str) -> Any:
    """Return the module of a replica strategy, such as ``plugins/local_sgd/strategy.py``.

    Raises:
        ConfigError: no installed package has it.
    """
    for entry in offered(_REPLICA_STRATEGIES).select(name=name):
        return entry.load()
    raise ConfigError(
        f"no installed package has the replica strategy {name!r}: install triax again, with all its parts"
    )


def tuner() -> Any:
    """Return the module with the search for the microbatch size and the ZeRO stage, such as ``plugins/plan/tuning.py``.

    Raises:
        ConfigError: no installed package has one.
    """
    for entry in offered(_TUNERS):
        return entry.load()
    raise ConfigError("no installed package can search for batch.microbatch or zero.stage: write them")


def foreign_members() -> Iterator[Mapping[str, Callable[[Any], Any]]]:
    """Yield the members that adapters add to engines: a name of another library -> function of the engine."""
    for entry in offered(_MEMBERS):
        yield entry.load()
