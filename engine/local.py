"""Engines whose replicas step on their own, and meet every so many steps: ``local_updates`` in the configuration.

A step runs on the replica's own grid, whose data axis has size 1 (``grid/replica.py``): losses, norms, overflows and
agreements are the replica's, and nothing goes over the data axis. Between steps the engine is one of the whole grid, by
which data, sample numbers and checkpoints go; and so it is in the steps before ``start_step``, which sum gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..grid import Grid, Layout
from ..grid.replica import ReplicaGrid
from ..pipe.module import PipelineModule
from ..zero.held import Held
from ..zero.local import Meetings, Outer, agreed_steps
from ..zero.local_async import AsyncMeetings
from ..zero.whole import WholeStepper
from . import local_state, precision
from .batch import AgreedError
from .checkpoint_read import Reader, Wanted
from .checkpoint_state import Part
from .config import Config, ConfigError
from .config_local import LocalUpdatesConfig
from .engine import Engine
from .module_engine import ModuleEngine
from .module_start import ModuleOptimizer, share

__all__ = ["Local", "LocalEngine", "LocalModuleEngine"]


class Local:
    """What an engine knows of the replicas' meetings. Made after the engine, on every rank.

    Attributes:
        meetings: the common weights, and how they move.
        since: steps of this replica since its last meeting.
        steps: so far, those before a checkpoint that was loaded included.
        sent: bytes that this rank sent to other replicas for those since then.
        grid: this replica's.
        restored: of these steps, those before the checkpoint.
        just_met: whether the last step ended with a meeting, or all took it together.
        parted: whether replicas have taken steps of their own: what their optimizers keep may differ from then on.
    """

    def __init__(self, engine: Any, grid: ReplicaGrid) -> None:
        config: Config = engine.config
        assert config.local_updates is not None
        self.section: LocalUpdatesConfig = config.local_updates
        self._engine, self.grid = engine, grid
        self.since = self.steps = self.restored = 0
        self.sent, self.just_met, self.over, self.parted = 0.0, False, False, False
        if engine.optimizer is None:
            raise ConfigError("local_updates has nothing to step: give optimizer, or leave it out")
        if isinstance(engine.lr_scheduler, ReduceLROnPlateau):
            raise ConfigError("local_updates with ReduceLROnPlateau: each replica has its own loss; go by steps")
        if engine._replicas.mode.exchange is not None:
            raise ConfigError(
                "local_updates sums no gradients over replicas, so there is nothing to compress of them: leave one of "
                "them out (communication_data_type says how differences travel)"
            )
        replicas, outer = engine._replicas, Outer(*self.section.outer)
        if self.section.average_optimizer and isinstance(replicas._stepper, WholeStepper):
            name = type(replicas.optimizer).__name__
            raise ConfigError(f"average_optimizer averages element by element, and {name} does not work so: leave it")
        wanted = config.communication_data_type
        dtype = None if wanted is None else precision.dtype_of(wanted)
        whole = grid.whole
        if self.section.type == "async_diloco":
            posts = whole.subgroup("data", range(whole.data.size), purpose=" local")
            assert posts is not None
            early = self.section.meet_early is not False
            self.meetings: Meetings = AsyncMeetings(replicas, grid, posts, outer, dtype, self.section.staleness, early)
        else:
            self.meetings = Meetings(replicas, whole.data, outer, dtype, self.section.average_optimizer)

    @property
    def together(self) -> bool:
        """Whether the next step is one of all replicas: ``start_step`` is still to come."""
        return bool(self._engine.global_steps < self.section.start_step)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Within it the engine takes a step, and then meets, where it is time: ``alone``, or all of them together."""
        if not self.together:
            with self.alone():
                yield
            self._stepped()
            return
        replicas, whole = self._engine._replicas, self.grid.whole
        replicas.joined = whole.data if whole.data.size > 1 else None
        try:
            with self._counted(), self.on(whole):
                yield
        finally:
            replicas.joined = None
        self.steps, self.just_met = self.steps + 1, True
        if not self.together:
            self.meetings.adopt()

    @property
    def asked(self) -> Grid:
        """Of whom things are asked that all ranks have a part of: all, but where nobody is waited for this replica."""
        return self.grid if isinstance(self.meetings, AsyncMeetings) else self.grid.whole

    def alone(self) -> AbstractContextManager[None]:
        """Within it the engine is this replica's alone. Raises as ``on``."""
        return self.on(self.grid)

    @contextmanager
    def on(self, grid: Grid) -> Iterator[None]:
        """Within it the engine's sums and agreements are over this grid.

        Raises:
            RuntimeError: for an ``AgreedError`` of this replica alone: the others would wait for its ranks, so these
                leave as a rank does that failed.
        """
        engine = self._engine
        places = [engine, engine._finite, *([engine._feed] if isinstance(engine, Engine) else ())]
        for place in places:
            place.grid = grid
        try:
            yield
        except AgreedError as error:
            if grid is self.grid.whole or self.grid.replicas == 1:
                raise
            raise RuntimeError(f"replica {self.grid.replica} of {self.grid.replicas} cannot go on: {error}") from error
        finally:
            for place in places:
                place.grid = self.grid.whole

    def _stepped(self) -> None:
        self.since, self.steps, self.parted = self.since + 1, self.steps + 1, True
        ends = self.meetings.stepped() if isinstance(self.meetings, AsyncMeetings) else False
        self.just_met = ends or self.since >= self.section.every
        if self.just_met:
            with self._counted():
                self.meetings.meet()
            self.since = 0

    def meet(self) -> None:
        """Meet now. Collective over the whole grid, and after as many meetings everywhere.

        Raises:
            AgreedError: on every rank: replicas have taken unlike numbers of steps since they met, and must not.
        """
        if self.together:  # all have the same
            self.meetings.adopt()
        elif isinstance(self.meetings, AsyncMeetings):
            with self._counted():
                self.meetings.meet_all(self.since)
        else:
            try:
                since = agreed_steps(self.grid.whole.data, self.since, self.grid.device)
            except ValueError as error:
                raise AgreedError(str(error)) from error
            if since:
                with self._counted():
                    self.meetings.meet()
        self.since = 0

    def leave(self) -> bool:
        """This replica steps no more; returns whether all have said so."""
        if not isinstance(self.meetings, AsyncMeetings):
            self.meet()
            return True
        if self.over:
            return True
        if self.together:
            self.meetings.adopt()
        with self._counted():
            complete = self.meetings.leave(self.since, self.grid.timeout)
        self.since, self.over = 0, True
        if not complete:
            logging.getLogger("triax").warning(
                "%s: replicas %s gave no sign for %g s: this one leaves with the common weights that it knows",
                self.grid.describe(),
                ", ".join(map(str, self.meetings.present)),
                self.grid.timeout,
            )
        return complete

    def asks(self, step: int, every: int | None) -> bool:
        """Whether ranks ask each other after this step whether one of them was told to end."""
        return self.just_met or (every is not None and step % every == 0)

    def held(self) -> Held:
        """What a checkpoint has of the engine's parameters. ``async_diloco`` meets for it: it is of one moment."""
        if isinstance(self.meetings, AsyncMeetings):
            self.meet()
        return local_state.held(self._engine, self)

    def parts(self) -> list[Part]:
        """What this rank writes of its own replica; nothing, while the engine is the replica's alone."""
        return [] if self._engine.grid is self.grid else local_state.parts(self._engine, self)

    def numbers(self) -> dict[str, Any]:
        """What is one number a parameter, of this replica."""
        return local_state.numbers(self._engine, self)

    def run_state(self) -> dict[str, Any]:
        """Where the meetings are."""
        return local_state.run_state(self)

    def require(self, reader: Reader, wanted: Wanted) -> None:
        """Refuse what cannot be loaded now; see ``local_state.require``."""
        local_state.require(self._engine, self, reader, wanted)

    def restore(self, reader: Reader, wanted: Wanted, usable: Mapping[str, Layout]) -> list[str]:
        """Take from a checkpoint, whose weights were loaded, what is this replica's. Collective."""
        return local_state.restore(self._engine, self, reader, wanted, usable)

    def report(self) -> dict[str, Any]:
        """Bytes that this rank sent to other replicas; see ``LocalUpdates.traffic_report``."""
        meeting, plain = self.meetings.bytes_of()
        found: dict[str, Any] = {
            "steps": self.steps,
            "meetings": self.meetings.met,
            "sent": self.sent,
            "per_step": self.sent / max(self.steps - self.restored, 1),
            "formula": meeting / self.section.every,
            "uncompressed": plain,
        }
        if isinstance(self.meetings, AsyncMeetings):
            found |= {"staleness": self.meetings.lag, "waited_s": self.meetings.waited}
        return found

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """What is sent within is the meeting's."""
        traffic = self.grid.traffic
        before = _sent(traffic.report())
        yield
        self.sent += _sent(traffic.report()) - before


