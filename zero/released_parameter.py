"""ReleasedParameter: a parameter that stage 3 has released, whose values cannot be read or written.

It has the shape, dtype and gradient of the parameter, and reads as NaN (``parameter.isnan()``), integers as 0. An
operation whose result would be NaN, or that would write to it, raises an error that names the parameter and says what
to do. It has this class only while it is released, so that operations on gathered parameters have no extra cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..base.torch_private import without_subclasses
from ..grid import layout_of

_grad: Any = nn.Parameter.grad  # the properties of the class, not of a parameter
_requires_grad: Any = nn.Parameter.requires_grad

# Functions that return floating-point tensors, but do not read values.
_MAKE = {"empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"}
_MAKE |= {"new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros"}
_VIEW = {"detach", "data"}  # they return the same values
_SET = {"requires_grad_", "__set__", "__delete__", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"}
_READ = {"item", "tolist", "numpy", "__array__", "__float__", "__int__", "__complex__", "__reduce_ex__"}
_ADVICE = (
    "stage 3 of ZeRO has released it, as it does outside of the run of its own unit, so that its values would be NaN. "
    "Read it on every rank within triax.zero.gathered(parameters), and write it within "
    "triax.zero.gathered(parameters, modifier_rank=0). If the forward of another module uses it, call "
    "triax.zero.register_external_parameter(module, parameter) before the engine is made"
)


class _Released(Tensor):
    """Base of released parameters and of their views: refuses operations that need values."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name == "__get__":  # of a property, such as shape or data
            name = getattr(func.__self__, "__name__", name)
        writes = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"
        with without_subclasses():
            if name in _READ or (writes and name not in _SET and name not in ("__init__", "__invert__", "__index__")):
                raise _error(name, args, kwargs)
            result = func(*args, **(kwargs or {}))
            if name == "grad" or name in _MAKE or name in _SET or not _has_values(result, args):
                return result
            if name in _VIEW:
                view = result.as_subclass(_Released)
                vars(view)["triax_name"] = _name(args)
                return view
            if args and result is args[0]:
                return result
        raise _error(name, args, kwargs)


class ReleasedParameter(_Released, nn.Parameter):
    """A released parameter."""

    @property
    def grad(self) -> Tensor | None:
        """The gradient. (A property of Python: it is read for each parameter and step.)"""
        with without_subclasses():
            gradient: Tensor | None = _grad.__get__(self)
            return gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with without_subclasses():
            _grad.__set__(self, value)

    @property
    def requires_grad(self) -> bool:
        """True if the parameter is trained."""
        with without_subclasses():
            return bool(_requires_grad.__get__(self))

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        with without_subclasses():
            _requires_grad.__set__(self, value)

    def __deepcopy__(self, memo: Any) -> Any:
        raise _error("deepcopy", (self,), None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise pickle_error(self)


def pickle_error(parameter: Tensor) -> RuntimeError:
    """Return the error of a released parameter that is saved or pickled."""
    return RuntimeError(
        f"{_name([parameter])} is saved or pickled, but stage 3 of ZeRO has released it and it would be NaN: save "
        "engine.module_state_dict(), which every rank calls, or save within triax.zero.gathered(module)"
    )


def _name(value: Any) -> str:
    """Return the name and the shape of the first released parameter, or view of one, in a nest."""
    released = next((leaf for leaf in _flat(value) if isinstance(leaf, _Released)), None)
    if released is None:
        return "a parameter"
    return vars(released).get("triax_name") or f"{layout_of(released).name or 'a parameter'} of {tuple(released.shape)}"


def _error(function: str, args: Any, kwargs: Any) -> RuntimeError:
    return RuntimeError(f"{_name([args, kwargs])} was used by {function}() while {_ADVICE}")


def _flat(value: Any) -> Iterable[Any]:
    if isinstance(value, (tuple, list)):
        for element in value:
            yield from _flat(element)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


def _has_values(result: Any, args: Any) -> bool:
    """Return True if a result contains a tensor of numbers, of integers only if they were made from released ones."""
    tensors = [leaf for leaf in _flat(result) if isinstance(leaf, Tensor)]
    if any(leaf.is_floating_point() or leaf.is_complex() for leaf in tensors):
        return True
    integers = any(isinstance(leaf, _Released) and not leaf.is_floating_point() for leaf in _flat(args))
    return integers and any(leaf.dtype != torch.bool for leaf in tensors)
