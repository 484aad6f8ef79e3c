"""``triax.TrainingArguments``: transformers' own, with a configuration in DeepSpeed's dialect.

The file is imported at the first use of the class, because it imports transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...base.errors import ConfigError, describe
from ...base.foreign_tables import answers, read_table
from ...base.json_comments import parse
from ...grid import Grid
from .auto_values import AutoValues, missing_extra

try:
    import accelerate  # noqa: F401 (transformers imports it late, in the Trainer)
    import transformers
except ImportError as missing:
    raise missing_extra(missing) from missing

from .pipeline import check_arguments, in_stages

_AXES = ("pipe", "data", "tensor", "context")

# Arguments without effect on a triax engine, and what to do instead.
_REFUSED = answers(read_table(__file__, "arguments.toml")["refused"])


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """``transformers.TrainingArguments`` with ``triax=``, the configuration, and ``grid=``; see docs/huggingface.md.

    The grid is made in the constructor, before transformers makes a process group. Without a launcher it has one
    process.

    >>> args = triax.TrainingArguments("runs/trainer", triax={"zero_optimization": {"stage": 1}}, grid={"tensor": 1})
    >>> args.grid.coordinate
    Coordinate(pipe=0, data=0, tensor=0)

    Attributes:
        triax: a dict, the path of a JSON file, or JSON. ``deepspeed=`` is accepted in its place: its value is moved to
            ``triax``, and the package DeepSpeed is not needed. None: all values come from the other arguments.
        grid: sizes of axes, such as ``{"pipe": 2, "data": 2}`` (or this as JSON), or a ``triax.Grid``. Sizes that are
            missing come from the configuration's ``pipeline.stages`` and ``tensor_parallel.autotp_size`` (or
            ``tp_size``), and the data axis has the remaining factor of the number of processes. As an attribute it is
            the ``triax.Grid``.
        auto_values: the configuration, with the "auto" values filled in from the arguments.

    Raises:
        ConfigError: the configuration cannot be read; an argument has no effect here, or not with a pipe axis;
            transformers and triax count different numbers of processes.
    """

    triax: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Configuration in DeepSpeed's dialect: a dict, a JSON file's path, or JSON."},
    )

    if TYPE_CHECKING:
        grid: Any = None  # sizes or a Grid as an argument, a Grid as an attribute
        _grid: Grid | None = None
    else:
        grid: dict[str, Any] | str | None = field(
            default=None, metadata={"help": "Sizes of the grid's axes pipe, data, tensor and context: a dict or JSON."}
        )

    _VALID_DICT_FIELDS = [*transformers.TrainingArguments._VALID_DICT_FIELDS, "triax"]  # noqa: RUF012 (as in the base class)

    def __post_init__(self) -> None:
        if self.triax is not None and self.deepspeed is not None:
            raise ConfigError(
                "triax= and deepspeed= are both given, but they are names of one configuration: give one of them"
            )
        if self.triax is None:
            self.triax, self.deepspeed = self.deepspeed, None
        self.auto_values = AutoValues(self.triax if self.triax is not None else {})
        for name, instead in _REFUSED.items():
            if getattr(self, name):
                raise ConfigError(f"{name}={getattr(self, name)!r} is not supported, because {instead}")
        if self.save_only_model and self.load_best_model_at_end:
            raise ConfigError(
                "load_best_model_at_end reads triax's checkpoints, which save_only_model leaves out: give one of them"
            )
        sizes = _sizes(self._grid_sizes, self.auto_values)
        tensor, shared = sizes.get("tensor", 1), any(sizes.get(axis, 1) > 1 for axis in _AXES if axis != "data")
        if shared and getattr(self, "num_generations", None):
            raise ConfigError(
                f"{type(self).__name__} divides its generations among all processes, but the ranks of the axes pipe, "
                "tensor and context need the same ones: use a grid of replicas alone, or triax.methods.grpo_loss and "
                "triax.methods.Rollouts, which generate on any grid (docs/guides/grpo.md)"
            )
        if where := in_stages(sizes):
            check_arguments(self, where)
        if shared and self.train_sampling_strategy == "batch_rebalance":
            raise ConfigError(
                "train_sampling_strategy='batch_rebalance' divides samples among all processes, but the ranks of "
                "the axes pipe, tensor and context need the same samples: use another strategy, or a grid without "
                "these axes"
            )
        stage3 = self.auto_values.get("zero_optimization.stage") == 3
        if self.use_liger_kernel and (tensor > 1 or stage3):
            what = f"{tensor} tensor ranks" if tensor > 1 else "zero_optimization.stage 3"
            raise ConfigError(
                f"use_liger_kernel=True with {what}: its loss reads the head's weight directly, but a rank has only a "
                "shard of it: leave it out, or use 1 tensor rank and stage 0, 1 or 2"
            )
        if self.grid.device.type == "cpu":
            self.use_cpu = True  # else accelerate treats each process of a machine without a GPU as a run of its own
        super().__post_init__()
        self._n_gpu = min(self._n_gpu, 1)  # one process, one device: no DataParallel
        if self.deepspeed_plugin is not None:
            raise ConfigError(
                "the launcher makes accelerate use DeepSpeed: start with triax run or torchrun, and give the "
                "configuration as triax="
            )
        if self.world_size != self.grid.size:
            raise ConfigError(
                f"accelerate counts {self.world_size} processes, and triax {self.grid.size}: start them with triax "
                "run or torchrun"
            )
        config: Any = self.accelerator_config
        if config.split_batches or (shared and config.dispatch_batches):
            raise ConfigError(
                "accelerator_config: split_batches, and with tensor, pipe or context ranks dispatch_batches, would "
                "change which samples a replica gets: leave them out"
            )
        if shared and self.train_sampling_strategy == "batch_rebalance":
            raise ConfigError(
                "train_sampling_strategy=batch_rebalance gives each process rows of its own, but tensor, pipe and "
                "context ranks need the same rows: use group_by_length"
            )
        # The engine finds the last backward pass itself: the loop must not look for a DDP module's no_sync.
        config.gradient_accumulation_kwargs = {**(config.gradient_accumulation_kwargs or {}), "sync_each_batch": True}
        self.auto_values.from_arguments(self, self.grid.data.size)

    @property
    def place_model_on_device(self) -> bool | None:
        """False over stages: the whole model stays in host memory, and each rank builds its stages from it."""
        return False if in_stages(self.grid.topology.sizes) else super().place_model_on_device

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments as transformers does; the grid as the sizes of its axes."""
        entries: dict[str, Any] = super().to_dict()
        entries["grid"] = _axes_of(self.grid)
        return entries

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_grid": None}  # process groups cannot be pickled: a copy makes its own grid

    def _get_grid(self) -> Grid:
        """Grid of the run, made at the first use. Collective."""
        if self._grid is None:
            sizes: dict[str, Any] = _sizes(self._grid_sizes, self.auto_values)
            device = "cpu" if self.use_cpu else None
            self._grid = Grid(**sizes, device=device, timeout=float(self.ddp_timeout))
        return self._grid

    def _set_grid(self, given: Any) -> None:
        self._grid = given if isinstance(given, Grid) else None
        self._grid_sizes: Any = given
        if self._grid is not None:
            self._grid_sizes = _axes_of(self._grid)
            if self._grid.expert.size > 1:
                raise ConfigError(
                    "grid= has an expert axis, which the Trainer does not use: give pipe, data, tensor and context"
                )


