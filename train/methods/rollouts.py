"""Answers that the model draws for prompts on its training grid, with rewards, as microbatches for ``grpo_loss``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...base.checks import check_count, check_seed
from ...base.seeds import derive
from ...context.order import gather
from ...data.chat import apply_template
from ...inference.text import follow
from .grpo import ADVANTAGES, OLD, TOKEN_REFERENCE
from .rewards import RewardFunction, Rewards, Scale, advantages, std

if TYPE_CHECKING:
    from ...engine.pipeline_engine import PipelineEngine
    from ...inference.engine import Completion, InferenceEngine

Messages = Sequence[Mapping[str, str]]  # a conversation: {"role": ..., "content": ...}
RolloutPrompt = str | Messages | Sequence[int] | Tensor


class Rollouts:
    """Answers to prompts by the model as it is, with rewards, advantages and log-probabilities. Collective.

    A call draws ``group`` answers to each prompt, on the training grid, with the KV cache, and records the
    log-probability of each token while it is drawn. A draw depends on the seed, the engine's ``global_steps``, the
    prompt's index, the answer's index in the group and the token's position, but not on the grid.

    Args:
        engine: the engine that trains a model whose ``loss_fn`` is a ``grpo_loss``. Answers are drawn at the loss's
            temperature.
        sampler: ``triax.init_inference`` of this engine; with a tokenizer if prompts are text.
        rewards: reward function or functions, of TRL's form; see ``methods.rewards.Rewards``. They are called once for
            all answers of a call, on rank 0.
        group: number of answers to each prompt.
        max_new_tokens: the most tokens of an answer.
        eos: id or ids that end an answer; None: the tokenizer's ``eos_token_id``, if it has one.
        weights: weight of each reward function; None: 1.
        scale_rewards: ``group``, ``batch`` or ``none``; see ``methods.rewards``.
        reference: engine of the reference model, for a loss with a ``beta``: a model of the same grid whose ``loss_fn``
            is a ``grpo_loss`` of the same temperature. It needs no optimizer.
        seed: seed of the draws.

    Attributes:
        metrics: of the last call, equal on every rank, under TRL's names: ``reward``, ``reward_std``,
            ``frac_reward_zero_std``, and for each function ``rewards/NAME/mean`` and ``rewards/NAME/std``;
            ``completions/mean_length``, ``completions/min_length``, ``completions/max_length``, and
            ``completions/clipped_ratio``, the share of answers that ``max_new_tokens`` ended.
        completions: the answers of the last call, those to a prompt one behind the other.
        rows: the rows of the last call as tensors of the whole job, before they are cut into microbatches.

    Raises:
        TypeError: the engine's ``loss_fn`` is no ``grpo_loss``.
        ValueError: an option out of its range, or engines that do not belong together.
    """

    def __init__(
        self,
        engine: PipelineEngine,
        sampler: InferenceEngine,
        rewards: RewardFunction | Sequence[RewardFunction],
        *,
        max_new_tokens: int,
        group: int = 8,
        eos: int | Iterable[int] | None = None,
        weights: Sequence[float] | None = None,
        scale_rewards: Scale = "group",
        reference: PipelineEngine | None = None,
        seed: int = 0,
    ) -> None:
        policy = _policy(engine, "Rollouts")
        if sampler.module is not engine.module:
            raise ValueError("the sampler has another model than the engine: give triax.init_inference(engine)")
        if policy.beta and reference is None:
            raise ValueError(
                f"the loss has beta={policy.beta}, the coefficient of the KL divergence from a reference model: give "
                "reference=, an engine of that model, or a loss with beta=0"
            )
        if reference is not None:
            _policy(reference, "Rollouts")
            if not policy.beta:
                raise ValueError("a reference model was given, but the loss has beta=0: leave it out, or give a beta")
            pairs = [(each.module.loss_fn.temperature, each.grid.topology.sizes) for each in (engine, reference)]
            if pairs[0] != pairs[1]:
                raise ValueError(
                    f"the engine has temperature and grid {pairs[0]}, and the reference {pairs[1]}: give both the same"
                )
        check_count("Rollouts", max_new_tokens=max_new_tokens)
        check_count("Rollouts", least=2, group=group)
        advantages(torch.zeros(group), group, scale_rewards)  # refuses an unknown scale
        if policy.length is not None and policy.length != max_new_tokens:
            raise ValueError(
                f"max_new_tokens is {max_new_tokens} here and {policy.length} in the loss: give both the same value"
            )
        self._engine, self._sampler, self._reference, self._group = engine, sampler, reference, group
        self._rewards, self._scale = Rewards(engine.grid, rewards, weights), scale_rewards
        self._longest, self._seed, self._policy = max_new_tokens, check_seed(seed), policy
        ends = getattr(sampler.tokenizer, "eos_token_id", None) if eos is None else eos
        self._eos = [] if ends is None else [ends] if isinstance(ends, int) else [*ends]
        self.metrics: dict[str, float] = {}
        self.completions: list[Completion] = []
        self.rows: dict[str, Tensor] = {}

    def __call__(self, prompts: Sequence[RolloutPrompt], **columns: Sequence[Any]) -> list[tuple[Tensor, Any]]:
        """Draw answers, and return the microbatches of this replica: those of one step, or of several. Collective.

        Args:
            prompts: texts, conversations (lists of messages) or lists of ids; the same on every rank.
            columns: further columns of the data, of one entry for each prompt, for the reward functions.

        Returns:
            (inputs, labels) of each microbatch, padded on the right to the length of the longest sequence. The answers
            of a step are neighbors: with ``group`` times the prompts equal to the batch size, they are one step's.

        Raises:
            AgreedError: on every rank: a reward function failed; the message names it.
            ValueError: on every rank: a column or a number of prompts that does not fit.
        """
        engine, group = self._engine, self._group
        rows, size = len(prompts) * group, engine.batch.train
        if not rows or rows % size:
            raise ValueError(
                f"{len(prompts)} prompts with {group} answers each are {rows} rows, but a step takes {size}: give a "
                "number of prompts whose rows make whole steps"
            )
        for name, column in columns.items():
            if len(column) != len(prompts):
                raise ValueError(f"{name} has {len(column)} entries for {len(prompts)} prompts: give one for each")
        step = engine.global_steps
        seeds = [derive("rollout", self._seed, step, index) for index in range(len(prompts))]
        done, values = self._drawn(prompts, columns, group, seeds)
        rewards = self._rewards.total(values)
        ahead = advantages(rewards, group, self._scale)
        self.completions = done
        self.metrics = self._measured(done, values, rewards) | {"frac_reward_zero_std": ahead.flat}
        self.rows = self._whole(ahead.values)
        return self.microbatches(self.rows)

    def evaluate(self, prompts: Sequence[RolloutPrompt], **columns: Sequence[Any]) -> dict[str, float]:
        """Draw an answer to each prompt, and return ``metrics`` of them. Collective; nothing is kept for training.

        The draws depend on the seed, the prompt's index and the model, and neither on the step nor on the grid.

        Args, raises: as a call, of any number of prompts.
        """
        seeds = [derive("evaluation", self._seed, index) for index in range(len(prompts))]
        done, values = self._drawn(prompts, columns, 1, seeds)
        return self._measured(done, values, self._rewards.total(values))

    def microbatches(self, rows: Mapping[str, Tensor]) -> list[tuple[Tensor, Any]]:
        """Return this replica's microbatches of whole rows, such as ``rows`` of the last call. Collective."""
        batch, grid = self._engine.batch, self._engine.grid
        share = batch.train // grid.replicas
        found = []
        for first in range(grid.replica * share, len(rows["ids"]), batch.train):
            for start in range(first, first + share, batch.micro):
                labels = {name: each[start : start + batch.micro] for name, each in sorted(rows.items())}
                found.append((labels.pop("ids"), labels))
        return found if self._reference is None else with_token_reference(self._reference, found)

    def _drawn(
        self, prompts: Sequence[RolloutPrompt], columns: Mapping[str, Sequence[Any]], group: int, seeds: Sequence[int]
    ) -> tuple[list[Completion], Tensor]:
        """Draw ``group`` answers to each prompt; return them with the value of each reward function for each."""
        engine = self._engine
        done = self._sampler.generate(
            [self._ids(prompt) for prompt in prompts],
            self._longest,
            temperature=engine.module.loss_fn.temperature,
            seed=seeds,
            eos=self._eos or None,
            num_return_sequences=group,
            logprobs="tempered",
        )
        repeated = {name: [each for each in column for _ in range(group)] for name, column in columns.items()}
        asked = [prompt for prompt in prompts for _ in range(group)]
        answers = [self._answer(prompt, each) for prompt, each in zip(asked, done, strict=True)]
        ids = [each.tokens[each.prompt :] for each in done]
        return done, self._rewards(asked, answers, ids, repeated, engine.global_steps)

    def largest_difference(self) -> float:
        """Return the largest abs(log p - log o) of a token, over all steps since the last call. Collective.

        After the first step on new answers it is the largest error of the recorded log-probabilities. Their mean error
        is the metric ``sampling/sampling_logp_difference/mean`` of the step.
        """
        most: float = self._policy.largest_difference()
        return most

    def _ids(self, prompt: RolloutPrompt) -> Any:
        """Return a prompt's ids."""
        tokenizer: Any = self._sampler.tokenizer
        if _is_ids(prompt):
            return prompt
        if tokenizer is None:
            raise ValueError(f"the prompt {prompt!r:.60} is text: give init_inference a tokenizer, or prompts of ids")
        if isinstance(prompt, str):
            return tokenizer.encode(prompt)
        return apply_template(tokenizer, prompt, add_generation_prompt=True, return_dict=False)

    def _answer(self, prompt: RolloutPrompt, done: Completion) -> Any:
        """Return an answer as reward functions get it: ids, a text, or a conversation of one message."""
        if _is_ids(prompt):
            return done.tokens[done.prompt :]
        kept = done.tokens[:-1] if done.tokens[-1] in self._eos else done.tokens
        tokenizer: Any = self._sampler.tokenizer
        text = follow(tokenizer, kept, done.prompt)
        return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]

    def _measured(self, done: Sequence[Completion], values: Tensor, rewards: Tensor) -> dict[str, float]:
        lengths = torch.tensor([len(each.logprobs) for each in done]).double()
        clipped = [each.tokens[-1] not in self._eos for each in done]
        found: dict[str, Any] = {"reward": rewards.nanmean(), "reward_std": std(rewards)}
        for name, column in zip(self._rewards.names, values.unbind(1), strict=True):
            found |= {f"rewards/{name}/mean": column.nanmean(), f"rewards/{name}/std": std(column)}
        found |= {"completions/mean_length": lengths.mean(), "completions/min_length": lengths.min()}
        found |= {"completions/max_length": lengths.max(), "completions/clipped_ratio": sum(clipped) / len(clipped)}
        return {name: float(value) for name, value in found.items()}

    def _whole(self, values: Tensor) -> dict[str, Tensor]:
        """Return the rows of all answers, with their advantages, (N,)."""
        done = self.completions
        length = max(len(each.tokens) for each in done) - 1
        ids, labels = torch.zeros(len(done), length, dtype=torch.long), torch.full((len(done), length), -100)
        old = torch.zeros(len(done), length, dtype=torch.float64)
        for row, each in enumerate(done):
            tokens, answer = torch.tensor(each.tokens), slice(each.prompt - 1, len(each.tokens) - 1)
            ids[row, : len(tokens) - 1] = tokens[:-1]
            labels[row, answer] = tokens[each.prompt :]
            old[row, answer] = torch.tensor(each.logprobs, dtype=torch.float64)
        return {"ids": ids, "labels": labels, OLD: old, ADVANTAGES: values}


