"""A model's folder, which a command runs on a grid of processes, new ones or those of a launcher.

``model_type`` in the folder's config.json names the family of the model. The installed package with the entry point of
that name, in the group ``triax.models``, makes the layers. A folder can only choose installed code: it holds none.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.entry_points import offered
from ..base.errors import ConfigError
from ..base.files import read_object
from ..base.hub import local_folder
from ..grid.environment import read_environment
from ..grid.topology import Topology

if TYPE_CHECKING:
    from ..grid.grid import Grid
    from ..pipe.module import PipelineModule

_MODELS = "triax.models"  # the group of entry points
ModelFolder = Annotated[
    str,
    typer.Argument(
        help="Folder with config.json and *.safetensors, a run's folder with model/, or an id, as Qwen/Qwen3-0.6B."
    ),
]


def on_ranks(function: Callable[[Any], None], job: Any, **sizes: int) -> None:
    """Call a function on each rank of a grid: in this process, if a launcher has started it or the grid has one rank.

    Raises:
        SystemExit: new processes have run it; with their exit code.
    """
    topology = Topology(**sizes)
    if read_environment() is not None or topology.world_size == 1:
        function(job)
        return
    from ..grid.launcher.launch import launch

    ranks, preload = topology.world_size, ("triax.inference.engine",)
    raise SystemExit(launch(function, job, ranks=ranks, topology=topology, preload=preload))


def read_model(folder: Path, grid: Grid, dtype: str | None) -> PipelineModule:
    """Return the model of a folder on a grid; ``dtype`` None: in the dtype of its weights.

    Raises:
        ValueError: the dtype is none of floating-point numbers, or the model cannot be read.
    """
    import torch

    from ..pipe.module import PipelineModule

    torch_dtype = None if dtype is None else getattr(torch, dtype, None)
    if dtype is not None and not (isinstance(torch_dtype, torch.dtype) and torch_dtype.is_floating_point):
        raise ValueError(f"--dtype is {dtype}, but it must be float32, float64, bfloat16 or float16.")
    return PipelineModule(family(folder)(folder), grid=grid, dtype=torch_dtype)


def find_model(run: str | Path) -> Path:
    """Return the folder with the model: the one given, or ``model`` in it, which a training run writes.

    Raises:
        ConfigError: neither of the two folders has a config.json; or, for an id, as ``base.hub.local_folder``.
    """
    root = local_folder(run, weights=True)
    for folder in (root, root / "model"):
        if (folder / "config.json").is_file():
            return folder
    reason = "has neither config.json nor model/config.json" if root.is_dir() else "does not exist"
    raise ConfigError(
        f"{run} {reason}. Give a folder as transformers saves it, or a run of triax train, or an id of the Hub, such "
        "as Qwen/Qwen3-0.6B."
    )


def family(folder: Path) -> Any:
    """Return the function that makes the layers of a folder's model from its path.

    Raises:
        ConfigError: no installed package has the family.
    """
    model_type = read_object(folder / "config.json").get("model_type")
    known = offered(_MODELS)
    if not isinstance(model_type, str) or model_type not in known.names:
        names = ", ".join(sorted(known.names)) or "none (install triax again with pip install -e .)"
        entry = f'[project.entry-points."{_MODELS}"] {model_type!s:.60} = "package.module:function"'
        raise ConfigError(
            f"{folder / 'config.json'} has model_type {model_type!r:.60}, but the installed ones are {names}. A "
            f"package adds one with the entry point {entry}"
        )
    return known[model_type].load()
