"""Pipeline layers made of Hugging Face's own blocks: ``hf_layers(model)``, for the decoders of ``families.py``.

layers = hf_layers(transformers_model)                  # or a folder; LayerSpecs that build themselves with its weights
model = PipelineModule(layers, grid=Grid(pipe=2), loss_fn=CausalLMLoss())
engine = triax.Engine(model, options)
save_hf(engine, "path/to/mine")                         # under transformers' names

The blocks are transformers' classes. They run as in transformers' models, with the same causal mask and the same rotary
positions. The tensor axis shards them by the plan of ``parallelize``; embedding, norm and head are whole on each rank.
``load_hf`` builds triax's own layers instead. ``hf_layers`` is for models with features that triax's layers lack. This
module is imported on first use, and transformers when a layer is built.

Of a model with images the list begins with the layers of its vision tower (``vision_layers.py``, ``padded_layers.py``,
``patch_layers.py``), which see the images of a microbatch. Its token embedding, which stands behind them, takes the
field ``input_ids`` of the microbatch.

On a grid with a context axis the embedding takes this rank's tokens of the whole ids (``context/order.py``), and the
blocks call ``context.attention`` in place of the implementation that the configuration names.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...base.formulas import CHUNK_TOKENS
from ...base.hub import local_folder
from ...context.context_attention import attention
from ...context.order import positions, shard
from ...grid import Axis, Grid
from ...pipe.chunked_loss import LastLayer, is_watched, loss_in_chunks, runs_otherwise
from ...pipe.spec import LayerSpec, TiedLayerSpec
from ..layers import scaled, softcapped
from .config import read_config, without_modules
from .families import FAMILIES
from .family import Family
from .load import self_loading
from .names import Names, OneRow, expand
from .padded_layers import PADDED_FAMILIES, Marked, PaddedTower
from .parallelize import shard_part
from .patch_layers import PATCH_FAMILIES, Patches, PatchTower
from .reader import open_source
from .vision_layers import IMAGE_FAMILIES, VisionTower


class HFModel:
    """Configuration of a transformers model, which all layers of one ``hf_layers`` list share.

    Args:
        config: transformers' configuration of the model.
        family: its family; None: that of its ``model_type``.

    Raises:
        ValueError: a family or a setting that ``hf_layers`` does not run.
    """

    def __init__(self, config: Any, family: Family | None = None) -> None:
        kind = getattr(config, "model_type", None)
        if family is None and (kind not in FAMILIES or not (FAMILIES[kind].names and FAMILIES[kind].blocks)):
            known = ", ".join(
                [name for name, family in FAMILIES.items() if family.names and family.blocks]
                + [*IMAGE_FAMILIES, *PATCH_FAMILIES]
            )
            raise ValueError(
                f"hf_layers has the families {known}, but the model is of the family {kind!r}. List its layers "
                "yourself, each as LayerSpec(cls, ...), or add the family (docs/models.md, 'Add a family'). With "
                "triax.load_hf(..., names=...), a triax.Engine trains it without the Trainer (docs/huggingface.md, "
                "'Another family')."
            )
        refused = {
            "add_cross_attention": False,
            "alibi": False,  # of all heads and blocks together
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "use_bidirectional_attention": False,
        }
        for key, wanted in refused.items():
            if bool(getattr(config, key, wanted)) != wanted:
                raise ValueError(f"hf_layers does not implement {key}={not wanted}. Take a model without it.")
        for key in ("router_aux_loss_coef", "aux_loss_alpha"):
            if getattr(config, key, 0.0):
                raise ValueError(
                    f"hf_layers does not add the load-balancing loss, but {key} is {getattr(config, key)}. Set it to 0 "
                    "in the model's configuration, or take the layers of load_hf(path), which have this loss."
                )
        if getattr(config, "word_embed_proj_dim", config.hidden_size) != config.hidden_size:
            raise ValueError(
                f"hf_layers does not implement word_embed_proj_dim={config.word_embed_proj_dim} different from "
                f"hidden_size={config.hidden_size}. Take a model without it."
            )
        self.config, self.family = config, family or FAMILIES[str(kind)]
        if config._attn_implementation is None:
            config._attn_implementation = self.whole().config._attn_implementation  # as a model would choose
        table = self._table()
        paths = {ours: theirs for ours, theirs in table.items() if isinstance(theirs, str)}
        self.embedding = paths["layers.0.weight"].removesuffix(".weight")
        self.positions = paths.get("layers.1.weight", "").removesuffix(".weight")
        self.embedding_norm = paths.get("layers.1.norm.*", "").removesuffix(".*")
        self.first = 1 + bool(self.positions) + bool(self.embedding_norm)  # the number of layers in front of the blocks
        self.norm = paths[f"layers.{{n+{self.first}}}.*"].removesuffix(".*")
        self.blocks = next(theirs for ours, theirs in paths.items() if "{i" in ours).partition(".{i}")[0]

    @property
    def architecture(self) -> str:
        """Name of the family's model class, as ``config.json`` lists it under ``architectures``."""
        return self.family.architecture

    def _table(self) -> Names:
        """Return the family's table of names."""
        names = self.family.names
        return names(without_modules(self.config.to_dict())) if callable(names) else names

    def whole(self) -> Any:
        """Return a model of one block on the meta device, to look up its modules."""
        import transformers

        config = copy.deepcopy(self.config)
        config.num_hidden_layers = 1
        with torch.device("meta"):
            return getattr(transformers, self.architecture)(config)

    def make(self, path: str) -> Any:
        """Build a module of the model by its name, with values: an embedding, a norm or the head."""
        layer = self.whole().get_submodule(path).to_empty(device=torch.get_default_device())
        layer.to(torch.get_default_dtype())
        self.initialize(layer)
        return layer

    def initialize(self, layer: nn.Module) -> None:
        """Draw a layer's initial weights from the distributions that transformers uses for the family."""
        import transformers

        cls = getattr(transformers, self.architecture)
        host = cls.__new__(cls)  # its rule needs the configuration, not a whole model
        nn.Module.__init__(host)
        host.config = self.config
        layer.apply(host._init_weights)

    def names(self) -> Names:
        """Return the table from the parameter names of these layers to transformers' names.

        A parameter whose name in files is not its name in transformers' model is written as in files.
        """
        model, first = self.whole(), self.first
        both = {_live(forms[-1]): [*map(_live, forms)] for forms in self._table().values() if isinstance(forms, list)}
        entries: dict[str, Any] = {"layers.0.weight": f"{self.embedding}.weight"}
        if self.positions:
            entries["layers.1.weight"] = f"{self.positions}.weight"
        if self.embedding_norm:
            for name, _ in model.get_submodule(self.embedding_norm).named_parameters():
                entries[f"layers.1.norm.{name}"] = f"{self.embedding_norm}.{name}"
        for name in self._names_of_blocks(type(model.get_submodule(f"{self.blocks}.0"))):
            theirs = f"{self.blocks}.{{i}}.{name}"
            entries[f"layers.{{i+{first}}}.block.{name}"] = both.get(theirs, theirs)
        for name, _ in model.get_submodule(self.norm).named_parameters():
            entries[f"layers.{{n+{first}}}.norm.{name}"] = f"{self.norm}.{name}"
        for name, _ in model.get_submodule("lm_head").named_parameters():  # tied: under no name of ours
            entries[f"layers.{{n+{first + 1}}}.{name}"] = f"lm_head.{name}"
        return entries

    def _names_of_blocks(self, make: Any) -> dict[str, Tensor]:
        """Return the parameters and stored buffers of the blocks, which need not all have the same ones."""
        with torch.device("meta"):
            blocks = [make(self.config, layer_idx=block) for block in range(self.config.num_hidden_layers)]
        return {name: tensor for block in blocks for name, tensor in block.state_dict(keep_vars=True).items()}

    def dropout(self, x: Tensor, training: bool) -> Tensor:
        """Apply the dropout of the embeddings."""
        return F.dropout(x, getattr(self.config, self.family.embedding_dropout or "", 0.0), training)

    def embedding_scale(self, embedding: Any) -> float:
        """Return the factor of the token embeddings, which the module has (Gemma) or the model (Granite)."""
        return float(getattr(embedding, "scalar_embed_scale", getattr(self.config, "embedding_multiplier", 1.0)))

    def capped(self, logits: Tensor) -> Tensor:
        """Apply the factor and the cap of the logits, if the model has them."""
        factor = getattr(self.config, self.family.places.get("logit_scale", ("", None))[0], 1.0)
        factor = 1.0 / factor if "logit_scale" in self.family.inverse else factor
        return softcapped(scaled(logits, factor), getattr(self.config, "final_logit_softcapping", None))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HFModel) and self.config.to_dict() == other.config.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return type(self.config).__name__


