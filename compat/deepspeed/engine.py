"""DeepSpeed's engines: triax's, with the members of DeepSpeed's that triax does not need.

``initialize`` of this adapter makes them. What is not here is inherited: ``backward``, ``step``, ``train_batch``,
``save_checkpoint``, ...
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, partialmethod, wraps
from pathlib import Path
from typing import Any
from weakref import proxy

import torch
from torch import Tensor

from ...base.checks import check_flag, check_path
from ...base.errors import AgreedError, ConfigError
from ...base.foreign_tables import answers
from ...checkpoint.format.folder import local_folder
from ...checkpoint.rendezvous import rendezvous
from ...data.dataloader import RepeatingLoader
from ...engine.base import Engine
from ...engine.optim.loss_scale import LossScaler
from ...grid import Axis
from ...options.precision import LossScale
from ...zero.gathered_parameters import gathered, whole_state_dict
from ...zero.state_dict_guard import allow_empty_entries
from .assignments import EngineType, check_assignment, reason
from .config.table import table
from .from_config import ConfiguredEngine, ConfiguredModuleEngine, ConfiguredPipelineEngine
from .grids import ParallelGrid
from .ledger import TABLES
from .module_calls import ModuleCalls
from .offload_states import OffloadedStates, OffloadStateTypeEnum
from .timers import ThroughputTimer, WallClockTimers

# A key of the section zero_optimization has a method without "stage3_" and with "zero_" in front.
METHODS = TABLES["methods"] | {
    f"zero_{key.removeprefix('stage3_').removeprefix('zero_')}": f"config.zero_optimization.{key}"
    for key in table().sections["zero_optimization"].names
}
# Methods that need states which ``offload_states`` may have moved: name -> kinds of state; (): all.
NEEDS = {name: tuple(kinds.split()) for name, kinds in answers(TABLES["moved_states"]).items()}


def _value(engine: Engine, path: str) -> Any:
    """Return the value at a path of attributes: of an axis its process group, and None behind a None."""
    value: Any = engine
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return engine.grid.group(value) if isinstance(value, Axis) else value


def _add_members(cls: type, properties: Mapping[str, str], methods: Mapping[str, str]) -> None:
    """Add properties and methods, by the places of their values."""
    for name, path in properties.items():
        type.__setattr__(cls, name, property(partial(_value, path=path), doc=f"``engine.{path}``"))
    for name, path in methods.items():
        if name not in vars(cls):
            type.__setattr__(cls, name, partialmethod(_value, path))


def _require_states(cls: Any) -> None:
    """Let the methods that need states which were moved raise an error."""

    def guarded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(self: DeepSpeedMembers, *args: Any, **kwargs: Any) -> Any:
            if self.offloaded_states.kinds:
                with deepspeed_errors():
                    self.offloaded_states.require_here(f"engine.{name}", *NEEDS[name])
            return method(self, *args, **kwargs)

        return call

    for name in NEEDS:
        if hasattr(cls, name):
            type.__setattr__(cls, name, guarded(name, getattr(cls, name)))


class DeepSpeedError(AgreedError, AssertionError):
    """An error of an engine's call, where DeepSpeed has an ``assert``."""


class DeepSpeedConfigError(ConfigError, AssertionError):
    """A configuration that cannot be used; DeepSpeed raises this class, a ``ValueError`` or an ``AssertionError``."""


@contextmanager
def deepspeed_errors() -> Iterator[None]:
    """Context that raises triax's errors as classes that scripts for DeepSpeed catch."""
    try:
        yield
    except (AgreedError, ConfigError) as error:
        if type(error) is AgreedError:
            raise DeepSpeedError(str(error)) from error
        if type(error) is ConfigError:
            raise DeepSpeedConfigError(str(error)) from error
        raise


