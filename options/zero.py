"""ZeRO: stage, collectives, offload, and ZeRO++."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..base.option_error import Note, refusal
from .base import Options, option

# The stages in which an option acts, for options that do not act in all stages.
_STAGES = {
    "shard_size": (1, 2, 3),
    "reduce_scatter": (1, 2, 3),
    "reduce_each_microbatch": (2, 3),
    "allgather_partitions": (1, 2),
    "allgather_bucket_size": (1, 2),
    "keep_gathered": (3,),
    "prefetch_bucket_size": (3,),
    "persistence_threshold": (3,),
    "max_live_parameters": (3,),
    "max_reuse_distance": (3,),
    "quantized_weights": (3,),
    "quantized_frozen_weights": (3,),
    "quantized_gradients": (1, 2, 3),
    "hpz_partition_size": (3,),
}


@dataclass(frozen=True, kw_only=True)
class Offload(Options):
    """Place of tensors outside of the model's device."""

    MAIN: ClassVar = "device"

    device: Literal["none", "cpu", "nvme"] = option(
        "none", "none: on the model's device; cpu: host memory; nvme: a file."
    )
    path: str | None = option(None, "nvme: folder on the disk for the file, which is removed when the process ends.")
    pin_memory: bool = option(False, "Pin host memory, if the model is on a GPU.")

    def check(self) -> None:
        """Check that a file has a folder."""
        if self.device == "nvme" and not self.path:
            raise refusal("device nvme needs <path>, a folder on the disk: write it")

    def notes(self) -> list[Note]:
        """Return notes on options that have no effect."""
        notes = []
        if self.path is not None and self.device != "nvme":
            notes.append(Note("path", "does nothing without device nvme: write that device, or leave <path> out"))
        if self.pin_memory and self.device == "nvme":
            notes.append(Note("pin_memory", "does nothing with device nvme: pages of a file cannot be pinned"))
        return notes


@dataclass(frozen=True, kw_only=True)
class OffloadOptimizer(Offload):
    """Place of optimizer state, master weights and accumulated gradients, and how the step reads and writes them."""

    pipeline_read: bool = option(True, "nvme: read the next sub-group while one is updated.")
    pipeline_write: bool = option(True, "nvme: write a sub-group while the next one is updated; False: wait for it.")


@dataclass(frozen=True, kw_only=True)
class LeafModules(Options):
    """Modules that stage 3 gathers as one unit, in a model that is not a PipelineModule."""

    classes: tuple[str, ...] = option((), "Classes, by name, with or without their Python module.")
    names: tuple[str, ...] = option((), "Whole names of modules in the model.")
    name_suffixes: tuple[str, ...] = option((), "Ends of names.")


