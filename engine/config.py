"""The configuration: DeepSpeed's JSON dialect, checked. What it asks for is done, or refused with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ValidationError, model_validator

from ..pipe.schedules import NAMES
from .choose import FILES
from .config_base import ConfigError, Section, describe, idle, no_such, refused, setting
from .config_checkpoint import CheckpointConfig
from .config_compression import GradientCompressionConfig, check_compression
from .config_local import LocalUpdatesConfig
from .config_local import check as check_local
from .config_profiling import AmpConfig, CommsLoggerConfig, FlopsProfilerConfig, TorchAutocastConfig
from .config_sections import (
    ActivationCheckpointingConfig,
    Bf16Config,
    DataTypesConfig,
    Fp16Config,
    MonitorConfig,
    OptimizerConfig,
    PipelineConfig,
    SchedulerConfig,
    TensorParallelConfig,
    TimelineConfig,
    WandbConfig,
)
from .config_text import parse
from .config_zero import OffloadConfig, OffloadOptimizerConfig, ZeroConfig

__all__ = [
    "ActivationCheckpointingConfig",
    "Batch",
    "Config",
    "ConfigError",
    "Fp16Config",
    "OffloadConfig",
    "OffloadOptimizerConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "SchedulerConfig",
    "ZeroConfig",
    "batch_sizes",
    "read_config",
]

_DATA = "the data is yours: leave it out, and hand train_batch what it should see"


class Config(Section):
    """What ``triax.initialize`` takes as ``config``."""

    train_batch_size: int | None = setting(None, "Samples a step, over all replicas.", auto=True, ge=1)
    train_micro_batch_size_per_gpu: int | None = setting(
        None, "Samples of one microbatch of one replica.", auto=True, ge=1
    )
    gradient_accumulation_steps: int | None = setting(
        None, "Microbatches a step and replica: those that fill the pipeline.", auto=True, ge=1
    )
    optimizer: OptimizerConfig | None = setting(None, "Which, and its arguments; None: initialize(optimizer=...).")
    scheduler: SchedulerConfig | None = setting(None, "Of the learning rates; None: they stay, or lr_scheduler=....")
    gradient_clipping: float = setting(
        0.0, "The longest global gradient; 0: no limit. auto: 1.", auto_is=1.0, ge=0.0, allow_inf_nan=False
    )
    prescale_gradients: bool = setting(
        False,
        "Divide gradients by the number of replicas before they are summed, so that the sum does not overflow in a "
        "narrow communication_data_type. What is stepped is the same: the one division undoes it.",
    )
    gradient_predivide_factor: float = setting(1.0, "The same, with this number.", gt=0.0, allow_inf_nan=False)
    zero_optimization: ZeroConfig = setting(ZeroConfig(), "What the data axis shards.")
    pipeline: PipelineConfig = setting(PipelineConfig(), "How stages take turns.")
    tensor_parallel: TensorParallelConfig = setting(TensorParallelConfig(), "Held against the grid.")
    activation_checkpointing: ActivationCheckpointingConfig = setting(
        ActivationCheckpointingConfig(), "What the backward pass computes again."
    )
    bf16: Bf16Config = setting(Bf16Config(), "Weights in bfloat16, masters in fp32.")
    fp16: Fp16Config = setting(Fp16Config(), "Weights in float16, masters in fp32, and a loss scale.")
    data_types: DataTypesConfig = setting(DataTypesConfig(), "Dtypes that follow from bf16 and fp16.")
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = setting(
        None, "The dtype in which gradients are summed over replicas; by default that they have."
    )
    local_updates: LocalUpdatesConfig | None = setting(
        None, "Replicas that step on their own, and meet every so many steps; null: they step together."
    )
    gradient_compression: GradientCompressionConfig = setting(
        GradientCompressionConfig(), "What travels in place of the plain sum of gradients: docs/compression.md."
    )
    sparse_gradients: bool = setting(
        False, "Sum embeddings' gradients by the rows that came, where that sends less. Stages 0 and 1."
    )
    seed: int = setting(0, "Of the data's order and of dropout.")
    nan_loss: Literal["raise", "skip", "ignore"] = setting(
        "raise",
        "A loss, or but for fp16 a gradient, that is nan or infinite: raise an error on every rank before a weight "
        "moves, skip the step, or ignore it. Overflows of fp16's scaled gradients are the loss scale's; one process "
        "without clipping computes no norm, and looks at the loss alone.",
    )
    steps_per_print: int | None = setting(
        None, "Rank 0 prints step, loss, learning rate and samples a second, once in so many steps.", ge=1
    )
    torch_autocast: TorchAutocastConfig = setting(TorchAutocastConfig(), "Forward passes under torch.autocast.")
    amp: AmpConfig = setting(AmpConfig(), "apex's: O1 is autocast to float16.")
    dump_state: bool = setting(
        False, "Rank 0 prints the resolved configuration at the start, and what every rank holds."
    )
    flops_profiler: FlopsProfilerConfig = setting(FlopsProfilerConfig(), "A report of one step, by module.")
    memory_breakdown: bool = setting(
        False, "Rank 0 prints what every rank holds around forward, backward and step, by kind. Slows every step."
    )
    comms_logger: CommsLoggerConfig = setting(CommsLoggerConfig(), "Collectives and messages, counted and timed.")
    tensorboard: MonitorConfig = setting(MonitorConfig(), "Event files for TensorBoard, if it is installed.")
    csv_monitor: MonitorConfig = setting(MonitorConfig(), "A CSV file for each number, as DeepSpeed names them.")
    checkpoint: CheckpointConfig = setting(CheckpointConfig(), "How checkpoints are written and read.")

    json_monitor: MonitorConfig = setting(
        MonitorConfig(), "metrics.jsonl, a line a step, and run.json beside it: triax report makes a page of them."
    )
    wandb: WandbConfig = setting(WandbConfig(), "Runs of Weights & Biases, if it is installed.")
    wall_clock_breakdown: bool = setting(
        False,
        "Record every step; print where the ranks' time went once in steps_per_print steps, or in 10: docs/seeing.md.",
    )
    timeline: TimelineConfig = setting(TimelineConfig(), "A trace of one step of all ranks, for Perfetto or Chrome.")
    peak_tflops: float | None = setting(
        None,
        "TFLOP/s of one device in the model's dtype, against which monitors write MFU. null: as its maker says; none "
        "on a CPU.",
        gt=0.0,
        allow_inf_nan=False,
    )

    comet: Any = refused("leave it out: csv_monitor and tensorboard write the same numbers")
    gradient_allreduce_op: Any = refused(
        "gradients are summed, and divided by the weight of the batch: write mean", "mean"
    )
    disable_allgather: Any = refused("every rank needs the new weights: leave it out")
    elasticity: Any = refused("the number of ranks is the launcher's: leave it out")
    autotuning: Any = refused("leave it out: triax schedule --compare and triax memory weigh layouts on paper")
    sparse_attention: Any = refused("attention is the model's: leave it out, and list a layer that has it")
    compression_training: Any = refused("layers are trained as they are listed: leave it out")
    quantize_training: Any = refused("layers are trained as they are listed: leave it out")
    weight_quantization: Any = refused("layers are trained as they are listed: leave it out")
    progressive_layer_drop: Any = refused("all layers run: leave it out")
    eigenvalue: Any = refused("nothing is computed with it: leave it out")
    curriculum_learning: Any = refused(_DATA)
    data_efficiency: Any = refused(_DATA)
    compile: Any = refused("nothing is compiled here: leave it out")
    hybrid_engine: Any = refused(
        "leave it out: triax.init_inference(engine) generates with the weights that are trained"
    )
    nebula: Any = refused("leave it out: there is no such service here")
    expert_parallel: Any = refused("there is no expert axis: leave it out")
    use_data_before_expert_parallelism: Any = refused("there is no expert axis: leave it out")
    sequence_parallel_size: Any = refused(
        "leave it out: the models' sequence_parallel=True shards the sequence over the tensor axis", 1
    )
    disable_python_gc: Any = refused("leave it out, and call gc.disable() yourself")
    managed_gradient_accumulation: Any = refused("leave it out: train_batch runs all microbatches of a step", True)
    zero_allow_untested_optimizer: Any = idle("every optimizer that works element by element is stepped in every stage")
    zero_force_ds_cpu_optimizer: Any = idle("an offloaded update runs on the CPU with the optimizer that is named")
    aio: Any = idle("files are mapped into memory: there are no reads to queue")
    timers: Any = idle("wall_clock_breakdown measures")
    log_level: Any = idle('logging.getLogger("triax").setLevel(...) says what is logged')
    dataloader_drop_last: bool = setting(
        True,
        "Leave an incomplete last batch of training_data out of an epoch; false: the epoch's first samples fill it up.",
    )
    seq_parallel_communication_data_type: Any = idle("the sequence's shards travel in the dtype of the model")
    vocabulary_size: Any = idle("the model has a vocabulary of any size")

    @model_validator(mode="before")
    @classmethod
    def _other_names(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        given = {key: value for key, value in values.items() if key != "$schema"}  # that one is for editors
        if "bfloat16" in given:
            if "bf16" in given:
                raise ValueError("bfloat16 is an older name of bf16: give the second alone")
            given["bf16"] = given.pop("bfloat16")
        if isinstance(given.get("steps_per_print"), float) and given["steps_per_print"] == float("inf"):
            given["steps_per_print"] = None  # never, as some trainers write it
        return given

    @model_validator(mode="after")
    def _agrees(self) -> Config:
        train, micro = self.train_batch_size, self.train_micro_batch_size_per_gpu
        steps = self.gradient_accumulation_steps
        parts = [(name, value) for name, value in (("micro batch", micro), ("accumulation steps", steps)) if value]
        product = (micro or 1) * (steps or 1)
        if train and train % product:
            said = " * ".join(f"{name} {value}" for name, value in parts)
            raise ValueError(
                f"train_batch_size {train} is no multiple of {said}{f' = {product}' if len(parts) > 1 else ''}, "
                "whatever the number of replicas: change one of them (train_batch_size = "
                "train_micro_batch_size_per_gpu * gradient_accumulation_steps * replicas)"
            )
        if self.bf16.enabled and self.fp16.enabled:
            raise ValueError("bf16.enabled and fp16.enabled are both true: a model computes in one of them")
        narrow = [key for key in ("bf16", "fp16", "torch_autocast", "amp") if getattr(self, key).enabled]
        if len(narrow) > 1:
            raise ValueError(
                f"{' and '.join(f'{key}.enabled' for key in narrow)} are both true: weights of that dtype, or fp32 "
                "weights and a forward pass under autocast: enable one of them"
            )
        if self.communication_data_type and self.torch_autocast.lower_precision_safe_modules:
            raise ValueError(
                "communication_data_type and torch_autocast.lower_precision_safe_modules both say in which dtype "
                "gradients are summed over replicas: give one of them"
            )
        check_local(self)
        check_compression(self)
        zero, section = self.zero_optimization, self.checkpoint
        narrowed = self.communication_data_type or self.torch_autocast.lower_precision_safe_modules
        if zero.zero_quantized_gradients and zero.stage and narrowed:
            raise ValueError(
                "zero_optimization.zero_quantized_gradients sends gradients in 4 bits, and communication_data_type (or "
                "torch_autocast.lower_precision_safe_modules) in another dtype: give one of them"
            )
        if section.async_ and "nvme" in (zero.offload_optimizer.device, zero.offload_param.device):
            raise ValueError(
                "checkpoint.async copies what is written into the host's memory, and offload keeps it on nvme for "
                "want of room there: leave out one of them"
            )
        schedule = self.pipeline.schedule
        if schedule not in NAMES and not schedule.endswith(FILES):
            raise ValueError(no_such("pipeline.schedule", schedule, NAMES))
        other = self.pipeline.activation_checkpoint_interval
        if other and self.activation_checkpointing.interval not in (None, other):
            raise ValueError(
                f"pipeline.activation_checkpoint_interval {other} is another name of activation_checkpointing.interval "
                f"{self.activation_checkpointing.interval}: give one of them"
            )
        return self

    @property
    def monitored(self) -> bool:
        """Whether anything is written of each step."""
        return any(each.enabled for each in (self.tensorboard, self.csv_monitor, self.json_monitor, self.wandb))

    @property
    def recomputation(self) -> ActivationCheckpointingConfig:
        """``activation_checkpointing``, with the interval that ``pipeline`` may have for it."""
        section, other = self.activation_checkpointing, self.pipeline.activation_checkpoint_interval
        return section.model_copy(update={"interval": other}) if other and section.interval is None else section


class Batch(Section):
    """The three sizes of a batch, all known: train = micro * accumulation * replicas."""

    train: int
    micro: int
    accumulation: int


def read_config(config: Config | Mapping[str, Any] | str | Path) -> Config:
    """A checked configuration from a dict, or from the path of a JSON file (with comments, if it has any).

    Raises:
        ConfigError: a key that does not exist (the nearest that does is named), a value that cannot be, or what
            triax does not do; the message says what to write instead.
    """
    if isinstance(config, Config):
        return config
    if isinstance(config, (str, Path)):
        source = str(config)
        try:
            text = Path(config).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"the configuration {source} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"the configuration {source} is no text in UTF-8: byte {error.start}") from error
        except ValueError as error:  # no path at all
            raise ConfigError(f"the configuration {source!r} cannot be read: {error}") from error
        config = parse(text, source)
    if not isinstance(config, Mapping):
        raise ConfigError(f"the configuration is a {type(config).__name__}: pass a dict or the path of a JSON file")
    try:
        checked = Config.model_validate(dict(config))
    except ValidationError as error:
        raise ConfigError("; ".join(dict.fromkeys(map(_explain, error.errors())))) from error
    if checked.optimizer is not None or checked.scheduler is not None:
        from .trials import try_out  # torch is not needed before

        try_out(checked)
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
    """What pydantic found, in a line that starts with the key."""
    place = [str(part) for part in error["loc"] if part not in ("constrained-int", "nullable")]
    where = ".".join(place) or "the configuration"
    if error["type"] == "extra_forbidden":
        section = _section(place[:-1])
        known = [field.alias or key for key, field in section.model_fields.items()]
        return no_such(".".join(place[:-1]) or "the configuration", place[-1], known)
    if error["type"] == "missing":
        return f"{where} is missing: write it"
    given = error["input"]
    if isinstance(given, str) and given == "auto" and place:
        return f'{where} is "auto", which a trainer fills in from its own arguments: write a value'
    text = str(error["ctx"]["error"]) if error["type"] == "value_error" else error["msg"][0].lower() + error["msg"][1:]
    if error["type"] in ("model_type", "dict_type"):
        text = "a section {...} belongs here"
    if isinstance(given, Mapping):
        return text if not place else f"{where}: {text}"
    return f"{where} = {describe(given)}: {text}"


def _section(place: list[str]) -> type[Section]:
    found: type[Section] = Config
    for part in place:
        annotation = found.model_fields[part].annotation
        found = next(each for each in (annotation, *get_args(annotation)) if _is_section(each))
    return found


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)
