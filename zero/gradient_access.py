"""Access to ``p.grad``: user code reads and changes the reduced gradients of a step through guards.

between two backward passes    ``p.grad`` is a guard: each operation on it first calls ``GradientAccess``
an operation on a guard        stages 0, 1: the reductions end; then every ``p.grad`` is the whole batch's gradient
                               stages 2, 3, gradients that are not complete, shards: an error
the optimizer's step           takes what user code left in ``p.grad``
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from ..base.torch_private import backward_task, multiply_all
from ..grid import Axis, Grid
from .bucket import Bucket
from .managed import ManagedParameter

# Gradients of replicas differ if one was changed; rounding may differ between processors.
_TOLERANCE = 1e-6


class GradientAccess:
    """Access to the gradients of one data axis through ``p.grad``.

    Args:
        buckets: buckets with trained parameters.
        grid: the grid.
        settle: waits for the reductions that have begun.
        exchanged: True if the replicas' gradients are combined only within the step (gradient compression).

    Attributes:
        plain: True if ``.grad`` is right without a guard: one process, one microbatch, no loss scale.
        applied: factor by which the gradients are multiplied already, because user code has read them.
        stepped: True if the optimizer has stepped with the gradients.
        touched: True if user code has read or changed a gradient of this step.
    """

    def __init__(self, buckets: Sequence[Bucket], grid: Grid, settle: Callable[[], None], exchanged: bool) -> None:
        self._buckets, self._grid, self._exchanged = list(buckets), grid, exchanged
        self._settle = WeakMethod(settle)
        self._bucket_of = {id(m.parameter): (bucket, m) for bucket in self._buckets for m in bucket.members}
        self._divisor: WeakMethod[Callable[[], float]] | None = None
        self._context: WeakMethod[Callable[[str], AbstractContextManager[None]]] | None = None
        self._remedy = ""
        self._replaced: list[tuple[Bucket, nn.Parameter, Tensor | None]] = []  # what user code has put into ``.grad``
        self.plain = self.stepped = self._exposed = self.touched = False
        self.applied = 1.0

    def connect(
        self,
        divisor: Callable[[], float] | None,
        remedy: str,
        context: Callable[[str], AbstractContextManager[None]] | None = None,
    ) -> None:
        """Connect the engine or optimizer.

        Args:
            divisor: method that ends the reductions, and returns the number by which the sums are divided for the mean
                gradient. It raises an error if the gradients are not complete. None: they can never be read.
            remedy: what to type instead of an operation that is refused.
            context: method that returns the context of a collective call of this name.
        """
        self._context = None if context is None else WeakMethod(context)
        self._divisor, self._remedy = None if divisor is None else WeakMethod(divisor), remedy
        if divisor is not None:
            for bucket in self._buckets:
                bucket.shown.access = self

    def hide(self) -> None:
        """Hide all gradients behind ``.grad``."""
        for bucket in self._buckets:
            bucket.shown.hide(self)

    def begin(self) -> None:
        """Begin a step."""
        self._replaced = []
        self.stepped = self._exposed = self.touched = False
        self.applied = 1.0

    def value(self, parameter: Tensor | None) -> Tensor:
        """Return the reduced gradient of a parameter: a view of its bucket. In stage 1 collective, the first time.

        Raises:
            RuntimeError: this rank does not hold the whole gradient, or it is not complete.
        """
        bucket, member = self._bucket_of[id(parameter)]
        if (reason := self._obstacle(bucket, member)) is not None:
            raise RuntimeError(f"p.grad of {member.layout.name} was read or changed, but {reason}. {self._remedy}")
        if not (self.stepped or self._exposed):
            context = None if self._context is None else self._context()
            with nullcontext() if context is None else context("reading of p.grad"):
                self.expose()
        return bucket.gradient_of(member.parameter)

    def zero(self, parameter: Tensor | None) -> None:
        """Set a gradient to zero, in any stage."""
        bucket, member = self._bucket_of[id(parameter)]
        if backward_task() != -1:
            self.value(parameter)  # refused
        if not self.is_gone(parameter):
            self.touched = True
            if (settle := self._settle()) is not None:
                settle()
            bucket.discard(member.parameter, "zero")

    def is_gone(self, parameter: Tensor | None) -> bool:
        """Return True if the optimizer has stepped and this rank no longer has the whole gradient of the parameter."""
        bucket, _ = self._bucket_of[id(parameter)]
        return self._divisor is None or (self.stepped and (bucket.sharded or bucket.transient))

    @torch.no_grad()
    def expose(self) -> None:
        """Make all gradients whole mean gradients, which ``.grad`` shows. Collective if they are sharded."""
        divisor = self._own_divisor()
        for bucket in self._buckets:
            bucket.expose(1.0 / divisor)
        self.applied, self._exposed, self.touched = 1.0 / divisor, True, True
        self.take_back(look=False)

    @torch.no_grad()
    def conceal(self) -> None:
        """Undo ``expose``, because another backward pass adds to the gradients."""
        if self._exposed:
            self.take_back()
            for bucket in self._buckets:
                bucket.conceal(1.0 / self.applied)
            self.applied, self._exposed = 1.0, False

    def set_aside(self) -> None:
        """Keep what user code has assigned to ``.grad``, before the reductions of a step end, for ``take_back``."""
        replaced = [(bucket, *replacement) for bucket in self._buckets for replacement in bucket.replaced()]
        for bucket, parameter, gradient in replaced:
            self._replaced.append((bucket, parameter, None if gradient is None else gradient.detach()))
            bucket.put_back(parameter)

    @torch.no_grad()
    def take_back(self, look: bool = True) -> None:
        """Take what user code has assigned to ``.grad``, after all reductions, into the buckets.

        Args:
            look: look for what was assigned since ``set_aside``.

        Raises:
            RuntimeError: a gradient was assigned that this rank does not hold.
        """
        if look:
            self.set_aside()
        replaced, self._replaced = self._replaced, []
        for bucket, parameter, gradient in replaced:
            self.touched = True
            if gradient is None:
                bucket.discard(parameter, "drop")
                parameter.grad = None
                continue
            member = self._bucket_of[id(parameter)][1]
            if (reason := self._obstacle(bucket, member)) is not None:
                raise RuntimeError(f"p.grad of {member.layout.name} was assigned, but {reason}. {self._remedy}")
            divisor = self._own_divisor() * self.applied
            bucket.assign_gradient(parameter, gradient, divisor, self._exposed or self.plain)

    def multiply(self, factor: Tensor | float) -> None:
        """Multiply all reduced gradients by a factor."""
        if gradients := [bucket.reduced_gradient(self._exposed) for bucket in self._buckets]:
            multiply_all(gradients, factor)

    @torch.no_grad()
    def require_equal(self, axis: Axis) -> None:
        """Check that all replicas have made the same changes. Collective, if one of them has read or changed gradients.

        Raises:
            RuntimeError: on every replica, if they differ.
        """
        if not self._exposed and not any(bucket.sharded or bucket.transient for bucket in self._buckets):
            self.expose()  # another replica has read or changed gradients: all step with the same factor
        sums = [bucket.fingerprint(self._exposed) for bucket in self._buckets]
        fingerprint = torch.tensor(sums, dtype=torch.float64, device=self._grid.device).view(-1)
        most = torch.cat([fingerprint, -fingerprint])
        axis.all_reduce(most, op="max")
        high, low = most.view(2, -1)
        most = high.view(-1, 3)
        allowed = _TOLERANCE * torch.stack([most[:, 1], most[:, 1], torch.zeros_like(most[:, 1])], dim=1)
        differs = ((high + low).view(-1, 3) > allowed).any(dim=1)
        if bool(differs.any()):
            bucket = self._buckets[int(differs.nonzero()[0])]
            names = [member.layout.name for member in bucket.members]
            raise RuntimeError(
                f"p.grad of {', '.join(names[:3])}{', ...' if len(names) > 3 else ''} was changed differently on "
                "different replicas, which would then have different weights: change it equally on every rank (draw "
                "noise from a torch.Generator with the same seed on all of them)"
            )

    def _own_divisor(self) -> float:
        method = None if self._divisor is None else self._divisor()
        assert method is not None  # else ``_obstacle`` has refused
        return method()

    def _obstacle(self, bucket: Bucket, member: ManagedParameter) -> str | None:
        """Return the reason for which a gradient can neither be read nor changed on this rank; None if it can."""
        grid = self._grid
        if self._divisor is None:
            return "train_batch has taken the step already, so that a change has no effect"
        if backward_task() != -1:
            return (
                "a backward pass is running, in which the gradient is neither complete nor reduced: for a linear "
                "change, such as a mask, use p.register_hook, whose function returns the changed gradient"
            )
        if grid.pipe.size > 1:
            return f"this rank has the layers of one of {grid.pipe.size} pipe ranks only"
        if member.layout.shard_dim is not None and grid.tensor.size > 1:
            return f"this rank holds one of {grid.tensor.size} tensor shards, so that a norm would be that of a part"
        if bucket.axis.size != grid.data_context.size:
            return "this rank holds a part of the experts only, so that a norm would be that of a part"
        if self.is_gone(member.parameter):
            return "the step has taken the gradients, of which this rank keeps its shard: do it before the step"
        if self._exchanged:
            return "gradient compression combines the replicas' gradients only within the step"
        if bucket.transient:
            return "ZeRO stages 2 and 3 keep only this rank's shard of it: use stage 0 or 1, where p.grad is whole"
        return None
