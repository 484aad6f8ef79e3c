"""Fit of a machine's figures to measured runs, with leave-one-out errors.

Four figures are fitted: the shares of the peak that products and fused attention reach, of the memory bandwidth that
elementwise kernels reach, and of the links' bandwidth that collectives reach. The fit is that of the largest posterior:
the squares of the errors of the runs' times over ``NOISE``, and of the figures' distances from those of the description
over ``SPREADS``, all in logarithms. So one run moves the figures that it depends on, and leaves the others. It is found
by the method of Levenberg and Marquardt (Marquardt 1963).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...models.config import TransformerConfig
from .cost import CostModel
from .layer_shapes import layers_of
from .machine import Machine
from .parallel_layout import ParallelLayout
from .work import Work

# Standard deviations of the logarithms of the figures around those of a description.
SPREADS = {"product_efficiency": 0.25, "bandwidth_efficiency": 0.4, "attention_efficiency": 0.3, "links": 0.5}
_FEW = 8  # runs of which each fit without one of them is solved to the end
NOISE = 0.03  # of the logarithm of a run's time: of the run and of the model together

Array = Any  # of numpy


@dataclass(frozen=True)
class MeasuredRun:
    """A run whose step was timed.

    Attributes:
        name: for messages.
        config: the model.
        layouts: the run's layout; several if the source leaves some of it out, of which the fastest is meant.
        batch, sequence, precision, products: as for ``Work``.
        seconds: of a step.
        memory: bytes of tensors on the fullest rank, or None.
        switches: fields of ``Machine`` that say what the run's software did.
    """

    name: str
    config: TransformerConfig
    layouts: tuple[ParallelLayout, ...]
    batch: int
    sequence: int
    seconds: float
    precision: str = "bf16"
    products: str | None = None
    memory: float | None = None
    switches: Mapping[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> float:
        """Number of the model's parameters."""
        return float(sum(layer.parameters for layer in layers_of(self.config)))

    def model(self, machine: Machine) -> CostModel:
        """Return the cost model of the run on a machine, with the run's switches."""
        on = replace(machine, **self.switches)
        return CostModel(Work(self.config, on, self.batch, self.sequence, self.precision, self.products))

    def predicted(self, machine: Machine) -> float:
        """Return the predicted seconds of a step."""
        model = self.model(machine)
        return min(model.step(layout).seconds for layout in self.layouts)

    def likely(self, machine: Machine, most: int = 3) -> MeasuredRun:
        """Return the run with the fastest of its layouts on a machine, so that a fit is fast."""
        if len(self.layouts) <= most:
            return self
        model = self.model(machine)
        return replace(self, layouts=tuple(sorted(self.layouts, key=lambda each: model.step(each).seconds)[:most]))

    def predicted_memory(self, machine: Machine) -> float:
        """Return the predicted bytes of tensors on the fullest rank, without the margin."""
        memory, layout = self.model(machine).memory, self.layouts[0]
        return max(each.total - each.margin for each in memory.ranks(layout, self.batch, self.sequence))


def figures(machine: Machine) -> dict[str, float]:
    """Return the figures of ``SPREADS``; of the links that of the innermost level."""
    return {name: machine.links[0].efficiency if name == "links" else getattr(machine, name) for name in SPREADS}


def with_figures(machine: Machine, values: Mapping[str, float]) -> Machine:
    """Return a machine with other figures; the levels of the links keep their ratios."""
    factor = values["links"] / machine.links[0].efficiency
    links = tuple(replace(link, efficiency=min(1.0, link.efficiency * factor)) for link in machine.links)
    others: dict[str, Any] = {name: value for name, value in values.items() if name != "links"}
    return replace(machine, links=links, **others)


def fit(machine: Machine, runs: Sequence[MeasuredRun]) -> Machine:
    """Return the machine with the figures that fit the runs best.

    Raises:
        ValueError: there is no run, or the machine has measured tables, which the figures would not change.
    """
    problem = _FigureFit(machine, runs)
    return problem.machine_of(problem.solve(problem.start))


