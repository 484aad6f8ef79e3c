"""Diffusion transformers (DiT) as lists of layers.

Peebles and Xie 2022, arXiv:2212.09748, with adaLN-Zero (section 3.2) and the initial weights of the released code. The
patches of a noisy image are tokens. One vector for each image, of its time step and its class, shifts, scales and
gates what each block computes. It travels beside the tokens from layer to layer:

    (image, time, class) -> DiTEmbedding -> (x, c) -> DiTBlock 0, ... -> (x, c) -> DiTHead -> prediction

Over the tensor axis heads and MLP are sharded as in a decoder. The linear layers that make shifts, scales and gates
have a third of the weights: their outputs are sharded, and gathered, (B, 6 D) in a block.

Shapes: B images of C channels, T patches of p x p, D the width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ..base.uncompiled import uncompiled
from ..grid import Grid
from ..grid.layout import Layout
from ..grid.randomness.random import Constant, Normal, SampleRandom, Uniform, sharded_parameter, uniform
from ..pipe.spec import LayerSpec
from ..tensor_parallel.embedding import check_ids
from ..tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from .attention import SelfAttention
from .dit_config import DiTConfig
from .flux_config import FluxConfig
from .mlp import MLP
from .replicated_linear import ReplicatedLinear

FREQUENCIES = 256  # of the embedding of the time step
_NORMAL, _ZERO = Normal(0.02), Constant(0.0)


def dit_layers(config: DiTConfig) -> list[LayerSpec]:
    """List the specs of a diffusion transformer's layers in order, for a ``PipelineModule``.

    The inputs are ``(images, time, classes)``: (B, C, size, size), integers (B,) and integers (B,), where -1 is an
    image without a class. The outputs are (B, C_out, size, size): the prediction of the noise, or of the velocity.
    ``FlowMatching`` and ``NoisePrediction`` make the inputs and targets of training, and sample images.

    >>> config = triax.DiTConfig.preset("dit-digits")
    >>> model = triax.PipelineModule(triax.models.dit_layers(config), loss_fn=triax.models.diffusion_loss)
    >>> images, time, classes = torch.zeros(2, 1, 8, 8), torch.tensor([500, 30]), torch.tensor([3, -1])
    >>> model((images, time, classes)).shape
    torch.Size([2, 1, 8, 8])

    Args:
        config: the model's configuration.
    """
    blocks = [LayerSpec(DiTBlock, config)] * config.num_hidden_layers
    return [LayerSpec(DiTEmbedding, config), *blocks, LayerSpec(DiTHead, config)]


class DiTEmbedding(nn.Module):
    """Embeddings of patches, with fixed positions, and of time step and class: (image, time, class) -> (x, c).

    Args:
        config: the model's configuration.
        grid: the grid.

    Attributes:
        weight, bias: (D, C, p, p) and (D,): the convolution of the patches.
        time_up, time_down: linear layers of the time step's frequencies, with SiLU between them.
        classes: (number of classes + 1, D). The last row is that of no class.
        class_dropout: the choice of the samples that have no class in a training step.

    Shape:
        ((B, C, size, size), (B,), (B,)) -> ((B, T, D), (B, D)). The second is behind the SiLU that all layers begin
        with.

    Raises:
        ValueError: the tensor axis is larger than the number of heads, or the grid has a context axis; in forward, the
            images have another shape.
    """

    def __init__(self, config: DiTConfig, *, grid: Grid) -> None:
        super().__init__()
        check_axes("DiT", config, grid)
        self.patch, self.side, self.num_classes = config.patch_size, config.image_size, config.num_classes
        width, shape = config.hidden_size, (config.hidden_size, config.num_channels, self.patch, self.patch)
        self.shape = (config.num_channels, self.side, self.side)
        whole: dict[str, Any] = {"rank": 0, "size": 1}
        self.weight = sharded_parameter(Layout(shape), _glorot(shape[1] * self.patch**2, width), **whole)
        self.bias = sharded_parameter(Layout((width,)), _ZERO, **whole)
        how: dict[str, Any] = {"grid": grid, "unit": 1, "init": _NORMAL, "bias_init": _ZERO}
        self.time_up = ColumnParallelLinear(FREQUENCIES, width, **how)
        self.time_down = RowParallelLinear(width, width, **how)
        self.classes = sharded_parameter(Layout((self.num_classes + 1, width)), _NORMAL, **whole)
        self.class_dropout = ClassDropout(config.class_dropout)

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Embed the images, time steps and classes."""
        images, time, classes = inputs
        if images.shape[1:] != self.shape:
            raise ValueError(f"an image is {tuple(images.shape[1:])}, but the model takes {self.shape}. Resize it.")
        x = F.conv2d(images, self.weight, self.bias, stride=self.patch).flatten(2).transpose(1, 2)
        known = self.time_up(time_waves(time, x.dtype))
        classes = self.class_dropout(classes)
        classes = torch.where(classes == -1, self.num_classes, classes)
        check_ids(classes, self.num_classes + 1, "class")
        c = self.time_down(F.silu(known)) + F.embedding(classes, self.classes)
        return x + self._positions(x), F.silu(c)

    def _positions(self, x: Tensor) -> Tensor:
        """Return sines and cosines of each patch's column, and of its row: (T, D)."""
        side = self.side // self.patch
        turns = angles_of(torch.arange(side, device=x.device), x.shape[-1] // 4, x.dtype)
        waves = torch.cat([turns.sin(), turns.cos()], -1).to(x.dtype)  # (side, D / 2)
        return torch.cat([waves.repeat(side, 1), waves.repeat_interleave(side, 0)], -1)


class ClassDropout(SampleRandom):
    """Choice of the samples that have no class, -1, in a training step: the same samples on every grid.

    Args:
        p: the probability.
    """

    def __init__(self, p: float) -> None:
        super().__init__("class dropout")
        self.p = p

    @uncompiled  # the key changes in each step
    def forward(self, classes: Tensor) -> Tensor:
        """Return the classes (B,), in training mode with -1 for those that are left out."""
        if not self.training or self.p == 0.0:
            return classes
        ids = torch.tensor(self.samples_of(classes), device=classes.device) + self.key()
        drawn = uniform(ids, torch.zeros(1, dtype=torch.int64, device=classes.device))[:, 0]
        return torch.where(drawn < self.p, -1, classes)


class DiTBlock(nn.Module):
    """Attention and MLP, each shifted, scaled and gated by the vector c (adaLN-Zero): (x, c) -> (x, c).

    x = x + gate attention(norm(x) (1 + scale) + shift), then the same with the MLP. The initial gates are 0.

    Args:
        config: the model's configuration.
        grid: grid whose tensor axis shards the heads, the MLP's width and the outputs of ``modulation``.
        parts: number of the vectors that ``modulation`` makes.
        changes: further options of the attention.

    Attributes:
        modulation: linear layer from c to shift, scale and gate of attention, then of the MLP.
    """

    def __init__(self, config: DiTConfig | FluxConfig, *, grid: Grid, parts: int = 6, **changes: Any) -> None:
        super().__init__()
        width = config.hidden_size
        sizes: Any = config
        inits: dict[str, Any] = {"init": _glorot(width, 3 * width), "out_init": _glorot(width, width)}
        options: dict[str, Any] = {"bias": True, "out_bias": True, "causal": False, **changes}
        self.attention = SelfAttention(width, config.num_attention_heads, grid=grid, **inits, **options)
        init = _glorot(width, config.intermediate_size)
        self.mlp = MLP(sizes, grid=grid, activation="gelu_pytorch_tanh", bias=True, init=init, out_init=init)
        self.modulation = modulation(width, parts, grid)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Run the block on the tokens (B, T, D); the vector c (B, D) stays as it is."""
        x, c = pair
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c)[:, None].chunk(6, -1)
        x = x + gate1 * self.attention(modulated(x, shift1, scale1))
        x = x + gate2 * self.mlp(modulated(x, shift2, scale2))
        return x, c


class DiTHead(nn.Module):
    """Norm, shifted and scaled, and a linear layer to the pixels of each patch: (x, c) -> (B, C_out, size, size).

    Args:
        config: the model's configuration.
        grid: the grid.

    Attributes:
        modulation: linear layer from c to shift and scale.
        linear: linear layer, replicated over the tensor axis.
    """

    def __init__(self, config: DiTConfig | FluxConfig, *, grid: Grid) -> None:
        super().__init__()
        self.patch, width = config.patch_size, config.hidden_size
        self.modulation = modulation(width, 2, grid)
        pixels = self.patch**2 * (config.out_channels or config.num_channels)
        self.linear = ReplicatedLinear(width, pixels, True, grid=grid, init=_ZERO)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        """Compute the prediction."""
        x, c = pair
        y = self.linear(modulated(x, *self.modulation(c)[:, None].chunk(2, -1)))
        form, side = "b (h w) (p q c) -> b c (h p) (w q)", round(y.shape[1] ** 0.5)
        image: Tensor = rearrange(y, form, h=side, p=self.patch, q=self.patch)
        return image


def check_axes(name: str, config: DiTConfig | FluxConfig, grid: Grid) -> None:
    """Raise ValueError if the grid has a context axis, or too large a tensor axis."""
    config.check_tensor(grid.tensor.size)
    if grid.context.size > 1:
        raise ValueError(
            f"a {name} needs context=1, but the grid has context={grid.context.size}: each rank holds all patches of "
            "an image. Use the data, tensor and pipe axes."
        )


def modulation(width: int, parts: int, grid: Grid) -> ColumnParallelLinear:
    """Make the linear layer from c to shifts, scales and gates, ``parts`` in all, (B, D) each."""
    zeros: dict[str, Any] = {"init": _ZERO, "bias_init": _ZERO}
    return ColumnParallelLinear(width, parts * width, grid=grid, unit=1, gather_output=True, **zeros)


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return the normalized x, scaled and shifted; shift and scale are (B, 1, D)."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def _glorot(inputs: int, outputs: int) -> Uniform:
    """Return the distribution of Glorot and Bengio 2010: of the variance 2 / (inputs + outputs)."""
    return Uniform((6 / (inputs + outputs)) ** 0.5)


def time_waves(time: Tensor, dtype: torch.dtype) -> Tensor:
    """Return cosines and sines of time steps (B,): (B, FREQUENCIES)."""
    turns = angles_of(time, FREQUENCIES // 2, dtype)
    return torch.cat([turns.cos(), turns.sin()], -1).to(dtype)


def angles_of(places: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return the angles 10000^(-i / count) of each place (...), for i from 0: (..., count), in fp32 at least."""
    wide = torch.promote_types(dtype, torch.float32)
    frequencies = 10000.0 ** -(torch.arange(count, device=places.device, dtype=wide) / count)
    return places.to(wide)[..., None] * frequencies
