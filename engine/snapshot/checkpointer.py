"""Checkpointer: saves and loads an engine's checkpoints, on the user's call and automatically."""

from __future__ import annotations

import contextlib
import logging
import secrets
import weakref
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar

import torch
from torch import nn

from ...base.checks import check_flag, check_kind, check_path
from ...base.errors import ArgumentError, ConfigError
from ...checkpoint.async_writer import AsyncWriter, report_failure
from ...checkpoint.auto import AutoSaver, load_newest
from ...checkpoint.convert.export import write_model
from ...checkpoint.format import folder as folders
from ...checkpoint.lineage import Lineage
from ...checkpoint.reader import LoadOptions, open_checkpoint
from ...checkpoint.remote_writer import make_writer
from ...checkpoint.rendezvous import agreed_tag, rendezvous
from ...checkpoint.snapshot import Snapshot
from ...grid.agreement.agreement import agreed
from .capture import Checkpointed, capture, capture_weights
from .restore import apply

Loaded = tuple[str | None, dict[str, Any] | None]  # a checkpoint's path and its client state; None: nothing was loaded


def check_state(call: str, client_state: Any) -> None:
    """Check that the user's values have names.

    Raises:
        ArgumentError: they are no dict.
    """
    check_kind(call, (Mapping, NoneType), "a dict of names and values, or None", client_state=client_state)


