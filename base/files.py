"""Reading of files from elsewhere: a FIFO or a device under the name is an error, and not a wait without an end."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from .errors import ConfigError

PICTURES = (".png", ".svg", ".pdf")  # endings of what matplotlib draws
# Pipes that a shell opened for this process: `triax schedule <(...)`.
_GIVEN = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")


def open_file(path: str | Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        OSError: there is none, or something else has its name: a folder, a FIFO, a device, a socket.
    """
    if str(path).startswith(_GIVEN):
        return open(path, "rb")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # an open FIFO without a writer would wait
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = "a FIFO" if stat.S_ISFIFO(mode) else "a device"
    raise OSError(errno.EINVAL, f"It is {kind}, but a regular file is required", str(path))


def check_output(path: Path, endings: Sequence[str]) -> None:
    """Check that a file can be written, before the work for it begins.

    Raises:
        ValueError: the path has none of the ``endings``, its folder does not exist, or it is a folder.
    """
    if not path.name.endswith(tuple(endings)):
        raise ValueError(f"{path} must end in {', '.join(endings[:-1])}{' or ' * (len(endings) > 1)}{endings[-1]}")
    if not path.parent.is_dir():
        made = next((each for each in path.parents if each.exists()), path.parent)
        raise ValueError(
            f"{made} is a file, not a folder: give another path than {path}"
            if made.is_file()
            else f"there is no folder {path.parent} for {path.name}: type mkdir -p {path.parent}"
        )
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the path of a file")


def read_bytes(path: str | Path) -> bytes:
    """Return the content of a regular file, or raise as ``open_file``."""
    with open_file(path) as file:
        return file.read()


def read_text(path: str | Path, errors: str = "strict") -> str:
    """Return the content of a regular file in UTF-8, or raise as ``open_file``; ``errors``: as of ``bytes.decode``."""
    with io.TextIOWrapper(open_file(path), encoding="utf-8", errors=errors) as file:
        return file.read()


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Return the value of a JSON text from elsewhere; ``options``: those of ``json.loads``.

    Raises:
        ValueError: it is not JSON, or it is nested too deeply.
    """
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object whose keys differ, as the ``object_pairs_hook`` of ``parse_json``.

    Raises:
        ValueError: a key stands in the object twice, so that one of its two values would be lost.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r} occurs twice")
    return found


def read_object(file: Path, **options: Any) -> dict[str, Any]:
    """Return the content of a JSON file from elsewhere, which must be an object; ``options``: as for ``parse_json``.

    Raises:
        ConfigError: the file cannot be read, is not JSON, is nested too deeply, or has something other than an object.
    """
    try:
        found = parse_json(read_bytes(file), **options)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}.") from error
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{file} is damaged: it is not JSON in line {error.lineno}. Copy or write it again."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is damaged: it is not JSON. Copy or write it again.") from error
    except ValueError as error:  # too deep, or a number of too many digits
        raise ConfigError(f"{file} is damaged: {error}. Copy or write it again.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is damaged: it has no keys. Copy or write it again.")
    return found
