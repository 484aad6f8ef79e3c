"""KV cache: keys and values of the tokens seen, so that a decode step runs only the new token through the model.

A layer of ``models/`` that needs positions or earlier keys has an attribute ``cache``, None in training. During
generation it is a ``KVCache``: the layer reads ``cache.positions`` and calls ``cache.attend``. A rank stores the keys
and values of its own layers and heads only. A recurrent layer calls ``cache.recur``, and the cache keeps its state,
whose size does not depend on the number of tokens.

On a grid with a context axis a prompt is computed in parts (``context/order.py``), and each rank then keeps the keys
and values of the whole prompt: the tokens that follow are computed on every rank of the axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..context.order import gather, positions, runs
from ..grid import Axis


class KVCache:
    """Keys and values of every attention layer of this rank, for a number of sequences, one per slot.

    And the states of every recurrent layer.

    All slots have the same length. The memory of a slot is used again after its sequence ends. Each layer of each stage
    has tensors of its own, identified by the order in which layers call ``attend`` and allocated at the first call.

    Args:
        device: device of the positions.
        context: the context axis; None: prompts are not computed in parts.

    Attributes:
        slots: number of slots.
        length: number of tokens of a slot.
        positions: integers (B, T): position of each token of the running batch in its own sequence.

    Raises:
        RuntimeError: a layer reads the cache outside of ``begin`` and ``end``: another forward than the stream's runs.
    """

    def __init__(self, device: torch.device, context: Axis | None = None) -> None:
        self.slots = self.length = 0
        self._device, self._context = device, context
        self._positions: Tensor | None = None
        self._layers: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # (stage, nth) -> (slots, kv heads, length, d)
        self._states: dict[tuple[int, int], tuple[Tensor, ...]] = {}  # (stage, nth) -> (slots, ...) each
        self._stage = self._next = 0
        self._rows: Tensor | slice = slice(0, 0)
        self._begins = True
        self._longest = 0

    def reserve(self, slots: int, length: int) -> None:
        """Make room for ``slots`` sequences of ``length`` tokens. If the cache has to grow, its contents are lost."""
        if slots > self.slots or length > self.length:
            self.slots, self.length = max(slots, self.slots), max(length, self.length)
            self.clear()

    def clear(self) -> None:
        """Drop all contents: what a failed stream has left may not be finite, which a mask does not keep out."""
        self._layers.clear()
        self._states.clear()

    def in_parts(self, starts: Sequence[int], tokens: int) -> Axis | None:
        """Return the context axis if a forward's tokens are spread over it: those of prompts, not of a decode step."""
        wanted = self._context is not None and self._context.size > 1 and not any(starts) and tokens > 1
        return self._context if wanted else None

    def copy(self, stage: int, sources: Sequence[int], slots: Sequence[int], tokens: int) -> None:
        """Copy the keys and values of the first ``tokens`` tokens of some slots to others, in all layers of a stage.

        Recurrent layers have the state behind these tokens, which is copied.
        """
        from_, to = (torch.tensor(slot_numbers, device=self._device) for slot_numbers in (sources, slots))
        for (owner, _), pair in self._layers.items():
            for held in pair if owner == stage else ():
                held[to, :, :tokens] = held[from_, :, :tokens]
        for (owner, _), states in self._states.items():
            for held in states if owner == stage else ():
                held[to] = held[from_]

    def begin(self, stage: int, slots: Sequence[int], starts: Sequence[int], tokens: int) -> None:
        """Prepare for the next forward of a stage.

        Args:
            stage: index of the stage.
            slots: (B,) the slot of each sequence, without duplicates.
            starts: (B,) the number of tokens that each slot has already.
            tokens: T, the number of new tokens of each.
        """
        self._stage, self._next = stage, 0
        self._begins = not any(starts)
        self._goes_on = None if all(starts) else torch.tensor(starts, device=self._device) > 0  # (B,)
        self._masks: dict[tuple[Any, ...], Tensor] = {}  # each made by the first layer that needs it
        self._longest = max(starts) + tokens
        first, count = slots[0], len(slots)
        # Contiguous slots are read as a view of the cache; others are gathered into a copy by each attention.
        contiguous = list(slots) == list(range(first, first + count))
        self._rows = slice(first, first + count) if contiguous else torch.tensor(slots, device=self._device)
        self._index = torch.tensor(slots, device=self._device)[:, None]  # (B, 1)
        # Contiguous slots of equal length are written by one copy; others element by element.
        self._common = starts[0] if contiguous and starts.count(starts[0]) == count else None
        self._tokens, self._axis = tokens, self.in_parts(starts, tokens)
        new = torch.arange(tokens, device=self._device)
        if self._axis is not None:
            held = positions(tokens, self._axis.size, self._axis.rank).to(self._device)
            new = held.clamp(max=tokens - 1)  # padding has no position
        self._positions = torch.tensor(starts, device=self._device)[:, None] + new

    def end(self) -> None:
        """End the forward: until the next ``begin``, a layer that reads the cache raises an error."""
        self._positions = None

    @property
    def positions(self) -> Tensor:
        """Position of each token of the running batch in its own sequence, integers (B, T)."""
        if self._positions is None:
            raise RuntimeError(
                "the model is run while a stream of tokens uses its cache. Finish or close that stream first, "
                "list(stream) or stream.close()."
            )
        return self._positions

    @property
    def axis(self) -> Axis | None:
        """The context axis if the tokens of the running batch are spread over it, else None."""
        return self._axis

    @property
    def tokens(self) -> int:
        """Number of new tokens of each sequence of the running batch, of all ranks of the context axis."""
        return self._tokens

    def valid(self, local: int) -> Tensor | None:
        """Return which of the ``local`` tokens of this rank are no padding, bool (local,); None: all are none."""
        if self._axis is None:
            return None
        held = runs(self._tokens, local, self._axis.size, self._axis.rank)
        return torch.arange(local, device=self._device) < sum(stop - start for start, stop in held)

    def recur(self, run: Callable[[list[Tensor]], tuple[Tensor, Sequence[Tensor]]], empty: Sequence[Tensor]) -> Tensor:
        """Run a recurrent layer from the states of the sequences, and store the states at the end.

        Args:
            run: takes the states, and returns the layer's output and the new states.
            empty: states of a sequence without tokens, zeros, (B, ...) each.

        Returns:
            The output.
        """
        key, _ = (self._stage, self._next), self.positions
        self._next += 1
        held = self._states.get(key)
        if held is None or [state.dtype for state in held] != [state.dtype for state in empty]:
            held = self._states[key] = tuple(state.new_zeros(self.slots, *state.shape[1:]) for state in empty)
        states = [state[self._rows] for state in held]
        if self._goes_on is not None:  # a slot that begins has the state of its last sequence
            begins = ~self._goes_on
            states = [state.masked_fill(begins.view(-1, *[1] * (state.dim() - 1)), 0) for state in states]
        y, new = run(states)
        for state, value in zip(held, new, strict=True):
            state[self._rows] = value
        return y

    def attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the new keys and values, and attend: each new token to itself and to the earlier ones of its sequence.

        Args:
            module: the calling attention; its ``attend(q, k, v, mask)`` computes the result. The mask is added to the
                scores; None is the causal mask of T keys and T queries.
            q: (B, heads, T, d), queries of the new tokens, for this rank's heads.
            k, v: (B, kv heads, T, d), their keys and values; each head is shared by heads / kv heads neighbouring heads
                of q.

        Returns:
            (B, heads, T, d).
        """
        key, places = (self._stage, self._next), self.positions
        self._next += 1
        if key not in self._layers or self._layers[key][0].dtype != k.dtype:
            keys, values = (x.new_zeros(self.slots, x.shape[1], self.length, x.shape[3]) for x in (k, v))
            self._layers[key] = keys, values
        keys, values = self._layers[key]
        y: Tensor
        if self._axis is not None:
            y = module.attend_in_parts(q, k, v, torch.zeros(len(q), self._tokens, dtype=torch.int64))
            k, v = (gather(x, self._axis, self._tokens, dim=2) for x in (k, v))
            places = torch.arange(self._tokens, device=self._device)[None]
        if self._common is not None:
            start, stop = self._common, self._common + self._tokens
            keys[self._rows, :, start:stop], values[self._rows, :, start:stop] = k, v
        else:
            keys[self._index, :, places] = k.transpose(1, 2)  # (B, T, kv heads, d)
            values[self._index, :, places] = v.transpose(1, 2)
        if self._axis is not None:
            return y
        if self._begins:  # the slots are empty: prefill
            y = module.attend(q, k, v)
            return y
        window, chunk = module.options.window, module.options.chunk
        kind = q.dtype, window, chunk
        if kind not in self._masks:
            held = torch.arange(self._longest, device=q.device)
            ahead = held - places[..., None]  # (B, T, longest)
            unseen = ahead > 0 if window is None else (ahead > 0) | (ahead <= -window)
            if chunk is not None:
                unseen |= held // chunk != places[..., None] // chunk
            mask = torch.zeros_like(unseen, dtype=q.dtype).masked_fill_(unseen, -torch.inf)
            self._masks[kind] = mask[:, None]
        keys, values = keys[self._rows, :, : self._longest], values[self._rows, :, : self._longest]
        y = module.attend(q, keys, values, self._masks[kind])
        return y

    @property
    def bytes(self) -> int:
        """Memory in bytes: layers x slots x kv heads x length x (d of k + d of v) elements, of this rank's part.

        Of recurrent layers: layers x slots x (heads x K x V elements of the state, and the convolution's inputs).
        """
        held = [*self._layers.values(), *self._states.values()]
        return sum(tensor.nbytes for tensors in held for tensor in tensors)
