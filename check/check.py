"""``check``: run a model on one process and on grids, compare them, and say where and why they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..testing.pool import RankFailure, RankTimeout, run_ranks
from .causes import Repeats, causes_of
from .grids import Axes, count, default_grids, name_of, parts_of
from .locate import Comparison, Location, differing_gradients, first_op, local_pair
from .matching import close
from .report import KINDS, Differing, Finding, GridResult, Report
from .run import Observed, Run, observe
from .target import Target

RTOL = 1e-10

Observe = Callable[..., list[Observed]]


def check(
    target: Target,
    grids: Sequence[Axes] | None = None,
    *,
    ranks: int = 4,
    rtol: float = RTOL,
    timeout: float = 60.0,
    costs: bool = False,
) -> Report:
    """Compare a model on grids with the same model on one process, in float64.

    Args:
        target: the model and its batch.
        grids: the grids to try; None: each axis with 2 ranks, and a combination.
        ranks: ranks that a grid may have, for ``grids=None``.
        rtol: largest difference of a tensor, relative to its largest element.
        timeout: seconds that a run may take.
        costs: measure time and activation bytes of the layers.

    Returns:
        The report. A model that raises, hangs or is not deterministic has one line in it.
    """
    runner = _Runner(target, timeout)
    report = Report(f"{target.path}{':' if target.function else ''}{target.function}")
    try:
        alone = runner.alone(Run(costs=costs))
    except RankFailure as failure:
        report.error = f"the model does not run on one process: {_line(failure, timeout)}"
        return report
    runner.batch = alone.batch
    report.costs = alone.costs
    report.without_gradient = [name for name, gradient in alone.gradients.items() if not gradient.any()]
    repeats = runner.repeats(alone)
    if not (repeats.same_seed and repeats.other_seed):
        report.error = "the model is not deterministic on one process"
        report.causes = causes_of(repeats, None, "", alone, [], {}, ())
    if grids is None:
        grids = default_grids(ranks, alone.layers, alone.microbatches, alone.experts)
    seen: dict[Axes, GridResult] = {}
    for axes in grids:
        seen[axes] = _compare(runner, alone, axes, repeats, seen, rtol)
        report.grids.append(seen[axes])
    return report


class _Runner:
    """Runs of a target, with their time limit."""

    def __init__(self, target: Target, timeout: float) -> None:
        self.target, self.timeout = target, timeout
        self.batch: list[tuple[object, object]] | None = None

    def on(self, axes: Axes, run: Run) -> list[Observed]:
        run = run._replace(axes=axes)
        return run_ranks(count(axes), observe, self.target, run, self.batch, timeout=self.timeout)

    def alone(self, run: Run) -> Observed:
        return self.on((), run)[0]

    def repeats(self, alone: Observed) -> Repeats:
        """Run one process again: with the same and other seeds, and with the microbatches in reversed order."""
        bare = Run(record=False)
        same = _equal(alone, self.alone(bare))
        other = _equal(alone, self.alone(bare._replace(seed=7)))
        order = True
        if same and other:
            order = _equal(self.alone(bare._replace(still=True)), self.alone(bare._replace(still=True, reverse=True)))
        return Repeats(same, other, order, tuple(alone.changed))


def _equal(a: Observed, b: Observed) -> bool:
    """Return True if two runs have the same numbers, up to another order of sums."""
    if a.numbers.keys() != b.numbers.keys() or a.gradients.keys() != b.gradients.keys():
        return False
    pairs = [(_tensor(value), _tensor(b.numbers[name])) for name, value in a.numbers.items()]
    pairs += [(value, b.gradients[name]) for name, value in a.gradients.items()]
    return all(close(x, y) for x, y in pairs)


def _compare(
    runner: _Runner, alone: Observed, axes: Axes, repeats: Repeats, seen: dict[Axes, GridResult], rtol: float
) -> GridResult:
    """Run a grid, compare it, and explain a difference."""
    result = GridResult(name_of(axes))
    try:
        found = runner.on(axes, Run())
    except RankFailure as failure:
        result.error = _line(failure, runner.timeout)
        return result
    result.traffic = found[0].traffic
    for kind, checks in _numbers(alone, found, rtol).items():
        bad = [each for each in checks if each is not None]
        result.counts[kind] = len(checks) - len(bad), len(checks)
        result.differing += bad
    if result.differing:
        sizes = dict(axes)
        guilty = _axes(runner, alone, axes, seen, rtol)
        location = Comparison(alone, found, sizes).first()
        if location is not None:
            _find_op(runner, axes, location, sizes)
        result.finding = _finding(alone, found, sizes, repeats, location, guilty, result.differing)
    return result


def _axes(runner: _Runner, alone: Observed, axes: Axes, seen: dict[Axes, GridResult], rtol: float) -> tuple[str, ...]:
    """Return the axes of a grid that differ from one process on their own."""
    parts = parts_of(axes)
    if len(parts) == 1 and parts[0] == axes:
        return (axes[0][0],)
    guilty: list[str] = []
    for part in parts:
        if part == axes:  # data and expert: data alone is another part
            holds = False
        elif part in seen:
            holds = seen[part].holds
        else:
            try:
                found = runner.on(part, Run(record=False))
                holds = not any(any(checks) for checks in _numbers(alone, found, rtol).values())
            except RankFailure:
                holds = False
        if not holds:
            guilty.append(part[-1][0])
    # An expert axis lies on data: if data differs alone, experts are not what does it.
    return tuple(name for name in guilty if not (name == "expert" and "data" in guilty))


def _find_op(runner: _Runner, axes: Axes, location: Location, sizes: dict[str, int]) -> None:
    """Run once more with ops recorded, to find the op of a location in the forward pass."""
    if location.phase != "forward":
        return
    run = Run(ops=location.microbatch)
    try:
        first_op(location, runner.alone(run).records, runner.on(axes, run), sizes)
    except RankFailure:  # code that does not run under a dispatch mode: the module is named all the same
        return


def _finding(
    alone: Observed,
    found: Sequence[Observed],
    sizes: dict[str, int],
    repeats: Repeats,
    location: Location | None,
    axes: tuple[str, ...],
    differing: Iterable[Differing],
) -> Finding:
    gradient = next((each for each in differing if each.kind == "gradients"), None)
    name = "" if gradient is None else gradient.name
    finding = Finding("parameter" if location is None else location.phase, axes=axes, parameter=gradient)
    if location is not None:
        finding.layer, finding.module, finding.what = location.layer, location.name, location.what
        finding.place, finding.op, finding.op_place = location.place, location.op, location.op_place
    elif name:
        finding.module, finding.layer, finding.what = _owner(name, alone)
    finding.causes = causes_of(repeats, location, name, alone, found, sizes, axes)
    return finding


def _owner(parameter: str, alone: Observed) -> tuple[str, int | None, str]:
    """Return (name, layer, class) of the module that has a parameter."""
    owner = parameter.rpartition(".")[0]
    record = next((r for r in alone.records if r.name == owner and r.kind == "module"), None)
    return owner, None if record is None else record.layer, "" if record is None else record.what


# ------------------------------------------------------------------------------------------------- numbers


def _numbers(alone: Observed, ranks: Sequence[Observed], rtol: float) -> dict[str, list[Differing | None]]:
    """Return kind -> for each number None, or the difference."""
    found: dict[str, list[Differing | None]] = {kind: [] for kind in KINDS}
    for name, wanted in alone.numbers.items():
        kind = "gradient norm" if name == "gradient norm" else "outputs"
        differs = partial(_differs, kind, name, wanted=_tensor(wanted), rtol=rtol)
        values = enumerate(rank.numbers.get(name, float("nan")) for rank in ranks)
        found[kind].append(next((d for number, value in values if (d := differs(number, _tensor(value)))), None))
    local = {name: ranks.index(rank) for name, rank in differing_gradients(alone, ranks, max(rtol, 1e-9))}
    for kind, mine, theirs in (
        ("gradients", ranks[0].gradients, alone.gradients),
        ("weights", ranks[0].weights, alone.weights),
    ):
        for name in reversed(list(theirs)):
            if name not in mine:
                found[kind].append(Differing(kind, name, (), float("nan"), float(theirs[name].sum()), 0))
                continue
            differs_at = _differs(kind, name, 0, mine[name], theirs[name], rtol)
            if differs_at is None and kind == "gradients" and name in local:
                rank = local[name]
                pair = local_pair(alone, ranks[rank], ranks, name)
                assert pair is not None
                differs_at = _differs(kind, name, rank, *pair, rtol)
            found[kind].append(differs_at)
    return found


def _differs(kind: str, name: str, rank: int, found: Tensor, wanted: Tensor, rtol: float) -> Differing | None:
    if found.shape != wanted.shape:
        return Differing(kind, name, (), float("nan"), float("nan"), rank)
    if not wanted.numel():
        return None
    error = (found - wanted).abs()
    if bool((error <= rtol * wanted.abs().max() + 1e-14).all()):  # False for NaN
        return None
    at = tuple(int(i) for i in torch.unravel_index(error.nan_to_num(torch.inf).argmax(), wanted.shape))
    return Differing(kind, name, at, float(found[at]), float(wanted[at]), rank)


def _tensor(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _line(failure: RankFailure, timeout: float) -> str:
    """Return one line about a run that raised or did not end."""
    if isinstance(failure, RankTimeout):
        stuck = next((each for each in failure.reports if each.kind == "stuck"), failure.first)
        where = [line.strip() for line in stuck.text.splitlines() if line.strip().startswith("File")]
        place = f"; rank {stuck.rank} was at {where[0]}" if where else ""
        return f"it hangs: no end within {timeout:g} s{place} (--timeout gives it more time)"
    first = failure.first
    return f"rank {first.rank} {first.kind}: {first.summary.strip().splitlines()[0]}"
