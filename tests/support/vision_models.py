"""Small models of text and images in float64, and microbatches with different numbers of images in each row."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from support.exact_norms import exact

IMAGE, VOCAB, LENGTH = 47, 48, 16
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
_VISION |= {"image_size": 8, "patch_size": 4}
_TEXT: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 3}
_TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, **_NO_TOKENS}
_TIED = {"tie_word_embeddings": True}
# Tower, language model, and the options of all.
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "clip-llama": ("CLIPVisionConfig", "LlamaConfig", _TEXT, {}),
    "clip-qwen2-tied": ("CLIPVisionConfig", "Qwen2Config", _TEXT | _TIED, {"vision_feature_layer": 2}),
    "siglip-llama": (
        "SiglipVisionConfig",
        "LlamaConfig",
        _TEXT,
        {"vision_feature_select_strategy": "full", "vision_feature_layer": -1},
    ),
}
_GEMMA = _TEXT | {"head_dim": 6, "sliding_window": 6, "query_pre_attn_scalar": 5}
_GEMMA |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
# A Gemma 3, whose image token may lie beyond the vocabulary of its language model.
GEMMA_CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("SiglipVisionConfig", "Gemma3TextConfig", _GEMMA, {"tie_word_embeddings": True}),
    "gemma3-beyond": ("SiglipVisionConfig", "Gemma3TextConfig", _GEMMA | {"vocab_size": 47}, {}),
}
# Prefix of the classes, and the options of all. Images of SmolVLM are masked in part.
PADDED_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "idefics3": ("Idefics3", {}),
    "smolvlm": ("SmolVLM", {"tie_word_embeddings": True}),
}
# Images of the two rows of each microbatch, for each replica.
IMAGES: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, 1), (3, 0), (0, 0), (1, 2)),
    ((0, 0), (1, 1), (0, 3), (0, 0)),
)
# Models with images of any size: prefix of the classes, vision tower, language model, and options of all.
PATCH_LENGTH = 28
_PATCHES: dict[str, Any] = {"depth": 3, "hidden_size": 16, "num_heads": 2, "patch_size": 2, "spatial_merge_size": 2}
_PATCHES |= {"temporal_patch_size": 2, "in_channels": 3, "intermediate_size": 20, "out_hidden_size": 24}
_GQA = _TEXT | {"max_position_embeddings": 64}
_SECTIONS = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 1]}
_INTERLEAVED = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
PATCH_CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VL", _PATCHES | {"embed_dim": 16, "hidden_size": 24}, _GQA | {"rope_parameters": _SECTIONS}, {}),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        _PATCHES | {"window_size": 8, "fullatt_block_indexes": [1]},
        _GQA | {"rope_parameters": _SECTIONS},
        {},
    ),
    "qwen3_vl": (
        "Qwen3VL",
        _PATCHES | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        _GQA | {"rope_parameters": _INTERLEAVED, "head_dim": 8},
        {"tie_word_embeddings": True},
    ),
}
_IDS = {"image_token_id": IMAGE, "video_token_id": 46, "vision_start_token_id": 45, "vision_end_token_id": 44}
SIZES = ((4, 4), (2, 6), (6, 4), (2, 2), (8, 2))  # rows and columns of patches of the images


def of_patches(
    prefix: str, vision: dict[str, Any], text: dict[str, Any], options: dict[str, Any], seed: int = 3
) -> Any:
    """Return a random model of text and images of any size, in which no bias is 0 and no norm 1."""
    import transformers

    configuration = getattr(transformers, f"{prefix}Config")
    config = configuration(vision_config=dict(vision), text_config=dict(text), **_IDS, **options)
    return _random(getattr(transformers, f"{prefix}ForConditionalGeneration"), config, seed)


def of_rows(prefix: str, vision: dict[str, Any], text: dict[str, Any], options: dict[str, Any], seed: int = 3) -> Any:
    """Return a random model of text and rows of images, in which no bias is 0 and no norm 1."""
    import transformers

    config = getattr(transformers, f"{prefix}Config")(
        vision_config=dict(vision), text_config={"model_type": "llama", **text}, image_token_id=IMAGE, **options
    )
    return _random(getattr(transformers, f"{prefix}ForConditionalGeneration"), config, seed)


def rows_of_images(counts: Sequence[int], shape: tuple[int, int, int], patch: int, seed: int) -> dict[str, Tensor]:
    """Return images (B, n, C, H, W) with the padding of a processor: whole images, and rows and columns of pixels."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(len(counts), max(counts), *shape, generator=generator, dtype=torch.float64)
    mask = torch.ones(len(counts), max(counts), *shape[1:], dtype=torch.bool)
    for row, count in enumerate(counts):
        mask[row, count:] = False
        for image in range(count):
            rows, columns = torch.randint(patch, shape[1] + 1, (2,), generator=generator).tolist()
            mask[row, image, rows:] = False
            mask[row, image, :, columns:] = False
    return {"pixel_values": pixels * mask[:, :, None], "pixel_attention_mask": mask} if max(counts) else {}


