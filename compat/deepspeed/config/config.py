"""Reading a configuration: from a dict or a JSON file to a checked ``Config``, and the three batch sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from ....base.errors import ConfigError, close, describe, no_such
from ....base.json_comments import read
from ....base.option_error import OptionError
from ....options.batch import BatchSizes
from ....options.foreign_names import counterpart
from .base import Section, extra_of, inner_section
from .consistency import check_consistency
from .schema import Config
from .to_options import batch_of, errors_of, key_of, options_of

S = TypeVar("S", bound=Section)


def parse_config(config: Config | Mapping[str, Any] | str | Path) -> Config:
    """Return a configuration from a dict, or from the path of a JSON file, with its keys and values checked.

    ``engine/setup/check.py`` checks the names of schedules and optimizers too.

    Raises:
        ConfigError: a key that does not exist (the message names the nearest key), a value that is not allowed, or a
            feature that is not supported; the message says what to write instead.
    """
    if isinstance(config, Config):
        return config
    if isinstance(config, (str, Path)):
        config = read(config)
    if not isinstance(config, Mapping):
        raise ConfigError(f"the configuration is a {type(config).__name__}: pass a dict or the path of a JSON file")
    checked = check_keys(Config, _without_comments(config))
    check_consistency(checked)
    try:
        options_of(checked)
    except OptionError as error:
        raise ConfigError(error.spelled(key_of)) from error
    return checked


def check_keys(section: type[S], values: Any, separator: str = "; ") -> S:
    """Return the outermost section of a file, with its keys and values checked.

    Args:
        section: class of the section.
        values: the file's keys and values.
        separator: what stands between the messages, if there are several errors.

    Raises:
        ConfigError: as ``parse_config``.
    """
    try:
        return section.model_validate(values)
    except ValidationError as error:
        found: dict[str, list[str]] = {}
        for each in error.errors():  # a key that takes several kinds of values has an error for each
            key, text = _explain(each, section)
            found.setdefault(key, []).append(text)
        messages = (f"{key}{', or '.join(dict.fromkeys(texts))}" for key, texts in found.items())
        raise ConfigError(separator.join(messages)) from error


def unknown_keys(values: Mapping[str, Any]) -> list[str]:
    """Return outermost keys of a configuration that are neither a key of any section nor like one of the outermost."""
    known = {name for _, section in _sections(Config) for name in _names(section)}
    return [
        key
        for key in map(str, values)
        if key not in known and not key.startswith("_") and not close(key, _names(Config))
    ]


def batch_sizes(config: Config, data: int) -> BatchSizes:
    """Return all three batch sizes from those that the configuration gives.

    Args:
        config: gives ``train_batch_size`` or ``train_micro_batch_size_per_gpu``, or both.
        data: size of the data axis, the number of replicas.

    Raises:
        ConfigError: no size is given, or those given contradict each other; the message shows the product.
    """
    try:
        with errors_of("batch"):
            return batch_of(config, data).sizes(data)
    except OptionError as error:
        raise ConfigError(error.spelled(key_of)) from error


def _without_comments(value: Any) -> Any:
    """Return a value of the configuration without the keys that begin with ``_``, which are comments, at any depth."""
    if isinstance(value, Mapping):
        return {key: _without_comments(each) for key, each in value.items() if not str(key).startswith("_")}
    return [_without_comments(each) for each in value] if isinstance(value, list) else value


def _explain(error: Any, root: type[Section]) -> tuple[str, str]:
    """Return pydantic's error as the key with its value, and what is wrong: parts of one line."""
    place = _keys_of(error["loc"], root)
    where = ".".join(place) or root.TITLE
    if error["type"] == "extra_forbidden":
        return _no_such_key(_keys_of(error["loc"][:-1], root), str(error["loc"][-1]), root), ""
    if error["type"] == "missing":
        return f"{where} is missing: write it", ""
    given = error["input"]
    if isinstance(given, str) and given == "auto" and place and root is Config:
        return f'{where} is "auto", which a trainer fills in from its own arguments: write a value', ""
    text = str(error["ctx"]["error"]) if error["type"] == "value_error" else error["msg"][0].lower() + error["msg"][1:]
    if error["type"] in ("model_type", "dict_type"):
        text = "a section {...} belongs here"
    if isinstance(given, Mapping):
        return f"{where}: " if place else "", text
    return f"{where} = {describe(given)}: ", text


def _keys_of(place: Sequence[str | int], root: type[Section]) -> list[str]:
    """Return the keys in pydantic's place of an error, without its names of types and validators."""
    found: list[str] = []
    for part in map(str, place):
        kind = part in ("str", "int", "float", "bool", "none") and part not in _names(_section(found, root))
        if not kind and not re.match(r"(constrained-|function-|nullable|model-|(list|dict|tuple|literal)\[)", part):
            found.append(part)
    return found


def _no_such_key(place: list[str], key: str, root: type[Section]) -> str:
    """Return the error message for an unknown key: another library's counterpart, the nearest key, or other sections.

    Args:
        place: the names of the sections that lead to the key, from the outermost one.
        key: the unknown key.
        root: the outermost section.
    """
    known = _names(_section(place, root))
    where = ".".join(place) or root.TITLE
    if (instead := counterpart(place, key, False)) is not None:
        return f"{where}: there is no {key!r}; write {instead}"
    near = close(key, known)
    # A name of one word means something else in each section: the interval of recomputation is not that of checkpoints.
    sections = [name for name, section in _sections(root) if "_" in key and key in _active(section)]
    if not near and 0 < len(sections) <= 3:
        return f"{where}: there is no {key!r} here, but in {' and '.join(sections)}: write it there"
    if not near and root is Config and len(known) > 20:
        return f"{where}: there is no {describe(key)}, and no key like it: `triax config --table` lists all keys"
    return no_such(where, key, known)


def _names(section: type[Section]) -> list[str]:
    return [field.alias or key for key, field in section.model_fields.items()]


def _active(section: type[Section]) -> list[str]:
    fields = section.model_fields.items()
    return [field.alias or key for key, field in fields if extra_of(field).get("x-status") not in ("idle", "refused")]


def _sections(section: type[Section], prefix: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Yield each section by its path; the outermost one by its title."""
    yield prefix.removesuffix(".") or section.TITLE, section
    for key, field in section.model_fields.items():
        inner = inner_section(field.annotation)
        if inner is not None:
            yield from _sections(inner, f"{prefix}{key}.")


def _section(place: list[str], root: type[Section]) -> type[Section]:
    """Return the class of the section at a path of keys."""
    found = root
    for part in place:
        if (field := found.model_fields.get(part)) is not None:
            found = inner_section(field.annotation) or found
    return found
