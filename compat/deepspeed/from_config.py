"""``triax.initialize``: from a model and a configuration in DeepSpeed's JSON to an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from ...base.checks import check_count
from ...base.errors import ConfigError
from ...base.option_error import Note, OptionError
from ...data.dataloader import Loader, TokenLoader
from ...engine.base import Engine
from ...engine.keywords import Collate, Samples, Trained
from ...engine.module_engine import ModuleEngine
from ...engine.optim import optimizers, schedulers
from ...engine.pipeline_engine import PipelineEngine
from ...engine.setup import arguments
from ...engine.setup.check_names import try_names
from ...engine.setup.rank_consistency import require_same_settings
from ...engine.setup.tuning import is_searched, search_sizes, write_results
from ...grid import Grid
from ...options.batch import BatchSizes
from ...options.engine import EngineOptions
from ...pipe.module import PipelineModule
from ...pipe.program.schedule import Schedule
from ...pipe.schedules.choose import require_schedule
from .config.document import resolved
from .config.optimizer_names import native_optimizer
from .config.read import Section, checked_section
from .config.table import key_of, keys
from .config.to_options import notes_of, options_of, parse_config
from .parameter_marks import mark_parameters


def read_config(source: Section | Mapping[str, Any] | str | Path) -> Section:
    """Return a checked configuration from a dict, or from the path of a JSON file (with comments, if it has any).

    An optimizer and a schedule by name take a few steps over one number.

    Raises:
        ConfigError: a key that does not exist (the nearest that does is named), a value that cannot be, or what
            triax does not support; the message says what to write instead.
    """
    if isinstance(source, Section):
        return source
    config = parse_config(source)
    try:
        try_names(options_of(config))
    except OptionError as error:
        raise ConfigError(error.spelled(key_of)) from error
    return config


def resolve_config(config: Section, batch: BatchSizes) -> dict[str, Any]:
    """Return the configuration with every default filled in, those of its optimizer and scheduler too."""
    values = resolved(config, batch)
    if config.optimizer is not None:
        named = native_optimizer(config.optimizer.type, config.optimizer.params)
        values["optimizer"] = optimizers.resolved(named.type, named.arguments)
    if config.scheduler is not None:
        values["scheduler"] = schedulers.resolved(config.scheduler.type, config.scheduler.params)
    return values


class ConfiguredEngine(Engine):
    """Base class of engines that ``initialize`` makes, from a configuration in DeepSpeed's JSON.

    Args:
        model: the model.
        config: the checked configuration.
        options: its options, and those given in place of its own.
        arguments: further arguments of ``Engine``.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return a member under DeepSpeed's name, or the module's: a type checker does not know them."""

    def __init__(self, model: nn.Module, config: Section, options: EngineOptions, **arguments: Any) -> None:
        self._given = config
        self._make(model, options, **arguments)

    @property
    def config(self) -> Section:
        """The configuration, with the batch sizes of the engine."""
        batch = self.batch
        return self._given.changed(
            train_batch_size=batch.train,
            train_micro_batch_size_per_gpu=batch.micro,
            gradient_accumulation_steps=batch.accumulation,
        )

    @config.setter
    def config(self, value: Section) -> None:
        self._given = value

    def _built(self) -> None:
        super()._built()
        if self.zero_optimization_stage() == 3:
            mark_parameters(self.module.parameters(), self.data_axis)

    def _notes(self) -> list[Note]:
        return [Note("", note) for note in notes_of(self._given)]

    def settings(self, given: bool = False) -> dict[str, Any]:
        """Return the configuration, as JSON has it."""
        if not hasattr(self, "optimizer"):  # it is compared over the ranks before the engine is made
            return self._given.plain()
        if given:
            return self._given.plain(given=True)
        return resolve_config(self.config, self.batch)

    def train_batch_size(self) -> int:
        """Return the samples per step, over all replicas."""
        return self.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples per microbatch."""
        return self.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Return the microbatches per step and replica."""
        return self.batch.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return samples per step, samples per microbatch, and microbatches per step and replica."""
        return self.batch.train, self.batch.micro, self.batch.accumulation

    def set_train_batch_size(self, train_batch_size: int, micro: int | None = None) -> None:
        """Set the samples per step from the next step on, as ``Engine.set_batch_size``."""
        check_count("set_train_batch_size", train_batch_size=train_batch_size)
        if micro is not None:
            check_count("set_train_batch_size", micro=micro)
        self.set_batch_size(train_batch_size, micro)

    @property
    def local_rank(self) -> int:
        """Rank of this process on its host, the launcher's ``LOCAL_RANK``. For ``tensor.to``, use ``engine.device``."""
        return self.grid.local_rank

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        pin_memory: bool = True,
        collate_fn: Collate | None = None,
        num_local_io_workers: int | None = None,
    ) -> Loader | TokenLoader:
        """Return a loader of this replica's microbatches, in an order that depends on the configuration's seed alone.

        Args:
            dataset: a dataset with a length, or an ``IterableDataset``, which has its own order.
            pin_memory: copy microbatches to pinned memory, as torch's loader does. Ignored without a GPU.
            collate_fn: function that makes a microbatch of a list of samples.
            num_local_io_workers: number of processes that read ahead. None or 0: this process reads.
        """
        return self.make_loader(dataset, collate_fn, num_local_io_workers or 0, pin_memory)

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return self.lr

    def get_mom(self) -> list[Any]:
        """Return the betas, or the momentum, of each parameter group; 0 for a group that has neither."""
        groups = self.optimizer.param_groups if self.optimizer else []
        return [group.get("betas", group.get("momentum", 0.0)) for group in groups]

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's whole gradient before clipping, as ``Engine.grad_norm``."""
        return self.grad_norm

    def gradient_clipping(self) -> float:
        """Return the limit of the global gradient norm; 0: no limit."""
        return self.options.clip or 0.0

    def wall_clock_breakdown(self) -> bool:
        """Return True if every step is recorded."""
        return self.options.monitor.breakdown

    def zero_optimization(self) -> bool:
        """Return True if ZeRO's stage is above 0."""
        return self.options.zero.stage != 0

    def zero_optimization_stage(self) -> int:
        """Return ZeRO's stage, 0 to 3."""
        return self.data_axis.options.stage

    def fp16_enabled(self) -> bool:
        """Return True if weights are float16."""
        return self.options.precision.weights == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Return True if weights are bfloat16."""
        return self.options.precision.weights == "bf16"

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True if this microbatch is the last one of a step."""
        return self.is_last_microbatch()

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "model.safetensors", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write unsharded weights and buffers to one safetensors file, in fp16 or bf16. Collective.

        The dtype is that of the engine's weights under ``fp16`` and ``bf16``, else bfloat16. Nothing is gathered: every
        rank writes its boxes into the file.

        Args:
            save_dir: a folder that every rank sees.
            save_filename: name of the file. Its ending becomes ``.safetensors``, because nothing is pickled.
            exclude_frozen_parameters: leave out parameters that are not trained.

        Raises:
            CheckpointError: on every rank, if a rank could not write.
            ConfigError: on every rank, if folder or file is no path.
        """
        with self.all_or_none("save_16bit_model"):
            self.data_axis.enter("calls save_16bit_model")
            self.checkpointer.export(save_dir, save_filename, exclude_frozen_parameters)
            return True


class ConfiguredPipelineEngine(ConfiguredEngine, PipelineEngine):
    """``PipelineEngine`` of ``initialize``."""


class ConfiguredModuleEngine(ConfiguredEngine, ModuleEngine):
    """``ModuleEngine`` of ``initialize``."""

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether this microbatch is the last one of a step, as ``ModuleEngine.set_last_microbatch``."""
        self.set_last_microbatch(is_boundary)


