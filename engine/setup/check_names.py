"""Checks of an engine's options by name: the schedule, the optimizer and the learning-rate schedule."""

from __future__ import annotations

from ...base.errors import ConfigError
from ...base.option_error import refusal
from ...options.contradictions import fp16_of_means
from ...options.engine import EngineOptions
from ...options.named import LRSchedule, Optimizer
from ...pipe.schedules.choose import require_schedule
from ..optim import optimizers, schedulers
from ..optim import trial_step as dry_run
from .compression import named_compressor, require_fitting
from .optimizer import require_elementwise, require_whole_tensors


def check_names(options: EngineOptions) -> None:
    """Check that what the options name exists and takes its arguments. Nothing is made.

    Raises:
        ConfigError: a name or an argument that does not exist, or one that another option does not allow.
    """
    try:
        if options.schedule.value is None:
            require_schedule("<schedule.name>", options.schedule.name)
    except ConfigError as error:
        raise refusal(str(error)) from error
    optimizer, schedule = options.optimizer, options.lr_scheduler
    if isinstance(optimizer, Optimizer):
        _check_optimizer(options, optimizer)
    named_compressor(options)
    if isinstance(schedule, LRSchedule):
        if options.local_updates is not None and schedule.type == "ReduceLROnPlateau":
            raise refusal(
                "<local_updates> does not work with ReduceLROnPlateau, because each replica has its own loss, "
                "so that their learning rates would differ: use a schedule that follows steps",
            )
        schedulers.make_scheduler(schedule.type, schedule.arguments)


def try_names(options: EngineOptions) -> None:
    """Check what a file names where no engine is made, by ``check_names`` and a few steps with it over one number.

    Raises:
        ConfigError: as ``check_names``, or a value that the optimizer or the schedule refuses.
    """
    check_names(options)
    optimizer, schedule, named = options.optimizer, options.lr_scheduler, None
    if isinstance(optimizer, Optimizer):
        named = optimizer.type, optimizer.arguments
        require_fitting(named_compressor(options), dry_run.try_optimizer(*named))
    if isinstance(schedule, LRSchedule):
        dry_run.try_scheduler(schedule.type, schedule.arguments, named)


def _check_optimizer(options: EngineOptions, optimizer: Optimizer) -> None:
    cls, _ = optimizers.resolve(optimizer.type, optimizer.arguments)
    name = cls.__name__
    if hasattr(cls, "stepper"):
        if options.reduction.dtype == "fp16":
            raise fp16_of_means(name)
        if options.compression is not None:
            raise refusal(
                f"{name} already compresses what it sends, so <compression> cannot be used with it: leave "
                "<compression> out",
            )
    require_whole_tensors(cls, options.zero)
    if name not in optimizers.WHOLE_TENSOR:
        require_elementwise(cls)
