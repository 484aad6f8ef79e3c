"""Reading a training file: YAML, TOML or JSON, with ``key=value`` changes, and errors that name file, line and key."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..config.config import check_keys
from ..config.json_comments import parse
from ..grid.errors import ConfigError, describe
from .schema import SHORT, TrainingFile

_DEEPEST, _MOST = 50, 100_000  # levels of sections, and values, of a file
_NO_SUCH = re.compile(r"([\w. -]+): there is no '([^']+)'")
_KEY = re.compile(r"[\w-]+(?:\.[\w-]+)*")


@dataclass(frozen=True)
class ReadFile:
    """A training file as it was read.

    Attributes:
        path: the file.
        values: its keys and values, changed by ``key=value``.
        lines: line of each dotted key, where the format has lines.
        changed: dotted keys that were given as ``key=value``.
    """

    path: Path
    values: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)
    changed: tuple[str, ...] = ()

    def place(self, message: str) -> str:
        """Return an error message that begins with the file, and the line of the first key in the message."""
        unknown = _NO_SUCH.match(message)
        inside = "" if unknown is None or unknown[1] == TrainingFile.TITLE else f"{unknown[1]}."
        for key in [f"{inside}{unknown[2]}"] if unknown else _KEY.findall(message):
            parts = key.split(".")
            for outer in (".".join(parts[:stop]) for stop in range(len(parts), 0, -1)):
                if outer in self.changed:
                    return f"{self.path} with {outer}=...: {message}"
                if outer in self.lines:
                    return f"{self.path}, line {self.lines[outer]}: {message}"
        return f"{self.path}: {message}"


def read_training_file(path: str | Path, changes: Sequence[str] = ()) -> tuple[TrainingFile, ReadFile]:
    """Read and check a training file.

    Args:
        path: a file that ends in .yaml, .yml, .toml or .json.
        changes: ``key=value``: a dotted key, such as ``training.batch``, and its value as YAML has it.

    Raises:
        ConfigError: a file that cannot be read, an unknown key (the message names the nearest one), or a value that
            is not allowed. The message has the file, the line and the key.
    """
    source = _read(Path(path))
    for change in changes:
        source = _change(source, change)
    return check_training_file(source), source


def check_training_file(source: ReadFile) -> TrainingFile:
    """Return the checked keys of a training file.

    Raises:
        ConfigError: as ``read_training_file``.
    """
    try:
        return check_keys(TrainingFile, source.values, "\n")
    except ConfigError as error:
        raise ConfigError("\n".join(source.place(line) for line in str(error).splitlines())) from error


def _read(path: Path) -> ReadFile:
    kind = path.suffix.lower()
    if kind not in (".yaml", ".yml", ".toml", ".json"):
        raise ConfigError(
            f"{path} ends in {kind or 'nothing'}, but a training file ends in .yaml, .yml, .toml or .json"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not text in UTF-8: save it as UTF-8 ({error})") from error
    lines: dict[str, int] = {}
    if kind == ".toml":
        try:
            values = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ConfigError(f"{path} is not TOML: {error}") from error
    elif kind == ".json":
        values = parse(text, str(path))
    else:
        values = _yaml(text, str(path), lines)
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{path} has {describe(values)}, but a training file has sections: write model, data and training"
        )
    _require_names(values, str(path))
    return ReadFile(path, dict(values), lines)


def _change(source: ReadFile, change: str) -> ReadFile:
    """Return the file with one ``key=value`` applied."""
    key, equals, text = change.partition("=")
    if not equals or not _KEY.fullmatch(key):
        raise ConfigError(f"{change!r} is not key=value: write a dotted key and its value, such as training.batch=16")
    value = _yaml(text, f"the value of {key}", {})
    *sections, name = key.split(".")
    values = dict(source.values)
    inner = values
    for number, section in enumerate(sections):
        found = inner.get(section)
        path = ".".join(sections[: number + 1])
        if path in SHORT and isinstance(found, (str, int, float)):
            found = {SHORT[path]: found}
        if found is not None and not isinstance(found, Mapping):
            raise ConfigError(
                f"{change!r} changes a key of {path}, which is {describe(found)} in "
                f"{source.path} and no section: change the whole of it, or write a section there"
            )
        inner[section] = inner = dict(found or {})
    inner[name] = value
    return ReadFile(source.path, values, source.lines, (*source.changed, key))


class _YamlLoader(yaml.SafeLoader):
    """YAML loader for which 1e-3 is a number, as in YAML 1.2, and a key that stands twice is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands here twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _yaml(text: str, name: str, lines: dict[str, int]) -> Any:
    """Return a YAML text's value, and write the line of each of its keys into ``lines``.

    Raises:
        ConfigError: the text is not YAML; the message has the line.
    """
    try:
        node = yaml.compose(text, Loader=_YamlLoader)
        _note_lines(node, "", lines, [0])
        return yaml.load(text, Loader=_YamlLoader)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ConfigError(f"{name}{line} is not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, OverflowError, TypeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        problem = str(error).partition("\n")[0]
        raise ConfigError(f"{name} is not YAML that can be read: {problem}") from error


def _note_lines(node: Any, prefix: str, lines: dict[str, int], seen: list[int], depth: int = 0) -> None:
    seen[0] += 1
    if depth > _DEEPEST or seen[0] > _MOST:
        raise ConfigError(
            f"the file is nested in more than {_DEEPEST} levels or has more than {_MOST} values, aliases included: "
            "write fewer"
        )
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            lines.setdefault(name, key.start_mark.line + 1)
            _note_lines(value, f"{name}.", lines, seen, depth + 1)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _note_lines(value, prefix, lines, seen, depth + 1)


def _require_names(values: Any, name: str) -> None:
    """Check that all keys are text: YAML takes ``on`` for true, and ``1`` for a number."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            if not isinstance(key, str):
                raise ConfigError(f"{name}: the key {describe(key)} is no text: write it in quotes")
            _require_names(value, name)
    elif isinstance(values, Sequence) and not isinstance(values, str):
        for value in values:
            _require_names(value, name)
