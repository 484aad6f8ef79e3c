"""The engine of a plain module: DeepSpeed's loop of forward, backward and step, over the replicas of any ``nn.Module``.

engine, *_ = triax.initialize(model=model, config=config)
for batch in batches:
    loss = engine(*batch)
    engine.backward(loss)  # gradients are reduced while the last microbatch's runs
    engine.step()          # acts once in gradient_accumulation_steps
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import Dataset

from ..grid import Grid, Layout, layout_of
from ..grid.nest import map_tensors
from ..zero.norm import clip_factor
from ..zero.optimizer import MakeOptimizer
from ..zero.passes import Passes
from . import precision
from .alike import require_alike
from .batch import AgreedError
from .compat import Compat
from .config import Config, ConfigError, batch_sizes
from .data import Loader
from .failure import all_or_none
from .finite import Finite, Losses
from .module_start import ModuleOptimizer, bind_dropout, describe, number_samples, share
from .monitor import make_monitor
from .rescale import missing, rescaled, scaled, scaled_by
from .schedulers import advance, follow
from .sums import totals
from .weights import Weights, assembled

# Engines with a loss scale: where there are any, every engine's outputs see to it that only its own counts.
_SCALING: WeakSet[ModuleEngine] = WeakSet()


class ModuleEngine(Compat, Weights):
    """Trains a plain ``nn.Module``; made by ``triax.initialize``.

    Gradients are means: over the samples of a microbatch as the loss has it, over microbatches, and over replicas, as
    under DDP. What the engine itself does not have is looked for on the module: ``engine.parameters()``.

    Args:
        module: on the grid's device.
        grid: without a pipe axis. Replicas take the first one's parameters and buffers; tensor ranks each have their
            own of what is sharded, and the first one's of what is whole.
        config: checked.
        make_optimizer: None: the module is run, not trained.
        groups: parameter groups, (options, parameters).
        training_data, make_scheduler, collate_fn: of ``initialize``.

    Attributes:
        module, grid, config, batch: what is trained, where and how; ``batch`` has all three sizes.
        optimizer: over this rank's ranges; its groups hold the model's parameters. None without one.
        lr_scheduler: stepped after each step that was not skipped; None without one.
        training_dataloader: this replica's microbatches of ``training_data``; None without it.
        global_steps: optimizer steps, those included that fp16 skipped.
        micro_steps: calls of ``step``.
    """

    global_steps = 0
    micro_steps = 0

    def __init__(
        self,
        module: nn.Module,
        grid: Grid,
        config: Config,
        make_optimizer: MakeOptimizer | None,
        groups: list[tuple[dict[str, Any], list[nn.Parameter]]],
        training_data: Dataset[Any] | None = None,
        make_scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.module, self.config, self.grid = module, config, grid
        self.batch = batch_sizes(config, grid.replicas)
        self._half = precision.half_dtype(config)
        self._mode = precision.mode(config, grid, module)
        self._scaler = precision.scaler(config)
        if self._scaler is not None:
            _SCALING.add(self)
        self._dropout = bind_dropout(module, config.seed)
        share(module, grid, {p for _, parameters in groups for p in parameters} if make_optimizer else set())
        zero = config.zero_optimization
        common: dict[str, Any] = {"module": module, "keep": zero.stage3_keep_gathered}
        self.optimizer: ModuleOptimizer | None = None
        if make_optimizer is None:
            self._passes = Passes([], grid, self._mode, zero.reduce_bucket_size, None, **common)
        else:
            listed = [{**options, "params": parameters} for options, parameters in groups]
            self.optimizer = ModuleOptimizer(
                make_optimizer, listed, grid, self._mode, zero.reduce_bucket_size, **common
            )
            self._passes = self.optimizer.passes
        self._replicas = self._passes.replicas
        self.lr_scheduler = make_scheduler(self.optimizer) if make_scheduler and self.optimizer else None
        self.training_dataloader: Loader | None = None
        if training_data is not None:
            self.training_dataloader = self.deepspeed_io(training_data, collate_fn=collate_fn)
        self._monitor = make_monitor(config, grid, self.batch.train)
        self._micro = 0  # microbatches of this step that are behind us
        self._boundary: bool | None = None  # what set_gradient_accumulation_boundary said
        self._silent = False  # within no_sync
        self._by_hand = False  # the loss of this microbatch went through scale()
        self._own = 0  # backward passes of this microbatch that backward() made
        self._opaque = False  # outputs of this microbatch that cannot be looked into
        self._hidden = False  # the same, in eval mode, where no backward pass need follow
        self._entered = False  # a backward pass came in by outputs of this microbatch that can be
        self._finite = Finite(grid, config.nan_loss, scaled=self._scaler is not None)
        self._losses = Losses()
        self._mark_last()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """``forward``."""
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns. Under fp16 and bf16, floating-point inputs take the dtype of its weights."""
        with self._all_or_none("forward"):
            graph, trains = torch.is_grad_enabled(), self.module.training
            if graph and len(_SCALING):  # before the cast: gradients are divided in the inputs' own dtype
                (args, kwargs), _ = rescaled((args, kwargs), self._missing, True, self._stays)
            if self._half is not None:
                args, kwargs = map_tensors(self._cast, args), map_tensors(self._cast, kwargs)
            if graph and trains:
                self._begin()
            if self._dropout is not None:
                share = self.batch.micro * self.batch.accumulation
                first = self.grid.replica * share + self._micro * self.batch.micro
                number_samples(self._dropout, (args, kwargs), first, self.global_steps)
            require_alike(self.grid, (args, kwargs))
            y = self.module(*args, **kwargs)
            if graph and (len(_SCALING) or not trains):
                y, seen = rescaled(y, self._enter if trains else self._enter_eval)
                if trains:
                    self._opaque |= not seen
                elif not seen:  # a backward pass may come here, and not be seen to
                    self._hidden = True
                    self._begin()
            return y

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """The backward pass of one microbatch.

        Args:
            loss: 0-dim. Its gradient counts by 1 / gradient_accumulation_steps.
            retain_graph: as torch's.
            scale_wrt_gas: False: its gradient counts whole.

        Returns:
            The loss divided by gradient_accumulation_steps (or whole), detached.

        Raises:
            RuntimeError: no optimizer, a loss that is no number or has no graph, or a second pass of a step's last
                microbatch.
        """
        with self._all_or_none("backward"):
            if self.optimizer is None:
                raise AgreedError(_NO_OPTIMIZER)
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise AgreedError(
                    f"backward takes a loss, a tensor of one element that depends on parameters, not {describe(loss)} "
                    "(of other outputs, call output.backward(gradient), and then engine.step())"
                )
            self._begin()
            before, accumulation = self._passes.count, self.batch.accumulation
            scale = self._scale()
            # The one division, by microbatches and all, is that of the step.
            factor = scale if scale_wrt_gas else scale * accumulation
            with scaled_by(scale):
                (loss if factor == 1.0 else loss.float() * factor).backward(retain_graph=retain_graph)
            if self._passes.count == before:
                self._passes.absent()
            self._own += self._passes.count - before
            return self._losses.add(loss.detach() / accumulation if scale_wrt_gas else loss.detach())

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times fp16's scale, for a ``backward()`` of one's own: ``engine.scale(loss).backward()``."""
        self._by_hand = True
        return scaled(loss, self._scale()) if len(_SCALING) else loss

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """A microbatch is done; after the last one of a step, the step: clip, update, schedule.

        Args:
            lr_kwargs: arguments of the schedule's own ``step``, such as ``{"metrics": loss}``.

        Raises:
            RuntimeError: nothing to step: no optimizer, or no backward pass since the last call; or within
                ``no_sync``.
        """
        with self._all_or_none("step"):
            if self.optimizer is None:
                raise AgreedError(_NO_OPTIMIZER)
            if self._silent:
                raise AgreedError("step() within no_sync(), where nothing is reduced: call it behind")
            if self._passes.stepped or self._passes.count == self._passes.seen:
                raise AgreedError(
                    "step() without a backward pass: call engine.backward(loss), or loss.backward(), before each step()"
                )
            opaque = self._opaque or (self._hidden and not self._entered and self._scaler is not None)
            if opaque and not self._by_hand and self._passes.count - self._passes.seen > self._own:
                raise AgreedError(
                    "the module returned an object that cannot be looked into, so under fp16 loss.backward() does not "
                    "scale its gradients: call engine.backward(loss), or engine.scale(loss).backward()"
                )
            try:
                if self.is_gradient_accumulation_boundary():
                    self._micro = -1
                    self._step(self.optimizer, lr_kwargs)
            finally:  # a step that is refused is over, too
                self._micro += 1
                self._passes.seen = self._passes.count
                self.micro_steps += 1
                self._own, self._by_hand = 0, False
                self._opaque = self._hidden = self._entered = False
                self._mark_last()

    @torch.no_grad()
    def _step(self, optimizer: ModuleOptimizer, lr_kwargs: Mapping[str, Any] | None) -> None:
        optimizer.require_known()
        self._passes.close()
        counts, told, squares = float(self.grid.tensor.is_first), self._losses.count > 0, self._squares()
        mine = [self._replicas.unused(), self._losses.sum() * counts]
        unused, total, *square = totals(self.grid, [*mine, *squares])
        loss = torch.tensor(total / self.grid.data.size if told else math.nan, dtype=torch.float64)
        divisor = self.grid.data.size * self.batch.accumulation * self._mode.prescale * self._scale()
        self._norm = math.sqrt(square[0]) / divisor if square else None
        self._passes.stepped = True  # what may be left out is over, too
        losses, self._losses = self._losses, Losses()
        skipped = self._finite.leaves_out(
            total if told else None, self._norm, lambda: losses.describe(self.grid, squares)
        )
        overflow = not skipped and self._scaler is not None and self._norm is not None and not math.isfinite(self._norm)
        if not (skipped or overflow):
            scale = self._exchange(divisor)
            if self.config.gradient_clipping and self._norm is not None:
                scale *= clip_factor(self._norm, self.config.gradient_clipping)
            # What had no gradient anywhere stands still, as under torch's optimizers.
            optimizer.next = scale, self._replicas.without_gradient() if unused > 0 else ()
            optimizer.step()
            self._schedule(optimizer, loss if told else None, lr_kwargs)
        if self._scaler is not None and not skipped:
            self._scaler.update(overflow, report=self.grid.rank == 0)
        self.global_steps += 1
        if self._monitor is not None:
            self._monitor(self, loss)

    def _schedule(self, optimizer: ModuleOptimizer, loss: Tensor | None, lr_kwargs: Mapping[str, Any] | None) -> None:
        if self.lr_scheduler is None:
            return
        if lr_kwargs:
            self.lr_scheduler.step(**lr_kwargs)
            follow(self.lr_scheduler, optimizer)
        elif isinstance(self.lr_scheduler, ReduceLROnPlateau) and loss is None:
            raise AgreedError(
                "ReduceLROnPlateau goes by the loss, which only engine.backward(loss) tells: call that, or "
                'engine.step(lr_kwargs={"metrics": loss})'
            )
        else:
            advance(self.lr_scheduler, loss, optimizer)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether this microbatch is the last one of a step."""
        return self._micro + 1 >= self.batch.accumulation if self._boundary is None else self._boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say so oneself, before each forward: then ``step`` acts where it is True, whatever was counted.

        Gradients are divided by gradient_accumulation_steps all the same.
        """
        self._boundary = is_boundary
        self._mark_last()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward passes reduce nothing, and ``step`` is not called.

        Raises:
            RuntimeError: in stages 2 and 3, which reduce each pass, or within another one.
        """
        if self._silent:
            raise AgreedError("no_sync() within no_sync(): leave the first one before")
        if self._mode.stage >= 2 and self._mode.each:
            raise AgreedError(
                f"no_sync() in stage {self._mode.stage}, which keeps no whole gradients between backward passes: set "
                "zero_optimization.reduce_each_microbatch to false, or the stage to 1"
            )
        self._silent = True
        self._mark_last()
        try:
            yield
        finally:
            self._silent = False
            self._mark_last()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this step so far. (A step begins without any.) Collective where there are some."""
        self._passes.zero()
        self._losses = Losses()

    def train(self, mode: bool = True) -> ModuleEngine:
        """As ``nn.Module.train``."""
        self.module.train(mode)
        return self

    def eval(self) -> ModuleEngine:
        """As ``nn.Module.eval``."""
        return self.train(False)

    def module_state_dict(self) -> dict[str, Tensor]:
        """``state_dict()`` with whole weights, for a module of one process; buffers are this rank's. Collective."""
        whole = self.gather()
        names = {p: layout_of(p).name or name for name, p in self.module.named_parameters()}
        return {
            key: whole[names[value]].clone() if isinstance(value, nn.Parameter) else value.detach().clone()
            for key, value in self.module.state_dict(keep_vars=True).items()
        }

    def gather(self, what: str = "weights") -> dict[str, Tensor]:
        """Whole tensors under whole-model names, on every rank. Collective.

        Args:
            what: ``"weights"``, or ``"gradients"``: of the last step, divided and clipped, until the next forward.
        """
        mine: dict[str, tuple[Layout, Tensor]] = {}
        if what == "weights":
            with self._replicas.whole():
                for name, parameter in self.module.named_parameters():
                    mine[layout_of(parameter).name or name] = layout_of(parameter), parameter.detach().clone()
        elif what == "gradients":
            mine = {member.layout.name: (member.layout, gradient) for member, gradient in self._replicas.gradients()}
        else:
            raise ValueError(f"gather takes 'weights' or 'gradients', not {what!r}")
        return assembled(self.grid, mine)

    def whole_weights(self) -> AbstractContextManager[None]:
        """Within it all weights are whole, in stage 3 of ZeRO too. Collective over the data axis."""
        return self._replicas.whole()

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("module")
        if module is not None and hasattr(module, name):
            return getattr(module, name)
        raise AttributeError(f"neither {type(self).__name__} nor its {type(module).__name__} has {name!r}")

    def _scale(self) -> float:
        return 1.0 if self._scaler is None else self._scaler.scale

    def _missing(self) -> float:
        return missing(self._scale(), self._by_hand)

    def _enter(self) -> float:
        self._entered = True
        return self._missing()

    def _enter_eval(self) -> float:
        with torch.no_grad():
            self._begin()
        return self._enter()

    def _begin(self) -> None:
        """After a step, the first forward or backward pass begins the next one.

        In eval mode a forward does not: it may be an evaluation's, which no backward pass follows.
        """
        if self._passes.stepped:
            self._passes.begin()

    def _mark_last(self) -> None:
        self._passes.last = self.is_gradient_accumulation_boundary() and not self._silent

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._half) if tensor.is_floating_point() else tensor

    def _stays(self, tensor: Tensor) -> bool:
        return self._half in (None, tensor.dtype)

    def _reschedule(self, microbatches: int) -> None:
        if self._micro:
            raise ConfigError(f"set_train_batch_size after {self._micro} microbatches of a step: call it between steps")

    def _resized(self) -> None:
        self._mark_last()

    def _all_or_none(self, call: str) -> AbstractContextManager[None]:
        return all_or_none(self.grid, self._passes.abandon, f"{call} of microbatch {self._micro}")


_NO_OPTIMIZER = "there is no optimizer: give config['optimizer'], or initialize(optimizer=...)"
