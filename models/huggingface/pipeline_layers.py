"""Pipeline layers made of Hugging Face's own blocks: ``hf_layers(model)``, for the families GPT-2 and Llama.

layers = hf_layers(transformers_model)                  # LayerSpecs that build themselves with its weights
model = PipelineModule(layers, grid=Grid(pipe=2), loss_fn=CausalLMLoss())
engine, *_ = triax.initialize(model=model, config=...)
save_hf(engine, "path/to/mine")                         # under transformers' names

The blocks are transformers' classes. They run as in transformers' models, with the same causal mask and the same rotary
positions. ``load_hf`` builds triax's own layers instead, which the tensor axis shards. ``hf_layers`` is for models with
features that triax's layers do not have. This module is imported on first use, and transformers when a layer is built.

On a grid with a context axis the embedding takes this rank's tokens of the whole ids (``context/order.py``), and the
blocks call ``context.attention`` in place of the implementation that the configuration names.
"""

from __future__ import annotations

import copy
import importlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...context.context_attention import attention
from ...context.order import positions, shard
from ...grid import Axis, Grid
from ...pipe.spec import LayerSpec, TiedLayerSpec
from .load import load_hf
from .names import Names


@dataclass(frozen=True)
class _Family:
    """Names of a family's modules and classes in transformers.

    Attributes:
        module: name of the family's module in ``transformers.models``.
        name: prefix of the names of the family's classes.
        embedding, blocks, norm: attribute names of these modules in the family's models.
        learned: True if the family's positions are learned, False if they are rotary.
    """

    module: str
    name: str
    embedding: str = "model.embed_tokens"
    blocks: str = "model.layers"
    norm: str = "model.norm"
    learned: bool = False

    def find(self, what: str) -> Any:
        """Return a class of the family in transformers: ``find("Block")`` of GPT-2 is ``GPT2Block``."""
        module = importlib.import_module(f"transformers.models.{self.module}.modeling_{self.module}")
        return getattr(module, self.name + what)


_FAMILIES = {
    "gpt2": _Family("gpt2", "GPT2", "transformer.wte", "transformer.h", "transformer.ln_f", learned=True),
    "llama": _Family("llama", "Llama"),
    "qwen2": _Family("qwen2", "Qwen2"),
}


class HFModel:
    """Configuration of a transformers model, which all layers of one ``hf_layers`` list share.

    Args:
        config: transformers' configuration of the model.

    Raises:
        ValueError: a family or a setting that ``hf_layers`` does not run.
    """

    def __init__(self, config: Any) -> None:
        kind = getattr(config, "model_type", None)
        if kind not in _FAMILIES:
            raise ValueError(
                f"hf_layers has the families {', '.join(_FAMILIES)}, but the model is of the family {kind!r}. List "
                "its layers yourself, each as LayerSpec(cls, ...)."
            )
        if getattr(config, "add_cross_attention", False):
            raise ValueError("hf_layers does not implement add_cross_attention. Take a configuration without it.")
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            raise ValueError("hf_layers has no mask for sliding_attention in layer_types. Use full_attention instead.")
        self.config, self.family = config, _FAMILIES[kind]
        if config._attn_implementation is None:
            config._attn_implementation = "sdpa"  # as a model would choose

    @property
    def architecture(self) -> str:
        """Name of the family's model class, as ``config.json`` lists it under ``architectures``."""
        return self.family.name + ("LMHeadModel" if self.family.learned else "ForCausalLM")

    def initialize(self, layer: nn.Module) -> None:
        """Draw a layer's initial weights from the distributions that transformers uses for the family."""
        cls = self.family.find("PreTrainedModel")
        host = cls.__new__(cls)  # its rule needs the configuration, not a whole model
        nn.Module.__init__(host)
        host.config = self.config
        layer.apply(host._init_weights)

    def names(self) -> Names:
        """Return the table from the parameter names of these layers to transformers' names."""
        family, first = self.family, 2 if self.family.learned else 1
        with torch.device("meta"):
            block = _block(self, 0)
        found: dict[str, Any] = {"layers.0.weight": f"{family.embedding}.weight"}
        if family.learned:
            found["layers.1.weight"] = "transformer.wpe.weight"
        for name, _ in block.named_parameters():
            found[f"layers.{{i+{first}}}.block.{name}"] = f"{family.blocks}.{{i}}.{name}"
        found[f"layers.{{n+{first}}}.norm.weight"] = f"{family.norm}.weight"
        if family.learned:
            found[f"layers.{{n+{first}}}.norm.bias"] = f"{family.norm}.bias"
        found[f"layers.{{n+{first + 1}}}.weight"] = "lm_head.weight"  # tied: under no name of ours
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HFModel) and self.config.to_dict() == other.config.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return type(self.config).__name__


