"""``triax.init_inference``: generation from a model of ``triax.models``, on any grid.

``turns.py`` is the loop, ``batching.py`` its plan, ``cache.py`` what attention keeps, ``sampling.py`` the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..grid import layout_of
from ..grid.random import derive
from ..pipe.module import PipelineModule
from .batching import Batcher, Request, Token
from .cache import KVCache
from .checkpoint_weights import load_weights
from .engine import Engine
from .failure import all_or_none
from .sampling import Sampling
from .turns import Turns, caching

__all__ = ["InferenceEngine", "init_inference"]


def init_inference(
    model: PipelineModule | Engine,
    *,
    dtype: torch.dtype | None = None,
    max_batch: int = 8,
    max_length: int | None = None,
    checkpoint: str | Path | None = None,
) -> InferenceEngine:
    """Make an engine that generates. Every rank calls this, with the same arguments.

    Args:
        model: a ``PipelineModule`` whose layers are of ``triax.models``, or have the attribute ``cache`` of these; or
            the ``Engine`` that trains one: it may go on training, and what is generated is by the weights of then.
        dtype: cast the weights to it, in place; None leaves them. A training engine's stay as they are.
        max_batch: sequences that run at once, on each replica.
        max_length: tokens of the longest sequence, prompt and all; None: as many as the model has positions. The cache
            takes what a call's longest sequence needs, in each of the places that it uses.
        checkpoint: load these weights before, as ``load_weights`` does; not for a training engine, which has
            ``load_checkpoint``.

    Raises:
        TypeError: the model is neither.
        ValueError: no layer has a cache, a size does not fit, or the weights are not here.
    """
    weights: Callable[[], AbstractContextManager[None]] = nullcontext
    if checkpoint is not None:
        if not isinstance(model, PipelineModule):
            raise ValueError("checkpoint= is for a PipelineModule: a training engine has load_checkpoint")
        load_weights(model, checkpoint)
    if isinstance(model, Engine):
        if dtype is not None:
            raise ValueError(f"dtype={dtype} would change the weights that this engine trains: leave it out")
        weights, module = model.whole_weights, model.module
    elif isinstance(model, PipelineModule):
        module = model
        if module.around is not None:
            raise ValueError(
                "each rank holds but a shard of these weights, since an engine trains them in stage 3 of ZeRO: pass "
                "that engine, triax.init_inference(engine, ...), and they are gathered"
            )
    else:
        raise TypeError(
            f"model is a {type(model).__name__}, not a PipelineModule or a training engine: wrap it, "
            "PipelineModule(layers)"
        )
    return InferenceEngine(module, weights, dtype, max_batch, max_length)


class InferenceEngine:
    """Generates from a ``PipelineModule``; made by ``triax.init_inference``.

    Between two calls the model is as it was: in training mode if it was, and without a cache. A stream has it until it
    ends or is closed.

    Attributes:
        module, grid: the model, of which this rank holds its part.
        max_batch: sequences that run at once, on each replica.
        max_length: tokens of the longest sequence.
        vocab_size: V; 0 where the last layer does not tell it.
        cache: keys and values of this rank; ``cache.bytes`` is what they take once something was generated.
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
        if module._placeholders:
            raise ValueError("the weights are placeholders still: call model.fill(), or load weights, before this")
        for name, size in (("max_batch", max_batch), ("max_length", max_length)):
            if size is not None and size < 1:
                raise ValueError(f"{name} is {size}; give at least 1")
        if dtype is not None:
            module.to(dtype=dtype)
        positions, self.vocab_size = self._agree_on_sizes()
        self.max_batch, self.max_length = max_batch, max_length or positions
        if not self.max_length:
            raise ValueError("the model does not tell how many positions it has: pass max_length=")
        if positions and self.max_length > positions:
            raise ValueError(
                f"max_length is {max_length}, and the model has {positions} positions: pass max_length={positions} at "
                "most"
            )
        self.cache = KVCache(self.grid.device)
        self._turns = Turns(module, self.cache, self.vocab_size)

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
        """Continue prompts. Every rank calls this, with the same arguments, and gets the same sequences.

        The prompts need not be of one length, nor as few as there are places: a prompt begins when a place is free.
        What is drawn for a prompt depends on its seed and on its tokens, on no other prompt and not on the grid.

        Args:
            tokens: the prompts, each the ids of at least one token.
            max_new_tokens: how many to generate, for all or for each.
            temperature: 0 is greedy, 1 draws from the model's own distribution.
            top_k, top_p: see ``Sampling``; without effect at temperature 0.
            seed: of the draws; or one for each prompt, which then continues as if it were alone.
            eos: the token, or tokens, that end a sequence.
            stream: called on rank 0 as ``stream(request, token)``, as tokens come; ``request`` is the prompt's place
                in the list.

        Returns:
            For each prompt, its tokens and the new ones: the one that ended it too.

        Raises:
            ValueError: on every rank, before anything runs: a prompt or an option that cannot be; ranks that were
                given different ones.
            RuntimeError: on every rank: the logits are not finite; another stream has neither ended nor been closed;
                or a rank failed on its own, and left.
        """
        sequences = [_ids(prompt) for prompt in tokens]
        with closing(self.stream(tokens, max_new_tokens, temperature, top_k, top_p, seed, eos)) as events:
            for event in events:
                sequences[event.request].append(event.token)
                if stream is not None and self.grid.rank == 0:
                    with all_or_none(self.grid, self._turns.abandon, "generate"):
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
        """``generate``'s tokens as they come: ``for request, token, position, last in engine.stream(...)``.

        Every rank must iterate it: the ranks compute together, and each gets the same tokens in the same order. To
        stop early, leave the loop at the same token on each, or ``close`` the stream. One runs at a time.

        Args, raises: as ``generate``.
        """
        sampling = Sampling(temperature, top_k, top_p)
        ends = _ends(eos)
        requests = self._requests(tokens, max_new_tokens, seed)
        self._agree([(r.tokens, r.limit, r.key) for r in requests], sampling, sorted(ends))
        return self._stream(requests, sampling, ends)

    def _requests(
        self, prompts: Sequence[Sequence[int] | Tensor], new: int | Sequence[int], seed: int | Sequence[int]
    ) -> list[Request]:
        """The prompts, each with its limit and its key; ValueError where one cannot be."""
        limits = [new] * len(prompts) if isinstance(new, int) else list(new)
        keys = [(seed, i) for i in range(len(prompts))] if isinstance(seed, int) else [(s, 0) for s in seed]
        for what, values in (("max_new_tokens", limits), ("seed", keys)):
            if len(values) != len(prompts):
                raise ValueError(f"{what} has {len(values)} entries for {len(prompts)} prompts: give one for each")
        requests = []
        for index, (prompt, limit, key) in enumerate(zip(prompts, limits, keys)):
            ids = _ids(prompt)
            if not ids:
                raise ValueError(f"prompt {index} is empty: give it a token to begin with")
            if limit < 1:
                raise ValueError(f"max_new_tokens is {limit} for prompt {index}; give at least 1")
            if self.vocab_size and not 0 <= min(ids) <= max(ids) < self.vocab_size:
                raise ValueError(
                    f"prompt {index} has ids from {min(ids)} to {max(ids)}, and the vocabulary goes from 0 to "
                    f"{self.vocab_size - 1}"
                )
            if len(ids) + limit > self.max_length:
                raise ValueError(
                    f"prompt {index} has {len(ids)} tokens; with {limit} new ones that is {len(ids) + limit}, and a "
                    f"sequence has at most {self.max_length} here: cut it, or pass max_new_tokens="
                    f"{max(self.max_length - len(ids), 0)} at most"
                )
            requests.append(Request(index, ids, len(ids) + limit, key))
        return requests

    def _stream(
        self, requests: list[Request], sampling: Sampling, ends: frozenset[int]
    ) -> Generator[Token, None, None]:
        self._turns.require_free()  # before anything that the other stream has is touched
        replicas = self.grid.data.size
        slots = min(self.max_batch, -(-len(requests) // replicas))
        self.cache.reserve(slots, max((request.limit for request in requests), default=0))
        batcher = Batcher(requests, slots=slots, replicas=replicas, groups=self._turns.legs, eos=ends)
        with all_or_none(self.grid, self._turns.abandon, "generate"), self._weights(), self._turns.attached():
            yield from self._turns.run(batcher, sampling)

    def _agree_on_sizes(self) -> tuple[int, int]:
        """The fewest positions of any layer (0: unknown), and the vocabulary (0: unknown), on every rank."""
        positions = [length for m in self.module.modules() if (length := getattr(m, "sequence_length", None))]
        layers = self.module.layers_of(len(self.module.placement) - 1) if self.module.is_last else []
        weight = getattr(self.module.layers[str(layers[-1])], "weight", None) if layers else None
        vocab_size = layout_of(weight).shape[0] if isinstance(weight, Tensor) and weight.dim() == 2 else 0
        most = torch.tensor([len(caching(self.module)), -min(positions, default=2**62), vocab_size])
        self.grid.world.all_reduce(most, op="max")
        count, fewest, vocab_size = most.tolist()
        if not count:
            raise ValueError(
                "no layer of the model has a cache: generation takes the layers of triax.models, or layers with their "
                "attribute `cache` (docs/generation.md)"
            )
        return (-fewest if fewest > -(2**62) else 0), vocab_size

    def _agree(self, *what: object) -> None:
        """Refuse to start where ranks were given different things: they would wait for each other's messages."""
        mine = derive(repr(what))
        seen = torch.tensor([mine, -mine])
        self.grid.world.all_reduce(seen, op="max")
        if seen.tolist() != [mine, -mine]:
            raise ValueError("the ranks were given different prompts or options: pass the same on every rank")


def _ids(prompt: Sequence[int] | Tensor) -> list[int]:
    """The prompt's ids; ValueError where it is no row of integers."""
    if isinstance(prompt, Tensor):
        if prompt.dim() != 1 or prompt.is_floating_point():
            raise ValueError(
                f"a prompt is a row of ids, not {prompt.dtype} of shape {tuple(prompt.shape)}: pass a list"
            )
        prompt = prompt.tolist()
    if isinstance(prompt, int):
        raise ValueError("a prompt is a row of ids, and tokens is a list of prompts: write generate([[1, 2, 3]], ...)")
    return [int(token) for token in prompt]


def _ends(eos: int | Iterable[int] | Tensor | None) -> frozenset[int]:
    """The ids that end a sequence, as ints; ValueError for what is no whole number."""
    values: Any = () if eos is None else _plain(eos)
    if not isinstance(values, Iterable) or isinstance(values, str):
        values = (values,)
    ids = [_plain(value) for value in values]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool):
            raise ValueError(f"eos is a token's id, or several, and {token!r} is no whole number: pass eos=[2], say")
    return frozenset(ids)


def _plain(value: Any) -> Any:
    """What a tensor, an array or one of numpy's numbers has, as Python's numbers."""
    return value.tolist() if hasattr(value, "tolist") else value
