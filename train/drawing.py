"""Answers that a run draws to its prompts, with rewards: the method ``grpo``, and its evaluation."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from typing import Any

from safetensors.torch import load, save

from ..base.errors import ConfigError
from ..base.named_function import named_function
from ..data.dataloader import BatchOrder
from ..data.prompts import Prompts, PromptTokenizer
from ..engine.pipeline_engine import PipelineEngine
from ..inference.engine import init_inference
from .job import Job
from .methods.rollouts import Rollouts
from .model import frozen_engine

_SLOTS = 64  # sequences that a replica draws at once, at most


class Drawing:
    """Method ``grpo`` of a run.

    The prompts of a draw depend on the seed and the step, and their order is that of the data's epochs. If a draw is
    for several steps, a checkpoint between them has its rows.

    Args:
        job: the run.
        engine: its engine, with its checkpoint loaded.
        prompts: the prompts to train on.
        tokenizer: name of their tokenizer.

    Attributes:
        rollouts: draws the answers.
        metrics: numbers of the last draw, if the last step was the first one on it; else {}.
    """

    def __init__(self, job: Job, engine: PipelineEngine, prompts: Prompts, tokenizer: str) -> None:
        section = job.file.method
        assert section is not None and section.max_new_tokens is not None
        self._job, self._engine, self._prompts, self._steps = job, engine, prompts, section.steps_per_rollout
        count = job.batch.train * self._steps // section.group
        if len(prompts) < count:
            raise ConfigError(
                f"data.training has {len(prompts)} prompts, less than the {count} of a rollout (batch.size x "
                "method.steps_per_rollout / method.group): give more of them, or a smaller batch"
            )
        self._count, self._order = count, BatchOrder(len(prompts), count, count, 0, 1, job.file.seed)
        rows = job.batch.train * self._steps // engine.grid.replicas
        encoder = PromptTokenizer(tokenizer)
        sampler = init_inference(engine, max_batch=min(rows, _SLOTS), tokenizer=encoder)
        reference = None if section.beta is None else frozen_engine(job, engine.grid, section.reference)
        self.rollouts = Rollouts(
            engine,
            sampler,
            reward_functions(job),
            max_new_tokens=section.max_new_tokens,
            group=section.group,
            weights=section.reward_weights,
            scale_rewards=section.scale_rewards,
            reference=reference,
            seed=job.file.seed,
        )
        self._left: list[tuple[Any, Any]] = []  # microbatches of the steps to come
        self.metrics: dict[str, float] = {}

    def next_batch(self) -> Iterator[Any]:
        """Return the microbatches of the next step. Collective."""
        accumulation = self._job.batch.accumulation
        self.metrics = {}
        if not self._left:
            draw = self._engine.global_steps // self._steps
            self._order.epoch, self._order.first = divmod(draw, self._order.batches)
            prompts, columns = self._prompts.take(next(iter(self._order)))
            self._left = self.rollouts(prompts, **columns)
            self.metrics = self.rollouts.metrics
        mine, self._left = self._left[:accumulation], self._left[accumulation:]
        return iter(mine)

    @property
    def state(self) -> dict[str, Any] | None:
        """Plain data for a checkpoint behind the step that was handed out: rows for further steps; None: none are."""
        if not self._left:
            return None
        return {"rows": b64encode(save(self.rollouts.rows)).decode()}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go on from what ``state`` returned. Collective."""
        done = self._engine.global_steps % self._steps
        if not done:
            return
        if state is None:
            raise ConfigError(
                f"the run continues at step {self._engine.global_steps}, in the middle of a rollout, but the "
                "checkpoint was made with another method.steps_per_rollout: give that value"
            )
        self.rollouts.rows = load(b64decode(state["rows"]))
        if len(self.rollouts.rows["ids"]) != self._steps * self._job.batch.train:
            raise ConfigError(
                f"the checkpoint has {len(self.rollouts.rows['ids'])} answers for further steps, but batch.size x "
                f"method.steps_per_rollout is {self._steps * self._job.batch.train}: give the run's values"
            )
        self._left = self.rollouts.microbatches(self.rollouts.rows)[done * self._job.batch.accumulation :]


def reward_functions(job: Job) -> list[Any]:
    """Return the reward functions of a run.

    Raises:
        ConfigError: a name that names no function, or a weight is missing.
    """
    section = job.file.method
    assert section is not None and section.rewards is not None
    try:
        return [named_function(name) for name in section.rewards]
    except ValueError as error:
        raise ConfigError(f"method.rewards: {error}") from error


class RewardEvaluation:
    """Evaluation of a run with drawn answers: the mean reward of an answer to each of the first held-out prompts.

    Args:
        job: the run.
        data: the held-out prompts.
        drawing: the method of the run.

    Attributes:
        metrics: numbers of the answers of the last evaluation, as ``Rollouts.metrics``.
    """

    def __init__(self, job: Job, data: Prompts, drawing: Drawing) -> None:
        self._data, self._drawing = data, drawing
        self._count = min(len(data), job.file.evaluate.sequences or len(data))
        self.metrics: dict[str, float] = {}

    def loss(self) -> float:
        """Return the mean reward with its sign changed, so that less is better. Equal on every rank. Collective."""
        prompts, columns = self._data.take(range(self._count))
        self.metrics = self._drawing.rollouts.evaluate(prompts, **columns)
        return -self.metrics["reward"]
