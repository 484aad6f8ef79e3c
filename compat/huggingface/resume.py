"""Checkpoint folders of transformers' own Trainer, loaded into an engine on any grid.

The folder has weights (``model.safetensors`` or ``adapter_model.safetensors``, with an index or without), the state of
torch's optimizer by number (``optimizer.pt``), and the state of the schedule (``scheduler.pt``). Torch's restricted
reader, which makes tensors, numbers and text alone, reads the last two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...base.errors import ConfigError
from ...base.files import read_object
from ...base.json_values import encode
from ...checkpoint.protocol import BUFFERS, OPTIMIZER, WEIGHTS, Snapshot
from ...checkpoint.reader import LoadOptions
from ...engine.module_engine import ModuleEngine
from ...engine.pipeline_engine import PipelineEngine
from ...engine.snapshot.restore import apply
from ...models.huggingface.reader import open_weights
from .adapters import plain_names

OPTIMIZER_FILE, SCHEDULER_FILE = "optimizer.pt", "scheduler.pt"
_WEIGHTS = ("model.safetensors", "adapter_model.safetensors")


def require_files(folder: Path) -> None:
    """Check that a folder without a checkpoint of triax is a checkpoint of transformers' Trainer.

    Raises:
        ConfigError: it is not.
    """
    weights = any((folder / f"{name}{end}").is_file() for name in _WEIGHTS for end in ("", ".index.json"))
    if weights and (folder / OPTIMIZER_FILE).is_file() and (folder / SCHEDULER_FILE).is_file():
        return
    raise ConfigError(
        f"{folder} has neither a checkpoint of triax (global_step*, latest) nor all of transformers' "
        f"{OPTIMIZER_FILE}, {SCHEDULER_FILE} and model.safetensors: another trainer wrote it, or save_only_model was "
        "set. To start from its weights, build the model with from_pretrained"
    )


def load_folder(engine: ModuleEngine | PipelineEngine, model: nn.Module, order: Sequence[str], folder: Path) -> None:
    """Load weights, optimizer state and counters of transformers' Trainer into an engine. Collective.

    Args:
        engine: the engine.
        model: the script's model.
        order: the model's names of the trained parameters, in the order of the optimizer's groups.
        folder: the folder ``checkpoint-N``.

    Raises:
        ConfigError: a weight is missing, or the optimizer's state is of other parameters.
        CheckpointError: on every rank, if the tensors do not fit the model.
    """
    state = read_state(folder / OPTIMIZER_FILE)
    groups, values = state["param_groups"], state["state"]
    numbers = [number for group in groups for number in group["params"]]
    if len(numbers) != len(order):
        raise ConfigError(
            f"{folder / OPTIMIZER_FILE} has the state of {len(numbers)} parameters, but this run trains {len(order)}: "
            "resume with the model and the optim of the first run"
        )
    snapshot, whole = Snapshot(source=str(folder)), True
    own = plain_names(model)
    adapters = {name: plain for plain, name in own.items() if plain.endswith((".lora_A", ".lora_B"))}
    for name, value in _tensors(folder):
        if name.startswith("base_model.model.") and adapters:
            whole = False
            name = own.get(name.removeprefix("base_model.model.").removesuffix(".weight"), name)
        snapshot.add(f"{WEIGHTS if name in own.values() else BUFFERS}/{name}", value)
    if missing := [name for name in order if f"{WEIGHTS}/{name}" not in snapshot.tensors]:
        raise ConfigError(f"{folder} lacks {', '.join(missing[:4])}: it is of another model")
    for number, name in zip(numbers, order, strict=True):
        for key, value in values.get(number, {}).items():
            if isinstance(value, Tensor) and value.dim():
                snapshot.add(f"{OPTIMIZER}/{key}/{name}", value)
            else:
                snapshot.numbers.setdefault(name, {})[key] = encode(value)
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    steps = int(read_object(folder / "trainer_state.json")["global_step"])
    snapshot.header = {"grid": {}, "run": {"global_steps": steps, "param_groups": encode(options)}}
    apply(engine, snapshot, LoadOptions(strict=whole))


def read_state(file: Path) -> Any:
    """Read a state dict with torch's restricted reader.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of torch's reader, of zip files, of the disk
        raise ConfigError(f"{file} cannot be read: {str(error).strip().partition(chr(10))[0]}") from error


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of the folder's weights."""
    for stem in _WEIGHTS:
        index = folder / f"{stem}.index.json"
        files = sorted(set(read_object(index)["weight_map"].values())) if index.is_file() else [stem]
        for file in (folder / name for name in files):
            if file.is_file():
                opened = open_weights(file)
                yield from ((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118, no mapping
