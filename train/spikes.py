"""Spikes of the loss and of the gradient norm: warn, skip the step, or rewind to the last checkpoint.

    warn      the step is taken
    skip      the step is not taken, and its batch is left out
    rewind    the run goes back to the last checkpoint, and on with the batches behind the spike, which is the remedy of
              PaLM (Chowdhery et al., 2022, section 5.1)

After 50 steps in a row that were left out the run ends with an error (``engine/optim/nonfinite.py``).

A value that is not finite is a spike, except a gradient that overflows under fp16, which the loss scale handles. Every
rank judges the same sums, before the optimizer changes a weight, so all ranks decide alike, and on every grid.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from ..base.errors import AgreedError, ConfigError
from ..checkpoint.format import folder as folders
from ..engine.step_observer import StepObserver
from .sections import SpikesSection

_LEAST = 20  # values of the window from which on a value is judged, or as many as it holds if that is less
_FLOOR = 0.01  # least deviation of the losses, as a share of their median: losses that stand still have none
_NORMAL = 1.4826  # standard deviation of normal values whose median absolute deviation is 1
_LOG = logging.getLogger("triax")


class SpikeDetector:
    """Judges each step's loss and gradient norm by those of the steps before it.

    | value | it is a spike if |
    |---|---|
    | loss | loss > median + ``loss`` x deviation |
    | norm | norm > ``norm`` x median |
    | either | it is not finite |

    The deviation is 1.4826 times the median absolute deviation, which is the standard deviation of normal values and,
    unlike that, hardly changes with earlier spikes. It is at least 1 % of the median.

    Args:
        loss: standard deviations above the median of the losses.
        norm: multiple of the median of the norms.
        window: number of steps before this one that are looked at.

    Attributes:
        losses, norms: the finite values of the window, the last one at the end; spikes are among them.
    """

    def __init__(self, loss: float, norm: float, window: int) -> None:
        self._loss, self._norm, self._window = loss, norm, window
        self.losses: list[float] = []
        self.norms: list[float] = []

    def judge(self, loss: float | None, norm: float | None) -> str:
        """Return the reason for which a step is a spike, empty if it is none, and move the window on.

        Args:
            loss: the mean loss of the step's batch. None: not judged.
            norm: the norm of its gradient before clipping. None: not judged.
        """
        reasons = []
        if loss is not None:
            reasons.append(self._reason_of_loss(loss))
            self._push(self.losses, loss)
        if norm is not None:
            reasons.append(self._reason_of_norm(norm))
            self._push(self.norms, norm)
        return " and ".join(filter(None, reasons))

    def _reason_of_loss(self, loss: float) -> str:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if len(self.losses) < min(_LEAST, self._window):
            return ""
        middle = median(self.losses)
        deviation = max(_NORMAL * median(abs(each - middle) for each in self.losses), _FLOOR * abs(middle))
        if loss <= middle + self._loss * deviation:
            return ""
        return (
            f"the loss is {loss:.4g}, and the {len(self.losses)} steps before have a median of {middle:.4g} and a "
            f"deviation of {deviation:.2g}"
        )

    def _reason_of_norm(self, norm: float) -> str:
        if not math.isfinite(norm):
            return f"the norm of the gradient is {norm}"
        if len(self.norms) < min(_LEAST, self._window) or norm <= self._norm * median(self.norms):
            return ""
        return (
            f"the norm of the gradient is {norm:.4g}, and the {len(self.norms)} steps before have a median of "
            f"{median(self.norms):.4g}"
        )

    def _push(self, values: list[float], value: float) -> None:
        if math.isfinite(value):
            values.append(value)
            del values[: -self._window]


class SpikeGuard(StepObserver):
    """Observes the steps of an engine and acts on spikes. Call ``rewind`` after each ``train_batch``.

    It is one of the engine's observers from its construction on. Put ``state`` into the client state of each
    checkpoint, and give it to ``load`` when a run resumes, so that it decides as if it had not stopped.

    Args:
        engine: the engine.
        options: action, limits and window.
        folder: the folder of checkpoints to go back to, or its URI; None: there are none.

    Attributes:
        state: the window and the number of rewinds, for the client state. It is changed in place.
        spikes: number of spikes so far.

    Raises:
        ConfigError: the action is skip or rewind under ``local_updates``, whose replicas have losses of their own; or
            it is rewind without checkpoints.
    """

    def __init__(self, engine: Any, options: SpikesSection, folder: str | Path | None) -> None:
        self._engine, self._folder = engine, None if folder is None else folders.folder_at(folder)
        self._action, self._limit = options.action, options.limit
        self._detector = SpikeDetector(options.loss, options.norm, options.window)
        self.state: dict[str, Any] = {"losses": self._detector.losses, "norms": self._detector.norms, "rewinds": 0}
        self.spikes = 0
        self._found = ""  # reason of a spike after which the run must go back
        if self._action == "none":
            return
        if self._action != "warn" and engine.options.local_updates is not None:
            raise ConfigError(
                f"training.spikes is {self._action}, but under local_updates each replica has its own loss, and all "
                "must take the same steps: write warn or none"
            )
        if self._action == "rewind" and folder is None:
            raise ConfigError(
                "training.spikes is rewind, but the run saves no checkpoints to go back to: write checkpoint with "
                "every, or skip instead of rewind"
            )
        engine.optimizer_step.global_norm()  # a single process, too, computes the norm of each step from now on
        engine.observers.append(self)

    def load(self, client_state: Mapping[str, Any] | None) -> None:
        """Continue from the state in the client state of a loaded checkpoint, whose key is ``spikes``."""
        saved = (client_state or {}).get("spikes") or {}
        self._detector.losses[:] = saved.get("losses", [])
        self._detector.norms[:] = saved.get("norms", [])
        self.state["rewinds"] = saved.get("rewinds", 0)

    def may_step(self, loss: float | None, norm: float | None) -> bool:
        """Return False if the step is a spike that is left out. Otherwise a value that is not finite meets nan_loss."""
        found = self._detector.judge(loss, norm)
        if not found:
            return True
        self.spikes += 1
        what = {"warn": "", "skip": ": the step is left out", "rewind": ": the run goes back"}[self._action]
        self._say("step %d is a spike, because %s%s", self._engine.global_steps + 1, found, what)
        if self._action == "warn":
            return True
        self._found = found if self._action == "rewind" else ""
        self._engine.optimizer_step.nonfinite.skip(f"step {self._engine.global_steps + 1} is a spike, because {found}")
        return False

    def may_save(self) -> bool:
        """Return False after a spike from which the run goes back."""
        return not self._found

    def rewind(self) -> bool:
        """Go back to the last checkpoint if the step was a spike and the action is rewind. Collective.

        The data continue behind the spike. If there is no undamaged checkpoint, the run goes on: the step was left out.

        Returns:
            True if the run went back: ``engine.global_steps`` is then the checkpoint's.

        Raises:
            AgreedError: on every rank, if the run went back ``limit`` times before.
        """
        found, self._found = self._found, ""
        if not found:
            return False
        engine, folder, rewinds = self._engine, self._folder, self.state["rewinds"]
        assert folder is not None
        step, loader = engine.global_steps, engine.training_dataloader
        engine.wait_for_checkpoint()
        if rewinds >= self._limit:
            raise AgreedError(
                f"step {step} is a spike, because {found}. All rewinds of training.spikes.limit are used ({rewinds} of "
                f"{self._limit}). Lower the learning rate, look at the data of this step, or give a higher limit and "
                f"resume from {folder}"
            )
        place = None if loader is None else loader.state_dict()
        with engine.all_or_none("rewind"):
            loaded = engine.checkpointer.resume(folder)
        if not loaded:
            self._say("there is no checkpoint to go back to: step %d was left out", step)
            return False
        self.load(engine.resumed[1])
        self.state["rewinds"] = rewinds + 1
        if loader is not None:
            loader.load_state_dict(place)
        self._say(
            "the run went back from step %d to step %d, and leaves out the %d batches between (%d of %d rewinds)",
            *(step, engine.global_steps, step - engine.global_steps, rewinds + 1, self._limit),
        )
        return True

    def _say(self, text: str, *values: object) -> None:
        if self._engine.grid.rank == 0:
            _LOG.warning(text, *values)
