"""``triax.Trainer``: transformers' Trainer, whose model is trained by a triax engine.

args = triax.TrainingArguments("out", triax="ds_config.json", per_device_train_batch_size=8)
trainer = triax.Trainer(model=model, args=args, train_dataset=...)
trainer.train()

The loop, logging, callbacks, evaluation and the rotation of checkpoints are transformers' own. The methods replaced are
those that its DeepSpeed integration replaces: forward, backward and step; saving and loading; with a tensor axis, the
division of samples among processes. With a pipe axis, a step's microbatches are collected, and the engine's
``train_batch`` runs them. The file is imported at the first use of the class: it imports transformers.
"""

from __future__ import annotations

import logging
import math
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...base.errors import ConfigError
from ...base.evaluating import evaluating
from ...context.order import gather
from ...engine.module_engine import ModuleEngine
from ...engine.optim import schedulers
from ...engine.pipeline_engine import PipelineEngine
from ...grid.loss_terms import is_named
from ...models.huggingface.parallelize import parallelize, plan_of
from ...tensor_parallel.outside import ReadOutside
from ..deepspeed.config.read import Section
from ..deepspeed.from_config import initialize, read_config
from .adapters import add_section, check_section, save_adapters
from .auto_values import hidden_size, missing_extra
from .batches import EvenBatches, last_share, weighted, without_labels
from .resume import SCHEDULER_FILE, load_folder, read_state, whole_folder
from .state_dict import full_state_dict, saved_axes

try:
    import transformers
    from accelerate.data_loader import BatchSamplerShard
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import recursively_apply
    from accelerate.utils.memory import clear_device_cache

    from .pipeline import TrainerLoss, check_trainer, copy_weights, in_stages, optimizer_of, pairs, pipeline_module
    from .training_arguments import TrainingArguments
except ImportError as missing:
    raise missing_extra(missing) from missing

# Methods of transformers.Trainer that are replaced below. Some are private and may be renamed; the replacement
# would then never be called, so their presence is checked here. Tested with transformers 5.23.
_REPLACED = (
    *("_prepare_for_training", "create_optimizer", "create_scheduler", "_wrap_model", "training_step"),
    *("_get_num_items_in_batch", "_clip_grad_norm", "_get_grad_norm", "_build_accelerator_args", "get_tp_size"),
    *("_get_dataloader", "evaluation_loop", "predict", "log", "floating_point_ops", "_track_num_input_tokens", "_save"),
    *("_save_optimizer_and_scheduler", "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_best_model"),
    *("_load_rng_state", "call_model_init", "create_accelerator_and_postprocess", "prediction_step", "compute_loss"),
)
# DeepSpeed's schedules, and the lr_scheduler_type that gives nearly the same learning rates.
_ALIKE = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
if _gone := [name for name in _REPLACED if not hasattr(transformers.Trainer, name)]:
    raise ImportError(
        f"the Trainer of transformers {transformers.__version__} has no {', '.join(_gone)}: triax.Trainer is tested "
        "with 5.23, pip install 'transformers>=5.23,<5.24'"
    )


class EngineOptimizer(AcceleratedOptimizer):
    """Optimizer handed to transformers' loop: the engine has stepped already when the loop calls ``step``.

    Attributes:
        step_was_skipped: True if the last step was skipped after an overflow in fp16; the schedule then does not step.
    """

    step_was_skipped = False
    _is_accelerate_prepared = True  # ``Accelerator.prepare`` does not wrap it

    def __init__(self, engine: ModuleEngine | PipelineEngine) -> None:
        super().__init__(engine.optimizer, device_placement=False)
        self.engine = engine

    def step(self, closure: Any = None) -> None:
        """Do nothing: ``Trainer.training_step`` has stepped."""

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Zero the engine's gradients; a ``train_batch`` begins without gradients anyway."""
        if isinstance(self.engine, ModuleEngine):
            self.engine.zero_grad()


class WholeHead:
    """Output layer of a sharded model for losses that multiply by its weight themselves, such as TRL's.

    Args:
        layer: the sharded output layer. Its whole weight and bias are gathered once, when they are read first.
    """

    def __init__(self, layer: ReadOutside) -> None:
        self._layer = layer

    @cached_property
    def weight(self) -> Tensor:
        """Weight (vocabulary, width), equal on every tensor rank."""
        return self._layer.full_weight()

    @cached_property
    def bias(self) -> Tensor | None:
        """Bias (vocabulary,), equal on every tensor rank, or None."""
        return self._layer.full_bias()


