"""``triax train --explain``: what a run would be, without ranks, weights or torch.

Grid, schedule and its bubble, stages with their layers and parameters, bytes of each pipe rank by kind
(``plugins/plan/memory.py``), tokens of a step and of the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD

from ..base.errors import ConfigError
from ..base.formulas import STATES, optimizer_states
from ..base.tables import as_text, table
from ..data.balance import MOST
from ..pipe.program.costs import Costs
from ..pipe.program.simulate import simulate
from ..plugins.plan.layer_shapes import LayerShape
from ..plugins.plan.memory import ModelMemory, RankMemory
from ..plugins.plan.parallel_layout import ParallelLayout
from ..plugins.plan.state_memory import StateOptions
from ..train.job import Job


def explain(job: Job, processes: int | None = None) -> dict[str, Any]:
    """Return what a run would be, as plain data: the object that ``--explain --json`` prints.

    Args:
        job: the resolved file.
        processes: number of processes that the user gave.

    Raises:
        ConfigError: the grid does not fit the model.
    """
    if job.file.model.layers is not None:
        raise ConfigError("--explain knows triax's own models alone, and model.layers is a function: try --dry-run")
    layout, memory = layout_of_job(job), memory_of_job(job)
    try:
        memory.check(layout, job.sequence)
        ranks = memory.ranks(layout, job.batch.train * job.rows, job.sequence, job.schedule)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    cuts = memory.cuts(job.schedule.stages)
    stages = [
        {
            "stage": stage,
            "pipe": job.schedule.placement[stage],
            "layers": [cuts[stage], cuts[stage + 1] - 1],
            "kinds": dict(Counter(layer.name for layer in memory.layers[cuts[stage] : cuts[stage + 1]])),
            "parameters": sum(layer.parameters for layer in memory.layers[cuts[stage] : cuts[stage + 1]]),
        }
        for stage in range(job.schedule.stages)
    ]
    return {
        "name": job.file.name,
        "model": {
            "kind": type(job.model).__name__,
            "parameters": job.parameter_count,
            "layers": len(memory.layers),
        },
        "grid": dict(job.topology.sizes),
        "processes": job.topology.world_size,
        "schedule": {
            "name": job.schedule.name,
            "chunks": job.schedule.chunks,
            "microbatches": job.schedule.microbatches,
            "bubble": _bubble(job, memory, cuts, layout),
        },
        "training": {
            "batch": _sizes(job),
            "sequence": job.sequence,
            "tokens_per_step": job.tokens_per_step,
            "steps": job.steps,
            "tokens": job.steps * job.tokens_per_step,
            "precision": job.precision,
            "precision_is_default": job.precision_is_default,
            "optimizer": job.options.optimizer.type,
            "zero": layout.zero,
            "recompute": layout.recompute,
        },
        "stages": stages,
        "memory": [
            {"pipe": pipe, **{kind: round(size) for kind, size in sizes._asdict().items()}, "total": round(sizes.total)}
            for pipe, sizes in enumerate(ranks)
        ],
        "notes": list(_notes(job, processes)),
    }


def layout_of_job(job: Job) -> ParallelLayout:
    """Return the layout of a run. Its schedule and chunks are those of 1F1B: ``job.schedule`` has the run's own."""
    return ParallelLayout.of(
        *(job.options, job.topology.sizes),
        microbatch=job.batch.micro * job.rows,
        zero=job.options.zero.known_stage,
        sequence_parallel=job.file.grid.sequence_parallel,
    )


def memory_of_job(job: Job) -> ModelMemory:
    """Return the formulas for the memory of a run's model, with the options of its training.

    Raises:
        ConfigError: there are none for the run's layers.
    """
    if job.file.data.images:
        raise ConfigError("data.images takes layers whose memory is not known: train a few steps, training.steps=3")
    section = job.options.optimizer
    states = optimizer_states(section.type, section.arguments)
    options = StateOptions.of(job.options, job.precision, states, job.file.optimizer.decays)
    cut = job.file.schedule.partition if job.cut is None else job.cut.boundaries
    return ModelMemory(
        job.model,
        options=options,
        partition=cut,
        shard_tensor=bool(job.file.model.experts.shard_tensor),
        lend=job.file.model.experts.lend or 0,
    )


