"""Clock of one device: the host's clock on a CPU, events in the stream on a GPU, so that no measurement waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ...base.accelerators import functions_of, is_accelerator

Mark = Any  # a point in time: a float on a CPU, an event on a GPU; ``Clock.at`` converts both to seconds


class Clock:
    """Marks points in time on one device.

    Seconds are those of ``time.perf_counter``, which on Linux is one clock for all processes of a host.

    Args:
        device: the rank's device.

    Attributes:
        mark: returns the present time; on a GPU, the time at which the current stream reaches this point.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._zero, self._first = 0.0, None
        self.mark: Callable[[], Mark] = time.perf_counter
        if is_accelerator(device):
            functions_of(device).synchronize(device)
            self._zero, self._first = time.perf_counter(), self._event()
            self.mark = self._event

    def settle(self) -> None:
        """Wait until every mark has been reached. Required before ``at``."""
        if self._first is not None:
            functions_of(self._device).synchronize(self._device)

    def at(self, mark: Mark) -> float:
        """Return a mark in seconds, as ``time.perf_counter`` counts them."""
        return float(mark) if self._first is None else self._zero + self._first.elapsed_time(mark) / 1e3

    def _event(self) -> Any:
        event = functions_of(self._device).Event(enable_timing=True)
        event.record()
        return event
