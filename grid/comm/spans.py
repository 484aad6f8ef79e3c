"""Stream of spans: the parts of a step, the ops of a program and the operations of the axes, while they run.

Whatever measures a step reads this stream: the communication log, the timeline, the times of a step, the profiles. The
context of a reader may also change what runs in it: autocast is such a reader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Self, TypeVar

from .pending import Done, Pending

T = TypeVar("T")
_UNREAD = nullcontext()


class OpenSpan:
    """Interval in which a rank does one thing. It runs in the contexts that its readers return.

    | kind | about |
    |---|---|
    | a part of a step: ``step``, ``forward``, ``backward``, ``reduce``, ``optimizer`` | its name |
    | a part of the step of a pipeline: ``batch``, ``program``, ``stage`` | its name |
    | an op of a program: ``F``, ``SEND_F``, ... | the ``Op`` |
    | two ops that run interleaved: ``pair`` | both |
    | a method of ``Axis``: ``all_reduce``, ``send``, ... | its ``Operation`` |

    The span of an axis's operation ends at the end of the wait for it.

    Args:
        kind: the kind.
        about: object that prints as the name of the span.
        readers: the readers of the kind. The context of the last one is outermost.
    """

    def __init__(self, kind: str, about: Any, readers: Sequence[Reader]) -> None:
        self.kind, self.about = kind, about
        self._readers = readers
        self._turns: list[Callable[[], object]] = []
        self._contexts = ExitStack()

    def __enter__(self) -> Self:
        with self._contexts as contexts:
            for read in reversed(self._readers):
                if (context := read(self)) is not None:
                    contexts.enter_context(context)
            self._contexts = contexts.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._contexts.__exit__(*error)

    def at_turn(self, call: Callable[[], object]) -> None:
        """Call a function at ``turn``."""
        self._turns.append(call)

    def turn(self) -> None:
        """Note that the rank begins to wait for the operation, or that the inputs of the op have arrived."""
        for call in self._turns:
            call()

    def follow(self, pending: Pending) -> Pending:
        """Take the handle of the operation; return the one to wait for. An operation that is done ends here."""
        if isinstance(pending, Done):
            self._contexts.close()
            return pending
        return _SpanHandle(pending, self.turn, self._contexts)


class _SpanHandle:
    """Handle of an operation that runs in a span: its wait ends the span.

    It is not the span itself, which the frames of its contexts refer to: an operation that is dropped after a failure
    must be freed at once, so that its connection closes.
    """

    def __init__(self, pending: Pending, turn: Callable[[], None], contexts: ExitStack) -> None:
        self._pending, self._turn, self._contexts = pending, turn, contexts

    def wait(self) -> None:
        with self._contexts:
            self._turn()
            self._pending.wait()


Reader = Callable[[OpenSpan], AbstractContextManager[Any] | None]  # called when a span begins; its context ends with it


class Spans:
    """Stream of spans, of a grid or of an engine. An engine's spans are also read in the stream of its grid.

    Args:
        outer: another stream, whose readers read this one too.

    Attributes:
        readers: the kinds that each reader asks for (none: all), and the reader, in the order in which they were added.

    >>> spans, seen = Spans(), []
    >>> stop = spans.read(lambda span: nullcontext(seen.append(span.kind)), "forward", "step")
    >>> with spans("forward"):
    ...     seen.append("runs")
    >>> stop()
    >>> seen
    ['forward', 'runs']
    """

    def __init__(self, outer: Spans | None = None) -> None:
        self.readers: tuple[tuple[frozenset[str], Reader], ...] = ()
        self._outer = outer

    def __call__(self, kind: str, about: Any = None) -> AbstractContextManager[OpenSpan | None]:
        """Return the context in which a span runs. It yields None if nothing reads the kind."""
        if not self.are_read or not (readers := self._readers_of(kind)):
            return _UNREAD
        return OpenSpan(kind, kind if about is None else about, readers)

    @property
    def are_read(self) -> bool:
        """True if anything reads spans of any kind."""
        return bool(self.readers) or (self._outer is not None and bool(self._outer.readers))

    def read(self, reader: Reader, *kinds: str) -> Callable[[], None]:
        """Call a reader with each span of some kinds, or of all kinds, from now on.

        Returns:
            Function that ends this. A context that the reader has returned before still ends with its span.
        """
        entry = frozenset(kinds), reader
        self.readers = (*self.readers, entry)

        def stop() -> None:
            self.readers = tuple(other for other in self.readers if other is not entry)

        return stop

    def reader(self, kind: type[T]) -> T | None:
        """Return the first reader of a class, e.g. ``CommsLog``; None if there is none."""
        return next((reader for _, reader in self.readers if isinstance(reader, kind)), None)

    def _readers_of(self, kind: str) -> list[Reader]:
        own = [reader for kinds, reader in self.readers if not kinds or kind in kinds]
        return own if self._outer is None else own + self._outer._readers_of(kind)
