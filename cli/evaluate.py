"""``triax evaluate``: the metrics of a model from a folder on tasks of lm-eval, on any grid."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.option_error import refusal
from ..base.tables import table, terminal
from ..grid.environment import read_environment
from ..options.base import REQUIRED, Options, option
from .flags import with_flags
from .model_folder import ModelFolder, family, find_model, on_ranks, read_model
from .model_text import has_bytes


@dataclass(frozen=True, kw_only=True)
class EvaluateFlags(Options):
    """Flags of ``triax evaluate``. The launching process sends them to every rank."""

    tasks: str = option(
        REQUIRED, "Tasks of lm-eval, with commas between: names, groups, or paths of task files (.yaml)."
    )
    samples: int | None = option(None, "Number of samples of each task, the first ones. Default: all.", least=1)
    batch: int = option(8, "Sequences that a replica runs at once.", least=1)
    dtype: str | None = option(None, "Dtype of the computation, such as bfloat16. Default: the dtype of the weights.")
    json: bool = option(False, "Print one JSON object, metric: value.")
    confirm_run_unsafe_code: bool = option(False, "Run Python code of task files, and tasks that run answers.")
    pipe: int = option(1, "Size of the pipe axis: the number of stages.", least=1)
    data: int | None = option(
        None, "Number of replicas. Default: torchrun's processes divided by the other axes, or 1.", least=1
    )
    context: int = option(1, "Size of the context axis.", least=1)
    tensor: int = option(1, "Size of the tensor axis.", least=1)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tasks."""
        return tuple(name.strip() for name in self.tasks.split(",") if name.strip())

    @property
    def sizes(self) -> dict[str, Any]:
        """Sizes of the grid, with one replica by default."""
        return {"pipe": self.pipe, "data": self.data or 1, "context": self.context, "tensor": self.tensor}

    def check(self) -> None:
        """Check that there is a task."""
        if not self.names:
            raise refusal(
                "<tasks> is empty. Give names of tasks, such as <tasks> piqa,arc_easy, or paths of task files"
            )


@with_flags
def evaluate(run: ModelFolder, options: EvaluateFlags) -> None:
    """Evaluate a model on tasks of lm-eval, on --pipe x --data x --context x --tensor processes, new or torchrun's.

    Rank 0 downloads the data sets, into the cache of the package datasets.
    """
    folder = find_model(run)
    family(folder)  # before any process starts
    environment, replica = read_environment(), options.pipe * options.context * options.tensor
    replicas = options.data or (max(1, environment.world_size // replica) if environment else 1)
    options = options.changed(data=replicas)
    on_ranks(evaluate_on_rank, (folder, options), **options.sizes)


def evaluate_on_rank(job: tuple[Path, EvaluateFlags]) -> None:
    """Evaluate on one rank of the grid; rank 0 prints."""
    from ..engine.pipeline_engine import PipelineEngine
    from ..grid.grid import Grid
    from ..grid.launcher.launch import user_error
    from ..options.batch import Batch
    from ..options.engine import EngineOptions

    folder, options = job
    try:
        from ..compat.lm_eval import LmEvalTasks

        grid = Grid(**options.sizes)
        module = read_model(folder, grid, options.dtype)
        sizes: Any = {"size": options.batch * grid.replicas, "microbatch": options.batch}
        engine = PipelineEngine(module, EngineOptions(batch=Batch(**sizes)))
        unsafe, tokenizer = options.confirm_run_unsafe_code, "bytes" if has_bytes(folder) else str(folder)
        tasks = LmEvalTasks(engine, tokenizer, options.names, options.samples, runs_code=unsafe)
        metrics = tasks.metrics()
    except (ValueError, FileNotFoundError) as error:
        user_error(error)
    if grid.rank == 0:
        if options.json:
            print(json.dumps(metrics, indent=2), flush=True)
        else:
            rows = [
                (name, f"{value:.4f}", "higher" if tasks.names[name] else "lower") for name, value in metrics.items()
            ]
            terminal().print(table(("metric", "value", "better"), rows))
    grid.close()
