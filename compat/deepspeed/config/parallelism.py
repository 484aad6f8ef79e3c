"""Sections ``pipeline``, ``tensor_parallel`` and ``moe``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from .base import Section, SwitchSection, idle, refused, setting

_PLAN = "leave it out: triax.parallelize(model, grid, plan), called before initialize, shards layers by a plan"


class PipelineConfig(Section):
    """``pipeline``: the pipeline schedule."""

    schedule: str = setting("1f1b", "Name of a schedule, auto (search for one), or path of a .csv, .json or .txt file.")
    costs: tuple[Annotated[float, Strict(), Field(ge=0)], ...] = setting(
        (1.0, 1.0, 1.0),
        "For schedule auto: measured times of a forward pass, the input gradient, the weight gradient and (optional) a "
        "message, in any unit.",
        min_length=3,
        max_length=4,
    )
    memory: float | None = setting(
        None,
        "For schedule auto: limit of a rank's activations. 1 is the activations of one microbatch in 1/pipe of the "
        "model.",
        gt=0,
    )
    stages: int | None = setting(
        None,
        "Expected size of the grid's pipe axis, which Grid(pipe=...) sets; another size is an error. Under "
        "triax.Trainer it sets that axis.",
        auto=True,
        ge=1,
    )
    activation_checkpoint_interval: int | None = setting(
        None, "Another name of activation_checkpointing.interval.", ge=0
    )
    micro_batch_size: Any = idle("microbatches have train_micro_batch_size_per_gpu samples")
    partition: Any = idle("PipelineModule(..., partition=...) sets how layers are cut into stages")
    seed_layers: Any = idle("each layer's weights are drawn by the seed and its place in the list, equal on every grid")
    pipe_partitioned: Any = idle("each tensor rank sends its own shard to its peer in the next stage")
    grad_partitioned: Any = idle("each tensor rank sends its own shard to its peer in the next stage")
    use_reentrant: Any = idle("recomputation has one form")
    labels: Literal["read", "sent"] = setting(
        "read",
        "read: the last stage's ranks read the data too; sent: only the first stage's ranks read data, and send the "
        "labels.",
    )


class TensorParallelConfig(Section):
    """``tensor_parallel``: the expected size of the tensor axis."""

    autotp_size: int | None = setting(
        None,
        "Expected size of the grid's tensor axis, which Grid(tensor=...) sets; another size is an error. Under "
        "triax.Trainer it sets that axis. 0: not given.",
        ge=0,
    )
    tp_size: int | None = setting(None, "Another name of autotp_size.", ge=1)
    dtype: Any = refused("bf16 and fp16 set the dtype of the model: leave it out")
    tp_grain_size: Any = idle("Layout(unit=...) sets the units in which a dim is sharded")
    preset_model: Any = refused(f"{_PLAN}; triax.hf_layers knows the layers of Hugging Face's models")
    partition_config: Any = refused(_PLAN)
    tp_overlap_comm: Any = idle("collectives of the tensor axis always overlap with weight gradients")


class MoEConfig(SwitchSection):
    """``moe``: the expected size of the expert axis."""

    enabled: Any = idle("a model with MoE layers has experts")
    ep_size: int | None = setting(
        None,
        "Another name of expert_parallel_size: the size that Grid(expert=...) sets; another size is an error.",
        ge=1,
    )
    moe_experts: Any = refused("MoE(hidden, experts, top_k) in the model sets the number of experts: leave it out")
    num_experts: Any = refused("MoE(hidden, experts, top_k) in the model sets the number of experts: leave it out")
    type: Any = refused("MoE(..., shared_experts=...) in the model sets residual experts: leave it out", "standard")
