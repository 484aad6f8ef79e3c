"""Comparison of facts over the ranks of an axis, by their hashes."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from .axis import Axis


def same(axis: Axis, facts: Any, device: torch.device) -> bool:
    """Return True if every rank of an axis has equal facts. Collective: 16 bytes, which no report counts.

    The ranks compare hashes x of ``repr(facts)``: the maximum of (x, -x) is (x, -x) on every rank if all x are equal.
    """
    digest = int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:7], "big")
    both = torch.tensor([digest, -digest], device=device)
    with axis.traffic.uncounted():
        axis.all_reduce(both, op="max")
    return bool(both[0] == -both[1])
