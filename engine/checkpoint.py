"""``save_checkpoint`` and ``load_checkpoint``: DeepSpeed's calls, on both engines and between any two grids."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import checkpoint_folder as folders
from . import checkpoint_state as states
from .checkpoint_behind import Behind, failure, report
from .checkpoint_boxes import everything
from .checkpoint_export import write_model
from .checkpoint_model import describe as describe_model
from .checkpoint_read import CheckpointError, Reader, Wanted, agreed, open_checkpoint, restore
from .checkpoint_values import encode
from .checkpoint_write import Writer

if TYPE_CHECKING:
    from .compat import Compat

__all__ = ["CheckpointError", "Checkpoints"]


class Checkpoints:
    """What both engines can do with checkpoints. Every rank calls each of these, with the same arguments."""

    client_state: dict[str, Any] | None = None  # what checkpoints that are written by themselves keep
    resumed: tuple[str | None, dict[str, Any] | None] = (None, None)  # what ``checkpoint.resume`` loaded
    _behind: Behind | None = None

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a checkpoint of the run as it is after its last step. Collective.

        Every rank writes a part of it, nothing is gathered. It has its name once all of it is on the disk; until then,
        and where that fails, the one before is the last. With ``checkpoint.async`` this returns when there is a copy in
        the host's memory, which is written while training goes on; the next save, or load, waits for it.

        Args:
            save_dir: a folder that every rank sees.
            tag: the checkpoint's folder within it; None: ``global_step`` and the number of steps.
            client_state: to be had from ``load_checkpoint``: numbers, text, tensors, lists and dicts. Rank 0's counts.
            save_latest: name it in the file ``latest``.
            exclude_frozen_parameters: leave out what is not trained; such a checkpoint is loaded with
                ``load_module_strict=False``.

        Returns:
            Whether it is there. Where it could not be written, every rank says why, and the run goes on; or raises
            it, where ``checkpoint.on_failure`` is ``stop``.

        Raises:
            CheckpointError: on every rank: a tag or a client state that cannot be saved.
            RuntimeError: ranks that did not call this within ``checkpoint.patience`` seconds.
        """
        engine: Compat = self  # type: ignore[assignment]
        with engine._all_or_none("save_checkpoint"):
            chosen = tag if tag is not None else f"global_step{engine.global_steps}"
            given = come_together(engine, "save_checkpoint", str(save_dir), str(chosen))
            chosen = _agreed_tag(engine, given)
            frozen = not exclude_frozen_parameters
            problem = save(engine, Path(save_dir), chosen, client_state or {}, save_latest, frozen)
            if problem is None:
                return True
            if engine.config.checkpoint.on_failure == "stop":
                raise CheckpointError(failure(save_dir, chosen, problem))
            report(save_dir, chosen, problem)
            return False

    def wait_for_checkpoint(self) -> str | None:
        """Return when no checkpoint is being written behind the run; why the last one did not come to be, if so."""
        return None if self._behind is None else self._behind.wait()

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        *,
        strict: bool | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on where a checkpoint was written, on whatever grid that was. Collective.

        Args:
            load_dir: as ``save_dir``.
            tag: which one; None: the one that ``latest`` names.
            load_module_strict: names and shapes must be the model's. False: what fits is loaded, and a line says what
                was not.
            load_optimizer_states: the optimizer's state, its groups' options and the loss scale too.
            load_lr_scheduler_states: the learning-rate schedule too.
            load_module_only: weights and buffers alone: neither of these, nor steps, nor the data's place.
            strict: another name of ``load_module_strict``.

        Returns:
            The checkpoint's path, and the client state; two times None where ``tag`` is not given and there is no
            ``latest``.

        Raises:
            CheckpointError: on every rank, and nothing was changed: there is none of that tag, it is damaged, or it is
                not of this model.
            RuntimeError: ranks that did not call this within ``checkpoint.patience`` seconds.
        """
        engine: Compat = self  # type: ignore[assignment]
        with engine._all_or_none("load_checkpoint"):
            self.wait_for_checkpoint()
            given = come_together(engine, "load_checkpoint", str(load_dir), "" if tag is None else str(tag))
            folder = Path(load_dir)
            with agreed(engine.grid):
                chosen = _agreed_tag(engine, given) or folders.latest(folder)
            if (chosen := engine.grid.world.all_gather_object(chosen)[0]) is None:
                if engine.grid.rank == 0:
                    there = ", ".join(folders.tags(folder)) or "none"
                    logging.getLogger("triax").warning(
                        "%s has no file 'latest', and no tag was given: nothing is loaded. Checkpoints there: %s",
                        folder,
                        there,
                    )
                return None, None
            wanted = Wanted(
                strict=load_module_strict if strict is None else strict,
                optimizer=load_optimizer_states,
                schedule=load_lr_scheduler_states,
                weights_only=load_module_only,
                verify=engine.config.checkpoint.verify,
                local=engine.local is not None,
            )
            path = engine.grid.world.all_gather_object(folders.place(folder, chosen))[0]
            reader = open_checkpoint(engine.grid, path, wanted)
            return load(engine, reader, wanted)

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write whole weights and buffers to one safetensors file: bf16's or fp16's own, else in bfloat16. Collective.

        Nothing is gathered: every rank puts its boxes into the file, which all must see.

        Args:
            save_dir: a folder.
            save_filename: of the file; its ending becomes ``.safetensors``, since nothing is pickled.
            exclude_frozen_parameters: leave out what is not trained.

        Raises:
            CheckpointError: on every rank, where one could not write.
        """
        engine: Compat = self  # type: ignore[assignment]
        with engine._all_or_none("save_16bit_model"):
            come_together(engine, "save_16bit_model", str(save_dir), save_filename)
            path = (Path(save_dir) / save_filename).with_suffix(".safetensors")
            dtype = engine._replicas.mode.weights or torch.bfloat16
            write_model(engine, path, dtype, frozen=not exclude_frozen_parameters)
            return True

    def rewind(self) -> None:
        """After a load: gradients of a step under way are forgotten."""
        engine: Any = self
        if hasattr(engine, "_passes"):
            engine.zero_grad()
            engine._micro = 0
            engine._mark_last()


