"""Checkpoints: how the engine writes and reads them, and when it saves by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..base.checks import path_text
from ..base.option_error import Note, refusal
from .base import Options, option


def resume_text(value: Any) -> Any:
    """Return the value of ``resume`` if a checkpoint's folder can have its name, also while it is written."""
    if isinstance(value, str):
        path_text(value)
        path_text(f".{value.rstrip('/').rpartition('/')[2]}")
    return value


@dataclass(frozen=True, kw_only=True)
class Checkpoints(Options):
    """Checkpoints: how the engine writes and reads them, and when it saves by itself.

    >>> model = triax.PipelineModule([triax.LayerSpec(nn.Linear, 4, 1)], loss_fn=nn.functional.mse_loss)
    >>> checkpoint = triax.Checkpoints(folder="runs/checkpoints", every=2)
    >>> engine = triax.Engine(model, optimizer=triax.Optimizer("Adam"), batch=1, checkpoint=checkpoint)
    >>> for step in range(4):
    ...     loss = engine.train_batch(iter([(torch.ones(1, 4), torch.ones(1, 1))]))
    >>> [name for name in sorted(os.listdir("runs/checkpoints")) if name[0] != "."]
    ['global_step2', 'global_step4', 'latest']
    """

    folder: str | None = option(
        None,
        "Folder in which checkpoints are written and found automatically: a path, or a URI as s3://bucket/run.",
        read=path_text,
    )
    every: int | None = option(
        None,
        "Save into the folder every N steps, and on SIGTERM or SIGUSR1 at the end of the current step before exiting.",
        least=1,
    )
    keep: int | None = option(
        None, "Number of automatic checkpoints to keep in the folder; older ones are removed.", least=1
    )
    resume: bool | str = option(
        False,
        "True or auto: resume from the newest complete checkpoint in the folder, if there is one; required: there must "
        "be one; the tag or path of a checkpoint: resume from it; False or never: do not resume.",
        read=resume_text,
    )
    background: bool = option(
        False, "Write in the background: a save waits for a copy to host memory, and for the previous save."
    )
    on_failure: Literal["continue", "stop"] = option(
        "continue",
        "If writing fails (a full disk): continue: log it on every rank, return False from save_checkpoint, and keep "
        "the previous checkpoint; stop: raise an error on every rank.",
    )
    verify: bool = option(True, "Check files against their checksums before loading.")
    patience: float = option(
        30.0, "Seconds that a rank waits in save_checkpoint or load_checkpoint for the other ranks.", above=0
    )
    tag_validation: Literal["ignore", "warn", "fail"] = option(
        "warn", "If ranks give different tags: ignore: use rank 0's; warn: use it and warn; fail: raise an error."
    )

    def check(self) -> None:
        """Check that automatic checkpoints have a folder."""
        for name in ("every", "keep", "resume"):
            if getattr(self, name) not in (None, False, "never") and self.folder is None:
                raise refusal(f"<{name}> needs a folder: give <folder> too")
        if self.keep is not None and self.every is None:
            raise refusal("<keep> is for automatic checkpoints: give <every> too")

    def notes(self) -> list[Note]:
        """Return a note on a folder that nothing uses."""
        if self.folder is not None and self.every is None and self.resume in (False, "never"):
            text = "does nothing without <every> or <resume>: write one of them, or call save_checkpoint with this "
            return [Note("folder", f"{text}folder")]
        return []
