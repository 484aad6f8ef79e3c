"""The version of the library, wherever it is written."""

from __future__ import annotations

import re
import tomllib

import yaml

from triax.base import VERSION

from support.paths import ROOT


def versions() -> dict[str, str]:
    """Return file -> the version that it names. CHANGELOG.md names the newest one that is not `Unreleased`."""
    released = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    return {
        "pyproject.toml": tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"],
        "base/__init__.py": VERSION,
        "CITATION.cff": str(yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]),
        "CHANGELOG.md": released[0],
    }
