"""Modules under DeepSpeed's names, which the ledger lists; ``install``, which puts them under the name ``deepspeed``.

A module without a file of its own, such as ``ops.adam``, is made when it is first imported: its names are imported from
their places in triax when they are first used, and a name that triax does not have raises the ledger's sentence.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from importlib.metadata._meta import SimplePath
from pathlib import Path
from types import ModuleType
from typing import Any

from ...base.moved import Renamed
from . import ledger

PACKAGE = __name__.rpartition(".")[0]  # triax.compat.deepspeed


def install() -> None:
    """Make ``import deepspeed`` import this package, in this process.

    Call it before the first import of a library that writes ``import deepspeed`` itself (transformers, Accelerate,
    Lightning): such libraries look for DeepSpeed once, when they are imported. ``importlib.util.find_spec`` and
    ``importlib.metadata.version`` answer too. A second call does nothing.

    Raises:
        ImportError: DeepSpeed itself has been imported.
    """
    package, imported = sys.modules[PACKAGE], sys.modules.get("deepspeed")
    if imported is package:
        return
    if imported is not None:
        raise ImportError(
            f"install() was called after DeepSpeed itself was imported from {getattr(imported, '__file__', '?')}, and "
            "modules that imported it would continue to use it: call install() at the top of the script"
        )
    transformers = sys.modules.get("transformers.integrations.deepspeed")
    if getattr(transformers, "DeepSpeedConfig", None) is object:
        logging.getLogger("triax").warning(
            "install() was called after transformers was imported and found no DeepSpeed, so HfDeepSpeedConfig and "
            "sharded models of stage 3 do not work. Import triax.compat.deepspeed and call install() above "
            "transformers"
        )
    sys.meta_path.insert(0, Finder("deepspeed"))  # before an installed DeepSpeed is found
    sys.modules["deepspeed"] = package


def register() -> None:
    """Make Python find the modules of the ledger under the name of this package."""
    if not any(isinstance(finder, Finder) and finder.prefix == PACKAGE for finder in sys.meta_path):
        sys.meta_path.append(Finder(PACKAGE))  # after the finder of files, which goes first


def names_of(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make ``__getattr__``, ``__dir__`` and ``__all__`` of a module from the ledger.

    Args:
        module: the module's ``__name__``.
    """
    here = module.removeprefix(PACKAGE).lstrip(".")
    present = sorted(ledger.names(here))

    def get(name: str) -> Any:
        return _get(module, here, name)

    return get, lambda: present, present


def rest_of(module: str) -> tuple[Callable[[str], Any], list[str]]:
    """Make ``__getattr__`` and ``__path__`` of a file, for the names and sub-modules that it does not define itself."""
    return names_of(module)[0], []


def _get(module: str, here: str, name: str) -> Any:
    full = ledger.canonical(f"{here}.{name}".lstrip("."))
    entry = ledger.answer(full)
    if entry is None and name.startswith("__"):  # Python itself asks for __path__ and the like
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    if isinstance(entry, ledger.Place):
        if entry.module == "=":
            return entry.name
        home = importlib.import_module(ledger.home(entry.module))
        if (home.__name__, entry.name) != (module, name):
            value = getattr(home, entry.name)
            setattr(sys.modules[module], name, value)  # the next time it is found at once
            return value
    elif isinstance(entry, str):
        raise AttributeError(f"deepspeed.{full}: {entry}")
    elif ledger.is_module(full):
        return importlib.import_module(f"{PACKAGE}.{full}")
    raise AttributeError(_unknown(full))


def _unknown(name: str) -> str:
    return (
        f"triax has no deepspeed.{name}, which is not among DeepSpeed's public names: "
        "docs/reference/deepspeed-names.md says how to print them"
    )


class Finder(MetaPathFinder):
    """Finder of DeepSpeed's modules under one name, and of DeepSpeed's version.

    Args:
        prefix: ``deepspeed``, or this package's name.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module of the ledger.

        Raises:
            ImportError: the ledger says why triax has no such module, or no such name in ``from module import name``.
        """
        package, _, name = fullname.partition(f"{self.prefix}.")
        if package or not name:
            return None
        full = ledger.canonical(name)
        entry = ledger.answer(full)
        if isinstance(entry, str):
            raise ImportError(f"deepspeed.{full}: {entry}", name=fullname)
        ours = f"{PACKAGE}.{full}"
        if not ledger.is_module(full):
            if full.rpartition(".")[2].startswith("__"):  # Python itself asks
                return None
            raise ImportError(_unknown(full), name=fullname)
        loader = Made() if fullname == ours else Renamed(ours)
        return ModuleSpec(fullname, loader, is_package=True)  # type: ignore[arg-type]

    def find_distributions(
        self,
        context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008
    ) -> Iterator[Distribution]:
        """Find the metadata of ``deepspeed``, which libraries read to learn its version."""
        if self.prefix == "deepspeed" and context.name in (None, "deepspeed"):
            yield Metadata()


class Made(Loader):
    """Loader of a module that has no file: its names come from the ledger."""

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = f"DeepSpeed's module ``deepspeed{module.__name__.removeprefix(PACKAGE)}``."
        get, listed, names = names_of(module.__name__)
        vars(module).update(__getattr__=get, __dir__=listed, __all__=names)


class Metadata(Distribution):
    """Metadata of ``deepspeed`` as ``install`` shows it: name and version."""

    def read_text(self, filename: str) -> str | None:
        return {
            "METADATA": f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {ledger.VERSION}\n",
            "top_level.txt": "deepspeed\n",
        }.get(filename)

    def locate_file(self, path: object) -> SimplePath:
        return Path(__file__).parent / str(path)
