"""A third party's function between ``backward`` and ``step`` acts on the gradients of the batch, or is refused.

In stages 0 and 1 ``p.grad`` is the whole mean gradient, and what a function does to it is what the step takes; stages 2
and 3 hold no whole gradients, so such a function raises an error there, and the step is that without the function. What
the engine offers itself works in all stages. All are compared with one process of plain PyTorch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import triax
from triax import Grid
from triax.zero import ShardedOptimizer

from support.gradient_loops import LIMIT, OPTIONS, REFUSED, WIDTH, Net, batch, compared, engine_of, net


class Loop:
    """A training loop between a backward pass and its step, of an engine or of plain PyTorch.

    Attributes:
        zero_grad, clip: ``zero_grad`` and ``clip_grad_norm_`` of the engine, or their counterparts in plain PyTorch.
        again: runs the backward pass of another batch.
    """

    def __init__(self, model: Net, optimizer: Any, zero_grad: Any, clip: Any, again: Callable[[], None]) -> None:
        self.model, self.optimizer, self.zero_grad, self.clip, self.again = model, optimizer, zero_grad, clip, again

    @property
    def gradients(self) -> list[Tensor]:
        # Not of ``never``, which has zeros on several replicas, as another one might have had a gradient.
        named = self.model.named_parameters()
        return [p.grad for name, p in named if p.grad is not None and not name.startswith("never")]


def clip_norm(loop: Loop) -> Any:
    return nn.utils.clip_grad_norm_(loop.model.parameters(), LIMIT)


def clip_norm_of_each(loop: Loop) -> Any:
    return [nn.utils.clip_grad_norm_(p, LIMIT) for p in loop.model.blocks.parameters()]


def clip_largest_element(loop: Loop) -> Any:
    return nn.utils.clip_grad_norm_(loop.model.parameters(), LIMIT, norm_type=float("inf"), foreach=False)


def clip_norm_foreach(loop: Loop) -> Any:
    return nn.utils.clip_grad_norm_(list(loop.model.parameters()), LIMIT, norm_type=1.0, foreach=True)


def clip_value(loop: Loop) -> Any:
    nn.utils.clip_grad_value_(loop.model.parameters(), LIMIT / 10)


def clip_value_foreach(loop: Loop) -> Any:
    nn.utils.clip_grad_value_(loop.model.parameters(), LIMIT / 10, foreach=True)


def total_norm_and_clip(loop: Loop) -> Any:
    total = nn.utils.get_total_norm(loop.gradients, error_if_nonfinite=True)
    nn.utils.clip_grads_with_norm_(loop.model.parameters(), LIMIT, total)
    return total


def grad_scaler(loop: Loop) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(loop.optimizer)


def nan_to_num(loop: Loop) -> Any:
    for gradient in loop.gradients:
        torch.nan_to_num_(gradient, nan=0.0)


def read_norms(loop: Loop) -> Any:
    return [gradient.norm(2) for gradient in loop.gradients], nn.utils.get_total_norm(loop.gradients)


def read_numbers(loop: Loop) -> Any:
    gradient = loop.model.enter.weight.grad
    assert gradient is not None and gradient.shape == (2 * WIDTH, WIDTH) and not gradient.is_sparse
    return [gradient.detach().cpu().numpy().sum(), gradient.abs().max().item(), gradient[1, 2].tolist()]


def read_flat(loop: Loop) -> Any:
    return (
        nn.utils.parameters_to_vector(loop.gradients),
        copy.deepcopy(loop.gradients),
        torch._foreach_norm(loop.gradients),
    )


def halve(loop: Loop) -> Any:
    for p in loop.model.parameters():
        if p.grad is not None:
            p.grad *= 0.5


def halve_data(loop: Loop) -> Any:
    for gradient in loop.gradients:
        gradient.data.mul_(0.5)


def set_data(loop: Loop) -> Any:
    for gradient in loop.gradients:
        gradient.data = gradient.data * 0.5


def set_anew(loop: Loop) -> Any:
    for p in loop.model.parameters():
        if p.grad is not None:
            p.grad = p.grad.clone() * 0.5


def set_unread(loop: Loop) -> Any:
    for number, p in enumerate([*loop.model.enter.parameters(), *loop.model.blocks.parameters()]):
        p.grad = torch.full_like(p, 0.1 * number)


def noise(loop: Loop) -> Any:
    generator = torch.Generator().manual_seed(7)
    for gradient in loop.gradients:
        gradient.add_(torch.randn(gradient.shape, generator=generator, dtype=torch.float64), alpha=0.01)


def sign(loop: Loop) -> Any:
    for gradient in loop.gradients:
        gradient.sign_()


def centralize(loop: Loop) -> Any:
    for gradient in loop.gradients:
        if gradient.dim() > 1:
            gradient.add_(-gradient.mean(dim=1, keepdim=True))


def graft(loop: Loop) -> Any:
    for p in loop.model.parameters():
        if p.grad is not None:
            p.grad.copy_(p.grad.sign() * (p.grad.norm() / p.grad.numel() ** 0.5))


def average_by_hand(loop: Loop) -> Any:
    for gradient in loop.gradients:
        if dist.is_initialized():
            dist.all_reduce(gradient)
            gradient.div_(dist.get_world_size())


def two_functions(loop: Loop) -> Any:
    clip_value(loop)
    return nn.utils.get_total_norm(loop.gradients), noise(loop)


def read_and_go_on(loop: Loop) -> Any:
    norm = nn.utils.get_total_norm(loop.gradients)
    loop.again()
    return norm, clip_norm(loop)


def drop_some(loop: Loop) -> Any:
    loop.model.blocks[0].weight.grad = None
    loop.model.leave.bias.grad = None


def drop_all(loop: Loop) -> Any:
    for p in loop.model.parameters():
        p.grad = None


def zero_some(loop: Loop) -> Any:
    for p in loop.model.blocks.parameters():
        assert p.grad is not None
        p.grad.zero_()


def zero_module(loop: Loop) -> Any:
    loop.model.zero_grad()
    loop.again()


def zero_module_in_place(loop: Loop) -> Any:
    loop.model.zero_grad(set_to_none=False)
    loop.again()


def zero_part(loop: Loop) -> Any:
    loop.model.blocks.zero_grad()
    loop.model.leave.zero_grad(set_to_none=False)
    loop.again()


def zero_optimizer(loop: Loop) -> Any:
    loop.optimizer.zero_grad()
    loop.again()


def zero_optimizer_in_place(loop: Loop) -> Any:
    loop.optimizer.zero_grad(set_to_none=False)
    loop.again()


def zero_own_optimizer(loop: Loop) -> Any:
    torch.optim.SGD(loop.model.parameters(), lr=1.0).zero_grad(set_to_none=False)
    loop.again()


def zero_engine(loop: Loop) -> Any:
    loop.zero_grad()
    loop.again()


def clip_by_engine(loop: Loop) -> Any:
    return loop.clip(LIMIT)


def clip_by_engine_twice(loop: Loop) -> Any:
    return loop.clip(2 * LIMIT), loop.clip(LIMIT)


EVERYWHERE = [
    *(drop_some, drop_all, zero_some, zero_module, zero_module_in_place, zero_part, zero_optimizer),
    *(zero_optimizer_in_place, zero_own_optimizer, zero_engine, clip_by_engine, clip_by_engine_twice),
]


WHOLE = [
    *(clip_norm, clip_norm_of_each, clip_largest_element, clip_norm_foreach, clip_value, clip_value_foreach),
    *(total_norm_and_clip, grad_scaler, nan_to_num, read_norms, read_numbers, read_flat, halve, halve_data, set_data),
    *(set_anew, set_unread, noise, sign, centralize, graft, average_by_hand, two_functions, read_and_go_on),
]


FUNCTIONS = [each for pair in zip(WHOLE, [*EVERYWHERE, *EVERYWHERE], strict=True) for each in pair]


def plain(size: int, passes: int, whole: bool, functions: list[Any]) -> list[tuple[Any, dict[str, Tensor]]]:
    """Return what each function returns, and the weights after its step, of one process of plain PyTorch."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), **OPTIONS)

    def backward(step: int, index: int) -> None:
        for replica in range(size):
            (model(batch(step, index, replica)).square().mean() / (size * passes)).backward()

    found = []
    for step, function in enumerate(functions):
        model.zero_grad()
        for index in range(passes):
            backward(step, index)
        clip = lambda limit: nn.utils.clip_grad_norm_(model.parameters(), limit)  # noqa: E731
        loop = Loop(model, optimizer, model.zero_grad, clip, partial(backward, step, 9))
        result = function(loop) if whole or function in EVERYWHERE else None
        optimizer.step()
        found.append((copy.deepcopy(result), copy.deepcopy(dict(model.state_dict()))))
    return found


