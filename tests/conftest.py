"""Settings of all test files, and the tests that a plain run skips. The fixture `ranks` is triax.testing's."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

# A machine that is busy makes no example wrong.
settings.register_profile("triax", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("triax")
# torchrun asks for this machine's address by its own name, and waits for minutes where nothing knows that name, as on
# machines that were made for one run of tests. This is `torchrun --local-addr`.
os.environ.setdefault("PET_LOCAL_ADDR", "127.0.0.1")
# Before torch is imported, here and in programs that tests start: the tensors of tests are so small that two threads
# spend their time waiting for each other, with 6 times the CPU.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests start some hundred processes, and each would compile the library again, for a second of its CPU; and each worker
# would rewrite all test files for pytest, for 15 s of its CPU, where one run can leave them to the next.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


class FirstFailure:
    """Shows the first failure in the terminal at once. pytest shows all failures after the last test."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._shown = config, False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.getplugin("terminalreporter")  # None in a worker
        if report.failed and not self._shown and terminal is not None:
            self._shown = True
            terminal.write_line("")
            terminal.write_sep("=", f"first failure: {report.nodeid}", red=True)
            terminal.write_line(report.longreprtext)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FirstFailure(config))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", choices=("cuda", "cpu"), default="cuda", help="of tests/device; cpu: to see that they are right"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Exhaustive sweeps and tests of a device run when `-m` says something, or by their names (`file.py::test`)."""
    if config.option.markexpr or any("::" in argument for argument in config.args):
        return
    others = [item for item in items if item.get_closest_marker("exhaustive") or item.get_closest_marker("device")]
    config.hook.pytest_deselected(items=others)
    left_out = set(others)
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Return to the folder in which a test began: some tests call the functions of ranks, which change it."""
    folder = os.getcwd()
    try:
        return (yield)
    finally:
        os.chdir(folder)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what is imported and collected out of collections of garbage, which would take a quarter of this CPU.

    It is no garbage, and later collections, also those that tests ask for, need not look through it.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
