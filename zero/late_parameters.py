"""LateParameters: parameters that some steps left out, and that have step counts of their own, as in torch.

    bucket     a a a | b b b b | c c | d d d      b was frozen in the first steps, c has no gradient in this one
    pieces     a a a | b b b b |     | d d d      each stepped with its own count; c is left out

An optimizer over flat buckets has one state for each bucket. The numbers in this state (Adam's ``step``) count for all
parameters that no step has left out. If a step leaves out a parameter of a bucket, because it is frozen or has no
gradient on any replica, the optimizer steps the bucket in pieces from then on: views of the bucket's master and state,
each with its own numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .bucket import Bucket
from .optimizer_state import copied, is_elementwise, is_number, worker_of

Numbers = dict[str, Any]


class LateParameters:
    """Step counts of the parameters that some steps left out, and the steps of their buckets.

    Args:
        optimizer: over the masters of the buckets.

    Attributes:
        numbers: for each of these parameters, the entries of its state that are one number; None: it has no state yet.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.numbers: dict[Tensor, Numbers | None] = {}

    def find(self, buckets: Sequence[Bucket], without: Collection[Tensor]) -> dict[Bucket, set[Tensor]]:
        """Return the buckets that must be stepped in pieces, with the parameters that this step leaves out."""
        standing_in: dict[Bucket, set[Tensor]] = {}
        for bucket in buckets:
            standing = bucket.standing(without)
            for parameter in standing - self.numbers.keys():
                self.numbers[parameter] = self._common(bucket)
            if standing or (self.numbers and any(m.parameter in self.numbers for m in bucket.members)):
                standing_in[bucket] = standing
        return standing_in

    def step(self, standing_in: Mapping[Bucket, set[Tensor]]) -> None:
        """Step buckets in pieces. Their gradients are scaled already."""
        groups = self._optimizer.param_groups
        # Fused kernels do not take tensors with and without state together.
        chosen: list[list[list[nn.Parameter]]] = [[[] for _ in groups] for _ in range(2)]
        state: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        pieces: list[tuple[Bucket, Tensor | None, int, int, nn.Parameter]] = []
        for bucket, standing in standing_in.items():
            assert bucket.master is not None and bucket.group is not None
            flat = self._optimizer.state.get(bucket.master, {})
            for parameter, start, stop in self.cut(bucket, standing):
                piece = nn.Parameter(bucket.master.detach()[start:stop])
                piece.grad = bucket.owned_gradient[start:stop].to(piece.device)
                numbers = self.numbers_of(bucket, parameter)
                if numbers is not None:
                    state[piece] = {k: v[start:stop] for k, v in flat.items() if is_elementwise(v, bucket.master)}
                    state[piece] |= {key: copied(value) for key, value in numbers.items()}
                chosen[piece in state][bucket.group].append(piece)
                pieces.append((bucket, parameter, start, stop, piece))
        for some in chosen:
            listed = [{**group, "params": parameters} for group, parameters in zip(groups, some, strict=True)]
            worker_of(self._optimizer, listed, state).step()
        for bucket, parameter, start, stop, piece in pieces:
            assert bucket.master is not None
            flat = self._optimizer.state[bucket.master]
            numbers = {}
            for key, value in state[piece].items():
                if is_number(value, piece):
                    numbers[key] = value
                    flat.setdefault(key, copied(value))  # no parameter of this bucket has the common number
                    continue
                if not is_elementwise(flat.get(key), bucket.master):
                    flat[key] = torch.zeros_like(bucket.master, dtype=value.dtype, requires_grad=False)
                if flat[key][start:stop].data_ptr() != value.data_ptr():
                    flat[key][start:stop].copy_(value)
            if parameter is None:
                flat.update(numbers)
            else:
                self.numbers[parameter] = numbers

    def numbers_of(self, bucket: Bucket, parameter: Tensor | None) -> Numbers | None:
        """Return the numbers of a parameter, or with None those of the rest of its bucket; None: no state yet."""
        return self._common(bucket) if parameter is None else self.numbers[parameter]

    def _common(self, bucket: Bucket) -> Numbers | None:
        """Return the numbers of the bucket's state, or None if it has no state yet."""
        master = bucket.master
        assert master is not None
        state = self._optimizer.state
        if master not in state:
            return None
        return {key: copied(value) for key, value in state[master].items() if is_number(value, master)}

    def cut(self, bucket: Bucket, standing: Collection[Tensor]) -> list[tuple[Tensor | None, int, int]]:
        """Cut the owned range into pieces that are stepped: (parameter with its own numbers or None, start, stop).

        A rank that owns no element of such a parameter has an empty piece: numbers are equal on all ranks.
        """
        first, last = bucket.owned
        pieces: list[tuple[Tensor | None, int, int]] = []
        joins = False  # the slot before is of a piece with the common numbers
        for slot, member in zip(bucket.flat.slots, bucket.members, strict=True):
            start, stop = (min(max(bound, first), last) - first for bound in (slot.start, slot.stop))
            common = member.parameter not in self.numbers
            if joins and common:
                pieces[-1] = None, pieces[-1][1], stop
            elif member.parameter not in standing:
                pieces.append((None if common else member.parameter, start, stop))
            joins = common
        return pieces
