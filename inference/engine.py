"""``triax.init_inference``: generation from a model of ``triax.models``, on any grid."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..base.checks import check_seed
from ..engine.pipeline_engine import PipelineEngine
from ..engine.snapshot.load_weights import load_weights
from ..grid import layout_of
from ..grid.agreement.failure import all_or_none
from ..grid.comm.equal_facts import same
from ..models.attention import ShardedAttention
from ..pipe.module import PipelineModule
from .batching import Batcher, Request, Token
from .beam_search import Beams, BeamSearch
from .decode_loop import DecodeLoop, layers_with_cache
from .int8 import Int8, quantize
from .kv_cache import KVCache
from .sampling import LogitsProcessor, Sampling
from .text import Tokenizer, ends_with, follow

Prompt = str | Sequence[int] | Tensor


def init_inference(
    model: PipelineModule | PipelineEngine,
    *,
    dtype: torch.dtype | None = None,
    max_batch: int = 8,
    max_length: int | None = None,
    checkpoint: str | Path | None = None,
    tokenizer: Tokenizer | None = None,
    int8: Int8 | bool = False,
) -> InferenceEngine:
    """Make an engine for generation. Collective: every rank calls it, with the same arguments.

    >>> model = triax.PipelineModule(triax.gpt_layers(triax.GPTConfig.preset("bytes-tiny")))
    >>> engine = triax.init_inference(model, max_batch=2)
    >>> engine.generate([[72, 101, 108]], max_new_tokens=4, temperature=0)
    [[72, 101, 108, 108, 108, 108, 108]]

    Args:
        model: a ``PipelineModule`` whose layers are of ``triax.models``, or have their attribute ``cache``; or the
            ``PipelineEngine`` that trains one. It may continue training; each call uses the weights of that moment.
        dtype: dtype to which the weights are cast in place. If None, they are not cast. Not for a training engine.
        max_batch: number of sequences that run at once, on each replica.
        max_length: number of tokens of the longest sequence, prompt included. If None, it is the number of the model's
            positions. Each slot of the KV cache that a call uses takes memory for the longest sequence of the call.
        checkpoint: checkpoint whose weights are loaded first, as ``load_weights`` does. Not for a training engine,
            which has ``load_checkpoint``.
        tokenizer: tokenizer for string prompts and stop strings: one of transformers', or any object with
            ``encode(text)`` and ``decode(ids)``. The tokens of ``inference.text.BYTES`` are the bytes of a text.
        int8: keep the weights of linear layers in 8 bits, in groups of 64 inputs, or as the options say (``Int8``), in
            place. Not for a training engine.

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
        if int8:
            raise ValueError("int8 would change the weights that this engine trains. Leave out int8.")
        return InferenceEngine(model.module, model.whole_weights, dtype, max_batch, max_length, tokenizer)
    if not isinstance(model, PipelineModule):
        raise TypeError(
            f"model is a {type(model).__name__}, not a PipelineModule or its training engine. Make one of its layers, "
            "PipelineModule(layers), or use triax.inference.module_inference.ModuleInference(model)."
        )
    if checkpoint is not None:
        load_weights(model, checkpoint)
    if model.run_hook is not None:
        raise ValueError(
            "each rank has only a shard of these weights, because an engine trains them in ZeRO stage 3. Pass the "
            "engine, triax.init_inference(engine, ...), which gathers them."
        )
    engine = InferenceEngine(model, nullcontext, dtype, max_batch, max_length, tokenizer)
    if int8:
        quantize(model, model.grid, int8 if isinstance(int8, Int8) else Int8())
    return engine


class Completion(NamedTuple):
    """A generated sequence, as ``InferenceEngine.generate(..., logprobs=True)`` returns it.

    Attributes:
        tokens: the prompt's ids and the new ones.
        prompt: number of ids of the prompt.
        text: the prompt and the new text, without the token that ended it; None if the prompt was given as ids.
        logprobs: the log-probability of each new token under the model's own distribution, or with
            ``logprobs="tempered"`` under that of logits / temperature. In beam search it is that behind repetition
            penalty and processors.
        score: the score by which beam search ranks the sequences of a prompt; None without beam search.
    """

    tokens: list[int]
    prompt: int
    text: str | None
    logprobs: list[float]
    score: float | None


