"""``triax generate``: continue a prompt, or talk, with a model from a folder, and print the text as it is made."""

from __future__ import annotations

import importlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import ConfigError
from ..base.option_error import refusal
from ..grid.environment import read_environment
from ..options.base import Options, option
from .flags import with_flags
from .model_folder import ModelFolder, family, find_model, on_ranks, read_model
from .model_text import Text, open_text
from .output import printable

if TYPE_CHECKING:
    from ..inference.engine import InferenceEngine

_MAX_NEW_TOKENS = 200  # default of --max-new-tokens, if the model's context has room for as many


@dataclass(frozen=True, kw_only=True)
class GenerateFlags(Options):
    """Flags of ``triax generate``. The launching process sends them to every rank."""

    prompt: str | None = option(None, "Text to continue; with --chat a message. Without it, --chat reads messages.")
    chat: bool = option(
        False, "Read one message per line until the input ends, and answer with the tokenizer's chat template."
    )
    system: str | None = option(None, "System message of --chat.")
    max_new_tokens: int | None = option(
        None, f"Number of new tokens. Default: {_MAX_NEW_TOKENS}, or as many as fit into the context.", least=1
    )
    temperature: float = option(1.0, "Sampling temperature; 0 always takes the likeliest token.")
    top_k: int | None = option(None, "Sample from the k likeliest tokens.")
    top_p: float | None = option(None, "Sample from the likeliest tokens whose probabilities add up to p.")
    min_p: float | None = option(None, "Sample from tokens at least P times as likely as the likeliest one.")
    repetition_penalty: float = option(
        1.0, "Divide the logits of tokens that are in the text by this number; 1: no penalty."
    )
    stop: tuple[str, ...] = option((), "Text that ends the generation. May be repeated.")
    samples: int = option(1, "Number of texts: draws, or the best ones of --beams.", least=1)
    beams: int = option(1, "Number of beams of a beam search, which draws nothing.", least=1)
    length_penalty: float = option(1.0, "With --beams: larger values prefer longer texts.")
    logprobs: bool = option(False, "Print the log-probability of each new token after the text.")
    logits_processor: tuple[str, ...] = option(
        (), "package.module:function of (ids, scores) that returns scores. May be repeated."
    )
    seed: int = option(0, "Random seed. The same seed gives the same text on any grid.")
    dtype: str | None = option(None, "Dtype of the computation, such as bfloat16. Default: the dtype of the weights.")
    pipe: int = option(1, "Size of the pipe axis: the number of stages.", least=1)
    tensor: int | None = option(None, "Size of the tensor axis. Default: torchrun's processes / --pipe, or 1.", least=1)

    def check(self) -> None:
        """Check the flags of a chat."""
        if not self.prompt and not (self.chat and self.prompt is None):
            raise refusal("<prompt> is empty, but the model needs a text to continue. Give at least one character")
        if self.chat and (self.samples > 1 or self.beams > 1 or self.logprobs):
            raise refusal("<chat> prints one answer while it is generated. Leave out <samples>, <beams> and <logprobs>")
        if self.system is not None and not self.chat:
            raise refusal("<system> is a message of <chat>. Add <chat>, or leave <system> out")


