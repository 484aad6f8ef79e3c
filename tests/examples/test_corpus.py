"""examples/corpus.py: the training files, their order, and the bigram model as a baseline."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from triax.data import TokenData

from support.paths import EXAMPLES

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


def test_the_corpus_is_the_standard_library_by_default() -> None:
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
    for rows, inside in zip(C.open_parts(sources, tmp_path / "cache", 64), (training, held), strict=True):
        found = text_of(rows)
        assert sorted(found) == sorted(source.path.read_text() for source in inside)


def text_of(data: TokenData) -> list[str]:
    """The documents of some data, which end with byte 0."""
    (folder,) = data.folders
    whole = b"".join(bytes(file.tokens) for file in folder.files)
    return [each.decode() for each in whole.split(b"\0")[:-1]]


def test_held_out_files_depend_on_file_names_only(texts: Path) -> None:
    held = {source.name for source in C.split(C.find([texts]))[1]}
    (texts / "part0" / "file0.txt").write_text("changed")
    (texts / "another.txt").write_text("new")
    again = {source.name for source in C.split(C.find([texts]))[1]}
    assert held <= again <= held | {"another.txt"}


def test_a_corpus_of_few_files_still_has_two_parts(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("some words " * 9)
    training, held = C.split(C.find([tmp_path]))
    assert (len(training), len(held)) == (1, 1)
    (tmp_path / "a.txt").write_text("\n\n".join(f"paragraph {number}" for number in range(60)))
    one = C.open_parts(C.find([tmp_path / "a.txt"]), tmp_path / "cache", 16)  # one file: some paragraphs are held out
    counts = [part.rows(0).documents for part in one]
    assert sum(counts) == 60 and 0 < counts[1] < 15


def test_changed_corpus_files_are_tokenized_again(texts: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = C.tokens(C.find([texts]), cache)
    assert C.tokens(C.find([texts]), cache) == first and len(list(cache.glob("*/index.json"))) == 2
    C.split(C.find([texts]))[0][0].path.write_text("something else entirely")
    changed = C.tokens(C.find([texts]), cache)
    assert changed["training"] != first["training"] and changed["validation"] == first["validation"]


def test_missing_or_empty_paths_of_a_corpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere does not exist"):
        C.find([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="no documents"):
        C.find([tmp_path])
