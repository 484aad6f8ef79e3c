"""Engine: base class of ``PipelineEngine`` and ``ModuleEngine``, and how one is made."""

from __future__ import annotations

import inspect
import json
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, Unpack, overload

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ..base.accelerators import is_accelerator
from ..base.checks import check_count, check_kind, check_path
from ..base.errors import ConfigError
from ..base.option_error import Note
from ..checkpoint.auto import AutoSaver
from ..checkpoint.snapshot import Snapshot
from ..context.sparse_layers import set_sparse_attention
from ..data.dataloader import Loader, TokenLoader, make_loader
from ..grid import Grid
from ..grid.agreement.agreement import agreed, begin_call, totals
from ..grid.assemble import Shard, assemble
from ..grid.comm.spans import Spans
from ..grid.comm.traffic import Sent
from ..options.compilation import Compile
from ..options.engine import EngineOptions
from ..pipe.module import PipelineModule
from ..pipe.program.schedule import Schedule
from ..zero.data_axis import ZeroDataAxis
from ..zero.gathered_parameters import gathered
from ..zero.range_stepper import OptimizerFactory
from .accounting.memory import MemoryAccounts
from .accounting.traffic_formulas import traffic_formulas
from .auxiliary_steps import AuxiliarySteps
from .instrument import instrument
from .keywords import Collate, EngineKeywords, Samples, Trained
from .monitor.monitor import Monitor
from .monitor.trace import comms_logger as comms
from .named_losses import NamedLossSteps
from .named_parameters import named_parameters
from .optimizer_step import OptimizerStep
from .recording_observer import RecordingObserver
from .replica_buffers import ReplicaBuffers
from .replica_rows import ReplicaRows
from .replica_strategy import SynchronousReplicas
from .setup.arguments import (
    Groups,
    check_arguments,
    choose_grid,
    given_options,
    unless_all,
    untrained_in_loss,
)
from .setup.balance import balance_of
from .setup.check_names import check_names
from .setup.compilation import Compilation
from .setup.compression import named_compressor, require_fitting
from .setup.extensions import foreign_members, replica_strategy
from .setup.lora import add_lora, require_adapters
from .setup.optimizer import choose_optimizer, choose_scheduler, optimizer_groups
from .setup.precision import make_loss_scaler
from .setup.rank_consistency import require_same_model, require_same_settings
from .setup.tuning import is_searched, search_sizes
from .setup.zero import one_replica_note, unsharded_note, zero_options
from .snapshot.capture import ReplicaState
from .snapshot.checkpointer import Checkpointer, check_state
from .step_observer import StepObserver

if TYPE_CHECKING:
    from .module_engine import ModuleEngine
    from .pipeline_engine import PipelineEngine

SEARCH_ENDS = "0.3"  # version of triax in which an engine searches for sizes no more
NO_OPTIMIZER = (
    "there is no optimizer, so the engine cannot train: pass optimizer=..., such as "
    "functools.partial(torch.optim.AdamW, lr=1e-3), or triax.Optimizer('AdamW', lr=1e-3)"
)


class TrainingParts(NamedTuple):
    """Optimizer, schedule and data of a new engine.

    Attributes:
        optimizer: makes the optimizer from parameter groups. None if the model is only evaluated.
        groups: parameter groups, (options, parameters).
        training_data, collate_fn: arguments of ``Engine``.
        make_scheduler: makes the learning-rate schedule over the optimizer. None without one.
    """

    optimizer: OptimizerFactory | None
    groups: Groups
    training_data: Samples | None = None
    make_scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None
    collate_fn: Collate | None = None


