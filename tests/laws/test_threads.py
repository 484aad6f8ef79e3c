"""No thread of the library swallows an exception.

A call whose end is awaited is a ``BackgroundCall``, or a future: the error is raised there. Other threads hand on what
they catch, and Python prints what they do not.
"""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from triax.base.threads import BackgroundCall
from triax.plugins.fault_tolerance import sharded_state, state_transfers

from support.import_reader import library
from support.paths import ROOT
from support.replica_jobs import coordinator, finish, start

BROAD = ("", "Exception", "BaseException")


def targets(tree: ast.AST) -> set[str]:
    """Return the names of the functions that a file calls in threads."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            given = [keyword.value for keyword in node.keywords if keyword.arg in ("target", "function")]
            given += (
                node.args[:1] if called in ("BackgroundCall", "submit") else node.args[1:2] if called == "Timer" else []
            )
            found |= {ast.unparse(each).rpartition(".")[2] for each in given if called.endswith(THREADS)}
    return found


CALLS = ("BackgroundCall", "submit")  # their first argument is called in a thread
THREADS = ("Thread", "Timer", *CALLS)


def swallowed(file: str, text: str) -> Iterator[str]:
    """Yield what a file does against the law."""
    if not re.search(r"excepthook|(Thread|Timer|BackgroundCall|submit)\(", text):
        return
    tree = ast.parse(text)
    called = targets(tree)
    for node in ast.walk(tree):
        if "Thread(" in text and isinstance(node, ast.Expr) and ast.unparse(node).endswith(".join()"):
            yield f"{file}:{node.lineno} waits for a thread, whatever its end: use BackgroundCall"
        if isinstance(node, ast.Attribute) and node.attr == "excepthook" and isinstance(node.ctx, ast.Store):
            yield f"{file}:{node.lineno} replaces what prints the error of a thread"
        if not (isinstance(node, ast.FunctionDef) and node.name in called):
            continue
        for inner in ast.walk(node):
            if isinstance(inner, ast.ExceptHandler):
                kinds = "" if inner.type is None else ast.unparse(inner.type)
                used = {each.id for each in ast.walk(inner) if isinstance(each, ast.Name)}
                passes = any(isinstance(each, ast.Raise) for each in ast.walk(inner)) or inner.name in used
                if kinds in BROAD and not passes:
                    yield f"{file}:{inner.lineno} drops every error of a thread"
            context = ast.unparse(inner) if isinstance(inner, ast.withitem) else ""
            if "suppress(" in context and {*re.findall(r"\w+", context)} & {*BROAD}:
                yield f"{file}:{node.lineno} drops every error of a thread"


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ("def f():\n    with suppress(Exception):\n        g()\nThread(target=f).start()", 1),
        ("class A:\n    def f(self):\n        try: g()\n        except: pass\nThread(target=a.f)", 1),
        ("def f():\n    try: g()\n    except Exception as e: errors.append(e)\nWork(f, 'name')", 0),
        ("def f():\n    try: g()\n    except Exception: pass\nf()", 0),
        ("t = Thread(target=f)\nt.join()", 1),
        ("t = Thread(target=f)\nt.join(5)", 0),
        ("threading.excepthook = f", 1),
    ],
)
def test_the_law_of_threads_finds_swallowed_errors(body: str, count: int) -> None:
    assert len([*swallowed("a.py", body)]) == count


def test_no_thread_of_the_library_swallows_an_exception() -> None:
    files = library(ROOT)
    texts = {file: Path(ROOT, file).read_text() for file in files}
    assert len(targets(ast.parse("\n".join(text for text in texts.values() if "Thread(" in text)))) > 10
    offences = [each for file, text in texts.items() for each in swallowed(file, text)]
    assert not offences, "\n".join(offences)


def test_the_error_of_a_call_is_raised_where_it_is_awaited() -> None:
    assert BackgroundCall(lambda: 7, "work").result() == 7
    for error in (KeyError("a"), SystemExit(3), KeyboardInterrupt()):

        def fail(error: BaseException = error) -> None:
            raise error

        with pytest.raises(type(error)):
            BackgroundCall(fail, "work").result()


def fail_to_send_whole(engine: Any) -> None:
    """Let the next send of a whole state raise an error that no lost connection raises."""
    state_transfers.send_state = _planted


def fail_to_send_parts(engine: Any) -> None:
    """The same for parts of the optimizer state."""
    sharded_state.send_state = _planted


def _planted(header: Any, tensors: Any, group: Any, to: int) -> None:
    raise KeyError("planted")


@pytest.mark.parametrize(("options", "fault"), [({}, fail_to_send_whole), ({"zero": 1}, fail_to_send_parts)])
def test_an_error_of_a_state_transfer_is_no_success(
    options: dict[str, int], fault: Callable[[Any], None], tmp_path: Path
) -> None:
    """A send that failed by it was taken for one that succeeded; now the sender ends with it."""
    with coordinator(min_replicas=1) as address:
        common = {"pause": 0.05, "options": options, "steps": 10**6, "log": str(tmp_path / "log")}
        (a,) = start(tmp_path, "a", address, gather="a", after=1, fault=fault, **common)
        while not (tmp_path / "a.jsonl").exists() and a.is_alive():
            time.sleep(0.05)
        (b,) = start(tmp_path, "b", address, **common)
        assert finish([a], 60.0) == [1] and "KeyError: 'planted'" in (tmp_path / "log").read_text()
        b.kill()
