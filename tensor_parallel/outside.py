"""Weights of sharded layers in the hands of other code: a shard refuses to be taken for the whole weight.

A loss with a fused output layer multiplies by ``lm_head.weight``, others look ids up in ``embedding.weight``. From a
shard they would compute other numbers, without an error. So the first code outside of triax that reads a sharded
layer's ``weight`` turns the parameter, in place, into a ``ShardedWeight``, which refuses such operations. The layers
themselves, optimizers and engines read the plain parameter and pay nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ..base.torch_private import without_subclasses
from ..base.uncompiled import uncompiled
from ..grid.comm.axis import Axis
from ..grid.layout import Layout, layout_of

# Operations that combine the rows or the columns of a weight, or look them up.
_PRODUCTS = {
    *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "vdot", "inner", "outer", "einsum", "tensordot"),
    *("addmm", "addmm_", "addmv", "addbmm", "baddbmm", "chain_matmul", "multi_dot", "linear", "bilinear", "kron"),
    *("embedding", "embedding_bag", "index_select", "gather", "take", "take_along_dim", "cosine_similarity", "cdist"),
    *("cat", "concat", "concatenate", "vstack", "hstack", "cov", "corrcoef", "svd", "qr", "inverse", "pinverse"),
    *("matrix_exp", "matrix_power", "cholesky", "det", "logdet"),
    *("__setitem__", "index_fill_", "index_copy_", "index_add_", "scatter_", "index_put_"),  # rows by their numbers
}
_REDUCTIONS = {
    *("sum", "nansum", "mean", "nanmean", "norm", "var", "std", "var_mean", "std_mean", "prod", "median", "nanmedian"),
    *("max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "mode", "quantile", "nanquantile", "count_nonzero"),
    *("softmax", "log_softmax", "logsumexp", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "renorm"),
    *("sort", "argsort", "topk", "kthvalue", "unique", "histc", "bincount", "_foreach_norm", "_foreach_max"),
}
_VIEWS = {  # operations whose result is the shard in another form, or a part of it
    *("t", "T", "mT", "H", "mH", "transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "adjoint"),
    *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel", "unsqueeze", "squeeze", "expand"),
    *(
        "expand_as",
        "__getitem__",
        "__iter__",
        "narrow",
        "select",
        "split",
        "chunk",
        "tensor_split",
        "unbind",
        "diagonal",
    ),
}
_VALUES = {"numpy", "__array__", "tolist"}
_NO_VALUES = {"grad", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "requires_grad"}
# Modules of torch that read parameters for a purpose of their own. Other code of torch only runs what its caller asks.
_OWN_ACCORD = (
    *("torch.optim", "torch.distributed", "torch.amp", "torch.serialization", "torch._tensor_str", "torch.nn.init"),
    *("torch.nn.modules.module", "torch.nn.utils.clip_grad"),
)
_CALLS = ("_call_impl", "_wrapped_call_impl", "inner")  # of torch.nn.modules.module, for the caller of a module

_REASON = "other code reads the weight of a layer sharded by triax: give it layer.full_weight() instead"
_HERE = (__name__, uncompiled.__module__)  # modules whose frames lie between an operation and its caller


class ReadOutside(nn.Module):
    """Base class of layers with a sharded ``weight`` that other code may read."""

    axis: Axis
    _forward_elsewhere = False  # True for a class whose forward pass may be other code's, which knows the weight

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._forward_elsewhere = cls.__module__.partition(".")[0] != __name__.partition(".")[0]

    def _read(self) -> nn.Parameter:
        """Return the weight; turn it into a ``ShardedWeight`` if code outside of triax and of the layer reads it."""
        if torch.compiler.is_compiling():  # where no frame can be seen; triax's own layers read ``_shard``
            known: Any = self._parameters["weight"] if self._forward_elsewhere else self._read_uncompiled()
            return known
        weight = self._parameters.get("weight")
        if weight is None and "weight" in vars(self):  # in 4 or 8 bits: quantized.py
            computed: nn.Parameter = vars(self)["weight"]
            return computed
        if weight is None:  # not registered yet
            raise AttributeError(f"{type(self).__name__} has no weight")
        if type(weight) is nn.Parameter and self.axis.size > 1:
            reader = _asking() or sys._getframe()
            foreign = _package(reader) != _package(sys._getframe()) and reader.f_locals.get("self") is not self
            if foreign and layout_of(weight).sharded:
                weight.__class__ = ShardedWeight
        return weight

    @partial(uncompiled, reason=_REASON)
    def _read_uncompiled(self) -> nn.Parameter:
        return self._read()

    @property
    def _shard(self) -> Tensor:
        """The weight, with which the layer's own forward pass computes."""
        weight: Any = self._parameters.get("weight")
        if weight is None:  # it is computed from numbers of 4 or 8 bits
            weight = self.weight
        assert isinstance(weight, Tensor)
        return _plain(weight) if type(weight) is ShardedWeight else weight  # stage 3's keeps its errors

    weight: Any = property(_read)

    def full_weight(self) -> Tensor:
        """Gather the whole weight on every rank of the axis, differentiably. Collective over the axis.

        Every rank must compute the same from it: the weight's gradient is this rank's slice of the whole gradient.
        """
        return _gathered(self._parameters.get("weight", self._shard), self.axis)

    def full_bias(self) -> Tensor | None:
        """Gather the whole bias, as ``full_weight`` gathers the weight; None for a layer without a bias."""
        bias = self._parameters.get("bias")
        return None if bias is None else _gathered(bias, self.axis)


