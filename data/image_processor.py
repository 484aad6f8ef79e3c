"""Processor of a folder of a vision-language model, as transformers has it: the text of an image, and its pixels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..base.errors import describe
from ..base.hub import local_folder
from .bad_document import BadDocument
from .tokenizer import load_transformers, unreadable

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
    height: int = 0
    width: int = 0

    def read(self, function: Callable[[Any], Any]) -> Any:
        """Return the result of a function of the opened image, which Pillow decodes only if the function needs it.

        Raises:
            BadDocument: there is no such file, or it is no image, or damaged.
        """
        from PIL import Image

        try:
            with Image.open(self.name if self.content is None else BytesIO(self.content)) as image:
                return function(image)
        except Exception as error:  # Pillow raises errors of any type
            raise BadDocument(f"the image {self.name} cannot be read: {error}") from error


def image_file(value: Any, folder: Path) -> ImageFile:
    """Return an image of a sample, of whose file the header alone is read.

    Args:
        value: a path, or {"bytes": ..., "path": ...} as ``datasets`` saves images.
        folder: folder to which the path is relative.

    Raises:
        BadDocument: it is something else, or no image.
    """
    path, content = (value.get("path"), value.get("bytes")) if isinstance(value, Mapping) else (value, None)
    if not isinstance(path, str | None) or not isinstance(content, bytes | None) or (path, content) == (None, None):
        raise BadDocument(f"an image is {describe(value)}, but a path or {{bytes, path}} is needed")
    file = ImageFile(str(folder / path) if path and content is None else path or "in the data", content)
    height, width = file.read(_size)
    return file._replace(height=height, width=width)


def _size(image: Any) -> tuple[int, int]:
    """Return height and width of an opened image, upright."""
    from PIL.Image import Image

    width, height = image.size
    turned = Image.getexif(image).get(_ORIENTATION) in _TURNED  # the method of a PNG's class would decode the image
    return (width, height) if turned else (height, width)


class ImageProcessor:
    """Processor of a model's folder, without its part for videos, which would need torchvision.

    Args:
        folder: the folder, or its id on the Hub.

    Attributes:
        tokenizer: the tokenizer, with the processor's chat template.
        image_token: the token of an image in the text that the chat template makes.
        tokens: ids of the tokens of an image.

    Raises:
        ConfigError: the folder has no processor.
    """

    def __init__(self, folder: str | Path) -> None:
        from PIL import Image
        from transformers import AutoConfig, AutoImageProcessor
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

        path = local_folder(folder)
        self.tokenizer = load_transformers(path)
        try:
            self._images = AutoImageProcessor.from_pretrained(path, local_files_only=True)
            kind: Any = PROCESSOR_MAPPING[type(AutoConfig.from_pretrained(path, local_files_only=True))]
            parts = {"image_processor": self._images, "tokenizer": self.tokenizer}
            given = [parts.get(name) for name in kind.get_attributes()]
            settings, _ = kind.get_processor_dict(path, local_files_only=True)
            self._processor = _without_videos(kind).from_args_and_dict(given, settings)
        except Exception as error:  # transformers raises errors of any type
            raise unreadable(f"{folder} has no processor of images that transformers can load", error) from error
        self.tokenizer.chat_template = self._processor.chat_template or self.tokenizer.chat_template
        self.image_token = str(self._processor.image_token)
        self.tokens = [token for token in self._processor.image_token_ids if token is not None]
        # Of a model that gives all images one size: any of them.
        has_one_size = not hasattr(self._images, "get_number_of_image_patches")
        self._any = self._images([Image.new("RGB", (32, 32))], return_tensors="np") if has_one_size else None

    def text_of(self, image: ImageFile) -> str:
        """Return the text that stands for an image, in place of the image token of the chat template.

        Raises:
            BadDocument: the model takes no image of this size.
        """
        made = self._any
        if made is None:
            try:
                patches = self._images.get_number_of_image_patches(image.height, image.width)
            except ValueError as error:
                raise BadDocument(f"the image {image.name} is {image.width} x {image.height}: {error}") from error
            made = {"image_grid_thw": np.array([[1, 1, patches]])}
        return str(self._processor.replace_image_token(made, 0))

    def pixels(self, images: Sequence[ImageFile]) -> dict[str, Tensor]:
        """Return the entries of a microbatch with all its images; without images there are none.

        Raises:
            BadDocument: an image cannot be read.
        """
        from transformers.image_utils import load_image

        made = self._images([image.read(load_image) for image in images], return_tensors="pt") if images else {}
        return {name: made[name] for name in _PIXELS if name in made}


def _without_videos(kind: Any) -> Any:
    """Return a class of transformers' processors whose part for videos may be None."""

    class WithoutVideos(kind):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

    return WithoutVideos
