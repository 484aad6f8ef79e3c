"""Bytes that a rank of each pipe stage holds, by kind, from a configuration and a layout.

    RankMemory = model states                     of ZeRO's buckets         state_memory.py
               + activations                      of a layer x in flight    layer_memory.py, in_flight
               + activations beside those         slices, recomputed ops    _recomputed, _shared_keys
               + temporaries                      of ZeRO, of a layer       state_memory.py, layer_memory.py
               + margin                           fragments and a reserve

Model states are counted byte for byte as ``engine.memory_report()`` counts them. Temporaries and the margin are
estimates.

>>> from triax.models.config import LlamaConfig
>>> from triax.plugins.plan.parallel_layout import ParallelLayout
>>> memory = ModelMemory(LlamaConfig.preset("llama3-8b"), precision="bf16")
>>> [rank] = memory.ranks(ParallelLayout(data=8, zero=3), batch=64, sequence=8192)
>>> {kind: round(bytes / 2**30, 1) for kind, bytes in rank._asdict().items() if kind in ("parameters", "optimizer")}
{'parameters': 1.9, 'optimizer': 7.5}
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from operator import mul
from typing import NamedTuple

from ...models.config import TransformerConfig
from ...pipe.program.activations import counts_in_flight, largest_counts
from ...pipe.program.schedule import Schedule
from ...pipe.program.slices import require_slices
from ...pipe.schedules.registry import RECIPES, named_schedule
from .cached import cached_method
from .layer_memory import LayerMemory, LayerSplit
from .layer_shapes import LayerShape, layers_of
from .layers_by_kind import LayersByKind, RankLayers
from .parallel_layout import UNCHANGED, ParallelLayout
from .state_memory import BucketShape, StateBytes, StateMemory, StateOptions, StateSplit

# Share of activations and temporaries that the caching allocator loses to fragments.
FRAGMENTS = 0.05
# Microbatches in flight in each stage of a rank: the vectors that no other one exceeds in all stages.
Flights = tuple[tuple[float, ...], ...]


class RankMemory(NamedTuple):
    """Bytes of one rank, by kind.

    - parameters, gradients, masters, optimizer, buffers: held between two steps
    - activations: kept for the backward pass, at the schedule's peak
    - temporaries: gathered weights and unsharded gradients of ZeRO, working memory of one layer's backward pass, the
      gradient of the logits, messages of the pipe axis
    - margin: fragmentation, and a reserve for the device's context and communicators
    """

    parameters: float
    gradients: float
    masters: float
    optimizer: float
    buffers: float
    activations: float
    temporaries: float
    margin: float

    @property
    def states(self) -> float:
        """Bytes held between two steps."""
        return self.parameters + self.gradients + self.masters + self.optimizer + self.buffers

    @property
    def total(self) -> float:
        """Sum of all kinds."""
        return sum(self)

    @classmethod
    def of(cls, states: StateBytes, activations: float, temporaries: float, margin: float) -> RankMemory:
        """Return the bytes of a rank with these model states."""
        held = (states.parameters, states.gradients, states.masters, states.optimizer, states.buffers)
        return cls(*held, activations, temporaries, margin)


class ModelMemory:
    """Memory of one model on any layout. Sums over layers are cached, so that a search may ask for many layouts.

    Args:
        config: the model's configuration.
        precision, optimizer: as for ``StateOptions``.
        options: further options; None: the defaults, with ``precision`` and ``optimizer``.
        partition: how the list of layers is cut into stages, as for ``PipelineModule``.
        speeds: speed of each rank of the pipe axis, by which ``parameters`` then cuts; (): all have the same.
        shard_tensor: the tensor axis shards experts.
        lend: largest number of experts that a rank borrows.
        fused_attention: attention does not keep its s x s probabilities. False: it does, as in Korthikanti et al.
        fused_kernels: as for ``Machine``: an MLP's gate and rotary positions keep their inputs alone.
        device: ``cuda`` or ``cpu``. On a CPU torch has no fused RMSNorm, which then keeps more.
        reserve: bytes of the device's context and communicators, a part of the margin.

    Attributes:
        layers: the model's layers.
        stage_layers: the layers of each stage and rank, by kind.
        state_memory, layer_memory: bytes of model states, and of one layer.
    """

    def __init__(
        self,
        config: TransformerConfig,
        precision: str = "bf16",
        optimizer: str | int = "adamw",
        *,
        options: StateOptions | None = None,
        partition: str | Sequence[int] = "parameters",
        speeds: Sequence[float] = (),
        shard_tensor: bool = False,
        lend: int = 0,
        fused_attention: bool = True,
        fused_kernels: bool = False,
        device: str = "cuda",
        reserve: int = 2**30,
    ) -> None:
        self.config, self.reserve = config, reserve
        self.options = options or StateOptions(precision=precision, optimizer=optimizer)
        self.layers = layers_of(config, shard_tensor)
        self.stage_layers = LayersByKind(self.layers, partition, speeds)
        kinds = self.stage_layers.kinds
        self.state_memory = StateMemory(kinds, self.options)
        self.layer_memory = LayerMemory(
            kinds=kinds,
            options=self.options,
            vocabulary=config.vocab_size,
            shard_tensor=shard_tensor,
            lend=lend,
            fused_attention=fused_attention,
            fused_kernels=fused_kernels,
            on_cpu=device == "cpu",
        )

    # ---------------------------------------------------------------------------------------------------- stages

    def cuts(self, stages: int) -> list[int]:
        """Return the boundaries of the stages: stage ``s`` has the layers ``cuts[s]`` to ``cuts[s + 1] - 1``.

        Raises:
            ValueError: there are fewer layers than stages, or the given boundaries are of another number of stages.
        """
        return self.stage_layers.cuts(stages)

    def stages(self, layout: ParallelLayout, schedule: Schedule | None = None) -> list[list[range]]:
        """Return for each pipe rank the layers of its stages.

        Args:
            layout: the layout.
            schedule: a schedule of the user's own, which takes the place of the layout's schedule and chunks.
        """
        return self.stage_layers.stages(layout.placement if schedule is None else schedule.placement)

    # ---------------------------------------------------------------------------------------------- model states

    def buckets(self, layout: ParallelLayout, tensor_rank: int | None = None) -> list[Counter[BucketShape]]:
        """Return the ZeRO buckets of each pipe rank.

        Args:
            layout: the layout.
            tensor_rank: rank on the tensor axis; None: the last one, whose shards are the largest.
        """
        split = StateSplit.of(layout, tensor_rank).buckets
        return [self.state_memory.buckets(rank, split) for rank in self.stage_layers.ranks(layout.placement)]

    def states(self, layout: ParallelLayout, tensor_rank: int | None = None) -> list[RankMemory]:
        """Return the bytes that each pipe rank holds between two steps. The other kinds are 0.

        Arguments are those of ``buckets``.
        """
        split = StateSplit.of(layout, tensor_rank)
        ranks = self.stage_layers.ranks(layout.placement)
        return [RankMemory.of(self.state_memory.bytes(rank, split), 0.0, 0.0, 0.0) for rank in ranks]

    # -------------------------------------------------------------------------------------------------- everything

    def ranks(
        self, layout: ParallelLayout, batch: int, sequence: int, schedule: Schedule | None = None
    ) -> list[RankMemory]:
        """Return the bytes of each pipe rank in a training step, on the tensor-parallel rank with most of them.

        Args:
            layout: the layout.
            batch: sequences of a step, over all replicas.
            sequence: tokens of a sequence.
            schedule: as for ``stages``.

        Raises:
            ValueError: the batch or the layout does not fit the model; the message says how. Or the layout has options
                of the schedule, and no schedule is given.
        """
        if schedule is not None:
            return self._ranks_of(schedule, layout, sequence)
        if layout.changes != UNCHANGED:
            raise ValueError(
                f"the memory of {layout} depends on the times of its passes. Leave the options of the schedule out, or "
                "ask triax plan --layout."
            )
        flights = in_flight(layout.schedule, layout.pipe, layout.chunks, layout.microbatches(batch))
        ranks = self.stage_layers.ranks(layout.placement)
        split = _tokens_of(layout, sequence)
        return [self._memory(rank, tuple(counts), layout, split) for rank, counts in zip(ranks, flights, strict=True)]

    def _ranks_of(self, schedule: Schedule, layout: ParallelLayout, sequence: int) -> list[RankMemory]:
        """Return ``ranks`` for a schedule of the user's own, or one with options."""
        slices = len(schedule.slices)
        split, whole = _tokens_of(layout, sequence, slices), _tokens_of(layout, sequence)
        memories = []
        for number, rank in enumerate(self.stage_layers.ranks(schedule.placement)):
            counts = counts_in_flight(schedule)[number]
            flights = tuple(tuple(slices * held for held in counts_of) for counts_of in counts)
            beside = self._recomputed(schedule, number, whole) + self._shared_keys(schedule, number, rank, whole)
            memories.append(self._memory(rank, flights, layout, split, beside))
        return memories

    def peak(self, layout: ParallelLayout, batch: int, sequence: int) -> RankMemory:
        """Return the bytes of the pipe rank that needs most of them: the largest of ``ranks``, but faster."""
        microbatches = _until_steady(layout.schedule, layout.pipe, layout.microbatches(batch))
        ranks = self._different_ranks(layout.placement, layout.schedule, layout.pipe, layout.chunks, microbatches)
        split = _tokens_of(layout, sequence)
        memories = (self._memory(rank, flights, layout, split) for rank, flights in ranks)
        return max(memories, key=lambda memory: memory.total)

    @cached_method
    def _different_ranks(
        self, placement: tuple[int, ...], schedule: str, pipe: int, chunks: int, microbatches: int
    ) -> list[tuple[RankLayers, Flights]]:
        """Return the ranks with different layers, each with the most microbatches that such a rank has in flight."""
        counts_of: dict[RankLayers, list[tuple[float, ...]]] = {}
        flights = in_flight(schedule, pipe, chunks, microbatches)
        for rank, counts in zip(self.stage_layers.ranks(placement), flights, strict=True):
            counts_of.setdefault(rank, []).extend(counts)
        return [(rank, tuple(largest_counts(counts))) for rank, counts in counts_of.items()]

    def check(self, layout: ParallelLayout, sequence: int) -> None:
        """Check that the layout can shard the model and the sequence.

        Raises:
            ValueError: it cannot; the message has the numbers.
        """
        self.config.check_tensor(layout.tensor)
        self.cuts(layout.pipe * layout.chunks)
        experts = max((layer.feedforward.experts for layer in self.layers if layer.feedforward), default=0)
        if layout.expert > 1 and (not experts or experts % layout.expert):
            what = f"the model's blocks have {experts} experts" if experts else "the model has no experts"
            raise ValueError(f"expert={layout.expert} is impossible, because {what}. Give a divisor of their number.")
        lengths, reason = (1.0,) * layout.slices, self.config.refuses_slices()
        require_slices(lengths, sequence, layout.tensor, layout.context, reason)
        if layout.sequence_parallel and sequence % (layout.tensor * layout.context):
            raise ValueError(
                f"sequence={sequence} cannot be sharded over tensor x context = {layout.tensor} x {layout.context}, as "
                f"sequence parallelism does. Give a multiple of {layout.tensor * layout.context} tokens."
            )

    def layer_activations(self, layer: LayerShape, tokens: float, sequence: int, layout: ParallelLayout) -> float:
        """Return the bytes that one layer keeps of a microbatch until its backward pass.

        Args:
            layer: the layer.
            tokens: tokens of a microbatch on this rank, before sequence parallelism divides them.
            sequence: tokens of a whole sequence.
            layout: the layout.
        """
        kind = self.stage_layers.kinds.index(layer)
        return self.layer_memory.activations(kind, LayerSplit.of(layout, tokens, sequence))

    # ---------------------------------------------------------------------------------------------------- a rank

    def _memory(
        self, rank: RankLayers, flights: Flights, layout: ParallelLayout, split: LayerSplit, beside: float = 0.0
    ) -> RankMemory:
        """Return the bytes of a rank.

        Args:
            rank: its layers.
            flights: microbatches, or slices, that it has in flight.
            layout: the layout.
            split: tokens of one of them.
            beside: bytes beside their activations.
        """
        state_split = StateSplit.of(layout)
        activations = self._activations(rank, flights, split) + beside
        temporaries = self.state_memory.working(rank, state_split) + self._backward(rank, split)
        if layout.pipe > 1:  # sent and received, forward and backward
            temporaries += 4 * self._message(split)
        margin = FRAGMENTS * (activations + temporaries) + self.reserve
        return RankMemory.of(self.state_memory.bytes(rank, state_split), activations, temporaries, margin)

    @cached_method
    def _activations(self, rank: RankLayers, flights: Flights, split: LayerSplit) -> float:
        """Return the bytes of activations of all that a rank has in flight."""
        stages = [self._stage_activations(kinds, split) for kinds in rank.kinds]
        # A chunk's logits exist in the backward pass alone.
        has_head = any(self.layer_memory.kinds[kind].kind == "head" for kind in rank.counts)
        loss = self.layer_memory.loss(split.loss_chunk, split.tensor) if has_head else 0.0
        return max(sum(map(mul, counts, stages)) for counts in flights) + loss

    def _stage_activations(self, kinds: Sequence[int], split: LayerSplit) -> float:
        """Return the bytes that a stage keeps of a slice."""
        return sum(self.layer_memory.activations(kind, split) for kind in kinds)

    @cached_method
    def _backward(self, rank: RankLayers, split: LayerSplit) -> float:
        """Return the bytes that the backward pass of one layer needs at most."""
        return max((self.layer_memory.working(kind, split) for kind in rank.counts), default=0.0)

    def _message(self, split: LayerSplit) -> float:
        """Return the bytes of a message between two stages."""
        return self.options.size * split.tokens * self.config.hidden_size / split.hidden_shards

    # ----------------------------------------------------------------- beside activations: options of a schedule

    def _recomputed(self, schedule: Schedule, rank: int, split: LayerSplit) -> float:
        """Return the bytes that stay of recomputed activations: inputs of the stages, and what the loss keeps."""
        if not schedule.recomputes:
            return 0.0
        stages = [stage for stage, home in enumerate(schedule.placement) if home == rank]
        stays = [self._message(split) if stage else 0.0 for stage in stages]  # stage 0 has the data
        if stages[-1] == schedule.stages - 1:
            stays[-1] += self.layer_memory.activations(self.stage_layers.kind_of[-1], split)
        without = tuple(tuple(op for op in order if op.kind != "C") for order in schedule.orders)
        counts = counts_in_flight(replace(schedule, orders=without))[rank]
        return max(sum(map(mul, held, stays)) for held in counts)

    def _shared_keys(self, schedule: Schedule, number: int, rank: RankLayers, split: LayerSplit) -> float:
        """Return the bytes of keys and values that the slices of a sequence share, and of their gradients.

        They stay until the backward of the first slice. One sequence at a time has gradients, and the backward of a
        slice makes gradients of its own.
        """
        if len(schedule.slices) == 1:
            return 0.0
        size, wide = self.options.size, max(4, self.options.size)
        elements = {kind: split.tokens * self.layer_memory.keys(kind, split.tensor) for kind in rank.counts}
        stages = [sum(elements[kind] for kind in kinds) for kinds in rank.kinds]
        counts = counts_in_flight(_of_first_slices(schedule))[number]
        keys = size * max(sum(map(mul, held, stages)) for held in counts)
        return keys + wide * (sum(stages) + max(elements.values(), default=0.0))


