"""LoRA under the Trainer: the configuration's section ``lora``, and PEFT's models over pipe stages.

Both put adapters into the model that the script made. Without a pipe axis this model is trained. With one, the stages
get adapters of triax with equal factors, whose parameters have the names of the script's model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...base.errors import ConfigError
from ...context.dropout import dropout
from ...grid import Grid
from ...models.huggingface.adapters import peft_options, write_adapters
from ...models.huggingface.merge_adapters import is_factor, layer_of
from ...models.huggingface.save import linear_names, transposed_layers, written_config
from ...tensor_parallel.lora import LoraOptions, add_adapters
from ...tensor_parallel.lora_adapter import DEFAULT
from ..deepspeed.config.read import Section

_PEFT_PREFIX = "base_model.model."
_PEFT_FACTOR = re.compile(r"(.+)\.lora_([AB])\.[^.]+\.weight")


def check_section(model: Any, config: Mapping[str, Any]) -> None:
    """Check that not both the model and the configuration have adapters, and that the Trainer has those of the section.

    Raises:
        ConfigError: both have, or the section has dropout, DoRA or a quantized base.
    """
    section = config.get("lora")
    for key in ("dropout", "lora_dropout", "dora", "use_dora", "base"):
        if isinstance(section, Mapping) and section.get(key):
            raise ConfigError(
                f"the Trainer's section lora has no {key}: leave it out, give a PeftModel on a grid with pipe=1, or "
                "train with triax.Engine(..., lora=...) or a training file"
            )
    if hasattr(model, "peft_config") and config.get("lora") is not None:
        raise ConfigError(
            f"the model is a {type(model).__name__} of PEFT, and the configuration has the section lora: give one of "
            "them"
        )


def add_section(model: nn.Module, config: Section, grid: Grid, whole: bool) -> None:
    """Add the adapters of the configuration's section ``lora`` to a transformers model. Collective.

    Args:
        model: the model; one that has adapters already keeps them.
        config: the configuration.
        grid: the grid.
        whole: the model is whole on each rank; False: sharded over the tensor axis.

    Raises:
        ConfigError: a target names no layer.
    """
    section = config.lora
    if section is None:
        return
    options = LoraOptions(section.rank, section.alpha, section.targets, section.rslora, seed=config.seed)
    # The Trainer's grid has no expert axis: grid.expert is an axis of one rank.
    axis = grid.expert if whole else None
    add_adapters(model, options, linear_names(model), grid, dropout, axis=axis)


def adapter_options(model: Any) -> LoraOptions | None:
    """Return the options of a model's adapters, with the layers that have one as targets; None without adapters.

    Raises:
        ConfigError: PEFT's adapters compute something else than plain LoRA.
    """
    sets: dict[str, LoraOptions] = getattr(model, "lora_options", {})
    options = sets.get(DEFAULT)
    configs = getattr(model, "peft_config", None)
    if configs is not None:
        if len(configs) > 1:
            raise ConfigError(f"the model has the adapters {', '.join(configs)}: give it one, or a grid with pipe=1")
        (config,) = configs.values()
        if getattr(config, "lora_dropout", 0.0):
            raise ConfigError(
                f"peft's lora_dropout={config.lora_dropout} is not supported over stages: set it to 0, or use a grid "
                "with pipe=1"
            )
        try:
            options = LoraOptions(**peft_options(config.to_dict(), "the model's peft_config"))
        except ValueError as error:
            raise ConfigError(f"{error} Or use a grid with pipe=1") from error
        if options.dora:
            raise ConfigError(
                "the model's peft_config has use_dora=True, but stages have plain LoRA only: leave it out, or use a "
                "grid with pipe=1"
            )
        variants = [name for name, layer in model.named_modules() if getattr(layer, "lora_variant", None)]
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        others = [name for plain, name in plain_names(model).items() if not plain.endswith((".lora_A", ".lora_B"))]
        if refused := [*variants, *trained.intersection(others)]:
            raise ConfigError(
                f"{refused[0]} is trained by PEFT, but stages have plain LoRA only: leave it out, or use a grid with "
                "pipe=1"
            )
    if options is None:
        return None
    targets = {name.rpartition(".lora_")[0] for name in plain_names(model) if name.endswith((".lora_A", ".lora_B"))}
    return replace(options, targets=sorted(targets))


def plain_names(model: nn.Module) -> dict[str, str]:
    """Return transformers' name of each parameter -> its name in a model that may have adapters.

    A factor has the name of its layer and ``.lora_A`` or ``.lora_B``.
    """
    names = {}
    for name, _ in model.named_parameters():
        plain = name
        if hasattr(model, "peft_config"):
            plain = name.removeprefix(_PEFT_PREFIX).replace(".base_layer.", ".")
            if factor := _PEFT_FACTOR.fullmatch(plain):
                plain = "{}.lora_{}".format(*factor.groups())
        elif is_factor(name):
            plain = "{}.lora_{}".format(*layer_of(name, {}))
        names[plain] = name
    return names


def without_adapters(model: Any) -> Any:
    """Return a transformers model with the same weights, which share their memory, and without adapters.

    Its buffers have no values. A model without adapters is returned itself.
    """
    if not hasattr(model, "peft_config") and not hasattr(model, "lora_options"):
        return model
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    with torch.device("meta"):
        bare = type(base)(base.config)
    own = dict(model.named_parameters())
    bare.load_state_dict(
        {plain: own[name].data for plain, name in plain_names(model).items()}, strict=False, assign=True
    )
    bare.tie_weights()
    return bare


def save_adapters(model: Any, folder: str | Path, state: Mapping[str, Tensor]) -> None:
    """Write the adapters of the section ``lora`` to a folder of PEFT, on one process.

    Args:
        model: the model.
        folder: the folder, which is created.
        state: the model's names of parameters -> whole values.
    """
    factors = {name: value.detach().cpu().contiguous() for name, value in state.items() if is_factor(name)}
    transposed = transposed_layers(written_config(model, None))
    base = getattr(model.config, "_name_or_path", "") or None
    write_adapters(Path(folder), model.lora_options[DEFAULT], factors, linear_names(model), transposed, None, base)
