"""Standing in the way of one instance's method: for measuring, where nothing shall be in the way when nobody does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..grid.clock import Clock

Hook = Callable[..., Any]  # hook(call, *args, **kwargs) calls it, and returns what it returned


class Tap:
    """An attribute of an instance that hides its class's method, and calls it through hooks.

    Attributes:
        hooks: the last one is the outermost.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self._call = getattr(owner, name)
        self.hooks: list[Hook] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The method, through the hooks."""
        call = self._call
        for hook in self.hooks:
            call = partial(hook, call)
        return call(*args, **kwargs)


def tap(owner: Any, name: str, hook: Hook) -> Callable[[], None]:
    """Have a method of this instance called through a hook; returns what takes the hook away, and the tap with it."""
    if not isinstance(found := vars(owner).get(name), Tap):
        found = Tap(owner, name)
        setattr(owner, name, found)
    found.hooks.append(hook)

    def remove() -> None:
        found.hooks.remove(hook)
        if not found.hooks:
            delattr(owner, name)

    return remove


class Stopwatch:
    """Marks when methods of some instances run.

    Attributes:
        clock: that marks them.
        phases: kind, start and end of what ran since ``start``.
        installed: whether it does.
    """

    def __init__(self) -> None:
        self.clock: Clock | None = None
        self.phases: list[tuple[str, Any, Any]] = []
        self._removers: list[Callable[[], None]] = []

    @property
    def installed(self) -> bool:
        """Whether the taps are in place."""
        return bool(self._removers)

    def install(self, methods: list[tuple[Any, str, str]]) -> None:
        """Tap these methods, unless they are: owner, name, and the kind to list them as."""
        if not self._removers:
            self._removers = [tap(owner, name, partial(self._timed, kind)) for owner, name, kind in methods]

    def remove(self) -> None:
        """Take the taps away."""
        for remove in self._removers:
            remove()
        self._removers, self.clock = [], None

    def start(self, clock: Clock) -> None:
        """Forget what was, and go by this clock."""
        self.clock, self.phases = clock, []

    def stop(self) -> None:
        """Go by no clock until the next ``start``."""
        self.clock = None

    def _timed(self, kind: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.clock is None:
            return call(*args, **kwargs)
        mark, phases = self.clock.mark, self.phases
        start = mark()
        try:
            return call(*args, **kwargs)
        finally:
            phases.append((kind, start, mark()))