def odd_rows(kind: str, seed: int) -> tuple[Any, list[dict[str, Tensor]]]:
    """Return a random Idefics3 or SmolVLM of odd sizes, and two microbatches of it."""
    draw = random.Random(f"{kind} {seed}")
    heads, kv_heads, patch, side = draw.choice((2, 3)), draw.choice((1, 2)), draw.randint(1, 3), draw.randint(1, 2)
    factor, text_heads, tokens = draw.randint(1, 3), kv_heads * draw.randint(3 - kv_heads, 3), side**2
    vision: dict[str, Any] = {"hidden_size": heads * draw.choice((3, 4)), "num_attention_heads": heads}
    vision |= {"intermediate_size": draw.choice((5, 9)), "num_hidden_layers": draw.randint(1, 4), "patch_size": patch}
    vision |= {"num_channels": draw.choice((1, 3)), "image_size": patch * side * factor}
    text = _TEXT | {"hidden_size": 4 * text_heads, "num_attention_heads": text_heads, "num_key_value_heads": kv_heads}
    text |= {"num_hidden_layers": draw.randint(1, 4), "intermediate_size": draw.choice((6, 14))}
    options = {"scale_factor": factor, "tie_word_embeddings": draw.random() < 0.5}
    batches, generator = [], torch.Generator().manual_seed(seed)
    for number in range(2):
        counts = [draw.randint(0, 3) for _ in range(2)]
        ids = torch.randint(IMAGE, (2, max(counts) * (tokens + 1) + 5), generator=generator)
        for row, count in zip(ids, counts, strict=True):
            for start in range(1, 1 + count * (tokens + 1), tokens + 1):
                row[start : start + tokens] = IMAGE
        shape = vision["num_channels"], vision["image_size"], vision["image_size"]
        images = rows_of_images(counts, shape, patch, seed + number)
        if draw.random() < 0.3:
            images.pop("pixel_attention_mask", None)
        batches.append({"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100), **images})
    return of_rows(PADDED_CASES[kind][0], vision, text, options, seed), batches


def odd_patches(kind: str, seed: int) -> tuple[Any, list[dict[str, Tensor]]]:
    """Return a random model of odd sizes with images of any size, and two microbatches of it."""
    draw = random.Random(f"{kind} {seed}")
    prefix, vision, text, options = PATCH_CASES[kind]
    heads, width, depth, merge = draw.choice((2, 3, 4)), draw.choice((4, 8, 12)), draw.randint(1, 4), draw.randint(1, 3)
    kv_heads, blocks, sections = draw.choice((1, 2)), draw.randint(1, 4), [0, 1, 1]
    groups = draw.randint(3 - kv_heads, 3)
    sections[draw.randrange(3)] += draw.randint(1, 2)
    hidden = 2 * sum(sections) * groups * kv_heads
    vision = vision | {"depth": depth, "num_heads": heads, "hidden_size": heads * width, "spatial_merge_size": merge}
    vision |= {"patch_size": draw.randint(1, 3), "temporal_patch_size": draw.randint(1, 2), "out_hidden_size": hidden}
    vision |= {"in_channels": draw.choice((1, 3)), "intermediate_size": draw.choice((6, 10, 18))}
    if kind == "qwen2_vl":
        vision |= {"embed_dim": heads * width, "hidden_size": hidden}
    elif kind == "qwen2_5_vl":
        vision |= {"window_size": vision["patch_size"] * merge * draw.randint(1, 3) + draw.randint(0, 1)}
        vision |= {"fullatt_block_indexes": draw.sample(range(depth), draw.randint(0, depth))}
    else:
        deep = draw.sample(range(depth), draw.randint(0, min(depth, blocks)))
        vision |= {"num_position_embeddings": draw.randint(2, 5) ** 2, "deepstack_visual_indexes": deep}
        hidden = draw.choice((hidden, hidden + 2))
        vision["out_hidden_size"] = hidden
        text = text | {"head_dim": 2 * sum(sections)}
    rope = text["rope_parameters"] | {"mrope_section": sections}
    text = text | {"hidden_size": hidden, "num_attention_heads": groups * kv_heads, "num_key_value_heads": kv_heads}
    text |= {"num_hidden_layers": blocks, "intermediate_size": draw.choice((6, 14)), "rope_parameters": rope}
    if kind != "qwen3_vl" and draw.random() < 0.4:
        text |= {
            "use_sliding_window": True,
            "sliding_window": draw.randint(2, 9),
            "max_window_layers": draw.randint(0, 2),
        }
    model = of_patches(prefix, vision, text, options | {"tie_word_embeddings": draw.random() < 0.5}, seed)
    sizes = [(draw.randint(1, 4), draw.randint(1, 4)) for _ in range(3)]
    rows = [[[draw.choice(sizes) for _ in range(draw.randint(0, 2))] for _ in range(2)] for _ in range(2)]
    longest = max(sum(height * width + 3 for height, width in images) for batch in rows for images in batch)
    return model, [patch_microbatch(vision, batch, longest + 3, seed + number) for number, batch in enumerate(rows)]


def odd_gemma(seed: int) -> tuple[Any, list[dict[str, Tensor]]]:
    """Return a random Gemma 3 of odd sizes, and two microbatches of it."""
    import transformers

    draw = random.Random(f"gemma3 {seed}")
    heads, kv_heads, blocks, patch = draw.choice((2, 3)), draw.choice((1, 2)), draw.randint(1, 4), draw.randint(1, 3)
    side, pool, text_heads = draw.randint(1, 3), draw.randint(1, 3), kv_heads * draw.randint(3 - kv_heads, 3)
    vision: dict[str, Any] = {
        "hidden_size": heads * draw.choice((3, 4)),
        "intermediate_size": draw.choice((5, 9)),
        "patch_size": patch,
    }
    vision |= {
        "num_hidden_layers": draw.randint(1, 4),
        "num_attention_heads": heads,
        "num_channels": draw.choice((1, 3)),
    }
    vision |= {"image_size": patch * side * pool, "vision_use_head": draw.random() < 0.5}
    text = _GEMMA | {"hidden_size": 4 * text_heads, "num_attention_heads": text_heads, "num_key_value_heads": kv_heads}
    text |= {"num_hidden_layers": blocks, "head_dim": draw.choice((4, 6)), "sliding_window": draw.randint(2, 9)}
    text |= {"layer_types": [draw.choice(("sliding_attention", "full_attention")) for _ in range(blocks)]}
    text |= {"intermediate_size": draw.choice((6, 14)), "vocab_size": draw.choice((47, 48))}
    config = transformers.Gemma3Config(
        vision_config=transformers.SiglipVisionConfig(**vision),
        text_config=transformers.Gemma3TextConfig(**text),
        mm_tokens_per_image=side**2,
        image_token_index=IMAGE,
        tie_word_embeddings=draw.random() < 0.5,
    )
    batches, generator = [], torch.Generator().manual_seed(seed)
    for _ in range(2):
        counts = [draw.randint(0, 2) for _ in range(2)]
        ids = torch.randint(IMAGE, (2, max(counts) * (side**2 + 1) + 5), generator=generator)
        for row, count in zip(ids, counts, strict=True):
            for start in range(1, 1 + count * (side**2 + 1), side**2 + 1):
                row[start : start + side**2] = IMAGE
        given = {
            "input_ids": ids,
            "labels": ids.masked_fill(ids == IMAGE, -100),
            "token_type_ids": (ids == IMAGE).int(),
        }
        shape = sum(counts), vision["num_channels"], vision["image_size"], vision["image_size"]
        pixels = torch.randn(shape, generator=generator, dtype=torch.float64)
        batches.append(given | ({"pixel_values": pixels} if len(pixels) else {}))
    return _random(transformers.Gemma3ForConditionalGeneration, config, seed), batches


def odd(kind: str, seed: int) -> tuple[Any, list[dict[str, Tensor]]]:
    """Return a random model of odd sizes, and two microbatches of it."""
    if kind in PADDED_CASES:
        return odd_rows(kind, seed)
    return odd_gemma(seed) if kind == "gemma3" else odd_patches(kind, seed)


def _random(cls: Any, config: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    model = cls(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
        for module in model.modules():
            if hasattr(module, "scalar_embed_scale"):  # without the rounding of its buffer to fp32
                module.embed_scale.fill_(module.scalar_embed_scale)
    return model


def make(case: str, frozen: bool = False) -> Any:
    """Return a random model in which no bias is 0 and no norm 1; frozen: its tower is not trained."""
    if case in PATCH_CASES:
        model = of_patches(*PATCH_CASES[case])
        for name, parameter in model.model.visual.named_parameters() if frozen else ():
            parameter.requires_grad_("merger" in name)
        return model
    import transformers

    if case in PADDED_CASES:
        prefix, options = PADDED_CASES[case]
        model = of_rows(prefix, _VISION | {"image_size": 16}, _TEXT, options)
        model.model.vision_model.requires_grad_(not frozen)
        return model
    tower, text, sizes, options = (CASES | GEMMA_CASES)[case]
    length, prefix, vision = ("mm_tokens_per_image", "Gemma3", _VISION | {"image_size": 16})
    if case in CASES:
        length, prefix, vision = "image_seq_length", "Llava", _VISION
    options = {length: 4, "image_token_index": IMAGE, **options}
    config = getattr(transformers, f"{prefix}Config")(
        vision_config=getattr(transformers, tower)(**vision),
        text_config=getattr(transformers, text)(**sizes),
        **options,
    )
    model = _random(getattr(transformers, f"{prefix}ForConditionalGeneration"), config, 3)
    if frozen:
        model.model.vision_tower.requires_grad_(False)
    return model


def patch_microbatch(
    vision: dict[str, Any], rows: Sequence[Sequence[tuple[int, int]]], length: int, seed: int
) -> dict[str, Tensor]:
    """Return ids, labels and images of any size; rows: of each row, rows and columns of its images in image tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids, merge = torch.randint(44, (len(rows), length), generator=generator), vision["spatial_merge_size"]
    for row, images in zip(ids, rows, strict=True):
        start = 1
        for height, width in images:
            row[start], end = 45, start + 1 + height * width
            row[start + 1 : end], row[end] = IMAGE, 44
            start = end + 1 + int(torch.randint(2, (), generator=generator))
        assert start <= length
    labels = ids.masked_fill(ids == IMAGE, -100)
    labels[:, : 1 + seed % 4] = -100
    grid = torch.tensor([(1, height * merge, width * merge) for images in rows for height, width in images])
    if not len(grid):
        return {"input_ids": ids, "labels": labels}
    width = vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    pixels = torch.randn(int(grid.prod(1).sum()), width, generator=generator, dtype=torch.float64)
    types = (ids == IMAGE).int()
    given = {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": types}
    return {"input_ids": ids, "labels": labels, **given}


def microbatch(replica: int, number: int, case: str = "") -> dict[str, Tensor]:
    """Return ids, labels and images; no label counts at an image's tokens, nor at some of the first ones."""
    if case in PATCH_CASES:
        vision, seed = PATCH_CASES[case][1], 10 * replica + number
        sizes = [(height // 2, width // 2) for height, width in SIZES]
        rows = [[sizes[(seed + image) % len(sizes)] for image in range(count)] for count in IMAGES[replica][number]]
        return patch_microbatch(vision, rows, PATCH_LENGTH, seed)
    generator = torch.Generator().manual_seed(10 * replica + number)
    counts = IMAGES[replica][number]
    ids = torch.randint(IMAGE, (len(counts), LENGTH), generator=generator)
    for row, count in enumerate(counts):
        ids[row, 1 : 1 + 4 * count] = IMAGE
    labels = ids.masked_fill(ids == IMAGE, -100)
    labels[:, : 1 + number] = -100
    if case in PADDED_CASES:  # a square of 2 patches by 2 is an image token
        images = rows_of_images(counts, (3, 16, 16), 4, 10 * replica + number)
        return {"input_ids": ids, "labels": labels, **images}
    side = 16 if case in GEMMA_CASES else 8
    pixels = torch.randn(sum(counts), 3, side, side, generator=generator, dtype=torch.float64)
    given = {"pixel_values": pixels} if len(pixels) else {}
    given |= {"token_type_ids": (ids == IMAGE).int()} if case in GEMMA_CASES else {}
    return {"input_ids": ids, "labels": labels, **given}


def sums(model: Any, batches: Sequence[dict[str, Tensor]]) -> tuple[Tensor, int]:
    """Return the sum of microbatches' losses by transformers' model, without rounding to fp32, and a count."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for batch in batches:
        given = {name: value for name, value in batch.items() if name != "labels"}
        with exact(model):
            logits = model(**given).logits
        labels = batch["labels"][:, 1:]
        total = total + F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum")
        count += int((labels != -100).sum())
    return total, count


def on_one_process(model: Any, replicas: int, case: str = "") -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss of a batch and its gradients, by transformers' model and its names."""
    total, count = sums(model, [microbatch(r, n, case) for r in range(replicas) for n in range(len(IMAGES[r]))])
    (total / count).backward()
    return total.item() / count, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
