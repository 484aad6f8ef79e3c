"""Recurrence of Mamba2, structured state space duality (Dao and Gu 2024, arXiv:2405.21060), computed in chunks.

    S_t = a_t S_{t-1} + b_t x_t^T          S (N, P), x (P), b and c (N), of each head
    y_t = S_t^T c_t

Section 6 of the paper: within a chunk of Q tokens y is a product of masked matrices, as in attention; from chunk to
chunk only the state goes on.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from ...context.scan import scan
from ...grid import Axis
from .decays import Decays


def state_space(
    x: Tensor,
    logarithms: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    chunk: int,
    begins: Tensor | None = None,
    initial: Tensor | None = None,
    axis: Axis | None = None,
) -> tuple[Tensor, Tensor]:
    """Return y, and the state at the end, of pieces of a sequence.

    Args:
        x: (B, p, L, G, h, P), with h heads in each of G groups. The chunk divides L.
        logarithms: of the decays a, (B, p, L, G, h).
        b, c: (B, p, L, G, N), common to the heads of a group.
        chunk: Q.
        begins: bool (B, p, L): True where a document begins, whose state before is 0; None: nowhere.
        initial, axis: as for ``scan``.

    Returns:
        (B, p, L, G, h, P), and (B, G h, N, P), as ``scan`` returns it.
    """
    by_chunks = "b p (n q) {0} -> b p n {0} q"
    x, b, c = (
        rearrange(x, "b p (n q) g h v -> b p n g h q v", q=chunk),
        rearrange(b, "b p (n q) g s -> b p n g q s", q=chunk),
        rearrange(c, "b p (n q) g s -> b p n g q s", q=chunk),
    )
    logarithms = rearrange(logarithms, by_chunks.format("g h"), q=chunk)
    if begins is not None:
        begins = rearrange(begins, by_chunks.format(""), q=chunk)[:, :, :, None, None]
    decays = Decays.of(logarithms, begins)
    y = ((c @ b.mT)[:, :, :, :, None] * decays.pairs) @ x
    updates = torch.einsum("bpngqs,bpnghqv->bpnghsv", b, x * decays.to_end[..., None])
    before, last = scan(decays.whole.flatten(3)[..., None, None], updates.flatten(3, 4), initial, axis)
    before = before.unflatten(3, x.shape[3:5])
    y = y + torch.einsum("bpngqs,bpnghsv->bpnghqv", c, before) * decays.from_start[..., None]
    return rearrange(y, "b p n g h q v -> b p (n q) g h v"), last
