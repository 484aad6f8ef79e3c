"""Rewards of drawn answers by users' functions, and the advantages that follow from them.

With R the reward of an answer, the sum of the functions' values times their weights, its advantage is

    group   (R - mean of the group) / (std of the group + 1e-4)
    batch   (R - mean of the group) / (std of all answers + 1e-4)
    none     R - mean of the group

where a group is the answers to one prompt, and std divides by the number less 1. An answer for which every function
returned None has the advantage 0 and is in no mean. Sources: Shao et al. 2024, arXiv:2402.03300, section 4.1.2
(``group``); Liu et al. 2025, arXiv:2503.20783 (``none``); TRL for the 1e-4, ``batch`` and None.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ...base.errors import AgreedError, nearest
from ...grid import Grid
from ...grid.agreement.agreement import agreed

Scale = Literal["group", "batch", "none"]
RewardFunction = Callable[..., Any]  # (prompts, completions, completion_ids, **columns) -> a number or None for each


class Rewards:
    """Users' reward functions, each called once for all answers of the job, on rank 0.

    A function is called as TRL's trainers call it, ``function(prompts=..., completions=..., completion_ids=...,
    trainer_state=..., **columns)`` with lists of one entry for each answer, and returns a list of numbers, or None for
    answers that it does not judge. It may be a coroutine function. ``trainer_state.global_step`` is the engine's.

    Args:
        grid: the grid.
        functions: a function, or several.
        weights: weight of each function; None: 1.

    Attributes:
        names: name of each function.

    Raises:
        TypeError: a function cannot be called.
        ValueError: there are no functions, two have one name, or the weights are not one for each function.
    """

    def __init__(
        self, grid: Grid, functions: RewardFunction | Sequence[RewardFunction], weights: Sequence[float] | None = None
    ) -> None:
        given = [functions] if callable(functions) else list(functions)
        for each in given:
            if not callable(each):
                raise TypeError(f"a reward function is a {type(each).__name__}: give functions of (prompts, ...)")
        self._grid, self._functions = grid, given
        self.names = [getattr(each, "__name__", type(each).__name__) for each in given]
        if not given or len({*self.names}) < len(given):
            raise ValueError(f"the reward functions are {self.names}: give at least one, and each its own name")
        self._weights = [1.0] * len(given) if weights is None else [float(weight) for weight in weights]
        if len(self._weights) != len(given):
            raise ValueError(f"{len(self._weights)} weights were given for {len(given)} reward functions: give as many")

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        step: int,
    ) -> Tensor:
        """Return the value of each function for each answer, (N, functions) float64, NaN for None. Collective.

        Raises:
            AgreedError: on every rank: a function failed, or returned something else than N numbers.
        """
        values = torch.zeros(len(ids), len(self._functions), dtype=torch.float64)
        with agreed(self._grid, AgreedError, catch=(Exception,)):
            for index, function in enumerate(self._functions if self._grid.rank == 0 else ()):
                given = {name: list(column) for name, column in columns.items()}
                given |= {"prompts": list(prompts), "completions": list(completions)}
                given |= {"completion_ids": [list(each) for each in ids]}
                given["trainer_state"] = SimpleNamespace(global_step=step)  # type: ignore[assignment]
                values[:, index] = _call(function, self.names[index], given, len(ids))
        values = values.to(self._grid.device)
        self._grid.world.broadcast(values)
        return values.cpu()

    def total(self, values: Tensor) -> Tensor:
        """Return the rewards, (N,), of the functions' values (N, functions); NaN if every function returned None."""
        total = (values * torch.tensor(self._weights, dtype=values.dtype)).nansum(1)
        return total.masked_fill(values.isnan().all(1), math.nan)


class Advantages(NamedTuple):
    """Advantages of answers.

    Attributes:
        values: (N,).
        flat: share of the answers whose group (with ``batch``: all answers) has equal rewards.
    """

    values: Tensor
    flat: float


def advantages(rewards: Tensor, group: int, scale: Scale) -> Advantages:
    """Return the advantages of rewards, (N,), where each run of ``group`` rewards belongs to one prompt's answers.

    Raises:
        ValueError: an unknown ``scale``.
    """
    if scale not in get_args(Scale):
        raise ValueError(f"there is no scale_rewards {scale!r}; {nearest(str(scale), get_args(Scale))}")
    groups = rewards.view(-1, group)
    ahead = (groups - groups.nanmean(1, keepdim=True)).flatten()
    spread = (std(rewards) if scale == "batch" else std(groups)[:, None]).expand_as(groups).flatten()
    flat = torch.isclose(spread, torch.zeros_like(spread)).double().mean().item()
    return Advantages((ahead if scale == "none" else ahead / (spread + 1e-4)).nan_to_num(nan=0.0), flat)


def std(values: Tensor) -> Tensor:
    """Return the standard deviation of each row's values that are no NaN, by their number less 1; NaN of one value."""
    ahead = values - values.nanmean(-1, keepdim=True)
    return (ahead.square().nansum(-1) / ((~values.isnan()).sum(-1) - 1)).sqrt()


def _call(function: RewardFunction, name: str, given: Mapping[str, Any], count: int) -> Tensor:
    """Return a function's values, (N,).

    Raises:
        RuntimeError: the function failed, or returned something else; the message names it.
    """
    try:
        found = function(**given)
        if inspect.isawaitable(found):
            with ThreadPoolExecutor(1) as thread:  # this thread may run an event loop, as a notebook's does
                found = thread.submit(asyncio.run, _result(found)).result()
        found = list(found) if hasattr(found, "tolist") else found  # a tensor, an array or a series
    except Exception as error:
        raise RuntimeError(f"the reward function {name} raised {type(error).__name__}: {error}") from error
    if not isinstance(found, Sequence) or len(found) != count:
        what = f"{len(found)} values" if isinstance(found, Sequence) else f"a {type(found).__name__}"
        raise RuntimeError(f"the reward function {name} returned {what} for {count} answers: return a list of one each")
    values = []
    for each in found:
        try:
            values.append(math.nan if each is None else float(each))
        except (TypeError, ValueError):
            raise RuntimeError(f"the reward function {name} returned {each!r}: return numbers, or None") from None
    if any(map(math.isinf, values)):
        raise RuntimeError(f"the reward function {name} returned an infinite reward: return finite numbers, or None")
    return torch.tensor(values, dtype=torch.float64)


async def _result(found: Any) -> Any:
    return await found
