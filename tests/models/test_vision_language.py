"""``hf_layers`` of models of text and images, tower and language model in one list, against transformers."""

from __future__ import annotations

from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import triax
from triax import CausalLMLoss, Grid, PipelineModule, hf_layers
from triax.models.huggingface.config import entries
from triax.models.huggingface.save import save_hf, wrapping
from triax.models.huggingface.vision_layers import VisionBlock, VisionEmbedding

from support.exact_norms import exact
from support.sweeps import some
from support.vision_models import (
    CASES,
    GEMMA_CASES,
    IMAGE,
    IMAGES,
    PADDED_CASES,
    PATCH_CASES,
    make,
    microbatch,
    odd,
    on_one_process,
    sums,
)

Sizes = tuple[int, int, int, int]  # pipe, data, context, tensor
LR = 0.5


def engine_of(
    source: Any,
    sizes: Sizes,
    stage: Any,
    cut: list[int] | None = None,
    schedule: str = "1f1b",
    frozen: bool = False,
    microbatches: int = 4,
    **options: Any,
) -> Any:
    pipe, data, context, tensor = sizes
    grid = Grid(pipe=pipe, data=data, context=context, tensor=tensor)
    loss_fn = CausalLMLoss(grid=grid, chunk_tokens=4)
    module = PipelineModule(hf_layers(source), grid=grid, loss_fn=loss_fn, partition=cut, dtype=torch.float64)
    for layer in module.modules() if frozen else ():
        if isinstance(layer, (VisionEmbedding, VisionBlock)):
            layer.requires_grad_(False)
    return triax.Engine(
        module,
        batch=triax.Batch(microbatch=2, microbatches=microbatches),
        optimizer=partial(torch.optim.SGD, lr=LR, fused=False),  # ``exact`` would give a fused kernel a scale in fp64
        zero=stage,
        schedule=schedule,
        **options,
    )


def step(engine: Any, case: str = "") -> float:
    batches = [microbatch(engine.grid.data.rank, number, case) for number in range(len(IMAGES[0]))]
    with exact(engine.module):
        loss: float = engine.train_batch(iter(batches)).item()
    return loss


def theirs(engine: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names of transformers' live model."""
    table = entries(wrapping(engine.module).names(), {})
    return {(table[name].live or table[name].theirs)[0]: tensor for name, tensor in tensors.items()}


def trained(case: str, frozen: bool, out: str, *options: Any) -> tuple[float, dict[str, Tensor]]:
    engine = engine_of(make(case, frozen), *options)
    save_hf(engine, f"{out}/before")
    loss = step(engine, case)
    save_hf(engine, f"{out}/after")
    return loss, theirs(engine, engine.gather("gradients"))


def require_equal_to_transformers(
    ranks: Any, tmp_path: Path, case: str, frozen: bool, sizes: Sizes, *options: Any
) -> None:
    import transformers

    model, out = make(case, frozen), str(tmp_path)
    loss, wanted = on_one_process(model, sizes[1], case)
    world = sizes[0] * sizes[1] * sizes[2] * sizes[3]
    for found, gradients in ranks(world, trained, case, frozen, out, sizes, *options, timeout=120):
        assert found == pytest.approx(loss, rel=1e-10)
        assert gradients.keys() == wanted.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-12, msg=name)
    reader: Any = getattr(transformers, type(model).__name__)
    before, after = (
        reader.from_pretrained(f"{out}/{when}", dtype=torch.float64).state_dict() for when in ("before", "after")
    )
    if model.config.tie_word_embeddings:
        wanted["lm_head.weight"] = next(each for name, each in wanted.items() if name.endswith("embed_tokens.weight"))
    for name, value in model.state_dict().items():
        assert torch.equal(before[name], value), name
        moved = value - LR * wanted[name] if name in wanted else value
        torch.testing.assert_close(after[name], moved, rtol=1e-10, atol=0.0 if name not in wanted else 1e-12, msg=name)


