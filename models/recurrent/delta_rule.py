"""Recurrence of Gated DeltaNet, the gated delta rule (Yang et al. 2024, arXiv:2412.06464), computed in chunks.

    S_t = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T          S (K, V), k and q (K), v (V), of each head
    y_t = S_t^T q_t

Within a chunk the delta rule is a triangular system of Q equations (section 3.3 of the paper, the extended WY
representation). With the state S in front of the chunk, the decays d of ``decays.py`` and T = (I + tril(beta k k^T d,
-1))^-1, each token adds k_j u_j^T to the state, u = T beta v - T beta d_start k S, and so is affine in S:

    S' = (d_whole I - (d_end k)^T T beta d_start k) S + (d_end k)^T T beta v
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from ...context.scan import scan
from ...grid import Axis
from .decays import Decays


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    logarithms: Tensor,
    beta: Tensor,
    *,
    chunk: int,
    begins: Tensor | None = None,
    initial: Tensor | None = None,
    axis: Axis | None = None,
) -> tuple[Tensor, Tensor]:
    """Return y, and the state at the end, of pieces of a sequence.

    Args:
        q, k: (B, p, L, G, K), common to the h heads of a group. The chunk divides L.
        v: (B, p, L, G, h, V).
        logarithms: of the decays a, (B, p, L, G, h).
        beta: (B, p, L, G, h).
        chunk: number of tokens of a chunk.
        begins: bool (B, p, L): True where a document begins, whose state before is 0; None: nowhere.
        initial, axis: as for ``scan``.

    Returns:
        (B, p, L, G, h, V), and (B, G h, K, V), as ``scan`` returns it.
    """
    q, k = (rearrange(tensor, "b p (n q) g k -> b p n g 1 q k", q=chunk) for tensor in (q, k))
    v = rearrange(v, "b p (n q) g h v -> b p n g h q v", q=chunk)
    logarithms, beta = (rearrange(rates, "b p (n q) g h -> b p n g h q", q=chunk) for rates in (logarithms, beta))
    if begins is not None:
        begins = rearrange(begins, "b p (n q) -> b p n 1 1 q", q=chunk)
    decays = Decays.of(logarithms, begins)
    system = beta[..., None] * (k @ k.mT) * decays.pairs  # only what is below the diagonal is read
    added = torch.cat([v, decays.from_start[..., None] * k], -1) * beta[..., None]
    added = torch.linalg.solve_triangular(system, added, upper=False, unitriangular=True)
    values, readers = added.split([v.shape[-1], k.shape[-1]], -1)  # (..., q, V) and (..., q, K)
    ends = (decays.to_end[..., None] * k).mT  # (..., K, q)
    identity = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    transitions = decays.whole[..., None, None] * identity - ends @ readers
    before, last = scan(transitions.flatten(3, 4), (ends @ values).flatten(3, 4), initial, axis)
    before = before.unflatten(3, v.shape[3:5])
    y = ((q @ k.mT) * decays.pairs) @ (values - readers @ before)
    y = y + decays.from_start[..., None] * (q @ before)
    return rearrange(y, "b p n g h q v -> b p (n q) g h v"), last
