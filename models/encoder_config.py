"""``EncoderConfig``: configuration of encoders of text and of images, such as BERT, RoBERTa and ViT. Without torch."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

from ..options.base import option
from .config_base import TransformerConfig
from .config_groups import Act, BiasFields, MLPFields, RopeFields
from .presets import ENCODER_PRESETS, Presets


@dataclass(frozen=True, repr=False)
class EncoderConfig(BiasFields, MLPFields, RopeFields):
    """Configuration of an encoder: each token attends to all tokens of its row. With the defaults it is BERT-base.

    >>> triax.models.EncoderConfig.preset("bert-base").parameter_count
    109514298
    >>> triax.models.EncoderConfig.preset("vit-b-16").parameter_count
    86567656

    Raises:
        ValueError: the number of heads does not divide the width, the patches do not fill the image, settings
            contradict each other, or a check of ``TransformerConfig`` fails.
    """

    PRESETS: ClassVar[Presets] = ENCODER_PRESETS
    SHARDED: ClassVar[tuple[str, ...]] = (*TransformerConfig.SHARDED, "intermediate_size")
    EPSILON: ClassVar[str] = "layer_norm_eps"
    LAYERS: ClassVar[str] = "encoder:encoder_layers"

    vocab_size: int = 30522
    max_position_embeddings: int = 512
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = option(3072, "Width of the MLP.", least=1)
    _: KW_ONLY
    num_labels: int = option(
        0,
        "Number of classes of a row, or of numbers; 0: logits of each token, for masked tokens, or, of an encoder of "
        "images, the features of each token.",
        least=0,
    )
    pooler: bool = option(True, "A linear layer and tanh in front of the classes, if there are any.")
    norm_place: Literal["before", "sum", "embedding"] = option(
        "sum",
        "Norms are behind the sum of a branch and its input, and behind the embeddings (BERT); before each branch and "
        "before the head (ViT); or embedding: the same, but behind the embeddings in place of before the first "
        "attention (ModernBERT).",
    )
    norm_bias: bool = option(True, "Norms have a bias.")
    layer_scale: float = option(
        0.0, "Initial value of a learned factor of each channel of a branch's output (DINOv2); 0: none.", least=0.0
    )
    mean_pool: bool = option(False, "Classes are of the first token and the mean of the others, side by side (DINOv2).")
    classifier_pooling: Literal["", "cls", "mean"] = option(
        "",
        "Classes are of the first token (cls) or of the mean of a row (mean), behind the layers that are in front of "
        "the logits of masked tokens too (ModernBERT); empty: pooler and mean_pool say it.",
    )
    head_bias: bool = option(True, "The linear layer in front of the logits of masked tokens has a bias.")
    layer_norm_eps: float = option(1e-12, "Epsilon of each LayerNorm.")
    type_vocab_size: int = option(
        2, "Number of token types, such as the first and the second text; 0: there are none.", least=0
    )
    learned_positions: bool = option(True, "Positions are learned; False: rotary (ModernBERT).")
    position_offset: int = option(
        0, "Rows before the first position in the table of positions: 2 in RoBERTa, whose padding has row 1.", least=0
    )
    image_size: int = option(0, "Height and width of the images, in pixels; 0: the inputs are tokens.", least=0)
    patch_size: int = option(16, "Height and width of a patch, in pixels.", least=1)
    class_token: bool = option(True, "A learned token stands before the patches; False: the patches alone (SigLIP).")
    num_channels: int = option(3, "Channels of the images.", least=1)
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    hidden_act: Act = "gelu"
    gated: bool = False
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        heads, width = self.num_attention_heads, self.hidden_size
        if width % heads:
            fits = width // heads * heads or heads
            raise ValueError(
                f"num_attention_heads={heads} does not divide hidden_size={width}. Give hidden_size={fits}."
            )
        self._check_types("sliding_attention", "full_attention")
        text, odd = not self.image_size, width // heads % 2
        for name, given, holds, needed in (
            ("layer_scale", self.layer_scale, self.norm_place == "before", "norm_place='before'"),
            ("norm_place", self.norm_place == "embedding", text, "image_size=0"),
            ("mean_pool", self.mean_pool, not self.pooler, "pooler=False"),
            ("classifier_pooling", self.classifier_pooling, text and not self.pooler, "pooler=False and image_size=0"),
            ("learned_positions", not self.learned_positions, text and not odd, "text, and even head widths"),
        ):
            if given and not holds:
                raise ValueError(f"{name} is {getattr(self, name)!r}, which needs {needed}. Give both.")
        if not self.image_size:
            return
        if self.image_size % self.patch_size:
            raise ValueError(f"patch_size={self.patch_size} does not divide image_size={self.image_size}. Change one.")
        if self.num_labels and not self.class_token:
            raise ValueError(
                f"num_labels is {self.num_labels}, which needs class_token=True. Give it, or num_labels=0."
            )
        tokens = (self.image_size // self.patch_size) ** 2 + self.class_token
        self._set(vocab_size=1, type_vocab_size=1, max_position_embeddings=tokens, position_offset=0)

    @property
    def _unused(self) -> tuple[str, ...]:
        return ("vocab_size",) if self.image_size else ()

    @property
    def predicts_masked(self) -> bool:
        """True if the outputs are logits of tokens, for masked tokens."""
        return not (self.num_labels or self.image_size)

    @property
    def layer_count(self) -> int:
        """Number of entries in the model's list of layers: embedding, blocks, any norm, and one or two of the head."""
        return self.num_hidden_layers + 2 + (self.norm_place != "sum") + self.predicts_masked

    @property
    def residual_std(self) -> float:
        """Initial standard deviation of the last weight of each residual branch: that of all weights."""
        return self.initializer_range
