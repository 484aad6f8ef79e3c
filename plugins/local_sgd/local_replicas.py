"""Local updates: each replica trains alone and synchronizes its weights every few steps (``local_updates``).

A local step runs on the grid of one replica, whose data axis has size 1 (``replica_grid.py``). Loss, gradient norm
and overflow check then include only this replica's ranks, and nothing is sent over the data axis. The other calls of
the engine, such as those for data and checkpoints, use the whole grid. The steps before ``start_step`` use the whole
grid too, because they sum gradients over the replicas.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ...base.errors import AgreedError
from ...base.option_error import refusal
from ...engine.replica_strategy import SynchronousReplicas
from ...grid import Grid
from ...options.local_updates import AsyncDiLoCo, LocalSGD
from ...zero.data_axis import ZeroDataAxis
from .async_diloco import AsyncOuterOptimizer
from .outer_optimizer import NesterovStep, OuterOptimizer
from .replica_grid import ReplicaGrid


class LocalReplicas(SynchronousReplicas):
    """Replica strategy of local SGD, DiLoCo and asynchronous DiLoCo. Made on every rank, after the engine's optimizer.

    ``train_batch`` (``backward`` and ``step``) return the loss of this replica over its own part of the batch. Before
    ``start_step`` they return the loss of all replicas. ``eval_batch`` runs each replica's weights on that replica's
    data and returns the loss over the data of all replicas (with ``async_diloco``, over the data of this replica).
    ``gather`` returns the weights of this replica.

    Args:
        options: the options.
        grid: the grid of this replica, on which the data axis is laid out.
        data_axis: weights and optimizer of this replica.
        optimizer, lr_scheduler: those that take the steps; None if there is none.
        dtype: dtype in which differences of weights are sent; None: their own.
        steps_taken: returns the number of steps so far.

    Attributes:
        outer: the weights after the last synchronization, and the outer optimizer.
        steps_since_sync: steps of this replica since the last synchronization.
        steps: steps so far, including those before a checkpoint that was loaded.
        steps_restored: number of the steps before that checkpoint.
        sent: bytes that this rank sent to other replicas for the steps after that checkpoint.
        just_synchronized: True if the last step ended with a synchronization, or was synchronous over all replicas.
        diverged: True if replicas have made local steps, after which their optimizer states may differ.
        left: True if this replica has left the training.
    """

    grid: ReplicaGrid

    def __init__(
        self,
        options: LocalSGD,
        grid: ReplicaGrid,
        data_axis: ZeroDataAxis,
        optimizer: torch.optim.Optimizer | None,
        lr_scheduler: LRScheduler | None,
        dtype: torch.dtype | None,
        steps_taken: Callable[[], int],
    ) -> None:
        super().__init__(grid)
        self.options, self._data_axis, self._steps_taken = options, data_axis, steps_taken
        self.steps_since_sync = self.steps = self.steps_restored = 0
        self.sent, self.just_synchronized, self.left, self.diverged = 0.0, False, False, False
        if optimizer is None:
            raise refusal("<local_updates> needs an optimizer, and there is none: set <optimizer>, or leave it out")
        if isinstance(lr_scheduler, ReduceLROnPlateau):
            raise refusal(
                "<local_updates> does not work with ReduceLROnPlateau, because each replica has its own loss: use a "
                "schedule that follows steps"
            )
        if data_axis.options.exchange is not None:
            raise refusal(
                "<local_updates> does not work with <compression>, because it sums no gradients over replicas: leave "
                "one of them out. <reduction.dtype> sets the dtype in which differences of weights are sent"
            )
        step = NesterovStep(*self.options.outer)
        if self.options.average_optimizer and data_axis.stepper.whole_tensors:
            name = type(data_axis.optimizer).__name__
            raise refusal(
                f"<local_updates.average_optimizer> averages optimizer states element by element, which {name} does "
                "not allow: leave it out"
            )
        whole = grid.full_grid
        if isinstance(options, AsyncDiLoCo):
            posts = whole.subgroup("data", range(whole.data.size), purpose=" local")
            assert posts is not None
            self.outer: OuterOptimizer = AsyncOuterOptimizer(
                data_axis, grid, posts, step, dtype, options.max_staleness, options.meet_early
            )
        else:
            self.outer = OuterOptimizer(data_axis, whole.data, step, dtype, self.options.average_optimizer)

    @property
    def steps_together(self) -> bool:
        """True if the next step sums gradients over all replicas, because it comes before ``start_step``."""
        return self._steps_taken() < self.options.start_step

    @property
    def collective_grid(self) -> Grid:
        """Grid for collectives: the whole grid, or under ``async_diloco`` the grid of this replica.

        Under ``async_diloco`` no replica waits for another.
        """
        return self.grid if self.outer.asynchronous else self.grid.full_grid

    @property
    def present(self) -> list[int]:
        """Indices of the replicas that have not left the training, as far as this replica was told.

        Without ``async_diloco`` these are all replicas.
        """
        return self.outer.present

    def share(self, numbers: Sequence[float]) -> list[float]:
        """Return numbers as they are: there are no replicas outside of the grid."""
        return [*numbers]

    @contextmanager
    def stepping(self) -> Iterator[Grid]:
        """Context around one training step, which yields the grid of the step.

        Before ``start_step`` that is the grid of all replicas, and afterwards the grid of this replica alone. If a
        synchronization of the weights is due, it runs at the end of the context.

        Raises:
            AgreedError: if this replica has left the training.
            RuntimeError: if the ranks of this replica raised an ``AgreedError`` in a local step. The other replicas do
                not know of it, so this replica leaves the process group.
        """
        if self.left:
            raise AgreedError("this replica has left the training: call no step after engine.leave()")
        if not self.steps_together:
            with self._on(self.grid):
                yield self.grid
            self._end_local_step()
            return
        whole = self.grid.full_grid
        self._data_axis.extra_axis = whole.data if whole.data.size > 1 else None
        try:
            with self._count_sent():
                yield whole
        finally:
            self._data_axis.extra_axis = None
        self.steps, self.just_synchronized = self.steps + 1, True
        if not self.steps_together:
            self.outer.restart()

    def evaluating(self) -> AbstractContextManager[Grid]:
        """Context for an evaluation on ``collective_grid``."""
        return self._on(self.collective_grid)

    def reading(self) -> AbstractContextManager[Grid]:
        """Context in which this replica's weights are read. Collective over the replica's ranks."""
        return self._on(self.grid)

    @contextmanager
    def _on(self, grid: Grid) -> Iterator[Grid]:
        """Context for a call that all ranks of a grid make together.

        An ``AgreedError`` is one that every rank of a grid raises, with no state changed, so that training can
        continue.

        Raises:
            RuntimeError: in place of an ``AgreedError`` that only the ranks of this replica raised. The other replicas
                would wait for them. So they leave the process group, as a failed rank does.
        """
        try:
            yield grid
        except AgreedError as error:
            if grid is self.grid.full_grid or self.grid.replicas == 1:
                raise
            name = f"replica {self.grid.replica} of {self.grid.replicas}"
            raise RuntimeError(f"{name} cannot continue, because {error}") from error

    def _end_local_step(self) -> None:
        self.steps_since_sync, self.steps, self.diverged = self.steps_since_sync + 1, self.steps + 1, True
        self.just_synchronized = self.outer.end_step() or self.steps_since_sync >= self.options.every
        if self.just_synchronized:
            with self._count_sent():
                self.outer.synchronize()
            self.steps_since_sync = 0

    def synchronize(self) -> None:
        """Give all replicas the same weights now. Collective over the whole grid.

        Raises:
            AgreedError: on every rank, if replicas have taken different numbers of steps since the last
                synchronization. ``async_diloco`` allows different numbers.
        """
        if self.steps_together:  # all have the same
            self.outer.restart()
        else:
            try:
                with self._count_sent():
                    self.outer.synchronize_all(self.steps_since_sync)
            except ValueError as error:
                raise AgreedError(str(error)) from error
        self.steps_since_sync = 0

    def leave(self) -> bool:
        """End this replica's training. Returns True if all replicas have left."""
        if not isinstance(self.outer, AsyncOuterOptimizer):
            self.synchronize()
            return True
        if self.left:
            return True
        if self.steps_together:
            self.outer.restart()
        with self._count_sent():
            complete = self.outer.leave(self.steps_since_sync, self.grid.timeout)
        self.steps_since_sync, self.left = 0, True
        if not complete:
            logging.getLogger("triax").warning(
                "%s: replicas %s sent no message for %g s: this replica leaves with the common weights that it has",
                self.grid.describe(),
                ", ".join(map(str, self.outer.present)),
                self.grid.timeout,
            )
        return complete

    def common_weights(self) -> AbstractContextManager[None]:
        """Context in which the model has the weights of the last synchronization. Nothing is sent.

        Before ``start_step`` these are the model's present weights."""
        return nullcontext() if self.steps_together else self.outer.common_weights()

    def memory(self) -> dict[str, int]:
        """Return the bytes of the common weights and the state of the outer optimizer."""
        return {"common": self.outer.memory()}

    def traffic(self) -> dict[str, Any]:
        """Return ``formula`` and ``local`` of ``Engine.traffic_report``."""
        synchronization, plain = self.outer.traffic_formula()
        local: dict[str, Any] = {
            "steps": self.steps,
            "meetings": self.outer.synchronizations,
            "sent": self.sent,
            "per_step": self.sent / max(self.steps - self.steps_restored, 1),
            "formula": synchronization / self.options.every,
            "uncompressed": plain,
        }
        local |= self.outer.report()
        return {"formula": {"data": local["formula"]}, "local": local}

    @contextmanager
    def _count_sent(self) -> Iterator[None]:
        """Context in which the bytes that are sent count as traffic between replicas."""
        traffic = self.grid.traffic
        before = _sent(traffic.report())
        yield
        self.sent += _sent(traffic.report()) - before


def _sent(report: Mapping[str, Mapping[str, Any]]) -> float:
    """Return the bytes sent over the data axis, from a traffic report (axis -> collective -> calls and bytes)."""
    return float(sum(entry.bytes for entry in report.get("data", {}).values()))
