"""DeepSpeed's engines: triax's, with the members of DeepSpeed's that triax does not need.

``initialize`` of this adapter makes them. What is not here is inherited: ``backward``, ``step``, ``train_batch``,
``save_checkpoint``, ...
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...config.config import batch_sizes
from ...config.schema import Config
from ...engine.base import Engine, TrainingParts
from ...engine.module_engine import ModuleEngine
from ...engine.pipeline_engine import PipelineEngine
from ...grid import Axis, Grid
from ...grid.errors import AgreedError, ConfigError
from ...monitor.timers import ThroughputTimer, WallClockTimers
from ...pipe.module import PipelineModule
from ...pipe.program.schedule import Schedule
from ...zero.gathered_parameters import gathered

# DeepSpeed's methods that return a value of the configuration: name -> the key.
_VALUES = {
    "communication_data_type": "communication_data_type",
    "dataloader_drop_last": "dataloader_drop_last",
    "dump_state": "dump_state",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "managed_gradient_accumulation": "managed_gradient_accumulation",
    "memory_breakdown": "memory_breakdown",
    "optimizer_name": "optimizer.type",
    "optimizer_params": "optimizer.params",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
    "sparse_gradients_enabled": "sparse_gradients",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "flops_profiler_enabled": "flops_profiler.enabled",
    "zero_allgather_bucket_size": "zero_optimization.allgather_bucket_size",
    "zero_allgather_partitions": "zero_optimization.allgather_partitions",
    "zero_contiguous_gradients": "zero_optimization.contiguous_gradients",
    "zero_gather_16bit_weights_on_model_save": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_hpz_partition_size": "zero_optimization.zero_hpz_partition_size",
    "zero_ignore_unused_parameters": "zero_optimization.ignore_unused_parameters",
    "zero_max_live_parameters": "zero_optimization.stage3_max_live_parameters",
    "zero_max_reuse_distance": "zero_optimization.stage3_max_reuse_distance",
    "zero_offload_optimizer": "zero_optimization.offload_optimizer",
    "zero_offload_param": "zero_optimization.offload_param",
    "zero_overlap_comm": "zero_optimization.overlap_comm",
    "zero_param_persistence_threshold": "zero_optimization.stage3_param_persistence_threshold",
    "zero_prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
    "zero_quantized_gradients": "zero_optimization.zero_quantized_gradients",
    "zero_quantized_nontrainable_weights": "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_quantized_weights": "zero_optimization.zero_quantized_weights",
    "zero_reduce_bucket_size": "zero_optimization.reduce_bucket_size",
    "zero_reduce_scatter": "zero_optimization.reduce_scatter",
    "zero_round_robin_gradients": "zero_optimization.round_robin_gradients",
    "zero_sub_group_size": "zero_optimization.sub_group_size",
}


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


class DeepSpeedMembers(Engine):
    """Members of DeepSpeed's engine that both engines have.

    Attributes:
        tput_timer: samples per second.
        timers: timers by name; ``wall_clock_breakdown`` measures steps without them.
        mpu: the object given as ``initialize(mpu=)``, or None.
    """

    tput_timer: ThroughputTimer
    timers: WallClockTimers
    mpu: Any = None
    _applied = False

    def _start_members(self) -> None:
        self.tput_timer = ThroughputTimer(self.batch.train)
        self.timers = WallClockTimers(self.grid.synchronize)
        if type(self.grid) is Grid:
            self.grid.__class__ = ParallelGrid  # the same grid, with DeepSpeed's methods
        if self.optimizer is not None:
            members = {"optimizer": self.data_axis.optimizer, "dynamic_loss_scale": self.dynamic_loss_scale()}
            vars(self.optimizer).update(members, loss_scaler=self.loss_scaler)
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

    @property
    def global_rank(self) -> int:
        """Rank of this process."""
        return self.grid.rank

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """Modules whose gradients stay sparse: none."""
        return set()

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.grid.size

    @property
    def dp_world_size(self) -> int:
        """Number of replicas."""
        return self.grid.data.size

    @property
    def mp_world_size(self) -> int:
        """Number of ranks of the tensor axis."""
        return self.grid.tensor.size

    @property
    def seq_parallel_group(self) -> dist.ProcessGroup | None:
        """Process group of the context axis."""
        return group_of(self.grid, self.grid.context)

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """Process group of the data axis."""
        return group_of(self.grid, self.grid.data)

    @property
    def seq_data_parallel_group(self) -> dist.ProcessGroup | None:
        """Process group of the data and the context axis."""
        return group_of(self.grid, self.grid.data_context)

    def get_data_parallel_rank(self) -> int:
        """Return the rank on the data axis."""
        return self.grid.data.rank

    def get_tensor_parallel_rank(self) -> int:
        """Return the rank on the tensor axis."""
        return self.grid.tensor.rank

    get_model_parallel_rank = get_tensor_parallel_rank

    def get_sequence_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the process group of the context axis."""
        return self.seq_parallel_group

    def steps_per_print(self) -> int | None:
        """Return the steps between two printed lines."""
        return self.config.steps_per_print

    def was_step_applied(self) -> bool:
        """Return True if the last ``step`` updated the weights: it ended a batch, and fp16 did not skip it."""
        return self._applied

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every parameter group."""
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            group["lr"] = lr

    def get_type(self) -> list[Any]:
        """Return the ``type`` of each parameter group, or None."""
        return [group.get("type") for group in self.optimizer.param_groups] if self.optimizer else []

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Set the samples per microbatch from the next step on; the number of microbatches does not change.

        Every rank calls this, between two steps.

        Raises:
            ConfigError: if the batches come from ``training_data``, whose order is made for one batch size.
        """
        if self.training_dataloader is not None:
            raise DeepSpeedConfigError(
                "set_train_micro_batch_size does not work with training_data, whose order is made for one batch size: "
                "leave training_data out of initialize, and read the batches from a loader of your own"
            )
        sizes = {
            "train_batch_size": micro_batch_size * self.batch.accumulation * self.grid.replicas,
            "train_micro_batch_size_per_gpu": micro_batch_size,
            "gradient_accumulation_steps": self.batch.accumulation,
        }
        config = self.config.model_copy(update=sizes)
        self._samples_before, self._batch_size_since = self.global_samples, self.global_steps
        self.config, self.batch = config, batch_sizes(config, self.grid.replicas)

    def optimizer_state_dict(self) -> Any:
        """Return ``optimizer.state_dict()``: this rank's shard."""
        return None if self.optimizer is None else self.optimizer.state_dict()

    def dynamic_loss_scale(self) -> bool:
        """Return True if fp16 adapts its loss scale."""
        return self.config.fp16.enabled and not self.config.fp16.loss_scale

    def fp16_auto_cast(self) -> bool:
        """Return True if inputs are cast to float16."""
        return self.config.fp16.enabled

    def amp_enabled(self) -> bool:
        """Return True if the section ``amp`` is on."""
        return self.config.amp.enabled

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

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtype of the weights, and the dtype in which gradients accumulate."""
        options = self.data_axis.options
        weights = options.weight_dtype or torch.get_default_dtype()
        return weights, options.accumulation_dtype or weights

    def empty_partition_cache(self) -> None:
        """Release the whole weights that stage 3 keeps between its gathers."""
        if self.data_axis.gatherer is not None:
            self.data_axis.gatherer.finish()

    def destroy(self) -> None:
        """Wait until a checkpoint is written. The memory is freed when the last reference to the engine is gone."""
        self.wait_for_checkpoint()

    def compile(self, backend: Any = None, compile_kwargs: Mapping[str, Any] | None = None, **others: Any) -> None:
        """Log that the model runs uncompiled. To compile layers, call ``torch.compile`` on them before ``initialize``.

        The arguments have no effect.
        """
        logging.getLogger("triax").warning(
            "engine.compile() has no effect: compile the model's layers with torch.compile before initialize"
        )

    is_compiled = False

    def _backward_prologue(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: ``backward`` does all that belongs to it."""

    def _backward_epilogue(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: ``backward`` does all that belongs to it."""

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Do nothing: the backward pass reduces gradients."""

    # --------------------------------------------------------------------------------------------------- files

    def whole_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Return the whole ``state_dict()`` in host memory on rank 0, and None on the others. Collective.

        Weights are gathered one after the other, so that the other ranks hold one of them at a time.
        """
        raise NotImplementedError

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        return self.whole_state_dict(exclude_frozen_parameters)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

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
        if save_filename.endswith(".safetensors"):
            return super().save_16bit_model(save_dir, save_filename, exclude_frozen_parameters)
        with self.all_or_none("save_16bit_model"):
            state = self.whole_state_dict(exclude_frozen_parameters)
            if state is not None:
                Path(save_dir).mkdir(parents=True, exist_ok=True)
                torch.save(state, Path(save_dir) / save_filename)
            self.grid.world.all_gather_json(None)  # nobody reads before the file is there
        return True

    def save_fp16_model(self, save_dir: str | Path, save_filename: str = "pytorch_model.bin") -> bool:
        """Write unsharded weights: an older name of ``save_16bit_model``. Collective."""
        return self.save_16bit_model(save_dir, save_filename)

    def all_or_none(self, call: str) -> AbstractContextManager[None]:
        return _both(deepspeed_errors(), super().all_or_none(call))

    def _value(self, name: str) -> Callable[[], Any] | None:
        """Return DeepSpeed's method that returns a value of the configuration; None if there is no such method."""
        if name not in _VALUES:
            return None

        def value() -> Any:
            found: Any = self.config
            for key in _VALUES[name].split("."):
                found = None if found is None else getattr(found, key)
            return found

        return value


class DeepSpeedEngine(DeepSpeedMembers, ModuleEngine):
    """DeepSpeed's engine of any module: ``ModuleEngine`` with DeepSpeed's members."""

    def __init__(self, module: nn.Module, grid: Grid, config: Config, parts: TrainingParts) -> None:
        super().__init__(module, grid, config, parts)
        self._start_members()
        # Scripts call the module itself between the engine's calls, as DeepSpeed allows.
        link = ModuleLink(module, self)
        module.register_forward_pre_hook(link.before)
        module.register_forward_hook(link.after)
        module.zero_grad = link.zero_grad  # type: ignore[method-assign]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, as ``ModuleEngine.forward``."""
        self.tput_timer.start()
        return super().forward(*args, **kwargs)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a microbatch, as ``ModuleEngine.step``."""
        with self._stepping():
            super().step(lr_kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward passes do not reduce gradients, as ``ModuleEngine.no_sync``."""
        with deepspeed_errors(), super().no_sync():
            yield

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Return a context without effect: gradients of several backward passes add up in any case."""
        return nullcontext()

    def whole_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Return the whole ``state_dict()`` in host memory on rank 0, and None on the others. Collective."""
        frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}
        left_out = frozen if exclude_frozen_parameters else set()
        if self.grid.tensor.size * self.grid.expert.size > 1:
            state = {key: value.cpu() for key, value in super().module_state_dict().items() if key not in left_out}
            return state if self.grid.rank == 0 else None
        found: dict[str, Tensor] = {}
        copies: dict[Tensor, Tensor] = {}  # a parameter with two names has one copy
        for key, value in self.module.state_dict(keep_vars=True).items():
            if key in left_out:
                continue
            if value not in copies:
                sharded = isinstance(value, nn.Parameter) and hasattr(value, "ds_id")
                with gathered(value) if sharded else nullcontext():
                    first = self.grid.rank == 0
                    copies[value] = value.detach().to("cpu", copy=True) if first else torch.empty(0)
            found[key] = copies[value]
        return found if self.grid.rank == 0 else None

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Tensor]:
        """Return ``state_dict()`` with unsharded weights on every rank. Collective.

        Args:
            destination: a dict that takes the entries, in place of a new one.
            prefix: put before each name.
            keep_vars: without effect: values are copies.
            exclude_frozen_parameters: leave out parameters that are not trained.
        """
        frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}
        found: dict[str, Tensor] = {} if destination is None else destination
        for key, value in super().module_state_dict().items():
            if not (exclude_frozen_parameters and key in frozen):
                found[prefix + key] = value
        return found

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

    def __getattr__(self, name: str) -> Any:
        return self._value(name) or super().__getattr__(name)

    def module_called(self) -> None:
        """Begin the next step, if the last one has ended: the module is run in training."""
        if torch.is_grad_enabled() and self.module.training:
            self._begin_step()


