"""Slices of sequences, from ``options.schedule.slices``: checks that the model is exact with them, and its states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from ...base.option_error import OptionError
from ...context.slices import Slices
from ...options.engine import EngineOptions
from ...pipe.module import PipelineModule
from ...pipe.program.schedule import Schedule

_ROOT = Slices.__module__.partition(".")[0]
# Modules of this library whose layers act on each token by itself, except layers with an attribute ``slices``.
_KNOWN = tuple(
    f"{_ROOT}.{name}"
    for name in (
        *("tensor_parallel", "grid.randomness", "context.dropout", "models.attention", "models.decoder"),
        *("models.head_groups", "models.qk_norm"),
        *("models.deepseek", "models.layers", "models.mlp", "models.positions", "models.recurrent"),
        *("models.replicated_linear", "models.gpt", "models.llama", "moe"),
    )
)
_TOKEN_WISE = (
    *(nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Identity, nn.Dropout, nn.Sequential, nn.ModuleList),
    *(nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid),
)


def slice_states(module: PipelineModule, schedule: Schedule, options: EngineOptions) -> Slices | None:
    """Give the layers of a model the states of slices. Collective.

    Returns:
        The states; None if the schedule runs whole microbatches.

    Raises:
        OptionError: on every rank, if the model or another option is not exact with slices.
    """
    count = len(schedule.slices)
    if count == 1:
        return None
    problem = next(_problems(module, options), None)
    problem = next((text for text in module.grid.world.all_gather_json(problem) if text), None)
    if problem is not None:
        raise OptionError("schedule.slices", count, f"{problem}. Leave <schedule.slices> out for whole sequences")
    states = Slices()
    layers: Iterable[Any] = module.layers.modules()
    for layer in layers:
        if hasattr(layer, "slices"):
            layer.slices = states
    return states


def _problems(module: PipelineModule, options: EngineOptions) -> Iterator[str]:
    """Yield reasons why this rank's part of a model is not exact with slices."""
    if (context := module.grid.context.size) > 1:
        yield f"the grid has context={context}, which cuts sequences too: take one of the two"
    if options.compile is not None:
        yield "<compile> would compile each layer again for each slice: leave it out"
    loss = module.loss_fn
    if not (getattr(loss, "next_tokens", False) or getattr(loss, "token_wise", False)):
        name = getattr(loss, "__name__", type(loss).__name__)
        yield (
            f"loss_fn ({name}) would be called for each slice, with its outputs and labels, and is not known to be a "
            "sum over tokens: use triax.NextTokenLoss, or give it the attribute token_wise = True"
        )
    taken = [name for rank in range(module.grid.pipe.size) for name in module.taken(rank)]
    if taken:
        yield f"a layer takes the field {taken[0]!r} of a microbatch, which belongs to the whole sequence"
    for stage in module.stages:
        uses: Counter[str] = Counter()
        for index, key, function, _ in module.calls_of(stage):
            if function is not None and not (_is_known(function) or getattr(function, "token_wise", False)):
                name = getattr(function, "__name__", repr(function))
                why = f"which is not known to act on each token by itself: {_SAY}"
                yield f"layer {index} runs the function {name}, {why}"
            if key is None:
                continue
            layer = module.layers[key]
            where = f"layer {index} ({type(layer).__name__})"
            uses[key] += function is None
            if uses[key] > 1 and any(hasattr(submodule, "slices") for submodule in layer.modules()):
                yield f"{where} is listed twice in stage {stage}, and its keys and values could not be told apart"
            for submodule in layer.modules():
                if (reason := _reason(submodule)) is not None:
                    yield f"{where}{reason}"


_SAY = "if it does, give it the attribute token_wise = True"


def _is_known(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).startswith(_KNOWN)


def _reason(part: nn.Module) -> str | None:
    """Return why a module is not exact with slices; None if it is."""
    if (reason := getattr(part, "refuses_slices", None)) is not None:
        return f" {reason}"
    if hasattr(type(part), "slices") or getattr(part, "token_wise", False) or type(part) in _TOKEN_WISE:
        return None
    if _is_known(type(part)):
        return None
    return f" has a {type(part).__name__}, which is not known to act on each token by itself: {_SAY}"
