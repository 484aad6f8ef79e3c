"""DeepSpeed's ``init_inference``, its configuration and ``tp_model_init``.

A key of the configuration acts, is refused, or is without effect here and says so in one line of the log.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from torch import Tensor, nn

from ...engine.module_engine import ModuleEngine
from ...engine.pipeline_engine import PipelineEngine
from ...engine.snapshot.load_weights import load_weights
from ...grid import Grid
from ...grid.megatron import grid_of_mpu
from ...inference.engine import InferenceEngine
from ...inference.engine import init_inference as make_engine
from ...inference.int8 import Int8, quantize
from ...models.huggingface.load import load_hf
from ...models.huggingface.parallelize import find_plan, parallelize
from ...pipe.module import PipelineModule
from ...tensor_parallel.plans import Column, Local, Row, Style
from .context import CONTEXT
from .engine import DeepSpeedConfigError, DeepSpeedError
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
                _LOGGER.warning("init_inference: %s is without effect, because %s", key, _IDLE[key])
        if self.tensor_parallel.tp_grain_size != 64:
            _LOGGER.warning("init_inference: tp_grain_size is without effect, because shards are even or whole heads")
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
            _LOGGER.warning("init_inference: quant is without effect, because dtype is not int8")
        elif quant.activation != BaseQuantConfig() and quant.activation.enabled:
            _LOGGER.warning("init_inference: quant.activation is without effect, because only weights are quantized")
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
    else:
        given = json.loads(Path(config).read_text()) if isinstance(config, str) else dict(config or {})
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


class DeepSpeedInferenceEngine(nn.Module):
    """A model for inference: callable, with ``generate``. Attributes that it does not have are the model's.

    Args:
        model: as for ``init_inference``.
        config: the checked configuration.

    Attributes:
        module: the model, sharded and cast in place.
        grid: its grid.
        engine: triax's ``InferenceEngine``, which generates from a ``PipelineModule``; None for other models.
    """

    module: Any

    def __init__(self, model: Any, config: DeepSpeedInferenceConfig) -> None:
        super().__init__()
        self._config, self._profiles = config, False
        self._times: list[float] = []
        trainer = model if isinstance(model, (ModuleEngine, PipelineEngine)) else None
        self._trainer = [trainer]  # in a list: it is no sub-module
        self.module = model if trainer is None else trainer.module
        self.engine: InferenceEngine | None = None
        if trainer is not None or isinstance(model, PipelineModule):
            self._adopt(model if trainer is None else trainer)
        else:
            self.grid = _make_grid(config.tp, None)
            self._prepare()
        if trainer is None:
            self.module.eval()

    def _adopt(self, model: Any) -> None:
        """Take over a model that has a grid already: a ``PipelineModule``, or the engine of a module."""
        config = self._config
        self.grid = _make_grid(config.tp, model.grid)
        if self._trainer[0] is not None:
            for key in ("dtype", "checkpoint"):
                if getattr(config, key) is not None:
                    raise DeepSpeedConfigError(f"{key} would change the weights that this engine trains: leave it out")
        else:
            self._load()
        if not isinstance(self.module, PipelineModule):
            return
        positions = [length for m in self.module.modules() if (length := getattr(m, "max_position_embeddings", None))]
        most = min([config.max_out_tokens, *positions])
        dtype = None if self._trainer[0] is not None else self._dtype()
        self.engine = make_engine(model, dtype=dtype, max_length=most, int8=config.int8 or False)

    def _prepare(self) -> None:
        """Load, cast, move, shard and quantize a plain module."""
        config, module = self._config, self.module
        if not isinstance(module, nn.Module):
            raise DeepSpeedConfigError(f"model is a {type(module).__name__}: pass a torch.nn.Module or an engine")
        if any(tensor.is_meta for tensor in module.parameters()):
            module.to_empty(device="cpu" if config.keep_module_on_host else self.grid.device)
            if config.checkpoint is None and config.checkpoint_config.checkpoint_dir is None:
                raise DeepSpeedConfigError("the model is on the meta device and has no values: pass checkpoint=")
        self._load()
        module.to(dtype=self._dtype())
        if not config.keep_module_on_host:
            module.to(self.grid.device)
        if self.grid.tensor.size > 1:
            parallelize(module, self.grid, _plan(module, config.injection_policy))
        elif config.injection_policy is not None:
            _LOGGER.warning("init_inference: injection_policy is without effect, because tp_size is 1")
        if config.int8 is not None:
            quantize(module, self.grid, config.int8)

    def _dtype(self) -> torch.dtype | None:
        """Return the dtype to cast to; None: the model's own."""
        if self._config.dtype not in (None, torch.int8):
            return self._config.dtype
        return torch.float16 if self.grid.device.type == "cuda" else None

    def _load(self) -> None:
        """Load ``checkpoint``: triax's, a folder of transformers, a file of weights, or DeepSpeed's list of files."""
        config, section = self._config, self._config.checkpoint_config
        given: Any = config.checkpoint if config.checkpoint is not None else section.checkpoint_dir
        if given is None:
            return
        base = Path(config.base_dir or section.base_dir or "")
        if isinstance(given, str):
            path = base / given
            if path.suffix == ".json":
                given, base = json.loads(path.read_text()), base if str(base) != "." else path.parent
            elif (path / "config.json").is_file():
                load_hf(path, into=self.module, grid=self.grid)
                return
            elif path.is_dir():
                load_weights(self.module, path, grid=self.grid)
                return
            else:
                given = {"checkpoints": [path]}
        weights: dict[str, Tensor] = {}
        for name in given.get("checkpoints") or ():
            weights |= _read(base / (given.get("base_dir") or "") / name)
        if not weights:
            raise DeepSpeedConfigError(
                f"checkpoint is {given!r}, which names no file: give a folder, a file of weights, or a dict with "
                '"checkpoints", a list of files'
            )
        missing = list(self.module.load_state_dict(weights, strict=False).missing_keys)
        tied = getattr(self.module, "_tied_weights_keys", None) or ()
        missing = [name for name in missing if name not in tied]
        if missing:
            raise DeepSpeedConfigError(
                f"the checkpoint lacks {len(missing)} of the model's tensors, such as {missing[0]}: give the files of "
                "the whole model, not those of one tensor rank"
            )

    @contextmanager
    def _running(self) -> Iterator[None]:
        trainer, begin = self._trainer[0], time.perf_counter()
        if trainer is None:
            yield
        else:
            training = trainer.module.training
            trainer.module.eval()
            try:
                with trainer.whole_weights():
                    yield
            finally:
                trainer.module.train(training)
        if self._profiles:
            self._times.append((time.perf_counter() - begin) * 1e3)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model: the loss or the outputs that it returns."""
        with self._running():
            return self.module(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate: transformers' ``generate`` of the model, or ``triax.InferenceEngine.generate``.

        Draws are equal on the ranks of the tensor axis.

        Raises:
            RuntimeError: the input is longer than ``max_out_tokens``.
            AttributeError: the model cannot generate.
        """
        if self.engine is not None:
            return self.engine.generate(*args, **kwargs)
        if not hasattr(self.module, "generate"):
            raise AttributeError(f"a {type(self.module).__name__} has no method generate: call the engine instead")
        ids = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[1] > self._config.max_out_tokens:
            raise DeepSpeedError(
                f"the input has {ids.shape[1]} tokens, but max_out_tokens is {self._config.max_out_tokens}: give "
                f"max_out_tokens={ids.shape[1]} plus the number of new tokens"
            )
        with self._running(), self._equal_draws():
            return self.module.generate(*args, **kwargs)

    @contextmanager
    def _equal_draws(self) -> Iterator[None]:
        """Draw on every rank of the tensor axis what its first rank draws."""
        axis = self.grid.tensor
        if axis.size == 1:
            yield
            return
        seed = torch.randint(2**62, (1,), device=self.grid.device)
        axis.broadcast(seed)
        with torch.random.fork_rng(devices=[self.grid.device] if self.grid.device.type == "cuda" else []):
            torch.manual_seed(int(seed))
            yield

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Measure the time of each call; ``model_times`` returns them."""
        self._profiles = True

    def model_times(self) -> list[float]:
        """Return the times of the calls since the last one, in milliseconds."""
        times, self._times = self._times, []
        return times

    def destroy(self) -> None:
        """Do nothing: the engine has no state beside the model."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(super().__getattr__("module"), name)


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
    if section.tp_group is not None and tuple(dist.get_process_group_ranks(section.tp_group)) != grid.tensor.ranks:
        ranks = dist.get_process_group_ranks(section.tp_group)
        raise DeepSpeedConfigError(
            f"tp_group has the ranks {ranks}, but those of the tensor axis are {list(grid.tensor.ranks)}: leave "
            "tp_group out, or pass mpu"
        )
    return grid


