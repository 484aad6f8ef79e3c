"""The configuration: DeepSpeed's JSON dialect, checked. An unknown key is an error, never ignored."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ..pipe.schedules import NAMES
from .choose import FILES


class ConfigError(ValueError):
    """The configuration cannot be used; the message says which key, why, and what to write."""


# Elements; "auto", as Hugging Face's configurations have it, is the default.
_Elements = Annotated[int, Field(ge=0)]
_AutoElements = Annotated[_Elements | None, BeforeValidator(lambda value: None if value == "auto" else value)]
_BUCKET = 2**22


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OptimizerConfig(_Section):
    """``optimizer``: which, and its arguments."""

    type: str = Field(description="The optimizer: a name of torch.optim that works element by element.")
    params: dict[str, Any] = Field(default_factory=dict, description="Its arguments: lr, betas, weight_decay, ...")


class OffloadConfig(_Section):
    """``zero_optimization.offload_param``: where shards of the weights are kept."""

    device: Literal["none", "cpu", "nvme"] = Field(
        default="none", description="none: with the model; cpu: the host's memory; nvme: a file."
    )
    nvme_path: str | None = Field(default=None, description="The folder of the file; it has no name there.")
    pin_memory: bool = Field(default=False, description="Pin the host's memory, where the model is on a GPU.")

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, values: Any) -> Any:
        """DeepSpeed's other keys, and what asks for nothing."""
        if values is None:
            return {}
        given = values if isinstance(values, dict) else {}
        if given.get("ratio") == 1:
            given = {key: value for key, value in given.items() if key != "ratio"}
        for key, reason in _NO_BUFFERS.items():
            if key in given:
                raise ValueError(f"{key} is not for triax ({reason}): leave it out")
        if given.get("device") == "nvme":
            if not given.get("nvme_path"):
                raise ValueError("device nvme needs nvme_path, a folder on the disk")
            if given.get("pin_memory"):
                raise ValueError("pin_memory is for device cpu: a file's pages come and go")
        return given


class OffloadOptimizerConfig(OffloadConfig):
    """``zero_optimization.offload_optimizer``: where its state, masters and accumulated gradients are kept."""

    pipeline_read: bool = Field(default=True, description="On disk: read the next sub-group while one is updated.")
    pipeline_write: bool = Field(
        default=True, description="On disk: a sub-group is written while the next is updated; false waits for it."
    )


_NO_BUFFERS = {
    **dict.fromkeys(("buffer_count", "buffer_size", "max_in_cpu"), "files are mapped, there are no buffers to size"),
    "fast_init": "state is made in the first step, on the disk",
    "pipeline": "pipeline_read and pipeline_write are its two halves",
    "ratio": "all of the optimizer's state is kept in one place",
}


class ZeroConfig(_Section):
    """``zero_optimization``: what the data axis shards."""

    stage: int = Field(
        default=0, ge=0, le=3, description="0: nothing; 1: the optimizer's state; 2: gradients too; 3: weights too."
    )
    reduce_bucket_size: Annotated[int, BeforeValidator(lambda value: _BUCKET if value == "auto" else value)] = Field(
        default=_BUCKET, ge=1, description="Elements of gradient that are reduced in one collective."
    )
    reduce_scatter: bool = Field(
        default=True, description="Reduce-scatter gradients; false: all-reduce them, twice the bytes."
    )
    reduce_each_microbatch: bool = Field(
        default=True,
        description="Stages 2 and 3: reduce gradients after every backward pass; false: after a step's last one, "
        "holding them whole until then.",
    )
    allgather_partitions: bool = Field(
        default=True, description="All-gather new weights after a step; false: every rank broadcasts its range."
    )
    allgather_bucket_size: _AutoElements = Field(
        default=None, description="Elements of new weights on their way at once, after a step; auto: all of them."
    )
    overlap_comm: bool = Field(
        default=True, description="Collectives run while something is computed; false: each is waited for at once."
    )
    contiguous_gradients: bool = True
    round_robin_gradients: bool = False
    ignore_unused_parameters: bool = Field(
        default=True, description="False: a step in which a parameter got no gradient is an error that names it."
    )
    stage3_keep_gathered: bool = Field(
        default=False,
        description="Stage 3: gather a layer once a step and keep it whole, instead of for each pass through it.",
    )
    stage3_prefetch_bucket_size: _AutoElements = Field(
        default=None, description="Stage 3: elements of the layers to run next that are gathered ahead; auto: a layer."
    )
    stage3_param_persistence_threshold: _AutoElements = Field(
        default=None, description="Stage 3: parameters of at most so many elements stay whole; auto: 0."
    )
    stage3_max_live_parameters: _AutoElements = Field(
        default=None,
        description="Stage 3: beyond so many whole elements, nothing is kept or gathered ahead; auto: no limit.",
    )
    stage3_max_reuse_distance: _AutoElements = Field(
        default=None,
        description="Stage 3: a layer that runs again before so many elements of others have run stays whole; auto: 0.",
    )
    stage3_gather_16bit_weights_on_model_save: bool = False
    offload_optimizer: OffloadOptimizerConfig = OffloadOptimizerConfig()
    offload_param: OffloadConfig = OffloadConfig()
    sub_group_size: Annotated[_Elements, Field(ge=1)] | None = Field(
        default=None,
        description="Elements that the optimizer updates together; by default 16777216 with offload, else all.",
    )

    @model_validator(mode="after")
    def _shards(self) -> ZeroConfig:
        if self.offload_param.device != "none" and self.stage < 3:
            raise ValueError(
                f"offload_param keeps shards of the weights, and in stage {self.stage} they are whole: set stage 3, "
                "or leave it out"
            )
        return self

    def notes(self) -> list[str]:
        """What the user asked for that changes nothing here, and why."""
        notes = [reason for key, (value, reason) in _NOTHING.items() if getattr(self, key) == value]
        for key in sorted(self.model_fields_set):
            stages = _STAGES.get(key, (3,) if key.startswith("stage3") else (0, 1, 2, 3))
            if self.stage not in stages and getattr(self, key) != type(self).model_fields[key].default:
                notes.append(f"{key} acts in stage {' and '.join(map(str, stages))}, not in stage {self.stage}")
        return [f"zero_optimization: {note}" for note in notes]


