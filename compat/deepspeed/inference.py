"""DeepSpeed's ``init_inference``, its configuration and ``tp_model_init``.

A key of the configuration acts, is refused, or is without effect here and says so in one line of the log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...base.errors import ConfigError
from ...base.json_comments import read_json
from ...engine.base import Engine
from ...grid import Grid
from ...inference.int8 import Int8
from ...inference.module_inference import ModuleInference
from ...models.huggingface.parallelize import find_plan, parallelize
from ...pipe.module import PipelineModule
from ...tensor_parallel.plans import Style, plan_of_outputs
from ..megatron.mpu import grid_of_mpu
from .config.read import Section
from .context import CONTEXT
from .engine import DeepSpeedConfigError, DeepSpeedError, deepspeed_errors
from .modules import rest_of
from .section_classes import BaseQuantConfig, DeepSpeedTPConfig, QuantizationConfig, SectionClass, inference_table

__getattr__, __path__ = rest_of(__name__)

_LOGGER = logging.getLogger("triax")
_DTYPES = {
    torch.float16: ("fp16", "float16", "half"),
    torch.float32: ("fp32", "float32", "float"),
    torch.bfloat16: ("bf16", "bfloat16", "bfloat"),
    torch.int8: ("int8",),
}


class DeepSpeedInferenceConfig(SectionClass):
    """Configuration of ``init_inference``.

    ``dtype`` is DeepSpeed's default, float16, on a GPU; elsewhere the model's own unless it is given.
    """

    ROWS = inference_table()

    def __init__(self, **values: Any) -> None:
        if (given := values.get("dtype")) is not None:
            names = {name: dtype for dtype, known in _DTYPES.items() for name in (*known, str(dtype))}
            values["dtype"] = names.get(given, given) if isinstance(given, str) else given
            if values["dtype"] not in _DTYPES:
                raise DeepSpeedConfigError(f"dtype is {given!r}: give one of {', '.join(names)}")
        super().__init__(**values)

    @property
    def tp(self) -> Section:
        """``tensor_parallel``, with the old keys ``mp_size`` and ``mpu``."""
        given: Section = self.tensor_parallel
        size = given.tp_size if given.tp_size > 1 else self.mp_size
        return given.changed(tp_size=size if given.enabled else 1, mpu=given.mpu or self.mpu)

    def check(self) -> None:
        """Log the keys without effect, and refuse those that cannot act.

        Raises:
            DeepSpeedConfigError: a key that cannot act.
        """
        for section in self.walk():
            for name, key in section.table.keys.items():
                if key.status == "idle" and section.values[name] != key.default:
                    _LOGGER.warning("init_inference: %s has no effect, because %s", name, key.doc)
        experts = self.moe.ep_size
        if max(experts, self.ep_size) > 1:
            raise DeepSpeedConfigError(
                f"moe.ep_size is {max(experts, self.ep_size)}, but generation keeps all experts on each rank: leave "
                "ep_size out"
            )
        if self.zero.get("stage", 0):
            raise DeepSpeedConfigError(
                f"zero.stage is {self.zero['stage']}, but init_inference shards no weights: make the engine with "
                'initialize and "zero_optimization", and pass the engine to init_inference'
            )
        if self.save_mp_checkpoint_path or self.checkpoint_config.save_mp_checkpoint_path:
            raise DeepSpeedConfigError(
                "save_mp_checkpoint_path is not possible: a checkpoint of triax loads on any grid. Leave the key out, "
                "and write the model by triax.save_hf"
            )
        quant = self.quant
        if quant.weight.num_bits != 8:
            raise DeepSpeedConfigError(
                f"quant.weight.num_bits is {quant.weight.num_bits}, but weights are quantized in 8 bits: give 8"
            )
        if not quant.qkv.enabled:
            raise DeepSpeedConfigError("quant.qkv.enabled is false, but all linear layers are quantized: leave it out")
        if quant.values != QuantizationConfig().values and self.dtype != torch.int8:
            _LOGGER.warning("init_inference: quant has no effect, because dtype is not int8")
        elif quant.activation.values != BaseQuantConfig().values and quant.activation.enabled:
            _LOGGER.warning("init_inference: quant.activation has no effect, because only weights are quantized")
        if quant.weight.quantized_initialization or quant.weight.post_init_quant:
            raise DeepSpeedConfigError(
                "quant.weight.quantized_initialization and post_init_quant are not possible: dtype int8 quantizes all "
                "linear layers. Leave the two keys out"
            )

    @property
    def int8(self) -> Int8 | None:
        """Options of the quantization, or None without ``dtype`` int8."""
        weight = self.quant.weight
        if self.dtype != torch.int8 or not (self.quant.enabled and weight.enabled):
            return None
        groups = weight.get("q_groups")
        return Int8(groups=groups, symmetric=weight.q_type == "symmetric")


def default_inference_config() -> dict[str, Any]:
    """Return the configuration's keys with their default values."""
    return DeepSpeedInferenceConfig().plain()