def _axes_of(grid: Grid) -> dict[str, int]:
    """Return the sizes of a grid's axes; the context axis only if the grid has one."""
    return {axis: size for axis, size in grid.topology.sizes.items() if axis in _AXES}


def _sizes(given: Any, values: AutoValues) -> dict[str, int]:
    """Return the sizes of axes that ``grid=`` and the configuration ask for.

    Raises:
        ConfigError: another axis, a size that is no positive number, or two sizes that differ.
    """
    given = parse(given, "given as JSON") if isinstance(given, str) else given
    sizes: dict[str, int] = dict(given) if isinstance(given, Mapping) else {}
    wrong = [f"{key} = {describe(size)}" for key, size in sizes.items() if not _is_size(key, size)]
    if wrong or not isinstance(given, Mapping | None):
        what = ", ".join(wrong) or f"a {type(given).__name__}"
        raise ConfigError(
            f'grid= has {what}: give whole numbers for pipe, data, tensor and context, such as {{"pipe": 2}}'
        )
    stages = values.get("pipeline.stages")
    for axis, key, wanted in (
        ("pipe", "pipeline.stages", stages if _is_size("pipe", stages) else 1),
        ("tensor", "tensor_parallel.autotp_size", values.tensor),
    ):
        if wanted > 1 and sizes.setdefault(axis, wanted) != wanted:
            raise ConfigError(f"{key} is {wanted}, but grid= has {axis}={sizes[axis]}: give the size in one of them")
    return sizes


def _is_size(axis: Any, size: Any) -> bool:
    return axis in _AXES and isinstance(size, int) and not isinstance(size, bool) and size > 0


# A property beside the field: the argument is sizes, the attribute is the grid.
TrainingArguments.grid = property(TrainingArguments._get_grid, TrainingArguments._set_grid)
