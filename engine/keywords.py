"""Types of the arguments and keywords of ``triax.Engine``, for checkers of types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypedDict

from torch.utils.data import Dataset

from ..data.token_data import TokenData
from ..options.batch import Batch
from ..options.checkpoints import Checkpoints
from ..options.compilation import Compile
from ..options.fault_tolerance import FaultTolerance
from ..options.local_updates import LocalSGD
from ..options.lora import Lora
from ..options.monitoring import Monitoring
from ..options.precision import Precision
from ..options.recomputation import Recomputation
from ..options.reduction import GradientReduction
from ..options.schedule import ScheduleOptions
from ..options.sparse_attention import SparseAttention
from ..options.tuning import Tuning
from ..options.zero import Zero
from ..pipe.program.schedule import Schedule

Samples = Dataset[Any] | TokenData  # training data
Collate = Callable[[list[Any]], Any]  # makes a batch of samples
Trained = Iterable[Any]  # parameters to train, or groups of them
_Section = Mapping[str, Any]


class EngineKeywords(TypedDict, total=False):
    """Keywords of ``triax.Engine``: the fields of ``EngineOptions``, and what may stand for a section."""

    batch: Batch | int | _Section
    optimizer: Any
    lr_scheduler: Any
    schedule: ScheduleOptions | Schedule | str | _Section
    zero: Zero | Literal[0, 1, 2, 3, "auto"] | _Section
    precision: Precision | Literal["fp32", "bf16", "fp16", "fp64"] | _Section | None
    clip: float | None
    nan_loss: Literal["raise", "skip", "ignore"]
    reduction: GradientReduction | _Section
    compression: Any
    recompute: Recomputation | Literal["none", "full", "selective", "matmul"] | _Section
    compile: Compile | bool | _Section | None
    checkpoint: Checkpoints | _Section
    monitor: Monitoring | _Section
    local_updates: LocalSGD | _Section | None
    fault_tolerance: FaultTolerance | bool | _Section | None
    lora: Lora | int | bool | _Section | None
    sparse_attention: SparseAttention | _Section | None
    tuning: Tuning | bool | _Section | None
    drop_last: bool
    seed: int
