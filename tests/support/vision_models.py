"""Small LLaVA models in float64, and microbatches of theirs with different numbers of images in each row."""

from __future__ import annotations

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
# Images of the two rows of each microbatch, for each replica.
IMAGES: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, 1), (3, 0), (0, 0), (1, 2)),
    ((0, 0), (1, 1), (0, 3), (0, 0)),
)


def make(case: str, frozen: bool = False) -> Any:
    """Return a random model in which no bias is 0 and no norm 1; frozen: its tower is not trained."""
    import transformers

    tower, text, sizes, options = CASES[case]
    config = transformers.LlavaConfig(
        vision_config=getattr(transformers, tower)(**_VISION),
        text_config=getattr(transformers, text)(**sizes),
        image_token_index=IMAGE,
        image_seq_length=4,
        **options,
    )
    torch.manual_seed(3)
    model = transformers.LlavaForConditionalGeneration(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    if frozen:
        model.model.vision_tower.requires_grad_(False)
    return model


def microbatch(replica: int, number: int) -> dict[str, Tensor]:
    """Return ids, labels and images; no label counts at an image's tokens, nor at some of the first ones."""
    generator = torch.Generator().manual_seed(10 * replica + number)
    counts = IMAGES[replica][number]
    ids = torch.randint(IMAGE, (len(counts), LENGTH), generator=generator)
    for row, count in enumerate(counts):
        ids[row, 1 : 1 + 4 * count] = IMAGE
    labels = ids.masked_fill(ids == IMAGE, -100)
    labels[:, : 1 + number] = -100
    pixels = torch.randn(sum(counts), 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"input_ids": ids, "labels": labels, **({"pixel_values": pixels} if len(pixels) else {})}


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


def on_one_process(model: Any, replicas: int) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss of a batch and its gradients, by transformers' model and its names."""
    total, count = sums(model, [microbatch(r, n) for r in range(replicas) for n in range(len(IMAGES[r]))])
    (total / count).backward()
    return total.item() / count, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
