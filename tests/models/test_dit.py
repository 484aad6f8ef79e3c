"""Diffusion transformers: beside diffusers' model on every axis, training samples, sampling, refusals."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from triax import DiTConfig, Grid, PipelineModule
from triax.grid.randomness.random import DropoutState
from triax.models import (
    FlowMatching,
    NoisePrediction,
    diffusion_loss,
    dit_from_diffusers,
    dit_layers,
    dit_to_diffusers,
)
from triax.models.dit import ClassDropout

from support.diffusion_runs import (
    AXES,
    NAMES,
    ROWS,
    PaperTime,
    engine_of,
    fill,
    microbatches,
    random_weights,
    require_equal,
)
from support.toys import error_text, same

TINY = DiTConfig(16, 3, 4, image_size=6, patch_size=2, num_channels=3, num_classes=5, class_dropout=0.0)
# Three heads on two ranks, one patch, images of variances too.
ODD = DiTConfig(12, 2, 3, mlp_ratio=1, image_size=3, patch_size=3, num_channels=1, out_channels=2, num_classes=1)
CASES = {"tiny": TINY, "odd": ODD}


def random_config(seed: int) -> DiTConfig:
    """Return a model with odd sizes and at least two heads."""
    draw = random.Random(seed)
    heads, patch, channels = draw.randint(2, 5), draw.randint(1, 3), draw.randint(1, 4)
    return DiTConfig(
        hidden_size=heads * 4 * draw.randint(1, 2),
        num_hidden_layers=draw.randint(1, 4),
        num_attention_heads=heads,
        mlp_ratio=draw.randint(1, 4),
        image_size=patch * draw.randint(1, 4),
        patch_size=patch,
        num_channels=channels,
        out_channels=channels * draw.randint(1, 2),
        num_classes=draw.randint(1, 7),
        class_dropout=0.0,
    )


def reference(config: DiTConfig) -> Any:
    """Return diffusers' model in float64 with random weights, none of them zero, and one embedding for all blocks."""
    pytest.importorskip("diffusers")
    from diffusers.models.embeddings import get_2d_sincos_pos_embed
    from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel

    torch.manual_seed(3)
    model = DiTTransformer2DModel(
        num_attention_heads=config.num_attention_heads,
        attention_head_dim=config.hidden_size // config.num_attention_heads,
        in_channels=config.num_channels,
        out_channels=config.out_channels or config.num_channels,
        num_layers=config.num_hidden_layers,
        sample_size=config.image_size,
        patch_size=config.patch_size,
        num_embeds_ada_norm=config.num_classes,
        norm_eps=1e-6,
    )
    model = model.double().eval()
    side = config.image_size // config.patch_size
    model.pos_embed.pos_embed = get_2d_sincos_pos_embed(config.hidden_size, side, base_size=side, output_type="pt")[
        None
    ]
    shared = model.transformer_blocks[0].norm1.emb
    shared.time_proj = PaperTime()
    for block in model.transformer_blocks:
        block.norm1.emb = shared
        # diffusers' MLP is always four times as wide as the model.
        block.ff.net[0].proj = nn.Linear(config.hidden_size, config.intermediate_size).double()
        block.ff.net[2] = nn.Linear(config.intermediate_size, config.hidden_size).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1)
    return model


def batch_of(config: DiTConfig, rows: int = ROWS) -> tuple[Any, Tensor]:
    """Return inputs, of which one has no class, and the target."""
    generator = torch.Generator().manual_seed(5)
    shape = (rows, config.num_channels, config.image_size, config.image_size)
    images, target = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    time = torch.randint(1000, (rows,), generator=generator)
    classes = torch.randint(config.num_classes, (rows,), generator=generator)
    classes[1] = -1
    return (images, time, classes), target


