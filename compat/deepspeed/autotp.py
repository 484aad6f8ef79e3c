"""Section ``tensor_parallel`` of DeepSpeed's configuration, which shards a module without a line in the script.

``autotp_size`` is the size of the tensor axis. ``partition_config`` names the layers: for each entry of
``layer_specs``, regular expressions of parameters' names, and ``column``, ``row`` or ``skip``. Without it, the plan is
that of the model's family.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from logging import getLogger
from typing import Any

from torch import nn

from ...base.errors import nearest
from ...grid import Grid
from ...grid.layout import layout_of
from ...models.huggingface.parallelize import find_plan, parallelize
from ...tensor_parallel.plans import Column, FusedHeads, KeyValue, Local, OnHeads, Row, Style
from .engine import DeepSpeedConfigError

_SPEC = ("patterns", "partition_type", "shape", "partition_dim", "model_types", "gather_output", "grad_allreduce")
_CONFIG = ("layer_specs", "use_default_specs", "strict_mode", "tp_size", "embedding_partition_dim", "lm_head_patterns")
_COLUMNS = (Column, KeyValue, FusedHeads)
_HEADS = ("num_heads", "n_heads", "num_attention_heads")


def asked_size(section: Mapping[str, Any]) -> int:
    """Return the size of the tensor axis for which the section asks, at least 1."""
    sizes = (section.get(key) for key in ("autotp_size", "tp_size"))
    return max((size for size in sizes if isinstance(size, int)), default=0) or 1


def is_sharded(model: nn.Module) -> bool:
    """Return True if tensor ranks hold shards of a parameter of a module."""
    return any(layout_of(parameter).sharded for parameter in model.parameters())


def shard(model: nn.Module, grid: Grid, section: Mapping[str, Any]) -> None:
    """Shard a module over the tensor axis as the section says, in place; one that is sharded stays. Collective.

    Raises:
        DeepSpeedConfigError: no plan is known for the module, or ``partition_config`` asks for what is not possible.
    """
    if is_sharded(model):
        return
    try:
        parallelize(model.to(grid.device), grid, plan_of(model, section))
    except (ValueError, TypeError) as error:
        raise DeepSpeedConfigError(f"tensor_parallel cannot shard the model: {error}") from error


def plan_of(model: nn.Module, section: Mapping[str, Any]) -> dict[str, Style]:
    """Return the plan of a section.

    Raises:
        ValueError: as ``shard``.
    """
    preset, config = section.get("preset_model"), section.get("partition_config")
    family = getattr(getattr(model, "config", None), "model_type", None)
    if preset is not None and preset != family:
        raise ValueError(
            f"preset_model is {preset!r}, but the model's model_type is {family!r}, whose plan is taken: leave "
            "preset_model out, or give partition_config"
        )
    if config is None:
        try:
            return find_plan(model)
        except ValueError as error:
            raise ValueError(
                f"{error} In the configuration, tensor_parallel.partition_config takes its place."
            ) from None
    _check_keys("partition_config", config, _CONFIG)
    try:
        known = find_plan(model)
    except ValueError:
        known = {}
    specs = [_checked(spec, number) for number, spec in enumerate(config.get("layer_specs", ()))]
    plan, left = _plan_of_specs(model, specs, known, family)
    if preset is not None and config.get("use_default_specs", True):
        plan = {**{name: style for name, style in known.items() if isinstance(style, (*_COLUMNS, Row))}, **plan}
        left = []
    if left and config.get("strict_mode", False):
        raise ValueError(f"strict_mode is true, but no entry of layer_specs matches {', '.join(left)}: add one")
    if not any(isinstance(style, Row) for style in plan.values()):
        getLogger("triax").warning("tensor_parallel.partition_config shards no layer by rows: outputs are not summed")
    others = {name: style for name, style in known.items() if not isinstance(style, (*_COLUMNS, Row))}
    return {**plan, **others} if known else {**plan, **_heads(model, plan)}


def _plan_of_specs(
    model: nn.Module, specs: Sequence[Mapping[str, Any]], known: Mapping[str, Style], family: str | None
) -> tuple[dict[str, Style], list[str]]:
    """Return the styles of linear layers, by name, and the names of those that no entry matches."""
    plan: dict[str, Style] = {}
    left = []
    for name, layer in model.named_modules():
        if next(layer.children(), None) is not None or not isinstance(getattr(layer, "weight", None), nn.Parameter):
            continue
        spec = next((spec for spec in specs if _matches(spec, name, family)), None)
        if spec is None:
            left += [name] if isinstance(layer, nn.Linear) else []
            continue
        theirs = next((style for pattern, style in known.items() if fnmatchcase(name, pattern)), None)
        style = _style(spec)
        # The family's style keeps heads whole.
        same = isinstance(theirs, _COLUMNS) if isinstance(style, Column) else isinstance(theirs, Row)
        if style is not None:
            plan[name] = theirs if theirs is not None and same and isinstance(style, (Column, Row)) else style
    return plan, left


def _matches(spec: Mapping[str, Any], name: str, family: str | None) -> bool:
    """Return True if an entry is for a layer, by the name of the layer or of its weight."""
    types = spec.get("model_types")
    if types and str(family).lower() not in [str(kind).lower() for kind in types]:
        return False
    return any(re.match(pattern, candidate) for pattern in spec["patterns"] for candidate in (f"{name}.weight", name))


def _style(spec: Mapping[str, Any]) -> Style | None:
    kind = spec.get("partition_type", "column").lower()
    if kind == "skip":
        return OnHeads() if spec.get("grad_allreduce") else None
    if kind == "row":
        return Row()
    shape = spec.get("shape")
    parts = None if shape is None else tuple(shape[0]) if isinstance(shape[0], (list, tuple)) else int(shape[0])
    return Column(parts=None if parts in (1, -1) else parts, gather_output=bool(spec.get("gather_output")))


def _checked(spec: Any, number: int) -> Mapping[str, Any]:
    """Return an entry of ``layer_specs``.

    Raises:
        ValueError: a key or a value that does not exist or cannot act; the message names it.
    """
    where = f"partition_config.layer_specs[{number}]"
    _check_keys(where, spec, _SPEC)
    patterns, kind = spec.get("patterns"), str(spec.get("partition_type", "column")).lower()
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"{where}.patterns is {patterns!r}: give a list of regular expressions")
    if kind not in ("column", "row", "skip"):
        raise ValueError(f"{where}.partition_type is {kind!r}: give column, row or skip")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{where}.patterns has {pattern!r}, which is no regular expression: {error}") from None
    dim, shape = spec.get("partition_dim"), spec.get("shape")
    if dim not in (None, 0 if kind == "column" else 1):
        raise ValueError(f"{where}.partition_dim is {dim}, but a {kind} layer is cut along its own dim: leave it out")
    fits = isinstance(shape, list) and len(shape) == 2 and shape[1] == -1
    if shape is not None and not (fits and kind == "column"):
        raise ValueError(
            f"{where}.shape is {shape}: give [number of equal parts, -1] or [[rows of each part], -1] for a column "
            "layer, or leave it out"
        )
    return dict(spec)


def _check_keys(where: str, values: Any, known: Sequence[str]) -> None:
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} is {values!r}: a section {{...}} belongs here")
    if unknown := [key for key in values if key not in known]:
        raise ValueError(f"{where} has no key {unknown[0]!r}; {nearest(str(unknown[0]), known)}")


def _heads(model: nn.Module, plan: Mapping[str, Style]) -> dict[str, Style]:
    """Return the styles of modules around sharded layers that count heads: each rank has its own share."""
    around = {name.rpartition(".")[0] for name, style in plan.items() if isinstance(style, _COLUMNS)}
    styles: dict[str, Style] = {}
    for name in around:
        if heads := {key: 1 for key in _HEADS if isinstance(getattr(model.get_submodule(name), key, None), int)}:
            styles[name] = Local(heads)
    return styles
