"""The user's model and batch: a function of a script, a training file, or a Hugging Face folder."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import ConfigError
from ..base.nest import map_tensors
from ..grid import Grid
from ..models.config import TransformerConfig
from ..models.huggingface.config import from_hf, read_config
from ..models.huggingface.load import LAYERS
from ..models.layers import NextTokenLoss
from ..models.mtp import MTPLoss
from ..pipe.module import PipelineModule
from ..train.file import read_training_file
from ..train.job import model_config

Microbatch = tuple[Any, Any]
FILES = (".yaml", ".yml", ".toml", ".json")
ROWS, LENGTH, MICROBATCHES = 2, 16, 4  # of a made batch
BATCH = "batch"  # name of a script's function that returns its batch


@dataclass(frozen=True)
class Target:
    """A model to check, which each rank builds for its grid.

    Attributes:
        path: a script, a training file or a Hugging Face folder.
        function: name of the script's function that is called with the grid; empty for a file or a folder.
        batch: name of the script's function that returns the batch, a list of microbatches (inputs, labels); empty:
            a batch is made.
        changes: keys of the training file to change, or fields of the folder's configuration, as KEY=VALUE.
        rows, length, microbatches: sizes of a made batch.
    """

    path: str
    function: str = ""
    batch: str = ""
    changes: tuple[str, ...] = ()
    rows: int = ROWS
    length: int = LENGTH
    microbatches: int = MICROBATCHES

    def open(self) -> tuple[Callable[[Grid], PipelineModule], Callable[[], Any] | None]:
        """Return the function that builds the model in float64, and the one that returns the batch, or None."""
        if not self.function:
            return self._build_configured, None
        module = _load(self.path)
        return _function(module, self.path, self.function), _batch_function(module, self.path, self.batch)

    def _build_configured(self, grid: Grid) -> PipelineModule:
        """Build the model of a training file or a folder, with random weights."""
        config, sequence_parallel, attention, options = _configured(self.path, self.changes)
        layers = LAYERS[type(config)](config, sequence_parallel, attention, **options)
        extra = getattr(config, "num_nextn_predict_layers", 0)
        loss = MTPLoss(grid, config.vocab_size, extra) if extra else NextTokenLoss(grid, config.vocab_size)
        return PipelineModule(layers, grid=grid, loss_fn=loss, dtype=torch.float64)


def read_target(text: str, batch: str = "", changes: Sequence[str] = (), **sizes: int) -> Target:
    """Return the target of a command's argument.

    Args:
        text: ``script.py:build``, a training file, or a Hugging Face folder.
        batch: name of the script's function that returns the batch.
        changes: KEY=VALUE of a training file or a configuration.
        sizes: ``rows``, ``length`` and ``microbatches`` of a made batch.

    Raises:
        ConfigError: there is no such file, folder or function, or an argument does not go with the target.
    """
    path, colon, function = text.rpartition(":")
    if not colon or not path.endswith(".py"):
        path, function = text, ""
    where = Path(path)
    if path.endswith(".py"):
        if not function:
            raise ConfigError(f"{text} has no function: write {text}:build, where build(grid) returns a PipelineModule")
        if not where.is_file():
            raise ConfigError(f"There is no file {path}. Give script.py:build, a training file or a folder.")
        if changes:
            raise ConfigError(f"{changes[0]} changes a training file, and {path} is a script: leave it out.")
        return Target(str(where.resolve()), function, batch, (), **sizes)
    if batch:
        raise ConfigError(f"--batch {batch} is a function of a script, and {path} is none: leave it out.")
    if (where.is_dir() and (where / "config.json").is_file()) or (where.is_file() and where.suffix in FILES):
        target = Target(str(where.resolve()), "", "", tuple(changes), **sizes)
    else:
        raise ConfigError(
            f"{path} is no script, training file or Hugging Face folder: give script.py:build, a file that ends in "
            f"{', '.join(FILES)}, or a folder with a config.json."
        )
    _configured(target.path, target.changes)
    return target


def float64(module: PipelineModule) -> None:
    """Make a model's parameters and buffers float64, also those of layers that are built later."""
    module.dtype = torch.float64
    module.change_layers(lambda name, layer: layer.double())
    if isinstance(module.loss_fn, nn.Module):
        module.loss_fn.double()


