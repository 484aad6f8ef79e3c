"""ALiBi: biases of the scores that grow with the position of the key, in place of positions (Press et al. 2022).

arXiv:2108.12409. Head h subtracts slope_h (i - j) from the score of query i and key j. Softmax does not notice a number
that is added to all scores of a query, so slope_h j is added here. It depends on head and key alone: it is one more
channel of the key, which a constant channel of the query multiplies. Every kernel, kind of context parallelism, mask
and cache therefore computes it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Alibi:
    """Biases of ALiBi as channels of queries and keys: it is called as ``Rope`` is.

    Where G query heads share a key/value head, the keys get G channels, and a query has a number in that of its head.

    Args:
        heads: H, the number of query heads of the whole layer.
        kv_heads: K, the number of key/value heads of the whole layer.
        held: range of this rank's query heads.
        scale: factor of the scores.
        rounded: the biases are rounded to bfloat16, and get the factor of the scores too, as in Falcon.
    """

    def __init__(self, heads: int, kv_heads: int, held: tuple[int, int], scale: float, rounded: bool = False) -> None:
        self.slopes, self.group, self.held, self.rounded = slopes(heads), heads // kv_heads, held, rounded
        self.factor = 1.0 if rounded else 1.0 / scale

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor | None = None, length: int = 0) -> tuple[Tensor, Tensor]:
        """Add the channels.

        Args:
            q: (B, heads, T, dim), of this rank's query heads.
            k: (B, kv_heads, T, dim), of the key/value heads that they use.
            positions: integers (B, T). If None, the positions are 0 to T - 1.
            length: number of tokens of the whole row, on which nothing depends.

        Returns:
            q (B, heads, T, dim + G) and k (B, kv_heads, T, dim + G).
        """
        (start, stop), group, device = self.held, self.group, q.device
        places = torch.arange(q.shape[2], device=device)[None] if positions is None else positions
        first = start // group
        own_slopes = self.slopes[first * group : (first + k.shape[1]) * group]
        steep = torch.tensor(own_slopes, dtype=torch.promote_types(q.dtype, torch.float32), device=device)
        steep = (steep.bfloat16() if self.rounded else steep).view(-1, 1, group)  # (kv_heads, 1, G)
        biases = (steep * places[:, None, :, None]).to(k.dtype).expand(len(k), -1, -1, -1)  # (B, kv_heads, T, G)
        head_in_group = torch.arange(start, stop, device=device) % group
        chosen = torch.nn.functional.one_hot(head_in_group, group).to(q.dtype) * self.factor  # (heads, G)
        shape = (len(q), q.shape[1], q.shape[2], group)
        return torch.cat([q, chosen[:, None].expand(shape)], dim=-1), torch.cat([k, biases], dim=-1)


def slopes(heads: int) -> list[float]:
    """Return the slope of each head: 2 ** (-8 h / H) for h from 1 to H, if H is a power of two.

    Else those of the next smaller power of two come first, then every second one of the next larger.
    """
    power = 2 ** math.floor(math.log2(heads))
    first = [2.0 ** (-8 * h / power) for h in range(1, power + 1)]
    return first + [2.0 ** (-4 * h / power) for h in range(1, 2 * (heads - power), 2)]
