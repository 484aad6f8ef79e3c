"""Named losses of a microbatch: terms that add up to the loss, and metrics that are reported beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.errors import AgreedError
from .loss_pair import is_pair, sum_and_weight

_FORMS = "a dict or triax.Loss of terms, each a mean (a 0-dim tensor) or a pair (sum of the losses, weight)"


@dataclass(frozen=True)
class Loss:
    """Several named losses of one microbatch, and metrics, which a ``loss_fn`` may return.

    The loss of a batch is the sum over the terms of ``factor * sum / weight``. The sums and the weights of a term go
    over all microbatches, replicas and parts of sequences, so that each term is divided once, by its own weight of the
    whole batch: the loss and its gradients are those of one process with the whole batch.

    A dict is a ``Loss`` whose values are the terms.

    >>> def loss_fn(outputs, labels):
    ...     terms = {"error": (outputs - labels).square().mean(), "size": outputs.square().mean()}
    ...     return triax.Loss(terms, factors={"size": 0.1})
    >>> model = triax.PipelineModule([nn.Identity()], loss_fn=loss_fn)
    >>> engine = triax.Engine(model, batch=1)
    >>> engine.eval_batch(iter([(torch.full((1, 4), 2.0), torch.ones(1, 4))])).item(), engine.metrics
    (1.4, {'error': 1.0, 'size': 4.0})

    Attributes:
        terms: name -> a mean, () (each microbatch then has the weight 1), or a pair (sum, weight) of 0-dim tensors.
        factors: name -> factor of the term, a number; 1 for those that are left out.
        metrics: name -> a number that is only reported: a mean, or a pair (sum, weight). The sum may be a tensor (K,),
            such as a histogram; it is then reported as K numbers.
    """

    terms: Mapping[str, Any]
    factors: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)


class WithLoss(NamedTuple):
    """Output of a layer of a ``PipelineModule`` together with losses of this layer, which the layer may return.

    The next layer gets ``value``. The terms of ``loss`` are added to those that ``loss_fn`` returns, which must then
    be named too, and are divided in the same way: each once, by its own weight of the whole batch. The weights of pairs
    are known before the first backward pass by a method ``loss_weight`` of the layer: it gets the fields that the layer
    takes, as keyword arguments, and returns name -> weight.

    Attributes:
        value: the layer's output.
        loss: a ``Loss`` or a dict of terms. No other layer, nor ``loss_fn``, may have a term or metric of these names.
    """

    value: Any
    loss: Any


class Term(NamedTuple):
    """A term of one microbatch.

    Attributes:
        total: sum of the losses, ().
        weight: their weight: 1 for a mean.
        factor: the term's factor in the loss.
        is_mean: True for a mean.
    """

    total: Tensor
    weight: Tensor | float
    factor: float
    is_mean: bool


class Metric(NamedTuple):
    """A metric of one microbatch: its sum, () or (K,), without a gradient, and its weight."""

    total: Tensor
    weight: Tensor | float


class NamedLosses(NamedTuple):
    """The terms and the metrics of one microbatch, checked."""

    terms: dict[str, Term]
    metrics: dict[str, Metric]

    def detached(self) -> NamedLosses:
        """Return the same without the graph."""
        return self._replace(terms={n: t._replace(total=t.total.detach()) for n, t in self.terms.items()})

    def form(self) -> list[Any]:
        """Return what all microbatches must have in common, as JSON: names, means or pairs, and sizes."""
        sizes = [[name, metric.total.numel(), metric.total.dim()] for name, metric in self.metrics.items()]
        return [[[name, term.is_mean] for name, term in self.terms.items()], sizes]


def combined(first: NamedLosses, second: NamedLosses) -> NamedLosses:
    """Return the losses of two layers, or of a layer and ``loss_fn``, of one microbatch.

    Raises:
        ValueError: they have a name in common.
    """
    require_other_names([first.form(), second.form()])
    return NamedLosses({**first.terms, **second.terms}, {**first.metrics, **second.metrics})


def require_other_names(forms: Sequence[Any]) -> None:
    """Check that forms of losses have no name in common.

    Raises:
        ValueError: they have; the message names it.
    """
    names = [name for terms, metrics in forms for name, *_ in [*terms, *metrics]]
    if again := [name for name in names if names.count(name) > 1]:
        raise ValueError(
            f"two layers, or a layer and loss_fn, returned a term or metric of the name {again[0]!r}: give each its "
            f"own name, such as '{again[0]} 1' and '{again[0]} 2'"
        )


def described_form(form: Any) -> str:
    """Return what ``NamedLosses.form`` returned, or None of a loss without names, in words."""
    if form is None:
        return "a loss without names"
    terms = [f"{name} ({'a mean' if is_mean else 'a pair'})" for name, is_mean in form[0]]
    metrics = [f"{name} ({size if dims else 1} numbers)" for name, size, dims in form[1]]
    return f"the terms {', '.join(terms)}" + (f" and the metrics {', '.join(metrics)}" if metrics else "")


def is_named(value: Any) -> bool:
    """Return True if a loss function's value has named terms."""
    return isinstance(value, (Loss, Mapping, NamedLosses))