def _plain(weight: Tensor) -> Tensor:
    """Return a parameter as a plain tensor, whose gradient is the parameter's."""
    with without_subclasses():
        return weight.as_subclass(Tensor)


def _gathered(parameter: Tensor | None, axis: Axis) -> Tensor:
    assert parameter is not None
    gathered: Tensor = _Whole.apply(parameter, layout_of(parameter), axis)
    return gathered


class _Whole(torch.autograd.Function):
    """Autograd function that gathers a sharded parameter; backward, this rank's slice of the whole gradient."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, layout: Layout, axis: Axis) -> Tensor:
        ctx.layout, ctx.axis = layout, axis
        gathered = layout.gather(axis, shard.detach())
        return gathered.clone() if gathered.data_ptr() == shard.data_ptr() else gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.layout.shard(grads[0], ctx.axis.rank, ctx.axis.size), None, None


class _Shard(Tensor):
    """Tensor with a rank's part of a weight, which refuses operations that need the whole weight.

    What an operation makes of it element by element is such a part too.
    """

    triax_shard_of: nn.Parameter  # for a parameter, itself
    triax_cut = False  # True for a view, whose dims need not be the parameter's

    @classmethod
    @partial(uncompiled, reason=_REASON)  # so that frames can be seen
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse an operation of other code that needs the whole weight, and run any other one."""
        kwargs = kwargs or {}
        with without_subclasses():
            shards = _shards(args, kwargs)
            if not shards or not _foreign(shards):
                return func(*args, **kwargs)
            name = _name(func)
            if _needs_whole(name, shards, args, kwargs):
                raise _refused(name, shards[0])
            result = func(*args, **kwargs)
            if name == "detach" and _caller() == "torch.nn.parameter":
                result.__class__ = type(shards[0])  # as nn.Parameter(shard) requires
                vars(result).update(vars(shards[0]))
            elif name not in _NO_VALUES and not name.startswith("new_"):
                _mark(name, result, shards)
            return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor."""
        with without_subclasses():
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
            with without_subclasses():
                copied = nn.Parameter(self.detach().as_subclass(Tensor).clone(), self.requires_grad)
            vars(copied).update(vars(self))
            memo[id(self)] = copied
        remembered: nn.Parameter = memo[id(self)]
        return remembered

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain parameter."""
        with without_subclasses():
            return nn.Parameter.__reduce_ex__(self, protocol)


