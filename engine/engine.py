"""The engine: one training step over all three axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from ..grid import layout_of
from ..grid.recorded import start_recording, stop_recording
from ..grid.traffic import Sent
from ..pipe.executor import Executor
from ..pipe.inference import forward_only
from ..pipe.module import PipelineModule
from ..pipe.nest import Schema, flatten, unflatten
from ..pipe.passes import Program, lower
from ..pipe.schedules import Schedule
from ..pipe.simulate import Costs, Timeline
from ..pipe.verify import verify
from ..zero.arguments import cast
from ..zero.mode import Managed
from ..zero.norm import clip_factor
from ..zero.optimizer import MakeOptimizer
from ..zero.replicas import Replicas
from . import accounts, finite, precision
from .batch import AgreedError, Feed
from .choose import choose_schedule
from .compat import Compat
from .config import Config, ConfigError, PipelineConfig, batch_sizes
from .data import Loader, RepeatingLoader
from .failure import all_or_none
from .monitor import make_monitor
from .plus_traffic import with_plus
from .recomputation import log_profile
from .schedulers import advance
from .sums import mean, totals
from .weights import Part, Weights, assembled


class Engine(Compat, Weights):
    """Trains a ``PipelineModule``; made by ``triax.initialize``.

    Attributes:
        module: the model, of which this rank holds its part.
        grid, config, batch: where and how it trains; ``batch`` has all three sizes.
        optimizer: torch's, over this rank's range of the parameters; None without an optimizer.
        lr_scheduler: stepped after each ``train_batch``; None without one.
        training_dataloader: microbatches of ``training_data``; None without it.
        global_steps: optimizer steps taken.
        record_timeline: set it to measure the next batches; ``timeline`` then holds the last one's.
        record_memory: set it to count what the next batches hold while they run, for ``memory_report``.
    """

    def __init__(
        self,
        module: PipelineModule,
        config: Config,
        schedule: Schedule,
        make_optimizer: MakeOptimizer | None,
        groups: list[tuple[dict[str, Any], list[nn.Parameter]]],
        training_data: Dataset[Any] | None = None,
        make_scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.module, self.config, self.grid = module, config, module.grid
        self.batch = batch_sizes(config, self.grid.replicas)
        self.global_steps = 0
        self.record_timeline = self.record_memory = False
        self.timeline: Timeline | None = None
        self._sent: dict[str, dict[str, Sent]] = {}
        self._evaluations: dict[int, Program] = {}
        self._feed = Feed(module, precision.half_dtype(config))
        module.dropout_state.seed = config.seed

        module.trained = True
        self._knew = {parameter for parameter in module.parameters() if parameter.requires_grad}
        # Where each parameter hangs: a step looks whether it still does, and walks no modules for that.
        modules = list(module.modules())
        self._homes = [(m._parameters, key, p) for m in modules for key, p in m._parameters.items() if p is not None]
        self._precision = precision.mode(config, self.grid, module)
        self._scaler = precision.scaler(config)
        self._finite = finite.Finite(self.grid, config.nan_loss, scaled=self._scaler is not None)
        self._replicas = Replicas(
            _managed(module, groups),
            self.grid,
            module.tie_axes,
            {stage: module.layers_of(stage) for stage in module.stages},
            self._precision,
            config.zero_optimization.reduce_bucket_size,
            keep=config.zero_optimization.stage3_keep_gathered,
            make=make_optimizer,
            groups=[group for group, _ in groups],
        )
        module.fill(self._replicas.fill)
        self._accounts = accounts.Accounts(self._replicas, module)
        cast((), module, self._precision.weights)
        module.around, module.ahead = self._replicas.around, self._replicas.ahead
        self.optimizer = self._replicas.optimizer
        self._executor = Executor(module, self._replicas)
        if self._scaler is not None:
            self._executor.loss_scale = self._scaler.scale
        self.lr_scheduler = make_scheduler(self.optimizer) if make_scheduler and self.optimizer else None
        self.training_dataloader: Loader | None = None
        self._own_data: RepeatingLoader | None = None
        if training_data is not None:
            self.training_dataloader = self.deepspeed_io(training_data, collate_fn=collate_fn)
            self._own_data = RepeatingLoader(self.training_dataloader)
        # A schedule that cannot run is refused here, before the first step.
        self._training = self._lower(schedule)
        self._monitor = make_monitor(config, self.grid, self.batch.train)

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One optimizer step over ``gradient_accumulation_steps`` microbatches of this replica.

        Args:
            data_iter: each ``next`` is one microbatch ``(inputs, labels)``. Only ranks of the first and the last
                stage call it. None: the engine's own loader over ``training_data``.

        Returns:
            The loss, 0-dim float64, the same on every rank: the sum over the whole batch by its whole weight.

        Raises:
            RuntimeError: on every rank. If it is an ``AgreedError`` (the data failed, say) the engine can go on; if
                a rank failed on its own, it leaves the process group, so that no other rank waits for it.
        """
        with self._all_or_none("train_batch"):
            with self._accounts.step() if self.record_memory else nullcontext():
                loss = self._train_batch(data_iter)
            log_profile(self.module)
            return loss

    def _train_batch(self, data_iter: Iterator[Any] | None) -> Tensor:
        if self.optimizer is None:
            raise AgreedError("there is no optimizer: give config['optimizer'], or initialize(optimizer=...)")
        self.grid.traffic.clear()
        source = self._own_data if data_iter is None else data_iter
        microbatches, changed = self._feed.fetch(source, self.batch.accumulation, self._untrainable())
        if data_iter is None and self.training_dataloader is not None and not self._feed.reads:
            self.training_dataloader.advance(self.batch.accumulation)
        if changed:
            self._executor.forget_schemas()
        if not self.module.training:
            self.module.train()
        self.module.dropout_state.step = self.global_steps
        if self._clock is None and self.record_timeline:
            self._clock = start_recording(self.grid)
        self._executor.clock = self._clock
        self._replicas.begin()
        result = self._executor.run(self._training, microbatches)
        self._replicas.finish()
        if self.record_timeline:
            self.timeline = accounts.measured(self.grid, self._executor)

        # The one division. Tensor ranks hold the same loss: the first one counts.
        counts = float(self.grid.tensor.is_first)
        squares = self._squares()
        mine = [number * counts for number in result.sums()]
        loss, weight, unused, *square = totals(self.grid, [*mine, self._replicas.unused(), *squares])
        if not weight > 0:
            raise AgreedError(f"the batch's weight is {weight}: no label of it counts, so it has no loss")
        divisor = weight * self._precision.prescale * (1.0 if self._scaler is None else self._scaler.scale)
        self._norm = math.sqrt(square[0]) / divisor if square else None
        value = mean(self.grid, loss, weight)
        skipped = self._finite.leaves_out(loss, self._norm, lambda: finite.describe(self.grid, result.losses, squares))
        overflow = not skipped and self._scaler is not None and self._norm is not None and not math.isfinite(self._norm)
        if not (skipped or overflow):
            scale = self._exchange(divisor)
            if self.config.gradient_clipping and self._norm is not None:
                scale *= clip_factor(self._norm, self.config.gradient_clipping)
            # What had no gradient anywhere stands still, as under torch's optimizers. Mostly there is no such thing.
            self._replicas.step(scale, self._replicas.without_gradient() if unused > 0 else ())
            if self.lr_scheduler is not None:
                advance(self.lr_scheduler, value, self.optimizer)
        if self._scaler is not None and not skipped:
            self._scaler.update(overflow, report=self.grid.rank == 0)
            self._executor.loss_scale = self._scaler.scale
        self.global_steps += 1
        self._sent = self.grid.traffic.report()
        if self._clock is not None:
            stop_recording(self.grid)
            self._clock = None
        if self._monitor is not None:
            self._monitor(self, value)
        return value

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """The loss of a batch without a step, and the model's outputs if asked for.

        Args:
            data_iter: as in ``train_batch``; microbatches may be of any size.
            return_logits: return the outputs too, on every rank.
            compute_loss: False ignores the labels.
            num_micro_batches: how many to read; by default ``gradient_accumulation_steps``.

        Returns:
            The loss, 0-dim float64, the same on every rank (None without ``compute_loss``). With
            ``return_logits`` a pair of it and the outputs: a list with one entry a microbatch of this replica,
            each what the last layer returned (or the module's ``output_fn`` made of it).

        Raises:
            RuntimeError: as ``train_batch``.
        """
        with self._all_or_none("eval_batch"), torch.no_grad():
            return self._eval_batch(data_iter, return_logits, compute_loss, num_micro_batches)

    def _eval_batch(
        self, data_iter: Iterator[Any], return_logits: bool, compute_loss: bool, num_micro_batches: int | None
    ) -> Any:
        count = num_micro_batches or self.batch.accumulation
        microbatches, changed = self._feed.fetch(data_iter, count)
        if changed:
            self._executor.forget_schemas()
        training = self.module.training
        self.module.eval()
        self._executor.clock = None
        try:
            result = self._executor.run(self._evaluation(count), microbatches, outputs=return_logits, loss=compute_loss)
        finally:
            self.module.train(training)
        loss = None
        if compute_loss:
            counts = float(self.grid.tensor.is_first)
            loss = mean(self.grid, *totals(self.grid, [number * counts for number in result.sums()]))
        if not return_logits:
            return loss
        return loss, self._share_outputs([result.outputs.get(index) for index in range(count)])

    def gather(self, what: str = "weights") -> dict[str, Tensor]:
        """Whole tensors under whole-model names, on every rank. For looking at, comparing and small exports.

        Args:
            what: ``"weights"``, or ``"gradients"``: those of the last ``train_batch``, divided and clipped, of
                the parameters that are trained.
        """
        return assembled(self.grid, self.parts(what))

    def parts(self, what: str = "weights") -> dict[str, Part]:
        """What this rank holds of ``gather``'s tensors: name -> (layout, its part). Collective over the data axis."""
        mine: dict[str, Part] = {}
        if what == "weights":
            with self._replicas.whole():
                for placed in self.module.placed():
                    mine[placed.layout.name] = placed.layout, placed.parameter.detach().clone()
        elif what == "gradients":
            for member, gradient in self._replicas.gradients():
                mine[member.layout.name] = member.layout, gradient
        else:
            raise ValueError(f"gather takes 'weights' or 'gradients', not {what!r}")
        return mine

    def whole_weights(self) -> AbstractContextManager[None]:
        """Within it all weights are whole, in stage 3 of ZeRO too. Collective over the data axis."""
        return self._replicas.whole()

    def traffic_report(self) -> dict[str, Any]:
        """Bytes that this rank sent in the last ``train_batch``, counted: axis -> collective -> calls and bytes.

        ``formula`` has, for the data axis, what ZeRO's paper says (or that of what compresses gradients, or ZeRO++'s:
        ``plus_traffic.plus_formula``), and ``uncompressed`` what ZeRO's does, for gradients in the dtype they have:
        ``accounts.data_axis``.
        """
        sent = {axis: {k: entry._asdict() for k, entry in kinds.items()} for axis, kinds in self._sent.items()}
        zero, rank = self.config.zero_optimization.stage, self.grid.pipe.rank
        data, whole = accounts.data_axis(self._replicas, self.grid.data.size, zero, self._training, rank)
        report = {"sent": sent, "formula": {"data": data}, "uncompressed": {"data": whole}}
        return with_plus(report, self._replicas, self._training, rank)

    def memory_report(self) -> dict[str, Any]:
        """Bytes of this rank, counted, beside the papers' formula and the process's own peak.

        ``held`` between two steps: parameters, gradients, masters, optimizer, buffers; and, if ``record_memory`` was
        set during the last batch, what that added at its largest: activations (all that autograd saved) and working
        (what lives within one operation: temporaries, gathered weights, gradients and messages under way).
        ``offloaded`` has what is kept elsewhere: ``cpu`` or ``nvme`` -> what it is for -> bytes.
        ``formula``: ``formulas.model_states``. ``peak``: ``Grid.peak_memory``.
        """
        return self._accounts.report()

    def _evaluation(self, microbatches: int) -> Program:
        """The verified program of a forward pass; made once for each number of microbatches."""
        if microbatches not in self._evaluations:
            self._evaluations[microbatches] = self._lower(forward_only(self.module.placement, microbatches))
        return self._evaluations[microbatches]

    def _reschedule(self, microbatches: int) -> None:
        schedule = training_schedule(self.module, self.config.pipeline, microbatches)
        if tuple(schedule.placement) != tuple(self.module.placement):
            raise ConfigError(f"the schedule of {microbatches} microbatches has its stages on other ranks")
        if self.config.activation_checkpointing.contiguous_memory_optimization:
            raise ConfigError(
                "contiguous_memory_optimization has one buffer, for the microbatches of the first schedule"
            )
        self._training = self._lower(schedule)

    def module_state_dict(self) -> dict[str, Tensor]:
        """The whole model's weights under its own names, on every rank: ``gather()``. Collective."""
        return self.gather()

    def _lower(self, schedule: Schedule) -> Program:
        zero = self.config.zero_optimization
        each = None if zero.reduce_each_microbatch else False
        program = lower(schedule, zero.stage, [tie.stages for tie in self.module.ties], each)
        verify(program)
        return program

    def _share_outputs(self, outputs: list[Any]) -> list[Any]:
        """The last stage's outputs on every stage."""
        pipe, source = self.grid.pipe, self.module.placement[-1]
        tensors, schema = flatten(outputs) if self.module.is_last else ([], None)
        encoded = pipe.all_gather_object(schema.encode() if schema else None)[source]
        schema = Schema.decode(encoded)
        if not self.module.is_last:
            tensors = [torch.empty(s.shape, dtype=s.dtype, device=self.grid.device) for s in schema.tensors]
        tensors = [tensor.contiguous() for tensor in tensors]
        for tensor in tensors:
            pipe.broadcast(tensor, source=source)
        shared: list[Any] = unflatten(schema, tensors)
        return shared

    def _untrainable(self) -> str | None:
        """Why a step would leave some of the model behind, if it would."""
        name = self._replicas.displaced()
        if name is not None:
            return (
                f"{self.grid.describe()}: {name} is no longer where this engine steps it: the model went to another "
                "engine, was moved or cast, or its parameters were assigned. Do that before triax.initialize"
            )
        for home, key, parameter in self._homes:
            if home.get(key) is not parameter:
                return f"{self.grid.describe()}: {key} was put in place after triax.initialize: do it before"
            if parameter.requires_grad and parameter not in self._knew:
                return (
                    f"{self.grid.describe()}: {layout_of(parameter).name} was frozen when the engine was made, so "
                    "nothing would step it: let all that will ever train require gradients at triax.initialize, and "
                    "freeze it then"
                )
        return None

    def _all_or_none(self, call: str) -> AbstractContextManager[None]:
        """What fails within on this rank alone makes it leave, and say why: ranks that wait for it stop at once."""
        return all_or_none(self.grid, self._abandon, call)

    def _abandon(self) -> None:
        self._executor.abandon()
        self._replicas.abandon()


def training_schedule(module: PipelineModule, config: PipelineConfig, microbatches: int) -> Schedule:
    """The schedule that the configuration asks for, of the model's size.

    Raises:
        ConfigError: the schedule does not run the model's chunks, or is of another size.
    """
    costs = Costs(*config.costs)
    try:
        return choose_schedule(
            config.schedule, module.grid.pipe.size, microbatches, module.chunks, costs, config.memory
        )
    except ValueError as error:
        raise ConfigError(f"pipeline.schedule: {error} (chunks are PipelineModule(..., chunks=))") from error


def _managed(module: PipelineModule, groups: list[tuple[dict[str, Any], list[nn.Parameter]]]) -> list[Managed]:
    """What the data axis manages: this rank's trained parameters, in the order of the model."""
    group_of = {p: i for i, (_, parameters) in enumerate(groups) for p in parameters if p.requires_grad}
    return [
        Managed(p.parameter, p.layout, p.stages, p.layers, p.tie, p.counted, group_of.get(p.parameter))
        for p in module.placed()
    ]
