"""The search is behind no named schedule and none of its own earlier results. It does not read these figures."""

from __future__ import annotations

import pytest

from triax.pipe.program.activations import peak_activations
from triax.pipe.program.costs import Costs
from triax.pipe.program.simulate import simulate
from triax.pipe.program.verify import verify
from triax.pipe.schedules.registry import RECIPES, named_schedule
from triax.pipe.schedules.search import Found, find_schedule

MEASURED = Costs(1, 0.993, 0.717, 0.0335)


def uneven(pipe: int, chunks: int) -> Costs:
    """Return costs of stages of which every fifth takes half as long again, and the last 0.8 longer, as with a head."""
    stages = range(pipe * chunks)
    each = [(1 + 0.5 * (7 * s % 5 == 0) + 0.8 * (s == stages[-1])) / chunks for s in stages]
    f, i, w = ([cost * x for x in each] for cost in (1.0, 1.1, 0.8))
    return Costs(f, i, w, 0.05)


def frozen(pipe: int, chunks: int, first: int) -> Costs:
    """Return costs of a model whose first stages only run forward, as a frozen encoder does."""
    stages = pipe * chunks
    i, w = ([0.0] * first + [cost / chunks] * (stages - first) for cost in (1.0, 0.8))
    return Costs([1 / chunks] * stages, i, w, 0.05)


def require_ahead_of_names(found: Found, costs: Costs, memory: float) -> None:
    """Check that no named schedule within the memory limit is faster."""
    verify(found, memory)
    assert found.lower_bound <= found.makespan + 1e-9
    for name, recipe in RECIPES.items():
        if name != "forward" and recipe.accepts(found.chunks) and found.microbatches >= recipe.least(found.pipe):
            named = named_schedule(name, found.pipe, found.microbatches, found.chunks)
            if max(peak_activations(named)) <= memory:
                assert found.makespan <= simulate(named, costs).makespan + 1e-9, name


# pipe, microbatches, chunks, costs, memory
QUICK = [
    (4, 8, 1, uneven(4, 1), 4),
    (4, 7, 2, MEASURED, 6),  # interleaved, with microbatches that are no multiple of the stages
    (4, 8, 2, frozen(4, 2, 3), 4),
]
LARGE = [
    (8, 16, 1, uneven(8, 1), 8),
    (8, 16, 2, uneven(8, 2), 8),
    (8, 16, 2, frozen(8, 2, 4), 8),
    (8, 19, 2, MEASURED, 12),
    (8, 64, 2, MEASURED, 12),
    (16, 64, 2, MEASURED, 16),
    (16, 128, 2, MEASURED, 16),
]


@pytest.mark.parametrize(("pipe", "microbatches", "chunks", "costs", "memory"), QUICK)
def test_the_search_is_no_slower_than_any_named_schedule(
    pipe: int, microbatches: int, chunks: int, costs: Costs, memory: float
) -> None:
    found = find_schedule(pipe, microbatches, costs, memory, chunks, effort=0.01)
    require_ahead_of_names(found, costs, memory)
    assert found.gap < 1e-12 or found.makespan < found.named_makespan - 1e-9


@pytest.mark.exhaustive
@pytest.mark.parametrize(("pipe", "microbatches", "chunks", "costs", "memory"), LARGE)
def test_large_searches_are_no_slower_than_any_named_schedule(
    pipe: int, microbatches: int, chunks: int, costs: Costs, memory: float
) -> None:
    require_ahead_of_names(find_schedule(pipe, microbatches, costs, memory, chunks), costs, memory)


# (pipe, microbatches, chunks or None, memory) -> bubble in percent at MEASURED; without the table the tests above hold
BEST_KNOWN = {
    (4, 8, 2, 4): 7.64,
    (4, 8, 2, 3): 14.90,
    (4, 8, 2, 2): 27.56,
    (8, 16, None, 8): 8.80,
    (8, 64, 2, 8): 2.36,
    (8, 64, 2, 5): 6.16,
    (8, 64, 2, 4): 18.64,
    (8, 64, 2, 3): 31.47,
    (16, 128, 2, 16): 2.66,
    (16, 128, 2, 9): 7.06,
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("size", "percent"), BEST_KNOWN.items())
def test_the_search_is_no_slower_than_its_earlier_results(
    size: tuple[int, int, int | None, float], percent: float
) -> None:
    pipe, microbatches, chunks, memory = size
    found = find_schedule(pipe, microbatches, MEASURED, memory, chunks)
    verify(found, memory)
    assert 100 * found.bubble <= percent