def leave_one_out(machine: Machine, runs: Sequence[MeasuredRun]) -> list[float]:
    """Return for each run the error of its predicted time, predicted / measured - 1, after a fit to the others.

    Each fit starts where a step of Gauss and Newton leads from the fit to all runs, and ends there if there are many.
    """
    import numpy as np

    problem = _FigureFit(machine, runs)
    x = problem.solve(problem.start)
    jacobian, rest = derivatives(problem.residuals, x), problem.residuals(x)
    square, gradient = jacobian.T @ jacobian, jacobian.T @ rest
    found = []
    for number, run in enumerate(runs):
        row = jacobian[number]
        moved = x - np.linalg.solve(square - np.outer(row, row), gradient - row * rest[number])
        others = [*runs[:number], *runs[number + 1 :]]
        if others and len(runs) <= _FEW:
            moved = _FigureFit(machine, others).solve(moved)
        found.append(run.predicted(problem.machine_of(moved)) / run.seconds - 1)
    return found


class _FigureFit:
    """The squares whose sum a fit makes least: of the runs' errors, and of the figures' distances from the start."""

    def __init__(self, machine: Machine, runs: Sequence[MeasuredRun]) -> None:
        import numpy as np

        if machine.measured is not None:
            raise ValueError(
                f"the machine {machine.name} has the times of triax machine measure, which a fit would not change. "
                "Give a machine without them, such as b200."
            )
        if not runs:
            raise ValueError("there is no run to fit. Give at least one row.")
        self.machine, self.runs = machine, [run.likely(machine) for run in runs]
        self.start = np.log(list(figures(machine).values()))

    def machine_of(self, x: Array) -> Machine:
        """Return the machine with figures that are given by their logarithms."""
        values = {name: min(1.0, math.exp(value)) for name, value in zip(SPREADS, x, strict=True)}
        return with_figures(self.machine, values)

    def residuals(self, x: Array) -> Array:
        """Return the numbers whose squares count: one for each run, and one for each figure."""
        import numpy as np

        on = self.machine_of(x)
        errors = [math.log(run.predicted(on) / run.seconds) / NOISE for run in self.runs]
        return np.array([*errors, *((x - self.start) / list(SPREADS.values()))])

    def solve(self, start: Array) -> Array:
        """Return the logarithms of the figures that fit best."""
        return least_squares(self.residuals, start)


def fitted(machine: Machine, runs: Sequence[MeasuredRun], source: str) -> tuple[Machine, list[float]]:
    """Return the fitted machine with its provenance, and the leave-one-out errors.

    Args:
        machine: the description to start from.
        runs: the runs.
        source: where the runs are from, such as a file's name.
    """
    errors = leave_one_out(machine, runs)
    found = fit(machine, runs)
    values = figures(found)
    rounded = with_figures(found, {name: float(f"{value:.4g}") for name, value in values.items()})
    said = f"fitted to {len(runs)} run{'s' * (len(runs) > 1)} of {source}, from {machine.name}"
    sources = {**machine.sources, **dict.fromkeys(SPREADS, said)}
    sources["links"] = f"{said} (efficiency); {machine.sources.get('links', 'assumed')}"
    error = math.sqrt(sum(math.log1p(each) ** 2 for each in errors) / len(errors)) if len(runs) > 1 else 0.0
    models = tuple(sorted({run.parameters for run in runs}))
    return replace(rounded, sources=sources, fitted_models=models, fitted_error=float(f"{error:.3g}")), errors


def least_squares(residuals: Callable[[Array], Array], start: Array, most: int = 60) -> Array:
    """Return the argument with the least sum of squares, by Levenberg and Marquardt's method.

    >>> import numpy as np
    >>> least_squares(lambda x: np.array([x[0] - 3.0, 10 * (x[1] - x[0] ** 2)]), np.array([1.0, 1.0])).round(4).tolist()
    [3.0, 9.0]
    """
    import numpy as np

    x, damping = np.array(start, dtype=float), 1e-3
    now = residuals(x)
    for _ in range(most):
        jacobian = derivatives(residuals, x)
        square, gradient = jacobian.T @ jacobian, jacobian.T @ now
        before = float(now @ now)
        while True:
            moved = x - np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-12), gradient)
            after = residuals(moved)
            if float(after @ after) < before:
                break
            damping *= 4
            if damping > 1e4:
                return x
        x, now, damping = moved, after, damping / 5
        if before - float(now @ now) < 1e-7 * before:
            break
    return x


def derivatives(residuals: Callable[[Array], Array], x: Array, step: float = 1e-4) -> Array:
    """Return the Jacobian matrix, by central differences: a row for each residual."""
    import numpy as np

    shifts = step * np.eye(len(x))
    return np.stack([(residuals(x + shift) - residuals(x - shift)) / (2 * step) for shift in shifts], axis=1)
