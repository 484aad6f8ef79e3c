"""Guards: tensors that stand in ``p.grad`` between two backward passes, and ask before user code reads the gradient.

    type               memory                                   torch's C++ code
    GuardedGradient    of the bucket                            adds to it without calling Python
    HiddenGradient     none                                     cannot read it: autograd's additions are kept beside it

Each operation on a guard first calls ``GradientReader``, which ends the reductions, or raises an error.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar
from weakref import ref

import torch
from torch import Tensor

from ..base.nest import map_tensors
from ..base.torch_private import backward_task, make_wrapper, without_subclasses

# Properties and methods that a guard answers by itself, because they need no values.
_WITHOUT_VALUES = {
    *("shape", "dtype", "device", "layout", "ndim", "names", "requires_grad", "grad_fn", "is_leaf", "is_sparse"),
    *("is_cuda", "is_cpu", "is_meta", "is_quantized", "is_mkldnn", "is_xla", "itemsize", "nbytes", "output_nr"),
    *("is_sparse_csr", "is_nested", "size", "dim", "numel", "nelement", "element_size", "stride", "is_contiguous"),
    *("is_floating_point", "is_complex", "__len__", "__hash__", "untyped_storage"),
    "_has_compatible_shallow_copy_type",
}
# Methods that do nothing to a guarded gradient: torch's ``zero_grad`` calls them first.
_IDLE = {"detach_", "requires_grad_"}
# Moves of a whole module move its gradients too, even gradients that a step has used already.
_MOVES = {"to", "cpu", "cuda", "half", "bfloat16", "float", "double"}


class GradientReader(Protocol):
    """Protocol: reads and changes the gradients behind guards; see ``GradientAccess``."""

    plain: bool

    def value(self, parameter: Tensor | None) -> Tensor: ...
    def zero(self, parameter: Tensor | None) -> None: ...
    def is_gone(self, parameter: Tensor | None) -> bool: ...


class GuardedGradient(Tensor):
    """``.grad`` in the memory in which autograd accumulates: torch's C++ code adds to it without calling Python."""

    _access: ref[GradientReader]
    _parameter: ref[Tensor]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):  # of a property, such as Tensor.data
            name = func.__self__.__name__ + ("=" if name == "__set__" else "")
        with without_subclasses():
            return _call(func, name, args, kwargs)


G = TypeVar("G", bound=GuardedGradient)


class HiddenGradient(GuardedGradient):
    """``.grad`` without memory, which C++ code cannot read either: the gradient is being reduced, or lies elsewhere.

    Attributes:
        added: the sum of what autograd has added to it, which is not in the bucket yet; None if it has added nothing.
    """

    added: Tensor | None

    @staticmethod
    def __new__(cls, parameter: Tensor) -> HiddenGradient:
        made: HiddenGradient = make_wrapper(cls, parameter.shape, dtype=parameter.dtype, device=parameter.device)
        made.added = None
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        adds = func is torch.ops.aten.add_.Tensor and backward_task() != -1
        if adds and isinstance(first, HiddenGradient):  # autograd accumulates in .grad
            _access_of(first)  # raises an error if the engine is gone
            first.added = args[1] if first.added is None else first.added + args[1]
            return first
        return func(*map_tensors(_value, args), **map_tensors(_value, kwargs))


def guard(made: G, access: GradientReader, parameter: Tensor) -> G:
    """Connect a new guard with its access and its parameter, and return it."""
    made._access, made._parameter = ref(access), ref(parameter)
    return made


def _call(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Call a function of torch that was given guards."""
    first: Any = args[0] if args else None
    if func in (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor) and backward_task() != -1:
        return func(*args, **kwargs)  # autograd accumulates in .grad, under a mode that sees its operations
    if name in _WITHOUT_VALUES or (name == "data_ptr" and type(first) is GuardedGradient):
        return func(*args, **kwargs)
    if name in _IDLE:
        return first
    if name in ("zero_", "_foreach_zero_"):
        for tensor in first if name == "_foreach_zero_" else (first,):
            _access_of(tensor).zero(tensor._parameter()) if isinstance(tensor, GuardedGradient) else tensor.zero_()
        return first
    if isinstance(first, GuardedGradient):
        if name in _MOVES and _access_of(first).is_gone(first._parameter()):
            return first
        if name == "data=":
            return None if args[1] is first else _value(first).copy_(_value(args[1]))
    return func(*map_tensors(_value, args), **map_tensors(_value, kwargs))


def _access_of(gradient: GuardedGradient) -> GradientReader:
    access = gradient._access()
    if access is None or gradient._parameter() is None:
        raise RuntimeError(
            "p.grad belongs to an engine or optimizer that is gone: call module.zero_grad() before you train the "
            "module without it"
        )
    return access


def _value(tensor: Tensor) -> Tensor:
    """Return the gradient behind a guard; any other tensor as it is."""
    return _access_of(tensor).value(tensor._parameter()) if isinstance(tensor, GuardedGradient) else tensor
