"""Before an engine is made: whether every rank has the same configuration, code and model. Off with one process.

Ranks that differ would hang, or train something that nobody asked for. Each rank's facts are numbers and names; what is
compared at first is one hash of them, so that ranks that agree send a few bytes.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..grid import Axis, Grid, layout_of
from ..pipe.module import PipelineModule
from .alike import same
from .choose import FILES
from .config import Config, ConfigError

Facts = dict[str, str]  # what it is called in a message -> what it is

_MAY_DIFFER = ("dump_state", "log_level")
# Each host may have its own disk, and only rank 0 writes what the others name.
_PATHS = ("nvme_path", "output_path", "output_file", "job_name")
_PACKAGE = Path(__file__).resolve().parent.parent
_FOLDERS = ("grid", "pipe", "tensor_parallel", "zero", "models", "engine")
_SHOWN = 3


def require_same(grid: Grid, config: Config, model: nn.Module, groups: Any, optimizer: Any) -> None:
    """Collective; does nothing on one process. From here on, a rank that hangs is found: see ``Grid.watch``.

    Raises:
        ConfigError: on every rank alike, if any rank differs; the message names the rank and what differs.
    """
    if grid.size == 1:
        return
    grid.watch()
    common = settings(config)
    common["the versions of Python and torch"] = f"{platform.python_version()}, {torch.__version__}"
    common["the optimizer"] = getattr(optimizer, "__qualname__", type(optimizer).__qualname__)
    kinds, sources = layers(model)
    loss = getattr(getattr(model, "loss_fn", None), "__module__", None)
    common |= {**kinds, **code({*sources, loss} if loss else sources)}
    compare(grid, grid.world, common)
    # Stages hold different layers, and tensor ranks different shards: replicas are those that hold the same.
    compare(grid, grid.data, parameters(model, groups))


def settings(config: Config) -> Facts:
    """Every key of the configuration that all ranks share, as ``section.key``."""
    found: Facts = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                if prefix or key not in _MAY_DIFFER:
                    walk(f"{prefix}.{key}" if prefix else str(key), inner)
        elif prefix == "pipeline.schedule" and value.endswith(FILES) and (file := Path(value)).is_file():
            found["the file that pipeline.schedule names"] = _hash(value, file.stat().st_mtime_ns)  # wherever it lies
        elif not prefix.endswith(_PATHS):
            found[prefix] = repr(value)

    walk("", config.model_dump())
    return found


def layers(model: nn.Module) -> tuple[Facts, set[str]]:
    """The class of every layer of a ``PipelineModule``, of all stages, or of every module of a plain one; whence."""
    if isinstance(model, PipelineModule):
        listed = {f"the class of layer {i}": getattr(layer, "cls", layer) for i, layer in enumerate(model.listed)}
    else:
        listed = {f"the class of {name or 'the model'}": type(module) for name, module in model.named_modules()}
    kinds = {name: each if hasattr(each, "__qualname__") else type(each) for name, each in listed.items()}
    return {name: kind.__qualname__ for name, kind in kinds.items()}, {kind.__module__ for kind in kinds.values()}


def code(modules: set[str]) -> Facts:
    """Hashes of the files that modules come from, of the program's own, and of triax."""
    found = {"triax": _package()}
    for name in sorted({*modules, "__main__"}):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and name.partition(".")[0] not in ("torch", "triax") and Path(file).is_file():
            found[Path(file).name] = _hash(file, Path(file).stat().st_mtime_ns)
    return found


def parameters(model: nn.Module, groups: Iterable[tuple[dict[str, Any], list[nn.Parameter]]]) -> Facts:
    """What this rank holds of the model."""
    group_of = {p: i for i, (_, listed) in enumerate(groups) for p in listed}
    found = {"the number of parameters": str(sum(1 for _ in model.parameters()))}
    for name, parameter in model.named_parameters():
        found[f"the parameter {layout_of(parameter).name or name}"] = _look(parameter, group_of.get(parameter))
    return found


def _look(parameter: Tensor, group: int | None) -> str:
    kind = f"{str(parameter.dtype).removeprefix('torch.')}{list(parameter.shape)}"
    return f"{kind}{'' if parameter.requires_grad else ', frozen'}{'' if group is None else f', group {group}'}"


def compare(grid: Grid, axis: Axis, facts: Facts) -> None:
    """Collective over the axis, and over the grid where an axis finds a difference.

    Raises:
        ConfigError: on every rank of the grid.
    """
    agreed = torch.tensor([0 if same(axis, sorted(facts.items()), grid.device) else 1], device=grid.device)
    grid.world.all_reduce(agreed, op="max")
    if not int(agreed):
        return
    everyone = grid.world.all_gather_object((axis.ranks, facts))
    for ranks, _ in everyone:
        others = {rank: everyone[rank][1] for rank in ranks}
        keys = dict.fromkeys(key for theirs in others.values() for key in theirs)
        different = [key for key in keys if len({theirs.get(key) for theirs in others.values()}) > 1]
        if different:
            raise ConfigError(_describe(grid, others, different))
    raise ConfigError("ranks differ in what they run")  # a hash alone differs: not reached


def _describe(grid: Grid, facts: Mapping[int, Facts], different: list[str]) -> str:
    """The ranks that differ from most, or from the first one, and in what."""
    said = []
    for key in different[:_SHOWN]:
        values = {rank: theirs.get(key) for rank, theirs in facts.items()}
        ((usual, count), *_) = Counter(values.values()).most_common(1)
        if 2 * count <= len(values):
            usual = values[next(iter(values))]
        rank, value = next((rank, value) for rank, value in values.items() if value != usual)
        like = next(rank for rank, value in values.items() if value == usual)
        if key.endswith(".py") or key == "triax":
            said.append(f"{grid.describe(rank)} runs another {key} than rank {like}")
        else:
            said.append(
                f"{key} is {value or 'missing'} on {grid.describe(rank)} and {usual or 'missing'} on rank {like}"
            )
    more = f" (and {len(different) - _SHOWN} more)" if len(different) > _SHOWN else ""
    return f"ranks differ: {'; '.join(said)}{more}. Give every rank the same files, configuration and model"


@functools.cache
def _package() -> str:
    """Of triax's own files: what this process has loaded does not change."""
    digest = hashlib.sha256()
    for file in sorted(file for folder in _FOLDERS for file in (_PACKAGE / folder).glob("*.py")):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def _hash(file: str, date: int) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]