def save(
    engine: Compat,
    folder: Path,
    tag: str,
    client: Mapping[str, Any],
    save_latest: bool,
    frozen: bool = True,
    done: Callable[[], None] | None = None,
) -> str | None:
    """Write one, or begin to; returns why it (or the one before, which was written behind) could not be. Collective.

    Args:
        engine: of the run.
        folder, tag, client, save_latest: of ``save_checkpoint``.
        frozen: with what is not trained.
        done: called when it is there.
    """
    grid = engine.grid
    before = engine.wait_for_checkpoint()
    with agreed(grid), torch.no_grad():
        folders.check_tag(tag)
        held = states.held_by(engine)
        extra, encoded = _client(client)
        out = set() if frozen else states.frozen(held)
        parts = [part for part in states.parts(engine, held) if part.name not in out]
        parts += extra if grid.rank == 0 else ()
        numbers, head = states.numbers(engine, held), describe(engine, tag, encoded)
    if not engine.config.checkpoint.async_:
        tell = grid.world.all_gather_object
        problem = Writer(grid, folder, tag, parts, numbers, head, tell, save_latest, held.behind).run()
        if problem is None and done is not None:
            done()
        return problem
    behind = engine._behind = engine._behind or Behind(grid)
    meetings = (f"{name}/{number}" for name in [grid.meeting()] for number in count())

    def meet(text: str) -> list[str | None]:
        return grid.meet(next(meetings), text, grid.timeout)

    def written(problem: str | None) -> None:
        report(folder, tag, problem)
        if problem is None and done is not None:
            done()

    behind.start(Writer(grid, folder, tag, behind.copied(parts), numbers, head, meet, save_latest), written)
    return before if engine.config.checkpoint.on_failure == "stop" else None


def load(engine: Compat, reader: Reader, wanted: Wanted) -> tuple[str, dict[str, Any]]:
    """Give an engine what is in a checkpoint that was opened. Collective."""
    with agreed(engine.grid):
        client = reader.client_state()
    restore(engine, reader, wanted)
    return str(reader.path), client


def describe(engine: Compat, tag: str, client: Any) -> dict[str, Any]:
    """The head of the index: what it is of, and where the run is."""
    return {
        "tag": tag,
        "step": engine.global_steps,
        "written": time.time(),
        "versions": {"triax": version("triax"), "torch": torch.__version__},
        "grid": engine.grid.topology.axes,
        "config": engine.config.model_dump(mode="json", by_alias=True, exclude_unset=True),
        "dtype": str(engine._replicas.mode.weights or "").removeprefix("torch.") or None,
        "model": describe_model(engine.module),
        "run": states.run_state(engine),
        "client_state": client,
    }


def come_together(engine: Compat, call: str, *arguments: str) -> list[str]:
    """Wait for every rank to make the same call; returns the last argument of each.

    Raises:
        RuntimeError: a rank did not come, or made another one.
    """
    grid, seconds = engine.grid, engine.config.checkpoint.patience
    mine = "\n".join((call, *arguments))
    told = grid.meet(grid.meeting(), mine, seconds)
    absent = [rank for rank, said in enumerate(told) if said is None]
    if absent:
        raise RuntimeError(
            f"{call} waited {seconds:g} s, and {', '.join(grid.describe(rank) for rank in absent)} did not call it. "
            f"Every rank must: each writes its own part. Take it out of `if rank == 0`. (Ranks that may come later: "
            "raise checkpoint.patience)"
        )
    said = [str(each).split("\n") for each in told]
    for rank, theirs in enumerate(said):
        if theirs[:-1] != mine.split("\n")[:-1]:
            raise RuntimeError(
                f"rank {grid.rank} is in {call}({', '.join(arguments)}), and rank {rank} in {theirs[0]}"
                f"({', '.join(theirs[1:])}): every rank must make the same call"
            )
    return [theirs[-1] for theirs in said]


def _agreed_tag(engine: Compat, given: Sequence[str]) -> str:
    """Rank 0's, where they differ.

    Raises:
        CheckpointError: they must not.
    """
    if len(set(given)) > 1:
        text = f"ranks gave unlike tags: {', '.join(map(repr, dict.fromkeys(given)))}"
        how = engine.config.checkpoint.tag_validation.lower()
        if how == "fail":
            raise CheckpointError(f"{text}: give the same on every rank")
        if how == "warn" and engine.grid.rank == 0:
            logging.getLogger("triax").warning("%s: rank 0's counts", text)
    return given[0]


def _client(client: Mapping[str, Any]) -> tuple[list[states.Part], Any]:
    """A client state's tensors, as they are now, and the rest of it in JSON."""
    parts: list[states.Part] = []

    def put(tensor: Tensor) -> str:
        name, value = f"{len(parts)}", tensor.detach().cpu().clone()
        parts.append(
            states.Part(f"{states.CLIENT}/{name}", tuple(value.shape), value.dtype, everything(value.shape), value)
        )
        return name

    encoded = encode(dict(client), put)
    return parts, encoded