class Engine:
    """Trains a model on a grid: a ``PipelineModule`` by ``train_batch``, any other module by forward, backward, step.

    ``Engine(model, ...)`` is a ``PipelineEngine`` or a ``ModuleEngine``. Every rank makes it, with the same arguments.

    >>> layers = [triax.LayerSpec(nn.Linear, 4, 8), torch.tanh, triax.LayerSpec(nn.Linear, 8, 1)]
    >>> model = triax.PipelineModule(layers, loss_fn=nn.functional.mse_loss)
    >>> batch = triax.Batch(size=4, microbatch=2)
    >>> engine = triax.Engine(model, optimizer=triax.Optimizer("Adam", lr=0.03), batch=batch, zero=1, clip=1.0)
    >>> microbatches = iter(lambda: (torch.ones(2, 4), torch.ones(2, 1)), None)
    >>> [round(engine.train_batch(microbatches).item(), 3) for step in range(3)]
    [1.77, 1.001, 0.451]

    Args:
        model: a ``PipelineModule``, or another ``nn.Module``, which moves to the grid's device.
        options: the options; the keywords below, which are the fields of ``EngineOptions``, replace some of them.
        grid: the grid of a plain module; None: every process is a replica. A ``PipelineModule`` has its own.
        parameters: the parameters to train, or parameter groups; by default all that require gradients.
        training_data: a dataset of ``(inputs, labels)``; its order depends only on the option ``seed``.
        collate_fn: batches samples in the data loader, as in torch.
        keywords: options by name: ``optimizer``, ``batch``, ``schedule``, ``zero``, ``precision``, ``clip``, ...

    Attributes:
        data_axis: ZeRO over the data axis: buckets of weights and gradients, and the optimizer's shards.
        optimizer_step: the end of a training step.
        replicas: replica strategy, which is synchronous data parallelism or local updates.
        kept_state: optimizer state of parameters that are frozen here, from the checkpoint that was loaded.
        replica_state: saves and loads each replica's state in a checkpoint. None if all replicas have equal state.
        checkpointer: saves and loads checkpoints.
        accounts: counts this rank's memory.
        record_memory: set it to True to count the memory of the next steps while they run, for ``memory_report``.
        auxiliary: auxiliary losses and expert loads, if the model has a mixture of experts.
        named_losses: terms and metrics of the loss, if it names them.
        spans: stream of the parts of a step and of the ops of a program, for measurements.
        replica_rows: warns once if replicas train on the same rows.
        observers: observers of steps, which each step calls in order.
        observer: the first of them; records, prints and traces steps.
        loss_scaler: fp16's loss scale; None without fp16.
        compilation: compiled layers, with counts of their graphs; None without ``compile``.

    Raises:
        OptionError: an option, or its combination with the other arguments, cannot be used.
        TypeError: an argument of the wrong kind; the message says what to pass.
    """

    module: Any
    optimizer: torch.optim.Optimizer | None
    data_axis: ZeroDataAxis
    optimizer_step: OptimizerStep
    auxiliary: AuxiliarySteps
    named_losses: NamedLossSteps
    observer: RecordingObserver
    accounts: MemoryAccounts
    compilation: Compilation | None
    lr_scheduler: LRScheduler | None
    training_dataloader: Loader | TokenLoader | None
    record_memory = False
    _saver: AutoSaver | None = None  # of automatic checkpoints
    _samples_before = 0  # samples of the steps before the batch got its present size
    _batch_size_since = 0  # the step from which the batch has its present size

    # A type checker sees which of the two classes a call returns; it would take the result of ``__init__`` before.
    if TYPE_CHECKING:

        @overload
        def __new__(  # type: ignore[overload-overlap]  # a PipelineModule is an nn.Module, too
            cls,
            model: PipelineModule,
            options: EngineOptions | None = None,
            *,
            parameters: Trained | None = None,
            training_data: Samples | None = None,
            collate_fn: Collate | None = None,
            **keywords: Unpack[EngineKeywords],
        ) -> PipelineEngine: ...
        @overload
        def __new__(
            cls,
            model: nn.Module,
            options: EngineOptions | None = None,
            *,
            grid: Grid | None = None,
            parameters: Trained | None = None,
            training_data: Samples | None = None,
            collate_fn: Collate | None = None,
            **keywords: Unpack[EngineKeywords],
        ) -> ModuleEngine: ...
        def __new__(cls, *args: Any, **kwargs: Any) -> Any: ...

    else:

        def __new__(cls, *args: Any, **kwargs: Any) -> Self:
            """Return an engine of the class that trains this kind of model."""
            model = args[0] if args else kwargs.get("model")
            kinds = (kind for kind in Engine.__subclasses__() if kind.trains(model)) if cls is Engine else iter(())
            return object.__new__(next(kinds, cls))

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._make(*args, **kwargs)

        def __getattr__(self, name: str) -> Any:
            """Return a member under another library's name, if an adapter has one: an engine has no other such one."""
            for members in () if name.startswith("_") else foreign_members():
                if name in members:
                    return members[name](self)
            return object.__getattribute__(self, name)  # raises the error again: a property's own, where it has failed

    def _make(
        self,
        model: nn.Module,
        options: EngineOptions | None = None,
        *,
        grid: Grid | None = None,
        parameters: Trained | None = None,
        training_data: Samples | None = None,
        collate_fn: Collate | None = None,
        **keywords: Unpack[EngineKeywords],
    ) -> None:
        self.options: EngineOptions = given_options(options, keywords)
        self._agree(model, grid, parameters, collate_fn)
        if is_searched(model, self.options, training_data):
            parameters = None if parameters is None else list(parameters)
            self.options = self._search(model, parameters, training_data, collate_fn)
        self.batch = self.options.batch_sizes(self.grid.replicas)
        schedule, parts = self._prepare(model, parameters, training_data, collate_fn)
        self._assemble(model, schedule, parts)
        self._start()

    def _agree(self, model: Any, grid: Grid | None, parameters: Any, collate_fn: Any) -> None:
        """Check what was given, before anything is made, and that all ranks were given the same. Collective."""
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}, not an nn.Module: pass a module of torch's")
        options = self.options
        check_arguments("Engine", optimizer=options.optimizer, parameters=parameters, collate_fn=collate_fn, grid=grid)
        check_names(options)
        if options.monitor.log_level is not None:
            logging.getLogger("triax").setLevel(options.monitor.log_level)
        self.grid: Grid = choose_grid(model, grid, options)
        require_same_settings(self.grid, self.settings(), options.schedule.value)
        if isinstance(model, PipelineModule):
            model.take_loss()

    def _search(self, model: Any, parameters: Any, data: Any, collate_fn: Any) -> EngineOptions:
        """Return the options with the sizes that ``triax.tune`` finds, with a warning. Collective."""
        text = (
            f"Engine searches for microbatch size and ZeRO stage until triax {SEARCH_ENDS}: write options = "
            "triax.tune(model, options, training_data=...), and make the engine with these"
        )
        warnings.warn(text, DeprecationWarning, stacklevel=4)  # of the line that makes the engine
        data = {"parameters": parameters, "training_data": data, "collate_fn": collate_fn}
        return search_sizes(Engine, model, self.options, **data).options

    def _prepare(
        self, model: Any, parameters: Any, data: Any, collate_fn: Any
    ) -> tuple[Schedule | None, TrainingParts]:
        """Bring the model into the state in which it trains: on its ranks, with adapters. Collective.

        Before it, the options and batch sizes are final.

        Returns:
            The schedule, and what the members of a step are made of.
        """
        options, grid = self.options, self.grid
        if isinstance(model, PipelineModule) and options.lora is None:
            parameters = unless_all(model, parameters)
        schedule = self._place(model)
        if options.lora is not None:
            add_lora(model, options.lora, grid)
        groups = optimizer_groups(model, options.optimizer, parameters)
        if hasattr(model, "lora_options"):
            require_adapters(groups, model)
        factory = choose_optimizer(options, grid, groups)
        make_scheduler = choose_scheduler(options)
        require_same_model(grid, model, groups, options.optimizer)
        if options.sparse_attention is not None:
            set_sparse_attention(
                model, grid, {"mode": options.sparse_attention.mode, **options.sparse_attention.plain(given=True)}
            )
        return schedule, TrainingParts(factory, groups, data, make_scheduler, collate_fn)

    def _assemble(self, model: Any, schedule: Schedule | None, parts: TrainingParts) -> None:
        """Make the members of a step. Before it, every rank has its part of the model, and all have the same groups."""
        options, grid = self.options, self.grid
        self.module = model
        self.global_steps: int = 0
        self._sent: dict[str, dict[str, Sent]] = {}  # in the last step
        # A step runs on the whole grid, or under local_updates on the grid of this replica.
        name = "local_sgd" if options.local_updates is not None else None
        name = "fault_tolerance" if options.fault_tolerance is not None else name
        self._strategy = None if name is None else replica_strategy(name)
        self._step_grid = grid if self._strategy is None else self._strategy.step_grid(grid)
        self._options = zero_options(options, self._step_grid, model)
        self.loss_scaler = make_loss_scaler(options.precision)
        self.spans = Spans(grid.spans)
        self._build(schedule, parts)
        self.observers: list[StepObserver] = [self.observer]
        require_fitting(named_compressor(options), self.optimizer)
        self._built()

    def _start(self) -> None:
        """Watch the steps as the options ask, and resume. Before it, the engine could take a step."""
        options, grid = self.options, self.grid
        kind: Any = self  # of one of the two kinds
        if options.monitor.state and grid.rank == 0:
            print(json.dumps(self.settings(), indent=2), flush=True)
        instrument(kind)
        self.start_checkpointing()
        lr_note, untrained = getattr(self.lr_scheduler, "note", None), untrained_in_loss(self.module)
        self._warn(*(Note("", text) for text in (lr_note, untrained) if text is not None))
        self._warn(unsharded_note(self.data_axis), one_replica_note(options.zero, grid))
        self.observer.install()

    if not TYPE_CHECKING:
        __init__.__signature__ = __new__.__signature__ = inspect.signature(_make)  # for help()

    @classmethod
    def trains(cls, model: Any) -> bool:
        """Return True if engines of this class train this kind of model."""
        return False

    def _place(self, model: Any) -> Schedule | None:
        """Put the model on this rank's device, and stages on the ranks of their schedule, which is returned."""
        raise NotImplementedError

    def _build(self, schedule: Any, parts: TrainingParts) -> None:
        """Make the members of a step."""
        raise NotImplementedError

    def _built(self) -> None:
        """Make the members of a subclass, before instruments observe the engine and a checkpoint is resumed."""

    def _notes(self) -> list[Note]:
        """Return notes on options that have no effect."""
        return self.options.notes()

    def settings(self, given: bool = False) -> dict[str, Any]:
        """Return the options as values that JSON can hold.

        Args:
            given: leave out options that have their default.
        """
        return self.options.plain(given)

    def _warn(self, *notes: Note | None) -> None:
        """Log notes as warnings, on rank 0."""
        for note in notes if self.grid.rank == 0 else ():
            if note is not None:
                logging.getLogger("triax").warning("%s", note.spelled(self.options.names))

    def _make_step(self, parts: TrainingParts) -> None:
        """Make the members that need the optimizer: step, schedule, data loader, replica strategy, checkpointer."""
        make, data = parts.make_scheduler, parts.training_data
        self.checkpointer = Checkpointer(self)
        self.kept_state = Snapshot()
        self.optimizer_step = OptimizerStep(self.options, self.data_axis, self.loss_scaler)
        self.lr_scheduler = make(self.optimizer) if make and self.optimizer else None
        self._balance = balance_of(self.module, self.grid) if self.options.batch.balance else None
        self._made_loaders = False
        self.training_dataloader = None if data is None else self.make_loader(data, parts.collate_fn)
        self.replicas = SynchronousReplicas(self.grid)
        self.replica_rows = ReplicaRows(self._step_grid)
        self._shared_buffers: ReplicaBuffers | None = None  # after local updates have given replicas equal weights
        self.replica_state: ReplicaState | None = None
        if self._strategy is not None:
            self.replicas, self.replica_state = self._strategy.attach(self, self._step_grid)
            outer = getattr(self.replicas, "outer", None)
            if outer is not None and not outer.asynchronous:
                self._shared_buffers = ReplicaBuffers(self.module, self.grid)

    @property
    def is_compiled(self) -> bool:
        """True if layers of the model are compiled by torch.compile."""
        return self.compilation is not None

    def compile(self, backend: str = "inductor", compile_kwargs: Mapping[str, Any] | None = None) -> None:
        """Compile the model's layers from now on, as the option ``compile`` does from the start. Collective.

        Does nothing if they are compiled already.

        Args:
            backend: backend of ``torch.compile``.
            compile_kwargs: ``mode``, ``options``, ``dynamic`` or ``fullgraph`` of ``torch.compile``.

        Raises:
            ConfigError: the backend, an argument, or another option does not allow it.
        """
        if self.compilation is None:
            check_kind("compile", (Mapping, NoneType), "a dict", compile_kwargs=compile_kwargs)
            options = self.options.changed(compile=Compile(backend=backend, kwargs=dict(compile_kwargs or {})))
            self.compilation = self._compile(options)
            self.options = options

    def _compile(self, options: EngineOptions) -> Compilation | None:
        raise NotImplementedError

    @property
    def global_samples(self) -> int:
        """Samples of the steps so far, over all replicas."""
        return self._samples_before + (self.global_steps - self._batch_size_since) * self.batch.train

    @property
    def skipped_steps(self) -> int:
        """Steps skipped so far: overflows in fp16, and losses that are not finite under ``nan_loss`` skip."""
        return self.optimizer_step.nonfinite.skipped + (0 if self.loss_scaler is None else self.loss_scaler.skipped)

    @property
    def micro_steps(self) -> int:
        """Microbatches of this replica so far, computed from the present batch size."""
        return self.global_steps * self.batch.accumulation

    def set_batch_size(self, size: int, microbatch: int | None = None) -> None:
        """Set the samples per step from the next step on, by the number of microbatches or by their size.

        Every rank calls this, between two steps.

        Args:
            size: samples per step, over all replicas.
            microbatch: samples per microbatch; None: as before.

        Raises:
            ConfigError: if the size is not a whole number of microbatches, if the schedule does not run that many, or
                if the batches come from ``training_data``, whose order is made for one batch size.
        """
        if self.training_dataloader is not None:
            raise ConfigError(
                "the batch size cannot change with training_data, whose order is made for one batch size: leave "
                "training_data out, and read the batches from a loader of your own"
            )
        microbatch = self.batch.micro if microbatch is None else microbatch
        check_count(self.options.say("<set_batch_size>"), size=size, microbatch=microbatch)
        sizes = self.options.batch.changed(size=size, microbatch=microbatch, microbatches=None)
        batch = sizes.sizes(self.grid.replicas)
        self._reschedule(batch.accumulation)
        self._samples_before, self._batch_size_since = self.global_samples, self.global_steps
        self.options, self.batch = self.options.changed(batch=sizes), batch

    def set_clip(self, clip: float | None) -> None:
        """Set the limit of the global gradient norm from the next step on; None: no limit. Every rank calls this."""
        self.options = self.options.changed(clip=clip)
        self.optimizer_step.clip = self.options.clip

    def synchronize(self) -> None:
        """Give all replicas the same weights now. Without ``local_updates`` this does nothing.

        Every rank of every replica calls this, between two steps or after the last step. Under local SGD the new
        weights are the weights averaged over the replicas. Under DiLoCo they are the weights after the outer step.

        Raises:
            RuntimeError: on every rank, if replicas have taken different numbers of steps since the last
                synchronization. Training can continue after this error. ``async_diloco`` allows different numbers.
        """
        with self.all_or_none("synchronize"):
            self.replicas.synchronize()
            self._share_buffers()

    def _share_buffers(self) -> None:
        """Give all replicas the first one's buffers, after local updates made their weights equal. Collective."""
        if self._shared_buffers:
            (strayed,) = totals(self.grid, [float(self._shared_buffers.strayed())])
            self._shared_buffers.synchronize(strayed > 0)

    def leave(self) -> bool:
        """End this replica's training. Every rank of the replica calls this once, after its last step.

        The steps since the last synchronization count as a last, shorter round. Under ``async_diloco`` no replica waits
        for this one from now on. The call returns when the other replicas have left too, and all replicas have the same
        weights. An engine that is dropped without this call loses the messages that others have not received. Without
        ``async_diloco`` the call does the same as ``synchronize``.

        Returns:
            True if all replicas have left. False if a replica sent no message during the grid's ``timeout`` (seconds).

        Raises:
            RuntimeError: in the same case as ``synchronize``.
        """
        with self.all_or_none("leave"):
            left = self.replicas.leave()
            self._share_buffers()
            return left

    @property
    def present(self) -> list[int]:
        """Indices of the replicas that have not left the training, as far as this replica knows.

        Without ``async_diloco`` these are all replicas.
        """
        return self.replicas.present

    def common_weights(self) -> AbstractContextManager[None]:
        """Context in which the model has the weights of the last synchronization, not this replica's present weights.

        Nothing is sent. Without ``local_updates``, and before ``start_step``, the two are equal.
        """
        return self.replicas.common_weights()

    def traffic_report(self) -> dict[str, Any]:
        """Return the bytes that this rank sent in the last step.

        | entry | meaning |
        |---|---|
        | ``sent`` | counted: axis -> collective -> calls and bytes |
        | ``formula`` | axis -> bytes, by the formula of ZeRO's paper, of the gradient compression, or of ZeRO++ |
        | ``uncompressed`` | axis -> bytes, by ZeRO's formula for gradients in the dtype in which they are accumulated |
        | ``local`` | under ``local_updates`` only: the table below |

        Under ``local_updates`` the ``formula`` of the data axis is the ``formula`` of ``local``.

        | entry of ``local`` | meaning |
        |---|---|
        | ``steps``, ``meetings`` | steps and synchronizations so far |
        | ``sent`` | bytes since this process began or loaded a checkpoint |
        | ``per_step`` | ``sent`` divided by the steps in that time |
        | ``formula`` | bytes of one synchronization by an all-reduce, divided by the steps between two |
        | ``uncompressed`` | bytes of a step that all-reduces the gradients in the masters' dtype |
        | ``staleness`` | ``async_diloco``: rounds that the slowest replica was behind at the last synchronization |
        | ``waited_s`` | ``async_diloco``: seconds spent waiting because of ``max_staleness`` |

        The steps before ``start_step`` all-reduce gradients in ``reduction.dtype``. ``async_diloco`` sends each
        other replica a message of its own, which is N/2 times the formula for N replicas.
        """
        sent = {axis: {k: entry._asdict() for k, entry in kinds.items()} for axis, kinds in self._sent.items()}
        formulas = traffic_formulas(self.data_axis, self.options.zero.known_stage, self._backward_passes())
        return {"sent": sent, **formulas} | self.replicas.traffic()

    def memory_report(self) -> dict[str, Any]:
        """Return the bytes that this rank holds, beside the papers' formula and the process's peak.

        | entry | bytes |
        |---|---|
        | ``held`` | between two steps, by kind: parameters, gradients, masters, optimizer, buffers |
        | ``held["common"]`` | under ``local_updates``: the common weights and the outer optimizer's state |
        | ``held["activations"]`` | peak of the tensors saved by autograd in the last step |
        | ``held["working"]`` | peak of temporaries, gathered weights, gradients and messages in the last step |
        | ``offloaded`` | ``cpu`` or ``nvme`` -> kind -> bytes |
        | ``formula`` | model states by ZeRO's formula |
        | ``peak`` | ``Grid.peak_memory`` |

        ``activations`` and ``working`` are None unless ``record_memory`` was set before the last step. For a plain
        module they count what is made in the engine's calls: not a loss function outside the module.
        """
        report = self.accounts.report()
        return {**report, "held": report["held"] | self.replicas.memory()}

    def _backward_passes(self) -> Counter[int]:
        """Return the backward passes of a step: stage of the pipeline -> their number on this rank."""
        raise NotImplementedError

    def gather(self, what: str = "weights") -> dict[str, Tensor]:
        """Return the model's unsharded tensors by whole-model name, on every rank. Collective.

        Use it for inspection and small exports. Under ``local_updates`` it returns the tensors of this replica, and the
        call is collective over the replica's ranks.

        Args:
            what: ``"weights"`` or ``"gradients"``. It returns the gradients of the last step for all trained
                parameters, divided by the batch's weight and clipped (not clipped if the step was left out). They are
                available until the next step begins. Both have the same order.
        """
        with self.replicas.reading() as grid:
            begin_call(grid, f"gather({what!r})")
            return assemble(grid, self.shards(what))

    def shards(self, what: str = "weights") -> dict[str, Shard]:
        """Return this rank's shards of the tensors that ``gather`` returns. Collective over the data axis.

        Returns:
            Name -> (layout, shard).
        """
        if what == "gradients":
            scale = self.optimizer_step.left_scale
            trained = {
                member.layout.name: (member.layout, value if scale == 1.0 else value * scale)
                for member, value in self.data_axis.gradients()
            }
            # The buckets hold them in another order than the module.
            order = {layout.name: i for i, (_, layout, _) in enumerate(named_parameters(self.module))}
            return {name: trained[name] for name in sorted(trained, key=lambda name: order.get(name, len(order)))}
        if what != "weights":
            raise ValueError(f"gather takes 'weights' or 'gradients', not {what!r}")
        with self.whole_weights():
            parameters = named_parameters(self.module)
            return {layout.name: (layout, parameter.detach().clone()) for parameter, layout, _ in parameters}

    def whole_weights(self) -> AbstractContextManager[None]:
        """Context in which all weights are gathered, also in stage 3 of ZeRO. Collective over the data axis."""
        return self.data_axis.gathered(self.data_axis.buckets)

    def gathered(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        """Context in which these parameters are gathered, also in stage 3 of ZeRO. Collective over the data axis."""
        return gathered(parameters)

    @torch.no_grad()
    def assign(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Give a parameter new values. Its fp32 master copy gets them unrounded; its optimizer state does not change.

        Every replica assigns the same values.

        Args:
            parameter: a parameter of this rank's module.
            value: the new values, in the parameter's shape and any dtype. If the tensor axis shards the parameter,
                these are the values of this rank's shard.

        Raises:
            ValueError: if the value and the parameter have different shapes.
        """
        check_kind("assign", Tensor, "a tensor", parameter=parameter, value=value)
        if value.shape != parameter.shape:
            raise ValueError(
                f"assign was given values of shape {tuple(value.shape)} for a parameter of shape "
                f"{tuple(parameter.shape)}: give the values of this tensor rank's shard of the parameter"
            )
        if not self.data_axis.assign(parameter, value.to(self.data_axis.device)):
            parameter.data.copy_(value)  # frozen, and whole on every replica

    @property
    def device(self) -> torch.device:
        """Device of the module."""
        return self.grid.device

    def make_loader(
        self,
        dataset: Samples,
        collate_fn: Collate | None = None,
        workers: int = 0,
        pin_memory: bool = True,
    ) -> Loader | TokenLoader:
        """Return a loader of this replica's microbatches, in an order that depends on the option ``seed`` alone.

        Args:
            dataset: a dataset with a length, or an ``IterableDataset``, which has its own order.
            collate_fn: function that makes a microbatch of a list of samples.
            workers: number of processes that read ahead. 0: this process reads.
            pin_memory: copy microbatches to pinned memory, as torch's loader does. Ignored without a GPU.
        """
        self._made_loaders = True
        return make_loader(
            dataset,
            self.batch.train,
            self.batch.micro,
            self.grid.replica,
            self.grid.replicas,
            self.options.seed,
            balance=self._balance,
            drop_last=self.options.drop_last,
            collate=collate_fn,
            workers=workers,
            pin_memory=pin_memory and is_accelerator(self.device),
        )

    @property
    def lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups] if self.optimizer else []

    @property
    def grad_norm(self) -> float | None:
        """Norm of the last step's whole gradient before clipping. None before the first step.

        On several processes each step computes the norm. On a single process a step computes it only if clipping, fp16,
        compression or a monitor needs it. Otherwise reading this computes it from the gradients, which exist until the
        next step begins. If you read it later, it is None, and from then on each step computes the norm.
        """
        return self.optimizer_step.global_norm() if self.global_steps else None

    def loss_scale(self) -> float | None:
        """Return fp16's loss scale; None without fp16."""
        return None if self.loss_scaler is None else self.loss_scaler.scale

    def auxiliary_losses(self) -> dict[str, float]:
        """Return the auxiliary losses of the last step: name -> mean over the batch's samples, without its coefficient.

        They are equal on every rank, and {} if the model has none. The loss that a step returns does not include them.
        """
        return dict(self.auxiliary.losses)

    @property
    def metrics(self) -> dict[str, float | list[float]]:
        """Terms and metrics of the last batch, if the loss names them (``triax.Loss``, a dict): name -> value.

        The batch is that of the last ``train_batch``, ``eval_batch`` or ``step``. A value is the sum over the whole
        batch, divided by its weight in the whole batch; NaN without a weight. The values are equal on every rank.
        """
        return dict(self.named_losses.values)

    def expert_loads(self) -> dict[str, list[int]]:
        """Return the tokens that each expert was given in the last step, over all ranks: layer -> loads.

        The loads are equal on every rank, and {} if the model has no experts.
        """
        return {name: list(loads) for name, loads in self.auxiliary.loads.items()}

    def log_summary(self, show_straggler: bool = False) -> str:
        """Return this rank's table of logged communication (``monitor.communication``). Rank 0 also prints its own.

        Args:
            show_straggler: add a column with the time spent waiting for the slowest rank. Collective if it is set.

        Raises:
            ConfigError: if ``monitor.communication`` is not given.
        """
        return comms.summary(self.grid, show_straggler)

    @property
    def monitor(self) -> Monitor:
        """Writer of numbers: ``engine.monitor.write_events([("Validation/loss", loss, engine.global_samples)])``."""
        return self.observer.monitor

    def time_report(self) -> dict[str, Any]:
        """Return the seconds of each part of the last recorded step on this rank: axis -> part -> seconds.

        The parts add up to ``seconds``. Steps are recorded under ``monitor.breakdown``, and if a trace is made.
        ``bubble`` is the idle share of the busiest pipe rank, as ``Timeline.bubble``. It is None for a plain module.
        The result is {} before the first recorded step.
        """
        return dict(self.observer.report)

    def record_trace(self, file: str | Path) -> None:
        """Write a trace of all ranks in the next step to ``file``, for ui.perfetto.dev.

        Every rank calls this, between two steps.

        Raises:
            ConfigError: on every rank, if ``file`` is no path, or its folder cannot be made.
        """
        self.observer.record_trace(file)

    def is_last_microbatch(self) -> bool:
        """Return True: ``train_batch`` runs all microbatches of a step."""
        return True

    def shift_samples(self, samples: int) -> None:
        """Set the number of samples of the step that other grids have before this one's: dropout depends on it."""
        raise NotImplementedError

    def all_or_none(self, call: str) -> AbstractContextManager[None]:
        """Return a context for a call that all ranks make: an error on one rank ends the call on every rank.

        The failed rank reports its error and leaves the process group, so that the other ranks stop with an error and
        do not hang.

        Args:
            call: name of the call, for the message.
        """
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------ checkpoints

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a checkpoint of the run as it is after its last step. Collective.

        Every rank writes its part, and nothing is gathered. The checkpoint gets its name when all of it is on the disk.
        Until then, or if writing fails, the previous checkpoint is the last one. With ``checkpoint.background`` the
        call returns when a copy is in host memory. A thread writes the copy while training continues, and the next
        save or load waits for it.

        >>> engine = triax.Engine(nn.Linear(4, 1), optimizer=triax.Optimizer("Adam"), batch=1)
        >>> engine.save_checkpoint("runs/linear", client_state={"epoch": 3})
        True
        >>> [name for name in sorted(os.listdir("runs/linear")) if name[0] != "."]
        ['global_step0', 'latest']

        Args:
            save_dir: a folder that every rank sees, or a URI such as ``s3://bucket/run``.
            tag: name of the checkpoint's folder in ``save_dir``. None: ``global_step`` and the number of steps.
            client_state: the user's values, which ``load_checkpoint`` returns: numbers, text, tensors, lists and dicts.
                The values of rank 0 are saved.
            save_latest: write the tag into the file ``latest``.
            exclude_frozen_parameters: leave out parameters that are not trained. Load such a checkpoint with
                ``load_module_strict=False``.

        Returns:
            True if the checkpoint was written. If not, every rank logs the reason and the run continues.

        Raises:
            CheckpointError: on every rank, if the tag or the client state cannot be saved, or if the checkpoint was not
                written and ``checkpoint.on_failure`` is ``stop``.
            ConfigError: on every rank, if ``save_dir`` is no path.
            RuntimeError: if a rank did not call this within ``checkpoint.patience`` seconds.
        """
        with self.all_or_none("save_checkpoint"):
            self.data_axis.enter("calls save_checkpoint")
            return self.checkpointer.write_checkpoint(
                save_dir, tag, client_state, save_latest, exclude_frozen_parameters
            )

    def wait_for_checkpoint(self) -> str | None:
        """Wait until no checkpoint is being written.

        Returns:
            None, or the reason for which the last asynchronous checkpoint was not written.
        """
        return self.checkpointer.wait()

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        *,
        strict: bool | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint that any grid may have written. Collective.

        Values get the dtype of the engine's own. If that rounds them, rank 0 logs a warning, unless ``precision`` names
        the dtype.

        >>> engine = triax.Engine(nn.Linear(4, 1), optimizer=triax.Optimizer("Adam"), batch=1)
        >>> engine.save_checkpoint("runs/linear", client_state={"epoch": 3})
        True
        >>> engine.load_checkpoint("runs/linear")
        ('runs/linear/global_step0', {'epoch': 3})

        Args:
            load_dir: the folder of checkpoints, ``save_dir`` of ``save_checkpoint``.
            tag: name of the checkpoint. None: the name in the file ``latest``.
            load_module_strict: require the names and shapes of the model. If False, the tensors that fit are loaded,
                and rank 0 logs the others.
            load_optimizer_states: load the optimizer's state, the options of its groups and the loss scale.
            load_lr_scheduler_states: load the learning-rate schedule.
            load_module_only: load only weights and buffers, without optimizer, schedule, counters and data position.
            strict: another name of ``load_module_strict``.

        Returns:
            The checkpoint's path and the client state. (None, None) if ``tag`` is not given and there is no ``latest``.

        Raises:
            CheckpointError: on every rank, with nothing changed, if there is no such checkpoint, if it is damaged, or
                if it does not fit this model.
            ConfigError: on every rank, if ``load_dir`` is no path.
            RuntimeError: if a rank did not call this within ``checkpoint.patience`` seconds.
        """
        with self.all_or_none("load_checkpoint"):
            self.data_axis.enter("calls load_checkpoint")
            options = self.checkpointer.load_options(
                strict=load_module_strict if strict is None else strict,
                optimizer=load_optimizer_states,
                schedule=load_lr_scheduler_states,
                weights_only=load_module_only,
            )
            return self.checkpointer.load(load_dir, tag, options)

    def save_weights(self, file: str | Path, exclude_frozen: bool = False) -> None:
        """Write unsharded weights and buffers to one safetensors file, in fp16 or bf16. Collective.

        The file has the dtype of the engine's weights under ``precision`` bf16 and fp16, else bfloat16. No rank gathers
        weights: every rank writes its part into the file.

        Args:
            file: path of the file, in a folder that every rank sees. Its ending becomes ``.safetensors``.
            exclude_frozen: leave out parameters that are not trained.

        Raises:
            CheckpointError: on every rank, if a rank could not write.
            ConfigError: on every rank, if the file is no path.
        """
        with self.all_or_none("save_weights"):
            with agreed(self.grid, ConfigError):
                check_path("save_weights", file=file)
            self.data_axis.enter("calls save_weights")
            self.checkpointer.export(Path(file).parent, Path(file).name, exclude_frozen)

    @property
    def client_state(self) -> Mapping[str, Any] | None:
        """Client state that automatic checkpoints save; see ``save_checkpoint``."""
        return self.checkpointer.client_state

    @client_state.setter
    def client_state(self, value: Mapping[str, Any] | None) -> None:
        check_state("engine.client_state", value)
        self.checkpointer.client_state = value

    @property
    def resumed(self) -> tuple[str | None, dict[str, Any] | None]:
        """Path and client state of the checkpoint that ``checkpoint.resume`` loaded. (None, None) without one."""
        return self.checkpointer.resumed

    def start_checkpointing(self) -> None:
        """Resume, and save automatically from now on, as the option ``checkpoint`` says. A new engine calls it.

        Raises:
            CheckpointError: on every rank, if the newest undamaged checkpoint is of another model, or if another run
                saves into the folder.
        """
        options = self.options.checkpoint
        if options.every is not None and options.folder is not None:
            with self.all_or_none("checkpoint"):
                self.checkpointer.claim(options.folder)
        if options.resume not in (False, "never") and options.folder is not None:
            with self.all_or_none("resume"):
                self.checkpointer.resume(options.folder, options.resume)
        self._saver = self.checkpointer.auto_saver()

    def save_on_interrupt(self) -> None:
        """Save a checkpoint and end the program, with code 130, after the step in which the first Ctrl-C comes.

        The second Ctrl-C ends it at once. Call it on every rank. It needs automatic checkpoints (``Checkpoints`` with
        ``folder`` and ``every``); without them Ctrl-C keeps its effect.
        """
        if self._saver is not None:
            self._saver.save_on_interrupt()

    def _save_if_due(self) -> None:
        """Save an automatic checkpoint if a step was taken and one is due. Collective after a step."""
        if self._saver is not None:
            with self.all_or_none("checkpoint"):
                self._saver.after_call(self.global_steps, self._may_save)

    def _may_save(self) -> bool:
        return all(observer.may_save() for observer in self.observers) and self.checkpointer.may_save()

    def set_position(self, steps: int, samples: int) -> None:
        """Set the counters of steps and samples, and discard the gradients of an unfinished step."""
        self.global_steps = self._batch_size_since = steps
        self._samples_before = samples
        if self._saver is not None:
            self._saver.last = steps

    def add_samples(self, samples: int) -> None:
        """Count samples that replicas outside of the grid have contributed to a step."""
        self._samples_before += samples

    def _reschedule(self, microbatches: int) -> None:
        """Set up steps of this number of microbatches. Subclasses override it if they have to change more."""
