"""The key-value cache of generation: what attention has seen of each sequence, so that a new token costs one row.

A layer of ``models/`` that must know positions or earlier keys has an attribute ``cache``, None in training. While
an ``InferenceEngine`` generates, a ``KVCache`` is there, and the layer reads ``cache.positions`` and calls
``cache.attend``. A rank keeps the keys and values of its own layers and of its own heads only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["KVCache"]


class KVCache:
    """Keys and values of a number of sequences, one a slot, for every attention layer of this rank.

    Slots are of one length; a sequence that leaves its slot leaves the memory for the next. Each layer of each stage
    has its own place, found by the order in which they call ``attend``, and takes its memory when it first does.

    Args:
        device: where positions are made.

    Attributes:
        slots: the number of sequences.
        length: tokens that a sequence may have.
        positions: integers (B, T): where each token of the batch that runs lies in its own sequence.

    Raises:
        RuntimeError: between ``end`` and ``begin`` a layer asks for it: what runs is no turn of generation.
    """

    def __init__(self, device: torch.device) -> None:
        self.slots = self.length = 0
        self._device = device
        self._positions: Tensor | None = None
        self._layers: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # (stage, nth) -> (slots, kv heads, length, d)
        self._stage = self._next = 0
        self._rows: Tensor | slice = slice(0, 0)
        self._begins = True
        self._longest = 0

    def reserve(self, slots: int, length: int) -> None:
        """Have room for so many sequences of such a length. What the slots held is lost where there was less."""
        if slots > self.slots or length > self.length:
            self.slots, self.length = max(slots, self.slots), max(length, self.length)
            self._layers.clear()

    def begin(self, stage: int, slots: Sequence[int], starts: Sequence[int], tokens: int) -> None:
        """Say what the next run of a stage computes.

        Args:
            stage: which stage runs.
            slots: (B,) the slot of each sequence, each once.
            starts: (B,) the tokens that each slot holds already.
            tokens: T, the new tokens of each.
        """
        self._stage, self._next = stage, 0
        self._begins = not any(starts)
        self._mask: Tensor | None = None  # made by the first layer that needs it, for all
        self._longest = max(starts) + tokens
        first, count = slots[0], len(slots)
        # Neighbouring slots in order are a view of the cache; others are copied together for each attention.
        together = list(slots) == list(range(first, first + count))
        self._rows = slice(first, first + count) if together else torch.tensor(slots, device=self._device)
        self._index = torch.tensor(slots, device=self._device)[:, None]  # (B, 1)
        self._positions = torch.tensor(starts, device=self._device)[:, None] + torch.arange(tokens, device=self._device)

    def end(self) -> None:
        """That run is over: whoever runs the layers before the next ``begin`` is no turn of generation."""
        self._positions = None

    @property
    def positions(self) -> Tensor:
        """See the class."""
        if self._positions is None:
            raise RuntimeError(
                "the model is run while a stream of tokens holds its cache: finish or close that stream first, "
                "list(stream) or stream.close()"
            )
        return self._positions

    def attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keep the new keys and values, and attend to all of each sequence up to each token.

        Args:
            module: the attention that calls; its ``attend(q, k, v, mask)`` does the arithmetic. The mask is added to
                the scores; None: the usual one, of as many keys as queries.
            q: (B, heads, T, d), this rank's heads.
            k, v: (B, kv heads, T, d); each serves heads / kv heads neighbouring heads of q.

        Returns:
            (B, heads, T, d).
        """
        key, positions = (self._stage, self._next), self.positions
        self._next += 1
        if key not in self._layers or self._layers[key][0].dtype != k.dtype:
            shape = self.slots, k.shape[1], self.length, k.shape[3]
            self._layers[key] = k.new_zeros(shape), v.new_zeros(shape)
        keys, values = self._layers[key]
        keys[self._index, :, positions] = k.transpose(1, 2)  # (B, T, kv heads, d)
        values[self._index, :, positions] = v.transpose(1, 2)
        y: Tensor
        if self._begins:  # no need to look back
            y = module.attend(q, k, v)
            return y
        if self._mask is None or self._mask.dtype != q.dtype:
            later = torch.arange(self._longest, device=q.device) > positions[..., None]  # (B, T, longest)
            self._mask = torch.zeros_like(later, dtype=q.dtype).masked_fill_(later, -torch.inf)[:, None]
        keys, values = keys[self._rows, :, : self._longest], values[self._rows, :, : self._longest]
        y = module.attend(q, keys, values, self._mask)
        return y

    @property
    def bytes(self) -> int:
        """Bytes held: 2 x layers x slots x kv heads x length x d elements, of this rank's layers and heads."""
        return sum(t.numel() * t.element_size() for pair in self._layers.values() for t in pair)