def _sent(report: Mapping[str, Mapping[str, Any]]) -> float:
    """Bytes over the data axis."""
    return float(sum(entry.bytes for entry in report.get("data", {}).values()))


class LocalUpdates:
    """What both engines can do where their replicas step on their own.

    ``train_batch`` (``backward`` and ``step``) return this replica's own loss, over its own part of the batch (before
    ``start_step`` that of all). ``eval_batch`` runs each replica's own weights on what it is given, and returns the
    loss of all of it (``async_diloco``: of this replica's). ``gather`` returns this replica's own weights.
    """

    local: Local | None

    def meet(self) -> None:
        """Have the replicas meet now. Every rank of every replica calls this, after its last step or between two.

        Afterwards all have the same weights: of local SGD the mean, of DiLoCo those after the outer step.

        Raises:
            RuntimeError: on every rank, and the engine can go on: replicas have taken unlike numbers of steps since
                they met. ``async_diloco`` takes them as they are.
        """
        with self._call("meet"):
            _of(self).meet()

    def leave(self) -> bool:
        """This replica's training is over. Every rank of the replica calls this once, after its last step.

        What it did since the last meeting counts as a last, shorter round. ``async_diloco``: from now on nobody waits
        for this replica; it waits until the others have left too, so that all end with the same weights. The other
        types: as ``meet``.

        Returns:
            Whether all replicas have left. False: one gave no sign of life for the grid's ``timeout``.

        Raises:
            RuntimeError: as ``meet``.
        """
        with self._call("leave"):
            return _of(self).leave()

    @property
    def present(self) -> list[int]:
        """The replicas that have not left, as far as this one heard; all of them, but for ``async_diloco``."""
        local = _of(self)
        if isinstance(local.meetings, AsyncMeetings):
            return local.meetings.present
        return list(range(local.grid.replicas))

    def common_weights(self) -> AbstractContextManager[None]:
        """Within it the model has the weights of the last meeting, in place of this replica's own. Nothing is sent.

        Before ``start_step`` these are its own.
        """
        local = _of(self)
        return nullcontext() if local.together else local.meetings.commonly()

    def traffic_report(self) -> dict[str, Any]:
        """As ``Engine.traffic_report``; and ``local``: what goes from this rank to other replicas.

        ``steps`` and ``meetings`` so far; ``sent``: bytes since this process began, or loaded a checkpoint, and
        ``per_step`` on average; ``formula``: what a meeting sends by the formula of an all-reduce, by the steps between
        two; ``uncompressed``: what a step sends that all-reduces gradients in the masters' dtype (those before
        ``start_step`` do, in ``communication_data_type``).
        ``async_diloco`` sends each replica a message of its own, N/2 times the formula, and has ``staleness``, the
        rounds that the slowest was behind at the last meeting, and ``waited_s``, seconds at the bound.
        """
        report: dict[str, Any] = {}
        if isinstance(self, Engine):
            report = Engine.traffic_report(self)
        local = _of(self).report()
        return {**report, "formula": {"data": local["formula"]}, "local": local}

    def _call(self, name: str) -> AbstractContextManager[None]:
        guarded: AbstractContextManager[None] = self._all_or_none(name)  # type: ignore[attr-defined]
        return guarded


