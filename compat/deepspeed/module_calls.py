"""ModuleCalls: tells the owner of a module, such as its engine, of calls of the module itself."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn

from ...zero.modules.backward_passes import BackwardPasses


class ModuleOwner(Protocol):
    """Owner of a module, as ``ModuleCalls`` sees it."""

    backward_passes: BackwardPasses

    def module_called(self) -> None:
        """Begin a step if the last one has ended. Called before each forward of the module."""

    def zero_grad(self) -> None:
        """Discard the gradients."""


class ModuleCalls:
    """Hooks on a module that tell its owner of its calls. Those of a copied or pickled module tell nothing.

    Args:
        module: the module, which gets the hooks, and a ``zero_grad`` that discards the owner's gradients too.
        owner: the owner, which is not kept alive.
    """

    def __init__(self, module: nn.Module, owner: ModuleOwner | None) -> None:
        self._module = module
        self._owner = None if owner is None else ref(owner)
        if owner is not None:
            module.register_forward_pre_hook(self.before)
            module.register_forward_hook(self.after)
            module.zero_grad = self.zero_grad  # type: ignore[method-assign]

    @property
    def owner(self) -> ModuleOwner | None:
        """The owner, if it is alive."""
        return None if self._owner is None else self._owner()

    def before(self, module: nn.Module, inputs: Any) -> None:
        """Hook before the module's forward."""
        if (owner := self.owner) is not None:
            owner.module_called()

    def after(self, module: nn.Module, inputs: Any, y: Any) -> None:
        """Hook after the module's forward."""
        if (owner := self.owner) is not None and torch.is_grad_enabled():
            owner.backward_passes.watch(y)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the owner's gradients, and those of the module. Collective, as ``engine.zero_grad``."""
        if (owner := self.owner) is not None:
            owner.zero_grad()
        type(self._module).zero_grad(self._module, set_to_none)

    def __reduce__(self) -> tuple[type[ModuleCalls], tuple[nn.Module, None]]:
        return ModuleCalls, (self._module, None)
