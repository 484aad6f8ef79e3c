"""The public API: every public name with its signature, as public_api.txt lists them.

A change of a public name, parameter or default fails here until the list is renewed on purpose:

    python tests/laws/test_public_api.py
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import importlib
import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ForwardRef, cast

import pytest

LISTED = Path(__file__).with_name("public_api.txt")
RENEW = "python tests/laws/test_public_api.py"
PACKAGES = (
    "triax",
    *("triax.compat.deepspeed", "triax.compat.horovod", "triax.compat.huggingface"),
    *(
        "triax.context",
        "triax.data",
        "triax.gradient_compression",
        "triax.grid",
        "triax.methods",
        "triax.models",
        "triax.moe",
        "triax.pipe",
        "triax.tensor_parallel",
        "triax.testing",
        "triax.zero",
    ),
)
WIDTH = 120


def public_api(packages: dict[str, dict[str, Any]]) -> str:
    """Return a text with one entry for each public name, each method and each property.

    Args:
        packages: for each package its public names and their objects. An object that several packages have is described
            under the first one, and as an alias under the others.
    """
    homes: dict[int, str] = {}
    blocks = []
    for package, names in packages.items():
        lines = []
        for name, value in names.items():
            path = f"{package}.{name}"
            home = homes.setdefault(id(value), path) if callable(value) else path
            lines += _entry(path, value, packages) if home == path else [f"{path} = {home}"]
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def _entry(path: str, value: Any, packages: dict[str, dict[str, Any]]) -> list[str]:
    if inspect.isclass(value):
        return [_class(path, value), *_members(path, value, packages)]
    if isinstance(value, types.ModuleType):
        return [f"{path}: module"]
    if callable(value):
        return [_signature(path, inspect.signature(value))]
    return [
        f"{path} = {_default(value)}" if isinstance(value, (int, float, str)) else f"{path}: {type(value).__name__}"
    ]


def _class(path: str, value: type) -> str:
    """Return a class's constructor; without arguments if another library's class defines it."""
    if issubclass(value, enum.Enum):
        return f"class {path}: {', '.join(value.__members__)}"
    head = f"class {path}"
    if getattr(value, "_is_protocol", False):
        return head
    foreign = [base for base in value.__mro__ if not _is_ours(base) and dataclasses.is_dataclass(base)]
    if foreign:  # its fields differ between versions of that library
        own = vars(value).get("__annotations__", {})  # not the fields' types, which transformers' parser overwrites
        fields = [
            f"{field.name}: {own[field.name]} = {_default(field.default)}"
            for field in dataclasses.fields(cast(Any, value))
            if field.name in own
        ]
        return _lines(head, [*fields, f"**{foreign[0].__module__.partition('.')[0]}.{foreign[0].__name__}"], "")
    if any({"__init__", "__new__"} & vars(base).keys() for base in value.__mro__ if _is_ours(base)):
        return _signature(head, inspect.signature(value).replace(return_annotation=inspect.Signature.empty))
    return head


def _members(path: str, value: type, packages: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the public methods and properties of a class: its own, and those of bases that are not public."""
    public = {id(each) for names in packages.values() for each in names.values()}
    found: dict[str, Any] = {}
    for base in value.__mro__:
        if _is_ours(base) and (base is value or id(base) not in public):
            found = {**vars(base), **found}
    for name in sorted(name for name in found if not name.startswith("_")):
        member = found[name]
        if isinstance(member, property):
            yield f"{path}.{name}: property"
        elif isinstance(member, (staticmethod, classmethod)):
            kind = type(member).__name__
            yield _signature(f"{kind} {path}.{name}", inspect.signature(member.__get__(None, value)))
        elif inspect.isfunction(member):
            signature = inspect.signature(member)
            parameters = list(signature.parameters.values())[1:]  # without self
            yield _signature(f"{path}.{name}", signature.replace(parameters=parameters))


def _is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "triax"


