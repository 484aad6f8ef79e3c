"""The section ``local_updates``: replicas that step on their own, and meet every so many steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from .config_base import Section, setting

if TYPE_CHECKING:
    from .config import Config

_LR, _MOMENTUM, _STALENESS = 0.7, 0.9, 2


class LocalUpdatesConfig(Section):
    """``local_updates``: replicas step on their own, and meet every so many steps: docs/local-updates.md."""

    type: Literal["local_sgd", "diloco", "async_diloco"] = Field(
        description="What a meeting does. local_sgd: the mean of the replicas' weights; diloco: Nesterov's step on "
        "their mean difference; async_diloco: the same, with what is there, and nobody waits but at max_staleness.",
    )
    every: int = Field(description="Optimizer steps between two meetings.", ge=1)
    start_step: int = setting(
        0, "Optimizer steps of the run before replicas step on their own: these sum gradients, as ever.", ge=0
    )
    outer_lr: float | None = setting(
        None, "diloco, async_diloco: of the step at a meeting; by default 0.7.", gt=0.0, allow_inf_nan=False
    )
    outer_momentum: float | None = setting(None, "The same: its momentum; by default 0.9.", ge=0.0, lt=1.0)
    average_optimizer: bool = setting(
        False, "local_sgd, diloco: at a meeting take the mean of the optimizers' state too, in the dtype it has."
    )
    max_staleness: int | None = setting(
        None,
        "async_diloco: rounds that another replica's difference may be missing for; by default 2. 0: wait for all.",
        ge=0,
    )
    meet_early: bool | None = setting(
        None, "async_diloco: end a round early where others would soon wait for this replica; by default true."
    )

    @model_validator(mode="after")
    def _agrees(self) -> LocalUpdatesConfig:
        others = {
            "outer_lr": ("diloco", "async_diloco"),
            "outer_momentum": ("diloco", "async_diloco"),
            "max_staleness": ("async_diloco",),
            "meet_early": ("async_diloco",),
        }
        for key, types in others.items():
            if getattr(self, key) is not None and self.type not in types:
                raise ValueError(f"{key} is of type {' and '.join(types)}, and type is {self.type}: leave it out")
        if self.average_optimizer and self.type == "async_diloco":
            raise ValueError(
                "average_optimizer needs a moment at which all replicas are at one step, and async_diloco has none: "
                "leave it out, or write type diloco"
            )
        if self.meet_early and self.max_staleness == 0:
            raise ValueError("meet_early with max_staleness 0, where every round waits for all: give 1 or more")
        return self

    @property
    def outer(self) -> tuple[float, float]:
        """Learning rate and momentum of a meeting's step."""
        if self.type == "local_sgd":
            return 1.0, 0.0
        lr = _LR if self.outer_lr is None else self.outer_lr
        return lr, _MOMENTUM if self.outer_momentum is None else self.outer_momentum

    @property
    def staleness(self) -> int:
        """``max_staleness``, or its default."""
        return _STALENESS if self.max_staleness is None else self.max_staleness


def check(config: Config) -> None:
    """What the rest of a configuration must be for replicas to step on their own.

    Raises:
        ValueError: it is not; the message says why.
    """
    section, zero = config.local_updates, config.zero_optimization
    if section is None:
        return
    if zero.stage:
        raise ValueError(
            f"local_updates with zero_optimization.stage {zero.stage}, which shares one replica's state out over all, "
            "and here each replica has weights of its own: set the stage to 0"
        )
    if zero.offload_optimizer.device != "none":
        raise ValueError(
            f"local_updates with offload_optimizer on {zero.offload_optimizer.device}: common weights and differences "
            "are made beside the masters, on the device: leave one of them out"
        )
    scaled = config.prescale_gradients or config.gradient_predivide_factor != 1.0
    if scaled or config.torch_autocast.lower_precision_safe_modules:
        keys = "prescale_gradients and gradient_predivide_factor are"
        raise ValueError(
            f"{keys if scaled else 'torch_autocast.lower_precision_safe_modules is'} of gradients that are summed over "
            "replicas, and with local_updates, from start_step on, none are: leave them out (communication_data_type "
            "says how differences travel)"
        )
    if config.scheduler is not None and config.scheduler.type == "ReduceLROnPlateau":
        raise ValueError(
            "local_updates with ReduceLROnPlateau, which goes by the loss: each replica has its own, and their "
            "learning rates would part: take a schedule that goes by steps"
        )
    if section.type == "async_diloco" and config.checkpoint.every is not None:
        raise ValueError(
            "checkpoint.every with local_updates.type async_diloco: a checkpoint is of one moment, for which fast "
            "replicas would wait: leave it out, and have all call save_checkpoint after as many steps"
        )
