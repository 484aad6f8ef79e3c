"""All options of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..base.option_error import Names, Note
from .contradictions import check_agreement
from .sections import EngineSections


@dataclass(frozen=True, kw_only=True)
class EngineOptions(EngineSections):
    """Options of an engine: the keywords of ``triax.Engine``, and the sections of a training file.

    >>> options = triax.EngineOptions(batch=8, zero=1, clip=1.0)
    >>> options.plain(given=True)
    {'batch': {'size': 8}, 'zero': {'stage': 1}, 'clip': 1.0}

    Attributes:
        names: function from an option's path, such as ``zero.stage``, to its name where the user gave it.
    """

    names: Names = field(default=str, repr=False, compare=False)  # of options, where the user gave them

    def check(self) -> None:
        """Check the sections against one another."""
        check_agreement(self)

    def notes(self) -> list[Note]:
        """Return notes on options that have no effect."""
        notes = super().notes()
        if self.tuning is not None and not (self.tunes_microbatch or self.zero.stage == "auto"):
            notes.append(
                Note(
                    "tuning",
                    "does nothing, because microbatches and the ZeRO stage are given: leave out <batch.microbatch> (or "
                    "<batch.microbatches>), or <zero.stage>",
                )
            )
        return notes

    def say(self, text: str) -> str:
        """Return a text for the user, with each option that it mentions as ``<path>`` under its name."""
        return Note("", text).spelled(self.names)
