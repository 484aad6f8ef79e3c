"""PipelineEngine: trains a ``PipelineModule`` over the pipe, data and tensor axes.

train_batch    fetch microbatches -> run the program (1F1B or another schedule) -> optimizer step
eval_batch     fetch microbatches -> run a forward-only program
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..base.checks import check_count
from ..base.checksum import checksum
from ..base.errors import AgreedError, ConfigError
from ..base.evaluating import evaluating
from ..base.option_error import Note, OptionError
from ..data.dataloader import RepeatingLoader
from ..grid import Grid, layout_of
from ..grid.agreement.agreement import mean, totals
from ..grid.agreement.failure import all_or_none
from ..grid.assemble import assemble
from ..options.engine import EngineOptions
from ..pipe.executor import Executor
from ..pipe.losses import Result
from ..pipe.microbatches import Microbatch, MicrobatchFeed
from ..pipe.module import PipelineModule
from ..pipe.program.forward_only import forward_only
from ..pipe.program.passes import lower
from ..pipe.program.program import Program
from ..pipe.program.schedule import Schedule
from ..pipe.program.timeline import Timeline
from ..pipe.program.verify import verify
from ..pipe.schema import Schema, flatten, unflatten
from ..zero.bucketing import cast
from ..zero.data_axis import ZeroDataAxis
from ..zero.managed import ManagedParameter
from ..zero.module_tree import ModuleTree
from ..zero.offload import OffloadTarget, memory_at
from ..zero.optimizer_modes import with_modes
from ..zero.state_dict_guard import guard_state_dict
from .accounting.memory import MemoryAccounts
from .auxiliary_steps import AuxiliarySteps
from .base import NO_OPTIMIZER, Engine, TrainingParts
from .named_losses import NamedLossSteps
from .optim.schedulers import advance_schedule
from .optimizer_step import StepSums
from .recording_observer import PipelineObserver
from .replica_buffers import ReplicaBuffers
from .setup.asked_schedule import with_passes
from .setup.compilation import Compilation, compile_pipeline
from .setup.recomputation import configure_recomputation, log_profile
from .setup.schedule import searched_cut, training_schedule
from .setup.slices import slice_states
from .snapshot.capture import buffers


class PipelineEngine(Engine):
    """Trains a ``PipelineModule``. ``triax.Engine(model, ...)`` makes it.

    Attributes:
        module: the model, of which this rank holds its stages.
        grid, options, batch: grid, options, and the three batch sizes.
        optimizer: torch optimizer over this rank's ranges of the parameters. None without one.
        lr_scheduler: learning-rate schedule, advanced after each ``train_batch``. None without one.
        training_dataloader: microbatches of ``training_data``. None without training data.
        global_steps: number of optimizer steps.
        record_timeline: set it to True to measure the next batches. ``timeline`` then holds the last measured batch.
        timeline: times of the ops of the last measured batch, on all pipe ranks.
        feed: reads this rank's microbatches.
        program: the lowered schedule of a training step.
        auxiliary_sums: loads and auxiliary losses of the step, as ``AuxiliarySteps.local_sums`` returns them.
        executor: runs programs.
    """

    observer: PipelineObserver

    module: PipelineModule
    record_timeline = False
    timeline: Timeline | None = None
    auxiliary_sums: Tensor

    @classmethod
    def trains(cls, model: Any) -> bool:
        """Return True for a ``PipelineModule``."""
        return isinstance(model, PipelineModule)

    def _place(self, model: PipelineModule) -> Schedule:
        """Put the stages on the ranks of the schedule."""
        options = self.options
        chunks = None if model.chunks_follow else model.chunks
        if options.schedule.chunks is not None and chunks not in (None, options.schedule.chunks):
            raise OptionError(
                "schedule.chunks", options.schedule.chunks, f"the model was made with chunks={chunks}: leave one out"
            )
        chunks = options.schedule.chunks or chunks
        cut = searched_cut(model, options.schedule, self.batch.accumulation, chunks)
        if cut is None:
            schedule = training_schedule(model, options.schedule, self.batch.accumulation, chunks)
        else:
            schedule = cut.schedule
            if model.partition == "auto":  # a step of another size has this schedule too
                own = options.schedule.changed(name=schedule.name, chunks=schedule.chunks)
                self.options = options = options.changed(schedule=own)
        if schedule.forward_only and options.optimizer is not None:
            why = "has no backward passes, and the engine has an optimizer: give one for training, such as 1f1b"
            raise OptionError("schedule.name", schedule.name, why)
        model.require_untouched()
        try:
            model.move(schedule.placement, None if cut is None else cut.boundaries)
        except ValueError as error:  # too few layers for its stages
            raise ConfigError(
                f"the schedule {schedule.name} has {schedule.chunks} stages on each of {schedule.pipe} ranks, but "
                f"{error}"
            ) from error
        notes = configure_recomputation(model, options.recompute, schedule)
        notes += [] if cut is None else [Note("", f"the layers are cut by {cut}")]
        if model.chunks_follow and schedule.chunks > 1:
            text = (
                f"the schedule {schedule.name} has {schedule.chunks} stages on each rank, so the model is cut into "
                f"{len(schedule.placement)} stages, as PipelineModule(..., chunks={schedule.chunks}) does"
            )
            notes.append(Note("", text))
        self._warn(*self._notes(), *notes)
        return schedule

    def _build(self, schedule: Schedule, parts: TrainingParts) -> None:
        module, options = self.module, self.options
        self._evaluations: dict[int, Program] = {}
        self.feed = MicrobatchFeed(module, self._options.weight_dtype, options.batch.labels == "sent")
        module.dropout_state.seed = options.seed

        module.training_started = True
        self._frozen_at_start = [parameter for parameter in module.parameters() if not parameter.requires_grad]
        self._tree = ModuleTree(module, {parameter for _, group in parts.groups for parameter in group})
        self.data_axis = ZeroDataAxis(
            _managed(module, parts.groups),
            self._step_grid,
            module.tie_axes,
            {stage: module.hooked(stage) for stage in module.stages},
            self._options,
            options.zero.bucket_size,
            keep=options.zero.keep_gathered,
            factory=parts.optimizer,
            groups=[group for group, _ in parts.groups],
        )
        module.fill(self.data_axis.fill)
        self.data_axis.stepper.renew_first_state()
        self.accounts = MemoryAccounts(self.data_axis, module, self.grid)
        cast((), module, self._options)
        gatherer = self.data_axis.gatherer
        module.run_hook = None if gatherer is None else gatherer.run
        module.prefetch_hook = None if gatherer is None else gatherer.prefetch
        if gatherer is not None:
            guard_state_dict(module)
        self.optimizer = with_modes(self.data_axis)
        offload = self.options.schedule.offload
        target = OffloadTarget("nvme" if offload.device == "nvme" else "cpu", offload.path, offload.pin_memory)
        memory = partial(memory_at, target, self.grid.device, wait=False)
        slices = slice_states(module, schedule, options)
        self.executor = Executor(module, self.data_axis.reducer, gatherer, self.spans, memory, slices)
        self.executor.interleaves = self.data_axis.options.stage < 3
        self.named_losses = NamedLossSteps(module.is_last)
        self._running: tuple[Grid, Sequence[Microbatch]] | None = None  # of the step whose gradients are summed
        self.auxiliary = AuxiliarySteps(module, self.grid, module.auxiliary)
        self.replica_buffers = ReplicaBuffers(module, self._step_grid)
        self._tied_buffers = [
            (f"{prefix}.{name}", layer, name)
            for prefix, layer in module.layers_of_several_ranks()
            for name, _ in layer.named_buffers()
        ]
        self._make_step(parts)
        self.data_axis.access.connect(
            None,
            options.say("Set <clip> to clip, and read engine.grad_norm or engine.gather('gradients')"),
        )
        # A schedule that cannot run raises here, before the first step.
        self.program = self._lower(schedule)
        self.compilation = self._compile(options)
        self.observer = PipelineObserver(self)

    @cached_property
    def _own_data(self) -> Iterator[Any] | None:
        return None if self.training_dataloader is None else RepeatingLoader(self.training_dataloader)

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Take one optimizer step over ``batch.accumulation`` microbatches of this replica.

        Args:
            data_iter: iterator over microbatches ``(inputs, labels)``, read on ranks of the first and the last stage
                only, or of the first alone if ``batch.labels`` is ``sent``. None: the engine's own loader over
                ``training_data``.

        Returns:
            The loss, 0-dim float64, equal on every rank: the sum over the whole batch, divided by the batch's weight.

        Raises:
            RuntimeError: on every rank. After an ``AgreedError``, for instance because the data failed, training can
                continue. After another error the failed rank leaves the process group, so that no rank waits for it.
        """
        with self.spans("step", f"step {self.global_steps + 1}"), self.all_or_none("train_batch"):
            if data_iter is not None and self.options.fault_tolerance is not None:
                raise AgreedError(
                    "train_batch was given an iterator, but fault_tolerance gives each replica its samples by number: "
                    "pass training_data to the engine, and call train_batch()"
                )
            if data_iter is not None and self.options.batch.balance and not self._made_loaders:
                raise AgreedError(
                    self.options.say(
                        "<batch.balance> deals out the documents of a loader of the engine, but train_batch was given "
                        "another iterator: pass training_data to the engine, or iterate over engine.make_loader(...)"
                    )
                )
            with self.accounts.step() if self.record_memory else nullcontext():
                for observer in self.observers:
                    observer.before_step()
                if self.optimizer is None:
                    raise AgreedError(NO_OPTIMIZER)
                self.grid.traffic.clear()
                with self.replicas.stepping() as grid:
                    loss = self._step(grid, self.optimizer, data_iter)
                if self.replicas.just_synchronized:
                    self._share_buffers()
                    self._sent = self.grid.traffic.report()
            log_profile(self.module.recompute)
        self._save_if_due()
        return loss

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ``RuntimeError``: a pipeline runs all microbatches of a step at once."""
        self._refuse("engine(...)")

    __call__ = forward

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ``RuntimeError``: ``train_batch`` runs the backward passes."""
        self._refuse("engine.backward(...)")

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ``RuntimeError``: ``train_batch`` takes the step."""
        self._refuse("engine.step()")

    def clip_grad_norm_(self, max_norm: float) -> NoReturn:
        """Raise ``RuntimeError``: the option ``clip`` clips within ``train_batch``."""
        raise RuntimeError(
            self.options.say(
                f"clip_grad_norm_({max_norm}) was called, but train_batch has taken the step already: set <clip> to "
                f"{max_norm}"
            )
        )

    def _refuse(self, call: str) -> NoReturn:
        raise RuntimeError(
            f"Only train_batch() is accessible in pipeline mode. {call} was called, but a PipelineModule runs the "
            f"{self.batch.accumulation} microbatches of a step at once: replace forward, backward and step by loss = "
            "engine.train_batch(batches), where batches is an iterator over pairs (inputs, labels), and call "
            "engine.eval_batch(batches) to evaluate"
        )

    def _step(self, grid: Grid, optimizer: torch.optim.Optimizer, data_iter: Iterator[Any] | None) -> Tensor:
        """Take a training step with the ranks of a grid."""
        microbatches = self._fetch(grid, data_iter)
        if not self.module.training:
            self.module.train()
        self.module.dropout_state.step = self.global_steps
        if self.record_timeline:
            self.observer.timer.record()
        self.executor.weights.scale = self.optimizer_step.scale
        self._running = grid, microbatches
        result, own = self._compute(grid, microbatches)
        if self.record_timeline:
            self.timeline = self.observer.measure_timeline(grid)

        losses = [*result.named.values()]
        total, named = self.named_losses.totals(grid, losses, own, self.optimizer_step.totals, training=True)
        self._running = None
        if total.strayed is not None:
            self.replica_buffers.synchronize(total.strayed > 0)
        weight = total.weight
        if total.unused and not self.auxiliary:
            self._leave_out_unreached(grid, result)
        if not weight > 0:
            raise AgreedError(
                f"the batch has no loss, because its weight is {weight}: none of its labels counts. Give batches with "
                "at least one label that is not ignored"
            )
        result.require_one_form(weight, len(microbatches) * grid.data.size * self.replicas.contributing)
        self.auxiliary.require_weight(weight)
        value = mean(grid, total.loss, weight) if named is None else mean(grid, named, 1.0)
        taken = self.optimizer_step.decide(grid, total.loss / weight, weight, result.losses, self.observers)
        if taken:
            factor = self.optimizer_step.factor(grid)
            # The step leaves out a parameter that has a gradient on no rank, as torch's optimizers do. This is rare.
            without = self.data_axis.without_gradient() if total.unused else ()
            with self.spans("optimizer"):
                self.data_axis.step(factor, without)
            advance_schedule(self.lr_scheduler, optimizer, value)
            self.optimizer_step.advance(grid)
        self.data_axis.access.hide()
        if self.auxiliary:
            self.auxiliary.end(grid, self.auxiliary_sums, weight, not taken, self.grid.rank == 0)
        self.global_steps += 1
        self._sent = self.grid.traffic.report()
        for observer in self.observers:
            observer.after_step(grid, value)
        return value

    def _fetch(self, grid: Grid, data_iter: Iterator[Any] | None) -> Sequence[Microbatch]:
        """Read the microbatches of a training step. Collective over the grid."""
        source = self._own_data if data_iter is None else data_iter
        loader = self.training_dataloader if data_iter is None else None
        position = None if loader is None else loader.state_dict()
        with self.spans("batch"):
            try:
                microbatches, changed = self.feed.fetch(
                    grid, source, self.batch.accumulation, "train_batch", self._untrainable()
                )
            except AgreedError:
                if loader is not None and position is not None:
                    loader.load_state_dict(position)  # the next call reads this step's samples again
                    self.feed.misplaced = None
                raise
        if changed:
            self.executor.forget_schemas()
        for microbatch in microbatches:
            self.observer.count_tokens(microbatch.inputs)
        if loader is not None and not self.feed.reads:
            loader.advance(self.batch.accumulation)
        elif data_iter is not None and self.module.is_first:
            self.replica_rows.see(microbatches[0].inputs)
            self.replica_rows.compare()
        return microbatches

    def compute_again(self) -> list[Tensor | float]:
        """Compute the gradients of the running step once more, and return this rank's numbers."""
        assert self._running is not None  # replicas sum within a step
        return self._compute(*self._running)[1].numbers()

    def _compute(self, grid: Grid, microbatches: Sequence[Microbatch]) -> tuple[Result, StepSums]:
        """Compute the gradients of a step; return the result of the program, and this rank's numbers.

        Collective over the grid, and where losses are weighed over the replicas.
        """
        self.data_axis.begin()
        self.named_losses.weigh(grid, self.module, self.executor.weights, microbatches, self.replicas.share)
        if self.auxiliary:
            labels = [microbatch.labels for microbatch in microbatches]
            samples = sum(len(microbatch.samples or ()) for microbatch in microbatches)
            counts = self.module.is_last and grid.tensor.is_first
            scale, share = self.optimizer_step.scale, self.replicas.share
            self.auxiliary.begin(grid, self.module.loss_fn, labels, samples, counts, scale, share)
        with self._unchanged_tied_buffers():
            with self.spans("program"):
                result = self.executor.run(self.program, microbatches)
            self.feed.wait_sent()
        if (problem := self._tree.problem()) is not None:  # a forward pass has changed the model
            raise RuntimeError(problem)
        with self.spans("reduce"):
            self.data_axis.finish()
        if self.auxiliary:
            self.auxiliary_sums = self.auxiliary.local_sums(grid.device)
        unreached = sum(not reached for reached in result.reached.values())
        unused = self.data_axis.used.unused() + unreached
        strayed = float(self.replica_buffers.strayed()) if self.replica_buffers else None
        return result, _own_sums(grid, result)._replace(unused=unused, strayed=strayed)

    def shift_samples(self, samples: int) -> None:
        """Set the number of samples of the step that other grids have before this one's: dropout depends on it."""
        self.feed.shift = samples

    @contextmanager
    def _unchanged_tied_buffers(self) -> Iterator[None]:
        """Refuse a program that changes a buffer of a tied layer of several ranks: the ranks' values would differ."""
        before = [checksum(layer.get_buffer(key)) for _, layer, key in self._tied_buffers]
        yield
        after = [checksum(layer.get_buffer(key)) for _, layer, key in self._tied_buffers]
        changes = (torch.stack(after) != torch.stack(before)).tolist() if after else []  # on a device, the one wait
        for (name, *_), changed in zip(self._tied_buffers, changes, strict=True):
            if changed:
                raise RuntimeError(
                    f"{name} is a buffer of a tied layer that several pipe ranks run, and this step has changed it: "
                    "each rank would have values of its own. Give PipelineModule a partition with all uses of the "
                    "layer on one rank, or use a layer without running statistics, such as LayerNorm"
                )

    def _leave_out_unreached(self, grid: Grid, result: Result) -> None:
        """Leave out of the step all stages before a stage whose inputs got no gradient (a ``detach``). Collective.

        The gradients of these stages are zero. On a single process they would have none, so that their weights would
        not decay. A stage whose layers return losses has gradients, and so do the stages before it.
        """
        flags = torch.zeros(2, len(self.module.placement), device=grid.device)
        for stage, reached in result.reached.items():
            flags[0, stage] = float(reached)
        flags[1, [*result.contributing]] = 1.0
        grid.world.all_reduce(flags, op="max")
        left: set[int] = set()
        for stage, reached in enumerate(flags[0].tolist()):
            if stage and not reached:
                last = max((earlier for earlier in range(stage) if flags[1, earlier]), default=-1)
                left |= {*range(last + 1, stage)}
        if left and self.optimizer_step.across is not None:
            raise AgreedError(
                f"the inputs of stage {max(left) + 1} got no gradient (they are detached), and fault_tolerance does "
                "not leave out the stages before it: freeze their parameters, or leave fault_tolerance out"
            )
        if left:
            self.data_axis.reducer.leave_out(left)

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None,
        return_logits: bool = False,
        compute_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Compute the loss of a batch without a step, and the model's outputs if asked for.

        Args:
            data_iter: as in ``train_batch``; microbatches may be of any size.
            return_logits: return the outputs too, on every rank.
            compute_loss: False ignores the labels.
            num_micro_batches: number of microbatches to read. None: ``batch.accumulation``.

        Returns:
            The loss, 0-dim float64, equal on every rank. None without ``compute_loss``. With ``return_logits`` the pair
            (loss, outputs): for each microbatch of this replica the output of the last layer, or the result of the
            module's ``output_fn`` on it.

        Raises:
            RuntimeError: in the cases of ``train_batch``.
        """
        count = self.batch.accumulation if num_micro_batches is None else num_micro_batches
        check_count("eval_batch", num_micro_batches=count)
        with (
            self.all_or_none("eval_batch"),
            torch.no_grad(),
            self.replicas.evaluating() as grid,
            evaluating(self.module),
        ):
            microbatches, changed = self.feed.fetch(grid, data_iter, count, "eval_batch")
            if changed:
                self.executor.forget_schemas()
            program = self._evaluation(count)
            with self._unchanged_tied_buffers():
                result = self.executor.run(program, microbatches, outputs=return_logits, loss=compute_loss)
                self.feed.wait_sent()
            loss = None
            if compute_loss:
                own, losses = _own_sums(grid, result), [*result.named.values()]
                total, named = self.named_losses.totals(grid, losses, own, totals, training=False)
                result.require_one_form(total.weight, count * grid.data.size)
                loss = mean(grid, total.loss, total.weight) if named is None else mean(grid, named, 1.0)
            if not return_logits:
                return loss
            return loss, self._share_outputs([result.outputs.get(index) for index in range(count)])

    def _backward_passes(self) -> Counter[int]:
        return Counter(op.stage for op in self.program.ops[self.grid.pipe.rank] if op.kind in "BW")

    def _evaluation(self, microbatches: int) -> Program:
        """Return the verified program of a forward pass; made once for each number of microbatches."""
        if microbatches not in self._evaluations:
            self._evaluations[microbatches] = self._lower(forward_only(self.module.placement, microbatches))
        return self._evaluations[microbatches]

    def _reschedule(self, microbatches: int) -> None:
        schedule = training_schedule(self.module, self.options.schedule, microbatches, self.module.chunks)
        if tuple(schedule.placement) != tuple(self.module.placement):
            raise ConfigError(
                f"{schedule.name} with {microbatches} microbatches has its stages on the ranks "
                f"{list(schedule.placement)}, but the model was built on {list(self.module.placement)}: keep the batch "
                "size, or make the engine with the new one"
            )
        if self.options.recompute.contiguous and microbatches != self.batch.accumulation:
            raise ConfigError(
                self.options.say(
                    "<set_batch_size> does not work with <recompute.contiguous>, whose buffer is made for the first "
                    "number of microbatches: set it to false"
                )
            )
        self.program = self._lower(schedule)

    def module_state_dict(self) -> dict[str, Tensor]:
        """Return the whole model's weights and persistent buffers under its own names, on every rank. Collective."""
        held = {name: (layout_of(buffer), buffer) for name, buffer, _ in buffers(self.module, self.grid.pipe.rank)}
        with self.replicas.reading() as grid:
            return self._in_list_order(assemble(grid, {**self.shards("weights"), **held}))

    def gather(self, what: str = "weights") -> dict[str, Tensor]:
        """Return the model's unsharded tensors in the order of the list of layers, as ``Engine.gather``."""
        return self._in_list_order(super().gather(what))

    def _in_list_order(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sort tensors by the layers to which they belong, whatever ranks have these; a loss module comes last."""

        def place(name: str) -> int:
            first, layer, *_ = name.split(".")
            return int(layer) if first == "layers" else len(self.module.layer_specs)

        return {name: whole[name] for name in sorted(whole, key=place)}

    def _lower(self, schedule: Schedule) -> Program:
        zero, recompute = self.options.zero, self.options.recompute
        schedule, notes = with_passes(schedule, self.options.schedule, recompute.asked)
        if schedule.pairs and not self.executor.interleaves:
            why = (
                f"stage 3 releases the weights of a layer at the end of each pass, so the passes of {schedule.name}'s "
                "pairs run one after the other, and their collectives do not hide; stage 2 runs them interleaved"
            )
            notes.append(Note("zero.stage", why))
        self._warn(*notes)
        reduce_each = None if zero.reduce_each_microbatch else False
        program = lower(schedule, self.data_axis.options.stage, [tie.stages for tie in self.module.ties], reduce_each)
        verify(program)
        return program

    def _share_outputs(self, outputs: list[Any]) -> list[Any]:
        """Broadcast the last stage's outputs to every stage, and return them. Collective over the pipe axis."""
        pipe, source = self.grid.pipe, self.module.placement[-1]
        tensors, schema = flatten(outputs) if self.module.is_last else ([], None)
        encoded = pipe.all_gather_json(schema.encode().decode() if schema else None)[source]
        schema = Schema.decode(encoded)
        if not self.module.is_last:
            tensors = [torch.empty(s.shape, dtype=s.dtype, device=self.grid.device) for s in schema.tensors]
        tensors = [tensor.contiguous() for tensor in tensors]
        for tensor in tensors:
            pipe.broadcast(tensor, source=source)
        shared: list[Any] = unflatten(schema, tensors)
        return shared

    def _untrainable(self) -> str | None:
        """Return the reason for which a step would not update a parameter. None if it updates all parameters."""
        name = self.data_axis.displaced()
        if name is not None:
            return (
                f"{self.grid.describe()}: {name} is no longer where this engine steps it, because the model was given "
                "to another engine, was moved or cast. Do that before the engine is made"
            )
        if (problem := self.data_axis.misled_hook() or self._tree.problem()) is not None:
            return f"{self.grid.describe()}: {problem}"
        for parameter in self._frozen_at_start:
            if parameter.requires_grad:
                return (
                    f"{self.grid.describe()}: {layout_of(parameter).name} was frozen when the engine was made, so the "
                    "optimizer does not have it. Let all parameters that will be trained require gradients when the "
                    "engine is made, and freeze them afterwards"
                )
        return None

    def _compile(self, options: EngineOptions) -> Compilation | None:
        return compile_pipeline(self.module, options, self.program)

    def all_or_none(self, call: str) -> AbstractContextManager[None]:
        return all_or_none(self.grid, self._abandon, call)

    def _abandon(self) -> None:
        self.executor.abandon()
        self.feed.abandon()
        self.data_axis.abandon()


def _own_sums(grid: Grid, result: Result) -> StepSums:
    """Return the loss and the weight that this rank adds to the batch's sums.

    They are 0 on ranks other than the first of the tensor axis, because all ranks of that axis hold the same loss.
    """
    return StepSums(*(number * float(grid.tensor.is_first) for number in result.sums()))


def _managed(module: PipelineModule, groups: list[tuple[dict[str, Any], list[nn.Parameter]]]) -> list[ManagedParameter]:
    """Return this rank's parameters for the data axis, in the order of the model."""
    group_of = {p: i for i, (_, parameters) in enumerate(groups) for p in parameters if p.requires_grad}
    return [
        ManagedParameter(p.parameter, p.layout, p.stages, p.layers, p.tie, p.counted, group_of.get(p.parameter))
        for p in module.local_parameters()
    ]
