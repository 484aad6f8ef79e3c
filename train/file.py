"""Reading a training file: YAML, TOML or JSON, with ``key=value`` changes, and errors that name file, line and key."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from ..base.errors import ConfigError, close, describe, no_such
from ..base.files import read_text
from ..base.json_comments import parse, plain
from ..base.option_error import OptionError, OptionErrors
from ..options.base import Options, declared, hints_of, sections_in
from ..options.foreign_names import counterpart
from .older_keys import new_name, renamed, warn_of_older
from .sections import TrainingFile

_DEEPEST, _MOST = 50, 100_000  # levels of sections, and values, of a file
_NO_SUCH = re.compile(r"([\w. -]+): there is no '([^']+)'")
_KEY = re.compile(r"[\w-]+(?:\.[\w-]+)*")


@dataclass(frozen=True)
class ReadFile:
    """A training file as it was read.

    Attributes:
        path: the file.
        values: its keys and values, changed by ``key=value``.
        lines: line of each dotted key.
        changed: dotted keys that were given as ``key=value``.
    """

    path: Path
    values: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)
    changed: tuple[str, ...] = ()

    def place(self, message: str) -> str:
        """Return an error message that begins with the file, and the line of the first key in the message."""
        message = message.replace("\n", "\\n")  # of a name in the file
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
        changes: ``key=value``: a dotted key, such as ``batch.microbatch``, and its value as YAML has it.

    Raises:
        ConfigError: a file that cannot be read, an unknown key (the message names the nearest one), or a value that
            is not allowed. The message has the file, the line and the key.
    """
    source = _under_new_names(_read(Path(path)))
    for change in changes:
        source = _under_new_names(_change(source, change))
    return check_training_file(source), source


def check_training_file(source: ReadFile) -> TrainingFile:
    """Return the checked keys of a training file.

    Raises:
        ConfigError: as ``read_training_file``.
    """
    try:
        return TrainingFile.of(source.values)
    except OptionError as error:
        found = error.errors if isinstance(error, OptionErrors) else (error,)
        raise ConfigError("\n".join(source.place(_in_words_of_the_file(each)) for each in found)) from error


def _in_words_of_the_file(error: OptionError) -> str:
    """Return the message of an error; of an unknown key with another library's counterpart, or where it belongs."""
    if error.unknown is None:
        return str(error)
    place, key = [part for part in error.path.split(".") if part], error.unknown
    where = error.path or TrainingFile.TITLE
    if (instead := counterpart(place, key, True)) is not None:
        return f"{where}: there is no {key!r}; write {instead}"
    section: type[Options] = TrainingFile
    for part in place:
        section = _inner(section).get(part, section)
    known = [each.name for each in declared(section)]
    # A name of one word means something else in each section: the interval of recomputation is not that of checkpoints.
    others = [path for path, kind in _sections(TrainingFile) if "_" in key and key in kind.__dataclass_fields__]
    if not close(key, known) and 0 < len(others) <= 3:
        return f"{where}: there is no {key!r} here, but in {' and '.join(others)}: write it there"
    return no_such(where, key, known)


def short_forms() -> dict[str, str]:
    """Return the sections for which a plain value may stand, and the keys of which it is the value."""
    return {path: kind.MAIN for path, kind in _sections(TrainingFile) if kind.MAIN}


def _inner(section: type[Options]) -> dict[str, type[Options]]:
    """Return the sections of a section, by their keys."""
    found = {name: sections_in(hint) for name, hint in hints_of(section).items()}
    return {name: kinds[0] for name, kinds in found.items() if kinds}


def _sections(section: type[Options], path: str = "") -> Iterator[tuple[str, type[Options]]]:
    """Yield each section by its path; the outermost one as the file."""
    yield path or TrainingFile.TITLE, section
    for name, kind in _inner(section).items():
        yield from _sections(kind, f"{path}.{name}".lstrip("."))


