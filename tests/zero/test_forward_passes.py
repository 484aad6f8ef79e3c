"""Forward passes of units in stage 3: each cell of the table in ``PassState``, and real steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from triax import Grid
from triax.zero.modules.forward_passes import EndedRun, ForwardPass, ForwardPasses, PassState

from support.sharded_loops import sharded_sgd

RUNNING, WAITING, REACHED, UNEXPECTED, PAST = PassState
Act = Callable[[ForwardPasses, ForwardPass], object]


def end(passes: ForwardPasses, forward: ForwardPass) -> None:
    forward.ended = [EndedRun(0, 0)]
    passes.end(forward, trains=True)


def reach(passes: ForwardPasses, forward: ForwardPass) -> None:
    passes.reach(forward)


def finish(passes: ForwardPasses, forward: ForwardPass) -> None:
    passes.finish([forward])


def forget(passes: ForwardPasses, forward: ForwardPass) -> None:
    passes.forget([forward])


def lose(passes: ForwardPasses, forward: ForwardPass) -> None:
    passes.end(forward, trains=True)


def evaluate(passes: ForwardPasses, forward: ForwardPass) -> None:
    passes.end(forward, trains=False)


WAYS: dict[PassState, list[Act]] = {
    RUNNING: [],
    WAITING: [end],
    REACHED: [end, reach],
    UNEXPECTED: [end, forget],
    PAST: [end, reach, finish],
}
CELLS: list[tuple[Act, PassState, PassState]] = [
    (end, RUNNING, WAITING),
    (lose, RUNNING, UNEXPECTED),
    (evaluate, RUNNING, RUNNING),
    *((reach, before, REACHED) for before in PassState),
    *((finish, before, PAST) for before in (WAITING, REACHED)),
    *((forget, before, UNEXPECTED) for before in (WAITING, REACHED)),
]


@pytest.mark.parametrize(("act", "before", "after"), CELLS)
def test_each_act_on_a_forward_pass_leads_to_the_tables_state(act: Act, before: PassState, after: PassState) -> None:
    passes, forward = ForwardPasses(expected=1), ForwardPass()
    forward.begun = [0]
    for step in WAYS[before]:
        step(passes, forward)
    assert forward.state is before
    act(passes, forward)
    assert forward.state is after
    assert {state for state in PassState if passes.having(state)} == {after} & {WAITING, REACHED}
    assert passes.runs(0) == (after in (WAITING, REACHED, UNEXPECTED))


def test_at_most_as_many_passes_wait_as_a_step_expects() -> None:
    passes, forwards = ForwardPasses(expected=2), [ForwardPass() for _ in range(3)]
    for forward in forwards:
        end(passes, forward)
    assert [forward.state for forward in forwards] == [UNEXPECTED, WAITING, WAITING]
    assert passes.having(WAITING) == forwards[1:]


def states_in_a_step() -> list[list[str]]:
    """Run two forward passes, and then their backward passes, the last one first; return the states after each."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    optimizer = sharded_sgd(module, Grid(timeout=60), backward_passes_per_step=2)  # fmt: skip
    passes: Any = optimizer.backward_passes._units._passes  # type: ignore[union-attr]
    found = []

    def note() -> None:
        found.append([forward.state.name for forward in forwards])

    losses = [module(torch.ones(5, 3, dtype=torch.float64)).sum() for _ in range(2)]
    forwards = passes.having(WAITING)
    note()
    losses[1].register_hook(lambda _: note())
    module.get_parameter("0.weight").register_hook(lambda _: note())
    losses[1].backward()
    note()
    losses[0].backward()
    optimizer.step()
    note()
    return found


def test_two_forward_passes_of_a_step_have_the_expected_states(ranks: Any) -> None:
    wanted = [
        ["WAITING", "WAITING"],
        ["WAITING", "WAITING"],  # at the loss, before an output of a unit
        ["WAITING", "REACHED"],  # at the first layer's weight
        ["WAITING", "PAST"],
        ["REACHED", "PAST"],
        ["PAST", "PAST"],
    ]
    assert ranks(2, states_in_a_step) == [wanted, wanted]
