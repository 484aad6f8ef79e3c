"""``triax.parallelize``: ``tensor_parallel.parallelize`` with plans for Hugging Face's families."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from torch import nn

from ...grid import Grid
from ...tensor_parallel.parallelize import parallelize as shard
from ...tensor_parallel.plans import Row, Style
from .families import FAMILIES

M = TypeVar("M", bound=nn.Module)


def parallelize(module: M, grid: Grid, plan: Mapping[str, Any] | None = None) -> M:
    """Shard a plain module's linears and embeddings over ``grid.tensor`` (Shoeybi et al. 2019, arXiv:1909.08053).

    Every ``nn.Linear``, ``nn.Embedding`` and Hugging Face ``Conv1D`` that the plan names is replaced, in place, by a
    sharded layer that holds this rank's shard of the same ``Parameter``. ``tensor_parallel.parallelize`` describes the
    rest, and the errors.

    Args:
        module: the module, on the grid's device or on the meta device.
        grid: grid whose tensor axis shards the module.
        plan: pattern of module names -> style, as for ``tensor_parallel.parallelize``. If None, the plan of the
            model's family is used: docs/models.md lists the families.

    Returns:
        The module itself.

    Raises:
        ValueError: no plan is known for the module. The message says how to give one.
    """
    sharded: Any = shard(module, grid, find_plan(module) if plan is None else plan)
    if grid.tensor.size > 1 and hasattr(sharded, "resize_token_embeddings"):
        sharded.resize_token_embeddings = _resize  # transformers takes a shard's rows for the whole vocabulary
    found: M = sharded
    return found


def shard_part(part: nn.Module, path: str, grid: Grid, plan: Mapping[str, Style]) -> None:
    """Shard a part of a model, such as a block, by the plan of the whole model. Collective over the tensor axis.

    Args:
        part: the part, which is sharded in place.
        path: name of the part in the whole model.
        grid: grid whose tensor axis shards the part.
        plan: the plan. Its patterns that match nothing in the part are left out.
    """
    whole = inner = nn.Module()
    *folders, last = path.split(".")
    for name in folders:
        inner.add_module(name, nn.Module())
        inner = inner.get_submodule(name)
    inner.add_module(last, part)
    shard(whole, grid, _matching(plan, whole))


def _matching(plan: Mapping[str, Style], module: nn.Module) -> dict[str, Style]:
    """Return the patterns of a plan that match at least one module."""
    names = [name for name, _ in module.named_modules()]
    return {pattern: style for pattern, style in plan.items() if any(fnmatchcase(name, pattern) for name in names)}


def _resize(*args: Any, **kwargs: Any) -> None:
    """Refuse to resize the embeddings of a sharded model."""
    raise RuntimeError(
        "resize_token_embeddings was called after parallelize, but each rank holds a shard of the vocabulary. Call it "
        "before parallelize."
    )


def find_plan(module: nn.Module) -> dict[str, Style]:
    """Return the plan of a Hugging Face model: the patterns of its family that match at least one module.

    Raises:
        ValueError: the family is unknown, or the module lacks sub-modules that this family's models have.
    """
    config: Any = getattr(module, "config", None)
    family = getattr(config, "model_type", None)
    make = FAMILIES[family].plan if family in FAMILIES else None
    if make is None:
        what = f"a {type(module).__name__}" + (f" of model_type {family!r}" if family else " without a model_type")
        known = ", ".join(name for name, each in FAMILIES.items() if each.plan is not None)
        raise ValueError(
            f"there is no built-in plan for {what}, only for {known}. Pass a plan of patterns of module names, such as "
            "plan={'*.up': 'column', '*.down': 'row'}, or add the family (docs/models.md, 'Add a family')."
        )
    plan = _matching(make(config), module)
    if not any(isinstance(style, Row) for style in plan.values()):
        names = [name for name, _ in module.named_modules()]
        raise ValueError(
            f"this {type(module).__name__} has the model_type {family!r}, but none of the layers of that family. Its "
            f"modules are {', '.join(names[1:9])}, .... Pass a plan of patterns of these names, plan={{...}}."
        )
    return plan
