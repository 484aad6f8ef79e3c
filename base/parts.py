"""Contexts around the named parts of a step, for measurements and autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

MakeContext = Callable[[], AbstractContextManager[Any]]
_NOTHING = nullcontext()


class Parts:
    """Named parts of a step. The code of a part runs under ``with parts(name):``, in the contexts of its observers.

    Args:
        names: the names of the parts.

    >>> parts, seen = Parts("forward"), []
    >>> remove = parts.watch("forward", lambda: nullcontext(seen.append("begins")))
    >>> with parts("forward"):
    ...     seen.append("runs")
    >>> remove()
    >>> seen
    ['begins', 'runs']
    """

    def __init__(self, *names: str) -> None:
        self._watched: dict[str, list[MakeContext]] = {name: [] for name in names}

    def __call__(self, name: str) -> AbstractContextManager[Any]:
        """Return the context in which a part runs once."""
        return _all(watched) if (watched := self._watched[name]) else _NOTHING

    def watch(self, name: str, make: MakeContext) -> Callable[[], None]:
        """Run a part in the context that ``make`` returns for each run. The context that was added last is outermost.

        Returns:
            Function that ends this.
        """
        self._watched[name].append(make)
        return lambda: self._watched[name].remove(make)


@contextmanager
def _all(makes: Sequence[MakeContext]) -> Iterator[None]:
    with ExitStack() as stack:
        for make in reversed(makes):
            stack.enter_context(make())
        yield
