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

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .answers import AnswerRow, Answers, SampleReader
from .bad_document import BadDocument
from .chat import ChatTemplate
from .image_processor import ImageProcessor, image_file
from .packing import IGNORED
from .token_file import Array


class ImageAnswers(Answers):
    """Samples of prompts with images and answers; ``collate`` makes a microbatch of several.

    Args:
        paths: as for ``Answers``.
        processor: folder with the model's processor, or its id on the Hub.
        length: the most tokens of a row. A sample with a longer row is dropped.
        multiple: as for ``Answers``.

    Raises:
        ConfigError: as for ``Answers``; an image cannot be read; or there are more or less images than their parts.
    """

    def __init__(
        self, paths: str | Path | Iterable[str | Path], processor: str | Path, length: int, multiple: int = 1
    ) -> None:
        self._processor = ImageProcessor(processor)
        pad = self._processor.tokenizer.pad_token_id
        self._pad = 0 if pad is None else pad
        super().__init__(paths, "sft", processor, length, multiple, _ImageReader(processor, self._processor))

    def collate(self, numbers: Sequence[int]) -> Any:
        """Return a microbatch of samples, for the layers of ``hf_layers``: a dict of tensors.

        ``input_ids`` and ``labels`` are int64 (B, T), padded on the right; labels are the ids that count, not shifted.
        ``pixel_values`` and, for images of any size, ``image_grid_thw`` have all images in the order of their tokens.
        """
        ids = np.full((len(numbers), self.length), self._pad, np.int64)
        labels = np.full((len(numbers), self.length), IGNORED, np.int64)
        for at, number in enumerate(numbers):
            row = self.rows[number]
            ids[at, : len(row.ids)] = row.ids
            labels[at, : len(row.ids)] = np.where(row.counts, row.ids, IGNORED)
        images = [image for number in numbers for image in self.beside[number]]
        given = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        return given | self._processor.pixels(images)


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
        given = value.get("image") if value.get("images") is None else value["images"]
        given = given if isinstance(given, list) else [] if given is None else [given]
        images = [image_file(each, self.folder) for each in given]
        messages = _in_parts([*(prompt or ()), *answer], len(images))
        before = 0 if prompt is None else len(prompt)
        return prompt and messages[:before], messages[before:], images

    def rows(self, samples: Sequence[tuple[Any, ...]], number: int) -> list[AnswerRow]:
        """Return the row of a sample, in which no token of an image counts."""
        prompt, answer, images = samples[number]
        self._images.texts = [self._processor.text_of(image) for image in images]
        rows = self._of_one(prompt, [answer])
        for row in rows:
            row.counts[np.isin(row.ids, self._processor.tokens)] = 0
        return rows


class _ImageTemplate(ChatTemplate):
    """Chat template whose image tokens become the texts of images.

    Attributes:
        texts: the texts of the images of the messages that follow.
    """

    def __init__(self, folder: str | Path, processor: ImageProcessor) -> None:
        super().__init__(folder, processor.tokenizer)
        self._processor, self.texts = processor, list[str]()

    def _render(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        return self._processor.expanded(super()._render(messages, prompt), self.texts[: _image_parts(messages)])

    def _by_marks(self, messages: list[dict[str, Any]]) -> tuple[Array, Array]:
        from transformers.utils.chat_template_utils import render_jinja_template

        named = self._tokenizer.special_tokens_map
        rendered: Any = render_jinja_template(
            [messages], chat_template=self.text, return_assistant_tokens_mask=True, **named
        )
        (text,), (spans,) = rendered
        ids, offsets = self._with_offsets(self._processor.expanded(text, self.texts))
        counted = np.zeros(len(ids), np.uint8)
        for span in spans:
            parts = [text[:end] for end in span]
            counts = [part.count(self._processor.image_token) for part in parts]
            expanded = map(self._processor.expanded, parts, [self.texts[:count] for count in counts])
            start, stop = map(len, expanded)
            counted[(offsets[:, 0] < stop) & (offsets[:, 1] > start)] = 1
        return ids, counted


def _in_parts(messages: list[dict[str, Any]], images: int) -> list[dict[str, Any]]:
    """Return messages whose contents are lists of parts, with one part for each image.

    Raises:
        BadDocument: a content is of another type, or the messages have parts for another number of images.
    """
    made = [{name: value for name, value in message.items() if value is not None} for message in messages]
    for message in made:
        content = message.get("content", [])
        content = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
            raise BadDocument("the 'content' of a message is neither a text nor a list of parts")
        message["content"] = [{name: value for name, value in part.items() if value is not None} for part in content]
    users = [message["content"] for message in made if message["role"] == "user"]
    count = _image_parts(made)
    if not count and users:
        users[0][:0] = [{"type": "image"} for _ in range(images)]
    elif count != images:
        raise BadDocument(f"the messages have {count} parts of the type 'image', but there are {images} images")
    return made


def _image_parts(messages: list[dict[str, Any]]) -> int:
    """Return the number of images for which messages have parts."""
    return sum(part.get("type") == "image" for message in messages for part in message["content"])
