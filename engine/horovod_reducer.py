"""Gradients averaged over all ranks while the backward pass runs: what stands behind ``DistributedOptimizer``.

Parameters share buckets, the last ones first, as their gradients come. A bucket is on its way as soon as the last of
its gradients is there, and always behind the bucket before it: the same order on every rank, whatever its backward pass
does. ``.grad`` is then a view of the bucket, so gradients are held once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..grid import Axis, Grid, Pending
from ..grid.timeline import labelled
from ..zero.gradients import weak
from .horovod_compression import elementwise


class Bucket:
    """Gradients that are sent together, of one dtype.

    Attributes:
        parameters, name: those, and what the timeline calls them.
        left: of them, those whose gradients are not complete.
        had: of them, those that had a gradient here when the bucket started.

    What ``start`` leaves in ``.grad`` are views of one tensor, with one count of writes for all: it tells whether
    somebody wrote to them while they were on their way.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], name: str) -> None:
        self.parameters, self.name = list(parameters), name
        self.left: set[Tensor] = set()
        self.had: set[Tensor] = set()
        self._sent: tuple[Pending, Tensor, Tensor, Any] | None = None
        self._written = 0

    def begin(self) -> None:
        """The next step's gradients are to come."""
        self.left, self.had = set(self.parameters), set()

    def start(self, axis: Axis, compression: Any, factor: float) -> None:
        """Gather the gradients, zeros where there are none, and start adding them up over the ranks."""
        self.had = {parameter for parameter in self.parameters if parameter.grad is not None}
        flat = self._gathered()
        if factor != 1.0:
            flat.mul_(factor)
        alone = self.parameters[0].shape if len(self.parameters) == 1 else flat.shape
        wire, context = compression.compress(flat.view(alone))
        wire = wire.contiguous()
        with labelled(axis, self.name):
            self._sent = axis.all_reduce(wire, async_op=True), flat, wire, context
        self._written = _writes(self.parameters[0].grad)

    def finish(self, compression: Any, factor: float) -> None:
        """Wait for the sum, and leave it in ``.grad``."""
        assert self._sent is not None
        (pending, flat, wire, context), self._sent = self._sent, None
        gradient = self.parameters[0].grad
        if gradient is not None and _writes(gradient) != self._written:
            raise RuntimeError(
                f"{self.name} were written to after backward() and before they were averaged (clip_grad_norm_ does so, "
                "and zero_grad(set_to_none=False)): call optimizer.synchronize() before, and optimizer.step() within "
                "optimizer.skip_synchronize()"
            )
        pending.wait()
        result = compression.decompress(wire, context)
        if result.data_ptr() != flat.data_ptr():
            flat.copy_(result.reshape(-1))
        if factor != 1.0:
            flat.mul_(factor)

    def abandon(self) -> None:
        """Let go of what is under way."""
        self._sent = None

    def _gathered(self) -> Tensor:
        """The gradients one behind the other; each ``.grad`` is a view of them, so that nothing is held twice."""
        gradients = [parameter.grad for parameter in self.parameters]
        if (before := _behind_each_other(gradients)) is not None:
            return before  # they were zeroed in place since the last step, and added to where they are
        flat = torch.cat(
            [
                parameter.new_zeros(parameter.numel()) if gradient is None else gradient.reshape(-1)
                for parameter, gradient in zip(self.parameters, gradients, strict=True)
            ]
        )
        parts = flat.split([parameter.numel() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view(parameter.shape)
        return flat


def _writes(gradient: Tensor | None) -> int:
    """How often a gradient, or what it is a view of, was written to."""
    return 0 if gradient is None else gradient._version


def _behind_each_other(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The whole of which these are the parts, in order; None if they are not."""
    end = 0
    for gradient in gradients:
        if gradient is None or not gradient.is_contiguous() or gradient.storage_offset() != end:
            return None
        end += gradient.numel()
    first = gradients[0]
    assert first is not None
    storage = first.untyped_storage()
    if any(gradient is not None and gradient.untyped_storage()._cdata != storage._cdata for gradient in gradients):
        return None
    return first.new_empty(0).set_(storage, 0, (end,))  # type: ignore[call-overload]


class Reducer:
    """Averages the gradients of some parameters over all ranks.

    Args:
        named: parameters that require gradients, with their names; alike on every rank.
        grid, axis: the ranks, and their connections for these gradients alone.
        passes: backward passes whose gradients add up before they are sent.
        compression: Horovod's.
        before, after: factors of the gradients before and after they are added up.
        capacity: bytes of a bucket, but for a larger parameter.
        groups: parameters that share a bucket, where the script says so.
        dense: whether sparse gradients are made dense.

    Attributes:
        parameters: those.
        pending: gradients came since the last ``synchronize``.
        done: ``synchronize`` was called, and nothing came since.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        grid: Grid,
        axis: Axis,
        *,
        passes: int,
        compression: Any,
        before: float,
        after: float,
        capacity: int,
        groups: Sequence[Sequence[nn.Parameter]] = (),
        dense: bool = False,
    ) -> None:
        self._grid, self._axis, self._compression = grid, axis, compression
        self._before, self._after, self._dense = before, after, dense
        self._names = {parameter: name for name, parameter in named}
        self.parameters = list(self._names)
        if not elementwise(compression):
            capacity = 1  # it may count on a parameter's shape: each is compressed by itself
        self._buckets: list[Bucket] = []
        for number, members in enumerate(shared(self.parameters, capacity, groups)):
            says = ", ".join(self._names[parameter] for parameter in members[:3])
            self._buckets.append(Bucket(members, f"gradients {number}: {says}{', ...' if len(members) > 3 else ''}"))
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._passes = passes
        self._next = 0
        self.pending = self.done = False
        self._handles = [p.register_post_accumulate_grad_hook(weak(self._arrived)) for p in self.parameters]
        self.begin()

    @property
    def passes(self) -> int:
        """Backward passes of a step."""
        return self._passes

    @passes.setter
    def passes(self, passes: int) -> None:
        if self.pending:
            raise RuntimeError("the number of backward passes changes between steps: call optimizer.step() before")
        self._passes = passes
        self.begin()

    def begin(self) -> None:
        """A new step."""
        self._left = dict.fromkeys(self.parameters, self._passes)
        self._next, self.pending = 0, False
        for bucket in self._buckets:
            bucket.begin()

    def stepped(self) -> None:
        """A step used the gradients: each is marked so, until it is written to."""
        self.done = False
        for gradient in self._gradients():
            gradient._stepped = gradient._version  # type: ignore[attr-defined]

    def _stale(self) -> bool:
        """Whether the gradients are the last step's: nothing has touched them since."""
        gradients = self._gradients()
        if self.pending or not gradients:
            return False
        return all(getattr(gradient, "_stepped", None) == gradient._version for gradient in gradients)

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def remove(self) -> None:
        """Leave nothing on the parameters."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Have every gradient reduced, and in ``.grad``. Collective, also where this rank had no backward pass.

        A parameter that had no gradient here takes part with zeros; one that had none on any rank keeps none.

        Raises:
            RuntimeError: the gradients are those that the last step used, or were written to on their way.
        """
        if self._axis.size > 1:
            if self._stale():
                raise RuntimeError(
                    "there was no backward pass since the last step, and .grad is what that step used: it would be "
                    "averaged once more. A rank that has no batch calls optimizer.zero_grad(); optimizer.step()"
                )
            while self._next < len(self._buckets):
                self._start_next()
            used = [parameter in self._bucket_of[parameter].had for parameter in self.parameters]
            flags = torch.tensor(used, dtype=torch.uint8, device=self._grid.device)
            with labelled(self._axis, "which have gradients"):
                flagged = self._axis.all_reduce(flags, op="max", async_op=True)
            for bucket in self._buckets:
                bucket.finish(self._compression, self._after)
            flagged.wait()
            for parameter, flag in zip(self.parameters, flags.tolist(), strict=True):
                if not flag:
                    parameter.grad = None
        self.begin()
        self.done = True

    def abandon(self) -> None:
        """After a failure: let go of everything under way."""
        for bucket in self._buckets:
            bucket.abandon()

    @torch.no_grad()
    def _arrived(self, parameter: Tensor) -> None:
        """A backward pass has added to a parameter's gradient all that it adds."""
        assert isinstance(parameter, nn.Parameter)
        left = self._left[parameter] - 1
        if left < 0:
            raise RuntimeError(
                f"{self._names[parameter]} has got more gradients than backward_passes_per_step={self._passes} before "
                "optimizer.step(): give DistributedOptimizer a larger one, and gradients add up that often before they "
                "are sent; or it is in a re-entrant checkpoint: use torch.utils.checkpoint with use_reentrant=False"
            )
        self._left[parameter] = left
        self.pending, self.done = True, False
        if parameter.grad is not None and parameter.grad.requires_grad:
            raise RuntimeError(
                f"{self._names[parameter]}: backward(create_graph=True) leaves a gradient that has one itself, which "
                "is not averaged: use torch.autograd.grad(loss, inputs, create_graph=True) for such a part of the loss"
            )
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            if not self._dense:
                raise RuntimeError(
                    f"{self._names[parameter]} has a sparse gradient: give DistributedOptimizer sparse_as_dense=True, "
                    "or make its layer with sparse=False"
                )
            parameter.grad = parameter.grad.to_dense()
        if left == 0 and self._axis.size > 1:
            self._bucket_of[parameter].left.discard(parameter)
            while self._next < len(self._buckets) and not self._buckets[self._next].left:
                self._start_next()

    def _start_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        bucket.start(self._axis, self._compression, self._before)


def shared(
    parameters: Sequence[nn.Parameter], capacity: int, groups: Sequence[Sequence[nn.Parameter]]
) -> list[list[nn.Parameter]]:
    """Which parameters share a bucket: the groups, and the others by dtype and device, the last ones first.

    Args:
        parameters: in the order of the model.
        capacity: bytes of a bucket, but for a larger parameter.
        groups: that the script asks for.
    """
    found = [
        [parameter for parameter in group if _kind(parameter) == kind]
        for group in reversed(groups)
        for kind in dict.fromkeys(map(_kind, group))
    ]
    grouped = {parameter for group in groups for parameter in group}
    open_: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], int]] = {}
    for parameter in reversed([p for p in parameters if p not in grouped]):
        bucket, size = open_.get(_kind(parameter), ([], capacity))
        more = parameter.numel() * parameter.element_size()
        if size + more > capacity:
            bucket, size = [], 0
            found.append(bucket)
        bucket.append(parameter)
        open_[_kind(parameter)] = bucket, size + more
    return found


def _kind(parameter: nn.Parameter) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device
