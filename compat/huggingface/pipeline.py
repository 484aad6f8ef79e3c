"""A transformers model over pipe stages for the Trainer: its layers, its batches, and its weights after training.

``hf_layers`` lists the model's own blocks. The parameters of the stages get transformers' names, so that a checkpoint
written with a pipe axis loads without one, and the other way round.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...base.errors import ConfigError
from ...base.foreign_tables import answers, read_table
from ...context.dropout import dropout
from ...context.order import shard
from ...engine.pipeline_engine import PipelineEngine
from ...grid import Grid, layout_of
from ...grid.layout import rename
from ...models.huggingface.config import layer_count
from ...models.huggingface.merge_adapters import is_factor, layer_of
from ...models.huggingface.names import expand
from ...models.huggingface.pipeline_layers import CausalLMLoss, HFBlock, HFModel, hf_layers
from ...models.huggingface.save import linear_names
from ...pipe.chunked_loss import LastLayer
from ...pipe.module import PipelineModule
from ...pipe.program.costs import Costs
from ...pipe.schedules.choose import make_schedule
from ...tensor_parallel.lora import add_adapters
from ..deepspeed.config.read import Section
from .adapters import adapter_options, plain_names, without_adapters

_COLUMNS = ("input_ids", "labels", "attention_mask")  # of a batch
_METHODS = ("compute_loss", "prediction_step", "training_step")  # they run the whole model
_ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attn_dropout")
# Modules of trainers of TRL -> what to use over stages in their place.
_INSTEAD = answers(read_table(__file__, "arguments.toml")["trainers"])
# Modules of classes whose methods the pipeline replaces: they compute the loss of a causal language model.
_REPLACED_IN = ("transformers.trainer", f"{__name__.rpartition('.')[0]}.trainer", "trl.trainer.sft_trainer")


def in_stages(sizes: Mapping[str, int]) -> str:
    """Return the sizes of the axes over which the model runs as ``hf_layers``, such as "pipe=2"; "" without them."""
    return ", ".join(f"{axis}={sizes[axis]}" for axis in ("pipe", "context") if sizes.get(axis, 1) > 1)


def _one(where: str) -> str:
    """Return a grid without these axes, such as "pipe=1"."""
    return " and ".join(f"{part.partition('=')[0]}=1" for part in where.split(", "))


def check_arguments(args: Any, where: str) -> None:
    """Check that the values of ``TrainingArguments`` are supported over stages.

    Args:
        args: the arguments.
        where: as ``in_stages``.

    Raises:
        ConfigError: they are not; the message names the argument.
    """
    tunes = hasattr(args, "packing")  # SFTConfig; other classes of TRL have losses of their own
    packed = tunes and args.packing and args.packing_strategy != "wrapped"
    loss = getattr(args, "loss_type", "nll") if tunes else "nll"
    rows = answers(read_table(__file__, "arguments.toml")["in_stages"])
    given = {name: getattr(args, name, None) for name in rows} | {
        "neftune_noise_alpha": args.neftune_noise_alpha is not None,
        # The first name is that of transformers 5.23 and newer.
        "activation_checkpointing_kwargs": getattr(args, "activation_checkpointing_kwargs", None)
        or args.gradient_checkpointing_kwargs,
        "average_tokens_across_devices=False": not args.average_tokens_across_devices,
        "packing": packed,
        "loss_type": loss not in ("nll", "chunked_nll"),
    }
    for name, reason in rows.items():
        if given[name]:
            raise ConfigError(
                f"{name} is not supported with {where}, because {reason}: leave it out, or use a grid with "
                f"{_one(where)}"
            )


def check_trainer(trainer: Any, grid: Grid, where: str) -> None:
    """Check that a Trainer's model, loss and methods can run over stages. Collective over the tensor axis.

    Raises:
        ConfigError: they cannot; the message says why.
    """
    for method in _METHODS:
        owner = next(cls for cls in type(trainer).__mro__ if method in vars(cls))
        if owner.__module__ not in _REPLACED_IN:
            raise ConfigError(
                f"{owner.__name__}.{method} runs the whole model, but with {where} a rank has only a part of it: "
                f"{_INSTEAD.get(owner.__module__.rpartition('.')[2], 'remove the method')}, or use a grid with "
                f"{_one(where)}"
            )
    if trainer.compute_loss_func is not None:
        raise ConfigError(
            f"compute_loss_func is not supported with {where}: leave it out, or use a grid with {_one(where)}"
        )
    model = trainer.model.get_base_model() if hasattr(trainer.model, "peft_config") else trainer.model
    try:
        hf = HFModel(model.config)
        if type(model).__name__ == hf.architecture:
            with torch.device("meta"):
                HFBlock(hf, 0, grid=grid)  # raises ValueError for what the axes tensor and context cannot share
        dropped = [key for key in _ATTENTION_DROPOUT if getattr(model.config, key, 0.0)]
        if grid.context.size > 1 and dropped:
            raise ValueError(f"the context axis cannot drop attention probabilities: set {dropped[0]} to 0")
    except (AttributeError, ValueError) as error:
        raise ConfigError(f"the model cannot be cut into the parts of {where}: {error}") from error
    if type(model).__name__ != hf.architecture:
        raise ConfigError(
            f"the model is a {type(model).__name__}, but with {where} a model of its family must be a "
            f"{hf.architecture}: use that class, or a grid with {_one(where)}"
        )
    adapter_options(trainer.model)


@dataclass(frozen=True)
class TrainerLoss(CausalLMLoss):
    """Causal language model loss, divided by the number of labels that transformers' Trainer counts.

    Args:
        counts_first: count the first label of a row too, although no logits predict it. The Trainer does that for
            models whose ``loss_type`` is not ForCausalLM, such as ``GPT2LMHeadModel``.
    """

    counts_first: bool = False

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses and the number by which the engine divides it."""
        return super().__call__(logits, labels)[0], self.weight(labels)

    def of_head(self, head: LastLayer, x: Any, labels: Tensor) -> Any:
        """Return the same for the output layer's input, (B, T, D)."""
        return super().of_head(head, x, labels)[0], self.weight(labels)

    def weight(self, labels: Tensor) -> Tensor:
        """Return the number of labels, (): with a context axis, of those of this rank's tokens."""
        if not self.counts_first:
            return super().weight(labels)
        if self.grid is not None:
            labels = shard(labels, self.grid.context, fill=self.ignore_index)
        return torch.count_nonzero(labels != self.ignore_index)


