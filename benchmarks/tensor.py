"""triax's tensor axis beside DTensor and layers written by hand: step time, bytes sent, activations held.

    python benchmarks/tensor.py                          # a transformer layer, then a GPT, on 2 and then 4 ranks
    python benchmarks/tensor.py --models gpt --ranks 2 --rounds 15

A step is forward and backward of 4,096 tokens. All contenders live in one set of processes on gloo, one thread each,
and take turns: every round runs each of them once, and starts one further down the list than the round before. What is
quoted is the median over rounds of the slowest rank's time, of its speed-up over one process and of the limit's ratio
to it in the same round, and of the bytes that each rank sent. The limit is the time of as many processes that compute
the same and send nothing, plus the bytes of the contender, at the rate of the transport while all ranks compute. Before
any of it, each must have computed the gradients of plain autograd in one process. docs/tensor-parallel.md says more.
"""

from __future__ import annotations

from rounds import Makers
from sharers import Alone, Shape
from sharing import run
from sharing_peers import Silent, sharers

import triax

SHAPES = {
    "layer": Shape(layers=1, width=256, heads=4, sequences=16, length=256),
    "gpt": Shape(layers=8, width=256, heads=4, sequences=16, length=256, vocabulary=256),
    "smoke": Shape(layers=2, width=16, heads=4, sequences=2, length=8, vocabulary=32),
}


def makers(model: str, grid: triax.Grid) -> Makers[Alone]:
    """Return the contenders."""
    return sharers(SHAPES[model], grid)


def silent(model: str) -> Alone:
    """Return the arithmetic of one rank."""
    return Silent(SHAPES[model])


if __name__ == "__main__":
    run(__doc__, {name: str(shape) for name, shape in SHAPES.items()}, "tensor", makers, silent)
