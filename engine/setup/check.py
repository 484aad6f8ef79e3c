"""Reading a configuration with all checks: also the names and arguments of schedules and optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...config.config import BatchSizes, parse_config
from ...config.consistency import fp16_of_means
from ...config.resolved import resolved
from ...config.schema import Config
from ...grid.errors import ConfigError
from ...optim import dry_run, optimizers, schedulers
from ...pipe.schedules.choose import require_schedule
from .compression import require_one_momentum
from .optimizer import ONE_BIT, require_elementwise, require_whole_tensors


def read_config(source: Config | Mapping[str, Any] | str | Path) -> Config:
    """Return a checked configuration from a dict, or from the path of a JSON file (with comments, if it has any).

    Raises:
        ConfigError: a key that does not exist (the nearest that does is named), a value that cannot be, or what
            triax does not support; the message says what to write instead.
    """
    if isinstance(source, Config):
        return source
    config = parse_config(source)
    require_schedule("pipeline.schedule", config.pipeline.schedule)
    if config.optimizer is not None or config.scheduler is not None:
        _try_out(config)
    return config


def resolve_config(config: Config, batch: BatchSizes) -> dict[str, Any]:
    """Return the configuration with every default filled in, those of its optimizer and scheduler too."""
    values = resolved(config, batch)
    if config.optimizer is not None:
        values["optimizer"] = optimizers.resolved(config.optimizer.type, config.optimizer.params, ONE_BIT)
    if config.scheduler is not None:
        values["scheduler"] = schedulers.resolved(config.scheduler.type, config.scheduler.params)
    return values


def _try_out(config: Config) -> None:
    """Make the optimizer and the schedule over a parameter of one element, and take a few steps with them."""
    optimizer, scheduler = config.optimizer, config.scheduler
    if optimizer is not None:
        cls, _ = optimizers.resolve(optimizer.type, optimizer.params, ONE_BIT)
        if cls.__name__ in ONE_BIT:
            _check_onebit(config, cls.__name__)
        require_whole_tensors(cls, config)
        if cls.__name__ not in optimizers.WHOLE_TENSOR:
            require_elementwise(cls)
        made = dry_run.try_optimizer(optimizer.type, optimizer.params, ONE_BIT)
        require_one_momentum(config, made)
    if scheduler is not None:
        if config.local_updates is not None and scheduler.type == "ReduceLROnPlateau":
            raise ConfigError(
                "local_updates does not work with ReduceLROnPlateau, because each replica has its own loss, so that "
                "their learning rates would differ: use a schedule that follows steps"
            )
        over = None if optimizer is None else (optimizer.type, optimizer.params)
        dry_run.try_scheduler(scheduler.type, scheduler.params, over, ONE_BIT)


def _check_onebit(config: Config, name: str) -> None:
    """Refuse fp16 communication, or a compressor of gradients, beside a 1-bit optimizer."""
    if "fp16" in (config.gradient_compression.type, config.communication_data_type):
        raise ConfigError(fp16_of_means(config, name))
    if config.compressor is not None:
        key = config.compressor.partition(".")[0]
        raise ConfigError(f"{name} already compresses what it sends, so {key} cannot be used with it: leave {key} out")
