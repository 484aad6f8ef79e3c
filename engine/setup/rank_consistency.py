"""Check, before an engine is made, that every rank has the same configuration, code and model.

Ranks that differ would hang, or train another model than intended. Each rank describes what it has by names and
numbers. Ranks first compare one hash of these, so that ranks that agree send a few bytes.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...base.errors import ConfigError
from ...base.source_hashes import file_hash, source_hashes
from ...grid import Grid, layout_of
from ...grid.agreement.agreement import require_equal
from ...pipe.module import PipelineModule
from ...pipe.program.schedule import Schedule
from ...pipe.schedules.choose import FILES
from .arguments import Groups

Facts = dict[str, str]  # name, as messages have it -> value

_MAY_DIFFER = ("dump_state", "log_level", "monitor.state", "monitor.log_level")
# Each host may have its own disk, and only rank 0 writes these outputs.
_PATHS = (
    *("nvme_path", "output_path", "output_file", "job_name"),
    *("offload_optimizer.path", "offload_parameters.path", "monitor.json", "monitor.csv", "monitor.tensorboard"),
    *("monitor.trace.file", "monitor.profile.file"),
)


def require_same_settings(grid: Grid, given: Mapping[str, Any], schedule: Schedule | None) -> None:
    """Check that all ranks have the same configuration and schedule, before stages move to their ranks. Collective.

    Does nothing on one process. Starts the hang watch: see ``Grid.watch``.

    Args:
        grid: the ranks.
        given: the settings as the user wrote them: a nest of mappings.
        schedule: the schedule, if it was given as a value.

    Raises:
        ConfigError: on every rank, if any rank differs; the message names the rank and the difference.
    """
    if grid.size == 1:
        return
    grid.start_hang_watch()
    common = settings(given)
    common["the versions of Python and torch"] = f"{platform.python_version()}, {torch.__version__}"
    if schedule is not None:
        common["the ops of the schedule"] = hashlib.sha256(schedule.to_csv().encode()).hexdigest()[:12]
    require_equal(grid, grid.world, common)


def require_same_model(grid: Grid, model: nn.Module, groups: Any, optimizer: Any) -> None:
    """Check that all ranks have the same code, layers, optimizer and parameters. Collective; nothing on one process.

    Raises:
        ConfigError: as ``require_same_settings``.
    """
    if grid.size == 1:
        return
    common = {"the optimizer": getattr(optimizer, "__qualname__", type(optimizer).__qualname__)}
    kinds, sources = layers(model)
    loss = getattr(getattr(model, "loss_fn", None), "__module__", None)
    common |= {**kinds, **source_hashes({*sources, loss} if loss else sources)}
    require_equal(grid, grid.world, common)
    # Stages hold different layers, and tensor ranks different shards; replicas hold the same parameters.
    require_equal(grid, grid.data_context, parameters(model, groups))
    if isinstance(model, PipelineModule) and model.ties:
        _require_same_ties(grid, model, groups)


def _require_same_ties(grid: Grid, model: PipelineModule, groups: Groups) -> None:
    """Check that all stages of a tied weight, which sum its gradients, train it in one way. Collective over the pipe.

    Raises:
        ConfigError: on every rank, because the replicas are equal.
    """
    group_of = _groups_of(groups)
    tied = [(entry.layout.name, entry.parameter) for entry in model.local_parameters() if entry.tie is not None]
    own_ties = {name: _description(parameter, group_of.get(parameter)) for name, parameter in tied}
    first_seen: dict[str, tuple[int, str]] = {}
    for stage, theirs in enumerate(grid.pipe.all_gather_json(own_ties)):
        for name, kind in theirs.items():
            first, expected = first_seen.setdefault(name, (stage, kind))
            if kind != expected:
                raise ConfigError(
                    f"the tied weight {name} is {expected} on pipe rank {first} and {kind} on pipe rank {stage}: give "
                    "model_parameters on every rank, in the same group, the tied weights that its stages use"
                )


def settings(given: Mapping[str, Any]) -> Facts:
    """Return every setting that must be equal on all ranks, as ``section.key``."""
    facts: Facts = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), inner)
        elif (
            prefix in ("pipeline.schedule", "schedule.name")
            and value.endswith(FILES)
            and (file := Path(value)).is_file()
        ):
            # Each host may have the file at another path.
            facts[f"the file that {prefix} names"] = file_hash(value, file.stat().st_mtime_ns)
        elif prefix not in _MAY_DIFFER and not prefix.endswith(_PATHS):
            facts[prefix] = repr(value)

    walk("", given)
    return facts


def layers(model: nn.Module) -> tuple[Facts, set[str]]:
    """Return the class of every layer, or of every module of a plain model, and the names of their Python modules."""
    if isinstance(model, PipelineModule):
        listed = {f"the class of layer {i}": getattr(layer, "cls", layer) for i, layer in enumerate(model.layer_specs)}
    else:
        listed = {f"the class of {name or 'the model'}": type(module) for name, module in model.named_modules()}
    kinds = {name: layer if hasattr(layer, "__qualname__") else type(layer) for name, layer in listed.items()}
    return {name: kind.__qualname__ for name, kind in kinds.items()}, {kind.__module__ for kind in kinds.values()}


def parameters(model: nn.Module, groups: Groups) -> Facts:
    """Return shape, dtype and parameter group of each parameter on this rank."""
    group_of = _groups_of(groups)
    facts = {"the number of parameters": str(sum(1 for _ in model.parameters()))}
    for name, parameter in model.named_parameters():
        facts[f"the parameter {layout_of(parameter).name or name}"] = _description(parameter, group_of.get(parameter))
    return facts


def _groups_of(groups: Groups) -> dict[nn.Parameter, int]:
    return {p: i for i, (_, listed) in enumerate(groups) for p in listed}


def _description(parameter: Tensor, group: int | None) -> str:
    kind = f"{str(parameter.dtype).removeprefix('torch.')}{list(parameter.shape)}"
    return f"{kind}{'' if parameter.requires_grad else ', frozen'}{'' if group is None else f', group {group}'}"
