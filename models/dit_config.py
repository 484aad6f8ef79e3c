"""``DiTConfig``: configuration of diffusion transformers. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..options.base import option
from .config_base import ModelConfig
from .presets import Presets

# Peebles and Xie 2022, arXiv:2212.09748, table 1, with patches of 2; images are latents of 256 x 256 pixels, and the
# models also predict variances. "digits": images of 8 x 8 pixels, for a laptop.
_SIZES = {"dit-s-2": (384, 12, 6), "dit-b-2": (768, 12, 12), "dit-l-2": (1024, 24, 16), "dit-xl-2": (1152, 28, 16)}
DIT_PRESETS: Presets = {
    name: {"hidden_size": width, "num_hidden_layers": blocks, "num_attention_heads": heads, "out_channels": 8}
    for name, (width, blocks, heads) in _SIZES.items()
}
DIT_PRESETS["dit-digits"] = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 8}
DIT_PRESETS["dit-digits"] |= {"num_channels": 1, "num_classes": 10}


@dataclass(frozen=True, repr=False)
class DiTConfig(ModelConfig):
    """Configuration of a diffusion transformer (DiT), of images or latents with a class. The defaults are DiT-XL/2's.

    >>> triax.DiTConfig.preset("dit-xl-2").parameter_count
    674834720

    Raises:
        ValueError: the patches do not fill the image, the number of heads does not divide the width, 4 does not divide
            it, or a field has another type or a value out of its limits.
    """

    PRESETS: ClassVar[Presets] = DIT_PRESETS
    LAYERS: ClassVar[str] = "dit:dit_layers"
    NO_SLICES: ClassVar[str | None] = "attends to later patches too"

    hidden_size: int = option(1152, "Width of the residual stream, a multiple of 4.", least=4)
    num_hidden_layers: int = option(28, "Number of blocks.", least=1)
    num_attention_heads: int = option(16, "Number of heads, at least the size of the tensor axis.", least=1)
    mlp_ratio: int = option(4, "Ratio of the MLP's width, intermediate_size, to hidden_size.", least=1)
    image_size: int = option(32, "Height and width of the images.", least=1)
    patch_size: int = option(2, "Height and width of a patch.", least=1)
    num_channels: int = option(4, "Channels of the images.", least=1)
    out_channels: int = option(
        0,
        "Channels of the output, more than num_channels if the model also predicts variances; 0: num_channels.",
        least=0,
    )
    num_classes: int = option(1000, "Number of classes.", least=1)
    class_dropout: float = option(
        0.1, "Probability that a sample of a training step has no class, for guidance.", least=0.0, most=1.0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        width, heads = self.hidden_size, self.num_attention_heads
        if width % heads or width % 4:
            raise ValueError(
                f"hidden_size is {width}, but {heads} heads and the 4 parts of a position have to divide it. Give a "
                f"multiple of {heads} and of 4."
            )
        if self.image_size % self.patch_size:
            raise ValueError(f"patch_size={self.patch_size} does not divide image_size={self.image_size}. Change one.")
        if self.out_channels and self.out_channels < self.num_channels:
            raise ValueError(
                f"out_channels is {self.out_channels}, fewer than num_channels={self.num_channels}. Give more, or 0."
            )

    @property
    def intermediate_size(self) -> int:
        """Width of the MLP."""
        return self.mlp_ratio * self.hidden_size
