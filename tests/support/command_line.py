"""The command ``triax`` in this process."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from triax.base.errors import ConfigError
from triax.cli.main import app, main


def run_triax(*words: object, columns: int = 80) -> tuple[int, str]:
    """Run the command; return its exit code, and what it prints, with the line of an error as ``main`` prints it."""
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": str(columns)})
    if isinstance(done.exception, ConfigError):
        return 2, f"{done.output}triax: {done.exception}"
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout or done.output  # progress goes to stderr


def output_of(*words: object, columns: int = 80) -> str:
    """Run the command, which must succeed; return what it prints."""
    code, output = run_triax(*words, columns=columns)
    assert code == 0, output
    return output


def run_main(*words: object, lines: str = "") -> tuple[Any, str, str]:
    """Run the program with lines as its input; return its exit code, output and error output."""
    before, sys.argv, sys.stdin = (sys.argv, sys.stdin), ["triax", *map(str, words)], io.StringIO(lines)
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as left:
            main()
    finally:
        sys.argv, sys.stdin = before
    return left.value.code, out.getvalue(), err.getvalue()
