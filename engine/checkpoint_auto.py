"""Checkpoints by themselves: written every so many steps and when the job is told to go, read when it comes back.

{"checkpoint": {"dir": "runs/a", "every": 100, "keep": 3, "resume": "auto"}}
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import checkpoint_folder as folders
from .checkpoint import load, save
from .checkpoint_behind import failure
from .checkpoint_read import CheckpointError, DamagedError, Wanted, open_checkpoint

if TYPE_CHECKING:
    from .compat import Compat

_LOG = logging.getLogger("triax")


def attach(engine: Compat) -> None:
    """Have an engine do what its configuration's ``checkpoint`` says. Nothing is installed where that is nothing.

    Raises:
        CheckpointError: on every rank: the newest checkpoint is whole, and not of this model.
    """
    section = engine.config.checkpoint
    if section.dir is None:
        return
    if section.resume == "auto":
        with engine._all_or_none("resume"):
            resume(engine, Path(section.dir))
    if section.every is None:
        return
    automatic = Automatic(engine)
    stepped: Any = engine
    name = "train_batch" if hasattr(engine, "train_batch") else "step"
    setattr(stepped, name, partial(_then, getattr(engine, name), automatic))


def resume(engine: Compat, folder: Path) -> None:
    """Go on from the newest checkpoint that is whole, if there is one. Collective.

    Raises:
        CheckpointError: it is not of this model.
    """
    grid = engine.grid
    found = None
    if grid.rank == 0:
        folders.restore(folder)
        for tag, reason in folders.unreadable(folder):
            _LOG.warning("%s is passed over: %s", folder / tag, reason)
        found = folders.tags(folder)[::-1]
    found = grid.world.all_gather_object(found)[0]
    wanted = Wanted(verify=engine.config.checkpoint.verify, local=engine.local is not None)
    for tag in found:
        try:
            reader = open_checkpoint(grid, folder / tag, wanted)
        except DamagedError as error:
            if grid.rank == 0:
                _LOG.warning("%s is passed over: %s", folder / tag, error)
            continue
        engine.resumed = load(engine, reader, wanted)
        if grid.rank == 0:
            _LOG.warning("goes on from %s, after step %d", folder / tag, engine.global_steps)
        return
    if grid.rank == 0:
        _LOG.warning("%s has no checkpoint to go on from: the run begins", folder)


class Automatic:
    """Saves after a step, where it is time; and leaves, where a signal said so.

    Attributes:
        told: a SIGTERM has come, to this rank.
    """

    def __init__(self, engine: Compat) -> None:
        section = engine.config.checkpoint
        self._engine, self._folder = engine, Path(section.dir or ".").absolute()
        self._every, self._keep, self._last = section.every, section.keep, engine.global_steps
        self.told = False
        self._flag = torch.zeros(1, dtype=torch.int64, device=engine.grid.device)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._hear)

    def __call__(self) -> None:
        """A step may have been taken. Collective, if one was."""
        engine = self._engine
        if engine.global_steps == self._last:
            return
        self._last = step = engine.global_steps
        if engine.local is not None and not engine.local.asks(step, self._every):
            return
        self._flag.fill_(self.told)
        engine.grid.world.all_reduce(self._flag, op="max")  # the signal may have come to one rank alone
        leave = bool(self._flag)
        if leave or (self._every and step % self._every == 0):
            self._save(f"global_step{step}", leave)

    def _save(self, tag: str, leave: bool) -> None:
        engine = self._engine
        problem = save(engine, self._folder, tag, engine.client_state or {}, True, done=self._tidy)
        if leave:
            problem = engine.wait_for_checkpoint() or problem
        if problem is not None:
            text = failure(self._folder, tag, problem)
            if engine.config.checkpoint.on_failure == "stop" and not leave:
                raise CheckpointError(text)
            _LOG.error("%s", text)
        if leave:
            if engine.grid.rank == 0:
                _LOG.warning("told to end by SIGTERM: left after step %d, %s", engine.global_steps, self._folder / tag)
            engine.grid.world.barrier()
            raise SystemExit(128 + signal.SIGTERM)

    def _tidy(self) -> None:
        """There is a new one: the oldest may go."""
        if self._keep is not None and self._engine.grid.rank == 0:
            for tag in folders.prunable(self._folder, self._keep, plain=True):
                with contextlib.suppress(OSError):
                    folders.remove(self._folder, tag)

    def _hear(self, *_: Any) -> None:
        self.told = True


def _then(step: Callable[..., Any], automatic: Automatic, *args: Any, **kwargs: Any) -> Any:
    result = step(*args, **kwargs)
    with automatic._engine._all_or_none("checkpoint"):
        automatic()
    return result
