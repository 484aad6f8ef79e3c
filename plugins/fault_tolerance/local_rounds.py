"""Local updates (local SGD, DiLoCo) of replicas that come and go between two outer steps.

begin of a round   a newcomer gets weights, outer velocity and inner optimizer state from the longest-standing member
H local steps      each replica alone; nothing is sent
end of a round     g = sum of n_i (common - weights_i) / sum of n_i over the contributors i, which have seen n_i labels
                   Nesterov's step on common, equal on all replicas; weights = common

A round is one step of the base class: its share of samples is H batches, and it is taken with all of a replica's
difference, or with nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ...base.dtypes import dtype_of
from ...base.errors import AgreedError
from ...base.option_error import refusal
from ...engine.optim.schedulers import advance_schedule
from ...engine.snapshot.capture import all_parameters
from ...grid import Grid
from ...grid.agreement import agreement
from ...grid.comm.axis import Axis
from ...grid.layout import FlatRange
from ...options.fault_tolerance import FaultTolerance
from ...options.local_updates import LocalSGD
from ...pipe.module import PipelineModule
from ...zero.state_shards import StateShards
from ..local_sgd.outer_optimizer import NesterovStep, OuterOptimizer
from .meeting import Round
from .membership import RESTARTED, Change
from .replicas import FaultTolerantReplicas

if TYPE_CHECKING:
    from ...engine.base import Engine


class LocalRounds(FaultTolerantReplicas):
    """Replica strategy of ``fault_tolerance`` with ``local_updates``. Every rank of a replica makes it.

    ``train_batch`` returns the loss of this replica. The history counts rounds, not optimizer steps.

    Args:
        engine: the engine.
        grid: the grid of this replica's processes.
        options: the options of ``fault_tolerance``.
        local: the options of ``local_updates``.

    Attributes:
        just_synchronized: True if the last step ended with an outer step.
        since: number of optimizer steps of this replica in the present round.

    Raises:
        OptionError: the schedule needs a loss that all replicas share, or the history cannot be replayed.
    """

    unit = "round"

    def __init__(self, engine: Engine, grid: Grid, options: FaultTolerance, local: LocalSGD) -> None:
        if isinstance(engine.lr_scheduler, ReduceLROnPlateau):
            raise refusal(
                "<local_updates> does not work with ReduceLROnPlateau, because each replica has its own loss: use a "
                "schedule that follows steps"
            )
        if not isinstance(engine.module, PipelineModule) or engine.auxiliary:
            raise refusal(
                "<fault_tolerance> with <local_updates> trains a PipelineModule without a mixture of experts: leave "
                "one of the two out"
            )
        super().__init__(engine, grid, options)
        if self.history is not None and self.history.restarted:
            raise refusal(
                f"{options.replay} is the history of a run with <local_updates> that has started again from files, and "
                "it does not say which inner optimizer states the files had: replay a run without a restart"
            )
        self.batches, self.since, self._labels = local.every, 0, 0.0
        dtype = dtype_of(engine.options.reduction.dtype)
        alone = Axis("replica", [grid.rank], grid.rank, None, grid.traffic)
        self._outer = OuterOptimizer(engine.data_axis, alone, NesterovStep(*local.outer), dtype)
        engine.optimizer_step.across = self._note
        self.just_synchronized = False

    # ------------------------------------------------------------------------------------------ a round

    def _begin(self) -> None:
        if self.since:
            return
        super()._begin()
        if self.history is not None:
            self._replay_entries()

    def _replay_entries(self) -> None:
        """Give the replicas that enter after this round the state that they got in the run that is replayed."""
        assert self.history is not None
        step = self._now.step
        members = self.history.members(step)
        entering = [name for name in self.history.members(step + 1) if name not in members]
        if entering and self.name == members[0]:
            self._send(entering)
        elif self.name in entering:
            self._receive(members[0])

    def share(self, numbers: Sequence[float]) -> list[float]:
        """Return numbers as they are: a local step has the weights of this replica alone."""
        return [*numbers]

    def _note(self, values: Sequence[Tensor | float]) -> list[float]:
        """Note the number of labels of a local step, the second of its numbers; nothing is sent."""
        numbers = [float(value) for value in values]
        self._labels += numbers[1]
        return numbers

    def _end(self) -> None:
        """End a local step; the last one of a round ends with the outer step. Collective over the replica."""
        if self._engine.named_losses.values:
            raise AgreedError(
                "the loss has named terms, and fault_tolerance with local_updates weighs a replica by one number of "
                "labels: return one pair (sum, labels), or leave one of the two out"
            )
        self.since += 1
        self.just_synchronized = self.since == self.batches
        if not self.just_synchronized:
            return
        (labels,) = agreement.totals(self.grid, [self._labels])
        weight = labels / (self.batches * self._engine.batch.train)  # of a sample: of a size that every dtype holds
        found, (total,) = self.agree([*self._outer.differences(weight)], [weight])
        common = zip(found, self._outer.common, strict=True)
        self._outer.step(each.to(own.device, own.dtype).div_(total) for each, own in common)
        self.shards().publish()
        self.since, self._labels = 0, 0.0

    def _count(self, counted: Sequence[str]) -> None:
        self._engine.add_samples((len(counted) - 1) * self.batches * self._engine.batch.train)

    @property
    def _steps_taken(self) -> int:
        return (self._engine.global_steps - self.since) // self.batches

    def shards(self) -> StateShards:
        """Return this rank's shards of the weights and the optimizer state."""
        return StateShards(self._engine.data_axis, all_parameters(self._engine), self.grid)

    # ------------------------------------------------------------------------------------------ state

    def _share_state(self, round_: Round) -> None:
        if self.ledger.changes:  # of a checkpoint: all get the inner optimizer state of one, which a replay cannot know
            self.ledger.changes.append(Change(round_.step, round_.members, facts={"cause": RESTARTED}))
        super()._share_state(round_)

    def _outer_state(self) -> Sequence[Tensor]:
        return self._outer.velocity

    def _capture(self) -> tuple[Tensor, list[Tensor]]:
        """Return a copy of this rank's state in host memory, because local steps change it while it is sent."""
        header, tensors = super()._capture()
        return header, [tensor.detach().to("cpu", copy=True) for tensor in tensors]

    def _load(self, header: dict[str, Any], tensors: list[Tensor]) -> None:
        """Load the state of the begin of a round, and go to the present place in it."""
        super()._load(header, tensors)
        self._outer.restart()
        for velocity, given in zip(
            self._outer.velocity, tensors[len(tensors) - len(self._outer.velocity) :], strict=True
        ):
            velocity.copy_(given)
        engine = self._engine
        assert engine.optimizer is not None
        for _ in range(self.since):
            advance_schedule(engine.lr_scheduler, engine.optimizer, None)
        engine.global_steps += self.since
        engine.add_samples(self.since * engine.batch.train)

    # ------------------------------------------------------------------------------------------ the engine's calls

    def synchronize(self) -> None:
        """Refuse to synchronize at other times than the end of a round.

        Raises:
            AgreedError: always.
        """
        raise AgreedError(
            f"replicas of fault_tolerance synchronize after every {self.batches} steps (local_updates.every), and "
            "at no other time: leave synchronize() out"
        )

    def common_weights(self) -> AbstractContextManager[None]:
        """Context in which the model has the weights of the last outer step. Nothing is sent."""
        return self._outer.common_weights()

    def memory(self) -> dict[str, int]:
        """Return the bytes of the common weights and the outer optimizer's state."""
        return {"common": self._outer.memory()}

    def velocity_ranges(self, mine: bool) -> Iterator[FlatRange]:
        """Yield the outer velocity, cut into ranges of parameters.

        Args:
            mine: yield only the ranges that this rank writes to a checkpoint.
        """
        shards = self.shards()
        for bucket, flat in zip(shards.trained, self._outer.velocity, strict=False):  # without momentum: none
            yield from shards.ranges.of_bucket(bucket, flat, bucket.values()[1], mine)

    def restart(self) -> None:
        """Take the model's weights, just loaded, as those of the last outer step."""
        self._outer.restart()
        self.since, self._labels = 0, 0.0
