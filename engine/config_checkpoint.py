"""The section ``checkpoint`` of the configuration."""

from __future__ import annotations

from typing import Any, Literal

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
    load_universal: Any = idle("every checkpoint is read on any grid")
    parallel_write: Any = idle("every rank writes its own part of everything")
    use_node_local_storage: Any = refused("every rank reads what others wrote: leave it out, and save where all see it")
    writer: Any = refused("ranks write plain files: leave it out")
    checkpoint_serialization: Any = refused("nothing is pickled: leave it out")
