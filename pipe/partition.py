"""Cut of the list of layers into stages. (program/placement.py gives each stage its rank.)

Boundaries ``[0, 8, 16, 23, 30]``: stage 0 has layers 0 to 7, stage 1 has layers 8 to 15.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, combinations, pairwise

SEARCHED = ("time", "memory", "auto")  # cuts that are searched by the costs of layers (pipe/cuts.py)
CUTS = ("parameters", "uniform", *SEARCHED)  # cuts by name


def uniform(layers: int, parts: int) -> list[int]:
    """Return boundaries of parts with equal numbers of layers; the first parts have one more if they do not divide.

    >>> uniform(30, 4)
    [0, 8, 16, 23, 30]
    """
    _check(layers, parts)
    size, extra = divmod(layers, parts)
    return [part * size + min(part, extra) for part in range(parts + 1)]


def balanced(weights: Sequence[float], parts: int) -> list[int]:
    """Return boundaries whose heaviest part is as light as possible, with no part empty.

    Among those, the parts are as even as possible (the least sum of squares).

    >>> balanced([5, 1, 1, 1, 1, 5], 3)
    [0, 1, 5, 6]
    """
    layers = len(weights)
    _check(layers, parts)
    if any(not math.isfinite(weight) or weight < 0 for weight in weights):
        raise ValueError(f"the weights of the layers are {list(weights)}: give finite numbers of at least 0")
    prefix = [0, *accumulate(weights)]
    loads = sorted({stop - start for start, stop in combinations(prefix, 2)})  # of every part that can be cut
    cap = loads[bisect_left(loads, True, key=lambda load: _fits(prefix, parts, load))]

    # The most even of the cuts under the cap: best[i] is the least sum of squares of the first i layers.
    best = [0.0] + [math.inf] * layers
    cuts: list[list[int]] = []
    for part in range(1, parts + 1):
        row, cut = [math.inf] * (layers + 1), [0] * (layers + 1)
        for stop in range(part, layers - (parts - part) + 1):
            for start in range(stop - 1, part - 2, -1):
                load = prefix[stop] - prefix[start]
                if load > cap:
                    break
                if best[start] + load * load < row[stop]:
                    row[stop], cut[stop] = best[start] + load * load, start
        best = row
        cuts.append(cut)
    boundaries = [layers]
    for cut in reversed(cuts):
        boundaries.append(cut[boundaries[-1]])
    return boundaries[::-1]


def by_speed(weights: Sequence[float], speeds: Sequence[float]) -> list[int]:
    """Return boundaries of one part for each speed, of which the largest weight / speed is as small as possible.

    Among those, the sum of their squares is least. No part is empty.

    >>> by_speed([1, 1, 1, 1, 1, 1], [1.0, 2.0])
    [0, 2, 6]
    """
    layers = len(weights)
    _check(layers, len(speeds))
    prefix = [0.0, *accumulate(weights)]
    worst = (math.inf, math.inf)
    best, cuts = [(0.0, 0.0), *[worst] * layers], []
    for part, speed in enumerate(speeds, 1):
        row, cut = [worst] * (layers + 1), [0] * (layers + 1)
        for stop in range(part, layers - (len(speeds) - part) + 1):
            for start in range(part - 1, stop):
                time = (prefix[stop] - prefix[start]) / speed
                cost = max(best[start][0], time), best[start][1] + time * time
                if cost < row[stop]:
                    row[stop], cut[stop] = cost, start
        best = row
        cuts.append(cut)
    found_cuts = [layers]
    for cut in reversed(cuts):
        found_cuts.append(cut[found_cuts[-1]])
    return found_cuts[::-1]


def boundaries(
    method: str | Sequence[int], stages: int, typenames: Sequence[str], weights: Callable[[], Sequence[float]]
) -> list[int]:
    """Return the boundaries for ``PipelineModule(partition=...)``.

    Args:
        method: ``"uniform"``, ``"parameters"``, ``"type:REGEX"`` (balances the layers whose class name matches,
            in any case), or the boundaries themselves. ``"time"``, ``"memory"`` and ``"auto"`` stand for a cut that an
            engine searches for its schedule: until then the weights are balanced.
        stages: number of stages.
        typenames: the name of each layer's class.
        weights: returns the weight of each layer, such as its number of parameters; not called for the other methods.

    Raises:
        ValueError: fewer layers than stages, an unknown method, or boundaries that do not place every layer exactly
            once.
    """
    layers = len(typenames)
    if not isinstance(method, str):
        return _explicit(list(method), stages, layers)
    if method == "uniform":
        return uniform(layers, stages)
    if method in ("parameters", *SEARCHED):
        _check(layers, stages)
        return balanced(weights(), stages) if stages > 1 else [0, layers]
    if method.startswith("type:"):
        pattern = re.compile(method.removeprefix("type:"), re.IGNORECASE)
        matches = [1.0 if pattern.search(name) else 0.0 for name in typenames]
        if not any(matches):
            raise ValueError(
                f"partition={method!r} matches no layer: give a pattern that matches one of "
                f"{', '.join(sorted(set(typenames)))}"
            )
        return balanced(matches, stages)
    raise ValueError(
        f"there is no partition={method!r}: use 'uniform', 'parameters', 'time', 'memory', 'auto', "
        f"'type:REGEX', or boundaries such as {uniform(layers, stages) if layers >= stages else [0, layers]}"
    )


def _explicit(cuts: list[int], stages: int, layers: int) -> list[int]:
    if len(cuts) != stages + 1 or cuts[0] != 0 or cuts[-1] != layers:
        sizes = f"{stages + 1} boundaries from 0 to {layers}"
        hint = f", for instance {uniform(layers, stages)}" if layers >= stages else ""
        raise ValueError(f"partition={cuts} does not cut {layers} layers into {stages} stages: give {sizes}{hint}")
    for stage, (start, stop) in enumerate(pairwise(cuts)):
        if start >= stop:
            raise ValueError(f"partition={cuts} leaves stage {stage} without layers: give boundaries that increase")
    return cuts


def _fits(prefix: Sequence[float], parts: int, cap: float) -> bool:
    """Return True if ``parts`` parts of at most ``cap`` each hold all layers, if each part is filled up to the cap."""
    start = 0
    for _ in range(parts):
        start = bisect_right(prefix, cap, start, key=lambda stop: stop - prefix[start]) - 1
    return start == len(prefix) - 1


def _check(layers: int, parts: int) -> None:
    if parts < 1:
        raise ValueError(f"a model cannot be cut into {parts} stages: give at least 1")
    if layers < parts:
        raise ValueError(
            f"{layers} layers cannot fill {parts} stages (each needs at least one): use at most {layers} stages, by a "
            "smaller pipe axis or fewer chunks, or more layers"
        )
