"""LoRA: adapters on the layers of a model that the options name, and nothing else trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ...base.errors import ConfigError
from ...checkpoint.convert.formats import module_names
from ...context.dropout import dropout
from ...grid import Grid
from ...options.lora import Lora
from ...tensor_parallel.lora import LoraOptions, activate, add_adapters, merge_adapters
from ...tensor_parallel.lora_adapter import DEFAULT
from .arguments import Groups


def add_lora(
    model: nn.Module, options: Lora | Mapping[str, Any], grid: Grid | None = None, *, name: str = DEFAULT
) -> None:
    """Freeze a model, and add low-rank adapters to its linear layers (docs/lora.md). Collective.

    An engine calls it for its option ``lora``. Call it before, if you make the optimizer or
    parameter groups yourself, for a model without an engine, or for a second set of adapters.

    Args:
        model: a ``PipelineModule``, or any other module on its device.
        options: ``Lora(...)``, or a mapping of its options.
        grid: the grid of a module that is not a ``PipelineModule``; by default every process is a replica.
        name: of this set of adapters. The first set of a model is active; ``use_lora`` activates others.

    Raises:
        ConfigError: on every rank, if a target names no layer, or a layer that cannot be adapted, or if the model has
            a set of this name with other options.
    """
    grid = getattr(model, "grid", None) or grid or Grid()
    given = Lora.of(options)
    targets = given.targets if isinstance(given.targets, str) else list(given.targets)
    seed = getattr(model, "seed", 0)
    made = LoraOptions(given.rank, given.alpha, targets, given.rslora, seed, given.dropout, given.dora, given.base)
    add_adapters(model, made, module_names(model), grid, dropout, name)


def use_lora(model: Any, names: str | Sequence[str]) -> None:
    """Add the updates of these sets of adapters from now on, and of no others. Every rank calls this.

    Before an engine is made, these sets alone are trained. Afterwards the trained sets stay the same: other names are
    for evaluation and generation, and a training step needs the trained ones.

    Args:
        model: an engine, or a module with adapters.
        names: names of sets; several are added up; none, ``()``, is the base model.

    Raises:
        ConfigError: the model has no set of such a name, or DoRA is one of several.
    """
    module: Any = model if isinstance(model, nn.Module) else model.module
    wanted, known = (names,) if isinstance(names, str) else tuple(names), getattr(module, "lora_options", {})
    for name in wanted:
        if name not in known:
            raise ConfigError(
                f"the model has no adapters {name!r}: it has {', '.join(known) or 'none, add_lora first'}"
            )
        if known[name].dora and len(wanted) > 1:
            raise ConfigError(
                f"the adapters {name!r} use DoRA, whose update cannot be added to others: name only these"
            )
    trains = isinstance(model, nn.Module) and not getattr(module, "training_started", False)
    module.lora_active = wanted
    if trains and hasattr(module, "change_layers"):
        module.change_layers(lambda _, layer: activate(layer, wanted, True))
    activate(module, wanted, trains)


def merge_lora(model: Any) -> None:
    """Merge the active adapters into the weights of a model, and remove all adapters. Collective.

    Weights in 4 or 8 bits become weights in floating point. The model has no engine, as an engine trains the adapters.

    Args:
        model: a ``PipelineModule``, or any other module with adapters.

    Raises:
        ConfigError: the model has no adapters, or an engine.
    """
    if not isinstance(model, nn.Module) or getattr(model, "training_started", False):
        raise ConfigError(
            "an engine trains these adapters, and would lose them: write the merged weights with "
            "triax.save_hf(engine, path, merge_lora=True), or load the adapters into a model without an engine"
        )
    module: Any = model
    if not getattr(module, "lora_options", {}):
        raise ConfigError("the model has no adapters to merge")
    if hasattr(module, "fill"):
        module.fill()
    merge_adapters(module)


def require_adapters(groups: Groups, model: nn.Module) -> None:
    """Check that the parameters to train contain the adapters, which are the model's only trained parameters."""
    given = {parameter for _, listed in groups for parameter in listed}
    if any(parameter.requires_grad and parameter not in given for parameter in model.parameters()):
        raise ConfigError(
            "the parameters to train were taken from the model before the engine added the adapters of lora: call "
            "triax.add_lora(model, ...) first, or leave the parameters and the optimizer's instance out"
        )
