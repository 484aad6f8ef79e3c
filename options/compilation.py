"""torch.compile of the model's layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..base.option_error import refusal
from .base import Options, option

KWARGS = ("mode", "options", "dynamic", "fullgraph")


@dataclass(frozen=True, kw_only=True)
class Compile(Options):
    """torch.compile of the layers of a ``PipelineModule``, or of the repeated blocks of another module."""

    backend: str = option("inductor", "Backend of torch.compile.")
    kwargs: dict[str, Any] = option(dict, "Arguments of torch.compile: mode, options, dynamic, fullgraph.")

    def check(self) -> None:
        """Check the names of the arguments."""
        unknown = sorted(self.kwargs.keys() - set(KWARGS))
        if unknown:
            raise refusal(f"kwargs has {unknown[0]}, but torch.compile takes {', '.join(KWARGS)}: give one of these")
        if self.backend != "inductor" and self.kwargs.keys() & {"mode", "options"}:
            raise refusal(
                f"kwargs mode and options are for the backend inductor, and the backend is {self.backend}: "
                "leave them out",
            )