def text(found: dict[str, Any]) -> str:
    """Return what ``explain`` found as text for a terminal."""
    model, schedule, training = found["model"], found["schedule"], found["training"]
    grid = " x ".join(f"{axis} {size}" for axis, size in found["grid"].items() if size > 1) or "one process"
    batch = training["batch"]
    default = " (the default)" if training["precision_is_default"] else ""
    facts = {
        "grid": f"{grid}: {found['processes']} processes",
        "schedule": f"{schedule['name']}, {schedule['microbatches']} microbatches: bubble {schedule['bubble']:.1%}",
        "microbatch": f"{batch['microbatch']} x {training['sequence']:,} tokens",
        "step": f"{batch['sequences']:,} x {training['sequence']:,} = {training['tokens_per_step']:,} tokens",
        "run": f"{training['steps']:,} steps: {training['tokens']:,} tokens",
        "training": f"{training['precision']}{default}, {training['optimizer']}, ZeRO stage {training['zero']}",
        "recompute": training["recompute"],
    }
    title = f"{found['name']}: {model['kind']} with {model['parameters']:,} parameters in {model['layers']} layers"
    stages = (
        (
            stage["stage"],
            stage["pipe"],
            "{} to {}".format(*stage["layers"]),
            ", ".join(f"{count} {name}" if count > 1 else name for name, count in stage["kinds"].items()),
            f"{stage['parameters']:,}",
        )
        for stage in found["stages"]
    )
    shown = [kind for kind in (*RankMemory._fields, "total") if any(row[kind] for row in found["memory"])]
    memory = ((row["pipe"], *(f"{row[kind] / 2**30:.2f}" for kind in shown)) for row in found["memory"])
    return as_text(
        title,
        table(("", ""), facts.items(), left=2, show_header=False),
        table(("stage", "pipe rank", "layers", "", "parameters"), stages, left=0),
        "bytes of a rank, in GiB",
        # Without lines and margins it fits into 80 columns with its heads and figures whole.
        table(("pipe", *shown), memory, left=0, box=SIMPLE_HEAD, padding=0, show_edge=False),
        *(f"note: {note}" for note in found["notes"]),
    )


def _bubble(job: Job, memory: ModelMemory, cuts: Sequence[int], layout: ParallelLayout) -> float:
    """Return the bubble of the schedule, if a pass takes as long as its FLOPs say, and messages take no time."""
    forward = [
        sum(_flops(layer, job.sequence) for layer in memory.layers[cuts[stage] : cuts[stage + 1]])
        for stage in range(job.schedule.stages)
    ]
    most = max(forward)
    weights = [seconds / most for seconds in forward]
    again = weights if layout.recompute == "full" else [0.0] * len(weights)
    inputs = [a + b for a, b in zip(weights, again, strict=True)]
    return simulate(job.schedule, Costs(F=weights, I=inputs, W=weights)).bubble


def _flops(layer: LayerShape, sequence: int) -> float:
    """Return the multiplications of a forward pass of one token."""
    products = float(sum(product.inputs * product.outputs * product.times for product in layer.products))
    sizes = layer.attention
    if sizes is None:
        return products
    seen = (sequence + 1) / 2 if sizes.window is None else min(sizes.window, (sequence + 1) / 2)
    return products + seen * sizes.heads * (sizes.query_dim + sizes.value_dim)


def _notes(job: Job, processes: int | None) -> Iterable[str]:
    section, optimizer = job.options.recompute, job.options.optimizer
    if job.options.lora is not None:
        yield "lora: the states are those of the frozen weights; its factors, their gradients and states are left out"
        if job.options.lora.base is not None:
            base = job.options.lora.base
            yield f"lora.base {base}: the frozen weights are counted in the model's dtype, not in 4 or 8 bits"
    if optimizer.type.lower() not in STATES:
        yield f"{optimizer.type} is counted with the two state tensors of AdamW"
    if section.asked and (section.granularity == "matmul" or (section.interval or 1) > 1 or section.groups):
        yield "recomputation is counted as that of each layer from its input"
    if job.options.batch.balance:
        yield f"batch.balance: activations are those of the mean microbatch; one may have {MOST} times as many tokens"
    own = job.file.schedule
    if job.cut is not None:
        yield f"schedule.partition: {job.cut}"
    elif own.searched:
        yield (
            f"schedule.partition {own.partition}: the run measures the layers and then cuts; the stages here have "
            "equal numbers of parameters. With schedule.layer_costs they are those of the run"
        )
    if job.file.method is not None:
        pairs = "a pair is two sequences; " if job.rows == 2 else ""
        yield f"method {job.file.method.name}: {pairs}rows are as long as the data's longest one, at most the sequence"
        if job.file.method.name == "reward":
            yield "method reward: stages and bytes are those of the language model, with its output layer"
        if job.file.method.name in ("distill", "grpo"):
            yield f"method {job.file.method.name}: a teacher, a reference and a KV cache are left out"
    if job.file.grid.data == "auto" and processes is None and job.topology.size("data") == 1:
        yield "grid.data is auto: --processes N shows the grid of N processes"
    yield "activations, temporaries and margin are those of a GPU with fused kernels; the others are exact"


def _sizes(job: Job) -> dict[str, int]:
    batch = job.batch
    sizes = {"sequences": batch.train * job.rows, "microbatch": batch.micro * job.rows}
    return {**sizes, "microbatches": batch.accumulation}
