"""The ledger: every public name of DeepSpeed 0.19, with its place in triax, or the reason why triax does not have it.

The names stand in names.toml, whose head explains its tables. The site has the table, which ``markdown``
returns.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from ...base.foreign_tables import read_table

VERSION = "0.19.8"  # of DeepSpeed, whose names these are
MAJOR, MINOR, PATCH = map(int, VERSION.split("."))
SOURCE = "[none]"  # what DeepSpeed says of its commit where it was built without git, so that scripts can log it

TABLES = read_table(__file__, "names.toml")
SENTENCES: dict[str, str] = TABLES["sentences"]


def _by_sentence(names: dict[str, str]) -> dict[str, str]:
    """Return the names under the sentences themselves."""
    return {SENTENCES.get(sentence, sentence): listed for sentence, listed in names.items()}


ALIASES: dict[str, str] = TABLES["aliases"]
PRESENT: dict[str, dict[str, str]] = TABLES["present"]
ABSENT = {module: _by_sentence(names) for module, names in TABLES["absent"].items()}
ABSENT_MODULES = {module: SENTENCES.get(sentence, sentence) for module, sentence in TABLES["absent_modules"].items()}
MEMBERS = _by_sentence(TABLES["members"])


class Place(NamedTuple):
    """Place of a name in triax.

    Attributes:
        module: the module of triax, without ``triax.``, or of torch. ``=``: there is none.
        name: the name in it, or the value.
    """

    module: str
    name: str


def canonical(name: str) -> str:
    """Return the dotted name with DeepSpeed's second paths replaced by the first ones."""
    for second, first in ALIASES.items():
        if name == second or name.startswith(f"{second}."):
            return canonical(first + name.removeprefix(second))
    return name


@cache
def _answers() -> dict[str, Place | str]:
    answers: dict[str, Place | str] = {}
    for module, places in PRESENT.items():
        for place, names in places.items():
            for name in names.split():
                theirs, _, ours = name.partition("=")
                default = theirs.lower() if place == "=" else theirs
                answers[f"{module}.{theirs}".lstrip(".")] = Place(place, ours or default)
    for module, sentences in ABSENT.items():
        for sentence, names in sentences.items():
            answers.update((f"{module}.{name}".lstrip("."), sentence) for name in names.split())
    return answers


@cache
def _modules() -> set[str]:
    """The modules that triax has, with their packages, and the packages of those that it does not have."""
    paths = [module.split(".") for module in (*PRESENT, *ABSENT)]
    paths += [module.split(".")[:-1] for module in ABSENT_MODULES]
    return {".".join(path[:stop]) for path in paths for stop in range(1, len(path) + 1)} - {""}


def is_module(name: str) -> bool:
    """Return True if triax has a module of this name of DeepSpeed's."""
    return name in _modules()


def answer(name: str) -> Place | str | None:
    """Return the place of a name in triax, or the sentence that it raises. None: a module, or an unknown name.

    Args:
        name: dotted and canonical, without ``deepspeed.``.
    """
    entry = _answers().get(name)
    if entry is not None or is_module(name):
        return entry
    module = name
    while module:
        if module in ABSENT_MODULES:
            return ABSENT_MODULES[module]
        module = module.rpartition(".")[0]
    return _answers().get(f"{name.rpartition('.')[0]}.*".lstrip("."))


def names(module: str) -> list[str]:
    """Return the names of a module that triax has, sub-modules too."""
    start = f"{module}." if module else ""
    known = [name for name, place in _answers().items() if isinstance(place, Place)]
    known += _modules()
    return [name.removeprefix(start) for name in known if name.startswith(start) and "." not in name[len(start) :]]


def markdown() -> str:
    """Return the ledger as a Markdown table: module of DeepSpeed, names, their place or the reason."""
    lines = ["| module | names | place in triax, or the reason |", "|---|---|---|"]
    for module in sorted({*PRESENT, *ABSENT, *ABSENT_MODULES}):
        shown = f"`deepspeed.{module}`".replace(".`", "`")
        places = PRESENT.get(module, {}).items()
        answers = [("the key's name" if place == "=" else f"`{home(place)}`", names) for place, names in places]
        answers += ABSENT.get(module, {}).items()
        answers += [(ABSENT_MODULES[module], "*")] if module in ABSENT_MODULES else []
        for answer, names in answers:
            listed = (
                "all others"
                if names == "*"
                else ", ".join(f"`{name.replace('=', '` is `')}`" for name in names.split())
            )
            listed = "all" if names == "*" and module not in PRESENT and len(answers) == 1 else listed
            lines.append(f"| {shown} | {listed} | {answer} |")
            shown = ""
    return "\n".join(lines)


def home(place: str) -> str:
    """Return the full name of a module of ``PRESENT``."""
    return place if place.startswith("torch") else f"triax.{place}".rstrip(".")
