"""Phase of a replica: where it stands with the run, and how far it is with the present step. A value, without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

from .meeting import Round


class Standing(Enum):
    """Relation of a replica to the run.

    from      to           when
    APART     JOINING      it enters a round as a newcomer: the state of the donor is under way
    APART     MEMBER       it enters the first round of a run as the donor, whose state all get
    JOINING   MEMBER       the state of the donor is loaded
    JOINING   JOINING      the state did not come: it meets the others again, and still has none
    MEMBER    MEMBER       the next round begins
    MEMBER    APART        the others have gone on without it, and it holds a whole state of an earlier step
    MEMBER    JOINING      the same, and it holds parts of a state, which are of no use (ZeRO over replicas); or the
                           others give it their state at once
    MEMBER    LEFT         the step after which it leaves is taken; or the caller has called leave()
    MEMBER    HANDED_OVER  the same, while others go on, which have its part of the state (ZeRO over replicas)
    """

    APART = auto()
    JOINING = auto()
    MEMBER = auto()
    LEFT = auto()
    HANDED_OVER = auto()


@dataclass(frozen=True)
class Phase:
    """Phase of a replica. Each method returns the next one.

    Attributes:
        standing: relation to the run.
        round: the present round; None while this replica is in no round.
        first: first round of the present step, whose contributors took its shares of samples.
        prepared: the samples of the present step are chosen.
        computed: number of the round for whose contributors the gradients were computed; -1 before the first.
        ready: number of the last round for which weights and parts of the optimizer state were made ready.
        announced: the others know that this replica leaves after the present step.
        weighs: the gradients depend on weights of the whole batch. A fact of the loss: it stays once it is known.
    """

    standing: Standing = Standing.APART
    round: Round | None = None
    first: Round | None = None
    prepared: bool = False
    computed: int = -1
    ready: int = -1
    announced: bool = False
    weighs: bool = False

    @property
    def stateless(self) -> bool:
        """True if this replica has no state that another one could take."""
        return self.standing is Standing.JOINING

    @property
    def left(self) -> bool:
        """True if this replica has left the run."""
        return self.standing in (Standing.LEFT, Standing.HANDED_OVER)

    def entered(self, round_: Round, name: str) -> Phase:
        """Enter a round.

        Args:
            round_: the round.
            name: this replica's name.
        """
        again = self.first is not None and self.first.step == round_.step and not round_.fresh
        standing = Standing.JOINING if name in round_.newcomers else Standing.MEMBER
        return replace(self, standing=standing, round=round_, first=self.first if again else round_)

    def cut_off(self, holds_parts: bool) -> Phase:
        """Be in no round, with the state that this replica has, unless this is only parts of one."""
        stateless = self.stateless or holds_parts
        return replace(self, standing=Standing.JOINING if stateless else Standing.APART, round=None)

    def loaded(self) -> Phase:
        """Have the state of the run, from a donor."""
        return replace(self, standing=Standing.MEMBER)

    def ended(self, hands_over: bool = False) -> Phase:
        """Leave the run; ``hands_over``: others go on, which have this replica's part of the state."""
        return replace(self, standing=Standing.HANDED_OVER if hands_over else Standing.LEFT)
