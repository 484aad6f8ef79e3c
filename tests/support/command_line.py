"""The command ``triax`` in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from triax.base.errors import ConfigError
from triax.cli.main import app


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
