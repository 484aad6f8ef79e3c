"""Named states of the device's random generator, for regions that differ between the ranks of a tensor group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from ...base.accelerators import functions_of

TENSOR_STATE = "model-parallel-rng"  # Megatron's name


class RandomStates:
    """States of the device's random generator by name: Megatron's ``CudaRNGStatesTracker``."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all states."""
        self._states: dict[str, Tensor] = {}
        self._seeds: set[int] = set()

    def get_states(self) -> dict[str, Tensor]:
        """Return the states by name."""
        return dict(self._states)

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Replace the states."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Begin a state from a seed.

        Raises:
            ValueError: the name or the seed is there already.
        """
        if name in self._states or seed in self._seeds:
            raise ValueError(f"the random state {name!r} of seed {seed} has a name or a seed that exists already")
        self._seeds.add(seed)
        generator = _generator()
        self._states[name] = torch.Generator(generator.device).manual_seed(seed).get_state()

    @contextmanager
    def fork(self, name: str = TENSOR_STATE) -> Iterator[None]:
        """Context in which random numbers come from a state, which goes on; the generator's own state comes back.

        Raises:
            ValueError: there is no such state.
        """
        if name not in self._states:
            raise ValueError(f"there is no random state {name!r}: call add({name!r}, seed) before fork")
        generator = _generator()
        before = generator.get_state()
        generator.set_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = generator.get_state()
            generator.set_state(before)

    def seed_tensor_ranks(self, seed: int, rank: int) -> None:
        """Seed the generator, equal on the ranks of a tensor group, and one state that differs between them.

        ``fork()`` draws from that state, for dropout within the layers that the ranks share.
        """
        self.reset()
        _generator().manual_seed(seed)
        self.add(TENSOR_STATE, seed + 2718 + rank)

    def reseed_tensor_ranks(self, seed: int, rank: int) -> None:
        """Seed the state that differs between tensor ranks anew."""
        with self.fork():
            _generator().manual_seed(seed + 2718 + rank)


def _generator() -> torch.Generator:
    """Return the generator of the process's device."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return torch.default_generator
    functions = functions_of(device)
    functions.init()  # makes the generators
    generator: torch.Generator = functions.default_generators[functions.current_device()]
    return generator
