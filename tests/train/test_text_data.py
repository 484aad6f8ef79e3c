"""Text in a training file's ``data``: the rows are those of the folder of tokens that a user would make of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import triax
from triax.base.errors import ConfigError
from triax.train.data import open_data
from triax.train.sections import TrainingFile
from triax.train.start import make_job

from support.file_runs import NoPictures, run_watched, written_losses
from support.hub_cache import cache_of, fill
from support.tokenized import texts, write_json_lines

DATA = "tiny/stories"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the working directory. It has two files of texts; one file is also a data set in the Hub's cache."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hub_files").mkdir()
    write_json_lines(tmp_path / "some.jsonl", texts(20))
    write_json_lines(tmp_path / "hub_files" / "more.jsonl", [f"{text} again" for text in texts(20)])
    with cache_of(tmp_path / "hub"):
        fill(tmp_path / "hub", DATA, tmp_path / "hub_files", kind="dataset")
        triax.data.tokenize(["some.jsonl"], "bytes", "some")
        triax.data.tokenize(["hub_files/more.jsonl"], "bytes", "more")
        yield tmp_path


def file_of(data: Any, **changes: Any) -> TrainingFile:
    """Return a training file of a tiny model."""
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16}
    given: dict[str, Any] = {
        "model": {"preset": "bytes-small", "overrides": shape},
        "data": data,
        "tokenizer": "bytes",
        "training": {"steps": 3},
        "batch": 2,
        "checkpoint": False,
    }
    return TrainingFile.of(given | changes)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("some.jsonl", "some"),
        (f"hf://datasets/{DATA}", "more"),
        ([f"hf://datasets/{DATA}@main/more.jsonl", "some"], ["more", "some"]),
        ({"some.jsonl": 0.25, f"hf://datasets/{DATA}": 0.75}, {"some": 0.25, "more": 0.75}),
    ],
)
def test_a_run_on_text_reads_the_rows_of_its_tokens(folder: Path, text: Any, tokens: Any) -> None:
    job = make_job(file_of({"training": text, "held_out": 0.2}))
    for part in ("training", "held_out"):
        ours = open_data(job.file, 16, part)
        wanted = open_data(file_of({"training": tokens, "held_out": 0.2}), 16, part)
        loaders = (islice(data.loader(2, 2, seed=5), 20) for data in (ours, wanted))
        for mine, theirs in zip(*loaders, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_text_is_tokenized_once_and_anew_when_it_changes(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = {"training": "some.jsonl", "validation": ["hub_files/more.jsonl"]}
    first = make_job(file_of(data)).file.data
    assert capfd.readouterr().err.splitlines() == [
        f"data    some.jsonl is tokenized into {first.training}",
        f"data    hub_files/more.jsonl is tokenized into {first.validation[0]}",
    ]
    assert make_job(file_of(data)).file.data == first and capfd.readouterr().err == ""
    os.utime("some.jsonl", (0, 0))
    later = make_job(file_of(data)).file.data
    assert later.training != first.training and later.validation == first.validation


def test_processes_that_start_together_make_tokens_once(ranks: Any, folder: Path) -> None:
    """Each rank of a launcher reads the training file: one makes the tokens, and the others wait for it."""
    (folder / "run.yaml").write_text(
        "model: {preset: bytes-small, overrides: {hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2}}\n"
        "tokenizer: bytes\ntraining: {steps: 2, sequence: 16}\nbatch: 4\ncheckpoint: false\nexport: false\n"
    )
    for name, training in (("text", "some.jsonl"), ("tokens", "some")):
        ranks(2, run_watched, NoPictures(), str(folder), "run.yaml", f"data.training={training}", f"name={name}")
    assert written_losses(folder / "runs" / "text") == written_losses(folder / "runs" / "tokens")
    assert len([*(folder / "runs" / "tokens").glob("*/index.json")]) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer": None}, r"data.training: some.jsonl is text, and there is no tokenizer: give tokenizer"),
        ({"data": "hf://datasets/tiny/none"}, r"data.training: .* no complete data set tiny/none"),
        ({"data": "none.jsonl"}, r"data.training: none.jsonl has no tokens: it does not exist"),
    ],
)
def test_text_that_cannot_be_tokenized_is_an_error(folder: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_job(file_of(**{"data": "some.jsonl"} | changes))
