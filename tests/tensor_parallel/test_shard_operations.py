"""Operations on a shard of a weight: those whose results are no shard of the whole result need the whole weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from triax.tensor_parallel.shard_operations import ShardFacts, needs_whole

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
    return [result] if isinstance(result, Tensor) else list(result)


def are_shards(call: Callable[..., Any], arguments: tuple[Any, ...], dim: int) -> bool:
    """Return True if the results for two halves of the weight are, side by side, the result for the whole."""
    whole = tensors(call(WHOLE, *arguments))
    halves = zip(*(tensors(call(half, *arguments)) for half in WHOLE.chunk(2, dim)), strict=True)
    return all(
        any(
            joined.shape == one.shape and torch.equal(joined, one)
            for joined in (torch.cat(parts, at) for at in range(parts[0].dim()))
        )
        for one, parts in zip(whole, halves, strict=True)
    )


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("name", "call", "arguments"), CASES, ids=lambda value: str(value).split(" at ")[0])
def test_what_a_shard_computes_alone_is_a_shard_of_the_result(
    name: str, call: Callable[..., Any], arguments: tuple[Any, ...], dim: int
) -> None:
    """A reader found ``histc``, ``renorm`` and norms of matrices whose number was taken for a dim."""
    shard = WHOLE.chunk(2, dim)[0]
    facts = ShardFacts(shard, cut=False, shard_dim=dim, numel=shard.numel())
    if not needs_whole(name, facts, (shard, *arguments), {}):
        assert are_shards(call, arguments, dim)


def test_a_reduction_over_the_other_dim_is_a_part_of_the_shard() -> None:
    shard = WHOLE.chunk(2, 1)[0]
    facts = ShardFacts(shard, cut=False, shard_dim=1, numel=shard.numel())
    for name in (*OVER_DIMS, *OVER_ONE):
        assert not needs_whole(name, facts, (shard, 0), {}) and not needs_whole(name, facts, (shard,), {"dim": -2})
    assert not needs_whole("norm", facts, (shard, 2, 0), {}) and not needs_whole("quantile", facts, (shard, 0.5, 0), {})
