"""Hugging Face's own layers as a list for the pipe axis: ``hf_layers(model)``, of the families GPT-2 and Llama.

layers = hf_layers(transformers_model)                  # LayerSpecs that build themselves with its weights
model = PipelineModule(layers, grid=Grid(pipe=2), loss_fn=CausalLMLoss())
engine, *_ = triax.initialize(model=model, config=...)
save_hf(engine, "path/to/mine")                         # under transformers' names

The blocks are transformers' classes, run as its models run them, with the causal mask and the rotary positions that
those make. ``load_hf`` builds triax's layers instead, which the tensor axis shards; these are for what a model of
transformers has and ours does not. Imported when it is first used, and transformers when a layer is built.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..grid import Grid
from ..pipe.spec import LayerSpec, TiedLayerSpec
from .hf import load_hf
from .hf_names import Names

__all__ = ["CausalLMLoss", "hf_layers"]


@dataclass(frozen=True)
class _Family:
    """What a family calls its parts.

    Attributes:
        module: of ``transformers.models``.
        name: that its classes begin with.
        embedding, blocks, norm: where they are in its models.
        learned: its positions are learned; else rotary.
    """

    module: str
    name: str
    embedding: str = "model.embed_tokens"
    blocks: str = "model.layers"
    norm: str = "model.norm"
    learned: bool = False

    def find(self, what: str) -> Any:
        """One of its classes."""
        module = importlib.import_module(f"transformers.models.{self.module}.modeling_{self.module}")
        return getattr(module, self.name + what)


_FAMILIES = {
    "gpt2": _Family("gpt2", "GPT2", "transformer.wte", "transformer.h", "transformer.ln_f", learned=True),
    "llama": _Family("llama", "Llama"),
    "qwen2": _Family("qwen2", "Qwen2"),
}


class HFModel:
    """What the layers of one list have in common: the configuration and its family. (Short where a spec is printed.)

    Args:
        config: of transformers.

    Raises:
        ValueError: a family or a setting that ``hf_layers`` does not run.
    """

    def __init__(self, config: Any) -> None:
        kind = getattr(config, "model_type", None)
        if kind not in _FAMILIES:
            raise ValueError(
                f"hf_layers runs models of the families {', '.join(_FAMILIES)}, not of {kind!r}: list its layers "
                "yourself, LayerSpec(cls, ...) each"
            )
        if getattr(config, "add_cross_attention", False):
            raise ValueError("add_cross_attention: hf_layers runs decoders alone; take a configuration without it")
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            raise ValueError("layer_types has sliding_attention: hf_layers masks what comes later, and no more")
        self.config, self.family = config, _FAMILIES[kind]
        if config._attn_implementation is None:
            config._attn_implementation = "sdpa"  # as a model would choose

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return bool(self.config.tie_word_embeddings)

    @property
    def architecture(self) -> str:
        """The class of its models."""
        return self.family.name + ("LMHeadModel" if self.family.learned else "ForCausalLM")

    def initialise(self, layer: nn.Module) -> None:
        """Draw a layer's weights as its family does."""
        cls = self.family.find("PreTrainedModel")
        host = cls.__new__(cls)  # its rule needs the configuration, not a whole model
        nn.Module.__init__(host)
        host.config = self.config
        layer.apply(host._init_weights)

    def names(self) -> Names:
        """Our names -> transformers'."""
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


