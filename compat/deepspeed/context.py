"""``initialize``, which registers its engines for DeepSpeed's functions that take no engine; the grid of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ReferenceType, WeakValueDictionary, ref

import torch
from torch import nn
from torch.utils.data import DataLoader

from ...engine.base import Engine
from ...grid import Grid
from ...grid.randomness.random_states import RandomStates
from ...moe.module_experts import ModuleMoE
from ...pipe.module import PipelineModule
from ...pipe.rebuild import rebuilt
from ...pipe.recompute.calls import RecomputeCalls
from ..megatron.layouts import lay_out_megatron
from ..megatron.mpu import grid_of_mpu
from .autotp import asked_size, is_sharded, shard
from .config.read import Section
from .configuration import read_deepspeed_config, tensor_section
from .engine import DeepSpeedConfigError, DeepSpeedEngine, DeepSpeedPipelineEngine, deepspeed_errors
from .from_config import check_grid, config_source, make_engine

PERSISTENCE_THRESHOLD = 100_000  # DeepSpeed's default; triax's own is 0


class DeepSpeedContext:
    """Objects that DeepSpeed's functions and layers find without an argument, because its API is global.

    Attributes:
        engines: engines by id, in the order of their creation, which is the same on every rank.
        grid: the grid that layers with experts or ``tp_model_init`` have made last, or None.
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
        self._expert_grids: WeakValueDictionary[int, Grid] = WeakValueDictionary()  # by the size of the expert axis

    @property
    def grid(self) -> Grid | None:
        """The grid that layers or ``tp_model_init`` have made last, if it is in use and not closed."""
        return _open(None if self._grid is None else self._grid())

    def latest_grid(self) -> Grid | None:
        """Return the grid of the latest engine, before the first one that of ``grid``; None if there is none."""
        engines = list(self.engines.values())
        return engines[-1].grid if engines else self.grid

    def keep_grid(self, grid: Grid, owner: object) -> None:
        """Let ``initialize`` take this grid, for as long as its owner, a module, exists."""
        object.__setattr__(owner, "_triax_grid", grid)
        self._grid = ref(grid)

    def expert_grid(self, size: int) -> Grid:
        """Return the grid of layers whose experts are spread over ``size`` ranks, and make it if there is none yet.

        Collective when it makes the grid. Models of another size have another grid.
        """
        grid = self.grid
        if grid is None or grid.expert.size != size:
            grid = _open(self._expert_grids.get(size))
        if grid is None:
            grid = self._expert_grids[size] = Grid(expert=size)
        self._grid = ref(grid)
        return grid

    def grid_of(self, model: nn.Module, tensor: int | None = None) -> Grid | None:
        """Return the grid of a model's experts, or the one that ``tp_model_init`` or layers have made last.

        Args:
            model: the model.
            tensor: tensor ranks over which it will be sharded: a grid of another size is then no model's but a sharded
                one's. None: none.

        Raises:
            DeepSpeedConfigError: layers of the model have spread their experts over different numbers of ranks.
        """
        grids = {name: layer.grid for name, layer in model.named_modules() if isinstance(layer, ModuleMoE)}
        sizes = {grid.expert.size: name for name, grid in reversed(grids.items())}
        if len(sizes) > 1:
            listed = " and ".join(f"{name or 'the model'} ep_size={size}" for size, name in sorted(sizes.items()))
            raise DeepSpeedConfigError(
                f"{listed} are layers of one model, whose grid has one expert axis: give all of them the same ep_size"
            )
        grid = next(iter(grids.values()), self.grid)
        if tensor is None or grids or grid is None or grid.tensor.size == tensor or is_sharded(model):
            return grid
        return None


def _open(grid: Grid | None) -> Grid | None:
    """Return a grid that is in use; None if there is none or it was closed."""
    return None if grid is None or (grid.size > 1 and grid.world.group is None) else grid


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
        grid: triax's own: the grid of a plain module. With ``tensor_parallel`` in the configuration and no grid, one is
            made, and the module is sharded over its tensor axis, in place, unless it is sharded already.

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
    with deepspeed_errors():
        source, tensor = tensor_section(config_source(args, config, config_params))
        checked = _with_defaults(read_deepspeed_config(source))
        sizes = checked.data_parallel_size, checked.sequence_parallel_size
        if mesh_param is None and all(sizes) and not isinstance(model, PipelineModule):
            mesh_param = sizes
        if grid is None and mpu is not None and not isinstance(model, PipelineModule):
            grid = mpu if isinstance(mpu, Grid) else grid_of_mpu(mpu)
            lay_out_megatron(model, grid)
        elif grid is None and mesh_param is not None:
            grid = Grid(data=mesh_param[0], context=mesh_param[1], tensor=asked_size(tensor))
        if asked_size(tensor) > 1 and not isinstance(model, PipelineModule):
            if grid is None:
                grid = CONTEXT.grid_of(model, asked_size(tensor)) or Grid(tensor=asked_size(tensor))
            check_grid(grid, checked)
            shard(model, grid, tensor)
        stages = checked.pipeline.stages or 1
        if stages > 1 and isinstance(model, PipelineModule) and model.grid_is_default:
            model, model_parameters = rebuilt(model, Grid(pipe=stages), model_parameters)
        engine = make_engine(
            (DeepSpeedPipelineEngine, DeepSpeedEngine),
            model,
            checked,
            optimizer=optimizer,
            model_parameters=model_parameters,
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            collate_fn=collate_fn,
            grid=CONTEXT.grid_of(model) if grid is None and not isinstance(model, PipelineModule) else grid,
        )
    engine.mpu = mpu
    CONTEXT.engines[id(engine)] = engine
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _with_defaults(config: Section) -> Section:
    """Fill in DeepSpeed's defaults where triax has others: parameters that stay whole in stage 3, AdamW's decay."""
    zero, optimizer = config.zero_optimization, config.optimizer
    if zero.stage == 3 and "stage3_param_persistence_threshold" not in zero.given:
        zero = zero.changed(stage3_param_persistence_threshold=PERSISTENCE_THRESHOLD)
    if optimizer is not None and optimizer.type.lower() == "adamw" and not optimizer.params.get("torch_adam"):
        optimizer = optimizer.changed(params={"weight_decay": 0.0, **optimizer.params})
    return config.changed(zero_optimization=zero, optimizer=optimizer)