def attempt(function: Any, loop: Loop, whole: bool) -> Any:
    if whole or function in EVERYWHERE:
        return function(loop)
    if function is not set_unread:  # which the step refuses, see below
        with pytest.raises(RuntimeError, match=REFUSED):
            function(loop)
    return None


def train(grid: Grid, stage: int, passes: int) -> None:
    """Train an engine with all functions, one in each step."""
    engine, whole = engine_of(grid, stage, passes), stage < 2 or grid.size == 1

    def backward(step: int, index: int) -> None:
        engine.backward(engine(batch(step, index, grid.data.rank)).square().mean())

    for step, (function, wanted) in enumerate(zip(FUNCTIONS, plain(grid.size, passes, whole, FUNCTIONS), strict=True)):
        for index in range(passes):
            backward(step, index)
            if index + 1 < passes:
                engine.step()
        again = lambda at=step: backward(at, 9)  # noqa: E731
        loop = Loop(engine.module, engine.optimizer, engine.zero_grad, engine.clip_grad_norm_, again)
        found = attempt(function, loop, whole)
        compared(found, wanted[0], f"stage {stage}, what {function.__name__} returns")
        engine.step()
        compared(engine.module_state_dict(), wanted[1], f"stage {stage}, weights after {function.__name__}")


def engines(stages: list[int], passes: int) -> None:
    grid = Grid(timeout=60)
    for stage in stages:
        train(grid, stage, passes)


