"""triax's context axis beside torch's, DeepSpeed's and code by hand: step time, bytes sent, memory, balance of work.

    python benchmarks/context.py                          # 4,096 tokens on 2 and then 4 ranks
    python benchmarks/context.py --ranks 2 --rounds 15

A step is forward and backward of one sequence through the blocks of a GPT. All contenders live in one set of processes
on gloo, one thread each, and take turns: every round runs each of them once, and starts one further down the list than
the round before. Quoted are medians over rounds of the slowest rank's time and of its ratio to the best peer's in the
same round; what the loopback device carried for each rank; the bytes that autograd holds between forward and backward,
and the most that a step has allocated at once, gradients included, on the rank with most; and the scores that the
busiest rank's attention computes, over the mean. Before any of it, each must have computed the gradients of plain
autograd in one process. docs/benchmarks.md says more.
"""

from __future__ import annotations

from context_contenders import contenders
from rounds import Makers
from sharers import Alone, Shape
from sharing import run

import triax

SHAPES = {
    "gpt": Shape(layers=2, width=256, heads=4, sequences=1, length=4096),
    "smoke": Shape(layers=1, width=16, heads=4, sequences=2, length=32),
}


def makers(model: str, grid: triax.Grid) -> Makers[Alone]:
    """Return the contenders."""
    return contenders(SHAPES[model], grid)


if __name__ == "__main__":
    run(__doc__, {name: str(shape) for name, shape in SHAPES.items()}, "context", makers)