def _signature(head: str, signature: inspect.Signature) -> str:
    """Return ``head(a: int, *, b: str = 'x') -> C``, on several lines where it is long."""
    parts: list[str] = []
    before: set[Any] = set()  # kinds of the parameters so far
    for parameter in signature.parameters.values():
        kind = parameter.kind
        if kind is parameter.KEYWORD_ONLY and not {parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL} & before:
            parts.append("*")
        if kind is not parameter.POSITIONAL_ONLY and before == {parameter.POSITIONAL_ONLY}:
            parts.append("/")
        before.add(kind)
        stars = "*" if kind is parameter.VAR_POSITIONAL else "**" if kind is parameter.VAR_KEYWORD else ""
        text = f"{stars}{parameter.name}"
        if parameter.annotation is not parameter.empty:
            text += f": {_annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {_default(parameter.default)}"
        parts.append(text)
    result = signature.return_annotation
    return _lines(head, parts, "" if result is signature.empty else f" -> {_annotation(result)}")


def _lines(head: str, parts: list[str], tail: str) -> str:
    line = f"{head}({', '.join(parts)}){tail}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{head}(", *(f"    {part}," for part in parts), f"){tail}"])


def _annotation(annotation: Any) -> str:
    if isinstance(annotation, ForwardRef):  # of a NamedTuple, before Python 3.14
        return annotation.__forward_arg__
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _default(value: Any) -> str:
    """Return the text of a value, without addresses of objects."""
    if inspect.isclass(value) or inspect.isfunction(value):
        return str(value.__qualname__)
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    text = repr(value)
    return "..." if " at 0x" in text else text


def current() -> str:
    """Return the list of the installed triax."""
    packages = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        packages[package] = {name: getattr(module, name) for name in sorted(module.__all__)}
    return public_api(packages)


def difference(listed: str, found: str) -> str:
    """Return what to tell about two lists that differ; empty if they are equal."""
    if listed == found:
        return ""
    lines = difflib.unified_diff(listed.splitlines(), found.splitlines(), "public_api.txt", "triax", lineterm="", n=1)
    return "\n".join(
        ["the public API is not what tests/laws/public_api.txt lists:", *lines]
        + [f"If the change is meant, renew the list and commit it with the change: {RENEW}"]
    )


def test_the_public_api_equals_the_written_list() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    told = difference(LISTED.read_text(encoding="utf-8"), current())
    assert not told, told


def test_no_parameter_of_a_public_function_is_private() -> None:
    """A name with an underscore in front is for callers within the library, and ``help`` shows it to all others."""
    listed = LISTED.read_text(encoding="utf-8")
    private = re.compile(r"(?:^|[(,]) *\**(_\w+)(?: *[:=,)]|$)", re.MULTILINE)
    assert private.findall("class A(_a: int, b=_b)\nf(\n    x: int,\n    **_c,\n)") == ["_a", "_c"]
    assert private.findall(listed) == []


def test_each_change_of_a_signature_changes_the_public_list() -> None:
    """A renamed parameter, another default, a method that is gone and a new name each change the list."""

    def before(tensor: int, *, op: str = "sum") -> int:
        return tensor

    def renamed(value: int, *, op: str = "sum") -> int:
        return value

    def other_default(tensor: int, *, op: str = "mean") -> int:
        return tensor

    class Whole:
        def step(self, closure: object = None) -> None: ...

    class Part:
        pass

    Whole.__module__ = Part.__module__ = "triax.example"
    first = public_api({"p": {"reduce": before, "Optimizer": Whole}})
    assert first == (
        "p.reduce(tensor: int, *, op: str = 'sum') -> int\nclass p.Optimizer\n"
        "p.Optimizer.step(closure: object = None) -> None\n"
    )
    assert difference(first, public_api({"p": {"reduce": before, "Optimizer": Whole}})) == ""
    for names, line in (
        ({"reduce": renamed, "Optimizer": Whole}, "+p.reduce(value: int, *, op: str = 'sum') -> int"),
        ({"reduce": other_default, "Optimizer": Whole}, "+p.reduce(tensor: int, *, op: str = 'mean') -> int"),
        ({"reduce": before, "Optimizer": Part}, "-p.Optimizer.step(closure: object = None) -> None"),
        ({"reduce": before, "Optimizer": Whole, "size": 2}, "+p.size = 2"),
    ):
        told = difference(first, public_api({"p": names}))
        assert line in told.splitlines() and told.endswith(RENEW)


if __name__ == "__main__":
    LISTED.write_text(current(), encoding="utf-8")
    print(f"{LISTED}: {len(LISTED.read_text(encoding='utf-8').splitlines())} lines")
