"""Text of a run: what it prints before its first step and after its last one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..engine.monitor.format import numbers_in_words
from .job import Job
from .lowest import LowestLoss
from .progress import minutes


@dataclass(frozen=True)
class Criterion:
    """Number by which evaluations are compared, in words.

    Args:
        metric: ``evaluate.metric``.
        rewards: the evaluation's loss is a negative reward.
    """

    metric: str
    rewards: bool

    @property
    def better(self) -> str:
        """Name of what an evaluation without progress does not find."""
        if self.metric != "loss":
            return f"better {self.metric}"
        return "higher held-out reward" if self.rewards else "lower held-out loss"

    def best(self, value: float) -> str:
        """Return the best number with its name."""
        if self.metric != "loss":
            return f"best    {self.metric} {value:.4f}"
        return f"highest {-value:.4f}" if self.rewards else f"lowest  {value:.4f}"


def introduction(job: Job, data: str) -> Iterator[str]:
    """Yield the lines that say what a run is made of.

    Args:
        job: the run.
        data: what its data are.
    """
    yield f"data    {data}"
    own = job.file.model.folder if job.file.data.images else job.file.model.layers
    if own is not None:
        yield f"model   {job.layers} layers of {own}"
    else:
        size, model = f"{job.parameter_count / 1e6:.2f} M parameters", job.model
        yield f"model   {size}: {model.num_hidden_layers} blocks, width {model.hidden_size}"
    axes = " x ".join(f"{size} {axis}" for axis, size in job.topology.axes.items())
    expert = f", experts over {job.topology.expert}" if job.topology.expert > 1 else ""
    yield (
        f"grid    {axes}{expert}; ZeRO {job.options.zero.stage}; {job.schedule.name} with {job.batch.accumulation} "
        f"microbatches of {job.batch.micro}"
    )
    default = " (the default): precision=bf16 is faster on GPUs" if job.precision_is_default else ""
    yield f"dtype   {job.precision}{default}"
    if job.cut is not None:
        yield f"cut     {job.cut}"
    rate = job.learning_rate
    if rate is not None and rate.warmup > job.steps:
        yield f"note    the warmup of {rate.warmup} steps is longer than the run of {job.steps}"


def nothing_left(job: Job, step: int) -> str:
    """Return the line of a run whose checkpoint is of its last step."""
    more = "more steps" if step >= job.steps else "a larger evaluate.patience"
    return (
        f"the checkpoint in {job.checkpoints} is of step {step} of {job.steps}: give {more}, another name, or "
        "checkpoint.resume=never"
    )


def trained(job: Job, before: int, step: int, seconds: float, lowest: LowestLoss, criterion: Criterion) -> str:
    """Return the line that says which steps were taken, and why they were the last.

    Args:
        job: the run.
        before: steps that the run had taken when it was resumed.
        step: steps that it has taken now.
        seconds: time since it began or was resumed.
        lowest: the best evaluation.
        criterion: what the evaluations compare.
    """
    of = reason = ""
    if step < job.steps:
        of = f" of {job.steps}"
        reason = f": training.time_limit = {minutes(job.file.training.time_limit or 0)} min ended it"
        if lowest.is_over:
            reason = f": no {criterion.better} in {lowest.since} evaluations (evaluate.patience)"
    steps = f"steps {before + 1} to {step}{of}" if before else f"{step}{of} steps"
    return f"trained {steps} in {minutes(seconds)} min{reason}"


def last_evaluation(
    value: float, criterion: Criterion, unit: str, rows: str, metrics: Mapping[str, float]
) -> Iterator[str]:
    """Yield the lines of the evaluation after the last step.

    Args:
        value: its loss, or its negative reward.
        criterion: what the evaluations compare.
        unit: unit of the loss.
        rows: what the loss is of, such as documents.
        metrics: further numbers.
    """
    if criterion.rewards:
        yield f"reward  {-value:.4f} in the mean over held-out prompts"
    else:
        yield f"loss    {value:.4f} {unit} on held-out {rows}"
    if metrics:
        yield f"        {'  '.join(numbers_in_words(metrics))}"
