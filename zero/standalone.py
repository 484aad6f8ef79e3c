"""ZeRO in a plain PyTorch loop, without an engine: one optimizer over the replicas of any module.

optimizer = ShardedOptimizer(torch.optim.AdamW, model.parameters(), grid.data, stage=2, lr=1e-3)
for x, y in batches:                            # this replica's own
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()             # gradients are reduced while it runs
    optimizer.step()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..grid import Axis, layout_of
from .arguments import agree, cast, checked, listed, names
from .buckets import Managed, Mode
from .gradients import weak
from .norm import clip_coefficient
from .replicas import Replicas
from .units import Units, find_units, users


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer of torch's whose state, gradients and weights are sharded over replicas (ZeRO).

    It is made alike on every rank, after the model is on its device, and it broadcasts the parameters of the axis's
    first rank, as DDP does (not buffers). Gradients are then summed over the axis within the backward pass, by torch's
    own hooks, and divided by the number of replicas: each rank's loss is a mean over its own samples, as under DDP.
    Gradients of several backward passes add up, as ever in torch: divide the loss by their number for a mean.

    Learning-rate schedulers take it for what it is, a ``torch.optim.Optimizer``. A parameter that had no gradient on
    any replica stands still (Adam's count of steps, for its bias correction, goes on). Parameters' own ``.grad`` is
    whole in stage 0 only, after ``synchronize``; ``gradients()`` has it in every stage. ``torch.amp.GradScaler`` looks
    at ``.grad`` and so does not work with it: use bf16.

    Args:
        optimizer_class: one that treats every element alone: Adam, AdamW, SGD, ...
        params: parameters, parameter groups or named parameters, as the class takes them.
        axis: ``grid.data``. The grid's tensor axis is summed over too, where parameters' layouts say so.
        stage: of ZeRO, 0 to 3: nothing is sharded; the optimizer's state; gradients too; weights too.
        module: the model; stage 3 needs it, to have weights whole where they are used.
        units: of the module, in stage 3: patterns of names or submodules; see ``find_units``. By default the entries
            of its ``ModuleList`` s and ``Sequential`` s. Every replica runs the same ones in the same order.
        keep_gathered: in stage 3, hold weights whole from a step's first forward to its last backward pass. A loss
            that has a gradient in it (``create_graph=True``) needs that.
        backward_passes_per_step: how many, before ``step``. In stages 0 and 1 the last one reduces, in 2 and 3 each.
        reduction: ``"mean"`` or ``"sum"`` over replicas.
        bucket_size: elements of gradient reduced in one collective.
        weight_dtype: make parameters of this dtype, e.g. ``torch.bfloat16``, and where ``module`` is given whatever
            else it has; masters start from what they were before.
        master_dtype: of master weights, state and accumulated gradients; by default fp32 under a ``weight_dtype``,
            else the parameters' own.
        communication_dtype: in which gradients are summed over replicas; by default ``master_dtype``.
        options: the optimizer class's own: ``lr=1e-3``, ...

    Raises:
        ValueError: arguments that cannot be, parameters that differ between ranks or lie elsewhere than the grid.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params: Iterable[Any],
        axis: Axis,
        *,
        stage: int = 1,
        module: nn.Module | None = None,
        units: Sequence[str | nn.Module] | None = None,
        keep_gathered: bool = False,
        backward_passes_per_step: int = 1,
        reduction: str = "mean",
        bucket_size: int = 2**22,
        weight_dtype: torch.dtype | None = None,
        master_dtype: torch.dtype | None = None,
        communication_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        grid = checked(optimizer_class, axis, stage, module, backward_passes_per_step, reduction)
        template = optimizer_class(params, **options)  # torch's own checks, and every group's options in full
        super().__init__(template.param_groups, template.defaults)
        del template
        self._grid, self._expected, self._mean = grid, backward_passes_per_step, reduction == "mean"
        group_of = {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
        cut = find_units(module, units) if module is not None and stage == 3 else []
        where = users(cut) if cut else {}
        called = names(self.param_groups, module)
        laid_out = listed(group_of, where, called, module, stage)
        agree(laid_out, called, grid)

        self._trained = [p for p in laid_out if p in group_of and p.requires_grad]
        for parameter in self._trained:
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
        masters = master_dtype or (torch.float32 if weight_dtype is not None else None)
        self._replicas = Replicas(
            members,
            grid,
            tie_axes=(),
            order={0: range(len(cut))},
            mode=Mode(stage, weight_dtype, masters, communication_dtype),
            capacity=bucket_size,
            make=lambda groups: optimizer_class(groups, **options),
            groups=[_options(group) for group in self.param_groups],
        )
        cast([*laid_out, *(() if module is None else (*module.parameters(), *module.buffers()))], weight_dtype)
        self._units: Units | None = None
        if self._replicas.gatherer is not None:
            gatherer = self._replicas.gatherer
            self._units = Units(cut, gatherer, keep_gathered, backward_passes_per_step, self._over)
        self._running: AbstractContextManager[None] | None = None  # what the backward pass that runs is in
        self._passes = 0  # backward passes of this step
        self._reduced = self._stepped = False
        self._task = -1
        self._early: list[tuple[int, int, int]] = []  # the pass, and a unit that was over before its first gradient
        self.state = self._inner.state
        self._begin()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """A new step: gradients are zero. Every step begins with it; ``set_to_none`` is as one likes.

        Collective where backward passes were made and no ``step`` followed: their reductions end first.
        """
        if self._running is not None:
            self._replicas.abandon()  # the last backward pass failed half way
            self._running = None
        elif self._passes:
            self.synchronize()
        self._begin()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce what was not yet reduced, step this rank's range, bring the new weights to every replica. Collective.

        Args:
            closure: computes the gradients first, and returns what ``step`` returns: the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_unfrozen()
        self.synchronize()
        for mine, its in zip(self.param_groups, self._inner.param_groups, strict=True):
            its.update(_options(mine))  # what schedulers, and whoever else, wrote
        self._replicas.step(None, without=self._replicas.without_gradient())
        self._stepped = True
        return loss

    @torch.no_grad()
    def synchronize(self) -> None:
        """Have all gradients reduced, and divided by the number of replicas, before ``step`` does. Collective."""
        if self._reduced:
            return
        if self._running is not None:
            raise RuntimeError("the last backward pass failed half way, so its gradients are not whole: zero_grad()")
        if self._units is not None:
            self._units.catch_up(self._expected - self._passes)
        while self._passes < self._expected:
            # As many as the other replicas: they may have had gradients where this one had none.
            self._passes += 1
            with self._replicas.backward(0, last=self._passes == self._expected):
                pass
        self._replicas.finish()
        if self._units is not None:
            self._units.forget()
        owned = [bucket.owned_gradient for bucket in self._replicas.buckets if bucket.trained]
        if self._mean and self._grid.data.size > 1 and owned:
            torch._foreach_mul_(owned, 1.0 / self._grid.data.size)
        self._reduced = True

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over the whole grid is no longer than this. Collective over the grid.

        Returns:
            The norm before, 0-dim float64: what ``torch.nn.utils.clip_grad_norm_`` returns, which cannot be used here.
        """
        self.synchronize()
        square = self._replicas.squares()
        self._grid.world.all_reduce(square)
        norm = square.sqrt()
        owned = [bucket.owned_gradient for bucket in self._replicas.buckets if bucket.trained]
        if owned:
            torch._foreach_mul_(owned, clip_coefficient(norm, max_norm))
        return norm

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each trained parameter and its whole gradient (this tensor rank's), until ``zero_grad``. Collective."""
        self.synchronize()
        for member, gradient in self._replicas.gradients():
            yield member.parameter, gradient

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Parameters are laid out once: give all groups when it is made."""
        if hasattr(self, "_replicas"):
            raise RuntimeError(
                "a ShardedOptimizer has its parameters laid out already: make it with all groups, those too whose "
                "parameters are frozen later"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's shard, for this rank of an axis of this size: every rank saves its own.

        Weights are the module's: save ``module.state_dict()`` within ``zero.gathered(module)``.
        """
        for mine, its in zip(self.param_groups, self._inner.param_groups, strict=True):
            its.update(_options(mine))
        return {**self._inner.state_dict(), "shard": self._shard(), "masters": self._masters()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What ``state_dict`` returned on this rank. Load the module's weights before, within ``zero.gathered``.

        Raises:
            ValueError: it is another rank's, or of other parameters, stages or sizes.
        """
        mine, theirs = self._shard(), state_dict.get("shard")
        if theirs != mine:
            raise ValueError(f"the state is of shard {theirs}, and this one is {mine}: load what this rank saved")
        self._inner.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        for group, its in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update(_options(its))
        self.state = self._inner.state
        for master, saved in zip(self._masters(), state_dict["masters"], strict=True):
            master.copy_(saved)

    @property
    def _inner(self) -> torch.optim.Optimizer:
        """Torch's, over the ranges that this rank owns."""
        inner = self._replicas.optimizer
        assert inner is not None
        return inner

    def _shard(self) -> dict[str, Any]:
        axis = self._grid.data
        elements = [bucket.owned[1] - bucket.owned[0] for bucket in self._replicas.buckets if bucket.trained]
        return {"rank": axis.rank, "of": axis.size, "stage": self._replicas.mode.stage, "elements": elements}

    def _masters(self) -> list[Tensor]:
        """Masters that are not the weights themselves."""
        buckets = [bucket for bucket in self._replicas.buckets if bucket.master is not None]
        return [b.master.detach() for b in buckets if b.master is not None and b.master.dtype != b.shard.dtype]

    def _begin(self) -> None:
        self._replicas.begin()
        self._passes = 0
        self._reduced = self._stepped = False
        if self._units is not None:
            self._units.forget()

    def _arrived(self, parameter: Tensor) -> None:
        """Autograd has made a parameter's gradient."""
        if torch._C._current_graph_task_id() != self._task:
            self._enter_backward()

    def _enter_backward(self) -> None:
        """The first gradient of a backward pass: from here on buckets are reduced as they become complete."""
        if self._running is not None:
            raise RuntimeError("the last backward pass failed half way: call optimizer.zero_grad() before the next")
        if self._stepped or self._reduced:
            raise RuntimeError("gradients were reduced, and there are new ones: call optimizer.zero_grad() before")
        if self._passes == self._expected:
            raise RuntimeError(
                f"backward pass {self._passes + 1} of a step that has backward_passes_per_step={self._expected}: pass "
                "a larger one, or add the losses and call backward() once. (A re-entrant checkpoint is a pass of its "
                "own: use torch.utils.checkpoint with use_reentrant=False.)"
            )
        self._task = torch._C._current_graph_task_id()
        self._passes += 1
        self._running = self._replicas.backward(0, last=self._passes == self._expected)
        self._running.__enter__()
        for task, unit, runs in self._early:
            if task == self._task:
                self._replicas.over(unit, runs)
        self._early.clear()
        torch.autograd.Variable._execution_engine.queue_callback(self._leave_backward)

    def _over(self, unit: int, runs: int) -> None:
        """The backward of one of a unit's runs is over."""
        task = torch._C._current_graph_task_id()
        if self._running is not None:
            self._replicas.over(unit, runs)
        else:
            self._early = [*(entry for entry in self._early if entry[0] == task), (task, unit, runs)]

    def _leave_backward(self) -> None:
        assert self._running is not None
        running, self._running = self._running, None
        with torch.no_grad():
            running.__exit__(None, None, None)
        if self._units is not None and self._passes == self._expected:
            self._units.drop()

    def _refuse_unfrozen(self) -> None:
        known = set(self._trained)
        late = sum(p.requires_grad and p not in known for group in self.param_groups for p in group["params"])
        if late:
            raise RuntimeError(
                f"{late} parameters were frozen when the optimizer was made, so nothing would step them: let all that "
                "will ever train require gradients then, and freeze it after"
            )


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