@dataclass(frozen=True, kw_only=True)
class Zero(Options):
    """ZeRO: what the replicas shard, and how they communicate.

    >>> zero = triax.Zero(stage=3, offload_optimizer="cpu")
    >>> engine = triax.Engine(nn.Linear(64, 64), optimizer=triax.Optimizer("Adam"), batch=1, zero=zero)
    >>> engine.memory_report()["offloaded"]["cpu"]  # bytes of 64 * 65 numbers, and of Adam's two moments
    {'gradients': 16640, 'optimizer': 33280}
    """

    MAIN: ClassVar = "stage"

    stage: Literal[0, 1, 2, 3, "auto"] = option(
        0,
        "What replicas shard. 0: nothing; 1: optimizer state; 2: gradients too; 3: weights too; auto: found with "
        "Tuning.",
    )
    shard_size: int | None = option(
        None,
        "Stages 1 to 3: number of consecutive replicas (usually those of one host) that shard among themselves (HSDP). "
        "Each such group holds a copy of the model: weights are gathered within a group, and gradients are summed "
        "between groups. None: all replicas are one group.",
        least=1,
    )
    bucket_size: int = option(2**22, "Gradient elements per collective.", least=1)
    # Acts in zero/gradients.py, and in stage 3 in zero/layer_gather.py.
    overlap_comm: bool = option(True, "Overlap collectives with computation; False: wait for each collective.")
    reduce_scatter: bool = option(True, "Reduce-scatter gradients; False: all-reduce them, with twice the bytes.")
    reduce_each_microbatch: bool = option(
        True,
        "Stages 2 and 3: reduce gradients after every backward pass; False: after the last one of a step, with whole "
        "gradients until then.",
    )
    allgather_partitions: bool = option(
        True, "All-gather new weights after a step; False: every rank broadcasts its shard."
    )
    allgather_bucket_size: int | None = option(
        None, "Elements of new weights in flight at once after a step; None: 4194304.", least=0
    )
    allow_unused: bool = option(
        True, "False: raise an error that names the parameter if a step gives a parameter no gradient."
    )
    sub_group_size: int | None = option(
        None, "Elements per optimizer update; None: 16777216 with offload, else all.", least=1
    )
    keep_gathered: bool = option(
        False, "Stage 3: gather a layer once per step and keep it whole, instead of gathering it for each pass."
    )
    prefetch_bucket_size: int | None = option(
        None, "Stage 3: elements of the next layers to prefetch; None: one layer.", least=0
    )
    persistence_threshold: int = option(0, "Stage 3: parameters with at most this many elements stay whole.", least=0)
    max_live_parameters: int | None = option(
        None,
        "Stage 3: if more than this many elements are gathered, no layer is kept or prefetched; None: no limit.",
        least=0,
    )
    max_reuse_distance: int = option(
        0, "Stage 3: a layer stays whole if it runs again within this many elements of other layers.", least=0
    )
    leaf_modules: LeafModules = option(LeafModules(), "Stage 3, for a plain module: modules gathered as one unit.")
    offload_optimizer: OffloadOptimizer = option(
        OffloadOptimizer(), "Where optimizer state, master weights and accumulated gradients are stored."
    )
    offload_parameters: Offload = option(Offload(), "Stage 3: where shards of the weights are stored.")
    quantized_weights: bool = option(
        False, "ZeRO++, stage 3: gather weights in blocks of 8 bits. Shards and checkpoints are not rounded."
    )
    quantized_frozen_weights: bool = option(
        False, "ZeRO++, stage 3: gather weights that are not trained in blocks of 8 bits."
    )
    quantized_gradients: bool = option(
        False,
        "ZeRO++: reduce gradients in blocks of 4 bits; if all hosts have the same number of replicas, within hosts "
        "first.",
    )
    hpz_partition_size: int = option(
        1,
        "ZeRO++, stage 3: number of consecutive replicas (usually those of one host) that share a second copy of the "
        "weights. After a layer's first gather in a step, its further gathers use that copy. 1: no second copy.",
        least=1,
    )

    @property
    def known_stage(self) -> int:
        """The stage.

        Raises:
            OptionError: the stage is auto, and no search has found it.
        """
        if self.stage == "auto":
            raise refusal("<stage> auto works only for a PipelineModule, in Python: give a stage from 0 to 3")
        return self.stage

    def check(self) -> None:
        """Check the options of ZeRO++ against the others."""
        savings = ("quantized_weights", "quantized_frozen_weights", "quantized_gradients", "hpz_partition_size")
        if self.shard_size is not None and (given := next((name for name in savings if self.changes(name)), None)):
            raise refusal(
                f"<shard_size> is {self.shard_size}, so that weights are gathered within a group of replicas, and "
                f"<{given}> saves bytes of gathers and sums over all replicas: leave one of them out"
            )
        if self.quantized_gradients and not self.reduce_scatter and self.stage:
            raise refusal(
                "<quantized_gradients> is true and <reduce_scatter> is false, but quantized gradients are "
                "always reduce-scattered: change one of them",
            )
        if self.hpz_partition_size > 1 and self.stage == 3 and self.offload_parameters.device != "none":
            raise refusal(
                f"<hpz_partition_size> is {self.hpz_partition_size}, which keeps a second shard of the weights "
                "on the device, but <offload_parameters> moves the first one off it to save memory: leave one of them "
                "out",
            )

    def notes(self) -> list[Note]:
        """Return notes on options that have no effect in this stage."""
        notes = super().notes()
        if self.offload_parameters.device != "none" and self.stage in (0, 1, 2):
            notes.append(
                Note(
                    "offload_parameters",
                    f"does nothing in stage {self.stage}, where weights are whole: set stage 3, or leave it out",
                )
            )
        if self.hpz_partition_size > 1 and self.keep_gathered and self.max_live_parameters is None and self.stage == 3:
            notes.append(
                Note("hpz_partition_size", "keeps no second shard: <keep_gathered> gathers weights once a step")
            )
        for name, stages in _STAGES.items():
            if self.stage not in (*stages, "auto") and self.changes(name):
                acts = " and ".join(map(str, stages))
                notes.append(Note(name, f"acts in stage {acts}, not in stage {self.stage}"))
        return notes
