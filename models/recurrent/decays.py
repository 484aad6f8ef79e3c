"""Decays between the tokens of a chunk, from the logarithms of the tokens' decays.

Differences of cumulative sums are taken before the exponential, so that no product of decays underflows and is divided
by again. A document that begins at a token cuts every decay that passes over this token to 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Decays(NamedTuple):
    """Decays in a chunk of Q tokens, of any leading shape: sequence, piece, chunk, head."""

    pairs: Tensor  # (..., Q, Q): from behind token j to behind token i, for j <= i; else 0
    from_start: Tensor  # (..., Q): from the chunk's start to behind a token
    to_end: Tensor  # (..., Q): from behind a token to the chunk's end
    whole: Tensor  # (...): of the chunk

    @classmethod
    def of(cls, logarithms: Tensor, begins: Tensor | None) -> Decays:
        """Make the decays.

        Args:
            logarithms: (..., Q), of each token's decay, at most 0.
            begins: bool, broadcastable with (..., Q): True where a document begins; None: nowhere.
        """
        total = logarithms.cumsum(-1)
        pairs = total[..., :, None] - total[..., None, :]
        size = total.shape[-1]
        unseen = torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1)
        to_end, from_start, over_chunk = total[..., -1:] - total, total, total[..., -1]
        if begins is not None:
            number = begins.cumsum(-1)  # of the document in the chunk; 0: it began before
            unseen = unseen | (number[..., :, None] != number[..., None, :])
            to_end = to_end.masked_fill(number != number[..., -1:], -torch.inf)
            from_start = from_start.masked_fill(number > 0, -torch.inf)
            over_chunk = over_chunk.masked_fill(number[..., -1] > 0, -torch.inf)
        pairs = pairs.masked_fill(unseen, -torch.inf)
        return cls(pairs.exp(), from_start.exp(), to_end.exp(), over_chunk.exp())
