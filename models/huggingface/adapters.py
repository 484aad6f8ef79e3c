"""PEFT's adapters in and out: ``save_lora``, ``load_lora``, ``lora_config``, and the adapters of a checkpoint.

A folder has ``adapter_config.json`` and ``adapter_model.safetensors``, whose names are those of transformers' layers:

    triax   layers.1.attention.kv.lora.v_proj.A
    PEFT    base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight

DoRA's norms are ``magnitude`` and ``lora_magnitude_vector``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...base.checks import check_path
from ...base.errors import ConfigError
from ...base.files import read_object
from ...base.folder_files import FolderFiles
from ...base.hub import local_folder
from ...base.safetensors import write_file
from ...context.dropout import dropout
from ...grid import Grid, layout_of
from ...grid.agreement.agreement import agreed, begin_call
from ...options.lora import Lora
from ...tensor_parallel.lora import LoraOptions, add_adapters, plan_adapters
from ...tensor_parallel.lora_adapter import DEFAULT
from .merge_adapters import is_factor, layer_of, set_of_factor
from .names import Names
from .reader import open_weights
from .save import (
    held_everywhere,
    linear_names,
    module_and_grid,
    named,
    transposed_layers,
    whole_tensors,
    written_config,
)

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Settings of PEFT's LoraConfig -> triax's.
CARRIED = {
    "r": "rank",
    "lora_alpha": "alpha",
    "target_modules": "targets",
    "use_rslora": "rslora",
    "lora_dropout": "dropout",
    "use_dora": "dora",
}
# Settings that change nothing of what the stored factors compute, or only in place of one that is refused.
HARMLESS = frozenset(
    (
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        *("fan_in_fan_out", "layers_pattern", "megatron_config", "megatron_core", "runtime_config"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
    )
)
# Settings that change what an adapter computes or trains -> the values that triax has; of others that are not listed,
# whatever says that they are not used. The other initial weights change the weights of the base model as well.
_NOT_USED: tuple[Any, ...] = (None, False, [], {}, "")
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}


def save_lora(
    model: Any,
    path: str | Path,
    *,
    names: Names | None = None,
    grid: Grid | None = None,
    dtype: torch.dtype | None = None,
    base_model: str | None = None,
    name: str = DEFAULT,
) -> None:
    """Write a model's adapters to a folder that PEFT loads, ``PeftModel.from_pretrained(model, path)``. Collective.

    Args:
        model: an ``Engine``, or a module with adapters.
        path: path of the folder, which is created.
        names: table of parameter names as in ``load_hf``, for models of other families.
        grid: the grid of a module that has no attribute with its grid.
        dtype: dtype of the written factors; None: their own.
        base_model: name or path of the frozen model, which PEFT's ``AutoPeftModel`` loads.
        name: of the adapters, if the model has several sets.

    Raises:
        ValueError: the model has no adapters of this name.
        RuntimeError: rank 0 could not write. The error is raised on every rank.
    """
    check_path("save_lora", path=path)
    module, grid = module_and_grid(model, grid, "save_lora(module, path, grid=grid)")
    known: dict[str, LoraOptions] = getattr(module, "lora_options", {})
    if not known:
        raise ValueError("the model has no adapters: give initialize a section lora, or save weights with save_hf")
    if name not in known:
        raise ValueError(f"the model has no adapters {name!r}: give name one of {', '.join(known)}")
    options = known[name]
    own = {key: parameter for key, parameter in named(module).items() if is_factor(key) and set_of_factor(key) == name}
    begin_call(grid, "save_lora")
    tensors = dict(whole_tensors(model, own, held_everywhere(own, grid), grid))
    with agreed(grid, None):
        if grid.rank == 0:
            factors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
            layers = linear_names(module, names)
            transposed = transposed_layers(written_config(module, None)) if layers else set[str]()
            write_adapters(Path(path), options, factors, layers, transposed, dtype, base_model)


def write_adapters(
    folder: Path,
    options: LoraOptions,
    factors: Mapping[str, Tensor],
    layers: Mapping[str, tuple[str, ...]],
    transposed: set[str],
    dtype: torch.dtype | None,
    base_model: str | None,
) -> list[str]:
    """Write whole factors as PEFT's folder, on one process.

    Args:
        folder: the folder, which is created.
        options: rank, scaling and targets.
        factors: triax's name -> factor.
        layers: name of a layer -> transformers' names of the layers that it is; a layer without an entry keeps its own.
        transposed: names of transformers' layers that keep their weight as (inputs, outputs).
        dtype: dtype of the written factors; None: their own.
        base_model: name or path of the frozen model.

    Returns:
        PEFT's names of the tensors.
    """
    written: dict[str, Tensor] = {}
    adapted = set()
    for name, value in factors.items():
        layer, factor = layer_of(name, layers)
        if layers and name.partition(".lora.")[0] not in layers:
            raise ValueError(
                f"{layer} is a part of a fused layer in transformers' model, where PEFT cannot adapt it alone. Merge "
                "the adapters instead: save_hf(..., merge_lora=True), or --merge-lora."
            )
        adapted.add(layer)
        written[_peft_name(layer, factor)] = value if dtype is None else value.to(dtype)
    every = {name for several in layers.values() for name in several} | adapted
    config = {
        "peft_type": "LORA",
        "task_type": None if base_model is None else "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": options.rank,
        "lora_alpha": int(options.alpha) if options.alpha == int(options.alpha) else options.alpha,
        "use_rslora": options.rslora,
        "use_dora": options.dora,
        "target_modules": _shortest(adapted, every),
        "fan_in_fan_out": bool(adapted & transposed),
        "lora_dropout": options.dropout,
        "bias": "none",
        "init_lora_weights": True,
    }
    with FolderFiles(folder) as files:
        (files / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        write_file(files / _WEIGHTS, written)
    return [*written]


def _peft_name(layer: str, factor: str) -> str:
    return f"base_model.model.{layer}.lora_{'magnitude_vector' if factor == 'magnitude' else f'{factor}.weight'}"


def _shortest(adapted: set[str], every: set[str]) -> list[str]:
    """Return the last words of the adapted layers' names if no other layer has them, else the whole names."""
    ends = {name.rpartition(".")[2] for name in adapted}
    return sorted(ends if all(name in adapted for name in every if name.rpartition(".")[2] in ends) else adapted)


