"""Configurations of the models as plain data: ``GPTConfig``, ``LlamaConfig``, ``DeepseekConfig`` and others.

Fields that Hugging Face's configurations also have are named as there. ``config_base.py`` has the fields of all models,
``config_groups.py`` those of decoders by group, ``presets.py`` the published sizes. Without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal

from ..grid.ranges import check_units
from ..options.base import option
from .config_base import TransformerConfig, check_experts, whole_experts
from .config_groups import Act, AttentionFields, EndFields, ExpertFields, Norm, PositionFields
from .encoder_config import EncoderConfig
from .encoder_decoder_config import T5Config, WhisperConfig
from .presets import DEEPSEEK_PRESETS, GPT_PRESETS, LLAMA_PRESETS, MIXTRAL_PRESETS, Presets
from .recurrent.sizes import sizes_from_fields
from .rope_scaling import DynamicScaling, LinearScaling, LongRopeScaling, RopeScaling, Scaling, YarnScaling


@dataclass(frozen=True, repr=False)
class AnyDecoderConfig(ExpertFields, AttentionFields, EndFields):
    """Configuration of a model that ``decoder_layers`` makes: a ``GPTConfig``, or a ``DecoderConfig``.

    The properties are a GPT's rules. ``DecoderConfig`` has fields in their place.
    """

    SHARDED: ClassVar[tuple[str, ...]] = (*TransformerConfig.SHARDED, "intermediate_size")
    LAYERS: ClassVar[str] = "decoder:decoder_layers"
    BLOCK: ClassVar[str] = "DecoderBlock"  # name of the class of the blocks
    # Pairs of settings that exclude each other, and the reason.
    EXCLUSIVE: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("sliding_window", "attention_chunk_size", "both limit what a token attends to"),
        ("qk_norm", "qk_norm_all_heads", "both are norms of queries and keys"),
        ("qk_norm", "qk_norm_per_head", "both are norms of queries and keys"),
        ("qk_norm_all_heads", "qk_norm_per_head", "both are norms of queries and keys"),
        ("query_pre_attn_scalar", "attention_multiplier", "both are factors of the scores"),
        ("alibi", "attn_logit_softcapping", "the cap would act on the biases too"),
        ("alibi", "qk_norm_after", "there is no rotation"),
        ("head_bias", "tie_word_embeddings", "the token embedding has no bias"),
        ("num_experts", "one_branch", "a block with experts has two branches"),
        ("swiglu_limit", "shared_expert_intermediate_size", "an expert that every token goes to has no limit"),
        ("moe_bias", "shared_expert_intermediate_size", "an expert that every token goes to has no bias"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for one, other, why in self.EXCLUSIVE:
            if getattr(self, one) and getattr(self, other):
                raise ValueError(
                    f"{one} is {getattr(self, one)!r} and {other} is {getattr(self, other)!r}, but {why}. Give one of "
                    "them."
                )
        if self.qk_norm_after and not self.has_qk_norm:
            raise ValueError("qk_norm_after is True, which needs qk_norm=True. Give both, or neither.")
        if self.head_bias and self.logit_scale != 1.0:
            raise ValueError(
                f"logit_scale is {self.logit_scale}, which a head with a bias lacks. Give head_bias=False."
            )
        self._check_blocks()
        if self.num_experts and not self.moe_intermediate_size:
            self._set(moe_intermediate_size=self.intermediate_size)
        self._check_mixture()
        self._check_heads()

    def _check_heads(self) -> None:
        heads, width = self.num_attention_heads, self.hidden_size
        if width % heads:
            raise ValueError(
                f"num_attention_heads={heads} does not divide hidden_size={width}. Give, for example, "
                f"hidden_size={width // heads * heads or heads}{'' if self.fused_qkv else ', or give head_dim'}."
            )

    @property
    def num_key_value_heads(self) -> int:
        """Number of key/value heads."""
        return self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def intermediate_size(self) -> int:
        """Width of the MLP."""
        raise NotImplementedError

    @property
    def fused_qkv(self) -> bool:
        """True if queries, keys and values are one weight."""
        return True

    @property
    def learned_positions(self) -> bool:
        """True if learned positions are added to the embeddings."""
        return True

    @property
    def alibi(self) -> str:
        """Biases of the scores that grow with the position; empty: none."""
        return ""

    def has_rope(self, layer: int) -> bool:
        """Return True if a block, counted from 0, has rotary positions."""
        return False

    @property
    def generated_positions(self) -> int:
        """Length of the longest sequence that is generated token by token, with the KV cache."""
        return self.max_position_embeddings

    @property
    def layer_count(self) -> int:
        """Number of entries in the model's list of layers, with those of learned positions and a norm in front."""
        return super().layer_count + self.learned_positions + self.embedding_norm + 2 * bool(self.embedding_size)

    def check_tensor(self, tensor: int) -> None:
        """Check that a tensor axis of size ``tensor`` can shard this model, as for ``TransformerConfig``."""
        super().check_tensor(tensor)
        if self.linear_attention is not None:
            check_units("heads of linear_attention", self.linear_attention.heads, 1, tensor)

    @property
    def _unused(self) -> tuple[str, ...]:
        kinds = {self.type_of(layer) for layer in range(self.num_hidden_layers)}
        attention = ("num_attention_heads", "num_key_value_heads", "head_dim", "partial_rotary_factor")
        return (
            *(() if "attention" in kinds else attention),
            *(("intermediate_size",) if self.one_branch and "mlp" not in kinds else ()),
        )


