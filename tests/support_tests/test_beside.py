"""Tests beside the others: in a process of their own, with reports, counts and failures as if they had run here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from paths import ROOT

TESTS = """
import os
import pytest

def here(name):
    open(name, "w").write(f"{os.getpid()} {os.nice(0)}")

@pytest.mark.beside
def test_one():
    here("one")

@pytest.mark.beside
@pytest.mark.parametrize("value", [1, 2])
def test_several(value):
    assert value == 1, "two is not one"

def test_another():
    here("another")
"""


def test_marked_tests_run_in_a_second_process(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["beside"]\n')
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support"), "TRIAX_BESIDE_ENOUGH": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1
    assert "1 failed, 3 passed" in done.stdout.splitlines()[-1]
    assert "FAILED test_it.py::test_several[2] - AssertionError: two is not one" in done.stdout
    one, another = ((tmp_path / name).read_text().split() for name in ("one", "another"))
    assert one[0] != another[0]
    assert int(one[1]) == 19
