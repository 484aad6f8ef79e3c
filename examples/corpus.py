"""The text that train_gpt.py learns: files -> one memory-mapped array of bytes -> batches.

By default the source of Python's own standard library, which is on every machine that runs Python. Some of the
files are held out for validation: which ones depends on their names alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

HELD_OUT = 0.05  # the share of the files that is never trained on
END = b"\0"  # stands behind every file; no text has it
FORMAT = 2  # part of the cache's key: raise it when what is cached changes

# Not the library's own text: installed packages, its tests, which many distributions leave out, and what programs
# wrote: tables of characters and of help texts, which would flatter any model.
_SKIP = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_GENERATED = ("encodings/", "pydoc_data/")


class Source(NamedTuple):
    """A file of the corpus."""

    name: str  # relative to the folder it was found in; decides whether it is held out
    path: Path


@dataclass(frozen=True)
class Corpus:
    """Text as bytes, in two parts that share no file."""

    training: Bytes  # (N,), memory-mapped
    held_out: Bytes  # (M,)
    training_files: int
    held_out_files: int

    def __str__(self) -> str:
        trained, held = (f"{len(part) / 1e6:.1f} MB" for part in (self.training, self.held_out))
        return f"{trained} in {self.training_files} files, and {held} in {self.held_out_files} held-out files"


# ------------------------------------------------------------------------------------ files -> bytes


def find(data: Sequence[str | Path] = ()) -> list[Source]:
    """The text files of the given files and folders, in a fixed order; by default the standard library's source.

    Raises:
        ValueError: a path that does not exist, or no text at all.
    """
    if not data:
        library = Path(sysconfig.get_paths()["stdlib"])
        return [s for s in _walk(library) if s.name.endswith(".py") and not s.name.startswith(_GENERATED)]
    sources: dict[Path, Source] = {}
    for path in map(Path, data):
        if not path.exists():
            raise ValueError(f"--text {path}: there is no such file or folder")
        for source in _walk(path) if path.is_dir() else [Source(path.name, path)]:
            if _is_text(source.path):
                sources.setdefault(source.path.resolve(), source)
    if not sources:
        raise ValueError(f"--text {' '.join(map(str, data))}: there is no text file in it")
    return list(sources.values())


def load(sources: Sequence[Source], cache: Path) -> Corpus:
    """The bytes of the files, from the cache if nothing changed since they were last read.

    Any number of processes may call this at once: the first one reads the files.
    """
    stats = []
    for source in sources:
        with contextlib.suppress(OSError):
            stat = source.path.stat()
            stats.append([source.name, str(source.path.resolve()), stat.st_size, stat.st_mtime_ns])
    key = hashlib.sha256(json.dumps([FORMAT, HELD_OUT, stats]).encode()).hexdigest()[:16]
    facts = cache / f"{key}.json"
    if not facts.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not facts.exists():
                _write(sources, facts)
    sizes = json.loads(facts.read_text())
    whole: Bytes = np.memmap(facts.with_suffix(".bin"), dtype=np.uint8, mode="r")
    split = sizes["training"]
    return Corpus(whole[:split], whole[split:], sizes["training_files"], sizes["held_out_files"])


def split(sources: Sequence[Source]) -> tuple[list[Source], list[Source]]:
    """Split files into those to train on and those to hold out, by each file's name alone."""
    ranked = sorted(sources, key=lambda source: _fraction(source.name))
    count = sum(_fraction(source.name) < HELD_OUT for source in ranked)
    if len(ranked) > 1:
        count = min(max(count, 1), len(ranked) - 1)  # a small corpus also has both
    held = set(ranked[:count])
    return [s for s in sources if s not in held], [s for s in sources if s in held]


def _walk(folder: Path) -> Iterator[Source]:
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIP and not name.startswith("."))
        for file in sorted(files):
            path = Path(root) / file
            yield Source(path.relative_to(folder).as_posix(), path)


def _is_text(path: Path) -> bool:
    """Return True if a file has no zero byte near its beginning, which is git's test for text."""
    try:
        with path.open("rb") as file:
            return END not in file.read(8000)
    except OSError:
        return False


