"""fp16's loss scale: the scaler of an engine, and the factor of gradients where they enter an engine's module.

``engine.backward(loss)`` multiplies the loss by its engine's scale. ``loss.backward()``, over one engine or several,
multiplies nothing: there each engine's scale is applied to the gradients that enter its module through its outputs.
The same happens if the backward pass of one engine runs into the module of another, which has a scale of its own.
Gradients that leave a module through its inputs are divided by what they were multiplied by when they entered.

If an output of one engine's module is an input of another's, both factors are applied as one. Between the two, an fp16
gradient would be unscaled, and too small for its dtype.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor

from ...base.torch_private import backward_task, has_hooks

if TYPE_CHECKING:
    from ...options.precision import LossScale


class BackwardScales:
    """Loss scales of the backward passes that run in one process.

    A backward pass names no engine, and may run through the modules of several. So all engines of a process share one
    instance, ``process_scales()``.
    """

    def __init__(self) -> None:
        self._scalers: WeakSet[LossScaler] = WeakSet()
        self.steps = 0  # that the engines of this process have taken
        self._owners: list[int] = []  # ids of the engines whose ``backward`` runs
        # Scale of the loss whose backward pass runs now, last in the list. Autograd's device threads read it too.
        self._running = [1.0]
        # Scales of the losses of ``scaled`` in the last backward pass that reached one, by autograd's number of it.
        self._scaled_by_user: dict[int, set[float]] = {}

    def add(self, scaler: LossScaler) -> None:
        """Add a new engine's loss scaler to the scalers of this process."""
        self._scalers.add(scaler)

    @property
    def any(self) -> bool:
        """True if an engine of this process has a loss scale.

        In this case every engine of the process multiplies or divides gradients by its own scale.
        """
        return len(self._scalers) > 0

    @contextmanager
    def running(self, scale: float, owner: int) -> Iterator[None]:
        """Context for the backward pass that ``engine.backward`` runs on a loss multiplied by ``scale``.

        Args:
            scale: the engine's loss scale.
            owner: the engine's ``id``.
        """
        self._running.append(scale)
        self._owners.append(owner)
        try:
            yield
        finally:
            self._running.pop()
            self._owners.pop()

    def origin(self) -> tuple[int | None, int]:
        """Return the origin of the backward pass that runs now.

        Returns:
            The ``id`` of the engine whose ``backward`` runs, or None in a ``loss.backward()`` of torch; and the number
            of steps that the engines of this process have taken.
        """
        return (self._owners[-1] if self._owners else None), self.steps

    def scaled(self, loss: Tensor, scale: float) -> Tensor:
        """Return the loss times the engine's loss scale. The user then calls ``backward()`` on the result."""
        product = loss if scale == 1.0 else loss.float() * scale
        if product.requires_grad:
            product.register_hook(lambda _: self._note(scale))
        return product

    def _note(self, scale: float) -> None:
        task = backward_task()
        if task not in self._scaled_by_user:
            self._scaled_by_user.clear()
        self._scaled_by_user.setdefault(task, set()).add(scale)

    def missing(self, scale: float, scaled_by_user: bool) -> float:
        """Return the factor by which gradients must still be multiplied where they enter a module in a backward pass.

        The factor is the module's loss scale, divided by the scale that the loss of this backward pass already has.

        Args:
            scale: the loss scale of the module's engine.
            scaled_by_user: True if the user multiplied a loss by this scale through ``scaled``. If the loss of this
                backward pass is not known to have another scale, it is taken to be that loss.
        """
        scales = self._scaled_by_user.get(backward_task(), set())
        if len(scales) == 1:
            return scale / self._running[-1] / next(iter(scales))
        known = len(self._running) > 1 and not scales
        return (1.0 if scaled_by_user and not known else scale) / self._running[-1]


@functools.cache
def process_scales() -> BackwardScales:
    """Return the ``BackwardScales`` of this process."""
    return BackwardScales()