def read_loss(value: Any, given: str, give: str) -> Term | NamedLosses:
    """Return the value of a loss function in one form: a term without a name, of a mean or a pair, or named terms.

    Args:
        value: what a loss function returned.
        given, give: for error messages, as of ``named_losses``.

    Raises:
        ValueError: the value is no loss.
    """
    if is_named(value):
        return named_losses(value, given, give)
    total, weight = sum_and_weight(value, given, give)
    return Term(total, weight, 1.0, not is_pair(value))


def named_losses(value: Any, given: str, give: str) -> NamedLosses:
    """Check a ``Loss`` or a dict of terms.

    Args:
        value: a value for which ``is_named`` returns True.
        given, give: for error messages: who gave the value, and what to do, as "loss_fn returned" and "return".

    Raises:
        ValueError: there is no term, or a name, a value, a weight or a factor is wrong.
    """
    if isinstance(value, NamedLosses):  # checked already
        return value
    loss = value if isinstance(value, Loss) else Loss(value)
    if not loss.terms:
        raise ValueError(f"the loss that {given} has no terms: {give} {_FORMS}")
    _check_names("term", loss.terms, given)
    _check_names("metric", loss.metrics, given)
    if both := sorted({*loss.terms} & {*loss.metrics}):
        raise ValueError(f"the loss that {given} has a term and a metric of the name {both[0]!r}: rename one of them")
    if unknown := [name for name in loss.factors if name not in loss.terms]:
        raise ValueError(
            f"the loss that {given} has a factor for {unknown[0]!r}, but its terms are {', '.join(loss.terms)}"
        )
    terms = {name: _term(name, term, loss.factors.get(name, 1.0), given, give) for name, term in loss.terms.items()}
    return NamedLosses(terms, {name: _metric(name, metric, given, give) for name, metric in loss.metrics.items()})


def _check_names(kind: str, values: Mapping[str, Any], given: str) -> None:
    for name in values:
        if not isinstance(name, str) or not name:
            raise ValueError(f"the loss that {given} has a {kind} with the name {name!r}: give each a text as its name")


def _term(name: str, value: Any, factor: Any, given: str, give: str) -> Term:
    total, weight = sum_and_weight(value, f"{given} for {name!r}", give)
    if isinstance(factor, Tensor) or not isinstance(factor, Real) or not math.isfinite(float(factor)):
        raise ValueError(
            f"the factor that {given} for {name!r} is {factor!r}: give a finite number; multiply the term itself by a "
            "factor that is trained"
        )
    return Term(total, weight, float(factor), not is_pair(value))


def _metric(name: str, value: Any, given: str, give: str) -> Metric:
    total, weight = value if is_pair(value) else (value, 1.0)
    if isinstance(total, Real):
        total = torch.tensor(float(total), dtype=torch.float64)
    if not isinstance(total, Tensor) or total.dim() > 1:
        shape = f"a tensor of shape {tuple(total.shape)}" if isinstance(total, Tensor) else f"a {type(total).__name__}"
        raise ValueError(
            f"the metric {name!r} that {given} is {shape}: {give} a mean, or a pair (sum, weight) whose sum has the "
            "shape () or (K,)"
        )
    total = total.detach()
    _, weight = sum_and_weight((total.sum(), weight), f"{given} for {name!r}", give)
    return Metric(total, weight)


