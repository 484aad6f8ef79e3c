"""Conversations as tokens, by the tokenizer's chat template. Only the assistant's tokens count in the loss.

The assistant's tokens are those that the template itself marks with ``{% generation %}``. A template without these
marks is rendered up to each message of the assistant: what the message adds to the text, after the prompt for it, is
the assistant's, with the token that ends the turn.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..base.errors import ConfigError
from ..base.hub import local_folder
from .bad_document import BadDocument
from .token_file import Array
from .tokenizer import BYTES, load_transformers, within_limit

T = TypeVar("T")
Spans = list[tuple[int, int]]

_SECONDS, _LONGEST = 20.0, 10**8  # of a conversation: time of the template, and characters of its text


class ChatTemplate:
    """Chat template of a folder's tokenizer.

    Args:
        folder: the tokenizer's folder, for transformers, or an id of the Hub.
        tokenizer: the tokenizer, if it is loaded.

    Raises:
        ConfigError: the tokenizer has no chat template, or cannot say which characters a token stands for.
    """

    def __init__(self, folder: str | Path, tokenizer: Any = None) -> None:
        if str(folder) == BYTES or not (path := local_folder(folder)).is_dir():
            raise ConfigError(
                f"{folder} has no chat template. Give the folder, or the id on the Hub, of a tokenizer that has one."
            )
        self._name, self._tokenizer = str(folder), load_transformers(path) if tokenizer is None else tokenizer
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"{folder} has no chat template. Add a file chat_template.jinja there, or give another tokenizer."
            )
        if not self._tokenizer.is_fast:
            raise ConfigError(
                f"{folder} has no fast tokenizer, which conversations need. Give one with tokenizer.json."
            )
        self._marks = (
            "{% generation" in self._tokenizer.chat_template or "{%- generation" in self._tokenizer.chat_template
        )

    @property
    def text(self) -> str:
        """The template."""
        return str(self._tokenizer.chat_template)

    def encode(self, messages: list[dict[str, Any]]) -> tuple[Array, Array] | BadDocument:
        """Return the tokens of a conversation, and for each 1 if it counts in the loss, else 0: integers (T,) each."""
        try:
            ids, counted = _within_limits(self._name, lambda: self._counted(messages))
        except BadDocument as error:
            return error
        if not counted.any():
            return BadDocument("no message is the assistant's, so that no token would count in the loss")
        return ids, counted

    def tokens(self, messages: list[dict[str, Any]], prompt: bool = False) -> list[int]:
        """Return the tokens of messages; ``prompt``: with the beginning of the assistant's next one.

        Raises:
            BadDocument: the template refuses the messages.
        """
        text = _within_limits(self._name, lambda: self._expanded(self._render(messages, prompt)))
        return [*self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def _counted(self, messages: list[dict[str, Any]]) -> tuple[Array, Array]:
        text, spans = self._by_marks(messages) if self._marks else self._by_prompts(messages)
        encoding = self._tokenizer(self._expanded(text), add_special_tokens=False, return_offsets_mapping=True)
        ids = np.asarray(encoding["input_ids"], np.int64)
        begins, ends = np.asarray(encoding["offset_mapping"], np.int64).reshape(-1, 2).T
        counted = np.zeros(len(ids), np.uint8)
        for span in spans:
            start, stop = (len(self._expanded(text[:place])) for place in span)
            # As transformers has it, marks count a token that begins before them, too.
            counted[((ends > start) if self._marks else (begins >= start)) & (begins < stop)] = 1
        return ids, counted

    def _by_marks(self, messages: list[dict[str, Any]]) -> tuple[str, Spans]:
        """Return the text of a conversation, and the assistant's spans of it: first character, and first behind it."""
        from transformers.utils.chat_template_utils import render_jinja_template

        options: dict[str, Any] = {"chat_template": self.text, "return_assistant_tokens_mask": True}
        rendered: Any = render_jinja_template([messages], **options, **self._tokenizer.special_tokens_map)
        (text,), (spans,) = rendered
        return _short(text), spans

    def _by_prompts(self, messages: list[dict[str, Any]]) -> tuple[str, Spans]:
        """Return the same, of a template without marks."""
        text, spans = self._render(messages), []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before, after = self._render(messages[:number], prompt=True), self._render(messages[: number + 1])
                if not (text.startswith(after) and after.startswith(before)):
                    raise BadDocument(
                        f"the chat template changes message {number + 1} after later ones, so that its tokens are not "
                        "known; mark them in the template with {% generation %}"
                    )
                spans.append((len(before), len(after)))
        return text, spans

    def _expanded(self, text: str) -> str:
        """Return a text, or the beginning of one, as it is made into tokens."""
        return text

    def _render(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        return str(_applied(self._tokenizer, messages, tokenize=False, add_generation_prompt=prompt))


def apply_template(tokenizer: Any, messages: Any, **options: Any) -> Any:
    """Return the text or the tokens that any tokenizer's chat template makes of messages.

    Args:
        tokenizer: tokenizer with ``apply_chat_template``, such as one of transformers'.
        messages: the messages.
        options: options of ``apply_chat_template``.

    Raises:
        BadDocument, ConfigError: as ``_within_limits``.
    """
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    return _within_limits(name, lambda: _applied(tokenizer, messages, **options))


def _applied(tokenizer: Any, messages: Any, **options: Any) -> Any:
    """Return what the template makes."""
    return _short(tokenizer.apply_chat_template(messages, **options))


def _short(applied: Any) -> Any:
    """Return what a template has made, if it is not too long."""
    if len(applied) > _LONGEST:
        what = "characters" if isinstance(applied, str) else "tokens"
        raise BadDocument(f"the chat template makes {len(applied)} {what}, of which {_LONGEST} are too many")
    return applied


def _within_limits(name: str, function: Callable[[], T]) -> T:
    """Return the result of a function that runs a chat template, which is a program from elsewhere.

    Raises:
        BadDocument: the template refuses the messages, fails with any error, or makes a text that is too long.
        ConfigError: it does not end.
    """

    def call() -> T | BadDocument | ConfigError:
        try:
            return function()
        except (BadDocument, ConfigError) as error:
            return error
        except Exception as error:
            said = " ".join(str(error).split())[:200] or type(error).__name__
            return BadDocument(f"the chat template refuses the messages ({said})")

    applied = within_limit(name, call, _SECONDS, "its chat template does not end")
    if isinstance(applied, (BadDocument, ConfigError)):
        raise applied
    return applied