def hf_layers(model_or_config: Any, attention: str = "ring") -> list[LayerSpec]:
    """Return a transformers model as layers for a ``PipelineModule``: ids (B, T) -> logits (B, T, V).

    The list is ``[embedding, (positions,) block 0, ..., block L - 1, norm, head]``, where a tied head is the embedding
    again. The layers are built later, by the ``PipelineModule``. Every row must be one document without padding.
    Dropout is transformers' own, drawn from each process's generator. Set it to 0 if different grids must give equal
    results.

    Args:
        model_or_config: a ``GPT2LMHeadModel``, ``LlamaForCausalLM`` or ``Qwen2ForCausalLM``, from which the layers
            take their initial weights, or the configuration of such a model. With a configuration, the initial
            weights are drawn from transformers' distributions, with equal values on every grid.
        attention: how the ranks of the context axis compute attention: ``ring``, ``ulysses`` or ``gather``.

    Returns:
        The layers' specs. ``save_hf(engine, path)`` writes the parameters of these layers under transformers' names.

    Raises:
        ValueError: the model is of another family, or has cross attention or sliding windows.
    """
    live = isinstance(model_or_config, nn.Module)
    hf = HFModel(model_or_config.config if live else model_or_config)
    positions = [LayerSpec(Positions, hf)] if hf.family.learned else []
    blocks = [LayerSpec(HFBlock, hf, index, attention=attention) for index in range(hf.config.num_hidden_layers)]
    first, head = LayerSpec(Embedding, hf), LayerSpec(Head, hf)
    if hf.config.tie_word_embeddings:
        first = TiedLayerSpec("embed", Embedding, hf)
        head = TiedLayerSpec("embed", Embedding, hf, forward_fn=Embedding.attend)
    layers = [first, *positions, *blocks, LayerSpec(Norm, hf), head]
    return load_hf(model_or_config, layers, names=hf.names()) if live else layers


class Embedding(nn.Embedding):
    """Token embedding of a transformers model: ids (B, T) -> (B, T, D); with a context axis, (B, T / c, D)."""

    hollow = False  # built with its values, and its buffers

    def __init__(self, hf: HFModel, *, grid: Grid) -> None:
        if grid.tensor.size > 1:
            raise ValueError(
                f"the grid has tensor={grid.tensor.size}, but the blocks of hf_layers cannot be sharded. Take the "
                "layers of load_hf(path), or a grid with tensor=1."
            )
        padding = None if hf.family.learned else hf.config.pad_token_id
        super().__init__(hf.config.vocab_size, hf.config.hidden_size, padding)
        self.context = grid.context
        hf.initialize(self)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up this rank's tokens: (B, T) -> (B, T / c, D).

        Raises:
            ValueError: the length is not a multiple of 2 c.
        """
        length, step = ids.shape[1], 2 * self.context.size
        if self.context.size > 1 and length % step:
            raise ValueError(
                f"the rows have {length} tokens, but context={self.context.size} cuts them into {step} equal chunks. "
                f"Pad them, or cut them, to a multiple of {step}, such as {-(-length // step) * step}."
            )
        return super().forward(shard(ids, self.context))

    def attend(self, x: Tensor) -> Tensor:
        """Multiply by the embedding's weight as a tied head: (B, T, D) -> logits (B, T, V)."""
        return F.linear(x, self.weight)


class Positions(nn.Embedding):
    """GPT-2's learned positions, then dropout: (B, T, D) -> (B, T, D)."""

    hollow = False

    def __init__(self, hf: HFModel, *, grid: Grid) -> None:
        super().__init__(hf.config.max_position_embeddings, hf.config.hidden_size)
        hf.initialize(self)
        self.p, self.context = hf.config.embd_pdrop, grid.context

    def forward(self, x: Tensor) -> Tensor:
        """Add the learned positions and apply dropout: (B, T, D) -> (B, T, D)."""
        return F.dropout(x + super().forward(_positions(x, self.context)), self.p, self.training)


class HFBlock(nn.Module):
    """One transformers block with the causal mask and positions of its model: (B, T, D) -> (B, T, D)."""

    hollow = False

    def __init__(self, hf: HFModel, index: int, *, grid: Grid, attention: str = "ring") -> None:
        super().__init__()
        self.config, self.context = hf.config, grid.context
        self.block = _block(hf, index)
        if grid.context.size > 1:
            _attend_over_context(self.block, grid, attention)
        self.rotary = None if hf.family.learned else hf.family.find("RotaryEmbedding")(hf.config)
        hf.initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """Run the block with its model's mask and positions: (B, T, D) -> (B, T, D)."""
        from transformers.masking_utils import create_causal_mask

        positions, mask = _positions(x, self.context)[None], None
        if self.context.size == 1:
            mask = create_causal_mask(self.config, x, attention_mask=None, past_key_values=None, position_ids=positions)
        given: dict[str, Any] = {"attention_mask": mask, "position_ids": positions}
        if self.rotary is not None:
            given["position_embeddings"] = self.rotary(x, positions)
        y: Tensor = self.block(x, **given)
        return y


