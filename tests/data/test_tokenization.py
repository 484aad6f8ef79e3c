"""Tokenizing text: every format, resumed runs, wrong input named with its line, and the command."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from triax.base.errors import ConfigError
from triax.cli.main import app
from triax.data import TokenFolder, open_tokenizer
from triax.data.sources import Part, Reading, cut, documents, find_sources, lines_before
from triax.data.tokenization import tokenize

from support.tokenized import texts, write_json_lines

TEXTS = texts(60, longest=30)


def tokens_of(folder: Path) -> list[bytes]:
    opened = TokenFolder(folder)
    return [bytes(opened.document(number)) for number in range(opened.index.documents)]


def wanted(values: list[str]) -> list[bytes]:
    return [value.encode() + b"\0" for value in values]


def command(*words: object) -> str:
    """Run the command; return what it prints, or its error."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        assert isinstance(result.exception, ConfigError), result.exception
        assert "\n" not in str(result.exception)
        return str(result.exception)
    return result.output


def write(path: Path, format: str, values: list[Any], key: str = "text") -> Path:
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"number": list(range(len(values))), key: values})
    if format == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=7)
    else:
        opened = pyarrow.ipc.new_file if format == "file" else pyarrow.ipc.new_stream
        with opened(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=9)
    return path


def test_a_folder_of_text_files_is_read_file_by_file(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / ".hidden").mkdir()
    (tmp_path / "in" / ".hidden" / "a.txt").write_text("hidden")
    for name, content in {"b.py": b"one\ntwo\n", "a.md": "é".encode(), "x.png": b"\0\1", "e.txt": b""}.items():
        (tmp_path / "in" / name).write_bytes(content)
    (tmp_path / "in" / "deep" / "c.txt").write_bytes(b"\n\n  first\n more\n \n\nsecond\r\n")
    printed = command("data", "tokenize", tmp_path / "in", "--tokenizer", "bytes", "--output", tmp_path / "files")
    assert "1 binary" in printed and "1 empty" in printed and "tokens in 3 documents" in printed
    contents = [b"\xc3\xa9\0", b"one\ntwo\n\0", b"\n\n  first\n more\n \n\nsecond\r\n\0"]
    assert tokens_of(tmp_path / "files") == contents
    assert TokenFolder(tmp_path / "files").origin(1) == f"{tmp_path}/in/b.py, line 1"
    tokenize([tmp_path / "in"], "bytes", tmp_path / "paragraphs", split="paragraph")
    assert tokens_of(tmp_path / "paragraphs")[2:] == [b"  first\n more\0", b"second\r\n\0"]
    assert [TokenFolder(tmp_path / "paragraphs").origin(n)[-7:] for n in (1, 2, 3)] == [" line 1", " line 3", " line 7"]
    tokenize([tmp_path / "in" / "b.py"], "bytes", tmp_path / "lines", split="line", end="none")
    assert tokens_of(tmp_path / "lines") == [b"one", b"two"]


def test_json_lines_parquet_and_arrow_have_the_same_documents(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "a.jsonl", TEXTS)
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(source.read_bytes().removesuffix(b"\n")))
    sources = {
        "jsonl": source,
        "gz": packed,
        "parquet": write(tmp_path / "a.parquet", "parquet", TEXTS),
        "file": write(tmp_path / "a.feather", "file", TEXTS),
        "stream": write(tmp_path / "a.arrow", "stream", TEXTS),
    }
    for name, path in sources.items():
        made = tokenize([path], "bytes", tmp_path / name, piece_bytes=400)
        assert tokens_of(tmp_path / name) == wanted(TEXTS)
        assert len(made.folder.files) > 1 or name in ("gz", "file", "stream")
        unit = "line" if name in ("jsonl", "gz") else "row"
        assert [made.folder.origin(n) for n in (0, 30, 59)] == [f"{path}, {unit} {n}" for n in (1, 31, 60)]
        assert [*made.folder.verify()] == []
        assert (made.folder.keys == TokenFolder(tmp_path / "jsonl").keys).all()
    (tmp_path / "state.json").write_text("{}")  # as datasets saves
    found, left = find_sources([tmp_path])
    assert {each.format for each in found} == {"jsonl", "parquet", "arrow"} and left["text beside data files"] >= 1


def test_token_files_are_safetensors(tmp_path: Path) -> None:
    tokenize([write_json_lines(tmp_path / "a.jsonl", TEXTS)], "bytes", tmp_path / "out")
    file = load_file(tmp_path / "out" / "00000.safetensors")
    assert {name: (str(array.dtype), array.shape) for name, array in file.items()} == {
        "offsets": ("int64", (61,)),
        "keys": ("uint64", (60,)),
        "origins": ("uint32", (60, 2)),
        "tokens": ("uint8", (sum(map(len, wanted(TEXTS))),)),
    }
    assert file["tokens"][file["offsets"][7] : file["offsets"][8]].tobytes() == wanted(TEXTS)[7]


