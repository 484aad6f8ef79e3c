"""All-reduce of gradients in buckets while the backward pass runs, for ``DistributedOptimizer``.

Parameters share buckets, the last ones first, in the order in which their gradients become ready. A bucket is sent when
the last of its gradients is ready and the bucket before it was sent: the order is the same on every rank, whatever the
order of its backward pass. ``.grad`` then is a view of the bucket, so a gradient is stored once.

Stage 0 of zero/ all-reduces gradients in buckets too, of its own optimizer's flat parameters. The script's optimizer
here needs averages in ``.grad``, factors before and after the sum, Horovod's compression, the check for gradients
changed in transit, and None on parameters that no rank used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...base.autograd import WeakHook
from ...grid import Axis, Grid, Pending
from .compression import elementwise


class AllreduceBucket:
    """Gradients of one dtype that are sent in one all-reduce.

    ``start`` makes each ``.grad`` a view of one tensor. The views share one version counter, which tells whether a
    gradient was written to while it was being sent.

    Attributes:
        parameters: the parameters.
        name: the bucket's name in the timeline.
        missing: parameters whose gradients are not ready.
        had_gradient: parameters that had a gradient on this rank when the bucket was sent.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], name: str) -> None:
        self.parameters, self.name = list(parameters), name
        self.missing: set[Tensor] = set()
        self.had_gradient: set[Tensor] = set()
        self._sent: tuple[Pending, Tensor, Tensor, Any] | None = None
        self._version = 0

    def begin(self) -> None:
        """Start a new step: no gradient is ready."""
        self.missing, self.had_gradient = set(self.parameters), set()

    def start(self, axis: Axis, compression: Any, factor: float) -> None:
        """Copy the gradients into one tensor, with zeros for missing ones, and start its all-reduce."""
        self.had_gradient = {parameter for parameter in self.parameters if parameter.grad is not None}
        flat = self._flatten()
        if factor != 1.0:
            flat.mul_(factor)
        shape = self.parameters[0].shape if len(self.parameters) == 1 else flat.shape
        wire, ctx = compression.compress(flat.view(shape))
        wire = wire.contiguous()
        with axis.labeled(self.name):
            self._sent = axis.all_reduce(wire, async_op=True), flat, wire, ctx
        self._version = _version(self.parameters[0].grad)

    def finish(self, compression: Any, factor: float) -> None:
        """Wait for the sum, and write it to ``.grad``."""
        assert self._sent is not None
        (pending, flat, wire, ctx), self._sent = self._sent, None
        gradient = self.parameters[0].grad
        if gradient is not None and _version(gradient) != self._version:
            raise RuntimeError(
                f"{self.name} were changed after backward() and before they were averaged (by clip_grad_norm_ or "
                "zero_grad(set_to_none=False), for example): call optimizer.synchronize() before, and "
                "optimizer.step() within optimizer.skip_synchronize()"
            )
        pending.wait()
        result = compression.decompress(wire, ctx)
        if result.data_ptr() != flat.data_ptr():
            flat.copy_(result.reshape(-1))
        if factor != 1.0:
            flat.mul_(factor)

    def abandon(self) -> None:
        """Drop an unfinished all-reduce."""
        self._sent = None

    def _flatten(self) -> Tensor:
        """Return the gradients in one flat tensor; each ``.grad`` becomes a view of it, so that it is stored once."""
        sizes = [parameter.numel() for parameter in self.parameters]
        gradients = [parameter.grad for parameter in self.parameters]
        flat = getattr(gradients[0], "_flat", None)
        if flat is not None and all(
            gradient is not None and getattr(gradient, "_flat", None) is flat and gradient.data_ptr() == part.data_ptr()
            for gradient, part in zip(gradients, flat.split(sizes), strict=True)
        ):
            return flat  # still its parts: they were zeroed in place since the last step
        # Copied: what autograd left may share memory with other gradients, and lacks a lazy conjugate bit in memory.
        flat = torch.cat(
            [
                parameter.new_zeros(parameter.numel()) if gradient is None else gradient.reshape(-1)
                for parameter, gradient in zip(self.parameters, gradients, strict=True)
            ]
        )
        for parameter, part in zip(self.parameters, flat.split(sizes), strict=True):
            gradient = part.view(parameter.shape)
            gradient._flat = flat
            parameter.grad = gradient
        return flat


def _version(gradient: Tensor | None) -> int:
    """Return torch's count of writes to a gradient or its base tensor; 0 for None."""
    return 0 if gradient is None else gradient._version


