"""``WhisperConfig``: configuration of Whisper, an encoder of speech and a decoder of text. Without torch."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from ..options.base import option
from .config_base import TransformerConfig
from .config_groups import Act, EncoderDecoderFields
from .presets import WHISPER_PRESETS, Presets


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
    SHARDED: ClassVar[tuple[str, ...]] = (*TransformerConfig.SHARDED, "intermediate_size")
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

    @property
    def residual_std(self) -> float:
        """Initial standard deviation of the last weight of each residual branch: that of all weights."""
        return self.initializer_range
