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
from torch import Tensor, nn

from ...base.errors import ConfigError
from ...engine.pipeline_engine import PipelineEngine
from ...grid import Grid, layout_of
from ...grid.layout import rename
from ...models.huggingface.config import layer_count
from ...models.huggingface.names import expand
from ...models.huggingface.pipeline_layers import CausalLMLoss, HFModel, hf_layers
from ...pipe.chunked_loss import LastLayer
from ...pipe.module import PipelineModule
from ...pipe.program.simulate import Costs
from ...pipe.schedules.choose import make_schedule
from ..deepspeed.config.schema import Config

_COLUMNS = ("input_ids", "labels", "attention_mask")  # of a batch
_METHODS = ("compute_loss", "prediction_step", "training_step")  # they run the whole model
# Modules of classes whose methods the pipeline replaces: they compute the loss of a causal language model.
_REPLACED_IN = ("transformers.trainer", f"{__name__.rpartition('.')[0]}.trainer", "trl.trainer.sft_trainer")
_USE_ONE_STAGE = "leave it out, or use a grid with pipe=1"


def check_arguments(args: Any, stages: int, tensor: int) -> None:
    """Check that a pipeline of this many stages supports the values of ``TrainingArguments``.

    Raises:
        ConfigError: it does not; the message names the argument.
    """
    if tensor > 1:
        raise ConfigError(
            f"tensor={tensor} is not supported with pipe={stages}, because the Trainer's stages are made of "
            "transformers' own blocks (hf_layers), which are not sharded over tensor ranks: set one of the two to 1. "
            "For both, pass the layers of triax.load_hf(path) to triax.PipelineModule, and the model to "
            "triax.initialize, as docs/huggingface.md shows"
        )
    packed = args.packing and args.packing_strategy != "wrapped" if hasattr(args, "packing") else False
    refused = {
        "neftune_noise_alpha": (args.neftune_noise_alpha is not None, "its hook is on the unsplit model's embedding"),
        "label_smoothing_factor": (args.label_smoothing_factor, "the last stage computes the loss without smoothing"),
        "use_liger_kernel": (args.use_liger_kernel, "its loss needs the hidden states and the head on one rank"),
        "debug": (args.debug, "its hooks are on the unsplit model"),
        "activation_checkpointing_kwargs": (
            # The first name is that of transformers 5.23 and newer.
            getattr(args, "activation_checkpointing_kwargs", None) or args.gradient_checkpointing_kwargs,
            "the section activation_checkpointing of the configuration says how stages recompute",
        ),
        "average_tokens_across_devices=False": (
            not args.average_tokens_across_devices,
            "the loss is divided by the labels of all replicas",
        ),
        "packing": (packed, "packed rows have positions of several documents, and a stage numbers a row's tokens"),
        "padding_free": (getattr(args, "padding_free", False), "rows of several documents are not supported"),
        "activation_offloading": (getattr(args, "activation_offloading", False), "a stage keeps its activations"),
        "loss_type": (getattr(args, "loss_type", "nll") not in ("nll", "chunked_nll"), "the loss is cross-entropy"),
    }
    for name, (given, reason) in refused.items():
        if given:
            raise ConfigError(f"{name} is not supported with pipe={stages}, because {reason}: {_USE_ONE_STAGE}")


def check_trainer(trainer: Any, stages: int) -> None:
    """Check that a Trainer's model, loss and methods can run over pipe stages.

    Raises:
        ConfigError: they cannot; the message says why.
    """
    for method in _METHODS:
        owner = next(cls for cls in type(trainer).__mro__ if method in vars(cls))
        if owner.__module__ not in _REPLACED_IN:
            raise ConfigError(
                f"{owner.__name__}.{method} runs the whole model, but with pipe={stages} a rank has only its stage: "
                "remove the method, or use a grid with pipe=1"
            )
    if trainer.compute_loss_func is not None:
        raise ConfigError(f"compute_loss_func is not supported with pipe={stages}: {_USE_ONE_STAGE}")
    model = trainer.model
    if hasattr(model, "peft_config"):
        raise ConfigError(
            f"the model is a {type(model).__name__} of PEFT, whose adapters are not layers of hf_layers, so it cannot "
            f"run with pipe={stages}: use a grid with pipe=1"
        )
    try:
        wanted = HFModel(model.config).architecture
    except (AttributeError, ValueError) as error:
        raise ConfigError(f"the model cannot be cut into pipe={stages} stages: {error}") from error
    if type(model).__name__ != wanted:
        raise ConfigError(
            f"the model is a {type(model).__name__}, but with pipe={stages} a model of its family must be a {wanted}: "
            "use that class, or a grid with pipe=1"
        )


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
        """Return the number of labels, ()."""
        return torch.count_nonzero(labels != self.ignore_index) if self.counts_first else super().weight(labels)


