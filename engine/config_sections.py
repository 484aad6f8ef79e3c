"""The sections of the configuration, but for ``zero_optimization``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Strict, model_validator

from .config_base import Section, idle, refused, setting


class OptimizerConfig(Section):
    """``optimizer``: which, and its arguments."""

    type: str = Field(
        description="DeepSpeed's or torch.optim's name; those that need whole tensors (Adafactor, Muon) in stage 0."
    )
    params: dict[str, Any] = Field(default_factory=dict, description="Its arguments: lr, betas, weight_decay, ...")
    legacy_fusion: Any = idle("torch's fused kernels are used where there are any")

    def notes(self) -> list[str]:
        """What of an optimizer's arguments changes nothing here, and why."""
        names = {"cuda_aware", "comm_backend_name"} & set(self.params)
        why = "what is compressed travels as the grid has it: by NCCL where there is CUDA, else by gloo"
        return [f"params.{name} does nothing: {why}" for name in sorted(names)] + super().notes()


class SchedulerConfig(Section):
    """``scheduler``: the learning rates, stepped once a batch."""

    type: str = Field(
        description="WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, ReduceLROnPlateau (which goes by "
        "the loss), or a name of torch.optim.lr_scheduler."
    )
    params: dict[str, Any] = Field(default_factory=dict, description="Its arguments, by DeepSpeed's or torch's names.")


class PipelineConfig(Section):
    """``pipeline``: how stages take turns."""

    schedule: str = setting("1f1b", "A schedule's name, auto (searched for), or the path of a .csv or .json file.")
    costs: tuple[Annotated[float, Strict(), Field(ge=0)], ...] = setting(
        (1.0, 1.0, 1.0),
        "For auto: measured costs of F, I, W and a message, in any unit.",
        min_length=3,
        max_length=4,
    )
    memory: float | None = setting(
        None, "For auto: activations a rank may hold, in microbatches through 1/pipe of the model.", gt=0
    )
    stages: int | None = setting(
        None,
        "Held against the grid's pipe axis, which Grid(pipe=...) makes; another number is an error.",
        auto=True,
        ge=1,
    )
    activation_checkpoint_interval: int | None = setting(
        None, "Another name of activation_checkpointing.interval.", ge=0
    )
    micro_batch_size: Any = idle("microbatches have train_micro_batch_size_per_gpu samples")
    partition: Any = idle("PipelineModule(..., partition=...) says how layers are cut into stages")
    seed_layers: Any = idle("weights are drawn by the seed and their names, alike on every grid")
    pipe_partitioned: Any = idle("each tensor rank sends what it holds to its own peer")
    grad_partitioned: Any = idle("each tensor rank sends what it holds to its own peer")
    use_reentrant: Any = idle("recomputation has one form")


class TensorParallelConfig(Section):
    """``tensor_parallel``: held against the grid."""

    autotp_size: int | None = setting(
        None,
        "Held against the grid's tensor axis, which Grid(tensor=...) makes; another number is an error. 0: not given.",
        ge=0,
    )
    tp_size: int | None = setting(None, "The same.", ge=1)
    dtype: Any = refused("bf16 and fp16 say in which dtype a model computes: leave it out")
    tp_grain_size: Any = idle("Layout(unit=...) says in which units a dim is shared out")


class Bf16Config(Section):
    """``bf16``: weights in bfloat16, masters in fp32."""

    enabled: bool = setting(False, "Weights in bfloat16; masters, state and accumulated gradients in fp32.")
    immediate_grad_update: Any = idle("a gradient is added to the fp32 sum as soon as it is made")
    check_grad_overflow: Any = refused(
        "nan_loss says what is done about gradients that are not finite: leave it out; nan_loss is raise by default"
    )
    bf16_master_weights_and_grads: Any = refused(
        "masters are fp32: leave it out; offload_optimizer makes room for them"
    )
    bf16_optimizer_states: Any = refused("the state is fp32, as masters are: leave it out")