def pipeline_module(
    model: Any, grid: Grid, config: Section, microbatches: int, counts_first: bool = False
) -> PipelineModule:
    """Return a transformers model as a ``PipelineModule`` whose parameters have transformers' names. Collective.

    Args:
        model: the model, with weights, in host memory, perhaps with adapters. It stays as it is.
        grid: the grid.
        config: the configuration, which names the schedule.
        microbatches: microbatches of a step.
        counts_first: as in ``TrainerLoss``.

    Raises:
        ConfigError: the schedule does not exist for these sizes.
    """
    options, stages = config.pipeline, grid.pipe.size
    try:
        schedule = make_schedule(options.schedule, stages, microbatches, None, Costs(*options.costs), options.memory)
    except ValueError as error:
        raise ConfigError(f"pipeline.schedule: {error}") from error
    _broadcast(model, grid)
    # On the schedule's ranks from the beginning: the engine builds a stage that it moves again, under other names.
    module = PipelineModule(
        hf_layers(without_adapters(model)),
        grid=grid,
        loss_fn=TrainerLoss(grid=grid, counts_first=counts_first),
        chunks=schedule.chunks,
        placement=list(schedule.placement),
        seed=config.seed,
    )
    names = expand(HFModel(model.config).names(), layer_count(model.config.to_dict()))
    own, theirs, layers = plain_names(model), dict(model.named_parameters()), dict[str, tuple[str, ...]]()
    if (lora := adapter_options(model)) is not None:
        layers = linear_names(module)
        add_adapters(module, lora, layers, grid, dropout)
    for local in module.local_parameters():
        parameter, layout = local.parameter, local.layout
        adapts = is_factor(layout.name)
        plain = "{}.lora_{}".format(*layer_of(layout.name, layers)) if adapts else names[layout.name].theirs[0]
        if adapts:
            weight = theirs[own[plain]].detach()
            parameter.data.copy_(layout.shard(weight, grid.tensor.rank, grid.tensor.size))
        rename(parameter, own[plain], layout.tie)
        parameter.requires_grad_(theirs[own[plain]].requires_grad)
    if lora is None:  # then the names are those of a folder for transformers, to which a checkpoint can be exported
        described: Any = module
        described.config = copy.deepcopy(model.config)
        described.config.architectures = [type(model).__name__]
    return module


