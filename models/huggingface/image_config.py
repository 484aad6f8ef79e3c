"""``ImageTextConfig``: configuration of a model of images and text, whose layers are those of ``hf_layers``."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Self

from ...base.hub import local_folder
from ...options.base import REQUIRED, option
from ...pipe.spec import LayerSpec
from ..config_base import TransformerConfig
from .patch_layers import PATCH_FAMILIES
from .pipeline_layers import hf_layers
from .vision_layers import IMAGE_FAMILIES

# Fields of the language model, which transformers' configurations have under the same names.
_SIZES = ("vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True, repr=False)
class ImageTextConfig(TransformerConfig):
    """Configuration of a Hugging Face folder's model of images and text.

    The fields that all models have are those of its language model; layers and parameters are those of the whole model.
    """

    NO_SLICES: ClassVar[str | None] = "has images, whose tokens belong to whole sequences"

    _: KW_ONLY
    folder: str = option(REQUIRED, "Folder of the model, or its id on the Hub.")
    weights: bool = option(True, "False: the layers draw random weights.")

    @classmethod
    def of_folder(cls, folder: str, weights: bool = True) -> Self:
        """Return the configuration of a folder's model.

        Raises:
            ValueError: the model is of another family.
        """
        whole = _read(folder)
        if whole.model_type not in (known := (*IMAGE_FAMILIES, *PATCH_FAMILIES)):
            raise ValueError(
                f"data.images is for models of the families {', '.join(known)}, but this one is of the family "
                f"{whole.model_type!r}: leave data.images out, or give another folder"
            )
        text = whole.get_text_config()
        return cls(**{name: getattr(text, name) for name in _SIZES}, folder=folder, weights=weights)

    def layers(self, **options: Any) -> list[LayerSpec]:
        """List the specs of the layers of tower and language model, with the folder's weights."""
        return hf_layers(self.folder if self.weights else _read(self.folder), **options)

    @property
    def layer_count(self) -> int:
        """Number of entries in the list of layers, with those of the tower."""
        return len(replace(self, weights=False).layers())

    @property
    def parameter_count(self) -> int:
        """Number of parameters, with those of the tower."""
        return super().parameter_count if not self.weights else replace(self, weights=False).parameter_count


def _read(folder: str) -> Any:
    """Return the configuration of a folder's model, as transformers reads it."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(local_folder(folder), local_files_only=True, trust_remote_code=False)
