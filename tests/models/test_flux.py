"""Flux-like diffusion transformers: beside diffusers' model on every axis, released sizes, refusals."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import triax
from triax import FluxConfig, Grid, PipelineModule
from triax.models import FlowMatching, diffusion_loss, dit_from_diffusers, dit_to_diffusers, flux_layers

from support.diffusion_runs import AXES, NAMES, ROWS, PaperTime, random_weights, require_equal
from support.sweeps import some
from support.toys import error_text

TINY = FluxConfig(2, 2, 4, (2, 4, 4), num_channels=3, joint_attention_dim=6, pooled_projection_dim=5)
# Three heads on two ranks, patches of one and of three pixels, one text token, a guidance scale.
ODD = FluxConfig(1, 3, 3, (4, 2, 6), 1, patch_size=3, num_channels=1, joint_attention_dim=1, guidance_embeds=True)
CASES = {"tiny": (TINY, (6, 4, 5)), "odd": (ODD, (3, 3, 1))}  # height, width, text tokens


def random_case(seed: int) -> tuple[FluxConfig, tuple[int, int, int]]:
    """Return a model with odd sizes and at least two heads, and the sizes of its image and text."""
    draw = random.Random(seed)
    patch, channels = draw.randint(1, 3), draw.randint(1, 4)
    config = FluxConfig(
        num_double_layers=draw.randint(1, 3),
        num_single_layers=draw.randint(1, 3),
        num_attention_heads=draw.randint(2, 5),
        axes_dims_rope=tuple(2 * draw.randint(1, 3) for _ in range(3)),
        mlp_ratio=draw.randint(1, 4),
        patch_size=patch,
        num_channels=channels,
        out_channels=channels * draw.randint(0, 2),
        joint_attention_dim=draw.randint(1, 9),
        pooled_projection_dim=draw.randint(2, 9),
        guidance_embeds=draw.random() < 0.5,
    )
    return config, (patch * draw.randint(1, 5), patch * draw.randint(1, 5), draw.randint(1, 7))


def reference(config: FluxConfig) -> Any:
    """Return diffusers' model in float64 with random weights, none of them zero."""
    pytest.importorskip("diffusers")
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(3)
    model = FluxTransformer2DModel(
        in_channels=config.patch_size**2 * config.num_channels,
        out_channels=config.patch_size**2 * (config.out_channels or config.num_channels),
        num_layers=config.num_double_layers,
        num_single_layers=config.num_single_layers,
        attention_head_dim=sum(config.axes_dims_rope),
        num_attention_heads=config.num_attention_heads,
        joint_attention_dim=config.joint_attention_dim,
        pooled_projection_dim=config.pooled_projection_dim,
        guidance_embeds=config.guidance_embeds,
        axes_dims_rope=config.axes_dims_rope,
    )
    model.time_text_embed.time_proj = PaperTime()
    width, inner = config.hidden_size, config.intermediate_size
    # diffusers' MLPs are always four times as wide as the model.
    for block in model.transformer_blocks:
        for mlp in (block.ff, block.ff_context):
            mlp.net[0].proj, mlp.net[2] = nn.Linear(width, inner), nn.Linear(inner, width)
    for block in model.single_transformer_blocks:
        block.proj_mlp, block.proj_out = nn.Linear(width, inner), nn.Linear(width + inner, width)
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1)
    return model


def batch_of(config: FluxConfig, sizes: tuple[int, int, int]) -> tuple[Any, Tensor]:
    """Return inputs and target."""
    height, width, length = sizes
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(ROWS, *shape, generator=generator, dtype=torch.float64)

    condition = [random(length, config.joint_attention_dim), random(config.pooled_projection_dim)]
    condition += [random()] * config.guidance_embeds
    time = torch.randint(1001, (ROWS,), generator=generator)
    target = random(config.out_channels or config.num_channels, height, width)
    return (random(config.num_channels, height, width), time, tuple(condition)), target


def in_diffusers(model: Any, patch: int, inputs: Any) -> Tensor:
    """Return the outputs of diffusers' model, which takes and returns patches as vectors."""
    images, time, (text, pooled, *guidance) = inputs
    rows, columns = images.shape[2] // patch, images.shape[3] // patch
    places = torch.zeros(rows, columns, 3)
    places[..., 1], places[..., 2] = torch.arange(rows)[:, None], torch.arange(columns)[None]
    outputs = model(
        hidden_states=F.unfold(images, patch, stride=patch).transpose(1, 2),
        encoder_hidden_states=text,
        pooled_projections=pooled,
        timestep=time.double() / 1000,
        img_ids=places.view(-1, 3),
        txt_ids=torch.zeros(text.shape[1], 3),
        guidance=guidance[0] if guidance else None,
    ).sample
    return F.fold(outputs.transpose(1, 2), images.shape[2:], patch, stride=patch)


def wanted(config: FluxConfig, sizes: tuple[int, int, int], path: Path) -> dict[str, Any]:
    """Return outputs, loss and gradients by diffusers; write configuration, weights of triax and batch."""
    model = reference(config)
    weights = model.state_dict()
    ours = dit_from_diffusers(config, weights)
    inputs, target = batch_of(config, sizes)
    torch.save((config, ours, (inputs, target)), path)
    back = dit_to_diffusers(config, ours)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weight) for name, weight in weights.items())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)  # diffusers rotates in float32
        outputs = in_diffusers(model, config.patch_size, inputs)
    loss = (outputs - target).square().mean()
    loss.backward()
    gradients = dit_from_diffusers(config, {name: p.grad for name, p in model.named_parameters()})
    return {"outputs": outputs.detach(), "loss": loss.item(), "gradients": gradients}


def all_wanted(cases: dict[str, Any], folder: Path) -> dict[Path, dict[str, Any]]:
    return {folder / name: wanted(*case, folder / name) for name, case in cases.items()}


@pytest.mark.parametrize(("sizes", "stage"), AXES, ids=NAMES)
def test_flux_trains_as_in_diffusers_on_every_axis(
    ranks: Any, tmp_path: Path, sizes: tuple[int, int, int], stage: int
) -> None:
    require_equal(ranks, all_wanted(CASES, tmp_path), sizes, stage)


@pytest.mark.parametrize("seed", some(range(60), (0, 7)))
def test_a_random_flux_equals_that_of_diffusers(ranks: Any, tmp_path: Path, seed: int) -> None:
    sizes, stage = AXES[seed % len(AXES)]
    require_equal(ranks, all_wanted({str(seed): random_case(seed)}, tmp_path), sizes, stage)
