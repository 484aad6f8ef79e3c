"""Checkpoint folders of transformers' own Trainer, loaded into an engine on any grid.

The folder has weights (``model.safetensors`` or ``adapter_model.safetensors``, with an index or without), the state of
torch's optimizer by number (``optimizer.pt``), and the state of the schedule (``scheduler.pt``). Torch's restricted
reader, which makes tensors, numbers and text alone, reads the last two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...base.errors import ConfigError, CorruptError
from ...base.files import read_object
from ...base.json_values import encode
from ...checkpoint.format.folder import last, unreadable
from ...checkpoint.reader import LoadOptions
from ...checkpoint.snapshot import BUFFERS, OPTIMIZER, WEIGHTS, Snapshot
from ...engine.module_engine import ModuleEngine
from ...engine.pipeline_engine import PipelineEngine
from ...engine.snapshot.restore import apply
from ...models.huggingface.reader import open_weights, weight_files
from ...zero.whole_tensors import WholeStepper
from .adapters import plain_names

OPTIMIZER_FILE, SCHEDULER_FILE = "optimizer.pt", "scheduler.pt"
_WEIGHTS = ("model.safetensors", "adapter_model.safetensors")


def fault(folder: Path) -> str:
    """Return why a folder is not a whole checkpoint, as after a save that was interrupted; "" if it is one."""
    try:
        if (tag := last(folder)[0]) is None:
            require_files(folder)
        elif damage := dict(unreadable(folder)).get(tag):
            return damage
        read_object(folder / "trainer_state.json")  # written last
    except (ConfigError, CorruptError, FileNotFoundError) as error:
        return str(error)
    return ""


def whole_folder(given: str | Literal[True], output: str) -> tuple[str, str]:
    """Return the folder to resume from, and a warning of newer ones that are not whole.

    Args:
        given: the folder; True: the newest whole one of the output folder.
        output: the folder of the runs' ``checkpoint-N``.

    Raises:
        ConfigError: the folder is not whole, or none is.
    """
    faults: list[str] = []
    if given is not True:
        if not (reason := fault(Path(given))):
            return str(given), ""
        faults, output = [reason.rstrip(".")], str(Path(given).absolute().parent)
    numbers = [path.name.partition("-")[2] for path in Path(output).glob("checkpoint-*")]
    for number in sorted((number for number in numbers if number.isdecimal()), key=int, reverse=True):
        folder = Path(output) / f"checkpoint-{number}"
        if reason := fault(folder):
            faults.append(reason.rstrip("."))
            continue
        if given is not True:
            raise ConfigError(f"{faults[0]}. {folder} is whole: give it, or resume_from_checkpoint=True")
        return str(folder), "; ".join([*faults, f"the run is resumed from {folder}"] if faults else [])
    first = faults[0] if faults else f"{output} has no folder checkpoint-N"
    raise ConfigError(f"{first}. No other checkpoint there is whole: leave resume_from_checkpoint out")


def require_files(folder: Path) -> None:
    """Check that a folder without a checkpoint of triax is a checkpoint of transformers' Trainer.

    Raises:
        ConfigError: it is not.
    """
    if (
        any(weight_files(folder, name) for name in _WEIGHTS)
        and (folder / OPTIMIZER_FILE).is_file()
        and (folder / SCHEDULER_FILE).is_file()
    ):
        return
    raise ConfigError(
        f"{folder} has neither a checkpoint of triax (global_step*, latest) nor all of transformers' "
        f"{OPTIMIZER_FILE}, {SCHEDULER_FILE} and model.safetensors: another trainer wrote it, or save_only_model was "
        "set. To start from its weights, build the model with from_pretrained"
    )


def load_folder(
    engine: ModuleEngine | PipelineEngine, model: nn.Module, own_groups: Sequence[Sequence[str]], folder: Path
) -> None:
    """Load weights, optimizer state and counters of transformers' Trainer into an engine. Collective.

    Args:
        engine: the engine.
        model: the script's model.
        own_groups: the model's names of the parameters of each group of the optimizer that the folder's numbers mean.
        folder: the folder ``checkpoint-N``.

    Raises:
        ConfigError: a weight is missing, or the optimizer's state is of other parameters.
        CheckpointError: on every rank, if the tensors do not fit the model.
    """
    state = read_state(folder / OPTIMIZER_FILE)
    groups, values = state["param_groups"], state["state"]
    lengths, own_lengths = [len(group["params"]) for group in groups], [len(names) for names in own_groups]
    if lengths != own_lengths:
        raise ConfigError(
            f"{folder / OPTIMIZER_FILE} has groups of {lengths} parameters, but this run has {own_lengths}: resume "
            "with the model and the optimizer (optim, optimizers=) of the first run"
        )
    numbers = [number for group in groups for number in group["params"]]
    order = [name for names in own_groups for name in names]
    snapshot, complete = Snapshot(source=str(folder)), True
    own = plain_names(model)
    adapters = {name: plain for plain, name in own.items() if plain.endswith((".lora_A", ".lora_B"))}
    for name, value in _tensors(folder):
        if name.startswith("base_model.model.") and adapters:
            complete = False
            name = own.get(name.removeprefix("base_model.model.").removesuffix(".weight"), name)
        snapshot.add(f"{WEIGHTS if name in own.values() else BUFFERS}/{name}", value)
    trained = [name for name in order if model.get_parameter(name).requires_grad]
    if missing := [name for name in trained if f"{WEIGHTS}/{name}" not in snapshot.tensors]:
        raise ConfigError(f"{folder} lacks {', '.join(missing[:4])}: it is of another model")
    whole = isinstance(engine.data_axis.stepper, WholeStepper)
    for number, name in zip(numbers, order, strict=True):
        for key, value in values.get(number, {}).items():
            shape = snapshot.tensors[f"{WEIGHTS}/{name}"].shape
            if not whole and isinstance(value, Tensor) and value.dim() and value.shape != shape:
                raise ConfigError(
                    f"{folder / OPTIMIZER_FILE} has {key} of the shape {tuple(value.shape)} for parameter {number}, "
                    f"but this run's parameter {number} is {name} of the shape {tuple(shape)}: resume with the "
                    "optimizer of the first run, over the same parameters in the same order"
                )
            if isinstance(value, Tensor) and value.dim():
                snapshot.add(f"{OPTIMIZER}/{key}/{name}", value)
            else:
                snapshot.numbers.setdefault(name, {})[key] = encode(value)
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    steps = int(read_object(folder / "trainer_state.json")["global_step"])
    snapshot.header = {"grid": {}, "run": {"global_steps": steps, "param_groups": encode(options)}}
    apply(engine, snapshot, LoadOptions(strict=complete))


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
        for file in weight_files(folder, stem):
            opened = open_weights(file)
            yield from ((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118, no mapping