@dataclass(frozen=True, repr=False)
class DecoderConfig(PositionFields, AnyDecoderConfig):
    """Configuration of a decoder-only transformer, with the settings in which the families differ.

    With the defaults it is a Llama: rotary positions, pre-RMSNorm, SwiGLU and grouped queries. ``LlamaConfig`` and
    ``MixtralConfig`` are this class with other presets and defaults. ``models/huggingface/`` has the settings of each
    family.

    Raises:
        ValueError: a number does not divide another one as required, settings contradict each other, no block has
            experts though ``num_experts`` is not 0, or a check of ``TransformerConfig`` fails.
    """

    vocab_size: int = 32000
    max_position_embeddings: int = 4096
    hidden_size: int = 4096
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = option(
        0,
        "Number of key/value heads, which must divide num_attention_heads; 0: num_attention_heads. If the tensor axis "
        "does not divide this number, each rank holds the whole weights of keys and values, and computes only the "
        "heads that its queries use.",
    )
    intermediate_size: int = option(11008, "Width of the MLP.", least=1)
    head_dim: int = option(0, "Width of a head, even if it is rotated; 0: hidden_size / num_attention_heads.")
    _: KW_ONLY
    rms_norm_eps: float = option(1e-5, "Epsilon of each norm.")
    fused_qkv: bool = option(
        False,
        "Queries, keys and values are one weight, as in GPT-2, of as many heads each.",
    )

    def _check_heads(self) -> None:
        self._check_positions()
        if not self.fused_qkv:
            self._set(**{name: 2 if name == "head_dim" else 1 for name in self._unused})
        if self.fused_qkv or not self.head_dim:
            super()._check_heads()
        heads, width = self.num_attention_heads, self.hidden_size
        # The fields that were left out get their values, so that a reader of the configuration need not know the rule.
        self._set(num_key_value_heads=self.num_key_value_heads or heads, head_dim=self.head_dim or width // heads)
        if self.num_key_value_heads < 1 or heads % self.num_key_value_heads:
            fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} does not divide num_attention_heads={heads}. Give "
                f"one of {fits}."
            )
        if self.fused_qkv and (self.num_key_value_heads, self.head_dim) != (heads, width // heads):
            raise ValueError(
                f"num_key_value_heads is {self.num_key_value_heads} and head_dim is {self.head_dim}, but "
                f"fused_qkv=True needs {heads} and {width // heads}. Leave both out, or give fused_qkv=False."
            )
        rotary, rotated = not (self.learned_positions or self.alibi), self.rotary_dim
        if self.head_dim < 1 or (self.head_dim % 2 and rotary):
            raise ValueError(f"head_dim is {self.head_dim}, but rotary positions need pairs. Give an even number.")
        if rotary and (rotated < 2 or rotated % 2 or rotated > self.head_dim):
            raise ValueError(
                f"partial_rotary_factor={self.partial_rotary_factor} of head_dim={self.head_dim} is {rotated} "
                "rotated channels. Give a fraction with which the number is even, and at least 2."
            )

    @property
    def rotary_dim(self) -> int:
        """Number of rotated channels of a head."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def generated_positions(self) -> int:
        """Length of the longest sequence that is generated token by token, with the KV cache.

        Beyond the context length of pretraining, LongRoPE and dynamic scaling change the earlier keys.
        """
        if isinstance(self.rope_scaling, (LongRopeScaling, DynamicScaling)):
            return min(self.max_position_embeddings, self.rope_scaling.original_max_position_embeddings)
        return self.max_position_embeddings


@dataclass(frozen=True, repr=False)
class GPTConfig(AnyDecoderConfig):
    """Configuration of a decoder-only transformer like GPT-2, with learned positions, pre-LayerNorm and GELU.

    It has the fields of a ``DecoderConfig``, except those that follow from the others, and those of rotary positions.

    >>> config = triax.GPTConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16)
    >>> config.head_dim, config.intermediate_size, config.parameter_count
    (64, 4096, 354823168)

    Raises:
        ValueError: the number of heads does not divide the width, settings contradict each other, or a check of
            ``TransformerConfig`` fails.
    """

    PRESETS: ClassVar[Presets] = GPT_PRESETS
    EPSILON: ClassVar[str] = "layer_norm_epsilon"
    BLOCK: ClassVar[str] = "GPTBlock"

    vocab_size: int = 50257
    max_position_embeddings: int = 1024
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    mlp_ratio: int = option(4, "Ratio of the MLP's width, intermediate_size, to hidden_size.", least=1)
    layer_norm_epsilon: float = option(1e-5, "Epsilon of each LayerNorm.")
    _: KW_ONLY
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    tie_word_embeddings: bool = True
    norm: Norm = "layer"
    hidden_act: Act = "gelu_new"
    gated: bool = False

    @property
    def intermediate_size(self) -> int:
        """Width of the MLP."""
        return self.mlp_ratio * self.hidden_size

    @property
    def rms_norm_eps(self) -> float:
        """Epsilon of the norms, under the name that other configurations have for it."""
        return self.layer_norm_epsilon


@dataclass(frozen=True, repr=False)
class LlamaConfig(DecoderConfig):
    """``DecoderConfig`` with its defaults, and the sizes of the published models of Llama's architecture.

    With ``qkv_bias`` it has the architecture of Qwen2, with ``qk_norm`` that of Qwen3, with ``sliding_window`` that of
    Mistral, with ``no_rope_layers`` that of SmolLM3.

    >>> config = triax.LlamaConfig.preset("llama3-8b")
    >>> config.num_hidden_layers, config.num_key_value_heads, config.parameter_count
    (32, 8, 8030261248)
    """

    PRESETS: ClassVar[Presets] = LLAMA_PRESETS
    BLOCK: ClassVar[str] = "LlamaBlock"


@dataclass(frozen=True, repr=False)
class MixtralConfig(DecoderConfig):
    """``DecoderConfig`` with mixtures of experts in place of the MLPs: Mixtral, Qwen-MoE, OLMoE, gpt-oss."""

    PRESETS: ClassVar[Presets] = MIXTRAL_PRESETS
    BLOCK: ClassVar[str] = "MixtralBlock"

    _: KW_ONLY
    num_experts: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.num_experts:
            raise ValueError("num_experts is 0. Give at least 1, or a DecoderConfig.")


@dataclass(frozen=True, repr=False)
class DeepseekConfig(TransformerConfig):
    """Configuration of a DeepSeek-V2 or DeepSeek-V3: multi-head latent attention, and mixtures of experts.

    Raises:
        ValueError: the numbers of experts or groups do not fit each other, ``qk_rope_head_dim`` is odd, or a check of
            ``TransformerConfig`` fails.
    """

    PRESETS: ClassVar[Presets] = DEEPSEEK_PRESETS
    SHARDED: ClassVar[tuple[str, ...]] = (*TransformerConfig.SHARDED, "intermediate_size")
    LAYERS: ClassVar[str] = "deepseek:deepseek_layers"

    vocab_size: int = 102400
    max_position_embeddings: int = 4096
    hidden_size: int = 2048
    num_hidden_layers: int = 27
    num_attention_heads: int = 16
    intermediate_size: int = option(10944, "Width of the MLPs of the first blocks, which have no experts.", least=1)
    moe_intermediate_size: int = option(1408, "Width of an expert.", least=1)
    n_routed_experts: int = option(64, "Number of experts of a block. The expert axis must divide it.", least=1)
    n_shared_experts: int = option(2, "Number of experts that every token goes to.", least=1)
    num_experts_per_tok: int = option(6, "Number of experts that are chosen for each token.", least=1)
    first_k_dense_replace: int = option(1, "Number of the first blocks, without experts.", least=0)
    q_lora_rank: int | None = option(
        None, "Width of the latent vector of the queries; None: they are projected from the input.", least=1
    )
    kv_lora_rank: int = option(512, "Width of the latent vector of keys and values.", least=1)
    qk_nope_head_dim: int = option(128, "Channels of a head of queries and keys that are not rotated.", least=1)
    qk_rope_head_dim: int = option(
        64, "Rotated channels, an even number; those of the keys are the same for all heads.", least=1
    )
    v_head_dim: int = option(128, "Width of a head of the values.", least=1)
    scoring_func: Literal["softmax", "sigmoid"] = option(
        "softmax", "Scores of experts: softmax (V2), or sigmoid with a bias for the selection (V3)."
    )
    norm_topk_prob: bool = option(False, "Divide the weights of a token's experts by their sum.")
    routed_scaling_factor: float = option(1.0, "Factor of these weights.")
    n_group: int = option(1, "A token's experts are chosen from topk_group of n_group groups.", least=1)
    topk_group: int = option(1, "Number of these groups.", least=1)
    aux_loss_alpha: float = option(0.001, "Factor of the load-balancing loss of each block.", least=0.0)
    rope_theta: float = option(1e4, "Base of the rotary wavelengths.")
    rope_scaling: YarnScaling | None = option(None, "YaRN's scaling of the rotary frequencies, or None.")
    rope_interleave: bool = option(
        True, "Neighboring channels are rotated as a pair; False: channels of the two halves."
    )
    rms_norm_eps: float = option(1e-6, "Epsilon of each RMSNorm; of the latent vectors it is 1e-6.")
    num_nextn_predict_layers: int = option(0, "Modules that predict further tokens in training (mtp.py).", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        groups = self.n_group, self.topk_group
        check_experts("n_routed_experts", self.n_routed_experts, self.num_experts_per_tok, *groups)
        if self.qk_rope_head_dim % 2:
            raise ValueError(
                f"qk_rope_head_dim is {self.qk_rope_head_dim}, but rotary positions need pairs. Give an even number."
            )
        if self.sliding_window is not None:
            raise ValueError(f"sliding_window is {self.sliding_window}, which DeepSeek's models lack. Leave it out.")
        if self.first_k_dense_replace >= self.num_hidden_layers:
            raise ValueError(
                f"first_k_dense_replace is {self.first_k_dense_replace}, but there are {self.num_hidden_layers} "
                f"blocks. Give 0 to {self.num_hidden_layers - 1}, so that some have experts."
            )

    @property
    def layer_count(self) -> int:
        """Number of entries in the model's list of layers; with modules, the embedding is in it again."""
        modules = self.num_nextn_predict_layers
        return super().layer_count + (modules + 1 if modules else 0)

    def refuses_slices(self, experts: Mapping[str, Any] | None = None) -> str | None:
        """Return the reason why a pipeline cannot cut sequences of the model, as for ``TransformerConfig``."""
        if self.num_nextn_predict_layers:
            return "predicts several tokens at once (num_nextn_predict_layers), whose modules take ids of later slices"
        return whole_experts(self.moe_arguments(), experts)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Numbers of the blocks that have experts, counted from 0."""
        return tuple(range(self.first_k_dense_replace, self.num_hidden_layers))

    def moe_arguments(self) -> dict[str, Any]:
        """Return the arguments of ``triax.moe.MoE`` that follow from the configuration."""
        bias, loss = self.scoring_func == "sigmoid", self.aux_loss_alpha > 0
        return {
            "experts": self.n_routed_experts,
            "top_k": self.num_experts_per_tok,
            "width": self.moe_intermediate_size,
            "router": self.scoring_func,
            "normalize": self.norm_topk_prob,
            "scale": self.routed_scaling_factor,
            "groups": self.n_group,
            "groups_limit": self.topk_group,
            "shared_experts": self.n_shared_experts,
            "balance": ("bias",) * bias + ("sequence",) * loss,
            "balance_coefficient": self.aux_loss_alpha,
        }


# ------------------------------------------------------------------------------------------- fields of checkpoints

# The names that fields had in checkpoints written before the fields took Hugging Face's names.
_FORMER = {
    "sequence_length": "max_position_embeddings",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "hidden": "intermediate_size",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
    "original_length": "original_max_position_embeddings",
}


CONFIGS: dict[str, type[TransformerConfig]] = {
    cls.__name__: cls
    for cls in (GPTConfig, LlamaConfig, DecoderConfig, MixtralConfig, DeepseekConfig)
    + (EncoderConfig, T5Config, WhisperConfig)
}


def config_from_fields(kind: str, saved: Mapping[str, Any]) -> TransformerConfig:
    """Rebuild a configuration from the fields that a checkpoint's index stores as JSON.

    Args:
        kind: name of a class of ``CONFIGS``, such as ``"GPTConfig"``.
        saved: field name -> value, under the current names or the names in checkpoints of earlier versions.

    Raises:
        ValueError: ``kind`` is another name.
    """
    if kind not in CONFIGS:
        raise ValueError(f"the checkpoint stores a {kind}, but only {', '.join(CONFIGS)} can be rebuilt")
    cls = CONFIGS[kind]
    former = _FORMER | {"norm_eps": cls.EPSILON}
    renamed = {former.get(name, name): value for name, value in saved.items()}
    if (scaling := renamed.get("rope_scaling")) is not None:
        scaled: type[Scaling] = RopeScaling if "low_freq_factor" in scaling else LinearScaling
        if "beta_fast" in scaling:
            scaled = YarnScaling
        elif "short_factor" in scaling:
            scaled = LongRopeScaling
        elif scaled is LinearScaling and "original_max_position_embeddings" in scaling:
            scaled = DynamicScaling
        renamed["rope_scaling"] = scaled(**{former.get(name, name): value for name, value in scaling.items()})
    if (sizes := renamed.get("linear_attention")) is not None:
        renamed["linear_attention"] = sizes_from_fields(sizes)
    return cls(**renamed)