def _of(engine: LocalUpdates) -> Local:
    assert engine.local is not None
    return engine.local


def _begun(engine: LocalUpdates) -> Local:
    """Of an engine that is about to step.

    Raises:
        AgreedError: this replica has left.
    """
    local = _of(engine)
    if local.over:
        raise AgreedError("this replica has left: there is no step after leave()")
    return local


class LocalEngine(LocalUpdates, Engine):
    """An ``Engine`` whose replicas step on their own."""

    def __init__(self, module: PipelineModule, config: Config, *args: Any) -> None:
        whole = module.grid
        replica = ReplicaGrid(whole)
        module.grid = replica
        try:
            super().__init__(module, config, *args)
        finally:
            module.grid = whole
        self.grid = whole
        self.local = Local(self, replica)

    def _train_batch(self, data_iter: Iterator[Any] | None) -> Tensor:
        local = _begun(self)
        self.grid.traffic.clear()
        with local.stepping():
            loss = super()._train_batch(data_iter)
        if local.just_met:
            self._sent = self.grid.traffic.report()
        return loss

    def _eval_batch(self, *args: Any) -> Any:
        local = _of(self)
        with local.on(local.asked):
            return super()._eval_batch(*args)

    def memory_report(self) -> dict[str, Any]:
        """As ``Engine.memory_report``; ``held`` has ``common``: the common weights, and what goes with them."""
        report = super().memory_report()
        return {**report, "held": {**report["held"], "common": _of(self).meetings.held()}}

    def gather(self, what: str = "weights") -> dict[str, Tensor]:
        """As ``Engine.gather``, of this replica. Collective over it."""
        with _of(self).alone():
            return super().gather(what)


class LocalModuleEngine(LocalUpdates, ModuleEngine):
    """A ``ModuleEngine`` whose replicas step on their own."""

    def __init__(self, module: nn.Module, grid: Grid, *args: Any) -> None:
        share(module, grid, set())  # between replicas too, which the engine of one knows nothing of
        replica = ReplicaGrid(grid)
        super().__init__(module, replica, *args)
        self.grid = grid
        self.local = Local(self, replica)

    @torch.no_grad()
    def _step(self, optimizer: ModuleOptimizer, lr_kwargs: Mapping[str, Any] | None) -> None:
        with _begun(self).stepping():
            super()._step(optimizer, lr_kwargs)

    def gather(self, what: str = "weights") -> dict[str, Tensor]:
        """As ``ModuleEngine.gather``, of this replica. Collective over it."""
        with _of(self).alone():
            return super().gather(what)
