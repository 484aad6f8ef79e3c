"""Commands without their first verb, flags that became verbs, one-line mistakes, and completion in a shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.command_line import run_triax

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
        ("plan mesure x.json", "triax plan: there is no 'mesure'; did you mean 'measure'?"),
        (
            "plan search x --model m",
            "Got unexpected extra argument(s) (x). Type triax plan search --help for what it takes.",
        ),
        ("plan --gpus 2", "Missing option '--model'. Type triax plan search --help for what it takes."),
        ("plan --model", "Option '--model' requires an argument. Type triax plan search --help for what it takes."),
        ("plan fit rows.csv --mashine b200", "triax machine fit has no --mashine; did you mean --machine?"),
        ("generate x --qqq", "triax generate has no --qqq. Type triax generate --help for what it takes."),
        ("generate x --beams 1.5 --prompt a", "--beams = '1.5': give a whole number, not '1.5'."),
        ("generate x --beams 0 --prompt a", "--beams = 0: give 1 or more."),
        ("run --master-port 70000 x.py", "--master-port = 70000: give 65,535 or less."),
        ("run --min-replicas 2 x.py", "--min-replicas = 2: it is for --replicas: give them, or leave it out."),
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