# The layers are patches, 2 blocks of the tower, projector, embedding, 3 blocks, norm, head.
@pytest.mark.parametrize(
    ("case", "frozen", "sizes", "stage", "cut", "schedule"),
    [
        ("clip-llama", False, (2, 1, 1, 1), 0, [0, 7, 10], "1f1b"),
        ("clip-qwen2-tied", False, (4, 1, 1, 1), 0, [0, 1, 2, 6, 10], "zb-h1"),
        ("siglip-llama", False, (1, 2, 1, 1), 3, None, "1f1b"),
        ("clip-llama", True, (2, 1, 1, 2), 1, [0, 2, 10], "1f1b"),
        *(
            pytest.param("clip-llama", *cell, "1f1b", marks=pytest.mark.exhaustive)
            for cell in ((True, (2, 2, 1, 1), 2, [0, 3, 10]), (False, (2, 1, 1, 2), 1, [0, 2, 10]))
        ),
        ("clip-llama", False, (1, 1, 2, 1), 0, None, "1f1b"),
        # Here they are patches, 3 blocks of the tower, merger, embedding, 3 blocks, norm, head.
        ("qwen2_5_vl", False, (2, 1, 1, 1), 0, [0, 3, 11], "1f1b"),
        ("qwen2_5_vl", False, (1, 2, 1, 1), 3, None, "1f1b"),
        ("qwen2_5_vl", True, (2, 1, 1, 2), 1, [0, 7, 11], "1f1b"),
        ("qwen3_vl", False, (4, 1, 1, 1), 0, [0, 2, 6, 7, 11], "zb-h1"),
        ("qwen3_vl", False, (1, 2, 1, 1), 3, None, "1f1b"),
        ("qwen3_vl", True, (2, 1, 1, 1), 0, [0, 3, 11], "1f1b"),
        ("qwen3_vl", False, (1, 1, 1, 2), 0, None, "1f1b"),
        ("qwen2_vl", False, (2, 1, 1, 2), 1, [0, 5, 11], "1f1b"),
        # And here patches, 3 blocks of the tower, projector, embedding, 3 blocks, norm, head.
        ("gemma3", False, (2, 1, 1, 1), 0, [0, 7, 11], "1f1b"),
        ("gemma3", False, (1, 2, 1, 1), 3, None, "1f1b"),
        ("gemma3-beyond", True, (2, 1, 1, 2), 1, [0, 3, 11], "1f1b"),
        ("idefics3", False, (2, 1, 1, 1), 0, [0, 3, 11], "1f1b"),
        ("idefics3", False, (1, 2, 1, 1), 3, None, "1f1b"),
        ("smolvlm", False, (4, 1, 1, 1), 0, [0, 1, 4, 6, 11], "zb-h1"),
        ("smolvlm", True, (2, 1, 1, 2), 1, [0, 7, 11], "1f1b"),
        ("smolvlm", False, (1, 1, 2, 1), 0, None, "1f1b"),
    ],
)
def test_vision_models_train_as_transformers(
    ranks: Any,
    tmp_path: Path,
    case: str,
    frozen: bool,
    sizes: Sizes,
    stage: int,
    cut: list[int] | None,
    schedule: str,
) -> None:
    require_equal_to_transformers(ranks, tmp_path, case, frozen, sizes, stage, cut, schedule)


GRIDS = [(1, 1, 1, 1), (2, 1, 1, 1), (4, 1, 1, 1), (1, 2, 1, 1), (2, 2, 1, 1), (1, 1, 1, 2)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("case", "sizes", "stage"),
    [(case, sizes, stage) for case in (*CASES, *PADDED_CASES) for sizes in (*GRIDS, (2, 1, 2, 1)) for stage in range(4)]
    + [
        (case, sizes, stage)
        for case in (*PATCH_CASES, *GEMMA_CASES)
        for sizes in (*GRIDS, (2, 1, 1, 2))
        for stage in (range(4) if sizes[1] == 2 else range(1))
    ],
)
def test_vision_models_train_as_transformers_on_every_grid(
    ranks: Any, tmp_path: Path, case: str, sizes: Sizes, frozen: bool, stage: int
) -> None:
    require_equal_to_transformers(ranks, tmp_path, case, frozen, sizes, stage)


