"""From the configuration to what stands in place of the plain sum of gradients, and the accounts of it."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

from ..grid import Grid, layout_of
from ..tensor_parallel.embedding import VocabParallelEmbedding
from ..zero.compression import MakeExchange
from ..zero.powersgd import PowerSGD
from ..zero.sparse_rows import SparseRows
from ..zero.topk import TopK, require_no_momentum
from .config import Config, ConfigError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag, VocabParallelEmbedding)


def communicate(config: Config) -> torch.dtype | None:
    """The dtype in which gradients are summed over replicas, if the configuration says one."""
    kind = config.gradient_compression.type
    name = config.communication_data_type or (kind if kind in DTYPES else None)
    return None if name is None else DTYPES[name]


def exchange(config: Config, module: nn.Module, grid: Grid) -> MakeExchange | None:
    """What takes the place of the plain sum, if anything does.

    Collective over the grid with ``sparse_gradients``.

    Raises:
        ConfigError: on every rank: the whole model has no embedding whose gradient is sparse.
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
            values=None if section.values is None else DTYPES[section.values],
        )
    if section.type == "powersgd":
        return PowerSGD(section.rank, section.start_step, section.min_compression, section.warm_start, config.seed)
    return None


def require_one_momentum(config: Config, optimizer: torch.optim.Optimizer | None) -> None:
    """Momentum correction is SGD's momentum: another on top of it would be a second one.

    Raises:
        ConfigError: the optimizer, which the configuration did not name, has its own.
    """
    momentum = config.gradient_compression.momentum
    if not momentum or optimizer is None:
        return
    try:
        require_no_momentum(momentum, getattr(optimizer, "_inner", optimizer))
    except ValueError as error:
        raise ConfigError(f"gradient_compression.{error}") from error


def _embeddings(module: nn.Module, grid: Grid) -> list[Tensor]:
    """The weights of embeddings that nothing else uses."""
    users: dict[Tensor, list[nn.Module]] = defaultdict(list)
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            users[parameter].append(part)
    found: dict[str, Tensor] = {}
    problems: list[str] = []
    wrong: list[str] = []
    for name, parameter in module.named_parameters():
        using, layout = users[parameter], layout_of(parameter)
        if not any(isinstance(part, _EMBEDDINGS) for part in using):
            continue
        title = layout.name or name
        if any(getattr(part, "sparse", False) for part in using):
            wrong.append(f"{title} is of an embedding with sparse=True: build it with sparse=False")
        elif layout.tie is not None or not all(isinstance(part, _EMBEDDINGS) for part in using):
            problems.append(f"{title} is tied to another layer, so that its gradient has something in every row")
        else:
            found[title] = parameter
    told = grid.world.all_gather_object((len(found), problems, wrong))
    for _, _, texts in told:
        if texts:
            raise ConfigError(f"sparse_gradients: {texts[0]}")
    if not any(count for count, *_ in told):
        why = next((text for _, texts, _ in told for text in texts), "it has no nn.Embedding")
        raise ConfigError(f"sparse_gradients: the model has no embedding of rows of its own ({why}): leave it out")
    return list(found.values())
