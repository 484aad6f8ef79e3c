"""Files of a layout that ``triax plan`` has found: a training file, and a Slurm script that runs it."""

from __future__ import annotations

import copy
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..plugins.plan.parallel_layout import ParallelLayout
    from ..plugins.plan.work import Work
    from ..train.file import ReadFile

_WRITTEN = "# written by triax plan"  # first line of its training files, which it may write again


def write_training_file(
    path: Path, model: str, source: ReadFile | None, work: Work, layout: ParallelLayout, note: str
) -> None:
    """Write a training file of a layout; other keys are those of the training file that was given."""
    import yaml

    from ..plugins.plan.cost import CostModel
    from ..plugins.plan.parallel_layout import RECOMPUTATION

    if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(_WRITTEN):
        raise ValueError(f"--output is {path}, which exists and is not a file of triax plan. Give another name.")
    if layout.recompute not in RECOMPUTATION or work.products:
        raise ValueError(
            f"The plan has recompute={layout.recompute} and --products {work.products}, which triax train cannot run. "
            "Leave them out with --output."
        )
    content: dict[str, Any] = {} if source is None else copy.deepcopy(source.values)
    if source is None:
        shape: dict[str, Any] = {"preset": model}
        if Path(model).is_dir():  # of a folder without weights only the shape can be trained
            shape = {"folder": model, "weights": any(Path(model).glob("*.safetensors"))}
        if model.endswith(".json"):
            raise ValueError("--output needs a model that triax train can build. Give a preset or a folder.")
        content = {"model": shape, "data": {"training": "tokens"}, "training": {"steps": 1000}}
    sizes = ("pipe", "data", "context", "tensor", "expert")
    content["grid"] = {name: getattr(layout, name) for name in sizes}
    content["grid"]["sequence_parallel"] = bool(layout.sequence_parallel)
    costs = CostModel(work)
    section = costs.schedule_options(layout).plain(given=True)
    content["schedule"] = {"name": layout.schedule, "chunks": layout.chunks, **section}
    if work.speeds:  # a cut that no run makes by itself
        content["schedule"]["partition"] = costs.memory.cuts(layout.pipe)
    zero: dict[str, Any] = {"stage": layout.zero}
    if layout.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if layout.shard_size is not None:
        zero["shard_size"] = layout.shard_size
    content |= {
        "training": {**content.get("training", {}), "sequence": work.sequence},
        "batch": {"size": work.batch, "microbatch": layout.microbatch},
        "precision": work.precision,
        "recompute": layout.recompute,
        "zero": zero if len(zero) > 1 else layout.zero,
    }
    path.write_text(f"{_WRITTEN}\n# {note}\n" + yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def write_sbatch(path: Path, training: Path, gpus: int, node: int = 8) -> int:
    """Write a Slurm script that runs a training file, and return its number of nodes."""
    per_node = min(gpus, node)
    if gpus % per_node:
        raise ValueError(f"--sbatch uses nodes of {node} GPUs, but {gpus} GPUs are not a whole number of nodes.")
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={training.stem}",
        f"#SBATCH --nodes={gpus // per_node}",
        f"#SBATCH --ntasks-per-node={per_node}",
        f"#SBATCH --gpus-per-node={per_node}",
        "#SBATCH --time=24:00:00",
        "#SBATCH --signal=USR1@300",
        "#SBATCH --requeue",
        "#SBATCH --output=%x-%j.log",
        "",
        "# SIGUSR1 comes 300 s before the time limit: the run saves a checkpoint and puts the job back into the queue.",
        f"srun --cpu-bind=cores triax train {shlex.quote(str(training))}",
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return gpus // per_node
