"""triax's mixture of experts beside one written by hand and DeepSpeed's: step time, bytes sent, memory.

    python benchmarks/moe.py                          # 4,096 tokens in all, 8 experts, on 2 and then 4 ranks
    python benchmarks/moe.py --ranks 2 --rounds 15

A step is forward and backward through residual blocks of a norm and a mixture, with the experts sharded over all ranks
and the sequences too. It is measured as benchmarks/context.py measures. Memory is that of the rank with most, on which
also the most tokens arrive.
"""

from __future__ import annotations

from moe_contenders import MoEShape, contenders
from rounds import Makers
from sharers import Alone
from sharing import run

import triax

SHAPES = {
    "moe": MoEShape(layers=2, width=256, heads=1, sequences=4, length=1024),
    "smoke": MoEShape(layers=2, width=16, heads=1, sequences=4, length=8, hidden=32),
}


def makers(model: str, grid: triax.Grid) -> Makers[Alone]:
    """Return the contenders."""
    return contenders(SHAPES[model], grid)


if __name__ == "__main__":
    run(__doc__, {name: str(shape) for name, shape in SHAPES.items()}, "expert", makers)
