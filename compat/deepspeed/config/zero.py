"""Section ``zero_optimization``: ZeRO's stage, its collectives, offload, and ZeRO++."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from .base import Section, idle, refused, setting

# Default of reduce_bucket_size, and its "auto".
_BUCKET = 2**22
_Elements = Annotated[int, Field(ge=0)]

_Names = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]

_MAPPED = "files are memory-mapped, without buffers: the operating system caches what fits in host memory"


class OffloadConfig(Section):
    """``zero_optimization.offload_param``: where shards of the weights are stored."""

    device: Literal["none", "cpu", "nvme"] = setting(
        "none", "none: on the model's device; cpu: host memory; nvme: a file.", auto=True
    )
    nvme_path: str | None = setting(None, "Folder on the disk for the file, which is removed when the process ends.")
    pin_memory: bool = setting(False, "Pin host memory, if the model is on a GPU.", auto=True)
    buffer_count: Any = idle(_MAPPED)
    buffer_size: Any = idle(_MAPPED)
    max_in_cpu: Any = idle(_MAPPED)

    @model_validator(mode="before")
    @classmethod
    def _null(cls, values: Any) -> Any:
        return {} if values is None else values


class OffloadOptimizerConfig(OffloadConfig):
    """``zero_optimization.offload_optimizer``: where optimizer state, master weights and gradients are stored."""

    pipeline_read: bool = setting(True, "nvme: read the next sub-group while one is updated.")
    pipeline_write: bool = setting(True, "nvme: write a sub-group while the next one is updated; false: wait for it.")
    pipeline: Any = idle("pipeline_read and pipeline_write set this")
    fast_init: Any = idle("state is created in the first step, in its place")
    ratio: Any = idle("all optimizer state is offloaded, and all of it is updated on the CPU")


class LeafModuleConfig(Section):
    """``zero_optimization.leaf_module``: modules that stage 3 gathers as one unit."""

    classes: _Names = setting([], "Classes, by name, with or without their Python module.")
    names: _Names = setting([], "Whole names of modules in the model.")
    name_suffixes: _Names = setting([], "Ends of names.")


class ZeroConfig(Section):
    """``zero_optimization``: what the data axis shards."""

    stage: int = setting(
        0, "What replicas shard. 0: nothing; 1: optimizer state; 2: gradients too; 3: weights too.", ge=0, le=3
    )
    reduce_bucket_size: int = setting(_BUCKET, "Gradient elements per collective.", auto=True, ge=1)
    reduce_scatter: bool = setting(
        True, "Reduce-scatter gradients; false: all-reduce them, with twice the bytes.", auto=True
    )
    reduce_each_microbatch: bool = setting(
        True,
        "Stages 2 and 3: reduce gradients after every backward pass; false: after the last one of a step, with whole "
        "gradients until then.",
    )
    allgather_partitions: bool = setting(
        True, "All-gather new weights after a step; false: every rank broadcasts its shard.", auto=True
    )
    allgather_bucket_size: _Elements | None = setting(
        None, "Elements of new weights in flight at once after a step; auto: 4194304.", auto=True
    )
    overlap_comm: bool = setting(
        True, "Overlap collectives with computation; false: wait for each collective.", auto=True
    )
    contiguous_gradients: bool = setting(
        True, "No effect: gradients are always in flat buckets.", auto=True, status="inert"
    )
    round_robin_gradients: bool = setting(
        False, "No effect: every bucket is always sharded over all replicas.", status="inert"
    )
    ignore_unused_parameters: bool = setting(
        True, "false: raise an error that names the parameter if a step gives a parameter no gradient."
    )
    stage3_keep_gathered: bool = setting(
        False, "Stage 3: gather a layer once per step and keep it whole, instead of gathering it for each pass."
    )
    stage3_prefetch_bucket_size: _Elements | None = setting(
        None, "Stage 3: elements of the next layers to prefetch; auto: one layer.", auto=True
    )
    stage3_param_persistence_threshold: _Elements | None = setting(
        None, "Stage 3: parameters with at most this many elements stay whole; auto: 0.", auto=True
    )
    stage3_max_live_parameters: _Elements | None = setting(
        None,
        "Stage 3: if more than this many elements are gathered, no layer is kept or prefetched; auto: no limit.",
        auto=True,
    )
    stage3_max_reuse_distance: _Elements | None = setting(
        None,
        "Stage 3: a layer stays whole if it runs again within this many elements of other layers; auto: 0.",
        auto=True,
    )
    stage3_gather_16bit_weights_on_model_save: bool = setting(
        False, "No effect: engine.gather() returns whole weights in every stage.", auto=True, status="inert"
    )
    stage3_gather_fp16_weights_on_model_save: bool = setting(
        False, "Older name of stage3_gather_16bit_weights_on_model_save.", status="older"
    )
    offload_optimizer: OffloadOptimizerConfig = setting(
        OffloadOptimizerConfig(), "Where optimizer state, master weights and accumulated gradients are stored."
    )
    offload_param: OffloadConfig = setting(OffloadConfig(), "Stage 3: where shards of the weights are stored.")
    sub_group_size: Annotated[_Elements, Field(ge=1)] | None = setting(
        None, "Elements per optimizer update; null: 16777216 with offload, else all.", auto=True
    )
    cpu_offload: bool = setting(False, 'Older name of offload_optimizer: {"device": "cpu"}.', status="older")
    cpu_offload_params: bool = setting(False, 'Older name of offload_param: {"device": "cpu"}.', status="older")
    cpu_offload_param: bool = setting(False, 'Older name of offload_param: {"device": "cpu"}.', status="older")
    cpu_offload_use_pin_memory: bool = setting(False, "Older name of pin_memory in both sections.", status="older")

    stage3_max_act_size: Any = idle(
        "DeepSpeed has no such key; activation_checkpointing sets which activations are kept"
    )
    stage3_model_persistence_threshold: Any = idle("only stage3_param_persistence_threshold sets what stays whole")
    stage3_module_granularity_threshold: Any = idle("a layer of the list is always gathered as one")
    stage3_allgather_sequential: Any = idle("buckets are gathered in the order of the layers")
    stage3_use_all_reduce_for_fetch_params: Any = idle("weights are all-gathered")
    use_multi_rank_bucket_allreduce: Any = idle("a bucket is always reduced over all replicas at once")
    load_from_fp32_weights: Any = idle("master weights start from the fp32 weights, before rounding")
    memory_efficient_linear: Any = idle(
        "autograd saves views of gathered weights, which take no memory after their release"
    )
    override_module_apply: Any = idle('modules are built unchanged; device="meta" builds them shard by shard')
    parameter_alignment: Any = idle("buckets are padded as the collectives need it")
    pipeline_loading_checkpoint: Any = idle("this key loads nothing")
    log_trace_cache_warnings: Any = idle("the order of layers is known without a trace")
    enable_sanity_checks: Any = idle("these checks always run")
    legacy_stage1: Any = idle("there is one stage 1")
    compute_grad_norm: Any = idle("the norm is always computed")
    save_muon_momentum_buffer_in_memory: Any = idle("Muon's momentum is never on disk")
    zero_quantized_weights: bool = setting(
        False, "ZeRO++, stage 3: gather weights in blocks of 8 bits. Shards and checkpoints are not rounded."
    )
    zero_quantized_nontrainable_weights: bool = setting(
        False, "ZeRO++, stage 3: gather weights that are not trained in blocks of 8 bits."
    )
    zero_quantized_gradients: bool = setting(
        False,
        "ZeRO++: reduce gradients in blocks of 4 bits; if all hosts have the same number of replicas, within hosts "
        "first.",
    )
    zero_hpz_partition_size: int = setting(
        1,
        "ZeRO++, stage 3: number of consecutive replicas (usually those of one host) that share a second copy of the "
        "weights. After a layer's first gather in a step, its further gathers use that copy. 1: no second copy.",
        ge=1,
    )
    zeropp_loco_param: Any = refused("quantized gradients have no error feedback: leave it out")
    mics_shard_size: Any = refused("weights are sharded over the whole data axis: leave it out", -1)
    mics_hierarchical_params_gather: Any = refused("weights are sharded over the whole data axis: leave it out")
    elastic_checkpoint: Any = idle("every checkpoint loads on any grid")
    zenflow: Any = refused(
        "updates with late gradients are not supported: leave it out; offload_optimizer overlaps by default"
    )
    leaf_module: LeafModuleConfig = setting(
        LeafModuleConfig(), "Stage 3, for a model that is not a PipelineModule: modules gathered as one unit."
    )

    @model_validator(mode="before")
    @classmethod
    def _older_names(cls, values: Any) -> Any:
        """Translate DeepSpeed's older keys, and true or false in place of the section."""
        if isinstance(values, bool):
            return {"stage": int(values)}  # DeepSpeed's first files: "zero_optimization": true
        if not isinstance(values, Mapping):
            return values
        # DeepSpeed takes the keys of stage 3 without their prefix too.
        given = {f"stage3_{key}" if f"stage3_{key}" in cls.model_fields else key: values[key] for key in values}
        if len(given) < len(values):
            twice = next(key for key in values if f"stage3_{key}" in values)
            raise ValueError(f"{twice} is another name of stage3_{twice}: give only the second")
        if given.get("stage3_gather_fp16_weights_on_model_save") is True:
            del given["stage3_gather_fp16_weights_on_model_save"]
            given["stage3_gather_16bit_weights_on_model_save"] = True
        pin = given.get("cpu_offload_use_pin_memory") is True
        if pin:
            del given["cpu_offload_use_pin_memory"]
        for old, new in (
            ("cpu_offload", "offload_optimizer"),
            ("cpu_offload_params", "offload_param"),
            ("cpu_offload_param", "offload_param"),
        ):
            if given.get(old) is True:
                if given.get(new):
                    raise ValueError(f"{old} is an older name of {new}: give only the second")
                given[new] = {"device": "cpu", "pin_memory": pin}
                del given[old]
        return given

    def __getattr__(self, name: str) -> Any:
        """Return ``stage3_...`` under DeepSpeed's name in Python, which is without the prefix."""
        if f"stage3_{name}" in type(self).model_fields:
            return getattr(self, f"stage3_{name}")
        return super().__getattr__(name)  # type: ignore[misc]  # pydantic hides it from type checkers
