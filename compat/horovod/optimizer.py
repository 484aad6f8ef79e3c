"""Horovod's ``DistributedOptimizer``: the script's own optimizer, with gradients averaged over all ranks.

optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
for x, y in batches:                           # different batches on each rank
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()            # gradients are averaged while the backward pass runs
    optimizer.step()
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...base.checks import LARGEST, SMALLEST
from ...grid import Axis
from ...grid.agreement.failure import all_or_none
from ...zero.modules.module_optimizer import ZeroModuleOptimizer
from ...zero.optimizer_entries import load_in_place
from .compression import Compression, elementwise
from .context import ProcessSet, context, require_global
from .negotiation import MismatchError
from .reducer import Reducer
from .reductions import NO_ADASUM, Adasum, Average, ReduceOp, Sum

_BUCKET_BYTES = 2**24  # bytes of a gradient bucket


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[nn.Parameter]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet | None = None,
) -> Any:
    """Wrap an optimizer: gradients are averaged over all ranks within the backward pass. Collective.

    The result is of a class derived from the given optimizer's; it shares its parameter groups and its state. ``step``
    waits for the averages. To read or change averaged gradients before the step, call ``synchronize``::

        loss.backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()

    A ``step`` after ``synchronize`` without ``skip_synchronize`` has the same result: gradients are averaged once.

    A rank on which a parameter had no gradient contributes zeros. A rank without a batch calls
    ``optimizer.zero_grad(); optimizer.step()`` and contributes zeros for all. A parameter without a gradient on every
    rank is not updated. With a closure, gradients are averaged after each call of it.

    Args:
        optimizer: an optimizer of torch, except LBFGS, or the script's own. It is not changed.
        named_parameters: names of all its parameters; by default they are numbered.
        compression: dtype in which gradients are sent: ``Compression.none``, ``.fp16``, ``.bf16``; or an object with
            ``compress`` and ``decompress``, called for one gradient at a time.
        backward_passes_per_step: number of backward passes whose gradients are accumulated before they are sent.
        op: ``Average`` or ``Sum``.
        gradient_predivide_factor: f divides gradients by f before the sum and by ranks / f after it, to avoid overflow.
        num_groups: number of gradient buckets; by default a bucket has 16 MB.
        groups: a number as ``num_groups``, or lists of parameters that share a bucket.
        sparse_as_dense: convert sparse gradients to dense ones.
        process_set: None or ``global_process_set``.

    Returns:
        The optimizer, with ``synchronize``, ``skip_synchronize`` and ``set_backward_passes_per_step``.

    Raises:
        ValueError: arguments out of range or contradictory; on every rank: parameters that differ between ranks.
    """
    require_global(process_set)
    if isinstance(optimizer, _DistributedOptimizer):
        raise ValueError("the optimizer is a DistributedOptimizer already: its gradients would be averaged twice")
    if isinstance(optimizer, ZeroModuleOptimizer):
        raise ValueError("a ShardedOptimizer averages its gradients itself: use it as it is, or torch's own optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS evaluates the loss a number of times that depends on the loss, which differs between ranks: use "
            "another optimizer"
        )
    if op == Adasum:
        raise ValueError(NO_ADASUM)
    if op not in (Average, Sum):
        raise ValueError(f"op={ReduceOp(op).name}: gradients are averaged or summed, give op=Average or op=Sum")
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step is {backward_passes_per_step}: give at least 1")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError(
            f"gradient_predivide_factor={gradient_predivide_factor} with op=Sum: it divides gradients in two steps, "
            "and a sum is not divided: leave it out, or give op=Average"
        )
    if not SMALLEST <= gradient_predivide_factor <= LARGEST:
        raise ValueError(
            f"gradient_predivide_factor is {gradient_predivide_factor}: give a number above 0, from {SMALLEST:.2g} to "
            f"{LARGEST:.2g}"
        )
    if num_groups and groups:
        raise ValueError("num_groups is the deprecated form of groups: give one of them")
    groups = groups or num_groups
    if groups and not elementwise(compression):
        raise ValueError(
            "groups put several gradients into one message, but a compression of your own is called for one gradient "
            "at a time: leave out groups and num_groups"
        )
    named = _named(optimizer, named_parameters)
    grid = context().grid
    axis = grid.subgroup("data", range(grid.size), f" of optimizer {context().queue.unique_name('optimizer', None)}")
    assert axis is not None
    settings = {
        "passes": backward_passes_per_step,
        "compression": compression,
        "before": 1.0 / gradient_predivide_factor,
        "after": gradient_predivide_factor / grid.size if op == Average else 1.0,
        "dense": sparse_as_dense,
    }
    kind = type(optimizer)
    namespace = {"__doc__": kind.__doc__, "__module__": kind.__module__}
    made: Any = type(kind.__name__, (_DistributedOptimizer, kind), namespace)
    distributed: _DistributedOptimizer = made.__new__(made)
    # Not `step`: a scheduler may have replaced it by a wrapper around the given optimizer's own step.
    vars(distributed).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    distributed._hvd = _GradientAveraging(optimizer, named, axis, groups, settings)
    return distributed


class _DistributedOptimizer(torch.optim.Optimizer):
    """Mixin before the wrapped optimizer's class: adds the averaging of gradients to its methods."""

    _hvd: _GradientAveraging

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait until gradients are averaged, and step. Collective.

        Raises:
            RuntimeError: within ``skip_synchronize`` without ``synchronize`` before; parameters were unfrozen; there
                was no backward pass since the last step; gradients were changed before they were averaged.
        """
        averaging = self._hvd
        averaging.require_trained(self.param_groups)

        def averaged_closure() -> Any:
            assert closure is not None
            with torch.enable_grad():
                loss = closure()
            if not averaging.skip and not averaging.reducer.done:
                averaging.synchronize()
            averaging.reducer.mark_used()
            return loss

        if closure is None and not averaging.reducer.done:
            if averaging.skip:
                raise RuntimeError(
                    "step() within skip_synchronize(), but the gradients are not averaged yet: call "
                    "optimizer.synchronize() before"
                )
            averaging.synchronize()
        with averaging.grid.spans("optimizer", "step"):
            result = super().step(None if closure is None else averaged_closure)
        averaging.reducer.mark_used()
        averaging.wrapped._opt_called = True  # type: ignore[attr-defined]  # read by schedulers of the wrapped optimizer
        return result

    step.hooked = True  # type: ignore[attr-defined]  # else torch would call the step hooks twice

    def synchronize(self) -> None:
        """Wait until all averaged gradients are in ``.grad``. Collective."""
        if not self._hvd.reducer.done:
            self._hvd.synchronize()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """False, for ``torch.amp.GradScaler.step``, which reads this before it unscales gradients.

        They are averaged here, before: each rank then unscales the same averages, and all or none of them step.
        """
        if not self._hvd.skip:
            self.synchronize()
        return False

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context in which ``step`` does not average: ``synchronize`` did, and gradients may have changed since."""
        self._hvd.skip = True
        try:
            yield
        finally:
            self._hvd.skip = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes per step; allowed between two steps."""
        self._hvd.reducer.passes = passes

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients, as the wrapped optimizer does.

        Raises:
            RuntimeError: between a backward pass and ``step`` or ``synchronize``: gradients may be in transit.
        """
        if self._hvd.reducer.pending:
            raise RuntimeError(
                "zero_grad() after backward() and before step(): gradients are being sent to the other ranks. Call "
                "optimizer.step() before, or optimizer.synchronize() to discard them"
            )
        self._hvd.reducer.done = False
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state into the existing groups and state, to which schedulers and the wrapped optimizer refer."""
        with load_in_place(self):
            super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, the same one on every rank. Collective."""
        if self._hvd.reducer.pending:
            raise RuntimeError("add_param_group() between backward() and step(): call optimizer.step() before")
        super().add_param_group(param_group)
        self._hvd.add(self.param_groups[-1])


