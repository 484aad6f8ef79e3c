"""Batches of ``triax train`` over stops and resumes with other numbers of replicas."""

from __future__ import annotations

import os
import signal
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from triax.data import TokenData, TokenLoader

from support.file_runs import NoPictures
from support.tokenized import as_filled, documents_in, folder, rows_of, texts

RUN = """\
model: {preset: bytes-tiny, overrides: {hidden_size: 16, num_hidden_layers: 1}}
data: {training: tokens, threads: 2}
training: {epochs: 1, sequence: 32}
export: false
monitor: {trace: false}
batch: {size: 8, microbatch: 2}
"""


class Stop:
    """Watch that sends a SIGTERM before a step."""

    def __init__(self, step: int | None) -> None:
        self._step = step

    def start(self, run: Any) -> None:
        self.after_step(run, 0.0)

    def after_step(self, run: Any, loss: float) -> None:
        if self._step is not None and run.step + 1 == self._step:
            os.kill(os.getpid(), signal.SIGTERM)


def read_rows(root: str, changes: list[str], stop: int | None) -> list[Tensor]:
    """Be a rank of the run, and return what it read, step by step: ids, documents and labels (3, rows, T) each."""
    from triax.train.file import read_training_file
    from triax.train.loop import train
    from triax.train.start import make_job

    os.chdir(root)
    read: list[Any] = []
    plain = TokenLoader.__next__

    def recorded(self: TokenLoader) -> Any:
        read.append(plain(self))
        return read[-1]

    TokenLoader.__next__ = recorded  # type: ignore[method-assign]
    job = make_job(read_training_file("run.yaml", changes)[0])
    try:
        train(job, [Stop(stop), NoPictures()])
    except SystemExit as end:
        if end.code != 143 or stop is None:
            raise
    finally:
        TokenLoader.__next__ = plain  # type: ignore[method-assign]
    each = job.batch.accumulation
    return [torch.stack(rows_of(read[at : at + each])) for at in range(0, len(read), each)]


@pytest.mark.parametrize("packing", ["cut", pytest.param("whole", marks=pytest.mark.exhaustive)])
def test_every_document_is_read_once_over_stops_and_resumes(ranks: Any, tmp_path: Path, packing: str) -> None:
    """The rows of each step are those of one loader, bit by bit, and those of an epoch have every document once."""
    count = 100
    folder(tmp_path, count, longest=20)
    (tmp_path / "run.yaml").write_text(RUN)
    data = TokenData(tmp_path / "tokens", 32, packing=packing)
    epoch = data.rows(0).count
    steps = -(-epoch // 8)
    found: list[Tensor] = []
    for replicas, stop in [(1, 2), (4, 4), (2, None)]:
        changes = [f"grid.data={replicas}", f"data.packing={packing}"]
        parts = ranks(replicas, read_rows, str(tmp_path), changes, stop)
        found += [torch.cat(step, dim=1) for step in zip(*parts, strict=True)]
    assert len(found) == steps > 5
    with_loader = torch.stack(rows_of(islice(data.loader(8, 8), steps)))
    rows = torch.cat(found, dim=1)
    assert torch.equal(rows, with_loader)
    assert documents_in(*as_filled(data, 0, 0, rows[:, :epoch])) == Counter(texts(count, longest=20))
