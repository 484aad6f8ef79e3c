"""The sum of gradients over replicas: its dtype, and the compressor that replaces the plain sum."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

from ...config.schema import Config
from ...grid import Grid, layout_of
from ...grid.dtypes import dtype_of
from ...grid.errors import ConfigError
from ...tensor_parallel.embedding import VocabParallelEmbedding
from ...zero.compression.powersgd import PowerSGD
from ...zero.compression.sparse_rows import SparseRows
from ...zero.compression.topk import TopK, require_no_momentum
from ...zero.protocols import MakeExchange

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag, VocabParallelEmbedding)


def communication_dtype(config: Config) -> torch.dtype | None:
    """Return the dtype in which gradients are summed over replicas. None if they are summed in their own dtype."""
    kind = config.gradient_compression.type
    return dtype_of(config.communication_data_type or (kind if kind in ("fp16", "bf16") else None))


def make_exchange(config: Config, module: nn.Module, grid: Grid) -> MakeExchange | None:
    """Return the compressor that replaces the plain sum of gradients, or None if the configuration has none.

    Collective over the grid if ``sparse_gradients`` is set.

    Raises:
        ConfigError: on every rank, if ``sparse_gradients`` is set and the model has no embedding with sparse gradients.
    """
    section = config.gradient_compression
    if config.sparse_gradients:
        return SparseRows(_embeddings(module, grid))
    if section.type == "topk":
        return TopK(
            ratio=section.ratio,
            momentum=section.momentum,
            clip=section.clip,
            warmup_steps=section.warmup_steps,
            start_step=section.start_step,
            values=dtype_of(section.values),
        )
    if section.type == "powersgd":
        return PowerSGD(section.rank, section.start_step, section.min_compression, section.warm_start, config.seed)
    return None


def require_one_momentum(config: Config, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse an optimizer with momentum if top-k compression already applies momentum (momentum correction).

    Raises:
        ConfigError: if the optimizer is not SGD, or if it has momentum.
    """
    momentum = config.gradient_compression.momentum
    if not momentum or optimizer is None:
        return
    try:
        require_no_momentum(momentum, getattr(optimizer, "inner", optimizer))
    except ValueError as error:
        raise ConfigError(f"gradient_compression.{error}") from error


def _embeddings(module: nn.Module, grid: Grid) -> list[Tensor]:
    """Return the weights of embeddings that no other layer uses. Collective over the grid."""
    users: dict[Tensor, list[nn.Module]] = defaultdict(list)
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            users[parameter].append(part)
    found: dict[str, Tensor] = {}
    problems: list[str] = []
    for name, parameter in module.named_parameters():
        using, layout = users[parameter], layout_of(parameter)
        if not any(isinstance(part, _EMBEDDINGS) for part in using):
            continue
        title = layout.name or name
        if layout.tie is not None or not all(isinstance(part, _EMBEDDINGS) for part in using):
            problems.append(f"{title} is tied to another layer, so that no row of its gradient is zero")
        else:
            found[title] = parameter
    told = grid.world.all_gather_json((len(found), problems))
    if not any(count for count, _ in told):
        why = next((text for _, texts in told for text in texts), "it has no nn.Embedding")
        raise ConfigError(
            f"sparse_gradients has no effect, because the model has no embedding with a sparse gradient ({why}): leave "
            "it out"
        )
    return list(found.values())
