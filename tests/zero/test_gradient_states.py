"""The states of one parameter's gradient: each cell of the table in ``GradientState``, on real buckets and engines."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from triax import Grid
from triax.zero import ShardedOptimizer
from triax.zero.bucket import Bucket
from triax.zero.shown_gradients import TRANSITIONS, GradientState

STATES = [state.name for state in GradientState]


def test_the_table_in_the_docstring_is_the_one_in_the_code() -> None:
    rows = re.findall(
        rf"^ {{4}}(\w+) .*?((?: +(?:{'|'.join(STATES)})){{5}})$", GradientState.__doc__ or "", re.MULTILINE
    )
    header, *events = [(event, cells.split()) for event, cells in rows]
    assert header == ("event", STATES)
    assert {event: [state.name for state in TRANSITIONS[event]] for event, _ in events} == dict(events)
    assert TRANSITIONS.keys() == {event for event, _ in events}


class OneGradient:
    """The first parameter of a real bucket, and all that can happen to its gradient in a step of two replicas."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket, self.parameter = bucket, bucket.members[0].parameter

    @property
    def state(self) -> GradientState:
        return self.bucket.shown.state(self.parameter)

    def begin(self) -> None:
        self.bucket.begin()

    def add(self) -> None:
        self.parameter.grad = torch.ones_like(self.parameter)  # as autograd does
        self.bucket.take_gradient(self.parameter)

    def fill(self) -> None:
        self.bucket.fill_in()

    def vanish(self) -> None:
        self.bucket.expose(1.0)

    def pass_(self) -> None:
        self.bucket.begin_pass(lambda: None, None)

    def zero(self) -> None:
        if isinstance(gradient := self.parameter.grad, Tensor):
            gradient.zero_()  # a guard, which calls ``Bucket.discard``
        else:
            self.bucket.discard(self.parameter, "zero")

    def drop(self) -> None:
        self.bucket.discard(self.parameter, "drop")

    def assign(self, value: float = 1.0) -> None:
        self.bucket.assign_gradient(self.parameter, torch.full_like(self.parameter, value), 1.0, exposed=False)

    def reach(self, state: GradientState, filled: bool) -> None:
        """Bring the gradient into a state, from a pass on this rank, or from zeros in place of one."""
        self.begin()
        present: Callable[[], None] = self.fill if filled else self.add
        ways: dict[str, list[Callable[[], None]]] = {
            "ABSENT": [],
            "PRESENT": [present],
            "CLEARED": [present, self.zero],
            "ASSIGNED": [present, lambda: self.assign(float(not filled))],
            "DROPPED": [self.add, self.drop, *([self.fill] if filled else [])],
        }
        for event in ways[state.name]:
            event()
        assert self.state is state


def optimizer_of(grid: Grid, passes: int) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    made = ShardedOptimizer(
        torch.optim.SGD, module.parameters(), grid, stage=0, backward_passes_per_step=passes, lr=0.1
    )
    return made, module


def walk() -> list[str]:
    """Cause each event in each state; return the cells in which the next state is not the table's."""
    optimizer, _ = optimizer_of(Grid(timeout=60), passes=2)
    gradient = OneGradient(optimizer.backward_passes.data_axis.buckets[0])
    wrong = []
    for event, after in TRANSITIONS.items():
        for state in GradientState:
            gradient.reach(state, filled=event == "vanish")
            getattr(gradient, "pass_" if event == "pass" else event)()
            is_set = gradient.parameter.grad is not None
            right = {"ABSENT": not is_set, "DROPPED": True}.get(gradient.state.name, is_set)
            if gradient.state is not after[state] or not right:
                wrong.append(f"{state.name}, {event}: {gradient.state.name}, .grad {'set' if is_set else 'None'}")
    return wrong


def test_each_event_in_each_state(ranks: Any) -> None:
    assert ranks(2, walk) == [[], []]


USER_CODE: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    # What user code does after the first of two passes, the state then, and after the second pass.
    "nothing": (lambda p: None, "PRESENT", "PRESENT"),
    "p.grad.zero_()": (lambda p: p.grad.zero_(), "CLEARED", "PRESENT"),
    "p.grad = None": (lambda p: setattr(p, "grad", None), "PRESENT", "PRESENT"),  # seen when the second pass begins
}


@pytest.mark.parametrize("name", USER_CODE)
def test_what_user_code_does_between_two_passes(name: str) -> None:
    act, between, after = USER_CODE[name]
    optimizer, module = optimizer_of(Grid(), passes=2)
    first, second = module[0].weight, module[1].weight  # type: ignore[index]
    shown = optimizer.backward_passes.data_axis.bucket_of(first).shown
    x = torch.ones(5, 3, dtype=torch.float64)
    optimizer.zero_grad()
    assert shown.state(first).name == "ABSENT"
    module(x).sum().backward()
    act(first)
    assert shown.state(first).name == between
    module(x).sum().backward()
    assert (shown.state(first).name, shown.state(second).name) == (after, "PRESENT")


def test_what_user_code_does_after_the_last_pass() -> None:
    optimizer, module = optimizer_of(Grid(), passes=2)
    parameters = dict(module.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    shown = optimizer.backward_passes.data_axis.bucket_of(parameters["0.weight"]).shown
    optimizer.zero_grad()
    for _ in range(2):
        module(torch.ones(5, 3, dtype=torch.float64)).sum().backward()
    parameters["0.weight"].grad = None
    parameters["0.bias"].grad = torch.ones(4, dtype=torch.float64)
    parameters["1.weight"].grad.zero_()  # type: ignore[union-attr]
    optimizer.step()
    states = {name: shown.state(parameter).name for name, parameter in parameters.items()}
    assert states == {"0.weight": "DROPPED", "0.bias": "ASSIGNED", "1.weight": "CLEARED", "1.bias": "PRESENT"}
    moved = {name: (before[name] - parameter.detach()) / 0.1 for name, parameter in parameters.items()}
    wanted = {"0.weight": 0.0, "0.bias": 1.0, "1.weight": 0.0, "1.bias": 10.0}
    assert all(torch.allclose(moved[name], torch.full_like(moved[name], wanted[name])) for name in moved), moved
