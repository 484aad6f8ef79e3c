"""The options of a configuration: what each row of the table sets, put together as ``EngineOptions``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ....base.errors import ConfigError
from ....base.option_error import OptionError
from ....options.batch import BatchSizes
from ....options.engine import EngineOptions
from ....options.named import GradientCompression, LRSchedule
from . import elasticity
from .checks import OTHER_NAMES
from .optimizer_names import native_optimizer
from .read import Section, read_section
from .table import key_of, option_classes

_NOT_SET: Any = object()


def parse_config(config: Section | Mapping[str, Any] | str | Path) -> Section:
    """Return a configuration from a dict, or from the path of a JSON file, with its keys, values and options checked.

    ``from_config.read_config`` checks the names of schedules and optimizers too.

    Raises:
        ConfigError: a key that does not exist (the message names the nearest key), a value that is not allowed, or a
            feature that is not supported; the message says what to write instead.
    """
    if isinstance(config, Section):
        return config
    checked = read_section(config)
    try:
        options_of(checked)
    except OptionError as error:
        raise ConfigError(error.spelled(key_of)) from error
    return checked


def options_of(config: Section, replicas: int | None = None) -> EngineOptions:
    """Return the options of a configuration.

    Args:
        config: the configuration.
        replicas: number of replicas, by which ``elasticity`` chooses the batch sizes. None: without these.

    Raises:
        OptionError: options contradict each other; ``key_of`` spells them.
        ConfigError: ``elasticity`` has no batch size for this number.
    """
    values = option_values(config)
    if replicas is not None and config.elasticity.enabled:
        values["batch"]["size"], values["batch"]["microbatch"] = elasticity.sizes(config.elasticity, replicas)
    return EngineOptions(**values, names=key_of)


def batch_sizes(config: Section, replicas: int) -> BatchSizes:
    """Return all three batch sizes from those that the configuration gives.

    Raises:
        ConfigError: no size is given, or those given contradict each other; the message shows the product.
    """
    try:
        return options_of(config, replicas).batch_sizes(replicas)
    except OptionError as error:
        raise ConfigError(error.spelled(key_of)) from error


def notes_of(config: Section) -> list[str]:
    """Return notes on the keys of a configuration that have no effect, and on its options that have none."""
    notes, wanted, bf16 = config.notes(), config.data_types.grad_accum_dtype, config.bf16
    if config.torch_autocast.enabled and config.torch_autocast.dtype in ("float16", "fp16"):  # it has fp16's loss scale
        notes = [note for note in notes if not (note.startswith("fp16.") and "without enabled" in note)]
    masters = "bf16" if bf16.enabled and bf16.bf16_master_weights_and_grads else "fp32"
    if wanted not in (None, masters):
        notes.append(
            f"data_types.grad_accum_dtype {wanted} does nothing: gradients are accumulated in the dtype of the "
            f"master weights, {masters}; communication_data_type sets the dtype in which replicas sum them"
        )
    noted = {note.partition(" ")[0] for note in notes}
    others = [note.spelled(key_of) for note in options_of(config).notes()]
    return notes + [note for note in others if note.partition(" ")[0] not in noted]


def option_values(config: Section) -> dict[str, Any]:
    """Return the options that the given keys set: option, or section of options -> value, or its options' values."""
    values: dict[str, Any] = {}
    sections = {f"{part.table.path}.{name}".lstrip(".") for part in config.walk() for name in part.given}
    for section in config.walk():
        rows = section.table
        for name, key in rows.keys.items():
            if name in section.given and key.option is not None:
                value = _option_value(key.row, section, section.values[name])
                if value is not _NOT_SET:
                    _put(values, key.option, value)
        if "to" in rows.row:
            for path, value in _OF_SECTIONS[rows.row["to"]](section, config).items():
                _put(values, path, value)
        if "on" in rows.row and rows.path in sections:
            switch = rows.row.get("switch")
            _switch(values, rows.row["on"], switch is None or bool(section.values[switch]))
    return values


def _option_value(row: Mapping[str, Any], section: Section, value: Any) -> Any:
    if "when_true" in row:
        return row["when_true"] if value else _NOT_SET
    if "to" in row:
        return _OF_KEYS[row["to"]](value, section)
    return _NOT_SET if value is None and row.get("null") else value  # the option's default stands for null


