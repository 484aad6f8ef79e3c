"""The section ``checkpoint`` of the configuration."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from .config_base import Section, idle, refused, setting


class CheckpointConfig(Section):
    """``checkpoint``: how checkpoints are written and read, and when by themselves."""

    tag_validation: Literal["Ignore", "Warn", "Fail", "ignore", "warn", "fail", "IGNORE", "WARN", "FAIL"] = setting(
        "Warn", "Where ranks give unlike tags, rank 0's counts: silently, with a line, or it is an error."
    )
    verify: bool = setting(True, "Hold what is loaded against its checksums first.")
    patience: float = setting(
        30.0, "Seconds that a rank waits in save_checkpoint or load_checkpoint for ranks that do not come.", gt=0
    )
    on_failure: Literal["continue", "stop"] = setting(
        "continue",
        "What could not be written (a full disk) is said on every rank, save_checkpoint returns False, and the "
        "checkpoint before stays: continue; or every rank raises it: stop.",
    )
    async_: bool = setting(
        False,
        "Write behind the run: a save waits for a copy to the host's memory, and for the save before.",
        alias="async",
    )
    dir: str | None = setting(None, "Where checkpoints are written and looked for by themselves.")
    every: int | None = setting(
        None, "Save after so many steps into dir; and on SIGTERM, after the step under way, before leaving.", ge=1
    )
    keep: int | None = setting(
        None, "Of the checkpoints in dir that nobody gave a tag, keep so many of the last.", ge=1
    )
    resume: Literal["auto"] | None = setting(
        None, "auto: initialize goes on from the newest checkpoint in dir that is whole, if there is one."
    )
    load_universal: Any = idle("every checkpoint is read on any grid")
    parallel_write: Any = idle("every rank writes its own part of everything")
    use_node_local_storage: Any = refused("every rank reads what others wrote: leave it out, and save where all see it")
    writer: Any = refused("ranks write plain files: leave it out")
    checkpoint_serialization: Any = refused("nothing is pickled: leave it out")

    @model_validator(mode="after")
    def _agrees(self) -> CheckpointConfig:
        for key in ("every", "keep", "resume"):
            if getattr(self, key) is not None and self.dir is None:
                raise ValueError(f"{key} has no folder to go by: give dir too")
        if self.keep is not None and self.every is None:
            raise ValueError("keep is of checkpoints that are written by themselves: give every too")
        return self