def test_gradient_functions_act_as_in_torch_on_one_process() -> None:
    """Each of ``FUNCTIONS`` in a step of its own: its result, and the weights after the step, are plain PyTorch's."""
    engines(stages=[0, 3], passes=1)
    engines(stages=[0], passes=2)


@pytest.mark.parametrize("stages", [[1, 3], pytest.param([0, 2], marks=pytest.mark.exhaustive)], ids=str)
def test_gradient_functions_act_as_in_torch_on_two_ranks(ranks: Any, stages: list[int]) -> None:
    ranks(2, engines, stages, 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("size", "passes"), [(1, 2), (2, 2), (4, 1), (4, 2)])
def test_gradient_functions_act_as_in_torch_on_more_ranks(ranks: Any, size: int, passes: int) -> None:
    ranks(size, engines, [0, 1, 2, 3], passes)


def loops(stages: list[int], passes: int) -> None:
    """``ShardedOptimizer``: the same functions, with its own ``clip_grad_norm_``."""
    grid = Grid(timeout=60)
    # None of those that run another backward pass: their number in a step is fixed.
    once = [clip_norm, drop_some, set_anew, zero_some, clip_by_engine, halve_data, total_norm_and_clip, read_numbers]
    for stage in stages:
        model, whole = net(), stage < 2 or grid.size == 1
        options: Any = {
            "stage": stage,
            "module": model,
            "bucket_size": 70,
            "backward_passes_per_step": passes,
            **OPTIONS,
        }
        optimizer = ShardedOptimizer(torch.optim.SGD, model.parameters(), grid, **options)
        for step, (function, wanted) in enumerate(zip(once, plain(grid.size, passes, whole, once), strict=True)):
            optimizer.zero_grad()
            for index in range(passes):
                (model(batch(step, index, grid.data.rank)).square().mean() / passes).backward()
            loop = Loop(model, optimizer, optimizer.zero_grad, optimizer.clip_grad_norm_, lambda: None)
            found = attempt(function, loop, whole)
            compared(found, wanted[0], f"stage {stage}, what {function.__name__} returns")
            optimizer.step()
            with triax.zero.gathered(model):
                compared(dict(model.state_dict()), wanted[1], f"stage {stage}, weights after {function.__name__}")


def test_gradient_changes_in_a_plain_loop_act_as_in_torch(ranks: Any) -> None:
    ranks(2, loops, [0, 1, 2, 3], 1)
