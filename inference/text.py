"""Text and tokens: tokenizers for string prompts, and the strings that end a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Protocol: conversion of text to ids and back. transformers' tokenizers are such; ``BYTES`` is another."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class _Bytes:
    """Tokenizer whose tokens are the bytes of UTF-8."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


BYTES: Tokenizer = _Bytes()


def follow(tokenizer: Tokenizer, ids: list[int], prompt: int) -> str:
    """Return the text of the ids behind the first ``prompt`` ones.

    Both parts are decoded together, because a tokenizer may write a token differently at the beginning of a text.
    """
    return tokenizer.decode(ids)[len(tokenizer.decode(ids[:prompt])) :]


def ends_with(tokenizer: Tokenizer | None, strings: Sequence[str], eos: frozenset[int]) -> Callable[[list[int]], bool]:
    """Return a function that is True for ids that end with an id of ``eos``, or whose last token completes a string.

    The string may begin in earlier tokens, those of the prompt included, and the last token may go on behind it.

    Raises:
        ValueError: there are strings and no tokenizer, or a string is empty.
    """
    if not strings:
        return lambda ids: ids[-1] in eos
    if tokenizer is None:
        raise ValueError(
            f"stop_strings is {list(strings)!r}, but the engine has no tokenizer to turn ids into text. Pass one, "
            "triax.init_inference(model, tokenizer=...)."
        )
    if not all(isinstance(string, str) and string for string in strings):
        raise ValueError(f"stop_strings is {list(strings)!r}. Give strings of at least one character.")
    reach = 4 * max(map(len, strings)) + 8  # a character is at most four tokens

    def ended(ids: list[int]) -> bool:
        if ids[-1] in eos:
            return True
        tail = ids[-reach:]
        text, before = tokenizer.decode(tail), tokenizer.decode(tail[:-1])
        same = next((i for i, (a, b) in enumerate(zip(text, before)) if a != b), min(len(text), len(before)))
        return any(text.find(string, max(0, same - len(string) + 1)) >= 0 for string in strings)

    return ended
