"""The small methods of DeepSpeed's engine, under its names."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..grid import Grid
from ..zero.replicas import Replicas
from . import comms
from .checkpoint import Checkpoints
from .config import Batch, Config, ConfigError, batch_sizes
from .data import Loader, make_loader
from .finite import Finite
from .observe import Observed
from .precision import LossScaler
from .sums import totals

if TYPE_CHECKING:
    from .local import Local


class Compat(Checkpoints, Observed):
    """What ``Engine`` says of itself, and the size of its batch."""

    config: Config
    grid: Grid
    batch: Batch
    global_steps: int
    optimizer: torch.optim.Optimizer | None
    training_dataloader: Any
    module: Any
    lr_scheduler: Any
    local: Local | None = None  # where replicas step on their own
    _replicas: Replicas
    _all_or_none: Any
    _scaler: LossScaler | None
    _norm: float | None = None
    _late = False  # somebody asked for a norm when its gradients were gone: from then on each step has it
    _finite: Finite
    _samples = 0  # before the batch had its present size
    _since = 0  # the step from which it has

    @property
    def global_samples(self) -> int:
        """Samples in the steps so far, over all replicas."""
        return self._samples + (self.global_steps - self._since) * self.batch.train

    @property
    def skipped_steps(self) -> int:
        """Steps that fp16's overflows, and losses that ``nan_loss`` skips, have cost."""
        return self._finite.skipped + (0 if self._scaler is None else self._scaler.skipped)

    @property
    def micro_steps(self) -> int:
        """Microbatches of this replica so far, if the batch always had its present size."""
        return self.global_steps * self.batch.accumulation

    def train_batch_size(self) -> int:
        """Samples a step, over all replicas."""
        return self.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one microbatch."""
        return self.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Microbatches a step and replica."""
        return self.batch.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples a step, samples of a microbatch, microbatches a step and replica."""
        return self.batch.train, self.batch.micro, self.batch.accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """From the next step on, so many samples a step: more microbatches or fewer, of the size they have.

        Every rank calls it, between two steps.

        Raises:
            ConfigError: no whole number of microbatches; the schedule is not for so many; or the batches come from
                ``training_data``, whose order is made for batches of one size.
        """
        if self.training_dataloader is not None:
            raise ConfigError(
                "training_data is in the order of batches of one size: set_train_batch_size needs a loader of your own"
            )
        sizes = {
            "train_batch_size": train_batch_size,
            "train_micro_batch_size_per_gpu": self.batch.micro,
            "gradient_accumulation_steps": None,
        }
        config = self.config.model_copy(update=sizes)
        batch = batch_sizes(config, self.grid.replicas)
        self._reschedule(batch.accumulation)
        self._samples, self._since = self.global_samples, self.global_steps
        self.config, self.batch = config, batch
        self._resized()

    @property
    def device(self) -> torch.device:
        """Where the module is."""
        return self.grid.device

    @property
    def local_rank(self) -> int:
        """The number of this process's device, for ``tensor.to(engine.local_rank)``; better, ``engine.device``."""
        return self.grid.device.index or 0

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        pin_memory: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Loader:
        """A loader of this replica's microbatches, in an order that depends on the configuration's seed alone.

        Args:
            dataset: one with a length, or an ``IterableDataset``, whose order is its own.
            pin_memory: as torch's loader has it; only where there is a GPU.
            collate_fn: makes a microbatch of a list of samples.
            num_local_io_workers: processes that read ahead; None or 0: this one reads.
        """
        return make_loader(
            dataset,
            self.batch.train,
            self.batch.micro,
            self.grid.replica,
            self.grid.replicas,
            self.config.seed,
            drop_last=self.config.dataloader_drop_last,
            collate=collate_fn,
            workers=num_local_io_workers or 0,
            pin_memory=pin_memory and self.device.type == "cuda",
        )

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups] if self.optimizer else []

    def get_mom(self) -> list[Any]:
        """The betas, or the momentum, of each parameter group; 0 where there is none."""
        groups = self.optimizer.param_groups if self.optimizer else []
        return [group.get("betas", group.get("momentum", 0.0)) for group in groups]

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's whole gradient, before clipping; None before the first step.

        One process computes it where clipping, fp16 or a monitor wants it, or when it is asked for here. Ask before the
        next step's first forward: the first time that it is later, this is None too.
        """
        if self._norm is None and self.global_steps:
            if self._replicas.stepped:
                self._norm = math.sqrt(float(self._replicas.squares()))  # gradients are divided by now
            else:
                self._late = True
        return self._norm

    def _squares(self) -> list[Tensor]:
        """This rank's share of the square of the gradient's norm, where the step has to have it."""
        wanted = self.grid.size > 1 or self.config.gradient_clipping or self._scaler is not None or self._late
        return [self._replicas.squares()] if wanted or self._replicas.exchanges is not None else []

    def _exchange(self, divisor: float) -> float:
        """Have gradients brought together that were not summed; what then is to scale them by. Collective."""
        if self._replicas.exchanges is None:
            return 1.0 / divisor
        self._replicas.exchange(1.0 / divisor)
        (square,) = totals(self.grid, [self._replicas.squares()])
        self._norm = math.sqrt(square)
        return 1.0

    def loss_scale(self) -> float | None:
        """fp16's loss scale; None without fp16."""
        return None if self._scaler is None else self._scaler.scale

    def gradient_clipping(self) -> float:
        """The longest global gradient; 0: no limit."""
        return self.config.gradient_clipping

    def log_summary(self, show_straggler: bool = False) -> str:
        """Print, on rank 0, and return what ``comms_logger`` counted on this rank; see ``comms.summary``."""
        return comms.summary(self.grid, show_straggler)

    def zero_optimization(self) -> bool:
        """Whether anything is sharded over the data axis."""
        return self.config.zero_optimization.stage > 0

    def zero_optimization_stage(self) -> int:
        """ZeRO's stage, 0 to 3."""
        return self.config.zero_optimization.stage

    def fp16_enabled(self) -> bool:
        """Whether weights are float16."""
        return self.config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether weights are bfloat16."""
        return self.config.bf16.enabled

    def is_gradient_accumulation_boundary(self) -> bool:
        """True: ``train_batch`` runs all microbatches of a step, and returns after it."""
        return True

    def _reschedule(self, microbatches: int) -> None:
        """Each engine's own: have a step run that many microbatches from now on."""
        raise NotImplementedError

    def _resized(self) -> None:
        """The batch has another size."""