class ScalerMembers:
    """Loss scaler with DeepSpeed's members, which scripts find in ``optimizer.loss_scaler``.

    Args:
        scaler: the engine's.
        options: its options.
    """

    def __init__(self, scaler: LossScaler, options: LossScale) -> None:
        self._scaler = scaler
        self.dynamic, self.scale_window = options.fixed is None, options.window

    @property
    def cur_scale(self) -> float:
        """The loss scale."""
        return self._scaler.scale

    loss_scale = cur_scale

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scaler, name)


class DeepSpeedMembers(ConfiguredEngine, metaclass=EngineType):
    """Members of DeepSpeed's engine that both engines have.

    Attributes:
        tput_timer: samples per second.
        timers: timers by name; ``wall_clock_breakdown`` measures steps without them.
        mpu: the object given as ``initialize(mpu=)``, or None.
        offloaded_states: the states that ``offload_states`` has moved.
    """

    tput_timer: ThroughputTimer
    timers: WallClockTimers
    mpu: Any = None
    _applied = False

    offloaded_states: OffloadedStates

    def __setattr__(self, name: str, value: Any) -> None:
        check_assignment(self, name, value)
        super().__setattr__(name, value)

    def _built(self) -> None:
        super()._built()
        self.offloaded_states = OffloadedStates()
        self.tput_timer = ThroughputTimer(self.batch.train)
        self.timers = WallClockTimers(self.grid.synchronize)
        self.grid = ParallelGrid(self.grid)
        engine = proxy(self)  # the stream is the engine's
        self.spans.read(lambda span: engine._stepping(), "step")
        if self.optimizer is not None:
            members = {"optimizer": self.data_axis.optimizer, "dynamic_loss_scale": self.dynamic_loss_scale()}
            scaler = (
                None if self.loss_scaler is None else ScalerMembers(self.loss_scaler, self.options.precision.loss_scale)
            )
            vars(self.optimizer).update(members, loss_scaler=scaler)
        self._publish_scale(overflow=False)

    def _publish_scale(self, overflow: bool) -> None:
        """Set the attributes of the optimizer in which DeepSpeed's scripts find the loss scale."""
        if self.optimizer is not None:
            scale = self.loss_scale() or 1.0
            vars(self.optimizer).update(cur_scale=scale, loss_scale=scale, overflow=overflow)

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """Context of a call that may step: record if it did."""
        steps, skipped, self._applied = self.global_steps, self.skipped_steps, False
        yield
        self._applied = self.global_steps > steps and self.skipped_steps == skipped
        self._publish_scale(overflow=self.skipped_steps > skipped)
        self.tput_timer.batch_size = self.batch.train
        self.tput_timer.stop(global_step=self.global_steps > steps)

    def dynamic_loss_scale(self) -> bool:
        """Return True if fp16 adapts its loss scale."""
        return self.config.fp16.enabled and not self.config.fp16.loss_scale

    def get_type(self) -> list[Any]:
        """Return the ``type`` of each parameter group, or None."""
        return [group.get("type") for group in self.optimizer.param_groups] if self.optimizer else []

    def optimizer_state_dict(self) -> Any:
        """Return ``optimizer.state_dict()``: this rank's shard."""
        return None if self.optimizer is None else self.optimizer.state_dict()

    def postscale_gradients(self) -> bool:
        """Return True if gradients are divided after they are summed."""
        return not self.config.prescale_gradients

    def zero_cpu_offload(self) -> bool:
        """Return True if optimizer state is in host memory."""
        return self.config.zero_optimization.offload_optimizer.device == "cpu"

    zero_use_cpu_optimizer = zero_cpu_offload

    def zero_optimization_partition_gradients(self) -> bool:
        """Return True if gradients are sharded (stages 2 and 3)."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Return True if weights are sharded (stage 3)."""
        return self.zero_optimization_stage() >= 3

    def was_step_applied(self) -> bool:
        """Return True if the last ``step`` updated the weights: it ended a batch, and fp16 did not skip it."""
        return self._applied

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every parameter group."""
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            group["lr"] = lr

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Set the samples per microbatch from the next step on; the number of microbatches does not change.

        Every rank calls this, between two steps.

        Raises:
            ConfigError: if the batches come from ``training_data``, whose order is made for one batch size.
        """
        self.set_train_batch_size(micro_batch_size * self.batch.accumulation * self.grid.replicas, micro_batch_size)

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtype of the weights, and the dtype in which gradients accumulate."""
        options = self.data_axis.options
        weights = options.weight_dtype or torch.get_default_dtype()
        return weights, options.accumulation_dtype or weights

    def empty_partition_cache(self) -> None:
        """Release the whole weights that stage 3 keeps between its gathers."""
        if self.data_axis.gatherer is not None:
            self.data_axis.gatherer.finish()

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states from the device to host memory until ``reload_states``. States in host memory stay there.

        Calls that need a moved state raise an error meanwhile; without optimizer state and masters, for instance, the
        module still runs.

        Args:
            include: kinds of state (``OffloadStateTypeEnum``); None: all.
            device: ``cpu``; ``none``: move nothing.
            pin_memory: move to pinned memory.
            non_blocking: start all copies of a kind before the first has ended.
        """
        self.offloaded_states.offload(self, include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move the states of ``offload_states`` back to the device."""
        self.offloaded_states.reload(non_blocking)

    def destroy(self) -> None:
        """Wait until a checkpoint is written. The memory is freed when the last reference to the engine is gone."""
        self.wait_for_checkpoint()

    def compile(
        self,
        backend: str = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the model's layers, as ``triax``'s engines do.

        Args:
            backend, compile_kwargs: as for ``Engine.compile``.
            schedule: DeepCompile's; refused.
            compiled_autograd_enabled: refused.
        """
        if schedule is not None or compiled_autograd_enabled:
            given = "schedule" if schedule is not None else "compiled_autograd_enabled"
            raise ConfigError(
                f"engine.compile({given}=...) is not supported, because triax compiles layers: leave it out"
            )
        super().compile(backend, compile_kwargs)

    sparse_tensor_module_names: frozenset[str] = frozenset()  # modules whose gradients stay sparse

    # --------------------------------------------------------------------------------------------------- files

    def whole_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Return the whole ``state_dict()`` in host memory on rank 0, and None on the others. Collective.

        Weights are gathered one after the other, so that the other ranks hold one of them at a time.
        """
        raise NotImplementedError

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        return self.whole_state_dict(exclude_frozen_parameters)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a checkpoint, as ``Engine.save_checkpoint``, into the folder that rank 0 names. Collective.

        Scripts name the folder on each rank by itself, often by the time of day, of which the ranks see different ones.
        """
        with self.all_or_none("save_checkpoint"):
            check = partial(check_path, "save_checkpoint", save_dir=save_dir)
            named = rendezvous(
                self.grid, self.options.checkpoint.patience, "save_checkpoint", str(save_dir), check=check
            )
        if self.grid.rank == 0 and len(set(named)) > 1:
            logging.getLogger("triax").warning(
                "save_checkpoint: the ranks name different folders, %s: all ranks write into the first one, rank 0's",
                ", ".join(dict.fromkeys(named)),
            )
        return super().save_checkpoint(named[0], tag, client_state, save_latest, exclude_frozen_parameters)

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write unsharded weights and buffers, in the engine's dtype, to one file. Collective.

        Args:
            save_dir: folder, which is made if it is missing.
            save_filename: name of the file, which ``torch.load(weights_only=True)`` reads. If it ends in
                ``.safetensors``, the file is one.
            exclude_frozen_parameters: leave out parameters that are not trained.

        Returns:
            True.
        """
        if str(save_filename).endswith(".safetensors"):
            return super().save_16bit_model(save_dir, save_filename, exclude_frozen_parameters)
        with self.all_or_none("save_16bit_model"):

            def check() -> None:
                check_path("save_16bit_model", save_dir=save_dir, save_filename=save_filename)
                check_flag("save_16bit_model", exclude_frozen_parameters=exclude_frozen_parameters)
                local_folder(save_dir)

            rendezvous(self.grid, self.options.checkpoint.patience, "save_16bit_model", "", check=check)
            state = self.whole_state_dict(exclude_frozen_parameters)
            if state is not None:
                Path(save_dir).mkdir(parents=True, exist_ok=True)
                torch.save(state, Path(save_dir) / save_filename)
            self.grid.world.all_gather_json(None)  # nobody reads before the file is there
        return True

    def save_fp16_model(self, save_dir: str | Path, save_filename: str = "pytorch_model.bin") -> bool:
        """Write unsharded weights: an older name of ``save_16bit_model``. Collective."""
        return self.save_16bit_model(save_dir, save_filename)

    @contextmanager
    def all_or_none(self, call: str) -> Iterator[None]:
        with deepspeed_errors(), super().all_or_none(call):
            yield

    def __getattr__(self, name: str) -> Any:
        """Return a member of the module: ``engine.parameters()``."""
        module = self.__dict__.get("module")
        if module is not None and hasattr(module, name):
            return getattr(module, name)
        raise AttributeError(
            f"neither {type(self).__name__} nor its {type(module).__name__} has {name!r}{reason(name)}"
        )


_add_members(DeepSpeedMembers, TABLES["properties"], METHODS)
for _name in answers(TABLES["idle_methods"]):
    type.__setattr__(DeepSpeedMembers, _name, lambda *args, **kwargs: None)


class DeepSpeedEngine(DeepSpeedMembers, ConfiguredModuleEngine):
    """DeepSpeed's engine of any module: ``ModuleEngine`` with DeepSpeed's members."""

    def _built(self) -> None:
        super()._built()
        if self.zero_optimization_stage() == 3:
            allow_empty_entries(self.module)
        ModuleCalls(self.module, self)  # scripts call the module itself between the engine's calls, as DeepSpeed allows

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward passes do not reduce gradients, as ``ModuleEngine.no_sync``."""
        with deepspeed_errors(), super().no_sync():
            yield

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Return a context without effect: gradients of several backward passes add up in any case."""
        return nullcontext()

    def whole_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Return the whole ``state_dict()`` in host memory on rank 0, and None on the others. Collective."""
        frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}
        left_out = frozen if exclude_frozen_parameters else set()
        if self.grid.tensor.size * self.grid.expert.size > 1:
            state = {
                key: value.cpu() if isinstance(value, Tensor) else value
                for key, value in super().module_state_dict().items()
                if key not in left_out
            }
            return state if self.grid.rank == 0 else None
        return whole_state_dict(self.module, self.grid.rank == 0, left_out)

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return ``state_dict()`` with unsharded weights on every rank. Collective.

        Args:
            destination: a dict that takes the entries, in place of a new one.
            prefix: put before each name.
            keep_vars: without effect: values are copies.
            exclude_frozen_parameters: leave out parameters that are not trained.
        """
        frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}
        state: dict[str, Any] = {} if destination is None else destination
        for key, value in super().module_state_dict().items():
            if not (exclude_frozen_parameters and key in frozen):
                state[prefix + key] = value
        return state

    def load_module_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Load whole weights into the module, the same on every rank. Collective.

        Args:
            state_dict: whole weights by name.
            strict: require the module's names.
            custom_load_fn: called as ``custom_load_fn(src=state_dict, dst=module)`` in place of ``load_state_dict``.
            fetch_z3_params: without effect: stage 3 always gathers the weights here.
        """
        with gathered(self.module, modifier_rank=0) if self.data_axis.buckets else nullcontext():
            if custom_load_fn is not None:
                custom_load_fn(src=state_dict, dst=self.module)
            else:
                self.module.load_state_dict(state_dict, strict=strict)

    def _begin_step(self) -> None:
        super()._begin_step()
        self.tput_timer.start()

    def module_called(self) -> None:
        """Begin the next step, if the last one has ended: the module is run in training."""
        if torch.is_grad_enabled() and self.module.training:
            self._begin_step()