class ModuleLink:
    """Hooks on a module that tell its engine of calls of the module itself. A copied or pickled one tells nothing.

    Args:
        module: the engine's module.
        engine: the engine, which is not kept alive.
    """

    def __init__(self, module: nn.Module, engine: DeepSpeedEngine | None) -> None:
        self._module = module
        self._engine = None if engine is None else ref(engine)

    @property
    def engine(self) -> DeepSpeedEngine | None:
        """The engine, if it is alive."""
        return None if self._engine is None else self._engine()

    def before(self, module: nn.Module, inputs: Any) -> None:
        """Hook before the module's forward."""
        if (engine := self.engine) is not None:
            engine.module_called()

    def after(self, module: nn.Module, inputs: Any, y: Any) -> None:
        """Hook after the module's forward."""
        if (engine := self.engine) is not None and torch.is_grad_enabled():
            engine.backward_passes.watch(y)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the engine's gradients, and those of the module. Collective, as ``engine.zero_grad``."""
        if (engine := self.engine) is not None:
            engine.zero_grad()
        type(self._module).zero_grad(self._module, set_to_none)

    def __reduce__(self) -> tuple[type[ModuleLink], tuple[nn.Module, None]]:
        return ModuleLink, (self._module, None)


class DeepSpeedPipelineEngine(DeepSpeedMembers, PipelineEngine):
    """DeepSpeed's engine of a ``PipelineModule``: ``PipelineEngine`` with DeepSpeed's members."""

    _data: Iterator[Any] | None = None

    def __init__(self, module: PipelineModule, config: Config, schedule: Schedule, parts: TrainingParts) -> None:
        super().__init__(module, config, schedule, parts)
        self._start_members()

    @property
    def stage_id(self) -> int:
        """Rank on the pipe axis."""
        return self.grid.pipe.rank

    @property
    def num_stages(self) -> int:
        """Number of ranks of the pipe axis."""
        return self.grid.pipe.size

    @property
    def micro_batches(self) -> int:
        """Number of microbatches of a step."""
        return self.batch.accumulation

    @property
    def micro_batch_size(self) -> int:
        """Number of samples of a microbatch."""
        return self.batch.micro

    def is_first_stage(self) -> bool:
        """Return True if this rank reads the inputs."""
        return bool(self.module.is_first)

    def is_last_stage(self) -> bool:
        """Return True if this rank computes the loss."""
        return bool(self.module.is_last)

    def get_pipeline_parallel_rank(self) -> int:
        """Return the rank on the pipe axis."""
        return self.grid.pipe.rank

    def set_dataloader(self, loader: Any) -> None:
        """Let ``train_batch`` without an argument read from a loader, which begins again at its end."""
        self._data = _endless(loader)

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Let ``train_batch`` without an argument read from an iterator."""
        self._data = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Set a function that is applied to each microbatch that is read, and returns ``(inputs, labels)``."""
        self._batch_fn = fn
        if self._own_data is not None:
            self._own_data = map(fn, self._own_data)  # type: ignore[assignment]  # an iterator, as that

    _batch_fn: Callable[[Any], Any] | None = None

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Take a step, as ``PipelineEngine.train_batch``."""
        self.tput_timer.start()
        with self._stepping():
            return super().train_batch(self._source(data_iter))

    def eval_batch(
        self,
        data_iter: Iterator[Any],
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

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Raise ``RuntimeError``: a pipeline runs all microbatches of a step at once."""
        raise RuntimeError("Only train_batch() and eval_batch() run a PipelineModule: call one of them")

    backward = step = __call__ = forward

    def whole_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Return the whole model's weights in host memory on rank 0, and None on the others. Collective."""
        state = {name: value.cpu() for name, value in self.gather().items()}
        return state if self.grid.rank == 0 else None

    def _source(self, data_iter: Iterator[Any] | None) -> Iterator[Any] | None:
        source = self._data if data_iter is None else data_iter
        return source if source is None or self._batch_fn is None else map(self._batch_fn, source)

    def __getattr__(self, name: str) -> Any:
        if (value := self._value(name)) is not None:
            return value
        raise AttributeError(f"a {type(self).__name__} has no {name!r}")


