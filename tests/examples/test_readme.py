"""Everything that README.md, docs/start and the program of docs/train.md tell their reader to type works.

- README.md's ```python block has parts of examples/gpt_3d.py, which test_gpt_3d.py runs. Those of docs/start are
  programs: if the first line is `# name.py`, the commands below it may use this name. A block that imports nothing
  continues the one before it.
- In a ```sh block (or bash, console), every line is a command of a known kind, and is checked as far as is cheap:
  `make` targets by `make -n`, options of the examples by their `--help`, `torchrun` and `python` on one of the
  README's own programs by running it. A kind that is not known fails: teach it here.

Links are followed in test_site.py.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from triax.pipe.schedules.choose import NAMES

from support.paths import DOCS, ROOT
from support.processes import program
from support.readme_blocks import blocks, commands, programs

README = ROOT / "README.md"
FIRST_RUN = (DOCS / "start" / "first-run.md").read_text()

WRONG = "the README says this, and it does not work"


# ------------------------------------------------------------------------------ one check for each kind


def run(words: list[str], cwd: Path, seconds: float = 120) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    inherited["MPLBACKEND"] = "agg"
    done = subprocess.run(words, cwd=cwd, env=inherited, capture_output=True, text=True, timeout=seconds, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"{WRONG}: {shlex.join(words)}\n{output}"
    return output


@functools.cache
def help_of(*words: str) -> str:
    return run([*words, "--help"], ROOT)


def check_options(words: list[str], *program: str) -> None:
    """Every --option that is typed is one that the program's help names."""
    known = set(re.findall(r"--[\w-]+", help_of(*program)))
    unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]
    assert not unknown, f"{WRONG}: {shlex.join(program)} has no {', '.join(unknown)}; it has {sorted(known)}"


def check_script(words: list[str], launcher: list[str], folder: Path) -> None:
    """`python script.py ...`, or torchrun's: the README's own programs are run, others asked for their help."""
    at = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    assert at is not None, f"{WRONG}: no script in {shlex.join(words)}"
    script = words[at]
    if (folder / script).is_file():
        run([*launcher, *words], folder)
        return
    assert (ROOT / script).is_file(), f"{WRONG}: there is no {script}"
    check_options(words[at + 1 :], sys.executable, str(ROOT / script))


def check_make(words: list[str], folder: Path) -> None:
    targets = [word for word in words if "=" not in word and not word.startswith("-")]
    run(["make", "-n", *targets], ROOT)
    for word in words:
        name, equals, value = word.partition("=")
        if equals:
            assert re.search(rf"^{name} \?=|\$\({name}\)", (ROOT / "Makefile").read_text(), re.M), f"{WRONG}: {word}"
        if name == "ARGS" and targets == ["train"]:
            check_options(shlex.split(value), sys.executable, str(ROOT / "examples" / "gpt_3d.py"))


def check_python(words: list[str], folder: Path) -> None:
    if words[:1] == ["-c"]:
        run([sys.executable, *words], folder)
    elif words[:2] == ["-m", "pip"]:
        check_pip(words[2:], folder)
    elif words[:2] == ["-m", "pytest"]:
        check_pytest(words[2:], folder)
    elif words[:1] == ["-m"]:
        assert words[1].startswith("triax."), f"{WRONG}: not a module of triax: {words[1]}"
        run([sys.executable, *words], folder)
    else:
        check_script(words, [sys.executable], folder)


def check_torchrun(words: list[str], folder: Path) -> None:
    check_script(words, [sys.executable, "-m", "torch.distributed.run"], folder)


def check_pip(words: list[str], folder: Path) -> None:
    assert words[0] in ("install", "wheel"), f"{WRONG}: pip {words[0]}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for option, value in itertools.pairwise(words):
        if option in ("-c", "-r"):
            assert (ROOT / value).is_file(), f"{WRONG}: there is no {value}"
    for word in words:
        for extra in re.findall(r"[\w.]\[([\w,-]+)\]", word):
            unknown = set(extra.split(",")) - set(project["optional-dependencies"])
            assert not unknown, f"{WRONG}: no extra {unknown}"