def _put(values: dict[str, Any], path: str, value: Any) -> None:
    """Set the option at a path."""
    *sections, last = path.split(".")
    for name in sections:
        values = values.setdefault(name, {})
    values[last] = value


def _switch(values: dict[str, Any], path: str, on: bool) -> None:
    """Switch on the section of options at a path, or off; its options are checked in both cases."""
    *outer, last = path.split(".")
    for name in outer:
        values = values.setdefault(name, {})
    given = values.pop(last, None) or {}
    try:
        option_classes(path)[0].of(given)
    except OptionError as error:
        raise error.within(path) from error
    values[last] = given if on else None


def folder(section: Section) -> Path:
    """Return the folder to which a monitor writes files."""
    return Path(section.output_path) / section.job_name


def _autocast(enabled: bool, section: Section) -> Any:
    return {"bfloat16": "bf16", "float16": "fp16"}.get(section.dtype, section.dtype) if enabled else _NOT_SET


def _operations(_: Any, section: Section) -> Any:
    if not section.enabled:
        return _NOT_SET
    return None if section.prof_all else tuple(sorted({OTHER_NAMES.get(name, name) for name in section.prof_ops}))


# Conversions of one key's value: (value, section) -> the option's value.
_OF_KEYS: dict[str, Callable[[Any, Section], Any]] = {
    "zero_is_none": lambda value, _: value or None,
    "minus_one_is_none": lambda value, _: None if value == -1 else value,
    "is_auto": lambda value, _: value == "auto",
    "folder": lambda enabled, section: str(folder(section)) if enabled else None,
    "autocast": _autocast,
    "if_enabled": lambda value, section: value or None if section.enabled else _NOT_SET,
    "no_master_weights": lambda value, section: False if value and section.enabled else _NOT_SET,
    "operations": _operations,
    "sum_dtype": lambda value, _: value if value in ("fp16", "bf16") else _NOT_SET,
}


def _compression(section: Section, config: Section) -> dict[str, Any]:
    if config.sparse_gradients:
        return {"compression": GradientCompression("sparse_rows")}
    if section.type not in ("topk", "powersgd"):
        return {}
    rows = section.table.keys.items()
    arguments = {name: section.values[name] for name, key in rows if section.type in key.row.get("types", ())}
    return {"compression": GradientCompression(section.type, **arguments)}


def _amp(section: Section, config: Section) -> dict[str, Any]:
    if not section.enabled or section.opt_level != "O1" or config.torch_autocast.enabled:
        return {}
    # apex: starts at 2^16, doubled after 2000 steps without overflow, halved at each overflow
    minimum = section.min_loss_scale or 1.0
    scale = {"fixed": section.loss_scale, "window": 2000, "hysteresis": 1, "minimum": minimum}
    return {"precision.autocast": "fp16", "precision.loss_scale": scale}


def _recompute(section: Section, config: Section) -> dict[str, Any]:
    if section.enabled is False:
        return {"recompute": {"enabled": False}}
    other = config.pipeline.activation_checkpoint_interval
    return {"recompute.interval": other} if other and section.interval is None else {}


def _elasticity(section: Section, config: Section) -> dict[str, Any]:
    if not section.enabled:
        return {}
    return {f"batch.{name}": None for name in ("size", "microbatch", "microbatches")}  # chosen for a number of replicas


def _stage_to_find(section: Section, config: Section) -> dict[str, Any]:
    return {"zero.stage": "auto"} if section.enabled and "stage" not in config.zero_optimization.given else {}


# Conversions of several keys: (section, configuration) -> the options that they set.
_OF_SECTIONS: dict[str, Callable[[Section, Section], dict[str, Any]]] = {
    "optimizer": lambda section, _: {"optimizer": native_optimizer(section.type, section.params)},
    "scheduler": lambda section, _: {"lr_scheduler": LRSchedule(section.type, **section.params)},
    "compression": _compression,
    "amp": _amp,
    "recompute": _recompute,
    "elasticity": _elasticity,
    "stage_to_find": _stage_to_find,
}
