"""examples/corpus.py: what is trained on, in which order, and the bigram model to beat."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from paths import EXAMPLES

sys.path.insert(0, str(EXAMPLES))

import corpus as C


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Forty files of different words."""
    for index in range(40):
        folder = tmp_path / "texts" / f"part{index % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"file{index}.txt").write_text(f"file {index} speaks of thing {index}. " * 20)
    (tmp_path / "texts" / "picture.bin").write_bytes(b"\x89PNG\0\0" * 9)
    return tmp_path / "texts"


def test_standard_library_is_the_default() -> None:
    sources = C.find()
    names = [source.name for source in sources]
    assert "argparse.py" in names and "json/decoder.py" in names
    assert not any({"site-packages", "test", "tests"} & set(name.split("/")) for name in names)
    assert names == [source.name for source in C.find()]  # a fixed order
    training, held = C.split(sources)
    assert 0.02 < len(held) / len(sources) < 0.1
    assert len(training) + len(held) == len(sources)


def test_held_out_files_are_never_trained_on(texts: Path, tmp_path: Path) -> None:
    sources = C.find([texts])
    assert len(sources) == 40  # not the picture
    training, held = C.split(sources)
    assert held and not set(training) & set(held)
    corpus = C.load(sources, tmp_path / "cache")
    for part, inside, outside in ((corpus.training, training, held), (corpus.held_out, held, training)):
        text = bytes(part)
        assert all(source.path.read_bytes() + C.END in text for source in inside)
        assert not any(source.path.read_bytes() in text for source in outside)
        assert text.count(C.END) == len(inside)


def test_what_is_held_out_depends_on_names_alone(texts: Path) -> None:
    held = {source.name for source in C.split(C.find([texts]))[1]}
    (texts / "part0" / "file0.txt").write_text("changed")
    (texts / "another.txt").write_text("new")
    again = {source.name for source in C.split(C.find([texts]))[1]}
    assert held <= again <= held | {"another.txt"}


def test_few_files_still_give_two_parts(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("some words " * 9)
    training, held = C.split(C.find([tmp_path]))
    assert (len(training), len(held)) == (1, 1)
    one = C.load(C.find([tmp_path / "a.txt"]), tmp_path / "cache")  # one file: its end is held out
    whole = (tmp_path / "a.txt").read_bytes() + C.END
    assert bytes(one.training) + bytes(one.held_out) == whole and len(one.held_out) == 5


def test_cache_follows_the_files(texts: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = C.load(C.find([texts]), cache)
    assert isinstance(first.training, np.memmap)
    assert len(list(cache.glob("*.bin"))) == 1
    C.load(C.find([texts]), cache)
    assert len(list(cache.glob("*.bin"))) == 1
    trained_on = C.split(C.find([texts]))[0][0]
    trained_on.path.write_text("something else entirely")
    changed = C.load(C.find([texts]), cache)
    assert b"something else entirely" in bytes(changed.training)
    assert len(list(cache.glob("*.bin"))) == 2
    assert {path.suffix for path in cache.iterdir()} == {".bin", ".json", ""}  # no temporary file is left


def test_many_processes_at_once(texts: Path, tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path

sys.path.insert(0, {str(EXAMPLES)!r})
import corpus

for _ in range(2):
    print(len(corpus.load(corpus.find([Path({str(texts)!r})]), Path({str(tmp_path / "cache")!r})).training))
"""
    command = [sys.executable, "-c", program]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    sizes = {size for run in runs for size in run.communicate(timeout=60)[0].split()}
    assert len(sizes) == 1 and int(sizes.pop()) > 0 and all(run.returncode == 0 for run in runs)
    assert len(list((tmp_path / "cache").glob("*.bin"))) == 1


def test_unreadable_and_missing_paths(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--text .*nowhere: there is no such file or folder"):
        C.find([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="no text file in it"):
        C.find([tmp_path])
    (tmp_path / "a.txt").write_text("short")
    corpus = C.load(C.find([tmp_path]), tmp_path / "cache")
    with pytest.raises(ValueError, match=r"has \d+ bytes, too few for a sequence of 64"):
        C.check_length(corpus, 64)


def test_batches_are_a_function_of_seed_and_step() -> None:
    text = np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8)
    one = C.batch(text, 7, size=8, length=32, seed=3)
    C.batch(text, 1, size=2, length=9, seed=1)  # nothing is remembered
    assert np.array_equal(one, C.batch(text, 7, size=8, length=32, seed=3))
    assert one.shape == (8, 33) and one.dtype == np.uint8
    assert not np.array_equal(one, C.batch(text, 8, size=8, length=32, seed=3))
    assert not np.array_equal(one, C.batch(text, 7, size=8, length=32, seed=4))
    assert all(bytes(row) in bytes(text) for row in one)
    # The last byte can be reached, and nothing behind it.
    starts = {bytes(row) for step in range(60) for row in C.batch(text[:40], step, size=8, length=32, seed=0)}
    assert starts == {bytes(text[i : i + 33]) for i in range(8)}


@pytest.mark.parametrize(("replicas", "micro"), [(1, 1), (1, 8), (2, 2), (4, 1), (8, 1)])
def test_replicas_share_the_same_batch(replicas: int, micro: int) -> None:
    rows = np.arange(8 * 5, dtype=np.uint8).reshape(8, 5)
    parts = [part for r in range(replicas) for part in C.replica_rows(rows, r, replicas, micro)]
    assert all(len(part) == micro for part in parts)
    assert np.array_equal(np.concatenate(parts), rows)


def test_windows_cover_the_text_evenly() -> None:
    text = np.arange(101, dtype=np.uint8)
    rows = C.windows(text, 10, 10)
    assert rows.shape == (10, 11)
    assert rows[0, 0] == 0 and rows[-1, -1] == 100
    assert list(rows[:, 0]) == list(range(0, 100, 10))  # each labelled byte once
    assert C.windows(text, 50, 10).shape == (50, 11)  # a short text: they overlap


def test_bigram_loss_by_hand() -> None:
    text = np.frombuffer(b"abracadabra, abracadabra!", dtype=np.uint8)
    rows = np.stack([np.frombuffer(piece, dtype=np.uint8) for piece in (b"abra", b"xyza")])
    singles, pairs, firsts = Counter(bytes(text)), Counter(pairwise(bytes(text))), Counter(bytes(text)[:-1])

    def surprise(a: int, b: int) -> float:
        own = (singles[b] + 1) / (len(text) + 256)
        return -math.log((pairs[a, b] + own) / (firsts[a] + 1))

    expected = [surprise(a, b) for row in (b"abra", b"xyza") for a, b in pairwise(row)]
    assert C.Bigram(text).loss(rows) == pytest.approx(sum(expected) / len(expected), rel=1e-12)
    assert np.allclose(np.exp(C.Bigram(text).log_probability).sum(axis=1), 1.0)


def test_bigram_counts_long_texts_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    text = np.random.default_rng(0).integers(0, 7, (1 << 22) + 1000).astype(np.uint8)
    pairs = text[:-1].astype(np.int64) * 256 + text[1:]
    expected = np.bincount(pairs, minlength=65536).reshape(256, 256)
    single = (np.bincount(text, minlength=256) + 1) / (len(text) + 256)
    table = (expected + single) / (expected.sum(axis=1, keepdims=True) + 1)
    assert np.allclose(C.Bigram(text).log_probability, np.log(table), rtol=1e-12, atol=0)
