"""States of this process's random generators: torch's (of the CPU and the device), Python's, numpy's.

triax draws from none of them: they are saved for the user's own code.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from ..grid import Grid


def random_states(grid: Grid) -> dict[str, Tensor]:
    """Return name -> state, as a tensor, for each random generator of this process."""
    version, words, gauss = random.getstate()
    _, keys, position, has, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64),
        "numpy": torch.tensor([*map(int, keys), position, has], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    device = grid.random_state()
    return states if device is None else {**states, "device": device}


@contextmanager
def unchanged_random_states(grid: Grid) -> Iterator[None]:
    """Context after which the random generators of this process have their states of before."""
    states = random_states(grid)
    try:
        yield
    finally:
        set_random_states(grid, states)


def set_random_states(grid: Grid, states: Mapping[str, Tensor]) -> None:
    """Set the states to those that ``random_states`` returned."""
    torch.set_rng_state(states["torch"].clone())
    version, *words = states["python"].tolist()
    has, gauss = states["python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss if has else None))
    *keys, position, has_gauss = states["numpy"].tolist()
    legacy = ("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, states["numpy_gauss"].item())
    np.random.set_state(legacy)  # noqa: NPY002
    if "device" in states:
        grid.set_random_state(states["device"].clone())
