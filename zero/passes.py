"""Backward passes of a plain loop: any module's gradients, reduced over replicas while torch's own backward runs.

It is what stands behind ``ShardedOptimizer`` and behind the engine of a plain module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..grid import Grid, layout_of
from .arguments import agree, cast, listed, names
from .gradients import weak
from .mode import Managed, Mode
from .optimizer import MakeOptimizer
from .replicas import Replicas
from .units import Units, find_units, users


class Passes:
    """The replicas of any module, and the backward passes of its steps. Collective over the data axis.

    Args:
        groups: parameter groups; those whose parameters require gradients are trained.
        grid: whose data axis the replicas lie on; they take the first one's parameters.
        mode: what ZeRO does.
        capacity: elements of a bucket.
        make: makes the optimizer; None: nothing is stepped.
        module: the model; stage 3 needs it.
        units: of the module, in stage 3: see ``find_units``.
        keep: in stage 3, hold weights whole from a step's first forward to its last backward pass.
        expected: backward passes of a step; None: a pass is the last one if ``last`` is set when it runs.

    Attributes:
        replicas: of these parameters.
        trained: the parameters that are stepped.
        last: whether the next pass is the step's last one, where nothing is ``expected``.
        count: backward passes of this step so far.
        seen: how many of them the owner has seen; back to 0 with them.
        reduced: every gradient of the step is.
        stepped: so are the weights: ``zero`` begins the next step.

    Raises:
        ValueError: parameters that differ between replicas, or lie elsewhere than the grid.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        grid: Grid,
        mode: Mode,
        capacity: int,
        make: MakeOptimizer | None,
        *,
        module: nn.Module | None,
        units: Sequence[str | nn.Module] | None = None,
        keep: bool = False,
        expected: int | None = None,
    ) -> None:
        group_of = {p: i for i, group in enumerate(groups) for p in group["params"]}
        cut = find_units(module, units) if module is not None and mode.stage == 3 else []
        where = users(cut) if cut else {}
        called = names(groups, module)
        laid_out = listed(group_of, where, called, module, mode.stage)
        agree(laid_out, called, grid)

        self.trained = [p for p in laid_out if p in group_of and p.requires_grad]
        # Where each of them hangs: a step looks whether it still does, and walks no modules for that.
        stepped, modules = set(self.trained), [] if module is None else list(module.modules())
        self._homes = [(m._parameters, key, p) for m in modules for key, p in m._parameters.items() if p in stepped]
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(weak(self._arrived))  # called before the reducer's, made below
        members = [
            Managed(
                p,
                replace(layout_of(p), name=called[p]),
                stages=(0,),
                layers=tuple(where.get(p, ())),
                tie=None,
                counted=True,
                group=group_of[p] if p in group_of and p.requires_grad else None,
            )
            for p in laid_out
        ]
        self.replicas = Replicas(
            members,
            grid,
            tie_axes=(),
            order={0: range(len(cut))},
            mode=mode,
            capacity=capacity,
            make=make,
            groups=[options(group) for group in groups],
        )
        cast(laid_out, module, mode.weights)
        self._expected = expected
        self._units: Units | None = None
        if self.replicas.gatherer is not None:
            self._units = Units(cut, self.replicas.gatherer, keep, expected or 1, self._over)
        self._running: AbstractContextManager[None] | None = None  # what the backward pass that runs is in
        self.count = self.seen = 0
        self.last = self.reduced = self.stepped = False
        self._closed = False  # the last pass began
        self._task = -1
        self._early: list[tuple[int, int, int]] = []  # the pass, and a unit that was over before its first gradient
        self.begin()

    def begin(self) -> None:
        """A new step: gradients are zero."""
        self.replicas.begin()
        self.count = self.seen = 0
        self.reduced = self.stepped = self._closed = False
        if self._units is not None:
            self._units.forget()

    def zero(self) -> None:
        """The same, whatever the last step came to. Collective where passes were made and not reduced."""
        if self._running is not None:
            self.replicas.abandon()  # the last backward pass failed half way
            self._running = None
        elif self.count:
            self.close()
        self.begin()

    def close(self) -> None:
        """Have all gradients summed over the replicas. Collective.

        Raises:
            RuntimeError: the last backward pass failed half way.
        """
        if self.reduced:
            return
        self._require_whole()
        if self._units is not None:
            self._units.catch_up(int(not self._closed) if self._expected is None else self._expected - self.count)
        while not self._closed:
            # As many as the other replicas: they may have had gradients where this one had none.
            self._empty(self._expected is None or self.count + 1 == self._expected)
        self.replicas.finish()
        if self._units is not None:
            self._units.forget()
        self.reduced = True

    def absent(self) -> None:
        """A pass that gave this replica no gradient, and others maybe some. Collective, where it is reduced.

        Raises:
            RuntimeError: in stage 3, where the others gather weights in it, after more or less than one forward pass.
        """
        self._require_whole()
        if self._units is not None and not self._units.knows_the_last:
            raise RuntimeError(
                "the loss depends on no trained parameter, and in stage 3 every replica's backward pass gathers them, "
                "in an order that only one forward pass before it tells: add 0.0 * output.sum() to it, or use stage 2"
            )
        self._empty(self.last, self._units)

    def require_known(self, parameters: Iterable[Tensor]) -> None:
        """Refuse parameters that a step would not move.

        Raises:
            RuntimeError: some require gradients and did not before, or are not where they were.
        """
        moved = (key for home, key, parameter in self._homes if home.get(key) is not parameter)
        if (name := self.replicas.displaced() or next(moved, None)) is not None:
            raise RuntimeError(
                f"{name} is no longer where it is stepped: the model was moved, cast or assigned to, or went to "
                "another engine. Do that before its engine or optimizer is made"
            )
        known = set(self.trained)
        late = sum(p.requires_grad and p not in known for p in parameters)
        if late:
            raise RuntimeError(
                f"{late} parameters were frozen when the optimizer was made, so nothing would step them: let all that "
                "will ever train require gradients then, and freeze it after"
            )

    def abandon(self) -> None:
        """After a failure: let go of everything under way."""
        self.replicas.abandon()

    def _require_whole(self) -> None:
        if self._running is not None:
            raise RuntimeError("the last backward pass failed half way, so its gradients are not whole: zero_grad()")

    def _empty(self, last: bool, units: Units | None = None) -> None:
        self.count += 1
        self._closed = last
        self._running = self.replicas.backward(0, last=last)
        with self._running:
            if units is not None:
                units.absent()
        self._running = None

    def _arrived(self, parameter: Tensor) -> None:
        """Autograd has made a parameter's gradient."""
        if torch._C._current_graph_task_id() != self._task:
            self._enter_backward()

    def _enter_backward(self) -> None:
        """The first gradient of a backward pass: from here on buckets are reduced as they become complete."""
        if self._running is not None:
            raise RuntimeError("the last backward pass failed half way: call optimizer.zero_grad() before the next")
        if self.stepped or self.reduced:
            raise RuntimeError("gradients were reduced, and there are new ones: call optimizer.zero_grad() before")
        if self._closed and self._expected is None:
            raise RuntimeError(
                f"backward pass {self.count + 1} of a step whose last one is reduced already: add the losses and call "
                "backward() once, or run all but the last within engine.no_sync(), and engine.step() after it. (A "
                "re-entrant checkpoint is a pass of its own: use torch.utils.checkpoint with use_reentrant=False.)"
            )
        if self._closed:
            raise RuntimeError(
                f"backward pass {self.count + 1} of a step that has backward_passes_per_step={self._expected}: pass "
                "a larger one, or add the losses and call backward() once. (A re-entrant checkpoint is a pass of its "
                "own: use torch.utils.checkpoint with use_reentrant=False.)"
            )
        self._task = torch._C._current_graph_task_id()
        self.count += 1
        self._closed = self.last if self._expected is None else self.count == self._expected
        self._running = self.replicas.backward(0, last=self._closed)
        self._running.__enter__()
        for task, unit, runs in self._early:
            if task == self._task:
                self.replicas.over(unit, runs)
        self._early.clear()
        torch.autograd.Variable._execution_engine.queue_callback(self._leave_backward)

    def _over(self, unit: int, runs: int) -> None:
        """The backward of one of a unit's runs is over."""
        task = torch._C._current_graph_task_id()
        if self._running is not None:
            self.replicas.over(unit, runs)
        else:
            self._early = [*(entry for entry in self._early if entry[0] == task), (task, unit, runs)]

    def _leave_backward(self) -> None:
        assert self._running is not None
        running, self._running = self._running, None
        with torch.no_grad():
            running.__exit__(None, None, None)
        if self._units is not None and self._closed:
            self._units.drop()


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
