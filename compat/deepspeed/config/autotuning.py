"""Section ``autotuning``: microbatch size and ZeRO stage by formulas and measured steps, on the grid of the run."""

from __future__ import annotations

from typing import Any, Literal

from .base import SwitchSection, idle, setting

_GRID = "Grid(...) sets the sizes of the axes, and triax plan searches for them"
_BATCH = "train_batch_size sets the samples per step, and tuning does not change it"
_TRIALS = "formulas rank the sizes, and num_tuning_micro_batch_sizes of them are measured"
_INSIDE = "the steps are measured in the run itself, before its first step"


class AutotuningConfig(SwitchSection):
    """``autotuning``: how the microbatch size and the ZeRO stage are found: docs/plan.md."""

    enabled: bool = setting(
        False,
        "Find train_micro_batch_size_per_gpu, and zero_optimization.stage if it is not given (or auto), for a "
        "PipelineModule: docs/plan.md.",
    )
    memory: float | None = setting(
        None,
        "GB (1e9 bytes) that the tensors of a rank may take. null: a GPU's memory, or a share of the host's, less a "
        "margin.",
        gt=0.0,
    )
    min_train_micro_batch_size_per_gpu: int = setting(1, "Samples per microbatch, at least.", ge=1)
    max_train_micro_batch_size_per_gpu: int = setting(1024, "Samples per microbatch, at most.", ge=1)
    num_tuning_micro_batch_sizes: int = setting(
        3, "Number of fitting sizes to time; 1: take the largest that fits, without timing.", ge=1
    )
    start_profile_step: int = setting(1, "Untimed steps of each size, before the timed ones.", ge=0)
    end_profile_step: int = setting(3, "Steps of each size.", ge=1)
    results_dir: str | None = setting(
        None, "Folder for ds_config_optimal.json, the configuration with what was found, and results.json."
    )
    metric: Literal["throughput", "latency", "flops", "forward", "backward", "step"] | None = idle(
        "the batch has a fixed size, so the shortest step is best by every metric"
    )
    fast: Any = idle("tuning finds only the microbatch size and the ZeRO stage")
    tuner_type: Any = idle(_TRIALS)
    tuner_early_stopping: Any = idle(_TRIALS)
    tuner_num_trials: Any = idle(_TRIALS)
    max_train_batch_size: Any = idle(_BATCH)
    min_train_batch_size: Any = idle(_BATCH)
    mp_size: Any = idle(_GRID)
    exps_dir: Any = idle(_INSIDE)
    overwrite: Any = idle("results_dir is always replaced")
    metric_path: Any = idle(_INSIDE)
    arg_mappings: Any = idle("tuning changes the configuration given to triax.initialize, not a command line")
    model_info: Any = idle("the sizes of layers are read from the model")
    model_info_path: Any = idle("the sizes of layers are read from the model")