@pytest.mark.parametrize("piece_bytes", [1, 7, 64, 4096])
def test_files_are_cut_into_parts_at_lines(tmp_path: Path, piece_bytes: int) -> None:
    content = "".join(f"{text}\n" for text in TEXTS[:20]).removesuffix("\n") + "\r\nlast"
    (tmp_path / "a.txt").write_bytes(content.encode())
    reading = Reading(split="line")
    (found, _) = find_sources([tmp_path / "a.txt"])
    lines = []
    for (part,) in cut(found, reading, piece_bytes):
        before = lines_before(part)
        mine = [*documents(part, reading)]
        lines += [(before + number, text) for number, text in mine[:-1]]
        assert mine[-1] == (len(mine) - 1, None)
    assert lines == [*enumerate([*TEXTS[:20], "last"], 1)]


def test_an_interrupted_tokenize_resumes_to_equal_bytes(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "a.jsonl", TEXTS)
    done: list[int] = []
    tokenize([source], "bytes", tmp_path / "one", piece_bytes=400)

    def stop(count: int, of: int) -> None:
        done.append(count)
        if count == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize([source], "bytes", tmp_path / "two", piece_bytes=400, progress=stop)
    with pytest.raises(ConfigError, match=r"no index.json. triax data tokenize has not finished there"):
        TokenFolder(tmp_path / "two")
    (tmp_path / "two" / ".00002.safetensors.part").write_bytes(b"half")
    (tmp_path / "two" / "00001.json").write_text("{")  # a record that was cut off
    with pytest.raises(ConfigError, match="was begun with other sources, options or tokenizer"):
        tokenize([source], "bytes", tmp_path / "two", piece_bytes=401)
    made = tokenize([source], "bytes", tmp_path / "two", piece_bytes=400)
    assert done == [0, 1, 2] and made.pieces == len(made.folder.files) - 1
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert sorted(path.name for path in (tmp_path / "two").iterdir() if path.suffix != ".part") == names
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert tokenize([source], "bytes", tmp_path / "two", piece_bytes=400).pieces == 0  # there already
    source.write_text(source.read_text() + '{"text": "more"}\n')
    with pytest.raises(ConfigError, match="has tokens of other sources"):
        tokenize([source], "bytes", tmp_path / "two", piece_bytes=400)


@pytest.mark.exhaustive
def test_three_processes_write_the_bytes_of_one(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "a.jsonl", TEXTS)
    for processes in (1, 3):
        tokenize([source], "bytes", tmp_path / str(processes), piece_bytes=300, processes=processes)
    for path in (tmp_path / "1").iterdir():
        assert path.read_bytes() == (tmp_path / "3" / path.name).read_bytes()
    write_json_lines(tmp_path / "b.jsonl", [*TEXTS, "", *TEXTS])
    with pytest.raises(ConfigError, match=r"b.jsonl, line 61: the text is empty"):
        tokenize([tmp_path / "b.jsonl"], "bytes", tmp_path / "b", piece_bytes=300, processes=3)


BAD = [
    ('{"text": ""}', "the text is empty"),
    ("", "the line is empty"),
    ("{", "the line is not JSON"),
    ("[" * 100_000, "the line is not JSON"),
    ('{"text": 1' + "0" * 5000 + "}", "the line is not JSON"),
    ("[1]", "the line is a JSON list, but an object is required"),
    ('{"text": 5}', "'text' is the number 5, but a text is required"),
    ('{"text": null}', "'text' is null"),
    ('{"content": "x"}', "there is no 'text'; its keys are 'content'; give --key"),
    ('{"messages": []}', "there is no 'text'; its keys are 'messages'; add --chat"),
    ('{"text": "\\ud800"}', "the text has half of a surrogate pair"),
    ('{"text": "\xff"}', "the line is not JSON"),
]