def pipeline_module(
    model: Any, grid: Grid, config: Config, microbatches: int, counts_first: bool = False
) -> PipelineModule:
    """Return a transformers model as a ``PipelineModule`` whose parameters have transformers' names. Collective.

    Args:
        model: the model, with weights, in host memory. It stays as it is.
        grid: a grid with a pipe axis.
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
    # On the schedule's ranks from the beginning: the engine builds a stage that it moves again, under other names.
    module = PipelineModule(
        hf_layers(model),
        grid=grid,
        loss_fn=TrainerLoss(counts_first=counts_first),
        chunks=schedule.chunks,
        placement=list(schedule.placement),
        seed=config.seed,
    )
    names = expand(HFModel(model.config).names(), layer_count(model.config.to_dict()))
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for local in module.local_parameters():
        (name,) = names[local.layout.name].theirs
        rename(local.parameter, name, local.layout.tie)
        local.parameter.requires_grad_(trained[name])
    return module


def optimizer_of(optimizer: torch.optim.Optimizer, model: nn.Module, module: PipelineModule) -> torch.optim.Optimizer:
    """Return an optimizer like the given one, over this rank's parameters of the pipeline in place of the model's."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    mine = {layout_of(parameter).name: parameter for parameter in module.parameters()}
    groups = [
        {**group, "params": [mine[names[p]] for p in group["params"] if names[p] in mine]}
        for group in optimizer.param_groups
    ]
    same = copy.copy(optimizer)
    same.param_groups = groups
    return same


def pairs(batches: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield (ids, labels) of each of the Trainer's batches. Padding on the right changes no label's loss.

    Raises:
        ConfigError: a batch has other columns, padding on the left, or labels of padding that count.
    """
    for batch in batches:
        others = [name for name in batch if name not in _COLUMNS]
        if others:
            raise ConfigError(
                f"the batch has {', '.join(others)}, but pipe stages take {', '.join(_COLUMNS)} only: let the data "
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
        yield batch["input_ids"], labels


@torch.no_grad()
def copy_weights(engine: PipelineEngine, model: nn.Module, everywhere: bool) -> None:
    """Copy the engine's weights into the transformers model in host memory, one tensor at a time. Collective.

    Args:
        engine: engine of a module that ``pipeline_module`` made.
        model: the transformers model.
        everywhere: on every rank; else on the first replica only, which saves.
    """
    grid, theirs = engine.grid, dict(model.named_parameters())
    mine = {layout_of(parameter).name: parameter for parameter in engine.module.parameters()}
    dtypes = {str(parameter.dtype): parameter.dtype for parameter in mine.values()}
    dtypes |= {str(dtype): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
    owners: dict[str, tuple[int, str]] = {}
    for rank, held in enumerate(grid.pipe.all_gather_json([(name, str(p.dtype)) for name, p in mine.items()])):
        for name, dtype in held:
            owners.setdefault(name, (rank, dtype))
    for name, (owner, dtype) in owners.items():
        own = mine[name] if owner == grid.pipe.rank else None
        # In stage 3 of ZeRO, the replicas of the owner gather the parameter together.
        with engine.gathered([own]) if own is not None and engine.data_axis.options.stage == 3 else nullcontext():
            if not (everywhere or grid.data.is_first):
                continue
            target = theirs[name]
            value = own.detach().contiguous() if own is not None else None
            if value is None:
                value = torch.empty(target.shape, dtype=dtypes[dtype], device=grid.device)
            grid.pipe.broadcast(value, source=owner)
            target.data = value.to(target.device, copy=True)