def wanted(config: DiTConfig, path: Path) -> dict[str, Any]:
    """Return outputs, loss and gradients by diffusers; write configuration, weights of triax and batch."""
    model = reference(config)
    weights = model.state_dict()
    ours = dit_from_diffusers(config, weights)
    torch.save((config, ours, batch_of(config)), path)
    back = dit_to_diffusers(config, ours)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weight) for name, weight in weights.items())
    (images, time, classes), target = batch_of(config)
    outputs = model(images, time, classes.where(classes >= 0, config.num_classes)).sample
    loss = (outputs[:, : config.num_channels] - target).square().mean()
    loss.backward()
    # A parameter that blocks share has all its names in the state dict, and one gradient.
    gradients = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    return {"outputs": outputs.detach(), "loss": loss.item(), "gradients": dit_from_diffusers(config, gradients)}


def all_wanted(cases: dict[str, DiTConfig], folder: Path) -> dict[Path, dict[str, Any]]:
    return {folder / name: wanted(config, folder / name) for name, config in cases.items()}


@pytest.mark.parametrize(("sizes", "stage"), AXES, ids=NAMES)
def test_dit_trains_as_in_diffusers_on_every_axis(
    ranks: Any, tmp_path: Path, sizes: tuple[int, int, int], stage: int
) -> None:
    require_equal(ranks, all_wanted(CASES, tmp_path), sizes, stage)


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 80), marks=pytest.mark.exhaustive)], ids=len)
def test_random_dits_equal_those_of_diffusers(ranks: Any, tmp_path: Path, seeds: range) -> None:
    cases = {str(seed): random_config(seed) for seed in seeds}
    require_equal(ranks, all_wanted(cases, tmp_path), (1, 1, 2))


# ------------------------------------------------------------------------------------------------ classes and guidance


def with_dropout(sizes: tuple[int, int, int], stage: int) -> Any:
    """Return losses and gradients of two steps in which samples lose their class."""
    config = replace(TINY, class_dropout=0.5)
    torch.manual_seed(0)
    engine = engine_of(config, Grid(*sizes), random_weights(config), stage)
    parts = microbatches(engine.grid, *batch_of(config))
    steps = [(engine.train_batch(iter(parts)).item(), engine.gather("gradients")) for _ in range(2)]
    return steps, engine.eval_batch(iter(parts)).item()


@pytest.mark.parametrize(("sizes", "stage"), AXES[1:], ids=NAMES[1:])
def test_every_grid_leaves_out_the_same_classes(ranks: Any, sizes: tuple[int, int, int], stage: int) -> None:
    right, evaluated = with_dropout((1, 1, 1), 0)
    for steps, loss in ranks(torch.Size(sizes).numel(), with_dropout, sizes, stage):
        same([steps, loss], [right, evaluated], atol=1e-12)


def test_class_dropout_draws_a_new_share_in_each_step() -> None:
    layer, classes = ClassDropout(0.3), torch.arange(2000)
    drawn = []
    for step in range(2):
        layer.bind("layers.0.class_dropout", state := DropoutState(7))
        state.step = step
        drawn.append(layer(classes))
        kept = drawn[-1] != -1
        assert torch.equal(drawn[-1][kept], classes[kept])
        assert 0.27 < 1 - kept.double().mean() < 0.33
    assert not torch.equal(*drawn)
    assert torch.equal(layer.eval()(classes), classes)


def test_a_class_of_minus_one_is_the_last_row_of_the_table() -> None:
    model = PipelineModule(dit_layers(TINY), loss_fn=diffusion_loss, dtype=torch.float64).eval()
    fill(model, random_weights(TINY))
    (images, time, _), _ = batch_of(TINY)
    none, last, first = (model((images, time, torch.full((ROWS,), value))) for value in (-1, 5, 0))
    assert torch.equal(none, last)
    assert not torch.equal(none, first)


# --------------------------------------------------------------------------------------------------- training, sampling

METHODS = [FlowMatching(seed=4), NoisePrediction(seed=4)]


def test_training_pairs_depend_on_numbers_and_seed_alone() -> None:
    images, classes = torch.randn(8, 2, 4, 4), torch.arange(8)
    for method in METHODS:
        whole, target = method.training_pair(images, classes, range(40, 48))
        for rows in ([0, 1, 2], [7], [5, 3]):
            part, aim = method.training_pair(images[rows], classes[rows], [40 + row for row in rows])
            assert all(torch.equal(mine, all_[rows]) for mine, all_ in zip(part, whole, strict=True))
            assert torch.equal(aim, target[rows])
        for other, numbers in ((method, range(8)), (type(method)(seed=5), range(40, 48))):
            assert not torch.equal(other.training_pair(images, classes, numbers)[0][0], whole[0])


