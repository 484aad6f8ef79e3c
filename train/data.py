"""Training and held-out rows of a run, with the checks of tokenizer and vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError, CorruptError
from ..base.hub import is_here
from ..data.answers import Answers
from ..data.image_answers import ImageAnswers
from ..data.mixture import Rows
from ..data.prompts import Prompts
from ..data.token_data import TokenData
from ..data.tokenizer import BYTES, open_tokenizer
from .sections import TrainingFile


def open_data(file: TrainingFile, sequence: int, part: str, **checks: Any) -> TokenData:
    """Open the rows of a part: ``training``, or ``held_out``.

    Args:
        file: the training file.
        sequence: tokens of a row.
        part: the part.
        checks: ``tokenizer`` and ``vocab_size``, as for ``TokenData``.

    Raises:
        ConfigError: the data cannot be used; the message begins with the key.
    """
    data = file.data
    own = data.validation if part == "held_out" else None
    options: dict[str, Any] = {}
    if own is None:
        options = {"held_out": data.held_out or 0.0, "part": part, "shuffle": data.shuffle}
    try:
        return TokenData(
            data.training if own is None else own,
            sequence,
            packing=data.packing,
            document_mask=data.document_mask,
            threads=data.threads,
            **options,
            **checks,
        )
    except (ConfigError, CorruptError) as error:
        raise ConfigError(f"data.{'training' if own is None else 'validation'}: {error}") from error


def training_rows(file: TrainingFile, sequence: int) -> Rows:
    """Return the rows that are trained on."""
    return open_data(file, sequence, "training").rows(file.seed)


def rows_here(file: TrainingFile, sequence: int) -> Rows | None:
    """Return the rows that are trained on, or None if they are no packed documents, no tokens yet, or elsewhere."""
    data = file.data
    names = [data.training] if isinstance(data.training, str) else list(data.training)
    if file.method is not None or not data.document_mask or not all(Path(name).is_dir() for name in names):
        return None
    return training_rows(file, sequence)


def described(data: TokenData | Answers | Prompts, seed: int) -> str:
    """Return how much data there is, for people."""
    if isinstance(data, Prompts):
        left = f", {data.left_out:,} without room for an answer left out" if data.left_out else ""
        return f"{len(data):,} prompts{left}"
    if isinstance(data, Answers):
        cut = f", {data.cut:,} rows cut" if data.cut else ""
        why = "too long" if data.whole else "without room for an answer"
        left = f", {data.left_out:,} samples {why} left out" if data.left_out else ""
        return f"{len(data):,} samples, rows of {data.length:,} tokens{cut}{left}"
    rows = data.rows(seed)
    return f"{rows.documents:,} documents, {rows.tokens:,} tokens"


def open_answers(
    file: TrainingFile, sequence: int, tokenizer: str | None, vocab_size: int
) -> tuple[Answers | Prompts, Answers | Prompts | None]:
    """Open the samples to train on, and those to evaluate on, of a run with a ``method``.

    Arguments and errors are those of ``check_data``; the tokenizer must be given.
    """
    data, grid, method = file.data, file.grid, file.method
    assert method is not None
    for key in ("packing", "document_mask", "shuffle", "threads"):
        if key in data.given:
            raise ConfigError(
                f"data.{key} has no effect with a method, whose rows are prompts and answers: leave it out"
            )
    if isinstance(data.training, Mapping) or isinstance(data.validation, Mapping):
        raise ConfigError(
            "data: a mixture by weights needs folders of tokens; with a method, give a list of files or folders"
        )
    if tokenizer is None:
        raise ConfigError(
            "tokenizer is missing: a method makes tokens of prompts and answers, and the model's folder has no "
            "tokenizer; give tokenizer: the path of one, or bytes"
        )
    size = open_tokenizer(tokenizer).facts.vocab_size
    if size > vocab_size:
        raise ConfigError(f"tokenizer {tokenizer} has {size} tokens, but the model's vocab_size is {vocab_size}")
    unit = (2 * grid.context if grid.context > 1 else 1) * (grid.tensor if grid.sequence_parallel else 1)
    if sequence < unit:
        raise ConfigError(f"training.sequence is {sequence}, but the grid shards sequences of at least {unit} tokens")

    def opened(key: str, paths: Any) -> Answers | Prompts:
        try:
            if method.form == "prompts":
                return Prompts(paths, tokenizer, sequence - (method.max_new_tokens or 0))
            kind = ImageAnswers if data.images else Answers
            return kind(paths, method.form, tokenizer, sequence // unit * unit, unit)
        except ConfigError as error:
            raise ConfigError(f"data.{key}: {error}") from error

    training = opened("training", data.training)
    if data.validation is not None:
        return training, opened("validation", data.validation)
    if data.held_out is None:
        return training, None
    try:
        return training.split(data.held_out)
    except ConfigError as error:
        raise ConfigError(f"data.{error}") from error


def check_data(
    file: TrainingFile, sequence: int, tokenizer: str | None, vocab_size: int
) -> tuple[TokenData | Answers | Prompts, TokenData | Answers | Prompts | None, str | None]:
    """Open the rows to train on and those to evaluate on, and check them against the tokenizer and the vocabulary.

    With a ``method`` they are ``Answers``, or ``Prompts``.

    Args:
        file: the training file.
        sequence: tokens of a row.
        tokenizer: the model's tokenizer; None: the one that made the tokens, if it still is where it was.
        vocab_size: number of entries in the model's vocabulary.

    Returns:
        The two, and the name of the tokenizer. The second is None if nothing is held out, the name if it is unknown.

    Raises:
        ConfigError: data that the model or the tokenizer does not fit.
    """
    if file.method is not None:
        answers, unseen = open_answers(file, sequence, tokenizer, vocab_size)
        _require_held_out(file, unseen)
        return answers, unseen, tokenizer
    training = open_data(file, sequence, "training", vocab_size=vocab_size)
    named = training.folders[0].index.tokenizer.name
    if tokenizer is None and (named == BYTES or is_here(named)):
        tokenizer = named
    if tokenizer is not None:
        facts = open_tokenizer(tokenizer).facts
        for folder in training.folders:
            folder.check_tokenizer(facts)
    if file.data.held_out is not None or file.data.validation is not None:
        held_out = open_data(file, sequence, "held_out", vocab_size=vocab_size)
        held_out.folders[0].check_tokenizer(training.folders[0].index.tokenizer)
        return training, held_out, tokenizer
    _require_held_out(file, None)
    return training, None, tokenizer


def _require_held_out(file: TrainingFile, held_out: Answers | Prompts | None) -> None:
    if held_out is None and "evaluate" in file.given and not file.evaluate.tasks:
        raise ConfigError("evaluate needs documents that are not trained on: give data.held_out or data.validation")
