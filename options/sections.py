"""The sections and single options of an engine, each with its default and its meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..base.checks import SEEDS
from ..base.option_error import OptionError
from .base import Options, option
from .batch import Batch, BatchSizes
from .checkpoints import Checkpoints
from .compilation import Compile
from .fault_tolerance import FaultTolerance
from .local_updates import LocalSGD
from .lora import Lora
from .monitoring import Monitoring
from .named import GradientCompression
from .precision import Precision
from .recomputation import Recomputation
from .reduction import GradientReduction
from .schedule import ScheduleOptions
from .sparse_attention import SparseAttention
from .tuning import Tuning
from .zero import Zero


@dataclass(frozen=True, kw_only=True)
class EngineSections(Options):
    """Fields of ``EngineOptions``, which checks them against one another."""

    batch: Batch = option(Batch(), "Samples of a step, and of a microbatch.")
    optimizer: Any = option(
        None,
        "A function from parameter groups to an optimizer, such as functools.partial(torch.optim.AdamW, lr=1e-3); a "
        "torch optimizer over the model's parameters; or Optimizer(name, ...). None: the engine only evaluates.",
    )
    lr_scheduler: Any = option(
        None,
        "A function from the optimizer to a torch scheduler, stepped after each step; a scheduler over the optimizer; "
        "or LRSchedule(name, ...). None: constant rates.",
    )
    schedule: ScheduleOptions = option(ScheduleOptions(), "Pipeline schedule: its name, or ScheduleOptions(...).")
    zero: Zero = option(Zero(), "What replicas shard: ZeRO's stage, or Zero(...).")
    precision: Precision = option(Precision(), "Dtype of the weights, fp32, bf16, fp16 or fp64, or Precision(...).")
    clip: float | None = option(None, "Limit of the global gradient norm; None: no limit.", above=0.0)
    nan_loss: Literal["raise", "skip", "ignore"] = option(
        "raise",
        "If a loss or (without fp16) a gradient is nan or infinite: raise an error on every rank before any weight "
        "changes, skip the step (50 in a row are an error), or ignore it. With fp16 the loss scale handles gradients "
        "that overflow. One process without clipping computes no norm and checks only the loss.",
    )
    reduction: GradientReduction = option(GradientReduction(), "How gradients are summed over replicas.")
    compression: Any = option(
        None,
        "How the sum of gradients is compressed, in ZeRO stages 0 and 1: TopK(...) or PowerSGD(...) of "
        "triax.gradient_compression, or GradientCompression(name, ...). None: a plain sum.",
    )
    recompute: Recomputation = option(
        Recomputation(),
        "Activations that the backward pass recomputes: full, matmul, selective, or Recomputation(...).",
    )
    compile: Compile | None = option(None, "torch.compile of each layer: True, or Compile(...).")
    checkpoint: Checkpoints = option(Checkpoints(), "How checkpoints are written, and when automatically.")
    monitor: Monitoring = option(Monitoring(), "What the run writes and prints about itself.")
    local_updates: LocalSGD | None = option(
        None, "LocalSGD(...), DiLoCo(...) or AsyncDiLoCo(...): replicas step separately. None: together."
    )
    fault_tolerance: FaultTolerance | None = option(
        None, "Replicas that leave and join the run at a step: True, or FaultTolerance(...). None: a fixed number."
    )
    lora: Lora | None = option(None, "Low-rank adapters of linear layers; only these are trained.")
    sparse_attention: SparseAttention | None = option(None, "Block masks of the model's attention.")
    tuning: Tuning | None = option(None, "Search for the microbatch size and the ZeRO stage.")
    drop_last: bool = option(
        True,
        "Drop an epoch's incomplete last batch of the training data; False: fill it from the epoch's first samples.",
    )
    seed: int = option(0, "Seed of the order of data and of dropout.", least=0, below=SEEDS)

    def batch_sizes(self, replicas: int) -> BatchSizes:
        """Return the three batch sizes for a number of replicas, as ``Batch.sizes``."""
        try:
            return self.batch.sizes(replicas)
        except OptionError as error:
            raise error.within("batch") from error

    @property
    def tunes_microbatch(self) -> bool:
        """True if the microbatch size is to be found: it is auto, or not given beside ``tuning``."""
        batch = self.batch
        asked = batch.microbatch == "auto" or (self.tuning is not None and batch.microbatch is None)
        return asked and batch.size is not None and batch.microbatches is None

    @property
    def compressor(self) -> str | None:
        """Name of the compression of the gradient sum; None for a plain sum."""
        given: Any = self.compression
        return (
            None
            if given is None
            else given.type
            if isinstance(given, GradientCompression)
            else type(given).__name__.lower()
        )
