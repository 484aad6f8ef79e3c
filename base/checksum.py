"""A checksum of the bits of a tensor, which stays on its device: it tells if the tensor was changed."""

from __future__ import annotations

import torch
from torch import Tensor

_PIECE = 2**20  # words that are converted at once: all of them would take up to eight times the tensor's memory
_FACTOR = 0x9E3779B1  # odd: no bit of an earlier piece is lost


def checksum(tensor: Tensor) -> Tensor:
    """Return a number, 0-dim int64, that changes if an element of a tensor does, or if two elements change places.

    Each word of at most 32 bits is multiplied by its place, times two, plus one. In int64 arithmetic, which wraps
    around, an odd number times the change of one word is never 0. Nor is the difference of two words times their
    distance, so that an exchange of two words of a piece is seen.
    """
    dtype = {1: torch.uint8, 2: torch.int16}.get(tensor.element_size(), torch.int32)
    words = tensor.detach().reshape(-1).view(dtype)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    places = torch.arange(min(words.numel(), _PIECE), device=tensor.device) * 2 + 1
    for piece in words.split(_PIECE):
        total = total * _FACTOR + (piece * places[: piece.numel()]).sum()
    return total
