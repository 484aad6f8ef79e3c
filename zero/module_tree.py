"""Submodules and parameters of a module, as they were when its engine or optimizer was made."""

from __future__ import annotations

from collections.abc import Collection
from operator import is_
from typing import Any

from torch import nn


class ModuleTree:
    """Submodules and parameters of a module: a change of them that a step would ignore is found by ``problem``.

    A look at an unchanged module compares the entries of its dicts, without a walk over the modules.

    Args:
        module: the model.
        trained: the parameters that are stepped.
    """

    def __init__(self, module: nn.Module, trained: Collection[nn.Parameter]) -> None:
        self._module = module
        self._first = {parameter: name for name, parameter in module.named_parameters()}
        self._trained = [parameter for parameter in self._first if parameter in trained]
        # User code may have chosen what is trained: then what it adds may be meant for another engine.
        self._all = all(parameter in trained for parameter in self._first if parameter.requires_grad)
        self._added: dict[nn.Parameter, str] = {}
        self._read()

    def problem(self) -> str | None:
        """Return what is wrong if a trained parameter is gone, or one that requires gradients was added."""
        for held, values in self._dicts:
            if len(held) != len(values) or not all(map(is_, held.values(), values)):
                now = {parameter: name for name, parameter in self._module.named_parameters()}
                if gone := [self._first[parameter] for parameter in self._trained if parameter not in now]:
                    how = "replaced" if gone[0] in now.values() else "removed"
                    return f"{gone[0]} was {how} after its engine or optimizer was made: do that before"
                self._added = {p: name for p, name in now.items() if p not in self._first} if self._all else {}
                self._read()
                break
        if late := [name for parameter, name in self._added.items() if parameter.requires_grad]:
            return (
                f"{late[0]} was added after its engine or optimizer was made, so no step would change it, and replicas "
                "would have values of their own: add it before. If the first forward pass makes it, run one before"
            )
        return None

    def _read(self) -> None:
        self._dicts: list[tuple[dict[str, Any], list[Any]]] = [
            (held, [*held.values()]) for part in self._module.modules() for held in (part._modules, part._parameters)
        ]
