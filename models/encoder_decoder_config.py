"""``T5Config``, ``WhisperConfig``: configurations of an encoder and a decoder that reads its output. Without torch."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from ..options.base import option
from .config_base import TransformerConfig
from .config_groups import Act, MLPFields
from .presets import T5_PRESETS, WHISPER_PRESETS, Presets


@dataclass(frozen=True, repr=False, kw_only=True)
class EncoderDecoderFields(MLPFields):
    """Decoder that reads the output of an encoder."""

    SHARDED: ClassVar[tuple[str, ...]] = (*TransformerConfig.SHARDED, "intermediate_size")

    num_decoder_layers: int = option(0, "Number of blocks of the decoder; 0: the encoder's number.", least=0)
    decoder_start_token_id: int = option(0, "Token in front of the labels, in the decoder's input.", least=0)
    pad_token_id: int = option(0, "Token in the decoder's input in place of labels that are -100.", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window is not None:
            raise ValueError(f"sliding_window is {self.sliding_window}, which {self.title} lacks. Leave it out.")
        if not self.num_decoder_layers:
            self._set(num_decoder_layers=self.num_hidden_layers)

    @property
    def title(self) -> str:
        """Name of the architecture, such as ``T5``."""
        return type(self).__name__.removesuffix("Config")


@dataclass(frozen=True, repr=False)
class T5Config(EncoderDecoderFields):
    """Configuration of an encoder and a decoder that reads the encoder's output. With the defaults it is T5-small.

    >>> triax.models.T5Config().parameter_count
    60506624
    >>> triax.models.T5Config.preset("flan-t5-small").parameter_count
    76961152

    Raises:
        ValueError: the distances do not fill the buckets, there is a sliding window, or a check of
            ``TransformerConfig`` fails.
    """

    PRESETS: ClassVar[Presets] = T5_PRESETS
    EPSILON: ClassVar[str] = "layer_norm_epsilon"
    LAYERS: ClassVar[str] = "t5:t5_layers"

    vocab_size: int = 32128
    max_position_embeddings: int = option(
        512, "Length of the texts that the model was trained on. It is no limit: there are no positions.", least=1
    )
    hidden_size: int = 512
    num_hidden_layers: int = option(6, "Number of blocks of the encoder.", least=1)
    num_attention_heads: int = 8
    intermediate_size: int = option(2048, "Width of the MLP.", least=1)
    _: KW_ONLY
    head_dim: int = option(64, "Width of a head. hidden_size need not be a multiple of it.", least=1)
    relative_attention_num_buckets: int = option(
        32, "Number of buckets of distances between tokens, each with a bias of the scores of each head.", least=4
    )
    relative_attention_max_distance: int = option(
        128, "Distance from which on all distances are in the last bucket.", least=2
    )
    layer_norm_epsilon: float = option(1e-6, "Epsilon of each RMSNorm.")
    scale_decoder_outputs: bool = option(
        True, "Factor hidden_size ** -0.5 of the logits: True in the first T5, False in T5 v1.1 and Flan-T5."
    )
    initializer_range: float = option(
        1.0,
        "Factor of the initial standard deviations: 1 of the embeddings, n ** -0.5 of a weight with n inputs, and of "
        "queries also head_dim ** -0.5, because T5 does not scale the scores.",
    )
    hidden_act: Act = "relu"
    gated: bool = False
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        buckets, distance = self.relative_attention_num_buckets, self.relative_attention_max_distance
        if distance <= buckets // 2:
            raise ValueError(
                f"relative_attention_max_distance is {distance}, but half of relative_attention_num_buckets={buckets} "
                f"are of single distances. Give at least {buckets // 2 + 1}."
            )

    @property
    def layer_count(self) -> int:
        """Number of entries in the model's list of layers: of each stack three and its blocks, and the head."""
        return self.num_hidden_layers + self.num_decoder_layers + 7


@dataclass(frozen=True, repr=False)
class WhisperConfig(EncoderDecoderFields):
    """Configuration of an encoder of speech and a decoder of text. With the defaults it is Whisper-tiny.

    >>> triax.models.WhisperConfig().parameter_count
    37760640

    Raises:
        ValueError: the width is odd or below 4, the number of heads does not divide it, the output layer is not tied,
            there is a sliding window, or a check of ``TransformerConfig`` fails.
    """

    PRESETS: ClassVar[Presets] = WHISPER_PRESETS
    LAYERS: ClassVar[str] = "whisper:whisper_layers"

    vocab_size: int = 51865
    max_position_embeddings: int = option(448, "Length of the longest target, in tokens.", least=1)
    hidden_size: int = 384
    num_hidden_layers: int = option(4, "Number of blocks of the encoder.", least=1)
    num_attention_heads: int = 6
    intermediate_size: int = option(1536, "Width of the MLP.", least=1)
    _: KW_ONLY
    max_source_positions: int = option(
        1500, "Number of tokens of the encoder. The features of a source have twice as many frames.", least=1
    )
    num_mel_bins: int = option(80, "Number of mel bands of the features.", least=1)
    decoder_start_token_id: int = 50258
    pad_token_id: int = 50257
    hidden_act: Act = "gelu"
    gated: bool = False
    mlp_bias: bool = True
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        width, heads = self.hidden_size, self.num_attention_heads
        if width % 2 or width < 4:
            raise ValueError(f"hidden_size is {width}, but sinusoids need an even width of at least 4. Change it.")
        if width % heads:
            raise ValueError(f"num_attention_heads={heads} does not divide hidden_size={width}. Change one of them.")
        if not self.tie_word_embeddings:
            raise ValueError("tie_word_embeddings is False, but the output layer of Whisper is tied. Leave it out.")

    @property
    def layer_count(self) -> int:
        """Number of entries in the model's list of layers: two of the encoder, four of the decoder, and the blocks."""
        return self.num_hidden_layers + self.num_decoder_layers + 6

    @property
    def norm_epsilon(self) -> float:
        """Epsilon of the norms, which is the same in every Whisper."""
        return 1e-5
