"""Tables of options: every one with its default and meaning, for the pages of the documentation."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import Field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from .base import Options, declared, hints_of, is_required, sections_in

_IN_JSON = {"None": "null", "True": "true", "False": "false"}
_IN_PYTHON = re.compile(rf"\b({'|'.join(_IN_JSON)})\b")


def in_words_of_a_file(text: str) -> str:
    """Return a meaning with null, true and false in place of Python's words."""
    return _IN_PYTHON.sub(lambda word: _IN_JSON[word[0]], text)


def rows(
    section: type[Options], prefix: str = "", whole: Collection[type[Options]] = ()
) -> Iterator[tuple[str, type[Options], Field[Any]]]:
    """Yield each option by its path. The options of an inner section stand at the section's place.

    Args:
        section: the section.
        prefix: what each path begins with.
        whole: sections that are yielded as one option.
    """
    for each in declared(section):
        inner = next(iter(sections_in(hints_of(section)[each.name])), None)
        if inner is None or inner in whole:
            yield prefix + each.name, section, each
        else:
            yield from rows(inner, f"{prefix}{each.name}.", whole)


def type_in_words(hint: Any) -> str:
    """Return an annotation as users read it.

    >>> type_in_words(int | Literal["auto"] | None), type_in_words(tuple[str, ...])
    ('int, "auto", none', 'list')
    """
    kind = get_origin(hint) or hint
    if kind in (Union, types.UnionType):
        return ", ".join(dict.fromkeys(filter(None, map(type_in_words, get_args(hint)))))
    if kind is Literal:
        return ", ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in get_args(hint))
    if kind is Any or not isinstance(kind, type):
        return ""
    if issubclass(kind, Options):
        return "section"
    if kind is type(None):
        return "none"
    names: dict[Any, str] = {str: "text", Path: "path", Mapping: "mapping", Callable: "function", Sequence: "list"}
    return next((name for base, name in names.items() if issubclass(kind, base)), kind.__name__)


def markdown(
    section: type[Options], whole: Collection[type[Options]] = (), written: Callable[[Any], str] = json.dumps
) -> str:
    """Return a Markdown table of every option: key, type, default, meaning.

    Args:
        section: the section.
        whole: sections that are one row of the table.
        written: function that returns the text of a default; ``repr`` for Python.
    """
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for path, owner, found in rows(section, whole=whole):
        default = None if is_required(found) else owner.default_of(found.name)
        if isinstance(default, Options):  # a section: the value that may stand in its place
            main = getattr(default, default.MAIN) if default.MAIN else None
            shown = "" if main is None else f"`{written(main)}`"
        else:
            shown = "required" if is_required(found) else f"`{written(default)}`"
        text = found.metadata["doc"].replace("|", "\\|")
        text = in_words_of_a_file(text) if written is json.dumps else text
        kind = type_in_words(hints_of(owner)[found.name])
        lines.append(f"| `{path}` | {kind} | {shown} | {text}{'' if text.endswith('.') else '.'} |")
    return "\n".join(lines)
