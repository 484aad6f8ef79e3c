"""Section ``compile``: torch.compile of the model's layers."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from .base import SwitchSection, refused, setting


class CompileConfig(SwitchSection):
    """``compile``: compile the layers of a ``PipelineModule``, or the repeated blocks of another module."""

    enabled: bool = setting(False, "Compile; the section may also be true.")
    backend: str = setting("inductor", "Backend of torch.compile.")
    kwargs: dict[str, Any] = setting({}, "Arguments of torch.compile: mode, options, dynamic, fullgraph.")
    deepcompile: Any = refused("triax has no DeepCompile: leave it out, and set compile to true for torch.compile")

    @model_validator(mode="before")
    @classmethod
    def _on(cls, values: Any) -> Any:
        return {"enabled": True} if values is True else values
