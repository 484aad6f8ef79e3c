"""One loop over turns of the pipe, each a prefill or one token of a group of sequences.

Stages pass hidden states along the pipe axis, the last one chooses tokens, and every rank hears of them: each rank
plans the same turns from the same tokens, so that nobody has to be told what to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from ..grid import Pending
from ..pipe.executor import channels
from ..pipe.module import PipelineModule
from ..pipe.nest import flatten, unflatten
from ..pipe.p2p import Receive, receive_value
from .batch import AgreedError
from .batching import Batcher, Pass, Token, Turn
from .cache import KVCache
from .sampling import NOT_FINITE, Sampling, choose

__all__ = ["Turns", "caching"]

_TOKENS = 2**20 + 1  # tag of the messages that bring tokens
_UNDER_WAY = 8  # hidden states on their way from one channel before its next send waits for the oldest


class Turns:
    """Runs a ``Batcher``'s turns over a ``PipelineModule``'s stages on this rank.

    Args:
        module: the model.
        cache: of this rank.
        vocab_size: V, where the last layer shares it out over the tensor axis; 0: its width.

    Attributes:
        legs: how many runs of neighbouring stages on one rank the way through the pipe has.
    """

    def __init__(self, module: PipelineModule, cache: KVCache, vocab_size: int) -> None:
        self._module, self._cache, self._vocab_size, self._grid = module, cache, vocab_size, module.grid
        by_rank = groupby(range(len(module.placement)), key=lambda stage: module.placement[stage])
        self._legs = [(rank, list(stages)) for rank, stages in by_rank]
        self._mine = [leg for leg, (rank, _) in enumerate(self._legs) if rank == self._grid.pipe.rank]
        self.legs = len(self._legs)
        self._tail, self._calls = self._count_tail(), 0
        self._channels = channels(module, "F")
        self._abandoned = False
        self._turns: dict[int, Turn] = {}
        # Of a turn: tokens (replicas, rows), and what brings them, or takes them to others.
        self._chosen: dict[int, tuple[Tensor, list[Pending]]] = {}

    def run(self, batcher: Batcher, sampling: Sampling) -> Iterator[Token]:
        """The tokens, as they come. At tick t, leg n runs turn t - n; no rank waits in a ring, since all go by ticks.

        3 legs   rank 0: 0 1 2 0 1 2       which group's turn each runs. Group 0's second turn needs the tokens of
                 rank 1:   0 1 2 0 1 2     its first, and they are there: one tick before, rank 2 has chosen them.
                 rank 2:     0 1 2 0 1 2

        Raises:
            AgreedError: logits are not finite.
        """
        for channel in self._channels.values():
            channel.schemas.clear()  # the model may compute in another precision than the last time
        tick, planned, end, failure = 0, 0, None, ""
        closed = False
        while end is None or tick - self._mine[-1] < end:
            for leg in self._mine:
                index = tick - leg
                if index < 0 or (end is not None and index >= end):
                    continue
                if index == planned:  # this rank's first leg of it
                    for token in self._take(batcher, index - self.legs) if index >= self.legs else ():
                        if token.token == NOT_FINITE:
                            failure = failure or _not_finite(token)
                        if failure or closed:
                            batcher.cancel()
                            continue
                        try:
                            yield token
                        except GeneratorExit:
                            if self._abandoned:
                                return
                            # The reader leaves: what is under way comes to its end first, on every rank the same.
                            closed = True
                            batcher.cancel()
                    if batcher.done:
                        end = index
                        continue
                    planned += 1
                    self._expect(index, batcher.plan(index))
                self._run(index, leg, sampling)
            tick += 1
        for index in sorted(self._turns):
            self._take(batcher, index)
        for channel in self._channels.values():
            channel.limit(0)
        if failure and not closed:
            raise AgreedError(failure)

    def abandon(self) -> None:
        """After a failure: let go of every message, so that the connections to the other ranks can close."""
        for channel in self._channels.values():
            channel.abandon()
        self._turns.clear()
        self._chosen.clear()
        self._abandoned = True

    def require_free(self) -> None:
        """Refuse to begin while another stream of the model has not ended.

        Raises:
            AgreedError: on every rank, also those whose layers have no cache: ``around`` is set on each.
        """
        if isinstance(getattr(self._module.around, "__self__", None), Turns):
            raise AgreedError(
                "another stream of this model has not ended, and holds its cache: finish or close the other stream "
                "first, list(stream) or stream.close()"
            )

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Within it the layers have the cache, are whole in the sequence, and in evaluation mode."""
        self.require_free()
        module = self._module
        modules = list(module.modules())
        sharded = [m for m in modules if getattr(m, "sequence_parallel", False)]
        training = [m for m in modules if m.training]
        around = module.around
        for layer in caching(module):
            layer.cache = self._cache
        for layer in sharded:
            layer.sequence_parallel = False  # type: ignore[assignment]  # one token cannot be shared out
        module.eval()
        module.around = self._around
        try:
            yield
        finally:
            module.around = around
            for layer in training:
                layer.training = True
            for layer in sharded:
                layer.sequence_parallel = True  # type: ignore[assignment]
            for layer in caching(module):
                layer.cache = None

    def _expect(self, index: int, turn: Turn) -> None:
        """A turn begins here: post the receive of its tokens, where another rank chooses them."""
        pipe, source = self._grid.pipe, self._legs[-1][0]
        self._turns[index] = turn
        if turn.width and pipe.rank != source:
            tokens = torch.empty(self._grid.data.size, turn.width, dtype=torch.int64)
            self._chosen[index] = tokens, [pipe.receive(tokens, source, _TOKENS)]

    def _take(self, batcher: Batcher, index: int) -> list[Token]:
        """Wait for a turn's tokens and put them behind their sequences."""
        turn = self._turns.pop(index)
        if not turn.width:
            return []
        tokens, pending = self._chosen.pop(index)
        for work in pending:
            work.wait()
        return batcher.take(turn, tokens.tolist())

    @torch.no_grad()
    def _run(self, index: int, leg: int, sampling: Sampling) -> None:
        """One leg of one turn: this replica's passes through its stages, then on to the next rank."""
        turn, (_, stages) = self._turns[index], self._legs[leg]
        if not turn.width:
            return
        if self._module.training:  # somebody changed it while the stream stood still
            self._module.eval()
        parts, last = turn.passes[self._grid.data.rank], leg == self.legs - 1
        arriving = [receive_value(self._channels[stages[0]], part.shape) for part in parts] if leg else []
        logits = []
        for number, part in enumerate(parts):
            x = self._input(part, stages[0], arriving[number] if leg else None)
            self._calls = 0
            for stage in stages:
                self._cache.begin(stage, part.slots, part.starts, part.shape[1])
                x = self._module.run_stage(stage, x)
            self._cache.end()
            if last:
                logits.append(x[:, -1])
                continue
            channel = self._channels[stages[-1] + 1]
            channel.send(flatten(x), part.shape, index)
            channel.limit(_UNDER_WAY)
        if last:
            self._chosen[index] = self._choose(turn, logits, sampling)

    def _input(self, part: Pass, stage: int, receive: Receive | None) -> Any:
        if receive is None:
            return torch.tensor(part.tokens, device=self._grid.device)  # (B, T)
        tensors = receive.wait()
        return unflatten(self._channels[stage].schemas[part.shape], tensors)

    def _choose(self, turn: Turn, logits: list[Tensor], sampling: Sampling) -> tuple[Tensor, list[Pending]]:
        """The tokens of a turn, of all replicas, on their way to the other stages."""
        grid = self._grid
        mine = torch.zeros(1, turn.width, dtype=torch.int64)
        if logits:
            rows = torch.cat(logits)  # (rows, V_local)
            keys = [(*request.key, len(request.tokens)) for request in turn.rows(grid.data.rank)]
            vocab_size = self._vocab_size or rows.shape[-1]
            mine[0, : len(keys)] = choose(rows, sampling, keys, axis=grid.tensor, vocab_size=vocab_size)
        tokens = mine.new_empty(grid.data.size, turn.width)
        grid.data.all_gather(tokens, mine)
        others = [rank for rank in range(grid.pipe.size) if rank != grid.pipe.rank]
        return tokens, [grid.pipe.send(tokens, rank, _TOKENS) for rank in others]

    def _around(self, stage: int, layer: int, call: Callable[[Any], Any], x: Any) -> Any:
        """Behind the last attention, only the last token of a prompt goes on: the head is the dearest layer."""
        if stage in self._legs[-1][1]:
            if self._calls == self._tail and isinstance(x, Tensor) and x.dim() == 3:
                x = x[:, -1:]
            self._calls += 1
        return call(x)

    def _count_tail(self) -> int:
        """Layers of the last leg up to its last one that has a cache; none of the others looks at other tokens."""
        if self.legs - 1 not in self._mine:
            return -1
        layers = [layer for stage in self._legs[-1][1] for layer in self._module.layers_of(stage)]
        found = [i for i, layer in enumerate(layers) if caching(self._module.layers[str(layer)])]
        return found[-1] + 1 if found else 0


def caching(module: nn.Module) -> list[Any]:
    """The modules that want a cache while they generate."""
    return [m for m in module.modules() if hasattr(m, "cache")]


def _not_finite(token: Token) -> str:
    return (
        f"the logits for token {token.position} of prompt {token.request} are not finite: look for nan in the weights, "
        "or compute in a wider dtype"
    )
