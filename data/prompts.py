"""Prompts without answers, for methods that draw the answers: the column ``prompt``, and others for reward functions.

A prompt is a text, or a list of messages for the tokenizer's chat template, as in TRL's data sets of prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError
from .answers import at_place, kind_of
from .bad_document import BadDocument
from .chat import ChatTemplate
from .held_out import NumberedSamples
from .sources import UNITS, find_sources, records
from .tokenizer import open_tokenizer


class PromptTokenizer:
    """Tokenizer of prompts, in the form that ``triax.init_inference`` takes.

    Args:
        name: name for ``open_tokenizer``; a folder with a chat template for conversations.

    Attributes:
        eos_token_id: id of the token that ends a text; None: nothing ends it.
    """

    def __init__(self, name: str | Path) -> None:
        self._name = name
        self._text = open_tokenizer(name)
        self._chat: ChatTemplate | None = None
        self.eos_token_id = self._text.facts.end

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without the token that ends it."""
        (ids,) = self._text.encode([text])
        return [int(token) for token in (ids if self.eos_token_id is None else ids[:-1])]

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids."""
        return self._text.decode(ids)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], **options: Any) -> list[int]:
        """Return the ids of messages, with the beginning of the assistant's next one; options are transformers'."""
        self._chat = self._chat or ChatTemplate(self._name)
        return self._chat.tokens([dict(message) for message in messages], True)


class Prompts(NumberedSamples):
    """Prompts, and the columns beside them.

    Args:
        paths: JSON lines, Parquet or Arrow files, or folders of them, such as ``datasets`` saves.
        tokenizer: tokenizer of the prompts.
        length: the most tokens of a prompt; longer ones are left out.

    Attributes:
        left_out: number of prompts that were left out.

    Raises:
        ConfigError: a file cannot be read, a sample has no prompt or other columns than the first, or none is left.
    """

    noun = "prompt"

    def __init__(
        self, paths: str | Path | Iterable[str | Path], tokenizer: str | Path | PromptTokenizer, length: int
    ) -> None:
        given = [paths] if isinstance(paths, (str, Path)) else [*paths]
        encoder = tokenizer if isinstance(tokenizer, PromptTokenizer) else PromptTokenizer(tokenizer)
        self._prompts, self._rows, self.left_out = list[Any](), list[dict[str, Any]](), 0
        for source in find_sources(given)[0]:
            for line, value in records(source):
                with at_place(f"{source.name}, {UNITS[source.format]} {line}"):
                    prompt, others = self._parse(value)
                    is_text = isinstance(prompt, str)
                    ids = encoder.encode(prompt) if is_text else encoder.apply_chat_template(prompt)
                if 0 < len(ids) <= length:
                    self._prompts.append(prompt)
                    self._rows.append(others)
                else:
                    self.left_out += 1
        if not self._prompts:
            raise ConfigError(f"there is no prompt of 1 to {length} tokens in {', '.join(map(str, given))}")
        self.numbers = range(len(self._prompts))

    def take(self, places: Iterable[int]) -> tuple[list[Any], dict[str, list[Any]]]:
        """Return the prompts at some places from 0 to N - 1, and the other columns: name -> a value for each prompt."""
        numbers = [self.numbers[place] for place in places]
        columns = {name: [self._rows[number][name] for number in numbers] for name in self._rows[0]}
        return [self._prompts[number] for number in numbers], columns

    def _parse(self, value: Any) -> tuple[Any, dict[str, Any]]:
        """Return the prompt of a sample, and its other columns.

        Raises:
            BadDocument: there is no prompt, or the columns are others than those of the first sample.
        """
        if isinstance(value, BadDocument):
            raise value
        if value.get("prompt") is None:
            raise BadDocument(f"the columns are {', '.join(map(repr, value))}, but 'prompt' is needed")
        others = {name: field for name, field in value.items() if name != "prompt"}
        if self._rows and others.keys() != self._rows[0].keys():
            raise BadDocument(
                f"the columns beside 'prompt' are {', '.join(others) or 'none'}, but those of the first sample are "
                f"{', '.join(self._rows[0]) or 'none'}"
            )
        return kind_of("prompt", value["prompt"], str, list), others
