"""``triax generate``: a model's folder and a prompt; what follows it, as it is made.

The folder says what family of models it holds (``model_type`` in its config.json), and an installed package that
offers the entry point of that name in the group ``triax.models`` makes the layers: triax itself for the families of
``triax.models``, any other package for its own. So a folder chooses among code that is installed, and brings none.
"""

from __future__ import annotations

import codecs
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from ..grid.environment import read_environment
from ..grid.topology import Topology
from .config import ConfigError
from .launch import launch, user_error

if TYPE_CHECKING:
    from .inference import InferenceEngine

_MODELS = "triax.models"  # the group of entry points
_CONTROL = {i: "\N{REPLACEMENT CHARACTER}" for i in (*range(32), *range(127, 160)) if chr(i) not in "\n\t"}
_MOST = 200  # new tokens where nobody says how many and the model has room


@dataclass(frozen=True)
class Job:
    """What every rank is told."""

    folder: Path
    prompt: str
    new: int | None
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int
    dtype: str | None
    pipe: int
    tensor: int


def generate(
    run: Annotated[Path, typer.Argument(help="A folder of config.json and *.safetensors, or a run that has model/.")],
    prompt: Annotated[str, typer.Option(help="What the text begins with.")],
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help=f"As many as the model has room for, {_MOST} at most, unless told.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="Lower is safer; 0 takes the likeliest token.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest that add up to p.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text, on any grid.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="Of the computation, as bfloat16; the weights' own.")] = None,
    pipe: Annotated[int, typer.Option(min=1, help="Stages of layers.")] = 1,
    tensor: Annotated[
        int | None, typer.Option(min=1, help="Shards of a layer; what --pipe leaves of torchrun's processes, or 1.")
    ] = None,
) -> None:
    """Continue a prompt, and print it as it comes. Starts --pipe x --tensor processes, or runs under torchrun."""
    if not prompt:
        raise ConfigError("--prompt is empty: the text needs something to follow")
    folder = find_model(run)
    family(folder)  # before any process starts
    environment = read_environment()
    processes = environment.world_size if environment else pipe * (tensor or 1)
    shards = tensor or max(1, processes // pipe)
    job = Job(folder, prompt, max_new_tokens, temperature, top_k, top_p, seed, dtype, pipe, shards)
    if environment is not None or processes == 1:
        generate_on_rank(job)
        return
    topology = Topology(pipe=pipe, data=1, tensor=shards)
    raise SystemExit(
        launch(generate_on_rank, job, ranks=processes, topology=topology, preload=("triax.engine.inference",))
    )


def generate_on_rank(job: Job) -> None:
    """What each rank does; the first one prints."""
    import torch

    from ..grid.grid import Grid
    from ..pipe.module import PipelineModule
    from .inference import init_inference

    try:
        grid = Grid(pipe=job.pipe, tensor=job.tensor)
        dtype = None if job.dtype is None else getattr(torch, job.dtype, None)
        if job.dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"--dtype {job.dtype} is none of float32, float64, bfloat16 and float16")
        text = open_text(job.folder)
        layers = family(job.folder)(job.folder)
        engine = init_inference(PipelineModule(layers, grid=grid, dtype=dtype), max_batch=1)
        _write(engine, text, job)
    except (ValueError, FileNotFoundError) as error:
        user_error(error)
    grid.close()


def _write(engine: InferenceEngine, text: Text, job: Job) -> None:
    ids = text.encode(job.prompt)
    new = job.new or max(1, min(_MOST, engine.max_length - len(ids)))
    begin, count, speaks = time.perf_counter(), 0, engine.grid.rank == 0
    ends = [token for token in text.ends if not engine.vocab_size or token < engine.vocab_size]
    tokens = engine.stream([ids], new, job.temperature, job.top_k, job.top_p, job.seed, ends)
    if speaks:
        sys.stdout.write(job.prompt)
    for token in tokens:
        count += 1
        if speaks and token.token not in ends:
            sys.stdout.write(_shown(text.follow(token.token)))
            sys.stdout.flush()
    if speaks:
        sys.stdout.write(_shown(text.rest()) + "\n")
        sys.stdout.flush()
        seconds = time.perf_counter() - begin
        print(f"{count} tokens in {seconds:.1f} s, {count / seconds:.0f} a second", file=sys.stderr)


