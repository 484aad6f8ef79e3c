"""Values of tensors on the meta device: known where they are small and follow from numbers, else a stand-in.

A meta tensor has a shape and no values. ``MetaValues`` keeps the values of small tensors that a program makes of
numbers (flags, counts), and computes with them. Where a program reads a value that is not known (``loss.item()``), it
gets a stand-in that the user may set, and the place is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...base.torch_private import flash_cpu, without_dispatch_modes
from .places import user_place

_SMALL = 4096  # elements of the largest tensor whose values are kept
_VALUES = "_triax_dry_values"
_FACTORIES = frozenset(
    ("tensor", "as_tensor", "zeros", "ones", "full", "arange", "zeros_like", "ones_like", "full_like")
)
# Functions that return memory as it happens to be. In a dry run no exchange fills it.
_UNFILLED = frozenset(
    ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted", "new")
)
_READERS = frozenset(("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__complex__", "is_nonzero"))
_COPIES = frozenset(("numpy", "__array__"))
# Tests of elements: the answer for a tensor without known values.
_TESTS = {"isnan": False, "isinf": False, "isneginf": False, "isposinf": False, "isfinite": True}
_COMPARISONS = frozenset(
    ("eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
)
_OF_TESTS = frozenset(("any", "all", "logical_not", "logical_and", "logical_or", "__invert__", "__and__", "__or__"))
_ASKED = _COMPARISONS | _OF_TESTS | frozenset(_TESTS)

# Functions of torch that are given a tensor's device: there is no autocast for the meta device.
OF_AUTOCAST = ("autocast", "is_autocast_enabled", "get_autocast_dtype")


def without_meta(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of autocast that takes the meta device for a CPU, because torch has no autocast for it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple("cpu" if each == "meta" else each for each in args)
        return function(*args, **{key: "cpu" if each == "meta" else each for key, each in kwargs.items()})

    return call


def known(tensor: Tensor) -> Tensor | None:
    """Return the values of a tensor: itself on a CPU, what is known of a meta tensor, else None.

    In a tensor of floating point a nan stands for a value that is not known.
    """
    return getattr(tensor, _VALUES, None) if tensor.is_meta else tensor


@without_dispatch_modes()
def set_known(tensor: Tensor, values: Tensor | None) -> None:
    """Set the values of a meta tensor, or forget them; write them into a tensor of the CPU.

    A view of a meta tensor shares its values, which are therefore written in place.
    """
    with torch.no_grad():
        if not tensor.is_meta:
            if values is not None:
                tensor.copy_(values.view(tensor.shape))
            return
        before = getattr(tensor, _VALUES, None)
        if values is None:
            if before is not None:
                if before.is_floating_point():
                    before.fill_(float("nan"))
                delattr(tensor, _VALUES)
        elif before is not None and before.shape == tensor.shape and 0 not in before.stride():
            before.copy_(values.view(tensor.shape))
        else:
            setattr(tensor, _VALUES, values.detach().view(tensor.shape).clone())


class MetaValues(TorchFunctionMode):
    """Mode in which small meta tensors have values, and reads of other values give a stand-in.

    It also runs on the meta device what a script asks of a GPU, and moves tensors of the CPU there where a function
    is given both. Modes of dispatch see what the program computes, and not how this mode computes values.

    Args:
        stand_in: the value of a number that is not known.

    Attributes:
        asked: place in the script -> (name of the function, value given), of values that were not known.
        mixed: places in the script at which a function was given tensors of the CPU and of the rank's device.
    """

    def __init__(self, stand_in: float) -> None:
        super().__init__()
        self.stand_in = stand_in
        self.asked: dict[str, tuple[str, str]] = {}
        self.mixed: dict[str, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function of torch."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        first: Any = args[0] if args else None
        if isinstance(first, Tensor) and first.is_meta:
            if name in _READERS:
                return self._read(name, first, args)
            if name in _COPIES:
                return self._on_cpu(name, first).numpy()
            if name == "__format__":
                return format(self._read("item", first, (first,)), args[1]) if not first.dim() else repr(first)
            if name in ("to", "cuda", "cpu"):
                return self._to(func, name, first, args[1:], kwargs)
        elif name in ("to", "cuda"):
            return self._to(func, name, first, args[1:], kwargs)
        if name == "scaled_dot_product_attention" and (found := _attention(*args, **kwargs)) is not None:
            return found
        if name == "rms_norm" and (found := _rms_norm(*args, **kwargs)) is not None:
            return found
        if name.startswith("_fused_") and args[0] and args[0][0].is_meta:
            return None  # an optimizer's kernel, which has no result
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = "meta"
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            result = self._retry(func, name, args, kwargs, error)
        if name in _UNFILLED and isinstance(result, Tensor):
            return result if result.is_meta else _zeroed(result)
        if type(result) is Tensor and result.is_meta:
            if result.dtype == torch.bool and name in _ASKED:
                self._follow_test(func, name, args, kwargs, result)
            elif result.numel() <= _SMALL:
                self._follow(func, name, args, kwargs, result)
        elif name == "__setitem__":
            self._write(func, name, args, kwargs)
        return result

    def _read(self, name: str, tensor: Tensor, args: Any) -> Any:
        """Return what ``tensor.item()``, ``tolist()``, ``bool(tensor)`` and the like return."""
        values = self._on_cpu(name, tensor)
        return values.tolist() if name == "tolist" else getattr(values, name, values.item)(*args[1:])

    @without_dispatch_modes()
    def _on_cpu(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor of the CPU with the known values, and the stand-in for the others.

        A large one is a view of one element.
        """
        values, small = getattr(tensor, _VALUES, None), tensor.numel() <= _SMALL
        if values is not None and not (values.is_floating_point() and bool(values.isnan().any())):
            values = torch.broadcast_to(values.detach(), tensor.shape)
            return values.clone() if small else values
        stand_in = bool(self.stand_in) if tensor.dtype == torch.bool else self.stand_in
        filled = torch.full(tensor.shape if small else (1,) * tensor.dim(), stand_in, dtype=tensor.dtype)
        filled = filled.expand(tensor.shape)
        if values is not None:
            filled = torch.where(values.isnan(), filled, values.detach())
        place = user_place()
        if place is not None:
            self.asked.setdefault(place, (name.strip("_"), str(stand_in)))
        return filled

    def _to(self, func: Any, name: str, tensor: Tensor, args: Any, kwargs: Any) -> Any:
        """Run ``tensor.to``, ``tensor.cuda`` or ``tensor.cpu``. A copy of a large tensor is on the meta device too."""
        if name in ("cuda", "cpu"):
            func, args, kwargs = torch.Tensor.to, ("meta" if name == "cuda" else "cpu",), {}
        args = tuple("meta" if _is_gpu(each) else each for each in args)
        kwargs = {key: "meta" if key == "device" and _is_gpu(each) else each for key, each in kwargs.items()}
        wanted = [*args[:1], kwargs.get("device")]
        to_cpu = any(isinstance(each, (str, torch.device)) and torch.device(each).type == "cpu" for each in wanted)
        if tensor.is_meta and to_cpu:
            dtype = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.dtype)), tensor.dtype)
            if tensor.numel() <= _SMALL:
                return self._on_cpu(name, tensor).to(dtype)
            return self._moved(tensor, torch.Tensor.to, ("meta", dtype), {"copy": True})
        return self._moved(tensor, func, args, kwargs)

    def _moved(self, tensor: Tensor, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(tensor, *args, **kwargs)
        if result is not tensor and result.is_meta:
            values = known(tensor)
            if values is not None and values.numel() <= _SMALL:
                setattr(result, _VALUES, values.detach().to(result.dtype).clone())
        return result

    def _retry(self, func: Any, name: str, args: Any, kwargs: Any, error: Exception) -> Any:
        """Run a function again, with its tensors of the CPU moved to the meta device.

        Raises:
            Exception: the function's own error, if that does not help.
        """
        tensors = list(_tensors((args, tuple(kwargs.values()))))
        devices = {tensor.device.type for tensor in tensors}
        if devices != {"cpu", "meta"}:
            raise error
        place = user_place()
        if place is not None:
            self.mixed.setdefault(place, name)
        move = _mapper(lambda tensor: tensor if tensor.is_meta else tensor.to("meta"))
        return func(*move(args), **{key: move(each) for key, each in kwargs.items()})

    @without_dispatch_modes()
    def _follow(self, func: Any, name: str, args: Any, kwargs: Any, result: Tensor) -> None:
        """Compute the values of a small result, if they follow from known values."""
        if name in _FACTORIES and not any(True for _ in _tensors(args)):
            set_known(result, func(*args, **{**kwargs, "device": "cpu"}).detach())
            return
        if args and result is args[0]:
            self._write(func, name, args, kwargs)
            return
        if result is kwargs.get("out"):
            set_known(result, None)
            kwargs = {key: each for key, each in kwargs.items() if key != "out"}
        if getattr(result, _VALUES, None) is not None:
            return
        if self._any_known(args):
            self._compute(func, args, kwargs, result)

    @without_dispatch_modes()
    def _follow_test(self, func: Any, name: str, args: Any, kwargs: Any, result: Tensor) -> None:
        """Answer a comparison or a test: with known values, or with the stand-in for all elements.

        A large tensor is uniform then, and its values have the length 1 in every dim.
        """
        small = result.numel() <= _SMALL
        if name in _TESTS and known(args[0]) is None:
            found = torch.full((1,) * result.dim(), _TESTS[name])
        else:
            try:
                with torch.no_grad():
                    found = func(*_mapper(self._filled)(args), **kwargs)
            except (RuntimeError, TypeError, IndexError):
                return
        if small or found.numel() == 1:
            found = torch.broadcast_to(found, result.shape) if small else found.reshape((1,) * result.dim())
            setattr(result, _VALUES, found.clone())

    def _filled(self, tensor: Tensor) -> Tensor:
        values = known(tensor)
        if values is not None and not (values.is_floating_point() and bool(values.isnan().any())):
            return values
        stand_in = bool(self.stand_in) if tensor.dtype == torch.bool else self.stand_in
        shape = tensor.shape if tensor.numel() <= _SMALL else (1,) * tensor.dim()
        return torch.full(shape, stand_in, dtype=tensor.dtype)

    @without_dispatch_modes()
    def _write(self, func: Any, name: str, args: Any, kwargs: Any) -> None:
        """Follow a function that writes its first argument: ``x[0] = 1``, ``x.add_(y)``."""
        target = args[0]
        if not target.is_meta:
            return
        values = getattr(target, _VALUES, None)
        if values is None and name in ("zero_", "fill_", "copy_") and target.numel() <= _SMALL:
            values = torch.full(target.shape, 0, dtype=target.dtype)
        if values is None:
            return
        if name.startswith("resize"):  # what it adds has no values
            set_known(target, None)
            return
        rest = (args[1:], tuple(kwargs.values()))
        if all(known(tensor) is not None for tensor in _tensors(rest)):
            of_values = _mapper(lambda tensor: known(tensor))
            try:
                with torch.no_grad():
                    func(values, *of_values(args[1:]), **{key: of_values(each) for key, each in kwargs.items()})
                setattr(target, _VALUES, values)
                return
            except (RuntimeError, TypeError, IndexError):
                pass
        if values.is_floating_point():
            values.fill_(float("nan"))
        else:
            set_known(target, None)

    def _compute(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> None:
        tensors = list(_tensors((args, tuple(kwargs.values()))))
        if not all(known(tensor) is not None or self._may_be_nan(tensor, result) for tensor in tensors):
            return
        replace = _mapper(self._values_or_nan)
        try:
            with torch.no_grad():
                found = func(*replace(args), **{k: "cpu" if k == "device" else replace(v) for k, v in kwargs.items()})
        except (RuntimeError, TypeError, IndexError):
            return
        if type(found) is Tensor and found.shape == result.shape and found.dtype == result.dtype:
            set_known(result, found)
            if any(_share(found, known(tensor)) for tensor in tensors):
                setattr(result, _VALUES, found)  # a view: what is written to the tensor later is seen here too

    def _may_be_nan(self, tensor: Tensor, result: Tensor) -> bool:
        return tensor.numel() <= _SMALL and tensor.is_floating_point() and result.is_floating_point()

    def _values_or_nan(self, tensor: Tensor) -> Tensor:
        values = known(tensor)
        return torch.full(tensor.shape, float("nan"), dtype=tensor.dtype) if values is None else values.detach()

    def _any_known(self, args: Any) -> bool:
        return any(tensor.is_meta and hasattr(tensor, _VALUES) for tensor in _tensors(args))


def _share(view: Tensor, values: Tensor | None) -> bool:
    return values is not None and view.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Run attention as torch's fused kernels do, which keep no probabilities; None if they would not be used.

    Without this, torch runs separate products on the meta device.
    """
    fits = query.is_meta and query.dim() == 4 and query.shape[-1] == key.shape[-1] == value.shape[-1]
    if not fits or dropout_p or query.numel() == 0 or key.numel() == 0:
        return None
    if attn_mask is not None:
        if attn_mask.requires_grad:
            return None
        attn_mask = attn_mask.to("meta")
        attn_mask = attn_mask.to(query.dtype) if attn_mask.dtype == torch.bool else attn_mask
    fused = flash_cpu
    output: Tensor = fused(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return output


class _FusedRMSNorm(torch.autograd.Function):
    """RMSNorm on the meta device, of which a backward pass needs what torch's kernel for GPUs keeps.

    It keeps the input, the weight, and one number of each row, in fp32 at least.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        """Keep what the backward pass needs: (...) -> (...)."""
        shape = x.shape[: x.dim() - dims]
        ctx.save_for_backward(x, weight, x.new_empty(shape, dtype=torch.promote_types(x.dtype, torch.float32)))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Return gradients without values."""
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


def _rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor | None:
    """Run RMSNorm as torch's fused kernel does; None if it would not be used.

    Without this, torch runs separate products on the meta device, which keep x twice in fp32.
    """
    if not x.is_meta or (weight is not None and weight.dtype != x.dtype):
        return None
    found: Tensor = _FusedRMSNorm.apply(x, weight, len(shape))
    return found


def _zeroed(tensor: Tensor) -> Tensor:
    """Fill new memory of the CPU with zeros, so that what no exchange fills is equal in every dry run."""
    with torch.no_grad():
        return tensor.zero_()


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nest of tuples and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)


def _mapper(function: Callable[[Tensor], Any]) -> Callable[[Any], Any]:
    """Return a function that replaces the tensors in a nest of tuples and lists."""

    def of(value: Any) -> Any:
        if isinstance(value, Tensor):
            return function(value)
        if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
            return type(value)(of(each) for each in value)
        return value

    return of


def _is_gpu(device: Any) -> bool:
    """Return True if a device is a GPU."""
    if isinstance(device, int) and not isinstance(device, bool):
        return False
    return isinstance(device, (str, torch.device)) and str(device).partition(":")[0] in ("cuda", "xpu", "hpu", "npu")
