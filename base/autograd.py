"""Helpers of backward passes: marks in the graph, the pass that runs now, hooks without an owner, casts of autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakMethod, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .nest import map_tensors, tensors_of
from .torch_private import backward_task, call_after_backward, sum_hooks

T = TypeVar("T", Tensor, Tensor | None)


def mark(value: Any, action: Callable[[], None], exact: bool = False) -> Any:
    """Return a copy of a nest of tensors; the backward pass calls ``action`` once all their gradients are computed.

    Args:
        value: the nest of tensors, for example a layer's output.
        action: function without arguments. The backward pass calls it before it passes the gradients on to the nodes
            that made the tensors.
        exact: do not look inside subclasses of tuple, list and dict, as in ``map_tensors``.
    """
    wanted = [tensor for tensor in tensors_of(value, exact) if tensor.requires_grad]
    if not wanted:
        return value
    marked = dict(zip(map(id, wanted), _Mark.apply(action, *wanted), strict=True))
    return map_tensors(lambda tensor: marked.get(id(tensor), tensor), value, exact)


class _Mark(torch.autograd.Function):
    """Identity whose backward pass runs an action first."""

    @staticmethod
    def forward(ctx: Any, action: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.action = action
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.action()
        return (None, *gradients)


class OutermostBackward:
    """The backward pass that runs now, together with the passes that run within it, as in a reentrant checkpoint.

    torch numbers the passes, but does not tell which one runs within another. So ``enter`` must first be called by a
    hook outside of the checkpoint: on an output of the model, or on the loss.

    Args:
        begin: method that the first ``enter`` of a pass calls, with its arguments. Its object is not kept alive.
        end: method that is called when the pass has ended, and not if it failed. Its object is not kept alive.
    """

    def __init__(self, begin: Callable[..., None], end: Callable[[], None]) -> None:
        self._begin, self._end = WeakMethod(begin), WeakMethod(end)
        self._callback: ref[_Callback] | None = None  # torch holds it until the pass has ended or failed

    def enter(self, *arguments: Any) -> None:
        """Begin, if none runs, the backward pass from which this is called; ``arguments`` are those of ``begin``."""
        if self._callback is None or self._callback() is None:
            callback = _Callback(self._leave)
            call_after_backward(callback)
            self._callback = ref(callback)
            if (begin := self._begin()) is not None:
                begin(*arguments)

    def _leave(self) -> None:
        try:
            if (end := self._end()) is not None:
                end()
        finally:
            self._callback = None


class _Callback:
    """Callback at the end of a backward pass."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self) -> None:
        self._call()


class WeakHook:
    """Hook of a parameter or tensor that calls a method, but does not keep the method's object alive.

    Once the object is freed, the hook does nothing. A hook that held the object would keep it alive forever, together
    with its grid's sockets and threads, because Python's garbage collector does not follow hooks of tensors that C++
    also refers to.
    """

    __slots__ = ("_function", "_reference")

    def __init__(self, method: Callable[[Tensor], None]) -> None:
        # Faster than WeakMethod.
        self._function, self._reference = method.__func__, ref(method.__self__)  # type: ignore[attr-defined]

    def __call__(self, tensor: Tensor) -> None:
        if (owner := self._reference()) is not None:
            self._function(owner, tensor)


_RUNS_AGAIN = ContextVar("runs again", default=False)


@contextmanager
def running_again() -> Iterator[None]:
    """Context of a forward pass that repeats an earlier one, to make its saved tensors anew."""
    token = _RUNS_AGAIN.set(True)
    try:
        yield
    finally:
        _RUNS_AGAIN.reset(token)


def runs_again() -> bool:
    """Return True in a forward pass that repeats an earlier one: within ``running_again``, or in a backward pass."""
    return _RUNS_AGAIN.get() or backward_task() != -1


@contextmanager
def saved_through(
    pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor], what: str, otherwise: str
) -> Iterator[None]:
    """Context in which autograd saves tensors through two functions.

    Args:
        pack, unpack: as those of ``saved_tensors_hooks``.
        what, otherwise: for the error where torch does not allow these hooks: what needs them, and how to do without.

    Raises:
        RuntimeError: a gradient transform of ``torch.func`` is used within.
    """
    try:
        with saved_tensors_hooks(pack, unpack):
            yield
    except RuntimeError as error:
        if "torch.func.{" not in str(error):  # torch's own message, before a rank's name is put in front
            raise
        raise RuntimeError(
            f"{what} does not work, because a layer calls torch.func.grad, vjp, jacrev or hessian, within which torch "
            "allows no hooks on saved tensors: use "
            f"torch.autograd.grad(..., create_graph=True), torch.func.jvp or vmap, or {otherwise}"
        ) from error


def sees_sums(parameter: Tensor) -> bool:
    """Return True if user code has a hook that reads ``.grad`` after autograd has added to it."""
    return any(type(hook) is not WeakHook for hook in sum_hooks(parameter))


def product_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype in which autocast computes products with ``x``; None outside of autocast.

    Under autocast torch casts the arguments of ``F.linear`` and similar functions at the call, and autograd records the
    casts. The backward pass of a custom autograd function runs outside of autocast. Such a function must therefore
    store this dtype in its forward pass and cast with ``cast`` in its backward pass.
    """
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def cast(tensor: T, dtype: torch.dtype | None) -> T:
    """Cast as autocast does: floating-point tensors except float64. None as ``dtype`` or ``tensor`` changes nothing."""
    if dtype is None or tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)
