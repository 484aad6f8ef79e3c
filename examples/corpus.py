"""The text that the examples learn: files -> folders of tokens, one token a byte.

By default the source of Python's own standard library, which is on every machine that runs Python. Some of the
files are held out for validation: which ones depends on their names alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from triax.data import TokenData, tokenize
from triax.data.sources import find_sources

HELD_OUT = 0.05  # the share of the files that is never trained on

# Not the library's own text: installed packages, its tests, which many distributions leave out, and what programs
# wrote: tables of characters and of help texts, which would flatter any model.
_SKIP = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_GENERATED = ("encodings/", "pydoc_data/")


class Source(NamedTuple):
    """A file of the corpus."""

    name: str  # relative to the folder it was found in; decides whether it is held out
    path: Path


def find(data: Sequence[str | Path] = ()) -> list[Source]:
    """The text files of the given files and folders, in a fixed order; by default the standard library's source.

    Raises:
        ValueError: a path that does not exist, or no text at all.
    """
    if not data:
        library = Path(sysconfig.get_paths()["stdlib"])
        return [s for s in _walk(library) if s.name.endswith(".py") and not s.name.startswith(_GENERATED)]
    found: list[Source] = []
    for path in map(Path, data):
        files = [Path(source.name) for source in find_sources([path], "text")[0]]
        found += [Source(file.relative_to(path).as_posix() if path.is_dir() else file.name, file) for file in files]
    return found


def split(sources: Sequence[Source]) -> tuple[list[Source], list[Source]]:
    """Split files into those to train on and those to hold out, by each file's name alone."""
    ranked = sorted(sources, key=lambda source: _fraction(source.name))
    count = sum(_fraction(source.name) < HELD_OUT for source in ranked)
    if len(ranked) > 1:
        count = min(max(count, 1), len(ranked) - 1)  # a small corpus also has both
    held = set(ranked[:count])
    return [s for s in sources if s not in held], [s for s in sources if s in held]


def tokens(sources: Sequence[Source], cache: Path) -> dict[str, Any]:
    """The section ``data`` of a training file, for the bytes of files; of a single file, a part is held out.

    Documents are paragraphs, so that a batch has text of many files. They are tokenized once; any number of processes
    may call this.
    """
    training, held_out = split(sources)
    if not training or not held_out:
        return {"training": _tokenized(sources, cache), "held_out": HELD_OUT}
    return {"training": _tokenized(training, cache), "validation": _tokenized(held_out, cache)}


def open_parts(sources: Sequence[Source], cache: Path, length: int) -> tuple[TokenData, TokenData]:
    """Rows of ``length`` bytes to train on, and rows to evaluate on."""
    data = tokens(sources, cache)
    share = data.get("held_out", 0.0)
    training = TokenData(data["training"], length, held_out=share, document_mask=False)
    if share:
        return training, TokenData(data["training"], length, held_out=share, part="held_out", document_mask=False)
    return training, TokenData(data["validation"], length, document_mask=False)


def _walk(folder: Path) -> Iterator[Source]:
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIP and not name.startswith("."))
        for file in sorted(files):
            path = Path(root) / file
            yield Source(path.relative_to(folder).as_posix(), path)


def _fraction(name: str) -> float:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def _tokenized(sources: Sequence[Source], cache: Path) -> str:
    """The folder of the files' tokens, whose name changes with them."""
    stats = [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for _, path in sources]
    folder = cache / hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:16]
    paths = [source.path for source in sources]
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        tokenize(paths, "bytes", folder, split="paragraph", format="text", skip_bad=True)
    return str(folder)