@overload
def initialize(  # type: ignore[overload-overlap]  # a PipelineModule is an nn.Module too
    args: Any = ...,
    *,
    model: PipelineModule,
    optimizer: Any = ...,
    model_parameters: Trained | None = ...,
    training_data: Any = ...,
    lr_scheduler: Any = ...,
    collate_fn: Collate | None = ...,
    config: Any = ...,
    config_params: Any = ...,
    grid: Grid | None = ...,
    schedule: str | Schedule | None = ...,
    mpu: Any = ...,
    distributed_port: int | None = ...,
    dist_init_required: bool | None = ...,
) -> tuple[
    ConfiguredPipelineEngine, torch.optim.Optimizer | None, DataLoader[Any] | TokenLoader | None, LRScheduler | None
]: ...


@overload
def initialize(
    args: Any = ...,
    model: nn.Module | None = ...,
    optimizer: Any = ...,
    model_parameters: Trained | None = ...,
    training_data: Any = ...,
    lr_scheduler: Any = ...,
    collate_fn: Collate | None = ...,
    config: Any = ...,
    config_params: Any = ...,
    *,
    grid: Grid | None = ...,
    mpu: Any = ...,
    distributed_port: int | None = ...,
    dist_init_required: bool | None = ...,
) -> tuple[ConfiguredModuleEngine, torch.optim.Optimizer | None, Loader | TokenLoader | None, LRScheduler | None]: ...


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
    model_parameters: Trained | None = None,
    training_data: Samples | None = None,
    lr_scheduler: LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    collate_fn: Collate | None = None,
    config: Section | Mapping[str, Any] | str | Path | None = None,
    config_params: Section | Mapping[str, Any] | str | Path | None = None,
    *,
    grid: Grid | None = None,
    schedule: str | Schedule | None = None,
    mpu: Any = None,
    distributed_port: int | None = None,
    dist_init_required: bool | None = None,
) -> tuple[Any, torch.optim.Optimizer | None, DataLoader[Any] | TokenLoader | None, LRScheduler | None]:
    """Make an engine. Every rank calls this, with the same arguments.

    >>> config = {"train_batch_size": 2, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    >>> engine, optimizer, _, _ = triax.initialize(model=nn.Linear(4, 1), config=config)
    >>> loss = engine(torch.ones(2, 4)).square().mean()
    >>> engine.backward(loss).equal(loss)
    True
    >>> engine.step()
    >>> engine.global_steps, engine.get_lr()
    (1, [0.1])

    Args:
        args: object whose ``deepspeed_config`` is the path of the configuration, used if ``config`` is not given.
        model: a ``PipelineModule``, for a ``PipelineEngine`` and its ``train_batch``; or any other ``nn.Module``, for a
            ``ModuleEngine`` and DeepSpeed's loop of forward, ``backward`` and ``step``, which moves to the grid's
            device.
        optimizer: a torch optimizer over the model's parameters (the engine makes another of its class and options for
            flat parameters), or a function from parameter groups to an optimizer. None: ``config["optimizer"]``.
        model_parameters: the parameters to train, or parameter groups; by default all that require gradients.
        training_data: a dataset of ``(inputs, labels)``; its order depends only on the configuration's seed.
        lr_scheduler: a function from the optimizer to a torch scheduler, or a scheduler over ``optimizer``; it is
            stepped after each step. None: ``config["scheduler"]``.
        collate_fn: batches samples in the data loader, as in torch.
        config: a dict, or the path of a JSON file, in DeepSpeed's dialect: docs/config.md.
        config_params: an older name of ``config``.
        grid: the grid of a plain module; None: every process is a replica. A ``PipelineModule`` has its own.
        schedule: the pipeline schedule of a ``PipelineModule``, in place of the configuration's ``pipeline.schedule``:
            a ``Schedule`` for this grid's ranks and microbatches, or a name. If the model was given no ``chunks``, its
            list is cut into the stages that the schedule needs.
        mpu: refused: ``grid`` takes its place.
        distributed_port, dist_init_required: arguments of DeepSpeed without effect. The grid makes the process group
            from the launcher's environment, if there is none yet.

    Returns:
        engine, optimizer, dataloader, lr_scheduler. The last three are None if there is none.

    Raises:
        ConfigError: the configuration, or its combination with the other arguments, cannot be used.
        TypeError: an argument of the wrong kind; the message says what to pass.
    """
    engine = make_engine(
        (ConfiguredPipelineEngine, ConfiguredModuleEngine),
        model,
        config_source(args, config, config_params),
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        collate_fn=collate_fn,
        grid=grid,
        schedule=schedule,
        mpu=mpu,
    )
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def make_engine(
    kinds: tuple[type[ConfiguredEngine], type[ConfiguredEngine]],
    model: Any,
    config: Any,
    *,
    optimizer: Any,
    model_parameters: Trained | None,
    training_data: Samples | None,
    lr_scheduler: Any,
    collate_fn: Collate | None,
    grid: Grid | None,
    schedule: str | Schedule | None = None,
    mpu: Any = None,
) -> Any:
    """Make an engine of the first of ``kinds`` for a ``PipelineModule``, else of the second; as ``initialize``."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, not an nn.Module: pass model=, a module of torch's")
    arguments.check_arguments(
        "initialize", optimizer=optimizer, model_parameters=model_parameters, collate_fn=collate_fn, grid=grid
    )
    checked = parse_config(config)
    if schedule is not None:
        checked = with_schedule(checked, schedule, model)
    kind: Any = kinds[0] if isinstance(model, PipelineModule) else kinds[1]
    try:
        grid = choose_grid(model, grid, mpu, checked)
        check_grid(grid, checked)
        given = {
            "optimizer": optimizer,
            "lr_scheduler": lr_scheduler,
            "schedule": schedule if isinstance(schedule, Schedule) else None,
        }
        options = options_of(checked, grid.replicas)
        options = options.changed(**{name: value for name, value in given.items() if value is not None})
        parameters = None if model_parameters is None else list(model_parameters)
        data: Any = {"parameters": parameters, "training_data": training_data, "collate_fn": collate_fn}
        if is_searched(model, options, training_data):
            checked, options = _tuned(model, checked, options, data)
        return kind(model, checked, options, grid=grid, **data)
    except OptionError as error:
        raise ConfigError(error.spelled(key_of)) from error


def _tuned(
    model: PipelineModule, config: Section, options: EngineOptions, data: Mapping[str, Any]
) -> tuple[Section, EngineOptions]:
    """Return a configuration and its options with the sizes that "auto" and ``autotuning`` ask for. Collective.

    Args:
        model, config, options: the model, its configuration and options.
        data: further arguments of ``search_sizes``.
    """
    require_same_settings(model.grid, config.plain(), options.schedule.value)
    section = config.autotuning
    tuning = None if options.tuning is None else options.tuning.changed(results=None)
    tuned, results = search_sizes(PipelineEngine, model, options.changed(tuning=tuning), **data)
    made = config.changed(
        train_batch_size=tuned.batch.size,
        train_micro_batch_size_per_gpu=tuned.batch.microbatch,
        gradient_accumulation_steps=tuned.batch.microbatches,
        zero_optimization=config.zero_optimization.changed(stage=tuned.zero.stage),
        autotuning=checked_section(section.table, {"enabled": False}),
    )
    if section.enabled and section.results_dir is not None and model.grid.rank == 0:
        write_results(Path(section.results_dir), "ds_config_optimal.json", made.plain(given=True), results)
    return made, tuned


def config_source(args: Any, config: Any, config_params: Any) -> Any:
    """Return the configuration that was passed under one of its three names."""
    if config is not None and config_params is not None:
        raise ConfigError("config_params is an older name of config, and both were given: pass only config")
    given = config if config is not None else config_params
    source = given
    for name in ("deepspeed_config", "deepscale_config"):  # the second is DeepSpeed's own older name
        source = getattr(args, name, None) if source is None else source
    if source is None:
        option = ", or start the script with --deepspeed_config FILE" if hasattr(args, "deepspeed_config") else ""
        raise ConfigError(
            f"initialize was given no configuration: pass config=, a dict or the path of a JSON file{option}"
        )
    return source


def with_schedule(config: Section, schedule: str | Schedule, model: nn.Module) -> Section:
    """Return the configuration with the name of the schedule that was given to ``initialize``.

    Raises:
        ConfigError: there is no such schedule, the configuration names another one, or the model has no stages.
    """
    if not isinstance(schedule, (str, Schedule)):
        raise TypeError(
            f"schedule is a {type(schedule).__name__}: give a name such as '1f1b', or triax.make_schedule(...)"
        )
    name = schedule if isinstance(schedule, str) else schedule.name
    if not isinstance(model, PipelineModule):
        raise ConfigError(
            f"schedule is {name}, but a {type(model).__name__} runs as one stage: list its layers in a "
            "PipelineModule(layers, grid=grid, loss_fn=...), or leave schedule= out"
        )
    section = config.pipeline
    if "schedule" in section.given and section.schedule != name:
        raise ConfigError(
            f"schedule is {name}, but the configuration's pipeline.schedule is {section.schedule}: leave one out"
        )
    if isinstance(schedule, str):
        require_schedule("schedule", name)
    return config.changed(pipeline=section.changed(schedule=name))


def choose_grid(model: nn.Module, grid: Grid | None, mpu: Any, config: Section) -> Grid:
    """Return the grid to train on: the model's own, the one given, or all processes as replicas."""
    if mpu is not None:
        raise ConfigError(
            "mpu was given, but grid takes its place: pass grid=triax.compat.megatron.mpu.grid_of_mpu(mpu)"
        )
    sizes = [config.tensor_parallel.autotp_size, config.tensor_parallel.tp_size]
    wanted = max((size for size in sizes if size), default=1)
    if wanted > 1 and grid is None and not isinstance(model, PipelineModule):
        raise ConfigError(
            f"tensor_parallel asks for {wanted} tensor ranks: make grid = triax.Grid(tensor={wanted}), shard the "
            "model with triax.parallelize(model, grid), and pass initialize(grid=grid)"
        )
    return arguments.choose_grid(model, grid, options_of(config))


def check_grid(grid: Grid, config: Section) -> None:
    """Refuse a grid whose axes have other sizes than the configuration says."""
    for path, key in keys():
        if (axis := key.row.get("axis")) is None:
            continue
        wanted, size = reduce(getattr, path.split("."), config), getattr(grid, axis).size
        if wanted and wanted != size:
            raise ConfigError(
                f"{path} is {wanted}, but the model's grid has {size} on its {axis} axis: make it with "
                f"Grid({axis}={wanted}), or leave the key out"
            )
