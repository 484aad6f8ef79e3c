"""The ledger: every public name of DeepSpeed 0.19, with its place in triax, or the reason why triax does not have it.

``PRESENT``: module of DeepSpeed -> module of triax -> the names that it answers; ``A=B`` where triax's name of A is B.
``ABSENT``: module of DeepSpeed -> sentence -> the names that raise it; ``*``: all other names of the module.
``ABSENT_MODULES``: module of DeepSpeed -> the sentence that its import raises.
``ALIASES``: DeepSpeed's second paths to a module.

docs/deepspeed.md prints the table: ``python -m triax.compat.deepspeed.ledger``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

VERSION = "0.19.8"  # of DeepSpeed, whose names these are

ALIASES = {
    "runtime.zero": "zero",
    "runtime.pipe": "pipe",
    "runtime.activation_checkpointing.checkpointing": "checkpointing",
    "comm.comm": "comm",
    "accelerator.real_accelerator": "accelerator",
    "accelerator.abstract_accelerator": "accelerator",
    "profiling.flops_profiler.profiler": "profiling.flops_profiler",
    "zero.partition_parameters": "zero",
}

PRESENT = {
    "": {
        "": "PipelineModule",
        "compat.deepspeed.arguments": "add_config_arguments init_distributed",
        "compat.deepspeed.context": "initialize",
        "compat.deepspeed.ledger": "__version__=VERSION version=VERSION",
        "compat.deepspeed.modules": "install",
        "data.dataloader": "RepeatingLoader",
        "compat.deepspeed.engine": ("DeepSpeedConfigError DeepSpeedEngine PipelineEngine=DeepSpeedPipelineEngine"),
    },
    "comm": {
        "compat.deepspeed.arguments": "init_distributed",
        "compat.deepspeed.comm": "log_summary",
    },
    "moe": {"compat.deepspeed.moe": "layer"},
    "moe.layer": {"compat.deepspeed.moe.layer": "MoE"},
    "pipe": {"": "PipelineModule LayerSpec TiedLayerSpec"},
    "pipe.engine": {"compat.deepspeed.engine": "PipelineEngine=DeepSpeedPipelineEngine"},
    "pipe.module": {"": "PipelineModule LayerSpec TiedLayerSpec"},
    "profiling.flops_profiler": {"monitor.profiler": "FlopsProfiler get_model_profile"},
    "runtime.dataloader": {"data.dataloader": "RepeatingLoader"},
    "pipe.topology": {"compat.deepspeed.engine": "PipelineParallelGrid=ParallelGrid"},
    "runtime.engine": {"compat.deepspeed.engine": "DeepSpeedEngine"},
    "runtime.lr_schedules": {
        "optim.lr_schedules": "LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR",
    },
    "utils": {"data.dataloader": "RepeatingLoader"},
    "utils.timer": {
        "compat.deepspeed.timers": "SynchronizedWallClockTimer=WallClockTimers ThroughputTimer",
    },
    "zero": {"compat.deepspeed.zero": "GatheredParameters ZeroParamStatus"},
}

HYBRID = (
    "triax has no hybrid engine: train with initialize, and generate with triax.init_inference over the engine's module"
)
KERNELS = (
    "triax has no kernels of its own for a transformer's layer: use the layers of triax.models, or "
    "torch.nn.functional.scaled_dot_product_attention and torch.compile"
)
INJECTION = (
    "triax does not replace a model's layers by kernels: triax.parallelize(model, grid, plan) shards the layers of any "
    "module, and triax.hf_layers those of a transformers model"
)
FASTGEN = "triax has no FastGen: init_inference and triax.InferenceEngine generate with continuous batches"
TUNER = "triax does not tune configurations by trial runs: triax plan compares layouts by formulas"

ABSENT = {
    "": {HYBRID: "DeepSpeedHybridEngine", INJECTION: "replace_transformer_layer"},
}

ABSENT_MODULES = {
    "autotuning": TUNER,
    "inference.v2": FASTGEN,
    "model_implementations": KERNELS,
    "module_inject": INJECTION,
    "ops.transformer": KERNELS,
    "runtime.hybrid_engine": HYBRID,
}


class Place(NamedTuple):
    """Place of a name in triax.

    Attributes:
        module: the module, without ``triax.``.
        name: the name in it.
    """

    module: str
    name: str


def canonical(name: str) -> str:
    """Return the dotted name with DeepSpeed's second paths replaced by the first ones."""
    for second, first in ALIASES.items():
        if name == second or name.startswith(f"{second}."):
            return canonical(first + name.removeprefix(second))
    return name


@cache
def _answers() -> dict[str, Place | str]:
    found: dict[str, Place | str] = {}
    for module, places in PRESENT.items():
        for place, names in places.items():
            for name in names.split():
                theirs, _, ours = name.partition("=")
                found[f"{module}.{theirs}".lstrip(".")] = Place(place, ours or theirs)
    for module, sentences in ABSENT.items():
        for sentence, names in sentences.items():
            found.update((f"{module}.{name}".lstrip("."), sentence) for name in names.split())
    return found


@cache
def _modules() -> set[str]:
    """The modules that triax has, with their packages, and the packages of those that it does not have."""
    paths = [module.split(".") for module in (*PRESENT, *ABSENT)]
    paths += [module.split(".")[:-1] for module in ABSENT_MODULES]
    return {".".join(path[:stop]) for path in paths for stop in range(1, len(path) + 1)} - {""}


def is_module(name: str) -> bool:
    """Return True if triax has a module of this name of DeepSpeed's."""
    return name in _modules()


def answer(name: str) -> Place | str | None:
    """Return the place of a name in triax, or the sentence that it raises. None: a module, or an unknown name.

    Args:
        name: dotted and canonical, without ``deepspeed.``.
    """
    found = _answers().get(name)
    if found is not None or is_module(name):
        return found
    module = name
    while module:
        if module in ABSENT_MODULES:
            return ABSENT_MODULES[module]
        module = module.rpartition(".")[0]
    return _answers().get(f"{name.rpartition('.')[0]}.*".lstrip("."))


def names(module: str) -> list[str]:
    """Return the names of a module that triax has, sub-modules too."""
    start = f"{module}." if module else ""
    found = [name for name, place in _answers().items() if isinstance(place, Place)]
    found += _modules()
    return [name.removeprefix(start) for name in found if name.startswith(start) and "." not in name[len(start) :]]


def rows() -> Iterator[tuple[str, str, str]]:
    """Return the table's rows: module of DeepSpeed, names, answer."""
    for module in sorted({*PRESENT, *ABSENT, *ABSENT_MODULES}):
        for place, present in PRESENT.get(module, {}).items():
            yield module, present, place
        for sentence, absent in ABSENT.get(module, {}).items():
            yield module, absent, sentence
        if module in ABSENT_MODULES:
            yield module, "*", ABSENT_MODULES[module]
