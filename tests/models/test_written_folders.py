"""When save_hf writes over a folder and is stopped, the folder has the old or the new model."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import triax

from support.failing_disk import disturbed

LEFT = (".new", ".old", ".ready")


def model(seed: int) -> Any:
    config = triax.LlamaConfig.preset("llama-tiny", num_hidden_layers=2, hidden_size=16, intermediate_size=24)
    return triax.PipelineModule(triax.llama_layers(config), seed=seed)


def tensors(folder: Path) -> dict[str, Tensor] | None:
    """Return the weights by name as transformers finds them; None if the folder names no whole model."""
    if not (folder / "config.json").is_file():
        return None
    files = [folder / "model.safetensors"]
    if not files[0].is_file():
        index = folder / "model.safetensors.index.json"
        names = json.loads(index.read_text())["weight_map"].values() if index.is_file() else ["none"]
        files = [folder / name for name in {*names}]
    if not all(file.is_file() for file in files):
        return None
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def same(found: dict[str, Tensor] | None, wanted: dict[str, Tensor]) -> bool:
    return (
        found is not None and found.keys() == wanted.keys() and all(map(torch.equal, found.values(), wanted.values()))
    )


@pytest.fixture
def models(tmp_path: Path) -> tuple[list[Callable[[], None]], list[dict[str, Tensor]], Path]:
    """Return writers of two models to one folder, of three files and of one, and the weights of both."""
    writers: list[Callable[[], None]] = []
    folder, weights = tmp_path / "model", []
    for seed, size in ((1, 15_000), (2, 10**9)):
        made = model(seed)
        triax.save_hf(made, tmp_path / str(seed), max_file_bytes=size)
        found = tensors(tmp_path / str(seed))
        assert found is not None
        weights.append(found)
        writers.append(partial(triax.save_hf, made, folder, max_file_bytes=size))
    assert len([*(tmp_path / "1").glob("*.safetensors")]) > 2
    writers[0]()
    (folder / "README.md").write_text("mine")
    return writers, weights, folder


def test_killing_save_hf_leaves_the_old_or_the_new_model(models: Any) -> None:
    (first, second), (earlier, later), folder = models
    between = 0
    for number in count():
        if not (pid := os.fork()):
            with disturbed(number, lambda: os._exit(9)):
                second()
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, 9)
        found = tensors(folder)
        if found is None:
            between += 1
            assert any((folder / name).exists() for name in LEFT), number
        else:
            assert same(found, later if code == 0 else earlier) or same(found, later), number
        first()
        assert same(tensors(folder), earlier) and not any((folder / name).exists() for name in LEFT), number
        assert (folder / "README.md").read_text() == "mine"
        if code == 0:
            break
    assert number > 20 and between > 5


def test_a_full_disk_leaves_the_old_or_the_new_model(models: Any) -> None:
    (first, second), (earlier, later), folder = models

    def no_room() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    failures = 0
    for number in count():
        with disturbed(number, no_room) as calls:
            try:
                second()
                error = ""
            except (OSError, RuntimeError) as refusal:
                error = str(refusal)
        if len(calls) <= number:
            assert not error and same(tensors(folder), later)
            break
        assert not error or "No space left" in error
        assert same(tensors(folder), later) or (error and same(tensors(folder), earlier)), (number, calls[-1])
        assert not any((folder / name).exists() for name in LEFT), number
        failures += bool(error)
        first()
        assert same(tensors(folder), earlier), number
    assert failures > 10
