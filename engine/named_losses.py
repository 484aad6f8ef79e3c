"""Named losses and metrics of an engine's batches: the terms' weights before a batch, and the values after it.

A term's gradients are divided by its weight over the whole batch, and a pipeline's first backward passes run before its
last forward passes. So the weights must be known before the batch runs: ``loss_fn.weight(labels)`` gives them, and
``loss_weight`` of layers that return losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..base.errors import AgreedError
from ..grid import Grid
from ..grid.agreement.agreement import totals
from ..grid.loss_terms import LossSums, NamedLosses, described_form, require_other_names
from ..pipe.losses import UNNAMED, LossWeights
from ..pipe.microbatch import Microbatch
from ..pipe.module import PipelineModule
from .optimizer_step import StepSums

Totals = Callable[[Grid, Sequence[Tensor | float]], list[float]]


class NamedLossSteps:
    """Named losses of the batches of one engine.

    Args:
        computes: True on ranks that call ``loss_fn``: those with the last stage.

    Attributes:
        values: value of each term and metric in the last batch, by name; equal on every rank. {} without names.
    """

    def __init__(self, computes: bool) -> None:
        self._computes = computes
        self._forms: dict[bool, Any] = {}  # in training and in evaluation, equal on all ranks, after the first batch
        self._own: dict[bool, Any] = {}  # form of the losses that this rank computes, likewise
        self._told: dict[str, float] = {}  # weights of this rank's microbatches, by loss_fn.weight and loss_weight
        self.values: dict[str, float | list[float]] = {}

    def weigh(
        self,
        grid: Grid,
        module: PipelineModule,
        weights: LossWeights,
        microbatches: Sequence[Microbatch],
        share: Callable[[Sequence[float]], list[float]],
    ) -> None:
        """Find the weights of the terms before a training step. Collective over the ranks with the same stages.

        Args:
            grid: the grid whose ranks take the step.
            module: the model.
            weights: weights of the batch, which are set.
            microbatches: the microbatches of this rank.
            share: sums numbers over replicas outside of the grid.

        Raises:
            ValueError: ``loss_fn.weight`` or ``loss_weight`` gives other names on another rank, or a name twice.
        """
        weights.microbatches, weights.terms, self._told = len(microbatches) * grid.data.size, {}, {}
        form, sums = self._forms.get(True, "unknown"), dict[str, Any]()
        if form is None:  # (means are asked too: a replica that joins does not know the form yet)
            return
        layers = module.weighing_layers()
        for microbatch in microbatches:
            for name, weight in self._weights(module.loss_fn, layers, microbatch):
                sums[name] = sums.get(name, 0.0) + weight
        if not sums:
            return
        self._told = {name: float(weight) for name, weight in sums.items()}  # on a GPU the host waits here
        axis = grid.axis("data_context")
        with axis.traffic.uncounted():
            told = axis.all_gather_json(self._told)
        if any(counts.keys() != self._told.keys() for counts in told):
            names = " and ".join(sorted({", ".join(sorted(counts)) for counts in told}))
            raise ValueError(
                f"loss_fn.weight, or loss_weight of a layer, gave the weights of {names} on different ranks: give the "
                "same names"
            )
        count, *shared = share([weights.microbatches, *(sum(counts[name] for counts in told) for name in self._told)])
        weights.microbatches = int(count)
        weights.terms = dict(zip(self._told, shared, strict=True))

    def _weights(
        self, loss_fn: Any, layers: Sequence[tuple[Callable[..., Any], Sequence[str]]], microbatch: Microbatch
    ) -> list[tuple[str, Any]]:
        """Return (name, weight) of the terms of a microbatch that this rank computes.

        ``layers`` are the methods ``loss_weight`` of layers, and the fields that each gets.
        """
        weigh, weights_of = getattr(loss_fn, "weight", None), list[tuple[str, Any]]()
        for method, takes in layers:
            weights_of += method(**{name: microbatch.fields[name] for name in takes}).items()
        weights = weigh(microbatch.labels) if self._computes and callable(weigh) else None
        weights_of += weights.items() if isinstance(weights, Mapping) else []
        require_other_names([[weights_of, []]])
        return weights_of

    def totals(
        self,
        grid: Grid,
        named: Sequence[NamedLosses],
        own: StepSums,
        total: Totals,
        training: bool,
    ) -> tuple[StepSums, float | None]:
        """Sum numbers and named losses over all ranks, in one all-reduce. Collective.

        Args:
            grid: the grid whose ranks have run the batch.
            named: the losses of this rank's microbatches; none if they have no names, or if it computes none.
            own: further numbers of this rank.
            total: sums numbers over the ranks of a grid.
            training: the batch was one of a pipeline's step: its terms must have a weight, which was known before.

        Returns:
            The sums of ``own``, and the loss: the sum of the terms; None if the losses have no names.

        Raises:
            AgreedError: ranks return other terms; or, in training, all terms have the weight 0, or the weight of a pair
                differs from the one that ``loss_fn.weight`` returned.
            ValueError: the names or forms differ from the first batch's.
        """
        if training not in self._forms:
            (some,) = totals(grid, [float(bool(named))])
            self._forms[training] = self._agree(grid, named) if some else None
            self._own[training] = named[0].form() if named else None
        form = self._forms[training]
        if named and named[0].form() != self._own[training]:
            raise ValueError(
                f"the loss has {described_form(named[0].form())}, but in the first batch it was "
                f"{described_form(self._own[training])}: give the same names in the same form in every batch"
            )
        losses = None if form is None else LossSums(form)
        # Tensor ranks hold the same loss: the first one counts.
        terms = [] if losses is None else losses.numbers(named, self._told, float(grid.tensor.is_first))
        numbers = own.numbers()
        both = total(grid, [*numbers, *terms])
        sums, sums_of_losses = own.summed(both[: len(numbers)]), both[len(numbers) :]
        if losses is None:
            self.values = {}
            return sums, None
        loss, self.values = losses.divide(sums_of_losses, training)
        return sums, loss

    def _agree(self, grid: Grid, named: Sequence[NamedLosses]) -> Any:
        """Return the form of all losses, which all ranks with the same stages must have in common. Collective."""
        with grid.world.traffic.uncounted():
            own_form = [grid.pipe.rank, self._computes, named[0].form() if named else None]
            everyone = grid.world.all_gather_json(own_form)
        of_rank: dict[int, Any] = {}
        for rank, computes, form in everyone:
            if form != of_rank.setdefault(rank, form):
                raise AgreedError(
                    f"the losses are {described_form(of_rank[rank])} on one replica, and {described_form(form)} on "
                    "another: return the same names in the same form on every rank"
                )
            if computes and form is None:
                raise AgreedError(UNNAMED)
        forms = [form for _, form in sorted(of_rank.items()) if form is not None]
        try:
            require_other_names(forms)
        except ValueError as error:
            raise AgreedError(str(error)) from None
        return [[name for form in forms for name in form[part]] for part in range(2)]
