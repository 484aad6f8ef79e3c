"""Backward passes through units under ZeRO stage 3: each unit's weights are gathered for its backward, in one order.

Gathers are collectives, so every replica starts the same ones in the same order: the reverse of the order in which the
runs of units ended in the forward pass. A replica that has no gradient for a run gathers it all the same, when its turn
comes. Below, the graph of replica 1 does not reach unit 3:

    replica 0    reach 4 | end 4 | reach 3 | end 3 | reach 2 | ...
    replica 1    reach 4 | end 4 |                 | reach 2: skip 3, then as replica 0
    at the end of the pass all runs that are left are skipped
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from .forward_passes import REACHED, WAITING, ForwardPass, ForwardPasses
from .unit_weights import UnitWeights

_PATIENCE = 3.0  # seconds that a replica waits for the others at the end of a backward pass of another order than usual


class UnitBackward:
    """Gathers the weights of units in backward passes, and releases them.

    Args:
        weights: the weights of the units.
        passes: the forward passes that backward passes may reach.
        enter: called within a backward pass before its units are gathered. The first call in a pass calls
            ``begin_backward``, and ``end_backward`` follows at the pass's end.
        run_done: called as ``run_done(unit, runs)`` within a backward pass when the backward of one run of a unit has
            ended. ``runs`` is the number of the unit's runs in the forward passes that backward may reach.
    """

    def __init__(
        self,
        weights: UnitWeights,
        passes: ForwardPasses,
        enter: Callable[[], None],
        run_done: Callable[[int, int], None],
    ) -> None:
        self._weights, self._passes = weights, passes
        self._enter, self._run_done = enter, run_done
        self._entered = False  # the running backward pass has reached a unit
        self._repeated: Counter[int] = Counter()  # runs of units in it, by reentrant checkpoints, before their backward

    def begin_backward(self) -> None:
        """Begin a backward pass."""
        self._passes.forget(self._passes.having(REACHED))  # by a pass that failed
        self._entered = False
        self._repeated.clear()

    def enter(self) -> None:
        """Note that a unit is reached, or run again, by a backward pass, which begins if none runs."""
        self._enter()
        self._entered = True

    def reach(self, forward: ForwardPass, index: int) -> None:
        """Gather a unit's weights: the backward pass has reached an output of run ``index`` in ``forward.ended``."""
        self.enter()
        run = forward.ended[index]
        if torch.is_grad_enabled() and not self._weights.keep and not self._weights.gatherer.is_gathered(run.unit):
            raise RuntimeError(
                f"create_graph=True in a backward pass through {self._weights.names[run.unit]}: a second pass through "
                "this graph would need weights that stage 3 of ZeRO has released by then. Set "
                "keep_gathered of triax.Zero (or of ShardedOptimizer) to True, or run the forward and both backward "
                "passes on every rank within triax.zero.gathered(module)"
            )
        self._passes.reach(forward)
        if index < forward.left:
            self._skip(forward, index + 1, run.begun)
            self._start_gathers(forward, index)
            forward.left = index
        self._weights.in_backward.add(run.unit)
        self._weights.gather(run.unit)  # released before, in a second backward pass through the same graph

    def end(self, forward: ForwardPass, unit: int) -> None:
        """Release a unit's weights after the backward of one of its runs in a forward pass.

        Marks in the graph call it. They keep the pass alive, so that ``runs`` counts it as long as its graph lives.
        """
        self._weights.end_backward(unit)
        self._run_done(unit, self._passes.runs(unit))

    def begin_repeated(self, unit: int) -> None:
        """Note that a reentrant checkpoint runs a unit again; its backward follows."""
        self._repeated[unit] += 1

    def end_repeated(self, unit: int) -> None:
        """Release a unit's weights after the backward of all its runs in a reentrant checkpoint."""
        self._repeated[unit] -= 1
        if not self._repeated[unit]:
            self._weights.release_unused(unit)
        self._run_done(unit, self._passes.runs(unit))

    def end_backward(self) -> None:
        """End a backward pass: gather what other replicas gathered, and release all weights."""
        if self._entered:
            reached = self._passes.having(REACHED)
            for forward in reached:
                self._skip(forward, 0)
            self._passes.finish(reached)
            self._end_pass()

    @property
    def one_forward_waits(self) -> bool:
        """True if one forward pass has run since the last backward pass, to which the next backward pass belongs."""
        return self._passes.since_backward == 1 and len(self._passes.having(WAITING)) > 0

    def run_empty(self) -> None:
        """Gather and release weights as the other replicas do in a backward pass that has no gradient on this one."""
        forward = self._passes.having(WAITING)[-1]
        self._skip(forward, 0)
        self._passes.finish([forward])
        self._end_pass()

    def gather_missed(self, count: int) -> None:
        """Start the gathers of at most ``count`` backward passes that other replicas have run and this one has not.

        The gathers follow the oldest forward passes of this step that no backward pass has reached.
        """
        missed = self._passes.having(WAITING)[:count]
        for forward in missed:
            for run in reversed(forward.ended):
                self._weights.gatherer.start_gather(run.unit)
            self._mark_end()
        self._passes.forget(missed)

    def end_step(self) -> None:
        """Expect no further backward pass of this step."""
        self._passes.since_backward = 0
        self._passes.forget([*self._passes.having(WAITING), *self._passes.having(REACHED)])

    def release(self) -> None:
        """Release the gathered weights of all units."""
        self._weights.release_all()

    def _skip(self, forward: ForwardPass, to: int, begun: int = 0) -> None:
        """Gather and release the units of all runs from ``forward.left`` down to ``to``: they have no gradient here.

        Another replica may have a gradient there, and all replicas must take part in each gather. ``begun`` is the
        index in ``forward.begun`` of the run that is reached next. Units that began before it enclose it: they are not
        released, because their own backward follows.
        """
        while forward.left > to:
            forward.left -= 1
            self._start_gathers(forward, forward.left)
            run = forward.ended[forward.left]
            if run.begun >= begun:
                self.end(forward, run.unit)
            else:
                self._weights.in_backward.add(run.unit)

    def _start_gathers(self, forward: ForwardPass, index: int) -> None:
        """Start gathering the unit of run ``index``, and prefetch the unit of the run whose backward follows."""
        for run in forward.ended[max(index - 1, 0) : index + 1][::-1]:
            self._weights.gatherer.start_gather(run.unit)

    def _end_pass(self) -> None:
        if not self._weights.keep:
            self.release()
        self._mark_end()

    def _mark_end(self) -> None:
        """Check that a backward pass has ended on all replicas.

        If another replica still gathers weights, this one would wait for it in the reductions that follow.
        """
        if not self._weights.keep:
            self._weights.gatherer.enter("ends a backward pass", limit=_PATIENCE)
