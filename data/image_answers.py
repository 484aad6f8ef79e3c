"""Conversations with images as rows of tokens: data sets with TRL's columns, for models of ``hf_layers``.

| columns | |
|---|---|
| ``messages``; or ``prompt`` and ``completion`` | messages, whose content is a text or a list of parts |
| ``images``, or ``image`` | paths relative to the file, or {"bytes", "path"} as ``datasets`` saves images |

A part {"type": "image"} stands for the next image. In messages without such parts the images stand before the user's
first text. Rows are those of ``answers.py``; they are not cut, because a cut may split an image.

At the start the header of each image file is read, because its size gives the number of its tokens, and the number of
its rows the length of an epoch. Pixels would fill the memory: each microbatch opens its own images.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .answers import AnswerRow, Answers, Form, SampleReader
from .bad_document import BadDocument
from .chat import ChatTemplate
from .image_processor import ImageProcessor, image_file
from .packing import IGNORED


class ImageAnswers(Answers):
    """Samples of prompts with images and answers, of the form ``sft``; ``collate`` makes a microbatch of several.

    Arguments and errors are those of ``Answers``, with the folder of the model's processor as the tokenizer. It is an
    error, too, if an image cannot be read, or if there are more or less images than their parts. Samples with a row of
    more than ``length`` tokens are dropped.
    """

    def _reader(self, form: Form, tokenizer: str | Path) -> SampleReader:
        self._processor = ImageProcessor(tokenizer)
        return _ImageReader(tokenizer, self._processor)

    def collate(self, numbers: Sequence[int]) -> Any:
        """Return a microbatch of samples, for the layers of ``hf_layers``: a dict of tensors.

        ``input_ids`` and ``labels`` are int64 (B, T), padded on the right; labels are the ids that count, not shifted.
        ``pixel_values`` and, for images of any size, ``image_grid_thw`` have all images in the order of their tokens.
        """
        ids = np.full((len(numbers), self.length), self._processor.tokenizer.pad_token_id or 0, np.int64)
        labels = np.full_like(ids, IGNORED)
        for at, row in enumerate(self.rows[number] for number in numbers):
            ids[at, : len(row.ids)] = row.ids
            labels[at, : len(row.ids)] = np.where(row.counts, row.ids, IGNORED)
        given = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        return given | self._processor.pixels([image for number in numbers for image in self.beside[number]])


class _ImageReader(SampleReader):
    """Reader of samples with images. Beside the answer of a sample stand its images."""

    def __init__(self, name: str | Path, processor: ImageProcessor) -> None:
        super().__init__("sft", name)
        self.whole, self._processor = True, processor
        self._chat = self._images = _ImageTemplate(name, processor)

    def parse(self, value: Any) -> tuple[Any, ...]:
        """Return (prompt, answer, images) of a sample; the prompt is None for a whole conversation."""
        prompt, answer, _ = super().parse(value)
        if not isinstance(answer, list):
            raise BadDocument("the sample is a text, but with images 'messages', or lists of messages, are needed")
        given = value.get("images") or value.get("image") or []
        images = [image_file(each, self.folder) for each in (given if isinstance(given, list) else [given])]
        messages, before = _in_parts([*(prompt or ()), *answer], len(images)), len(prompt or ())
        return prompt and messages[:before], messages[before:], images

    def rows(self, samples: Sequence[tuple[Any, ...]], number: int) -> list[AnswerRow]:
        """Return the row of a sample, in which no token of an image counts."""
        prompt, answer, images = samples[number]
        self._images.texts, self._images.count = [self._processor.text_of(image) for image in images], 0
        (row,) = self._of_one(prompt, [answer])
        if (count := self._images.count) != len(images):
            raise BadDocument(f"the chat template makes {count} image tokens of {len(images)} images")
        row.counts[np.isin(row.ids, self._processor.tokens)] = 0
        return [row]


class _ImageTemplate(ChatTemplate):
    """Chat template whose image tokens become the texts of images.

    Attributes:
        texts: the texts of the images of a sample, whose messages are then made into tokens.
        count: number of image tokens that the template has made of these messages.
    """

    def __init__(self, folder: str | Path, processor: ImageProcessor) -> None:
        super().__init__(folder, processor.tokenizer)
        self._token, self.texts, self.count = processor.image_token, list[str](), 0

    def _expanded(self, text: str) -> str:
        first, *rest = text.split(self._token)
        self.count = max(self.count, len(rest))
        return first + "".join(image + part for image, part in zip(self.texts, rest))


def _in_parts(messages: list[dict[str, Any]], images: int) -> list[dict[str, Any]]:
    """Return messages whose contents are lists of parts, with one part for each image.

    Raises:
        BadDocument: a content is of another type, or the messages have parts for another number of images.
    """
    made: list[dict[str, Any]] = _without_none(messages)
    for message in made:
        content = message.get("content", [])
        message["content"] = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(content, str | list) or not all(isinstance(part, dict) for part in message["content"]):
            raise BadDocument("the 'content' of a message is neither a text nor a list of parts")
    users = [message for message in made if message["role"] == "user"]
    count = sum(part.get("type") == "image" for message in made for part in message["content"])
    if not count and users:
        users[0]["content"][:0] = [{"type": "image"} for _ in range(images)]
    elif count != images:
        raise BadDocument(f"the messages have {count} parts of the type 'image', but there are {images} images")
    return made


def _without_none(value: Any) -> Any:
    """Return a value without the entries None of its dicts: those that a Parquet file gives all parts of a message."""
    if isinstance(value, dict):
        return {name: _without_none(entry) for name, entry in value.items() if entry is not None}
    return [*map(_without_none, value)] if isinstance(value, list) else value
