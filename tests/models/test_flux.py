"""Flux-like diffusion transformers: beside diffusers' model on every axis, released sizes, refusals."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import triax
from triax import FluxConfig, Grid, PipelineModule
from triax.models import FlowMatching, diffusion_loss, dit_from_diffusers, dit_to_diffusers, flux_layers
from triax.models.attention import joint_attention
from triax.models.flux import AxialRope

from support.diffusion_runs import AXES, NAMES, ROWS, PaperTime, engine_of, fill, random_weights, require_equal
from support.sweeps import some
from support.toys import error_text, same

TINY = FluxConfig(2, 2, 4, (2, 4, 4), num_channels=3, joint_attention_dim=6, pooled_projection_dim=5)
# Three heads on two ranks, patches of one and of three pixels, one text token, a guidance scale.
ODD = FluxConfig(1, 3, 3, (4, 2, 6), patch_size=3, num_channels=1, joint_attention_dim=1, guidance_embeds=True)
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
        patch_size=patch,
        num_channels=channels,
        out_channels=channels * draw.randint(0, 2),
        joint_attention_dim=draw.randint(1, 9),
        pooled_projection_dim=draw.randint(2, 9),
        guidance_embeds=draw.random() < 0.5,
    )
    return config, (patch * draw.randint(1, 5), patch * draw.randint(1, 5), draw.randint(1, 7))


def reference(config: FluxConfig) -> Any:
    """Return diffusers' model in float64 with random weights."""
    pytest.importorskip("diffusers")
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(3)
    model: Any = FluxTransformer2DModel(
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


def all_wanted(cases: dict[str, tuple[FluxConfig, tuple[int, int, int]]], folder: Path) -> dict[Path, dict[str, Any]]:
    return {folder / name: wanted(config, sizes, folder / name) for name, (config, sizes) in cases.items()}


@pytest.mark.parametrize(("sizes", "stage"), AXES, ids=NAMES)
def test_flux_trains_as_in_diffusers_on_every_axis(
    ranks: Any, tmp_path: Path, sizes: tuple[int, int, int], stage: int
) -> None:
    require_equal(ranks, all_wanted(CASES, tmp_path), sizes, stage)


@pytest.mark.parametrize("seed", some(range(100), (0, 7)))
def test_a_random_flux_equals_that_of_diffusers(ranks: Any, tmp_path: Path, seed: int) -> None:
    sizes, stage = AXES[seed % len(AXES)]
    require_equal(ranks, all_wanted({str(seed): random_case(seed)}, tmp_path), sizes, stage)


OPTIONS: dict[str, tuple[tuple[int, int, int], int, dict[str, Any]]] = {
    "recompute": ((2, 1, 1), 0, {"recompute": "full"}),
    "selective": ((1, 1, 2), 1, {"recompute": triax.Recomputation(granularity="selective", mlp_tile=2)}),
    "matmul": ((1, 1, 2), 0, {"recompute": "matmul"}),
    "partitioned": ((1, 1, 2), 0, {"recompute": triax.Recomputation(granularity="full", partition_activations=True)}),
    "zero-2": ((1, 2, 1), 2, {}),
    "zero-bubble": ((2, 1, 1), 0, {"schedule": "zb-h1"}),
    "zero-3 with recompute": ((1, 2, 1), 3, {"recompute": "full"}),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_flux_trains_as_in_diffusers_with_each_option(ranks: Any, tmp_path: Path, option: str) -> None:
    sizes, stage, options = OPTIONS[option]
    require_equal(ranks, all_wanted({"tiny": CASES["tiny"]}, tmp_path), sizes, stage, options)


# -------------------------------------------------------------------------------------------- sizes, sampling, refusals


def model_of(config: FluxConfig) -> PipelineModule:
    """Return a model of one process with random weights."""
    model = PipelineModule(flux_layers(config), loss_fn=diffusion_loss, dtype=torch.float64).eval()
    fill(model, random_weights(config))
    return model


@pytest.mark.parametrize("name", FluxConfig.presets())
def test_a_flux_preset_has_the_weights_of_its_release(name: str) -> None:
    diffusers = pytest.importorskip("diffusers")
    config = FluxConfig.preset(name)
    with torch.device("meta"):
        model = diffusers.FluxTransformer2DModel(guidance_embeds=name == "flux-1-dev")
    weights = model.state_dict()
    assert config.parameter_count == sum(weight.numel() for weight in weights.values())
    back = dit_to_diffusers(config, dit_from_diffusers(config, weights))
    assert {name: weight.shape for name, weight in back.items()} == {n: weight.shape for n, weight in weights.items()}


def test_one_flux_takes_images_and_texts_of_any_size() -> None:
    model, diffusers = model_of(TINY), reference(TINY)
    diffusers.load_state_dict(dit_to_diffusers(TINY, random_weights(TINY)))
    for sizes in ((4, 10, 1), (8, 2, 9)):
        inputs, _ = batch_of(TINY, sizes)
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(Tensor, "float", Tensor.double)
            same(model(inputs), in_diffusers(diffusers, TINY.patch_size, inputs), atol=1e-12)


def test_a_flux_in_bfloat16_rotates_as_diffusers_in_float32() -> None:
    pytest.importorskip("diffusers")
    from diffusers.models.embeddings import apply_rotary_emb
    from diffusers.models.transformers.transformer_flux import FluxPosEmbed

    seen: list[Tensor] = []
    q, k, v = torch.randn(3, 1, 2, 3 + 20 * 30, 128, generator=torch.Generator().manual_seed(0)).bfloat16()

    def attended(*rotated: Tensor) -> Tensor:
        seen.extend(rotated)
        return rotated[2]

    layer: Any = SimpleNamespace(_project=lambda x: (q, k, v), _attended=attended, out=lambda x: x)
    rope = AxialRope((16, 56, 56))
    positions = rope.positions(torch.zeros(1, 3, 1), torch.zeros(1, 20, 30, 1))
    joint_attention([layer], [torch.zeros(1, 2, 1)], rope, positions)
    for found, given in zip(seen, (q, k), strict=False):
        right: Any = apply_rotary_emb(given, FluxPosEmbed(10000, [16, 56, 56])(positions[0]))
        # triax has the first channels of all pairs, then the second ones.
        assert torch.equal(found, torch.cat([right[..., ::2], right[..., 1::2]], -1))
    assert torch.equal(seen[2], v)


def sampled(sizes: tuple[int, int, int]) -> Tensor:
    """Sample on a grid, from every rank's call of ``eval_batch``."""
    engine = engine_of(ODD, Grid(*sizes), random_weights(ODD))

    def predict(inputs: Any) -> Tensor:
        data = iter([(inputs, None)])
        outputs: Tensor = engine.eval_batch(data, return_logits=True, compute_loss=False, num_micro_batches=1)[1][0]
        return outputs

    (noise, _, condition), _ = batch_of(ODD, (6, 3, 2))
    return FlowMatching().sample(predict, noise, condition, steps=3)


def test_a_grid_samples_a_flux_as_one_process_does(ranks: Any) -> None:
    right = sampled((1, 1, 1))
    for found in ranks(4, sampled, (2, 1, 2)):
        same(found, right, atol=1e-12)


def test_training_pairs_hand_texts_to_a_flux() -> None:
    (images, _, condition), _ = batch_of(TINY, (4, 4, 2))
    (noisy, time, found), velocity = FlowMatching().training_pair(images, condition, range(ROWS))
    assert found is condition
    same(noisy, images + time.view(-1, 1, 1, 1).double() / 1000 * velocity, atol=1e-12)
    assert diffusion_loss(model_of(TINY)((noisy, time, found)), velocity).isfinite()


def over_context() -> None:
    PipelineModule(flux_layers(TINY), grid=Grid(context=2), loss_fn=diffusion_loss)


def test_a_context_axis_is_refused_for_flux(ranks: Any) -> None:
    with pytest.raises(Exception, match="a Flux needs context=1, but the grid has context=2"):
        ranks(2, over_context)


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (lambda: FluxConfig(axes_dims_rope=(16, 56)), ("axes_dims_rope is (16, 56)", "three even")),
        (lambda: FluxConfig(axes_dims_rope=(16, 55, 57)), ("(16, 55, 57)",)),
        (lambda: FluxConfig(axes_dims_rope=(0, 64, 64)), ("(0, 64, 64)",)),
        (lambda: FluxConfig(num_single_layers=0), ("num_single_layers", "0")),
        (lambda: FluxConfig.preset("flux-1-pro"), ("flux-1-pro", "flux-1-")),
        (lambda: TINY.check_tensor(5), ("num_attention_heads is 4", "tensor=5")),
        (lambda: TINY.layers(sequence_parallel=True), ("sequence_parallel",)),
        (
            lambda: FlowMatching().sample(lambda x: x[0], torch.ones(1, 1, 2, 2), (torch.ones(1),), guidance=2.0),
            ("guidance is 2.0", "guidance=1.0"),
        ),
        (
            lambda: engine_of(TINY, Grid(), random_weights(TINY), schedule=triax.ScheduleOptions(slices=2)),
            ("schedule.slices = 2",),
        ),
    ],
)
def test_what_a_flux_cannot_do_is_refused_with_numbers(make: Any, facts: tuple[str, ...]) -> None:
    text = error_text(make, (ValueError, TypeError))
    assert all(fact in text for fact in facts), text
