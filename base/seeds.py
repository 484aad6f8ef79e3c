"""Seeds from the numbers and names on which they should depend."""

from __future__ import annotations

import hashlib


def derive(*keys: int | str) -> int:
    """Return a 63-bit seed, a hash of numbers and names, equal on every machine."""
    digest = hashlib.blake2b(repr(keys).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
