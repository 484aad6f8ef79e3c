"""Rules for operations on a shard of a weight: those that need the whole weight, and those whose result is a shard too.

    operation                                        on a shard
    element by element                               a shard
    view: another form, some rows                    a part of the shard
    reduction over another dim                       a part of the shard
    shape, dtype, hooks                              no numbers
    reduction over all, or over the sharded dim      needs the whole weight
    write to some rows                               needs the whole weight
    any other one: products, lookups, shifts         needs the whole weight

A part has other dims than the weight, so that no dim of it is known to be whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

# Operations on each element and those at its place in other tensors; also in place, as operators and over lists.
_ELEMENTWISE = {
    *("add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide", "truediv", "floor_divide"),
    *("floordiv", "remainder", "mod", "fmod", "pow", "float_power", "neg", "negative", "pos", "positive", "reciprocal"),
    *("abs", "absolute", "sign", "sgn", "signbit", "square", "sqrt", "rsqrt", "addcmul", "addcdiv", "lerp", "hypot"),
    *("exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "logaddexp", "logaddexp2", "xlogy", "logit", "expit"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "arcsin", "arccos", "arctan", "arctan2", "sinc"),
    *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "arcsinh", "arccosh", "arctanh", "deg2rad", "rad2deg"),
    *("ceil", "floor", "round", "trunc", "fix", "frac", "frexp", "ldexp", "copysign", "nextafter", "heaviside"),
    *("clamp", "clamp_min", "clamp_max", "clip", "nan_to_num", "maximum", "minimum", "fmax", "fmin"),
    *("erf", "erfc", "erfinv", "lgamma", "digamma", "polygamma", "mvlgamma", "i0", "igamma", "igammac"),
    *("eq", "ne", "not_equal", "lt", "less", "le", "less_equal", "gt", "greater", "ge", "greater_equal", "isclose"),
    *("isfinite", "isinf", "isnan", "isneginf", "isposinf", "isreal", "where", "masked_fill", "invert", "and", "or"),
    *("xor", "logical_and", "logical_or", "logical_xor", "logical_not", "bitwise_and", "bitwise_or", "bitwise_xor"),
    *("bitwise_not", "bitwise_left_shift", "bitwise_right_shift", "lshift", "rshift"),
    *("relu", "relu6", "leaky_relu", "rrelu", "elu", "celu", "selu", "gelu", "silu", "mish", "sigmoid", "logsigmoid"),
    *("hardtanh", "hardsigmoid", "hardswish", "hardshrink", "softplus", "softshrink", "softsign", "tanhshrink"),
    *("threshold", "dropout", "alpha_dropout", "fake_quantize_per_tensor_affine", "apply", "map", "map2"),
    *("fill", "zero", "copy", "normal", "uniform", "bernoulli", "random", "exponential", "log_normal", "cauchy"),
    *("geometric", "clone", "contiguous", "detach", "detach_copy", "alias_copy", "as_subclass", "as_tensor", "asarray"),
    *("to", "type", "type_as", "float", "double", "half", "bfloat16", "cfloat", "cdouble", "chalf", "int", "long"),
    *("short", "char", "byte", "bool", "cpu", "cuda", "xpu", "mtia", "ipu", "pin_memory", "share_memory"),
    *("real", "imag", "angle", "conj", "conj_physical", "complex", "polar", "resolve_conj", "resolve_neg"),
}
# Operations over a dim, or over all: the position of the argument ``dim``.
_REDUCTIONS = {
    **dict.fromkeys(("sum", "nansum", "mean", "nanmean", "var", "std", "var_mean", "std_mean", "prod"), 1),
    **dict.fromkeys(("max", "min", "amax", "amin", "argmax", "argmin", "median", "nanmedian", "mode", "all", "any"), 1),
    **dict.fromkeys(("softmax", "softmin", "log_softmax", "logsumexp", "cumsum", "cumprod", "cummax", "cummin"), 1),
    **dict.fromkeys(("logcumsumexp", "sort", "argsort", "count_nonzero"), 1),
    **dict.fromkeys(("norm", "normalize", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm"), 2),
    **dict.fromkeys(("topk", "kthvalue", "quantile", "nanquantile"), 2),
}
# Operations whose result is the shard in another form, or a part of it.
_VIEWS = {
    *("t", "T", "mT", "H", "mH", "transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "adjoint"),
    *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel", "unsqueeze", "squeeze", "expand"),
    *("expand_as", "__getitem__", "__iter__", "narrow", "select", "split", "chunk", "tensor_split", "unbind"),
    *("diagonal", "broadcast_to", "split_with_sizes"),
}
# Operations whose result has none of the numbers.
_NO_VALUES = {
    *("grad", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("size", "stride", "dim", "ndimension", "dim_order", "numel", "nelement", "element_size", "__len__", "get_device"),
    *("data_ptr", "const_data_ptr", "storage", "untyped_storage", "storage_offset", "storage_type", "result_type"),
    *("requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook", "record_stream"),
    *("backward", "__set__", "__delete__", "__hash__", "__repr__", "__str__", "__format__", "__dir__", "__setstate__"),
    *("__deepcopy__", "__reduce_ex__", "__dlpack_device__", "allclose", "equal"),  # a shard with a shard
}
_ATTRIBUTES = {name for name in dir(Tensor) if not callable(getattr(Tensor, name))} - _VIEWS  # shape, dtype, data, ...


class ShardFacts(NamedTuple):
    """Facts of a shard that decide about an operation.

    Attributes:
        tensor: the shard, or a part of it.
        cut: True for a part, whose dims need not be the weight's.
        shard_dim: the dim of the weight that is sharded.
        elements: number of elements of the whole shard.
    """

    tensor: Tensor
    cut: bool
    shard_dim: int | None
    elements: int


def operation_name(func: Callable[..., Any]) -> str:
    """Return the name of an operation; of an attribute such as ``T`` the attribute's."""
    name = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name  # type: ignore[attr-defined]