def batch_of(
    target: Target, module: PipelineModule, made: Callable[[], Any] | None, trial: Callable[[Microbatch], object] | None
) -> list[Microbatch]:
    """Return the microbatches of the global batch, with floating-point tensors in float64.

    Args:
        target: the model and the sizes of a made batch.
        module: the model, for the shapes of a made batch.
        made: the user's function.
        trial: run on a guessed microbatch; the first one for which it raises nothing is taken. None: take the first.

    Raises:
        ValueError: the function returned something else, or no guess fits the model.
    """
    if made is not None:
        found = made()
        if not isinstance(found, Sequence) or not found or not all(isinstance(m, tuple) and len(m) == 2 for m in found):
            raise ValueError(
                f"{target.batch or BATCH}() returned a {type(found).__name__}: return a list of microbatches, each a "
                "tuple (inputs, labels)"
            )
        return [map_tensors(_double, each) for each in found]
    errors = []
    for name, guess in _guesses(target, module):
        batch = [guess(number) for number in range(target.microbatches)]
        if trial is None:
            return batch
        try:
            trial(batch[0])
        except Exception as error:  # a guess that does not fit fails anywhere in the user's model
            errors.append(f"{name}: {str(error).partition(chr(10))[0][:120]}")
            continue
        return batch
    raise ValueError(
        f"no made batch fits the model ({'; '.join(errors)}): give the script a function {BATCH}() that returns a list "
        "of microbatches (inputs, labels)"
    )


def rows_of(inputs: Any) -> int:
    """Return the number of rows of a microbatch: the first dim of its first tensor."""
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()]
    if not leaves:
        raise ValueError(
            "the inputs of a microbatch have no tensor: return (inputs, labels) with a row for each sample"
        )
    return int(leaves[0].shape[0])


def _guesses(target: Target, module: PipelineModule) -> Iterator[tuple[str, Callable[[int], Microbatch]]]:
    """Yield (name, maker of a microbatch from its number) of inputs and labels that fit many models.

    The sizes are read from the model: rows of its first embedding, columns of its first matrix, rows of its last one.
    """
    rows, length = target.rows, target.length
    matrices = [p for p in module.parameters() if p.dim() >= 2]
    if not matrices:
        return
    words, width, outputs = matrices[0].shape[0], matrices[0].shape[1], matrices[-1].shape[0]

    def draw(number: int, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 + number)
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def ids(number: int, most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape, generator=torch.Generator().manual_seed(200 + number))

    def tokens(number: int) -> Microbatch:
        whole = ids(number, words, rows, length + 1)
        return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()

    yield "token ids", tokens
    for name, shape in (("rows", (rows,)), ("sequences", (rows, length))):
        for last in dict.fromkeys((outputs, width, matrices[-1].shape[1])):
            yield (
                f"{name} of {width} numbers, labels of {last}",
                lambda n, shape=shape, last=last: (draw(n, *shape, width), draw(n + 50, *shape, last)),
            )
        yield (
            f"{name} of {width} numbers, labels of {outputs} classes",
            lambda n, shape=shape: (draw(n, *shape, width), ids(n, outputs, *shape)),
        )


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _load(path: str) -> ModuleType:
    """Import a script under a name of its own; its folder is on the path, as when Python runs it."""
    name = f"triax_check_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if (folder := str(Path(path).parent)) not in sys.path:
        sys.path.insert(0, folder)
    spec.loader.exec_module(module)
    return module


def _function(module: ModuleType, path: str, name: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if not callable(found):
        others = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
        raise ValueError(f"{path} has no function {name}: give one of {', '.join(others) or 'its own'}")
    return found  # type: ignore[no-any-return]


def _batch_function(module: ModuleType, path: str, name: str) -> Callable[..., Any] | None:
    if not name and not callable(getattr(module, BATCH, None)):
        return None
    return _function(module, path, name or BATCH)


def _configured(path: str, changes: Sequence[str]) -> tuple[TransformerConfig, bool, str, dict[str, Any]]:
    """Return (configuration, sequence parallelism, attention over context, options of experts)."""
    if Path(path).is_dir():
        config = from_hf(read_config(Path(path)), Path(path) / "config.json")
        return replace(config, **dict(_change(each) for each in changes)), False, "ring", {}
    file, _ = read_training_file(Path(path), list(changes))
    section = file.model
    return model_config(section), file.grid.sequence_parallel, section.attention, dict(section.experts.arguments)


def _change(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{text} has no value: write KEY=VALUE, such as num_hidden_layers=2.")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
