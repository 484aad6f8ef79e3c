"""Horovod's ``DistributedOptimizer``: the script's own optimizer, whose gradients are averaged over all ranks.

optimizer = triax.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
for x, y in batches:                           # this rank's own
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()            # gradients are averaged while it runs
    optimizer.step()
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ..grid import Axis
from .failure import all_or_none
from .horovod import ProcessSet, job, only_global
from .horovod_calls import Mismatch
from .horovod_compression import Compression, elementwise
from .horovod_ops import NO_ADASUM, Adasum, Average, Op, Sum
from .horovod_reducer import Reducer

_CAPACITY = 2**24  # bytes of gradients that are sent at once


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[nn.Parameter]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet | None = None,
) -> Any:
    """An optimizer of a class made from the given one's, with its parameter groups and its state. Collective.

    Gradients are averaged over all ranks within the backward pass; ``step`` waits for them. ``synchronize`` does so
    before, for what looks at ``.grad``, which is whole and averaged then::

        loss.backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()

    Nothing is sent twice: a ``step`` that follows ``synchronize`` without ``skip_synchronize`` does the same. A rank on
    which a parameter had no gradient takes part with zeros; so does one that has no batch, by
    ``optimizer.zero_grad(); optimizer.step()``. A parameter that had none on any rank stands still. A closure's
    gradients are averaged after each call.

    Args:
        optimizer: any of torch's but LBFGS, or the script's own. It is left as it is.
        named_parameters: names of all its parameters; by default they are numbered.
        compression: in which dtype gradients are sent: ``Compression.none``, ``.fp16``, ``.bf16``; or anything with
            ``compress`` and ``decompress``, which is given one gradient after the other.
        backward_passes_per_step: so many gradients of a parameter add up before they are sent.
        op: ``Average`` or ``Sum``.
        gradient_predivide_factor: f divides by f before gradients are added up and by size / f after, where they might
            overflow.
        num_groups: send gradients in so many buckets; by default they hold 16 MB.
        groups: the same, or lists of parameters that share a bucket.
        sparse_as_dense: make sparse gradients dense.

    Returns:
        The optimizer, with ``synchronize``, ``skip_synchronize`` and ``set_backward_passes_per_step``.

    Raises:
        ValueError: arguments that cannot be; on every rank: parameters that differ between ranks.
    """
    only_global(process_set)
    if isinstance(optimizer, _Distributed):
        raise ValueError("the optimizer is a DistributedOptimizer already: its gradients would be averaged twice")
    if hasattr(optimizer, "passes"):
        raise ValueError("a ShardedOptimizer averages its gradients itself: use it as it is, or torch's own optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS decides by the loss how often it evaluates it, and ranks' losses differ: use another")
    if op == Adasum:
        raise ValueError(NO_ADASUM)
    if op not in (Average, Sum):
        raise ValueError(f"op={Op(op).name}: gradients are averaged or added up, Average or Sum")
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step is at least 1, not {backward_passes_per_step}")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor parts the division of op=Average in two: leave it out with Sum")
    if gradient_predivide_factor <= 0:
        raise ValueError(f"gradient_predivide_factor is more than 0, not {gradient_predivide_factor}")
    if num_groups and groups:
        raise ValueError("num_groups is the old name of groups: give one of them")
    groups = groups or num_groups
    if groups and not elementwise(compression):
        raise ValueError("a compression of your own is given one gradient at a time: leave out groups")
    named = _named(optimizer, named_parameters)
    grid = job().grid
    axis = grid.subgroup("data", range(grid.size), f" of optimizer {job().calls.name('optimizer', None)}")
    assert axis is not None
    axis.grid = grid
    factor = gradient_predivide_factor
    settings = {
        "passes": backward_passes_per_step,
        "compression": compression,
        "before": 1.0 / factor,
        "after": factor / grid.size if op == Average else 1.0,
        "groups": groups,
        "dense": sparse_as_dense,
    }
    return _distributed(optimizer, named, axis, settings)


class _Distributed(torch.optim.Optimizer):
    """What a ``DistributedOptimizer`` does that its optimizer's class, which stands behind this one, does not."""

    _hvd: _Averaging

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait until gradients are averaged, and step. Collective.

        Raises:
            RuntimeError: within ``skip_synchronize`` without ``synchronize`` before; parameters were unfrozen; the
                gradients are those of the last step, or were changed before they were averaged.
        """
        mine = self._hvd
        mine.require_known(self.param_groups)

        def reduced() -> Any:
            assert closure is not None
            with torch.enable_grad():
                loss = closure()
            if not mine.skip:
                mine.synchronize()
            return loss

        if closure is None and not mine.reducer.done:
            if mine.skip:
                raise RuntimeError(
                    "step() within skip_synchronize(), and the gradients are not averaged yet: call "
                    "optimizer.synchronize() before"
                )
            mine.synchronize()
        with mine.span("step"):
            result = super().step(None if closure is None else reduced)
        mine.reducer.stepped()
        mine.wrapped._opt_called = True  # type: ignore[attr-defined]  # a scheduler of that one asks whether it stepped
        return result

    step.hooked = True  # type: ignore[attr-defined]  # torch would call the hooks of steps here too

    def synchronize(self) -> None:
        """Wait until all gradients are averaged, and in ``.grad``. Collective."""
        if not self._hvd.reducer.done:
            self._hvd.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it ``step`` averages nothing: ``synchronize`` did, and gradients were changed since."""
        self._hvd.skip = True
        try:
            yield
        finally:
            self._hvd.skip = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """So many from here on; between two steps."""
        self._hvd.reducer.passes = passes

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's own.

        Raises:
            RuntimeError: between a backward pass and ``step`` or ``synchronize``: gradients may be on their way.
        """
        if self._hvd.reducer.pending:
            raise RuntimeError(
                "zero_grad() after backward() and before step(): gradients are on their way to the other ranks. Call "
                "optimizer.step(), or optimizer.synchronize() to give them up after it"
            )
        self._hvd.reducer.done = False
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the optimizer's own, into the groups and the state that schedulers and the wrapped optimizer hold."""
        with kept(self):
            super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's own; on every rank alike. Collective."""
        super().add_param_group(param_group)
        self._hvd.add(self.param_groups[-1])


