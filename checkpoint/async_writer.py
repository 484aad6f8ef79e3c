"""Asynchronous checkpoints: a step waits for a copy in host memory, and a thread writes it while training goes on."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import torch
from torch import Tensor

from ..base.accelerators import is_accelerator
from ..base.errors import CheckpointError
from ..base.threads import BackgroundCall
from ..grid import Grid
from ..grid.ranges import Spans, shape_of
from .format.remote import Folder
from .lineage import Lineage
from .remote_writer import make_writer
from .snapshot import Snapshot, TensorBox, WholeTensor

_NICE = 10  # of 19: where every core is busy, the thread gets a tenth of what the training gets


class AsyncWriter:
    """Copies a checkpoint to host memory and writes the copy to disk in a thread.

    The memory of the copy is reused by the next checkpoint, and pinned if the model is on a GPU. It is as large as the
    part of the checkpoint that this rank writes.

    Args:
        grid: the run's grid.

    Attributes:
        copies: (tensor name, box) -> copy in host memory.
        work: the last write. None before the first write and after ``wait``.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self.copies: dict[tuple[str, Spans], Tensor] = {}
        self.work: BackgroundCall[str | None] | None = None

    def start(
        self,
        snapshot: Snapshot,
        folder: Folder,
        tag: str,
        save_latest: bool,
        lineage: Lineage,
        done: Callable[[str | None], None],
    ) -> None:
        """Copy a snapshot to host memory, and start to write the copy in a thread.

        The previous checkpoint must be complete, so call ``wait`` first.

        Args:
            snapshot, folder, tag, save_latest, lineage: arguments of ``make_writer``.
            done: called in the thread at the end, with None or the reason of a failure.
        """
        grid = self._grid
        name, numbers = grid.barrier_name(), count()

        def all_gather(text: str) -> list[str | None]:  # in the store: collectives are the training's
            return grid.store_barrier(f"{name}/{next(numbers)}", text, grid.timeout)

        writer = make_writer(grid, self.copy(snapshot), folder, tag, all_gather, save_latest, lineage)

        def run() -> str | None:
            _lower_priority()
            try:
                problem = writer.run()
            except Exception as error:  # for instance, the store has gone with the run
                problem = f"{grid.describe()}: {type(error).__name__}: {error}"
            done(problem)
            return problem

        self.work = BackgroundCall(run, "triax checkpoint", daemon=False)

    def copy(self, snapshot: Snapshot) -> Snapshot:
        """Return a snapshot whose values are in host memory."""
        copies: dict[tuple[str, Spans], Tensor] = {}
        tensors = {name: WholeTensor(tensor.shape, tensor.dtype) for name, tensor in snapshot.tensors.items()}
        for name, tensor in snapshot.tensors.items():
            for box, load in tensor.boxes:
                value, held = load(), self.copies.get((name, box))
                if held is None or held.shape != shape_of(box) or held.dtype != tensor.dtype:
                    held = torch.empty(shape_of(box), dtype=tensor.dtype, pin_memory=is_accelerator(value.device))
                copies[name, box] = held.copy_(value, non_blocking=True)
                tensors[name].boxes.append(TensorBox(box, held.detach))
        self.copies = copies
        self._grid.synchronize()
        return replace(snapshot, tensors=tensors, after_write=None)

    def wait(self) -> str | None:
        """Wait until the thread has written its checkpoint.

        Returns:
            None, or the reason for which the last checkpoint was not written. The reason is returned only once.
        """
        work, self.work = self.work, None
        return None if work is None else work.result()


def _lower_priority() -> None:
    """Let this thread run when a core has nothing else to do. On Linux each thread has a niceness of its own."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def report_failure(folder: object, tag: str, problem: str | None, stop: bool = False) -> None:
    """Log on this rank the reason why a checkpoint was not written, or raise it as an error.

    Args:
        folder, tag: the folder of checkpoints, and the checkpoint's name.
        problem: the reason. None: the checkpoint was written, and nothing is done.
        stop: raise an error in place of the log message.

    Raises:
        CheckpointError: with the reason, if ``stop`` is set.
    """
    if problem is None:
        return
    text = f"{folder}: the checkpoint {tag!r} was not written, because {problem}. Older checkpoints are unchanged"
    if stop:
        raise CheckpointError(text)
    logging.getLogger("triax").error("%s", text)
