"""Decode loop over the pipeline stages: each step is a prefill, or one token of each sequence of a group.

Stages send hidden states along the pipe axis, and the last stage draws the tokens and sends them to all ranks. Every
rank plans the same steps from the same tokens, so no other message is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import AgreedError
from ..base.evaluating import evaluating
from ..context.order import runs, shard
from ..grid import Axis, Pending
from ..models.log_probs import label_log_probs
from ..pipe.module import PipelineModule
from ..pipe.p2p import channels, receive_value
from ..pipe.schema import flatten, unflatten
from .batching import Batcher, DecodeStep, Request, Token
from .beam_search import continuations
from .kv_cache import KVCache
from .sampling import NOT_FINITE, Sampling, choose

_TOKENS = 2**20 + 1  # tag of the messages with tokens
_MAX_PENDING_SENDS = 8  # unfinished sends of a channel, beyond which the next send waits for the oldest


class DecodeLoop:
    """Loop that runs the decode steps of a ``Batcher`` over this rank's stages of a ``PipelineModule``.

    Args:
        module: the model.
        cache: the KV cache of this rank.
        vocab_size: V, if the last layer shards the vocabulary over the tensor axis; 0 means the last layer's width.

    Attributes:
        hops: number of hops. A hop is a run of neighbouring stages on one rank. A token's forward visits them one after
            the other.
    """

    def __init__(self, module: PipelineModule, cache: KVCache, vocab_size: int) -> None:
        self._module, self._cache, self._vocab_size, self._grid = module, cache, vocab_size, module.grid
        by_rank = groupby(range(len(module.placement)), key=lambda stage: module.placement[stage])
        self._stages_of_hop = [(rank, list(stages)) for rank, stages in by_rank]
        self._local_hops = [hop for hop, (rank, _) in enumerate(self._stages_of_hop) if rank == self._grid.pipe.rank]
        self.hops = len(self._stages_of_hop)
        self._attention_depth, self._layers_run = self._count_attention_depth(), 0
        self._channels = channels(module, "F")
        self._abandoned = False
        self._steps: dict[int, DecodeStep] = {}
        # For each step: its tokens (replicas, rows, n), and the receive or the sends of them.
        self._tokens: dict[int, tuple[Tensor, list[Pending]]] = {}

    def run(self, batcher: Batcher, sampling: Sampling, numbers: int = 1) -> Iterator[Token]:
        """Yield the tokens as they are generated. Collective: every rank iterates.

        ``numbers`` is n, the numbers of each row of a step that ``Batcher.append`` takes.

        At tick t, hop n runs step t - n. All ranks go through the ticks in order, so no ranks wait for one another in
        a cycle.

        3 hops   rank 0: 0 1 2 0 1 2       the group of each step. Group 0's second step needs the tokens of its
                 rank 1:   0 1 2 0 1 2     first, which rank 2 has drawn one tick before.
                 rank 2:     0 1 2 0 1 2

        Raises:
            AgreedError: logits are not finite.
        """
        for channel in self._channels.values():
            channel.schemas.clear()  # the model's dtype may have changed since the last stream
        self._steps.clear()  # of a stream that failed
        self._tokens.clear()
        self._numbers = numbers
        tick, planned, end, failure = 0, 0, None, ""
        closed = False
        while end is None or tick - self._local_hops[-1] < end:
            for hop in self._local_hops:
                index = tick - hop
                if index < 0 or (end is not None and index >= end):
                    continue
                if index == planned:  # this rank's first hop of the step
                    for token in self._receive_tokens(batcher, index - self.hops) if index >= self.hops else ():
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
                            # The reader closed the stream: steps that were started still end, on every rank.
                            closed = True
                            batcher.cancel()
                    if batcher.done:
                        end = index
                        continue
                    planned += 1
                    self._begin(index, batcher.plan(index))
                self._run_hop(index, hop, sampling)
            tick += 1
        for index in sorted(self._steps):
            self._receive_tokens(batcher, index)
        for channel in self._channels.values():
            channel.limit(0)
        if failure:
            self._cache.clear()
        if failure and not closed:
            raise AgreedError(failure)

    def abandon(self) -> None:
        """Drop every unfinished message, after a failure, so that the connections to the other ranks can close."""
        for channel in self._channels.values():
            channel.abandon()
        self._steps.clear()
        self._tokens.clear()
        self._abandoned = True

    def require_free(self) -> None:
        """Check that no other stream of the model is open.

        Raises:
            AgreedError: another stream is open; on every rank, also without layers that have a cache, because
                ``run_hook`` is set on each.
        """
        if isinstance(getattr(self._module.run_hook, "__self__", None), DecodeLoop):
            raise AgreedError(
                "another stream of this model is open and uses its cache. Finish or close the other stream first, "
                "list(stream) or stream.close()."
            )

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Context in which layers have the cache, without sequence parallelism, and in evaluation mode.

        Layers with an attribute ``context`` take the ids as this loop gives them: it has cut them itself.
        """
        module = self._module
        modules = list(module.modules())
        sharded = [m for m in modules if getattr(m, "sequence_parallel", False)]
        cut = [(m, axis) for m in modules if isinstance(axis := getattr(m, "context", None), Axis)]
        run_hook = module.run_hook
        for layer in layers_with_cache(module):
            layer.cache = self._cache
        for layer in sharded:
            layer.sequence_parallel = False  # type: ignore[assignment]  # a sequence of one token cannot be sharded
        for layer, axis in cut:
            layer.context = Axis(axis.name, [self._grid.rank], self._grid.rank, None)  # type: ignore[assignment]
        module.run_hook = self._run_layer
        try:
            with evaluating(module):
                yield
        except Exception:
            self._cache.clear()
            raise
        finally:
            module.run_hook = run_hook
            for layer in sharded:
                layer.sequence_parallel = True  # type: ignore[assignment]
            for layer, axis in cut:
                layer.context = axis  # type: ignore[assignment]
            for layer in layers_with_cache(module):
                layer.cache = None

    def _begin(self, index: int, step: DecodeStep) -> None:
        """Register step number ``index``, and post the receive of its tokens if another rank draws them."""
        pipe, source = self._grid.pipe, self._stages_of_hop[-1][0]
        self._steps[index] = step
        if step.width and pipe.rank != source:
            tokens = torch.empty(self._grid.data.size, step.width, self._numbers, dtype=torch.int64)
            self._tokens[index] = tokens, [pipe.receive(tokens, source, _TOKENS)]

    def _receive_tokens(self, batcher: Batcher, index: int) -> list[Token]:
        """Wait for a step's tokens and append them to their sequences."""
        step = self._steps.pop(index)
        if not step.width:
            return []
        tokens, pending = self._tokens.pop(index)
        for work in pending:
            work.wait()
        return batcher.append(step, tokens.tolist())

    @torch.no_grad()
    def _run_hop(self, index: int, hop: int, sampling: Sampling) -> None:
        """Run one hop of a step: this replica's forwards through the hop's stages, and the send to the next rank."""
        step, (_, stages) = self._steps[index], self._stages_of_hop[hop]
        if not step.width:
            return
        if self._module.training:  # the script called train() between two tokens
            self._module.eval()
        forwards, is_last = step.forwards[self._grid.data.rank], hop == self.hops - 1
        receives = [receive_value(self._channels[stages[0]], forward.shape) for forward in forwards] if hop else []
        logits = []
        for number, forward in enumerate(forwards):
            if hop:  # hidden states of the previous hop
                tensors = receives[number].wait()  # also brings the schema of a new shape
                x = unflatten(self._channels[stages[0]].schemas[forward.shape], tensors)
            else:
                x = torch.tensor(forward.tokens, device=self._grid.device)  # ids (B, T)
                if self._cache.in_parts(forward.starts, forward.shape[1]) is not None:
                    x = shard(x, self._grid.context)
            self._layers_run, self._forward = 0, forward
            for stage in stages:
                if forward.sources is not None:
                    self._cache.copy(stage, forward.sources, forward.slots, max(forward.starts))
                self._cache.begin(stage, forward.slots, forward.starts, forward.shape[1])
                x = self._module.run_stage(stage, x)
            self._cache.end()
            if is_last:
                logits.append(self._last(x)[:, -1])
                continue
            channel = self._channels[stages[-1] + 1]
            channel.send(flatten(x), forward.shape, index)
            channel.limit(_MAX_PENDING_SENDS)
        if is_last:
            self._tokens[index] = self._choose(step, logits, sampling)

    def _choose(self, step: DecodeStep, logits: list[Tensor], sampling: Sampling) -> tuple[Tensor, list[Pending]]:
        """Draw the tokens of a step, (replicas, rows, n), and start sending them to the other pipe ranks.

        Called on the ranks of the last stage. Collective over the tensor and data axes.

        Args:
            step: the step.
            logits: for each forward of this replica, the logits of the last token, (B, V_local).
            sampling: the options.

        Returns:
            The tokens of all replicas, and the handles of the sends.
        """
        grid = self._grid
        own_tokens = torch.zeros(1, step.width, self._numbers, dtype=torch.int64)
        if logits:
            rows = torch.cat(logits) if len(logits) > 1 else logits[0]  # (rows, V_local)
            numbers = self._next(rows, step.rows(grid.data.rank), sampling)
            own_tokens[0, : len(numbers)] = numbers
        others = [rank for rank in range(grid.pipe.size) if rank != grid.pipe.rank]
        tokens = own_tokens
        if grid.data.size > 1:
            tokens = own_tokens.new_empty(grid.data.size, *own_tokens.shape[1:])
            grid.data.all_gather(tokens, own_tokens)
        return tokens, [grid.pipe.send(tokens, rank, _TOKENS) for rank in others]

    def _next(self, logits: Tensor, requests: list[Request], sampling: Sampling) -> Tensor:
        """Return the numbers of the next tokens of the requests, (rows, n), from their logits (rows, V_local)."""
        axis, vocab_size = self._grid.tensor, self._vocab_size or logits.shape[-1]
        searches = [beams for request in requests if (beams := request.beams) is not None]
        if searches:
            num_beams = self._numbers // 2
            searches = searches[:: searches[0].options.beams]
            return continuations(logits, sampling, searches, num_beams, axis=axis, vocab_size=vocab_size)
        keys = [(*request.key, len(request.tokens)) for request in requests]
        sequences = [request.tokens for request in requests]
        drawn = choose(logits, sampling, keys, axis=axis, vocab_size=vocab_size, sequences=sequences)
        if sampling.logprobs != "tempered":
            return drawn
        ids = drawn[:, 0].to(logits.device).clamp(min=0)  # a token that is not finite ends the stream
        log_probs = label_log_probs(logits, ids, self._grid, vocab_size, sampling.temperature).double().cpu()
        return torch.stack([drawn[:, 0], log_probs.view(torch.int64)], dim=1)

    def _run_layer(self, stage: int, layer: int, call: Callable[[Any], Any], x: Any) -> Any:
        """Run a layer as ``run_hook``. Behind the last attention layer only the last token of each prompt is kept.

        The logits of other tokens are not needed, and the head costs most.
        """
        if stage in self._stages_of_hop[-1][1]:
            if self._layers_run == self._attention_depth and isinstance(x, Tensor) and x.dim() == 3:
                x = self._last(x)
            self._layers_run += 1
        return call(x)

    def _last(self, x: Tensor) -> Tensor:
        """Return the last token of each row: (B, 1, D). It is on one rank of the context axis if that has parts."""
        axis = self._cache.in_parts(self._forward.starts, self._forward.shape[1])
        if axis is None or x.shape[1] == 1:
            return x[:, -1:]
        held = [runs(self._forward.shape[1], x.shape[1], axis.size, rank) for rank in range(axis.size)]
        owner = max(range(axis.size), key=lambda rank: max((stop for _, stop in held[rank]), default=0))
        own_length = sum(stop - start for start, stop in held[axis.rank])  # padding is behind them
        last = x[:, max(own_length - 1, 0)][:, None].contiguous()
        axis.broadcast(last, source=owner)
        return last

    def _count_attention_depth(self) -> int:
        """Return the number of layers of the last hop up to and including its last layer with a cache.

        0 if none has a cache; -1 on ranks that do not run the last hop.
        """
        if self.hops - 1 not in self._local_hops:
            return -1
        layers = [layer for stage in self._stages_of_hop[-1][1] for layer in self._module.layers_of(stage)]
        attending = [i for i, layer in enumerate(layers) if layers_with_cache(self._module.layers[str(layer)])]
        return attending[-1] + 1 if attending else 0


def layers_with_cache(module: nn.Module) -> list[Any]:
    """Return the sub-modules that have an attribute ``cache``: they get the KV cache during generation."""
    return [m for m in module.modules() if hasattr(m, "cache")]


def _not_finite(token: Token) -> str:
    return (
        f"the logits for token {token.position} of prompt {token.request} are not finite. Look for nan in the weights, "
        "or compute in a wider dtype."
    )
