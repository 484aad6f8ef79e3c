"""Reward models: a score of each token in place of logits, by transformers' names ``...ForSequenceClassification``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..grid import Grid
from ..grid.comm.regions import gather_split
from ..grid.randomness.random import Distribution, Normal
from ..pipe.spec import LayerSpec, TiedLayerSpec
from ..tensor_parallel.embedding import VocabParallelHead
from .config import TransformerConfig
from .layers import TokenEmbedding
from .replicated_linear import ReplicatedLinear


class RewardHead(ReplicatedLinear):
    """Last layer of a reward model: a score of each token, without a bias.

    Args:
        width: D.
        grid: the grid.
        init: distribution of the initial weight.
        sequence_parallel: the input is this rank's shard of the sequence.

    Attributes:
        weight: (1, D), whole on every tensor-parallel rank.

    Shape:
        (B, T, D), or (B, T / t, D) under sequence parallelism -> (B, T), equal on every tensor-parallel rank.
    """

    def __init__(self, width: int, *, grid: Grid, init: Distribution, sequence_parallel: bool = False) -> None:
        super().__init__(width, 1, grid=grid, init=init, sequence_parallel=sequence_parallel)
        self.axis, self.sequence_parallel = grid.tensor, sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Compute the scores; the shapes are in the class's docstring."""
        scores = super().forward(x)[..., 0]
        return gather_split(scores, self.axis, dim=1) if self.sequence_parallel else scores


def reward_layers(layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return the layers of a language model with a ``RewardHead`` in place of the output layer.

    The head's initial weight is drawn by the seed, with the deviation ``initializer_range`` of the configuration. A
    reward model's folder has a head of its own, and ``load_hf(folder)`` returns such layers.

    Args:
        layers: what ``llama_layers(config)`` and its like return, or ``load_hf`` of a language model.

    Raises:
        ValueError: the last layer is no output layer of triax's, or the model predicts several tokens.
    """
    config = next((a for spec in layers for a in getattr(spec, "args", ()) if isinstance(a, TransformerConfig)), None)
    made = [made_of(spec) for spec in layers]
    if config is None or not issubclass(made[-1], (VocabParallelHead, TokenEmbedding)):
        name = made[-1].__name__ if made else "nothing"
        raise ValueError(
            f"the last of the layers is {name}, but a reward model needs triax's layers of a language model, with its "
            "output layer: give reward_layers what llama_layers(config) or load_hf(folder) returns"
        )
    if getattr(config, "num_nextn_predict_layers", 0):
        raise ValueError(
            "the model has modules that predict further tokens, of which a reward model has none: give the "
            "configuration num_nextn_predict_layers=0"
        )
    *others, last = layers
    if isinstance(last, TiedLayerSpec):  # the embedding is tied to no other layer any more
        others = [_untied(spec) if getattr(spec, "key", None) == last.key else spec for spec in others]
    kept: dict[str, Any] = {"init": Normal(config.initializer_range)}
    kept["sequence_parallel"] = last.kwargs.get("sequence_parallel", False)
    return [*others, LayerSpec(RewardHead, config.hidden_size, **kept)]


def has_reward_head(layers: Sequence[Any]) -> bool:
    """Return True if the last of a model's layers is a ``RewardHead``."""
    return bool(layers) and issubclass(made_of(layers[-1]), RewardHead)


def made_of(spec: Any) -> type:
    """Return the class of a layer, also of one that loads its weights when it is built; ``object`` for a function."""
    cls = getattr(spec, "cls", type(spec))
    cls = cls if isinstance(cls, type) else getattr(cls, "cls", object)
    return cls if isinstance(cls, type) else object


def _untied(spec: LayerSpec) -> LayerSpec:
    return LayerSpec(spec.cls, *spec.args, takes=spec.takes, **spec.kwargs)
