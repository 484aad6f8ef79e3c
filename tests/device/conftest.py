"""Tests on a GPU: `make test-device`. Without one they are collected and skipped, and one line says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

MISSING = "torch finds no CUDA device"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() or config.option.device == "cpu":
        return
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.skip(reason=MISSING))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [report for report in terminalreporter.getreports("skipped") if MISSING in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(
            f"{len(skipped)} tests of tests/device were skipped: {MISSING}, {torch.__version__}"
        )


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of these tests, with what earlier tests left on it freed."""
    if request.config.option.device == "cpu":
        if request.node.get_closest_marker("cuda_only"):
            pytest.skip("it asks torch.cuda")
        return torch.device("cpu")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.device("cuda", 0)
