"""Losses of one run of a program on a rank: what ``loss_fn`` and layers return, and the roots of the backward passes.

A loss is not divided here, because the engine divides once, by the weight of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..grid import Grid
from ..grid.loss_terms import NamedLosses, Term, combined, described_form, read_loss

_MIXED_FORMS = (
    "loss_fn returned a mean for one microbatch of the batch, which weighs 1, and a pair (sum, weight) for another: "
    "return the same form for every microbatch"
)
UNNAMED = (
    "layers of the model return terms (triax.WithLoss), but loss_fn returned a loss without a name, whose weight the "
    "other stages do not know: let loss_fn return a dict of terms, as {'main': loss}"
)

Forms = dict[tuple[bool, int], Any]  # (in training, stage) -> form of the losses, as NamedLosses.form; None: no names


@dataclass
class LossWeights:
    """Factors and weights of the losses of a batch, known before it runs.

    Attributes:
        scale: factor of the losses before the backward pass (fp16). Reported losses are not scaled.
        microbatches: microbatches of the whole batch.
        terms: weights of named losses over the whole batch; means have none.
    """

    scale: float = 1.0
    microbatches: int = 1
    terms: Mapping[str, float] = field(default_factory=dict)


class Result:
    """Result of a run. The ranks that hold the last stage have losses and outputs; on the others both are empty.

    Attributes:
        losses: microbatch -> (loss, weight). For named losses: (their share of the batch's loss, 1).
        named: microbatch -> its named losses, if ``loss_fn`` or layers of this rank returned such.
        outputs: microbatch -> the last layer's output, if asked for.
        pairs: True if ``loss_fn`` returned pairs (sum, weight), False if it returned means; None without a loss.
        reached: stage of this rank -> True if a backward pass gave its inputs a gradient, in any microbatch.
        contributing: stages of this rank, except the last one, whose layers returned losses with a gradient.
    """

    def __init__(self) -> None:
        self.losses: dict[int, tuple[Tensor, Tensor | float]] = {}
        self.named: dict[int, NamedLosses] = {}
        self.outputs: dict[int, Any] = {}
        self.pairs: bool | None = None
        self.reached: dict[int, bool] = {}
        self.contributing: set[int] = set()

    def require_one_form(self, weight: float, microbatches: int) -> None:
        """Check that no other replica returned pairs where this rank returned means.

        Args:
            weight: weight of the whole batch.
            microbatches: microbatches of the whole batch. If all losses are means, it is the weight of the batch.

        Raises:
            ValueError: on a rank that returned means.
        """
        if self.pairs is False and weight != microbatches:
            raise ValueError(_MIXED_FORMS)

    def sums(self) -> tuple[Tensor | float, Tensor | float]:
        """Return (sum of losses, sum of weights) of all microbatches, in float64; tensors if they are on a GPU."""
        loss: Tensor | float = 0.0
        weight: Tensor | float = 0.0
        for value, count in self.losses.values():  # on a CPU as numbers, on a GPU without a wait
            loss = loss + (float(value) if value.device.type == "cpu" else value.double())
            if isinstance(count, Tensor) and count.device.type != "cpu":
                weight = weight + torch.where(count >= 0, count.double(), torch.nan)  # no negative weights
            else:
                weight = weight + float(count)
        return loss, weight


class RunLosses:
    """Reader of the losses of one run on this rank.

    Args:
        grid: the grid.
        weights: factors and weights of the batch.
        forms: forms of the losses of earlier batches, which each microbatch must have.
        training: the run has backward passes.
        slices: number of slices of each microbatch.
        last_stage: index of the last stage.
        holds_last_stage: this rank has it.
        is_frozen: returns True if a parameter of a stage requires no gradient; then a loss of its layers may have none.

    Attributes:
        result: the run's result, to which the losses are added.
    """

    def __init__(
        self,
        grid: Grid,
        weights: LossWeights,
        forms: Forms,
        training: bool,
        slices: int,
        last_stage: int,
        holds_last_stage: bool,
        is_frozen: Callable[[int], bool],
    ) -> None:
        self._grid, self._weights, self._forms, self._training, self._slices = grid, weights, forms, training, slices
        self._last_stage, self._holds_last_stage, self._is_frozen = last_stage, holds_last_stage, is_frozen
        self.result = Result()

    def add(self, value: Any, layers: Sequence[NamedLosses], index: int) -> list[Tensor]:
        """Add one microbatch's loss to the result and return the roots of its backward pass.

        Args:
            value: what ``loss_fn`` returned.
            layers: losses that layers of the last stage returned.
            index: the microbatch.
        """
        loss = read_loss(value, "loss_fn returned", "return")
        if isinstance(loss, NamedLosses):
            return self._add_named(layers, [loss], self._last_stage, index)
        if layers or index in self.result.named:
            raise ValueError(UNNAMED)
        self._require_form(None, self._last_stage)
        if loss.is_mean:
            self._refuse_mean("", "loss_fn")
        if self.result.pairs not in (None, not loss.is_mean):
            raise ValueError(_MIXED_FORMS)
        self.result.pairs = not loss.is_mean
        if self._training and not loss.total.requires_grad and float(loss.weight):
            raise ValueError(
                "the loss depends on no parameter that requires a gradient: remove a detach() or no_grad() before the "
                "loss, or train at least one parameter"
            )
        self.result.losses[index] = loss.total.detach(), loss.weight
        return [self._scaled(loss.total)]

    def add_layers(self, layers: Sequence[NamedLosses], stage: int, index: int) -> list[Tensor]:
        """Add the losses that layers of a stage returned for one microbatch; return the roots of its backward pass."""
        return self._add_named(layers, [], stage, index)

    def finish(self) -> None:
        """Add the values of named losses, and join the slices of each microbatch, when the run has ended.

        Values are known then. A rank whose stages have losses of layers alone has terms, and no weight of a batch.
        """
        weight = 1.0 / (self._grid.context.size * self._slices) if self._holds_last_stage else 0.0
        for index, named in self.result.named.items():
            loss = torch.zeros((), device=self._grid.device, dtype=torch.float64)
            if self._training:
                for name, term in named.terms.items():
                    loss = loss + term.total.double() * self._share(name, term, "loss_fn", "weight(labels)")
            self.result.losses[index] = loss, weight
        if self._slices == 1:
            return
        joined: dict[int, tuple[Tensor, Tensor | float]] = {}
        for index, (loss, weight_of_slice) in self.result.losses.items():
            total, count = joined.get(index // self._slices, (0.0, 0.0))
            joined[index // self._slices] = loss + total, weight_of_slice + count
        self.result.losses = joined

    def _add_named(
        self, layers: Sequence[NamedLosses], by_loss_fn: Sequence[NamedLosses], stage: int, index: int
    ) -> list[Tensor]:
        """Add the named losses of layers of one stage, and of ``loss_fn`` after the last one."""
        if not layers and not by_loss_fn:
            self._require_form(None, stage)
            return []
        named = reduce(combined, [*layers, *by_loss_fn])
        self._require_form(named.form(), stage)
        before = self.result.named.get(index)
        strict = not (layers and self._is_frozen(stage))
        roots = [self._root(losses, "the layer", "loss_weight(...)", strict) for losses in layers]
        strict = strict or not any(root.requires_grad for root in roots)
        roots += [self._root(losses, "loss_fn", "weight(labels)", strict) for losses in by_loss_fn]
        root = sum(roots[1:], roots[0])
        if not by_loss_fn and root.requires_grad:
            self.result.contributing.add(stage)
        # Another stage of this rank may have had losses before.
        self.result.named[index] = named.detached() if before is None else combined(before, named.detached())
        return [self._scaled(root)]

    def _scaled(self, root: Tensor) -> Tensor:
        return root if self._weights.scale == 1.0 else root.float() * self._weights.scale

    def _root(self, named: NamedLosses, whose: str, method: str, strict: bool) -> Tensor:
        """Return the root of the backward pass of named losses: the sum of the terms, times the number of microbatches.

        A batch of N microbatches has the weight N. So that the sum of all roots, divided by N, is the sum of the terms,
        a term of the weight W over the batch enters a root as ``factor * sum * N / W``. The W of a mean is N. With a
        context axis each rank has its part of the sum.

        Args:
            named: losses of one microbatch.
            whose, method: for error messages: what returned the losses, and its method that returns their weights.
            strict: refuse losses without a gradient.
        """
        root: Tensor | None = None
        for name, term in named.terms.items():
            if term.is_mean:
                self._refuse_mean(f" of {name!r}", whose)
            if self._training and (share := self._share(name, term, whose, method)):
                part = term.total * share
                root = part if root is None else root + part
        if root is None:
            root = torch.zeros((), device=self._grid.device)
        elif strict and not root.requires_grad and any(float(term.weight) for term in named.terms.values()):
            raise ValueError(
                f"none of the terms {', '.join(named.terms)} depends on a parameter that requires a gradient: remove a "
                "detach() or no_grad() before the loss, or train at least one parameter"
            )
        return root

    def _share(self, name: str, term: Term, whose: str, method: str) -> float:
        """Return the factor with which a term's sum of one microbatch enters its root."""
        weight_of_batch = self._weights.microbatches if term.is_mean else self._weights.terms.get(name)
        if weight_of_batch is None:
            raise ValueError(
                f"{whose} returned the pair (sum, weight) for {name!r}, one of several terms. Its gradients are "
                "divided by its weight over the whole batch, which must be known before the first backward pass: "
                f"give {whose} a method {method} that returns {{{name!r}: weight}} for a microbatch, or return a "
                "mean, which has the weight 1 in each microbatch"
            )
        return term.factor * self._weights.microbatches / weight_of_batch if weight_of_batch else 0.0

    def _refuse_mean(self, term: str, whose: str) -> None:
        """Refuse a mean of a part of a sequence."""
        if self._slices > 1:
            raise ValueError(
                f"the schedule cuts each sequence into {self._slices} slices, and with a mean{term} all of them would "
                f"have the same weight, however many labels they have: let {whose} return a pair (sum of the losses, "
                "number of labels), as triax.NextTokenLoss does"
            )
        if (parts := self._grid.context.size) > 1:
            raise ValueError(
                f"the grid has context={parts}, so each rank computes the loss of its part of a sequence, and with "
                f"a mean{term} all parts would have the same weight, however many labels they have: let {whose} "
                "return a pair (sum of the losses, number of labels), as triax.NextTokenLoss does"
            )

    def _require_form(self, form: Any, stage: int) -> None:
        """Check that each microbatch has named losses of one form: the same names, means or pairs, and sizes.

        Args:
            form: the form of this microbatch's losses; None if its loss has no names.
            stage: the stage that computed the losses.
        """
        before = self._forms.setdefault((self._training, stage), form)
        if form != before:
            who = "loss_fn" if stage == self._last_stage else f"the layers of stage {stage}"
            raise ValueError(
                f"{who} returned {described_form(form)}, and before {described_form(before)}: return the same "
                "names in the same form for every microbatch, a term that does not occur with the weight 0"
            )
