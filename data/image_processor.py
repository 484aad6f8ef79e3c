"""Processor of a folder of a vision-language model, as transformers has it: the text of an image, and its pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..base.errors import ConfigError, describe, to_install
from ..base.hub import local_folder
from .bad_document import BadDocument
from .tokenizer import load_transformers

_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # tag of EXIF; its values for which height and width are exchanged
_PIXELS = ("pixel_values", "image_grid_thw")  # entries of a microbatch


class ImageFile(NamedTuple):
    """Image of a sample: its upright size, and where its content is.

    Attributes:
        name: path of the file, or words for an image without one.
        content: bytes of the file; None: they are in the file of that name.
        height, width: size in pixels.
    """

    name: str
    content: bytes | None
    height: int
    width: int

    def opened(self) -> Any:
        """Return the image, upright and in RGB, as transformers opens it.

        Raises:
            ConfigError: the file is gone, or damaged.
        """
        from transformers.image_utils import load_image

        try:
            with _open(self.name, self.content) as image:
                return load_image(image)
        except Exception as error:  # Pillow raises errors of any type for damaged files
            raise ConfigError(f"the image {self.name} cannot be read: {error}") from error


def image_file(value: Any, folder: Path) -> ImageFile:
    """Return an image of a sample, of whose file the header alone is read.

    Args:
        value: a path, or {"bytes": ..., "path": ...} as ``datasets`` saves images.
        folder: folder to which the path is relative.

    Raises:
        BadDocument: it is something else, or no image.
    """
    from PIL import Image

    path, content = (value.get("path"), value.get("bytes")) if isinstance(value, Mapping) else (value, None)
    if not isinstance(path, str | None) or not isinstance(content, bytes | None) or (path is None and content is None):
        raise BadDocument(f"an image is {describe(value)}, but a path or {{bytes, path}} is needed")
    name = str(folder / path) if content is None else path or "in the data"
    try:
        with _open(name, content) as image:
            width, height = image.size
            turned = Image.Image.getexif(image).get(_ORIENTATION) in _TURNED  # that of a PNG would decode the image
    except Exception as error:
        raise BadDocument(f"the image {name} cannot be read: {error}") from error
    return ImageFile(name, content, *((width, height) if turned else (height, width)))


def _open(name: str, content: bytes | None) -> Any:
    from PIL import Image

    return Image.open(name if content is None else BytesIO(content))


class ImageProcessor:
    """Processor of a model's folder, without its part for videos, which would need torchvision.

    Args:
        folder: the folder, or its id on the Hub.

    Attributes:
        tokenizer: the tokenizer, with the processor's chat template.
        image_token: the token of an image in the text that the chat template makes.
        tokens: ids of the tokens of an image.

    Raises:
        ConfigError: a package is missing, or the folder has no processor.
    """

    def __init__(self, folder: str | Path) -> None:
        path = local_folder(folder)
        try:
            import PIL  # noqa: F401
            from transformers import AutoConfig, AutoImageProcessor
            from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
        except ImportError as error:
            raise ConfigError(f"images need transformers and Pillow. Type {to_install('images')}") from error
        self.tokenizer = load_transformers(path)
        try:
            self._images = AutoImageProcessor.from_pretrained(path, local_files_only=True)
            kind: Any = PROCESSOR_MAPPING[type(AutoConfig.from_pretrained(path, local_files_only=True))]
            parts = {"image_processor": self._images, "tokenizer": self.tokenizer}
            settings, _ = kind.get_processor_dict(path, local_files_only=True)
            self._processor = _without_videos(kind).from_args_and_dict(
                [*map(parts.get, kind.get_attributes())], settings
            )
        except Exception as error:  # transformers raises errors of any type
            said = " ".join(str(error).split())[:300] or type(error).__name__
            raise ConfigError(
                f"{folder} has no processor of images that transformers can load ({said}). Give the folder with "
                "preprocessor_config.json."
            ) from error
        self.tokenizer.chat_template = self._processor.chat_template or self.tokenizer.chat_template
        self.image_token = str(self._processor.image_token)
        self.tokens = [token for token in self._processor.image_token_ids if token is not None]
        self._text: str | None = None  # of every image, if all have the same size for the model

    def text_of(self, image: ImageFile) -> str:
        """Return the text that stands for an image, in place of the image token of the chat template.

        Raises:
            BadDocument: the model takes no image of this size.
        """
        count = getattr(self._images, "get_number_of_image_patches", None)
        if count is not None:  # of a model with images of any size
            try:
                grid = np.array([[1, 1, count(image.height, image.width)]])
            except ValueError as error:
                raise BadDocument(
                    f"the image {image.name} has {image.width} x {image.height} pixels: {error}"
                ) from error
            return str(self._processor.replace_image_token({"image_grid_thw": grid}, 0))
        if self._text is None:
            self._text = str(
                self._processor.replace_image_token(self._images([image.opened()], return_tensors="np"), 0)
            )
        return self._text

    def expanded(self, text: str, texts: Sequence[str]) -> str:
        """Return a text with the images' texts in place of its image tokens.

        Raises:
            BadDocument: the text has another number of image tokens.
        """
        first, *rest = text.split(self.image_token)
        if len(rest) != len(texts):
            raise BadDocument(
                f"the chat template makes a text with {len(rest)} tokens {self.image_token}, but of {len(texts)} images"
            )
        return first + "".join(image + part for image, part in zip(texts, rest))

    def pixels(self, images: Sequence[ImageFile]) -> dict[str, Tensor]:
        """Return the entries of a microbatch with all its images; without images there are none."""
        made = self._images([image.opened() for image in images], return_tensors="pt") if images else {}
        return {name: made[name] for name in _PIXELS if name in made}


def _without_videos(kind: Any) -> Any:
    """Return a class of transformers' processors whose part for videos may be None."""

    class WithoutVideos(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

    return WithoutVideos
