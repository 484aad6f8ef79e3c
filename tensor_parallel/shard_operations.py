"""Rules for operations on a shard of a weight: those that need the whole weight, and those whose result is a shard too.

    operation                                        on a shard
    product, lookup, write by the numbers of rows    needs the whole weight
    reduction over all, or over the sharded dim      needs the whole weight
    reduction over another dim                       a part of the shard
    view: another form, some rows                    a part of the shard
    element by element                               a shard
    another result                                   needs the whole weight

A part has other dims than the weight, so that no dim of it is known to be whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

# Operations that combine the rows or the columns of a weight, or look them up.
_PRODUCTS = {
    *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "vdot", "inner", "outer", "einsum", "tensordot"),
    *("addmm", "addmm_", "addmv", "addbmm", "baddbmm", "chain_matmul", "multi_dot", "linear", "bilinear", "kron"),
    *("embedding", "embedding_bag", "index_select", "gather", "take", "take_along_dim", "cosine_similarity", "cdist"),
    *("cat", "concat", "concatenate", "vstack", "hstack", "cov", "corrcoef", "svd", "qr", "inverse", "pinverse"),
    *("matrix_exp", "matrix_power", "cholesky", "det", "logdet"),
    *("__setitem__", "index_fill_", "index_copy_", "index_add_", "scatter_", "index_put_"),  # rows by their numbers
}
# Operations over a dim, or over all: the position of the argument ``dim``; None: over all, or of another meaning.
_REDUCTIONS: dict[str, int | None] = {
    **dict.fromkeys(("sum", "nansum", "mean", "nanmean", "var", "std", "var_mean", "std_mean", "prod"), 1),
    **dict.fromkeys(("max", "min", "amax", "amin", "argmax", "argmin", "median", "nanmedian", "mode"), 1),
    **dict.fromkeys(("softmax", "log_softmax", "logsumexp", "cumsum", "cumprod", "cummax", "cummin"), 1),
    **dict.fromkeys(("logcumsumexp", "sort", "argsort", "count_nonzero"), 1),
    **dict.fromkeys(("norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm"), 2),
    **dict.fromkeys(("topk", "kthvalue", "quantile", "nanquantile"), 2),
    **dict.fromkeys(("aminmax", "unique", "histc", "bincount", "renorm", "_foreach_norm", "_foreach_max"), None),
}
# Operations whose result is the shard in another form, or a part of it.
_VIEWS = {
    *("t", "T", "mT", "H", "mH", "transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "adjoint"),
    *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel", "unsqueeze", "squeeze", "expand"),
    *("expand_as", "__getitem__", "__iter__", "narrow", "select", "split", "chunk", "tensor_split", "unbind"),
    "diagonal",
}
# Operations that read the numbers.
_VALUES = {"numpy", "__array__", "tolist"}
# Operations whose result has none of the numbers.
_NO_VALUES = {"grad", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "requires_grad"}


class ShardFacts(NamedTuple):
    """Facts of a shard that decide about an operation.

    Attributes:
        tensor: the shard, or a part of it.
        cut: True for a part, whose dims need not be the weight's.
        shard_dim: the dim of the weight that is sharded.
        numel: elements of the whole shard.
    """

    tensor: Tensor
    cut: bool
    shard_dim: int | None
    numel: int


def operation_name(func: Callable[..., Any]) -> str:
    """Return the name of an operation; of an attribute such as ``T`` the attribute's."""
    name = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name  # type: ignore[attr-defined]


def needs_whole(name: str, shard: ShardFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if an operation needs the whole weight, by its name and arguments."""
    if name in _PRODUCTS or name in _VALUES or (name.startswith("linalg_") and not name.endswith("norm")):
        return True
    if name.endswith("_") and not name.endswith("__") and args and args[0] is shard.tensor:
        return shard.cut and shard.tensor.numel() < shard.numel  # writes rows by their numbers
    if name == "__getitem__":
        return _looks_up(args[1])
    if name in _REDUCTIONS or name.startswith("linalg_"):
        dims = _reduced_dims(name, shard.tensor, args, kwargs)
        return not dims or shard.cut or shard.shard_dim in dims
    return False


def _looks_up(index: Any) -> bool:
    """Return True if an index has the numbers of rows."""
    return isinstance(index, list) or any(type(value) is Tensor for value in flattened((index,)))


def _reduced_dims(name: str, tensor: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    """Return the dims over which an operation reduces; none if it reduces over all."""
    position = _REDUCTIONS.get(name)
    dim = kwargs.get("dim", None if position is None else next(iter(args[position:]), None))
    return [number % max(tensor.dim(), 1) for number in flattened((dim,)) if type(number) is int]


def keeps_numbers(name: str) -> bool:
    """Return False for an operation whose result has none of the shard's numbers."""
    return name not in _NO_VALUES and not name.startswith("new_")


def makes_part(name: str) -> bool:
    """Return True for an operation whose result is a part of the shard, or the shard in another form."""
    return name in _VIEWS or name in _REDUCTIONS


def may_change_shape(name: str) -> bool:
    """Return True for an operation whose result may have another shape than the shard, and still be of it."""
    return makes_part(name) or name.startswith("linalg_")


def flattened(values: Sequence[Any]) -> Iterator[Any]:
    """Yield the values in nested tuples and lists."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from flattened(value)
        else:
            yield value