def test_training_pairs_mix_images_by_the_papers_formulas() -> None:
    """x_t = (1 - t) x + t e of rectified flow, and DDPM's steps x_t = sqrt(1 - beta_t) x_(t-1) + sqrt(beta_t) e."""
    images, classes = torch.randn(300, 1, 2, 2, dtype=torch.float64), torch.zeros(300, dtype=torch.int64)
    (noisy, time, _), velocity = METHODS[0].training_pair(images, classes, range(300))
    share = time.double()[:, None, None, None] / 1000
    same(noisy, images + share * velocity, atol=1e-12)
    assert abs(velocity.add(images).std() - 1) < 0.1
    assert abs(share.logit(eps=1e-6).std() - 1) < 0.15  # logit-normal
    (noisy, time, _), noise = METHODS[1].training_pair(images, classes, range(300))
    assert time.min() >= 0
    assert time.max() <= 999
    assert abs(time.double().mean() - 499.5) < 60
    for row in range(5):
        variance, factor = 0.0, 1.0
        for step in range(int(time[row]) + 1):
            beta = 1e-4 + (0.02 - 1e-4) * step / 999
            variance, factor = (1 - beta) * variance + beta, factor * (1 - beta) ** 0.5
        same(noisy[row], factor * images[row] + variance**0.5 * noise[row], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", METHODS, ids=["velocity", "noise"])
@pytest.mark.parametrize("steps", [1, 7, 1000])
def test_a_perfect_prediction_samples_its_image(method: Any, steps: int) -> None:
    """The predictor knows the image of each class, so the estimates of image and noise are right in every step."""
    images, classes = torch.randn(3, 2, 4, 4, dtype=torch.float64), torch.arange(3)

    def predict(inputs: Any) -> Tensor:
        x, time, _ = inputs
        level = int(time[0])
        if isinstance(method, FlowMatching):
            return (x - images) / (level / 1000)
        kept = (1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64))[: level + 1].prod()
        return (x - kept.sqrt() * images) / (1 - kept).sqrt()

    noise = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    same(method.sample(predict, noise, classes, steps=steps), images, rtol=1e-8, atol=1e-9)


def test_noise_prediction_samples_as_the_ddim_of_diffusers() -> None:
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.DDIMScheduler(
        beta_end=0.02, beta_start=1e-4, clip_sample=False, timestep_spacing="trailing", set_alpha_to_one=True
    )
    scheduler.set_timesteps(10)
    scheduler.alphas_cumprod = (1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)).cumprod(0)
    scheduler.final_alpha_cumprod = torch.ones((), dtype=torch.float64)
    noise = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    predict = lambda x, time: (x * (1 + time / 1000)).sin()  # noqa: E731
    x = noise
    for time in scheduler.timesteps:
        x = scheduler.step(predict(x, time), time, x).prev_sample
    found = METHODS[1].sample(lambda inputs: predict(inputs[0], inputs[1][0]), noise, torch.zeros(2), steps=10)
    same(found, x, rtol=1e-9, atol=1e-10)


def test_guidance_extrapolates_from_the_prediction_without_class() -> None:
    seen = []

    def predict(inputs: Any) -> Tensor:
        x, time, classes = inputs
        seen.append((len(x), time.tolist(), classes.tolist()))
        velocity = (classes + 2.0)[:, None, None, None].expand_as(x)
        return torch.cat([velocity, 100 * velocity], 1)  # the second channel is of variances

    noise = torch.zeros(2, 1, 4, 4)
    x = FlowMatching().sample(predict, noise, torch.tensor([3, 0]), steps=2, guidance=3.0)
    # none: 1; with class: 5 and 2; so 1 + 3 * 4 and 1 + 3 * 1, over the time from 1 to 0
    same(x, -torch.tensor([13.0, 4.0])[:, None, None, None].expand_as(x))
    assert seen == [(4, [1000] * 4, [3, 0, -1, -1]), (4, [500] * 4, [3, 0, -1, -1])]