@pytest.mark.parametrize("case", [*CASES, *PADDED_CASES, *PATCH_CASES, *GEMMA_CASES])
def test_vision_models_have_transformers_logits_and_files(tmp_path: Path, case: str) -> None:
    model = make(case)
    model.save_pretrained(tmp_path / "theirs")
    wanted = load_file(tmp_path / "theirs" / "model.safetensors")
    for source in (model, tmp_path / "theirs"):
        mine = PipelineModule(hf_layers(source), loss_fn=CausalLMLoss(), dtype=torch.float64)
        for number in range(4):
            given = microbatch(0, number, case)
            given.pop("labels")
            with torch.no_grad():
                found = mine(given if "pixel_values" in given else given["input_ids"], input_ids=given["input_ids"])
                assert torch.equal(found, model(**given).logits)
        save_hf(mine, tmp_path / "mine")
        ours = load_file(tmp_path / "mine" / "model.safetensors")
        assert ours.keys() == wanted.keys()
        assert all(torch.equal(ours[name], tensor) for name, tensor in wanted.items())


ODD_GRIDS = ((1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 1, 2), (2, 1, 1, 2))


def odd_step(kind: str, seed: int, out: str, sizes: Sizes) -> tuple[float, dict[str, Tensor]]:
    model, batches = odd(kind, seed)
    engine = engine_of(model, sizes, 3 if sizes[1] == 2 else 0, microbatches=2 // sizes[1])
    save_hf(engine, out)
    own = batches[engine.grid.data.rank :: sizes[1]]
    with exact(engine.module):
        loss: float = engine.train_batch(iter(own)).item()
    return loss, theirs(engine, engine.gather("gradients"))


@pytest.mark.parametrize(
    ("kind", "seed"),
    some(
        [(kind, seed) for kind in (*PATCH_CASES, "gemma3", *PADDED_CASES) for seed in range(100)],
        (0, 101, 203, 204, 302, 401, 503),
    ),
)
def test_odd_models_of_images_train_as_transformers(ranks: Any, tmp_path: Path, kind: str, seed: int) -> None:
    """Random sizes, images and grids. Towers have no gradient in transformers if there are no images."""
    sizes = ODD_GRIDS[seed % len(ODD_GRIDS)]
    model, batches = odd(kind, seed)
    total, count = sums(model, batches)
    (total / count).backward()
    model.save_pretrained(tmp_path / "theirs")
    unused = ".vision_tower.head."
    wanted = {name: parameter.grad for name, parameter in model.named_parameters() if unused not in name}
    for loss, gradients in ranks(prod(sizes), odd_step, kind, seed, str(tmp_path / "mine"), sizes, timeout=120):
        assert loss == pytest.approx(total.item() / count, rel=1e-10)
        assert gradients.keys() == wanted.keys()
        for name, gradient in gradients.items():
            expected = torch.zeros_like(gradient) if wanted[name] is None else wanted[name]
            torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12, msg=name)
    mine, written = (load_file(tmp_path / who / "model.safetensors") for who in ("mine", "theirs"))
    assert mine.keys() == written.keys()
    assert all(torch.equal(mine[name], tensor) for name, tensor in written.items())


