"""Section ``local_updates``: local SGD and DiLoCo, replicas that step separately and synchronize now and then."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from .base import Section, setting


class LocalUpdatesConfig(Section):
    """``local_updates``: replicas step separately and synchronize every N steps: docs/local-updates.md."""

    OPTIONS: ClassVar = {
        "local_sgd": (),
        "diloco": ("outer_lr", "outer_momentum"),
        "async_diloco": ("outer_lr", "outer_momentum", "max_staleness", "meet_early"),
    }

    type: Literal["local_sgd", "diloco", "async_diloco"] = Field(
        description="Synchronization. local_sgd: average the replicas' weights; diloco: Nesterov step on the mean "
        "difference; async_diloco: as diloco, with the differences received so far, waiting only at max_staleness.",
    )
    every: int = Field(description="Optimizer steps between two synchronizations.", ge=1)
    start_step: int = setting(
        0, "First optimizer step of local updates; earlier steps sum gradients over replicas.", ge=0
    )
    outer_lr: float | None = setting(None, "diloco, async_diloco: learning rate of the outer step; null: 0.7.", gt=0.0)
    outer_momentum: float | None = setting(
        None, "diloco, async_diloco: momentum of the outer step; null: 0.9.", ge=0.0, lt=1.0
    )
    average_optimizer: bool = setting(False, "local_sgd, diloco: average the optimizer state too, in its own dtype.")
    max_staleness: int | None = setting(
        None,
        "async_diloco: rounds for which another replica's difference may be missing; null: 2. 0: wait for all.",
        ge=0,
    )
    meet_early: bool | None = setting(
        None, "async_diloco: end a round early if other replicas would soon wait for this one; null: true."
    )

    @model_validator(mode="after")
    def _agrees(self) -> LocalUpdatesConfig:
        if self.meet_early and self.max_staleness == 0:
            raise ValueError("meet_early with max_staleness 0, where every round waits for all: give 1 or more")
        return self
