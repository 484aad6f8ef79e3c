"""Public names of a package, imported when they are first used. The package's stub, ``__init__.pyi``, lists them once.

Importing a package thus costs nothing, and the parts of it that need no torch work where torch is not installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec


def attach(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Make ``__getattr__``, ``__dir__`` and ``__all__`` of a package from its stub, for the package's ``__init__.py``.

    Args:
        package: the package's ``__name__``.
        file: the package's ``__file__``; the stub lies beside it. Each line of it that begins with ``from`` is of the
            form ``from .grid import Grid as Grid`` (a name of a module) or ``from . import zero as zero`` (a module).
            ``# needs package`` at its end leaves the name out of the lists where the package is not installed.
    """
    homes: dict[str, tuple[str, str]] = {}
    listed: list[str] = []
    with open(f"{file.removesuffix('.py')}.pyi", encoding="utf-8") as stub:
        for line in stub:
            if line.startswith("from "):
                code, _, needed = line.partition("# needs ")
                _, module, _, attribute, *_ = words = code.split()
                homes[words[-1]] = module, attribute
                if not needed or find_spec(needed.strip()) is not None:
                    listed.append(words[-1])

    def get(name: str) -> object:
        if name not in homes:
            # Imported here, so that importing a package imports nothing else.
            from .errors import nearest
            from .moved import moved

            with suppress(KeyError):
                return moved(package, name)
            # Programs that look through modules, as pytest does, ask for names with an underscore, and read no hint.
            hint = "" if name.startswith("_") else f"; {nearest(name, homes)}"
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")
        module, attribute = homes[name]
        if module.strip(".") and hasattr(found := importlib.import_module(module, package), attribute):
            return getattr(found, attribute)
        return importlib.import_module(f"{module.rstrip('.')}.{attribute}", package)

    return get, lambda: sorted(listed), sorted(listed)
