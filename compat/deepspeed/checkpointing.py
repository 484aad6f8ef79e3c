"""DeepSpeed's module ``deepspeed.checkpointing``: a function is run again in the backward pass, and keeps its inputs.

It is triax's recomputation: the second run has the state of all random generators of the first, so dropout is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...base.json_comments import read_json
from ...grid import Grid
from ...grid.randomness.random_states import TENSOR_STATE, RandomStates
from ...pipe.recompute.calls import RecomputeCalls
from ..megatron.mpu import grid_of_mpu
from .context import CONTEXT
from .modules import rest_of

__getattr__, __path__ = rest_of(__name__)
_MODEL_PARALLEL_RNG_TRACKER_NAME = TENSOR_STATE  # GPT-NeoX imports both names
_CUDA_RNG_STATE_TRACKER = CONTEXT.random


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set how ``checkpoint`` keeps inputs. Collective: every rank calls it.

    Args:
        mpu_: Megatron's object, whose groups are the grid; None: every process is a replica.
        deepspeed_config: a configuration, dict or path, whose section ``activation_checkpointing`` has the other
            arguments under its own names.
        partition_activations: each rank of the tensor axis keeps a part of an input that all of them have.
        contiguous_checkpointing, num_checkpoints: without effect: inputs are kept as they are.
        checkpoint_in_cpu: keep inputs in host memory.
        synchronize: wait for the device before and after each run.
        profile: measure the second runs.

    Raises:
        AssertionError: contiguous_checkpointing without partition_activations, or without num_checkpoints.
    """
    config: Any = read_json(deepspeed_config) if isinstance(deepspeed_config, (str, Path)) else deepspeed_config
    section = config.get("activation_checkpointing") or {} if isinstance(config, Mapping) else {}
    given = {
        "partition_activations": (partition_activations, "partition_activations"),
        "contiguous_checkpointing": (contiguous_checkpointing, "contiguous_memory_optimization"),
        "num_checkpoints": (num_checkpoints, "number_checkpoints"),
        "checkpoint_in_cpu": (checkpoint_in_cpu, "cpu_checkpointing"),
        "synchronize": (synchronize, "synchronize_checkpoint_boundary"),
        "profile": (profile, "profile"),
    }
    options = {name: section.get(key) if value is None else value for name, (value, key) in given.items()}
    if options["contiguous_checkpointing"]:
        if not options["partition_activations"]:
            raise AssertionError("contiguous_checkpointing needs partition_activations=True: set it, or leave both out")
        if options["num_checkpoints"] is None:
            raise AssertionError("contiguous_checkpointing needs num_checkpoints, the number of layers: give it")
    grid = Grid() if mpu_ is None else mpu_ if isinstance(mpu_, Grid) else grid_of_mpu(mpu_)
    names = {"partition": "partition_activations", "host": "checkpoint_in_cpu"}
    names |= {"synchronize": "synchronize", "profile": "profile"}
    CONTEXT.recompute_options = {ours: bool(options[theirs]) for ours, theirs in names.items()}
    CONTEXT.recompute = RecomputeCalls(grid, **CONTEXT.recompute_options, random=CONTEXT.random)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return ``function(*args, **kwargs)``. Its inputs are kept, and the backward pass runs it again.

    It works without ``configure`` too.
    """
    if CONTEXT.recompute is None:
        CONTEXT.recompute = RecomputeCalls(Grid(), random=CONTEXT.random)
    return CONTEXT.recompute(function, *args, **kwargs)


non_reentrant_checkpoint = checkpoint


def is_configured() -> bool:
    """Return True if ``configure`` was called."""
    return CONTEXT.recompute_options is not None


def reset() -> None:
    """Do nothing: a function's inputs are freed with its graph."""


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Set ``partition_activations`` from now on."""
    options = {**(CONTEXT.recompute_options or {}), "partition": partition_activation}
    grid = Grid() if CONTEXT.recompute is None else CONTEXT.recompute.grid
    CONTEXT.recompute = RecomputeCalls(grid, **options, random=CONTEXT.random)


def set_num_layers(nlayers: int) -> None:
    """Do nothing: inputs are kept as they are, in no buffer whose size must be known."""


def get_cuda_rng_tracker() -> RandomStates:
    """Return the random states that ``checkpoint`` repeats in the second run."""
    return CONTEXT.random


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device's generator, equal on the ranks of a tensor group, and one state that differs between them.

    ``get_cuda_rng_tracker().fork()`` draws from that state, for dropout within the layers that tensor ranks share.
    """
    CONTEXT.random.seed_tensor_ranks(seed, _tensor_rank())


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed the state that differs between tensor ranks anew."""
    CONTEXT.random.reseed_tensor_ranks(seed, _tensor_rank())


def _tensor_rank() -> int:
    return 0 if CONTEXT.recompute is None else CONTEXT.recompute.grid.tensor.rank
