"""Configurations of the models as plain data, without torch: sizes, settings, number of parameters.

Fields that Hugging Face's configurations also have are named as there. ``presets.py`` has the published sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

from ..base.errors import nearest
from ..grid.ranges import check_units
from .presets import DEEPSEEK_PRESETS, GPT_PRESETS, LLAMA_PRESETS, MIXTRAL_PRESETS, Presets
from .recurrent.sizes import RecurrentSizes, sizes_from_fields
from .rope_scaling import DynamicScaling, LinearScaling, LongRopeScaling, RopeScaling, Scaling, YarnScaling


@dataclass(frozen=True, repr=False)
class TransformerConfig:
    """Fields and checks that the configurations of all models share.

    Attributes:
        vocab_size: number of different tokens. The tensor axis need not divide it.
        max_position_embeddings: length of the longest sequence, in tokens.
        hidden_size: width of the residual stream.
        num_hidden_layers: number of blocks.
        num_attention_heads: number of query heads. The tensor axis has at most as many ranks.
        dropout: dropout probability for the embeddings and for the output of each residual branch.
        tie_word_embeddings: share one weight between the output layer and the token embedding.
        initializer_range: standard deviation of the initial weights. The last weight of a residual branch has
            ``initializer_range / sqrt(2 num_hidden_layers)`` (Radford et al. 2019, section 2.3). Biases start at 0.
        sliding_window: number of tokens that a token attends to, itself included; None: all tokens before it.

    Raises:
        ValueError: a size below 1, or a dropout outside [0, 1).
    """

    PRESETS: ClassVar[Presets] = {}
    SIZES: ClassVar[tuple[str, ...]] = (
        *("vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    )
    SHARDED: ClassVar[tuple[str, ...]] = ("num_attention_heads", "vocab_size")  # over the tensor axis
    EPSILON: ClassVar[str] = "rms_norm_eps"  # the field with the epsilon of the norms

    vocab_size: int
    max_position_embeddings: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    dropout: float = field(default=0.0, kw_only=True)
    tie_word_embeddings: bool = field(default=False, kw_only=True)
    initializer_range: float = field(default=0.02, kw_only=True)
    sliding_window: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in (*self.SIZES, *(() if self.sliding_window is None else ("sliding_window",))):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}. Give at least 1.")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}. Give a probability in [0, 1).")

    def __repr__(self) -> str:
        """Return a call that makes the configuration, without the fields that have their defaults."""
        values = [(each, getattr(self, each.name)) for each in fields(self)]
        changed = ", ".join(f"{each.name}={value!r}" for each, value in values if value != each.default)
        return f"{type(self).__name__}({changed})"

    @classmethod
    def settings(cls) -> list[str]:
        """List the names of the fields."""
        return [each.name for each in fields(cls)]

    @property
    def layer_count(self) -> int:
        """Number of entries in the model's list of layers: embedding, learned positions if any, blocks, norm, head."""
        return self.num_hidden_layers + 3

    @property
    def norm_epsilon(self) -> float:
        """Epsilon of the norms."""
        return float(getattr(self, self.EPSILON))

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Make a published configuration or a small one for tests by name, with the given fields changed.

        >>> triax.GPTConfig.preset("gpt2").parameter_count
        124439808
        >>> triax.LlamaConfig.preset("llama3-8b").parameter_count
        8030261248

        Raises:
            ValueError: the name is unknown; the message has the nearest one.
            TypeError: a field is unknown; the message has the nearest one.
        """
        if name not in cls.PRESETS:
            raise ValueError(f"there is no preset {name!r}; {nearest(name, cls.PRESETS)}")
        known = cls.settings()
        if unknown := sorted(set(changes) - set(known)):
            raise TypeError(f"{cls.__name__} has no field {unknown[0]!r}; {nearest(unknown[0], known)}")
        return cls(**cls.PRESETS[name] | changes)

    @classmethod
    def presets(cls) -> tuple[str, ...]:
        """List the names of the presets that ``preset`` accepts."""
        return tuple(cls.PRESETS)

    @property
    def residual_std(self) -> float:
        """Initial standard deviation of the last weight of each residual branch; a block has two such branches."""
        return float(self.initializer_range / (2 * self.num_hidden_layers) ** 0.5)

    @property
    def parameter_count(self) -> int:
        """Number of parameters, a tied one counted once."""
        raise NotImplementedError(f"{type(self).__name__} does not count its parameters")

    def check_tensor(self, tensor: int) -> None:
        """Check that a tensor axis of size ``tensor`` can shard this model, before any process starts.

        Raises:
            ValueError: the size exceeds a number of ``SHARDED``, such as the number of heads or the vocabulary.
        """
        for name in self.SHARDED:
            check_units(name, getattr(self, name), 1, tensor)

    def refuses_slices(self, experts: Mapping[str, Any] | None = None) -> str | None:
        """Return the reason why a pipeline cannot cut sequences of the model into slices; None if it can.

        Args:
            experts: further arguments of its mixtures of experts, such as ``balance``.
        """
        return None


@dataclass(frozen=True, repr=False)
class DecoderConfig(TransformerConfig):
    """Configuration of a decoder-only transformer, with the settings in which the families differ.

    With the defaults it is a Llama: rotary positions, pre-RMSNorm, SwiGLU and grouped queries. ``GPTConfig``,
    ``LlamaConfig`` and ``MixtralConfig`` are this class with other defaults. ``models/huggingface/`` has the
    settings of each family.

    Attributes, beside those of ``TransformerConfig``:
        max_position_embeddings: length of the longest sequence, and the number of ``learned_positions``.
        num_key_value_heads: number of key/value heads, which must divide ``num_attention_heads``; 0 means
            ``num_attention_heads``. If the tensor axis does not divide this number, each rank holds the whole weights
            of keys and values, and computes only the heads that its queries use.
        intermediate_size: width of the MLP.
        head_dim: width of one head, an even number; 0 means ``hidden_size / num_attention_heads``.
        rope_theta: base of the rotary wavelengths (Su et al. 2021, arXiv:2104.09864).
        rope_scaling: scaling of the rotary frequencies: one of ``rope_scaling.py``, or None.
        rms_norm_eps: epsilon of each norm.
        qkv_bias: add biases to queries, keys and values, with initial value 0.
        qk_norm: apply an RMSNorm to each head of the queries and of the keys, before the rotation.
        qk_norm_all_heads: apply an RMSNorm to all heads of the queries together, and to those of the keys (OLMoE,
            OLMo-2).
        qk_norm_after: the norms of ``qk_norm`` are behind the rotation, not before it.
        qk_norm_per_head: apply a LayerNorm without a bias to each head of the queries and of the keys, with a weight
            for each head (Command R+, StableLM).
        out_bias, mlp_bias: add biases to the output of attention and to the linear layers of the MLP.
        layer_types: for each block ``"sliding_attention"``, with ``sliding_window``, ``"chunked_attention"``, with
            ``attention_chunk_size``, ``"full_attention"``, or ``"linear_attention"``, with a recurrent layer in place
            of attention; with ``one_branch`` also ``"mlp"``; (): all blocks have attention, with the window or the
            chunks if there are any.
        attention_chunk_size: a token attends to the tokens before it within its chunk of this many tokens only (Llama
            4); None: no chunks.
        qk_l2_norm: divide each head of queries and keys by the root mean square of its channels, after the rotation, in
            blocks with rotary positions (Llama 4).
        attn_scale, floor_scale: in blocks without rotary positions the queries at position p are multiplied by
            ``1 + attn_scale * ln(1 + floor((p + 1) / floor_scale))`` (Llama 4, arXiv:2501.19399).
        linear_attention: sizes of the recurrent layers: ``Mamba2Sizes`` or ``DeltaNetSizes``.
        one_branch: each block has one branch, attention, a recurrent layer or an MLP, as ``layer_types`` says
            (Nemotron-H); False: each has an MLP behind the other branch.
        attn_output_gate: the output of attention is multiplied by the sigmoid of a projection of its input
            (Qwen3-Next).
        no_rope_layers: for each block 1 if it has rotary positions, 0 if it has none; (): all have them.
        norm: ``rms`` (RMSNorm), ``rms_offset`` (RMSNorm with the factor 1 + weight, Gemma's), ``rms_plain`` (without
            parameters), ``layer`` (LayerNorm with a bias), ``layer_offset`` (with the factor 1 + weight, Nemotron's),
            ``layer_weight`` (without a bias, Command R's) or ``layer_plain`` (without parameters, OLMo's).
        norm_place: ``before`` each branch, ``after`` it (OLMo-2), ``both`` (Gemma 2), ``after_attention``: after the
            branches of blocks with attention, and before those of other blocks (OLMo-Hybrid), or ``sum``: behind the
            sum of a branch and its input, without a norm before the head (the first transformers; OPT-350m).
        parallel_residual: attention and MLP both take the block's input, and both are added to it.
        shared_norm: one norm for attention and MLP, with ``parallel_residual``.
        hidden_act: activation of the MLP: ``silu``, ``gelu``, ``gelu_new``, ``gelu_pytorch_tanh``, ``gelu_bloom``
            (the same with Bloom's constant), ``relu`` or ``relu2`` (the square of ``relu``).
        gated: the MLP is ``down(act(gate(x)) * up(x))``; False: ``down(act(up(x)))``.
        partial_rotary_factor: fraction of each head's channels, the first ones, that are rotated.
        embedding_norm: a norm behind the token embeddings (Bloom).
        alibi: biases of the scores that grow with the position, in place of rotary positions: ``added`` to the scores
            (Bloom), or ``rounded`` to bfloat16 and multiplied by the factor of the scores (Falcon); empty: none.
        learned_positions: learned positions that are added to the embeddings, in place of rotary ones.
        position_offset: number of rows before the first position in the table of learned positions (2 in OPT).
        rope_reversed: rotate the other way round, which is the same model with the halves of each head exchanged.
        rope_interleave: neighboring channels of a head are rotated as a pair; False: channel i of the first half and
            of the second half of the rotated ones.
        embedding_size: width of the token embeddings and of the head's input, if they are projected to ``hidden_size``
            and back (OPT-350m); 0: ``hidden_size``.
        scale_embedding: multiply the token embeddings by the square root of ``hidden_size``.
        embedding_multiplier, residual_multiplier: factors of the token embeddings, and of the output of attention and
            of MLP before it is added (Granite).
        logit_scale: factor of the logits.
        query_pre_attn_scalar: the scores are divided by the square root of this number; None: of ``head_dim``.
        attention_multiplier: factor of the scores, in place of ``query_pre_attn_scalar``; None: that.
        attn_logit_softcapping, final_logit_softcapping: cap c of the scores and of the logits, x -> c tanh(x / c);
            None: no cap.
        rope_local_base_freq: base of the rotary wavelengths of blocks with a sliding window, which are then not
            scaled; None: ``rope_theta``.
        head_bias: add a bias to the output layer.
        fused_qkv: queries, keys and values are one weight, as in GPT-2. There are as many heads of keys as of queries.
        clip_qkv: largest absolute value of queries, keys and values, to which they are clipped before the rotation
            (OLMoE); None: they are not clipped.
        attention_sinks: have in each head a score of its own beside those of the tokens, which takes a part of the
            softmax and adds nothing to the output (gpt-oss).
        num_experts: number of experts of a block. The expert axis must divide it.
        num_experts_per_tok: number of experts that each token goes to.
        moe_intermediate_size: width of an expert; 0 means ``intermediate_size``.
        norm_topk_prob: divide the weights of a token's experts by their sum.
        decoder_sparse_step: every block of this distance has experts: blocks ``decoder_sparse_step`` - 1, twice this
            number - 1, and so on, counted from 0. 1: every block.
        mlp_only_layers: further blocks without experts, counted from 0.
        router_aux_loss_coef: factor of the load-balancing loss, as ``transformers`` defines it: a loss of all blocks
            together, in which an expert's fractions of the tokens add up to ``num_experts_per_tok``.
        shared_expert_intermediate_size: width of the expert that every token goes to, beside those chosen for it; 0:
            there is none.
        shared_expert_gate: multiply the output of this expert by the sigmoid of a linear function of the token.
        moe_bias: add biases to the router and to the linear layers of the experts.
        swiglu_limit: the experts compute gpt-oss's clamped SwiGLU, ``(up + 1) * gate * sigmoid(swiglu_alpha * gate)``,
            with ``gate`` at most, and ``up`` within plus and minus, this number. Rows of gate and up lie by turns in
            one weight. None: SwiGLU.
        swiglu_alpha: factor in this sigmoid.
        scoring_func: scores of the experts: ``softmax`` over all of them, or ``sigmoid`` of each.
        selection_bias: add to the scores, for the selection of experts only, a bias that training moves towards equal
            loads (DeepSeek-V3).
        routed_scaling_factor: factor of the weights of a token's experts.
        weigh_expert_inputs: these weights are factors of the experts' inputs, not of their outputs (Llama 4).
        n_group, topk_group: a token's experts are chosen from ``topk_group`` of ``n_group`` groups.

    Raises:
        ValueError: a number does not divide another one as required, settings contradict each other, no block has
            experts though ``num_experts`` is not 0, or a check of ``TransformerConfig`` fails.
    """

    SIZES: ClassVar[tuple[str, ...]] = (
        *(*TransformerConfig.SIZES, "intermediate_size", "decoder_sparse_step", "n_group", "topk_group"),
        "floor_scale",
    )
    SHARDED: ClassVar[tuple[str, ...]] = (*TransformerConfig.SHARDED, "intermediate_size")
    BLOCK: ClassVar[str] = "DecoderBlock"  # name of the class of the blocks

    vocab_size: int = 32000
    max_position_embeddings: int = 4096
    hidden_size: int = 4096
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 0
    intermediate_size: int = 11008
    head_dim: int = 0
    rope_theta: float = 1e4
    rope_scaling: Scaling | None = None
    rms_norm_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    qk_norm_all_heads: bool = field(default=False, kw_only=True)
    qk_norm_after: bool = field(default=False, kw_only=True)
    qk_norm_per_head: bool = field(default=False, kw_only=True)
    out_bias: bool = field(default=False, kw_only=True)
    mlp_bias: bool = field(default=False, kw_only=True)
    layer_types: tuple[str, ...] = field(default=(), kw_only=True)
    no_rope_layers: tuple[int, ...] = field(default=(), kw_only=True)
    attention_chunk_size: int | None = field(default=None, kw_only=True)
    qk_l2_norm: bool = field(default=False, kw_only=True)
    attn_scale: float = field(default=0.0, kw_only=True)
    floor_scale: int = field(default=8192, kw_only=True)
    norm: str = field(default="rms", kw_only=True)
    norm_place: str = field(default="before", kw_only=True)
    parallel_residual: bool = field(default=False, kw_only=True)
    shared_norm: bool = field(default=False, kw_only=True)
    hidden_act: str = field(default="silu", kw_only=True)
    gated: bool = field(default=True, kw_only=True)
    partial_rotary_factor: float = field(default=1.0, kw_only=True)
    embedding_norm: bool = field(default=False, kw_only=True)
    alibi: str = field(default="", kw_only=True)
    learned_positions: bool = field(default=False, kw_only=True)
    position_offset: int = field(default=0, kw_only=True)
    rope_interleave: bool = field(default=False, kw_only=True)
    rope_reversed: bool = field(default=False, kw_only=True)
    embedding_size: int = field(default=0, kw_only=True)
    scale_embedding: bool = field(default=False, kw_only=True)
    embedding_multiplier: float = field(default=1.0, kw_only=True)
    residual_multiplier: float = field(default=1.0, kw_only=True)
    logit_scale: float = field(default=1.0, kw_only=True)
    query_pre_attn_scalar: float | None = field(default=None, kw_only=True)
    attention_multiplier: float | None = field(default=None, kw_only=True)
    attn_logit_softcapping: float | None = field(default=None, kw_only=True)
    final_logit_softcapping: float | None = field(default=None, kw_only=True)
    rope_local_base_freq: float | None = field(default=None, kw_only=True)
    head_bias: bool = field(default=False, kw_only=True)
    fused_qkv: bool = field(default=False, kw_only=True)
    clip_qkv: float | None = field(default=None, kw_only=True)
    attention_sinks: bool = field(default=False, kw_only=True)
    linear_attention: RecurrentSizes | None = field(default=None, kw_only=True)
    one_branch: bool = field(default=False, kw_only=True)
    attn_output_gate: bool = field(default=False, kw_only=True)
    num_experts: int = field(default=0, kw_only=True)
    num_experts_per_tok: int = field(default=2, kw_only=True)
    moe_intermediate_size: int = field(default=0, kw_only=True)
    norm_topk_prob: bool = field(default=True, kw_only=True)
    decoder_sparse_step: int = field(default=1, kw_only=True)
    mlp_only_layers: tuple[int, ...] = field(default=(), kw_only=True)
    router_aux_loss_coef: float = field(default=0.001, kw_only=True)
    shared_expert_intermediate_size: int = field(default=0, kw_only=True)
    shared_expert_gate: bool = field(default=False, kw_only=True)
    moe_bias: bool = field(default=False, kw_only=True)
    swiglu_limit: float | None = field(default=None, kw_only=True)
    swiglu_alpha: float = field(default=1.702, kw_only=True)
    scoring_func: str = field(default="softmax", kw_only=True)
    selection_bias: bool = field(default=False, kw_only=True)
    routed_scaling_factor: float = field(default=1.0, kw_only=True)
    weigh_expert_inputs: bool = field(default=False, kw_only=True)
    n_group: int = field(default=1, kw_only=True)
    topk_group: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_words()
        self._check_lists_of_layers()
        for name in () if self.fused_qkv else self._unused:  # one configuration is written in one way
            object.__setattr__(self, name, 2 if name == "head_dim" else 1)
        self._check_heads()
        self._check_settings()
        self._check_mixture()

    def _check_words(self) -> None:
        known = {
            "norm": ("rms", "rms_offset", "rms_plain", "layer", "layer_offset", "layer_weight", "layer_plain"),
            "norm_place": ("before", "after", "both", "after_attention", "sum"),
            "hidden_act": ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_bloom", "relu", "relu2"),
            "alibi": ("", "added", "rounded"),
            "scoring_func": ("softmax", "sigmoid"),
        }
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} is {getattr(self, name)!r}. Give one of {', '.join(values)}.")

    def _check_lists_of_layers(self) -> None:
        for name in ("layer_types", "no_rope_layers"):
            given = tuple(getattr(self, name))
            if given != getattr(self, name):  # a list
                object.__setattr__(self, name, given)
            if given and len(given) != self.num_hidden_layers:
                raise ValueError(
                    f"{name} has {len(given)} entries, but num_hidden_layers is {self.num_hidden_layers}. Give one "
                    "for each block."
                )
        if self.attention_chunk_size is not None and self.attention_chunk_size < 1:
            raise ValueError(f"attention_chunk_size is {self.attention_chunk_size}. Give at least 1, or None.")
        if self.attention_chunk_size is not None and self.sliding_window is not None:
            raise ValueError(
                f"sliding_window is {self.sliding_window} and attention_chunk_size is {self.attention_chunk_size}. "
                "Give one of them."
            )
        kinds = set(self.layer_types)
        if kinds and "sliding_attention" not in kinds:
            object.__setattr__(self, "sliding_window", None)
        if kinds and "chunked_attention" not in kinds:
            object.__setattr__(self, "attention_chunk_size", None)
        if self.no_rope_layers and all(self.no_rope_layers):
            object.__setattr__(self, "no_rope_layers", ())
        known = ["sliding_attention", "chunked_attention", "full_attention", "linear_attention"]
        known += ["mlp"] * self.one_branch
        if unknown := sorted(kinds - set(known)):
            raise ValueError(f"layer_types has {unknown[0]!r}. Give one of {', '.join(map(repr, known))}.")
        if "chunked_attention" in kinds and self.attention_chunk_size is None:
            raise ValueError("layer_types has 'chunked_attention', but attention_chunk_size is None. Give the length.")
        if "sliding_attention" in kinds and self.sliding_window is None:
            raise ValueError("layer_types has 'sliding_attention', but sliding_window is None. Give the window.")
        if len(kinds - {"linear_attention", "mlp"}) == len(kinds) == 1:  # one configuration is written in one way
            object.__setattr__(self, "layer_types", ())
        if ("linear_attention" in kinds) != (self.linear_attention is not None):
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

    def _check_heads(self) -> None:
        heads = self.num_attention_heads
        width = self.hidden_size
        if (not self.head_dim or self.fused_qkv) and width % heads:
            raise ValueError(
                f"num_attention_heads={heads} does not divide hidden_size={width}. Give, for example, "
                f"hidden_size={width // heads * heads or heads}{'' if self.fused_qkv else ', or give head_dim'}."
            )
        # The fields that were left out get their values, so that a reader of the configuration need not know the rule.
        if not self.num_key_value_heads:
            object.__setattr__(self, "num_key_value_heads", heads)
        if not self.head_dim:
            object.__setattr__(self, "head_dim", width // heads)
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
        if self.head_dim < 1 or (self.head_dim % 2 and not (self.learned_positions or self.alibi)):
            raise ValueError(f"head_dim is {self.head_dim}, but rotary positions need pairs. Give an even number.")

    def _check_settings(self) -> None:
        both = [name for name in ("qk_norm", "qk_norm_all_heads", "qk_norm_per_head") if getattr(self, name)]
        if len(both) > 1:
            raise ValueError(f"{both[0]} and {both[1]} are both True. Give one of them.")
        if self.qk_norm_after and (not both or self.alibi):
            raise ValueError("qk_norm_after is True, which needs qk_norm=True and rotary positions. Give False.")
        rotated = self.rotary_dim
        if self.alibi and self.attn_logit_softcapping is not None:
            raise ValueError(
                f"alibi is {self.alibi!r} and attn_logit_softcapping is {self.attn_logit_softcapping}, but the cap "
                "would act on the biases too. Give one of them."
            )
        if not (self.learned_positions or self.alibi) and (rotated < 2 or rotated % 2 or rotated > self.head_dim):
            raise ValueError(
                f"partial_rotary_factor={self.partial_rotary_factor} of head_dim={self.head_dim} is {rotated} "
                "rotated channels. Give a fraction with which the number is even, and at least 2."
            )
        if self.query_pre_attn_scalar is not None and not self.query_pre_attn_scalar > 0:
            raise ValueError(f"query_pre_attn_scalar is {self.query_pre_attn_scalar}. Give a number above 0.")
        if self.query_pre_attn_scalar is not None and self.attention_multiplier is not None:
            raise ValueError(
                f"query_pre_attn_scalar is {self.query_pre_attn_scalar} and attention_multiplier is "
                f"{self.attention_multiplier}, but both are factors of the scores. Give one of them."
            )
        if self.head_bias and self.logit_scale != 1.0:
            raise ValueError(
                f"logit_scale is {self.logit_scale}, which a head with a bias lacks. Give head_bias=False."
            )
        if self.shared_norm and not self.parallel_residual:
            raise ValueError("shared_norm is True, which needs parallel_residual=True. Give both, or neither.")
        if self.parallel_residual and self.norm_place != "before":
            raise ValueError(f"norm_place is {self.norm_place!r}, but parallel_residual needs norm_place='before'.")
        if self.head_bias and self.tie_word_embeddings:
            raise ValueError("head_bias and tie_word_embeddings are both True. Give one of them.")
        if self.clip_qkv is not None and self.clip_qkv <= 0:
            raise ValueError(f"clip_qkv is {self.clip_qkv}. Give a positive number, or None.")

    def _check_mixture(self) -> None:
        object.__setattr__(self, "mlp_only_layers", tuple(self.mlp_only_layers))
        if not self.num_experts:
            return
        object.__setattr__(self, "moe_intermediate_size", self.moe_intermediate_size or self.intermediate_size)
        _check_experts(self.num_experts, self.num_experts_per_tok, self.router_aux_loss_coef, "router_aux_loss_coef")
        if self.one_branch:
            raise ValueError(f"num_experts is {self.num_experts}, which one_branch=True cannot have. Give 0.")
        if (self.gated, self.hidden_act) != (True, "silu"):
            raise ValueError(
                f"num_experts is {self.num_experts}, but gated={self.gated} with hidden_act={self.hidden_act!r} is not "
                "what experts compute. Give gated=True and hidden_act='silu'."
            )
        if self.shared_expert_intermediate_size < 0:
            raise ValueError(
                f"shared_expert_intermediate_size is {self.shared_expert_intermediate_size}. Give a width, or 0."
            )
        _check_groups("num_experts", self.num_experts, self.num_experts_per_tok, self.n_group, self.topk_group)
        if self.swiglu_limit is not None and self.swiglu_limit <= 0:
            raise ValueError(f"swiglu_limit is {self.swiglu_limit}. Give a number above 0, or None.")
        if self.swiglu_limit is not None and self.shared_expert_intermediate_size:
            raise ValueError(
                f"swiglu_limit is {self.swiglu_limit}, which experts chosen by a router have, but "
                f"shared_expert_intermediate_size is {self.shared_expert_intermediate_size}. Give one of them."
            )
        if self.moe_bias and self.shared_expert_intermediate_size:
            raise ValueError(
                "moe_bias is True, which experts chosen by a router have, but shared_expert_intermediate_size is "
                f"{self.shared_expert_intermediate_size}. Give one of them."
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

    @property
    def layer_count(self) -> int:
        """Number of entries in the model's list of layers, with those of learned positions and a norm in front."""
        return super().layer_count + self.learned_positions + self.embedding_norm + 2 * bool(self.embedding_size)

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

    def refuses_slices(self, experts: Mapping[str, Any] | None = None) -> str | None:
        """Return the reason why a pipeline cannot cut sequences of the model, as for ``TransformerConfig``."""
        return _whole_experts(self.moe_arguments(), experts) if self.num_experts else None

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Numbers of the blocks that have experts, counted from 0."""
        if not self.num_experts:
            return ()
        step, dense = self.decoder_sparse_step, self.mlp_only_layers
        return tuple(layer for layer in range(step - 1, self.num_hidden_layers, step) if layer not in dense)

    def check_tensor(self, tensor: int) -> None:
        """Check that a tensor axis of size ``tensor`` can shard this model, as for ``TransformerConfig``."""
        for name in (name for name in self.SHARDED if name not in self._unused):
            check_units(name, getattr(self, name), 1, tensor)
        if self.linear_attention is not None:
            check_units("heads of linear_attention", self.linear_attention.heads, 1, tensor)

    @property
    def _unused(self) -> tuple[str, ...]:
        """Names of the sizes that no block has."""
        kinds = {self.type_of(layer) for layer in range(self.num_hidden_layers)}
        attention = ("num_attention_heads", "num_key_value_heads", "head_dim", "partial_rotary_factor")
        return (
            *(() if "attention" in kinds else attention),
            *(("intermediate_size",) if self.one_branch and "mlp" not in kinds else ()),
        )

    def type_of(self, layer: int) -> str:
        """Return the kind of a block, counted from 0: ``attention``, ``linear_attention`` or ``mlp``."""
        kind = self.layer_types[layer] if self.layer_types else ""
        return kind if kind in ("linear_attention", "mlp") else "attention"

    def window_of(self, layer: int) -> int | None:
        """Return the sliding window of a block, counted from 0, or None."""
        return self.sliding_window if not self.layer_types or self.layer_types[layer] == "sliding_attention" else None

    def chunk_of(self, layer: int) -> int | None:
        """Return the length of the chunks in which a block attends, counted from 0, or None."""
        chunked = not self.layer_types or self.layer_types[layer] == "chunked_attention"
        return self.attention_chunk_size if chunked else None

    def has_rope(self, layer: int) -> bool:
        """Return True if a block, counted from 0, has rotary positions."""
        return not (self.learned_positions or self.alibi) and (
            not self.no_rope_layers or bool(self.no_rope_layers[layer])
        )

    def rope_of(self, layer: int) -> tuple[float, Scaling | None]:
        """Return base and scaling of the rotary wavelengths of a block, counted from 0."""
        if self.rope_local_base_freq is not None and self.window_of(layer) is not None:
            return self.rope_local_base_freq, None
        return self.rope_theta, self.rope_scaling

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

    @property
    def attention_count(self) -> int:
        """Number of parameters of the attention of a block."""
        d = self.hidden_size
        q, kv = self.num_attention_heads * self.head_dim, 2 * self.num_key_value_heads * self.head_dim
        count = 2 * d * q + d * kv  # q, out; k and v
        count += (q + kv if self.qkv_bias else 0) + (d if self.out_bias else 0)
        count += (d + self.qkv_bias) * q if self.attn_output_gate else 0
        count += 2 * self.head_dim if self.qk_norm and self.norm != "rms_plain" else 0
        count += self.num_attention_heads if self.attention_sinks else 0
        return count + (q + kv // 2 if self.qk_norm_all_heads or self.qk_norm_per_head else 0)

    @property
    def norm_count(self) -> int:
        """Number of parameters of a norm over the hidden states."""
        return {"layer": 2, "layer_offset": 2, "rms_plain": 0, "layer_plain": 0}.get(self.norm, 1) * self.hidden_size

    @property
    def parameter_count(self) -> int:
        """Number of parameters, of all experts, a tied one counted once."""
        d, hidden, matrices = self.hidden_size, self.intermediate_size, 3 if self.gated else 2
        mlp = matrices * d * hidden + ((matrices - 1) * hidden + d if self.mlp_bias else 0)
        experts = self.num_experts * (3 * d * self.moe_intermediate_size + d)  # and their rows of the router
        experts += self.num_experts * (2 * self.moe_intermediate_size + d + 1) if self.moe_bias else 0
        shared = self.shared_expert_intermediate_size
        experts += 3 * d * shared + (d if shared and self.shared_expert_gate else 0)
        norm = self.norm_count
        norms = 1 if self.shared_norm else 4 if self.norm_place == "both" else 2
        embeddings = self.vocab_size * (self.embedding_size or d) * (1 if self.tie_word_embeddings else 2)
        embeddings += 2 * self.embedding_size * d  # from their width to d, and back
        embeddings += (self.max_position_embeddings + self.position_offset) * d if self.learned_positions else 0
        embeddings += (self.vocab_size if self.head_bias else 0) + (norm if self.embedding_norm else 0)
        kinds = [self.type_of(layer) for layer in range(self.num_hidden_layers)]
        blocks, sparse = self.num_hidden_layers, len(self.moe_layers)
        mixed = (blocks - sparse) * mlp + sparse * experts
        if self.one_branch:
            norms, mixed = 1, kinds.count("mlp") * mlp
        recurrent = 0 if self.linear_attention is None else self.linear_attention.parameter_count(d)
        attention = kinds.count("attention") * self.attention_count + kinds.count("linear_attention") * recurrent
        last = 0 if self.norm_place == "sum" else norm
        return embeddings + attention + blocks * norms * norm + mixed + last


@dataclass(frozen=True, repr=False)
class GPTConfig(DecoderConfig):
    """Configuration of a decoder-only transformer like GPT-2, with learned positions, pre-LayerNorm and GELU.

    >>> config = triax.GPTConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16)
    >>> config.head_dim, config.intermediate_size, config.parameter_count
    (64, 4096, 354823168)

    Attributes, beside those of ``DecoderConfig``:
        mlp_ratio: ratio of the MLP's width, ``intermediate_size``, to ``hidden_size``.
        layer_norm_epsilon: epsilon of each LayerNorm.

    Raises:
        ValueError: the number of heads does not divide the width, or a check of ``DecoderConfig`` fails.
    """

    PRESETS: ClassVar[Presets] = GPT_PRESETS
    SIZES: ClassVar[tuple[str, ...]] = ("mlp_ratio", *DecoderConfig.SIZES)
    EPSILON: ClassVar[str] = "layer_norm_epsilon"
    BLOCK: ClassVar[str] = "GPTBlock"

    vocab_size: int = 50257
    max_position_embeddings: int = 1024
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    mlp_ratio: int = 4
    layer_norm_epsilon: float = 1e-5
    qkv_bias: bool = field(default=True, kw_only=True)
    qk_norm: bool = field(default=False, kw_only=True)
    out_bias: bool = field(default=True, kw_only=True)
    mlp_bias: bool = field(default=True, kw_only=True)
    tie_word_embeddings: bool = field(default=True, kw_only=True)
    norm: str = field(default="layer", kw_only=True)
    hidden_act: str = field(default="gelu_new", kw_only=True)
    gated: bool = field(default=False, kw_only=True)

    # These are no fields of a GPT: they follow from the others, or have one value.
    learned_positions: ClassVar[bool] = True  # type: ignore[misc]
    fused_qkv: ClassVar[bool] = True  # type: ignore[misc]
    rope_theta: ClassVar[float] = 1e4  # type: ignore[misc]
    rope_scaling: ClassVar[Scaling | None] = None  # type: ignore[misc]
    rope_local_base_freq: ClassVar[float | None] = None  # type: ignore[misc]
    partial_rotary_factor: ClassVar[float] = 1.0  # type: ignore[misc]
    rope_interleave: ClassVar[bool] = False  # type: ignore[misc]
    rope_reversed: ClassVar[bool] = False  # type: ignore[misc]
    alibi: ClassVar[str] = ""  # type: ignore[misc]
    no_rope_layers: ClassVar[tuple[int, ...]] = ()  # type: ignore[misc]
    rms_norm_eps: ClassVar[Any] = property(lambda self: self.layer_norm_epsilon)  # type: ignore[misc]
    num_key_value_heads: ClassVar[Any] = property(lambda self: self.num_attention_heads)  # type: ignore[misc]
    head_dim: ClassVar[Any] = property(lambda self: self.hidden_size // self.num_attention_heads)  # type: ignore[misc]
    intermediate_size: ClassVar[Any] = property(lambda self: self.mlp_ratio * self.hidden_size)  # type: ignore[misc]


@dataclass(frozen=True, repr=False)
class LlamaConfig(DecoderConfig):
    """``DecoderConfig`` with its defaults, and the sizes of the published models of Llama's architecture.

    With ``qkv_bias`` it has the architecture of Qwen2, with ``qk_norm`` that of Qwen3, with ``sliding_window`` that of
    Mistral, with ``no_rope_layers`` that of SmolLM3. ``DecoderConfig`` describes the fields.

    >>> config = triax.LlamaConfig.preset("llama3-8b")
    >>> config.num_hidden_layers, config.num_key_value_heads, config.parameter_count
    (32, 8, 8030261248)
    """

    PRESETS: ClassVar[Presets] = LLAMA_PRESETS
    BLOCK: ClassVar[str] = "LlamaBlock"


@dataclass(frozen=True, repr=False)
class MixtralConfig(DecoderConfig):
    """``DecoderConfig`` with mixtures of experts in place of the MLPs: Mixtral, Qwen-MoE, OLMoE, gpt-oss.

    ``DecoderConfig`` describes the fields.
    """

    PRESETS: ClassVar[Presets] = MIXTRAL_PRESETS
    SIZES: ClassVar[tuple[str, ...]] = (*DecoderConfig.SIZES, "num_experts", "num_experts_per_tok")
    BLOCK: ClassVar[str] = "MixtralBlock"

    num_experts: int = field(default=8, kw_only=True)


@dataclass(frozen=True, repr=False)
class DeepseekConfig(TransformerConfig):
    """Configuration of a DeepSeek-V2 or DeepSeek-V3: multi-head latent attention, and mixtures of experts.

    Attributes, beside those of ``TransformerConfig``:
        max_position_embeddings: length of the longest sequence. No tensor of the model depends on it.
        intermediate_size: width of the MLPs of the first blocks, which have no experts.
        moe_intermediate_size: width of an expert.
        n_routed_experts: number of experts of a block. The expert axis must divide it.
        n_shared_experts: number of experts that every token goes to, beside those chosen for it.
        num_experts_per_tok: number of experts that are chosen for each token.
        first_k_dense_replace: number of the first blocks, without experts.
        q_lora_rank: width of the latent vector of the queries; None: queries are projected from the residual stream.
        kv_lora_rank: width of the latent vector of keys and values.
        qk_nope_head_dim, qk_rope_head_dim: channels of a head of queries and keys without and with rotary positions.
            The rotated channels of the keys are the same for all heads.
        v_head_dim: width of a head of the values.
        scoring_func: ``softmax`` (V2), or ``sigmoid`` with a bias for the selection (V3).
        norm_topk_prob: divide the weights of a token's experts by their sum.
        routed_scaling_factor: factor of these weights.
        n_group, topk_group: a token's experts are chosen from ``topk_group`` of ``n_group`` groups.
        aux_loss_alpha: factor of the load-balancing loss of each block.
        rope_theta: base of the rotary wavelengths.
        rope_scaling: YaRN's scaling of the rotary frequencies, or None.
        rope_interleave: neighbouring channels are rotated as a pair; False: channels of the two halves.
        rms_norm_eps: epsilon of each RMSNorm but those of the latent vectors, where it is 1e-6.
        num_nextn_predict_layers: number of modules that predict further tokens in training (``mtp.py``).

    Raises:
        ValueError: the numbers of experts or groups do not fit each other, ``qk_rope_head_dim`` is odd, or a check of
            ``TransformerConfig`` fails.
    """

    PRESETS: ClassVar[Presets] = DEEPSEEK_PRESETS
    SIZES: ClassVar[tuple[str, ...]] = (
        *(*TransformerConfig.SIZES, "intermediate_size", "moe_intermediate_size", "n_routed_experts"),
        *("n_shared_experts", "num_experts_per_tok", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
        *("v_head_dim", "n_group", "topk_group"),
    )
    SHARDED: ClassVar[tuple[str, ...]] = (*TransformerConfig.SHARDED, "intermediate_size")

    vocab_size: int = 102400
    max_position_embeddings: int = 4096
    hidden_size: int = 2048
    num_hidden_layers: int = 27
    num_attention_heads: int = 16
    intermediate_size: int = 10944
    moe_intermediate_size: int = 1408
    n_routed_experts: int = 64
    n_shared_experts: int = 2
    num_experts_per_tok: int = 6
    first_k_dense_replace: int = 1
    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    scoring_func: str = "softmax"
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    aux_loss_alpha: float = 0.001
    rope_theta: float = 1e4
    rope_scaling: YarnScaling | None = None
    rope_interleave: bool = True
    rms_norm_eps: float = 1e-6
    num_nextn_predict_layers: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_experts(self.n_routed_experts, self.num_experts_per_tok, self.aux_loss_alpha, "aux_loss_alpha")
        if self.scoring_func not in ("softmax", "sigmoid"):
            raise ValueError(f"scoring_func is {self.scoring_func!r}. Give 'softmax' or 'sigmoid'.")
        if self.num_nextn_predict_layers < 0:
            raise ValueError(f"num_nextn_predict_layers is {self.num_nextn_predict_layers}. Give 0 or more.")
        if self.qk_rope_head_dim % 2:
            raise ValueError(
                f"qk_rope_head_dim is {self.qk_rope_head_dim}, but rotary positions need pairs. Give an even number."
            )
        if self.q_lora_rank is not None and self.q_lora_rank < 1:
            raise ValueError(f"q_lora_rank is {self.q_lora_rank}. Give at least 1, or None.")
        if self.sliding_window is not None:
            raise ValueError(f"sliding_window is {self.sliding_window}, which DeepSeek's models lack. Leave it out.")
        _check_groups(
            "n_routed_experts", self.n_routed_experts, self.num_experts_per_tok, self.n_group, self.topk_group
        )
        if not 0 <= self.first_k_dense_replace < self.num_hidden_layers:
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
        return _whole_experts(self.moe_arguments(), experts)

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

    @property
    def parameter_count(self) -> int:
        """Number of parameters, of all experts, a tied one counted once."""
        d, heads, sparse = self.hidden_size, self.num_attention_heads, len(self.moe_layers)
        queries, inputs = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim), self.q_lora_rank or d
        attention = queries * inputs + (0 if self.q_lora_rank is None else inputs * (d + 1))
        attention += d * (self.kv_lora_rank + self.qk_rope_head_dim) + self.kv_lora_rank
        attention += self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim) + heads * self.v_head_dim * d
        dense = 3 * d * self.intermediate_size
        experts = 3 * d * self.moe_intermediate_size * (self.n_routed_experts + self.n_shared_experts)
        experts += d * self.n_routed_experts  # the router
        embeddings = self.vocab_size * d * (1 if self.tie_word_embeddings else 2)
        blocks = self.num_hidden_layers * (attention + 2 * d) + self.first_k_dense_replace * dense + sparse * experts
        module = attention + 2 * d + experts + 2 * d * d + 3 * d
        return embeddings + blocks + d + self.num_nextn_predict_layers * module


def _whole_experts(own: Mapping[str, Any], given: Mapping[str, Any] | None) -> str | None:
    """Return the reason why mixtures of experts need whole sequences; None if they do not."""
    arguments = {"z_loss": 0.0, "capacity": None, **own, **(given or {})}
    balance = arguments["balance"] or ()
    losses = {balance} if isinstance(balance, str) else {*balance}
    if losses - {"bias"} or arguments["z_loss"] or arguments["capacity"] is not None:
        return (
            "has a mixture of experts with a loss or a limit of whole sequences (z_loss, capacity, or another balance "
            "than bias)"
        )
    return None


def _check_experts(experts: int, chosen: int, coefficient: float, name: str) -> None:
    if not 1 <= chosen <= experts:
        raise ValueError(
            f"num_experts_per_tok is {chosen}, but there are {experts} experts. Give 1 to {experts} experts per token."
        )
    if coefficient < 0:
        raise ValueError(f"{name} is {coefficient}. Give 0 or more.")


def _check_groups(name: str, experts: int, chosen: int, groups: int, limit: int) -> None:
    each, rest = divmod(experts, groups)
    if rest or limit > groups or limit * each < chosen:
        raise ValueError(
            f"num_experts_per_tok={chosen} of {name}={experts} cannot be chosen from topk_group={limit} of "
            f"n_group={groups} equal groups. Give a divisor of {experts} as n_group, and a larger topk_group, at most "
            "n_group."
        )


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
    cls.__name__: cls for cls in (GPTConfig, LlamaConfig, DecoderConfig, MixtralConfig, DeepseekConfig)
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