@contextmanager
def kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Groups and state that are loaded within become the contents of the objects that were there.

    torch's ``load_state_dict`` puts new ones in their place, and whoever holds the old ones (the optimizer that is
    wrapped, and by it a scheduler) would write to what no step reads.
    """
    groups, state = optimizer.param_groups, optimizer.state
    yield
    loaded, known = optimizer.param_groups, optimizer.state
    if loaded is not groups:
        for group, new in zip(groups, loaded, strict=True):
            group.clear()
            group.update(new)
        optimizer.param_groups = groups
    if known is not state:
        state.clear()
        state.update(known)
        optimizer.state = state


class _Averaging:
    """What a ``DistributedOptimizer`` keeps beside its optimizer's own."""

    def __init__(
        self,
        wrapped: torch.optim.Optimizer,
        named: Sequence[tuple[str, nn.Parameter]],
        axis: Axis,
        settings: dict[str, Any],
    ) -> None:
        self.wrapped = wrapped
        self._named, self._axis, self._settings = list(named), axis, settings
        self._grid = job().grid
        self.skip = False
        self.reducer = self._made()

    def synchronize(self) -> None:
        """Have the gradients reduced."""
        whole = all_or_none(self._grid, self.reducer.abandon, "the reduction of gradients")
        with self.span("synchronize"), whole:
            self.reducer.synchronize()

    def span(self, name: str) -> AbstractContextManager[None]:
        """A slice of the timeline, where one is recorded."""
        recorder = self._grid.timeline
        return nullcontext() if recorder is None else recorder.span(name, "optimizer")

    def require_known(self, groups: Sequence[dict[str, Any]]) -> None:
        """Refuse parameters that require gradients and did not before."""
        known = set(self.reducer.parameters)
        late = sum(p.requires_grad and p not in known for group in groups for p in group["params"])
        if late:
            raise RuntimeError(
                f"{late} parameters were frozen when DistributedOptimizer was made, so nothing averages their "
                "gradients: let all that will ever train require gradients then, and freeze them after"
            )

    def add(self, group: dict[str, Any]) -> None:
        """Of another group of parameters too."""
        if self.reducer.pending:
            raise RuntimeError("add_param_group() between backward() and step(): gradients are on their way")
        begin = len(self._named)
        self._named += [(f"added parameter {begin + i}", p) for i, p in enumerate(group["params"])]
        self._settings["passes"] = self.reducer.passes
        self.reducer.remove()
        self.reducer = self._made()

    def _made(self) -> Reducer:
        grid, settings = self._grid, dict(self._settings)
        mine = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in self._named]
        away = next((name for name, p in self._named if p.device.type not in ("cpu", grid.device.type)), None)
        problem = (
            None if away is None else f"{away} is not on {grid.device}, where the ranks talk: move the model there"
        )
        told: list[tuple[str | None, Any]] = self._axis.all_gather_object((problem, mine))
        for rank, (other, theirs) in enumerate(told):
            if other is not None:
                raise Mismatch(f"rank {rank}: {other}")
            if theirs != told[0][1]:
                a, b = next(((a, b) for a, b in zip(told[0][1], theirs) if a != b), (len(told[0][1]), len(theirs)))
                raise Mismatch(f"all ranks train one model, but rank 0 has {a} where rank {rank} has {b}")
        trained = [(name, p) for name, p in self._named if p.requires_grad]
        groups = settings.pop("groups")
        if isinstance(groups, int) and groups:
            share = math.ceil(len(trained) / groups)
            parameters = [p for _, p in trained]
            groups = [parameters[i : i + share] for i in range(0, len(parameters), share)]
        elif groups:
            groups = [[p for p in group if p.requires_grad] for group in groups]
            groups = [group for group in groups if group]
        return Reducer(trained, grid, self._axis, capacity=_CAPACITY, groups=groups or (), **settings)


