"""Monitor: hands the numbers of each step to the writers, and prints a line every few steps."""

from __future__ import annotations

import atexit
import json
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

from ...base.records import Records, show
from ...grid.agreement.mailbox import Mailbox
from .files import EXPERTS, TERMS
from .format import numbers_in_words
from .records import Histogram, StepMetrics
from .writers import Event, Write


class Monitor:
    """Writes and prints the numbers of steps. Rank 0 has one with writers; the others post their own numbers to it.

    The names are ``Train/Samples/train_loss``, ``lr`` and, under fp16, ``loss_scale``. ``grad_norm`` and
    the ``timings`` of ``StepMetrics`` are written too. The x value of each number is the number of samples so far.
    Terms and metrics of the loss are ``Train/Metrics/...``; those of several numbers are in the JSON file alone.
    Of the loads of a layer's experts, the largest and the smallest are written, over their mean. The JSON file has all
    of them.

    Args:
        writers: called with every number.
        print_every: steps from one printed line to the next; None: nothing is printed.
        mailbox: through which numbers of other ranks reach rank 0; None if nothing is written.
        position: returns the steps and samples so far, for ``log``.

    Attributes:
        last: numbers of the last step that was written or printed; None before it.
    """

    def __init__(
        self,
        writers: Sequence[Write] = (),
        print_every: int | None = None,
        mailbox: Mailbox | None = None,
        position: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        self._writers = [(write, Records()) for write in writers]
        self._print_every, self._mailbox, self._position = print_every, mailbox, position
        self._step = 0
        self.last: StepMetrics | None = None
        if self._writers and mailbox is not None:
            received = weakref.finalize(self, _receive, mailbox, self._writers)  # what arrives after the last step
            # At exit Python calls the function registered last first: this one before wandb's, which ends its run.
            atexit.register(received)
        self._since: tuple[int, float] | None = None  # the samples and the time from which samples/s are measured

    @property
    def enabled(self) -> bool:
        """True if this rank has a writer, and so writes numbers and does not only print lines."""
        return bool(self._writers)

    def log(self, numbers: Mapping[str, float] | None = None, **more: float) -> None:
        """Write numbers of the caller's, such as an accuracy, at the samples trained on so far.

        Any rank may call this, alone. The numbers of other ranks than 0 are written with the next step, or at the end.
        A name that several ranks log is written once for each of them: log a mean over ranks on one of them.
        """
        step, samples = self._position()
        events: list[Event] = [(name, float(value), samples) for name, value in {**(numbers or {}), **more}.items()]
        if self._writers and events:
            self._write(events)
        elif self._mailbox is not None and events:
            self._mailbox.post(json.dumps([step, events]))

    def write_events(self, events: Sequence[tuple[str, float, int]]) -> None:
        """Write numbers under names of the caller's.

        Every rank may call this; the numbers of rank 0 are written.

        Args:
            events: for each its name, its value, and the samples trained on so far (``engine.global_samples``).
        """
        if self._writers:
            self._write([(name, float(value), int(samples)) for name, value, samples in events])

    def needs(self, step: int) -> bool:
        """Return True if ``write_step`` would write numbers or print a line for this step."""
        return bool(self._writers or (self._print_every and (step % self._print_every == 0 or self._since is None)))

    def write_step(self, metrics: StepMetrics) -> None:
        """Write the numbers of a step, and print a line if one is due."""
        self._step, self.last, now = metrics.step, metrics, time.perf_counter()
        if self._writers:
            _receive(self._mailbox, self._writers)
            self._write(_events(metrics))
        due = self._print_every is not None and metrics.step % self._print_every == 0
        if due:
            show(self._line(metrics, now))
        if due or self._since is None:
            self._since = metrics.samples, now

    def _write(self, events: list[Event]) -> None:
        _write_all(self._writers, events, self._step)

    def _line(self, metrics: StepMetrics, now: float) -> str:
        rates = ", ".join(f"{lr:.4g}" for lr in metrics.lr)
        parts = [f"step {metrics.step}: loss {float(metrics.loss):.4f}", f"lr {rates}"]
        if self._since is not None and metrics.samples > self._since[0] and now > self._since[1]:  # not after a rewind
            parts.append(f"{(metrics.samples - self._since[0]) / (now - self._since[1]):.4g} samples/s")
        parts += numbers_in_words(metrics.metrics)
        if metrics.loss_scale is not None:
            parts.append(f"loss scale {metrics.loss_scale:g}, {metrics.skipped_steps} steps skipped")
        return ", ".join(parts)


def _receive(mailbox: Mailbox | None, writers: Sequence[tuple[Write, Records]]) -> None:
    """Write the numbers that other ranks have posted."""
    for text in mailbox.read() if mailbox is not None else ():
        step, events = json.loads(text)
        _write_all(writers, [(name, value, samples) for name, value, samples in events], step)


def _write_all(writers: Sequence[tuple[Write, Records]], events: list[Event], step: int) -> None:
    for write, records in writers:
        with records.writing("the numbers of a step"):
            write(events, step)


def _events(metrics: StepMetrics) -> list[Event]:
    figures = {"train_loss": float(metrics.loss), "lr": float(metrics.lr[0])}
    if metrics.loss_scale is not None:
        figures["loss_scale"] = metrics.loss_scale
    if metrics.grad_norm is not None:
        figures["grad_norm"] = metrics.grad_norm
    figures |= {**metrics.timings, **metrics.auxiliary}
    for layer, loads in metrics.loads.items():
        mean = max(sum(loads) / len(loads), 1.0)
        figures |= {f"{layer}.largest_load": max(loads) / mean, f"{layer}.smallest_load": min(loads) / mean}
    events: list[Event] = [(f"Train/Samples/{name}", value, metrics.samples) for name, value in figures.items()]
    events += [(f"{TERMS}{name}", value, metrics.samples) for name, value in metrics.metrics.items()]
    events += [(f"{EXPERTS}{layer}", list(loads), metrics.samples) for layer, loads in metrics.loads.items()]
    return events + [(name, Histogram(*histogram), metrics.samples) for name, histogram in metrics.histograms.items()]
