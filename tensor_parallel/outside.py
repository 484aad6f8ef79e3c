"""Weights of sharded layers in the hands of other code: a shard refuses to be taken for the whole weight.

A loss with a fused output layer multiplies by ``lm_head.weight``, others look ids up in ``embedding.weight``. From a
shard they would compute other numbers, without an error. So the first code outside of triax that reads a sharded
layer's ``weight`` turns the parameter, in place, into a ``ShardedWeight``, which refuses such operations. The layers
themselves, optimizers and engines read the plain parameter and pay nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ..grid.comm.axis import Axis
from ..grid.layout import Layout, layout_of

# Operations that combine the rows or the columns of a weight, or look them up.
_PRODUCTS = (
    *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "vdot", "inner", "outer", "einsum", "tensordot"),
    *("addmm", "addmm_", "addmv", "addbmm", "baddbmm", "chain_matmul", "multi_dot", "linear", "bilinear", "kron"),
    *("embedding", "embedding_bag", "index_select", "gather", "take", "take_along_dim", "cosine_similarity", "cdist"),
    *("cat", "concat", "concatenate", "vstack", "hstack", "cov", "corrcoef", "svd", "qr"),
)
_REDUCTIONS = ("sum", "mean", "norm", "var", "std", "var_mean", "std_mean", "softmax", "log_softmax", "logsumexp")
_SHARD_STILL = (  # operations whose result is the shard in another form
    *("t", "T", "mT", "H", "transpose", "permute", "swapaxes", "movedim", "contiguous", "view", "reshape", "flatten"),
    *("__getitem__", "narrow", "split", "chunk", "unsqueeze", "squeeze", "expand", "data", "detach", "clone", "to"),
    *("float", "double", "half", "bfloat16", "type", "type_as", "cpu", "cuda", "requires_grad_", "mul", "div"),
)
# Python functions of torch that stand between the code that asks for an operation and ``__torch_function__``.
_BETWEEN = ("torch.overrides", "torch._tensor", "torch.functional", "torch.nn.functional", __name__)


class ReadOutside(nn.Module):
    """Base class of layers with a sharded ``weight`` that other code may read."""

    axis: Axis

    def _read(self) -> nn.Parameter:
        """Return the weight; turn it into a ``ShardedWeight`` if code outside of triax and of the layer reads it."""
        weight = self._parameters.get("weight")
        if weight is None:  # not registered yet
            raise AttributeError(f"{type(self).__name__} has no weight")
        if type(weight) is nn.Parameter and not torch.compiler.is_compiling() and self.axis.size > 1:
            reader = sys._getframe(1)
            foreign = _package(reader) != _package(sys._getframe()) and reader.f_locals.get("self") is not self
            if foreign and layout_of(weight).sharded:
                weight.__class__ = ShardedWeight
        return weight

    weight: Any = property(_read)

    def full_weight(self) -> Tensor:
        """Gather the whole weight on every rank of the axis, differentiably. Collective over the axis.

        Every rank must compute the same from it: the weight's gradient is this rank's slice of the whole gradient.
        """
        return _gathered(self._parameters["weight"], self.axis)

    def full_bias(self) -> Tensor | None:
        """Gather the whole bias, as ``full_weight`` gathers the weight; None for a layer without a bias."""
        bias = self._parameters.get("bias")
        return None if bias is None else _gathered(bias, self.axis)


def _gathered(parameter: Tensor | None, axis: Axis) -> Tensor:
    assert parameter is not None
    whole: Tensor = _Whole.apply(parameter, layout_of(parameter), axis)
    return whole


class _Whole(torch.autograd.Function):
    """Autograd function that gathers a sharded parameter; backward, this rank's slice of the whole gradient."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, layout: Layout, axis: Axis) -> Tensor:
        ctx.layout, ctx.axis = layout, axis
        whole = layout.gather(axis, shard.detach())
        return whole.clone() if whole.data_ptr() == shard.data_ptr() else whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.layout.shard(grads[0], ctx.axis.rank, ctx.axis.size), None, None


