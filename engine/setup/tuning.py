"""``"auto"`` and ``autotuning``: what ``plan/tuning.py`` asks of a run, with steps that change nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn

from ...checkpoint.random_states import unchanged_random_states
from ...config.config import batch_sizes
from ...config.consistency import allowed_stages
from ...config.schema import Config
from ...data.dataloader import make_loader
from ...grid.agreement import largest
from ...grid.devices import has_room, usable_memory
from ...grid.dtypes import short_name
from ...grid.errors import AgreedError, ConfigError
from ...pipe.module import PipelineModule
from ...pipe.program.schedule import Schedule
from ...pipe.schema import flatten
from ...plan.tuning import Measured, Tuner, model_of, optimizer_states
from ..optimizer_step import OptimizerStep
from ..pipeline_engine import PipelineEngine, training_schedule
from .precision import weight_dtype


def find_sizes(
    model: nn.Module, config: Config, optimizer: Any, data: Any, collate: Any, schedule: Schedule | None
) -> TunedRun | None:
    """Return the run whose sizes are to be found, of arguments of ``initialize``; None if they are given."""
    tunes, enabled = config.tunes_microbatch, config.autotuning.enabled
    if isinstance(model, PipelineModule) and (tunes or config.tunes_stage):
        if not tunes or data is not None or model_of(model.layer_specs) is not None:
            return TunedRun(model, config, optimizer, data, collate, schedule)
        if enabled:
            raise ConfigError("autotuning measures steps, but there are no samples: pass initialize(training_data=...)")
    elif enabled and not isinstance(model, PipelineModule):
        raise ConfigError(
            f"autotuning measures steps of a PipelineModule, but a step of a {type(model).__name__} is the script's "
            "own: leave autotuning out, and write train_micro_batch_size_per_gpu and zero_optimization.stage"
        )
    return None


class TunedRun:
    """A run of which sizes are found: ``RunToTune`` of ``plan/tuning.py``, and the ``Tuner`` that asks it.

    Args:
        model, config, optimizer, data, collate, schedule: arguments of ``initialize``.

    Attributes:
        tuner: the search.
        agree: returns the largest of each number on all ranks.
        schedule: returns the schedule of a step, by its number of microbatches.
    """

    def __init__(
        self,
        model: PipelineModule,
        config: Config,
        optimizer: Any,
        data: Any,
        collate: Any,
        schedule: Schedule | None,
    ) -> None:
        grid = self._grid = model.grid
        self._config, self._data, self._collate = config, data, collate
        self._known = model_of(model.layer_specs)
        batch, self.stages = batch_sizes(config, grid.replicas), allowed_stages(config)
        self.samples, self.size = batch.train // grid.replicas, batch.micro
        self.agree: Callable[[Sequence[float]], list[float]] = partial(largest, grid)
        chunks = None if model.chunks_follow else model.chunks
        self.schedule = partial(training_schedule, model, config.pipeline, chunks=chunks, given=schedule)
        self.rank, self.pipe_rank, self.device = grid.rank, grid.pipe.rank, grid.device_name()
        self.axes: dict[str, Any] = {
            name: grid.axis(name).size for name in ("pipe", "data", "context", "tensor", "expert")
        }
        self.layers: Sequence[Any] = model.layer_specs
        self.partition, self.sequence = model.partition, None
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        dtype = weight_dtype(config) or next((p.dtype for p in model.parameters()), torch.float32)
        self.precision = short_name(dtype) or "fp32"
        self.states = optimizer_states(type(optimizer).__name__, getattr(optimizer, "defaults", {}))
        if (section := config.optimizer) is not None:
            self.states = optimizer_states(section.type, section.params)
        self.memory = 1e9 * (config.autotuning.memory or 0.0) or usable_memory(grid.device)
        if data is not None and config.tunes_microbatch:
            tensors, _ = flatten(self._microbatches(1, 1)[0][0])
            self.sequence = tensors[0].shape[1] if tensors and tensors[0].dim() > 1 else None
        self.tuner = Tuner(config, self)

    def finish(self, engine: PipelineEngine) -> str:
        """Find the size, let the engine have it, and return a note on it. Collective."""
        self._engine = engine
        config, note = self.tuner.finish()
        engine.set_train_batch_size(engine.batch.train, batch_sizes(config, self._grid.replicas).micro)
        if self._data is not None:
            engine.training_dataloader = engine.deepspeed_io(self._data, collate_fn=self._collate)
        return note

    def measure(self, size: int, expected: float) -> Measured | None:
        """Return the bytes of this rank in a step; None if there is too little memory on any rank."""
        engine = self._engine
        held = sum(filter(None, engine.memory_report()["held"].values()))
        if self.agree([not has_room(engine.device, expected - held)])[0]:
            return None
        engine.record_memory = True
        try:
            self._step(size)
        except RuntimeError as error:
            # On several ranks this one has left the group, in which the others waited for it.
            if self._grid.size > 1 or not isinstance(error.__cause__, torch.OutOfMemoryError):
                raise
            return None
        finally:
            engine.record_memory = False
        report = engine.memory_report()
        kinds = {kind: size or 0 for kind, size in report["held"].items()}
        activations, working = kinds.pop("activations"), kinds.pop("working")
        if engine.config.zero_optimization.offload_optimizer.device == "none":  # the first update makes it
            kinds["optimizer"] = max(kinds["optimizer"], report["formula"]["optimizer"])
        return Measured(sum(kinds.values()), activations, working)

    def time(self, size: int, first: int, last: int) -> float:
        """Return the mean seconds of steps."""
        seconds = [self._step(size) for _ in range(last)]
        return sum(seconds[first:]) / (last - first)

    def _step(self, size: int) -> float:
        """Take a step without its end, and return its seconds. Nothing of the engine, or of the user's, changes."""
        engine = self._engine
        engine.set_train_batch_size(engine.batch.train, size)
        microbatches = iter(self._microbatches(size, engine.batch.accumulation))
        ended, buffers = engine.optimizer_step, [(buffer, buffer.clone()) for buffer in engine.module.buffers()]
        engine.optimizer_step = _TrialStep(engine.config, engine.data_axis, engine.loss_scaler)
        start = time.perf_counter()
        try:
            with unchanged_random_states(self._grid):
                engine.train_batch(microbatches)
        except _TrialEndError:
            return time.perf_counter() - start
        finally:
            engine.optimizer_step = ended
            for buffer, before in buffers:
                buffer.data.copy_(before)
        raise AssertionError("the trial step had no end")

    def _microbatches(self, size: int, count: int) -> list[Any]:
        """Return microbatches of the training data, from its start, or of random tokens."""
        grid, config = self._grid, self._config
        if self._data is not None:
            sizes = batch_sizes(config, grid.replicas).train, size, grid.replica, grid.replicas, config.seed
            with unchanged_random_states(grid):  # samples may be drawn from them
                return list(islice(make_loader(self._data, *sizes, drop_last=False, collate=self._collate), count))
        assert self._known is not None
        shape, generator = (size, self._known.max_position_embeddings), torch.Generator().manual_seed(config.seed)
        tokens = torch.randint(self._known.vocab_size, shape, generator=generator)
        return [(tokens, tokens)] * count


class _TrialEndError(AgreedError):
    """End of a trial step, which every rank raises in place of the update. The next step drops the gradients."""


class _TrialStep(OptimizerStep):
    def take(self, *_: Any, **__: Any) -> None:
        raise _TrialEndError
