"""LayerSpec, TiedLayerSpec: descriptions of layers, so that each rank builds only the layers that it runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn

from ..grid import Grid
from ..grid.layout import require_plain


class LayerSpec:
    """Description of a layer, which the rank that runs it builds: ``LayerSpec(nn.Linear, 64, 256)``.

    >>> spec = triax.LayerSpec(nn.Linear, 64, 256)
    >>> spec, spec.build().weight.shape
    (LayerSpec(Linear, 64, 256), torch.Size([256, 64]))

    Args:
        cls: the class of the layer, or any callable that returns an ``nn.Module``. If it takes a keyword
            ``grid`` that is not among ``kwargs``, it gets the grid of the ``PipelineModule`` that builds it.
        args, kwargs: arguments of ``cls``.
        takes: fields of a microbatch that the layer gets as keyword arguments beside the output of the layer before:
            ``"labels"``, ``"inputs"``, or a key of inputs that are a dict. The ranks that read the data send them to
            the rank of the layer. They have no gradient, and the layer must not change them in place. (An argument
            ``takes`` of ``cls`` itself is given by ``functools.partial(cls, takes=...)``.)
    """

    def __init__(
        self, cls: Callable[..., nn.Module], *args: Any, takes: str | Sequence[str] = (), **kwargs: Any
    ) -> None:
        if not callable(cls) or isinstance(cls, nn.Module):
            raise TypeError(
                f"LayerSpec was given a {type(cls).__name__} instead of a class: write LayerSpec(nn.Linear, 64, 256), "
                "or put a module that is built already into the list as it is"
            )
        made_by: Any = cls
        if isinstance(made_by, partial):  # equal partials are one class with equal arguments
            made_by, args, kwargs = made_by.func, (*made_by.args, *args), {**made_by.keywords, **kwargs}
        self.cls: Callable[..., nn.Module] = made_by
        self.args, self.kwargs = args, kwargs
        self.takes = (takes,) if isinstance(takes, str) else tuple(takes)
        if not all(isinstance(name, str) for name in self.takes):
            raise TypeError(f"{self} was given takes={takes!r}: give names of fields, as takes=('labels',)")

    def build(self, grid: Grid | None = None) -> nn.Module:
        """Build the layer, on the current default device."""
        kwargs = self.kwargs
        if grid is not None and "grid" not in kwargs and _takes_grid(self.cls):
            kwargs = {**kwargs, "grid": grid}
        layer = self.cls(*self.args, **kwargs)
        if not isinstance(layer, nn.Module):
            raise TypeError(f"{self} made a {type(layer).__name__}: give a class or function that makes an nn.Module")
        require_plain(chain(layer.named_parameters(), layer.named_buffers()), str(self))
        return layer

    @property
    def typename(self) -> str:
        """Name of the class, which ``partition="type:REGEX"`` matches."""
        return getattr(self.cls, "__name__", type(self.cls).__name__)

    def __repr__(self) -> str:
        words = [self.typename, *map(repr, self.args), *(f"{key}={value!r}" for key, value in self.kwargs.items())]
        words += [f"takes={self.takes}"] if self.takes else []
        return f"{type(self).__name__}({', '.join(words)})"


class TiedLayerSpec(LayerSpec):
    """Description of a layer that shares weights with all specs of the same key, on any rank.

    Specs of one key and one class are one layer with all its parameters: built from the first spec, and run by
    each spec's own ``forward_fn``. Specs of one key and different classes (an embedding and a linear head) are
    different layers that share the parameters named by ``tied_weight_attr``, and no others. Every function (a lambda)
    that is given as ``cls`` counts as a class of its own.

    >>> embedding = triax.TiedLayerSpec("table", nn.Embedding, 10, 4)
    >>> head = triax.TiedLayerSpec("table", nn.Embedding, 10, 4, forward_fn=lambda layer, x: x @ layer.weight.T)
    >>> model = triax.PipelineModule([embedding, head])
    >>> model(torch.tensor([1, 2])).shape, [name for name, _ in model.named_parameters()]
    (torch.Size([2, 10]), ['layers.0.weight'])

    Args:
        key: name of the tie.
        cls, args, kwargs: as in ``LayerSpec``, with ``takes`` of this index of the list.
        forward_fn: called as ``forward_fn(layer, x)`` instead of ``layer(x)`` at this index of the list, with the
            fields that the layer takes as keyword arguments.
        tied_weight_attr: the parameter (or several) that layers of different classes share.
    """

    def __init__(
        self,
        key: str,
        cls: Callable[..., nn.Module],
        *args: Any,
        forward_fn: Callable[..., Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",
        **kwargs: Any,
    ) -> None:
        super().__init__(cls, *args, **kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = (tied_weight_attr,) if isinstance(tied_weight_attr, str) else tuple(tied_weight_attr)


def require_arguments(
    call: Callable[..., Any],
    given: tuple[Any, ...],
    where: str,
    advice: str,
    fields: Mapping[str, Any] | None = None,
) -> None:
    """Check, after a ``TypeError``, that a layer or a loss function takes the arguments that it was given.

    Args:
        call: the layer or function.
        given: its arguments.
        where: its name and place, for the message.
        advice: what to write instead.
        fields: its keyword arguments.

    Raises:
        TypeError: it does not take them; the message describes them.
    """
    target = getattr(call, "forward", call)
    try:
        inspect.signature(target).bind(*given, **(fields or {}))
    except TypeError as error:
        what = ", ".join([*map(_in_words, given), *(f"the field {name}" for name in fields or {})])
        counted = "one argument" if len(given) == 1 else f"{len(given)} arguments"
        raise TypeError(f"{where} was called with {counted}, {what}, but: {error}. {advice}") from error
    except ValueError:
        pass  # no signature: written in C


def _in_words(value: Any) -> str:
    """Describe a nest of tensors by types and shapes."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(map(_in_words, value[:4]))})"
    if isinstance(value, dict):
        return f"a dict of {', '.join(map(repr, list(value)[:8]))}"
    return f"a {type(value).__name__}"


def _takes_grid(cls: Callable[..., Any]) -> bool:
    try:
        return "grid" in inspect.signature(cls).parameters
    except ValueError:
        # Some classes written in C have no signature; none of them takes a grid.
        return False
