"""Targets of ``triax check``: a function of a Python file, a training file, or a Hugging Face folder or id."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.hub import local_folder
from ..engine.engines import Engine
from ..grid import Grid
from ..models.config import TransformerConfig
from ..options.batch import Batch
from ..pipe.module import PipelineModule
from ..testing.equality import rows_of
from ..testing.pool import RankFailure, run_ranks
from ..train.file import read_training_file
from ..train.model import loss_for
from ..train.model_choice import model_config
from ..train.sections import ModelSection

FILES = (".yaml", ".yml", ".toml", ".json")
MICROBATCHES, LENGTH = 4, 16  # of random tokens
_COPIES = 4  # of the weights on one process: weights, gradients, and both once more gathered


def read_target(target: str, changes: Sequence[str], data: str | None, dry: bool = False) -> tuple[Any, Any]:
    """Return the function that builds the model for a grid, and the one that returns its batches.

    Args:
        target: ``FILE.py:FUNCTION``, a training file, or a Hugging Face folder or id.
        changes: ``KEY=VALUE`` for a training file, or for the fields of a folder's configuration.
        data: name of the function of ``FILE.py`` that returns the batches; None: ``batches``, or random ones if the
            file does not have it.
        dry: the model will not have values, under --dry-run or --types, so that this machine need not hold it.

    Raises:
        ValueError: there is no such file, folder or function; the file raises an error; an argument does not go with
            the target; or this machine has too little memory for the model in float64.
    """
    name, _, function = target.rpartition(":")
    if (path := Path(name)).suffix == ".py" and function:
        if not path.is_file():
            raise ValueError(f"there is no file {path}")
        if changes:
            raise ValueError(f"{changes[0]} changes a training file or a folder, and {target} is neither: leave it out")
        return _functions(path, function, data, dry)
    is_file = Path(target).suffix in FILES and Path(target).is_file()
    if not is_file and not (local_folder(target) / "config.json").is_file():
        raise ValueError(
            f"{target} is neither FILE.py:FUNCTION, such as model.py:build, nor a training file "
            f"({', '.join(FILES)}), nor a Hugging Face folder with a config.json, nor an id of the Hub, such "
            "as Qwen/Qwen3-0.6B"
        )
    if data is not None:
        raise ValueError(f"--data {data} names a function of a Python file, but {target} is not one: leave it out")
    build = partial(_configured, target, tuple(changes))
    config, _, _ = _read(target, changes)
    if not dry:
        _require_memory(target, config)
    length = min(LENGTH, config.max_position_embeddings)
    return build, partial(_tokens, config.vocab_size, length)


def train_without_values(build: Any, batches: Any, axes: Mapping[str, int]) -> None:
    """Train on this rank of a grid without end: the program of a dry run, which stops it after a step."""
    sizes: dict[str, Any] = dict(axes)
    grid, batch = Grid(**sizes), batches()[0]
    rows = rows_of(batch[0][0])
    engine = Engine(
        build(grid),
        batch=Batch(size=rows * len(batch) * grid.data.size, microbatch=rows),
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )
    microbatches = cycle(batch)
    while True:
        engine.train_batch(microbatches)


def _configured(target: str, changes: Sequence[str], grid: Grid) -> PipelineModule:
    """Build the model of a training file or a folder, in float64."""
    config, section, sequence_parallel = _read(target, changes)
    options = {"sequence_parallel": sequence_parallel, "attention": section.attention}
    layers = config.layers(**options, **section.experts.arguments)
    return PipelineModule(layers, grid=grid, loss_fn=loss_for(config, grid), dtype=torch.float64, seed=0)


def _read(target: str, changes: Sequence[str]) -> tuple[TransformerConfig, ModelSection, bool]:
    """Return (configuration, the section ``model``, sequence parallelism)."""
    if Path(target).suffix in FILES:
        file, _ = read_training_file(target, list(changes))
        return model_config(file.model), file.model, file.grid.sequence_parallel
    section = ModelSection(folder=target, weights=False, overrides=dict(_change(change) for change in changes))
    return model_config(section), section, False


def _change(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{text} is not KEY=VALUE, such as num_hidden_layers=2")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _require_memory(target: str, config: TransformerConfig) -> None:
    """Check that one process can hold the model in float64."""
    count = config.parameter_count
    needed, present = _COPIES * 8 * count, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > present:
        key = "num_hidden_layers" if Path(target).suffix not in FILES else "model.overrides.num_hidden_layers"
        raise ValueError(
            f"{target} has {count / 1e9:.1f} billion parameters: a check in float64 needs {needed / 2**30:.0f} GiB, "
            f"and this machine has {present / 2**30:.0f} GiB. Check fewer layers: {key}=2"
        )


def _tokens(words: int, length: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Return one batch of random tokens."""
    text = torch.randint(words, (MICROBATCHES, 1, length + 1), generator=torch.Generator().manual_seed(0))
    return [[(row[:, :-1], row[:, 1:]) for row in text]]


def _functions(path: Path, function: str, data: str | None, dry: bool) -> tuple[Any, Any]:
    """Return two functions of a Python file; without one of batches the second returns a random batch."""
    sys.path.insert(0, str(path.resolve().parent))  # it may import its neighbours
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path} raised {type(error).__name__}: {error}") from error
    for name, option in ((function, "the target"), (data, "--data")):
        if name is not None and not callable(getattr(module, name, None)):
            known = ", ".join(n for n, value in vars(module).items() if callable(value) and not n.startswith("_"))
            raise ValueError(f"{path} has no function {name!r}, which {option} names; it has {known or 'none'}")
    build, batches = getattr(module, function), getattr(module, data or "batches", None)
    if batches is not None:
        return build, batches
    if dry:
        raise ValueError(
            f"{path} has no function 'batches', which --dry-run and --types need: a batch, as the model trains on"
        )
    try:
        (batch,) = run_ranks(1, _random_batch, build)
    except RankFailure as failure:
        raise ValueError(f"{path} has no function 'batches', and {failure.first.summary}") from failure
    return build, partial(_same, batch)


def _same(batch: Any) -> Any:
    return batch


def _random_batch(build: Any) -> list[list[tuple[Tensor, Tensor]]]:
    """Return a batch that a model takes: ids of tokens, or rows or sequences of numbers, and labels.

    Raises:
        ValueError: the model takes none of them.
    """
    try:
        model = build(Grid())
    except TypeError as error:
        raise ValueError(
            f"{build.__name__}(grid) raised {error!r}: it must take a triax.Grid, and return a model"
        ) from error
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    words, width, outputs = (*matrices[0].shape[:2], matrices[-1].shape[0]) if matrices else (1, 1, 1)
    generator = torch.Generator().manual_seed(0)

    def ids(most: int, *shape: int) -> Tensor:
        return torch.randint(most, (MICROBATCHES, *shape), generator=generator)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(MICROBATCHES, *shape, generator=generator, dtype=torch.float64)

    text = ids(words, 1, LENGTH + 1)
    guesses = [(text[..., :-1], text[..., 1:])]
    for shape in ((2,), (2, LENGTH)):
        guesses += [(numbers(*shape, width), numbers(*shape, outputs)), (numbers(*shape, width), ids(outputs, *shape))]
    for inputs, labels in guesses:
        try:
            model.loss(model.run_stage(0, inputs[0], {}), labels[0])
        except Exception:  # a guess that does not fit fails anywhere in the user's model
            continue
        return [list(zip(inputs, labels, strict=True))]
    raise ValueError(
        "triax check cannot make a batch for this model: add to the file a function batches() that returns a list of "
        "batches, each a list of microbatches (inputs, labels)"
    )
