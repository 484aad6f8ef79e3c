"""``triax.tune``: what ``plugins/plan/tuning.py`` asks of a run, with steps of an engine of a copy of the model."""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from ...base.dtypes import dtype_of, short_name
from ...base.option_error import OptionError, refusal
from ...checkpoint.generator_states import unchanged_random_states
from ...data.dataloader import make_loader
from ...grid.agreement.agreement import largest
from ...grid.devices import has_room, usable_memory
from ...options.checkpoints import Checkpoints
from ...options.engine import EngineOptions
from ...options.monitoring import Monitoring
from ...pipe.module import PipelineModule
from ...pipe.rebuild import rebuilt
from ...pipe.schema import flatten
from ..keywords import Collate, Samples, Trained
from ..optim.optimizers import sharded_form
from .extensions import tuner
from .optimizer import state_tensors
from .schedule import training_schedule


class Tuned(NamedTuple):
    """Options with the sizes that were found, and what was measured."""

    options: EngineOptions
    results: Mapping[str, Any]


def is_searched(model: nn.Module, options: EngineOptions, data: Samples | None) -> TypeGuard[PipelineModule]:
    """Return True if sizes must be found; False if the options give them, or the batch does.

    Raises:
        OptionError: they cannot be found for this model.
    """
    tunes, enabled = options.tunes_microbatch, options.tuning is not None
    if isinstance(model, PipelineModule) and (tunes or options.zero.stage == "auto"):
        if not tunes or data is not None or tuner().model_of(model.layer_specs) is not None:
            return True
        if enabled:
            raise refusal("<tuning> measures steps, but there are no samples: pass training_data=...")
    elif enabled and not isinstance(model, PipelineModule):
        raise refusal(
            f"<tuning> measures steps of a PipelineModule, but a step of a {type(model).__name__} is the script's "
            "own: leave <tuning> out, and write <batch.microbatch> and <zero.stage>",
        )
    if options.zero.stage == "auto":
        raise OptionError("zero.stage", "auto", "auto works only for a PipelineModule: give a stage from 0 to 3")
    return False


def search_sizes(
    make: Callable[..., Any],
    model: PipelineModule,
    options: EngineOptions,
    *,
    parameters: Trained | None = None,
    training_data: Samples | None = None,
    collate_fn: Collate | None = None,
) -> Tuned:
    """Find the sizes of a run, for which ``is_searched`` is true; log them on rank 0. Collective.

    Args:
        make: the class of engines.
        model, options, parameters, training_data, collate_fn: arguments of the engine.

    Raises:
        OptionError: no size fits.
    """
    with unchanged_random_states(model.grid):
        run = _TriedRun(make, model, options, parameters, training_data, collate_fn)
        search = tuner().Tuner(options, run)
        run.tried = search.options
        with _set_aside(model):
            best = search.finish()
            vars(run).pop("engine", None)
            gc.collect()  # engines and their hooks refer to one another
    batch = search.options.batch.changed(microbatch=best.size, microbatches=run.samples // best.size)
    tuned = Tuned(search.options.changed(batch=batch, tuning=None), best.results)
    if model.grid.rank == 0:
        logging.getLogger("triax").warning("%s", best.note.spelled(options.names))
        if options.tuning is not None and options.tuning.results is not None:
            write_results(Path(options.tuning.results), "options.json", tuned.options.plain(given=True), best.results)
    return tuned


def write_results(folder: Path, name: str, options: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Write the options that were found, under a name, and what was measured."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in ((name, options), ("results.json", results)):
        (folder / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


class _TriedRun:
    """Run whose sizes are searched: ``RunToTune`` of ``plugins/plan/tuning.py``.

    Attributes:
        tried: options of the engine with which steps are measured.
    """

    tried: EngineOptions

    def __init__(
        self,
        make: Callable[..., Any],
        model: PipelineModule,
        options: EngineOptions,
        parameters: Trained | None,
        data: Samples | None,
        collate: Collate | None,
    ) -> None:
        if options.tunes_microbatch and model.costs is not None:
            raise refusal(
                f"triax is to find <batch.microbatch>, but partition={model.partition!r} uses the costs of layers for "
                "one microbatch size: give <batch.microbatch>, or boundaries"
            )
        grid = self._grid = model.grid
        self._make, self._model, self._parameters = make, model, parameters
        self._options, self._data, self._collate = options, data, collate
        self._known = tuner().model_of(model.layer_specs)
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

    @cached_property
    def engine(self) -> Any:
        """Engine of a copy of the model, which writes nothing. Collective at the first use."""
        optimizer, parameters = self.tried.optimizer, self._parameters
        if isinstance(optimizer, torch.optim.Optimizer):  # it is over the parameters of the model
            parameters, (cls, defaults) = optimizer.param_groups, sharded_form(type(optimizer), optimizer.defaults)
            optimizer = partial(cls, **defaults)
        model, groups = rebuilt(self._model, self._grid, parameters, apart=True)
        options = self.tried.changed(
            optimizer=optimizer, lr_scheduler=None, checkpoint=Checkpoints(), monitor=Monitoring(), tuning=None
        )
        return self._make(model, options, parameters=groups)

    def measure(self, size: int, expected: float) -> Any:
        """Return the bytes of this rank in a step, ``Measured`` of plugins/plan/tuning.py; None without memory."""
        engine = self.engine
        held = sum(filter(None, engine.memory_report()["held"].values()))
        if self.agree([not has_room(engine.device, expected - held)])[0]:
            return None
        engine.record_memory = True
        try:
            if not engine.global_steps:
                self._step(size)  # makes the optimizer's state
            self._step(size)
        except RuntimeError as error:
            # With several ranks, this rank has left the process group, so the run cannot go on.
            if self._grid.size > 1 or not isinstance(error.__cause__, torch.OutOfMemoryError):
                raise
            return None
        finally:
            engine.record_memory = False
        kinds = {kind: size or 0 for kind, size in engine.memory_report()["held"].items()}
        activations, working = kinds.pop("activations"), kinds.pop("working")
        return tuner().Measured(sum(kinds.values()), activations, working)

    def time(self, size: int, first: int, last: int) -> float:
        """Return the mean seconds of steps."""
        seconds = [self._step(size) for _ in range(last)]
        return sum(seconds[first:]) / (last - first)

    def _step(self, size: int) -> float:
        """Take a step, and return its seconds."""
        engine = self.engine
        engine.set_batch_size(engine.batch.train, size)
        microbatches = iter(self._microbatches(size, engine.batch.accumulation))
        start = time.perf_counter()
        engine.train_batch(microbatches)
        return time.perf_counter() - start

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


@contextmanager
def _set_aside(model: PipelineModule) -> Iterator[None]:
    """Context in which a model's tensors wait in host memory, and leave the device to the copy."""
    device = model.grid.device
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    moved = [held for held in tensors if held.device == device and device.type not in ("cpu", "meta")]
    for tensor in moved:
        tensor.data = tensor.data.cpu()
    try:
        yield
    finally:
        for tensor in moved:
            tensor.data = tensor.data.to(device)


def allowed_stages(options: EngineOptions) -> list[int]:
    """Return the ZeRO stages that the other options allow."""
    stages = []
    for stage in range(4):
        try:
            options.changed(zero=options.zero.changed(stage=stage))
        except OptionError:
            continue
        stages.append(stage)
    return stages
