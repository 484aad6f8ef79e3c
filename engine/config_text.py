"""JSON with what people put into DeepSpeed's files: comments, and commas after the last entry."""

from __future__ import annotations

import json
import re
from typing import Any

from .config_base import ConfigError

# A text, so that what looks like a comment within it is none; then a comment, to its end.
_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/\*.*?\*/|/\*', re.DOTALL)
_LAST_COMMA = re.compile(r'"(?:\\.|[^"\\\n])*"|,(?=\s*[}\]])')


def parse(text: str, source: str) -> Any:
    """What a JSON text means, comments (``//``, ``#``, ``/* */``) and commas before a closing bracket left out.

    Args:
        text: of the file.
        source: its name, for messages.

    Raises:
        ConfigError: it is not JSON, with the line; a key comes twice in one section; or a number is not finite.
    """

    def section(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ConfigError(f"the configuration {source} has {twice!r} twice in one section: leave one of them out")
        return found

    def constant(name: str) -> float:
        raise ConfigError(f"the configuration {source} has {name}, which is no number of JSON: leave the key out")

    def blank(match: re.Match[str]) -> str:
        token = match[0]
        if token.startswith('"'):
            return token
        if token == "/*":
            line = text.count("\n", 0, match.start()) + 1
            raise ConfigError(f"the configuration {source} has a comment /* in line {line} that does not end: add */")
        return re.sub(r"[^\n]", " ", token)  # lines stay where they are

    plain = _TOKEN.sub(blank, text)
    plain = _LAST_COMMA.sub(lambda match: match[0] if match[0].startswith('"') else " ", plain)
    try:
        return json.loads(plain, object_pairs_hook=section, parse_constant=constant)
    except ConfigError:
        raise
    except ValueError as error:  # of which json's own error is one
        raise ConfigError(f"the configuration {source} is not JSON: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"the configuration {source} is nested too deeply to be one") from error
