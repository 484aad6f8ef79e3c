"""Options of a decoder by group: attention, positions, the branches of a block, MLP, experts, and both ends.

Each group is a frozen dataclass, and ``DecoderConfig`` (``config.py``) is made of all of them: a field is declared
once, here, with its meaning, default and limits, and users give it by keyword. Without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..options.base import option
from .config_base import TransformerConfig, check_experts, whole_experts
from .recurrent.sizes import RecurrentSizes
from .rope_scaling import Scaling

Norm = Literal["rms", "rms_offset", "rms_plain", "layer", "layer_offset", "layer_weight", "layer_plain"]
NormPlace = Literal["before", "after", "both", "after_attention", "sum"]
Act = Literal["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_bloom", "relu", "relu2"]


@dataclass(frozen=True, repr=False, kw_only=True)
class TypeFields(TransformerConfig):
    """Kinds of the blocks."""

    layer_types: tuple[str, ...] = option(
        (),
        "For each block sliding_attention, with sliding_window, chunked_attention, with attention_chunk_size, "
        "full_attention, or linear_attention, with a recurrent layer in place of attention; with one_branch also mlp; "
        "(): all blocks have attention, with the window or the chunks if there are any.",
    )

    def _check_types(self, *known: str) -> None:
        kinds, depth = set(self.layer_types), self.num_hidden_layers
        if kinds and len(self.layer_types) != depth:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries, but num_hidden_layers is {depth}. Give one for each "
                "block."
            )
        if unknown := sorted(kinds - set(known)):
            raise ValueError(f"layer_types has {unknown[0]!r}. Give one of {', '.join(map(repr, known))}.")
        for kind, name in (("sliding_attention", "sliding_window"), ("chunked_attention", "attention_chunk_size")):
            if kind in kinds and getattr(self, name) is None:
                raise ValueError(f"layer_types has {kind!r}, but {name} is None. Give its number of tokens.")
            if kinds and kind in known and kind not in kinds:
                self._set(**{name: None})
        if len(kinds) == 1 and not kinds & {"linear_attention", "mlp"}:
            self._set(layer_types=())

    def window_of(self, layer: int) -> int | None:
        """Return the sliding window of a block, counted from 0, or None."""
        return self.sliding_window if not self.layer_types or self.layer_types[layer] == "sliding_attention" else None


@dataclass(frozen=True, repr=False, kw_only=True)
class RopeFields(TypeFields):
    """Rotary positions, which may be others in blocks with a sliding window."""

    rope_theta: float = option(1e4, "Base of the rotary wavelengths (Su et al. 2021, arXiv:2104.09864).")
    rope_scaling: Scaling | None = option(None, "Scaling of the rotary frequencies, of rope_scaling.py; None: none.")
    rope_local_base_freq: float | None = option(
        None, "This base, unscaled, in blocks with a sliding window; None: rope_theta."
    )

    def rope_of(self, layer: int) -> tuple[float, Scaling | None]:
        """Return base and scaling of the rotary wavelengths of a block, counted from 0."""
        if self.rope_local_base_freq is not None and self.window_of(layer) is not None:
            return self.rope_local_base_freq, None
        return self.rope_theta, self.rope_scaling


@dataclass(frozen=True, repr=False, kw_only=True)
class BlockFields(TypeFields):
    """Branches of the blocks, and their norms."""

    attention_chunk_size: int | None = option(
        None, "A token attends within its chunk of this many tokens only (Llama 4); None: no chunks.", least=1
    )
    linear_attention: RecurrentSizes | None = option(
        None, "Sizes of the recurrent layers: Mamba2Sizes or DeltaNetSizes."
    )
    one_branch: bool = option(
        False, "A block has one branch, attention, a recurrent layer or an MLP, as in Nemotron-H; False: also an MLP."
    )
    norm: Norm = option(
        "rms",
        "rms (RMSNorm), rms_offset (RMSNorm with the factor 1 + weight, Gemma's), rms_plain (without parameters), "
        "layer (LayerNorm with a bias), layer_offset (with the factor 1 + weight, Nemotron's), layer_weight (without a "
        "bias, Command R's) or layer_plain (without parameters, OLMo's).",
    )
    norm_place: NormPlace = option(
        "before",
        "Norms are before each branch, after it (OLMo-2), both (Gemma 2), after_attention: after the branches of "
        "blocks with attention, and before those of other blocks (OLMo-Hybrid), or sum: behind the sum of a branch and "
        "its input, without a norm before the head (the first transformers; OPT-350m).",
    )
    parallel_residual: bool = option(False, "Attention and MLP both take the block's input, and both are added to it.")
    shared_norm: bool = option(False, "One norm for attention and MLP, with parallel_residual.")
    residual_multiplier: float = option(
        1.0, "Factor of the outputs of attention and MLP, before they are added (Granite)."
    )

    def _check_blocks(self) -> None:
        known = ["sliding_attention", "chunked_attention", "full_attention", "linear_attention"]
        self._check_types(*known, *["mlp"] * self.one_branch)
        if ("linear_attention" in self.layer_types) != (self.linear_attention is not None):
            raise ValueError(
                f"linear_attention is {self.linear_attention}, but layer_types has "
                f"{self.layer_types.count('linear_attention')} blocks of 'linear_attention'. Give the sizes of these "
                "blocks, Mamba2Sizes or DeltaNetSizes, or neither."
            )
        if self.one_branch and (not self.layer_types or self.parallel_residual or self.norm_place != "before"):
            raise ValueError(
                f"one_branch is True with layer_types={self.layer_types}, norm_place={self.norm_place!r} and "
                f"parallel_residual={self.parallel_residual}. Give the branch of each block in layer_types, "
                "norm_place='before' and parallel_residual=False."
            )
        if self.shared_norm and not self.parallel_residual:
            raise ValueError("shared_norm is True, which needs parallel_residual=True. Give both, or neither.")
        if self.parallel_residual and self.norm_place != "before":
            raise ValueError(f"norm_place is {self.norm_place!r}, but parallel_residual needs norm_place='before'.")

    def type_of(self, layer: int) -> str:
        """Return the kind of a block, counted from 0: ``attention``, ``linear_attention`` or ``mlp``."""
        kind = self.layer_types[layer] if self.layer_types else ""
        return kind if kind in ("linear_attention", "mlp") else "attention"

    def chunk_of(self, layer: int) -> int | None:
        """Return the length of the chunks in which a block attends, counted from 0, or None."""
        chunked = not self.layer_types or self.layer_types[layer] == "chunked_attention"
        return self.attention_chunk_size if chunked else None


@dataclass(frozen=True, repr=False, kw_only=True)
class BiasFields(TransformerConfig):
    """Biases of attention."""

    qkv_bias: bool = option(False, "Add biases to queries, keys and values, with initial value 0.")
    out_bias: bool = option(False, "Add a bias to the output of attention.")


@dataclass(frozen=True, repr=False, kw_only=True)
class AttentionFields(BiasFields):
    """Attention: biases, norms of queries and keys, scores."""

    qk_norm: bool = option(False, "RMSNorm of each head of queries and keys, before the rotation.")
    qk_norm_all_heads: bool = option(
        False, "RMSNorm of all heads of the queries together, and of those of the keys (OLMoE)."
    )
    qk_norm_per_head: bool = option(
        False, "LayerNorm of each head, with a weight for each head and no bias (Command R+, StableLM)."
    )
    qk_norm_after: bool = option(False, "These norms are behind the rotation, not before it.")
    qk_l2_norm: bool = option(False, "RMSNorm without a weight, behind the rotation, in blocks that rotate (Llama 4).")
    clip_qkv: float | None = option(
        None, "Queries, keys and values are clipped to plus and minus this number (OLMoE); None: no limit.", above=0.0
    )
    query_pre_attn_scalar: float | None = option(
        None, "The scores are divided by its square root; None: that of head_dim.", above=0.0
    )
    attention_multiplier: float | None = option(
        None, "Factor of the scores, in place of query_pre_attn_scalar; None: that."
    )
    attn_logit_softcapping: float | None = option(
        None, "Cap c of the scores, x -> c tanh(x / c), without alibi; None: no cap."
    )
    attn_scale: float = option(
        0.0,
        "In blocks without rotary positions the queries at position p are multiplied by 1 + attn_scale * "
        "ln(1 + floor((p + 1) / floor_scale)) (Llama 4, arXiv:2501.19399).",
    )
    floor_scale: int = option(8192, "Number of positions in this factor.", least=1)
    attention_sinks: bool = option(
        False, "Each head has one more score, which takes a part of the softmax and adds nothing (gpt-oss)."
    )
    attn_output_gate: bool = option(
        False, "The output is multiplied by the sigmoid of a projection of the input (Qwen3-Next)."
    )

    @property
    def has_qk_norm(self) -> bool:
        """True if queries and keys have a norm of any kind."""
        return self.qk_norm or self.qk_norm_all_heads or self.qk_norm_per_head


@dataclass(frozen=True, repr=False, kw_only=True)
class MLPFields(TransformerConfig):
    """MLP of a block without experts."""

    hidden_act: Act = option(
        "silu",
        "Activation: silu, gelu, gelu_new, gelu_pytorch_tanh, gelu_bloom (the same with Bloom's constant), relu or "
        "relu2 (the square of relu).",
    )
    gated: bool = option(True, "The MLP is down(act(gate(x)) * up(x)); False: down(act(up(x))).")
    mlp_bias: bool = option(False, "Add biases to the linear layers of the MLP.")


@dataclass(frozen=True, repr=False, kw_only=True)
class ExpertFields(BlockFields, MLPFields):
    """Mixtures of experts in place of MLPs."""

    num_experts: int = option(0, "Number of experts of a block, which the expert axis divides; 0: no experts.", least=0)
    num_experts_per_tok: int = option(2, "Number of experts that each token goes to.", least=1)
    moe_intermediate_size: int = option(0, "Width of an expert; 0: intermediate_size.", least=0)
    norm_topk_prob: bool = option(True, "Divide the weights of a token's experts by their sum.")
    decoder_sparse_step: int = option(
        1,
        "Every block of this distance has experts: blocks decoder_sparse_step - 1, twice this number - 1, and so on, "
        "counted from 0. 1: every block.",
        least=1,
    )
    mlp_only_layers: tuple[int, ...] = option((), "Further blocks without experts, counted from 0.")
    router_aux_loss_coef: float = option(
        0.001, "Factor of the load-balancing loss of all blocks together, as transformers defines it.", least=0.0
    )
    shared_expert_intermediate_size: int = option(
        0, "Width of the expert that every token goes to; 0: there is none.", least=0
    )
    shared_expert_gate: bool = option(False, "Multiply its output by the sigmoid of a linear function of the token.")
    moe_bias: bool = option(False, "Add biases to the router and to the linear layers of the experts.")
    swiglu_limit: float | None = option(
        None,
        "The experts compute gpt-oss's clamped SwiGLU, (up + 1) * gate * sigmoid(swiglu_alpha * gate), with gate at "
        "most, and up within plus and minus, this number. Rows of gate and up lie by turns in one weight; None: "
        "SwiGLU.",
        above=0.0,
    )
    swiglu_alpha: float = option(1.702, "Factor in this sigmoid.")
    scoring_func: Literal["softmax", "sigmoid"] = option(
        "softmax", "Scores of experts: softmax over all, or sigmoid of each."
    )
    selection_bias: bool = option(
        False, "Select experts by the scores and a bias that training moves towards equal loads."
    )
    routed_scaling_factor: float = option(1.0, "Factor of the weights of a token's experts.")
    weigh_expert_inputs: bool = option(
        False, "These weights are factors of the inputs of experts, not of their outputs (Llama 4)."
    )
    n_group: int = option(1, "A token's experts are chosen from topk_group of n_group groups.", least=1)
    topk_group: int = option(1, "Number of these groups.", least=1)

    def _check_mixture(self) -> None:
        if not self.num_experts:
            return
        groups = self.n_group, self.topk_group
        check_experts("num_experts", self.num_experts, self.num_experts_per_tok, *groups)
        if (self.gated, self.hidden_act) != (True, "silu"):
            raise ValueError(
                f"num_experts is {self.num_experts}, but gated={self.gated} with hidden_act={self.hidden_act!r} is not "
                "what experts compute. Give gated=True and hidden_act='silu'."
            )
        if wrong := [layer for layer in self.mlp_only_layers if not 0 <= layer < self.num_hidden_layers]:
            raise ValueError(
                f"mlp_only_layers has {wrong[0]}, but the blocks are 0 to {self.num_hidden_layers - 1}. Leave it out."
            )
        if not self.moe_layers:
            raise ValueError(
                f"no block of {self.num_hidden_layers} has experts, because decoder_sparse_step is "
                f"{self.decoder_sparse_step} and mlp_only_layers is {self.mlp_only_layers}. Change one of them, or "
                "give a LlamaConfig."
            )

    def refuses_slices(self, experts: Mapping[str, Any] | None = None) -> str | None:
        """Return the reason why a pipeline cannot cut sequences of the model, as for ``TransformerConfig``."""
        return whole_experts(self.moe_arguments(), experts) if self.num_experts else None

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Numbers of the blocks that have experts, counted from 0."""
        if not self.num_experts:
            return ()
        step, dense = self.decoder_sparse_step, self.mlp_only_layers
        return tuple(layer for layer in range(step - 1, self.num_hidden_layers, step) if layer not in dense)

    def moe_arguments(self) -> dict[str, Any]:
        """Return the arguments of ``triax.moe.MoE`` that follow from the configuration.

        ``MoE`` has a loss for each block, in which the fractions of the tokens add up to 1.
        """
        k, loss = self.num_experts_per_tok, self.router_aux_loss_coef > 0 or not self.selection_bias
        return {
            "experts": self.num_experts,
            "top_k": k,
            "width": self.moe_intermediate_size,
            "router": self.scoring_func,
            "normalize": self.norm_topk_prob,
            "scale": self.routed_scaling_factor,
            "weigh_inputs": self.weigh_expert_inputs,
            "groups": self.n_group,
            "groups_limit": self.topk_group,
            "balance": ("bias",) * self.selection_bias + ("sequence",) * loss,
            "balance_coefficient": self.router_aux_loss_coef * k / len(self.moe_layers),
            "shared_width": self.shared_expert_intermediate_size,
            "shared_gate": self.shared_expert_gate,
            "bias": self.moe_bias,
            "clamp": None if self.swiglu_limit is None else (self.swiglu_limit, self.swiglu_alpha),
        }


