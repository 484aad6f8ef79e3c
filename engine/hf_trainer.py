"""``triax.Trainer``: transformers' Trainer, whose model is trained by a triax engine.

args = triax.TrainingArguments("out", triax="ds_config.json", per_device_train_batch_size=8)
trainer = triax.Trainer(model=model, args=args, train_dataset=...)
trainer.train()

The loop, logging, callbacks, evaluation and the rotation of checkpoints are transformers' own. What is replaced is what
its DeepSpeed integration replaces: who runs the model, its backward pass and its step; what is saved; which samples a
replica sees where there are tensor ranks. Imported when it is first used, and transformers with it.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ..tensor_parallel.parallelize import parallelize
from . import schedulers
from .config import Config, ConfigError, read_config
from .create import initialize
from .hf_filling import hidden_size, wanted
from .hf_state import saved_axes, whole_state
from .module_engine import ModuleEngine

try:
    import transformers
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import recursively_apply
    from accelerate.utils.memory import clear_device_cache

    from .hf_arguments import TrainingArguments
except ImportError as missing:
    raise wanted(missing) from missing

# What stands below in place of transformers' own, some of it under names that it may change: were one of them gone, the
# loop would train something else, silently. Tested with transformers 5.23.
_REPLACED = (
    *("_prepare_for_training", "create_optimizer", "create_scheduler", "_wrap_model", "training_step"),
    *("_get_num_items_in_batch", "_clip_grad_norm", "_get_grad_norm", "_build_accelerator_args", "get_tp_size"),
    *("_get_dataloader", "evaluation_loop", "floating_point_ops", "_track_num_input_tokens", "_save"),
    *("_save_optimizer_and_scheduler", "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_best_model"),
    *("_load_rng_state", "call_model_init", "create_accelerator_and_postprocess"),
)
if _gone := [name for name in _REPLACED if not hasattr(transformers.Trainer, name)]:
    raise ImportError(
        f"the Trainer of transformers {transformers.__version__} has no {', '.join(_gone)}: triax.Trainer is tested "
        "with 5.23, pip install 'transformers>=5.23,<5.24'"
    )


class EngineOptimizer(AcceleratedOptimizer):
    """The engine's optimizer as transformers' loop sees it: it has stepped when the loop calls ``step``.

    Attributes:
        step_was_skipped: whether the last step overflowed in fp16, so that the learning rate should stay.
    """

    step_was_skipped = False
    _is_accelerate_prepared = True  # ``Accelerator.prepare`` takes it as it is

    def __init__(self, engine: ModuleEngine) -> None:
        super().__init__(engine.optimizer, device_placement=False)
        self.engine = engine

    def step(self, closure: Any = None) -> None:
        """Nothing: ``Trainer.training_step`` has stepped."""

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """As the engine's."""
        self.engine.zero_grad()


