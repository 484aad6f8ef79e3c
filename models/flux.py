"""Flux-like diffusion transformers as lists of layers: tokens of text and of an image attend to each other.

The architecture of FLUX.1 (Black Forest Labs 2024). Text tokens and image patches are two streams. In a double block,
each stream has weights of its own, but the attention is over the tokens of both (Esser et al. 2024, arXiv:2403.03206,
section 4). A single block has one set of weights for all tokens, and attention and MLP side by side. A vector of time
and text shifts, scales and gates what each block computes, as in DiT (``dit.py``):

    (image, time, (text, pooled)) -> FluxEmbedding -> (text, image, c) -> FluxDoubleBlock, ... -> FluxSingleBlock, ...
    -> (text, image, c) -> FluxHead -> prediction

Queries and keys have an RMSNorm over each head, and rotary positions on three axes: text, row and column. All text
tokens are at (0, 0, 0), and a patch at (0, row, column).

Over the tensor axis heads, MLPs and modulations are sharded as in a DiT.

Shapes: B images of C channels, h x w patches of p x p, T text tokens, D the width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ..grid import Grid
from ..grid.randomness.random import Constant, Normal
from ..pipe.spec import LayerSpec
from ..tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from .attention import joint_attention
from .dit import FREQUENCIES, DiTBlock, DiTHead, angles_of, check_axes, modulated, time_waves
from .flux_config import FluxConfig
from .replicated_linear import ReplicatedLinear
from .rope import Rope

_NORMAL, _ZERO = Normal(0.02), Constant(0.0)


def flux_layers(config: FluxConfig) -> list[LayerSpec]:
    """List the specs of a Flux-like transformer's layers in order, for a ``PipelineModule``.

    The inputs are ``(images, time, (text, pooled))``: (B, C, height, width) of any size that patches fill, times 0 to
    1000 (B,), vectors of the text's tokens (B, T, joint_attention_dim), and one vector of the whole text
    (B, pooled_projection_dim). With ``guidance_embeds``, the last is ``(text, pooled, guidance)``, with a scale (B,).
    The outputs are (B, C, height, width): the prediction of the velocity, for ``FlowMatching``.

    >>> config = triax.FluxConfig(1, 2, 2, (4, 4, 8), num_channels=4, joint_attention_dim=6, pooled_projection_dim=5)
    >>> model = triax.PipelineModule(triax.models.flux_layers(config), loss_fn=triax.models.diffusion_loss)
    >>> text, pooled = torch.zeros(2, 7, 6), torch.zeros(2, 5)
    >>> model((torch.zeros(2, 4, 8, 6), torch.tensor([500, 30]), (text, pooled))).shape
    torch.Size([2, 4, 8, 6])

    Args:
        config: the model's configuration.
    """
    double = [LayerSpec(FluxDoubleBlock, config)] * config.num_double_layers
    single = [LayerSpec(FluxSingleBlock, config)] * config.num_single_layers
    return [LayerSpec(FluxEmbedding, config), *double, *single, LayerSpec(FluxHead, config)]


class FluxEmbedding(nn.Module):
    """Embeddings of patches, text, time and pooled text: (image, time, (text, pooled)) -> (text, image, c).

    Args:
        config: the model's configuration.
        grid: the grid.

    Attributes:
        patches, text: linear layers of the pixels of a patch, and of the text's tokens, replicated over the tensor
            axis.
        up, down: linear layers, with SiLU between them, of time, of pooled text, and of guidance if the model has it.

    Shape:
        ((B, C, h p, w p), (B,), ((B, T, text width), (B, pooled width))) -> ((B, T, D), (B, h, w, D), (B, D)). The last
        is behind the SiLU that all modulations begin with.

    Raises:
        ValueError: the tensor axis is larger than the number of heads, or the grid has a context axis.
    """

    def __init__(self, config: FluxConfig, *, grid: Grid) -> None:
        super().__init__()
        check_axes("Flux", config, grid)
        width, self.patch = config.hidden_size, config.patch_size
        self.patches = ReplicatedLinear(self.patch**2 * config.num_channels, width, True, grid=grid, init=_NORMAL)
        self.text = ReplicatedLinear(config.joint_attention_dim, width, True, grid=grid, init=_NORMAL)
        how: dict[str, Any] = {"grid": grid, "unit": 1, "init": _NORMAL, "bias_init": _ZERO}
        inputs = [FREQUENCIES, config.pooled_projection_dim, FREQUENCIES][: 2 + config.guidance_embeds]
        self.up = nn.ModuleList(ColumnParallelLinear(count, width, **how) for count in inputs)
        self.down = nn.ModuleList(RowParallelLinear(width, width, **how) for _ in inputs)

    def forward(self, inputs: tuple[Tensor, Tensor, tuple[Tensor, ...]]) -> tuple[Tensor, Tensor, Tensor]:
        """Embed the images, times and texts."""
        images, time, (text, pooled, *guidance) = inputs
        pixels = rearrange(images, "b c (h p) (w q) -> b h w (c p q)", p=self.patch, q=self.patch)
        vectors = [time_waves(time, text.dtype), pooled, *(time_waves(1000 * x, text.dtype) for x in guidance)]
        embedded = [down(F.silu(up(x))) for up, down, x in zip(self.up, self.down, vectors)]
        return self.text(text), self.patches(pixels), F.silu(torch.stack(embedded).sum(0))


class AxialRope(Rope):
    """Rotary positions on several axes. Each axis rotates its own channels of a head, in pairs of neighbors.

    Args:
        dims: number of channels of each axis, even numbers.
    """

    def __init__(self, dims: tuple[int, ...]) -> None:
        super().__init__(sum(dims), interleaved=True)
        self.dims = dims

    def angles(self, positions: Tensor, length: int = 0) -> Tensor:
        """Return the rotation angles (..., head_dim / 2) at positions (..., number of axes), in float64."""
        return torch.cat([angles_of(at, n // 2, torch.float64) for at, n in zip(positions.unbind(-1), self.dims)], -1)

    def positions(self, text: Tensor, image: Tensor) -> Tensor:
        """Return the positions of the tokens of a text (B, T, D), then of an image (B, h, w, D): (1, T + h w, 3)."""
        rows, columns = (torch.arange(size, device=image.device) for size in image.shape[1:3])
        patches = torch.cartesian_prod(rows[:1], rows, columns)  # (0, row, column), because rows[0] is 0
        return F.pad(patches, (0, 0, text.shape[1], 0))[None]


class FluxDoubleBlock(nn.Module):
    """Joint attention, and an MLP for each stream: (text, image, c) -> (text, image, c).

    text is (B, T, D), image (B, h, w, D) and c (B, D).

    Args:
        config: the model's configuration.
        grid: grid whose tensor axis shards heads, MLPs and the outputs of the modulations.

    Attributes:
        text, image: the weights of each stream, as those of a ``DiTBlock``, with norms of queries and keys.
    """

    def __init__(self, config: FluxConfig, *, grid: Grid) -> None:
        super().__init__()
        self.text, self.image = (DiTBlock(config, grid=grid, qk_norm=1e-6) for _ in range(2))
        self.rope = AxialRope(config.axes_dims_rope)

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Run the block."""
        text, image, c = inputs
        blocks, streams, outputs = (self.text, self.image), (text, image.flatten(1, 2)), []
        parts = [block.modulation(c)[:, None].chunk(6, -1) for block in blocks]
        normed = [modulated(x, *part[:2]) for x, part in zip(streams, parts)]
        attended = joint_attention([b.attention for b in blocks], normed, self.rope, self.rope.positions(text, image))
        for block, x, y, (_, _, gate1, shift, scale, gate2) in zip(blocks, streams, attended, parts):
            x = x + gate1 * y
            outputs.append(x + gate2 * block.mlp(modulated(x, shift, scale)))
        return outputs[0], outputs[1].view_as(image), c


