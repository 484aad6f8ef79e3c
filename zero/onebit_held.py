"""State of optimizers that compress, as a checkpoint has it: on any number of replicas.

Common state is as ever. What each replica has of its own is saved under the key and the replica's number, each whole.
On as many replicas each takes its own; on another number all take the mean: what errors will add to the mean of the
momenta is then the same. A server's errors lie end to end on the replicas, and are one whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from ..grid import Layout
from .onebit_step import OneBitStepper

# A name, its layout, elements start to stop of it (of this tensor rank's part), and where they are.
Piece = tuple[str, Layout, int, int, Tensor]
Has = Callable[[str, str], torch.dtype | None]


def states(
    stepper: OneBitStepper, tells: Callable[[Tensor], bool], share: Callable[[Tensor, Tensor], Iterable[Piece]]
) -> Iterator[tuple[str, Piece]]:
    """The state that is this rank's to write, with its keys.

    Args:
        stepper: whose.
        tells: whether, of those that hold the same parameter, this pipe and tensor rank writes it.
        share: this replica's part of what every replica holds of a parameter.
    """
    optimizer = stepper.optimizer
    for (parameter, master, *_), layout in zip(stepper._views, stepper.layouts, strict=True):
        for key, value in optimizer.state.get(master, {}).items():
            if not isinstance(value, Tensor) or value.dim() == 0 or key == "anchor":
                continue  # that is the parameter's own value, as it is saved
            if key in optimizer.OWN:
                if tells(parameter):
                    yield f"{key}.{stepper.rank}", (layout.name, layout, 0, value.numel(), value.reshape(-1))
            elif key == optimizer.SERVER:
                if tells(parameter):
                    yield key, (layout.name, layout, *stepper.served(master), value)
            else:
                yield from ((key, piece) for piece in share(parameter, value.reshape(-1)))


def rooms(stepper: OneBitStepper, has: Has, keys: Iterable[str]) -> Iterator[tuple[str, Piece]]:
    """Where loaded state goes, made where it was not there yet; whoever iterates fills each before the next.

    Args:
        stepper: whose.
        has: the dtype of a parameter's state under a key; None: it is not loaded.
        keys: that there are.
    """
    optimizer, known = stepper.optimizer, list(keys)
    for (_, master, *_), layout in zip(stepper._views, stepper.layouts, strict=True):
        state = optimizer.state[master]
        for key in known:
            if has(layout.name, key) is None or key.rpartition(".")[0] in optimizer.OWN:
                continue
            if key == optimizer.SERVER:
                start, stop = stepper.served(master)
                state[key] = master.new_zeros(stop - start)
                yield key, (layout.name, layout, start, stop, state[key])
            else:
                state[key] = torch.zeros_like(master)
                yield key, (layout.name, layout, 0, master.numel(), state[key].view(-1))
        for base in optimizer.OWN:
            saved = [key for key in known if key.rpartition(".")[0] == base and has(layout.name, key) is not None]
            mine = f"{base}.{stepper.rank}"
            wanted = [mine] if len(saved) == stepper.replicas and mine in saved else saved
            if wanted:
                total = torch.zeros_like(master)
                for key in wanted:
                    value = torch.zeros_like(master)
                    yield key, (layout.name, layout, 0, master.numel(), value.view(-1))
                    total += value / len(wanted) if len(wanted) > 1 else value
                state[base] = total
