"""Training and held-out rows of a run, with the checks of tokenizer and vocabulary."""

from __future__ import annotations

from typing import Any

from ..base.errors import ConfigError, CorruptError
from ..base.hub import is_here
from ..data.mixture import Rows
from ..data.token_data import TokenData
from ..data.tokenizer import BYTES, open_tokenizer
from .schema import TrainingFile


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


def check_data(
    file: TrainingFile, sequence: int, tokenizer: str | None, vocab_size: int
) -> tuple[TokenData, TokenData | None, str | None]:
    """Open the rows to train on and those to evaluate on, and check them against the tokenizer and the vocabulary.

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
    if "evaluate" in file.given:
        raise ConfigError("evaluate needs documents that are not trained on: give data.held_out or data.validation")
    return training, None, tokenizer