def with_token_reference(engine: PipelineEngine, microbatches: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return microbatches whose labels have the log-probability of each label by an engine's model. Collective.

    Args:
        engine: engine of the reference model, whose ``loss_fn`` is a ``grpo_loss``; it needs no optimizer.
        microbatches: microbatches of this replica, (inputs, labels), as many on every rank; labels are a dict with
            ``labels``, (B, T).

    Returns:
        The microbatches, with ``reference`` (B, T) in their labels, 0 at labels that do not count.

    Raises:
        TypeError: the model has another loss function.
    """
    policy, grid = _policy(engine, "with_token_reference"), engine.grid
    with policy.recording() as records:
        engine.eval_batch(iter(microbatches), num_micro_batches=len(microbatches))
    found = []
    for index, (inputs, labels) in enumerate(microbatches):
        shape, last = labels["labels"].shape, engine.module.placement[-1]
        if records:
            whole = gather(records[index], grid.context, shape[1]).double().contiguous()
        else:
            whole = torch.empty(shape, dtype=torch.float64, device=grid.device)
        grid.pipe.broadcast(whole, last)
        found.append((inputs, {**labels, TOKEN_REFERENCE: whole.cpu()}))
    return found


def _is_ids(prompt: RolloutPrompt) -> bool:
    """Return True for a prompt that is ids, and neither a text nor a conversation."""
    return not isinstance(prompt, str) and not any(isinstance(each, Mapping) for each in prompt)


def _policy(engine: PipelineEngine, call: str) -> Any:
    """Return the loss of the log-probabilities of an engine's ``grpo_loss``.

    Raises:
        TypeError: the model has another loss function.
    """
    loss_fn = getattr(engine.module, "loss_fn", None)
    policy = getattr(loss_fn, "loss_fn", None)
    if not hasattr(policy, "largest_difference"):
        raise TypeError(
            f"{call} was given an engine whose loss_fn is a {type(loss_fn).__name__}: make the model with "
            "loss_fn=triax.methods.grpo_loss(...)"
        )
    return policy
