"""JSON with comments and commas after the last entry."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .files import read_text

# A string, so that a comment sign inside it is not taken for a comment; then a comment, to its end.
_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/\*.*?\*/|/\*', re.DOTALL)
_LAST_COMMA = re.compile(r'"(?:\\.|[^"\\\n])*"|,(?=\s*[}\]])')


def read_json(path: str | Path) -> Any:
    """Read and parse a JSON file.

    Raises:
        ConfigError: the file cannot be read, and the errors of ``parse``.
    """
    try:
        text = read_text(path)
    except OSError as error:
        raise ConfigError(f"the configuration {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the configuration {path} is not text in UTF-8: byte {error.start}") from error
    except ValueError as error:  # not a path
        raise ConfigError(f"the configuration {str(path)!r} cannot be read: {error}") from error
    return parse(text, str(path))


def parse(text: str, source: str) -> Any:
    """Parse a JSON text; comments (``//``, ``#``, ``/* */``) and commas before a closing bracket are left out.

    Args:
        text: content of the file.
        source: name of the file, for messages.

    Raises:
        ConfigError: the text is not JSON (the message has the line), a section has a key twice, or a
            number is not finite.
    """

    def section(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ConfigError(f"the configuration {source} has {twice!r} twice in one section: leave one of them out")
        return found

    def constant(name: str) -> float:
        raise ConfigError(f"the configuration {source} has {name}, which is not a number in JSON: leave the key out")

    try:
        return json.loads(plain(text, source), object_pairs_hook=section, parse_constant=constant)
    except ConfigError:
        raise
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"the configuration {source} is not JSON: {error.msg}: {where}") from error
    except ValueError as error:  # of a number with thousands of digits
        raise ConfigError(f"the configuration {source} is not JSON: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"the configuration {source} is nested too deeply") from error


def plain(text: str, source: str) -> str:
    """Return a JSON text with spaces in place of comments and of commas before a closing bracket.

    Raises:
        ConfigError: a comment that does not end.
    """

    def blank(match: re.Match[str]) -> str:
        token = match[0]
        if token.startswith('"'):
            return token
        if token == "/*":
            line = text.count("\n", 0, match.start()) + 1
            raise ConfigError(f"the configuration {source} has a comment /* in line {line} that does not end: add */")
        return re.sub(r"[^\n]", " ", token)  # keeps line numbers

    return _LAST_COMMA.sub(lambda match: match[0] if match[0].startswith('"') else " ", _TOKEN.sub(blank, text))
