"""DeepSpeed's module ``deepspeed.checkpointing``: a function is run again in the backward pass, and keeps its inputs.

It is triax's recomputation: the second run has the state of all random generators of the first, so dropout is exact.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...grid import Grid
from ...grid.random import DropoutState
from ...pipe.recompute.kept_inputs import Inputs
from ...pipe.recompute.recompute import Group, Recompute
from .accelerator import get_accelerator
from .context import CONTEXT
from .grids import grid_of_mpu
from .modules import rest_of

__getattr__, __path__ = rest_of(__name__)

_MODEL_PARALLEL = "model-parallel-rng"


class RandomStates:
    """States of the device's random generator by name: DeepSpeed's and Megatron's ``CudaRNGStatesTracker``."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all states."""
        self._states: dict[str, Tensor] = {}
        self._seeds: set[int] = set()

    def get_states(self) -> dict[str, Tensor]:
        """Return the states by name."""
        return copy.copy(self._states)

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Replace the states."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Begin a state from a seed.

        Raises:
            ValueError: the name or the seed is there already.
        """
        if name in self._states or seed in self._seeds:
            raise ValueError(f"the random state {name!r} of seed {seed} has a name or a seed that is there already")
        self._seeds.add(seed)
        device = get_accelerator()
        before = device.get_rng_state()
        device.manual_seed(seed)
        self._states[name] = device.get_rng_state()
        device.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = _MODEL_PARALLEL) -> Iterator[None]:
        """Context in which random numbers come from a state, which goes on; the generator's own state comes back.

        Raises:
            ValueError: there is no such state.
        """
        if name not in self._states:
            raise ValueError(f"there is no random state {name!r}: call add({name!r}, seed) before fork")
        device = get_accelerator()
        before = device.get_rng_state()
        device.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = device.get_rng_state()
            device.set_rng_state(before)


class Checkpointing:
    """Settings of ``checkpoint``, and the recomputation that they make.

    Args:
        grid: the grid, over whose tensor axis inputs are partitioned if that is asked for.
        options: ``partition_activations``, ``checkpoint_in_cpu``, ``synchronize``, ``profile``, ``mpu``.

    Attributes:
        configured: True after ``configure``.
        random: the random states that a second run repeats.
    """

    def __init__(self, grid: Grid | None = None, random: RandomStates | None = None, **options: Any) -> None:
        self.configured, self.options = grid is not None, options
        self.random = random or RandomStates()
        self.grid, self._recompute = grid, None if grid is None else self._make(grid)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return ``function(*args, **kwargs)``, which the backward pass runs again."""
        recompute = self._recompute
        if recompute is None:
            recompute = self._recompute = self._make(Grid())
        code = getattr(function, "__code__", None)
        place = "" if code is None else f" at line {code.co_firstlineno} of {code.co_filename}"
        name = getattr(function, "__qualname__", type(function).__name__)
        module = (function,) if isinstance(function, nn.Module) else ()
        group = Group(0, 1, True, f"the checkpointed function {name}{place}", (), module)
        return recompute.run_block(group, self._repeating(function), *args, **kwargs)

    def _repeating(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function; in its second run it has the named random states of the first."""
        first: list[dict[str, Tensor]] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            now = self.random.get_states()
            if not first:
                first.append(now)
                return function(*args, **kwargs)
            self.random.set_states(first[0])
            try:
                return function(*args, **kwargs)
            finally:
                self.random.set_states(now)

        return run

    def _make(self, grid: Grid) -> Recompute:
        options = {key: bool(self.options.get(key)) for key in ("synchronize", "profile")}
        recompute = Recompute(grid, DropoutState(0), 1, **options)  # type: ignore[arg-type]  # they are booleans
        on_host = bool(self.options.get("checkpoint_in_cpu"))
        recompute.inputs = Inputs(grid, bool(self.options.get("partition_activations")), on_host, 0)
        return recompute


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
    section = _section(deepspeed_config)
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
    CONTEXT.checkpointing = Checkpointing(grid, _state().random, mpu=mpu_, **options)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return ``function(*args, **kwargs)``. Its inputs are kept, and the backward pass runs it again.

    It works without ``configure`` too.
    """
    return _state().run(function, *args, **kwargs)


non_reentrant_checkpoint = checkpoint


def is_configured() -> bool:
    """Return True if ``configure`` was called."""
    return _state().configured


def reset() -> None:
    """Do nothing: a function's inputs are freed with its graph."""


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Set ``partition_activations`` from now on."""
    state = _state()
    options = {**state.options, "partition_activations": partition_activation}
    CONTEXT.checkpointing = Checkpointing(state.grid, state.random, **options)


def set_num_layers(nlayers: int) -> None:
    """Do nothing: inputs are kept as they are, in no buffer whose size must be known."""


def get_cuda_rng_tracker() -> RandomStates:
    """Return the random states that ``checkpoint`` repeats in the second run."""
    return _state().random


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device's generator, equal on the ranks of a tensor group, and one state that differs between them.

    ``get_cuda_rng_tracker().fork()`` draws from that state, for dropout within the layers that tensor ranks share.
    """
    random = _state().random
    random.reset()
    get_accelerator().manual_seed(seed)
    random.add(_MODEL_PARALLEL, seed + 2718 + _tensor_rank())


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed the state that differs between tensor ranks anew."""
    with _state().random.fork():
        get_accelerator().manual_seed(seed + 2718 + _tensor_rank())


def _state() -> Checkpointing:
    if CONTEXT.checkpointing is None:
        CONTEXT.checkpointing = Checkpointing()
    state: Checkpointing = CONTEXT.checkpointing
    return state


def _tensor_rank() -> int:
    mpu = _state().options.get("mpu")
    if mpu is None:
        return 0
    if isinstance(mpu, Grid):
        return mpu.tensor.rank
    names = ("get_tensor_model_parallel_rank", "get_slice_parallel_rank", "get_model_parallel_rank")
    ask: Callable[[], int] = next(getattr(mpu, name) for name in names if hasattr(mpu, name))
    return ask()


def _section(config: Any) -> Mapping[str, Any]:
    """Return the section ``activation_checkpointing`` of a configuration: a dict, a path, or an object with a dict."""
    found: Any = json.loads(Path(config).read_text()) if isinstance(config, (str, Path)) else config or {}
    section: Mapping[str, Any] = found.get("activation_checkpointing") or {} if isinstance(found, Mapping) else {}
    return section