class HFVisionModel:
    """Configuration of a model with a vision tower and a language model. All layers of one list share it.

    Args:
        config: transformers' configuration of the model.

    Attributes:
        text: the configuration of the language model's layers.
        tower: the configuration of the tower's layers.
        embedding, block: the classes of the token embedding and of the language model's blocks.
        first: number of layers in front of the token embedding.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        self.tower: PatchTower | VisionTower
        self.embedding: Callable[..., Embedding]
        self.block: type[HFBlock]
        if config.model_type in PATCH_FAMILIES:
            self.tower, self.embedding, self.block = PatchTower(config), PatchTextEmbedding, PatchTextBlock
            self.text: HFModel = _TextPart(self.tower)
        else:
            padded = config.model_type in PADDED_FAMILIES
            self.tower = PaddedTower(config) if padded else VisionTower(config)
            self.embedding, self.block = PaddedTextEmbedding if padded else ImageTextEmbedding, HFBlock
            self.text = HFModel(config.text_config)
            if config.model_type == "gemma3":
                self.embedding, self.block = GemmaTextEmbedding, GemmaTextBlock
        self.family, self.first = self.text.family, self.tower.depth + 2

    @property
    def architecture(self) -> str:
        """Name of the model class, as ``config.json`` lists it under ``architectures``."""
        return self.tower.architecture

    def names(self) -> Names:
        """Return the table from the parameter names of these layers to transformers' names."""
        entries: dict[str, Any] = {
            f"layers.{ours}": self.tower.forms(theirs) for ours, theirs in self.tower.names().items()
        }
        for ours, entry in expand(self.text.names(), self.text.config.num_hidden_layers).items():
            _, index, rest = ours.split(".", 2)
            entries[f"layers.{int(index) + self.first}.{rest}"] = self.tower.forms_of_text(*entry.theirs)
        return entries

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HFVisionModel) and self.config.to_dict() == other.config.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return type(self.config).__name__