class Reducer:
    """Averages the gradients of parameters over all ranks.

    Args:
        named: names and parameters that require gradients; equal on every rank.
        grid: the ranks.
        axis: an axis of all ranks, used for these gradients alone.
        passes: backward passes whose gradients are accumulated before they are sent.
        compression: Horovod's compressor.
        before, after: factors of the gradients before and after the sum.
        bucket_bytes: size of a bucket; a larger parameter has a bucket of its own.
        groups: lists of parameters that share a bucket, as the script asked.
        dense: convert sparse gradients to dense ones.

    Attributes:
        parameters: the parameters.
        pending: there were gradients since the last ``synchronize``.
        done: ``synchronize`` was called, and there were no gradients since.
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
        bucket_bytes: int,
        groups: Sequence[Sequence[nn.Parameter]] = (),
        dense: bool = False,
    ) -> None:
        self._grid, self._axis, self._compression = grid, axis, compression
        self._before, self._after, self._dense = before, after, dense
        self._names = {parameter: name for name, parameter in named}
        self.parameters = list(self._names)
        if not elementwise(compression):
            bucket_bytes = 1  # the compressor may need the parameter's shape: one parameter per bucket
        self._buckets: list[AllreduceBucket] = []
        for number, members in enumerate(assign_buckets(self.parameters, bucket_bytes, groups)):
            names = ", ".join(self._names[parameter] for parameter in members[:3])
            self._buckets.append(
                AllreduceBucket(members, f"gradients {number}: {names}{', ...' if len(members) > 3 else ''}")
            )
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._passes = passes
        self._next = 0
        self.pending = self.done = False
        self._handles = [p.register_post_accumulate_grad_hook(WeakHook(self._on_gradient)) for p in self.parameters]
        self.begin()

    @property
    def passes(self) -> int:
        """Number of backward passes per step."""
        return self._passes

    @passes.setter
    def passes(self, passes: int) -> None:
        if self.pending:
            raise RuntimeError(
                "set_backward_passes_per_step() is allowed between two steps only: call optimizer.step() before"
            )
        self._passes = passes
        self.begin()

    def begin(self) -> None:
        """Start a new step."""
        self._passes_left = dict.fromkeys(self.parameters, self._passes)
        self._next, self.pending = 0, False
        for bucket in self._buckets:
            bucket.begin()

    def mark_used(self) -> None:
        """Mark all gradients as used by a step. A later write to a gradient, which torch counts, removes its mark."""
        self.done = False
        for gradient in self._gradients():
            gradient._used_at_version = gradient._version  # type: ignore[attr-defined]

    def _stale(self) -> bool:
        """Return True if the last step already used these gradients, because nothing has written to them since."""
        gradients = self._gradients()
        if self.pending or not gradients:
            return False
        return all(getattr(gradient, "_used_at_version", None) == gradient._version for gradient in gradients)

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Reduce all gradients and wait for them. Collective, also if this rank had no backward pass.

        A parameter without a gradient on this rank contributes zeros; without one on every rank its ``.grad`` is None.

        Raises:
            RuntimeError: the last step used these gradients, or they were written to while they were being sent.
        """
        if self._axis.size > 1:
            if self._stale():
                raise RuntimeError(
                    "there was no backward pass since the last step, and .grad has the gradients of that step: they "
                    "would be averaged again. On a rank without a batch call optimizer.zero_grad(); optimizer.step()"
                )
            while self._next < len(self._buckets):
                self._start_next()
            used = [parameter in self._bucket_of[parameter].had_gradient for parameter in self.parameters]
            flags = torch.tensor(used, dtype=torch.uint8, device=self._grid.device)
            with self._axis.labeled("which have gradients"):
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
        """Drop unfinished all-reduces, after a failure."""
        for bucket in self._buckets:
            bucket.abandon()

    @torch.no_grad()
    def _on_gradient(self, parameter: Tensor) -> None:
        """Hook of a parameter: a backward pass has finished its gradient."""
        assert isinstance(parameter, nn.Parameter)
        left = self._passes_left[parameter] - 1
        if left < 0:
            raise RuntimeError(
                f"{self._names[parameter]} has got more gradients than backward_passes_per_step={self._passes} before "
                "optimizer.step(): give DistributedOptimizer a larger backward_passes_per_step; if the parameter is "
                "used in a re-entrant checkpoint, use torch.utils.checkpoint with use_reentrant=False"
            )
        self._passes_left[parameter] = left
        self.pending, self.done = True, False
        if parameter.grad is not None and parameter.grad.requires_grad:
            raise RuntimeError(
                f"{self._names[parameter]}: backward(create_graph=True) makes a gradient that requires a gradient, "
                "which is not averaged: use torch.autograd.grad(loss, inputs, create_graph=True) for that part"
            )
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            if not self._dense:
                raise RuntimeError(
                    f"{self._names[parameter]} has a sparse gradient: give DistributedOptimizer sparse_as_dense=True, "
                    "or make its layer with sparse=False"
                )
            parameter.grad = parameter.grad.to_dense()
        if left == 0 and self._axis.size > 1:
            self._bucket_of[parameter].missing.discard(parameter)
            while self._next < len(self._buckets) and not self._buckets[self._next].missing:
                self._start_next()

    def _start_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        bucket.start(self._axis, self._compression, self._before)


def assign_buckets(
    parameters: Sequence[nn.Parameter], bucket_bytes: int, groups: Sequence[Sequence[nn.Parameter]]
) -> list[list[nn.Parameter]]:
    """Return lists of parameters that share a bucket: the groups, then the others by dtype and device, last ones first.

    Args:
        parameters: in the order of the model.
        bucket_bytes: size of a bucket; a larger parameter has a bucket of its own.
        groups: lists of parameters that share a bucket, as the script asked.
    """
    buckets = [
        [parameter for parameter in group if _dtype_and_device(parameter) == kind]
        for group in reversed(groups)
        for kind in dict.fromkeys(map(_dtype_and_device, group))
    ]
    grouped = {parameter for group in groups for parameter in group}
    # For each dtype and device, the bucket that is being filled and its bytes.
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], int]] = {}
    for parameter in reversed([p for p in parameters if p not in grouped]):
        kind = _dtype_and_device(parameter)
        bucket, size = filling.get(kind, ([], bucket_bytes))
        size += parameter.numel() * parameter.element_size()
        if size > bucket_bytes:
            bucket, size = [], parameter.numel() * parameter.element_size()
            buckets.append(bucket)
        bucket.append(parameter)
        filling[kind] = bucket, size
    return buckets


def _dtype_and_device(parameter: nn.Parameter) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device
