"""Damaged files of tokens, sources, records and loader states: a one-line error, or unchanged numbers.

A random damage is a function of its number: `damage(7, path)` is the same again.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from triax.base.errors import ConfigError, CorruptError
from triax.data import TokenData, TokenFolder
from triax.data.token_folder import NAME, _checksum
from triax.data.tokenization import tokenize

from support.tokenized import folder, texts, write_json_lines

# Values that JSON can hold, of which a damaged or hostile file may have any.
STRANGE: list[Any] = [None, True, -1, 0, 2**31, 2**63, 2**70, 1.5, 1e308, float("nan"), "", "a", "U64", "../x", [], {}]
STRANGE += [[[]], {"a": 1}, "\ud800", [1] * 50]


def damage(number: int, path: Path) -> str:
    """Damage a file, and say how."""
    drawn = random.Random(number)
    raw = bytearray(path.read_bytes())
    size = len(raw)
    at, count = drawn.randrange(size), drawn.choice([1, 1, 2, 8, 64, 4096])
    at = drawn.choice([at, min(at, 8), min(at, size - 1, 200)])  # headers are small
    kind = drawn.choice(["cut", "flip", "zero", "noise", "insert", "remove", "double", "empty", "missing"])
    if kind == "cut":
        raw = raw[:at]
    elif kind == "flip":
        raw[at] ^= 1 << drawn.randrange(8)
    elif kind in ("zero", "noise"):
        count = min(count, size - at)
        raw[at : at + count] = bytes(count) if kind == "zero" else drawn.randbytes(count)
    elif kind == "insert":
        raw[at:at] = drawn.randbytes(count)
    elif kind == "remove":
        del raw[at : at + count]
    elif kind == "double":
        raw += bytes(raw)
    path.unlink()
    if kind != "missing":
        path.write_bytes(b"" if kind == "empty" else raw)
    return f"damage {number}: {kind} at {at} of {size}, {count}"


def mutated(value: Any, drawn: random.Random) -> Any:
    """Return JSON with one value changed, removed or added, somewhere."""
    if isinstance(value, dict) and value and drawn.random() < 0.85:
        key = drawn.choice([*value])
        if drawn.random() < 0.15:
            return {each: inner for each, inner in value.items() if each != key}
        if drawn.random() < 0.1:
            return {**value, "more": drawn.choice(STRANGE)}
        return {**value, key: mutated(value[key], drawn)}
    if isinstance(value, list) and value and drawn.random() < 0.8:
        at = drawn.randrange(len(value))
        return [*value[:at], mutated(value[at], drawn), *value[at + 1 :]]
    if type(value) is int and drawn.random() < 0.6:
        return value + drawn.choice([-1, 1, 8, -8, 1000, 2**40])
    return drawn.choice(STRANGE)


def parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw


def one_line(error: Exception) -> None:
    text = str(error)
    assert text and "\n" not in text and len(text) < 700, text


def read_all(path: Path) -> Exception | None:
    """Open, read three epochs and look at every document; return the refusal, if there is one."""
    try:
        opened = TokenFolder(path)
        for packing in ("cut", "whole"):
            loader = TokenData(path, 24, packing=packing).loader(2, 2, seed=1, epochs=1, threads=0)
            assert all(labels.shape == (2, 24) for _, labels in loader)
        for number in range(opened.index.documents):
            opened.origin(number)
        problems = [*opened.verify()]
    except (ConfigError, CorruptError) as error:
        one_line(error)
        return error
    for problem in problems:
        one_line(CorruptError(problem))
    return CorruptError(problems[0]) if problems else None


def numbers_in(path: Path) -> list[Any]:
    """Return the rows of an epoch, and the origin of each document."""
    opened = TokenFolder(path)
    rows = TokenData(path, 24).loader(2, 2, seed=1, epochs=1, threads=0)
    return [labels.tolist() for _, labels in rows] + [opened.origin(i) for i in range(opened.index.documents)]


def copies(tmp_path: Path, source: Path, numbers: range) -> Any:
    for number in numbers:
        path = tmp_path / "copy"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(source, path)
        yield number, path


SOME = [pytest.param(range(12), id="12"), pytest.param(range(12, 600), id="600", marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("numbers", SOME)
def test_damaged_token_files_are_refused(tmp_path: Path, numbers: range) -> None:
    whole = folder(tmp_path, 40, piece_bytes=400)
    before = {path.name: path.read_bytes() for path in whole.iterdir()}
    for number, path in copies(tmp_path, whole, numbers):
        name = random.Random(number).choice(sorted(name for name in before if name != ".lock"))
        how = damage(number, path / name)
        now = (path / name).read_bytes() if (path / name).exists() else b""
        unchanged = now == before[name] or (name == NAME and parsed(now) == parsed(before[name]))
        assert (read_all(path) is None) == unchanged, f"{name}: {how}"


@pytest.mark.parametrize("numbers", SOME)
def test_a_hostile_index_with_a_right_checksum_is_refused(tmp_path: Path, numbers: range) -> None:
    whole = folder(tmp_path, 40, piece_bytes=400)
    for number, path in copies(tmp_path, whole, numbers):
        values = json.loads((path / NAME).read_text())
        values.pop("checksum")
        changed = mutated(values, random.Random(number))
        if isinstance(changed, dict):
            changed = {**changed, "checksum": _checksum(changed)}
        (path / NAME).write_text(json.dumps(changed))
        found = read_all(path)
        harmless = {"plan", "tokenizer", "line", "files"}  # facts that no byte of the files contradicts
        differs = {key for key in values if not isinstance(changed, dict) or changed.get(key) != values[key]}
        assert found is not None or differs <= harmless, f"{number}: {differs}"


@pytest.mark.parametrize("numbers", SOME)
def test_hostile_headers_are_refused_or_change_no_tokens(tmp_path: Path, numbers: range) -> None:
    """The header of a file is changed, with the index's size and checksum for it."""
    import hashlib

    whole = folder(tmp_path, 40, piece_bytes=10**6)
    raw = (whole / "00000.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    for number, path in copies(tmp_path, whole, numbers):
        text = json.dumps(mutated(header, random.Random(number))).encode()
        text += b" " * (-len(text) % 8)
        content = len(text).to_bytes(8, "little") + text + raw[8 + length :]
        (path / "00000.safetensors").write_bytes(content)
        values = json.loads((path / NAME).read_text())
        values.pop("checksum")
        values["files"][0] |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (path / NAME).write_text(json.dumps({**values, "checksum": _checksum(values)}))
        assert read_all(path) is not None or numbers_in(path) == numbers_in(whole), f"{number}: {text!r}"


@pytest.mark.parametrize("numbers", SOME)
@pytest.mark.parametrize("format", ["jsonl", "gz", "parquet", "arrow"])
def test_damaged_sources_are_refused_or_read(tmp_path: Path, format: str, numbers: range) -> None:
    import pyarrow
    import pyarrow.parquet

    values = texts(40)
    source = tmp_path / "whole" / f"a.{'jsonl.gz' if format == 'gz' else format}"
    source.parent.mkdir()
    table = pyarrow.table({"text": values})
    if format == "parquet":
        pyarrow.parquet.write_table(table, source, row_group_size=9)
    elif format == "arrow":
        with pyarrow.ipc.new_stream(source, table.schema) as writer:
            writer.write_table(table, max_chunksize=9)
    else:
        write_json_lines(tmp_path / "a.jsonl", values)
        raw = (tmp_path / "a.jsonl").read_bytes()
        source.write_bytes(gzip.compress(raw) if format == "gz" else raw)
    for number, path in copies(tmp_path, source.parent, numbers):
        how = damage(number, path / source.name)
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        for skip_bad in (False, True):
            try:
                tokenize([path / source.name], "bytes", out, skip_bad=skip_bad, piece_bytes=800)
                break
            except ConfigError as error:
                one_line(error)
                named = source.name in str(error)
                assert named, how
                shutil.rmtree(out, ignore_errors=True)


@pytest.mark.parametrize("numbers", SOME)
def test_tokenize_rewrites_or_refuses_damaged_files(tmp_path: Path, numbers: range) -> None:
    """A run that was interrupted, and then its files damaged, writes the right bytes or is refused."""
    source = write_json_lines(tmp_path / "a.jsonl", texts(40))
    right = tokenize([source], "bytes", tmp_path / "right", piece_bytes=400).folder

    def stop(count: int, of: int) -> None:
        if count == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize([source], "bytes", tmp_path / "half", piece_bytes=400, progress=stop)
    for number, path in copies(tmp_path, tmp_path / "half", numbers):
        names = sorted(each.name for each in path.iterdir() if each.name != ".lock")
        how = damage(number, path / random.Random(number).choice(names))
        try:
            made = tokenize([source], "bytes", path, piece_bytes=400).folder
        except ConfigError as error:
            one_line(error)
            continue
        assert made.index.files == right.index.files and not [*made.verify()], how


@pytest.mark.parametrize("numbers", SOME)
def test_hostile_loader_states_are_refused(tmp_path: Path, numbers: range) -> None:
    loader = TokenData(folder(tmp_path, 20), 24).loader(2, 2, seed=1, threads=0)
    state = loader.state_dict()
    for number in numbers:
        changed = mutated(state, random.Random(number))
        if not isinstance(changed, dict):
            continue
        try:
            loader.load_state_dict(changed)
        except ConfigError as error:
            one_line(error)
            continue
        assert {**changed, "row": 0}.items() >= {**state, "row": 0}.items()
        assert changed["row"] % 1 == 0 and len([*islice(loader, 1)]) == 1
    assert os.listdir(tmp_path)


@pytest.mark.parametrize("threads", [0, 1])
def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path: Path, threads: int) -> None:
    """Reading what was cut off ended the process by SIGBUS."""
    path = folder(tmp_path, 60)
    data = TokenData(path, length=16, threads=threads)
    loader = data.loader(train=2, micro=2, threads=threads)
    next(loader)
    for file in path.glob("*.safetensors"):
        os.truncate(file, 64)
    with pytest.raises(CorruptError, match=r"it had .* bytes when it was opened, and has 64 now") as failure:
        [*islice(loader, 9)]
    one_line(failure.value)
    with pytest.raises(CorruptError, match="has 64 now"):
        data.folders[0].document(0)
