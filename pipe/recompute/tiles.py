"""Modules that act on each token by itself, run on a tile of tokens at a time, each recomputed in the backward pass.

Of an MLP on T tokens only its input and output then exist as a whole, and what is between them for one tile. This is
for long sequences: the wide tensors of an MLP are larger than its input by a factor of 3 to 12.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from ...base.torch_private import AnyDropout
from ...grid.randomness.random import SampleRandom
from .recompute import Group, Recompute


def install_tiles(module: nn.Module, recompute: Recompute, tokens: int) -> int:
    """Set the attribute ``in_tiles`` of all modules whose class has it, to a function that runs them in tiles.

    A class asks for it by an attribute ``in_tiles = None``. Its forward then calls ``self.in_tiles(function, x)`` in
    place of ``function(x)``, where x is (B, T, D).

    Args:
        module: the model.
        recompute: runs each tile so that its backward pass recomputes it.
        tokens: tokens of each sequence in a tile.

    Returns:
        The number of modules that have the attribute.
    """
    asking = [(name, part) for name, part in module.named_modules() if getattr(type(part), "in_tiles", part) is None]
    for name, submodule in asking:
        group = Group(0, 0, True, f"a tile of {name}", (), ())
        submodule.in_tiles = partial(_run_in_tiles, recompute, group, tokens)
    return len(asking)


def dropout_in_tiles(module: nn.Module) -> str | None:
    """Return the name of a dropout in a module that may run in tiles: tiles would change its masks."""
    for name, submodule in module.named_modules():
        if isinstance(submodule, (SampleRandom, AnyDropout)) and getattr(submodule, "p", True):
            parts = name.split(".")
            owners = (module.get_submodule(".".join(parts[:i])) for i in range(len(parts)))
            if any(hasattr(type(owner), "in_tiles") for owner in owners):
                return name
    return None


def _run_in_tiles(
    recompute: Recompute, group: Group, tokens: int, function: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    """Return ``function(x)`` for x (B, T, D), a tile of T after the other; at once if there is only one."""
    if x.shape[1] <= tokens:
        return function(x)
    return torch.cat([recompute.run(group, function, tile) for tile in x.split(tokens, dim=1)], dim=1)