@dataclass(frozen=True, repr=False, kw_only=True)
class EndFields(TransformerConfig):
    """Token embeddings and head."""

    embedding_norm: bool = option(False, "A norm behind the token embeddings (Bloom).")
    embedding_size: int = option(
        0, "Width of the token embeddings and of the head's input (OPT-350m); 0: hidden_size.", least=0
    )
    scale_embedding: bool = option(False, "Multiply the token embeddings by the square root of hidden_size.")
    embedding_multiplier: float = option(1.0, "Factor of the token embeddings (Granite).")
    position_offset: int = option(
        0, "Rows before the first position in the table of learned positions (2 in OPT).", least=0
    )
    logit_scale: float = option(1.0, "Factor of the logits, of a head without a bias.")
    final_logit_softcapping: float | None = option(None, "Cap c of the logits, x -> c tanh(x / c); None: no cap.")
    head_bias: bool = option(False, "Add a bias to an output layer that is not tied.")


@dataclass(frozen=True, repr=False, kw_only=True)
class PositionFields(BlockFields, RopeFields):
    """Positions: rotary, learned, or biases of the scores."""

    learned_positions: bool = option(
        False, "max_position_embeddings learned positions are added, in place of rotary ones."
    )
    alibi: Literal["", "added", "rounded"] = option(
        "",
        "Biases of the scores that grow with the position, in place of rotary positions: added to the scores (Bloom), "
        "or rounded to bfloat16 and multiplied by the factor of the scores (Falcon); empty: none.",
    )
    partial_rotary_factor: float = option(1.0, "Fraction of each head's channels, the first ones, that are rotated.")
    no_rope_layers: tuple[int, ...] = option((), "For each block 1 if it rotates, 0 if not; (): all do.")
    rope_interleave: bool = option(
        False, "Neighboring channels are a pair; False: channel i of the first half and of the second."
    )
    rope_reversed: bool = option(False, "Rotate the other way round: the halves of each head are exchanged.")

    def _check_positions(self) -> None:
        if self.no_rope_layers and len(self.no_rope_layers) != self.num_hidden_layers:
            raise ValueError(
                f"no_rope_layers has {len(self.no_rope_layers)} entries, but num_hidden_layers is "
                f"{self.num_hidden_layers}. Give one for each block."
            )
        if all(self.no_rope_layers):
            self._set(no_rope_layers=())

    def has_rope(self, layer: int) -> bool:
        """Return True if a block, counted from 0, has rotary positions."""
        return not (self.learned_positions or self.alibi) and (
            not self.no_rope_layers or bool(self.no_rope_layers[layer])
        )