def _read(path: Path) -> ReadFile:
    kind = path.suffix.lower()
    if kind not in (".yaml", ".yml", ".toml", ".json"):
        raise ConfigError(
            f"{path} ends in {kind or 'nothing'}, but a training file ends in .yaml, .yml, .toml or .json"
        )
    try:
        text = read_text(path)
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
        _note_toml_lines(text, lines)
    elif kind == ".json":
        _note_json_lines(text, str(path), lines)
        values = parse(text, str(path))
    else:
        values = _yaml(text, str(path), lines)
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{path} has {describe(values)}, but a training file has sections: write model, data and training"
        )
    _require_names(values, str(path))
    return ReadFile(path, dict(values), lines)


def _under_new_names(source: ReadFile) -> ReadFile:
    """Return a file whose keys have the names of today."""
    try:
        values = renamed(source.values, short_forms())
    except ConfigError as error:
        raise ConfigError(source.place(str(error))) from error
    lines = {new_name(key): line for key, line in source.lines.items()}
    return replace(source, values=values, lines=source.lines | lines)


def _change(source: ReadFile, change: str) -> ReadFile:
    """Return the file with one ``key=value`` applied."""
    given, equals, text = change.partition("=")
    key = new_name(given)
    if key != given:
        warn_of_older(f"{given} is an older name of {key}")
    if not equals or not _KEY.fullmatch(key):
        raise ConfigError(f"{change!r} is not key=value: write a dotted key and its value, such as batch.microbatch=2")
    value = _yaml(text, f"the value of {key}", {})
    *sections, name = key.split(".")
    values = dict(source.values)
    inner = values
    for number, section in enumerate(sections):
        found = inner.get(section)
        path = ".".join(sections[: number + 1])
        main = short_forms().get(path)
        if main is not None and isinstance(found, (str, int, float)):
            found = {main: found}
        if found is not None and not isinstance(found, Mapping):
            raise ConfigError(
                f"{change!r} changes a key of {path}, which is {describe(found)} in "
                f"{source.path} and no section: change the whole of it, or write a section there"
            )
        inner[section] = inner = dict(found or {})
    inner[name] = value
    return ReadFile(source.path, values, source.lines, (*source.changed, key))


