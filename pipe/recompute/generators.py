"""Random generators whose states the second run of a recomputed group gets back.

They are the global ones of torch, Python and numpy, and those that a user's modules hold as attributes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from ...grid import Grid


class Generator(NamedTuple):
    """Random generator: functions that return and set its state."""

    read: Callable[[], Any]
    write: Callable[[Any], object]

    def saved(self) -> Callable[[], object]:
        """Return a function that gives the generator the state that it has now."""
        return partial(self.write, self.read())


def global_generators(grid: Grid) -> list[Generator]:
    """Return torch's generators (of the CPU, and of the grid's GPU if there is one), Python's, and numpy's."""
    known = [
        Generator(torch.get_rng_state, torch.set_rng_state),
        Generator(random.getstate, random.setstate),
        Generator(np.random.get_state, np.random.set_state),
    ]
    return known if grid.random_state() is None else [*known, Generator(grid.random_state, grid.set_random_state)]


def generators_in(values: Iterable[Any]) -> list[Generator]:
    """Return the generators among some values, each once."""
    by_id = {}
    for value in values:
        if isinstance(value, random.Random):
            by_id[id(value)] = Generator(value.getstate, value.setstate)
        elif isinstance(value, (torch.Generator, np.random.RandomState)):
            by_id[id(value)] = Generator(value.get_state, value.set_state)
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            by_id[id(value)] = Generator(partial(getattr, bits, "state"), partial(setattr, bits, "state"))
    return [*by_id.values()]