class _TextPart(HFModel):
    """Language model of a model with images, in which its modules are looked up."""

    def __init__(self, tower: PatchTower) -> None:
        self.tower = tower
        super().__init__(tower.config.text_config, tower.kind.text)

    @property
    def architecture(self) -> str:
        return self.tower.architecture

    def whole(self) -> Any:
        return self.tower.whole(1)


def hf_layers(model_or_config: Any, attention: str = "ring") -> list[LayerSpec]:
    """Return a transformers model as layers for a ``PipelineModule``: ids (B, T) -> logits (B, T, V).

    The list is ``[embedding, (norm,) (positions,) block 0, ..., block L - 1, norm, head]``, where a tied head is the
    embedding again. The layers are built later, by the ``PipelineModule``. Every row must be one document without
    padding. Dropout is transformers' own, drawn from each process's generator. Set it to 0 if different grids must give
    equal results.

    A LLaVA, Gemma 3, Idefics3, SmolVLM, Qwen2-VL, Qwen2.5-VL or Qwen3-VL (``...ForConditionalGeneration``) has the
    layers of its vision tower in front, ``[patches, block 0, ..., projector]``. Their input is the microbatch: a dict
    of ``input_ids`` and the images of all its rows in the order of their tokens, ``pixel_values`` (N, C, H, W), of an
    Idefics3 or a SmolVLM (B, n, C, H, W), or of a Qwen ``pixel_values`` (S, C) and ``image_grid_thw`` (N, 3). N may
    differ between microbatches, and may be 0.

    >>> sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
    >>> model = triax.PipelineModule(triax.hf_layers(transformers.LlamaConfig(**sizes)), loss_fn=triax.CausalLMLoss())
    >>> model(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 64])

    Args:
        model_or_config: a model such as ``LlamaForCausalLM``, of a family that docs/models.md lists, from which the
            layers take their initial weights, and which of them are frozen; a folder with such a model, or its id on
            the Hub; or the configuration of such a model. With a configuration, the initial weights are drawn from
            transformers' distributions, with equal values on every grid.
        attention: how the ranks of the context axis compute attention: ``ring``, ``ulysses`` or ``gather``.

    Returns:
        The layers' specs. ``save_hf(engine, path)`` writes the parameters of these layers under transformers' names.

    Raises:
        ValueError: the model is of another family, or has a setting such as cross attention.
    """
    config: Any = model_or_config
    source: Any = None
    if isinstance(model_or_config, nn.Module):
        config, source = model_or_config.config, model_or_config
    elif isinstance(model_or_config, (str, Path)):
        from transformers import AutoConfig

        source = local_folder(model_or_config, weights=True)
        read_config(source)  # whose errors name the file, and what is wrong in it
        config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    model: HFModel | HFVisionModel
    front: list[LayerSpec] = []
    takes: tuple[str, ...] = ()
    block: type[HFBlock] = HFBlock
    if getattr(config, "model_type", None) in (*IMAGE_FAMILIES, *PATCH_FAMILIES):
        model = HFVisionModel(config)
        text, block, front, takes = model.text, model.block, model.tower.layers(), ("input_ids",)
        embedding: Callable[..., Embedding] = partial(model.embedding, model)
    else:
        model = text = HFModel(config)
        embedding = partial(Embedding, text)
    first, head = LayerSpec(embedding, takes=takes), LayerSpec(Head, text)
    tied = config.tie_word_embeddings
    weights = None if source is None else open_source(source, text.embedding, whole=True)
    if tied and weights is not None:
        tied = weights.config.get("tie_word_embeddings", True)
    if tied:
        first = TiedLayerSpec("embed", embedding, takes=takes)
        head = TiedLayerSpec("embed", embedding, forward_fn=Embedding.attend)
    positions = [LayerSpec(Norm, text, text.embedding_norm)] if text.embedding_norm else []
    positions += [LayerSpec(Positions, text)] if text.positions else []
    blocks = [LayerSpec(block, text, index, attention=attention) for index in range(text.config.num_hidden_layers)]
    layers = [*front, first, *positions, *blocks, LayerSpec(Norm, text, text.norm), head]
    return layers if weights is None else self_loading(layers, weights, model.names())


