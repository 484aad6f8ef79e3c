"""Search for the microbatch size and the ZeRO stage by formulas and measured steps."""

from __future__ import annotations

from dataclasses import dataclass

from ..base.option_error import refusal
from .base import Options, option


@dataclass(frozen=True, kw_only=True)
class Tuning(Options):
    """Search for ``batch.microbatch`` of a PipelineModule, and for ``zero.stage`` if that is auto."""

    memory: float | None = option(
        None,
        "GB (1e9 bytes) that the tensors of a rank may take. None: a GPU's memory, or a share of the host's, less a "
        "margin.",
        above=0.0,
    )
    least: int = option(1, "Samples per microbatch, at least.", least=1)
    most: int = option(1024, "Samples per microbatch, at most.", least=1)
    sizes: int = option(
        3, "Number of sizes that fit of which the times of steps are measured; 1: the largest that fits, untimed.",
        least=1,
    )  # fmt: skip
    first_step: int = option(1, "Untimed steps of each size, before the timed ones.", least=0)
    last_step: int = option(3, "Steps of each size.", least=1)
    results: str | None = option(None, "Folder for options.json, the options with what was found, and results.json.")

    def check(self) -> None:
        """Check the ranges."""
        if self.least > self.most:
            raise refusal(f"<least> is {self.least}, above <most> {self.most}: change one of them")
        if self.first_step >= self.last_step:
            raise refusal(
                f"<first_step> is {self.first_step}, so that no step before <last_step> {self.last_step} is "
                "timed: give a larger <last_step>",
            )
