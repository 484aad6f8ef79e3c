"""Replica strategy of replicas that leave and join a run at a step while the others train.

Each replica is a group of processes with a world of its own: a whole grid. A step sums the gradients of the replicas
rank by rank, between ranks at the same place of each grid, over a connection that is made anew when replicas come or
go.

    a step of a MEMBER (phase.py has the table of standings, rounds.py the outcomes)

    stepping()
      _prepare    APART, JOINING: rounds.join, until a round has this replica
        _begin    _make_ready     ZeRO over replicas: gather the new weights, move optimizer state
                  seek the samples that the ledger gives; begin to send the state to newcomers
      the engine  forward, backward; share(): weights of the losses
      sum         agree           again and again, until the step is taken:
                    make ready, load the state that was under way (JOINING -> MEMBER)
                    _attempt      sum over the contributors
                    _meet         all replicas report; one decision follows
                    _follow       the step is not taken: the next round, or join
                  _take           record the step; the next round, or leave (LEFT, HANDED_OVER)
      the engine  optimizer step; _step_shards with ZeRO over replicas
      _end        LocalRounds: an outer step
"""

from __future__ import annotations

import logging
import secrets
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...base.errors import AgreedError
from ...base.option_error import refusal
from ...data.dataloader import RepeatingLoader
from ...engine.replica_strategy import SynchronousReplicas
from ...grid import Grid
from ...grid.agreement.agreement import agreed
from ...grid.environment import coordinator_address, replica_name, run_secret
from ...grid.launcher.launch import own_address
from ...options.fault_tolerance import FaultTolerance, is_replica_name
from ...pipe.module import PipelineModule
from .contributors import Contributors
from .coordinator_client import CoordinatorClient
from .identity import identity
from .leave_signal import LeaveSignal
from .meeting import Decision, Report, Round
from .membership import History, Ledger
from .peer_state import capture_here, load_here
from .phase import Phase, Standing
from .round_link import RoundLink
from .rounds import RoundOutcome, Rounds
from .run_record import ReplicaRecord
from .sharded_state import ReplicaShards
from .state_transfers import FAILURES, StateTransfers, reason
from .supported import ConstantBuffers, require_supported

if TYPE_CHECKING:
    from ...engine.base import Engine

_LOG = logging.getLogger("triax")