class ParallelGrid(Grid):
    """The grid, with the methods of DeepSpeed's ``PipelineParallelGrid`` and of Megatron's ``mpu``."""

    @property
    def stage_id(self) -> int:
        """Rank on the pipe axis."""
        return self.pipe.rank

    @property
    def is_first_stage(self) -> bool:
        """True on the first rank of the pipe axis."""
        return self.pipe.is_first

    @property
    def is_last_stage(self) -> bool:
        """True on the last rank of the pipe axis."""
        return self.pipe.is_last

    data_parallel_size = property(operator.attrgetter("data.size"))
    pipe_parallel_size = property(operator.attrgetter("pipe.size"))
    model_parallel_size = slice_parallel_size = property(operator.attrgetter("tensor.size"))
    data_parallel_id = property(operator.attrgetter("data.rank"))
    global_rank = property(operator.attrgetter("rank"))
    world_size = property(operator.attrgetter("size"))

    def get_global_rank(self) -> int:
        """Return the rank of this process."""
        return self.rank

    def get_stage_id(self) -> int:
        """Return the rank on the pipe axis."""
        return self.pipe.rank

    get_pipe_parallel_rank = get_pipeline_model_parallel_rank = get_stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """Return the size of the pipe axis."""
        return self.pipe.size

    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size

    def get_pipe_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the process group of the pipe axis."""
        return group_of(self, self.pipe)

    def get_data_parallel_rank(self) -> int:
        """Return the rank on the data axis."""
        return self.data.rank

    get_data_parallel_id = get_data_parallel_rank

    def get_data_parallel_world_size(self) -> int:
        """Return the size of the data axis."""
        return self.data.size

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the process group of the data axis."""
        return group_of(self, self.data)

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Return the ranks of the data axis."""
        return list(self.data.ranks)

    def get_model_parallel_rank(self) -> int:
        """Return the rank among the ranks of one replica: pipe and tensor axis."""
        return self.joint("pipe", "tensor").rank

    def get_model_parallel_world_size(self) -> int:
        """Return the number of ranks of one replica."""
        return self.pipe.size * self.tensor.size

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the process group of the ranks of one replica. Collective when it is first called."""
        return group_of(self, self.joint("pipe", "tensor"))

    def get_slice_parallel_rank(self) -> int:
        """Return the rank on the tensor axis."""
        return self.tensor.rank

    get_tensor_model_parallel_rank = get_slice_parallel_rank

    def get_slice_parallel_world_size(self) -> int:
        """Return the size of the tensor axis."""
        return self.tensor.size

    get_tensor_model_parallel_world_size = get_slice_parallel_world_size

    def get_slice_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the process group of the tensor axis."""
        return group_of(self, self.tensor)

    get_tensor_model_parallel_group = get_slice_parallel_group

    def stage_to_global(self, stage_id: int, **others: int) -> int:
        """Return the rank of a stage in this replica."""
        return self.topology.rank(**{**self.coordinate._asdict(), "pipe": stage_id, **others})


def group_of(grid: Grid, axis: Axis) -> dist.ProcessGroup | None:
    """Return torch's process group of an axis, also of one rank; None without ``torch.distributed``.

    (An axis of one rank has no group, and torch would take None for all processes.)
    """
    if axis.group is not None or not dist.is_initialized():
        return axis.group
    if grid.mesh is not None and axis.name in grid.topology.names:
        return grid.mesh.get_group(axis.name)
    return dist.group.WORLD if grid.size == 1 else axis.group


@contextmanager
def _both(outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> Iterator[None]:
    with outer, inner:
        yield


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader
