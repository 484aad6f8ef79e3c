"""The ``PipelineModule`` of a job, and the parameter groups of its optimizer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..data.answers import Answers
from ..data.dataloader import make_loader
from ..data.image_answers import ImageAnswers
from ..data.prompts import Prompts
from ..data.token_data import TokenData
from ..engine.pipeline_engine import PipelineEngine
from ..engine.setup.measured_layers import measure_layers
from ..grid import Grid
from ..models.config import TransformerConfig
from ..models.huggingface.load import load_hf
from ..models.huggingface.pipeline_layers import CausalLMLoss, hf_layers
from ..models.layers import NextTokenLoss
from ..models.log_probs import LogProbsLoss
from ..models.mtp import MTPLoss
from ..models.positions import PositionEmbedding
from ..models.reward import reward_layers
from ..options.engine import EngineOptions
from ..pipe.module import PipelineModule
from ..tensor_parallel.embedding import VocabParallelEmbedding
from .job import Job, cut_by
from .methods.answer_losses import BASELINE, REFERENCE
from .methods.distillation import IDS, TEACHER, distill_loss
from .methods.grpo import ADVANTAGES, OLD, TOKEN_REFERENCE, grpo_loss
from .methods.kto import kto_loss
from .methods.preferences import preference_loss
from .methods.reward import reward_loss
from .model_choice import hf_config, layers_function, model_config
from .sections import MethodSection, ModelSection

_EMBEDDINGS = (VocabParallelEmbedding, PositionEmbedding, nn.Embedding)


def build_module(job: Job, grid: Grid) -> PipelineModule:
    """Build this rank's stages: from a folder's weights, or with random ones from the seed.

    With ZeRO stage 3 the layers are built one after another when the engine is made, so that no rank holds them all.
    """
    layers = layers_of_job(job)
    is_reward_model = job.file.method is not None and job.file.method.name == "reward"
    has_head = is_reward_model and job.starts_with_score
    if has_head:
        layers = reward_layers(layers)
    if job.file.model.has_weights and not job.file.data.images:  # hf_layers has read them
        layers = load_hf(job.file.model.folder, layers)
    if is_reward_model and not has_head:
        layers = reward_layers(layers)
    cut = job.file.schedule.partition
    if job.file.schedule.searched:  # a dry run measures no layers
        cut = "parameters" if job.cut is None else job.cut.boundaries
    return PipelineModule(
        layers,
        grid=grid,
        loss_fn=_loss_of_job(job, grid),
        partition=cut,
        chunks=job.schedule.chunks,
        placement=list(job.schedule.placement),
        seed=job.file.seed,
        dtype=_dtype(job),
        device="meta" if job.options.zero.stage == 3 else None,
    )


def frozen_engine(job: Job, grid: Grid, folder: str | None) -> PipelineEngine:
    """Build the engine of a second model without an optimizer: a teacher, or a reference.

    Its weights are whole on each replica, ZeRO or not.

    Args:
        job: the run, whose loss it gets.
        grid: the run's grid.
        folder: the model's folder, or id on the Hub; None: the model that the run starts from.
    """
    file = job.file
    if folder is not None:
        file = file.changed(model=ModelSection(folder=folder))
        job = replace(job, model=model_config(file.model))
    layers = layers_of_job(replace(job, file=file))
    if file.model.has_weights:
        layers = load_hf(file.model.folder, layers)
    loss_fn = loss_for(job.model, grid, file.method)
    module = PipelineModule(layers, grid=grid, loss_fn=loss_fn, seed=file.seed, dtype=_dtype(job))
    half: Any = job.precision if job.precision in ("bf16", "fp16") else None
    return PipelineEngine(module, EngineOptions(batch=job.options.batch, precision=half))


def layers_of_job(job: Job) -> list[Any]:
    """Return the list of layers of a run's language model, with random weights; with images, of its whole model."""
    section = job.file.model
    if job.file.data.images:
        return hf_layers(section.folder if section.has_weights else hf_config(section))
    if section.layers is not None:
        return list(layers_function(section)(job.model))
    options = {"sequence_parallel": job.file.grid.sequence_parallel, "attention": section.attention}
    return job.model.layers(**options, **section.experts.arguments)


