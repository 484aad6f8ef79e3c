"""Removable hooks around a method of one instance, for measuring. Without hooks the class's own method runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

Hook = Callable[..., Any]  # hook(call, *args, **kwargs) runs call(*args, **kwargs) and returns its result


class MethodHook:
    """A method of one instance that runs through hooks. It is an attribute that hides the class's method.

    Attributes:
        hooks: functions that wrap the method. The last one in the list is the outermost.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self._call = getattr(owner, name)
        self.hooks: list[Hook] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method through the hooks."""
        call = self._call
        for hook in self.hooks:
            call = partial(hook, call)
        return call(*args, **kwargs)


def hook_method(owner: Any, name: str, hook: Hook) -> Callable[[], None]:
    """Call a method of this instance through a hook. Returns a function that removes the hook."""
    if not isinstance(found := vars(owner).get(name), MethodHook):
        found = MethodHook(owner, name)
        setattr(owner, name, found)
    found.hooks.append(hook)

    def remove() -> None:
        found.hooks.remove(hook)
        if not found.hooks:
            delattr(owner, name)

    return remove
