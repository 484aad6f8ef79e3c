"""The ``PipelineModule`` of a job, and the parameter groups of its optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..data.answers import Answers
from ..data.dataloader import make_loader
from ..data.token_data import TokenData
from ..engine.setup.measured_layers import measure_layers
from ..grid import Grid
from ..methods.answers import BASELINE, REFERENCE
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
from .job import Job, cut_by
from .schema import MethodSection

_EMBEDDINGS = (VocabParallelEmbedding, PositionEmbedding, nn.Embedding)


def build_module(job: Job, grid: Grid) -> PipelineModule:
    """Build this rank's stages: from a folder's weights, or with random ones from the seed.

    With ZeRO stage 3 the layers are built one after another when the engine is made, so that no rank holds them all.
    """
    layers = layers_of_job(job)
    if job.file.model.has_weights:
        layers = load_hf(job.file.model.folder, layers)
    cut = job.file.schedule.partition
    if job.file.schedule.searched:  # a dry run measures no layers
        cut = "parameters" if job.cut is None else job.cut.boundaries
    return PipelineModule(
        layers,
        grid=grid,
        loss_fn=loss_for(job.model, grid, job.file.method),
        partition=cut,
        chunks=job.schedule.chunks,
        placement=list(job.schedule.placement),
        seed=job.file.seed,
        dtype=_dtype(job),
        device="meta" if job.options.zero.stage == 3 else None,
    )


def layers_of_job(job: Job) -> list[Any]:
    """Return the list of layers of a run's model, with random weights."""
    section = job.file.model
    experts = section.experts.arguments
    return LAYERS[type(job.model)](job.model, job.file.grid.sequence_parallel, section.attention, **experts)


def with_cut(job: Job, grid: Grid, training: TokenData | Answers) -> Job:
    """Return a run whose cut is known. If it goes by the layers' costs, of which there is no file, measure them.

    The costs are written into the run's folder, as ``layer_costs.json``. Collective.
    """
    if not job.file.schedule.searched or job.cut is not None:
        return job
    batch = job.batch
    collate = training.collate if isinstance(training, Answers) else None
    rows = make_loader(training, batch.train, batch.micro, 0, grid.replicas, job.file.seed, collate=collate)
    inputs, labels = next(iter(rows))
    if isinstance(labels, dict):  # no time depends on the reference's numbers
        nothing = torch.zeros(len(inputs), dtype=torch.float64)
        labels |= {REFERENCE: nothing, BASELINE: nothing}
    costs = measure_layers(
        layers_of_job(job),
        (inputs, labels),
        grid=grid,
        loss_fn=loss_for(job.model, grid, job.file.method),
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
