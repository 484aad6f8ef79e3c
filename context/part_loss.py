"""Loss of this rank's part of the sequences, as its share of the mean over whole sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..base.errors import AgreedError
from ..grid.comm.axis import Axis
from ..grid.loss_pair import sum_and_weight
from ..grid.loss_terms import NamedLosses, Term, named_losses

_NO_LABEL = "no label of this microbatch counts: give microbatches with at least one label"


def share_of_terms(loss: Any, axis: Axis, call: str) -> tuple[Tensor, NamedLosses]:
    """Return this rank's share of the mean of named losses, and the shares of each term, as means. Collective.

    The share of a term of weight 0, which does not occur in this microbatch, is 0.

    Args:
        loss: a ``triax.Loss``, or a dict of terms, of this rank's tokens.
        axis, call: as for ``share_of_mean``.

    Raises:
        AgreedError, ValueError: as ``share_of_mean`` and ``named_losses``.
    """
    named = named_losses(loss, f"{call} was given", "pass")
    terms, counts = dict[str, Term](), list[float]()
    for name, term in named.terms.items():
        share, count = _share_and_count(term.total if term.is_mean else (term.total, term.weight), axis, call)
        terms[name] = Term(share, 1.0 / axis.size, term.factor, True)
        counts.append(count)
    if not (min(counts) >= 0 and max(counts) > 0):
        raise AgreedError(_NO_LABEL)
    total = sum(term.total * term.factor for term in terms.values())
    assert isinstance(total, Tensor)
    return total, named._replace(terms=terms).detached()


def share_of_mean(loss: Tensor | tuple[Tensor, Tensor | float], axis: Axis, call: str) -> Tensor:
    """Return this rank's share of the mean loss; the shares of all ranks of the context axis add up to it. Collective.

    Args:
        loss: pair (sum of the losses, number of labels) of this rank's tokens. On an axis of size 1 it may be the mean.
        axis: the context axis.
        call: the call that the user made, for the error message.

    Raises:
        AgreedError: the loss is the mean over a part, or no label counts.
        ValueError: a tuple or list is not such a pair.
    """
    share, count = _share_and_count(loss, axis, call)
    if not count > 0:
        raise AgreedError(_NO_LABEL)
    return share


def _share_and_count(loss: Tensor | tuple[Tensor, Tensor | float], axis: Axis, call: str) -> tuple[Tensor, float]:
    """Return this rank's share of the mean loss, and the number of labels of the whole sequences, 1 for a mean."""
    if isinstance(loss, (tuple, list)):
        total, count = sum_and_weight(loss, f"{call} was given", "pass")
        counts = torch.as_tensor(float(count), dtype=torch.float64, device=total.device).view(1)
        axis.all_reduce(counts)
        number = float(counts)  # on a device, the one wait
        # Times 0, the sum keeps its graph: other replicas may communicate in its backward pass.
        return total / counts[0].to(total.dtype) if number else total * 0.0, number
    if axis.size > 1:
        raise AgreedError(
            f"the grid has context={axis.size}, so each rank has the loss of its part of the sequences, and {call} "
            "would give all parts the same weight: call engine.backward((sum of the losses, number of labels))"
        )
    return loss, 1.0
