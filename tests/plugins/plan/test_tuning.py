"""The search for a microbatch size: against all sizes tried one by one, with formulas that are right or wrong."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from triax.base.errors import ConfigError
from triax.plugins.plan.tuning import FittingSizes, Measured, search, sizes


def run(
    order: Sequence[int],
    limit: float,
    truth: Callable[[int], Measured | None],
    estimate: Callable[[int], float] | None = None,
    wanted: int = 1,
) -> tuple[FittingSizes, list[int]]:
    tried: list[int] = []

    def measure(size: int, expected: float) -> Measured | None:
        tried.append(size)
        return truth(size)

    return search(order, wanted, limit, measure, list, in_flight=lambda size: 1, estimate=estimate), tried


@pytest.mark.parametrize("wanted", [1, 3])
def test_search_finds_the_largest_sizes_that_fit(wanted: int) -> None:
    draw = random.Random(0)
    for _ in range(300):
        order = sizes(draw.choice([6, 8, 36, 64, 96, 1024]))
        held, kept, work, off = (draw.uniform(0, 100) for _ in range(4))

        def truth(size: int, held: float = held, kept: float = kept, work: float = work) -> Measured:
            return Measured(held, kept * size, work * size + held / 7)

        limit = draw.uniform(0, 1.2) * truth(draw.choice(order)).total
        fitting = [size for size in order if truth(size).total <= limit][:wanted]
        for estimate in (None, lambda size, truth=truth, off=off: truth(size).total - off):
            found, tried = run(order, limit, truth, estimate) if wanted == 1 else run(order, limit, truth, estimate, 3)
            assert found.fitting == fitting, (order, limit, found)
            assert found.measured == {size: truth(size).total for size in tried}
            assert len(tried) <= wanted + 3
            if estimate is not None and off == 0:
                assert len(tried) == 1


def test_a_microbatch_size_that_does_not_fit_is_never_chosen() -> None:
    draw = random.Random(1)
    for _ in range(300):
        order, limit = sizes(1024), draw.uniform(1, 2000)
        found, _ = run(order, limit, lambda size: Measured(50, size, 0), lambda size: draw.uniform(0, 3000))
        assert all(50 + size <= limit for size in found.fitting)
        assert bool(found.fitting) == (limit >= 51)


def test_a_search_out_of_memory_takes_the_next_smaller_size() -> None:
    def truth(size: int) -> Measured | None:
        return None if size > 8 else Measured(1, size, 0)

    for estimate in (None, lambda size: 1.0 + size):
        found, tried = run(sizes(64), 1000, truth, estimate)
        assert found.fitting == [8] and found.measured[tried[-2] if estimate is None else 16] == math.inf
    assert run(sizes(64), 1000, lambda size: None)[0].fitting == []


def test_microbatch_sizes_fill_a_pipeline_and_keep_the_limits() -> None:
    assert sizes(64, pipe=4) == [4, 2, 1]
    assert sizes(8, pipe=4) == [1]  # no size leaves four microbatches a rank
    assert sizes(36, least=2, most=9) == [9, 6, 4, 3, 2]
    with pytest.raises(ConfigError, match="no microbatch size from 5 to 6 divides the 64 samples"):
        sizes(64, least=5, most=6)