class _Generation(NamedTuple):
    """A checked call of ``generate`` or ``stream``.

    Attributes:
        requests: the queue.
        sampling: the options.
        ends: function that is True for a sequence that ends.
        numbers: numbers of each row of a step (``Batcher.append``).
        beams: K; 1 without beam search.
        lengths: number of ids of each prompt.
        strings: the prompts, if they are strings.
        eos: ids that end a sequence.
    """

    requests: list[Request]
    sampling: Sampling
    ends: Callable[[list[int]], bool]
    numbers: int
    beams: int
    lengths: list[int]
    strings: list[str]
    eos: frozenset[int]


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
        tokenizer: the tokenizer for string prompts, or None.
        cache: KV cache of this rank; ``cache.bytes`` is its memory, 0 before the first call.
    """

    def __init__(
        self,
        module: PipelineModule,
        weights: Callable[[], AbstractContextManager[None]],
        dtype: torch.dtype | None,
        max_batch: int,
        max_length: int | None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.module, self.grid, self._weights, self.tokenizer = module, module.grid, weights, tokenizer
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
        count, positions, self.vocab_size = agreed_sizes(module)
        if not count:
            raise ValueError(
                "no layer of the model has the attribute `cache`, which generation needs. Use the layers of "
                "triax.models, or give your attention layers this attribute (docs/generation.md)."
            )
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
        tokens: Sequence[Prompt],
        max_new_tokens: int | Sequence[int],
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | Sequence[int] = 0,
        eos: int | Iterable[int] | Tensor | None = None,
        stream: Callable[[int, int], object] | None = None,
        *,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop_strings: str | Sequence[str] = (),
        logits_processor: LogitsProcessor | Sequence[LogitsProcessor] = (),
        num_return_sequences: int = 1,
        num_beams: int = 1,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        logprobs: bool | Literal["tempered"] = False,
    ) -> list[Any]:
        """Continue prompts. Collective: every rank passes the same arguments and gets the same sequences.

        Prompts may differ in length, and there may be more of them than slots: a prompt starts when a slot is free.
        The tokens drawn for a prompt depend on its tokens and its seed, not on other prompts and not on the grid.

        Args:
            tokens: the prompts, each the ids of at least one token; or each a string, if the engine has a tokenizer.
            max_new_tokens: number of tokens to generate, one for all prompts or one for each.
            temperature: 0 is greedy; 1 draws from the model's own distribution.
            top_k, top_p, min_p: as ``Sampling``; without effect at temperature 0.
            seed: seed of the draws; or one per prompt, which makes a prompt independent of its index in the list.
            eos: id or ids of the tokens that end a sequence. If None, and the prompts are strings, it is the
                tokenizer's ``eos_token_id``.
            stream: called on rank 0 as ``stream(request, token)`` for each token; ``request`` is the index of the
                sequence in the result.
            repetition_penalty: as ``Sampling``.
            stop_strings: string or strings that end a sequence, with the token that completes one. They need a
                tokenizer.
            logits_processor: function or functions (ids (1, T), scores (1, V)) -> scores (1, V), as transformers'
                ``LogitsProcessor``. Every rank of the tensor axis calls them, with equal arguments.
            num_return_sequences: number of sequences of each prompt: draws, or the best of a beam search.
            num_beams: K of ``BeamSearch``, which takes the most likely sequences and draws nothing; 1: no beam search.
            length_penalty, early_stopping: as ``BeamSearch``.
            logprobs: return ``Completion`` s, with the log-probability of each new token, as ``Sampling``.

        Returns:
            For each prompt, its tokens and the new ones, the ending token included; of a string prompt, the prompt and
            the new text, without the ending token. With ``num_return_sequences`` n, the sequences of prompt i are the
            items i n to i n + n - 1. With ``logprobs``, each is a ``Completion``.

        Raises:
            ValueError: on every rank, before anything runs: a prompt or an option out of range, or arguments that
                differ between ranks.
            RuntimeError: on every rank: the logits are not finite; another stream is open; or a rank failed.
        """
        processors = _functions(logits_processor)
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, processors, logprobs)
        search = None
        if num_beams != 1:
            search = BeamSearch(num_beams, length_penalty, early_stopping)
            self._check_search(search, sampling, num_return_sequences, stream)
        job = self._job(tokens, max_new_tokens, sampling, seed, eos, stop_strings, num_return_sequences, search)
        with closing(self._stream(job)) as events:
            for event in events:
                if stream is not None and self.grid.rank == 0:
                    with all_or_none(self.grid, self._loop.abandon, "generate"):
                        stream(event.request, event.token)
        answers: list[tuple[list[int], list[float], float | None]] = []
        for request in job.requests[::num_beams]:
            if request.beams is None:
                answers.append((request.tokens, request.logprobs, None))
            else:
                best = request.beams.found[:num_return_sequences]
                answers += [(beam.tokens, beam.logprobs, beam.score) for beam in best]
        done = [self._completion(job, i // num_return_sequences, *answer) for i, answer in enumerate(answers)]
        return done if logprobs else [answer.tokens if answer.text is None else answer.text for answer in done]

    def stream(
        self,
        tokens: Sequence[Prompt],
        max_new_tokens: int | Sequence[int],
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | Sequence[int] = 0,
        eos: int | Iterable[int] | Tensor | None = None,
        *,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop_strings: str | Sequence[str] = (),
        logits_processor: LogitsProcessor | Sequence[LogitsProcessor] = (),
        num_return_sequences: int = 1,
    ) -> Generator[Token, None, None]:
        """Yield ``generate``'s tokens as they are drawn: ``for request, token, position, last in engine.stream(...)``.

        Collective: every rank must iterate, and gets the same tokens in the same order. To stop early, leave the loop
        at the same token on every rank, or ``close`` the stream. A model has one open stream at a time.

        Args, raises: as ``generate``.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, _functions(logits_processor))
        return self._stream(
            self._job(tokens, max_new_tokens, sampling, seed, eos, stop_strings, num_return_sequences, None)
        )

    def _check_search(
        self, search: BeamSearch, sampling: Sampling, wanted: int, stream: Callable[[int, int], object] | None
    ) -> None:
        """Raise ValueError if options do not go with a beam search."""
        if search.beams > self.max_batch:
            raise ValueError(
                f"num_beams is {search.beams}, but max_batch is {self.max_batch}, and each beam needs a slot. Pass "
                f"max_batch={search.beams} to init_inference."
            )
        if wanted > search.beams:
            raise ValueError(
                f"num_return_sequences is {wanted}, but num_beams={search.beams} finds {search.beams} sequences. Pass "
                f"num_beams={wanted} at least."
            )
        drawn = {name: getattr(sampling, name) for name in ("top_k", "top_p", "min_p")}
        drawn = {name: value for name, value in drawn.items() if value is not None}
        if sampling.temperature not in (0, 1):
            drawn["temperature"] = sampling.temperature
        if sampling.logprobs == "tempered":
            drawn["logprobs"] = sampling.logprobs
        if drawn or stream is not None:
            what = ", ".join(f"{name}={value}" for name, value in drawn.items()) or "stream"
            raise ValueError(
                f"num_beams={search.beams} takes the most likely sequences, which are known at the end, and draws "
                f"nothing, so {what} cannot act. Leave it out, or leave out num_beams."
            )

    def _job(
        self,
        prompts: Sequence[Prompt],
        new: int | Sequence[int],
        sampling: Sampling,
        seed: int | Sequence[int],
        eos: int | Iterable[int] | Tensor | None,
        stop_strings: str | Sequence[str],
        samples: int,
        search: BeamSearch | None,
    ) -> _Generation:
        """Check the arguments, also between the ranks, and return what a stream runs. Collective.

        Raises:
            ValueError: an argument out of range, or one that differs between ranks.
        """
        if isinstance(prompts, str):
            raise ValueError("tokens must be a list of prompts, but it is a string. Write generate([text], ...).")
        strings = [prompt for prompt in prompts if isinstance(prompt, str)]
        if strings and (self.tokenizer is None or len(strings) < len(prompts)):
            raise ValueError(
                "a prompt is a string, but the engine has no tokenizer. Pass one, init_inference(model, tokenizer=...)."
                if self.tokenizer is None
                else f"{len(strings)} of {len(prompts)} prompts are strings. Give only strings, or only ids."
            )
        if strings and eos is None:
            eos = getattr(self.tokenizer, "eos_token_id", None)
        eos_ids = _ends(eos)
        if samples < 1:
            raise ValueError(f"num_return_sequences is {samples}. Give at least 1.")
        stops = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
        ends = ends_with(self.tokenizer, stops, eos_ids)
        requests = self._requests(prompts, new, seed, 1 if search is not None else samples)
        lengths = [len(request.tokens) for request in requests[:: samples if search is None else 1]]
        names = [getattr(processor, "__qualname__", type(processor).__name__) for processor in sampling.processors]
        facts = [(r.tokens, r.limit, r.key) for r in requests], sampling, names, sorted(eos_ids), stops, search
        if not same(self.grid.world, facts, self.grid.device):  # the ranks would wait for one another forever
            raise ValueError("the ranks got different prompts or options. Pass the same on every rank.")
        numbers = 2 if sampling.logprobs else 1
        if search is not None:
            numbers = 2 * max(2, 1 + len(eos_ids))
            for request in requests:
                request.beams = Beams(request.tokens, request.limit, search, ends)
            # The sequences of a search share it, and each is a request in a slot of its own.
            requests = [replace(request, logprobs=[]) for request in requests for _ in range(search.beams)]
        beams = 1 if search is None else search.beams
        return _Generation(requests, sampling, ends, numbers, beams, lengths, strings, eos_ids)

    def _requests(
        self, prompts: Sequence[Prompt], new: int | Sequence[int], seed: int | Sequence[int], samples: int
    ) -> list[Request]:
        """Check the prompts and options; return the requests, one for each sample of each prompt.

        Args:
            prompts: the ids of each prompt, or its text.
            new: number of tokens to generate, one for all prompts or one for each.
            seed: seed of the draws, one for all prompts or one for each.
            samples: number of sequences of each prompt.

        Raises:
            ValueError: a prompt that cannot run, with the reason.
        """
        for number in [seed] if isinstance(seed, int) else seed:
            check_seed(number)
        limits = [new] * len(prompts) if isinstance(new, int) else list(new)
        keys = [(seed, i) for i in range(len(prompts))] if isinstance(seed, int) else [(s, 0) for s in seed]
        for argument, values in (("max_new_tokens", limits), ("seed", keys)):
            if len(values) != len(prompts):
                raise ValueError(f"{argument} has {len(values)} entries for {len(prompts)} prompts. Give one for each.")
        requests = []
        for index, (prompt, limit, key) in enumerate(zip(prompts, limits, keys)):
            ids = _ids(self.tokenizer.encode(prompt) if isinstance(prompt, str) and self.tokenizer else prompt)
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
            for sample in range(samples):  # the first one is that of a single sample
                row = index * samples + sample
                requests.append(Request(row, list(ids), len(ids) + limit, (*key, sample) if sample else key))
        return requests

    def _stream(self, job: _Generation) -> Generator[Token, None, None]:
        self._loop.require_free()  # before the other stream's cache is changed
        replicas, requests, beams = self.grid.data.size, job.requests, job.beams
        slots = beams * min(self.max_batch // beams, -(-len(requests) // (replicas * beams)))
        self.cache.reserve(slots, max((request.limit for request in requests), default=0))
        batcher = Batcher(requests, slots=slots, replicas=replicas, groups=self._loop.hops, ends=job.ends, beams=beams)
        with all_or_none(self.grid, self._loop.abandon, "generate"), self._weights(), self._loop.attached():
            yield from self._loop.run(batcher, job.sampling, job.numbers)

    def _completion(
        self, job: _Generation, prompt: int, tokens: list[int], logprobs: list[float], score: float | None
    ) -> Completion:
        """Return the result of one sequence of a prompt, with its text if the prompt is one."""
        length, text = job.lengths[prompt], None
        if job.strings and self.tokenizer is not None:
            kept = tokens[:-1] if len(tokens) > length and tokens[-1] in job.eos else tokens
            text = job.strings[prompt] + follow(self.tokenizer, kept, length)
        return Completion(tokens, length, text, logprobs, score)


def agreed_sizes(module: PipelineModule) -> tuple[int, int, int]:
    """Return (layers with a cache, positions, vocabulary size) of a model, equal on all ranks. Collective.

    The positions are the smallest number of any layer. A number is 0 if it is unknown.

    Raises:
        ValueError: the model has an encoder.
    """
    positions = [length for m in module.modules() if (length := getattr(m, "max_position_embeddings", None))]
    layers = module.layers_of(len(module.placement) - 1) if module.is_last else []
    weight = getattr(module.layers[str(layers[-1])], "weight", None) if layers else None
    vocab_size = layout_of(weight).shape[0] if isinstance(weight, Tensor) and weight.dim() == 2 else 0
    acausal = any(isinstance(m, ShardedAttention) and not m.options.causal for m in module.modules())
    most = torch.tensor([len(layers_with_cache(module)), -min(positions, default=2**62), vocab_size, acausal])
    module.grid.world.all_reduce(most, op="max")
    count, fewest, vocab_size, acausal = most.tolist()
    if acausal:
        raise ValueError("the model has an encoder (causal=False): only decoders generate. Call it for its outputs.")
    return count, (-fewest if fewest > -(2**62) else 0), vocab_size


def _functions(given: LogitsProcessor | Sequence[LogitsProcessor]) -> tuple[LogitsProcessor, ...]:
    """Return one function, or several, as a tuple. (transformers' list of processors is callable itself.)"""
    return tuple(given) if isinstance(given, Sequence) else (given,)


def _ids(prompt: Prompt) -> list[int]:
    """Return a prompt's ids as a list; ValueError unless it is a 1-d sequence of integers."""
    if isinstance(prompt, Tensor):
        if prompt.dim() != 1 or prompt.is_floating_point():
            raise ValueError(
                f"a prompt is {prompt.dtype} of shape {tuple(prompt.shape)}. Give a 1-d tensor of integers."
            )
        prompt = prompt.tolist()
    if isinstance(prompt, int):
        raise ValueError("tokens must be a list of prompts, each a list of ids. Write generate([[1, 2, 3]], ...).")
    return list(map(int, prompt))


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