def check_pytest(words: list[str], folder: Path) -> None:
    output = run([sys.executable, "-m", "pytest", "--collect-only", "-q", *words], ROOT)
    assert re.search(r"\d+(/\d+)? tests? collected|::", output), f"{WRONG}: no tests for {shlex.join(words)}"


KINDS: dict[str, Callable[[list[str], Path], None]] = {
    "make": check_make,
    "python": check_python,
    "python3": check_python,
    "python3.11": check_python,
    "torchrun": check_torchrun,
    "pip": check_pip,
    "pytest": check_pytest,
}
# They need the network, or the reader's own folder; tests/laws/test_references.py looks up the options of `triax`.
NOT_CHECKED = ("triax", "git", "cd", "source")


def words_of(command: str) -> tuple[str, list[str]]:
    """The program that a command calls, and its arguments."""
    words = shlex.split(command, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    return words[0].removeprefix(".venv/bin/"), words[1:]


def checked(typed: list[tuple[int, str]]) -> list[str]:
    """The commands that ``assert_works`` takes, each once."""
    return list(dict.fromkeys(command for _, command in typed if words_of(command)[0] not in NOT_CHECKED))


def assert_works(command: str, folder: Path) -> None:
    program, words = words_of(command)
    assert program in KINDS, f"README.md says `{command}`, and this test does not know how to check it: teach it"
    KINDS[program](words, folder)


def write_programs(text: str, folder: Path) -> None:
    for name, source in programs(text).items():
        (folder / name).write_text(source)


# -------------------------------------------------------------------------------------------- the README


LINES, WORDS = 114, 25  # of the whole README, and of a cell of its tables


def test_the_readme_is_short_and_shows_a_picture() -> None:
    """The number of lines, the longest cell of a table, and a picture on the first screen."""
    lines = README.read_text().splitlines()
    assert len(lines) <= LINES
    assert any(line.startswith("![") for line in lines[:20])
    cells = [cell for line in lines if line.startswith("|") for cell in line.strip("|").split("|")]
    shown = [re.sub(r"\]\([^)]*\)", "]", cell) for cell in cells]  # a link's address is not read
    assert cells and [cell for cell in shown if len(cell.split()) > WORDS] == []


def test_readme_shows_a_program_and_commands() -> None:
    text = README.read_text()
    assert "```python" in text, "README.md has no Python example"
    typed = [command for _, command in commands(text)]
    assert any(command.startswith("pip install") for command in typed)
    assert {"make train", "make test"} <= {command.partition("#")[0].strip() for command in typed}


STARTING = [page.read_text() for page in sorted((DOCS / "start").glob("*.md"))]
STARTED = [command for text in STARTING for _, command in commands(text)]
# The rest of docs/train.md is in tests/train/test_from_text.py.
_, _, PROGRAM = (DOCS / "train.md").read_text().partition("\n## A program\n")
ON_PAGES = [command for text in (*STARTING, PROGRAM) for command in commands(text)]


def listing(page: Path) -> list[str]:
    """The first Python block of a page, as lines."""
    return next(block.text for block in blocks(page.read_text()) if block.language == "python").splitlines()


def test_the_readmes_listing_is_in_the_example() -> None:
    """Every line of it stands in examples/gpt_3d.py, in this order; between two of them may be others, for ``...``."""
    whole = (ROOT / "examples" / "gpt_3d.py").read_text()
    parts = re.split(r"\n *\.\.\.\n|\n\n\n", "\n".join(listing(README)))
    place = 0
    for part in parts:
        place = whole.find(part.strip("\n"), place)
        assert place >= 0, part
    assert len(parts) > 3
    assert listing(DOCS / "index.md") == listing(README)


def test_programs_print_equal_text_under_torchrun_and_alone(ranks: Any, tmp_path: Path) -> None:
    """They run in torchrun's environment, in processes with torch imported; torchrun itself is an exhaustive test."""
    write_programs(FIRST_RUN, tmp_path)
    words = [shlex.split(command) for command in STARTED if command.startswith("torchrun ")]
    assert words and all(typed[1] == "--nproc-per-node" for typed in words)
    for _, _, size, *arguments in words:
        (alone,) = ranks(1, program, arguments[:1], str(tmp_path))
        first, *others = ranks(int(size), program, arguments, str(tmp_path))
        assert first == alone and not any(others)


def every_schedule(names: list[str], folder: str) -> list[str]:
    """Run the program of each schedule's name; return what each prints."""
    return [program([f"{name}.py", "2"], folder) for name in names]


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_the_first_program_works_with_each_schedule(ranks: Any, tmp_path: Path, every: int) -> None:
    """Every third schedule, and in the sweep all; tests/laws/test_invariance.py trains with each one."""
    source = programs(FIRST_RUN)["first.py"]
    assert '"1f1b"' in source and "range(10)" in source
    names = [name for name in NAMES if name != "forward"][::every]
    for name in names:  # here, once: a rank that writes a file while another reads it may leave it nothing to read
        changed = source.replace('"1f1b"', f'"{name}"').replace("range(10)", "range(2)")
        (tmp_path / f"{name}.py").write_text(changed)
    first, second = ranks(2, every_schedule, names, str(tmp_path))
    assert len(set(first)) == 1 and "step 1: " in first[0] and not any(second)


# The programs run in test_programs_print_equal_text_under_torchrun_and_alone; here in processes of their own.
PROGRAMS = ("torchrun ", "python first.py")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=pytest.mark.exhaustive if command.startswith(PROGRAMS) else ())
        for command in checked([*commands(README.read_text()), *ON_PAGES])
    ],
)
def test_commands_of_readme_and_first_pages_work(command: str, tmp_path: Path) -> None:
    write_programs(FIRST_RUN, tmp_path)
    assert_works(command, tmp_path)


