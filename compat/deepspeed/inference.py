"""DeepSpeed's ``init_inference``, its configuration and ``tp_model_init``.

A key of the configuration acts, is refused, or is without effect here and says so in one line of the log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from torch import Tensor, nn

from ...base.json_comments import read
from ...engine.base import Engine
from ...grid import Grid
from ...inference.int8 import Int8
from ...inference.module_inference import ModuleInference
from ...models.huggingface.parallelize import find_plan, parallelize
from ...pipe.module import PipelineModule
from ...tensor_parallel.plans import Style, plan_of_outputs
from ..megatron.mpu import grid_of_mpu
from .context import CONTEXT
from .engine import DeepSpeedConfigError, DeepSpeedError, deepspeed_errors
from .modules import rest_of

__getattr__, __path__ = rest_of(__name__)

_LOGGER = logging.getLogger("triax")
_DTYPES = {
    torch.float16: ("fp16", "float16", "half"),
    torch.float32: ("fp32", "float32", "float"),
    torch.bfloat16: ("bf16", "bfloat16", "bfloat"),
    torch.int8: ("int8",),
}
# Keys without effect, and why.
_IDLE = {
    "replace_with_kernel_inject": "triax has no kernels to inject, and attention is torch's fused one",
    "enable_cuda_graph": "triax captures no CUDA graphs",
    "use_triton": "triax has no Triton kernels",
    "triton_autotune": "triax has no Triton kernels",
    "triangular_masking": "the model makes its own mask",
    "set_empty_params": "a model on the meta device is filled from the checkpoint in any case",
    "return_tuple": "layers are not replaced and return what they do",
    "training_mp_size": "a checkpoint of triax does not depend on the grid",
    "replace_method": "parallelize replaces the layers",
    "injection_policy_tuple": "injection_policy names the layers",
    "min_out_tokens": "no memory is set aside before a call",
    "transposed_mode": "layers are not replaced",
    "moe_type": "the model's own layers decide",
    "moe_experts": "the model's own layers decide",
    "config": "each key is given by itself",
}


class InferenceSection(BaseModel):
    """Section of the configuration: unknown keys are errors, and keys have DeepSpeed's second names too."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, arbitrary_types_allowed=True)


class DeepSpeedTPConfig(InferenceSection):
    """Section ``tensor_parallel``. ``tp_grain_size`` is without effect: shards are even, or whole heads."""

    enabled: bool = True
    tp_size: int = Field(default=1, ge=1)
    tp_grain_size: int = 64
    mpu: Any = None
    tp_group: Any = None


class DeepSpeedMoEConfig(InferenceSection):
    """Section ``moe``. A model's experts are whole on each rank: ``ep_size`` must be 1."""

    enabled: bool = True
    ep_size: int = 1
    moe_experts: list[int] = Field(default=[1], alias="num_experts")
    type: Literal["standard", "residual"] = "standard"
    ep_mp_group: Any = None
    ep_group: Any = Field(default=None, alias="expert_group")


class BaseQuantConfig(InferenceSection):
    """Section ``quant.weight``: ``q_groups`` groups of the inputs of each output, with a scale each."""

    enabled: bool = True
    num_bits: int = 8
    q_type: Literal["symmetric", "asymmetric"] = "symmetric"
    q_groups: int = Field(default=1, ge=1)
    quantized_initialization: dict[str, Any] = {}
    post_init_quant: dict[str, Any] = {}


class QKVQuantConfig(InferenceSection):
    """Section ``quant.qkv``."""

    enabled: bool = True


class QuantizationConfig(InferenceSection):
    """Section ``quant``, which acts with ``dtype`` int8. Only weights are quantized."""

    enabled: bool = True
    activation: BaseQuantConfig = BaseQuantConfig()
    weight: BaseQuantConfig = BaseQuantConfig()
    qkv: QKVQuantConfig = QKVQuantConfig()


class InferenceCheckpointConfig(InferenceSection):
    """Section ``checkpoint_config``."""

    checkpoint_dir: str | None = None
    save_mp_checkpoint_path: str | None = None
    base_dir: str | None = None