_NOTHING = {
    "contiguous_gradients": (False, "contiguous_gradients false: gradients lie in flat buckets all the same"),
    "round_robin_gradients": (
        True,
        "round_robin_gradients true: every bucket is shared out over all replicas, so none copies more than another",
    ),
    "stage3_gather_16bit_weights_on_model_save": (
        True,
        "stage3_gather_16bit_weights_on_model_save true: engine.gather() returns whole weights in any stage",
    ),
}
_STAGES = {
    "reduce_scatter": (1, 2, 3),
    "reduce_each_microbatch": (2, 3),
    "allgather_partitions": (1, 2),
    "allgather_bucket_size": (1, 2),
}


class PipelineConfig(_Section):
    """``pipeline``: how stages take turns."""

    schedule: str = Field(
        default="1f1b", description="A schedule's name, auto (searched for), or the path of a .csv or .json file."
    )
    costs: tuple[float, ...] = Field(
        default=(1.0, 1.0, 1.0),
        min_length=3,
        max_length=4,
        description="For auto: measured costs of F, I, W and a message, in any unit.",
    )
    memory: float | None = Field(
        default=None,
        gt=0,
        description="For auto: activations a rank may hold, in microbatches through 1/pipe of the model.",
    )


class Bf16Config(_Section):
    """``bf16``: weights in bfloat16, masters in fp32."""

    enabled: bool = False


class Fp16Config(_Section):
    """``fp16``: weights in float16, masters in fp32, and a loss scale."""

    enabled: bool = False
    loss_scale: float = Field(default=0.0, ge=0.0, description="A fixed scale; 0: one that adapts.")
    initial_scale_power: int = Field(default=16, ge=0, description="The scale starts at 2 to this power.")
    loss_scale_window: int = Field(default=1000, ge=1, description="Steps without overflow before it doubles.")
    hysteresis: int = Field(default=2, ge=1, description="Overflows before it halves.")
    min_loss_scale: float = Field(default=1.0, gt=0.0, description="It does not fall below this.")


class ActivationCheckpointingConfig(_Section):
    """``activation_checkpointing``: what the backward pass computes again, and what it keeps for that."""

    interval: int | None = Field(
        default=None,
        ge=0,
        description="Recompute groups of so many layers of a stage; 0: none. null: the model's.",
    )
    granularity: Literal["full", "selective", "matmul"] | None = Field(
        default=None,
        description="full: keep the groups' inputs; matmul: and what matrix products return; selective: attention's "
        "core alone is recomputed. Given without an interval, every layer is a group.",
    )
    checkpointable_layers: tuple[str, ...] | None = Field(
        default=None, description="The classes of layers to recompute. By default the model's, or all."
    )
    number_checkpoints: int | None = Field(
        default=None, ge=1, description="Instead of an interval: how many groups the layers of a rank are cut into."
    )
    partition_activations: bool = Field(
        default=False, description="Keep 1/tensor of each input, where all tensor ranks hold the same."
    )
    cpu_checkpointing: bool = Field(default=False, description="Keep inputs in the host's memory.")
    contiguous_memory_optimization: bool = Field(
        default=False, description="Copy inputs into one buffer; needs partition_activations and number_checkpoints."
    )
    synchronize_checkpoint_boundary: bool = Field(
        default=False, description="Wait for the device where a group begins and ends."
    )
    profile: bool = Field(default=False, description="Log the time of recomputation after each step.")
    preserve_rng_state: bool = Field(
        default=True, description="Recompute with torch's generators as they were. triax's Dropout does not need it."
    )

    @model_validator(mode="after")
    def _agrees(self) -> ActivationCheckpointingConfig:
        if self.contiguous_memory_optimization and not (self.partition_activations and self.number_checkpoints):
            raise ValueError(
                "contiguous_memory_optimization makes one buffer for the slices of so many inputs: set "
                "partition_activations to true, and number_checkpoints"
            )
        if self.interval and self.number_checkpoints:
            raise ValueError(
                f"interval {self.interval} and number_checkpoints {self.number_checkpoints} both say how layers are "
                "grouped: give one of them"
            )
        if self.granularity == "selective" and (self.interval or self.number_checkpoints):
            raise ValueError(
                "granularity selective recomputes a part of each layer, and groups none: leave out interval and "
                "number_checkpoints"
            )
        return self


