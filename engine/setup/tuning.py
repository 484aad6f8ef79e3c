"""``batch.microbatch`` auto and ``tuning``: what plugins/plan/tuning.py asks of a run. Its steps change nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...base.dtypes import dtype_of, short_name
from ...base.errors import AgreedError
from ...base.option_error import Note, OptionError, refusal
from ...checkpoint.random_states import unchanged_random_states
from ...data.dataloader import make_loader
from ...grid.agreement.agreement import largest
from ...grid.devices import has_room, usable_memory
from ...options.engine import EngineOptions
from ...pipe.module import PipelineModule
from ...pipe.schema import flatten
from ..optimizer_step import OptimizerStep
from .extensions import tuner
from .optimizer import state_tensors
from .schedule import training_schedule

Tuner = Measured = PipelineEngine = Any  # of plugins/plan/tuning.py, which is found by name


def find_sizes(model: nn.Module, options: EngineOptions, data: Any, collate: Any) -> TunedRun | None:
    """Return the run whose sizes must be found, from an engine's arguments; None if the options give the sizes."""
    tunes, enabled = options.tunes_microbatch, options.tuning is not None
    if isinstance(model, PipelineModule) and (tunes or options.zero.stage == "auto"):
        if not tunes or data is not None or tuner().model_of(model.layer_specs) is not None:
            return TunedRun(model, options, data, collate)
        if enabled:
            raise refusal("<tuning> measures steps, but there are no samples: pass training_data=...")
    elif enabled and not isinstance(model, PipelineModule):
        raise refusal(
            f"<tuning> measures steps of a PipelineModule, but a step of a {type(model).__name__} is the script's "
            "own: leave <tuning> out, and write <batch.microbatch> and <zero.stage>",
        )
    if options.zero.stage == "auto":
        raise OptionError("zero.stage", "auto", "auto works only for a PipelineModule: give a stage from 0 to 3")
    return None


class TunedRun:
    """Run whose batch sizes are searched: ``RunToTune`` of ``plugins/plan/tuning.py``, and the ``Tuner`` that searches.

    Args:
        model, options, data, collate: arguments of the engine.

    Attributes:
        tuner: the search.
        agree: returns the largest of each number on all ranks.
        schedule: returns the schedule of a step, by its number of microbatches.
    """

    def __init__(self, model: PipelineModule, options: EngineOptions, data: Any, collate: Any) -> None:
        if options.tunes_microbatch and model.costs is not None:
            raise refusal(
                f"triax is to find <batch.microbatch>, but partition={model.partition!r} uses the costs of layers for "
                "one microbatch size: give <batch.microbatch>, or boundaries"
            )
        grid = self._grid = model.grid
        self._options, self._data, self._collate = options, data, collate
        planning = tuner()
        self._known = planning.model_of(model.layer_specs)
        batch, self.stages = options.batch_sizes(grid.replicas), allowed_stages(options)
        self.samples, self.size = batch.train // grid.replicas, batch.micro
        self.agree: Callable[[Sequence[float]], list[float]] = partial(largest, grid)
        chunks = None if model.chunks_follow else model.chunks
        self.schedule = partial(training_schedule, model, options.schedule, chunks=chunks)
        self.rank, self.pipe_rank, self.device = grid.rank, grid.pipe.rank, grid.device_name()
        self.axes: dict[str, Any] = {
            name: grid.axis(name).size for name in ("pipe", "data", "context", "tensor", "expert")
        }
        self.layers: Sequence[Any] = model.layer_specs
        self.partition, self.sequence = model.partition, None
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        weights = dtype_of(options.precision.weights)
        dtype = weights or next((p.dtype for p in model.parameters()), torch.float32)
        self.precision = short_name(dtype) or "fp32"
        self.states = state_tensors(options.optimizer)
        memory = None if options.tuning is None else options.tuning.memory
        self.memory = 1e9 * (memory or 0.0) or usable_memory(grid.device)
        if data is not None and options.tunes_microbatch:
            tensors, _ = flatten(self._microbatches(1, 1)[0][0])
            self.sequence = tensors[0].shape[1] if tensors and tensors[0].dim() > 1 else None
        self.tuner: Tuner = planning.Tuner(options, self)

    def finish(self, engine: PipelineEngine) -> Note:
        """Find the size, let the engine have it, and return a note on it. Collective."""
        self._engine = engine
        found = self.tuner.finish()
        engine.set_batch_size(engine.batch.train, found.size)
        if self._data is not None:
            engine.training_dataloader = engine.make_loader(self._data, self._collate)
        tuning = self._options.tuning
        if tuning is not None and tuning.results is not None and self.rank == 0:
            folder = Path(tuning.results)
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in (engine.tuned_settings(), ("results.json", found.results)):
                (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        return found.note

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
            # With several ranks, this rank has left the process group, so the run cannot go on.
            if self._grid.size > 1 or not isinstance(error.__cause__, torch.OutOfMemoryError):
                raise
            return None
        finally:
            engine.record_memory = False
        report = engine.memory_report()
        kinds = {kind: size or 0 for kind, size in report["held"].items()}
        activations, working = kinds.pop("activations"), kinds.pop("working")
        if engine.options.zero.offload_optimizer.device == "none":  # the first update makes it
            kinds["optimizer"] = max(kinds["optimizer"], report["formula"]["optimizer"])
        return tuner().Measured(sum(kinds.values()), activations, working)

    def time(self, size: int, first: int, last: int) -> float:
        """Return the mean seconds of steps."""
        seconds = [self._step(size) for _ in range(last)]
        return sum(seconds[first:]) / (last - first)

    def _step(self, size: int) -> float:
        """Take a step without its end, and return its seconds. Nothing of the engine, or of the user's, changes."""
        engine = self._engine
        engine.set_batch_size(engine.batch.train, size)
        microbatches = iter(self._microbatches(size, engine.batch.accumulation))
        ended, buffers = engine.optimizer_step, [(buffer, buffer.clone()) for buffer in engine.module.buffers()]
        engine.optimizer_step = _TrialStep(engine.options, engine.data_axis, engine.loss_scaler)
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
        grid, options = self._grid, self._options
        if self._data is not None:
            samples = self.samples * grid.replicas
            sizes = samples, size, grid.replica, grid.replicas, options.seed
            with unchanged_random_states(grid):  # samples may be drawn from them
                return list(islice(make_loader(self._data, *sizes, drop_last=False, collate=self._collate), count))
        assert self._known is not None
        shape, generator = (size, self._known.max_position_embeddings), torch.Generator().manual_seed(options.seed)
        tokens = torch.randint(self._known.vocab_size, shape, generator=generator)
        return [(tokens, tokens)] * count


def allowed_stages(options: EngineOptions) -> list[int]:
    """Return the ZeRO stages that the other options allow."""
    found = []
    for stage in range(4):
        try:
            options.changed(zero=options.zero.changed(stage=stage))
        except OptionError:
            continue
        found.append(stage)
    return found


class _TrialEndError(AgreedError):
    """End of a trial step, which every rank raises in place of the update. The next step drops the gradients."""


class _TrialStep(OptimizerStep):
    def decide(self, *_: Any, **__: Any) -> bool:
        raise _TrialEndError
