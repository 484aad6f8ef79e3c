"""The states of one parameter's gradient: each cell of the table in ``GradientState``, on real buckets and engines."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from triax import Grid
from triax.zero import ShardedOptimizer
from triax.zero.bucket import Bucket
from triax.zero.shown_gradients import TRANSITIONS, GradientState

# The next state of a gradient, by the event and the state before it.
TABLE = """\
event       what happens                             ABSENT    PRESENT   CLEARED   ASSIGNED  DROPPED
add         a backward pass has given a gradient     PRESENT   PRESENT   PRESENT   ASSIGNED  PRESENT
fill        zeros are sent for a missing gradient    PRESENT   PRESENT   CLEARED   ASSIGNED  DROPPED
vanish      other replicas have had none either      ABSENT    ABSENT    ABSENT    ASSIGNED  DROPPED
pass        another backward pass begins             ABSENT    PRESENT   PRESENT   ASSIGNED  DROPPED
zero        user code sets the gradient to zero      ABSENT    CLEARED   CLEARED   ASSIGNED  DROPPED
drop        user code sets ``.grad`` to None         DROPPED   DROPPED   DROPPED   DROPPED   DROPPED
assign      user code sets ``.grad`` to a tensor     ASSIGNED  ASSIGNED  ASSIGNED  ASSIGNED  ASSIGNED"""
NEXT = {row.split()[0]: [GradientState[name] for name in row.split()[-5:]] for row in TABLE.splitlines()[1:]}


def test_docstring_and_code_have_the_table_of_states() -> None:
    assert TABLE in inspect.getdoc(GradientState)  # type: ignore[operator]
    assert {event: list(after) for event, after in TRANSITIONS.items()} == NEXT


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


def optimizer_of(grid: Grid, passes: int, stage: int = 0) -> tuple[Any, nn.Sequential]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    made = ShardedOptimizer(
        torch.optim.SGD, module.parameters(), grid, stage=stage, backward_passes_per_step=passes, lr=0.1
    )
    return made, module


def wrong_transitions() -> list[str]:
    """Cause each event in each state; return the cells in which the next state is not the table's."""
    optimizer, _ = optimizer_of(Grid(timeout=60), passes=2)
    gradient = OneGradient(optimizer.backward_passes.data_axis.buckets[0])
    wrong = []
    for event, after in NEXT.items():
        for state, wanted in zip(GradientState, after, strict=True):
            gradient.reach(state, filled=event == "vanish")
            getattr(gradient, "pass_" if event == "pass" else event)()
            is_set = gradient.parameter.grad is not None
            right = {"ABSENT": not is_set, "DROPPED": True}.get(gradient.state.name, is_set)
            if gradient.state is not wanted or not right:
                wrong.append(f"{state.name}, {event}: {gradient.state.name}, .grad {'set' if is_set else 'None'}")
    return wrong


def test_each_event_in_each_state_leads_to_the_tables_state(ranks: Any) -> None:
    assert ranks(2, wrong_transitions) == [[], []]


ONES = torch.ones(5, 3, dtype=torch.float64)  # the gradient of the last bias is 5 in each pass


# User code between two passes, and the state of the gradient before the second.
USER_CODE: dict[str, tuple[Callable[[Any], object], str]] = {
    "nothing": (lambda p: None, "PRESENT"),
    "p.grad.zero_()": (lambda p: p.grad.zero_(), "CLEARED"),
    "p.grad = None": (lambda p: setattr(p, "grad", None), "PRESENT"),  # seen when the second pass begins
}


@pytest.mark.parametrize("code", USER_CODE)
@pytest.mark.parametrize("name", ["0.weight", "0.bias", "1.bias"])
@pytest.mark.parametrize("second", ["all layers", "the last layer"])
@pytest.mark.parametrize("stage", [0, 2])
def test_a_gradient_changed_between_two_passes_is_as_in_torch(code: str, name: str, second: str, stage: int) -> None:
    change, state = USER_CODE[code]
    optimizer, module = optimizer_of(Grid(), passes=2, stage=stage)
    plain, parameter = deepcopy(module), module.get_parameter(name)
    shown = optimizer.backward_passes.data_axis.bucket_of(parameter).shown
    optimizer.zero_grad()
    for model in (plain, module):
        model(ONES).sum().backward()
        change(model.get_parameter(name))
        between = shown.state(parameter).name  # in the end, of the sharded module
        (model(ONES) if second == "all layers" else model[1](torch.ones(5, 4).double())).sum().backward()
    wanted = [parameter.grad for parameter in plain.parameters()]
    torch.testing.assert_close([parameter.grad for parameter in module.parameters()], wanted, rtol=1e-10, atol=0)
    after = "DROPPED" if plain.get_parameter(name).grad is None else "PRESENT"
    assert (between, shown.state(parameter).name) == (state, after)
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    torch.testing.assert_close([*module.parameters()], [*plain.parameters()], rtol=1e-10, atol=0)


def test_a_gradient_assigned_between_two_passes_is_refused() -> None:
    _, module = optimizer_of(Grid(), passes=2)
    parameter = dict(module.named_parameters())["0.weight"]
    module(ONES).sum().backward()
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match=r"p\.grad of .* was assigned between two .*: change it after"):
        module(ONES).sum().backward()


def test_step_uses_gradients_changed_by_user_code() -> None:
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