class LossScaler:
    """fp16's loss scale: halved if gradients overflow, doubled after ``window`` steps without an overflow.

    A fixed scale never changes. Steps that overflow are skipped in this case too.

    Args:
        options: how the scale starts and changes.

    Attributes:
        scale: factor of the loss before the backward pass.
        skipped: number of steps that overflowed.
        cur_iter: number of steps so far.
    """

    def __init__(self, options: LossScale) -> None:
        self._options = options
        self.cur_iter = 0
        self.scale = options.first
        self.skipped = 0
        self._good = 0  # steps since the last overflow or doubling
        self._patience = options.hysteresis

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the counters, for a checkpoint."""
        counters = {"skipped": self.skipped, "good": self._good, "patience": self._patience, "steps": self.cur_iter}
        return {"scale": self.scale, **counters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the scale and the counters to those that ``state_dict`` returned."""
        self.scale, self.skipped = float(state["scale"]), state["skipped"]
        self._good, self._patience = state["good"], state["patience"]
        self.cur_iter = state.get("steps", 0)  # not in files of older versions

    def update(self, overflow: bool, report: bool) -> None:
        """Update the scale after a step.

        Args:
            overflow: the gradients overflowed on a rank of the grid.
            report: log an overflow: True on one rank.
        """
        before = self.scale
        self.cur_iter += 1
        if not overflow:
            self._good += 1
            if self._options.consecutive_hysteresis:
                self._patience = self._options.hysteresis
            if self._options.fixed is None and self._good % self._options.window == 0:
                self.scale *= 2
                self._patience = self._options.hysteresis
            return
        self.skipped += 1
        self._good = 0
        if self._options.fixed is None:
            if self._patience > 1:
                self._patience -= 1
            else:
                self.scale = max(self.scale / 2, self._options.minimum)
        if report:
            logging.getLogger("triax").warning(
                "overflow in fp16: step skipped on every rank (%d so far); loss scale %g -> %g",
                self.skipped,
                before,
                self.scale,
            )


def rescaled(
    value: Any,
    factor: Callable[[], float],
    leaving: bool = False,
    copies: Callable[[Tensor], bool] = lambda tensor: tensor.dim() == 0,
) -> tuple[Any, bool]:
    """Return a module's outputs with a factor on their gradients, and True if every tensor among them was found.

    The outputs have the same values. In the backward pass their gradients are multiplied by ``factor()``. The second
    result is False if the outputs contain an object other than a nest of tensors and plain values, because tensors in
    it would be missed. A value that needs no change is returned without a copy.

    Args:
        value: a nest of tensors.
        factor: called in the backward pass.
        leaving: True if the value is the module's inputs, whose gradients are divided by the factor.
        copies: returns True for a tensor that must be copied, so that the user can change it in place. By default
            these are the 0-dim tensors, such as losses.
    """
    if isinstance(value, Tensor):
        wanted = value.requires_grad and value.is_floating_point()
        entry = _entry_of(value) if wanted and leaving else None
        if entry is not None:
            return _Rescale.apply(lambda: factor() / entry.factor(), True, 1.0, copies(value), entry.source), True
        return (_Rescale.apply(factor, leaving, 1.0, copies(value), value) if wanted else value), True
    if isinstance(value, Mapping):
        parts = {key: rescaled(item, factor, leaving, copies) for key, item in value.items()}
        changed = {key: rescaled_item for key, (rescaled_item, _) in parts.items() if rescaled_item is not value[key]}
        made: Any = copy.copy(value) if changed else value  # a model's output has a class of its own
        for key, rescaled_item in changed.items():
            made[key] = rescaled_item
        return made, all(seen for _, seen in parts.values())
    if isinstance(value, (tuple, list)):
        items = [rescaled(item, factor, leaving, copies) for item in value]
        parts_, seen = [new for new, _ in items], all(seen for _, seen in items)
        if all(new is item for new, item in zip(parts_, value, strict=True)):
            return value, seen
        return (type(value)(*parts_) if hasattr(value, "_fields") else type(value)(parts_)), seen
    return value, value is None or isinstance(value, (bool, int, float, str))


def _entry_of(value: Tensor) -> Any:
    """Return the node by which gradients enter the module whose output a tensor is, unchanged; None if it is not one.

    None too if the user reads the tensor's own gradient, which must be unscaled.
    """
    node: Any = value.grad_fn
    if not isinstance(node, _Rescale._backward_cls) or node.source is None:  # type: ignore[attr-defined]
        return None
    return None if value.retains_grad or has_hooks(value) else node


class _Rescale(torch.autograd.Function):
    """Identity whose backward pass multiplies the gradient by a factor, or divides it if ``leaving``.

    In a double backward pass (a gradient penalty) the second pass runs in the opposite direction through this function,
    so there it divides, or multiplies if ``leaving``.
    """

    @staticmethod
    def forward(
        ctx: Any, factor: Callable[[], float], leaving: bool, by: float, copied: bool, tensor: Tensor
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.factor, ctx.leaving, ctx.by = factor, leaving, by
        ctx.source = tensor if by == 1.0 and not (leaving or copied) else None  # see _entry_of
        if by != 1.0:
            return tensor * by
        # Not a view, which could not be changed in place.
        return tensor.clone() if copied else tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return (None,) * 5
        by = ctx.by / ctx.factor() if ctx.leaving else ctx.by * ctx.factor()
        if gradient.requires_grad:
            gradient = _Rescale.apply(ctx.factor, not ctx.leaving, by, False, gradient)
        elif by != 1.0:
            gradient = gradient * by
        return None, None, None, None, gradient
