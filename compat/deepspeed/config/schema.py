"""Every key of the configuration file, in DeepSpeed's JSON dialect: its type, default, limits and description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, Strict, model_validator

from ....base.checks import LARGEST, SEEDS
from .activation_checkpointing import ActivationCheckpointingConfig
from .attention import SparseAttentionConfig
from .autotuning import AutotuningConfig
from .base import Section, idle, refused, setting
from .checkpoint import CheckpointConfig
from .compilation import CompileConfig
from .compression import GradientCompressionConfig
from .elasticity import ElasticityConfig
from .local_updates import LocalUpdatesConfig
from .lora import LoraConfig
from .monitoring import (
    CommsLoggerConfig,
    FlopsProfilerConfig,
    HistogramsConfig,
    MonitorConfig,
    TimelineConfig,
    WandbConfig,
)
from .optimizer import OptimizerConfig, SchedulerConfig
from .parallelism import MoEConfig, PipelineConfig, TensorParallelConfig
from .precision import AmpConfig, Bf16Config, DataTypesConfig, Fp16Config, TorchAutocastConfig
from .zero import ZeroConfig

_DATA = "the library does not choose data: leave it out, and pass the batches that you want to train_batch"


class Config(Section):
    """The configuration: all keys of ``triax.initialize(config=...)``."""

    train_batch_size: int | None = setting(None, "Samples per step, over all replicas.", auto=True, ge=1)
    train_micro_batch_size_per_gpu: Annotated[int, Strict(), Field(ge=1)] | Literal["auto"] | None = setting(
        None,
        "Samples per microbatch of one replica. auto, if train_batch_size is given and gradient_accumulation_steps is "
        "not: for a PipelineModule, the largest that fits in memory (docs/plan.md).",
    )
    gradient_accumulation_steps: int | None = setting(
        None, "Microbatches per step and replica: they fill the pipeline.", auto=True, ge=1
    )
    managed_gradient_accumulation: bool = setting(
        True,
        "false: every engine.step() updates the weights, after any number of backward passes; gradients are still "
        "divided by gradient_accumulation_steps. Not for a PipelineModule.",
    )
    optimizer: OptimizerConfig | None = setting(None, "Optimizer; null: the one of initialize(optimizer=...).")
    scheduler: SchedulerConfig | None = setting(
        None, "Learning-rate schedule; null: constant rates, or initialize(lr_scheduler=...)."
    )
    gradient_clipping: float = setting(
        0.0, "Limit of the global gradient norm; 0: no limit. auto: 1.", auto_is=1.0, ge=0.0
    )
    prescale_gradients: bool = setting(
        False,
        "Divide gradients by the number of replicas before they are summed, so that the sum does not overflow in a "
        "low-precision communication_data_type. The step stays the same.",
    )
    gradient_predivide_factor: float = setting(
        1.0, "Divide gradients by this number before they are summed.", gt=0.0, le=LARGEST
    )
    gradient_allreduce_op: Literal["mean", "sum"] = setting(
        "mean",
        "mean: the mean of the replicas' gradients; sum: their sum. Each replica's gradient is the mean over its own "
        "samples.",
    )
    zero_optimization: ZeroConfig = setting(ZeroConfig(), "ZeRO: what the data axis shards.")
    pipeline: PipelineConfig = setting(PipelineConfig(), "The pipeline schedule.")
    tensor_parallel: TensorParallelConfig = setting(TensorParallelConfig(), "Expected size of the tensor axis.")
    activation_checkpointing: ActivationCheckpointingConfig = setting(
        ActivationCheckpointingConfig(), "Recomputation in the backward pass."
    )
    compile: CompileConfig = setting(CompileConfig(), "torch.compile of each layer: docs/guides/compile.md.")
    bf16: Bf16Config = setting(Bf16Config(), "Weights in bfloat16, master weights in fp32.")
    fp16: Fp16Config = setting(Fp16Config(), "Weights in float16, master weights in fp32, and a loss scale.")
    data_types: DataTypesConfig = setting(DataTypesConfig(), "Dtypes that bf16 and fp16 determine.")
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = setting(
        None, "Dtype in which gradients are summed over replicas; null: their own."
    )
    local_updates: LocalUpdatesConfig | None = setting(
        None, "Local SGD and DiLoCo: replicas step separately and synchronize every N steps; null: off."
    )
    lora: LoraConfig | None = setting(
        None, "Low-rank adapters of linear layers; only these are trained: docs/lora.md; null: off."
    )
    gradient_compression: GradientCompressionConfig = setting(
        GradientCompressionConfig(), "Compression of the sum of gradients: docs/compression.md."
    )
    sparse_gradients: bool = setting(
        False, "Sum embeddings' gradients by the rows that are not zero, if that sends less. ZeRO stages 0 and 1."
    )
    data_parallel_size: int | None = setting(
        None, "Expected size of the grid's data axis, the number of replicas; another size is an error.", ge=1
    )
    sequence_parallel_size: int | None = setting(
        None,
        "Expected size of the grid's context axis, which Grid(context=...) sets; another size is an error.",
        auto=True,
        ge=1,
    )
    expert_parallel_size: int | None = setting(
        None,
        "Expected size of the grid's expert axis, which Grid(expert=...) sets; another size is an error.",
        auto=True,
        ge=1,
    )
    moe: MoEConfig = setting(MoEConfig(), "Expected size of the expert axis; MoE(...) in the model sets the rest.")
    sparse_attention: SparseAttentionConfig = setting(
        SparseAttentionConfig(), "Block masks of the model's attention: docs/context.md."
    )
    seed: int = setting(0, "Seed of the order of data and of dropout.", ge=0, lt=SEEDS)
    nan_loss: Literal["raise", "skip", "ignore"] = setting(
        "raise",
        "If a loss or (without fp16) a gradient is nan or infinite: raise an error on every rank before any weight "
        "changes, skip the step (50 in a row are an error), or ignore it. With fp16 the loss scale handles gradients "
        "that overflow. One process without clipping computes no norm and checks only the loss.",
    )
    steps_per_print: int | None = setting(
        None, "Print step, loss, learning rate and samples per second on rank 0, every N steps.", ge=1
    )
    torch_autocast: TorchAutocastConfig = setting(TorchAutocastConfig(), "Forward passes under torch.autocast.")
    amp: AmpConfig = setting(AmpConfig(), "NVIDIA apex: O1 is autocast to float16.")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] | None = setting(
        None, 'Level of the log, logging.getLogger("triax"); null: as Python\'s logging is set.'
    )
    dump_state: bool = setting(
        False, "Print the resolved configuration and what every rank holds on rank 0, at the start."
    )
    flops_profiler: FlopsProfilerConfig = setting(
        FlopsProfilerConfig(), "FLOPs and times of one step, for each module."
    )
    memory_breakdown: bool = setting(
        False, "Print the memory of every rank, by kind, around forward, backward and step. Slows every step."
    )
    comms_logger: CommsLoggerConfig = setting(CommsLoggerConfig(), "Counts and times of collectives and messages.")
    tensorboard: MonitorConfig = setting(MonitorConfig(), "Event files for TensorBoard, if it is installed.")
    csv_monitor: MonitorConfig = setting(MonitorConfig(), "A CSV file for each metric, with DeepSpeed's names.")
    checkpoint: CheckpointConfig = setting(CheckpointConfig(), "How checkpoints are written and read.")

    json_monitor: MonitorConfig = setting(
        MonitorConfig(), "metrics.jsonl, a line per step, and run.json: triax report makes a page of them."
    )
    wandb: WandbConfig = setting(WandbConfig(), "Weights & Biases, if it is installed.")
    histograms: HistogramsConfig = setting(
        HistogramsConfig(), "Histograms of weights and gradients by parameter, for the monitors: docs/monitoring.md."
    )
    wall_clock_breakdown: bool = setting(
        False,
        "Time every step; print the ranks' times by part every steps_per_print steps, or every 10: docs/monitoring.md.",
    )
    timeline: TimelineConfig = setting(TimelineConfig(), "Trace of one step of all ranks, for Perfetto or Chrome.")
    peak_tflops: float | None = setting(
        None,
        "Peak TFLOP/s of one device in the model's dtype, for the MFU that monitors write. null: the manufacturer's "
        "number, none on a CPU.",
        gt=0.0,
    )

    comet: Any = refused("leave it out: csv_monitor and tensorboard write the same numbers")
    disable_allgather: Any = refused("every rank needs the new weights: leave it out")
    elasticity: ElasticityConfig = setting(
        ElasticityConfig(), "Choose batch sizes that fit many numbers of replicas: docs/launch.md."
    )
    autotuning: AutotuningConfig = setting(
        AutotuningConfig(), "Find the microbatch size and the ZeRO stage by measured steps: docs/plan.md."
    )
    datastates_ckpt: Any = refused("leave it out: checkpoint.async writes in the background")
    compression_training: Any = refused("layers are trained as they are: leave it out")
    quantize_training: Any = refused("layers are trained as they are: leave it out")
    weight_quantization: Any = refused("layers are trained as they are: leave it out")
    progressive_layer_drop: Any = refused("all layers run: leave it out")
    eigenvalue: Any = refused("eigenvalues are not used: leave it out")
    curriculum_learning: Any = refused(_DATA)
    data_efficiency: Any = refused(_DATA)
    hybrid_engine: Any = refused("leave it out: triax.init_inference(engine) generates with the weights in training")
    nebula: Any = refused("leave it out: triax has no such service")
    expert_parallel: Any = refused("write expert_parallel_size, and Grid(expert=...)")
    use_data_before_expert_parallelism: Any = refused(
        "experts are spread over consecutive ranks of data x context: leave it out"
    )
    disable_python_gc: Any = refused("leave it out, and call gc.disable() yourself")
    zero_allow_untested_optimizer: Any = idle("every elementwise optimizer runs in every stage")
    zero_force_ds_cpu_optimizer: Any = idle("an offloaded update runs on the CPU with the named optimizer")
    aio: Any = idle("files are mapped into memory: there are no reads to queue")
    timers: Any = idle("wall_clock_breakdown measures times")
    dataloader_drop_last: bool = setting(
        True,
        "Drop an incomplete last batch of an epoch of training_data; false: fill it with the epoch's first samples.",
    )
    seq_parallel_communication_data_type: Any = idle("shards of the sequence are sent in the dtype of the model")
    vocabulary_size: Any = idle("the model has a vocabulary of any size")

    @model_validator(mode="before")
    @classmethod
    def _other_names(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        given = {key: value for key, value in values.items() if key != "$schema"}  # for editors
        if "bfloat16" in given:
            if "bf16" in given:
                raise ValueError("bfloat16 is an older name of bf16: give only bf16")
            given["bf16"] = given.pop("bfloat16")
        if isinstance(given.get("steps_per_print"), float) and given["steps_per_print"] == float("inf"):
            given["steps_per_print"] = None  # some trainers write infinity for never
        zero, tuning = given.get("zero_optimization"), given.get("autotuning")
        tunes = isinstance(tuning, Mapping) and tuning.get("enabled") is True
        if tunes and isinstance(zero, Mapping) and zero.get("stage") in ("auto", "all"):  # DeepSpeed's for any stage
            given["zero_optimization"] = {key: value for key, value in zero.items() if key != "stage"}
        return given

    def notes(self) -> list[str]:
        """Return notes on the given keys that have no effect, with the reason; ``to_options.notes_of`` has all."""
        notes = super().notes()
        if self.torch_autocast.enabled and self.torch_autocast.dtype in ("float16", "fp16"):  # it has fp16's loss scale
            notes = [note for note in notes if not (note.startswith("fp16.") and "without enabled" in note)]
        wanted = self.data_types.grad_accum_dtype
        masters = "bf16" if self.bf16.enabled and self.bf16.bf16_master_weights_and_grads else "fp32"
        if wanted not in (None, masters):
            notes.append(
                f"data_types.grad_accum_dtype {wanted} does nothing: gradients are accumulated in the dtype of the "
                f"master weights, {masters}; communication_data_type sets the dtype in which replicas sum them"
            )
        return notes

    @property
    def tunes_microbatch(self) -> bool:
        """True if the microbatch size is to be found: it is auto, or autotuning is enabled, and no key sets it."""
        asked = self.train_micro_batch_size_per_gpu == "auto" or (
            self.autotuning.enabled and self.train_micro_batch_size_per_gpu is None
        )
        given = self.train_batch_size is not None and self.gradient_accumulation_steps is None
        return asked and given and not self.elasticity.enabled

    @property
    def tunes_stage(self) -> bool:
        """True if the ZeRO stage is to be found: autotuning is enabled, and no stage is given."""
        return self.autotuning.enabled and "stage" not in self.zero_optimization.model_fields_set

    @property
    def recomputation(self) -> ActivationCheckpointingConfig:
        """``activation_checkpointing``, with ``pipeline.activation_checkpoint_interval`` merged in."""
        section, other = self.activation_checkpointing, self.pipeline.activation_checkpoint_interval
        if section.enabled is False:
            return ActivationCheckpointingConfig(enabled=False)
        return section.model_copy(update={"interval": other}) if other and section.interval is None else section