class Fp16Config(Section):
    """``fp16``: weights in float16, masters in fp32, and a loss scale."""

    enabled: bool = setting(False, "Weights in float16; masters, state and accumulated gradients in fp32.")
    loss_scale: float = setting(0.0, "A fixed scale; 0: one that adapts.", auto=True, ge=0.0)
    initial_scale_power: int = setting(16, "The scale starts at 2 to this power.", auto=True, ge=0, le=1000)
    loss_scale_window: int = setting(1000, "Steps without overflow before it doubles.", auto=True, ge=1)
    hysteresis: int = setting(2, "Overflows before it halves.", auto=True, ge=1)
    consecutive_hysteresis: bool = setting(False, "A step without overflow gives all of hysteresis back.")
    min_loss_scale: float = setting(1.0, "It does not fall below this.", auto=True, gt=0.0)
    auto_cast: Any = idle("floating-point inputs are always cast to the model's dtype")
    fp16_master_weights_and_grads: Any = refused(
        "masters are fp32: leave it out; offload_optimizer makes room for them"
    )


class DataTypesConfig(Section):
    """``data_types``: dtypes that follow from ``bf16`` and ``fp16``."""

    grad_accum_dtype: Any = refused(
        "gradients are summed over microbatches in the masters' dtype, fp32 under bf16 and fp16: write fp32", "fp32"
    )
    param_dtype: Any = refused("bf16 and fp16 say in which dtype weights are: enable one, or leave it out")
    buffer_dtype: Any = refused("buffers have the dtype of the weights: leave it out")
    keep_in_fp32_modules: Any = refused("bf16 and fp16 cast all modules: leave it out", "auto")


class ActivationCheckpointingConfig(Section):
    """``activation_checkpointing``: what the backward pass computes again, and what it keeps for that."""

    interval: int | None = setting(
        None, "Recompute groups of so many layers of a stage; 0: none. null: the model's.", ge=0
    )
    granularity: Literal["full", "selective", "matmul"] | None = setting(
        None,
        "full: keep the groups' inputs; matmul: and what matrix products return; selective: attention's core alone is "
        "recomputed. Given without an interval, every layer is a group.",
    )
    checkpointable_layers: tuple[Annotated[str, Strict()], ...] | None = setting(
        None, "The classes of layers to recompute. By default the model's, or all."
    )
    number_checkpoints: int | None = setting(
        None, "Instead of an interval: how many groups the layers of a rank are cut into.", ge=1
    )
    partition_activations: bool = setting(False, "Keep 1/tensor of each input, where all tensor ranks hold the same.")
    cpu_checkpointing: bool = setting(False, "Keep inputs in the host's memory.")
    contiguous_memory_optimization: bool = setting(
        False, "Copy inputs into one buffer; needs partition_activations and number_checkpoints."
    )
    synchronize_checkpoint_boundary: bool = setting(False, "Wait for the device where a group begins and ends.")
    profile: bool = setting(False, "Log the time of recomputation after each step.")
    preserve_rng_state: bool = setting(
        True, "Recompute with torch's generators as they were. triax's Dropout does not need it."
    )
    enabled: Any = idle("DeepSpeed has no such key; interval, granularity or number_checkpoints turn it on")

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


class MonitorConfig(Section):
    """Where rank 0 writes the numbers of each step."""

    enabled: bool = setting(False, "Write.")
    output_path: str = setting("", "A folder; by default the current one.")
    job_name: str = setting("triax", "The folder in it.")


class TimelineConfig(Section):
    """``timeline``: a trace of one step, across all ranks, in one file."""

    step: int | None = setting(None, "Which: 1 is the first one of the process; null: none.", ge=1)
    file: str | None = setting(None, "Where; by default timeline.json, in json_monitor's folder if that is enabled.")


class WandbConfig(Section):
    """``wandb``: a run of Weights & Biases, which rank 0 logs to."""

    enabled: bool = setting(False, "Log.")
    group: str | None = setting(None, "The group of the run.")
    team: str | None = setting(None, "The team whose project it is; by default yours.")
    project: str = setting("triax", "The project.")
