"""Time of a step whose schedule has options: slices, pairs, or passes that recompute or offload. All by simulation.

    RankTime, LayerTime  --pass_costs-->  PassCosts  --simulation-->  seconds of the step, idle seconds  -->  kinds

A simulation decides which collectives hide, so that it has them apart from the passes. With F, I, W the passes of
``RankTime``, and ``forward``, ``backward``, ``split_inputs``, ``split_weights`` the fields of ``TensorTime``:

| cost | formula, for each slice | what hides it |
|---|---|---|
| forward | F - forward - expert | nothing |
| inputs | I - backward - expert, and - split_inputs if the schedule splits the backward pass | nothing |
| weights | W, and - split_weights if the schedule splits it | nothing |
| reduce | (forward + backward + split_inputs) / 2: the mean of F and I | the other pass of a pair; the weight \
gradients of an undivided backward pass |
| exchange | expert | the other pass of a pair |
| copy | bytes of activations / speed of the link to the host (of the microbatch) | the passes until it is needed |

What is subtracted is what the passes have: they have ``split_inputs`` and ``split_weights`` only if the schedule splits
(``PassTime.of``). ``split_inputs`` is the part of the all-reduces that the weight gradients hide in an undivided
backward pass. The simulation hides it there itself (pipe/program/costs.py: a B takes I + max(W, AR)), so that it needs
the whole of them: ``reduce`` always includes ``split_inputs``. A weight gradient has no collective in the simulation:
the gather of its input, ``split_weights``, counts as hidden.

Without pairs nothing hides, and the collectives stay in the passes: ``reduce`` and ``exchange`` are 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...options.schedule import ScheduleOptions
from ...pipe.program.schedule import Schedule
from ...pipe.schedules.registry import RECIPES
from .layer_time import LayerTime, TensorTime
from .parallel_layout import ParallelLayout
from .pass_time import RankTime
from .schedule_time import PassCosts, ScheduleTime


def pass_costs(layout: ParallelLayout, rank: RankTime, layers: Sequence[LayerTime], copy: float) -> PassCosts:
    """Return the costs of a rank's passes of a whole microbatch.

    Args:
        layout: the layout.
        rank: times of the rank.
        layers: times of a layer of each kind.
        copy: seconds of a copy of the rank's activations.
    """
    n, split = layout.slices, RECIPES[layout.schedule].split
    tensor, expert = TensorTime(), 0.0  # collectives that may hide
    if layout.hides_collectives:
        for time, count in zip(layers, rank.counts, strict=True):
            tensor = TensorTime(*(total + count * seconds for total, seconds in zip(tensor, time.tensor, strict=True)))
            expert += count * time.expert.forward
    attention = rank.kinds["attention"] / (rank.forward + rank.inputs)
    return PassCosts(
        forward=n * (rank.forward - tensor.forward - expert),
        inputs=n * (rank.inputs - tensor.backward - split * tensor.split_inputs - expert),
        weights=n * (rank.weights - split * tensor.split_weights),
        copy=copy,
        reduce=n * (tensor.forward + tensor.backward + tensor.split_inputs) / 2,
        exchange=n * expert,
        attention=min(1.0, attention) if n > 1 else 0.0,
    )


@dataclass(frozen=True)
class OptionStep:
    """One step of a layout whose schedule has options.

    Attributes:
        simulations: times of schedules.
        layout: the layout.
        batch: sequences of a step, over all replicas.
        rank: times of the busiest pipe rank.
        costs: costs of its passes.
    """

    simulations: ScheduleTime
    layout: ParallelLayout
    batch: int
    rank: RankTime
    costs: PassCosts

    @property
    def _microbatches(self) -> int:
        return self.layout.microbatches(self.batch)

    @property
    def options(self) -> ScheduleOptions:
        """The options of the schedule, as a run has them."""
        return self.costs.options(self.layout)

    def schedule(self, microbatches: int | None = None) -> Schedule:
        """Return the schedule that a run makes; None: of as many microbatches as have the same peaks."""
        m, p = self._microbatches, self.layout.pipe
        steady = m if m <= 5 * p else 4 * p + m % p
        return self.simulations.schedule(self.layout, self.options, steady if microbatches is None else microbatches)

    def kinds(self, plain: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds by kind of the busiest rank up to its last backward pass, and the bubble.

        Args:
            plain: the same of its passes one after the other, without options.
        """
        kinds = dict(plain)
        whole, idle = self.simulations.makespan_and_idle(self.layout, self._microbatches, self.costs)
        if self.layout.hides_collectives:
            collectives = kinds["tensor"] + kinds["expert"]
            passes = sum(kinds.values()) - collectives
            not_hidden = max(0.0, whole - idle - passes)  # collectives for which the busy rank waits
            for kind in ("tensor", "expert"):
                kinds[kind] *= not_hidden / collectives if collectives else 0.0
        if self.layout.recompute_ops:
            kinds["recompute"] += self._microbatches * self._recomputed() * self.rank.forward
        kinds["bubble"] = whole - sum(kinds.values())
        if kinds["bubble"] < 0:  # a long schedule recomputes a smaller share than the short one
            kinds["recompute"], kinds["bubble"] = max(0.0, kinds["recompute"] + kinds["bubble"]), 0.0
        return kinds

    def _recomputed(self) -> float:
        """Return the share of its forward passes that the rank which recomputes most runs again."""
        made = self.schedule()
        return max(sum(op.kind == "C" for op in order) for order in made.orders) / made.microbatches / made.chunks

    def least(self) -> float:
        """Return a lower bound, without a simulation, of the seconds up to the last backward pass.

        The last rank waits for the first forward pass to come through the other ranks, and in 1f1b and interleaved
        these wait for its last gradient; slices take equally long. A rank that recomputes runs that share of its
        forward passes again, at best while it would wait. Of stp it is 0.99 of the paper's formula.
        """
        layout, m, costs, recipe = self.layout, self._microbatches, self.costs, RECIPES[self.layout.schedule]
        products, forward = costs.products, costs.forward
        if recipe.idle_in_pairs is not None:
            idle = recipe.idle_in_pairs(forward, costs.inputs, costs.weights, costs.reduce, layout.pipe)
            return m * products + 0.99 * idle
        whole = recipe.closed is not None and not recipe.split
        waits = (layout.pipe - 1) * (products if whole else forward) / (layout.chunks * layout.slices)
        again = max(0.0, layout.recompute_ops - 1 / m) * forward
        return max(m * products + 0.99 * waits, m * (products + again))  # the slices' lengths are rounded

    @property
    def copies(self) -> float:
        """Seconds of the copies that the schedule offloads and reloads, over those of the passes."""
        return self.layout.offload_activations * 2 * self.costs.copy / self.costs.products
