"""Evaluation of a run on tasks, by an installed package that has an entry point for it: lm-eval's, of triax."""

from __future__ import annotations

from typing import Protocol

from ..base.entry_points import offered
from ..base.errors import ConfigError, nearest
from ..engine.pipeline_engine import PipelineEngine
from .sections import EvaluateSection

_GROUP = "triax.task_evaluations"  # of entry points


class TaskEvaluation(Protocol):
    """Protocol: an evaluation of an engine's model on tasks.

    An entry point of the group ``triax.task_evaluations`` makes one of (engine, name of the tokenizer, tasks, samples
    of each task or None, ``runs_code=``: Python code of task files may run). Collective.

    Attributes:
        names: name of each metric -> True if higher values are better.
    """

    names: dict[str, bool]

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the model as it is now: name -> value, equal on every rank. Collective."""


def task_evaluation(
    section: EvaluateSection, engine: PipelineEngine, tokenizer: str | None, held_out: bool
) -> TaskEvaluation | None:
    """Return the evaluation on the tasks of a training file; None without tasks. Collective.

    Args:
        section: the section ``evaluate``.
        engine: the engine of the run.
        tokenizer: name of the tokenizer; None: it is unknown.
        held_out: True if there are held-out rows, whose loss is known.

    Raises:
        ConfigError: the tasks cannot be evaluated, or ``evaluate.metric`` is none of their metrics.
    """
    if not section.tasks:
        return None
    if tokenizer is None:
        raise ConfigError("evaluate.tasks are texts, and the run's tokenizer is unknown: give tokenizer")
    (found,) = offered(_GROUP).select(name="lm_eval")
    try:
        runs_code = section.confirm_run_unsafe_code
        made: TaskEvaluation = found.load()(engine, tokenizer, section.tasks, section.task_samples, runs_code=runs_code)
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"evaluate.{error}") from error
    if section.metric != "loss" and section.metric not in made.names:
        raise ConfigError(
            f"evaluate.metric: there is no metric {section.metric!r}; {nearest(section.metric, made.names)}"
        )
    if section.metric == "loss" and not held_out and (section.best or section.patience is not None):
        raise ConfigError(
            "evaluate.metric is loss, but no documents are held out: give data.held_out, or a metric of the tasks: "
            f"{', '.join(made.names)}"
        )
    return made