class Norm(nn.Module):
    """The norm in front of the head: (B, T, D) -> (B, T, D)."""

    hollow = False

    def __init__(self, hf: HFModel) -> None:
        super().__init__()
        config = hf.config
        if hf.family.learned:
            self.norm: nn.Module = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        else:
            self.norm = hf.family.find("RMSNorm")(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize: (B, T, D) -> (B, T, D)."""
        y: Tensor = self.norm(x)
        return y


class Head(nn.Linear):
    """Output layer with its own weight (not tied to the embedding): (B, T, D) -> logits (B, T, V)."""

    hollow = False

    def __init__(self, hf: HFModel) -> None:
        super().__init__(hf.config.hidden_size, hf.config.vocab_size, bias=False)
        hf.initialize(self)


@dataclass(frozen=True)
class CausalLMLoss:
    """Causal language model loss as in transformers: the labels are the ids themselves, and the loss shifts them.

    Args:
        ignore_index: label value that is left out of the loss and of the count.
        grid: the model's grid. Needed if it has a context axis.
    """

    ignore_index: int = -100
    grid: Grid | None = None

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses and the number of labels that count, by which the engine divides the sum.

        The sum is computed in fp32, or in fp64 if the logits are fp64.

        Args:
            logits: (B, T, V), of this rank's tokens if the grid has a context axis.
            labels: integers (B, T), of the whole sequence.

        Raises:
            ValueError: the logits are of a part of the sequence, and the loss was not given the grid.
        """
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if logits.shape[1] != labels.shape[1]:
            if self.grid is None:
                raise ValueError(
                    f"the logits have {logits.shape[1]} tokens and the labels {labels.shape[1]}, because the context "
                    "axis spreads the sequence. Give the loss the grid, CausalLMLoss(grid=grid)."
                )
            labels = shard(F.pad(labels[:, 1:], [0, 1], value=self.ignore_index), self.grid.context)
            logits, labels = F.pad(logits, [0, 0, 0, 1]), F.pad(labels, [1, 0], value=self.ignore_index)
        followed = labels[:, 1:]
        total = F.cross_entropy(
            logits[:, :-1].flatten(0, 1), followed.flatten(), ignore_index=self.ignore_index, reduction="sum"
        )
        return total, torch.count_nonzero(followed != self.ignore_index)

    def weight(self, labels: Tensor) -> Tensor:
        """Return the number of labels that count, (): with a context axis, of those of this rank's tokens."""
        followed = labels[:, 1:]
        if self.grid is not None:
            followed = shard(followed, self.grid.context, fill=self.ignore_index)
        return torch.count_nonzero(followed != self.ignore_index)


def _positions(x: Tensor, context: Axis) -> Tensor:
    """Return the positions of this rank's tokens, x (B, T / c, D), in the whole sequence: int64 (T / c,)."""
    if context.size == 1:
        return torch.arange(x.shape[1], device=x.device)
    return positions(x.shape[1] * context.size, context.size, context.rank).to(x.device)


def _attend_over_context(block: nn.Module, grid: Grid, kind: str) -> None:
    """Let a transformers block's attention call ``context.attention``.

    Raises:
        ValueError: the block drops attention probabilities, or has no attention that transformers can replace.
    """
    from transformers import AttentionInterface

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        if options.get("dropout"):
            raise ValueError(
                f"context={grid.context.size} spreads each sequence over ranks, which cannot drop attention "
                f"probabilities, but the model drops {options['dropout']}. Set its attention dropout to 0."
            )
        y = attention(query, key, value, grid=grid, kind=kind, scale=options.get("scaling"))
        return y.transpose(1, 2), None

    name = f"triax_context_{id(grid)}_{kind}"
    AttentionInterface.register(name, attend)
    found = [module for module in block.modules() if hasattr(getattr(module, "config", None), "_attn_implementation")]
    if not found:
        raise ValueError(
            f"a {type(block).__name__} has no attention that context={grid.context.size} could replace. Use a grid "
            "with context=1, or the layers of load_hf(path)."
        )
    for module in found:
        module.config = copy.copy(module.config)
        module.config._attn_implementation = name  # type: ignore[union-attr]


def _block(hf: HFModel, index: int) -> nn.Module:
    block: nn.Module = hf.family.find("Block" if hf.family.learned else "DecoderLayer")(hf.config, layer_idx=index)
    return block