@pytest.mark.parametrize("command", checked(commands((ROOT / "CONTRIBUTING.md").read_text())))
def test_commands_of_contributing_work(command: str, tmp_path: Path) -> None:
    assert_works(command, tmp_path)


# ---------------------------------------------------------------------------------- and the checks check


SAMPLE = """
# A sample

```python
# first.py
import json
print(json.dumps({}))
```
```python
raise SystemExit(3)
```
```python
from json import loads
```
```sh
make test ARGS="-k pool"   # a comment
# a comment
torchrun --nproc-per-node 2 \\
    first.py
cd triax && make install
```
```console
$ triax --help
Usage: nothing of this is typed
```
```text
make nonsense
```
"""


def test_programs_and_commands_are_extracted_from_a_page(tmp_path: Path) -> None:
    assert programs(SAMPLE) == {
        "first.py": "# first.py\nimport json\nprint(json.dumps({}))\nraise SystemExit(3)\n",
        "line_12.py": "from json import loads\n",
    }
    assert [command for _, command in commands(SAMPLE)] == [
        'make test ARGS="-k pool"   # a comment',
        "torchrun --nproc-per-node 2 first.py",
        "cd triax",
        "make install",
        "triax --help",
    ]
    write_programs(SAMPLE, tmp_path)
    with pytest.raises(AssertionError, match=r"first\.py"):
        assert_works("python first.py", tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        "make nonsense",
        "make test NONSENSE=1",
        "python nonsense.py",
        "python -m triax.pipe.nonsense",
        "python -c 'import nonsense'",
        "pip install triax[nonsense]",
        "pip install -c nonsense.txt triax",
        "pytest tests/test_nonsense.py",
        "pytest tests/grid/test_topology.py -k nonsense_that_no_test_is_called",
        "nonsense",
    ],
)
def test_assert_works_rejects_commands_that_do_not_work(command: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"does not work|does not know"):
        assert_works(command, tmp_path)


def test_check_options_rejects_options_a_program_lacks(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--real')\n")
    program.write_text(program.read_text() + "parser.parse_args()\n")
    check_options(["--real=1"], sys.executable, str(program))
    with pytest.raises(AssertionError, match="has no --unreal"):
        check_options(["--unreal", "1"], sys.executable, str(program))