def sampled(sizes: tuple[int, int, int]) -> Tensor:
    """Sample on a grid, from every rank's call of ``eval_batch``."""
    engine = engine_of(TINY, Grid(*sizes), random_weights(TINY))

    def predict(inputs: Any) -> Tensor:
        data = iter([(inputs, None)])
        outputs = engine.eval_batch(data, return_logits=True, compute_loss=False, num_micro_batches=1)[1]
        return outputs[0]

    (noise, _, classes), _ = batch_of(TINY)
    return FlowMatching().sample(predict, noise, classes.abs(), steps=3, guidance=2.0)


def test_a_grid_samples_the_images_of_one_process(ranks: Any) -> None:
    right = sampled((1, 1, 1))
    for found in ranks(4, sampled, (2, 1, 2)):
        same(found, right, atol=1e-12)


# ------------------------------------------------------------------------------------------------- settings, refusals


def test_presets_have_the_parameters_of_the_released_models() -> None:
    """The released counts are of pytorch's modules and include the fixed positions, which are no parameters here."""
    for name, count in {"dit-s-2": 32_963_360, "dit-b-2": 130_512_416, "dit-xl-2": 675_129_632}.items():
        config = DiTConfig.preset(name)
        assert config.parameter_count == count - 256 * config.hidden_size


def over_context() -> None:
    PipelineModule(dit_layers(TINY), grid=Grid(context=2), loss_fn=diffusion_loss)


def test_a_context_axis_is_refused_for_dits(ranks: Any) -> None:
    with pytest.raises(Exception, match="a DiT needs context=1, but the grid has context=2"):
        ranks(2, over_context)


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (lambda: DiTConfig(18, 1, 3), ("hidden_size is 18", "3 heads", "multiple of 3 and of 4")),
        (lambda: DiTConfig(16, 1, 3), ("hidden_size is 16", "3 heads")),
        (lambda: DiTConfig(image_size=7), ("patch_size=2", "image_size=7")),
        (lambda: DiTConfig(out_channels=3), ("out_channels is 3", "num_channels=4")),
        (lambda: DiTConfig(class_dropout=1.5), ("class_dropout", "1.5")),
        (lambda: DiTConfig.preset("dit-xl-4"), ("dit-xl-4", "dit-xl-2")),
        (lambda: TINY.check_tensor(5), ("num_attention_heads is 4", "tensor=5")),
        (
            lambda: FlowMatching().training_pair(torch.ones(3, 1, 2, 2), torch.ones(3), [1, 2]),
            ("3 images", "2 numbers"),
        ),
        (
            lambda: FlowMatching().sample(lambda x: x[0], torch.ones(1, 1, 2, 2), torch.ones(1), steps=1001),
            ("1001", "1000"),
        ),
        (
            lambda: PipelineModule(dit_layers(TINY), loss_fn=diffusion_loss)(
                (torch.ones(2, 3, 8, 6), torch.tensor([1, 2]), torch.tensor([1, 2]))
            ),
            ("(3, 8, 6)", "(3, 6, 6)"),
        ),
        (
            lambda: PipelineModule(dit_layers(TINY), loss_fn=diffusion_loss)(
                (torch.ones(2, 3, 6, 6), torch.tensor([1, 2]), torch.tensor([1, 6]))
            ),
            ("class", "0 to 5"),
        ),
    ],
)
def test_what_a_dit_cannot_do_is_refused_with_numbers(make: Any, facts: tuple[str, ...]) -> None:
    text = error_text(make, (ValueError, IndexError))
    assert all(fact in text for fact in facts), text


def test_different_copies_of_an_embedding_are_refused() -> None:
    weights = dit_to_diffusers(TINY, random_weights(TINY))
    weights["transformer_blocks.2.norm1.emb.timestep_embedder.linear_1.bias"][0] += 1
    with pytest.raises(ValueError, match=r"blocks\.2\.norm1\.emb\.timestep_embedder\.linear_1\.bias differs"):
        dit_from_diffusers(TINY, weights)
