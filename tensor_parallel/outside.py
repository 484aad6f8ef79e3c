"""Weights of sharded layers in the hands of other code: a shard refuses to be taken for the whole weight.

A loss with a fused output layer multiplies by ``lm_head.weight``, others look ids up in ``embedding.weight``. From a
shard they would compute other numbers, without an error.

    nn.Parameter                          of the layer; triax, optimizers and engines read it and pay nothing
      | other code reads layer.weight     ReadOutside.weight, by the frames of the stack (callers.py)
      v
    ShardedWeight                         the same object, in place
      | other code runs an operation      ShardOfWeight.__torch_function__, by the rules of shard_operations.py
      |-- needs the whole weight          RuntimeError
      |-- element by element              ShardOfWeight, which refuses likewise
      |-- a view, some rows               ShardOfWeight with ``triax_cut``: its dims need not be the weight's
      v
    triax, torch and the layer itself run operations on it as on a plain parameter
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..base.torch_private import without_subclasses
from ..base.uncompiled import uncompiled
from ..grid.comm.axis import Axis
from ..grid.layout import Layout, layout_of
from .callers import PACKAGE, asking_frame, calling_module, package_of
from .shard_operations import (
    ShardFacts,
    flattened,
    keeps_numbers,
    makes_part,
    needs_whole,
    operation_name,
)

_REASON = "other code reads the weight of a layer sharded by triax: give it layer.full_weight() instead"


class ReadOutside(nn.Module):
    """Base class of layers with a sharded ``weight`` that other code may read."""

    axis: Axis
    _forward_elsewhere = False  # True for a class whose forward pass may be other code's, which knows the weight

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._forward_elsewhere = cls.__module__.partition(".")[0] != PACKAGE

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
        if (
            type(weight) is nn.Parameter
            and self.axis.size > 1
            and self._is_read_outside()
            and layout_of(weight).sharded
        ):
            weight.__class__ = ShardedWeight
        return weight

    def _is_read_outside(self) -> bool:
        """Return True if the code that reads the weight is neither triax's nor this layer's."""
        reader = asking_frame() or sys._getframe()
        return package_of(reader) != PACKAGE and reader.f_locals.get("self") is not self

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
    gathered: Tensor = _GatheredWeight.apply(parameter, layout_of(parameter), axis)
    return gathered


class _GatheredWeight(torch.autograd.Function):
    """Autograd function that gathers a sharded parameter; backward, this rank's slice of the whole gradient."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, layout: Layout, axis: Axis) -> Tensor:
        ctx.layout, ctx.axis = layout, axis
        gathered = layout.gather(axis, shard.detach())
        return gathered.clone() if gathered.data_ptr() == shard.data_ptr() else gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.layout.shard(grads[0], ctx.axis.rank, ctx.axis.size), None, None


class ShardOfWeight(Tensor):
    """Tensor with a rank's part of a weight, which refuses operations that need the whole weight.

    What an operation makes of it element by element is such a part too.
    """

    triax_shard_of: nn.Parameter  # of a result; a parameter has none
    triax_cut = False  # True for a view, whose dims need not be the parameter's

    @classmethod
    @partial(uncompiled, reason=_REASON)  # so that frames can be seen
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse an operation of other code that needs the whole weight, and run any other one."""
        kwargs = kwargs or {}
        with without_subclasses():
            shards = [value for value in flattened((*args, *kwargs.values())) if isinstance(value, ShardOfWeight)]
            if not shards or not _asked_outside(shards):
                return func(*args, **kwargs)
            name, first = operation_name(func), shards[0]
            if needs_whole(name, first.facts(), args, kwargs):
                raise _refused(name, first)
            result = func(*args, **kwargs)
            if name == "detach" and calling_module() == "torch.nn.parameter":
                result.__class__ = type(first)  # as nn.Parameter(shard) requires
                vars(result).update(vars(first))
            elif keeps_numbers(name):
                _mark(name, result, shards)
            return result

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter from which this tensor is made."""
        return self if isinstance(self, ShardedWeight) else self.triax_shard_of

    def facts(self) -> ShardFacts:
        """Return what decides about an operation."""
        parameter = self.parameter
        return ShardFacts(self, self.triax_cut, layout_of(parameter).shard_dim, parameter.numel())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor."""
        with without_subclasses():
            return self.detach().as_subclass(Tensor).__reduce_ex__(protocol)


class ShardedWeight(ShardOfWeight, nn.Parameter):
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


def _asked_outside(shards: Sequence[ShardOfWeight]) -> bool:
    """Return True if the code that asks for an operation is neither torch's, nor triax's, nor the layer's own."""
    frame = asking_frame()
    if frame is None or package_of(frame) in ("torch", PACKAGE):
        return False
    layer = frame.f_locals.get("self")
    own = layer._parameters.values() if isinstance(layer, ReadOutside) else ()
    return not any(shard.parameter is parameter for parameter in own for shard in shards)


def _mark(name: str, result: Any, shards: Sequence[ShardOfWeight]) -> None:
    """Mark the result of an operation on shards as a shard.

    Raises:
        RuntimeError: it is neither a shard in another form, nor made of one element by element.
    """
    shapes = {shard.shape for shard in shards}
    cut = makes_part(name) or any(shard.triax_cut for shard in shards)
    for value in flattened((result,)):
        if type(value) is not Tensor or not (value.is_floating_point() or value.is_complex()):
            continue
        if not makes_part(name) and value.shape not in shapes:
            if name.startswith("_foreach_"):  # of another tensor of the list
                continue
            raise _refused(name, shards[0])
        if value.dim():
            marked: Any = value
            marked.__class__, marked.triax_shard_of, marked.triax_cut = ShardOfWeight, shards[0].parameter, cut


def _refused(name: str, shard: ShardOfWeight) -> RuntimeError:
    parameter = shard.parameter
    layout = layout_of(parameter)
    layer = layout.name.removesuffix(".weight") or "layer"
    return RuntimeError(
        f"{name.strip('_')} outside of the layer takes {layout.name or 'the weight'} for the whole weight "
        f"{layout.shape}, but it is this rank's shard {tuple(parameter.shape)} of it. Call the layer, or "
        f"take model.get_submodule({layer!r}).full_weight(), on every rank of the tensor axis."
    )