def lora_config(path: str | Path) -> dict[str, Any]:
    """Return the section ``lora`` of a configuration for the adapter in PEFT's folder, or of that id on the Hub.

    Raises:
        ValueError: the adapter has a setting that triax does not have, such as a rank of its own for some layers.
    """
    check_path("lora_config", path=path)
    file = local_folder(path) / _CONFIG
    return peft_options(read_object(file), str(file))


def peft_options(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the section ``lora`` for the settings of PEFT's ``LoraConfig``.

    Args:
        config: the settings, as ``LoraConfig.to_dict`` and ``adapter_config.json`` have them.
        where: where they stand, for the messages.

    Raises:
        ValueError: a setting that triax does not have, such as DoRA.
    """
    for key, value in config.items():
        allowed = _SUPPORTED.get(key, _NOT_USED)
        if key not in CARRIED and key not in HARMLESS and value not in allowed:
            raise ValueError(
                f"{where} has {key}={value!r:.60}, which triax's adapters do not have. Train the "
                f"adapter with {key}={allowed[0]!r}, or merge it with PEFT's merge_and_unload()."
            )
    given = {ours: config[theirs] for theirs, ours in CARRIED.items() if config.get(theirs) is not None}
    if isinstance(given.get("targets"), (set, list)):
        given["targets"] = sorted(given["targets"])
    try:
        if missing := [theirs for theirs, ours in CARRIED.items() if ours not in (*given, "rslora", "dropout", "dora")]:
            raise ValueError(f"it has no {missing[0]}")
        Lora.of(given)
        re.compile(given["targets"] if isinstance(given["targets"], str) else "")
    except (ValueError, TypeError, re.error) as error:
        raise ConfigError(f"{where} is damaged: {error}. Copy or write it again.") from error
    return {"rslora": False, "dropout": 0.0, "dora": False, **given}


def load_lora(
    path: str | Path, into: Any, *, names: Names | None = None, grid: Grid | None = None, name: str = DEFAULT
) -> None:
    """Load PEFT's adapter into a model. Collective.

    Args:
        path: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``, or an id of the Hub.
        into: an ``Engine`` with the section ``lora`` that ``lora_config(path)`` returns; or a module with its weights,
            which gets the adapters if it has none.
        names: table of parameter names as in ``load_hf``, for models of other families.
        grid: the grid of a module that has no attribute with its grid.
        name: of the adapters, if the model has several sets.

    Raises:
        ValueError: the model has other adapters than the folder, or the folder has a setting that triax does not have.
    """
    check_path("load_lora", path=path)
    module, grid = module_and_grid(into, grid, "load_lora(path, module, grid=grid)")
    with agreed(grid, None):
        folder = local_folder(path, weights=True)
        settings = lora_config(folder)
        options = LoraOptions(**settings, seed=getattr(module, "seed", 0))
        _check_factors(folder / _WEIGHTS, options.rank)
        layers = linear_names(module, names)
        known: dict[str, LoraOptions] = getattr(module, "lora_options", {})
        own = known.get(name)
        if own is None and isinstance(into, nn.Module) and not getattr(module, "training_started", False):
            own = options
        if own is None or _kind(own) != _kind(options):
            raise ValueError(
                f"{folder} has an adapter of {_kind(options)}, but the model has "
                f"{'none' if own is None else _kind(own)}. Make the engine with "
                "config={'lora': triax.lora_config(path), ...}."
            )
    held = {key: parameter for key, parameter in named(module).items() if is_factor(key) and set_of_factor(key) == name}
    shapes = {key: layout_of(parameter).shape for key, parameter in held.items()}
    if name not in known:
        for change in plan_adapters(module, options, layers, grid, name):
            shapes |= change.factor_shapes(name, options.dora)
    theirs = {key: _peft_name(*layer_of(key, layers)) for key in shapes}
    everywhere = set[str]().union(*grid.pipe.all_gather_json(sorted(theirs.values())))
    with agreed(grid, None), open_weights(folder / _WEIGHTS) as file:  # before the model gets adapters
        stored = set(file.keys())
        missing, unused = sorted(set(theirs.values()) - stored), sorted(stored - everywhere)
        if missing or unused:
            raise ValueError(
                f"{folder / _WEIGHTS} {'lacks' if missing else 'also has'} {', '.join((missing or unused)[:4])}. Give "
                "the engine the targets of the adapter, config={'lora': triax.lora_config(path), ...}."
            )
        for key, shape in shapes.items():
            if (found := tuple(file.get_slice(theirs[key]).get_shape())) != shape:
                raise ValueError(
                    f"{folder / _WEIGHTS}: {theirs[key]} has the shape {found}, but the model's is {shape}. Give an "
                    "adapter of this model."
                )
    if name not in known:
        add_adapters(module, options, layers, grid, dropout, name)
        held = {key: parameter for key, parameter in named(module).items() if key in shapes}
    with agreed(grid, None), open_weights(folder / _WEIGHTS) as file, torch.no_grad():
        for key, parameter in held.items():
            layout = layout_of(parameter)
            value = layout.shard(file.get_tensor(theirs[key]), grid.tensor.rank, grid.tensor.size)
            getattr(into, "assign", lambda p, v: p.copy_(v))(parameter, value)


def _check_factors(file: Path, rank: int) -> None:
    """Check the ranks and dtypes of stored factors, before a model gets such adapters.

    Raises:
        ConfigError: a factor has another rank than the settings, or numbers that are not real.
    """
    with open_weights(file) as opened:
        for name in opened.keys():  # noqa: SIM118, it is not a mapping
            stored = opened.get_slice(name)
            if not stored.get_dtype().startswith(("F", "BF")):
                raise ConfigError(
                    f"{file}: {name} has the dtype {stored.get_dtype()}: give real floating-point factors"
                )
            if name.endswith("lora_A.weight") and stored.get_shape()[0] != rank:
                raise ConfigError(f"{file}: {name} has rank {stored.get_shape()[0]}, but {_CONFIG} has r={rank}")


def _kind(options: LoraOptions) -> str:
    """Return what two adapters must have in common, so that the factors of one mean the same in the other."""
    return f"rank {options.rank} and scaling {options.scaling:g}{', with DoRA' if options.dora else ''}"
