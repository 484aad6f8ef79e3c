"""What a checkpoint has of replicas that stepped on their own: their mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..grid import Grid
from .held import Held, Named, Range, _home
from .local import agreed_steps
from .replicas import Replicas
from .whole import WholeStepper

__all__ = ["MeanHeld"]


class MeanHeld(Held):
    """As ``Held``; what is this rank's to write is the mean over the replicas. Collective over the data axis.

    Args:
        replicas, parameters: of ``Held``; each replica has all of its own.
        grid: the whole one.
        since: steps since the last meeting: after 0 their weights are the same.
    """

    def __init__(self, replicas: Replicas, parameters: Sequence[Named], grid: Grid, since: int) -> None:
        super().__init__(replicas, parameters, grid)
        self._since = since

    def values(self, mine: bool) -> Iterator[Range]:
        """As ``Held.values``.

        Raises:
            ValueError: on every rank, where it is to be written: replicas have taken unlike numbers of steps.
        """
        if not mine or agreed_steps(self._grid.data, self._since, self._grid.device) == 0:
            yield from super().values(mine)
            return
        for bucket in self._replicas.buckets:
            home, first = _home(bucket)
            yield from self._ranges(bucket, self._mean(home) if bucket.trained else home, first, True)
        for named in self._outside:
            yield from self._share(named, named.parameter.detach().contiguous().view(-1))

    def states(self) -> Iterator[tuple[str, Range]]:
        """As ``Held.states``."""
        whole = isinstance(self._stepper, WholeStepper)
        mine: dict[tuple[int, str], Tensor] = {}
        if isinstance(self._stepper, WholeStepper):
            views = self._stepper._views
            for number, (_, master, *_) in enumerate(views):
                known = self._known(master).items()
                mine |= {(number, key): v for key, v in known if isinstance(v, Tensor) and v.shape == master.shape}
        else:
            buckets = self._trained()
            for number, bucket in enumerate(buckets):
                mine |= {(number, key): value for key, value in self._flat(bucket).items()}
        # A replica that skipped all its steps so far has none: then there is no mean either.
        everyone = self._grid.data.all_gather_object([*mine])
        for number, key in everyone[0]:
            if all((number, key) in theirs for theirs in everyone):
                value = self._mean(mine[number, key])
                if whole:
                    assert isinstance(self._stepper, WholeStepper)
                    named = self._named[self._stepper._views[number][0]]
                    yield from ((key, part) for part in self._share(named, value.view(-1)))
                else:
                    bucket = buckets[number]
                    yield from ((key, part) for part in self._ranges(bucket, value, bucket.owned[0], True))

    def flats(self, flats: Sequence[Tensor], mine: bool) -> Iterator[Range]:
        """Flat tensors that go with the trained buckets, by parameter: all of them, or what is this rank's to write."""
        for bucket, flat in zip(self._trained(), flats, strict=True):
            yield from self._ranges(bucket, flat, 0, mine)

    def _mean(self, value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        found = value.detach().to(torch.promote_types(value.dtype, torch.float32), copy=True)
        self._grid.data.all_reduce(found)
        return found.div_(self._grid.data.size).to(value.dtype)