@with_flags
def generate(run: ModelFolder, options: GenerateFlags) -> None:
    """Continue a prompt, or answer messages, on --pipe x --tensor processes, new or torchrun's."""
    folder = find_model(run)
    family(folder)  # before any process starts
    environment, pipe = read_environment(), options.pipe
    processes = environment.world_size if environment else pipe * (options.tensor or 1)
    if options.prompt is None and environment is None and processes > 1:
        raise ConfigError(
            f"--chat reads messages from the terminal, but the {processes} processes that this command starts have "
            f"none. Type torchrun --nproc-per-node {processes} --no-python triax generate ..., or give --prompt."
        )
    shards = options.tensor or max(1, processes // pipe)
    on_ranks(generate_on_rank, (folder, options.changed(tensor=shards)), pipe=pipe, data=1, tensor=shards)


def generate_on_rank(job: tuple[Path, GenerateFlags]) -> None:
    """Generate from a model's folder on one rank of the grid; rank 0 prints."""
    from ..grid.grid import Grid
    from ..grid.launcher.launch import user_error
    from ..inference.engine import init_inference

    folder, options = job
    try:
        grid = Grid(pipe=options.pipe, tensor=options.tensor or 1)
        text, module = open_text(folder), read_model(folder, grid, options.dtype)
        slots = max(options.beams, options.samples)
        engine = init_inference(module, max_batch=slots, tokenizer=text.tokenizer)
        (_talk if options.chat else _write)(engine, text, options)
    except (ValueError, FileNotFoundError) as error:
        user_error(error)
    grid.close()


def _talk(engine: InferenceEngine, text: Text, options: GenerateFlags) -> None:
    """Answer the prompt, or each line of rank 0's input until it ends."""
    messages = [] if options.system is None else [{"role": "system", "content": options.system}]
    while (asked := options.prompt or _next_line(engine)) is not None:
        messages.append({"role": "user", "content": asked})
        answer, _ = _stream(engine, text, text.chat(messages), options)
        messages.append({"role": "assistant", "content": answer})
        if options.prompt is not None:
            return


def _next_line(engine: InferenceEngine) -> str | None:
    """Return rank 0's next line of input that is not empty, on every rank; None at the end."""
    line = None
    if engine.grid.rank == 0:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = next((text.strip() for text in sys.stdin if text.strip()), None)
    first_line: str | None = engine.grid.world.all_gather_json(line)[0]
    return first_line


def _stream(
    engine: InferenceEngine, text: Text, ids: list[int], options: GenerateFlags, before: str = ""
) -> tuple[str, int]:
    """Write ``before``, and what the model adds to ids as it is made; return this, and the number of tokens."""
    speaks, ends = engine.grid.rank == 0, _ends(engine, text)
    made, parts = 0, list[str]()
    tokens = engine.stream([ids], _count(engine, ids, options), **_common(engine, text, options))  # checks the options
    if speaks:
        sys.stdout.write(before)
    for token in tokens:
        made += 1
        if token.token not in ends:
            parts.append(text.follow(token.token))
            if speaks:
                sys.stdout.write(printable(parts[-1]))
                sys.stdout.flush()
    parts.append(text.rest())
    if speaks:
        sys.stdout.write(printable(parts[-1]) + "\n")
        sys.stdout.flush()
    return "".join(parts), made


def _ends(engine: InferenceEngine, text: Text) -> list[int]:
    return [token for token in text.ends if not engine.vocab_size or token < engine.vocab_size]


def _count(engine: InferenceEngine, ids: list[int], options: GenerateFlags) -> int:
    """Return the number of new tokens.

    Raises:
        ValueError: the tokenizer makes a token that the model does not have.
    """
    if engine.vocab_size and max(ids, default=0) >= engine.vocab_size:
        raise ValueError(
            f"the tokenizer makes the token {max(ids)}, but the model has {engine.vocab_size}. "
            "Copy the model's own tokenizer into its folder."
        )
    return options.max_new_tokens or max(1, min(_MAX_NEW_TOKENS, engine.max_length - len(ids)))


def _common(engine: InferenceEngine, text: Text, options: GenerateFlags) -> dict[str, Any]:
    return {
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "seed": options.seed,
        "eos": _ends(engine, text),
        "min_p": options.min_p,
        "repetition_penalty": options.repetition_penalty,
        "stop_strings": options.stop,
        "logits_processor": [_function(name) for name in options.logits_processor],
        "num_return_sequences": options.samples,
    }


def _write(engine: InferenceEngine, text: Text, options: GenerateFlags) -> None:
    """Write the prompt, or several texts that begin with it, and what the model adds."""
    assert options.prompt is not None  # or it is a chat
    ids = text.encode(options.prompt)
    new, common = _count(engine, ids, options), _common(engine, text, options)
    begin, speaks = time.perf_counter(), engine.grid.rank == 0
    write = sys.stdout.write if speaks else lambda text: None
    if options.samples == 1 and options.beams == 1 and not options.logprobs:  # as it is made
        _, count = _stream(engine, text, ids, options, options.prompt)
    else:
        beams: dict[str, Any] = {"num_beams": options.beams, "length_penalty": options.length_penalty}
        completions = engine.generate([options.prompt], new, logprobs=True, **common, **beams)
        count = sum(len(completion.logprobs) for completion in completions)
        for number, completion in enumerate(completions):
            write(f"--- {number + 1} of {len(completions)}\n" if len(completions) > 1 else "")
            write(printable(completion.text) + "\n")
            if options.logprobs:
                for token, gain in zip(completion.tokens[completion.prompt :], completion.logprobs):
                    write(f"{gain:10.4f}  {token:>6}  {text.tokenizer.decode([token])!r}\n")
    if speaks:
        sys.stdout.flush()
        seconds = time.perf_counter() - begin
        print(f"{count} tokens in {seconds:.1f} s, {count / seconds:.0f} a second", file=sys.stderr)


def _function(name: str) -> Any:
    """Return the function that ``package.module:function`` names."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"--logits-processor is {name}, but there is no such function ({error}). Give package.module:function, "
            "which Python can import."
        ) from error
