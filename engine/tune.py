"""``triax.tune``: options with the microbatch size, and the ZeRO stage, that fit in memory."""

from __future__ import annotations

from typing import Any, Unpack

from torch import nn

from ..options.engine import EngineOptions
from .keywords import Collate, EngineKeywords, Samples, Trained
from .pipeline_engine import PipelineEngine
from .setup.arguments import check_arguments, choose_grid, given_options
from .setup.check_names import check_names
from .setup.rank_consistency import require_same_settings
from .setup.tuning import is_searched, search_sizes


def tune(
    model: nn.Module,
    options: EngineOptions | None = None,
    *,
    parameters: Trained | None = None,
    training_data: Samples | None = None,
    collate_fn: Collate | None = None,
    **keywords: Unpack[EngineKeywords],
) -> EngineOptions:
    """Return options with numbers in place of ``batch.microbatch="auto"`` and ``zero="auto"``. Collective.

    Steps of a copy of the model are measured; the model itself, the data and random states stay as they are.

    >>> layers = [triax.LayerSpec(nn.Linear, 4, 8), torch.tanh, triax.LayerSpec(nn.Linear, 8, 1)]
    >>> model = triax.PipelineModule(layers, loss_fn=nn.functional.mse_loss)
    >>> data = torch.utils.data.TensorDataset(torch.ones(8, 4), torch.ones(8, 1))
    >>> options = triax.EngineOptions(optimizer=triax.Optimizer("Adam", lr=0.03))
    >>> batch = triax.Batch(size=8, microbatch="auto")
    >>> triax.tune(model, options, batch=batch, training_data=data).batch.microbatch
    8

    Args:
        model: a ``PipelineModule``. Of another module, ``Engine`` takes a replica's batch for the microbatch.
        options, parameters, training_data, collate_fn, keywords: as for ``Engine``. The option ``tuning`` says how to
            search, and where to write what was measured.

    Raises:
        OptionError: no size fits, or an option does not allow the search.
    """
    given = given_options(options, keywords)
    check_arguments("tune", optimizer=given.optimizer, parameters=parameters, collate_fn=collate_fn, grid=None)
    check_names(given)
    if not is_searched(model, given, training_data):
        return given
    require_same_settings(choose_grid(model, None, given), given.plain(), given.schedule.value)
    data: Any = {"parameters": parameters, "training_data": training_data, "collate_fn": collate_fn}
    return search_sizes(PipelineEngine, model, given, **data).options
