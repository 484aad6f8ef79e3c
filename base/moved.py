"""Modules and names that have moved: they are found at their older places until those end, with a warning."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

ENDS = "0.3"  # version of triax in which the older places are gone
# Older module -> the module that it is now; both within triax. Its inner modules have moved with it, but for those with
# a row of their own.
MODULES = {
    "agreement": "grid.agreement",
    "dry_run": "plugins.dry_run",
    "fault_tolerance": "plugins.fault_tolerance",
    "gradient_compression": "plugins.gradient_compression",
    "launcher": "grid.launcher",
    "local_sgd": "plugins.local_sgd",
    "methods": "train.methods",
    "monitor": "engine.monitor",
    "optim": "engine.optim",
    "optim.lr_schedules": "compat.deepspeed.lr_schedules",
    "plan": "plugins.plan",
    "randomness": "grid.randomness",
}
_PUBLIC = ("gradient_compression", "methods")  # public names of triax itself, which stay: no warning
_COMPRESSION = ("OneBitAdam", "OneBitLamb", "OneBitSGD", "PowerSGD", "SparseRows", "TopK", "ZeroOneAdam")
# Older place of a name -> the package that has the name now; both within triax.
NAMES = {**{f"zero.{name}": "gradient_compression" for name in _COMPRESSION}, "grid.VERSION": "base"}


def find_moved(package: str) -> None:
    """Let Python find the modules at their older places in a package, which is triax."""
    # First: the finder of files would load a file of the new folder again, under its older name.
    sys.meta_path.insert(0, MovedModules(package))


def moved(package: str, name: str) -> object:
    """Return what a package has had under a name.

    Args:
        package: name of the package, such as ``triax.zero``.
        name: the name in the package.

    Raises:
        KeyError: the package has had no such name.
    """
    top, _, inside = package.partition(".")
    home = f"{top}.{NAMES[f'{inside}.{name}']}"
    _warn(f"{package}.{name}", f"{home}.{name}", 3)
    found, _, attribute = home.rpartition(".")
    return getattr(getattr(importlib.import_module(found), attribute), name)


def _warn(older: str, now: str, level: int) -> None:
    text = f"{older} has moved, and is there until triax {ENDS}: write {now}"
    warnings.warn(text, DeprecationWarning, stacklevel=level + 1)


class MovedModules:
    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(f"{self._package}.")
        older = name if name in MODULES else name.partition(".")[0]
        if package or older not in MODULES:
            return None
        now = f"{self._package}.{MODULES[older]}{name.removeprefix(older)}"
        if name == older and older not in _PUBLIC:
            _warn(fullname, now, 2)
        return ModuleSpec(fullname, Renamed(now), is_package=True)  # type: ignore[arg-type]


class Renamed:
    """Loader of a second name of a module.

    It is no ``importlib.abc.Loader``: to import that class would be half of the time of ``import triax``.

    Args:
        name: the module's own name.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # Python has written the second name's over it
