"""The search and its lower bound against an exact solver, over random costs of every stage."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

from triax.pipe.program.costs import Costs
from triax.pipe.program.placement import loop, zigzag
from triax.pipe.program.simulate import simulate
from triax.pipe.program.verify import verify
from triax.pipe.schedules.search import find_schedule

from support.exact_schedules import Exact, solve


class Case(NamedTuple):
    """A random scheduling problem: sizes, memory limit, and times of each stage's ops."""

    pipe: int
    microbatches: int
    chunks: int
    memory: int
    times: dict[str, list[int]]
    hop: int

    @property
    def costs(self) -> Costs:
        return Costs(self.times["F"], self.times["I"], self.times["W"], self.hop)


def drawn(seed: int, most: int) -> Case:
    """Draw a problem of up to 4 ranks and ``most`` microbatches, with 1 or 2 chunks, uneven stages in three of five."""
    draw = random.Random(seed)
    pipe, microbatches, chunks = draw.randint(2, 4), draw.randint(2, most), draw.choice((1, 1, 2))
    stages, even = pipe * chunks, draw.random() < 0.4
    times = {
        kind: [draw.randint(1, 12)] * stages if even else [draw.randint(1, 12) for _ in range(stages)] for kind in "FIW"
    }
    memory = draw.randint(1, microbatches)
    return Case(pipe, microbatches, chunks, memory, times, draw.choice((0, 1, 3)))


def share_behind_the_solver(case: Case, effort: float, seconds: float) -> float | None:
    """Return by how much the search is behind the solver, as a share; None if the solver proved nothing in its time."""
    found = find_schedule(case.pipe, case.microbatches, case.costs, case.memory, case.chunks, effort=effort)
    verify(found, case.memory)
    hops, limits = [case.hop] * (case.pipe * case.chunks - 1), [case.memory * case.chunks] * case.pipe
    answers: list[Exact] = []
    for placement in sorted({loop(case.pipe, case.chunks), zigzag(case.pipe, case.chunks)}):
        answer = solve(placement, case.microbatches, case.times, hops, limits, seconds)
        if answer is None:
            return None
        verify(answer.schedule, case.memory)
        assert simulate(answer.schedule, case.costs).makespan <= answer.makespan + 1e-9
        answers.append(answer)
    best = min(answer.makespan for answer in answers)
    assert found.lower_bound <= best + 1e-9  # it holds for every order
    assert found.makespan >= min(answer.bound for answer in answers) - 1e-9  # so does the solver's
    if found.makespan > best + 1e-9:
        assert found.gap > 0 and f"{100 * found.gap:.2f} % above the lower bound" in found.summary()
    proved = all(answer.bound == answer.makespan for answer in answers)
    return max(0.0, found.makespan / best - 1.0) if proved else None


@pytest.mark.parametrize("seed", range(10))
def test_the_search_finds_the_optimum_of_small_problems(seed: int) -> None:
    loss = share_behind_the_solver(drawn(seed, most=4), effort=0.03, seconds=20)
    assert loss is not None, "the solver proved nothing in 20 s"
    assert loss == 0


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)  # 240 s on a machine without other programs
def test_the_search_loses_little_on_300_random_problems() -> None:
    """Most are optimal; of the others the gap is printed, and they are a few percent behind."""
    losses = [
        loss
        for seed in range(300)
        if (loss := share_behind_the_solver(drawn(seed, most=6), effort=0.1, seconds=10)) is not None
    ]
    late = [loss for loss in losses if loss]
    print(f"proved by the solver: {len(losses)}, equal: {len(losses) - len(late)}, largest loss: {max(losses):.2%}")
    assert len(losses) > 270
    assert len(late) < 0.08 * len(losses) and max(losses) < 0.06
