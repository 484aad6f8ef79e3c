"""Reader of JSON files that somebody else wrote: their content is an object, or the error names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import ConfigError


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON file whose content is an object.

    Raises:
        ConfigError: the file cannot be read, is not JSON, is nested too deeply, or has something other than an object.
    """
    try:
        found = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:  # json's own error is a ValueError, and so is a number of too many digits
        line = f" in line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ConfigError(f"{file} is damaged: it is not JSON{line}. Copy or write it again.") from error
    except RecursionError as error:
        raise ConfigError(f"{file} is damaged: it is nested too deeply. Copy or write it again.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is damaged: it has no keys. Copy or write it again.")
    return found
