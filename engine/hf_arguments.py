"""``triax.TrainingArguments``: transformers' own, with a configuration in DeepSpeed's dialect.

Imported when it is first used, and transformers with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..grid import Grid
from .config_base import ConfigError
from .hf_filling import Filling, wanted

try:
    import accelerate  # noqa: F401 (the Trainer's, which transformers asks for late)
    import transformers
except ImportError as missing:
    raise wanted(missing) from missing

# What these arguments ask for is done otherwise, or not at all.
_REFUSED = {
    "fsdp": "ZeRO shards here: leave it out, and write zero_optimization.stage 3",
    "parallelism_config": "leave it out, and write tensor_parallel.autotp_size",
    "torch_compile": "nothing is compiled here: leave it out",
    "torch_compile_backend": "it turns torch_compile on, and nothing is compiled here: leave it out",
    "torch_compile_mode": "it turns torch_compile on, and nothing is compiled here: leave it out",
    "save_on_each_node": "rank 0 alone has whole weights to write, and checkpoints are one folder that all nodes see: "
    "leave it out",
    "auto_find_batch_size": "an engine's batch has one size: leave it out, and set per_device_train_batch_size",
    "fp16_full_eval": "evaluation computes in the dtype of training: leave it out, and pass fp16=True",
    "bf16_full_eval": "evaluation computes in the dtype of training: leave it out, and pass bf16=True",
}


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """``transformers.TrainingArguments`` with ``triax=``, the configuration; see docs/huggingface.md.

    The grid is made here, before anything else asks for a process group: ``tensor_parallel.autotp_size`` (or
    ``tp_size``) tensor ranks, and as many replicas as there are processes for. Without a launcher it is one process.

    Attributes:
        triax: a dict, the path of a JSON file, or JSON. ``deepspeed=`` is the same: its value moves here, and DeepSpeed
            is not needed. None: all from the other arguments.
        filling: that configuration, as far as the arguments fill it in.

    Raises:
        ConfigError: a configuration that cannot be read; an argument that cannot act; processes that transformers and
            triax count differently.
    """

    triax: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "A configuration in DeepSpeed's dialect: a dict, a JSON file's path, or JSON."}
    )

    _VALID_DICT_FIELDS = [*transformers.TrainingArguments._VALID_DICT_FIELDS, "triax"]  # noqa: RUF012 (as there)

    def __post_init__(self) -> None:
        if self.triax is not None and self.deepspeed is not None:
            raise ConfigError("triax= and deepspeed= are one configuration: give one of them")
        if self.triax is None:
            self.triax, self.deepspeed = self.deepspeed, None
        self.filling = Filling(self.triax if self.triax is not None else {})
        for name, instead in _REFUSED.items():
            if getattr(self, name):
                raise ConfigError(f"{name}={getattr(self, name)!r}: {instead}")
        if self.save_only_model and self.load_best_model_at_end:
            raise ConfigError(
                "load_best_model_at_end reads triax's checkpoints, which save_only_model leaves out: give one of them"
            )
        tensor = self.filling.tensor
        if tensor > 1 and self.train_sampling_strategy == "batch_rebalance":
            raise ConfigError(
                "train_sampling_strategy='batch_rebalance' shares samples out over all processes, and tensor ranks "
                "see the same ones: take another, or leave tensor_parallel out"
            )
        stage3 = self.filling.get("zero_optimization.stage") == 3
        if self.use_liger_kernel and (tensor > 1 or stage3):
            what = f"{tensor} tensor ranks" if tensor > 1 else "zero_optimization.stage 3"
            raise ConfigError(
                f"use_liger_kernel=True with {what}: its loss reads the head's weight itself, of which a rank has a "
                "part: leave it out, or take 1 tensor rank and stage 0, 1 or 2"
            )
        self._grid: Grid | None = None
        if self.grid.device.type == "cpu":
            self.use_cpu = True  # else accelerate takes each process of a machine without a GPU for a run of its own
        super().__post_init__()
        self._n_gpu = min(self._n_gpu, 1)  # one process, one device: no DataParallel
        if self.deepspeed_plugin is not None:
            raise ConfigError(
                "the launcher asks accelerate for DeepSpeed: start with triax run or torchrun, and give the "
                "configuration as triax="
            )
        if self.world_size != self.grid.size:
            raise ConfigError(
                f"accelerate counts {self.world_size} processes, and triax {self.grid.size}: start them with triax "
                "run or torchrun"
            )
        config: Any = self.accelerator_config
        if config.split_batches or (tensor > 1 and config.dispatch_batches):
            raise ConfigError(
                "accelerator_config: split_batches, and with tensor ranks dispatch_batches, would change which samples "
                "a replica sees: leave them out"
            )
        # The engine knows itself which pass is the last one: the loop should not look for a DDP to keep silent.
        config.gradient_accumulation_kwargs = {**(config.gradient_accumulation_kwargs or {}), "sync_each_batch": True}
        self.filling.from_arguments(self, self.grid.data.size)

    @property
    def grid(self) -> Grid:
        """Where the run is; made once. Collective."""
        if self._grid is None:
            device = "cpu" if self.use_cpu else None
            self._grid = Grid(tensor=self.filling.tensor, device=device, timeout=float(self.ddp_timeout))
        return self._grid

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_grid": None}  # a copy makes its own; and what is written has no process group
