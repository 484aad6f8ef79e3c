"""Named losses and metrics of an engine's batches: the terms' weights before a batch, and the values after it.

A pipeline's first backward passes run before its last forward passes, and a term's gradients are divided by its weight
over the whole batch. Therefore ``loss_fn.weight(labels)`` gives the weights before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..agreement.agreement import totals
from ..base.errors import AgreedError
from ..grid import Grid
from ..grid.loss_terms import LossSums, NamedLosses, described_form
from ..pipe.executor import Executor, Microbatch
from ..pipe.module import PipelineModule

Totals = Callable[[Grid, Sequence[Tensor | float]], list[float]]


class NamedLossSteps:
    """Named losses of the batches of one engine.

    Args:
        computes: True on ranks that compute losses: those with the last stage.

    Attributes:
        values: value of each term and metric in the last batch, by name; equal on every rank. {} without names.
    """

    def __init__(self, computes: bool) -> None:
        self._computes = computes
        self._forms: dict[bool, Any] = {}  # in training and in evaluation, equal on all ranks, after the first batch
        self._told: dict[str, float] = {}  # weights of this rank's microbatches, by loss_fn.weight
        self.values: dict[str, float | list[float]] = {}

    def weigh(self, grid: Grid, module: PipelineModule, executor: Executor, microbatches: Sequence[Microbatch]) -> None:
        """Find the weights of the terms before a training step. Collective over the ranks with the last stage.

        Raises:
            ValueError: ``loss_fn.weight`` gives other names on another rank.
        """
        executor.count, executor.term_weights, self._told = len(microbatches) * grid.data.size, {}, {}
        weigh, form = getattr(module.loss_fn, "weight", None), self._forms.get(True, "unknown")
        pairs = form == "unknown" or (form is not None and not all(is_mean for _, is_mean in form[0]))
        if not (self._computes and callable(weigh) and pairs):
            return
        sums: dict[str, Any] = {}
        for microbatch in microbatches:
            weights = weigh(microbatch.labels)
            if not isinstance(weights, Mapping):
                return
            for name, weight in weights.items():
                sums[name] = sums.get(name, 0.0) + weight
        self._told = {name: float(weight) for name, weight in sums.items()}  # on a GPU the host waits here
        axis = grid.axis("data_context")
        with axis.traffic.uncounted():
            found = axis.all_gather_json(self._told)
        if any(each.keys() != self._told.keys() for each in found):
            names = " and ".join(sorted({", ".join(sorted(each)) for each in found}))
            raise ValueError(f"loss_fn.weight gave the weights of {names} on different ranks: give the same names")
        executor.term_weights = {name: sum(each[name] for each in found) for name in self._told}

    def totals(
        self,
        grid: Grid,
        named: Sequence[NamedLosses],
        values: Sequence[Tensor | float],
        total: Totals,
        training: bool,
    ) -> tuple[list[float], float | None]:
        """Sum numbers and named losses over all ranks, in one all-reduce after the first batch. Collective.

        Args:
            grid: the grid whose ranks have run the batch.
            named: the losses of this rank's microbatches; none if they have no names, or if it computes none.
            values: further numbers of this rank.
            total: sums numbers over the ranks of a grid.
            training: the batch was one of a pipeline's step: its terms must have a weight, which was known before.

        Returns:
            The sums of ``values``, and the loss: the sum of the terms; None if the losses have no names.

        Raises:
            AgreedError: ranks return other terms; or, in training, all terms have the weight 0, or the weight of a pair
                differs from the one that ``loss_fn.weight`` returned.
            ValueError: the names or forms are not those of the first batch.
        """
        known = training in self._forms
        if not known:
            *sums, some = total(grid, [*values, float(bool(named))])
            self._forms[training] = self._agree(grid, named) if some else None
        form = self._forms[training]
        if known and named and named[0].form() != form:
            raise ValueError(
                f"the loss has {described_form(named[0].form())}, but in the first batch it was "
                f"{described_form(form)}: give the same names in the same form in every batch"
            )
        losses = None if form is None else LossSums(form)
        # Tensor ranks hold the same loss: the first one counts.
        mine = [] if losses is None else losses.numbers(named, self._told, float(grid.tensor.is_first))
        if known:
            both = total(grid, [*values, *mine])
            sums, found = both[: len(values)], both[len(values) :]
        else:
            found = totals(grid, mine) if mine else []
        if losses is None:
            self.values = {}
            return sums, None
        loss, self.values = losses.read(found, training)
        return sums, loss

    def _agree(self, grid: Grid, named: Sequence[NamedLosses]) -> Any:
        """Return the form of the losses, which all ranks that compute losses must have. Collective."""
        with grid.world.traffic.uncounted():
            everyone = grid.world.all_gather_json([self._computes, named[0].form() if named else None])
        found = [form for computes, form in everyone if computes]
        for form in found:
            if form != found[0]:
                raise AgreedError(
                    f"loss_fn returned {described_form(found[0])} on one replica, and {described_form(form)} on "
                    "another: return the same names in the same form on every rank"
                )
        return found[0]