class LossSums:
    """Sums of named losses over microbatches, which add up over ranks.

    Args:
        form: what ``NamedLosses.form`` returns for every microbatch.
    """

    def __init__(self, form: Sequence[Any]) -> None:
        self._terms: dict[str, bool] = dict(form[0])  # name -> is it a mean?
        self._metrics: list[tuple[str, int, int]] = [tuple(entry) for entry in form[1]]

    def numbers(
        self, microbatches: Sequence[NamedLosses], told: Mapping[str, float], counts: float
    ) -> list[Tensor | float]:
        """Return this rank's numbers, times ``counts``: those of all ranks are summed, and given to ``read``.

        A term or metric that this rank does not have, because other stages compute it, has the weight 0 here.

        Args:
            microbatches: the losses of this rank's microbatches; none on a rank without the last stage.
            told: weights of the terms that are pairs, as ``loss_fn.weight`` gave them.
            counts: 1, or 0 on a rank whose losses another rank counts.
        """
        if not microbatches:
            return [0.0] * (4 * len(self._terms) + sum(size + 1 for _, size, _ in self._metrics))
        sums: list[Tensor | float] = []
        for name in self._terms:
            terms = [losses.terms[name] for losses in microbatches if name in losses.terms]
            sums += [sum((counts * _number(term.total) for term in terms), 0.0)]
            sums += [sum((counts * term.factor * _number(term.total) for term in terms), 0.0)]
            sums += [sum((counts * _number(term.weight) for term in terms), 0.0)]
            sums += [counts * told.get(name, 0.0)]
        for name, size, _ in self._metrics:
            metrics = [losses.metrics[name] for losses in microbatches if name in losses.metrics]
            if not metrics:
                sums += [0.0] * (size + 1)
                continue
            row = counts * torch.stack([metric.total.reshape(size).double() for metric in metrics]).sum(0)
            sums += row.tolist() if row.device.type == "cpu" else row.unbind()
            sums += [sum((counts * _number(metric.weight) for metric in metrics), 0.0)]
        return sums

    def divide(self, sums: Sequence[float], training: bool) -> tuple[float, dict[str, float | list[float]]]:
        """Return the loss of the batch, and the value of each term and metric.

        A term or metric of weight 0 is NaN, and such a term adds nothing to the loss.

        Raises:
            AgreedError: in training, all terms have the weight 0, or the weight of a pair differs from the one that
                ``loss_fn.weight`` returned.
        """
        loss, weights, numbers = 0.0, dict[str, float](), iter(sums)
        values: dict[str, float | list[float]] = {}
        for name, is_mean in self._terms.items():
            total, scaled, weights[name], told = next(numbers), next(numbers), next(numbers), next(numbers)
            if training and not is_mean and abs(told - weights[name]) > 1e-6 * abs(weights[name]):
                raise AgreedError(
                    f"loss_fn.weight(labels), or loss_weight of a layer, gave the weight {told:g} of {name!r} for the "
                    "batch, but the pairs (sum, weight) that were then returned have the weight "
                    f"{weights[name]:g}: let both count the same"
                )
            loss += scaled / weights[name] if weights[name] else 0.0
            values[name] = total / weights[name] if weights[name] else math.nan
        if training and not any(weights.values()):
            raise AgreedError(
                f"the batch has no loss, because all its terms ({', '.join(weights)}) have the weight 0: give batches "
                "with at least one label that is not ignored"
            )
        for name, size, dims in self._metrics:
            row, weight = [next(numbers) for _ in range(size)], next(numbers)
            means = [summed / weight if weight else math.nan for summed in row]
            values[name] = means if dims else means[0]
        return loss, values


def _number(value: Tensor | float) -> Tensor | float:
    """Return a value in float64 without a gradient: a float, or a 0-dim tensor where the host would wait to read it."""
    if not isinstance(value, Tensor):
        return float(value)
    return float(value.detach()) if value.device.type == "cpu" else value.detach().double().reshape(())
