"""``FluxConfig``: configuration of Flux-like diffusion transformers. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..options.base import option
from .config_base import ModelConfig
from .presets import Presets


@dataclass(frozen=True, repr=False)
class FluxConfig(ModelConfig):
    """Configuration of a diffusion transformer of text and image tokens (Flux). The defaults are FLUX.1-schnell's.

    >>> triax.FluxConfig.preset("flux-1-dev").parameter_count
    11901408320

    Raises:
        ValueError: ``axes_dims_rope`` are not three even numbers, or a field has another type or a value out of its
            limits.
    """

    PRESETS: ClassVar[Presets] = {"flux-1-schnell": {}, "flux-1-dev": {"guidance_embeds": True}}
    LAYERS: ClassVar[str] = "flux:flux_layers"
    NO_SLICES: ClassVar[str | None] = "attends to later tokens too"

    num_double_layers: int = option(19, "Number of double blocks, of two streams.", least=1)
    num_single_layers: int = option(38, "Number of single blocks, of the joined tokens.", least=1)
    num_attention_heads: int = option(24, "Number of heads, at least the size of the tensor axis.", least=1)
    axes_dims_rope: tuple[int, ...] = option(
        (16, 56, 56), "Channels of a head that are rotated by an index of the text (always 0), by row and by column."
    )
    patch_size: int = option(2, "Height and width of a patch.", least=1)
    num_channels: int = option(16, "Channels of the images.", least=1)
    out_channels: int = option(0, "Channels of the output; 0: num_channels.", least=0)
    joint_attention_dim: int = option(4096, "Width of the vectors of the text's tokens.", least=1)
    pooled_projection_dim: int = option(768, "Width of the vector of the whole text.", least=1)
    guidance_embeds: bool = option(False, "A guidance scale is an input too (FLUX.1-dev).")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.axes_dims_rope) != 3 or any(dim < 2 or dim % 2 for dim in self.axes_dims_rope):
            raise ValueError(f"axes_dims_rope is {self.axes_dims_rope}. Give three even numbers of channels.")

    @property
    def hidden_size(self) -> int:
        """Width of the residual streams."""
        return self.num_attention_heads * sum(self.axes_dims_rope)

    @property
    def intermediate_size(self) -> int:
        """Width of the MLPs."""
        return 4 * self.hidden_size
