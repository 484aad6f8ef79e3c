"""triax: training in three dimensions at once, pipe (stages), tensor (shards) and data (ZeRO replicas).

This is the front door and nothing else. `import triax` costs nothing and needs no torch: each name below is
imported from its own module when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import initialize as initialize
    from .engine import profiler as profiler
    from .engine.checkpoint_weights import load_weights as load_weights
    from .engine.comms import log_summary as log_summary
    from .engine.data import RepeatingLoader as RepeatingLoader
    from .engine.engine import Engine as Engine
    from .engine.hf_arguments import TrainingArguments as TrainingArguments
    from .engine.hf_trainer import Trainer as Trainer
    from .engine.inference import InferenceEngine as InferenceEngine
    from .engine.inference import init_inference as init_inference
    from .engine.module_engine import ModuleEngine as ModuleEngine
    from .engine.script import add_config_arguments as add_config_arguments
    from .engine.script import init_distributed as init_distributed
    from .grid.grid import Grid as Grid
    from .grid.layout import Layout as Layout
    from .grid.topology import Topology as Topology
    from .models.config import GPTConfig as GPTConfig
    from .models.config import LlamaConfig as LlamaConfig
    from .models.gpt import gpt as gpt
    from .models.hf import config_from_hf as config_from_hf
    from .models.hf import load_hf as load_hf
    from .models.hf import save_hf as save_hf
    from .models.hf_pipe import CausalLMLoss as CausalLMLoss
    from .models.hf_pipe import hf_layers as hf_layers
    from .models.layers import NextTokenLoss as NextTokenLoss
    from .models.llama import llama as llama
    from .pipe.module import PipelineModule as PipelineModule
    from .pipe.schedules import Schedule as Schedule
    from .pipe.schedules import make_schedule as make_schedule
    from .pipe.simulate import simulate as simulate
    from .pipe.spec import LayerSpec as LayerSpec
    from .pipe.spec import TiedLayerSpec as TiedLayerSpec
    from .pipe.verify import verify as verify
    from .tensor_parallel.embedding import VocabParallelEmbedding as VocabParallelEmbedding
    from .tensor_parallel.linear import ColumnParallelLinear as ColumnParallelLinear
    from .tensor_parallel.linear import RowParallelLinear as RowParallelLinear
    from .tensor_parallel.parallelize import parallelize as parallelize

__version__ = "0.1.0"

_HOMES = {
    "Grid": "grid.grid",
    "Layout": "grid.layout",
    "Topology": "grid.topology",
    "LayerSpec": "pipe.spec",
    "TiedLayerSpec": "pipe.spec",
    "PipelineModule": "pipe.module",
    "Schedule": "pipe.schedules",
    "make_schedule": "pipe.schedules",
    "verify": "pipe.verify",
    "simulate": "pipe.simulate",
    "ColumnParallelLinear": "tensor_parallel.linear",
    "RowParallelLinear": "tensor_parallel.linear",
    "VocabParallelEmbedding": "tensor_parallel.embedding",
    "parallelize": "tensor_parallel.parallelize",
    "GPTConfig": "models.config",
    "LlamaConfig": "models.config",
    "NextTokenLoss": "models.layers",
    "gpt": "models.gpt",
    "llama": "models.llama",
    "load_hf": "models.hf",
    "save_hf": "models.hf",
    "config_from_hf": "models.hf",
    "hf_layers": "models.hf_pipe",
    "CausalLMLoss": "models.hf_pipe",
    "initialize": "engine",
    "RepeatingLoader": "engine.data",
    "load_weights": "engine.checkpoint_weights",
    "Engine": "engine.engine",
    "InferenceEngine": "engine.inference",
    "init_inference": "engine.inference",
    "ModuleEngine": "engine.module_engine",
    "add_config_arguments": "engine.script",
    "init_distributed": "engine.script",
    "log_summary": "engine.comms",
    "profiler": "engine",
    "Trainer": "engine.hf_trainer",
    "TrainingArguments": "engine.hf_arguments",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_HOMES)}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value  # asked once
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOMES))