def _tokens_of(layout: ParallelLayout, sequence: int, slices: int = 1) -> LayerSplit:
    """Return a microbatch of a layout, or one of the slices of its sequences."""
    tokens = layout.microbatch * sequence / (layout.context * slices)
    return LayerSplit.of(layout, tokens, sequence // slices, slices)


def _of_first_slices(schedule: Schedule) -> Schedule:
    """Return the ops of first slices as a schedule, whose activations live as long as a sequence is under way."""
    n = len(schedule.slices)
    orders = (
        tuple(op._replace(microbatch=op.microbatch // n) for op in order if op.microbatch % n == 0)
        for order in schedule.orders
    )
    return replace(schedule, orders=tuple(orders), slices=(1,))


def in_flight(schedule: str, pipe: int, chunks: int, microbatches: int) -> list[list[tuple[float, ...]]]:
    """Return for each pipe rank the largest numbers of microbatches that its stages keep activations of.

    A rank with several stages may have several largest numbers, of which none is larger in all stages: with chunks=2,
    (3, 1) and (2, 2). Of numbers that change linearly from pass to pass, the first and the last stand for all: a sum
    over stages is largest at one of them.
    """
    closed = RECIPES[schedule].in_flight(pipe, microbatches, chunks)
    if closed is not None:
        return closed
    return counts_in_flight(named_schedule(schedule, pipe, _until_steady(schedule, pipe, microbatches), chunks))


def _until_steady(schedule: str, pipe: int, microbatches: int) -> int:
    """Return a number of microbatches of which as many are in flight.

    The peak is reached while the pipeline fills, or in the steady state that follows: later microbatches add nothing.
    """
    if RECIPES[schedule].steady(pipe) == math.inf:
        return microbatches
    return min(microbatches, 4 * pipe + microbatches % pipe)
