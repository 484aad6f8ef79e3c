"""Checks of a training file's method against its other keys: one function a method."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..base.errors import ConfigError
from ..grid.topology import Topology
from ..models.config import DeepseekConfig, TransformerConfig
from ..models.huggingface.config import as_reward, to_hf
from ..options.batch import BatchSizes
from .model_choice import is_reward_model, model_config
from .sections import MethodSection, ModelSection, TrainingFile


class Facts(NamedTuple):
    """Method and the other parts of a run that its checks read.

    Attributes:
        file: the training file.
        method: its method.
        model: the model.
        topology: the grid.
        batch: sizes of a step.
        sequence: tokens of a row, at most.
    """

    file: TrainingFile
    method: MethodSection
    model: TransformerConfig
    topology: Topology
    batch: BatchSizes
    sequence: int


def require_method_fits(facts: Facts) -> None:
    """Check that the method goes with the rest of its file.

    Raises:
        ConfigError: it does not; the message names the keys.
    """
    method, model = facts.method, facts.model
    if isinstance(model, DeepseekConfig) and model.num_nextn_predict_layers:
        raise ConfigError(
            f"method {method.name} does not train modules of multi-token prediction, and the model has "
            f"{model.num_nextn_predict_layers}: give model.overrides {{num_nextn_predict_layers: 0}}"
        )
    check = {"reward": _reward, "distill": _distill, "grpo": _grpo}.get(method.name)
    if check is not None:
        check(facts)


def _reward(facts: Facts) -> None:
    if facts.file.sample is not None:
        raise ConfigError("sample has no effect on a reward model, which writes no text: leave it out")
    if facts.file.export is not None:
        try:
            as_reward(to_hf(facts.model))
        except ValueError as error:
            raise ConfigError(f"export cannot write this reward model: {error} Or write export: false") from error


def _distill(facts: Facts) -> None:
    method, model = facts.method, facts.model
    if method.is_stored:
        if facts.file.data.validation is not None:
            raise ConfigError(
                f"method.teacher {method.teacher} has only the tokens of data.training: give data.held_out instead of "
                "data.validation"
            )
        return
    _require_second(f"method.teacher {method.teacher}", str(method.teacher), facts)
    if method.top_k is not None and method.top_k >= model.vocab_size:
        raise ConfigError(
            f"method.top_k is {method.top_k}, but the model's vocabulary has {model.vocab_size} tokens: give less, or "
            "leave it out"
        )


def _grpo(facts: Facts) -> None:
    method, batch, most = facts.method, facts.batch, facts.sequence
    rows = batch.train * method.steps_per_rollout
    if rows % method.group:
        raise ConfigError(
            f"batch.size {batch.train} x method.steps_per_rollout {method.steps_per_rollout} is {rows} answers, no "
            f"multiple of method.group {method.group}: give {math.lcm(method.group, rows)} answers, or another group"
        )
    assert method.max_new_tokens is not None  # the section requires it for grpo
    if method.max_new_tokens >= most:
        raise ConfigError(
            f"method.max_new_tokens is {method.max_new_tokens}, which leaves no room for a prompt in training.sequence "
            f"{most}: give less"
        )
    if facts.topology.expert > 1:
        raise ConfigError(
            f"method grpo draws answers, for which all experts of a layer must lie on one rank, but grid.expert is "
            f"{facts.topology.expert}: write expert: 1"
        )
    if facts.file.grid.sequence_parallel:
        raise ConfigError(
            "grid.sequence_parallel shares a row's tokens evenly, but the answers of method grpo have any length: "
            "leave it out"
        )
    if facts.file.training.spikes.action == "rewind":
        raise ConfigError(
            "training.spikes rewind leaves out the batches of a spike, but method grpo would draw the same ones: write "
            "skip"
        )
    if method.reference is not None:
        _require_second(f"method.reference {method.reference}", method.reference, facts)


def _require_second(what: str, folder: str, facts: Facts) -> None:
    """Check that a teacher or a reference has the vocabulary of a model, and runs on its grid."""
    topology, most = facts.topology, facts.sequence
    try:
        section = ModelSection(folder=folder)
        second = model_config(section)
    except ConfigError as error:
        raise ConfigError(f"{what}: {str(error).partition(': ')[2] or error}") from error
    if is_reward_model(section):
        raise ConfigError(f"{what} is a reward model, which has scores instead of logits: give a language model")
    vocabulary = facts.model.vocab_size
    if second.vocab_size != vocabulary:
        raise ConfigError(
            f"{what} has a vocabulary of {second.vocab_size}, and the model of {vocabulary}: give one with the same "
            "tokens"
        )
    if second.max_position_embeddings < most:
        raise ConfigError(
            f"{what} has {second.max_position_embeddings} positions, less than training.sequence {most}: give a "
            "smaller sequence"
        )
    if isinstance(second, DeepseekConfig) and second.num_nextn_predict_layers:
        raise ConfigError(f"{what} has modules of multi-token prediction, which no method takes: give another model")
    if topology.size("pipe") > second.layer_count:
        raise ConfigError(
            f"{what} has {second.layer_count} layers for grid.pipe {topology.size('pipe')}: give fewer stages"
        )
    try:
        second.check_tensor(topology.size("tensor"))
    except ValueError as error:
        raise ConfigError(f"grid.tensor: {what}: {error}") from error