class Embedding(nn.Embedding):
    """Token embedding of a transformers model: ids (B, T) -> (B, T, D); with a context axis, (B, T / c, D)."""

    hollow = False  # built with its values, and its buffers

    def __init__(self, hf: HFModel, *, grid: Grid) -> None:
        theirs = hf.whole().get_submodule(hf.embedding)
        super().__init__(theirs.num_embeddings, theirs.embedding_dim, theirs.padding_idx)
        self.hf, self.context = hf, grid.context
        self.scale = hf.embedding_scale(theirs)
        hf.initialize(self)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up this rank's tokens: (B, T) -> (B, T / c, D).

        Raises:
            ValueError: the length is not a multiple of 2 c.
        """
        self._check_length(ids)
        return self._dropped(self._vectors(shard(ids, self.context)))

    def attend(self, x: Tensor) -> Tensor:
        """Multiply by the embedding's weight as a tied head: (B, T, D) -> logits (B, T, V)."""
        return self.hf.capped(F.linear(x, self.weight))

    def _vectors(self, ids: Tensor) -> Tensor:
        x = super().forward(ids)
        return x if self.scale == 1.0 else x * torch.tensor(self.scale, dtype=x.dtype)

    def _dropped(self, x: Tensor) -> Tensor:
        return x if self.hf.positions else self.hf.dropout(x, self.training)

    def _check_length(self, ids: Tensor) -> None:
        length, step = ids.shape[1], 2 * self.context.size
        if self.context.size > 1 and length % step:
            raise ValueError(
                f"the rows have {length} tokens, but context={self.context.size} cuts them into {step} equal chunks. "
                f"Pad them, or cut them, to a multiple of {step}, such as {-(-length // step) * step}."
            )


