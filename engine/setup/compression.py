"""The compressor that replaces the plain sum of gradients over replicas, from ``options.compression``."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from ...base.dtypes import dtype_of
from ...base.errors import no_such
from ...base.option_error import OptionError, refusal
from ...grid import Grid, layout_of
from ...options.engine import EngineOptions
from ...options.named import GradientCompression
from ...tensor_parallel.embedding import VocabParallelEmbedding
from ...zero.compression.powersgd import PowerSGD
from ...zero.compression.sparse_rows import SparseRows
from ...zero.compression.topk import TopK, require_no_momentum
from ...zero.protocols import MakeExchange

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag, VocabParallelEmbedding)


def make_exchange(options: EngineOptions, module: nn.Module, grid: Grid) -> MakeExchange | None:
    """Return the compressor that replaces the plain sum of gradients, or None if there is none.

    Collective over the grid for ``sparse_rows``.

    Raises:
        OptionError: on every rank, if ``compression`` is no compressor, or if it is ``sparse_rows`` and the model has
            no embedding with sparse gradients.
    """
    made = made_compression(options.compression, options.seed)
    if made == "sparse_rows":
        return SparseRows(_embeddings(module, grid))
    exchange: MakeExchange | None = made
    return exchange


def made_compression(given: Any, seed: int) -> Any:
    """Return the compressor of a name and its arguments; ``"sparse_rows"`` for the one that needs the model.

    Raises:
        OptionError: there is no such compressor or argument, or a value is out of range.
    """
    if given is None or not isinstance(given, GradientCompression):
        if given is not None and not callable(given):
            raise OptionError("compression", given, "give TopK(...) or PowerSGD(...) of triax.zero, or a name")
        return given
    kinds: dict[str, Any] = {"topk": TopK, "powersgd": PowerSGD, "sparse_rows": None}
    if given.type not in kinds:
        raise refusal(no_such("<compression>", given.type, kinds))
    kind, arguments = kinds[given.type], dict(given.arguments)
    known = [] if kind is None else [each.name for each in fields(kind) if each.name != "seed"]
    for name in arguments:
        if name not in known:
            raise refusal(no_such(f"<compression> {given.type}", name, known))
    if kind is None:
        return given.type
    if "values" in arguments:
        arguments["values"] = dtype_of(arguments["values"])
    try:
        return kind(**arguments, **({"seed": seed} if kind is PowerSGD else {}))
    except ValueError as error:
        raise OptionError("compression", reason=str(error)) from error


def require_one_momentum(compression: Any, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse an optimizer with momentum if top-k compression already applies momentum (momentum correction).

    Raises:
        OptionError: if the optimizer is not SGD, or if it has momentum.
    """
    made = made_compression(compression, 0)
    momentum = made.momentum if isinstance(made, TopK) else 0.0
    if not momentum or optimizer is None:
        return
    try:
        require_no_momentum(momentum, getattr(optimizer, "inner", optimizer))
    except ValueError as error:
        raise refusal(f"<compression.momentum>{str(error).removeprefix('momentum')}") from error


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
        raise refusal(
            f"<compression> sparse_rows has no effect: the model has no embedding with a sparse gradient ({why}). "
            "Leave it out",
        )
    return list(found.values())
