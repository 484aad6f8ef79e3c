"""Layers of the vision tower of a LLaVA (Liu et al. 2023, arXiv:2304.08485) or a Gemma 3 (2025, arXiv:2503.19786).

    images (N, C, H, W) -> VisionEmbedding -> VisionBlock 0, ... -> Projector -> features (N, P, D) of the image tokens

N is the number of images of the microbatch, of all its rows together, and may be 0. Each layer then runs on a blank
image, whose output is cut off: replicas run the same layers, which ZeRO needs, and gradients are 0 where one process of
transformers has none.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...grid import Grid
from ...pipe.spec import LayerSpec
from ...tensor_parallel.plans import Column, Local, Row, Style
from .names import FolderName
from .parallelize import shard_part

TOWERS = ("clip_vision_model", "siglip_vision_model")  # model_type of the towers of these models
# model_type of the whole model -> its class in transformers.
IMAGE_FAMILIES = {
    kind: f"{name}ForConditionalGeneration"
    for kind, name in {"llava": "Llava", "gemma3": "Gemma3", "idefics3": "Idefics3", "smolvlm": "SmolVLM"}.items()
}


def bare(cls: Any, config: Any) -> Any:
    """Return a model of transformers with its configuration and no modules, to call its methods."""
    host = cls.__new__(cls)
    nn.Module.__init__(host)
    host.config = config
    return host


class Tower:
    """Configuration of a vision tower, which all layers of one ``hf_layers`` list share.

    Args:
        config: transformers' configuration of the whole model.

    Attributes:
        architecture: name of the class of the whole model.
        path: name of the tower in ``model.model``.
        blocks: name of the tower's list of blocks.
        batch: names of the entries of a microbatch that the tower takes -> their description in an error message.
    """

    architecture: str
    path, blocks = "vision_tower", "encoder.layers"
    batch: Mapping[str, str] = {
        "input_ids": "input_ids, labels",
        "pixel_values": "pixel_values (N, C, H, W) of all its images",
        "attention_mask": "attention_mask",
    }

    def __init__(self, config: Any) -> None:
        self.config, self.vision = config, config.vision_config
        if self.vision._attn_implementation is None:
            self.vision._attn_implementation = self.whole(1).config.vision_config._attn_implementation

    def whole(self, blocks: int) -> Any:
        """Return a model on the meta device with this number of blocks in the tower, and one in the language model."""
        import transformers

        config = copy.deepcopy(self.config)
        config.vision_config.num_hidden_layers, config.text_config.num_hidden_layers = blocks, 1
        with torch.device("meta"):
            return getattr(transformers, self.architecture)(config)

    def initialize(self, layer: nn.Module, model: Any, config: Any) -> None:
        """Draw a layer's initial weights from the distributions of the class of a model of transformers."""
        host = bare(type(model), config)  # its rule needs the configuration, not a whole model
        layer.apply(host._init_weights)

    def make(self, path: str, blocks: int = 1) -> Any:
        """Build a module of the tower by its name, with values."""
        tower = self.whole(blocks).model.get_submodule(self.path)
        layer = tower.get_submodule(path)
        layer.to_empty(device=torch.get_default_device()).to(torch.get_default_dtype())
        for module in layer.modules():
            if hasattr(module, "config"):
                module.config = self.vision  # that of all blocks: initial weights depend on their number
        self.initialize(layer, tower, self.vision)
        return layer

    def entries(self, inputs: Tensor | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the entries of a microbatch; of ids alone, (B, T), there are none.

        Raises:
            ValueError: the microbatch has other entries, or rows that are padded on the left.
        """
        given = {} if isinstance(inputs, Tensor) else inputs
        if others := [name for name in given if name not in self.batch]:
            *first, last = self.batch.values()
            raise ValueError(
                f"the microbatch has {', '.join(others)}, which this model does not take. Give it {', '.join(first)}, "
                f"and {last}."
            )
        mask = given.get("attention_mask")
        if mask is not None and bool((mask[:, 1:] > mask[:, :-1]).any()):
            raise ValueError(
                "attention_mask has rows that are padded on the left, but the layers of hf_layers take every row from "
                "its first token. Pad on the right: processor.tokenizer.padding_side = 'right'."
            )
        return given

    def plan(self) -> dict[str, Style]:
        """Return the plan by which the tensor axis shards the tower's blocks."""
        width = getattr(self.vision, "embed_dim", None) or self.vision.hidden_size
        head_dim = width // self.vision.num_attention_heads
        return {
            "*.self_attn.[qkv]_proj": Column(unit=head_dim),
            "*.self_attn.out_proj": Row(unit=head_dim),
            "*.attn": Local({"num_heads": 1}),
            "*.attn.qkv": Column(parts=3, unit=head_dim),
            "*.attn.proj": Row(unit=head_dim),
            "*.mlp.gate_proj": Column(group="gate_up"),
            "*.mlp.up_proj": Column(group="gate_up"),
            "*.mlp.down_proj": Row(),
            **{f"*.mlp.{up}": Column() for up in ("fc1", "linear_fc1")},
            **{f"*.mlp.{down}": Row() for down in ("fc2", "linear_fc2")},
        }


class VisionTower(Tower):
    """Tower of a LLaVA or a Gemma 3, and its projector.

    Attributes:
        projector: name of the projector in ``model.model``.
        depth: number of blocks that run: the output of the last of them is projected.
        has_norm: True if the tower's last norm runs in front of the projector (Gemma 3).

    Raises:
        ValueError: a tower or a setting that ``hf_layers`` does not run.
    """

    projector = "multi_modal_projector"

    def __init__(self, config: Any) -> None:
        vision = config.vision_config
        if vision.model_type not in TOWERS:
            raise ValueError(
                f"hf_layers has the vision towers {', '.join(TOWERS)}, but the model has a {vision.model_type!r}."
            )
        self.architecture, self.has_norm = IMAGE_FAMILIES[config.model_type], config.model_type == "gemma3"
        if self.has_norm:
            self.batch = {"token_type_ids": "token_type_ids", **self.batch}
        layer, blocks = getattr(config, "vision_feature_layer", -1), vision.num_hidden_layers
        if not isinstance(layer, int) or not -blocks - 1 <= layer <= blocks:
            raise ValueError(
                f"hf_layers takes the image features of one of {blocks} blocks, but vision_feature_layer is {layer}."
            )
        self.depth = layer if layer >= 0 else blocks + 1 + layer
        super().__init__(config)

    def layers(self) -> list[LayerSpec]:
        """Return the layers in front of the token embedding."""
        blocks = [LayerSpec(VisionBlock, self, index) for index in range(self.depth)]
        return [LayerSpec(VisionEmbedding, self), *blocks, LayerSpec(Projector, self)]

    def forms(self, name: str) -> list[Any]:
        """Return the forms of a name of the tower, in a folder and in a live model, now and before transformers 5."""
        older = name.replace("vision_tower.", "vision_tower.vision_model.", 1)
        return [FolderName(name, f"model.{name}"), older]

    def forms_of_text(self, name: str) -> FolderName:
        """Return the forms of a name of the language model, in a folder and in a live model."""
        live = name if name.startswith("lm_head.") else name.replace("model.", "model.language_model.", 1)
        return FolderName(f"language_model.{name}", live)

    def names(self) -> dict[str, str]:
        """Return the parameter names of the tower's layers, ``0.embeddings...``, -> names in transformers' model."""
        blocks = self.vision.num_hidden_layers
        entries = {}
        for name, _ in self.whole(blocks).model.named_parameters():
            part, _, rest = name.partition(".")
            first = rest.partition(".")[0]
            if part == self.projector:
                entries[f"{self.depth + 1}.projector.{rest}"] = name
            elif part == self.path and first in ("embeddings", "pre_layrnorm"):
                entries[f"0.{rest}"] = name
            elif part == self.path and first == "post_layernorm" and self.has_norm:
                entries[f"{self.depth + 1}.norm.{rest.partition('.')[2]}"] = name
            elif part == self.path:
                number, _, inner = rest.removeprefix("encoder.layers.").partition(".")
                runs = first == "encoder" and int(number) < self.depth
                where = f"{int(number) + 1}.block.{inner}" if runs else f"{self.depth + 1}.unused.{rest}"
                entries[where] = name
        return entries


class VisionEmbedding(nn.Module):
    """Patches of the images of a microbatch, a dict with ``pixel_values`` (N, C, H, W) -> (N, S, D) of the tower.

    Rows of a microbatch may be padded on the right, where no label counts: causal attention does not look there.
    """

    hollow = False  # built with its values, and its buffers

    def __init__(self, tower: VisionTower) -> None:
        super().__init__()
        self.tower = tower
        self.embeddings: nn.Module = tower.make("embeddings")
        clip = tower.vision.model_type == "clip_vision_model"
        self.pre_layrnorm: nn.Module | None = tower.make("pre_layrnorm") if clip else None

    def forward(self, inputs: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Embed the images of a microbatch; of ids alone, (B, T), there are none.

        Raises:
            ValueError: the microbatch has other entries, or rows that are padded on the left.
        """
        given = self.tower.entries(inputs)
        x = run_on_images(self.embeddings, given["pixel_values"] if "pixel_values" in given else self.no_images())
        return x if self.pre_layrnorm is None else run_on_images(self.pre_layrnorm, x)

    def no_images(self) -> Tensor:
        """Return the images of a microbatch without any, (0, C, H, W)."""
        vision, weight = self.tower.vision, next(self.parameters())
        return weight.new_zeros(0, vision.num_channels, vision.image_size, vision.image_size)


class VisionBlock(nn.Module):
    """One block of a vision tower: (N, S, D) -> (N, S, D)."""

    hollow = False

    def __init__(self, tower: Tower, index: int, *, grid: Grid) -> None:
        super().__init__()
        path = f"{tower.blocks}.0"
        self.block: nn.Module = tower.make(path)
        if grid.tensor.size > 1:
            shard_part(self.block, path, grid, tower.plan())

    def forward(self, x: Tensor) -> Tensor:
        """Run the block: (N, S, D) -> (N, S, D)."""
        return run_on_images(self.block, x, attention_mask=None)


class Projector(nn.Module):
    """Features of the image tokens from a tower's output: (N, S, D) of the tower -> (N, P, D) of the language model.

    Attributes:
        unused: what the tower has behind the layer whose features are taken. It does not run, and is not trained.
    """

    hollow = False

    def __init__(self, tower: VisionTower) -> None:
        super().__init__()
        self.tower, config = tower, tower.config
        blocks = tower.vision.num_hidden_layers
        whole = tower.whole(blocks)
        model = whole.model
        self.projector: nn.Module = model.get_submodule(tower.projector).to_empty(device=torch.get_default_device())
        self.projector.to(torch.get_default_dtype())
        tower.initialize(self.projector, whole, config)
        self.norm: nn.Module | None = tower.make("post_layernorm") if tower.has_norm else None
        self.unused = nn.Module()
        self.unused.encoder = nn.Module()
        for name in dict(model.get_submodule(tower.path).named_children()):
            if name not in ("embeddings", "pre_layrnorm", "encoder") and not (name == "post_layernorm" and self.norm):
                self.unused.add_module(name, tower.make(name))
        later = {str(index): tower.make("encoder.layers.0") for index in range(tower.depth, blocks)}
        self.unused.encoder.layers = nn.ModuleDict(later)
        self.unused.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Project the features that are taken: (N, S, D) -> (N, P, D)."""
        x = x if self.norm is None else run_on_images(self.norm, x)
        if getattr(self.tower.config, "vision_feature_select_strategy", "") == "default":
            x = x[:, 1:]  # without that of the class
        return run_on_images(self.projector, x)


def run_on_images(layer: nn.Module, x: Tensor, **given: Tensor | None) -> Tensor:
    """Run a layer on images (N, ...); without any, on a blank one, whose output is cut off.

    Further arguments (N, ...) are 1 for a blank image.
    """
    if len(x):
        y: Tensor = layer(x, **given)
        return y
    given = {name: value if value is None else value.new_ones(1, *value.shape[1:]) for name, value in given.items()}
    y = layer(torch.cat([x, x.new_zeros(1, *x.shape[1:])]), **given)
    return y[:0]
