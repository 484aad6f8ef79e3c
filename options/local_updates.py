"""Local SGD and DiLoCo: replicas that step separately and synchronize now and then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ..base.errors import no_such
from ..base.option_error import refusal
from .base import Options, option


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Options):
    """Replicas step separately; a synchronization averages their weights (Stich 2019, arXiv:1805.09767)."""

    TYPE: ClassVar[str] = "local_sgd"  # name of the class where a file names it

    every: int = option(1, "Optimizer steps between two synchronizations.", least=1)
    start_step: int = option(
        0, "First optimizer step of local updates; earlier steps sum gradients over replicas.", least=0
    )
    average_optimizer: bool = option(False, "Average the optimizer state too, in its own dtype.")

    @property
    def outer(self) -> tuple[float, float]:
        """Learning rate and momentum of the outer step."""
        return 1.0, 0.0

    @classmethod
    def of(cls, value: Any) -> Self:
        """Return the section for a mapping, whose ``type`` names the class."""
        if not isinstance(value, Mapping):
            return super().of(value)
        kinds = {kind.TYPE: kind for kind in (LocalSGD, DiLoCo, AsyncDiLoCo)}
        given = {key: each for key, each in value.items() if key != "type"}
        kind = value.get("type")
        if kind not in kinds:
            raise refusal(no_such("<type>", str(kind), kinds))
        made: Any = super(LocalSGD, kinds[kind]).of(given)
        return made


@dataclass(frozen=True, kw_only=True)
class DiLoCo(LocalSGD):
    """Local SGD with an outer Nesterov step on the mean change of the weights (Douillard 2023, arXiv:2311.08105)."""

    TYPE: ClassVar = "diloco"

    outer_lr: float = option(0.7, "Learning rate of the outer step.", above=0.0)
    outer_momentum: float = option(0.9, "Momentum of the outer step.", least=0.0, below=1.0)

    @property
    def outer(self) -> tuple[float, float]:
        """Learning rate and momentum of the outer step."""
        return self.outer_lr, self.outer_momentum


@dataclass(frozen=True, kw_only=True)
class AsyncDiLoCo(DiLoCo):
    """DiLoCo with the changes that other replicas have sent so far; it waits for them only at ``max_staleness``."""

    TYPE: ClassVar = "async_diloco"

    max_staleness: int = option(
        2, "Rounds for which another replica's difference may be missing. 0: wait for all.", least=0
    )
    meet_early: bool = option(
        True, "End a round early if other replicas would soon wait for this one; not with max_staleness 0."
    )

    def check(self) -> None:
        """Check the options against each other."""
        if self.average_optimizer:
            raise refusal(
                "<average_optimizer> needs all replicas at the same step, and with async_diloco they are not: "
                "leave it out, or take diloco",
            )
