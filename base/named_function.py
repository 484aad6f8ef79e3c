"""Functions of users by name: ``file.py:function`` or ``module:function``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def named_function(name: str) -> Callable[..., Any]:
    """Return the function of a name: ``file.py:function``, or ``module:function`` of a module that Python can import.

    A file is run once in a process, and may import its neighbours.

    Raises:
        ValueError: there is no such file, module or function, or the file raises an error.
    """
    place, _, attribute = name.rpartition(":")
    try:
        module = _of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        found = getattr(module, attribute)
    except Exception as error:  # a user's module may raise anything
        raise ValueError(
            f"{name} cannot be read ({type(error).__name__}: {error}): give file.py:function, or module:function of a "
            "module that Python can import"
        ) from error
    if not callable(found):
        raise ValueError(f"{name} is a {type(found).__name__}: give the name of a function")
    function: Callable[..., Any] = found
    return function


def _of_file(path: Path) -> Any:
    path = path.resolve()
    key = f"{__name__}:{path}"
    if key in sys.modules:
        return sys.modules[key]
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[key]
        raise
    return module
