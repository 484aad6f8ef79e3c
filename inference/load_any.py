"""Weights of a module from a file or folder of any known format, for inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import ConfigError
from ..base.files import parse_json, read_text
from ..base.hub import local_folder
from ..engine.snapshot.load_weights import load_weights
from ..grid import Grid
from ..models.huggingface.load import load_hf
from ..models.huggingface.reader import open_weights

Source = str | Path | Sequence[str | Path] | Mapping[str, Any]


def load_any(module: nn.Module, source: Source, grid: Grid, base: str | Path = "") -> None:
    """Load a module's weights. Collective.

    Args:
        module: the module; its weights are not sharded yet, except those of a ``PipelineModule``.
        source: a checkpoint of triax, a folder of transformers, an id of the Hub, a file of weights (safetensors,
            or ``torch.save``'s, which is read without running code), several such files, or a list of
            them: a dict with ``checkpoints`` and ``base_dir``, or a JSON file with one.
        grid: the grid.
        base: the folder of relative paths.

    Raises:
        ConfigError: no file is named, or the files lack tensors of the module.
    """
    base, files = Path(base), source
    if isinstance(files, (str, Path)):
        path = local_folder(files, weights=True) if base == Path() else base / files
        if (path / "config.json").is_file():
            load_hf(path, into=module, grid=grid)
            return
        if path.is_dir():
            load_weights(module, path, grid=grid)
            return
        files = [path]
        if path.suffix == ".json":
            base = base if str(base) != "." else path.parent
            files = dict(parse_json(read_text(path)))
    if isinstance(files, Mapping):
        base, files = base / (files.get("base_dir") or ""), list(files.get("checkpoints") or ())
    weights: dict[str, Tensor] = {}
    for name in files:
        weights |= read_weights(base / name)
    if not weights:
        raise ConfigError(
            f"checkpoint is {source!r}, which names no file: give a folder, a file of weights, or a dict with "
            '"checkpoints", a list of files'
        )
    tied = getattr(module, "_tied_weights_keys", None) or ()
    missing = [name for name in module.load_state_dict(weights, strict=False).missing_keys if name not in tied]
    if missing:
        raise ConfigError(
            f"the checkpoint lacks {len(missing)} of the model's tensors, such as {missing[0]}: give the files of "
            "the whole model, not those of one tensor rank"
        )


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a file of weights, without running code from it."""
    if path.suffix == ".safetensors":
        with open_weights(path) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is not a mapping
    state = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("module", "model"):  # of other libraries' files
        state = state[key] if isinstance(state.get(key), dict) else state
    return dict(state)