class _GradientAveraging:
    """Attributes of a ``DistributedOptimizer`` beside those of the wrapped optimizer."""

    def __init__(
        self,
        wrapped: torch.optim.Optimizer,
        named: Sequence[tuple[str, nn.Parameter]],
        axis: Axis,
        groups: int | Sequence[Sequence[nn.Parameter]] | None,
        settings: dict[str, Any],
    ) -> None:
        self.wrapped = wrapped
        self._named, self._axis, self._groups, self._settings = list(named), axis, groups, settings
        self.grid = context().grid
        self.skip = False
        self.reducer = self._make_reducer()

    def synchronize(self) -> None:
        """Reduce all gradients; an error on one rank is raised on all."""
        agreed = all_or_none(self.grid, self.reducer.abandon, "the reduction of gradients")
        with self.grid.spans("optimizer", "synchronize"), agreed:
            self.reducer.synchronize()

    def require_trained(self, groups: Sequence[dict[str, Any]]) -> None:
        """Raise a RuntimeError for parameters that require gradients but have no bucket."""
        known = set(self.reducer.parameters)
        late = sum(p.requires_grad and p not in known for group in groups for p in group["params"])
        if late:
            raise RuntimeError(
                f"{late} parameters were frozen when DistributedOptimizer was made, so their gradients are not "
                "averaged. Call requires_grad_() on all parameters that will train before, and freeze them after it"
            )

    def add(self, group: dict[str, Any]) -> None:
        """Average the gradients of another parameter group too. Collective."""
        begin = len(self._named)
        self._named += [(f"added parameter {begin + i}", p) for i, p in enumerate(group["params"])]
        self._settings["passes"] = self.reducer.passes
        self.reducer.remove()
        self.reducer = self._make_reducer()

    def _make_reducer(self) -> Reducer:
        """Return a Reducer, after comparing the parameters of all ranks. Collective."""
        grid = self.grid
        own_facts = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in self._named]
        away = next((name for name, p in self._named if p.device.type not in ("cpu", grid.device.type)), None)
        problem = None if away is None else f"{away} is not on {grid.device}, the ranks' device: move the model there"
        gathered: list[tuple[str | None, Any]] = self._axis.all_gather_json((problem, own_facts))
        first = gathered[0][1]
        for rank, (other, theirs) in enumerate(gathered):
            if other is not None:
                raise MismatchError(f"rank {rank}: {other}")
            if theirs != first:
                a, b = next(((a, b) for a, b in zip(first, theirs) if a != b), (len(first), len(theirs)))
                raise MismatchError(
                    f"all ranks must train one model, but rank 0 has {a} where rank {rank} has {b}: build the same "
                    "model on every rank"
                )
        trained = [(name, p) for name, p in self._named if p.requires_grad]
        groups = self._groups or ()
        if isinstance(groups, int):
            share = math.ceil(len(trained) / groups)
            groups = [[p for _, p in trained[i : i + share]] for i in range(0, len(trained), share)]
        groups = [[p for p in group if p.requires_grad] for group in groups]
        return Reducer(trained, grid, self._axis, bucket_bytes=_BUCKET_BYTES, groups=groups, **self._settings)


def _named(
    optimizer: torch.optim.Optimizer, given: Iterable[tuple[str, nn.Parameter]] | None
) -> list[tuple[str, nn.Parameter]]:
    """Return the optimizer's parameters with their names, in the order of ``given``."""
    numbered = {
        p: f"parameter {i} of group {g}"
        for g, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
    }
    if given is None:
        return [(name, p) for p, name in numbered.items()]
    pairs = list(given)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError("named_parameters must give pairs (name, parameter): pass model.named_parameters()")
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"named_parameters has {', '.join(twice)} twice: give every parameter its own name")
    named = {p: name for name, p in pairs if p in numbered}
    missing = [name for p, name in numbered.items() if p not in named]
    if missing:
        raise ValueError(
            f"named_parameters names {len(named)} of the optimizer's {len(numbered)} parameters; without a name are "
            f"{', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}: pass model.named_parameters() of the "
            "whole model, or leave the argument out"
        )
    return [(name, p) for p, name in named.items()]
