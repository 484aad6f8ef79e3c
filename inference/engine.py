"""``triax.init_inference``: generation from a model of ``triax.models``, on any grid."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..engine.pipeline_engine import PipelineEngine
from ..engine.snapshot.load_weights import load_weights
from ..grid import layout_of
from ..grid.agreement import same
from ..grid.failure import all_or_none
from ..pipe.module import PipelineModule
from .batching import Batcher, Request, Token
from .decode_loop import DecodeLoop, layers_with_cache
from .kv_cache import KVCache
from .sampling import Sampling


def init_inference(
    model: PipelineModule | PipelineEngine,
    *,
    dtype: torch.dtype | None = None,
    max_batch: int = 8,
    max_length: int | None = None,
    checkpoint: str | Path | None = None,
) -> InferenceEngine:
    """Make an engine for generation. Collective: every rank calls it, with the same arguments.

    Args:
        model: a ``PipelineModule`` whose layers are of ``triax.models``, or have their attribute ``cache``; or the
            ``PipelineEngine`` that trains one. It may continue training; each call uses the weights of that moment.
        dtype: dtype to which the weights are cast in place. If None, they are not cast. Not for a training engine.
        max_batch: number of sequences that run at once, on each replica.
        max_length: number of tokens of the longest sequence, prompt included. If None, it is the number of the model's
            positions. Each slot of the KV cache that a call uses takes memory for the longest sequence of the call.
        checkpoint: checkpoint whose weights are loaded first, as ``load_weights`` does. Not for a training engine,
            which has ``load_checkpoint``.

    Raises:
        TypeError: the model is neither a ``PipelineModule`` nor a ``PipelineEngine``.
        ValueError: no layer has a cache, a size is out of range, this rank does not have the weights, or the grid has
            an expert axis.
    """
    if isinstance(model, PipelineEngine):
        if dtype is not None:
            raise ValueError(f"dtype={dtype} would change the weights that this engine trains. Leave out dtype.")
        if checkpoint is not None:
            raise ValueError("checkpoint is only for a PipelineModule. Call the training engine's load_checkpoint.")
        return InferenceEngine(model.module, model.whole_weights, dtype, max_batch, max_length)
    if not isinstance(model, PipelineModule):
        raise TypeError(
            f"model is a {type(model).__name__}, not a PipelineModule or a training engine. Make one of its layers, "
            "PipelineModule(layers)."
        )
    if checkpoint is not None:
        load_weights(model, checkpoint)
    if model.run_hook is not None:
        raise ValueError(
            "each rank has only a shard of these weights, because an engine trains them in ZeRO stage 3. Pass the "
            "engine, triax.init_inference(engine, ...), which gathers them."
        )
    return InferenceEngine(model, nullcontext, dtype, max_batch, max_length)


class InferenceEngine:
    """Engine that generates tokens with a ``PipelineModule``, made by ``triax.init_inference``.

    Between two calls the model is unchanged: in training mode if it was, and without a cache. A stream uses the model
    until it ends or is closed.

    Attributes:
        module: the model; this rank has its stages and shards.
        grid: the module's grid.
        max_batch: number of sequences that run at once, on each replica.
        max_length: number of tokens of the longest sequence, prompt included.
        vocab_size: V; 0 if the last layer has no weight (V, hidden).
        cache: KV cache of this rank; ``cache.bytes`` is its memory, 0 before the first call.
    """

    def __init__(
        self,
        module: PipelineModule,
        weights: Callable[[], AbstractContextManager[None]],
        dtype: torch.dtype | None,
        max_batch: int,
        max_length: int | None,
    ) -> None:
        self.module, self.grid, self._weights = module, module.grid, weights
        if self.grid.expert.size > 1:
            raise ValueError(
                f"the experts of a layer are spread over {self.grid.expert.size} ranks, which generate different "
                "sequences and would wait for one another's tokens. Make the grid with expert=1: a checkpoint of any "
                "grid can be loaded."
            )
        if module.has_placeholders:
            raise ValueError("the weights of the model have no values yet. Call model.fill() or load weights first.")
        for name, size in (("max_batch", max_batch), ("max_length", max_length)):
            if size is not None and size < 1:
                raise ValueError(f"{name} is {size}. Give at least 1.")
        if dtype is not None:
            module.to(dtype=dtype)
        positions, self.vocab_size = self._agree_on_sizes()
        self.max_batch, self.max_length = max_batch, max_length or positions
        if not self.max_length:
            raise ValueError(
                "no layer has the attribute max_position_embeddings, so the number of positions is unknown. Pass "
                "max_length."
            )
        if positions and self.max_length > positions:
            raise ValueError(
                f"max_length is {max_length}, but the model has {positions} positions. Pass max_length={positions} at "
                "most."
            )
        self.cache = KVCache(self.grid.device, self.grid.context)
        self._loop = DecodeLoop(module, self.cache, self.vocab_size)

    def generate(
        self,
        tokens: Sequence[Sequence[int] | Tensor],
        max_new_tokens: int | Sequence[int],
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | Sequence[int] = 0,
        eos: int | Iterable[int] | Tensor | None = None,
        stream: Callable[[int, int], object] | None = None,
    ) -> list[list[int]]:
        """Continue prompts. Collective: every rank passes the same arguments and gets the same sequences.

        Prompts may differ in length, and there may be more of them than slots: a prompt starts when a slot is free.
        The tokens drawn for a prompt depend on its tokens and its seed, not on other prompts and not on the grid.

        Args:
            tokens: the prompts, each the ids of at least one token.
            max_new_tokens: number of tokens to generate, one for all prompts or one for each.
            temperature: 0 is greedy; 1 draws from the model's own distribution.
            top_k, top_p: as ``Sampling``; without effect at temperature 0.
            seed: seed of the draws; or one per prompt, which makes a prompt independent of its index in the list.
            eos: id or ids of the tokens that end a sequence.
            stream: called on rank 0 as ``stream(request, token)`` for each token; ``request`` is the prompt's index.

        Returns:
            For each prompt, its tokens and the new ones, the ending token included.

        Raises:
            ValueError: on every rank, before anything runs: a prompt or an option out of range, or arguments that
                differ between ranks.
            RuntimeError: on every rank: the logits are not finite; another stream is open; or a rank failed.
        """
        sequences = [_ids(prompt) for prompt in tokens]
        with closing(self.stream(tokens, max_new_tokens, temperature, top_k, top_p, seed, eos)) as events:
            for event in events:
                sequences[event.request].append(event.token)
                if stream is not None and self.grid.rank == 0:
                    with all_or_none(self.grid, self._loop.abandon, "generate"):
                        stream(event.request, event.token)
        return sequences

    def stream(
        self,
        tokens: Sequence[Sequence[int] | Tensor],
        max_new_tokens: int | Sequence[int],
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | Sequence[int] = 0,
        eos: int | Iterable[int] | Tensor | None = None,
    ) -> Generator[Token, None, None]:
        """Yield ``generate``'s tokens as they are drawn: ``for request, token, position, last in engine.stream(...)``.

        Collective: every rank must iterate, and gets the same tokens in the same order. To stop early, leave the loop
        at the same token on every rank, or ``close`` the stream. A model has one open stream at a time.

        Args, raises: as ``generate``.
        """
        sampling = Sampling(temperature, top_k, top_p)
        ends = _ends(eos)
        requests = self._requests(tokens, max_new_tokens, seed)
        arguments = [(r.tokens, r.limit, r.key) for r in requests], sampling, sorted(ends)
        if not same(self.grid.world, arguments, self.grid.device):  # the ranks would wait for one another forever
            raise ValueError("the ranks got different prompts or options. Pass the same on every rank.")
        return self._stream(requests, sampling, ends)

    def _requests(
        self, prompts: Sequence[Sequence[int] | Tensor], new: int | Sequence[int], seed: int | Sequence[int]
    ) -> list[Request]:
        """Check the prompts and options; return one request per prompt.

        Args:
            prompts: the ids of each prompt.
            new: number of tokens to generate, one for all prompts or one for each.
            seed: seed of the draws, one for all prompts or one for each.

        Raises:
            ValueError: a prompt that cannot run, with the reason.
        """
        limits = [new] * len(prompts) if isinstance(new, int) else list(new)
        keys = [(seed, i) for i in range(len(prompts))] if isinstance(seed, int) else [(s, 0) for s in seed]
        for argument, values in (("max_new_tokens", limits), ("seed", keys)):
            if len(values) != len(prompts):
                raise ValueError(f"{argument} has {len(values)} entries for {len(prompts)} prompts. Give one for each.")
        requests = []
        for index, (prompt, limit, key) in enumerate(zip(prompts, limits, keys)):
            ids = _ids(prompt)
            if not ids:
                raise ValueError(f"prompt {index} is empty. Give it at least one token.")
            if limit < 1:
                raise ValueError(f"max_new_tokens is {limit} for prompt {index}. Give at least 1.")
            if self.vocab_size and not 0 <= min(ids) <= max(ids) < self.vocab_size:
                raise ValueError(
                    f"prompt {index} has ids from {min(ids)} to {max(ids)}, but the vocabulary goes from 0 to "
                    f"{self.vocab_size - 1}. Give ids of this model's tokenizer."
                )
            if len(ids) + limit > self.max_length:
                raise ValueError(
                    f"prompt {index} has {len(ids)} tokens and gets {limit} new ones, which makes {len(ids) + limit}, "
                    f"but max_length is {self.max_length}. Shorten the prompt, or pass max_new_tokens="
                    f"{max(self.max_length - len(ids), 0)} at most."
                )
            requests.append(Request(index, ids, len(ids) + limit, key))
        return requests

    def _stream(
        self, requests: list[Request], sampling: Sampling, ends: frozenset[int]
    ) -> Generator[Token, None, None]:
        self._loop.require_free()  # before the other stream's cache is changed
        replicas = self.grid.data.size
        slots = min(self.max_batch, -(-len(requests) // replicas))
        self.cache.reserve(slots, max((request.limit for request in requests), default=0))
        batcher = Batcher(requests, slots=slots, replicas=replicas, groups=self._loop.hops, eos=ends)
        with all_or_none(self.grid, self._loop.abandon, "generate"), self._weights(), self._loop.attached():
            yield from self._loop.run(batcher, sampling)

    def _agree_on_sizes(self) -> tuple[int, int]:
        """Return (smallest number of positions of any layer, vocabulary size), with 0 for unknown. Collective.

        Both are equal on all ranks.
        """
        positions = [length for m in self.module.modules() if (length := getattr(m, "max_position_embeddings", None))]
        layers = self.module.layers_of(len(self.module.placement) - 1) if self.module.is_last else []
        weight = getattr(self.module.layers[str(layers[-1])], "weight", None) if layers else None
        vocab_size = layout_of(weight).shape[0] if isinstance(weight, Tensor) and weight.dim() == 2 else 0
        most = torch.tensor([len(layers_with_cache(self.module)), -min(positions, default=2**62), vocab_size])
        self.grid.world.all_reduce(most, op="max")
        count, fewest, vocab_size = most.tolist()
        if not count:
            raise ValueError(
                "no layer of the model has the attribute `cache`, which generation needs. Use the layers of "
                "triax.models, or give your attention layers this attribute (docs/generation.md)."
            )
        return (-fewest if fewest > -(2**62) else 0), vocab_size


def _ids(prompt: Sequence[int] | Tensor) -> list[int]:
    """Return a prompt's ids as a list; ValueError unless it is a 1-d sequence of integers."""
    if isinstance(prompt, Tensor):
        if prompt.dim() != 1 or prompt.is_floating_point():
            raise ValueError(
                f"a prompt is {prompt.dtype} of shape {tuple(prompt.shape)}. Give a 1-d tensor of integers."
            )
        prompt = prompt.tolist()
    if isinstance(prompt, int):
        raise ValueError("tokens must be a list of prompts, each a list of ids. Write generate([[1, 2, 3]], ...).")
    return [int(token) for token in prompt]


def _ends(eos: int | Iterable[int] | Tensor | None) -> frozenset[int]:
    """Return the ids that end a sequence, as ints; ValueError for values that are no integers."""
    values: Any = () if eos is None else _to_python(eos)
    if not isinstance(values, Iterable) or isinstance(values, str):
        values = (values,)
    ids = [_to_python(value) for value in values]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool):
            raise ValueError(f"eos has {token!r}, not an integer. Give one id or a list of ids, such as eos=[2].")
    return frozenset(ids)


def _to_python(value: Any) -> Any:
    """Return a tensor, a numpy array or a numpy number as Python numbers."""
    return value.tolist() if hasattr(value, "tolist") else value