def _shards(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[_Shard]:
    return [value for value in _flat((*args, *kwargs.values())) if isinstance(value, _Shard)]


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


def _caller() -> str:
    """Return the name of the module that calls an operation."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith((*_HERE, "torch._dynamo")):
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


def _asking() -> FrameType | None:
    """Return the frame of the code that asks for an operation, behind the code of torch that runs it for that."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        accord = name.startswith(_OWN_ACCORD) and frame.f_code.co_name not in _CALLS
        if name not in _HERE and (accord or name.partition(".")[0] != "torch"):
            break
        frame = frame.f_back
    return frame


def _foreign(shards: Sequence[_Shard]) -> bool:
    """True if the code that asks for the operation is neither torch's, nor triax's, nor the layer's own."""
    frame = _asking()
    if frame is None or _package(frame) in ("torch", _package(sys._getframe())):
        return False
    layer = frame.f_locals.get("self")
    own = layer._parameters.values() if isinstance(layer, ReadOutside) else ()
    return not any(_parameter(shard) is parameter for parameter in own for shard in shards)


def _needs_whole(name: str, shards: Sequence[_Shard], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if an operation needs the whole weight, by its name and arguments."""
    shard = shards[0]
    if name in _PRODUCTS or name in _VALUES or (name.startswith("linalg_") and not name.endswith("norm")):
        return True
    if name.endswith("_") and not name.endswith("__") and args and args[0] is shard:  # writes rows by their numbers
        return shard.triax_cut and shard.numel() < _parameter(shard).numel()
    if name == "__getitem__":
        by_tensor = any(isinstance(value, Tensor) and not isinstance(value, _Shard) for value in _flat(args[1:]))
        return by_tensor or isinstance(args[1], list)
    if name in _REDUCTIONS or name.startswith("linalg_"):
        dim_argument = 2 if name in ("norm", "linalg_norm", "linalg_vector_norm", "topk", "kthvalue", "quantile") else 1
        given = kwargs.get("dim", args[dim_argument] if len(args) > dim_argument else None)
        dims = [dim % max(shard.dim(), 1) for dim in _flat((given,)) if type(dim) is int]
        return not dims or shard.triax_cut or layout_of(_parameter(shard)).shard_dim in dims
    return False


def _mark(name: str, found: Any, shards: Sequence[_Shard]) -> None:
    """Mark what an operation has made of shards.

    Raises:
        RuntimeError: it is neither a shard in another form, nor made of one element by element.
    """
    shapes = {shard.shape for shard in shards}
    cut = name in _VIEWS or name in _REDUCTIONS or any(shard.triax_cut for shard in shards)
    for value in _flat((found,)):
        if type(value) is not Tensor or not (value.is_floating_point() or value.is_complex()):
            continue
        if not (name in _VIEWS or name in _REDUCTIONS or name.startswith("linalg_") or value.shape in shapes):
            if name.startswith("_foreach_"):  # of another tensor of the list
                continue
            raise _refused(name, shards[0])
        if value.dim():
            marked: Any = value
            marked.__class__, marked.triax_shard_of, marked.triax_cut = _Shard, _parameter(shards[0]), cut


def _refused(name: str, shard: _Shard) -> RuntimeError:
    parameter = _parameter(shard)
    layout = layout_of(parameter)
    layer = layout.name.removesuffix(".weight") or "layer"
    return RuntimeError(
        f"{name.strip('_')} outside of the layer takes {layout.name or 'the weight'} for the whole weight "
        f"{layout.shape}, but it is this rank's shard {tuple(parameter.shape)} of it. Call the layer, or "
        f"take model.get_submodule({layer!r}).full_weight(), on every rank of the tensor axis."
    )