class ImageTextEmbedding(Embedding):
    """Token embedding with the features of images at the places of image tokens: (N, P, D) -> (B, T / c, D)."""

    def __init__(self, model: HFVisionModel, *, grid: Grid) -> None:
        super().__init__(model.text, grid=grid)
        self.image_token = model.config.image_token_id

    def forward(self, features: Tensor, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        """Look up the tokens (B, T), and put the features there, image by image: (N, P, D) -> (B, T / c, D).

        Raises:
            ValueError: the rows have another number of image tokens than the images have features; or as ``Embedding``.
        """
        self._check_length(input_ids)
        is_image = input_ids == self.image_token
        beyond = self.image_token >= self.num_embeddings
        x = self._vectors(input_ids.masked_fill(is_image, 0) if beyond else input_ids)
        count, per_image = int(is_image.sum()), features.shape[1]
        if count != len(features) * per_image:
            raise ValueError(
                f"the microbatch has {count} tokens {self.image_token} for images, but {len(features)} images of "
                f"{per_image} tokens each. Give pixel_values (N, C, H, W) with the images of these rows, and no others."
            )
        x = x.masked_scatter(is_image[..., None], features.to(x.dtype))  # also without images: see vision_layers.py
        return self._dropped(shard(x, self.context))


class PaddedTextEmbedding(ImageTextEmbedding):
    """``ImageTextEmbedding`` of an Idefics3 or a SmolVLM, some of whose images are padding."""

    def forward(self, features: Marked, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        """Look up the tokens (B, T), and put the features of the other images there: -> (B, T / c, D)."""
        x, marks = features
        return super().forward(x[(marks >= 0).all(1)], input_ids)


class GemmaTextEmbedding(ImageTextEmbedding):
    """Token embedding of a Gemma 3 with images: (N, P, D) -> x (B, T, D), and the number of each token's image, or -1.

    Its blocks let the tokens of an image attend to each other, also to later ones.
    """

    def __init__(self, model: HFVisionModel, *, grid: Grid) -> None:
        super().__init__(model, grid=grid)
        _check_whole(model, grid)

    def forward(self, features: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Look up the tokens (B, T), and put the features there, image by image."""
        from transformers.models.gemma3.modeling_gemma3 import get_block_sequence_ids_for_mask

        x = super().forward(features, input_ids)
        return x, get_block_sequence_ids_for_mask((input_ids == self.image_token).int())


class PatchTextEmbedding(Embedding):
    """Token embedding with the features of images of any size at the places of their tokens.

    Patches -> x (B, T, D) and the positions (3, B, T) of the tokens, in time, height and width; if there are deep-stack
    features, also (B, T), True at image tokens, and these features.
    """

    tower: PatchTower

    def __init__(self, model: HFVisionModel, *, grid: Grid) -> None:
        super().__init__(model.text, grid=grid)
        self.tower = model.tower  # type: ignore[assignment]
        _check_whole(model, grid)

    def forward(self, patches: Patches, input_ids: Tensor) -> Patches:  # type: ignore[override]
        """Look up the tokens (B, T), and put the features there, image by image.

        Raises:
            ValueError: the image tokens are not those of the images.
        """
        features, sizes, *deep = patches
        positions = self.tower.positions_of_text(input_ids, sizes)
        is_image = input_ids == self.tower.config.image_token_id
        x = self._vectors(input_ids)
        x = x.masked_scatter(is_image[..., None], features.to(x.dtype))
        return (x, positions, is_image, *deep) if deep else (x, positions)


class Positions(nn.Embedding):
    """Learned positions, then dropout: (B, T, D) -> (B, T, D)."""

    hollow = False

    def __init__(self, hf: HFModel, *, grid: Grid) -> None:
        theirs = hf.whole().get_submodule(hf.positions)
        super().__init__(theirs.num_embeddings, theirs.embedding_dim)
        self.hf, self.context, self.offset = hf, grid.context, getattr(theirs, "offset", 0)
        hf.initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """Add the learned positions and apply dropout: (B, T, D) -> (B, T, D)."""
        return self.hf.dropout(x + super().forward(_positions(x, self.context) + self.offset), self.training)


class HFBlock(nn.Module):
    """One transformers block with the causal mask and positions of its model: (B, T, D) -> (B, T, D)."""

    hollow = False

    def __init__(self, hf: HFModel, index: int, *, grid: Grid, attention: str = "ring") -> None:
        super().__init__()
        self.config, self.context = hf.config, grid.context
        self.is_last = index == hf.config.num_hidden_layers - 1
        model = hf.whole()
        self.block: nn.Module = type(model.get_submodule(f"{hf.blocks}.0"))(hf.config, layer_idx=index)
        types, window = getattr(hf.config, "layer_types", None), getattr(hf.config, "sliding_window", None)
        self.layer_type = types[index] if types else "full_attention" if window is None else "sliding_attention"
        if grid.context.size > 1:
            if not getattr(model, "_supports_attention_backend", False):
                raise ValueError(
                    f"the attention of {type(model).__name__} cannot be replaced, which context={grid.context.size} "
                    "needs. Use a grid with context=1, or the layers of load_hf(path)."
                )
            if getattr(hf.config, "attention_chunk_size", None) is not None:
                raise ValueError(
                    "hf_layers cannot spread attention in chunks "
                    f"(attention_chunk_size={hf.config.attention_chunk_size}) over context={grid.context.size}. Use a "
                    "grid with context=1, or the layers of load_hf(path)."
                )
            _attend_over_context(
                self.block, grid, attention, window if self.layer_type == "sliding_attention" else None
            )
        base = model.get_submodule(hf.blocks.rpartition(".")[0])
        rotary, self.alibi = getattr(base, "rotary_emb", None), getattr(type(base), "build_alibi_tensor", None)
        kind = getattr(rotary, "rope_type", None)
        if grid.context.size > 1 and {"longrope", "dynamic"} & set(kind.values() if isinstance(kind, dict) else [kind]):
            raise ValueError(
                f"rope_type={kind!r} depends on the length of a row, of which each rank of context={grid.context.size} "
                "has a part. Use a grid with context=1, or the layers of load_hf(path)."
            )
        self.rotary = None if rotary is None else type(rotary)(hf.config)
        self.by_type = rotary is not None and "layer_type" in inspect.signature(rotary.forward).parameters
        hf.initialize(self)
        if grid.tensor.size > 1:
            if hf.family.plan is None:
                raise ValueError(
                    f"the grid has tensor={grid.tensor.size}, but no plan says how the blocks of "
                    f"{type(model).__name__} are sharded. Take the layers of load_hf(path), or a grid with tensor=1."
                )
            shard_part(self.block, f"{hf.blocks}.{index}", grid, hf.family.plan(hf.config))

    def forward(self, x: Any) -> Any:
        """Run the block with its model's mask and positions: (B, T, D) -> (B, T, D)."""
        return self.run(x)

    def run(self, x: Tensor, rotary_positions: Tensor | None = None, images: Tensor | None = None) -> Tensor:
        """Run the block.

        Args:
            x: (B, T, D).
            rotary_positions: (3, B, T), of a model with images; None: those of text.
            images: (B, T), for each token the number of the image within which attention is not causal, or -1.
        """
        from transformers import masking_utils

        positions, mask = _positions(x, self.context)[None], None
        if self.context.size == 1:
            kinds = {"sliding_attention": "sliding_window_", "chunked_attention": "chunked_"}
            make = getattr(masking_utils, f"create_{kinds.get(self.layer_type, '')}causal_mask")
            mask = make(self.config, x, attention_mask=None, past_key_values=None, position_ids=positions)
        if images is not None:
            from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model

            masks = create_masks_for_vision_model(self.config, x, None, None, positions, images)
            mask = masks[self.layer_type]
        given: dict[str, Any] = {"attention_mask": mask, "position_ids": positions}
        if self.rotary is not None:
            kind = (self.layer_type,) if self.by_type else ()
            given["position_embeddings"] = self.rotary(
                x, positions if rotary_positions is None else rotary_positions, *kind
            )
        if hasattr(self.config, "alibi"):  # Falcon's blocks want it, also where there is none
            given["alibi"] = None
        if self.alibi is not None:  # of Bloom
            every_token = torch.ones(x.shape[:2], dtype=torch.int64, device=x.device)
            given["alibi"] = self.alibi(None, every_token, self.config.n_head, x.dtype)
        y = self.block(x, **given)
        hidden: Tensor = y[0] if isinstance(y, tuple) else y
        return hidden


class PatchTextBlock(HFBlock):
    """One block of the language model of ``PatchTextEmbedding``: its output -> the same; the last one: -> (B, T, D).

    The first blocks each add one of the deep-stack features to their output at the image tokens.
    """

    def forward(self, value: Patches) -> Tensor | Patches:
        """Run the block, and add its deep-stack features."""
        x, positions, *images = value
        x = self.run(x, positions)
        if images:
            is_image, features, *later = images
            x = x.masked_scatter(is_image[..., None], x[is_image] + features.to(x.dtype))
            images = [is_image, *later] if later else []
        return x if self.is_last else (x, positions, *images)


class GemmaTextBlock(HFBlock):
    """One block of the language model of ``GemmaTextEmbedding``: its output -> the same; the last one: -> (B, T, D)."""

    def forward(self, value: tuple[Tensor, Tensor]) -> Any:
        """Run the block."""
        x, images = value
        x = self.run(x, images=images)
        return x if self.is_last else (x, images)


class Norm(nn.Module):
    """A norm of the model, such as that in front of the head, by its name: (B, T, D) -> (B, T, D)."""

    hollow = False

    def __init__(self, hf: HFModel, path: str) -> None:
        super().__init__()
        self.norm: nn.Module = hf.make(path)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize: (B, T, D) -> (B, T, D)."""
        y: Tensor = self.norm(x)
        return y


class Head(nn.Linear):
    """Output layer with its own weight (not tied to the embedding): (B, T, D) -> logits (B, T, V)."""

    hollow = False

    def __init__(self, hf: HFModel) -> None:
        bias = hf.whole().get_submodule("lm_head").bias is not None
        super().__init__(hf.config.hidden_size, hf.config.vocab_size, bias=bias)
        self.hf = hf
        hf.initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits: (B, T, D) -> (B, T, V)."""
        return self.hf.capped(super().forward(x))


@dataclass(frozen=True)
class CausalLMLoss:
    """Causal language model loss as in transformers: the labels are the ids themselves, and the loss shifts them.

    >>> triax.CausalLMLoss()(torch.zeros(1, 3, 256), torch.tensor([[7, 8, 9]]))  # 2 ln 256, and 2 labels
    (tensor(11.0904), tensor(2))

    Args:
        ignore_index: label value that is left out of the loss and of the count.
        grid: the model's grid. Needed if it has a context axis.
        chunk_tokens: tokens for which the output layer and the loss run at a time, as for ``NextTokenLoss``.
    """

    ignore_index: int = -100
    grid: Grid | None = None
    chunk_tokens: int | None = CHUNK_TOKENS

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses and the number of labels that count, by which the engine divides the sum.

        The sum is computed in fp32, or in fp64 if the logits are fp64.

        Args:
            logits: (B, T, V), of this rank's tokens if the grid has a context axis.
            labels: integers (B, T), of the whole sequence.

        Raises:
            ValueError: the logits are of a part of the sequence, and the loss was not given the grid.
        """
        return self._entropy(logits, self._following(labels, logits.shape[1]))

    def takes_head(self, layer: nn.Module | None, function: Callable[..., Any] | None) -> bool:
        """Return True for the output layers of ``hf_layers``, which may be run in chunks of tokens."""
        if self.chunk_tokens is None or layer is None or is_watched(layer) or runs_otherwise(self):
            return False
        return (
            function is Embedding.attend if isinstance(layer, Embedding) else function is None and type(layer) is Head
        )

    def of_head(self, head: LastLayer, x: Any, labels: Tensor) -> Any:
        """Return the loss of the output layer's input, (B, T, D)."""
        assert self.chunk_tokens is not None
        labels = self._following(labels, x.shape[1])
        return loss_in_chunks(head, self._entropy, x, labels, self.chunk_tokens)

    def _following(self, labels: Tensor, length: int) -> Tensor:
        """Return the label that follows each of this rank's tokens, which are ``length``: (B, T)."""
        followed = F.pad(labels[:, 1:], [0, 1], value=self.ignore_index)
        if length == labels.shape[1]:
            return followed
        if self.grid is None:
            raise ValueError(
                f"the logits have {length} tokens and the labels {labels.shape[1]}, because the context axis divides "
                "the sequence. Give the loss the grid, CausalLMLoss(grid=grid)."
            )
        return shard(followed, self.grid.context, fill=self.ignore_index)

    def _entropy(self, logits: Tensor, followed: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits if logits.dtype == torch.float64 else logits.float()
        total = F.cross_entropy(
            logits.flatten(0, 1), followed.flatten(), ignore_index=self.ignore_index, reduction="sum"
        )
        return total, torch.count_nonzero(followed != self.ignore_index)

    def weight(self, labels: Tensor) -> Tensor:
        """Return the number of labels that count, (): with a context axis, of those of this rank's tokens."""
        followed = labels[:, 1:]
        if self.grid is not None:
            followed = shard(followed, self.grid.context, fill=self.ignore_index)
        return torch.count_nonzero(followed != self.ignore_index)


def _check_whole(model: HFVisionModel, grid: Grid) -> None:
    """Raise ValueError if the context axis divides the sequences of a model with images."""
    if grid.context.size > 1:
        raise ValueError(
            f"hf_layers does not divide the sequences of a {model} over context={grid.context.size}. Use a grid with "
            "context=1."
        )


def _live(form: Any) -> Any:
    """Return one form of a name for transformers' own parameter, of the shape that files have."""
    return form.name if isinstance(form, OneRow) else form


def _positions(x: Tensor, context: Axis) -> Tensor:
    """Return the positions of this rank's tokens, x (B, T / c, D), in the whole sequence: int64 (T / c,)."""
    if context.size == 1:
        return torch.arange(x.shape[1], device=x.device)
    return positions(x.shape[1] * context.size, context.size, context.rank).to(x.device)


def _attend_over_context(block: nn.Module, grid: Grid, kind: str, window: int | None) -> None:
    """Let a transformers block's attention call ``context.attention``.

    The window is the block's, because some models have it in their mask only.

    Raises:
        ValueError: the block drops attention probabilities, or has no attention that transformers can replace.
    """
    from transformers import AttentionInterface

    AttentionInterface.register("triax_context", _attend)
    users = [module for module in block.modules() if hasattr(getattr(module, "config", None), "_attn_implementation")]
    if not users:
        raise ValueError(
            f"a {type(block).__name__} has no attention that context={grid.context.size} could replace. Use a grid "
            "with context=1, or the layers of load_hf(path)."
        )
    for module in users:
        # Kept by the module, not by transformers' registry, which keeps what it is given until the process ends.
        module.triax_context = (grid, kind, window)  # type: ignore[assignment]
        module.config = copy.copy(module.config)
        module.config._attn_implementation = "triax_context"  # type: ignore[union-attr]


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Compute ``context.attention`` in place of a transformers attention function: (B, T / c, H, D) for its module."""
    grid, kind, window = module.triax_context
    if options.get("dropout"):
        raise ValueError(
            f"context={grid.context.size} divides each sequence over ranks, which does not work with dropout of "
            f"attention probabilities, but the model has {options['dropout']}. Set its attention dropout to 0."
        )
    rules: dict[str, Any] = {
        "scale": options.get("scaling"),
        "sinks": options.get("s_aux"),
        "softcap": options.get("softcap"),
    }
    y = attention(query, key, value, grid=grid, kind=kind, window=window, **rules)
    return y.transpose(1, 2), None