def _plan(module: nn.Module, policy: Mapping[Any, Any] | None) -> dict[str, Style] | None:
    """Return the plan of an injection policy: the named linear layers are row-parallel, others column-parallel.

    None: the built-in plan of the family, which a policy only replaces where there is none.
    """
    if policy is None:
        return None
    try:
        find_plan(module)
    except ValueError:
        pass
    else:
        _LOGGER.warning("init_inference: injection_policy is without effect, because the model's family has a plan")
        return None
    plan: dict[str, Style] = {}
    for cls, names in policy.items():
        outputs = (names,) if isinstance(names, str) else tuple(names)
        if not all(isinstance(name, str) for name in outputs):
            raise DeepSpeedConfigError(
                f"injection_policy has {names!r}: give the names of the layers whose outputs are summed, such as "
                "('attention.out', 'mlp.down')"
            )
        for path, block in module.named_modules():
            if type(block) is not cls:
                continue
            for name, layer in block.named_modules():
                full = f"{path}.{name}" if path else name
                if isinstance(layer, nn.Linear):
                    plan[full] = Row() if name.endswith(outputs) else Column()
                heads = {key: 1 for key in ("num_heads", "n_heads", "num_attention_heads") if hasattr(layer, key)}
                if heads and name:
                    plan[full] = Local(heads)
    return plan


def _read(path: Path) -> dict[str, Tensor]:
    """Read a file of weights, without running code from it."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    found = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("module", "model"):  # of DeepSpeed's and Megatron's files
        found = found[key] if isinstance(found.get(key), dict) else found
    return dict(found)
