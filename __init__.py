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
    from .engine.horovod import ProcessSet as ProcessSet
    from .engine.horovod import add_process_set as add_process_set
    from .engine.horovod import cross_rank as cross_rank
    from .engine.horovod import cross_size as cross_size
    from .engine.horovod import global_process_set as global_process_set
    from .engine.horovod import gloo_built as gloo_built
    from .engine.horovod import gloo_enabled as gloo_enabled
    from .engine.horovod import init as init
    from .engine.horovod import is_homogeneous as is_homogeneous
    from .engine.horovod import is_initialized as is_initialized
    from .engine.horovod import local_rank as local_rank
    from .engine.horovod import local_size as local_size
    from .engine.horovod import mpi_built as mpi_built
    from .engine.horovod import mpi_enabled as mpi_enabled
    from .engine.horovod import mpi_threads_supported as mpi_threads_supported
    from .engine.horovod import nccl_built as nccl_built
    from .engine.horovod import rank as rank
    from .engine.horovod import remove_process_set as remove_process_set
    from .engine.horovod import shutdown as shutdown
    from .engine.horovod import size as size
    from .engine.horovod import start_timeline as start_timeline
    from .engine.horovod import stop_timeline as stop_timeline
    from .engine.horovod_compression import Compression as Compression
    from .engine.horovod_moves import allgather as allgather
    from .engine.horovod_moves import allgather_async as allgather_async
    from .engine.horovod_moves import alltoall as alltoall
    from .engine.horovod_moves import alltoall_async as alltoall_async
    from .engine.horovod_moves import broadcast as broadcast
    from .engine.horovod_moves import broadcast_ as broadcast_
    from .engine.horovod_moves import broadcast_async as broadcast_async
    from .engine.horovod_moves import broadcast_async_ as broadcast_async_
    from .engine.horovod_moves import grouped_allgather as grouped_allgather
    from .engine.horovod_moves import grouped_reducescatter as grouped_reducescatter
    from .engine.horovod_moves import reducescatter as reducescatter
    from .engine.horovod_moves import reducescatter_async as reducescatter_async
    from .engine.horovod_ops import Adasum as Adasum
    from .engine.horovod_ops import Average as Average
    from .engine.horovod_ops import Max as Max
    from .engine.horovod_ops import Min as Min
    from .engine.horovod_ops import Product as Product
    from .engine.horovod_ops import Sum as Sum
    from .engine.horovod_ops import allreduce as allreduce
    from .engine.horovod_ops import allreduce_ as allreduce_
    from .engine.horovod_ops import allreduce_async as allreduce_async
    from .engine.horovod_ops import allreduce_async_ as allreduce_async_
    from .engine.horovod_ops import barrier as barrier
    from .engine.horovod_ops import grouped_allreduce as grouped_allreduce
    from .engine.horovod_ops import grouped_allreduce_ as grouped_allreduce_
    from .engine.horovod_ops import grouped_allreduce_async as grouped_allreduce_async
    from .engine.horovod_ops import grouped_allreduce_async_ as grouped_allreduce_async_
    from .engine.horovod_ops import join as join
    from .engine.horovod_ops import poll as poll
    from .engine.horovod_ops import synchronize as synchronize
    from .engine.horovod_optimizer import DistributedOptimizer as DistributedOptimizer
    from .engine.horovod_state import allgather_object as allgather_object
    from .engine.horovod_state import broadcast_object as broadcast_object
    from .engine.horovod_state import broadcast_optimizer_state as broadcast_optimizer_state
    from .engine.horovod_state import broadcast_parameters as broadcast_parameters
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
    # Horovod's names: `import triax as hvd`.
    "init": "engine.horovod",
    "shutdown": "engine.horovod",
    "is_initialized": "engine.horovod",
    "rank": "engine.horovod",
    "size": "engine.horovod",
    "local_rank": "engine.horovod",
    "local_size": "engine.horovod",
    "cross_rank": "engine.horovod",
    "cross_size": "engine.horovod",
    "is_homogeneous": "engine.horovod",
    "mpi_threads_supported": "engine.horovod",
    "mpi_enabled": "engine.horovod",
    "mpi_built": "engine.horovod",
    "gloo_enabled": "engine.horovod",
    "gloo_built": "engine.horovod",
    "nccl_built": "engine.horovod",
    "start_timeline": "engine.horovod",
    "stop_timeline": "engine.horovod",
    "ProcessSet": "engine.horovod",
    "global_process_set": "engine.horovod",
    "add_process_set": "engine.horovod",
    "remove_process_set": "engine.horovod",
    "Compression": "engine.horovod_compression",
    "Average": "engine.horovod_ops",
    "Sum": "engine.horovod_ops",
    "Adasum": "engine.horovod_ops",
    "Min": "engine.horovod_ops",
    "Max": "engine.horovod_ops",
    "Product": "engine.horovod_ops",
    "allreduce": "engine.horovod_ops",
    "allreduce_async": "engine.horovod_ops",
    "allreduce_": "engine.horovod_ops",
    "allreduce_async_": "engine.horovod_ops",
    "grouped_allreduce": "engine.horovod_ops",
    "grouped_allreduce_async": "engine.horovod_ops",
    "grouped_allreduce_": "engine.horovod_ops",
    "grouped_allreduce_async_": "engine.horovod_ops",
    "synchronize": "engine.horovod_ops",
    "poll": "engine.horovod_ops",
    "barrier": "engine.horovod_ops",
    "join": "engine.horovod_ops",
    "allgather": "engine.horovod_moves",
    "allgather_async": "engine.horovod_moves",
    "grouped_allgather": "engine.horovod_moves",
    "broadcast": "engine.horovod_moves",
    "broadcast_async": "engine.horovod_moves",
    "broadcast_": "engine.horovod_moves",
    "broadcast_async_": "engine.horovod_moves",
    "alltoall": "engine.horovod_moves",
    "alltoall_async": "engine.horovod_moves",
    "reducescatter": "engine.horovod_moves",
    "reducescatter_async": "engine.horovod_moves",
    "grouped_reducescatter": "engine.horovod_moves",
    "broadcast_parameters": "engine.horovod_state",
    "broadcast_optimizer_state": "engine.horovod_state",
    "broadcast_object": "engine.horovod_state",
    "allgather_object": "engine.horovod_state",
    "DistributedOptimizer": "engine.horovod_optimizer",
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
