"""Public names that have moved: read at their older places until they end, with a warning."""

from __future__ import annotations

import importlib
import warnings

ENDS = "0.3"  # version of triax in which the older places are gone
_COMPRESSION = ("OneBitAdam", "OneBitLamb", "OneBitSGD", "PowerSGD", "SparseRows", "TopK", "ZeroOneAdam")
# Older place -> the package that has the name now; both within triax.
MOVED = {
    **{f"zero.{name}": "gradient_compression" for name in _COMPRESSION},
    "grid.VERSION": "base",
}


def moved(package: str, name: str) -> object:
    """Return what a package has had under a name.

    Args:
        package: name of the package, such as ``triax.zero``.
        name: the name in the package.

    Raises:
        KeyError: the package has had no such name.
    """
    top, _, inside = package.partition(".")
    home = f"{top}.{MOVED[f'{inside}.{name}']}"
    text = f"{package}.{name} has moved, and is there until triax {ENDS}: write {home}.{name}"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    return getattr(importlib.import_module(home), name)