def blank_microbatch(job: Job, length: int) -> tuple[Tensor, Any]:
    """Return a microbatch of zeros of a run with a method, with all that its loss needs: rows of ``length`` tokens."""
    method, model = job.file.method, job.model
    assert method is not None
    tokens = torch.zeros(job.batch.micro * job.rows, length, dtype=torch.int64)
    rows = torch.zeros(len(tokens), dtype=torch.float64)
    if method.name == "sft":
        return tokens, tokens
    if method.form == "scored":
        return tokens, {"lengths": torch.full((len(tokens),), length)}
    labels: dict[str, Tensor] = {"labels": tokens}
    if method.name == "distill":
        count = method.top_k or (1 if method.is_stored else model.vocab_size)
        labels[TEACHER] = torch.full((*tokens.shape, count), -math.log(model.vocab_size), dtype=_dtype(job))
        if count < model.vocab_size:
            labels[IDS] = torch.arange(count).expand(*tokens.shape, count)
    elif method.name == "grpo":
        known = torch.full(tokens.shape, -math.log(model.vocab_size), dtype=torch.float64)
        labels |= {OLD: known, ADVANTAGES: rows, TOKEN_REFERENCE: known}
    else:
        labels |= {REFERENCE: rows, BASELINE: rows, "desirable": rows == 0}
    return tokens, labels


def with_cut(job: Job, grid: Grid, training: TokenData | Answers | Prompts) -> Job:
    """Return a run whose cut is known. If it goes by the layers' costs, of which there is no file, measure them.

    The costs are written into the run's folder, as ``layer_costs.json``. Collective.
    """
    if not job.file.schedule.searched or job.cut is not None:
        return job
    batch = job.batch
    if isinstance(training, TokenData):
        rows = make_loader(training, batch.train, batch.micro, 0, grid.replicas, job.file.seed)
        microbatch = next(iter(rows))
    elif isinstance(training, ImageAnswers):
        microbatch = training.collate(training.numbers[: batch.micro])
    else:  # no time depends on the values
        microbatch = blank_microbatch(job, job.sequence if isinstance(training, Prompts) else training.length)
    layers = layers_of_job(job)
    if job.file.method is not None and job.file.method.name == "reward":
        layers = reward_layers(layers)
    costs = measure_layers(
        layers,
        microbatch,
        grid=grid,
        loss_fn=_loss_of_job(job, grid),
        options=job.options,
        dtype=_dtype(job),
        seed=job.file.seed,
    )
    if grid.rank == 0:
        job.folder.mkdir(parents=True, exist_ok=True)
        (job.folder / "layer_costs.json").write_text(costs.to_json(), encoding="utf-8")
    return cut_by(costs, job)


def _dtype(job: Job) -> torch.dtype:
    return torch.float64 if job.precision == "fp64" else torch.float32


def _loss_of_job(job: Job, grid: Grid) -> Any:
    """Return the loss of a run, of whose images the layers are transformers'."""
    return CausalLMLoss(grid=grid) if job.file.data.images else loss_for(job.model, grid, job.file.method)


def loss_for(model: TransformerConfig, grid: Grid, method: MethodSection | None = None) -> Any:
    """Return the loss of a method, or of the next token and of those after it that the model predicts too."""
    if method is None and (modules := getattr(model, "num_nextn_predict_layers", 0)):
        return MTPLoss(grid, model.vocab_size, modules)
    if method is None or method.name == "sft":
        return NextTokenLoss(grid, model.vocab_size)
    if method.name == "kto":
        weights = method.desirable_weight, method.undesirable_weight
        return kto_loss(grid, model.vocab_size, method.strength, *weights)
    if method.name == "reward":
        return reward_loss(grid, method.center)
    if method.name == "distill":
        kind: Any = method.loss_kind
        return distill_loss(grid, model.vocab_size, kind, method.beta, method.temperature, method.hard)
    if method.name == "grpo":
        return _grpo_loss(model, grid, method)
    return preference_loss(grid, model.vocab_size, method.name, method.strength, method.margin)


def _grpo_loss(model: TransformerConfig, grid: Grid, method: MethodSection) -> LogProbsLoss:
    kind: Any = method.loss_kind
    return grpo_loss(
        grid,
        model.vocab_size,
        kind,
        method.beta or 0.0,
        method.clip,
        method.clip_high,
        method.level,
        correct_kl=method.correct_kl,
        max_new_tokens=method.max_new_tokens if kind == "dr_grpo" else None,
        temperature=method.temperature,
    )


def parameter_groups(job: Job, module: PipelineModule) -> list[dict[str, Any]] | None:
    """Return the optimizer's groups: weights that decay, then norms, biases and embeddings, which do not.

    None stands for one group: with ``decays: all``, and with LoRA, which alone is trained.
    """
    if job.file.optimizer.decays == "all" or job.options.lora is not None:
        return None
    spared: set[nn.Parameter] = set()
    for part in module.modules():
        whole = isinstance(part, _EMBEDDINGS) or "Norm" in type(part).__name__
        for name, parameter in part.named_parameters(recurse=False):
            if whole or parameter.dim() < 2 or name.endswith("bias"):
                spared.add(parameter)
    decaying = [parameter for parameter in module.parameters() if parameter not in spared]
    others = [parameter for parameter in module.parameters() if parameter in spared]
    return [{"params": decaying}, {"params": others, "weight_decay": 0.0}]