def _named(
    optimizer: torch.optim.Optimizer, given: Iterable[tuple[str, nn.Parameter]] | None
) -> list[tuple[str, nn.Parameter]]:
    """The optimizer's parameters and their names, in the order of the names."""
    groups = [list(group["params"]) for group in optimizer.param_groups]
    mine = {p for group in groups for p in group}
    if given is None:
        return [(f"parameter {i} of group {g}", p) for g, group in enumerate(groups) for i, p in enumerate(group)]
    pairs = list(given)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError("named_parameters gives pairs of name and parameter: model.named_parameters()")
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"named_parameters has {', '.join(twice)} twice: every parameter has a name of its own")
    found = {p: name for name, p in pairs if p in mine}
    missing = [
        f"parameter {i} of group {g}" for g, group in enumerate(groups) for i, p in enumerate(group) if p not in found
    ]
    if missing:
        raise ValueError(
            f"named_parameters names {len(found)} of the optimizer's {len(mine)} parameters; without a name are "
            f"{', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}: pass model.named_parameters() of the "
            "whole model, or leave it out"
        )
    return [(name, p) for p, name in found.items()]


def _distributed(
    optimizer: torch.optim.Optimizer,
    named: Sequence[tuple[str, nn.Parameter]],
    axis: Axis,
    settings: dict[str, Any],
) -> _Distributed:
    kind = type(optimizer)
    made: Any = type(kind.__name__, (_Distributed, kind), {"__doc__": kind.__doc__, "__module__": kind.__module__})
    distributed: _Distributed = made.__new__(made)
    # All but a step that a scheduler has wrapped, which would be the optimizer's own.
    vars(distributed).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    distributed._hvd = _Averaging(optimizer, named, axis, settings)
    return distributed
