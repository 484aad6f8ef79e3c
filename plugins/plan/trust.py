"""Interval of a predicted time, from the errors of runs of its class.

``benchmarks/plan_tables.py`` predicts every published run without its table, without all runs of its size, without it
alone, and from the data sheet, and sorts the errors by what was known of the machine:

- ``seen machine and size``: its figures are fitted to runs of a model with about as many parameters
- ``seen machine, other size``: fitted to runs of other models
- ``unseen machine``: nothing is fitted; the figures are a data sheet's, or another machine's
- ``measured machine``: times of ``triax machine measure``

The interval is time x exp(+-half). Of a seen or measured machine, ``half`` is the size of error that 90 % of the
class's runs keep, with one more run counted as outside (split conformal prediction, Lei et al. 2018). Of an unseen one
it is Student's t times the errors' root mean square, with as many degrees of freedom as there are machines, because all
runs of a machine share the error of its figures. A machine file of ``triax machine fit`` adds the leave-one-out errors
of its own runs to those of its class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...models.config import TransformerConfig
from .layer_shapes import layers_of
from .machine import Machine

LEVEL = 0.9
SAME_SIZE = 1.25  # ratio of the parameters of two models of one size
_OWN = 4  # models of a class, beside those of a machine file's own runs


# Half the widths of the intervals, in logarithms. Printed by benchmarks/plan_tables.py; "measured machine": from the 30
# layouts of docs/plan.md.
HALF = {
    "seen machine and size": 0.065,
    "seen machine, other size": 0.066,
    "unseen machine": 0.462,
    "measured machine": 0.198,
}


class Trust(NamedTuple):
    """Interval around a predicted time, and the class of runs from whose errors it is made.

    Attributes:
        known: the class, a key of ``HALF``.
        low, high: factors of a predicted time between which 90 % of the runs lie.
        reason: why the class is what it is.
    """

    known: str
    low: float
    high: float
    reason: str

    def line(self, machine: str, seconds: float | None = None) -> str:
        """Return the first line of the output: the interval in percent and, of a time, in seconds."""
        runs = "triax's runs" if self.known == "measured machine" else "published runs"
        percent = f"{100 * (1 - self.low):.0f} % less to {100 * (self.high - 1):.0f} % more"
        times = "" if seconds is None else f"; the first: {seconds * self.low:.3g} to {seconds * self.high:.3g} s"
        return f"90 % of {runs} took {percent} than predicted{times} ({self.known}; {machine} is {self.reason})"

    def to_dict(self, machine: str, seconds: float | None = None) -> dict[str, Any]:
        """Return the entry ``trust`` of the JSON object."""
        return {
            "class": self.known,
            "level": LEVEL,
            "low": self.low,
            "high": self.high,
            "line": self.line(machine, seconds),
        }


def known_of(machine: Machine, parameters: float, precision: str) -> str:
    """Return the class of a prediction."""
    if machine.measured is not None:
        return "measured machine"
    if machine.unfitted(precision) is not None:
        return "unseen machine"
    same = any(1 / SAME_SIZE <= parameters / each <= SAME_SIZE for each in machine.fitted_models)
    return "seen machine and size" if same else "seen machine, other size"


def trust(machine: Machine, config: TransformerConfig, precision: str) -> Trust:
    """Return how far the times of a model on a machine can be trusted."""
    known = known_of(machine, float(sum(layer.parameters for layer in layers_of(config))), precision)
    half = HALF[known]
    if (own := len(machine.fitted_models)) > 1 and machine.fitted_error and known.startswith("seen"):
        square = own * (student(own) * machine.fitted_error) ** 2 + _OWN * half**2
        half = math.sqrt(square / (own + _OWN))
    if known == "measured machine":
        reason = "timed by triax machine measure"
    elif known == "unseen machine":
        unfitted = machine.unfitted(precision)
        reason = f"{unfitted}; time it with triax machine measure, or fit it to runs with triax machine fit"
    else:
        sizes = ", ".join(f"{size / 1e9:.3g}" for size in machine.fitted_models)
        reason = f"fitted to runs of models of {sizes} billion parameters"
    return Trust(known, math.exp(-half), math.exp(half), reason)


def kept(errors: Sequence[float]) -> float:
    """Return the size that 90 % of the errors keep, with one more error counted as larger."""
    sizes = sorted(map(abs, errors))
    return sizes[min(len(sizes), math.ceil(LEVEL * (len(sizes) + 1))) - 1]


def student(freedom: int) -> float:
    """Return the 95th percentile of Student's t (Abramowitz and Stegun 1972, 26.7.5; exact for 1 and 2).

    >>> round(student(2), 3), round(student(10), 2)
    (2.92, 1.81)
    """
    if freedom <= 2:
        return (6.3138, 2.92)[freedom - 1]
    z, n = 1.6448536, float(freedom)
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )
