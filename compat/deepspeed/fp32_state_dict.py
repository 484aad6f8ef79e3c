"""A checkpoint's whole weights in fp32, in memory or in one file: DeepSpeed's ``zero_to_fp32``."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from ...base.safetensors import write_file
from ...checkpoint.format.folder import last, readable_path
from ...checkpoint.format.index import read_index
from ...checkpoint.reader import Reader
from ...checkpoint.snapshot import BUFFERS, WEIGHTS


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Tensor]:
    """Return the weights and buffers of a checkpoint of triax, whole and in fp32, on the CPU.

    A parameter that the model has under several names has each of them.

    Args:
        checkpoint_dir: the folder that ``save_checkpoint`` was given.
        tag: the checkpoint in it; by default the last one.
        exclude_frozen_parameters: False; a checkpoint does not say which were frozen.
        lazy_mode: without effect.
    """
    if exclude_frozen_parameters:
        raise ValueError(
            "exclude_frozen_parameters=True is not possible, because a checkpoint does not say which parameters were "
            "frozen: leave it out, and delete those entries"
        )
    folder = Path(checkpoint_dir)
    if tag is None and (tag := last(folder)[0]) is None:
        raise ValueError(f"Unable to find a checkpoint in {folder}: give the folder that save_checkpoint was given")
    path = readable_path(folder, tag)
    if not path.is_dir():
        raise FileNotFoundError(f"Directory '{path}' doesn't exist: give the tag of a checkpoint in {folder}")
    snapshot = Reader(path, read_index(path)).snapshot
    tensors = {name: tensor.read_all() for name, tensor in snapshot.of_kinds(WEIGHTS, BUFFERS).items()}
    state = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    shared = (snapshot.header.get("model") or {}).get("shared", {})
    return state | {name: state[first] for name, first in shared.items() if first in state}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str,
    output_dir: str,
    max_shard_size: str | None = None,
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write a checkpoint's whole fp32 weights to ``pytorch_model.bin`` or ``model.safetensors`` in a folder.

    Args:
        checkpoint_dir, tag, exclude_frozen_parameters: as ``get_fp32_state_dict_from_zero_checkpoint``.
        output_dir: the folder.
        max_shard_size: without effect: one file.
        safe_serialization: write safetensors.
    """
    weights = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    if safe_serialization:
        once = {id(value): name for name, value in reversed(weights.items())}  # a shared tensor is written once
        weights = {name: value for name, value in weights.items() if once[id(value)] == name}
        write_file(Path(output_dir, "model.safetensors"), weights)
    else:
        torch.save(weights, Path(output_dir, "pytorch_model.bin"))


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: str, tag: str | None = None) -> nn.Module:
    """Load a checkpoint's whole weights into a module, on the CPU, and return it."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model