class _Shard(Tensor):
    """Tensor with a rank's part of a weight, which refuses operations that need the whole weight."""

    triax_shard_of: nn.Parameter  # for a parameter, itself

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse an operation of foreign code that needs the whole weight, and run any other one."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            shards = [] if torch.compiler.is_compiling() else _shards(args, kwargs)
            foreign = bool(shards) and _foreign(shards)
            name = _name(func)
            if foreign:
                _check(name, shards, args, kwargs)
            found = func(*args, **kwargs)
            if foreign and name in _SHARD_STILL:
                for each in found if isinstance(found, (tuple, list)) else (found,):
                    if type(each) is Tensor and each.dim() > 1 and each.is_floating_point():
                        shard: Any = each
                        shard.__class__, shard.triax_shard_of = _Shard, _parameter(shards[0])
            return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().as_subclass(Tensor).__reduce_ex__(protocol)


class ShardedWeight(_Shard, nn.Parameter):
    """Parameter of a sharded layer, this rank's part, that code outside of the layer has read.

    Raises:
        RuntimeError: code outside of triax and of the layer multiplies by it, looks rows up in it or reduces it, as if
            it were the whole weight.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Copy as a plain parameter is copied, with its layout."""
        if id(self) not in memo:
            with torch._C.DisableTorchFunctionSubclass():
                copied = nn.Parameter(self.detach().as_subclass(Tensor).clone(), self.requires_grad)
            vars(copied).update(vars(self))
            memo[id(self)] = copied
        found: nn.Parameter = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain parameter."""
        with torch._C.DisableTorchFunctionSubclass():
            return nn.Parameter.__reduce_ex__(self, protocol)


def _shards(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[_Shard]:
    return [each for each in _flat((*args, *kwargs.values())) if isinstance(each, _Shard)]


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flat(value)
        else:
            yield value


def _name(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name  # type: ignore[attr-defined]


def _parameter(shard: _Shard) -> nn.Parameter:
    return shard if isinstance(shard, ShardedWeight) else shard.triax_shard_of


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _foreign(shards: Sequence[_Shard]) -> bool:
    """True if the code that asks for the operation is neither torch's, nor triax's, nor the layer's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back
    if frame is None or _package(frame) in ("torch", _package(sys._getframe())):
        return False
    layer = frame.f_locals.get("self")
    own = layer._parameters.values() if isinstance(layer, ReadOutside) else ()
    return not any(_parameter(shard) is each for each in own for shard in shards)


def _check(name: str, shards: Sequence[_Shard], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    shard = shards[0]
    layout, whole = layout_of(_parameter(shard)), False
    if name in _PRODUCTS or name.startswith("linalg_"):
        whole = True
    elif name == "__getitem__":
        whole = any(isinstance(each, (Tensor, list)) and not isinstance(each, _Shard) for each in _flat(args[1:]))
        whole = whole or isinstance(args[1], list)
    elif name in _REDUCTIONS:
        given = kwargs.get("dim", args[2] if name == "norm" and len(args) > 2 else None)
        if given is None and name != "norm" and len(args) > 1:
            given = args[1]
        dims = [each % shard.dim() for each in _flat((given,)) if isinstance(each, int)]
        whole = not dims or (shard.shape == _parameter(shard).shape and layout.shard_dim in dims)
    if whole:
        layer = layout.name.removesuffix(".weight") or "layer"
        raise RuntimeError(
            f"{name.strip('_')} outside of the layer takes {layout.name or 'the weight'} for the whole weight "
            f"{layout.shape}, but it is this rank's shard {tuple(_parameter(shard).shape)} of it. Call the layer, or "
            f"take model.get_submodule({layer!r}).full_weight(), on every rank of the tensor axis."
        )
