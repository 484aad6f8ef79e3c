"""Text in a training file's ``data``: tokenized once, before the run, into a folder beside the runs."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError
from ..base.hub import DATA_URI
from ..base.verbosity import is_quiet
from ..data.sources import find_sources
from ..data.tokenization import tokenize
from ..data.tokenizer import open_tokenizer
from .job import tokenizer_of
from .sections import TrainingFile


def with_tokens(file: TrainingFile) -> TrainingFile:
    """Return a training file whose text files and data sets of the Hub are folders of tokens, which are made if needed.

    A folder's name is a hash of the sources and of the tokenizer, so a later run of the same text finds its tokens.
    Processes that ask at once wait for the first. Prompts and answers of a method stay files.

    Raises:
        ConfigError: there is no tokenizer, or the text cannot be tokenized.
    """
    if file.method is not None or file.data.images:
        return file
    changes: dict[str, Any] = {}
    for key in ("training", "validation"):
        given = getattr(file.data, key)
        try:
            if isinstance(given, str):
                changes[key] = _tokens(given, file)
            elif isinstance(given, Mapping):
                changes[key] = {_tokens(name, file): weight for name, weight in given.items()}
            elif given is not None:
                changes[key] = [_tokens(name, file) for name in given]
        except ConfigError as error:
            raise ConfigError(f"data.{key}: {error}") from error
    return file.changed(data=file.data.changed(**changes))


def _tokens(name: Any, file: TrainingFile) -> str:
    """Return the folder of the tokens of a text; of a folder, the folder itself."""
    if not str(name).startswith(DATA_URI) and not Path(name).is_file():
        return str(name)
    tokenizer = tokenizer_of(file)
    if tokenizer is None:
        raise ConfigError(f"{name} is text, and there is no tokenizer: give tokenizer, the path of one, or bytes")
    sources = find_sources([name])[0]
    known = [[*map(str, sources)], open_tokenizer(tokenizer).facts.fingerprint]
    folder = Path(file.runs) / "tokens" / hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]

    def progress(done: int, of: int) -> None:
        if not done and not is_quiet():
            print(f"data    {name} is tokenized into {folder}", file=sys.stderr, flush=True)

    tokenize([name], tokenizer, folder, progress=progress, wait=True)
    return str(folder)
