"""``triax evaluate``: the metrics of a model from a folder on tasks of lm-eval, on any grid."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..base.errors import ConfigError
from ..base.files import read_object
from ..base.tables import table, terminal
from ..grid.environment import read_environment
from ..grid.launcher.launch import launch, user_error
from ..grid.topology import Topology
from .generate import family, find_model


@dataclass(frozen=True)
class EvaluateOptions:
    """Options of ``triax evaluate``. The launching process sends them to every rank."""

    folder: Path
    tasks: tuple[str, ...]
    samples: int | None
    batch: int
    dtype: str | None
    as_json: bool
    runs_code: bool
    sizes: dict[str, Any]


def evaluate(
    run: Annotated[
        str,
        typer.Argument(
            help="Folder with config.json and *.safetensors, a run's folder with model/, or an id, as Qwen/Qwen3-0.6B."
        ),
    ],
    tasks: Annotated[
        str, typer.Option(help="Tasks of lm-eval, with commas between: names, groups, or paths of task files (.yaml).")
    ],
    samples: Annotated[
        int | None, typer.Option(min=1, help="Number of samples of each task, the first ones. Default: all.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that a replica runs at once.")] = 8,
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of the computation, such as bfloat16. Default: the dtype of the weights.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, metric: value.")] = False,
    confirm_run_unsafe_code: Annotated[
        bool,
        typer.Option("--confirm-run-unsafe-code", help="Run Python code of task files, and tasks that run answers."),
    ] = False,
    pipe: Annotated[int, typer.Option(min=1, help="Size of the pipe axis: the number of stages.")] = 1,
    data: Annotated[
        int | None,
        typer.Option(min=1, help="Number of replicas. Default: torchrun's processes divided by the other axes, or 1."),
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Size of the context axis.")] = 1,
    tensor: Annotated[int, typer.Option(min=1, help="Size of the tensor axis.")] = 1,
) -> None:
    """Evaluate a model on tasks of lm-eval, on --pipe x --data x --context x --tensor processes, new or torchrun's.

    Rank 0 downloads the data sets, into the cache of the package datasets.
    """
    folder = find_model(run)
    family(folder)  # before any process starts
    environment = read_environment()
    replica = pipe * context * tensor
    replicas = data or (max(1, environment.world_size // replica) if environment else 1)
    sizes = {"pipe": pipe, "data": replicas, "context": context, "tensor": tensor}
    names = tuple(name.strip() for name in tasks.split(",") if name.strip())
    if not names:
        raise ConfigError(
            "--tasks is empty. Give names of tasks, such as --tasks piqa,arc_easy, or paths of task files."
        )
    options = EvaluateOptions(folder, names, samples, batch, dtype, as_json, confirm_run_unsafe_code, sizes)
    if environment is not None or replica * replicas == 1:
        evaluate_on_rank(options)
        return
    raise SystemExit(
        launch(
            evaluate_on_rank,
            options,
            ranks=replica * replicas,
            topology=Topology(**sizes),
            preload=("triax.inference.engine",),
        )
    )


def evaluate_on_rank(options: EvaluateOptions) -> None:
    """Evaluate on one rank of the grid; rank 0 prints."""
    import torch

    from ..engine.pipeline_engine import PipelineEngine
    from ..grid.grid import Grid
    from ..options.batch import Batch
    from ..options.engine import EngineOptions
    from ..pipe.module import PipelineModule

    try:
        from ..compat.lm_eval import LmEvalTasks

        grid = Grid(**options.sizes)
        dtype = None if options.dtype is None else getattr(torch, options.dtype, None)
        if options.dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"--dtype is {options.dtype}, but it must be float32, float64, bfloat16 or float16.")
        module = PipelineModule(family(options.folder)(options.folder), grid=grid, dtype=dtype)
        sizes: Any = {"size": options.batch * grid.replicas, "microbatch": options.batch}
        engine = PipelineEngine(module, EngineOptions(batch=Batch(**sizes)))
        found = LmEvalTasks(
            engine, _tokenizer(options.folder), options.tasks, options.samples, runs_code=options.runs_code
        )
        metrics = found.metrics()
    except (ValueError, FileNotFoundError) as error:
        user_error(error)
    if grid.rank == 0:
        if options.as_json:
            print(json.dumps(metrics, indent=2), flush=True)
        else:
            rows = [
                (name, f"{value:.4f}", "higher" if found.names[name] else "lower") for name, value in metrics.items()
            ]
            terminal().print(table(("metric", "value", "better"), rows))
    grid.close()


def _tokenizer(folder: Path) -> str:
    """Return the name of the tokenizer in a model's folder: the folder, or ``bytes`` for a vocabulary of 256."""
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        return str(folder)
    if read_object(folder / "config.json").get("vocab_size") == 256:
        return "bytes"
    raise ConfigError(f"{folder} has no tokenizer.json. Copy the model's tokenizer files there.")
