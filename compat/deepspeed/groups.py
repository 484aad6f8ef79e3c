"""DeepSpeed's module ``deepspeed.utils.groups``: ranks, sizes and process groups of the latest engine's grid.

Each function has a second name that begins with ``_``, as in DeepSpeed. Functions of experts take the name of the
experts' group, such as ``ep_size_4``, which must be of the size of the grid's expert axis.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

from .context import CONTEXT
from .grids import ParallelGrid
from .modules import rest_of

_AXES = (
    *("data_parallel", "model_parallel", "tensor_model_parallel", "sequence_parallel", "sequence_data_parallel"),
    *("expert_parallel", "expert_data_parallel"),
)
_ASKED = {f"get_{axis}_{what}" for axis in _AXES for what in ("group", "group_ranks", "rank", "world_size")}
# Other names: the place of the value in the grid.
_PLACES = {
    "get_broadcast_src_rank": "data_context.ranks",
    "get_tensor_model_parallel_src_rank": "tensor.ranks",
    "get_expert_broadcast_src_rank": "expert_data.ranks",
    "get_expert_parallel_src_rank": "expert.ranks",
}
_OF_EXPERTS = "get_expert"

_rest, __path__ = rest_of(__name__)


def _ask(name: str, group_name: str | None = None) -> Any:
    """Return the answer of a function of this module.

    Raises:
        RuntimeError: no grid has been made.
        ValueError: the experts' group has another size.
    """
    grid = CONTEXT.latest_grid()
    if grid is None:
        raise RuntimeError(f"groups.{name} was called before initialize, which makes the process groups: call it after")
    if name.startswith(_OF_EXPERTS) and group_name not in (None, f"ep_size_{grid.expert.size}"):
        raise ValueError(
            f"groups.{name} was asked for {group_name}, but the engine's experts are spread over {grid.expert.size} "
            f"ranks: write ep_size_{grid.expert.size}"
        )
    if name in _PLACES:
        return operator.attrgetter(_PLACES[name])(grid)[0]
    return getattr(ParallelGrid(grid), name)()


def __getattr__(name: str) -> Callable[..., Any]:
    wanted = name.removeprefix("_")
    return partial(_ask, wanted) if wanted in _ASKED or wanted in _PLACES else _rest(name)