def needs_whole(name: str, shard: ShardFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if an operation needs the whole weight, by its name and arguments."""
    if name == "__getitem__":
        return _looks_up(args[1])
    if name in _VIEWS or name in _ATTRIBUTES or not keeps_numbers(name):
        return False
    base, writes = _base_name(name)
    if base in _REDUCTIONS:
        dims = _reduced_dims(base, shard.tensor, args, kwargs)
        return not dims or shard.cut or shard.shard_dim in dims
    if base not in _ELEMENTWISE or (base == "where" and len(args) + len(kwargs) == 1):  # numbers of rows
        return True
    written = flattened(args[:1] if writes else ())
    return any(value is shard.tensor for value in written) and shard.cut and shard.tensor.numel() < shard.elements


def _base_name(name: str) -> tuple[str, bool]:
    """Return ``add`` for ``add_``, ``__add__``, ``__radd__``, ``_foreach_add_``, and True if it writes in place."""
    base = name.removeprefix("_foreach_").removeprefix("special_").strip("_")
    if not name.startswith("__"):
        return base, name.endswith("_")
    return (base, False) if base in _ELEMENTWISE else (base[1:], base[0] == "i")


def _looks_up(index: Any) -> bool:
    """Return True if an index has the numbers of rows."""
    return isinstance(index, list) or any(type(value) is Tensor for value in flattened((index,)))


def _reduced_dims(name: str, tensor: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    """Return the dims over which an operation reduces; none if it reduces over all."""
    given = args[_REDUCTIONS[name] :]
    dim = kwargs.get("dim", kwargs.get("axis", given if name == "count_nonzero" else given[:1]))
    return [number % max(tensor.dim(), 1) for number in flattened((dim,)) if type(number) is int]


def keeps_numbers(name: str) -> bool:
    """Return False for an operation whose result has none of the shard's numbers."""
    return name not in _NO_VALUES and not name.startswith(("new_", "is_", "_is_"))


def makes_part(name: str) -> bool:
    """Return True for an operation whose result is a part of the shard, or the shard in another form."""
    return name in _VIEWS or _base_name(name)[0] in _REDUCTIONS


def flattened(values: Sequence[Any]) -> Iterator[Any]:
    """Yield the values in nested tuples and lists."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from flattened(value)
        else:
            yield value