def _place(kind: type[SectionClass]) -> str:
    """Return the argument that gives a section, such as ``tensor_parallel=DeepSpeedTPConfig(...)``."""
    outer, _, name = kind.ROWS.path.rpartition(".")
    given = f"{name}={kind.__name__}(...)"
    return f"{outer}={QuantizationConfig.__name__}({given})" if outer else given


def init_inference(model: Any, config: str | Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
    """Make an inference engine, with DeepSpeed's arguments. Collective.

    Args:
        model: a transformers model, any other module, a ``PipelineModule``, or the engine that trains one of them.
        config: a dict, or the path of a JSON file, with the keys of ``DeepSpeedInferenceConfig``.
        kwargs: further keys.

    Returns:
        ``DeepSpeedInferenceEngine``.

    Raises:
        DeepSpeedConfigError: a ``ValueError``: unknown or conflicting keys, or values that cannot act.
    """
    given: dict[str, Any]
    if isinstance(config, DeepSpeedInferenceConfig):
        given = {key: config.values[key] for key in config.given}
    elif isinstance(config, SectionClass):
        kind = type(config)
        raise DeepSpeedConfigError(
            f"config is a {kind.__name__}, which is a section of the configuration: write "
            f"init_inference(model, {_place(kind)})"
        )
    else:
        given = dict(read_json(config) if isinstance(config, str) else config or {})
    for key in given.keys() & kwargs.keys():
        if given[key] != kwargs[key]:
            raise DeepSpeedConfigError(
                f"{key} is {given[key]!r} in config and {kwargs[key]!r} beside it: leave one out"
            )
    try:
        checked = DeepSpeedInferenceConfig(**{**given, **kwargs})
    except ConfigError as error:
        raise DeepSpeedConfigError(f"init_inference: {error}") from error
    checked.check()
    return DeepSpeedInferenceEngine(model, checked)


class DeepSpeedInferenceEngine(ModuleInference):
    """A model for inference: ``ModuleInference``, made with DeepSpeed's configuration, and its times.

    Args:
        model: as for ``init_inference``.
        config: the checked configuration.
    """

    def __init__(self, model: Any, config: DeepSpeedInferenceConfig) -> None:
        with deepspeed_errors():
            trains = isinstance(model, Engine)
            grid = _make_grid(
                config.tp, getattr(model, "grid", None) if trains or isinstance(model, PipelineModule) else None
            )
            dtype, section = config.dtype, config.checkpoint_config
            if dtype == torch.int8 or (dtype is None and not trains):
                dtype = torch.float16 if grid.device.type == "cuda" else None
            super().__init__(
                model,
                grid,
                dtype=dtype,
                checkpoint=section.checkpoint_dir if config.checkpoint is None else config.checkpoint,
                base=config.base_dir or section.base_dir or "",
                int8=config.int8,
                plan=_plan(model, config.injection_policy, grid),
                on_host=config.keep_module_on_host,
                max_length=config.max_out_tokens,
            )
        self._most = config.max_out_tokens
        self._times: list[float] | None = None  # None: not measured

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context of a run of the model, as ``ModuleInference.running``, whose time is measured."""
        begin = time.perf_counter()
        with super().running():
            yield
        if self._times is not None:
            self._times.append((time.perf_counter() - begin) * 1e3)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate, as ``ModuleInference.generate``.

        Raises:
            RuntimeError: the input is longer than ``max_out_tokens``.
        """
        ids = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[1] > self._most:
            raise DeepSpeedError(
                f"the input has {ids.shape[1]} tokens, but max_out_tokens is {self._most}: give "
                f"max_out_tokens={ids.shape[1]} plus the number of new tokens"
            )
        return super().generate(*args, **kwargs)

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Measure the time of each call; ``model_times`` returns them."""
        self._times = []

    def model_times(self) -> list[float]:
        """Return the times of the calls since the last one, in milliseconds."""
        times, self._times = self._times or [], []
        return times

    def destroy(self) -> None:
        """Do nothing: the engine has no state beside the model."""


def tp_model_init(model: nn.Module, tp_size: int, dtype: torch.dtype, config: Any = None, **kwargs: Any) -> nn.Module:
    """Shard a module over ``tp_size`` ranks, in place, for training by ``initialize``, which takes its grid over.

    Args:
        model: a transformers model of a family that ``parallelize`` knows.
        tp_size: size of the tensor axis.
        dtype: the dtype to which it is cast.
        config: without effect: ``initialize`` reads the configuration.
        kwargs: ``tp_group``, the process group of the tensor axis, which must be this grid's.

    Returns:
        The module itself.
    """
    section = DeepSpeedTPConfig(tp_size=tp_size, tp_group=kwargs.pop("tp_group", None))
    if kwargs:
        raise DeepSpeedConfigError(f"tp_model_init has no argument {', '.join(kwargs)}: leave it out")
    grid = _make_grid(section, CONTEXT.grid)
    model = parallelize(model.to(device=grid.device, dtype=dtype), grid)
    CONTEXT.keep_grid(grid, model)
    return model


def _make_grid(section: Section, grid: Grid | None) -> Grid:
    """Return the grid of the tensor-parallel size; ``grid`` is that of the model, if it has one."""
    if grid is None:
        grid = grid_of_mpu(section.mpu) if section.mpu is not None else Grid(tensor=section.tp_size)
    elif section.tp_size not in (1, grid.tensor.size):
        raise DeepSpeedConfigError(
            f"tp_size is {section.tp_size}, but the model's grid has tensor={grid.tensor.size}: make the model with "
            f"triax.Grid(tensor={section.tp_size})"
        )
    group = section.tp_group
    if group is not None and (ranks := tuple(dist.get_process_group_ranks(group))) != grid.tensor.ranks:
        raise DeepSpeedConfigError(
            f"tp_group has the ranks {list(ranks)}, but those of the tensor axis are {list(grid.tensor.ranks)}: leave "
            "tp_group out, or pass mpu"
        )
    return grid


def _plan(module: Any, policy: Mapping[Any, Any] | None, grid: Grid) -> dict[str, Style] | None:
    """Return the plan of an injection policy, which acts where the model's family has none; else None."""
    if policy is None:
        return None
    why = "the model's family has a plan"
    if grid.tensor.size == 1:
        why = "tp_size is 1"
    else:
        try:
            find_plan(module)
        except ValueError:
            named = {cls: (names,) if isinstance(names, str) else tuple(names) for cls, names in policy.items()}
            wrong = [names for names in named.values() if not all(isinstance(name, str) for name in names)]
            if wrong:
                raise DeepSpeedConfigError(
                    f"injection_policy has {wrong[0]!r}: give the names of the layers whose outputs are summed, such "
                    "as ('attention.out', 'mlp.down')"
                ) from None
            return plan_of_outputs(module, named)
    _LOGGER.warning("init_inference: injection_policy has no effect, because %s", why)
    return None