@torch.no_grad()
def _broadcast(model: nn.Module, grid: Grid) -> None:
    """Give all tensor ranks the first one's parameters: processes may have drawn other values. Collective."""
    if grid.tensor.size > 1:
        for parameter in model.parameters():
            value = parameter.detach().to(grid.device).contiguous()
            grid.tensor.broadcast(value)
            parameter.data.copy_(value)


def optimizer_of(optimizer: torch.optim.Optimizer, model: nn.Module, module: PipelineModule) -> torch.optim.Optimizer:
    """Return an optimizer like the given one, over this rank's parameters of the pipeline in place of the model's."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    weights = {layout_of(parameter).name: parameter for parameter in module.parameters()}
    groups = [
        {**group, "params": [weights[names[p]] for p in group["params"] if names[p] in weights]}
        for group in optimizer.param_groups
    ]
    same = copy.copy(optimizer)
    same.param_groups = groups
    return same


def pairs(batches: Iterable[Mapping[str, Any]], multiple: int = 1) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield (ids, labels) of each of the Trainer's batches. Padding on the right changes no label's loss.

    Args:
        batches: the batches.
        multiple: rows are padded to a multiple of this number.

    Raises:
        ConfigError: a batch has other columns, padding on the left, or labels of padding that count.
    """
    for batch in batches:
        others = [name for name in batch if name not in _COLUMNS]
        if others:
            raise ConfigError(
                f"the batch has {', '.join(others)}, but stages take {', '.join(_COLUMNS)} only: let the data "
                "collator leave the rest out, or use a grid with pipe=1"
            )
        labels, mask = batch.get("labels"), batch.get("attention_mask")
        if mask is not None and (mask.dim() != 2 or bool((mask[:, 1:] > mask[:, :-1]).any())):
            raise ConfigError(
                "the batch has padding before tokens, but pipe stages have no mask for it: pad on the right, "
                'tokenizer.padding_side = "right"'
            )
        if mask is not None and labels is not None and bool((labels[mask == 0] != -100).any()):
            raise ConfigError("labels of padding count in the loss: set them to -100, as transformers' collators do")
        ids = batch["input_ids"]
        more = [0, -ids.shape[1] % multiple]
        yield F.pad(ids, more), None if labels is None else F.pad(labels, more, value=-100)


@torch.no_grad()
def copy_weights(engine: PipelineEngine, model: nn.Module, everywhere: bool) -> None:
    """Copy the engine's weights into the transformers model in host memory, one tensor at a time. Collective.

    Args:
        engine: engine of a module that ``pipeline_module`` made.
        model: the transformers model.
        everywhere: on every rank; else on the first replica only, which saves.
    """
    grid, theirs = engine.grid, dict(model.named_parameters())
    weights = {layout_of(parameter).name: parameter for parameter in engine.module.parameters()}
    dtypes = {str(parameter.dtype): parameter.dtype for parameter in weights.values()}
    dtypes |= {str(dtype): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
    owners: dict[str, tuple[int, str]] = {}
    for rank, held in enumerate(grid.pipe.all_gather_json([(name, str(p.dtype)) for name, p in weights.items()])):
        for name, dtype in held:
            owners.setdefault(name, (rank, dtype))
    for name, (owner, dtype) in owners.items():
        own = weights[name] if owner == grid.pipe.rank else None
        # In stage 3 of ZeRO, the replicas of the owner gather the parameter together.
        with engine.gathered([own]) if own is not None and engine.data_axis.options.stage == 3 else nullcontext():
            if not (everywhere or grid.data.is_first):
                continue
            target, value = theirs[name], None
            if own is not None:
                value = layout_of(own).gather(grid.tensor, own.detach(), grid.expert).contiguous()
            else:
                value = torch.empty(target.shape, dtype=dtypes[dtype], device=grid.device)
            grid.pipe.broadcast(value, source=owner)
            target.data = value.to(target.device, copy=True)
