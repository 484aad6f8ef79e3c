"""A second pytest process for the tests marked ``beside``, with the lowest priority, while the others run.

A quarter of the time of two cores is idle in a run of all tests, because ranks and processes wait for one another. A
test that starts a command, and looks only at what became of it, can use that time: nothing in it is measured, and it
needs no rank of the pool. Its reports come to the main process, which shows and counts them like its own.

With few other tests (``pytest tests/zero``) there is no second process, and marked tests run in their place.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

ENOUGH = int(os.environ.get("TRIAX_BESIDE_ENOUGH", "1000"))  # other tests, from which on a second process pays
_REPORTS = "TRIAX_BESIDE_REPORTS"  # the file into which the second process writes its reports
_SECOND = pytest.StashKey["_SecondProcess"]()
_WRITER = pytest.StashKey["_Writer"]()


class _SecondProcess:
    """The process, and the reports that it has written so far."""

    def __init__(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self.config, self.items = config, items
        self.folder = tempfile.TemporaryDirectory(prefix="triax-beside-")
        self.file = Path(self.folder.name) / "reports"
        self.file.touch()
        self.output = Path(self.folder.name) / "output"
        self.read = 0  # bytes of the file
        self.reports: dict[str, list[Any]] = {item.nodeid: [] for item in items}
        names = Path(self.folder.name) / "tests"
        names.write_text("\n".join(self.reports))
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(config.rootpath)]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*words, f"@{names}"],
                env={**os.environ, _REPORTS: str(self.file)},
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=config.rootpath,
            )

    def reports_of(self, nodeid: str) -> list[Any]:
        """Reports of a test, once all of them are there; none if the process ended without them."""
        while True:
            ended = self.process.poll() is not None
            self._read()
            found = self.reports[nodeid]
            if found and found[-1].when == "teardown":
                return found
            if ended:
                sys.stderr.write(f"\n{nodeid} was not run beside the others:\n{self.output.read_text()[-2000:]}\n")
                return []
            time.sleep(0.1)

    def _read(self) -> None:
        with self.file.open("rb") as file:
            file.seek(self.read)
            lines = file.read().splitlines(keepends=True)
        for line in lines:
            if line.endswith(b"\n"):  # otherwise it is still being written
                self.read += len(line)
                report = self.config.hook.pytest_report_from_serializable(config=self.config, data=json.loads(line))
                self.reports[report.nodeid].append(report)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "beside: runs a command, of which only the outcome counts; see beside.py")
    reports = os.environ.pop(_REPORTS, None)  # not for a pytest that a test starts
    if reports is not None:
        config.stash[_WRITER] = _Writer(config, reports)
        config.pluginmanager.register(config.stash[_WRITER])
        os.nice(19)


@pytest.hookimpl(trylast=True)  # when tests have been deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    beside = [item for item in items if item.get_closest_marker("beside") and "ranks" not in _fixtures(item)]
    chosen = set(beside)
    others = [item for item in items if item not in chosen]
    if beside and len(others) >= ENOUGH and _WRITER not in config.stash and not config.option.collectonly:
        items[:] = others + beside
        config.stash[_SECOND] = _SecondProcess(config, beside)


def _fixtures(item: pytest.Item) -> list[str]:
    return getattr(item, "fixturenames", [])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    second = item.config.stash.get(_SECOND, None)
    found = second.reports_of(item.nodeid) if second is not None and item.nodeid in second.reports else []
    if not found:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in found:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


class _Writer:
    """Plugin of the second process: writes each report on a line of a file."""

    def __init__(self, config: pytest.Config, file: str) -> None:
        self.config, self.file = config, file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        with open(self.file, "a") as file:
            file.write(json.dumps(data, default=str) + "\n")


def pytest_unconfigure(config: pytest.Config) -> None:
    second = config.stash.get(_SECOND, None)
    if second is not None:
        second.end()
