"""Rewriting a training file under the names that its keys have today, with its comments."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError, to_install
from ..base.files import read_text
from .file import short_forms
from .older_keys import rename


def upgraded(text: str) -> tuple[str, list[str]]:
    """Return a YAML text under the names of today, and a note on each change.

    Raises:
        ConfigError: ruamel.yaml is not installed, or a key stands there under both names.
    """
    try:
        from ruamel.yaml import YAML
        from ruamel.yaml.comments import CommentedMap
    except ImportError as error:
        raise ConfigError(f"--upgrade needs ruamel.yaml: {to_install('upgrade')}") from error

    def keep_form(holder: Any, older: str, target: Any, key: str) -> None:
        if not isinstance(target, CommentedMap):
            return
        if older in holder.ca.items:
            target.ca.items[key] = holder.ca.items.pop(older)
        if holder.fa.flow_style() and target is not values:
            target.fa.set_flow_style()

    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 120
    values = yaml.load(text)
    notes = list(rename(values, short_forms(), keep_form))
    written = io.StringIO()
    yaml.dump(values, written)
    return written.getvalue(), notes


def upgrade(path: Path) -> list[str]:
    """Rewrite a training file in YAML, and return a note on each change.

    Raises:
        ConfigError: as ``upgraded``, or a file of another kind.
    """
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise ConfigError(f"{path} is no YAML: rename its keys by hand; triax train {path} --dry-run names each")
    text, notes = upgraded(read_text(path))
    if notes:
        path.write_text(text, encoding="utf-8")
    return notes
