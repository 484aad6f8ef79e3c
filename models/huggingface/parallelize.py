"""``triax.parallelize``: ``tensor_parallel.parallelize`` with plans for Hugging Face's families."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from torch import nn

from ...grid import Grid
from ...tensor_parallel.parallelize import parallelize as shard
from ...tensor_parallel.plans import Column, FusedHeads, KeyValue, Row, Style
from .families import FAMILIES

M = TypeVar("M", bound=nn.Module)


def parallelize(module: M, grid: Grid, plan: Mapping[str, Any] | None = None) -> M:
    """Shard a plain module's linears and embeddings over ``grid.tensor`` (Shoeybi et al. 2019, arXiv:1909.08053).

    Every ``nn.Linear``, ``nn.Embedding`` and Hugging Face ``Conv1D`` that the plan names is replaced, in place, by a
    sharded layer that holds this rank's shard of the same ``Parameter``. ``tensor_parallel.parallelize`` describes the
    rest, and the errors.

    >>> model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    >>> model = triax.parallelize(model, triax.Grid(), {"0": "column", "2": "row"})
    >>> [tuple(p.shape) for p in model.parameters()]  # with tensor=2: (32, 16), (32,), (16, 32), (16,)
    [(64, 16), (64,), (16, 64), (16,)]

    A model with PEFT's LoRA keeps PEFT's layers, of which the factors are sharded as ``tensor_parallel/lora.py`` says.

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
    sharded: Any = shard(module, grid, plan_of(module, grid.tensor.size) if plan is None else plan)
    if grid.tensor.size > 1 and hasattr(sharded, "resize_token_embeddings"):
        sharded.resize_token_embeddings = _resize  # transformers takes a shard's rows for the whole vocabulary
    result: M = sharded
    return result


def shard_part(part: nn.Module, path: str, grid: Grid, plan: Mapping[str, Style]) -> None:
    """Shard a part of a model, such as a block, by the plan of the whole model. Collective over the tensor axis.

    Args:
        part: the part, which is sharded in place.
        path: name of the part in the whole model.
        grid: grid whose tensor axis shards the part.
        plan: the plan. Its patterns that match nothing in the part are left out.
    """
    root = inner = nn.Module()
    *folders, last = path.split(".")
    for name in folders:
        inner.add_module(name, nn.Module())
        inner = inner.get_submodule(name)
    inner.add_module(last, part)
    shard(root, grid, _matching(plan, root))


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


def plan_of(module: Any, size: int) -> dict[str, Style]:
    """Return the plan of a Hugging Face model, or of a PEFT model, for a number of tensor ranks.

    Raises:
        ValueError: no plan is known for the module, or its adapters are no plain LoRA of linear layers.
    """
    plan = find_plan(module)
    return dict(_plan_of_peft(module, plan, size)) if hasattr(module, "peft_config") else plan


def _plan_of_peft(module: Any, plan: Mapping[str, Style], size: int) -> Iterator[tuple[str, Style]]:
    """Yield name and style of the layers of a PEFT model: of the layers that it adapts, and of their factors.

    Args:
        module: the PEFT model.
        plan: the plan of the model in it.
        size: number of tensor ranks.

    Raises:
        ValueError: an adapter is no plain LoRA of a linear layer.
    """
    for key, config in module.peft_config.items():
        if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA":
            raise ValueError(
                f"the adapter {key!r} is PEFT's {config.peft_type}, but parallelize shards LoRA only. Use "
                "peft.LoraConfig, or a grid with tensor=1."
            )
    for name, layer in module.get_base_model().named_modules(remove_duplicate=False):
        style = next((value for pattern, value in plan.items() if fnmatchcase(name, pattern)), None)
        path = f"base_model.model.{name}"
        if style is None:
            continue
        if isinstance(copies := layer._modules.get("modules_to_save"), nn.ModuleDict):
            yield from (
                (f"{path}.{copy}", style) for copy in ("original_module", *(f"modules_to_save.{k}" for k in copies))
            )
        elif hasattr(layer, "base_layer"):
            yield f"{path}.base_layer", style
            _check_peft(path, layer, style, size)
            if isinstance(style, Row):
                yield from ((f"{path}.lora_A.{adapter}", style) for adapter in layer.lora_A)
            elif isinstance(style, (Column, KeyValue, FusedHeads)):
                own = style if isinstance(style, FusedHeads) else replace(style, group="")
                yield from ((f"{path}.lora_B.{adapter}", own) for adapter in layer.lora_B)
        else:
            yield path, style


def _check_peft(path: str, layer: Any, style: Style, size: int) -> None:
    """Check that tensor ranks can share a layer of PEFT.

    Raises:
        ValueError: they cannot; the message says why.
    """
    plain = type(layer).__module__ == "peft.tuners.lora.layer" and type(layer).__name__ == "Linear"
    if size > 1 and (not plain or getattr(layer, "lora_variant", {})):
        kind = f"{type(layer).__module__}.{type(layer).__name__}"
        variant = f" with {', '.join(sorted({type(v).__name__ for v in layer.lora_variant.values()}))}" if plain else ""
        raise ValueError(
            f"{path} is a {kind}{variant}, but tensor={size} shards plain LoRA of linear layers only. Use "
            "peft.LoraConfig without variants such as DoRA, with linear layers as target_modules; or a grid with "
            "tensor=1."
        )
    drops = any(getattr(dropout, "p", 0.0) for dropout in getattr(layer, "lora_dropout", {}).values())
    if drops and isinstance(style, Row) and layer.in_features // style.unit % size:
        raise ValueError(
            f"{path} has lora_dropout, and {layer.in_features // style.unit} inputs or heads, which tensor={size} does "
            "not divide: its ranks would draw different numbers of random values, and later drop different elements. "
            "Set lora_dropout to 0."
        )


def find_plan(module: nn.Module) -> dict[str, Style]:
    """Return the plan of a Hugging Face model: the patterns of its family that match at least one module.

    Of a PEFT model it is the plan of the model in it.

    Raises:
        ValueError: the family is unknown, or the module lacks sub-modules that this family's models have.
    """
    if hasattr(module, "peft_config"):
        module = module.get_base_model()  # type: ignore[operator]
    config: Any = getattr(module, "config", None)
    family = getattr(config, "model_type", None)
    make = FAMILIES[family].plan if family in FAMILIES else None
    if make is None:
        what = f"a {type(module).__name__}" + (f" of model_type {family!r}" if family else " without a model_type")
        known = ", ".join(name for name, known_family in FAMILIES.items() if known_family.plan is not None)
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
