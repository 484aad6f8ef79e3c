"""Parallel layout of a run: degrees, microbatch, schedule, ZeRO stage and recomputation. The formulas' argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...base.errors import nearest
from ...grid.topology import Topology
from ...options.engine import EngineOptions
from ...pipe.schedules.registry import RECIPES
from ...zero.flat import require_equal_groups, shards_of

RECOMPUTATION = ("none", "selective", "full")
# "mlp" is planned where it is given, for runs of other software; triax train has no such run.
KNOWN_RECOMPUTATION = (*RECOMPUTATION, "mlp")
# Options of a layout's schedule beside its name and chunks, which the section ``schedule`` of a training file has too.
CHANGES: dict[str, Any] = {"slices": 1, "pairs": False, "recompute_ops": 0.0, "offload_activations": 0.0}
UNCHANGED = tuple(CHANGES.values())


class Replicas(NamedTuple):
    """Ranks that hold the same weight before ZeRO shards it: of a dense weight, and of an expert's."""

    dense: int
    expert: int

    def of(self, expert: bool) -> int:
        """Return the number of replicas of an expert's weight, or of another one."""
        return self.expert if expert else self.dense


@dataclass(frozen=True)
class ParallelLayout:
    """One way to spread a training run over a cluster.

    The batch and the sequence length are arguments of the formulas, because all layouts of a search share them.

    Attributes:
        pipe, data, context, tensor: sizes of the axes.
        expert: number of shards of each layer's experts. It divides data x context.
        microbatch: sequences of a microbatch on one replica.
        chunks: stages per pipe rank.
        schedule: name of a schedule, a key of ``pipe/schedules/registry.RECIPES`` other than ``forward``.
        zero: stage of ZeRO.
        recompute: ``none``, ``selective`` (the core of attention), ``full`` (each layer from its input) or ``mlp`` (the
            MLP from its input).
        offload: masters and optimizer state are kept in CPU memory.
        sequence_parallel: hidden states between tensor-parallel layers are sharded over the sequence; by default True
            if tensor > 1, and False without a tensor axis, which it would not change.
        slices: slices of each sequence, of equal cost, which pass the pipeline one after the other.
        pairs: passes are joined to pairs, so that collectives of the tensor and expert axes hide.
        shard_size: as in ``triax.Zero``: ranks of data x context that ZeRO shards over; None: all.
        recompute_ops, offload_activations: share of each rank's activations that ops of the schedule recompute, or
            copy to the host and back.

    Raises:
        ValueError: a number that no run can have, an unknown name, or chunks that the schedule does not have.
    """

    pipe: int = 1
    data: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    microbatch: int = 1
    chunks: int = 1
    schedule: str = "1f1b"
    zero: int = 0
    recompute: str = "none"
    offload: bool = False
    sequence_parallel: bool | None = None
    slices: int = 1
    pairs: bool = False
    recompute_ops: float = 0.0
    offload_activations: float = 0.0
    shard_size: int | None = None

    def __post_init__(self) -> None:
        if min(self.pipe, self.data, self.context, self.tensor, self.expert, self.microbatch, self.chunks) < 1:
            names = ("pipe", "data", "context", "tensor", "expert", "microbatch", "chunks")
            wrong = next(name for name in names if getattr(self, name) < 1)
            raise ValueError(f"{wrong} is {getattr(self, wrong)}. Give a whole number of at least 1.")
        if self.data * self.context % self.expert:
            raise ValueError(
                f"expert={self.expert} does not divide data x context = {self.data} x {self.context}. Give a divisor "
                f"of {self.data * self.context}."
            )
        recipe = RECIPES.get(self.schedule)
        if recipe is None or not recipe.trains:
            known = [name for name, each in RECIPES.items() if each.trains]
            hint = nearest(self.schedule, known)
            raise ValueError(f"there is no schedule {self.schedule!r} for training; {hint}")
        if not recipe.accepts(self.chunks):
            raise ValueError(
                f"{self.schedule} does not run {self.chunks} chunks per rank. Give chunks={recipe.chunks}, or another "
                "schedule."
            )
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"zero is {self.zero}. Give a stage of ZeRO: 0, 1, 2 or 3.")
        if self.recompute not in KNOWN_RECOMPUTATION:
            raise ValueError(f"recompute is {self.recompute!r}. Give one of {', '.join(KNOWN_RECOMPUTATION)}.")
        if self.shard_size is not None:
            require_equal_groups(self.data * self.context, self.shard_size)
        if self.changes != UNCHANGED:
            self._check_changes()
        sharded = self.tensor > 1 and self.sequence_parallel is not False
        object.__setattr__(self, "sequence_parallel", sharded)

    def _check_changes(self) -> None:
        if self.slices < 1:
            raise ValueError(f"slices is {self.slices}. Give a whole number of at least 1.")
        for name in ("recompute_ops", "offload_activations"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}. Give a share from 0 to 1.")

    @property
    def changes(self) -> tuple[Any, ...]:
        """Values of the options in ``CHANGES``."""
        return self.slices, self.pairs, self.recompute_ops, self.offload_activations

    @property
    def hides_collectives(self) -> bool:
        """True if passes run in pairs; stage 3 of ZeRO runs them one after the other."""
        return (self.pairs or RECIPES[self.schedule].pairs is not None) and self.zero < 3

    @classmethod
    def of(cls, options: EngineOptions, axes: Mapping[str, Any], **others: Any) -> ParallelLayout:
        """Return the layout of axes with an engine's recomputation and offload; ``others`` are further fields."""
        section = options.recompute
        kind = "selective" if section.granularity == "selective" else "full"
        offload = options.zero.offload_optimizer.device != "none"
        alone = axes.get("data", 1) * axes.get("context", 1) == 1
        size = None if alone else options.zero.shard_size
        return cls(**axes, recompute=kind if section.asked else "none", offload=offload, shard_size=size, **others)

    @property
    def replicas(self) -> Replicas:
        """Number of replicas of a weight, and of an expert's weight."""
        ranks = self.data * self.context
        return Replicas(ranks, ranks // self.expert)

    @property
    def shards(self) -> Replicas:
        """Number of ranks over which ZeRO shards a weight, and an expert's weight."""
        dense, expert = self.replicas
        return Replicas(shards_of(dense, self.shard_size), shards_of(expert, self.shard_size, self.expert))

    @property
    def hidden_shards(self) -> int:
        """Number of ranks that share the hidden states: under sequence parallelism those of the tensor axis."""
        return self.tensor if self.sequence_parallel else 1

    @property
    def placement(self) -> tuple[int, ...]:
        """The pipe rank of each stage."""
        return RECIPES[self.schedule].place(self.pipe, self.chunks)

    @property
    def gpus(self) -> int:
        """Number of ranks."""
        return self.pipe * self.data * self.context * self.tensor

    @property
    def topology(self) -> Topology:
        """The grid's topology."""
        sizes = {"pipe": self.pipe, "data": self.data, "context": self.context, "tensor": self.tensor}
        if self.context == 1:  # an axis only where it is asked for
            del sizes["context"]
        return Topology(expert=self.expert, **sizes)

    def microbatches(self, batch: int) -> int:
        """Return the number of microbatches of a step on one replica.

        Args:
            batch: sequences of a step, over all replicas.

        Raises:
            ValueError: data x microbatch does not divide the batch, or the schedule needs more microbatches.
        """
        count, rest = divmod(batch, self.data * self.microbatch)
        if rest or not count:
            raise ValueError(
                f"data x microbatch = {self.data} x {self.microbatch} does not divide batch={batch}. Give a multiple "
                f"of {self.data * self.microbatch} as the batch."
            )
        if count < (least := RECIPES[self.schedule].least(self.pipe)):
            raise ValueError(
                f"{self.schedule} needs at least {least} microbatches for pipe={self.pipe}, but batch={batch} is "
                f"{count} for each of {self.data} replicas. Give a batch of {least * self.data * self.microbatch}."
            )
        return count

    def __str__(self) -> str:
        """List the sizes above 1 and the choices that are not the default, as ``triax plan --layout`` reads them."""
        shown = {name: getattr(self, name) for name in ("pipe", "data", "context", "tensor", "expert")}
        parts = [f"{name}={size}" for name, size in shown.items() if size > 1]
        parts.append(f"microbatch={self.microbatch}")
        parts += [f"chunks={self.chunks}"] * (self.chunks > 1) + [f"schedule={self.schedule}"] * (self.pipe > 1)
        parts += [f"zero={self.zero}", f"recompute={self.recompute}"] + ["offload=true"] * self.offload
        if self.tensor > 1 and not self.sequence_parallel:
            parts.append("sequence_parallel=false")
        for name, value in zip(CHANGES, self.changes, strict=True):
            parts += [f"{name}={str(value).lower()}"] * (value != CHANGES[name])
        return ",".join(parts)
