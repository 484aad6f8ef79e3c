"""Layers of vision towers that take images of any size as rows of patches: Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

    patches (S, C) -> PatchEmbedding -> PatchBlock 0, ... -> PatchMerger -> features (S / m^2, D) of the image tokens

S is the number of patches of all images of the microbatch, and may be 0. With the patches travels ``image_grid_thw``,
(N, 3): the frames, rows and columns of patches of each image. From it each layer computes what it needs, the rotary
positions and the bounds of attention, because shapes of messages may not depend on its values. Behind the grid travel
the deep-stack features (Meng et al. 2024, arXiv:2406.04334) of the blocks that have them, each (S / m^2, D).

Without images each layer runs on a blank one, whose output is cut off (``vision_layers.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...grid import Grid
from ...pipe.spec import LayerSpec
from .family import Family, block_names, end_names
from .names import FolderName
from .sharding_plans import llama_plan
from .vision_layers import Tower, VisionBlock, VisionEmbedding, bare

Patches = tuple[Tensor, ...]  # x (S, D), grid (N, 3), then deep-stack features (S / m^2, D)

_TEXT = "model.language_model"
_NAMES = end_names(f"{_TEXT}.embed_tokens", f"{_TEXT}.norm")
_NAMES = {**_NAMES, **block_names(1, norm1=f"{_TEXT}.layers.{{i}}.input_layernorm.*")}


@dataclass(frozen=True)
class PatchFamily:
    """Family of vision-language models with a tower of this file.

    Attributes:
        prefix: prefix of the names of the family's classes in transformers, such as ``Qwen3VL``.
        embeds: names of the modules of the tower in front of its blocks.
        older_names: True if folders have the names of transformers 4, ``visual...`` and ``model.layers...``.
    """

    prefix: str
    embeds: tuple[str, ...] = ("patch_embed",)
    older_names: bool = True

    @property
    def text(self) -> Family:
        """Family of the language model. Its names are those in the whole model."""
        return Family(self.prefix, llama_plan, names=_NAMES)


# By the model_type of the whole model. Windows of attention and deep-stack features are those of its configuration.
PATCH_FAMILIES = {
    "qwen2_vl": PatchFamily("Qwen2VL"),
    "qwen2_5_vl": PatchFamily("Qwen2_5_VL"),
    "qwen3_vl": PatchFamily("Qwen3VL", ("patch_embed", "pos_embed"), older_names=False),
}


class PatchTower(Tower):
    """Configuration of a tower with patches of images of any size.

    Attributes:
        kind: the model's family.
        depth: number of blocks.
        merge: m, the side of the squares of patches that become one image token.
        deep: numbers of the blocks that have deep-stack features, in the order of the mergers of these features.

    Raises:
        ValueError: a setting that ``hf_layers`` does not run.
    """

    path, blocks = "visual", "blocks"
    batch: Mapping[str, str] = {
        "input_ids": "input_ids, labels",
        "pixel_values": "pixel_values (S, C) with the patches of all its images",
        "image_grid_thw": "image_grid_thw (N, 3)",
        "mm_token_type_ids": "mm_token_type_ids",
        "attention_mask": "attention_mask; videos and positions of your own are not taken",
    }

    def __init__(self, config: Any) -> None:
        self.kind = PATCH_FAMILIES[config.model_type]
        self.architecture = f"{self.kind.prefix}ForConditionalGeneration"
        vision, blocks = config.vision_config, config.text_config.num_hidden_layers
        self.depth, self.merge = vision.num_hidden_layers, vision.spatial_merge_size
        self.deep = list(getattr(vision, "deepstack_visual_indexes", ()))
        if len(set(self.deep) & set(range(self.depth))) != len(self.deep) or len(self.deep) > blocks:
            raise ValueError(
                f"deepstack_visual_indexes is {self.deep}, but must name different blocks of the tower's {self.depth}. "
                f"Give at most {blocks}: each block of the language model takes one."
            )
        super().__init__(config)
        self.rope_index = bare(type(self.whole(1).model), config).get_rope_index

    def layers(self) -> list[LayerSpec]:
        """Return the layers in front of the token embedding."""
        blocks = [LayerSpec(PatchBlock, self, index) for index in range(self.depth)]
        return [LayerSpec(PatchEmbedding, self), *blocks, LayerSpec(PatchMerger, self)]

    def forms(self, name: str) -> str | FolderName:
        """Return the name of a tensor of the tower, in a folder and in a live model."""
        return FolderName(name, f"model.{name}") if self.kind.older_names else f"model.{name}"

    def forms_of_text(self, name: str) -> str | FolderName:
        """Return the name of a tensor of the language model, in a folder and in a live model."""
        return FolderName(name.replace(".language_model.", ".", 1), name) if self.kind.older_names else name

    def names(self) -> dict[str, str]:
        """Return the parameter names of the tower's layers, ``0.patch_embed...``, -> names in transformers' model."""
        entries = {}
        for name, _ in self.whole(self.depth).model.visual.named_parameters():
            part, _, rest = name.partition(".")
            number, _, inner = rest.partition(".")
            if part == "blocks":
                ours = f"{int(number) + 1}.block.{inner}"
            elif part == "deepstack_merger_list":
                ours = f"{self.deep[int(number)] + 1}.deepstack.{inner}"
            else:
                ours = f"{self.depth + 1 if part == 'merger' else 0}.{name}"
            entries[ours] = f"visual.{name}"
        return entries

    def filled(self, x: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows and the grid, with a blank image if there is none."""
        if len(grid):
            return x, grid
        blank = x.new_zeros(self.merge**2, *x.shape[1:])
        return torch.cat([x, blank]), grid.new_tensor([[1, self.merge, self.merge]])

    def windows(self, grid: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the squares of patches in the order of the windows of attention, and the windows' bounds.

        None: the tower has no windows.
        """
        from transformers.vision_utils import get_vision_window_index

        if not hasattr(self.vision, "window_size"):
            return None
        sizes = (self.merge, self.vision.window_size, self.vision.patch_size)
        order, bounds = get_vision_window_index(grid, *sizes)
        return order.to(grid.device), bounds

    def in_order(self, x: Tensor, windows: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return rows of patches (S, ...) in the order in which the tower keeps them."""
        return x if windows is None else x.unflatten(0, (-1, self.merge**2))[windows[0]].flatten(0, 1)

    def positions_of_text(self, ids: Tensor, grid: Tensor) -> Tensor:
        """Return the positions of tokens (B, T) in time, height and width: (3, B, T).

        Raises:
            ValueError: the runs of image tokens are not those of the images.
        """
        image = ids == self.config.image_token_id
        edges = nn.functional.pad(image.int(), (1, 1)).diff(dim=1)
        runs = ((edges == -1).nonzero() - (edges == 1).nonzero())[:, 1].tolist()
        wanted = (grid.prod(dim=1) // self.merge**2).tolist()
        if runs != wanted:
            raise ValueError(
                f"the rows have runs of {runs} tokens {self.config.image_token_id} for images, but the images of "
                f"image_grid_thw have {wanted} tokens. Give the images of these rows in the order of their tokens, and "
                "put another token between two images."
            )
        positions: Tensor = self.rope_index(ids.cpu(), image.int().cpu(), image_grid_thw=grid.cpu())[0]
        return positions.to(ids.device)


class PatchEmbedding(VisionEmbedding):
    """Embedding of the patches of a microbatch's images: a dict with ``pixel_values`` (S, C) and their grid -> Patches.

    Rows of a microbatch may be padded on the right, as for ``VisionEmbedding``.
    """

    tower: PatchTower  # type: ignore[assignment]

    def __init__(self, tower: PatchTower) -> None:
        nn.Module.__init__(self)
        self.tower = tower
        for name in tower.kind.embeds:
            self.add_module(name, tower.make(name))

    def forward(self, inputs: Tensor | Mapping[str, Tensor]) -> Patches:  # type: ignore[override]
        """Embed the patches; of ids alone, (B, T), there are none.

        Raises:
            ValueError: as ``VisionEmbedding``; or the patches are not those of the grid.
        """
        tower, given = self.tower, self.tower.entries(inputs)
        ids = inputs if isinstance(inputs, Tensor) else given["input_ids"]
        grid, pixels = given.get("image_grid_thw"), given.get("pixel_values")
        vision, merge = tower.vision, tower.merge
        if pixels is None:
            width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
            pixels = next(self.parameters()).new_zeros(0, width)
        grid = ids.new_zeros(0, 3) if grid is None else grid
        if int(grid.prod(dim=1).sum()) != len(pixels) or bool((grid[:, 1:] % merge).any()):
            raise ValueError(
                f"pixel_values has {len(pixels)} patches, but image_grid_thw is {grid.tolist()}. Give frames, rows and "
                f"columns of patches of each image, with rows and columns that {merge} divides."
            )
        rows, (x, sizes) = len(pixels), tower.filled(pixels, grid)
        x = self.get_submodule("patch_embed")(x)
        if "pos_embed" in self._modules:
            x = x + self._learned(sizes).to(x.dtype)
        return tower.in_order(x, tower.windows(sizes))[:rows], grid

    def _learned(self, grid: Tensor) -> Tensor:
        """Return learned positions (S, D), interpolated between those of a square."""
        from transformers.vision_utils import get_vision_interpolation_indices_and_weights

        side = int(self.tower.vision.num_position_embeddings**0.5)
        options: dict[str, Any] = {"align_corners": True, "spatial_merge_size": self.tower.merge}
        indices, weights = get_vision_interpolation_indices_and_weights(grid, side, **options)
        found: Tensor = (self.get_submodule("pos_embed")(indices) * weights[:, :, None]).sum(1)
        return found


class PatchBlock(VisionBlock):
    """One block of a tower, and the merger of its deep-stack features if it has them: Patches -> Patches."""

    def __init__(self, tower: PatchTower, index: int, *, grid: Grid) -> None:
        super().__init__(tower, index, grid=grid)
        self.tower, deep = tower, tower.deep
        full = getattr(tower.vision, "fullatt_block_indexes", ())
        self.windowed = index not in full
        self.rotary: nn.Module = type(tower.whole(1).model.visual.rotary_pos_emb)(tower.vision)
        path = f"deepstack_merger_list.{deep.index(index)}" if index in deep else None
        self.deepstack: nn.Module | None = None if path is None else tower.make(path)

    def forward(self, patches: Patches) -> Patches:  # type: ignore[override]
        """Run the block; its deep-stack features are the last of the output."""
        from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids

        x, grid, *deep = patches
        rows, (x, sizes) = len(x), self.tower.filled(x, grid)
        windows = self.tower.windows(sizes)
        bounds = windows[1] if windows is not None and self.windowed else get_vision_cu_seqlens(sizes)
        positions = self.tower.in_order(get_vision_position_ids(sizes, self.tower.merge), windows)
        x = self.block(x, cu_seqlens=bounds, position_embeddings=self.rotary(x, positions))
        if self.deepstack is not None:
            deep.append(self.deepstack(x)[: rows // self.tower.merge**2])
        return x[:rows], grid, *deep


class PatchMerger(nn.Module):
    """Features of the image tokens from a tower's output, in the order of the tokens: Patches -> Patches, (S / m^2, D).

    The grid and the deep-stack features are passed on.
    """

    hollow = False

    def __init__(self, tower: PatchTower) -> None:
        super().__init__()
        self.tower = tower
        self.merger: nn.Module = tower.make("merger")

    def forward(self, patches: Patches) -> Patches:
        """Merge squares of patches: (S, D) of the tower -> (S / m^2, D) of the language model."""
        x, grid, *deep = patches
        rows, (x, sizes) = len(x), self.tower.filled(x, grid)
        x, windows = self.merger(x), self.tower.windows(sizes)
        x = x if windows is None else x[torch.argsort(windows[0])]
        return x[: rows // self.tower.merge**2], grid, *deep
