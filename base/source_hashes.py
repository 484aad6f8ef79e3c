"""Hashes of the files of Python modules, with which ranks find that they run different code."""

from __future__ import annotations

import functools
import hashlib
import sys
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def source_hashes(modules: set[str]) -> dict[str, str]:
    """Return hashes of the files of Python modules, of the program's own file, and of triax."""
    found = {"triax": _package()}
    for name in sorted({*modules, "__main__"}):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and name.partition(".")[0] not in ("torch", "triax") and Path(file).is_file():
            found[Path(file).name] = file_hash(file, Path(file).stat().st_mtime_ns)
    return found


@functools.cache
def _package() -> str:
    """Return a hash of triax's own files. It is computed once, because a process does not load the files again."""
    digest = hashlib.sha256()
    folders = (each.parent for each in _PACKAGE.glob("*/__init__.py"))  # tests, examples and benchmarks have none
    for file in sorted(file for folder in folders for file in folder.rglob("*.py")):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def file_hash(file: str, date: int) -> str:
    """Return a hash of a file's content. It is computed once for each date of change."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]
