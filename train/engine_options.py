"""The engine's options of a training file: its sections, and in their place those that its ``deepspeed`` sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from ..base.errors import ConfigError
from ..base.option_error import OptionError
from ..grid.environment import replica_name
from ..options.base import Options, as_kind, declared
from ..options.batch import Batch
from ..options.checkpoints import Checkpoints
from ..options.dialect import GivenOptions, find_dialect
from ..options.engine import EngineOptions
from ..options.monitoring import Monitoring
from ..options.named import Optimizer
from ..options.schedule import ScheduleOptions
from .sections import TrainingFile


def name_of(path: str, overridden: frozenset[str] = frozenset()) -> str:
    """Return the key of an option in the training file.

    Args:
        path: the option.
        overridden: the options that the file's section ``deepspeed`` sets.
    """
    if path.partition(".")[0] in overridden:
        return f"deepspeed.{find_dialect('deepspeed').key_of(path)}"
    return path


def foreign_options(file: TrainingFile) -> GivenOptions:
    """Return the options that the section ``deepspeed`` sets, without the keys that are "auto": the file has them."""
    if file.deepspeed is None:
        return GivenOptions({}, {})
    dialect = find_dialect("deepspeed")
    kept = dialect.given_keys(file.deepspeed)
    for ours in _given_options(file):
        key = dialect.key_of(ours).partition(".")[0]
        if key in kept and key != "checkpoint":
            raise ConfigError(f"{ours} and deepspeed.{key} say the same: give one of them")
    if (key := dialect.key_of("monitor.json").partition(".")[0]) in kept:
        raise ConfigError(
            f"deepspeed.{key} has no effect here, because metrics.jsonl is written in the run's folder: leave it out, "
            "and give name and runs"
        )
    for name in ("folder", "every", "keep", "resume"):
        key = dialect.key_of(f"checkpoint.{name}")
        section, _, last = key.partition(".")
        if isinstance(kept.get(section), Mapping) and last in kept[section]:
            raise ConfigError(f"deepspeed.{key} has no effect: leave it out, and give checkpoint.{name}")
    try:
        found = dialect.given_options(kept)
    except OptionError as error:
        raise ConfigError(error.spelled(lambda path: f"deepspeed.{dialect.key_of(path)}")) from error
    except ConfigError as error:
        text = str(error)
        begins = text.startswith(dialect.TITLE)
        raise ConfigError(text.replace(dialect.TITLE, "deepspeed", 1) if begins else f"deepspeed.{text}") from error
    for ours in _given_options(file):  # keys of these options may have several sections, as fp16 and bf16
        section, _, name = ours.partition(".")
        if name in (fields if isinstance(fields := found.fields.get(section), dict) else ()):
            raise ConfigError(f"{ours} and deepspeed.{dialect.key_of(ours)} say the same: give one of them")
    optimizer = found.fields.get("optimizer")
    if optimizer is not None and "lr" in optimizer.arguments and "peak" in file.training.learning_rate.given:
        raise ConfigError("training.learning_rate and deepspeed.optimizer.params.lr say the same: give one of them")
    if "lr_scheduler" in found.fields and "learning_rate" in file.training.given:
        raise ConfigError(
            f"training.learning_rate and deepspeed.{dialect.key_of('lr_scheduler')} say the same: give one of them"
        )
    return found


def engine_options(file: TrainingFile, given: GivenOptions, batch: Batch) -> EngineOptions:
    """Return the engine's options: those of the training file, and those that ``deepspeed`` sets in their place."""
    folder, peak, faults = str(Path(file.runs) / file.name), file.training.learning_rate.peak, file.fault_tolerance
    if "lr" in file.optimizer.arguments:
        raise ConfigError("optimizer.lr is the learning rate: give it as training.learning_rate")
    if faults is not None:
        faults = faults.changed(
            replica=faults.replica or replica_name(), folder=faults.folder or str(Path(folder) / "history")
        )
    named = given.fields.get("optimizer")
    if named is not None and "lr_scheduler" not in given.fields:
        given.fields["optimizer"] = Optimizer(named.type, state=named.state, **{"lr": peak, **named.arguments})
    rate = {} if "lr_scheduler" in given.fields else {"lr": peak}
    checkpoint = Checkpoints()
    if file.checkpoint.every is not None:
        place = file.checkpoint.folder or str(Path(folder) / "checkpoints")
        checkpoint = as_kind(file.checkpoint.changed(folder=place), Checkpoints)
    options = as_kind(file, EngineOptions).changed(
        batch=batch,
        optimizer=file.optimizer.at_rate(**rate),
        schedule=as_kind(file.schedule, ScheduleOptions),
        fault_tolerance=faults,
        monitor=as_kind(file.monitor.changed(json=folder, print_every=None), Monitoring),
        checkpoint=checkpoint,
        names=partial(name_of, overridden=frozenset(given.fields)),
    )
    return given.over(options)


def _given_options(file: TrainingFile) -> Iterator[str]:
    """Yield the paths of the engine's options that a file gives: of the sections, and of their options."""
    for each in declared(EngineOptions):
        if each.name in file.given:
            yield each.name
            section = getattr(file, each.name)
            yield from (f"{each.name}.{name}" for name in section.given) if isinstance(section, Options) else ()
    if file.batch.tokens is not None:
        yield "batch.size"  # it follows from them