class _YamlLoader(yaml.SafeLoader):
    """YAML loader with the numbers of YAML 1.2, and without dates.

    1e-3 is a number. 010, which was octal, and 1:30, which was 90, are texts. Sections are read down to a limit:
    PyYAML's time is quadratic in the depth.
    """

    depth = 0  # of the node that is read

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.depth > _DEEPEST:
            problem = f"it is nested in more than {_DEEPEST} levels: write fewer"
            raise yaml.constructor.ConstructorError(None, None, problem, self.peek_event().start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


_NUMBERS = {
    "int": r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)",
    "float": r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)",
}
_PREFIX = "tag:yaml.org,2002:"
_YamlLoader.yaml_implicit_resolvers = {
    first: [each for each in resolvers if each[0].removeprefix(_PREFIX) not in (*_NUMBERS, "timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, _pattern in _NUMBERS.items():
    _YamlLoader.add_implicit_resolver(f"{_PREFIX}{_kind}", re.compile(f"(?:{_pattern})$"), list("-+.0123456789"))


def _yaml(text: str, name: str, lines: dict[str, int]) -> Any:
    """Return a YAML text's value, and write the line of each of its keys into ``lines``.

    Raises:
        ConfigError: the text is not YAML; the message has the line.
    """
    try:
        node = yaml.compose(text, Loader=_YamlLoader)
        _note_lines(node, "", lines, name, [0])
        return yaml.load(text, Loader=_YamlLoader)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ConfigError(f"{name}{line} is not YAML: {_in_words(error.problem or error.context or '')}") from error
    except (yaml.YAMLError, ValueError, OverflowError, TypeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        if isinstance(error, yaml.YAMLError):
            problem = str(error).partition("\n")[0]
        else:  # Python's own words: of int() for !!int abc, or for a number of thousands of digits
            problem = "a number has too many digits, a value does not fit its tag, or sections are too deep"
        raise ConfigError(f"{name} is not YAML that can be read: {problem}") from error


def _in_words(problem: str) -> str:
    """Return PyYAML's description of a problem, or what to change where that names the parser's tokens."""
    if (tag := re.search(r"could not determine a constructor for the tag '(.*)'", problem)) is not None:
        return f"it has a value of the kind {tag[1]!r}, which is not read: write a text, a number, a list or a section"
    if "'\\t'" in problem:
        return "a tab stands where only spaces may: indent with spaces"
    if problem == "found unexpected end of stream":
        return "the file ends within a quote: close it"
    if problem == "but found another document":
        return "a second document begins with ---, but a training file is one: leave that line out"
    if problem.startswith(("expected", "did not find expected", "could not find expected")):
        return (
            f"{problem.replace('<', '').replace('>', '')}. Look for an indentation that differs from that of the lines "
            "around it, and for a quote or a bracket before it that is not closed"
        )
    return problem


def _note_lines(node: Any, prefix: str, lines: dict[str, int], file: str, seen: list[int], depth: int = 0) -> None:
    """Write the line of each key under a node into ``lines``, and check that none stands twice in a section.

    Args:
        node: the node.
        prefix: what the dotted keys under it begin with.
        lines: line of each dotted key, written.
        file: name of the file, for messages.
        seen: number of nodes so far, counted on.
        depth: level of the node.

    Raises:
        ConfigError: too many levels or values.
        ConstructorError: a key that is no text, or that stands twice.
    """
    seen[0] += 1
    if depth > _DEEPEST or seen[0] > _MOST:
        raise ConfigError(
            f"{file} is nested in more than {_DEEPEST} levels or has more than {_MOST} values, aliases included: "
            "write fewer"
        )
    if isinstance(node, yaml.MappingNode):
        here: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key is a list or a section, but it must be a name", key.start_mark
                )
            if key.value in here:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands here twice", key.start_mark)
            here.add(key.value)
            name = f"{prefix}{key.value}"
            lines.setdefault(name, key.start_mark.line + 1)
            _note_lines(value, f"{name}.", lines, file, seen, depth + 1)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _note_lines(value, prefix, lines, file, seen, depth + 1)


def _note_json_lines(text: str, file: str, lines: dict[str, int]) -> None:
    """Write the line of each key of a JSON text into ``lines``, by the YAML parser, to which JSON is YAML.

    Raises:
        ConfigError: a section has a key twice, or there are too many sections or values.
    """
    try:
        node = yaml.compose(plain(text, file).replace("\t", " "), Loader=_YamlLoader)
        _note_lines(node, "", lines, file, [0])
    except yaml.constructor.ConstructorError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ConfigError(f"{file}{line}: {error.problem}") from error
    except (yaml.YAMLError, RecursionError):
        lines.clear()  # it is no JSON, which the JSON parser says


def _note_toml_lines(text: str, lines: dict[str, int]) -> None:
    """Write the line of each key of a TOML text into ``lines``.

    TOML has one header or key a line, except where a list or a text goes on in the next ones. So each line, with those
    that it goes on in, is a TOML text by itself.
    """
    section, statement, start, goes_on = "", "", 0, False
    for number, line in enumerate(text.split("\n"), 1):
        if not statement:
            start, goes_on = number, False
        statement += f"{line}\n"
        if goes_on and not re.search(r"""[]}]|"{3}|'{3}""", line):
            continue  # neither a list nor a text ends here
        try:
            found = list(_paths(tomllib.loads(statement)))
        except tomllib.TOMLDecodeError:
            goes_on = True
            continue
        if statement.lstrip().startswith("["):
            section = ""
        for path in found:
            lines.setdefault(section + path, start)
        if statement.lstrip().startswith("["):
            section, lines[found[-1]] = f"{found[-1]}.", start  # [a] may stand behind [a.b]
        statement = ""


def _paths(value: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a section, inner sections too."""
    for inner in value if isinstance(value, list) else [value]:
        for key, each in inner.items() if isinstance(inner, Mapping) else ():
            yield f"{prefix}{key}"
            yield from _paths(each, f"{prefix}{key}.")


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