class Checkpointer:
    """Saves and loads the checkpoints of one engine. ``Engine`` documents the methods that users call.

    Args:
        engine: the engine whose state is saved and loaded.

    Attributes:
        client_state: the user's values that are saved with automatic checkpoints.
        resumed: path and client state of the checkpoint from which the run goes on.
        writer: writes asynchronous checkpoints. None before the first one.
        problem: the reason for which the last checkpoint was not written; None if it was, or is being written.
    """

    # Path -> the module that an engine of this process saved there.
    _saved: ClassVar[weakref.WeakValueDictionary[str, nn.Module]] = weakref.WeakValueDictionary()

    def __init__(self, engine: Checkpointed) -> None:
        self._engine: Checkpointed = weakref.proxy(engine)  # the engine holds the checkpointer
        self.client_state: Mapping[str, Any] | None = None
        self.resumed: Loaded = (None, None)
        self.writer: AsyncWriter | None = None
        self.problem: str | None = None

    @cached_property
    def _lineage(self) -> Lineage:
        """Identity of the run, which rank 0 draws. Collective at its first use."""
        return Lineage(self._engine.grid.world.all_gather_json(secrets.token_hex(6))[0])

    def write_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None,
        client_state: Mapping[str, Any] | None,
        save_latest: bool,
        exclude_frozen: bool,
    ) -> bool:
        """Write a checkpoint, as ``Engine.save_checkpoint`` documents."""
        settings = self._engine.options.checkpoint
        call = "save_checkpoint"

        def check() -> None:
            check_path(call, save_dir=save_dir)
            check_kind(call, (str, int, NoneType), "a text, or None", tag=tag)
            check_state(call, client_state)
            check_flag(call, save_latest=save_latest, exclude_frozen_parameters=exclude_frozen)
            self._require_own(save_dir, chosen)

        chosen = tag if tag is not None else f"global_step{self._engine.global_steps}"
        chosen = self._rendezvous(call, str(save_dir), str(chosen), check=check)
        problem = self._write(folders.folder_at(save_dir), chosen, client_state or {}, save_latest, exclude_frozen)
        report_failure(save_dir, chosen, problem, settings.on_failure == "stop")
        return problem is None

    def _require_own(self, save_dir: str | Path, tag: Any) -> None:
        """Check that no other engine of this process, of another model, has saved under the same path.

        Raises:
            ArgumentError: one has, and its checkpoint would be lost.
        """
        path = str(folders.folder_at(save_dir).absolute() / str(tag))
        other, own = Checkpointer._saved.get(path), self._engine.module
        if other is not None and other is not own and _shapes(other) != _shapes(own):
            raise ArgumentError(
                f"save_checkpoint would overwrite {path}, which another engine of this process has saved. It trains a "
                f"{type(other).__name__}, and this one trains a {type(own).__name__} with other parameters. Give each "
                "engine a folder of its own"
            )

    def wait(self) -> str | None:
        """Wait until an asynchronous checkpoint is written, as ``Engine.wait_for_checkpoint`` documents."""
        return None if self.writer is None else self.writer.wait()

    def load(self, load_dir: str | Path, tag: str | None, options: LoadOptions) -> Loaded:
        """Load a checkpoint into the engine, as ``Engine.load_checkpoint`` documents."""
        grid, call = self._engine.grid, "load_checkpoint"
        flags = {
            "load_module_strict": options.strict,
            "load_optimizer_states": options.optimizer,
            "load_lr_scheduler_states": options.schedule,
            "load_module_only": options.weights_only,
        }

        def check() -> None:
            check_path(call, load_dir=load_dir)
            check_kind(call, (str, int, NoneType), "a text, or None", tag=tag)
            check_flag(call, **flags)

        self.wait()
        given = self._rendezvous(call, str(load_dir), "" if tag is None else str(tag), check=check)
        folder = folders.folder_at(load_dir)
        note = ""
        with agreed(grid):
            chosen, note = (given, "") if given else folders.last(folder)
        chosen = grid.world.all_gather_json(chosen)[0]
        if note and grid.rank == 0:
            logging.getLogger("triax").warning("%s", note)
        if chosen is None:
            if grid.rank == 0:
                logging.getLogger("triax").warning(
                    "nothing is loaded, because no tag was given and %s has no file 'latest'. Checkpoints there: %s",
                    folder,
                    ", ".join(folders.tags(folder)) or "none",
                )
            return None, None
        path = folders.folder_at(grid.world.all_gather_json(str(folders.readable_path(folder, chosen)))[0])
        return self._apply(open_checkpoint(grid, path, options), options)

    def export(self, save_dir: str | Path, save_filename: str, exclude_frozen: bool) -> None:
        """Write weights and buffers to one file, as ``Engine.save_weights`` documents."""
        engine, call = self._engine, self._engine.options.say("<save_weights>")

        def check() -> None:
            check_path(call, save_dir=save_dir, save_filename=save_filename)
            check_flag(call, exclude_frozen_parameters=exclude_frozen)

        rendezvous(
            engine.grid, engine.options.checkpoint.patience, call, str(save_dir), str(save_filename), check=check
        )
        path = (folders.local_folder(save_dir) / save_filename).with_suffix(".safetensors")
        with agreed(engine.grid):
            snapshot = capture_weights(engine, exclude_frozen)
        write_model(engine.grid, snapshot, path, engine.data_axis.options.weight_dtype or torch.bfloat16)

    def resume(self, folder: str | Path, which: bool | str = True) -> bool:
        """Load a checkpoint of a folder: the newest undamaged one, or that of ``which``. Collective.

        Args:
            folder: the folder of checkpoints.
            which: the option ``checkpoint.resume``.

        Returns:
            True if a checkpoint was loaded; False if the folder has none that is undamaged.

        Raises:
            CheckpointError: on every rank, if the checkpoint is of another model.
            ConfigError: on every rank, if a checkpoint is required and there is none.
        """
        engine, options = self._engine, self.load_options()

        def load(snapshot: Snapshot) -> None:
            self.resumed = self._apply(snapshot, options)

        if which not in (True, "auto", "required"):
            where, _, tag = str(which).rstrip("/").rpartition("/")
            self.resumed = self.load(where or folder, tag, options)
        elif not load_newest(engine.grid, folders.folder_at(folder), options, self._lineage, load):
            if which == "required":
                name = engine.options.say("<checkpoint.resume>")
                raise ConfigError(f"{name} is required, but {folder} has no checkpoint to resume from: write auto")
            return False
        if engine.grid.rank == 0:
            logging.getLogger("triax").warning(
                "the run resumes from %s, after step %d", self.resumed[0], self._engine.global_steps
            )
        return True

    def auto_saver(self) -> AutoSaver | None:
        """Return the object that saves a checkpoint every ``checkpoint.every`` steps. None if the key is not set."""
        engine, settings = self._engine, self._engine.options.checkpoint
        if settings.every is None or settings.folder is None:
            return None
        folder = folders.folder_at(settings.folder).absolute()

        def write(tag: str, done: Callable[[], None]) -> str | None:
            return self._write(folder, tag, self.client_state or {}, True, False, done)

        return AutoSaver(
            engine.grid,
            folder,
            every=settings.every,
            keep=settings.keep,
            stop=settings.on_failure == "stop",
            step=engine.global_steps,
            save=write,
            wait=self.wait,
        )

    def claim(self, folder: str | Path) -> None:
        """Take the lock of the folder of automatic checkpoints before the first step. Collective.

        Raises:
            CheckpointError: on every rank, if another run saves into the folder.
        """
        grid, lineage = self._engine.grid, self._lineage
        with agreed(grid):
            if grid.rank == 0:
                with contextlib.suppress(OSError):  # the first save reports it, and checkpoint.on_failure decides
                    lineage.lock(folders.folder_at(folder))

    def may_save(self) -> bool:
        """Return True if an automatic checkpoint may be saved after the step that just ended.

        Without local updates this is always True. Under local updates it is True after a synchronization of the weights
        and after every ``checkpoint.every``-th step.
        """
        engine = self._engine
        every = engine.options.checkpoint.every
        return engine.replica_state is None or engine.replica_state.may_save_after(engine.global_steps, every or 1)

    def load_options(self, **options: bool) -> LoadOptions:
        """Return ``LoadOptions`` with the given options and those that follow from the engine's options."""
        engine = self._engine
        return LoadOptions(verify=engine.options.checkpoint.verify, local=engine.replica_state is not None, **options)

    def _rendezvous(self, call: str, *arguments: str, check: Callable[[], object]) -> str:
        """Wait until every rank has made the same call, and return the tag that all ranks use. Collective.

        Args:
            call: name of the call.
            arguments: folder and tag that the user gave. The tag is the last one; rank 0's is used.
            check: checks the arguments as they were given.
        """
        engine, settings = self._engine, self._engine.options.checkpoint
        given = rendezvous(engine.grid, settings.patience, call, *arguments, check=check)
        return agreed_tag(engine.grid, given, settings.tag_validation)

    def _write(
        self,
        folder: folders.Folder,
        tag: str,
        client_state: Mapping[str, Any],
        save_latest: bool,
        exclude_frozen: bool,
        done: Callable[[], None] = lambda: None,
    ) -> str | None:
        """Write a checkpoint, or start to write it in a thread. Collective.

        Args:
            folder, tag, client_state, save_latest, exclude_frozen: the arguments of ``save``.
            done: called when the checkpoint is complete.

        Returns:
            None, or the reason for which the checkpoint was not written. With ``checkpoint.background`` it is the
            reason for which the previous checkpoint was not written, if such a failure stops the run.
        """
        grid, settings = self._engine.grid, self._engine.options.checkpoint
        before = self.wait()
        with agreed(grid):
            folders.check_tag(tag)
            Checkpointer._saved[str(folder.absolute() / tag)] = self._engine.module
            snapshot = capture(self._engine, tag, client_state, exclude_frozen)
        if not settings.background:
            self.problem = make_writer(grid, snapshot, folder, tag, None, save_latest, self._lineage).run()
            if self.problem is None:
                done()
            return self.problem

        def written(problem: str | None) -> None:
            self.problem = problem
            report_failure(folder, tag, problem)
            if problem is None:
                done()

        self.writer = self.writer or AsyncWriter(grid)
        self.writer.start(snapshot, folder, tag, save_latest, self._lineage, written)
        return before if settings.on_failure == "stop" else None

    def _apply(self, snapshot: Snapshot, options: LoadOptions) -> tuple[str, dict[str, Any]]:
        with agreed(self._engine.grid):
            client_state = snapshot.client_state()
        apply(self._engine, snapshot, options)
        self._lineage.loaded(snapshot.header, snapshot.header["checksum"])
        return snapshot.source, client_state


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in module.named_parameters()}