class Config(_Section):
    """What ``triax.initialize`` takes as ``config``."""

    train_batch_size: int | None = Field(default=None, ge=1, description="Samples a step, over all replicas.")
    train_micro_batch_size_per_gpu: int | None = Field(
        default=None, ge=1, description="Samples of one microbatch of one replica."
    )
    gradient_accumulation_steps: int | None = Field(
        default=None, ge=1, description="Microbatches a step and replica: those that fill the pipeline."
    )
    optimizer: OptimizerConfig | None = None
    gradient_clipping: float = Field(default=0.0, ge=0.0, description="The longest global gradient; 0: no limit.")
    zero_optimization: ZeroConfig = ZeroConfig()
    pipeline: PipelineConfig = PipelineConfig()
    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    bf16: Bf16Config = Bf16Config()
    fp16: Fp16Config = Fp16Config()
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = Field(
        default=None, description="The dtype in which gradients are summed over replicas; by default that they have."
    )
    seed: int = Field(default=0, description="Of the data's order and of dropout.")


class Batch(_Section):
    """The three sizes of a batch, all known: train = micro * accumulation * replicas."""

    train: int
    micro: int
    accumulation: int


def read_config(config: Config | Mapping[str, Any] | str | Path) -> Config:
    """A checked configuration from a dict, or from the path of a JSON file.

    Raises:
        ConfigError: a key that does not exist (the nearest that does is named), or a value that cannot be.
    """
    if isinstance(config, Config):
        return config
    if isinstance(config, (str, Path)):
        try:
            config = json.loads(Path(config).read_text())
        except OSError as error:
            raise ConfigError(f"the configuration {config} cannot be read: {error.strerror}") from error
        except json.JSONDecodeError as error:
            raise ConfigError(f"the configuration {config} is not JSON: {error}") from error
    if not isinstance(config, Mapping):
        raise ConfigError(f"the configuration is a {type(config).__name__}: pass a dict or the path of a JSON file")
    try:
        checked = Config.model_validate(dict(config))
    except ValidationError as error:
        raise ConfigError("; ".join(map(_explain, error.errors()))) from error
    if checked.bf16.enabled and checked.fp16.enabled:
        raise ConfigError("bf16.enabled and fp16.enabled are both true: a model computes in one of them")
    name = checked.pipeline.schedule
    if name not in NAMES and not name.endswith(FILES):
        raise ConfigError(_no_such("pipeline.schedule", name, list(NAMES)))
    return checked


def batch_sizes(config: Config, replicas: int) -> Batch:
    """All three batch sizes from those that the configuration gives.

    Raises:
        ConfigError: none is given, or those given contradict each other; the message shows the product.
    """
    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    steps = config.gradient_accumulation_steps
    rule = "train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * replicas"
    if train is None and micro is None:
        raise ConfigError(f"no batch size: give train_batch_size or train_micro_batch_size_per_gpu ({rule})")
    if train is None:
        assert micro is not None
        steps = steps or 1
        return Batch(train=micro * steps * replicas, micro=micro, accumulation=steps)
    if micro is None:
        steps = steps or 1
        micro = max(1, train // (steps * replicas))
    elif steps is None:
        steps = max(1, train // (micro * replicas))
    if micro * steps * replicas != train:
        raise ConfigError(
            f"train_batch_size {train} is not micro batch {micro} * accumulation steps {steps} * {replicas} replicas "
            f"= {micro * steps * replicas}: change one of them ({rule})"
        )
    return Batch(train=train, micro=micro, accumulation=steps)


def _explain(error: Any) -> str:
    place = [str(part) for part in error["loc"]]
    if error["type"] == "extra_forbidden":
        section: Any = Config
        for part in place[:-1]:
            section = section.model_fields[part].annotation
            section = next((a for a in getattr(section, "__args__", ()) if a is not type(None)), section)
        return _no_such(".".join(place[:-1]) or "the configuration", place[-1], list(section.model_fields))
    return f"{'.'.join(place)} = {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _no_such(where: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
    return f"{where}: there is no {name!r}; {hint}"
