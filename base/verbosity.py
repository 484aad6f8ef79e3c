"""Amount that ``triax`` prints: ``triax -q`` prints no progress, ``triax -v`` the whole log and tracebacks."""

from __future__ import annotations

import logging
import os

_VARIABLE = "TRIAX_VERBOSITY"  # which the ranks of a command inherit


def set_verbosity(verbosity: str | None) -> None:
    """Set how much this process and the ranks that it starts print: ``quiet``, ``verbose``, or None for the usual."""
    if verbosity is not None:
        os.environ[_VARIABLE] = verbosity
    show_log()


def show_log() -> None:
    """Show the whole log of triax in a verbose process. The command and its ranks call it when they begin."""
    if is_verbose():
        logging.basicConfig()
        logging.getLogger("triax").setLevel(logging.DEBUG)


def is_quiet() -> bool:
    """Return True if no progress is printed."""
    return os.environ.get(_VARIABLE) == "quiet"


def is_verbose() -> bool:
    """Return True if the whole log is printed, and the traceback of an error."""
    return os.environ.get(_VARIABLE) == "verbose"