_require_states(DeepSpeedEngine)


class DeepSpeedPipelineEngine(DeepSpeedMembers, ConfiguredPipelineEngine):
    """DeepSpeed's engine of a ``PipelineModule``: ``PipelineEngine`` with DeepSpeed's members."""

    _data: Iterator[Any] | None = None

    @property
    def micro_batches(self) -> int:
        """Microbatches per step and replica. Assigned, the next batches have as many: ``set_train_batch_size``."""
        return self.batch.accumulation

    @micro_batches.setter
    def micro_batches(self, count: int) -> None:
        with deepspeed_errors():
            self.set_train_batch_size(count * self.batch.micro * self.grid.replicas)

    @property
    def is_pipe_parallel(self) -> bool:
        """True if the model has several stages."""
        return self.grid.pipe.size > 1

    @property
    def is_data_parallel(self) -> bool:
        """True if the grid has several replicas."""
        return self.grid.data.size > 1

    @property
    def is_model_parallel(self) -> bool:
        """True if layers are sharded over several tensor ranks."""
        return self.grid.tensor.size > 1

    @property
    def prev_stage(self) -> int:
        """Number of the stage before; -1 on the first one."""
        return self.grid.pipe.rank - 1

    @property
    def next_stage(self) -> int:
        """Number of the stage behind; the number of stages on the last one."""
        return self.grid.pipe.rank + 1

    def set_dataloader(self, loader: Any) -> None:
        """Let ``train_batch`` without an argument read from a loader, which begins again at its end."""
        self._data = RepeatingLoader(loader)

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Let ``train_batch`` without an argument read from an iterator."""
        self._data = iterator

    def reset_activation_shape(self) -> None:
        """Do nothing: each batch agrees on the shapes of its activations, so that they may change between batches."""

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Set a function that is applied to each microbatch that is read, and returns ``(inputs, labels)``."""
        self._batch_fn = fn

    _batch_fn: Callable[[Any], Any] | None = None

    @property
    def _own_data(self) -> Iterator[Any] | None:
        return self._source(super()._own_data)

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Take a step, as ``PipelineEngine.train_batch``."""
        self.tput_timer.start()
        return super().train_batch(self._source(data_iter))

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None,
        return_logits: bool = False,
        compute_loss: bool = True,
        num_micro_batches: int | None = None,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
    ) -> Any:
        """Compute the loss of a batch, as ``PipelineEngine.eval_batch``: the mean over the batch, on every rank.

        Args:
            data_iter, return_logits, compute_loss, num_micro_batches: as there.
            reduce_output: ``"avg"``.
            bcast_loss: without effect: every rank has the loss.

        Raises:
            NotImplementedError: another ``reduce_output``, as DeepSpeed raises.
        """
        if reduce_output != "avg":
            raise NotImplementedError(
                f"reduce_output={reduce_output!r} would not be the mean over the batch, which is what eval_batch "
                "returns: leave it out, and for the outputs of each microbatch pass return_logits=True"
            )
        source = self._source(data_iter)
        assert source is not None
        return super().eval_batch(source, return_logits, compute_loss, num_micro_batches)

    def whole_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Return the whole model's weights in host memory on rank 0, and None on the others. Collective."""
        state = {name: value.cpu() for name, value in self.gather().items()}
        return state if self.grid.rank == 0 else None

    def _source(self, data_iter: Iterator[Any] | None) -> Iterator[Any] | None:
        source = self._data if data_iter is None else data_iter
        return source if source is None or self._batch_fn is None else map(self._batch_fn, source)


_add_members(DeepSpeedPipelineEngine, TABLES["pipeline_properties"], TABLES["pipeline_methods"])
_require_states(DeepSpeedPipelineEngine)