class DeepSpeedInferenceConfig(InferenceSection):
    """Configuration of ``init_inference``, with DeepSpeed's keys and their second names.

    ``dtype`` is DeepSpeed's default, float16, on a GPU; elsewhere the model's own unless it is given.
    """

    replace_with_kernel_inject: bool = Field(default=False, alias="kernel_inject")
    dtype: torch.dtype | None = None
    tensor_parallel: DeepSpeedTPConfig = Field(default=DeepSpeedTPConfig(), alias="tp")
    enable_cuda_graph: bool = False
    use_triton: bool = False
    triton_autotune: bool = False
    zero: dict[str, Any] = {}
    triangular_masking: bool = Field(default=True, alias="tm")
    moe: bool | DeepSpeedMoEConfig = DeepSpeedMoEConfig()
    keep_module_on_host: bool = False
    quant: QuantizationConfig = QuantizationConfig()
    checkpoint: str | dict[str, Any] | None = None
    base_dir: str = ""
    set_empty_params: bool = False
    save_mp_checkpoint_path: str | None = None
    checkpoint_config: InferenceCheckpointConfig = Field(default=InferenceCheckpointConfig(), alias="ckpt_config")
    return_tuple: bool = True
    training_mp_size: int = 1
    replace_method: str = "auto"
    injection_policy: dict[Any, Any] | None = Field(default=None, alias="injection_dict")
    injection_policy_tuple: tuple[Any, ...] | None = None
    config: dict[str, Any] | None = Field(default=None, alias="args")
    max_out_tokens: int = Field(default=1024, alias="max_tokens", gt=0)
    min_out_tokens: int = Field(default=1, alias="min_tokens")
    transposed_mode: bool = False
    mp_size: int = Field(default=1, ge=1)
    mpu: Any = None
    ep_size: int = 1
    ep_group: Any = Field(default=None, alias="expert_group")
    ep_mp_group: Any = Field(default=None, alias="expert_mp_group")
    moe_experts: list[int] = [1]
    moe_type: Literal["standard", "residual"] = "standard"

    @field_validator("dtype", mode="before")
    @classmethod
    def _read_dtype(cls, value: Any) -> Any:
        names = {name: dtype for dtype, known in _DTYPES.items() for name in (*known, str(dtype))}
        found = names.get(value, value) if isinstance(value, str) else value
        if found is not None and found not in _DTYPES:
            raise ValueError(f"{value!r} is not one of {', '.join(names)}")
        return found

    @property
    def tp(self) -> DeepSpeedTPConfig:
        """``tensor_parallel``, with the old keys ``mp_size`` and ``mpu``."""
        given = self.tensor_parallel
        size = given.tp_size if given.tp_size > 1 else self.mp_size
        return given.model_copy(update={"tp_size": size if given.enabled else 1, "mpu": given.mpu or self.mpu})

    def check(self) -> None:
        """Log the keys without effect, and refuse those that cannot act.

        Raises:
            DeepSpeedConfigError: a key that cannot act.
        """
        fields = type(self).model_fields
        for key in self.model_fields_set & set(_IDLE):
            if getattr(self, key) != fields[key].default:
                _LOGGER.warning("init_inference: %s has no effect, because %s", key, _IDLE[key])
        if self.tensor_parallel.tp_grain_size != 64:
            _LOGGER.warning("init_inference: tp_grain_size has no effect, because shards are even or whole heads")
        experts = self.moe.ep_size if isinstance(self.moe, DeepSpeedMoEConfig) else 1
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
        if quant != QuantizationConfig() and self.dtype != torch.int8:
            _LOGGER.warning("init_inference: quant has no effect, because dtype is not int8")
        elif quant.activation != BaseQuantConfig() and quant.activation.enabled:
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
        groups = weight.q_groups if "q_groups" in weight.model_fields_set else None
        return Int8(groups=groups, symmetric=weight.q_type == "symmetric")


def default_inference_config() -> dict[str, Any]:
    """Return the configuration's keys with their default values."""
    return DeepSpeedInferenceConfig().model_dump()


def _place(outer: type[InferenceSection], kind: type[InferenceSection]) -> str:
    """Return the argument that gives a section, such as ``tensor_parallel=DeepSpeedTPConfig(...)``."""
    for name, field in outer.model_fields.items():
        section = type(field.default)
        if section is kind:
            return f"{name}={kind.__name__}(...)"
        if issubclass(section, InferenceSection) and (inner := _place(section, kind)):
            return f"{name}={section.__name__}({inner})"
    return ""


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
        given = {key: getattr(config, key) for key in config.model_fields_set}
    elif isinstance(config, InferenceSection):
        kind = type(config)
        raise DeepSpeedConfigError(
            f"config is a {kind.__name__}, which is a section of the configuration: write "
            f"init_inference(model, {_place(DeepSpeedInferenceConfig, kind)})"
        )
    else:
        given = dict(read(config) if isinstance(config, str) else config or {})
    for key in given.keys() & kwargs.keys():
        if given[key] != kwargs[key]:
            raise DeepSpeedConfigError(
                f"{key} is {given[key]!r} in config and {kwargs[key]!r} beside it: leave one out"
            )
    try:
        checked = DeepSpeedInferenceConfig(**{**given, **kwargs})
    except ValidationError as error:
        first = error.errors()[0]
        raise DeepSpeedConfigError(
            f"init_inference: {'.'.join(map(str, first['loc']))} is {first['input']!r}: {first['msg']}"
        ) from error
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


def _make_grid(section: DeepSpeedTPConfig, grid: Grid | None) -> Grid:
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
