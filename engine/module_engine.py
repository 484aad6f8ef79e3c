"""ModuleEngine: trains any ``nn.Module`` in a loop of forward, backward and step.

engine = triax.Engine(model, optimizer=functools.partial(torch.optim.AdamW, lr=1e-3), batch=32)
for batch in batches:
    loss = engine(*batch)
    engine.backward(loss)  # in the last microbatch of a step, gradients are reduced during this call
    engine.step()          # acts after the last microbatch of a step
"""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..base.accelerators import is_accelerator
from ..base.checks import check_flag, check_positive
from ..base.errors import AgreedError, ConfigError
from ..base.nest import map_tensors
from ..base.option_error import Note
from ..context.part_loss import share_of_mean, share_of_terms
from ..grid import Grid
from ..grid.agreement.agreement import SAME_CALLS, enter_call, number, totals
from ..grid.agreement.failure import all_or_none
from ..grid.comm.traffic import Sent
from ..grid.layout import require_plain
from ..grid.loss_terms import Loss, is_named
from ..grid.randomness.random import DropoutState, bind_dropout, set_dropout_samples
from ..options.engine import EngineOptions
from ..options.schedule import ScheduleOptions
from ..pipe.microbatches import require_equal_shapes
from ..pipe.module import PipelineModule
from ..zero.gradient_norm import clip_factor, global_norm
from ..zero.modules.backward_passes import BackwardPasses
from ..zero.modules.broadcast import broadcast_weights
from ..zero.modules.leaf_modules import set_listed_leaf_modules
from ..zero.modules.module_optimizer import ModuleOptimizer
from .accounting.memory import MemoryAccounts
from .auxiliary_steps import AuxiliarySteps, bind_auxiliary
from .base import NO_OPTIMIZER, Engine, TrainingParts
from .module_step import MicrobatchCalls, MicrobatchCount, StepLosses
from .named_losses import NamedLossSteps
from .named_parameters import named_parameters
from .optim.loss_scale import process_scales, rescaled
from .optim.schedulers import advance_schedule
from .optimizer_step import StepSums
from .recording_observer import ModuleObserver
from .replica_buffers import ReplicaBuffers
from .setup.arguments import to_device
from .setup.compilation import Compilation, compile_module
from .setup.recomputation import log_profile, recompute_blocks


