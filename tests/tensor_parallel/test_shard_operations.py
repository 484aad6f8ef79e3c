"""Operations on a shard of a weight: those whose results are no shard of the whole result need the whole weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from triax.base.nest import map_tensors
from triax.tensor_parallel import shard_operations
from triax.tensor_parallel.shard_operations import ShardFacts, keeps_numbers, needs_whole

WHOLE = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
DIMS = [(), (0,), (1,), (-1,), ((0, 1),)]
OVER_DIMS = ["sum", "nansum", "mean", "nanmean", "var", "std", "amax", "amin", "logsumexp", "count_nonzero"]
OVER_ONE = ["prod", "max", "min", "argmax", "argmin", "median", "nanmedian", "mode", "softmax", "log_softmax"]
OVER_ONE += ["cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort", "argsort"]
# Their arguments behind the weight: a number that is no dim, then perhaps a dim.
WITH_A_NUMBER: list[tuple[str, Callable[..., Any], list[tuple[Any, ...]]]] = [
    ("norm", torch.norm, [(2,), (1, 0), (1, 1)]),
    ("linalg_norm", torch.linalg.norm, [(2,), (2, 0), (2, 1)]),
    ("linalg_vector_norm", torch.linalg.vector_norm, [(2,), (1, 0), (0, 1)]),
    ("linalg_matrix_norm", torch.linalg.matrix_norm, [(1,), (2,), (1, (0, 1))]),
    ("topk", torch.topk, [(1,), (1, 0), (2, 1), (2, 0)]),
    ("kthvalue", torch.kthvalue, [(1,), (1, 0), (2, 1)]),
    ("quantile", torch.quantile, [(0.5,), (0.5, 0), (0.5, 1)]),
    ("nanquantile", torch.nanquantile, [(0.5,), (0.5, 0), (0.5, 1)]),
    ("renorm", torch.renorm, [(2, 0, 1.0), (2, 1, 1.0)]),
    ("histc", torch.histc, [(10,), (11,)]),
]
CASES = [(name, getattr(torch, name), dims) for name in OVER_DIMS for dims in DIMS if name != "nanmean" or dims]
CASES += [(name, getattr(torch, name), dims) for name in OVER_ONE for dims in DIMS[1:4]]
CASES += [(name, call, given) for name, call, all_given in WITH_A_NUMBER for given in all_given]


def tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [value for value in result if isinstance(value, Tensor)]


def bound_of(result: Tensor) -> float:
    """Relative error of four roundings to fp32, or 1e-12 in float64."""
    return 4 * torch.finfo(torch.float32).eps if result.dtype in (torch.float32, torch.complex64) else 1e-12


def are_shards(call: Callable[..., Any], whole: tuple[Any, ...], *halves: tuple[Any, ...]) -> bool:
    """Return True if the results for two halves of the arguments are, side by side, the result for the whole ones.

    Functions of whole numbers give fp32, whose last bit depends on a number's place in a vector of the processor.
    """
    results = [tensors(call(*map_tensors(Tensor.clone, arguments))) for arguments in (whole, *halves)]
    return all(
        any(
            joined.shape == one.shape and torch.allclose(joined, one, rtol=bound_of(one), atol=0, equal_nan=True)
            for joined in (torch.cat(parts, at) for at in range(parts[0].dim()))
        )
        for one, *parts in zip(*results, strict=True)
    )


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("name", "call", "arguments"), CASES, ids=lambda value: str(value).split(" at ")[0])
def test_functions_allowed_on_a_shard_give_a_shard_of_the_result(
    name: str, call: Callable[..., Any], arguments: tuple[Any, ...], dim: int
) -> None:
    """Functions that are not allowed on a shard need the whole weight, such as ``histc`` and ``renorm``."""
    shard = WHOLE.chunk(2, dim)[0]
    facts = ShardFacts(shard, cut=False, shard_dim=dim, elements=shard.numel())
    if not needs_whole(name, facts, (shard, *arguments), {}):
        assert are_shards(call, *((weight, *arguments) for weight in (WHOLE, *WHOLE.chunk(2, dim))))


def test_reductions_over_the_other_dim_are_allowed_on_a_shard() -> None:
    shard = WHOLE.chunk(2, 1)[0]
    facts = ShardFacts(shard, cut=False, shard_dim=1, elements=shard.numel())
    for name in (*OVER_DIMS, *OVER_ONE):
        assert not needs_whole(name, facts, (shard, 0), {}) and not needs_whole(name, facts, (shard,), {"dim": -2})
    assert not needs_whole("norm", facts, (shard, 2, 0), {}) and not needs_whole("quantile", facts, (shard, 0.5, 0), {})
    assert needs_whole("sum", facts, (shard,), {"axis": 1}) and not needs_whole("sum", facts, (shard,), {"axis": 0})


def arguments(weight: Tensor, first: Tensor, second: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield a weight, also of whole numbers, and what functions may take behind it."""
    mask, rows = first > 0.5, torch.tensor([0, 1])
    behind: list[tuple[Any, ...]] = [(), (0,), (1,), (2,), (0.5,), (0, 1), (0.2, 0.5), (2, 0, 0.5), (torch.float32,)]
    behind += [(first,), (first, second), (first, 0.5), (mask,), (mask, second), (mask, 0.5), (rows,)]
    behind += [(0, mask.long(), second), (0, rows, second[:2]), (0, rows, second[:2], "prod")]
    for others in behind:
        yield weight, *others
        yield weight.mul(9).long(), *others


@pytest.mark.filterwarnings("ignore")  # of deprecated functions
@pytest.mark.parametrize("dim", [0, 1])
def test_every_torch_function_allowed_on_a_shard_is_correct(dim: int) -> None:
    """Over all functions of ``Tensor``, ``torch`` and ``torch.nn.functional``, also those that no list names."""
    values = torch.rand(3, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    calls = list(zip(*(list(arguments(*part)) for part in (values, *values.chunk(2, dim + 1))), strict=True))
    named = [(name, getattr(place, name)) for place in (Tensor, torch, F) for name in dir(place)]
    given: set[str] = set()
    wrong: set[str] = set()
    for name, call in named:
        if not callable(call) or isinstance(call, type) or name in shard_operations._VIEWS or not keeps_numbers(name):
            continue
        for whole, *halves in calls:
            shard = halves[0][0]
            if needs_whole(name, ShardFacts(shard, False, dim, shard.numel()), halves[0], {}):
                continue
            with suppress(Exception):  # it takes other arguments
                one, other = (tensors(call(whole[0].clone(), *whole[1:])) for _ in range(2))
                if all(torch.allclose(a, b, equal_nan=True) for a, b in zip(one, other, strict=True)):  # not random
                    (given if are_shards(call, whole, *halves) else wrong).add(name)
    assert not wrong and {"add", "mul_", "__rsub__", "where", "gelu", "cumsum", "softmax", "clone", "to"} <= given
