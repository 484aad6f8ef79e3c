"""Layers of the vision tower of an Idefics3 (Laurençon et al. 2024, arXiv:2408.12637) or a SmolVLM (arXiv:2504.05299).

    images (B, n, C, H, W) -> PaddedEmbedding -> PaddedBlock 0, ... -> PaddedProjector -> (features (B n, P, D), marks)

Each row of a microbatch has n images. An image that is 0 everywhere is padding. Padding runs through the tower too,
because the shapes of messages between stages may not depend on values; the token embedding leaves it out. Each layer
sends the marks of the patches behind the activations, integers (B n, S): 1 for a patch that is attended to, 0 for a
patch without pixels, and -1 for each patch of an image that is padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...grid import Grid
from ...pipe.spec import LayerSpec
from .vision_layers import IMAGE_FAMILIES, Projector, Tower, VisionBlock, VisionEmbedding, VisionTower, run_on_images

PADDED_FAMILIES = ("idefics3", "smolvlm")  # model_type of the whole models
Marked = tuple[Tensor, Tensor]  # x (B n, S, D), marks (B n, S)


class PaddedTower(VisionTower):
    """Tower and projector of an Idefics3 or a SmolVLM; attributes as for ``VisionTower``."""

    path, projector = "vision_model", "connector"
    batch: Mapping[str, str] = {
        "input_ids": "input_ids, labels",
        "pixel_values": "pixel_values (B, n, C, H, W) with the images of each row",
        "pixel_attention_mask": "pixel_attention_mask (B, n, H, W)",
        "attention_mask": "attention_mask",
    }

    def __init__(self, config: Any) -> None:
        self.architecture, self.has_norm = IMAGE_FAMILIES[config.model_type], True
        self.depth = config.vision_config.num_hidden_layers
        Tower.__init__(self, config)

    def layers(self) -> list[LayerSpec]:
        """Return the layers in front of the token embedding."""
        blocks = [LayerSpec(PaddedBlock, self, index) for index in range(self.depth)]
        return [LayerSpec(PaddedEmbedding, self), *blocks, LayerSpec(PaddedProjector, self)]

    def forms(self, name: str) -> Any:
        """Return the name of a tensor of the tower."""
        return f"model.{name}"

    def forms_of_text(self, name: str) -> Any:
        """Return the name of a tensor of the language model."""
        return name if name.startswith("lm_head.") else name.replace("model.", "model.text_model.", 1)


class PaddedEmbedding(VisionEmbedding):
    """Patches of the images of a microbatch, a dict with ``pixel_values`` (B, n, C, H, W) -> (B n, S, D), and marks."""

    def forward(self, inputs: Tensor | Mapping[str, Tensor]) -> Marked:  # type: ignore[override]
        """Embed the images of a microbatch; of ids alone, (B, T), there are none.

        Raises:
            ValueError: as ``VisionEmbedding``.
        """
        given = self.tower.entries(inputs)
        pixels = given["pixel_values"].flatten(0, 1) if "pixel_values" in given else self.no_images()
        whole = pixels.new_ones(len(pixels), *pixels.shape[2:])
        seen = given["pixel_attention_mask"].flatten(0, 1) if "pixel_attention_mask" in given else whole
        for dim in (1, 2):
            seen = seen.unfold(dim, self.tower.vision.patch_size, self.tower.vision.patch_size)
        padding = ~pixels.flatten(1).any(1)[:, None]
        patches = (seen != 0).flatten(3).any(3) | padding[..., None]  # (B n, rows, columns)
        x = run_on_images(self.embeddings, pixels, patch_attention_mask=patches)
        return x, patches.flatten(1).long().masked_fill(padding, -1)


class PaddedBlock(VisionBlock):
    """One block of a vision tower, in which no patch attends to one without pixels."""

    def __init__(self, tower: PaddedTower, index: int, *, grid: Grid) -> None:
        super().__init__(tower, index, grid=grid)
        self.config = tower.vision

    def forward(self, value: Marked) -> Marked:  # type: ignore[override]
        """Run the block: (B n, S, D) -> (B n, S, D), with the marks."""
        from transformers.masking_utils import create_bidirectional_mask

        x, marks = value
        mask: Any = create_bidirectional_mask(self.config, x, marks != 0) if len(x) else None
        return run_on_images(self.block, x, attention_mask=mask), marks


class PaddedProjector(Projector):
    """Features of the image tokens: squares of patches, side by side, through a linear layer."""

    def forward(self, value: Marked) -> Marked:  # type: ignore[override]
        """Project: (B n, S, D) of the tower -> (B n, P, D) of the language model, with the marks."""
        return super().forward(value[0]), value[1]