def test_folders_with_older_names_of_transformers_are_loaded(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = make("clip-llama")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {
        name.replace("vision_tower.", "vision_tower.vision_model."): value for name, value in load_file(file).items()
    }
    save_file(tensors, file)
    given = microbatch(0, 3)
    given.pop("labels")
    mine = PipelineModule(hf_layers(tmp_path), loss_fn=CausalLMLoss(), dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(mine(given, input_ids=given["input_ids"]), model(**given).logits)


def test_vision_models_draw_transformers_weights(tmp_path: Path) -> None:
    """Weights as transformers draws them."""
    import transformers

    for case in CASES:
        config = make(case).config
        torch.manual_seed(0)
        wanted = transformers.LlavaForConditionalGeneration(config)
        save_hf(PipelineModule(hf_layers(config), loss_fn=CausalLMLoss()), tmp_path / case)
        reader: Any = transformers.LlavaForConditionalGeneration
        drawn = dict(reader.from_pretrained(tmp_path / case).named_parameters())
        for name, parameter in wanted.named_parameters():
            if parameter.numel() > 200:
                assert drawn[name].std().item() == pytest.approx(parameter.std().item(), rel=0.25), name
            elif parameter.dim() == 1 and "class_embedding" not in name:  # SigLIP draws biases of 1e-6
                torch.testing.assert_close(drawn[name], parameter, rtol=0.0, atol=1e-5, msg=name)


def test_batches_without_images_train_as_transformers(tmp_path: Path) -> None:
    """The tower's gradients are 0, where transformers has none; and a tower that is frozen after it was built."""
    batches = [microbatch(1, 0), microbatch(0, 2), microbatch(1, 3), microbatch(1, 0)]
    model = make("clip-llama")
    total, count = sums(model, batches)
    (total / count).backward()
    model.save_pretrained(tmp_path)
    for frozen in (False, True):
        engine = engine_of(tmp_path, (1, 1, 1, 1), 0, frozen=frozen)
        with exact(engine.module):
            assert engine.train_batch(iter(batches)).item() == pytest.approx(total.item() / count, rel=1e-10)
        gradients = theirs(engine, engine.gather("gradients"))
        tower = [name for name in gradients if ".vision_tower." in name]
        assert bool(tower) is not frozen and not any(gradients[name].any() for name in tower)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("case", ["clip-llama", "qwen2_5_vl", "qwen3_vl", "gemma3", "smolvlm"])
def test_padding_on_the_right_changes_no_logits(case: str) -> None:
    model, given = make(case), microbatch(0, 1, case)
    given.pop("labels")
    length = given["input_ids"].shape[1]
    mask = torch.arange(length) < torch.tensor([[length - 2], [9]])
    mine = PipelineModule(hf_layers(model), loss_fn=CausalLMLoss(), dtype=torch.float64)
    with torch.no_grad():
        found = mine(given | {"attention_mask": mask.long()}, input_ids=given["input_ids"])
        wanted = model(**given, attention_mask=mask.long()).logits
    torch.testing.assert_close(found[mask], wanted[mask], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", ["qwen2_5_vl", "qwen3_vl", "gemma3", "smolvlm"])
def test_recomputed_layers_of_vision_models_give_equal_gradients(case: str) -> None:
    kept, recomputed = (engine_of(make(case), (1, 1, 1, 1), 0, recompute=what) for what in (None, "full"))
    assert step(kept, case) == step(recomputed, case)
    found = recomputed.gather("gradients")
    for name, gradient in kept.gather("gradients").items():
        assert torch.equal(found[name], gradient), name


LANGUAGE = r".*(language|text)_model.*(q_proj|down_proj)"


def with_adapters(case: str, sizes: Sizes, stage: int, cut: list[int] | None, out: str) -> Any:
    """Losses of two steps, and the gradients of the second one; the adapters before it are written."""
    lora = triax.Lora(rank=2, alpha=3.0, targets=LANGUAGE)
    engine = engine_of(make(case), sizes, stage, cut, lora=lora)
    losses = [step(engine, case)]
    triax.save_lora(engine, out)
    losses.append(step(engine, case))
    return losses, engine.gather("gradients"), wrapping(engine.module).first


@pytest.mark.parametrize(
    ("case", "sizes"),
    some(
        [
            (case, sizes)
            for case in ("clip-llama", "gemma3", *PATCH_CASES, "smolvlm")
            for sizes in ((2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 1, 2))
        ],
        (0, 2, 9, 12, 15),
    ),
)
def test_adapters_of_the_language_model_equal_pefts(ranks: Any, tmp_path: Path, case: str, sizes: Sizes) -> None:
    """The tower of models other than LLaVA is frozen with all else, too."""
    import peft

    cut = [0, 6, 10 if case == "clip-llama" else 11] if sizes[0] == 2 else None
    stage = 2 if sizes[1] == 2 else 0
    found = ranks(2, with_adapters, case, sizes, stage, cut, str(tmp_path), timeout=120)
    start, _ = on_one_process(make(case), sizes[1], case)
    model: Any = peft.PeftModel.from_pretrained(make(case), str(tmp_path), is_trainable=True).double()
    adapted = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    language = "text_model" if case == "smolvlm" else "language_model"
    assert len(adapted) == 12 and all(f".{language}.layers." in name for name in adapted)
    total, count = sums(
        model.base_model.model, [microbatch(r, n, case) for r in range(sizes[1]) for n in range(len(IMAGES[r]))]
    )
    (total / count).backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    for losses, gradients, first in found:
        assert losses == pytest.approx([start, total.item() / count], rel=1e-10)
        assert len(gradients) == 12
        for name, gradient in gradients.items():
            _, index, rest = name.split(".", 2)
            layer, _, factor = rest.removeprefix("block.").partition(".lora.")
            theirs = f"base_model.model.model.{language}.layers.{int(index) - first - 1}.{layer}"
            grad = wanted[f"{theirs}.lora_{factor[-1]}.default.weight"]
            torch.testing.assert_close(gradient, grad, rtol=1e-10, atol=1e-12, msg=name)


def test_vision_models_refuse_options_they_lack() -> None:
    import transformers

    config = make("clip-llama").config
    config.vision_feature_layer = [-2, -1]
    with pytest.raises(ValueError, match=r"one of 3 blocks, but vision_feature_layer is \[-2, -1\]"):
        hf_layers(config)
    config = transformers.LlavaConfig(vision_config=transformers.PixtralVisionConfig())
    with pytest.raises(ValueError, match="clip_vision_model, siglip_vision_model, but the model has a 'pixtral'"):
        hf_layers(config)
    mine = PipelineModule(hf_layers(make("clip-llama")), loss_fn=CausalLMLoss(), dtype=torch.float64)
    given = microbatch(0, 3)
    ids = given["input_ids"]
    for change, said in {
        ("pixel_values", given["pixel_values"][:2]): f"12 tokens {IMAGE} for images, but 2 images of 4 tokens each",
        ("image_sizes", ids): "has image_sizes, which this model does not take",
        ("attention_mask", torch.arange(16) > torch.tensor([[2], [-1]])): "padded on the left",
    }.items():
        with pytest.raises(ValueError, match=said):
            mine({"input_ids": ids, "pixel_values": given["pixel_values"], change[0]: change[1]}, input_ids=ids)


def test_models_of_patches_refuse_what_they_lack() -> None:
    model = make("qwen3_vl")
    for indexes in ([0, 0], [3], [0, 1, -1]):
        model.config.vision_config.deepstack_visual_indexes = indexes
        with pytest.raises(ValueError, match="must name different blocks of the tower's 3"):
            hf_layers(model.config)
    model = make("qwen2_5_vl")
    mine = PipelineModule(hf_layers(model), loss_fn=CausalLMLoss(), dtype=torch.float64)
    given = microbatch(0, 3, "qwen2_5_vl")
    given.pop("labels")
    ids, grid, pixels = given["input_ids"], given["image_grid_thw"], given["pixel_values"]
    joined = ids.clone()
    joined[1, 1:] = IMAGE
    for change, said in (
        ({"pixel_values_videos": pixels}, "has pixel_values_videos, which this model does not take"),
        ({"position_ids": ids}, "positions of your own are not taken"),
        ({"attention_mask": torch.arange(ids.shape[1]) > torch.tensor([[2], [-1]])}, "padded on the left"),
        ({"pixel_values": pixels[1:]}, "patches, but image_grid_thw is"),
        ({"image_grid_thw": grid[:2], "pixel_values": pixels[: int(grid[:2].prod(1).sum())]}, "have runs of"),
        ({"input_ids": joined}, "have runs of .* put another token between two images"),
    ):
        changed = given | change
        with pytest.raises(ValueError, match=said):
            mine(changed, input_ids=changed["input_ids"])


@pytest.mark.parametrize("case", ["gemma3", "qwen3_vl"])
def test_models_of_images_refuse_a_context_axis(ranks: Any, case: str) -> None:
    for said in ranks(2, refused_context, case):
        assert "does not divide the sequences of a" in said and "context=1" in said


def refused_context(case: str) -> str:
    with pytest.raises(ValueError) as caught:
        PipelineModule(hf_layers(make(case)), grid=Grid(context=2), loss_fn=CausalLMLoss(), dtype=torch.float64)
    return str(caught.value)