def _fraction(name: str) -> float:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def _write(sources: Sequence[Source], facts: Path) -> None:
    """The bytes first, then the facts, whose presence says that all is there; each under its name when whole."""
    training, held = map(_read, split(sources))
    files = [len(training), len(held)]
    parts = [b"".join(part) for part in (training, held)]
    if not all(files) and sum(files) == 1:  # a single file: hold out its end
        whole = parts[0] + parts[1]
        cut = int(len(whole) * (1 - HELD_OUT))
        parts, files = [whole[:cut], whole[cut:]], [1, 1]
    known = {"training": len(parts[0]), "training_files": files[0], "held_out_files": files[1]}
    for path, content in ((facts.with_suffix(".bin"), b"".join(parts)), (facts, json.dumps(known).encode())):
        temporary = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}")
        temporary.write_bytes(content)
        temporary.replace(path)


def _read(sources: Sequence[Source]) -> list[bytes]:
    texts = []
    for source in sources:
        with contextlib.suppress(OSError):  # unreadable: the corpus goes on without it
            texts.append(source.path.read_bytes() + END)
    return texts


# ---------------------------------------------------------------------------------- bytes -> batches


def check_length(corpus: Corpus, length: int) -> None:
    """Check that both parts have a window of ``length`` bytes and its next byte.

    Raises:
        ValueError: one has not.
    """
    for name, part in (("training", corpus.training), ("held-out", corpus.held_out)):
        if len(part) < length + 1:
            raise ValueError(
                f"the {name} text has {len(part)} bytes, too few for a sequence of {length} and the byte after it: "
                "give more text, or a shorter --sequence"
            )


def batch(text: Bytes, step: int, *, size: int, length: int, seed: int) -> Bytes:
    """The windows of one global batch: a function of (seed, step) alone, whatever the grid.

    Returns:
        (size, length + 1): in each row, inputs and labels overlap in all but one byte.
    """
    random = np.random.Generator(np.random.Philox(key=np.array([seed, step], dtype=np.uint64)))
    starts = random.integers(0, len(text) - length, size)
    return np.stack([text[start : start + length + 1] for start in starts])


def replica_rows(rows: Bytes, replica: int, replicas: int, micro: int) -> Iterator[Bytes]:
    """One replica's contiguous part of a global batch, a microbatch at a time."""
    share = len(rows) // replicas
    for start in range(replica * share, (replica + 1) * share, micro):
        yield rows[start : start + micro]


def windows(text: Bytes, count: int, length: int) -> Bytes:
    """``count`` windows spread evenly over the text; they overlap only if it is too short: (count, length + 1)."""
    starts = np.linspace(0, len(text) - 1 - length, count).astype(np.int64)
    return np.stack([text[start : start + length + 1] for start in starts])


class Bigram:
    """The model to beat: the next byte's probability given one byte, as counted in the training text.

    p(b | a) = (n(a, b) + p(b)) / (n(a) + 1), where p(b) is the byte's own frequency, every byte counted once more
    than it occurs, so that nothing is impossible.
    """

    def __init__(self, text: Bytes) -> None:
        pairs = np.zeros(256 * 256, dtype=np.int64)
        for start in range(0, len(text) - 1, 1 << 22):  # in parts: a pair takes 4 bytes, where the text has one
            part = text[start : start + (1 << 22) + 1].astype(np.int32)
            pairs += np.bincount(part[:-1] * 256 + part[1:], minlength=256 * 256)
        single = np.bincount(text, minlength=256) + 1.0
        table = pairs.reshape(256, 256) + single / single.sum()
        self.log_probability = np.log(table / table.sum(axis=1, keepdims=True))  # (256, 256): [a, b]

    def loss(self, rows: Bytes) -> float:
        """The mean loss in nats per byte on windows (N, length + 1), as a model's is measured."""
        return float(-self.log_probability[rows[:, :-1], rows[:, 1:]].mean())
