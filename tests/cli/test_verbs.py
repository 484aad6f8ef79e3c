"""Commands without their first verb, flags that became verbs, one-line mistakes, and completion in a shell."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from triax import cli
from triax.cli.main import COMMANDS, app
from triax.cli.verbs import NEW_COMMANDS, NEW_FLAGS

from support.command_line import run_triax

EXAMPLES = tomllib.loads((Path(cli.__file__).parent / "examples.toml").read_text())
PLAN = ("--model", "bytes-tiny", "--gpus", "4", "--batch", "8", "--top", "1", "--json")


@pytest.mark.parametrize(
    ("short", "whole"),
    [
        (("schedule", "1f1b", "--json"), ("schedule", "show", "1f1b", "--json")),
        (("schedule", "--json", "1f1b"), ("schedule", "show", "1f1b", "--json")),
        (("schedule", "1f1b", "--help"), ("schedule", "show", "--help")),
        (("schedule", "-h"), ("schedule", "--help")),
        (("train", "-h"), ("train", "--help")),
    ],
)
def test_commands_work_without_their_first_verb(short: tuple[str, ...], whole: tuple[str, ...]) -> None:
    found, wanted = run_triax(*short), run_triax(*whole)
    assert found[1] == wanted[1] and found[0] == 0


def test_triax_plan_searches_without_a_verb() -> None:
    assert run_triax("plan", *PLAN)[1][:200] == run_triax("plan", "search", *PLAN)[1][:200]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("generat x", "triax: there is no 'generat'; did you mean 'generate'?"),
        ("data shw x", "triax data: there is no 'shw'; did you mean 'show'?"),
        ("machine mesure x.json", "triax machine: there is no 'mesure'; did you mean 'measure'?"),
        (
            "plan search x --model m",
            "Got unexpected extra argument(s) (x). Type triax plan search --help for what it takes.",
        ),
        ("plan --gpus 2", "Missing option '--model'. Type triax plan search --help for what it takes."),
        ("plan --model", "Option '--model' requires an argument. Type triax plan search --help for what it takes."),
        ("plan fit rows.csv --mashine b200", "triax machine fit has no --mashine; did you mean --machine?"),
        ("train x.yaml -v", "-v stands in front of the command: triax -v train."),
        ("generate x --qqq", "triax generate has no --qqq. Type triax generate --help for what it takes."),
        ("generate x --beams 1.5 --prompt a", "--beams = '1.5': give a whole number, not '1.5'."),
        ("generate x --beams 0 --prompt a", "--beams = 0: give 1 or more."),
        ("run --master-port 70000 x.py", "--master-port = 70000: give 65,535 or less."),
        ("run --min-replicas 2 x.py", "--min-replicas = 2: it is for --replicas: give them, or leave it out."),
        ("train x.yaml --upgrade a=1", "--upgrade renames keys and changes no values: leave out a=1"),
        (
            "train x.yaml --upgrade --table",
            "--upgrade = true: it rewrites the file and does nothing else: leave out --table.",
        ),
        ("run --dry-value 2 x.py", "--dry-value does nothing without --dry-run: give it, or leave --dry-value out."),
        ("run --replicas a,a x.py", "--replicas = 'a,a': give a number of at least 1, or different names: a,b,c."),
    ],
)
def test_command_line_mistakes_are_one_line(words: str, said: str) -> None:
    assert run_triax(*words.split()) == (2, f"triax: {said}")


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("triax sche", {"schedule"}),
        ("triax schedule ", {"show", "explain", "compare", "cuts"}),
        ("triax schedule 1f1b --micro", {"--microbatches"}),
        ("triax plan --laye", {"--layer-costs"}),
        ("triax plan search --precision bf", {"bf16"}),
        ("triax run --np", {"--nproc"}),
    ],
)
def test_bash_completes_commands_and_options(line: str, wanted: set[str], tmp_path: Path) -> None:
    variables = {"_TRIAX_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    program = tmp_path / "triax"
    program.write_text("from triax.cli.main import main\nmain()\n")
    done = subprocess.run(
        [sys.executable, str(program)], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert set(done.stdout.split()) == wanted, done.stderr


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each command that runs, with the words that name it."""
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name in command.commands:
        yield from leaves(command.commands[name], (*path, name))


def test_the_help_of_each_command_ends_with_a_right_example() -> None:
    found = dict(leaves(typer.main.get_command(app)))
    assert {" ".join(path) for path in found} == set(EXAMPLES)
    for path, example in EXAMPLES.items():
        words = shlex.split(example)[1:]
        whole = path.split()
        given = words[len(whole) :] if words[: len(whole)] == whole else words[1:]  # without the first verb
        command = found[tuple(whole)]
        command.make_context(whole[-1], given)  # refuses an unknown flag, and a missing argument
        assert words[0] == whole[0]
    shown = run_triax("plan", "search", "-h", columns=120)[1].rstrip().split("\n")[-1]
    assert shown.strip() == f"Example: {EXAMPLES['plan search']}"


def test_triax_help_lists_the_commands_by_group_without_them() -> None:
    code = (
        "import sys\nfrom triax.cli.main import main\n"
        "try:\n    main()\nfinally:\n    print([m for m in sys.modules if m.startswith('triax.cli.')], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, "-h"], capture_output=True, text=True, check=False)
    shown = [line for line in done.stdout.split("\n") if "─" in line and line.split()[1:2] and line[0] == "╭"]
    assert [line.split()[1] for line in shown] == ["Options", "Start", "Train", "Understand", "Files"]
    assert set(COMMANDS) == {path[0] for path, _ in leaves(typer.main.get_command(app))}
    assert "triax.cli.plan'" not in done.stderr and "triax.cli.verbs'" in done.stderr


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        (("config", "--schema"), ("compat", "config", "--schema")),
        (("plan", "fit", "no.csv"), ("machine", "fit", "no.csv")),
        (("drain", "0", "--log-dir", "no"), ("replicas", "drain", "0", "--log-dir", "no")),
        (("recipe", "lora", "--folder", "no/such"), ("recipe", "lora", "--output", "no/such")),
        (("check", "no.py:build", "--dry=pipe=2"), ("check", "no.py:build", "--dry-run=pipe=2")),
        (("run", "--least", "2", "x.py"), ("run", "--min-replicas", "2", "x.py")),
    ],
)
def test_older_names_of_commands_and_flags_are_read_with_a_warning(
    older: tuple[str, ...],
    newer: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = run_triax(*newer)
    assert not caplog.records
    if older[0] == "recipe":
        for path in (tmp_path / "no/such").iterdir():
            path.unlink()
    assert run_triax(*older) == wanted
    assert "is an older name of" in caplog.text and "which triax 0.3 removes" in caplog.text


def test_each_newer_name_is_that_of_a_command_or_flag() -> None:
    found = dict(leaves(typer.main.get_command(app)))
    assert set(NEW_COMMANDS.values()) <= set(found)
    for name, flags in NEW_FLAGS.items():
        options = {option for path, each in found.items() if path[-1] == name for p in each.params for option in p.opts}
        assert set(flags.values()) <= options and not set(flags) & options