def _shown(text: str) -> str:
    """As it is; on a terminal, without what would drive it."""
    return text.translate(_CONTROL) if sys.stdout.isatty() else text


def find_model(run: Path) -> Path:
    """The folder with the model: the one given, or ``model`` in it, which a training run leaves.

    Raises:
        ConfigError: neither has a config.json.
    """
    for folder in (run, run / "model"):
        if (folder / "config.json").is_file():
            return folder
    there = "is no such folder" if not run.is_dir() else "has neither config.json nor model/config.json"
    raise ConfigError(f"{run} {there}: give a folder as transformers saves it, or a run of examples/train_gpt.py")


def family(folder: Path) -> Any:
    """The function that makes the layers of a folder's model, from the folder.

    Raises:
        ConfigError: no installed package knows the family.
    """
    model_type = _read(folder / "config.json").get("model_type")
    known = entry_points(group=_MODELS)
    if model_type not in known.names:
        names = ", ".join(sorted(known.names)) or "none: install triax again, pip install -e ."
        raise ConfigError(
            f"{folder / 'config.json'} has model_type {model_type!r}, and those installed are {names}. A package adds "
            f'one with the entry point [project.entry-points."{_MODELS}"] {model_type} = "package.module:function"'
        )
    return known[model_type].load()


# -------------------------------------------------------------------------------------------- text and tokens


class Text(Protocol):
    """Text <-> ids, and the text of ids that come one by one."""

    ends: list[int]  # the tokens that end a text

    def encode(self, prompt: str) -> list[int]: ...

    def follow(self, token: int) -> str: ...

    def rest(self) -> str: ...


class ByteText:
    """UTF-8 bytes are the tokens. A character shows when it is whole."""

    def __init__(self, ends: Iterable[int]) -> None:
        self.ends = list(ends)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def encode(self, prompt: str) -> list[int]:
        return list(prompt.encode())

    def follow(self, token: int) -> str:
        return self._decoder.decode(bytes([token]))

    def rest(self) -> str:
        return self._decoder.decode(b"", final=True)


class TokenizerText:
    """Hugging Face's tokenizer of the folder."""

    def __init__(self, folder: Path, ends: Iterable[int]) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ValueError(f"{folder} has a tokenizer, which needs transformers: pip install 'triax[hf]'") from error
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.ends = list(ends)
        self._ids: list[int] = []
        self._shown = ""

    def encode(self, prompt: str) -> list[int]:
        self._ids = list(self._tokenizer(prompt)["input_ids"])
        self._shown = self._text()
        return list(self._ids)

    def follow(self, token: int) -> str:
        self._ids.append(token)
        whole = self._text()
        if whole.endswith("\N{REPLACEMENT CHARACTER}"):  # in the middle of a character
            return ""
        new, self._shown = whole[len(self._shown) :], whole
        return new

    def rest(self) -> str:
        return self._text()[len(self._shown) :]

    def _text(self) -> str:
        return str(self._tokenizer.decode(self._ids))


def open_text(folder: Path) -> Text:
    """The folder's tokenizer; without one, bytes, where the vocabulary is theirs.

    Raises:
        ValueError: there is no tokenizer, and the vocabulary is not that of bytes.
    """
    config = _read(folder / "config.json")
    further = folder / "generation_config.json"
    eos = (_read(further) if further.is_file() else config).get("eos_token_id")
    ends = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        return TokenizerText(folder, ends)
    if config.get("vocab_size") == 256:
        return ByteText(ends)
    raise ValueError(
        f"{folder} has no tokenizer.json, and a vocabulary of {config.get('vocab_size')}, not the 256 bytes: copy the "
        "model's tokenizer files there"
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    return found