@pytest.mark.parametrize(("line", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_documents_are_named_with_their_line(tmp_path: Path, line: str, message: str) -> None:
    good = '{"text": "good"}\n'
    (tmp_path / "a.jsonl").write_bytes((good * 30 + line + "\n" + good).encode("latin-1"))
    for piece_bytes in (10**6, 100):  # in a later part of a file, too
        out = tmp_path / f"out{piece_bytes}"
        with pytest.raises(ConfigError) as raised:
            tokenize([tmp_path / "a.jsonl"], "bytes", out, piece_bytes=piece_bytes)
        text = str(raised.value)
        assert text.startswith(f"{tmp_path}/a.jsonl, line 31: {message}") and "--skip-bad" in text, text
        assert "\n" not in text and len(text) < 400
        made = tokenize([tmp_path / "a.jsonl"], "bytes", tmp_path / f"s{piece_bytes}", skip_bad=True)
        assert (made.bad, made.folder.index.documents) == (1, 31) and "line 31" in made.first_bad


def test_damaged_and_wrong_inputs_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"a\nb\n\xff")
    (tmp_path / "zero.txt").write_bytes(b"a\0b")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "data.json").write_text("[]")
    (tmp_path / "not.parquet").write_bytes(b"PAR1 nothing PAR1")
    (tmp_path / "not.arrow").write_bytes(b"ARROW1 nothing")
    (tmp_path / "not.jsonl.gz").write_bytes(b"no gzip")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(os.urandom(1000))[:500])
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "folder").mkdir()
    write(tmp_path / "other.parquet", "parquet", ["a"], key="body")
    write(tmp_path / "numbers.parquet", "parquet", [1, 2])
    write(tmp_path / "nulls.arrow", "stream", ["a", None])
    good = write_json_lines(tmp_path / "good.jsonl", TEXTS)
    for name, message in {
        "latin.txt": "latin.txt, line 3: byte 0xff is not UTF-8 text",
        "zero.txt": "zero.txt, line 1: byte 0 is not text",
        "empty.txt": "empty.txt, line 1: the file is empty",
        "data.json": "data.json may be a text or JSON lines. Add --format text, or --format jsonl",
        "not.parquet": "not.parquet cannot be read, because",
        "not.arrow": "not.arrow cannot be read, because",
        "not.jsonl.gz": "not.jsonl.gz cannot be read, because Not a gzipped file",
        "cut.jsonl.gz": "cut.jsonl.gz",
        "other.parquet": "other.parquet has no column 'text', but number, body. Give --key",
        "numbers.parquet": "numbers.parquet, row 1: 'text' is the number 1",
        "nulls.arrow": "nulls.arrow, row 2: 'text' is null",
        "folder": "There are no documents in",
        "nothing": "nothing does not exist",
    }.items():
        out = tmp_path / f"out-{name}"
        assert message in command("data", "tokenize", tmp_path / name, "--tokenizer", "bytes", "--output", out)
    for words, message in {
        ("--tokenizer", "none.json"): "There is no tokenizer none.json",
        ("--tokenizer", tmp_path / "tokenizer.json"): "is not a tokenizer of the package tokenizers",
        ("--tokenizer", "bytes", "--end", "</s>"): "The tokenizer bytes has no token '</s>'",
        ("--tokenizer", "bytes", "--chat"): "bytes has no chat template",
        ("--tokenizer", "bytes", "--split", "lines"): "did you mean 'line'",
        ("--tokenizer", "bytes", "--format", "json"): "did you mean 'jsonl'",
        ("--tokenizer", "bytes", "--output", tmp_path): "has other files, such as",
        ("--tokenizer", "bytes", "--output", tmp_path / "latin.txt"): "cannot be made, because",
    }.items():
        where = [] if "--output" in words else ["--output", tmp_path / "out"]
        assert message in command("data", "tokenize", good, *words, *where)


def test_training_a_tokenizer_names_bytes_that_are_no_text(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.txt").write_bytes(b"fine\n\xff\n")
    (tmp_path / "mixed" / "b.txt").write_text("the cat sat on the mat " * 20)
    train = ("data", "train-tokenizer", tmp_path / "mixed", "--vocab-size", 260, "--output", tmp_path / "skipped")
    assert "a.txt, line 2: byte 0xff is not UTF-8 text. Mend it, or add --skip-bad" in command(*train)
    assert "260 tokens" in command(*train, "--skip-bad")


def test_a_trained_tokenizer_is_recognised_in_its_folder(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    source = write_json_lines(tmp_path / "a.jsonl", ["the cat sat on the mat", "the dog sat on the log"] * 20)
    trained, out = tmp_path / "tokenizer", tmp_path / "out"
    assert "257" in command("data", "train-tokenizer", source, "--vocab-size", 9, "--output", tmp_path / "small")
    assert "270 tokens" in command("data", "train-tokenizer", source, "--vocab-size", 270, "--output", trained)
    command("data", "tokenize", source, "--tokenizer", trained, "--output", out)
    opened, tokenizer = TokenFolder(out), open_tokenizer(trained)
    assert opened.index.tokenizer == tokenizer.facts and opened.index.dtype == "U16"
    first = opened.document(0).tolist()
    assert len(first) < 12 and first[-1] == tokenizer.facts.end
    assert tokenizer.decode(first) == "the cat sat on the mat<|endoftext|>"
    printed = command("data", "show", out, "--document", 1)
    assert "the dog sat on the log<|endoftext|>" in printed and "a.jsonl, line 2" in printed
    assert "40 documents" in command("data", "show", out)
    assert "all as they were written" in command("data", "verify", out)
    # The same tokenizer, saved another way; and another one.
    (tmp_path / "moved.json").write_text(json.dumps(json.loads((trained / "tokenizer.json").read_text()), indent=4))
    opened.check_tokenizer(open_tokenizer(tmp_path / "moved.json").facts)
    with pytest.raises(ConfigError, match=r"was tokenized with .*tokenizer \(270 .* you gave bytes \(256 entries"):
        opened.check_tokenizer(open_tokenizer("bytes").facts)
    assert "There is no document 99" in command("data", "show", out, "--document", 99)


def test_lines_before_counts_the_rows_before_a_part(tmp_path: Path) -> None:
    path = str(write(tmp_path / "a.parquet", "parquet", TEXTS))
    assert lines_before(Part(path, "parquet", 3, 4)) == 21
    values = [*documents(Part(path, "parquet", 3, 4), Reading())]
    assert values == [*enumerate(TEXTS[21:28], 1), (7, None)]
    assert np.array_equal([lines_before(Part(path, "parquet"))], [0])
