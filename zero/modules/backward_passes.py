"""ZeRO in a plain training loop: gradients are reduced over replicas while torch's own backward pass runs.

``ShardedOptimizer`` and the engine of a plain module are built on it. ``StepState`` tells how far a step is. Within one
backward pass, with the passes that run within it, methods are called in this order:

autograd                                          calls
reaches the outputs or the loss                   _reached, which begins the pass: _pass_began
ends a unit before a parameter has its gradient   _unit_done, which keeps it for later
gives the first gradient of a parameter           _accumulated, which begins the pass if nothing did before, and counts
                                                  it: _begin_reductions
gives another gradient, or ends another unit      _accumulated, or _unit_done, which reduces complete buckets
has ended                                         _pass_ended; not if an error has ended the pass: then the gradients
                                                  are incomplete until ``reset``
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...base.autograd import OutermostBackward, WeakHook
from ...base.nest import visit_tensors
from ...base.torch_private import backward_task
from ...grid import Grid, layout_of
from ..axis_options import ZeroOptions
from ..bucketing import cast
from ..data_axis import ZeroDataAxis
from ..managed import ManagedParameter
from ..module_tree import ModuleTree
from ..range_stepper import OptimizerFactory
from ..sharded_init import gather_all, sharded_parameter
from ..state_dict_guard import guard_state_dict
from .forward_passes import ForwardPasses
from .optimizer_arguments import broadcast_parameters, managed_parameters, parameter_names
from .step_state import LAST_BEGAN, OPEN, REDUCED, REOPENED, STEPPED
from .unit_backward import UnitBackward
from .unit_forward import UnitForward
from .unit_weights import UnitWeights
from .units import find_units, unit_names, users


@dataclass
class RunningPass:
    """The outermost backward pass that runs, or has ended.

    Attributes:
        keeps_graph: it was started with ``create_graph=True``.
        counted: it has had a gradient, with which its reductions began.
        early: (unit, runs) of units that ended before the first gradient.
    """

    keeps_graph: bool = False
    counted: bool = False
    early: list[tuple[int, int]] = field(default_factory=list)


class BackwardPasses:
    """ZeRO data axis of any module, and the backward passes of its steps. Collective over the data axis.

    Args:
        groups: parameter groups; those whose parameters require gradients are trained.
        grid: its data axis holds the replicas; they take the first one's parameters.
        options: options of ZeRO.
        capacity: maximum number of elements of a bucket.
        factory: makes the optimizer, and names its stepper; None means that no parameter is trained.
        module: the model, which stage 3 needs.
        units: in stage 3, the units of the module, as ``find_units`` takes them.
        keep: in stage 3, keep weights gathered from a step's first forward to its last backward pass.
        expected: number of backward passes of a step; None: ``next_is_last()`` tells the last one.

    Attributes:
        data_axis: ZeRO's data axis with these parameters.
        access: access of user code to the gradients.
        trained: the parameters that are stepped.
        next_is_last: returns True if the next pass is the step's last one; called if ``expected`` is None.
        state: how far the step is, as in ``StepState``.
        count: backward passes of this step so far.
        new: those since ``end_microbatch``.
        total: those of all steps.
        origin: called when a pass is counted.
        origins: its results since ``end_microbatch``, without passes whose gradients user code has discarded.
        discarded: called with ``total`` when user code has discarded the gradients of this step's passes.

    Raises:
        ValueError: parameters differ between replicas, or are not on the grid's device.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        grid: Grid,
        options: ZeroOptions,
        capacity: int,
        factory: OptimizerFactory | None,
        *,
        module: nn.Module | None,
        units: Sequence[str | nn.Module] | None = None,
        keep: bool = False,
        expected: int | None = None,
    ) -> None:
        group_of = {p: i for i, group in enumerate(groups) for p in group["params"]}
        cut = find_units(module, units) if module is not None and options.stage == 3 else []
        where = users(cut) if cut else {}
        names = parameter_names(groups, module)
        managed = managed_parameters(group_of, where, names, module, options.stage)
        if options.stage < 3:
            gather_all(managed if module is None else module.parameters())
        broadcast_parameters(managed, names, grid)

        self.trained = [p for p in managed if p in group_of and p.requires_grad]
        trained = set(self.trained)
        self._tree = None if module is None else ModuleTree(module, trained)
        self._untrained = [p for group in groups for p in group["params"] if p not in trained]
        members = [
            ManagedParameter(
                p,
                replace(layout_of(p), name=names[p]),
                stages=(0,),
                layers=tuple(where.get(p, ())),
                tie=None,
                counted=True,
                group=group_of[p] if p in trained else None,
            )
            for p in managed
        ]
        self.data_axis = ZeroDataAxis(
            members,
            grid,
            tie_axes=(),
            order={0: range(len(cut))},
            options=options,
            capacity=capacity,
            factory=factory,
            groups=[group_options(group) for group in groups],
            names=dict(enumerate(unit_names(cut))),
        )
        self.data_axis.reducer.watch(WeakHook(self._accumulated))
        self._reached_hook = WeakHook(self._reached)
        self.access = self.data_axis.access
        for parameter in managed:  # one after the other: none is whole for longer than that
            if (record := sharded_parameter(parameter)) is not None:
                self.data_axis.fill(parameter, record.whole())
                record.hand_over()
        self.data_axis.stepper.renew_first_state()
        cast(managed, module, options)
        self._expected = expected
        self._outermost = OutermostBackward(self._pass_began, self._pass_ended)
        self._units: UnitBackward | None = None
        if self.data_axis.gatherer is not None:
            assert module is not None
            guard_state_dict(module)
            weights, passes = UnitWeights(cut, self.data_axis.gatherer, keep), ForwardPasses(expected or 1)
            self._units = UnitBackward(weights, passes, self._outermost.enter, self._unit_done)
            UnitForward(weights, passes, self._units)  # the units' methods keep it
        self._reductions: ExitStack | None = None  # of the counted pass that runs, or has failed: until reset
        self._pass = RunningPass()
        self.next_is_last: Callable[[], bool] = lambda: False
        self.origin: Callable[[], Any] = lambda: None
        self.origins: list[Any] = []
        self.discarded: Callable[[int], object] = lambda total: None
        self.total = 0
        self.begin()

    def begin(self) -> None:
        """Begin a step, with zero gradients."""
        self.data_axis.begin()
        self.state, self.count = OPEN, 0
        self.end_microbatch()
        if self._units is not None:
            self._units.end_step()

    def end_microbatch(self) -> None:
        """Begin to count new passes, and to collect their origins."""
        self.new = 0
        self.origins.clear()

    def reset(self) -> None:
        """Begin a step, also after a failed or abandoned one. Collective if gradients are still unreduced."""
        if self.count and not self.stepped:
            self.discarded(self.total)
        if self._reductions is not None:  # the last backward pass failed, on every rank: else the others wait for it
            if self._units is not None:
                self._units.release()
            self.data_axis.drain()
            self._reductions = None
        elif self.count:
            self.end_reductions()
        self.begin()

    def watch(self, entries: Any) -> None:
        """Recognize the backward pass that enters the graph through these tensors, with all passes within it.

        Args:
            entries: the module's outputs, or the loss.
        """
        visit_tensors(
            lambda tensor: tensor.register_hook(self._reached_hook) if tensor.grad_fn is not None else None, entries
        )

    def forget_discarded(self) -> None:
        """Forget the ``origins`` of this step's passes if user code has discarded their gradients, by ``.grad``."""
        if self.count > 0 and self.data_axis.reducer.discarded:
            self.origins.clear()
            self.discarded(self.total)

    def end_reductions(self) -> None:
        """End the sums of all gradients over the replicas. Collective.

        Raises:
            RuntimeError: the last backward pass failed.
        """
        if self.reduced:
            return
        self._require_complete()
        self.access.set_aside()
        if self._units is not None:
            self._units.gather_missed(
                int(self.state is OPEN) if self._expected is None else self._expected - self.count
            )
        while self.state is OPEN:
            # As many passes as on the other replicas, which may have had gradients in passes where this one had none.
            self._run_empty(self._expected is None or self.count + 1 == self._expected)
        self.data_axis.finish()
        if self._units is not None:
            self._units.end_step()
        self.state = REDUCED

    def mark_stepped(self) -> None:
        """Note that the optimizer has stepped with the reduced gradients. Then ``reset`` begins the next step."""
        self.state = STEPPED

    @property
    def complete(self) -> bool:
        """True if the last backward pass of the step has run."""
        return self.state is not OPEN and self._reductions is None

    @property
    def reduced(self) -> bool:
        """True if all gradients of the step are reduced."""
        return self.state in (REDUCED, STEPPED)

    @property
    def stepped(self) -> bool:
        """True if the optimizer has stepped with the gradients of this step."""
        return self.state is STEPPED

    def run_empty(self) -> None:
        """Count a backward pass in which this replica has no gradient, although other replicas may have gradients.

        Collective if the pass reduces gradients.

        Raises:
            RuntimeError: in stage 3, if no forward pass, or more than one, ran since the last backward pass. This
                replica must gather the same weights as the others, so the forward pass must be known.
        """
        self._require_complete()
        if self._units is not None and not self._units.one_forward_waits:
            raise RuntimeError(
                "the loss depends on no trained parameter. In stage 3 every replica gathers the same parameters in its "
                "backward pass, and the order is known only if exactly one forward pass ran before. Add "
                "0.0 * output.sum() to the loss, or use stage 2"
            )
        self._run_empty(self.next_is_last(), self._units)

    def require_unchanged(self) -> None:
        """Refuse parameters that a step would not change, or not as their hooks mean to.

        Raises:
            RuntimeError: a parameter requires gradients and did not before, was added or replaced, or has a hook that
                would read a part of its gradient.
        """
        if (name := self.data_axis.displaced()) is not None:
            raise RuntimeError(
                f"{name} is no longer where it is stepped: the model was moved or cast, or given to another engine. Do "
                "that before its engine or optimizer is made"
            )
        if self._tree is not None and (problem := self._tree.problem()) is not None:
            raise RuntimeError(problem)
        if (problem := self.data_axis.misled_hook()) is not None:
            raise RuntimeError(problem)
        if late := sum([p.requires_grad for p in self._untrained]):
            raise RuntimeError(
                f"{late} parameters were frozen when the optimizer was made, so it does not step them: let all "
                "parameters that will be trained require gradients then, and freeze them afterwards"
            )

    def _require_complete(self) -> None:
        if self._reductions is not None:
            raise RuntimeError(
                "the last backward pass failed half way, so its gradients are incomplete: call optimizer.zero_grad()"
            )

    def _run_empty(self, last: bool, units: UnitBackward | None = None) -> None:
        with self._count_pass(last):
            if units is not None:
                units.run_empty()
        self._reductions = None

    def _count_pass(self, last: bool) -> ExitStack:
        """Count a backward pass, begin its reductions, and return the stack whose end is the end of them."""
        self._reopen()
        self.count, self.new, self.total = self.count + 1, self.new + 1, self.total + 1
        self.origins.append(self.origin())
        if last or self.state is REOPENED:
            self.state = LAST_BEGAN
        self._reductions = ExitStack()
        self._reductions.enter_context(self.data_axis.reducer.backward(0, last=self.state is LAST_BEGAN))
        return self._reductions

    def _reopen(self) -> None:
        """Let the pass that begins add to the gradients, if the pass before it was the last one, which reduced them.

        It must not have a gradient yet.
        """
        if self._expected is None and self.state in (LAST_BEGAN, REDUCED):
            self.state = REOPENED
            self.access.conceal()
            self.data_axis.reducer.reopen()

    def _reached(self, gradient: Tensor) -> None:
        """Hook: a backward pass has reached an output or the loss."""
        self._outermost.enter()

    def _accumulated(self, parameter: Tensor) -> None:
        """Hook of the reducer: autograd has accumulated a parameter's gradient, which is not reduced yet."""
        self._outermost.enter(parameter)
        if not self._pass.counted:
            self._begin_reductions()

    def _unit_done(self, unit: int, runs: int) -> None:
        """Reduce the gradients that are complete after the backward of one run of a unit."""
        if backward_task() != -1:
            self._outermost.enter()
        if self._reductions is not None:
            self.data_axis.reducer.layer_backward_done(unit, runs)
        else:
            self._pass.early.append((unit, runs))

    def _begin_reductions(self) -> None:
        """Begin the reductions of a pass when its first gradient arrives, so that complete buckets are reduced."""
        self._require_complete()
        if self.reduced:
            raise RuntimeError(
                "backward() was called after the gradients of this step were reduced: call optimizer.zero_grad() before"
            )
        if self.state is LAST_BEGAN:
            problem = "that has run its last one: call the model as engine(...), so that the engine sees the pass begin"
            if self._expected is not None:
                problem = f"that has backward_passes_per_step={self._expected}: pass a larger one"
            raise RuntimeError(
                f"backward pass {self.count + 1} of a step {problem}, or add the losses and call backward() once. "
                "(A reentrant checkpoint runs a pass within the pass, which only an engine recognizes, if the model is "
                "called as engine(...): otherwise use torch.utils.checkpoint with use_reentrant=False.)"
            )
        self._count_pass(self.next_is_last() if self._expected is None else self.count + 1 == self._expected)
        self._pass.counted = True
        for unit, runs in self._pass.early:
            self.data_axis.reducer.layer_backward_done(unit, runs)

    def _pass_began(self, first: Tensor | None = None) -> None:
        """Begin a pass; ``first`` is the parameter by whose gradient it is first seen."""
        self._pass = RunningPass(keeps_graph=torch.is_grad_enabled())
        self.forget_discarded()
        if first is None:
            self._reopen()
        self.data_axis.reducer.begin_pass(first)
        if self._units is not None:
            self._units.begin_backward()

    def _pass_ended(self) -> None:
        if self._units is not None:
            self._units.end_backward()
        if not self._pass.counted:
            self.data_axis.reducer.end_pass(False)
            return
        assert self._reductions is not None
        reductions, self._reductions = self._reductions, None
        with torch.no_grad():
            reductions.close()
            self.data_axis.reducer.end_pass(self._pass.keeps_graph)
        if self._units is not None and self.state is not OPEN:
            self._units.release()


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group, without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