class FluxSingleBlock(DiTBlock):
    """Attention and MLP of one input, over the tokens of text and image together: (text, image, c) -> (text, image, c).

    x = x + gate (attention(y) + mlp(y)), with y = norm(x) (1 + scale) + shift. One bias serves attention and MLP.

    Args:
        config: the model's configuration.
        grid: grid whose tensor axis shards the heads, the MLP's width and the outputs of ``modulation``.
    """

    def __init__(self, config: FluxConfig, *, grid: Grid) -> None:
        super().__init__(config, grid=grid, parts=3, qk_norm=1e-6, out_bias=False)
        self.rope = AxialRope(config.axes_dims_rope)

    def forward(self, inputs: Any) -> Any:
        """Run the block."""
        text, image, c = inputs
        shift, scale, gate = self.modulation(c)[:, None].chunk(3, -1)
        x = torch.cat([text, image.flatten(1, 2)], 1)
        y = modulated(x, shift, scale)
        (attended,) = joint_attention([self.attention], [y], self.rope, self.rope.positions(text, image))
        x = x + gate * (attended + self.mlp(y))
        return x[:, : text.shape[1]], x[:, text.shape[1] :].reshape(image.shape), c


class FluxHead(DiTHead):
    """Norm, shifted and scaled, and a linear layer to the pixels of each patch: (text, image, c) -> (B, C, h p, w p).

    Args:
        config: the model's configuration.
        grid: the grid.

    Attributes:
        modulation: linear layer from c to scale and shift.
        linear: linear layer, replicated over the tensor axis.
    """

    def forward(self, inputs: Any) -> Tensor:
        """Compute the prediction."""
        _, x, c = inputs
        scale, shift = self.modulation(c)[:, None, None].chunk(2, -1)
        y = self.linear(modulated(x, shift, scale))
        image: Tensor = rearrange(y, "b h w (c p q) -> b c (h p) (w q)", p=self.patch, q=self.patch)
        return image
