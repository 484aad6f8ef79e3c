"""Small tokenized folders for tests: documents that differ in every token, and their texts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from triax.data.tokenization import tokenize


def texts(count: int, seed: int = 0, longest: int = 40) -> list[str]:
    """Return texts of 1 to ``longest`` letters, no two equal."""
    drawn = random.Random(seed)
    return [
        f"{number}:" + "".join(chr(drawn.randrange(97, 123)) for _ in range(drawn.randint(0, longest)))
        for number in range(count)
    ]


def write_json_lines(path: Path, values: list[Any], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: value}) + "\n" for value in values))
    return path


def folder(root: Path, count: int, seed: int = 0, name: str = "tokens", piece_bytes: int = 500) -> Path:
    """Tokenize texts as bytes into several files, and return the folder."""
    source = write_json_lines(root / f"{name}.jsonl", texts(count, seed))
    tokenize([source], "bytes", root / name, piece_bytes=piece_bytes)
    return root / name