class FaultTolerantReplicas(SynchronousReplicas):
    """Replica strategy of ``fault_tolerance``. Every rank of a replica makes it, after the engine's optimizer.

    Args:
        engine: the engine.
        grid: the grid of this replica's processes.
        options: the options.

    Attributes:
        name: this replica's name.
        record: the ledger of samples and members, and what is written of it.
        sharded: the optimizer state that this replica holds, with ZeRO over the replicas; None: it holds all.
        link: connection to the ranks at this rank's place in the other replicas.
        history: the history that is replayed; None: none is.
        batches: number of batches of a share of samples.
        unit: name of what the history counts.
    """

    batches, unit = 1, "step"

    def __init__(self, engine: Engine, grid: Grid, options: FaultTolerance) -> None:
        super().__init__(grid)
        self._engine = engine
        self.name = _given(options.replica or replica_name(), "<fault_tolerance.replica>", "TRIAX_REPLICA", "0")
        if not is_replica_name(self.name):
            raise refusal(f"the variable TRIAX_REPLICA is {self.name!r}: give a name without a slash, such as 0")
        address = _given(
            options.coordinator or coordinator_address(),
            "<fault_tolerance.coordinator>",
            "TRIAX_COORDINATOR",
            "127.0.0.1:29510",
        )
        require_supported(engine)
        self.history = None if options.replay is None else History.from_file(Path(options.replay))
        self.record = ReplicaRecord(self.name, options.folder, grid.rank == 0, self.unit)
        own = Report(self.name, -1, settings=identity(engine), process=secrets.token_hex(8))
        self._contributors, self._transfers = Contributors(options, self.history), StateTransfers()
        self._buffers = ConstantBuffers(engine)
        self._began, self._made = 0.0, time.monotonic()
        self._client: CoordinatorClient | None = None
        secret = run_secret()
        host = own_address(address.rpartition("//")[2].rpartition(":")[0])
        self.link = RoundLink(self.name, grid.rank, address, secret, host, options.timeout)
        with agreed(grid, RuntimeError):
            if grid.rank == 0:
                self._client = CoordinatorClient(
                    address, secret, self.name, own.process, options.heartbeat_timeout, options.give_up
                )
        engine.optimizer_step.across = self.sum
        self.sharded: ReplicaShards | None = None
        if options.zero:
            self.sharded = ReplicaShards(engine.data_axis, self.name, options.copies)
            engine.data_axis.stepper.elsewhere = self._step_shards
        folder = engine.options.checkpoint.folder
        self._rounds = Rounds(own, self.unit, grid, self._client, self.link, self._contributors, self.sharded, folder)
        rounds = weakref.ref(self._rounds)
        self._signal = LeaveSignal(lambda: _ask_to_leave(rounds))

    @property
    def ledger(self) -> Ledger:
        """The samples taken, and the history of members."""
        return self.record.ledger

    @property
    def phase(self) -> Phase:
        """Standing of this replica in the run, and its progress in the present step."""
        return self._rounds.phase

    @property
    def left(self) -> bool:
        """True if this replica has left the run."""
        return self.phase.left

    @property
    def present(self) -> list[int]:
        """Positions of the members of the present round."""
        return list(range(len(self.members)))

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the replicas that have the state of the run, the longest-standing first."""
        return () if self.phase.round is None else self.phase.round.members

    @property
    def leads(self) -> bool:
        """True on the longest-standing member, which prints what is equal on all."""
        return self.members[:1] == (self.name,)

    @contextmanager
    def stepping(self) -> Iterator[Grid]:
        """Context around one training step, which yields the grid of this replica.

        Raises:
            AgreedError: this replica has left the run.
            RuntimeError: there is no coordinator, or no replica with a state is left.
            SystemExit: with code 0, at the end of the step after which it leaves, unless a checkpoint is saved.
        """
        if isinstance(self._engine.module, PipelineModule):
            self._prepare()
        elif not self.phase.prepared:
            raise AgreedError(
                "step() ends a step whose samples do not come from engine.replicas.microbatches(), but fault_tolerance "
                "gives each replica its samples by number: write for inputs, labels in engine.replicas.microbatches()"
            )
        self._rounds.phase = replace(self.phase, prepared=False)
        yield self.grid
        self._buffers.require_unchanged()
        self._end()
        if self.left:
            self._close()
            if self.grid.rank == 0:
                _LOG.warning("replica %s has left the run after step %d", self.name, self._engine.global_steps)
            handed_over = self.phase.standing is Standing.HANDED_OVER
            if self._signal.following is None or handed_over:  # else a checkpoint is saved, which ends the process
                raise SystemExit(0)

    def microbatches(self) -> Iterator[Any]:
        """Yield the microbatches of this replica, in each step those of its share, without end. Collective.

        A plain module is trained on them: each forward and backward pass, and ``engine.step()``.

        Raises:
            AgreedError: this replica has left the run.
            RuntimeError: there is no coordinator, or no replica with a state is left.
        """
        loader: Any = self._engine.training_dataloader
        own = RepeatingLoader(loader)
        while not self.left:
            if not self.phase.prepared:
                self._prepare()
            yield next(own)

    def _prepare(self) -> None:
        """Begin a step, and join the run before the first one. Collective."""
        if self.left:
            raise AgreedError("this replica has left the run: take no step after engine.leave()")
        if self.phase.round is None:
            self._signal.install()
            self._get_state(self._rounds.join(self._steps_taken))
        self._begin()
        self._rounds.phase = replace(self.phase, prepared=True)

    def leave(self) -> bool:
        """Leave the run. The others learn of it when they miss this replica; SIGTERM lets it announce it in a step."""
        if not self.left:
            self._rounds.phase = self.phase.ended()
        self._close()
        return False

    def traffic(self) -> dict[str, Any]:
        """Return ``replicas`` of ``Engine.traffic_report``: the bytes that this rank has sent to other replicas."""
        sent = self.link.sent
        return {"replicas": {"sent": sent, "per_step": sent / max(1, self._engine.global_steps)}}

    def memory(self) -> dict[str, int]:
        """Return additional entries of ``held`` in ``memory_report``: with ZeRO over replicas, the bytes of copies."""
        return {} if self.sharded is None else self.sharded.nbytes()

    def may_save(self, due: bool) -> bool:
        """Return True if an automatic checkpoint may be saved now; with ZeRO over replicas all save together.

        Args:
            due: True if the replicas save one after this step.
        """
        if self.sharded is None or self.left:
            return self.phase.standing is not Standing.HANDED_OVER
        if due and (problem := self.hold_whole_state()) is not None:
            _LOG.warning("replica %s saves no checkpoint after step %d: %s", self.name, self._now.step - 1, problem)
            return False
        return due and not self.phase.announced

    def hold_whole_state(self) -> str | None:
        """Get the whole optimizer state, which stays until the next step, for a checkpoint. Collective over replicas.

        Returns:
            The reason of a failure, on every rank; the next step goes on with those that are left.
        """
        if self.sharded is None or self.phase.round is None or self.left:
            return None
        if self.phase.stateless:
            return "this replica waits for the state of the others"
        problem = None
        round_, group = self._now, self.link.group
        try:
            if group is None or self.phase.ready != round_.number:
                raise RuntimeError("this replica has no whole state of this step")
            self.sharded.gather_whole(group, round_.group, round_.members, round_.keepers)
        except FAILURES as error:
            problem = reason(error)
        return self._agreed_failure(problem)

    def _agreed_failure(self, problem: str | None) -> str | None:
        """Return the failure of any rank of this replica; then the connections to the others are closed. Collective."""
        problems = self.grid.world.all_gather_json(problem)
        failure = next((problem for problem in problems if problem is not None), None)
        if failure is not None:
            self.link.close()
        return failure

    # ------------------------------------------------------------------------------------------ a step

    def _begin(self) -> None:
        """Begin a step: go to the samples of this replica, and begin to send or receive the state."""
        self._make_ready()
        if self.sharded is not None:
            self.sharded.drop_whole()
        round_, engine = self._now, self._engine
        self._began = time.monotonic()
        planned = self._rounds.planned(round_)
        shares = self.ledger.plan(planned)
        # A spare replica and a newcomer compute a share that another one takes: their gradients are not summed.
        assert engine.training_dataloader is not None
        engine.training_dataloader.seek(shares.get(self.name, self.ledger.next_share) * self.batches)
        position = planned.index(self.name) if self.name in planned else 0
        engine.shift_samples(position * engine.batch.train)
        self._rounds.phase = replace(self.phase, computed=round_.number)
        if round_.donor == self.name and not round_.fresh:
            self._send(round_.newcomers)

    def _end(self) -> None:
        """End a step after which all is done: its gradients were summed within it."""

    def sum(self, values: Sequence[Tensor | float]) -> list[float]:
        """Sum gradients and numbers over the replicas; the gradients of the engine are then the sums. Collective.

        Returns:
            The sums of ``values``, of the ranks at this rank's place.

        Raises:
            RuntimeError: no replica with a state is left, or there is no coordinator.
        """
        engine: Any = self._engine
        buckets = [bucket for bucket in engine.data_axis.buckets if bucket.trained]

        def tensors() -> list[Tensor]:
            facts = [engine.data_axis.used.flags(), *([engine.auxiliary_sums] if engine.auxiliary else [])]
            return [*(bucket.owned_gradient for bucket in buckets), *facts]

        def again() -> tuple[list[Tensor], list[Tensor | float]]:
            own = engine.compute_again()
            return tensors(), [*own, *values[len(own) :]]

        summed, sums = self.agree(tensors(), values, again)
        for bucket, gradient in zip(buckets, summed, strict=False):
            bucket.owned_gradient.copy_(gradient)
        engine.data_axis.used.use_elsewhere(summed[len(buckets)])
        if engine.auxiliary:
            engine.auxiliary_sums.copy_(summed[len(buckets) + 1])
        return sums

    def agree(
        self,
        tensors: Sequence[Tensor],
        values: Sequence[Tensor | float],
        again: Callable[[], tuple[Sequence[Tensor], Sequence[Tensor | float]]] | None = None,
    ) -> tuple[list[Tensor], list[float]]:
        """Sum tensors and numbers over the replicas, record the step, and enter the next round. Collective.

        Args:
            tensors, values: those of this rank.
            again: returns them, computed with the weights of the present contributors; None: they do not depend on it.

        Returns:
            The sums of the tensors, in host memory, and of the numbers, of the ranks at this rank's place.

        Raises:
            RuntimeError: no replica with a state is left, or there is no coordinator.
        """
        seconds, since, detection = time.monotonic() - self._began, time.monotonic(), 0.0
        while True:
            round_ = self._now
            problem = self._make_ready_once() or self._load_received()  # a donor sends after it has done so
            if again is not None and self.phase.weighs and self.phase.computed != round_.number:
                self._rounds.phase, (tensors, values) = replace(self.phase, computed=round_.number), again()
            sums, problem = self._attempt(tensors, values, problem)
            decision, taken = self._meet(problem, seconds)
            now = time.monotonic()
            if taken:
                break
            detection, since = detection + now - since, now
            self._follow(decision)
        if detection:
            self.record.lose("detection", detection)
            self.record.lose("again", now - since)
        if self._transfers.wait_sent():
            self.record.lose("joining", time.monotonic() - now)
        self._take(round_, decision, detection + now - since if detection else 0.0)
        return sums[:-1], sums[-1].tolist()

    def _attempt(
        self, tensors: Sequence[Tensor], values: Sequence[Tensor | float], problem: str | None
    ) -> tuple[list[Tensor], str | None]:
        """Sum tensors and numbers over the contributors of the present round. Collective over the round.

        Args:
            tensors, values: those of this rank.
            problem: the reason for which this rank cannot take part; None if it can.

        Returns:
            The sums of the tensors, and of the numbers in one tensor; and the reason of a failure, with which there is
            no sum and the connection is closed.
        """
        sums: list[Tensor] = []
        numbers = torch.tensor([float(value) for value in values], dtype=torch.float64)
        if problem is None:
            try:
                sums = self.link.sum(self._now, self._contributors.summed(self._now), [*tensors, numbers])
            except FAILURES as error:
                problem = reason(error)
        if problem is not None:
            self.link.close()  # before the meeting, to which all come: others may still wait for this rank's part
        return sums, problem

    def share(self, numbers: Sequence[float]) -> list[float]:
        """Return the contributors' sums of numbers, which their backward passes need. Collective as ``sum``.

        If a replica is lost meanwhile, the gradients are computed again with the sums of those that are left.
        """
        self._rounds.phase = replace(self.phase, weighs=True)
        own = torch.tensor([float(number) for number in numbers], dtype=torch.float64)
        try:
            (summed,) = self.link.sum(self._now, self._contributors.summed(self._now), [own])
        except FAILURES as error:  # the sum of the gradients fails too, and all meet
            _LOG.debug("the weights of a step were not summed: %s", error)
            self.link.close()
            return [float(number) for number in numbers]
        sums: list[float] = summed.tolist()
        return sums

    def _take(self, round_: Round, decision: Decision, seconds: float) -> None:
        """Take the step: record it, and enter the next round, or leave the run. Collective over the round."""
        planned, counted = self._rounds.planned(round_), self._contributors.summed(round_)
        if self.name in planned and self.record.is_new:
            self.record.lose("joining", self._began - self._made)
        self.record.add_step(round_, planned, counted, decision, seconds)
        self._count(counted)
        if self.sharded is not None:
            self.sharded.adopt()
        if self.name in decision.left or not decision.next.members:
            hands_over = self.sharded is not None and bool(decision.next.members)
            self._rounds.phase = self.phase.ended(hands_over)
            if self.sharded is None or hands_over:
                self.link.close()
        else:
            before = time.monotonic()
            self._get_state(self._rounds.follow(decision))
            self.record.lose("joining" if decision.next.newcomers else "again", time.monotonic() - before)

    def _count(self, counted: Sequence[str]) -> None:
        """Count the samples that the other contributors have taken in this step."""
        self.contributing = len(counted)
        self._engine.add_samples((len(counted) - 1) * self._engine.batch.train)

    def _follow(self, decision: Decision) -> None:
        """Enter the next round after an attempt that failed, as a newcomer if the others went on. Collective.

        Raises:
            RuntimeError: all others have lost the state of the run, which starts again.
        """
        outcome = self._rounds.follow(decision)
        cut_off = outcome is RoundOutcome.CUT_OFF
        if cut_off:
            self._made = time.monotonic()
            outcome = self._rounds.join(self._steps_taken)
        self._get_state(outcome)
        if cut_off and outcome is RoundOutcome.STARTED:
            raise RuntimeError("every replica with the state of the run is lost, and the run starts again")

    # ------------------------------------------------------------------------------------------ ZeRO over replicas

    def _step_shards(self, without: Collection[Tensor]) -> None:
        """Step the parts of this replica, and gather the weights: in the next round, as one is lost at any time.

        Args:
            without: parameters that had no gradient on any replica.

        Raises:
            AgreedError: there is such a parameter.
            RuntimeError: all replicas leave after this step, and one was lost before the weights were there.
        """
        assert self.sharded is not None
        self.sharded.step(without)
        if not self.left:
            self._make_ready()
        elif self.phase.standing is Standing.LEFT and self.link.group is not None:
            group, members = self._now.group, self._now.members
            cut = self.sharded.of(self._rounds.planned(self._now))
            try:
                self.sharded.gather_weights(self.link.group, group, cut, members)
                self.sharded.gather_whole(self.link.group, group, members, members)
            except FAILURES as error:
                raise RuntimeError(
                    f"a replica was lost while all left the run after step {self._now.step}, so replica {self.name} "
                    f"has no whole state of it ({error}): start the run again from its last checkpoint"
                ) from error

    def _make_ready(self) -> None:
        """Make weights and shards ready for the round; with those that are left if one is lost. Collective."""
        before, failed = time.monotonic(), False
        while (problem := self._make_ready_once()) is not None:
            failed = True
            decision, _ = self._meet(problem, 0.0)
            self._follow(decision)
        if failed:
            self.record.lose("again", time.monotonic() - before)

    def _make_ready_once(self) -> str | None:
        """Make weights and shards ready for the round; return a reason if it failed. Collective over the round."""
        round_ = self._now
        if self.sharded is None or self.phase.ready == round_.number:
            return None
        problem = None
        try:
            before, after = self.sharded.of(round_.owners), self.sharded.of(self._rounds.planned(round_))
            self.sharded.prepare(self.link.opened(), round_.group, before, round_.keepers, after)
        except FAILURES as error:
            problem = reason(error)
        failure = self._agreed_failure(problem)
        if failure is None:
            self._rounds.phase = replace(self.phase, ready=round_.number)
        return failure

    # ------------------------------------------------------------------------------------------ rounds

    @property
    def _steps_taken(self) -> int:
        """Number of steps that the replicas have taken together."""
        return self._engine.global_steps

    @property
    def _now(self) -> Round:
        return self._rounds.now

    def _meet(self, problem: str | None, seconds: float) -> tuple[Decision, bool]:
        """Meet the other replicas. Collective.

        Args:
            problem: the reason for which this rank has no sum; None if it has one.
            seconds: time from the begin of the step to the gradients.

        Returns:
            The decision, and True if the step is taken with the sum that all ranks of this replica have.
        """
        by_hand = self._engine.data_axis.used.by_hand
        told = self.grid.world.all_gather_json([problem, self._rounds.leaving, self.phase.weighs, by_hand])
        summed = all(failure is None for failure, *_ in told)
        leaving = self._rounds.leaving = any(leaving for _, leaving, *_ in told)
        weighs = any(weighs for *_, weighs, _ in told)
        self._rounds.phase = replace(self.phase, announced=leaving, weighs=weighs)
        if any(by_hand for *_, by_hand in told):
            raise AgreedError(
                "a weight or a gradient was written by hand, and fault_tolerance does not give that to its replicas: "
                "leave it to the loss, or leave fault_tolerance out"
            )
        decision = self._rounds.meet(self._steps_taken, summed, seconds)
        taken = decision.committed is not None and summed and decision.next.number == self._now.number + 1
        return decision, taken

    # ------------------------------------------------------------------------------------------ state

    def _get_state(self, outcome: RoundOutcome) -> None:
        """Get the state of the run where the present round gives it to this replica. Collective over the round."""
        round_ = self._now
        if outcome is RoundOutcome.STARTED:
            if round_.donor == self.name:
                self.ledger.members = ()  # of a run that starts again from a checkpoint, which the history records
            self._share_state(round_)
        elif outcome is RoundOutcome.NEWCOMER:
            if self.sharded is not None:
                self.sharded.forget()
            self._receive(round_.donor)

    def _share_state(self, round_: Round) -> None:
        """Give all replicas the first one's state before the first step. Collective over the round."""
        if self.ledger.changes:
            self.record.write_history()
        if round_.donor == self.name:
            self._send(round_.newcomers)
            self._transfers.wait_sent()
        else:
            self._receive(round_.donor)
            if (problem := self._load_received()) is not None:
                raise RuntimeError(f"replica {self.name} did not get the state of replica {round_.donor}: {problem}")

    def _send(self, names: Sequence[str]) -> None:
        """Begin to send this replica's state to other replicas of the round, in a thread."""
        if self.link.group is not None:
            header, tensors = self._capture()
            self._transfers.send(header, tensors, self.link.group, [self._now.group.index(name) for name in names])

    def _capture(self) -> tuple[Tensor, list[Tensor]]:
        """Return this rank's state to be sent: a header, and tensors that stay as they are until they are sent."""
        more = {"ledger": self.ledger.state()}
        return capture_here(self._engine, self._engine.client_state, more, self._outer_state())

    def _outer_state(self) -> Sequence[Tensor]:
        """Return tensors of a state besides those of the engine: none here."""
        return ()

    def _load(self, header: dict[str, Any], tensors: list[Tensor]) -> None:
        """Load a state of ``_capture``. Collective over this replica's data axis."""
        self._engine.client_state = load_here(self._engine, header, tensors)
        self.record.ledger = Ledger.of(header["ledger"])

    def _receive(self, donor: str) -> None:
        """Begin to receive the state from another replica of the round, in a thread."""
        self._transfers.receive(self.link.group, self._now.group.index(donor))

    def _load_received(self) -> str | None:
        """Load the state that this replica waits for; return a reason if it did not come. Collective over the replica.

        A replica whose state did not come has none, and joins again.
        """
        if not self._transfers.receives:
            return "this replica has no state" if self.phase.stateless else None
        state = self._transfers.received()
        any_failed = any(self.grid.world.all_gather_json(isinstance(state, str)))
        if isinstance(state, str):
            return state
        if any_failed:
            return "another rank of this replica did not get its state"
        self._load(*state)
        self._rounds.phase = self.phase.loaded()
        for observer in self._engine.observers:
            observer.joined(self._engine.client_state or {})
        self.record.write_history()
        return None

    # ------------------------------------------------------------------------------------------ ends

    def _close(self) -> None:
        self.link.close()
        if self._client is not None:
            self._client.close()


def _ask_to_leave(rounds: weakref.ref[Rounds]) -> None:
    """Let a replica leave after its present step, if it is still there."""
    if (present := rounds()) is not None:
        present.leaving = True


def _given(value: str | None, option: str, variable: str, example: str) -> str:
    if not value:
        raise refusal(
            f"fault_tolerance needs {option}: give it, such as {example!r}, or the variable {variable}, which "
            "triax run --replicas sets"
        )
    return value
