"""``zero_optimization``: what the data axis shards, when it talks, and what is kept off the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from .config_base import Section, extra_of, idle, refused, setting

# Elements of gradient in one collective, and "auto".
_BUCKET = 2**22
_Elements = Annotated[int, Field(ge=0)]

_NO_BUFFERS = {
    **dict.fromkeys(("buffer_count", "buffer_size", "max_in_cpu"), "files are mapped, there are no buffers to size"),
    "fast_init": "state is made in the first step, on the disk",
    "pipeline": "pipeline_read and pipeline_write are its two halves",
    "ratio": "all of the optimizer's state is kept in one place",
}


class OffloadConfig(Section):
    """``zero_optimization.offload_param``: where shards of the weights are kept."""

    device: Literal["none", "cpu", "nvme"] = setting(
        "none", "none: with the model; cpu: the host's memory; nvme: a file.", auto=True
    )
    nvme_path: str | None = setting(None, "The folder of the file; it has no name there.")
    pin_memory: bool = setting(False, "Pin the host's memory, where the model is on a GPU.", auto=True)

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
        return given if isinstance(values, dict) else values


class OffloadOptimizerConfig(OffloadConfig):
    """``zero_optimization.offload_optimizer``: where its state, masters and accumulated gradients are kept."""

    pipeline_read: bool = setting(True, "On disk: read the next sub-group while one is updated.")
    pipeline_write: bool = setting(
        True, "On disk: a sub-group is written while the next is updated; false waits for it."
    )


class ZeroConfig(Section):
    """``zero_optimization``: what the data axis shards."""

    stage: int = setting(0, "0: nothing; 1: the optimizer's state; 2: gradients too; 3: weights too.", ge=0, le=3)
    reduce_bucket_size: int = setting(
        _BUCKET, "Elements of gradient that are reduced in one collective.", auto=True, ge=1
    )
    reduce_scatter: bool = setting(
        True, "Reduce-scatter gradients; false: all-reduce them, twice the bytes.", auto=True
    )
    reduce_each_microbatch: bool = setting(
        True,
        "Stages 2 and 3: reduce gradients after every backward pass; false: after a step's last one, holding them "
        "whole until then.",
    )
    allgather_partitions: bool = setting(
        True, "All-gather new weights after a step; false: every rank broadcasts its range.", auto=True
    )
    allgather_bucket_size: _Elements | None = setting(
        None, "Elements of new weights on their way at once, after a step; auto: all of them.", auto=True
    )
    overlap_comm: bool = setting(
        True, "Collectives run while something is computed; false: each is waited for at once.", auto=True
    )
    contiguous_gradients: bool = setting(
        True, "Gradients lie in flat buckets, true or false.", auto=True, status="inert"
    )
    round_robin_gradients: bool = setting(
        False, "Buckets are shared out over all replicas, true or false.", status="inert"
    )
    ignore_unused_parameters: bool = setting(
        True, "False: a step in which a parameter got no gradient is an error that names it."
    )
    stage3_keep_gathered: bool = setting(
        False, "Stage 3: gather a layer once a step and keep it whole, instead of for each pass through it."
    )
    stage3_prefetch_bucket_size: _Elements | None = setting(
        None, "Stage 3: elements of the layers to run next that are gathered ahead; auto: a layer.", auto=True
    )
    stage3_param_persistence_threshold: _Elements | None = setting(
        None, "Stage 3: parameters of at most so many elements stay whole; auto: 0.", auto=True
    )
    stage3_max_live_parameters: _Elements | None = setting(
        None, "Stage 3: beyond so many whole elements, nothing is kept or gathered ahead; auto: no limit.", auto=True
    )
    stage3_max_reuse_distance: _Elements | None = setting(
        None,
        "Stage 3: a layer that runs again before so many elements of others have run stays whole; auto: 0.",
        auto=True,
    )
    stage3_gather_16bit_weights_on_model_save: bool = setting(
        False, "engine.gather() returns whole weights in any stage, true or false.", auto=True, status="inert"
    )
    offload_optimizer: OffloadOptimizerConfig = setting(
        OffloadOptimizerConfig(), "Where the optimizer's state, masters and accumulated gradients are kept."
    )
    offload_param: OffloadConfig = setting(OffloadConfig(), "Stage 3: where shards of the weights are kept.")
    sub_group_size: Annotated[_Elements, Field(ge=1)] | None = setting(
        None, "Elements that the optimizer updates together; by default 16777216 with offload, else all.", auto=True
    )
    cpu_offload: bool = setting(False, 'An older name of offload_optimizer: {"device": "cpu"}.', status="older")
    cpu_offload_params: bool = setting(False, 'An older name of offload_param: {"device": "cpu"}.', status="older")
    cpu_offload_use_pin_memory: bool = setting(False, "An older name of pin_memory of both.", status="older")

    stage3_max_act_size: Any = idle("DeepSpeed has no such key; activation_checkpointing says what is kept")
    stage3_gather_fp16_weights_on_model_save: Any = idle("engine.gather() returns whole weights in any stage")
    stage3_model_persistence_threshold: Any = idle("stage3_param_persistence_threshold alone says what stays whole")
    stage3_module_granularity_threshold: Any = idle("a layer of the list is gathered as one, however it is built")
    stage3_allgather_sequential: Any = idle("all of a layer's buckets are gathered in the order of the layers")
    stage3_use_all_reduce_for_fetch_params: Any = idle("weights are all-gathered")
    use_multi_rank_bucket_allreduce: Any = idle("a bucket is reduced over all replicas at once")
    load_from_fp32_weights: Any = idle("masters start from the fp32 weights, before these are rounded")
    memory_efficient_linear: Any = idle(
        "autograd saves views of gathered weights, which hold nothing once these are released"
    )
    override_module_apply: Any = idle('modules are built as they are; device="meta" builds them shard by shard')
    parameter_alignment: Any = idle("ranges of buckets are padded as the collectives need it")
    pipeline_loading_checkpoint: Any = idle("nothing is loaded by this key")
    log_trace_cache_warnings: Any = idle("the order of layers is known, no trace of it is kept")
    enable_sanity_checks: Any = idle("what it would check is always checked")
    legacy_stage1: Any = idle("there is one stage 1")
    compute_grad_norm: Any = idle("the norm is always computed")
    zero_quantized_weights: bool = setting(
        False, "ZeRO++, stage 3: gather weights as blocks of 8 bits. Shards, and what is saved, are not rounded."
    )
    zero_quantized_nontrainable_weights: bool = setting(
        False, "ZeRO++, stage 3: gather those so that are not trained, whether or not the others are."
    )
    zero_quantized_gradients: bool = setting(
        False, "ZeRO++: reduce gradients as blocks of 4 bits: first within hosts, where replicas fill several alike."
    )
    zero_hpz_partition_size: int = setting(
        1,
        "ZeRO++, stage 3: so many consecutive replicas, those of a host, keep the weights once more among them, from "
        "a step's first gather on, and gather from there. 1: none do.",
        ge=1,
    )
    zeropp_loco_param: Any = refused("no error is fed back to quantised gradients: leave it out")
    mics_shard_size: Any = refused("shards go over the whole data axis: leave it out", -1)
    mics_hierarchical_params_gather: Any = refused("shards go over the whole data axis: leave it out")
    elastic_checkpoint: Any = refused("checkpoints are not this section's: leave it out")
    zenflow: Any = refused("the update waits for no late gradients: leave it out; offload_optimizer overlaps as it is")
    leaf_module: Any = refused("a layer of the list is gathered as one already: leave it out")

    @model_validator(mode="before")
    @classmethod
    def _older_names(cls, values: Any) -> Any:
        """What DeepSpeed called its sections before they were sections; and false for none at all."""
        if isinstance(values, bool):
            return {"stage": int(values)}  # DeepSpeed's first files: "zero_optimization": true
        if not isinstance(values, Mapping):
            return values
        given = dict(values)
        pin = given.get("cpu_offload_use_pin_memory") is True
        if pin:
            del given["cpu_offload_use_pin_memory"]
        for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_params", "offload_param")):
            if given.get(old) is True:
                if given.get(new):
                    raise ValueError(f"{old} is an older name of {new}: give the second alone")
                given[new] = {"device": "cpu", "pin_memory": pin}
                del given[old]
        return given

    @model_validator(mode="after")
    def _plus(self) -> ZeroConfig:
        """What of ZeRO++ does not go with something else."""
        if self.zero_quantized_gradients and not self.reduce_scatter and self.stage:
            raise ValueError(
                "zero_quantized_gradients is a way to reduce-scatter gradients, and reduce_scatter is false: give one"
            )
        if self.zero_hpz_partition_size > 1 and self.stage == 3 and self.offload_param.device != "none":
            raise ValueError(
                "zero_hpz_partition_size keeps a second shard of the weights in the model's memory, and offload_param "
                "has even the first elsewhere, for want of room there: give one of them"
            )
        return self

    def notes(self) -> list[str]:
        """What the user asked for that changes nothing here, and why."""
        notes = [reason for key, (value, reason) in _NOTHING.items() if getattr(self, key) == value]
        if self.offload_param.device != "none" and self.stage < 3:
            notes.append(
                f"offload_param keeps shards of the weights, and in stage {self.stage} they are whole: it does "
                "nothing; set stage 3, or leave it out"
            )
        kept = self.stage3_keep_gathered and self.stage3_max_live_parameters is None and self.stage == 3
        if self.zero_hpz_partition_size > 1 and kept:
            notes.append(
                "zero_hpz_partition_size keeps no second shard: stage3_keep_gathered gathers weights once a step"
            )
        for key in sorted(self.model_fields_set):
            stages = _STAGES.get(key, (3,) if key.startswith("stage3") else (0, 1, 2, 3))
            acts = "x-status" not in extra_of(type(self).model_fields[key])
            if acts and self.stage not in stages and getattr(self, key) != type(self).model_fields[key].default:
                notes.append(f"{key} acts in stage {' and '.join(map(str, stages))}, not in stage {self.stage}")
        return notes + super().notes()


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
    "zero_quantized_weights": (3,),
    "zero_quantized_nontrainable_weights": (3,),
    "zero_quantized_gradients": (1, 2, 3),
    "zero_hpz_partition_size": (3,),
    "reduce_scatter": (1, 2, 3),
    "reduce_each_microbatch": (2, 3),
    "allgather_partitions": (1, 2),
    "allgather_bucket_size": (1, 2),
}
