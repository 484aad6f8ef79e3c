"""Section ``checkpoint``: how checkpoints are written and read, and when automatically."""

from __future__ import annotations

from typing import Any, Literal

from .base import Section, idle, refused, setting


class CheckpointConfig(Section):
    """``checkpoint``: how checkpoints are written and read, and when automatically."""

    tag_validation: Literal["Ignore", "Warn", "Fail", "ignore", "warn", "fail", "IGNORE", "WARN", "FAIL"] = setting(
        "Warn", "If ranks give different tags: Ignore: use rank 0's; Warn: use it and warn; Fail: raise an error."
    )
    verify: bool = setting(True, "Check files against their checksums before loading.")
    patience: float = setting(
        30.0, "Seconds that a rank waits in save_checkpoint or load_checkpoint for the other ranks.", gt=0
    )
    on_failure: Literal["continue", "stop"] = setting(
        "continue",
        "If writing fails (a full disk): continue: log it on every rank, return False from save_checkpoint, and keep "
        "the previous checkpoint; stop: raise an error on every rank.",
    )
    async_: bool = setting(
        False,
        "Write in the background: a save waits for a copy to host memory, and for the previous save.",
        alias="async",
    )
    dir: str | None = setting(
        None, "Folder in which checkpoints are written and found automatically: a path, or a URI as s3://bucket/run."
    )
    every: int | None = setting(
        None,
        "Save into dir every N steps, and on SIGTERM or SIGUSR1 at the end of the current step before exiting.",
        ge=1,
    )
    keep: int | None = setting(None, "Number of automatic checkpoints to keep in dir; older ones are removed.", ge=1)
    resume: Literal["auto"] | None = setting(
        None, "auto: initialize resumes from the newest complete checkpoint in dir, if there is one."
    )
    load_universal: Any = idle("every checkpoint loads on any grid")
    parallel_write: Any = idle("every rank writes its own shards")
    use_node_local_storage: Any = refused(
        "ranks read files of other ranks: leave it out, and save to storage that all hosts share"
    )
    writer: Any = refused("ranks write plain files: leave it out")
    checkpoint_serialization: Any = refused("nothing is pickled: leave it out")