class ModuleEngine(Engine):
    """Trains a plain ``nn.Module``. ``triax.Engine(model, ...)`` makes it.

    Gradients are averaged: over the samples of a microbatch by the loss, over microbatches, and over replicas, as under
    DDP. Attributes that the engine does not have are the module's: ``engine.parameters()``.

    >>> model = nn.Linear(4, 1)
    >>> engine = triax.Engine(model, optimizer=triax.Optimizer("SGD", lr=0.1), batch=triax.Batch(microbatch=2))
    >>> before = model.weight.data.clone()
    >>> loss = engine(torch.ones(2, 4)).mean()
    >>> engine.backward(loss).equal(loss)
    True
    >>> engine.step()
    >>> before - model.weight.data, engine.global_steps
    (tensor([[0.1000, 0.1000, 0.1000, 0.1000]]), 1)

    The grid has no pipe axis. The first replica's parameters and buffers are broadcast to all replicas. Within a
    tensor-parallel group each rank keeps its shards, and unsharded tensors are broadcast from the group's first rank.

    Attributes:
        module, grid, options, batch: model, grid, options, and the three batch sizes.
        optimizer: over this rank's ranges; its groups hold the model's parameters. None without one.
        lr_scheduler: learning-rate schedule, advanced after each step that was not skipped. None without one.
        training_dataloader: this replica's microbatches of ``training_data``. None without training data.
        global_steps: number of optimizer steps, including those that fp16 skipped.
        micro_steps: number of calls of ``step``.
        recompute: recomputation of the module's blocks; None if none is asked for.
        backward_passes: backward passes of this step, and the reductions of their gradients.
        auxiliary_sums: loads and auxiliary losses of the step, as ``AuxiliarySteps.local_sums`` returns them.
    """

    micro_steps = 0
    auxiliary_sums: Tensor
    _shift = 0  # samples of the step that other grids have before this one's

    @classmethod
    def trains(cls, model: Any) -> bool:
        """Return True for a module that is not a ``PipelineModule``."""
        return isinstance(model, nn.Module) and not isinstance(model, PipelineModule)

    def _place(self, model: nn.Module) -> None:
        """Move the module to the grid's device."""
        self._warn(*self._notes())
        if self.options.schedule != ScheduleOptions():
            text = "has no effect, because the model is not a PipelineModule and runs as one stage"
            self._warn(Note("schedule", text))
        leaves = self.options.zero.leaf_modules
        set_listed_leaf_modules(model, [*leaves.classes], [*leaves.names], [*leaves.name_suffixes])
        require_plain(chain(model.named_parameters(), model.named_buffers()), type(model).__name__)
        to_device(model, self.grid)

    def _build(self, schedule: None, parts: TrainingParts) -> None:
        module, grid, options = self.module, self.grid, self.options
        self._scales = process_scales()
        if self.loss_scaler is not None:
            self._scales.add(self.loss_scaler)
        self._dropout = bind_dropout(module, options.seed)
        self._auxiliary = bind_auxiliary(module)
        self.auxiliary = AuxiliarySteps(module, grid, self._auxiliary)
        self.named_losses = NamedLossSteps(computes=True)
        self.compilation = compile_module(module, options, grid)
        self.recompute = recompute_blocks(module, options, grid, self._dropout or DropoutState(options.seed))
        factory, zero = parts.optimizer, options.zero
        if self._step_grid is not grid:
            broadcast_weights(module, grid, set())  # the data axis of one replica does not make replicas start equal
        broadcast_weights(
            module, self._step_grid, {p for _, group in parts.groups for p in group} if factory else set()
        )
        layout = (self._step_grid, self._options, zero.bucket_size)
        common: dict[str, Any] = {"module": module, "keep": zero.keep_gathered}
        self.optimizer: ModuleOptimizer | None = None
        if factory is None:
            self.backward_passes = BackwardPasses([], *layout, None, **common)
        else:
            listed = [{**options, "params": group} for options, group in parts.groups]
            self.optimizer = ModuleOptimizer(factory, listed, *layout, **common)
            self.backward_passes = self.optimizer.backward_passes
        self.data_axis = self.backward_passes.data_axis
        self.backward_passes.origin = self._scales.origin
        self.data_axis.access.connect(
            self._gradient_divisor,
            "Call engine.clip_grad_norm_(max_norm) before engine.step() to clip, in any stage, and "
            'engine.grad_norm or engine.gather("gradients") after it to read',
            self.all_or_none,
        )
        self.accounts = MemoryAccounts(self.data_axis, module, grid)
        self.replica_buffers = ReplicaBuffers(module, self._step_grid)
        self._sent_before: dict[str, dict[str, Sent]] | None = None  # when this step began; None: it has not
        self._make_step(parts)
        self.observer = ModuleObserver(self)
        early = self._options.stage > 1 and self._options.reduce_every_backward
        self._count = MicrobatchCount(self.batch.accumulation, options.batch.counted, options.batch.counted or early)
        self.backward_passes.next_is_last = self._count.pass_is_last
        self._calls, self._losses = MicrobatchCalls(), StepLosses(self.auxiliary)
        self.backward_passes.discarded = self._losses.forget
        self._warned_of_late_step = False
        self._set_plain()
        self._call_order = grid.call_order(self._step_grid.world, SAME_CALLS)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``forward``."""
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on its device. Under fp16 and bf16, floating-point inputs take the dtype of its weights."""
        with self.spans("forward"), self.all_or_none("forward"):
            graph, trains = torch.is_grad_enabled(), self.module.training
            if graph and self._scales.any:  # before the cast: gradients are divided in the inputs' own dtype
                (args, kwargs), _ = rescaled((args, kwargs), self._missing_scale, True, self._keeps_dtype)
            if self._options.weight_dtype is not None or self.device.type != "cpu":
                args, kwargs = map_tensors(self._cast, args), map_tensors(self._cast, kwargs)
            if graph and trains:
                self.replica_rows.see((args, kwargs))
                self._begin_step()
                self._calls.forwards += 1
            counting = self.accounts.counting() if trains else nullcontext()
            if not self.options.batch.counted:
                self._count.done = self.backward_passes.count
            if self._dropout is not None:
                share = self.batch.micro * self.batch.accumulation
                first = self._shift + self.grid.replica * share + self.microbatch * self.batch.micro
                set_dropout_samples(self._dropout, (args, kwargs), first, self.global_steps)
            require_equal_shapes(self.grid, (args, kwargs))
            self._auxiliary.scale = self.optimizer_step.scale
            self.auxiliary.begin_forward(self.backward_passes.total)
            with counting:
                y = self.module(*args, **kwargs)
            if trains:
                self.observer.count_tokens((*args, *kwargs.values()))
            return self._watch_outputs(y, trains) if graph else y

    def _watch_outputs(self, outputs: Any, trains: bool) -> Any:
        """Return the outputs of a forward pass such that a backward pass is seen, and is scaled where fp16 asks for it.

        A module in eval mode begins a step if a backward pass enters through its outputs.
        """
        self.backward_passes.watch(outputs)
        if not self._scales.any and trains:
            return outputs
        outputs, seen = rescaled(outputs, self._enter_backward if trains else self._enter_eval_backward)
        if trains:
            self._calls.opaque |= not seen
        elif not seen:  # a backward pass may enter here unnoticed
            self._calls.opaque_in_eval = True
            self._begin_step()
        return outputs

    def backward(
        self,
        loss: Tensor | tuple[Tensor, Tensor | float] | Loss | Mapping[str, Any],
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
    ) -> Tensor:
        """Run the backward pass of one microbatch. Collective over the context axis.

        Args:
            loss: 0-dim; or a pair (sum of losses, number of labels), which is divided here. With a context axis it must
                be a pair, of this rank's part of the sequences: the number is then summed over the axis. Or a
                ``triax.Loss`` or a dict of such terms, which are added; ``metrics`` has them after the step.
            retain_graph: as in ``torch.Tensor.backward``.
            scale_wrt_gas: divide the gradient by the microbatches of a step.

        Returns:
            The loss, divided by the microbatches of a step if ``scale_wrt_gas``, detached.

        Raises:
            RuntimeError: if there is no optimizer, if the loss is not a number or has no graph, if it is the mean over
                a part of a sequence, or if this is a second backward pass of a step's last microbatch.
        """
        with self.spans("backward"), self.all_or_none("backward"):
            if self.optimizer is None:
                raise AgreedError(NO_OPTIMIZER)
            named = is_named(loss)
            if named:
                loss, terms = share_of_terms(loss, self.grid.context, "engine.backward(loss)")
            else:
                loss = share_of_mean(loss, self.grid.context, "engine.backward(loss)")  # type: ignore[arg-type]
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise AgreedError(
                    "backward takes a loss, which is a tensor of one element that depends on parameters, not "
                    f"{describe_loss(loss)}. For another output, call output.backward(gradient), and then engine.step()"
                )
            self._begin_step()
            self.backward_passes.forget_discarded()
            self._require_one_loss((id(self), self._scales.steps))
            before, accumulation = self.backward_passes.count, self.batch.accumulation
            if named:
                self._losses.require_form(terms)
            scale = self.optimizer_step.scale
            # The step divides by the number of microbatches; not here.
            factor = scale if scale_wrt_gas else scale * accumulation
            self._auxiliary.scale = factor
            with self._scales.running(scale, id(self)):
                scaled = loss if factor == 1.0 else loss.float() * factor
                self.backward_passes.watch(scaled)
                with self.accounts.counting():
                    scaled.backward(retain_graph=retain_graph)
                if self.backward_passes.count == before:
                    self.backward_passes.run_empty()
            self._calls.backwards += self.backward_passes.count - before
            loss = loss.detach() / accumulation if scale_wrt_gas else loss.detach()
            self._losses.values.append(number(loss))
            self._losses.named += [terms] if named else []
            return loss

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply the loss by fp16's scale, to call ``backward()`` on it: ``engine.scale(loss).backward()``."""
        self._calls.scaled = True
        return self._scales.scaled(loss, self.optimizer_step.scale) if self._scales.any else loss

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a microbatch; after the last one of a step, clip, update the weights, and advance the schedule.

        Args:
            lr_kwargs: arguments of the schedule's own ``step``, such as ``{"metrics": loss}``.

        Raises:
            RuntimeError: if there is no optimizer, if no backward pass was run since the last call, or if called inside
                ``no_sync``.
        """
        with self.spans("step", f"step {self.global_steps + 1}"), self.all_or_none("step"):
            optimizer = self._require_step()
            self._warn_of_late_step()
            last = self._count.is_last
            try:
                if last:
                    self._end_step(optimizer, lr_kwargs)
            finally:  # also after an error
                self._end_microbatch(last)
        self._save_if_due()

    def _require_step(self) -> ModuleOptimizer:
        """Return the optimizer, if ``step`` may be called now, and raise its errors if not."""
        passes = self.backward_passes
        if self.optimizer is None:
            raise AgreedError(NO_OPTIMIZER)
        if self.in_no_sync:
            raise AgreedError(
                "step() was called inside no_sync(), where gradients are not reduced: call it after the with block"
            )
        if passes.stepped or not passes.new:
            raise AgreedError(
                "step() without a backward pass: call engine.backward(loss), or loss.backward(), before each step()"
            )
        self._require_one_loss()
        by_user = passes.new - self._calls.backwards
        if by_user > 0:
            share_of_mean(torch.zeros(()), self.grid.context, "loss.backward()")
        if self._calls.lacks_scale(by_user, self.loss_scaler is not None):
            raise AgreedError(
                "loss.backward() did not multiply the gradients by fp16's loss scale, because the module returned "
                "an object that is not a tensor, tuple, list or dict: call engine.backward(loss), or "
                "engine.scale(loss).backward()"
            )
        return self.optimizer

    def _end_step(self, optimizer: ModuleOptimizer, lr_kwargs: Mapping[str, Any] | None) -> None:
        """Take the step, after its last microbatch, with the replicas that take it together."""
        if not self.options.batch.counted:
            missing = self.batch.accumulation - self.backward_passes.count
            self._samples_before -= missing * self.batch.micro * self.grid.replicas
        # These passes reduce gradients, each by collectives of its own.
        reduces = self.options.batch.counted and self.data_axis.exchange is None
        passes = self.backward_passes.new if reduces else 1
        enter_call(self.grid, "step" if passes == 1 else f"step after {passes} backward passes", ends=self._call_order)
        self._count.in_update = True
        with torch.no_grad(), self.accounts.counting(), self.replicas.stepping() as grid:
            self._step(grid, optimizer, lr_kwargs)
        if self.replicas.just_synchronized:
            self._share_buffers()
        self._sent = self.grid.traffic.since(self._sent_before or {})

    def _end_microbatch(self, last: bool) -> None:
        if last:
            self._sent_before = None
            self.accounts.end()
        self._count.end(last)
        self.backward_passes.end_microbatch()
        self.micro_steps += 1
        self._calls = MicrobatchCalls()

    def _warn_of_late_step(self) -> None:
        """Warn once if step() ends one microbatch after the passes of a whole step, as in a DDP loop."""
        passes, microbatches = self.backward_passes.new, self.batch.accumulation
        by_count = self._count.counted and self._count.said_last is None
        late = by_count and 1 < microbatches == passes == self._calls.forwards
        if self._warned_of_late_step or not late:
            return
        self._warned_of_late_step = True
        self._warn(
            Note(
                "batch.microbatches",
                f"is {microbatches}, and engine.step() was called after {passes} forward and backward passes, which it "
                f"counts as one microbatch. If they are {passes} microbatches, call engine.step() after each of them; "
                "it changes the weights after the last one",
            )
        )

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over the whole grid is at most ``max_norm``, in any stage. Collective.

        Call it between the last ``backward`` of a step and ``step``. The option ``clip`` does the same in each step.

        Returns:
            The norm before, 0-dim float64. If it is not finite, as after an overflow in fp16, nothing is scaled.

        Raises:
            RuntimeError: if the step's backward passes are not complete, or with gradient compression.
        """
        check_positive("clip_grad_norm_", max_norm=max_norm)
        with self.all_or_none("clip_grad_norm_"):
            if self.data_axis.exchange is not None:
                raise AgreedError(
                    self.options.say(
                        "clip_grad_norm_ was called, but gradient compression combines the replicas' gradients only "
                        "within the step: set <clip>"
                    )
                )
            enter_call(self.grid, "clip_grad_norm_")
            divisor = self._gradient_divisor()
            self.data_axis.access.take_back()
            (square,) = totals(self._step_grid, [self.data_axis.squares()])
            norm = global_norm(square, divisor)
            if math.isfinite(norm):
                self.data_axis.access.multiply(clip_factor(norm, max_norm))
            return torch.tensor(norm, dtype=torch.float64, device=self.device)

    def _gradient_divisor(self) -> float:
        """End the reductions, and return the number by which the sums must be divided for the mean. Collective.

        Raises:
            RuntimeError: if the step's backward passes are not complete.
        """
        passes = self.backward_passes
        if self.options.fault_tolerance is not None and not self.data_axis.stepped:
            raise AgreedError(
                self.options.say(
                    "gradients were read or clipped before step(), but <fault_tolerance> sums them over its replicas "
                    "within it: set <clip>, and read gradients after step()"
                )
            )
        if not passes.reduced or self.data_axis.stepped:
            problem = None
            if passes.stepped or not passes.new:
                problem = "no backward pass has run since the last engine.step(): do it between the two"
            elif self.in_no_sync:
                problem = "within no_sync() gradients are not reduced: do it after the with block"
            elif not self.is_last_microbatch():
                problem = (
                    f"these are the gradients of {self.microbatch + 1} of {self.batch.accumulation} microbatches: do "
                    "it if engine.is_last_microbatch()"
                )
            elif self.options.local_updates is not None:
                problem = self.options.say("under <local_updates> replicas step by themselves: set <clip>")
            if problem is not None:
                raise AgreedError(f"gradients were read or clipped, but {problem}")
        with self.spans("reduce"):
            passes.end_reductions()
        weight = self._step_grid.data.size * self.batch.accumulation
        return weight * self._options.divisor * self.optimizer_step.scale

    def _step(self, grid: Grid, optimizer: ModuleOptimizer, lr_kwargs: Mapping[str, Any] | None) -> None:
        """Take the step with the ranks of a grid."""
        self.backward_passes.require_unchanged()
        self.replica_rows.compare()
        reduced = self.backward_passes.reduced
        with self.spans("reduce"):
            self.backward_passes.end_reductions()
        self.data_axis.access.take_back(look=reduced)
        losses = self._losses.take()
        total = self._totals(grid, losses)
        if total.strayed is not None:
            self.replica_buffers.synchronize(total.strayed > 0)
        replicas = grid.data.size * self.replicas.contributing
        weight, value = replicas * self.batch.accumulation, total.loss / replicas if losses.values else None
        loss = torch.tensor(math.nan if value is None else value, dtype=torch.float64)
        self.backward_passes.mark_stepped()  # also if the step is left out
        self._scales.steps += 1
        by_microbatch = {index: (term,) for index, term in enumerate(losses.values)}
        taken = self.optimizer_step.decide(grid, value, weight, by_microbatch, self.observers)
        if taken:
            factor = self.optimizer_step.factor(grid)
            # The step leaves out a parameter that has a gradient on no rank, as torch's optimizers do. This is rare.
            optimizer.prepared = factor, self.data_axis.without_gradient() if total.unused else set()
            with self.spans("optimizer"):
                optimizer.step()
            advance_schedule(self.lr_scheduler, optimizer, None if value is None else loss, lr_kwargs)
            self.optimizer_step.advance(grid)
        if self.auxiliary:
            self.auxiliary.end(grid, self.auxiliary_sums, weight, not taken, self.grid.rank == 0)
        self.global_steps += 1
        for observer in self.observers:
            observer.after_step(grid, loss)
        log_profile(self.recompute)

    def _totals(self, grid: Grid, losses: StepLosses) -> StepSums:
        """Sum the numbers of a step over all ranks, and its named losses. Collective."""
        # Tensor ranks hold the same loss: the first one counts. On a GPU the sum is a tensor, so that nothing waits.
        own = StepSums(
            functools.reduce(operator.add, losses.values, 0.0) * float(grid.tensor.is_first),
            unused=self.data_axis.used.unused(),
            strayed=float(self.replica_buffers.strayed()) if self.replica_buffers else None,
        )
        if self.auxiliary:
            self.auxiliary_sums = self.auxiliary.local_sums(grid.device)
        sums, _ = self.named_losses.totals(grid, losses.named, own, self.optimizer_step.totals, training=False)
        return sums

    def shift_samples(self, samples: int) -> None:
        """Set the number of samples of the step that other grids have before this one's: dropout depends on it."""
        self._shift = samples

    def _require_one_loss(self, *following: tuple[int | None, int]) -> None:
        """Check that this step adds no gradients of its own loss to gradients of a loss of another engine's step.

        Args:
            following: the origin of the pass that is about to begin.

        Raises:
            RuntimeError: a backward pass of this microbatch belongs to another engine's ``backward`` and one to this
                engine's; or another engine has stepped between two passes.
        """
        origins = [*self.backward_passes.origins, *following]
        owners, steps = ({*values} for values in zip(*origins, strict=True))
        if len(steps) > 1 or (id(self) in owners and owners - {id(self), None}):
            raise AgreedError(
                f"the gradients of {type(self.module).__name__} come from this engine's loss and from the loss of "
                "another engine, which flows through this module as a generator's loss does through a discriminator: "
                "one step would add both. Call zero_grad() of this engine before its own backward pass to discard the "
                "other gradients; to add both, run one backward pass of the sum of the losses"
            )

    @property
    def microbatch(self) -> int:
        """Number of microbatches of this step that are done."""
        return self._count.done

    @property
    def in_no_sync(self) -> bool:
        """True within ``no_sync``."""
        return self._count.in_no_sync

    def is_last_microbatch(self) -> bool:
        """Return True if this microbatch is the last one of a step."""
        return self._count.is_last

    def set_last_microbatch(self, is_boundary: bool) -> None:
        """Set before each forward whether its microbatch is the last one of a step, in place of counting them.

        Gradients are divided by ``batch.accumulation`` in any case.

        Raises:
            RuntimeError: under ``batch.counted`` False, where each ``step`` updates the weights.
        """
        check_flag(self.options.say("<set_last_microbatch>"), is_boundary=is_boundary)
        with self.all_or_none("set_last_microbatch"):
            if not self.options.batch.counted:
                raise AgreedError(
                    self.options.say(
                        "<set_last_microbatch>() was called, but <batch.counted> is false, so that each "
                        "engine.step() updates the weights: leave one of the two out"
                    )
                )
        self._count.said_last = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward passes do not reduce gradients. ``step`` must not be called inside it.

        Raises:
            RuntimeError: in stages 2 and 3 of ZeRO, because they reduce gradients in each backward pass, or inside
                another ``no_sync``.
        """
        if self.in_no_sync:
            raise AgreedError("no_sync() was called inside no_sync(): leave the outer with block first")
        options = self.data_axis.options
        if options.stage >= 2 and options.reduce_every_backward:
            raise AgreedError(
                self.options.say(
                    f"no_sync() does not work in ZeRO stage {options.stage}, which reduces gradients in each backward "
                    "pass: set <zero.reduce_each_microbatch> to false, or <zero.stage> to 1"
                )
            )
        self._count.in_no_sync = True
        try:
            yield
        finally:
            self._count.in_no_sync = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard this step's gradients. Every step begins without gradients. Collective if there are gradients."""
        self.backward_passes.reset()

    def train(self, mode: bool = True) -> ModuleEngine:
        """Set the module's training mode, as ``nn.Module.train``."""
        self.module.train(mode)
        return self

    def eval(self) -> ModuleEngine:
        """Set the module's evaluation mode, as ``nn.Module.eval``."""
        return self.train(False)

    def module_state_dict(self) -> dict[str, Any]:
        """Return ``state_dict()`` with unsharded weights, the buffers and any ``get_extra_state()``. Collective."""
        weights = self.gather()
        names = {parameter: layout.name for parameter, layout, _ in named_parameters(self.module)}
        state: dict[str, Any] = self.module.state_dict(keep_vars=True)
        for key, value in state.items():
            if isinstance(value, nn.Parameter):
                state[key] = weights[names[value]].clone()
            elif isinstance(value, Tensor):
                state[key] = value.detach().clone()
        return dict(state)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            module = self.__dict__.get("module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
            try:
                return super().__getattr__(name)
            except AttributeError as error:
                text = f"neither {type(self).__name__} nor its {type(module).__name__} has {name!r}"
                raise AttributeError(text, name=name, obj=self) from error

    def _missing_scale(self) -> float:
        return self._scales.missing(self.optimizer_step.scale, self._calls.scaled)

    def _enter_backward(self) -> float:
        self._calls.entered = True
        return self._missing_scale()

    def _enter_eval_backward(self) -> float:
        with torch.no_grad():
            self._begin_step()
        return self._enter_backward()

    def _begin_step(self) -> None:
        """Begin the next step, if the last one has ended: the first forward or backward pass after it does.

        A forward pass in eval mode begins no step: no backward pass follows an evaluation.
        """
        if self._sent_before is None:
            self._sent_before = self.grid.traffic.report()
            for observer in self.observers:
                observer.before_step()
            if self.record_memory:
                self.accounts.begin()
        if self.backward_passes.stepped:
            self.backward_passes.begin()

    def _backward_passes(self) -> Counter[int]:
        return Counter({0: self.batch.accumulation})

    def _set_plain(self) -> None:
        # One process and one microbatch: autograd's own gradients are the gradients of the batch.
        one = self.grid.size == 1 and self.batch.accumulation == 1 and self.options.batch.counted
        sums = self.data_axis.exchange is None and self.options.local_updates is None
        self.data_axis.access.plain = one and sums and self.loss_scaler is None and self._options.divisor == 1.0

    def _cast(self, tensor: Tensor) -> Tensor:
        dtype = self._options.weight_dtype if tensor.is_floating_point() else None
        return tensor.to(self.device, dtype, non_blocking=is_accelerator(self.device))

    def _keeps_dtype(self, tensor: Tensor) -> bool:
        return self._options.weight_dtype in (None, tensor.dtype)

    def set_position(self, steps: int, samples: int) -> None:
        """Set the counters of steps and samples, and discard the gradients of an unfinished step."""
        super().set_position(steps, samples)
        self.micro_steps = steps * self.batch.accumulation
        if self._count.in_update:  # a replica that joins gets its state within step(), which counts one more
            self.micro_steps += self.batch.accumulation - 1
        else:
            self.zero_grad()
            self._count.done = 0

    def set_batch_size(self, size: int, microbatch: int | None = None) -> None:
        """Set the samples per step, as ``Engine.set_batch_size``.

        Raises:
            ConfigError: in its cases, and in the middle of a step.
        """
        if self._count.done or self._count.in_update:
            raise ConfigError(
                f"{self.options.say('<set_batch_size>')} was called within a step, after {self._count.done} of its "
                f"{self._count.microbatches} microbatches: call it after engine.step() has ended the step"
            )
        super().set_batch_size(size, microbatch)
        self._count.microbatches = self.batch.accumulation
        self._set_plain()

    def _compile(self, options: EngineOptions) -> Compilation | None:
        if self.recompute is not None or options.zero.stage == 3:
            raise ConfigError(
                "engine.compile() was called after stage 3 of ZeRO or recomputation took over the calls of the "
                "module's blocks: "
                "leave it out, and set the option compile to true"
            )
        return compile_module(self.module, options, self.grid)

    def all_or_none(self, call: str) -> AbstractContextManager[None]:
        return all_or_none(self.grid, self.data_axis.abandon, f"{call} of microbatch {self.microbatch}")


def describe_loss(value: Any) -> str:
    """Describe a value that is not a loss, for messages."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"one of shape {tuple(value.shape)}{'' if value.requires_grad else ' without a graph'}"