class Trainer(transformers.Trainer):
    """``transformers.Trainer`` over a grid of replicas, tensor ranks and pipe stages; see docs/huggingface.md.

    >>> sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
    >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    >>> args = triax.TrainingArguments("runs/trainer", max_steps=2, per_device_train_batch_size=2, disable_tqdm=True)
    >>> data = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8
    >>> triax.Trainer(model=model, args=args, train_dataset=data).train().global_step
    {'train_runtime': ...}
    2

    Args:
        model, args, others, options: as transformers.Trainer; ``args`` must be ``triax.TrainingArguments``.

    Attributes:
        grid: the ranks.
        engine: engine that trains ``model``; None before the first ``train`` or ``evaluate``. With a pipe axis it has
            layers of its own, and ``model``, in host memory, gets their weights when ``train`` ends.

    Raises:
        TypeError: ``args`` are transformers' own class.
        ConfigError: the model, its adapters, or a method of a subclass cannot run over the grid.
        ValueError: there is no plan by which tensor ranks share the model.
    """

    args: TrainingArguments
    model: Any
    optimizer: Any
    lr_scheduler: Any
    engine: ModuleEngine | PipelineEngine | None = None
    _trained: Any = None  # the model that the engine was made of
    _groups: list[list[str]] | None = None  # the model's names of the given optimizer's parameters, by group
    _checked: Section | None = None
    _handle: EngineOptimizer | None = None
    _evaluated: int | None = None  # samples of an evaluation whose speed is not logged yet

    def __init__(self, model: Any = None, args: Any = None, *others: Any, **options: Any) -> None:
        args = TrainingArguments(output_dir="tmp_trainer") if args is None else args
        if not isinstance(args, TrainingArguments):
            raise TypeError(
                f"args are a {type(args).__module__}.{type(args).__name__}: pass triax.TrainingArguments(...), or a "
                "dataclass that inherits from both"
            )
        self.grid = args.grid
        where = in_stages(self.grid.topology.sizes)
        self._pipelined = bool(where)  # the model runs as a PipelineModule, of one stage with a context axis alone
        self._copies = self.grid.size // self.grid.replicas  # ranks that get the same samples
        # Rows are padded to a multiple of this length.
        self._multiple = 2 * self.grid.context.size if self.grid.context.size > 1 else 1
        self._microbatches: list[Any] = []
        self._uses_count: bool | None = None  # the loss depends on num_items_in_batch; None: not known yet
        super().__init__(model, args, *others, **options)
        check_section(self.model, self.args.auto_values.config)
        if self._pipelined:
            check_trainer(self, self.grid, where)
        elif self.grid.tensor.size > 1 and not hasattr(self.model, "triax_parameter_share"):
            plan_of(self.model, self.grid.tensor.size)
        if self._pipelined:
            vars(self)["prediction_step"] = self._predict_on_stages  # also in place of TRL's method

    def create_accelerator_and_postprocess(self) -> None:
        """Call transformers' method, and remove its argument num_steps, which the next call would refuse."""
        super().create_accelerator_and_postprocess()
        config: Any = self.args.accelerator_config
        config.gradient_accumulation_kwargs.pop("num_steps", None)

    # ------------------------------------------------------------------------------------ the engine

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        """Shard the model, then train; ``resume_from_checkpoint=True`` means the newest whole checkpoint.

        Sharding comes first because transformers adds hooks to modules (NEFTune).
        """
        if resume_from_checkpoint:
            folder, note = whole_folder(resume_from_checkpoint, str(self.args.output_dir))
            resume_from_checkpoint = self.grid.world.all_gather_json(folder)[0]
            if note and self.grid.rank == 0:
                logging.getLogger("triax").warning(note)
        if self.model_init is None:  # else call_model_init makes and shards the model
            self._sharded(self.model)
        self._microbatches = []
        if hasattr(self, "_tp_size"):  # TRL's number of ranks whose tokens it counts once
            self._tp_size = self._copies
        output = super().train(resume_from_checkpoint, *args, **options)
        if isinstance(self.engine, PipelineEngine):
            copy_weights(self.engine, self.model, everywhere=True)
        return output

    def call_model_init(self, trial: Any = None) -> Any:
        """Make the model as transformers does; within ``train``, shard it."""
        model: Any = super().call_model_init(trial)
        in_train = getattr(self, "is_in_train", False)  # __init__ calls this method before it sets the attribute
        return self._sharded(model if self._pipelined else model.to(self.grid.device)) if in_train else model

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        self._checked = self._configuration(max_steps)
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def create_optimizer(self, model: Any = None) -> Any:
        """Make the engine, and return its optimizer for the loop: the configuration's, or else transformers' own.

        Raises:
            ConfigError: both the configuration and the Trainer's arguments have an optimizer.
        """
        if self.engine is None or self.engine.optimizer is None or self._trained is not self.model:
            self.engine = self._engine()
            self._handle = EngineOptimizer(self.engine)
        elif self._checked is not None:  # keep the optimizer; clipping follows the arguments, as in transformers
            self.engine.set_clip(self._checked.gradient_clipping or None)
        assert self._handle is not None
        self.optimizer = self._handle
        return self._handle

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Return the configuration's schedule, or else transformers' own; the loop steps it."""
        section = None if self._checked is None else self._checked.scheduler
        if section is None:
            made: Any = super().create_scheduler(num_training_steps, optimizer)
            made.optimizer._opt_called = True  # the engine steps: else torch warns of a missing step
            return made
        if self.lr_scheduler is not None:
            raise ConfigError("both the configuration and optimizers= have a scheduler: give one of them")
        self.lr_scheduler = schedulers.make_scheduler(section.type, section.params)(
            self.optimizer if optimizer is None else optimizer
        )
        self._created_lr_scheduler = True
        asked = getattr(self.args.lr_scheduler_type, "value", self.args.lr_scheduler_type)
        if asked not in ("linear", _ALIKE.get(section.type)) and self.grid.rank == 0:  # linear: the default
            logging.getLogger("triax").warning(
                "lr_scheduler_type=%s has no effect, because the configuration has the scheduler %s: delete its "
                "section scheduler to use the argument's",
                *(asked, section.type),
            )
        return self.lr_scheduler

    def _configuration(self, steps: int | None) -> Section:
        """Return the checked configuration, filled in from the arguments; for evaluation only if steps is None."""
        width = hidden_size(getattr(self.model, "config", None))
        self.args.auto_values.from_arguments(self.args, self.grid.data.size)
        values = self.args.auto_values.from_run(self.args, width, steps)
        if self._pipelined and self.args.activation_checkpointing:
            values.setdefault("activation_checkpointing", {"enabled": True})  # the stages' layers, not the model's
        return read_config(values)

    def _engine(self) -> ModuleEngine | PipelineEngine:
        """Return a new engine that trains the model."""
        if self._checked is None:
            raise RuntimeError("the optimizer depends on the length of the run: call train(), which makes it")
        config = self._checked.changed(scheduler=None)  # the loop steps the schedule
        add_section(self.model, config, self.grid, whole=self._pipelined)
        given = None
        if config.optimizer is None:
            given = super().create_optimizer()
            names = {parameter: name for name, parameter in self.model.named_parameters()}
            self._groups = [[names[p] for p in group["params"] if p in names] for group in given.param_groups]
        elif self.optimizer is not None or self.optimizer_cls_and_kwargs is not None:
            raise ConfigError("both the configuration and the Trainer's arguments have an optimizer: give one of them")
        return self._made(config, given)

    def _made(self, config: Section, given: Any = None) -> ModuleEngine | PipelineEngine:
        """Return an engine of the model, with an optimizer over the model's parameters if one is given."""
        self._trained = module = self.model
        config = config.changed(lora=None)  # the model has the adapters
        engine: Any
        if self._pipelined:
            steps, counts_first = self.args.gradient_accumulation_steps, not self._loss_shifts_labels
            module = pipeline_module(self.model, self.grid, config, steps, counts_first)
            given = None if given is None else optimizer_of(given, self.model, module)
        trained = None if given is not None else [p for p in module.parameters() if p.requires_grad]
        engine, *_ = initialize(
            model=self._sharded(module), optimizer=given, model_parameters=trained, config=config, grid=self.grid
        )
        return engine

    def _sharded(self, model: Any) -> Any:
        """Shard the model over the tensor axis, in place and once; return it."""
        if self.grid.tensor.size > 1 and not self._pipelined and not hasattr(model, "triax_parameter_share"):
            count = getattr(model, "num_parameters", lambda exclude_embeddings: 1)
            total = count(exclude_embeddings=True)
            # A hook of transformers, which TRL adds for PEFT: it is moved to the sharded embedding.
            hooked = getattr(model, "_require_grads_hooks", None) or getattr(model, "_require_grads_hook", None)
            if hooked:
                model.disable_input_require_grads()
            parallelize(model, self.grid)
            if hooked:
                model.enable_input_require_grads()
            base = model.get_base_model() if hasattr(model, "get_base_model") else model
            head = getattr(base, "get_output_embeddings", lambda: None)()
            if isinstance(head, ReadOutside):
                base.get_output_embeddings = partial(WholeHead, head)
            model.triax_parameter_share = count(exclude_embeddings=True) / total
        return model

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if self.engine is None or self._trained is not self.model:
            self.engine = self._made(self._configuration(None))  # evaluation alone
        return self.engine.module if isinstance(self.engine, PipelineEngine) else self.engine

    # ------------------------------------------------------------------------------------------ steps

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run one microbatch: forward, backward, and after the last microbatch of a step the optimizer step.

        Args:
            model: the engine.
            inputs: the model's inputs.
            num_items_in_batch: number of items of the step, over all replicas and microbatches; divides the loss.

        Returns:
            The detached loss, 0-dim; transformers sums it over microbatches.
        """
        engine, handle = self.engine, self._handle
        assert engine is not None and handle is not None
        if isinstance(engine, PipelineEngine):
            return self._step_on_stages(engine, handle, inputs)
        if engine.microbatch == 0:
            self._set_microbatches(engine, self.current_gradient_accumulation_steps)
        engine.set_last_microbatch(self.accelerator.sync_gradients)
        engine.train()
        handle.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss: Any = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        is_divided = self.loss_is_scaled_for_ga
        if is_divided is None:
            by_items = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            is_divided = by_items or self.compute_loss_func is not None
        named = is_named(loss)  # then the engine divides each term
        if (share := self._share()) != 1:
            loss = weighted(loss, share, self._is_divided_by_items(num_items_in_batch is not None))
        if not is_divided and not named:
            loss = loss / self.current_gradient_accumulation_steps
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        self._copy_schedule()
        skipped = engine.skipped_steps
        # A loss without names was divided by the number of microbatches above.
        detached = engine.backward(loss, scale_wrt_gas=named)
        engine.step()
        handle.step_was_skipped = engine.skipped_steps > skipped
        return detached

    def _set_microbatches(self, engine: ModuleEngine | PipelineEngine, count: int) -> None:
        """Set the microbatches of a step: the last step of an epoch may have fewer."""
        if count != engine.batch.accumulation:
            engine.set_batch_size(engine.batch.micro * self.grid.replicas * count)

    def _is_divided_by_items(self, counted: bool) -> bool:
        """Return True if the loss is a sum that is divided by the labels of all replicas, which were counted."""
        takes_count = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        return counted and takes_count and self.args.average_tokens_across_devices

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss as transformers does; the loss of a model that ignores ``num_items_in_batch`` as a mean.

        transformers takes such a loss for a sum divided by that number. It multiplies it by the number of replicas, and
        does not divide it by the number of microbatches.
        """
        if self._uses_count is None and num_items_in_batch is not None and self.model_accepts_loss_kwargs:
            self._uses_count = self._loss_uses_count(model, inputs, num_items_in_batch)
        if self._uses_count is False:
            self.model_accepts_loss_kwargs, num_items_in_batch = False, None
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    @torch.no_grad()
    def _loss_uses_count(self, model: Any, inputs: Any, count: Any) -> bool | None:
        """Return True if the loss changes with ``num_items_in_batch``, None if no rank's loss is a number. Collective.

        Two forward passes without dropout, once in a run; for causal language models none.
        """
        if self._loss_shifts_labels or self.compute_loss_func is not None:
            return True
        compute: Any = super().compute_loss
        with evaluating(self.model):
            once, again = (compute(model, dict(inputs), num_items_in_batch=number) for number in (count, 2 * count))
        known = bool(once.isfinite()) and bool(once)  # a batch without labels may have a loss of 0, or NaN
        flags = torch.tensor([known, known and bool(once != again)], dtype=torch.int64)
        self.grid.world.all_reduce(flags, op="max")
        any_known, changed = map(bool, flags.tolist())
        return changed if any_known else None

    def _step_on_stages(self, engine: PipelineEngine, handle: EngineOptimizer, inputs: Any) -> Tensor:
        """Keep a microbatch, and after the last one of a step run ``train_batch``.

        Returns:
            The loss of the step over all replicas, 0-dim, after the last microbatch; 0 before.
        """
        self._microbatches.append(self._prepare_inputs(inputs if self._share() else without_labels(inputs)))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        microbatches, self._microbatches = self._microbatches, []
        self._set_microbatches(engine, len(microbatches))
        self.model.train()
        handle.train()
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        self._copy_schedule()
        skipped = engine.skipped_steps
        loss = engine.train_batch(pairs(microbatches, self._multiple))
        handle.step_was_skipped = engine.skipped_steps > skipped
        return loss.to(self.args.device)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Predict as transformers does. The loop weights losses by rows, also those that are divided by all labels."""
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if loss is not None and (share := self._share()) and self._is_divided_by_items("labels" in inputs):
            loss = loss / share
        return loss, logits, labels

    def _predict_on_stages(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Run ``eval_batch`` on a batch, in place of ``prediction_step``.

        Returns:
            The loss over all replicas, logits and labels, as transformers' ``prediction_step``. Logits are sent to all
            stages, unless ``prediction_loss_only`` is set.
        """
        engine, inputs = self.engine, self._prepare_inputs(inputs)
        assert isinstance(engine, PipelineEngine)
        self.model.eval()
        labels, loss, logits = inputs.get("labels"), None, None
        counts, training_loss = labels is not None, engine.module.loss_fn
        batch = pairs([inputs if self._share() else without_labels(inputs)], self._multiple)
        if type(self).prediction_step is not Trainer.prediction_step:  # TRL's own, with its own mean
            engine.module.loss_fn = TrainerLoss(grid=self.grid)
        try:
            if not prediction_loss_only:
                loss, (logits,) = engine.eval_batch(batch, True, compute_loss=counts, num_micro_batches=1)
                logits = gather(logits, self.grid.context, inputs["input_ids"].shape[1])
            elif counts:
                loss = engine.eval_batch(batch, num_micro_batches=1)
        finally:
            engine.module.loss_fn = training_loss
        loss = None if loss is None else loss.to(self.args.device, torch.get_default_dtype())
        return loss, logits, None if prediction_loss_only else labels

    def _copy_schedule(self) -> None:
        """Copy learning rates and other options to the engine's optimizer, if the schedule sets another's."""
        schedule, handle = self.lr_scheduler, self._handle
        if schedule is not None and handle is not None and schedule.optimizer is not handle:
            schedulers.follow(schedule, handle.optimizer)

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        if batch_samples and self._share(fetched=True) == 0:
            batch_samples = [*batch_samples[:-1], without_labels(batch_samples[-1])]
        count = super()._get_num_items_in_batch(batch_samples, device)
        if not isinstance(count, Tensor):
            return count
        if not self.args.average_tokens_across_devices:
            count = count * self._copies  # not summed over the ranks with equal samples, but divided by them
        # An integer: the engine casts floating-point inputs to the dtype of the weights.
        return count.round().long()

    def _clip_grad_norm(self, model: Any) -> Any:
        return self._get_grad_norm(model)  # the engine has clipped the gradients

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return None if self.engine is None else self.engine.grad_norm

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}  # the engine casts

    # -------------------------------------------------------------- samples, with tensor or pipe ranks

    def get_tp_size(self) -> int:
        """Return the number of processes that get the same samples: tensor ranks times pipe stages."""
        return self._copies

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        loader = super()._get_dataloader(*args, **kwargs)
        sampler, replicas = getattr(loader, "batch_sampler", None), self.grid.data.size
        if isinstance(sampler, BatchSamplerShard) and hasattr(sampler.batch_sampler, "sampler"):
            # accelerate divides batches among all processes, and fills the last ones with rows of the first.
            sampler.batch_sampler, sampler.even_batches = EvenBatches(sampler.batch_sampler, replicas), False
        if self._copies == 1:
            return loader
        base: Any = getattr(loader, "base_dataloader", loader)
        seeded = base.worker_init_fn
        if isinstance(seeded, partial) and "rank" in seeded.keywords:
            # Seeded by process, ranks of one replica would draw different masks. The wrapped loader starts the workers.
            base.worker_init_fn = partial(seeded, rank=self.grid.data.rank)
        shards: list[Any] = [sampler, getattr(loader, "dataset", None)]
        for shard in shards:
            if hasattr(shard, "num_processes") and hasattr(shard, "process_index"):
                shard.num_processes, shard.process_index = replicas, self.grid.data.rank
                if shard is not sampler and replicas == 1:
                    shard.batch_size = 1  # the loader makes the batches: the stream's last one is not filled
                return loader
        raise ConfigError(
            "an IterableDataset is read by one process and divided among all, but tensor ranks and pipe ranks need the "
            'same samples: pass accelerator_config={"dispatch_batches": False}'
        )

    def _share(self, fetched: bool = False) -> float:
        """Return this replica's rows of the current batch divided by the mean over the replicas; 0: it counts nothing.

        Args:
            fetched: of the last batch that was fetched; else of the one that is trained or evaluated.
        """
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or not (fetched or state.sync_gradients):
            return 1.0  # several batches are fetched before the first is trained
        return last_share(state.active_dataloader, self.grid.data.rank)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as transformers does. Samples that all ranks of a replica have count once."""
        if self._copies > 1 and self.args.eval_use_gather_object:
            raise ConfigError("eval_use_gather_object would count each sample on several ranks: leave it out")
        if self.grid.size > 1 and not self.args.eval_use_gather_object:
            self.gather_function = self._gather
        output = super().evaluation_loop(*args, **kwargs)
        self._evaluated = output.num_samples
        return output

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict as transformers does; steps that the ranks of a replica share count once."""
        output: Any = super().predict(*args, **kwargs)
        self._count_steps_once(output.metrics)
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as transformers does, and beside the training loss the last step's terms and metrics of a named loss.

        Steps of an evaluation that the ranks of a replica share count once.
        """
        self._count_steps_once(logs)
        if "loss" in logs and self.engine is not None:
            logs |= {n: v for n, v in self.engine.metrics.items() if isinstance(v, float) and n not in logs}
        super().log(logs, start_time)

    def _count_steps_once(self, metrics: dict[str, float]) -> None:
        """Correct the steps per second of the last evaluation: transformers takes every process for a replica."""
        samples, self._evaluated = self._evaluated, None
        if samples is None:
            return
        counted = math.ceil(samples / (self.args.eval_batch_size * self.grid.size))
        steps = math.ceil(samples / (self.args.eval_batch_size * self.grid.replicas))
        for key in metrics:
            if key.endswith("_steps_per_second"):
                metrics[key] = round(metrics[key] * steps / max(counted, 1), 3)

    def _gather(self, data: Any) -> Any:
        """Gather tensors from all replicas, from the first rank of each. Collective.

        Replicas may have fewer rows of the last batch, or one that counts nothing: it is left out.
        """
        state = self.accelerator.gradient_state
        if state.end_of_dataloader:
            data = self.accelerator.pad_across_processes(data, dim=0)
        where = [self.grid.topology.coordinate(rank)._asdict() for rank in range(self.grid.size)]
        firsts = [rank for rank, at in enumerate(where) if not any(n for axis, n in at.items() if axis != "data")]
        cut = state.remainder if state.end_of_dataloader and state.remainder > 0 else None

        def once(everyone: Tensor) -> Tensor:
            by_rank = everyone.view(self.grid.size, -1, *everyone.shape[1:])
            return by_rank[firsts].flatten(0, 1)[:cut]

        return recursively_apply(once, self.accelerator.gather(data))

    def floating_point_ops(self, inputs: Any) -> Any:
        """Return this rank's share of the model's FLOPs, because transformers sums them over all processes.

        transformers counts from this rank's parameters. The count is divided by their share of the whole model, and by
        the number of ranks that have the same samples.
        """
        share = getattr(self.model, "triax_parameter_share", 1.0)
        return super().floating_point_ops(inputs) / (share * self._copies)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs if self._share() else {name: rows[:0] for name, rows in inputs.items()})
        seen = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + seen // self._copies

    # ------------------------------------------------------------------------------------------- saving

    def _save(self, output_dir: str | None = None, state_dict: dict[Any, Any] | None = None) -> None:
        if isinstance(self.engine, PipelineEngine):
            copy_weights(self.engine, self.model, everywhere=False)
        elif state_dict is None and self.engine is not None:
            state_dict = full_state_dict(self.engine)
        if hasattr(self.model, "lora_options"):
            self._save_adapters(output_dir or self.args.output_dir, state_dict)
            return
        with self._names_of_peft():
            super()._save(output_dir, state_dict)

    def _save_adapters(self, folder: str | None, state_dict: dict[Any, Any] | None) -> None:
        """Write the adapters of the section ``lora`` in place of the model, and the rest as transformers does."""
        if not self.args.should_save or folder is None:
            return
        save_adapters(self.model, folder, self.model.state_dict() if state_dict is None else state_dict)
        made = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if made is not None:
            made.save_pretrained(folder)
        torch.save(self.args, Path(folder) / "training_args.bin")

    def _names_of_peft(self) -> AbstractContextManager[None]:
        """Context in which modules that PEFT saves whole may be asked for their state dict. Collective in stage 3.

        PEFT takes the values from the state dict of the model, and the names from each of these modules.
        """
        fully_trained = [
            layer for layer in self.model.modules() if isinstance(layer._modules.get("modules_to_save"), nn.ModuleDict)
        ]
        parameters = [parameter for layer in fully_trained for parameter in layer.parameters()]
        sharded = isinstance(self.engine, ModuleEngine) and self.engine.options.zero.stage == 3
        return self.engine.gathered(parameters) if self.engine is not None and sharded else nullcontext()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.engine is not None
        self._copy_schedule()
        schedule = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
        self.engine.save_checkpoint(output_dir, f"global_step{self.state.global_step}", {"lr_scheduler": schedule})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Do nothing: ``train`` has checked the folder, and ``_load_optimizer_and_scheduler`` loads it."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        assert self.engine is not None and self.engine.optimizer is not None
        folder = Path(checkpoint)
        if (folder / "latest").is_file():
            _, client = self.engine.load_checkpoint(checkpoint)
            schedule = (client or {}).get("lr_scheduler")
        else:
            decay, named = self.get_decay_parameter_names(self.model), self.model.named_parameters()
            trained = [name for name, parameter in named if parameter.requires_grad]
            # If the optimizer is the configuration's: transformers' own groups.
            groups = self._groups or [[n for n in trained if n in decay], [n for n in trained if n not in decay]]
            load_folder(self.engine, self.model, groups, folder)
            schedule = read_state(folder / SCHEDULER_FILE)
        if schedule is not None and self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(schedule)
            loaded = self.engine.optimizer.param_groups
            for group, saved_group in zip(self.lr_scheduler.optimizer.param_groups, loaded, strict=True):
                # Not the learning rate alone: some schedules also write betas.
                group.update({key: value for key, value in saved_group.items() if key not in ("params", "param_names")})

    def _load_rng_state(self, checkpoint: str | None) -> None:
        saved, axes = None if checkpoint is None else saved_axes(Path(checkpoint)), self.grid.topology.sizes
        if saved == axes or (saved is None and self._copies == 1):  # else of transformers' own Trainer, or of none
            super()._load_rng_state(checkpoint)
        elif saved is not None and self.grid.rank == 0:
            # States are saved by rank number: on another grid, tensor ranks could get different dropout masks.
            logging.getLogger("triax").warning(
                "%s was written on the grid %s, but this grid is %s: the random generators' states (dropout) are not "
                "loaded and start from seed=%d; resume on the checkpoint's grid to load them",
                *(checkpoint, saved, axes, self.args.seed),
            )

    def _load_best_model(self) -> None:
        assert self.engine is not None
        self.engine.load_checkpoint(str(self.state.best_model_checkpoint), load_module_only=True)
