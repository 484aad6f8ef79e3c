"""Ops: the elements of schedules and programs.

An `Op` is what one rank does for one stage on one microbatch. It prints as `2F0` (stage 2,
forward, microbatch 0) and parses back. A schedule holds compute ops, and the copies of activations to and from
host memory (O, R); a program (passes.py) also holds what the compute needs: messages, ZeRO's collectives, the sums of
tied gradients.

    kind       meaning of 2X0                                              in one line of code, roughly
    F          forward of stage 2 on microbatch 0                          y = stage(x)
    B          its whole backward                                          I, then W
    I          its input gradient                                          dx = backward_input(dy)
    W          its weight gradient                                         weight.grad += backward_weight()
    O          start to offload the activations that 2F0 keeps             host = copy(saved)
    R          start to reload them, for 2B0 or 2I0                        saved = copy(host)
    C          run 2F0 again, which kept its input only, for 2B0 or 2I0    stage(x)
    SEND_F     send the output of stage 2 to stage 3                       isend(y)
    RECV_F     post the receive of the input of stage 2                    x = irecv()
    SEND_B     send the gradient of the input of stage 2 to stage 1        isend(dx)
    RECV_B     post the receive of the gradient of the output of stage 2   dy = irecv()
    GATHER     make the weights of stage 2 whole (ZeRO 3)                  all_gather(weights)
    RELEASE    keep only this rank's shard of them                         free(weights)
    REDUCE     reduce the gradients of stage 2 over the data axis          reduce_scatter(grads)
    TIED       sum the gradient of a tied weight over its stages           all_reduce(tie.grad)

GATHER, RELEASE and the REDUCE after a stage's last backward belong to no microbatch: they print as
`2REDUCE`. In TIED the last number is the index of the tie, not a microbatch. In a schedule whose microbatches
are cut into slices, the last number counts slices (slices.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

F, B, I, W, C = "F", "B", "I", "W", "C"
O, R = "O", "R"
SEND_F, RECV_F, SEND_B, RECV_B = "SEND_F", "RECV_F", "SEND_B", "RECV_B"
GATHER, RELEASE, REDUCE, TIED = "GATHER", "RELEASE", "REDUCE", "TIED"

COMPUTE = frozenset((F, B, I, W, C))
MAKES = frozenset((F, C))  # the ops that make activations
TRANSFERS = frozenset((O, R))  # copies between the device and the host, which run beside the compute ops
BACKWARD = frozenset((B, I))  # the ops that make an input gradient, which the stage before waits for
SENDS = frozenset((SEND_F, SEND_B))
RECVS = frozenset((RECV_F, RECV_B))
KINDS = COMPUTE | TRANSFERS | SENDS | RECVS | {GATHER, RELEASE, REDUCE, TIED}
BARE = frozenset((GATHER, RELEASE, REDUCE))  # kinds that may have no microbatch

_PATTERN = re.compile(r"(\d+)([A-Z_]+?)(\d*)")


class Op(NamedTuple):
    """Operation of one rank for one stage and microbatch; `Op("F", 2, 0)` prints as `2F0`.

    Attributes:
        kind: kind of the operation: `F`, `B`, `I`, `W`, and so on.
        stage: index of the stage.
        microbatch: index of the microbatch, of the slice, or of the tie; -1: none.
    """

    kind: str
    stage: int
    microbatch: int = -1

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch if self.microbatch >= 0 else ''}"

    @classmethod
    def parse(cls, text: str) -> Op:
        match = _PATTERN.fullmatch(text.strip())
        if match is None or match[2] not in KINDS:
            raise ValueError(
                f"{text!r} is not an op: write the stage, the kind and the microbatch, as in 2F0; "
                f"the kinds are {', '.join(sorted(KINDS))}"
            )
        if not match[3] and match[2] not in BARE:
            raise ValueError(f"{text!r} names no microbatch: write {text.strip()}0 for microbatch 0")
        return cls(match[2], int(match[1]), int(match[3]) if match[3] else -1)


Orders = Sequence[Sequence[Op]]  # for each rank, its ops in the order it runs them
