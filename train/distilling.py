"""Distillation of a run: a teacher on the run's grid, or a file of its log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..base.errors import ConfigError
from ..data.answers import Answers
from ..engine.pipeline_engine import PipelineEngine
from ..grid.agreement.agreement import agreed
from .job import Job
from .method import Method, Microbatch
from .methods.distillation import IDS, TEACHER
from .methods.teacher import with_teacher
from .model import frozen_engine

_SAMPLES = "sample"  # entry of the labels: number of each row's sample


class Distilling(Method):
    """Method ``distill``: the labels of each step get the teacher's distribution.

    Args:
        job, engine, training, held_out: as for ``Method``.

    Raises:
        ConfigError: the stored file is not one of this data.
    """

    def __init__(self, job: Job, engine: PipelineEngine, training: Answers, held_out: Answers | None) -> None:
        super().__init__(job, engine, training, held_out)
        section = job.file.method
        assert section is not None and section.teacher is not None
        self._top_k = section.top_k
        self._teacher: PipelineEngine | None = None
        self._stored: StoredTeacher | None = None
        if section.is_stored:
            with agreed(engine.grid):
                self._stored = StoredTeacher(Path(section.teacher), training, job.model.vocab_size, section.temperature)
        else:
            self._teacher = frozen_engine(job, engine.grid, section.teacher)

    @property
    def prepares(self) -> bool:
        """True: each step's labels get the teacher's numbers."""
        return True

    def collate(self, data: Answers, numbers: Sequence[int]) -> Microbatch:
        """Return a microbatch of samples with the number of each."""
        return numbered(data, numbers)

    def prepared(self, microbatches: list[Microbatch], data: Answers) -> list[Microbatch]:
        """Return the microbatches with the teacher's distribution. Collective."""
        plain = [(inputs, {"labels": labels["labels"]}) for inputs, labels in microbatches]
        if self._teacher is not None:
            return with_teacher(self._engine, self._teacher, plain, self._top_k)
        assert self._stored is not None
        found = []
        for (inputs, labels), (_, given) in zip(plain, microbatches, strict=True):
            found.append((inputs, labels | self._stored.entries(given[_SAMPLES].tolist(), inputs.shape[1])))
        return found


def numbered(data: Answers, numbers: Sequence[int]) -> Microbatch:
    """Return a microbatch (inputs, labels): labels are a dict with ``labels`` and ``sample``, the samples' numbers."""
    inputs, labels = data.collate(numbers)
    return inputs, {"labels": labels, _SAMPLES: torch.tensor(list(numbers))}


class StoredTeacher:
    """File of a teacher's log-probabilities of the likeliest words, for each token of the samples but their first.

    The samples' tokens follow one another, N in all. The file is a safetensors file with the tensors

    | name | shape | |
    |---|---|---|
    | ``tokens`` | (N,), integers | the tokens that are predicted, to compare with the data |
    | ``log_probs`` | (N, k), floating point | log-probabilities at the temperature, over the whole vocabulary |
    | ``ids`` | (N, k), integers | the k words, which are different |
    | ``temperature`` | (), floating point | the temperature |

    Args:
        path: the file.
        data: the samples, of which also the held-out ones are.
        vocab_size: number of words.
        temperature: the temperature of the loss.

    Raises:
        ConfigError: there is no such file, or it does not fit.
    """

    def __init__(self, path: Path, data: Answers, vocab_size: int, temperature: float) -> None:
        self._file, self._k = _opened(path), 0
        where = f"method.teacher {path}"
        shapes = {name: tuple(self._file.get_slice(name).get_shape()) for name in self._file.keys()}  # noqa: SIM118
        needed = ("tokens", "log_probs", "ids", "temperature")
        if missing := [name for name in needed if name not in shapes]:
            raise ConfigError(f"{where} has no tensor {', '.join(missing)}, but {', '.join(needed)} are needed")
        wanted = np.concatenate([row.ids[1:] for row in data.rows])
        self._starts = np.cumsum([0, *(len(row.ids) - 1 for row in data.rows)])
        count, width = shapes["tokens"], shapes["ids"][-1:]
        if shapes["ids"] != shapes["log_probs"] or shapes["ids"] != count + width or not width:
            raise ConfigError(f"{where}: the shapes are {shapes}, but ids and log_probs need (N, k) for tokens (N,)")
        (self._k,) = width
        if not 1 <= self._k < vocab_size:
            raise ConfigError(f"{where} has {self._k} words of a vocabulary of {vocab_size}: give from 1 to one less")
        stored = self._file.get_tensor("tokens").numpy()
        if len(stored) != len(wanted) or not np.array_equal(stored, wanted):
            at = next((n for n, (a, b) in enumerate(zip(stored, wanted)) if a != b), min(len(stored), len(wanted)))
            raise ConfigError(
                f"{where} is not of this data: it has {len(stored)} tokens, the data {len(wanted)}, and they differ "
                f"from number {at} on. Make it of the rows of triax.data.Answers(data.training, 'sft', tokenizer, "
                "training.sequence)"
            )
        if (given := float(self._file.get_tensor("temperature"))) != temperature:
            raise ConfigError(f"{where} is of temperature {given}, and method.temperature is {temperature}: give that")

    def entries(self, samples: Sequence[int], length: int) -> dict[str, Tensor]:
        """Return the entries of the labels of rows: ``teacher`` and ``teacher_ids``, (B, ``length``, k)."""
        shape = (len(samples), length, self._k)
        values, ids = torch.zeros(shape, dtype=torch.float64), torch.arange(self._k).repeat(*shape[:2], 1)
        for row, sample in enumerate(samples):
            start, stop = int(self._starts[sample]), int(self._starts[sample + 1])
            for into, name in ((values, "log_probs"), (ids, "ids")):
                into[row, : stop - start] = self._file.get_slice(name)[start:stop].to(into.dtype)
        return {TEACHER: values, IDS: ids}


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"method.teacher {path} cannot be read: {' '.join(str(error).split())[:200]}") from error
