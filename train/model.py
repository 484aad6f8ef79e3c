"""The ``PipelineModule`` of a job, and the parameter groups of its optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..grid import Grid
from ..methods.kto import kto_loss
from ..methods.preferences import preference_loss
from ..models.config import TransformerConfig
from ..models.huggingface.load import LAYERS, load_hf
from ..models.layers import NextTokenLoss
from ..models.log_probs import LogProbsLoss
from ..models.mtp import MTPLoss
from ..models.positions import PositionEmbedding
from ..pipe.module import PipelineModule
from ..tensor_parallel.embedding import VocabParallelEmbedding
from .job import Job
from .schema import MethodSection

_EMBEDDINGS = (VocabParallelEmbedding, PositionEmbedding, nn.Embedding)


def build_module(job: Job, grid: Grid) -> PipelineModule:
    """Build this rank's stages: from a folder's weights, or with random ones from the seed.

    With ZeRO stage 3 the layers are built one after another when the engine is made, so that no rank holds them all.
    """
    section = job.file.model
    experts = section.experts.arguments
    layers = LAYERS[type(job.model)](job.model, job.file.grid.sequence_parallel, section.attention, **experts)
    if section.has_weights:
        layers = load_hf(section.folder, layers)
    return PipelineModule(
        layers,
        grid=grid,
        loss_fn=loss_for(job.model, grid, job.file.method),
        chunks=job.schedule.chunks,
        placement=list(job.schedule.placement),
        seed=job.file.seed,
        dtype=torch.float64 if job.precision == "fp64" else torch.float32,
        device="meta" if job.options.zero.stage == 3 else None,
    )


def loss_for(
    model: TransformerConfig, grid: Grid, method: MethodSection | None = None
) -> NextTokenLoss | MTPLoss | LogProbsLoss:
    """Return the loss of a method, or of the next token and of those after it that the model predicts too."""
    if method is None and (modules := getattr(model, "num_nextn_predict_layers", 0)):
        return MTPLoss(grid, model.vocab_size, modules)
    if method is None or method.name == "sft":
        return NextTokenLoss(grid, model.vocab_size)
    if method.name == "kto":
        weights = method.desirable_weight, method.undesirable_weight
        return kto_loss(grid, model.vocab_size, method.strength, *weights)
    return preference_loss(grid, model.vocab_size, method.name, method.strength, method.margin)


def parameter_groups(job: Job, module: PipelineModule) -> list[dict[str, Any]] | None:
    """Return the optimizer's groups: weights that decay, then norms, biases and embeddings, which do not.

    None stands for one group: with ``decays: all``, and with LoRA, which alone is trained.
    """
    if job.file.training.optimizer.decays == "all" or job.options.lora is not None:
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
