"""What is handed to the data axis: parameters, and what to do with them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..grid import Layout
from .compression import MakeExchange
from .offload import Offload
from .plus import Plus


class Managed(NamedTuple):
    """A parameter handed to the data axis, and what must be known of it."""

    parameter: nn.Parameter
    layout: Layout
    stages: tuple[int, ...]  # the stages of this rank that use it
    layers: tuple[int, ...]  # the layers of the list that use it
    tie: int | None  # the tie it belongs to, where other pipe ranks hold it too
    counted: bool  # whether this pipe rank counts it in the norm
    group: int | None  # its parameter group in the optimizer; None: it is not trained


class Key(NamedTuple):
    """What the parameters of one bucket have in common."""

    stages: tuple[int, ...]
    layers: tuple[int, ...]  # empty below stage 3, where a layer's weights need not stand alone
    tie: int | None
    counted: bool
    group: int | None
    dtype: torch.dtype
    persistent: bool  # whole in stage 3 too
    narrow: bool  # summed in the mode's dtype of communication
    sole: int | None  # the number of a parameter that has a bucket of its own


@dataclass(frozen=True)
class Mode:
    """What ZeRO does, and in which dtypes.

    Attributes:
        stage: of ZeRO.
        weights: dtype of the parameters; None leaves each its own.
        accumulate: dtype of gradients summed over microbatches, of masters and of the optimizer's state; None
            is the parameters' own.
        communicate: dtype in which gradients are summed over the data axis; None is that of accumulation.
        narrow: the parameters of which ``communicate`` is said; None: all.
        prescale: what gradients are multiplied by before they are summed over the data axis; nothing undoes it here.
        each: in stages 2 and 3, reduce after every backward; else gradients stay whole until a step's last one.
        scatter: reduce-scatter gradients; else all-reduce them and keep the owned range.
        gather: all-gather new weights; else every rank broadcasts its range.
        overlap: let collectives run while something is computed; else wait for each where it starts.
        unused: a step in which a parameter gets no gradient is none the worse; else it is an error.
        together: elements of new weights on their way at once, after a step; None: all of them.
        persistence: in stage 3, parameters of at most so many elements stay whole (0: none does).
        prefetch: in stage 3, elements of the layers to run next that are gathered ahead; None: the next layer.
        live: in stage 3, elements that may be whole at once; what runs now is, and nothing is kept or gathered
            ahead beyond. None: no limit.
        offload: what is kept in the host's memory or on disk.
        reuse: in stage 3, keep a layer whole that runs again before so many elements of other layers have run.
        exchange: makes what brings gradients together in place of their sum, in stages 0 and 1; None: the sum.
        plus: what of ZeRO++ saves bytes; None: nothing.
    """

    stage: int = 0
    weights: torch.dtype | None = None
    accumulate: torch.dtype | None = None
    communicate: torch.dtype | None = None
    narrow: Collection[Tensor] | None = None
    prescale: float = 1.0
    each: bool = True
    scatter: bool = True
    gather: bool = True
    overlap: bool = True
    unused: bool = True
    together: int | None = None
    persistence: int = 0
    prefetch: int | None = None
    live: int | None = None
    reuse: int = 0
    offload: Offload = field(default_factory=Offload)
    exchange: MakeExchange | None = None
    plus: Plus | None = None

    def sharding(self, replicas: int) -> int:
        """The stage that acts: a single replica has nothing to shard, but for what is kept elsewhere."""
        return self.stage if replicas > 1 or self.offload.portions else 0
