"""Names of other libraries are only in compat/, and in the files listed here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.import_reader import library
from support.paths import ROOT

# The libraries' names, and DeepSpeed's marks of parameters.
FOREIGN = re.compile(r"deepspeed|megatron|horovod|\bds_(?:id|status|shape|numel|tensor|persist)\b", re.IGNORECASE)
# A path of the adapter itself, in an import or a message.
ADAPTER = re.compile(r"\bcompat[./](?:deepspeed|megatron|horovod)[\w./]*")

# Files and folders that name other libraries -> the reason.
SOURCES = "names, arguments, defaults or a format taken from there: the library is the source"
IMPORTERS = "reads that library's files"
COMMANDS = "a command that takes that library's files, options or scripts"
MEASURED = "published measurements of that library"
ALLOWED = {
    "models/huggingface/adapters.py": "keys of PEFT's settings that name another library",
    "train/engine_options.py": "the section deepspeed: of the training file",
    "train/sections.py": "the section deepspeed: of the training file",
    "cli/checkpoint.py": COMMANDS,
    "cli/compat.py": COMMANDS,
    "grid/launcher/launch.py": "the advice when a script imports deepspeed, which is not installed",
    "plugins/plan/machine.py": MEASURED,
    "engine/monitor/trace/merge_timelines.py": SOURCES,
    "grid/randomness/random_states.py": SOURCES,
}


def foreign_names(root: Path) -> Iterator[tuple[str, str]]:
    """Yield each file outside compat/ that names another library, and the place of each name."""
    for file in (each for each in library(root) if not each.startswith("compat/")):
        if found := FOREIGN.search(file):
            yield file, f"{file} has {found[0]} in its name"
        for path in (root / file, (root / file).with_suffix(".pyi")):
            if not path.is_file():
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if found := FOREIGN.search(ADAPTER.sub("", line)):
                    yield file, f"{path.relative_to(root)}:{number} says {found[0]}"


def test_names_of_other_libraries_are_only_in_compat() -> None:
    found = [place for file, place in foreign_names(ROOT) if not file.startswith((*ALLOWED,))]
    assert not found, "\nmove it to compat/, say it without the name, or list the file:\n" + "\n".join(found)


def test_each_listed_file_names_another_library() -> None:
    files = {file for file, _ in foreign_names(ROOT)}
    assert not [place for place in ALLOWED if not any(file.startswith(place) for file in files)]


@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        ("zero/a.py", "# as DeepSpeed does", "zero/a.py:1 says DeepSpeed"),
        ("zero/a.py", 'setattr(parameter, "ds_status", 1)', "zero/a.py:1 says ds_status"),
        ("pipe/a.py", "def megatron_size(): ...", "pipe/a.py:1 says megatron"),
        ("pipe/horovod_axis.py", "", "pipe/horovod_axis.py has horovod in its name"),
        ("engine/a.pyi", "HOROVOD: int", "engine/a.pyi:1 says HOROVOD"),
        ("compat/a.py", "# as DeepSpeed does", None),
        ("cli/a.py", "from ..compat.deepspeed.config import read", None),
    ],
)
def test_the_law_finds_a_foreign_name(file: str, line: str, said: str | None, tmp_path: Path) -> None:
    path = tmp_path / file
    path.parent.mkdir()
    path.with_suffix(".py").touch()
    path.write_text(line)
    assert [place for _, place in foreign_names(tmp_path)] == ([] if said is None else [said])