def hf_layers(model_or_config: Any) -> list[LayerSpec]:
    """A model of transformers as layers for a ``PipelineModule``: ids (B, T) -> logits (B, T, V).

    The list is ``[embedding, (positions,) block 0, ..., block L - 1, norm, head]``; a tied head is the embedding again.
    Nothing is built here. Every row is one document without padding. Dropout is transformers' own, drawn from each
    process's generator: set it to 0 where grids are to agree.

    Args:
        model_or_config: ``GPT2LMHeadModel``, ``LlamaForCausalLM`` or ``Qwen2ForCausalLM``, whose weights the layers
            start from; or one of their configurations: they are drawn as transformers draws them, alike on every grid.

    Returns:
        The specs. ``save_hf(engine, path)`` writes what they make under transformers' names.

    Raises:
        ValueError: another family; cross attention, or sliding windows.
    """
    live = isinstance(model_or_config, nn.Module)
    hf = HFModel(model_or_config.config if live else model_or_config)
    positions = [LayerSpec(Positions, hf)] if hf.family.learned else []
    blocks = [LayerSpec(Block, hf, index) for index in range(hf.config.num_hidden_layers)]
    first: LayerSpec = TiedLayerSpec("embed", Embedding, hf) if hf.tied else LayerSpec(Embedding, hf)
    head = TiedLayerSpec("embed", Embedding, hf, forward_fn=Embedding.attend) if hf.tied else LayerSpec(Head, hf)
    layers = [first, *positions, *blocks, LayerSpec(Norm, hf), head]
    return load_hf(model_or_config, layers, names=hf.names()) if live else layers


class Embedding(nn.Embedding):
    """Token ids (B, T) -> (B, T, D)."""

    hollow = False  # built with its values, and its buffers

    def __init__(self, hf: HFModel, *, grid: Grid) -> None:
        _whole(grid)
        padding = None if hf.family.learned else hf.config.pad_token_id
        super().__init__(hf.config.vocab_size, hf.config.hidden_size, padding)
        hf.initialise(self)

    def attend(self, x: Tensor) -> Tensor:
        """As a head: (B, T, D) -> logits (B, T, V)."""
        return F.linear(x, self.weight)


class Positions(nn.Embedding):
    """GPT-2's learned positions, then dropout: (B, T, D) -> (B, T, D)."""

    hollow = False

    def __init__(self, hf: HFModel) -> None:
        super().__init__(hf.config.max_position_embeddings, hf.config.hidden_size)
        hf.initialise(self)
        self.p = hf.config.embd_pdrop

    def forward(self, x: Tensor) -> Tensor:
        """See above."""
        positions = torch.arange(x.shape[1], device=x.device)
        return F.dropout(x + super().forward(positions), self.p, self.training)


class Block(nn.Module):
    """One of transformers' blocks, with the mask and the positions that its model makes: (B, T, D) -> (B, T, D)."""

    hollow = False

    def __init__(self, hf: HFModel, index: int) -> None:
        super().__init__()
        self.config = hf.config
        self.block = _block(hf, index)
        self.rotary = None if hf.family.learned else hf.family.find("RotaryEmbedding")(hf.config)
        hf.initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """See above."""
        from transformers.masking_utils import create_causal_mask

        positions = torch.arange(x.shape[1], device=x.device)[None]
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
        """See above."""
        y: Tensor = self.norm(x)
        return y


class Head(nn.Linear):
    """A head of its own: (B, T, D) -> logits (B, T, V)."""

    hollow = False

    def __init__(self, hf: HFModel) -> None:
        super().__init__(hf.config.hidden_size, hf.config.vocab_size, bias=False)
        hf.initialise(self)


@dataclass(frozen=True)
class CausalLMLoss:
    """transformers' loss of a causal language model: labels are the ids themselves, and are shifted here.

    Args:
        ignore_index: labels with this value do not count.
    """

    ignore_index: int = -100

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the losses, and how many labels count: the engine divides once. In fp32, or fp64 as the logits.

        Args:
            logits: (B, T, V).
            labels: integers (B, T).
        """
        logits = logits if logits.dtype == torch.float64 else logits.float()
        followed = labels[:, 1:]
        total = F.cross_entropy(
            logits[:, :-1].flatten(0, 1), followed.flatten(), ignore_index=self.ignore_index, reduction="sum"
        )
        return total, torch.count_nonzero(followed != self.ignore_index)


def _block(hf: HFModel, index: int) -> nn.Module:
    block: nn.Module = hf.family.find("Block" if hf.family.learned else "DecoderLayer")(hf.config, layer_idx=index)
    return block


def _whole(grid: Grid) -> None:
    if grid.tensor.size > 1:
        raise ValueError(
            f"hf_layers runs transformers' own blocks, whole, and the grid has {grid.tensor.size} tensor ranks: take "
            "load_hf(path), whose layers they shard, or a grid without tensor"
        )
