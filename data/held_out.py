"""Samples by their numbers. A share of them is held out for evaluation."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Self

import numpy as np
from torch.utils.data import Dataset

from ..base.errors import ConfigError
from ..base.seeds import derive


class NumberedSamples(Dataset[int]):
    """Data set whose items are the numbers of its samples; the values stay in the class that inherits.

    Attributes:
        numbers: the numbers of the samples that this part has, of those of all parts.
        noun: word for a sample in messages.
    """

    numbers: Sequence[int]
    noun = "sample"

    def __len__(self) -> int:
        """Return N, the number of samples."""
        return len(self.numbers)

    def __getitem__(self, index: int) -> int:
        """Return the number of a sample."""
        return self.numbers[index]

    def split(self, held_out: float) -> tuple[Self, Self]:
        """Return the samples to train on and those that are held out, a share drawn at random, in their own order.

        Raises:
            ConfigError: there are less than two samples.
        """
        if len(self) < 2:
            raise ConfigError(f"held_out is {held_out}, but there is {len(self)} {self.noun}: give at least 2.")
        count = min(max(1, round(held_out * len(self))), len(self) - 1)
        order = np.random.default_rng(derive(0, "held out")).permutation(len(self)).tolist()
        return self._part(order[count:]), self._part(order[:count])

    def _part(self, indices: Sequence[int]) -> Self:
        part = copy.copy(self)
        part.numbers = [self.numbers[index] for index in sorted(indices)]
        return part
