"""``initialize``, which registers its engines for DeepSpeed's functions that take no engine; the grid of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ReferenceType, WeakValueDictionary, ref

import torch
from torch import nn
from torch.utils.data import DataLoader

from ...config.schema import Config
from ...engine.base import Engine
from ...engine.initialize import initialize as make_engine
from ...engine.setup.arguments import config_source
from ...engine.setup.check import read_config
from ...grid import Grid
from ...grid.megatron import grid_of_mpu
from ...grid.random_states import RandomStates
from ...pipe.module import PipelineModule
from ...pipe.on_grid import on_grid
from ...pipe.recompute.calls import RecomputeCalls
from ...tensor_parallel.megatron_layouts import lay_out_megatron
from .engine import DeepSpeedConfigError, DeepSpeedEngine, DeepSpeedPipelineEngine, deepspeed_errors

PERSISTENCE_THRESHOLD = 100_000  # DeepSpeed's default; triax's own is 0


class DeepSpeedContext:
    """Objects that DeepSpeed's functions and layers find without an argument, because its API is global.

    Attributes:
        engines: engines by id, in the order of their creation, which is the same on every rank.
        grid: the grid that layers with experts or ``tp_model_init`` have made, or None.
        accelerator: the object that ``get_accelerator`` returns, made when it is first asked for.
        random: the random states that ``checkpointing.checkpoint`` repeats in the second run.
        recompute: what ``checkpointing.checkpoint`` calls, made when it is first called.
        recompute_options: its options, set by ``checkpointing.configure``; None before.
    """

    accelerator: Any = None
    recompute: RecomputeCalls | None = None
    recompute_options: dict[str, bool] | None = None

    def __init__(self) -> None:
        self.engines: WeakValueDictionary[int, Engine] = WeakValueDictionary()
        self.random = RandomStates()
        self._grid: ReferenceType[Grid] | None = None

    @property
    def grid(self) -> Grid | None:
        """The grid that layers or ``tp_model_init`` have made, if it is in use and not closed."""
        grid = None if self._grid is None else self._grid()
        return None if grid is None or (grid.size > 1 and grid.world.group is None) else grid

    def keep_grid(self, grid: Grid, owner: object) -> None:
        """Let ``initialize`` take this grid, for as long as its owner, a module, exists."""
        object.__setattr__(owner, "_triax_grid", grid)
        self._grid = ref(grid)

    def expert_grid(self, size: int) -> Grid:
        """Return the grid of layers whose experts are spread over ``size`` ranks, and make it if there is none yet.

        Collective when it makes the grid.

        Raises:
            ValueError: an earlier layer has asked for another size.
        """
        grid = self.grid
        if grid is None:
            grid = Grid(expert=size)
            self._grid = ref(grid)
        if grid.expert.size != size:
            raise ValueError(
                f"ep_size is {size}, but an earlier layer has spread its experts over {grid.expert.size} ranks: give "
                "all layers the same ep_size"
            )
        return grid


# The one context of this adapter.
CONTEXT = DeepSpeedContext()


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: tuple[int, ...] | None = None,
    config_params: Any = None,
    *,
    grid: Grid | None = None,
) -> tuple[Any, Any, Any, Any]:
    """Make an engine, as ``triax.initialize``, with DeepSpeed's arguments in DeepSpeed's order.

    Args:
        args, model, optimizer, model_parameters, training_data, lr_scheduler, collate_fn, config, config_params: as
            ``triax.initialize``.
        distributed_port, dist_init_required: without effect.
        mpu: Megatron's object of process groups, whose sizes and groups make the grid of a plain module. Parameters
            that Megatron marks as sharded are shards here too.
        mesh_param: sizes of the data and of the context axis (DeepSpeed's mesh of replicas and sequence shards).
        grid: triax's own: the grid of a plain module.

    Returns:
        engine, optimizer, dataloader, lr_scheduler: a ``DeepSpeedEngine`` or a ``DeepSpeedPipelineEngine``.

    Raises:
        DeepSpeedConfigError: a ``ConfigError``, ``ValueError`` and ``AssertionError``: the configuration, or its
            combination with the other arguments, cannot be used.
    """
    given = config if config is not None else config_params
    if model is None:
        raise DeepSpeedConfigError("initialize was given no model: pass model=, a module of torch's")
    if given is not None and getattr(args, "deepspeed_config", None) is not None:
        raise DeepSpeedConfigError(
            f"two configurations were given, args.deepspeed_config={args.deepspeed_config!r} and config=: leave one out"
        )
    if isinstance(training_data, DataLoader):
        raise DeepSpeedConfigError(
            "training_data is a DataLoader, which reads the same samples on every rank: pass its dataset, "
            "training_data=loader.dataset, and collate_fn=loader.collate_fn"
        )
    make: Any = make_engine
    with deepspeed_errors():
        checked = _with_defaults(read_config(config_source(args, config, config_params)))
        sizes = checked.data_parallel_size, checked.sequence_parallel_size
        if mesh_param is None and all(sizes) and not isinstance(model, PipelineModule):
            mesh_param = sizes  # type: ignore[assignment]  # neither is None
        if grid is None and mpu is not None and not isinstance(model, PipelineModule):
            grid = mpu if isinstance(mpu, Grid) else grid_of_mpu(mpu)
            lay_out_megatron(model, grid)
        elif grid is None and mesh_param is not None:
            grid = Grid(data=mesh_param[0], context=mesh_param[1])
        stages = checked.pipeline.stages or 1
        if stages > 1 and isinstance(model, PipelineModule) and model.grid_is_default:
            model, model_parameters = on_grid(model, Grid(pipe=stages), model_parameters)
        made: tuple[Any, Any, Any, Any] = make(
            args,
            model,
            optimizer,
            model_parameters,
            training_data,
            lr_scheduler,
            collate_fn,
            checked,
            grid=CONTEXT.grid if grid is None else grid,
            _classes=(DeepSpeedPipelineEngine, DeepSpeedEngine),
        )
    made[0].mpu = mpu
    CONTEXT.engines[id(made[0])] = made[0]
    return made


def _with_defaults(config: Config) -> Config:
    """Fill in DeepSpeed's defaults where triax has others: parameters that stay whole in stage 3, AdamW's decay."""
    zero, optimizer = config.zero_optimization, config.optimizer
    if zero.stage == 3 and "stage3_param_persistence_threshold" not in zero.model_fields_set:
        zero = zero.model_copy(update={"stage3_param_persistence_threshold": PERSISTENCE_THRESHOLD})
    if optimizer is not None and optimizer.type.lower() == "adamw" and not optimizer.params.get("torch_adam"):
        optimizer = optimizer.model_copy(update={"params": {"weight_decay": 0.0, **optimizer.params}})
    return config.model_copy(update={"zero_optimization": zero, "optimizer": optimizer})