class Trainer(transformers.Trainer):
    """``transformers.Trainer`` over a grid of replicas and tensor ranks; see docs/huggingface.md.

    Args:
        model, args, others, options: as transformers'; ``args`` are ``triax.TrainingArguments``.

    Attributes:
        grid: where the run is.
        engine: what trains ``model``; None before the first ``train`` or ``evaluate``.

    Raises:
        TypeError: ``args`` of transformers' own class.
    """

    args: TrainingArguments
    model: Any
    optimizer: Any
    lr_scheduler: Any
    engine: ModuleEngine | None = None
    _checked: Config | None = None
    _handle: EngineOptimizer | None = None

    def __init__(self, model: Any = None, args: Any = None, *others: Any, **options: Any) -> None:
        args = TrainingArguments(output_dir="tmp_trainer") if args is None else args
        if not isinstance(args, TrainingArguments):
            raise TypeError(f"args are a {type(args).__module__}.TrainingArguments: pass triax.TrainingArguments(...)")
        self.grid = args.grid
        super().__init__(model, args, *others, **options)

    def create_accelerator_and_postprocess(self) -> None:
        """As transformers', which writes into the arguments what it refuses to find there the next time."""
        super().create_accelerator_and_postprocess()
        config: Any = self.args.accelerator_config
        config.gradient_accumulation_kwargs.pop("num_steps", None)

    # ------------------------------------------------------------------------------------ the engine

    def train(self, *args: Any, **options: Any) -> Any:
        """As transformers'; modules are sharded before it puts hooks on them, of NEFTune for example."""
        if self.model_init is None:  # else call_model_init makes another model
            self._sharded(self.model)
        return super().train(*args, **options)

    def call_model_init(self, trial: Any = None) -> Any:
        """As transformers'; within ``train``, the model is sharded."""
        model: Any = super().call_model_init(trial)
        within = getattr(self, "is_in_train", False)  # __init__ calls this too, and sets that later
        return self._sharded(model.to(self.grid.device)) if within else model

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        self._checked = self._configuration(max_steps)
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def create_optimizer(self, model: Any = None) -> Any:
        """The engine, and what the loop has of its optimizer: the configuration's, or else transformers' own.

        Raises:
            ConfigError: the configuration has one, and so have the Trainer's arguments.
        """
        if self.engine is None or self.engine.optimizer is None or self.engine.module is not self.model:
            self.engine = self._engine()
            self._handle = EngineOptimizer(self.engine)
        elif self._checked is not None:  # the optimizer goes on as it is; clipping is the arguments', as transformers'
            clipping = {"gradient_clipping": self._checked.gradient_clipping}
            self.engine.config = self.engine.config.model_copy(update=clipping)
        assert self._handle is not None
        self.optimizer = self._handle
        return self._handle

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The configuration's schedule, or else transformers' own; the loop steps either."""
        section = None if self._checked is None else self._checked.scheduler
        if section is None:
            made: Any = super().create_scheduler(num_training_steps, optimizer)
            made.optimizer._opt_called = True  # the engine's steps: else torch warns
            return made
        if self.lr_scheduler is not None:
            raise ConfigError("scheduler is in the configuration, and in optimizers= too: give one of them")
        self.lr_scheduler = schedulers.from_config(section)(self.optimizer if optimizer is None else optimizer)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _configuration(self, steps: int | None) -> Config:
        """Filled in, by what the arguments are now, and checked; for evaluation alone where there are no steps."""
        width = hidden_size(getattr(self.model, "config", None))
        self.args.filling.from_arguments(self.args, self.grid.data.size)
        return read_config(self.args.filling.from_run(self.args, width, steps))

    def _engine(self) -> ModuleEngine:
        """An engine that trains the model."""
        if self._checked is None:
            raise RuntimeError("the optimizer follows from the length of the run: train() makes it")
        config = self._checked.model_copy(update={"scheduler": None})  # the loop steps it
        given = None
        if config.optimizer is None:
            given = super().create_optimizer()
        elif self.optimizer is not None or self.optimizer_cls_and_kwargs is not None:
            raise ConfigError("optimizer is in the configuration, and in the Trainer's arguments too: give one of them")
        trained = None if given is not None else [p for p in self.model.parameters() if p.requires_grad]
        engine, *_ = initialize(
            model=self._sharded(self.model), optimizer=given, model_parameters=trained, config=config, grid=self.grid
        )
        return engine

    def _sharded(self, model: Any) -> Any:
        """The model, over the tensor axis if there is one."""
        if self.grid.tensor.size > 1 and not hasattr(model, "_triax_share"):
            count = getattr(model, "num_parameters", lambda exclude_embeddings: 1)
            whole = count(exclude_embeddings=True)
            parallelize(model, self.grid)
            model._triax_share = count(exclude_embeddings=True) / whole
        return model

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if self.engine is None or self.engine.module is not self.model:
            config = self._configuration(None)  # evaluation alone
            self.engine = initialize(model=self._sharded(self.model), config=config, grid=self.grid)[0]
        return self.engine

    # ------------------------------------------------------------------------------------------ steps

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """One microbatch: forward, backward, and after the last one of a step the step.

        Args:
            model: the engine.
            inputs: of the model.
            num_items_in_batch: of the whole step, over all replicas; the loss is divided by it.

        Returns:
            The loss, detached, as transformers adds it up.
        """
        engine, handle = self.engine, self._handle
        assert engine is not None and handle is not None
        engine.set_gradient_accumulation_boundary(self.accelerator.sync_gradients)
        engine.train()
        handle.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss: Any = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        scaled = self.loss_is_scaled_for_ga
        if scaled is None:
            by_items = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = by_items or self.compute_loss_func is not None
        if not scaled:
            loss = loss / self.current_gradient_accumulation_steps
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        self._follow()
        skipped = engine.skipped_steps
        # A mean over replicas, and a sum over the step's microbatches: the loss has been divided by them.
        engine.backward(loss, scale_wrt_gas=False)
        engine.step()
        handle.step_was_skipped = engine.skipped_steps > skipped
        detached: Tensor = loss.detach()
        return detached

    def _follow(self) -> None:
        """Where the schedule is over the optimizer that the engine's was made from: what it wrote there counts."""
        schedule, handle = self.lr_scheduler, self._handle
        if schedule is not None and handle is not None and schedule.optimizer is not handle:
            schedulers.follow(schedule, handle.optimizer)

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        count = super()._get_num_items_in_batch(batch_samples, device)
        if not isinstance(count, Tensor):
            return count
        if not self.args.average_tokens_across_devices:
            count = count * self.grid.tensor.size  # it was not summed over them, and was divided by their number
        # A whole number, which the engine does not round to the dtype of the weights, as it does with inputs.
        return count.round().long()

    def _clip_grad_norm(self, model: Any) -> Any:
        return self._get_grad_norm(model)  # the engine has clipped

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return None if self.engine is None else self.engine.get_global_grad_norm()

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}  # the engine's is in its config

    # ----------------------------------------------------------------- samples, where there are tensor ranks

    def get_tp_size(self) -> int:
        """How many processes see the same samples."""
        return self.grid.tensor.size

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        loader = super()._get_dataloader(*args, **kwargs)
        if self.grid.tensor.size == 1:
            return loader
        base: Any = getattr(loader, "base_dataloader", loader)
        seeded = base.worker_init_fn
        if isinstance(seeded, partial) and "rank" in seeded.keywords:
            # By process, tensor ranks would draw unlike masks; and it is the wrapped loader that starts workers.
            base.worker_init_fn = partial(seeded, rank=self.grid.data.rank)
        shards: list[Any] = [getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)]
        for shard in shards:
            if hasattr(shard, "num_processes") and hasattr(shard, "process_index"):
                # accelerate shares batches out over all processes; here over the replicas.
                shard.num_processes, shard.process_index = self.grid.data.size, self.grid.data.rank
                return loader
        raise ConfigError(
            "an IterableDataset is read by one process for all, and tensor ranks see the same samples: pass "
            'accelerator_config={"dispatch_batches": False}'
        )

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers'; what tensor ranks have alike counts once."""
        if self.grid.tensor.size > 1:
            if self.args.eval_use_gather_object:
                raise ConfigError("eval_use_gather_object counts every process, tensor ranks too: leave it out")
            self.gather_function = self._gather
        return super().evaluation_loop(*args, **kwargs)

    def _gather(self, data: Any) -> Any:
        """What the replicas have, each once, without the samples that fill up the last batch."""
        state = self.accelerator.gradient_state
        firsts = [rank for rank in range(self.grid.size) if not self.grid.topology.coordinate(rank).tensor]
        cut = state.remainder if state.end_of_dataloader and state.remainder > 0 else None

        def once(everyone: Tensor) -> Tensor:
            each = everyone.view(self.grid.size, -1, *everyone.shape[1:])
            return each[firsts].flatten(0, 1)[:cut]

        return recursively_apply(once, self.accelerator.gather(data))

    def floating_point_ops(self, inputs: Any) -> Any:
        """As transformers', which goes by the parameters of the model; a tensor rank's share of the whole model's."""
        share = getattr(self.model, "_triax_share", 1.0)
        return super().floating_point_ops(inputs) / (share * self.grid.tensor.size)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        seen = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + seen // self.grid.tensor.size

    # ------------------------------------------------------------------------------------------- saving

    def _save(self, output_dir: str | None = None, state_dict: dict[Any, Any] | None = None) -> None:
        if state_dict is None and self.engine is not None:
            state_dict = whole_state(self.engine)
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.engine is not None
        self._follow()
        schedule = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
        self.engine.save_checkpoint(output_dir, f"global_step{self.state.global_step}", {"lr_scheduler": schedule})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        if not (folder / "latest").is_file():
            raise ConfigError(
                f"{folder} has no checkpoint of triax (global_step*, latest): another trainer wrote it, or "
                "save_only_model. To start from its weights, build the model with from_pretrained"
            )  # it is loaded once there is an engine

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        assert self.engine is not None and self.engine.optimizer is not None
        _, client = self.engine.load_checkpoint(checkpoint)
        schedule = (client or {}).get("lr_scheduler")
        if schedule is not None and self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(schedule)
            groups = self.engine.optimizer.param_groups
            for its, mine in zip(self.lr_scheduler.optimizer.param_groups, groups, strict=True):
                # The rate, and betas too: some schedules write those.
                its.update({key: value for key, value in mine.items() if key not in ("params", "param_names")})

    def _load_rng_state(self, checkpoint: str | None) -> None:
        saved, axes = None if checkpoint is None else saved_axes(Path(checkpoint)), self.grid.topology.axes
        if saved == axes:
            super()._load_rng_state(checkpoint)
        elif saved is not None and self.grid.rank == 0:
            # By number alone, the ranks of a tensor group could get unlike ones, and drop what they hold alike unlike.
            logging.getLogger("triax").warning(
                "%s was written on the grid %s, and this one is %s: the states of generators (dropout) are not loaded, "
                "and draws begin anew from seed=%d; resume on that grid to have them",
                *(checkpoint, saved, axes, self.args.seed),
            )

    def _load_best_model(self) -> None:
        assert self.engine is not None
        self.engine.load_checkpoint(str(self.state.best_model_checkpoint), load_module_only=True)
