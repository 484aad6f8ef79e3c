"""Bytes that a rank of each pipe stage holds, by kind, from a configuration and a layout.

Model states (parameters, gradients, masters, optimizer state) are those of ZeRO's buckets, padding included: byte for
byte what ``engine.memory_report()`` counts. Activations are ``activations.block_activations`` (Korthikanti et al.
2022) times the microbatches that the schedule has in flight. Temporaries and the margin are estimates.

>>> from triax.models.config import LlamaConfig
>>> from triax.plugins.plan.parallel_layout import ParallelLayout
>>> memory = ModelMemory(LlamaConfig.preset("llama3-8b"), precision="bf16")
>>> [each] = memory.ranks(ParallelLayout(data=8, zero=3), batch=64, sequence=8192)
>>> {kind: round(bytes / 2**30, 1) for kind, bytes in each._asdict().items() if kind in ("parameters", "optimizer")}
{'parameters': 1.9, 'optimizer': 7.5}
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import pairwise
from operator import mul
from typing import NamedTuple, cast

from ...base.formulas import BYTES, CHUNK_TOKENS, STATES
from ...grid import Axis
from ...models.config import TransformerConfig
from ...models.head_groups import HeadGroups
from ...options.engine import EngineOptions
from ...pipe.partition import boundaries, by_speed
from ...pipe.program.activations import counts_in_flight, largest_counts
from ...pipe.program.schedule import Schedule
from ...pipe.program.slices import require_slices
from ...pipe.schedules.registry import RECIPES, named_schedule
from ...zero.flat import REPLICATED, Item, rules_of_size
from ...zero.flat import plan as plan_buckets
from .activations import block_activations
from .layer_shapes import Attention, LayerShape, Weight, layers_of
from .parallel_layout import UNCHANGED, ParallelLayout

# Share of activations and temporaries that the caching allocator loses to fragments.
FRAGMENTS = 0.05
BUCKET = 2**22  # default of ``zero.bucket_size``, in elements
_ALIGN = 16  # elements; as ``zero.flat`` pads each replica's shard


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
        return sum(self[:5])

    @property
    def total(self) -> float:
        """Sum of all kinds."""
        return sum(self)


class BucketShape(NamedTuple):
    """Properties of a ZeRO bucket on which its bytes depend.

    Attributes:
        numel: elements, before they are padded to the number of replicas.
        expert: it holds experts, whose replicas are data x context / expert ranks.
        tied: other pipe ranks hold it too, so that its whole gradient is kept.
        persistent: stage 3 does not shard its weights.
    """

    numel: int
    expert: bool
    tied: bool
    persistent: bool


@dataclass(frozen=True)
class StateOptions:
    """Training options on which the bytes of model states depend.

    Attributes:
        precision: ``fp64``, ``fp32``, ``bf16`` or ``fp16``.
        low_precision_masters: no fp32 masters and gradients with bf16 (``bf16_master_weights_and_grads``).
        optimizer: name of the optimizer, or the number of its state tensors of parameter size.
        bucket: ``zero.bucket_size``, in elements.
        persistent: ``stage3_param_persistence_threshold``, in elements.
        keep_gathered: ``stage3_keep_gathered``.
        reduce_each_microbatch: as in ``zero``.
        decays: ``matrices``: matrices and the other parameters are two parameter groups, which share no bucket;
            ``all``: one group.
        frozen: no weight is trained, as under LoRA, whose factors do not count here.
        mlp_tile: ``recompute.mlp_tile``, in tokens of a sequence.
    """

    precision: str = "bf16"
    low_precision_masters: bool = False
    optimizer: str | int = "adamw"
    bucket: int = BUCKET
    persistent: int = 0
    keep_gathered: bool = False
    reduce_each_microbatch: bool = True
    decays: str = "all"
    frozen: bool = False
    mlp_tile: int | None = None

    def __post_init__(self) -> None:
        if self.precision not in BYTES:
            raise ValueError(f"precision is {self.precision!r}. Give one of {', '.join(BYTES)}.")
        if isinstance(self.optimizer, str) and self.optimizer.lower() not in STATES:
            raise ValueError(
                f"optimizer is {self.optimizer!r}, whose number of state tensors is unknown. Give one of "
                f"{', '.join(STATES)}, or the number."
            )
        if self.decays not in ("all", "matrices"):
            raise ValueError(f"decays is {self.decays!r}. Give 'matrices' or 'all'.")

    @classmethod
    def of(cls, options: EngineOptions, precision: str, optimizer: str | int, decays: str = "all") -> StateOptions:
        """Return the options of an engine's options; the other arguments are fields."""
        zero = options.zero
        return cls(
            precision=precision,
            low_precision_masters=not options.precision.master_weights,
            optimizer=optimizer,
            bucket=zero.bucket_size,
            persistent=zero.persistence_threshold,
            keep_gathered=zero.keep_gathered,
            reduce_each_microbatch=zero.reduce_each_microbatch,
            decays=decays,
            frozen=options.lora is not None,
            mlp_tile=options.recompute.mlp_tile,
        )

    @property
    def size(self) -> int:
        """Bytes of a weight."""
        return BYTES[self.precision]

    @property
    def wide(self) -> int:
        """Bytes of an element of masters, gradients and optimizer state."""
        return self.size if self.low_precision_masters else max(self.size, 4)

    @property
    def states(self) -> int:
        """Number of state tensors of the optimizer."""
        return STATES[self.optimizer.lower()] if isinstance(self.optimizer, str) else self.optimizer


class ModelMemory:
    """Memory of one model on any layout. Sums over layers are kept, so that a search may ask for many layouts.

    Args:
        config: the model's configuration.
        precision, optimizer: as for ``StateOptions``.
        options: further options; None: the defaults, with ``precision`` and ``optimizer``.
        partition: how the list of layers is cut into stages, as for ``PipelineModule``.
        speeds: speed of each rank of the pipe axis, by which ``parameters`` then cuts; (): all have the same.
        shard_tensor: the tensor axis shards experts.
        fused_attention: attention does not keep its s x s probabilities. False: it does, as in Korthikanti et al.
        fused_kernels: as for ``Machine``: an MLP's gate and rotary positions keep their inputs alone.
        device: ``cuda`` or ``cpu``. On a CPU torch has no fused RMSNorm, which then keeps more.
        reserve: bytes of the device's context and communicators, part of the margin.
        document_mask: tokens attend within their document only, by a mask (models/packed.py).

    Attributes:
        layers: the model's layers.
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
        fused_attention: bool = True,
        fused_kernels: bool = False,
        device: str = "cuda",
        reserve: int = 2**30,
        document_mask: bool = False,
    ) -> None:
        self.config, self.fused_attention, self.reserve = config, fused_attention, reserve
        self.document_mask = document_mask
        self.shard_tensor, self.fused_kernels, self._on_cpu = shard_tensor, fused_kernels, device == "cpu"
        self.options = options or StateOptions(precision=precision, optimizer=optimizer)
        self.layers = layers_of(config, shard_tensor)
        self._partition, self._speeds = partition, tuple(speeds)
        # Equal layers have one number, by which everything below is remembered.
        numbers: dict[LayerShape, int] = {}
        self._kind_of = [numbers.setdefault(layer, len(numbers)) for layer in self.layers]
        self._kinds = list(numbers)
        self._cuts: dict[int, list[int]] = {}
        self._places: dict[tuple[object, ...], _Placed] = {}
        self._items: dict[tuple[object, ...], list[_WeightShard]] = {}
        self._run_buckets: dict[tuple[object, ...], Counter[BucketShape]] = {}
        self._rank_buckets: dict[tuple[object, ...], Counter[BucketShape]] = {}
        self._rank_states: dict[tuple[object, ...], _States] = {}
        self._working: dict[tuple[object, ...], float] = {}
        self._backward: dict[tuple[object, ...], float] = {}
        self._ranks: dict[tuple[object, ...], list[_RankClass]] = {}

    # ---------------------------------------------------------------------------------------------------- stages

    def cuts(self, stages: int) -> list[int]:
        """Return the boundaries of the stages: stage ``s`` has the layers ``cuts[s]`` to ``cuts[s + 1] - 1``.

        Raises:
            ValueError: there are fewer layers than stages, or the given boundaries are of another number of stages.
        """
        if stages not in self._cuts:
            names = [layer.name for layer in self.layers]
            counts = [float(layer.parameters) for layer in self.layers]
            if self._speeds and stages == len(self._speeds) and self._partition == "parameters":
                self._cuts[stages] = by_speed(counts, self._speeds)
            else:
                self._cuts[stages] = boundaries(self._partition, stages, names, lambda: counts)
        return self._cuts[stages]

    def stages(self, layout: ParallelLayout, schedule: Schedule | None = None) -> list[list[range]]:
        """Return for each pipe rank the layers of its stages.

        Args:
            layout: the layout.
            schedule: a schedule of the user's own, which takes the place of the layout's schedule and chunks.
        """
        if schedule is None:
            place = RECIPES[layout.schedule].place(layout.pipe, layout.chunks)
        else:
            place = schedule.placement
        stages = [range(a, b) for a, b in pairwise(self.cuts(len(place)))]
        return [[stages[s] for s, rank in enumerate(place) if rank == pipe] for pipe in range(layout.pipe)]

    # ---------------------------------------------------------------------------------------------- model states

    def buckets(self, layout: ParallelLayout, tensor_rank: int | None = None) -> list[Counter[BucketShape]]:
        """Return the ZeRO buckets of each pipe rank.

        Args:
            layout: the layout.
            tensor_rank: rank on the tensor axis; None: the last one, whose shards are the largest.
        """
        last = layout.tensor - 1 if tensor_rank is None else tensor_rank
        return [self._buckets_of(each, layout, last) for each in self._placed(layout)]

    def states(self, layout: ParallelLayout, tensor_rank: int | None = None) -> list[RankMemory]:
        """Return the bytes that each pipe rank holds between two steps. The other kinds are 0.

        Arguments are those of ``buckets``.
        """
        last = layout.tensor - 1 if tensor_rank is None else tensor_rank
        return [RankMemory(*self._states_of(each, layout, last), 0.0, 0.0, 0.0) for each in self._placed(layout)]

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
        if schedule is None and layout.changes != UNCHANGED:
            raise ValueError(
                f"the memory of {layout} depends on the times of its passes. Leave the options of the schedule out, or "
                "ask triax plan --layout."
            )
        if schedule is None:
            flights = in_flight(layout.schedule, layout.pipe, layout.chunks, layout.microbatches(batch))
        else:
            flights = counts_in_flight(schedule)
        placed = self._placed(layout, schedule)
        count = 1 if schedule is None else len(schedule.slices)
        flights = (
            [[tuple(count * held for held in each) for each in most] for most in flights] if count > 1 else flights
        )
        beside = [0.0] * len(placed) if schedule is None else self._beside(schedule, placed, layout, sequence)
        return [
            self._memory(_RankClass(each, most), layout, sequence, count, more)
            for each, most, more in zip(placed, flights, beside, strict=True)
        ]

    def peak(self, layout: ParallelLayout, batch: int, sequence: int) -> RankMemory:
        """Return the bytes of the pipe rank that needs most of them: the largest of ``ranks``, but faster."""
        microbatches = _until_steady(layout.schedule, layout.pipe, layout.microbatches(batch))
        key = (layout.schedule, layout.pipe, layout.chunks, microbatches)
        if key not in self._ranks:
            flights = in_flight(*key)
            classes: dict[_Placed, list[tuple[float, ...]]] = {}
            for placed, most in zip(self._placed(layout), flights, strict=True):
                classes.setdefault(placed, []).extend(most)
            self._ranks[key] = [_RankClass(placed, largest_counts(counts)) for placed, counts in classes.items()]
        return max((self._memory(each, layout, sequence) for each in self._ranks[key]), key=lambda memory: memory.total)

    def _beside(
        self, schedule: Schedule, placed: Sequence[_Placed], layout: ParallelLayout, sequence: int
    ) -> list[float]:
        """Return the bytes that each pipe rank keeps beside activations, for the options of a schedule.

        Of recomputed activations the inputs of the stages stay, and what the loss keeps. Slices of a sequence share
        keys and values, until the backward of the first one, and their gradients, which one sequence at a time has; and
        the backward of a slice makes gradients of its own.
        """
        tokens = layout.microbatch * sequence / layout.context
        found = [0.0] * len(placed)
        if schedule.recomputes:
            kept = [tuple(op for op in order if op.kind != "C") for order in schedule.orders]
            for rank, counts in enumerate(counts_in_flight(replace(schedule, orders=tuple(kept)))):
                own = [stage for stage, home in enumerate(schedule.placement) if home == rank]
                stays = [self._boundary(tokens, layout) if stage else 0.0 for stage in own]  # stage 0 has the data
                if own[-1] == schedule.stages - 1:
                    stays[-1] += self.layer_activations(self.layers[-1], tokens, sequence, layout)
                found[rank] += max(sum(map(mul, each, stays)) for each in counts)
        if len(schedule.slices) > 1:
            for rank, counts in enumerate(counts_in_flight(_of_first_slices(schedule))):
                kinds = placed[rank].kinds
                of = {kind: tokens * self._keys(self._kinds[kind], layout) for kind in placed[rank].counts}
                stages = [sum(of[kind] for kind in stage) for stage in kinds]
                size, wide = self.options.size, max(4, self.options.size)
                found[rank] += size * max(sum(map(mul, each, stages)) for each in counts)
                found[rank] += wide * (sum(stages) + max(of.values(), default=0.0))
        return found

    @staticmethod
    def _keys(layer: LayerShape, layout: ParallelLayout) -> int:
        """Return the elements per token of the keys and values of a layer on one rank."""
        if layer.attention is None:
            return 0
        sizes = layer.attention
        return kv_heads(sizes, layout.tensor) * (sizes.query_dim + sizes.value_dim)

    def _passed_on(self, layer: LayerShape, layout: ParallelLayout) -> int:
        """Return the bytes per token of keys and values, rotated and not, that a slice of a sequence does not keep."""
        if layer.attention is None or not layer.attention.rotated:
            return 0
        rotated = kv_heads(layer.attention, layout.tensor) * layer.attention.query_dim
        return self.options.size * (self._keys(layer, layout) + (0 if self.fused_kernels else rotated))

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
        if layer.kind == "block":
            return self._block(layer, tokens, sequence, layout)
        size, full = self.options.size, layout.recompute == "full"
        apart = layout.tensor if layout.sequence_parallel else 1
        hidden = tokens * layer.hidden / apart
        if layer.kind == "embedding":
            return 9.0 * tokens if layout.tensor > 1 and not full else 0.0  # the shifted ids and a mask
        if layer.kind == "positions":
            return hidden if layer.dropout and not full else 0.0  # the dropout's mask
        if layer.kind == "projection":
            return size * tokens * layer.products[0].inputs / apart
        if layer.kind == "norm":
            taken, numbers = self._of_norms(layer)
            return size * hidden if full else size * (taken * hidden + numbers * tokens / apart)
        if tokens > CHUNK_TOKENS:
            return size * hidden
        return size * hidden + self._logits(tokens, layout)

    def _logits(self, tokens: float, layout: ParallelLayout) -> float:
        """Return the bytes that the loss of some tokens keeps: logits, and of each token a logarithm and a mask."""
        return (self.options.size * self._vocabulary(layout) + max(self.options.size, 4) + 1) * tokens

    def _chunk(self, tokens: float, sequence: int, layout: ParallelLayout) -> int:
        """Return the tokens of a chunk of head and loss, as ``pipe/chunked_loss.py`` cuts them; 0 if nothing is cut."""
        if tokens <= CHUNK_TOKENS:
            return 0
        row = sequence // layout.context
        apart = layout.tensor if layout.sequence_parallel else 1
        return CHUNK_TOKENS // row * row if row <= CHUNK_TOKENS else CHUNK_TOKENS // apart * apart

    def _of_norms(self, layer: LayerShape) -> tuple[float, float]:
        """Return what the norms of a layer keep: tensors of the hidden width, and numbers per token, in elements."""
        size, wide = self.options.size, max(self.options.size, 4)
        if layer.norm.startswith("layer"):
            return layer.inputs, 2 * layer.norms * (size if self._on_cpu else wide) / size
        numbers = layer.norms * wide / size
        if not self._on_cpu:
            return layer.inputs, numbers
        # Its products one by one: x, in fp32 at least, and x divided by its norm.
        return (layer.inputs if wide == size else layer.norms * wide / size) + layer.norms * wide / size, numbers

    def _block(self, layer: LayerShape, tokens: float, sequence: int, layout: ParallelLayout) -> float:
        size, wide = self.options.size, max(self.options.size, 4)
        apart = layout.tensor if layout.sequence_parallel else 1
        sizes, attention, feedforward = (
            local_sizes(layer, layout, self.shard_tensor, self.fused_kernels),
            layer.attention,
            layer.feedforward,
        )
        assert attention is not None and feedforward is not None
        taken, numbers = self._of_norms(layer)
        own = sizes.attention
        # Tiles of the MLP, and an MLP that is computed again, keep its input alone.
        tiled = self._tile(layer, sequence, layout) < 1.0 or layout.recompute == "mlp"
        # The output is laid out as the rotated queries, head by head, so the last product's input is a copy of it.
        if attention.rotated and layout.recompute in ("none", "mlp") and not self.fused_kernels:
            own += sizes.heads * attention.value_dim
        if layout.recompute in ("none", "mlp") and self._mask(layer, tokens, sequence, layout):
            own += repeated_keys(attention, layout.tensor, self.fused_kernels)
        kept = block_activations(
            tokens,
            layer.hidden,
            attention=own,
            heads=sizes.heads if self.fused_attention else 0.0,
            product=0.0 if tiled else sizes.product,
            activation=0.0 if tiled else sizes.activation + sizes.routed,
            hidden=taken + layer.branches,
            statistics=numbers,
            tensor=layout.tensor,
            sequence_parallel=bool(layout.sequence_parallel),
            recompute="none" if layout.recompute == "mlp" else layout.recompute,
            dropout=layer.dropout,
            precision=self.options.precision,
        )
        if layout.recompute == "full":
            return kept
        if layout.recompute in ("none", "mlp") and not self.fused_attention:
            kept += _scores(tokens, sequence, layout, sizes.heads, size, layer.dropout)
        kept += size * attention.rotated * sequence / layout.context  # cosines and sines
        if attention.latent:
            kept += size * tokens * (2 * attention.latent - attention.rotated) / apart
        if feedforward.experts:
            # The router: its input in fp32, the scores, and of each expert of a token its number twice and its weight.
            each = wide * feedforward.experts + (16 + wide + size) * feedforward.per_token + wide
            kept += tokens * (each + (wide * layer.hidden if wide != size else 0)) / apart
        return kept

    def _mask(self, layer: LayerShape, tokens: float, sequence: int, layout: ParallelLayout, slices: int = 1) -> float:
        """Return the bytes of a microbatch's document mask, (B, 1, T, T).

        Over a context axis, in slices and with a window, attention goes by blocks instead, which need no mask.
        """
        by_blocks = layer.attention is None or layer.attention.window is not None or layout.context * slices > 1
        return self.options.size * tokens * sequence if self.document_mask and not by_blocks else 0.0

    def _tile(self, layer: LayerShape, sequence: int, layout: ParallelLayout) -> float:
        """Return the part of its tokens that the MLP of a block runs on at a time; experts run on all."""
        if self.options.mlp_tile is None or layer.feedforward is None or layer.feedforward.experts:
            return 1.0
        apart = layout.context * (layout.tensor if layout.sequence_parallel else 1)
        return min(1.0, self.options.mlp_tile * apart / sequence)

    # ---------------------------------------------------------------------------------------------------- internal

    def _placed(self, layout: ParallelLayout, schedule: Schedule | None = None) -> list[_Placed]:
        """Return for each pipe rank the numbers of its layers, stage by stage, and how it holds the tied weight."""
        ends = (0, len(self.layers) - 1) if self.layers[0].tie is not None else ()
        ranks = self.stages(layout, schedule)
        holders = [any(end in stage for stage in stages for end in ends) for stages in ranks]
        found = []
        for stages, holds in zip(ranks, holders, strict=True):
            alone = not any(all(end in stage for end in ends) for stage in stages)  # else it is a weight of its stage
            tied = (1 if sum(holders) == 1 else 2) if holds and alone else 0
            apart = set(ends) if alone else {len(self.layers) - 1} if ends else set()
            kinds = tuple(tuple(self._kind_of[i] for i in stage) for stage in stages)
            owned = tuple(tuple(self._kind_of[i] for i in stage if i not in apart) for stage in stages)
            place = (kinds, owned, tied)
            if place not in self._places:
                self._places[place] = _Placed(*place)
            found.append(self._places[place])
        return found

    def _local(self, kind: int, layout: ParallelLayout, rank: int) -> list[_WeightShard]:
        key = (kind, layout.tensor, layout.expert, rank)
        if key not in self._items:
            layer, expert = self._kinds[kind], (0, layout.expert)
            self._items[key] = [
                _WeightShard(
                    math.prod(weight.local_shape(rank, layout.tensor, expert)),
                    math.prod(weight.local_shape(layout.tensor - 1, layout.tensor, expert)),
                    weight.expert_dim is not None and layout.expert > 1,
                    0 if self.options.decays == "all" or _decays(layer, weight) else 1,
                )
                for weight in layer.weights
            ]
        return self._items[key]

    def _buckets_of(self, placed: _Placed, layout: ParallelLayout, rank: int) -> Counter[BucketShape]:
        alone = tuple(count == 1 and not layout.offload for count in self._replicas(layout))
        key = (placed, layout.tensor, layout.expert, rank, alone, layout.zero == 3)
        if key in self._rank_buckets:
            return self._rank_buckets[key]
        found: Counter[BucketShape] = Counter()
        # In stage 3 buckets follow the layers, otherwise the stages.
        runs = {(kind,): n for kind, n in placed.owned_counts.items()} if layout.zero == 3 else Counter(placed.owned)
        for run, times in runs.items():
            inner = (run, *key[1:])
            if inner not in self._run_buckets:
                weights = [each for kind in run for each in self._local(kind, layout, rank)]
                self._run_buckets[inner] = self._fill(weights, alone, layout.zero == 3)
            for shape, count in self._run_buckets[inner].items():
                found[shape] += count * times
        if placed.tied:
            weights = self._local(self._kind_of[0], layout, rank)
            for shape, count in self._fill(weights, alone, layout.zero == 3).items():
                found[shape._replace(tied=placed.tied == 2)] += count
        self._rank_buckets[key] = found
        return found

    def _fill(self, weights: Sequence[_WeightShard], alone: Sequence[bool], stage3: bool) -> Counter[BucketShape]:
        """Return the buckets of weights, in the order of the model, as ``zero.bucketing`` fills them."""
        items, threshold = [], self.options.persistent if stage3 else 0
        for number, each in enumerate(weights):
            rules = rules_of_size(number, each.largest, threshold=threshold, nothing_sent=alone[each.expert])
            items.append(Item(number, each.numel, REPLICATED, (each.expert, each.group, *rules), each.largest))
        shapes: Counter[BucketShape] = Counter()
        for bucket in plan_buckets(items, self.options.bucket) if items else ():
            expert, _, persistent, _ = cast(tuple[bool, int, bool, int | None], bucket.key)
            shapes[BucketShape(bucket.numel, expert, False, persistent)] += 1
        return shapes

    def _states_of(self, placed: _Placed, layout: ParallelLayout, rank: int) -> _States:
        replicas = self._replicas(layout)
        key = (placed, layout.tensor, layout.expert, rank, replicas, layout.zero, layout.offload)
        if key not in self._rank_states:
            buckets = self._buckets_of(placed, layout, rank)
            buffers = sum(self._kinds[kind].buffers * count for kind, count in placed.counts.items())
            self._rank_states[key] = (*self._bytes(buckets, replicas, layout), float(buffers))
            if self.options.frozen:
                whole = self._frozen(placed, layout, rank) if layout.zero < 3 else self._rank_states[key][0]
                self._rank_states[key] = (whole, 0.0, 0.0, 0.0, float(buffers))
        return self._rank_states[key]

    def _bytes(
        self, buckets: Mapping[BucketShape, int], replicas: Sequence[int], layout: ParallelLayout
    ) -> tuple[float, float, float, float]:
        """Return the bytes of parameters, gradients, masters and optimizer state in buckets."""
        size, wide, on_device = self.options.size, self.options.wide, not layout.offload
        parameters = gradients = masters = states = 0
        for (numel, expert, tied, persistent), count in buckets.items():
            shards = replicas[expert]
            stage = layout.zero if shards > 1 or layout.offload else 0
            step = shards * _ALIGN
            whole = -(-numel // step) * step
            owned = whole // shards if stage else whole
            parameters += count * size * (owned if stage == 3 and not persistent else whole)
            transient = stage >= 2 and not tied
            gradients += count * wide * (owned * on_device if transient else whole)
            masters += count * wide * owned * (on_device and wide != size)
            states += count * wide * owned * on_device * self.options.states
        return parameters, gradients, masters, states

    def _frozen(self, placed: _Placed, layout: ParallelLayout, rank: int) -> float:
        """Return the bytes of weights that are in no bucket, because they are not trained."""
        counts = Counter(placed.owned_counts)
        counts[self._kind_of[0]] += placed.tied > 0
        sizes = {kind: sum(each.numel for each in self._local(kind, layout, rank)) for kind in counts}
        return float(self.options.size * sum(sizes[kind] * count for kind, count in counts.items()))

    @staticmethod
    def _replicas(layout: ParallelLayout) -> tuple[int, int]:
        """Return the number of replicas of a weight, and of an expert."""
        both = layout.data * layout.context
        return both, both // layout.expert

    def _memory(
        self, rank: _RankClass, layout: ParallelLayout, sequence: int, slices: int = 1, beside: float = 0.0
    ) -> RankMemory:
        """Return the bytes of a rank that has activations of slices in flight, and ``beside`` them others."""
        states = self._states_of(rank.placed, layout, layout.tensor - 1)
        tokens, sequence = layout.microbatch * sequence / (layout.context * slices), sequence // slices
        activations = self._activations(rank, tokens, sequence, layout, slices) + beside
        temporaries = self._temporaries(rank.placed, tokens, sequence, layout)
        margin = FRAGMENTS * (activations + temporaries) + self.reserve
        return RankMemory(*states, activations, temporaries, margin)

    def _activations(
        self, rank: _RankClass, tokens: float, sequence: int, layout: ParallelLayout, slices: int = 1
    ) -> float:
        """Return the bytes of activations of the microbatches that a rank has in flight."""
        key = (
            tokens,
            sequence,
            layout.tensor,
            layout.expert,
            layout.context,
            layout.sequence_parallel,
            layout.recompute,
        )
        if key not in rank.activations:
            kinds = rank.placed.counts
            of = {kind: self.layer_activations(self._kinds[kind], tokens, sequence, layout) for kind in kinds}
            if (
                slices > 1 and layout.recompute == "none"
            ):  # rotated keys, and values, are in the sequence's buffer alone
                of = {kind: kept - tokens * self._passed_on(self._kinds[kind], layout) for kind, kept in of.items()}
            masks = {kind: self._mask(self._kinds[kind], tokens, sequence, layout, slices) for kind in kinds}
            if layout.recompute == "full":  # each layer makes it again
                masks = dict.fromkeys(kinds, 0.0)
            # The blocks of a stage have one mask.
            kept = [sum(of[kind] for kind in stage) + max(masks[kind] for kind in stage) for stage in rank.placed.kinds]
            # A chunk's logits exist in the backward pass alone.
            chunk = max(
                (self._chunk(tokens, sequence, layout) for k in kinds if self._kinds[k].kind == "head"), default=0
            )
            rank.activations[key] = max(sum(map(mul, count, kept)) for count in rank.counts) + self._logits(
                chunk, layout
            )
        return rank.activations[key]

    def _temporaries(self, placed: _Placed, tokens: float, sequence: int, layout: ParallelLayout) -> float:
        key = (
            *(placed, tokens, sequence, layout.pipe > 1, layout.tensor, layout.expert, layout.sequence_parallel),
            *(layout.recompute, layout.zero, self._replicas(layout), layout.offload, layout.context),
        )
        if key not in self._working:
            self._working[key] = (
                self._sharding_work(placed, layout)
                + self._backward_work(placed, tokens, sequence, layout)
                + (4 * self._boundary(tokens, layout) if layout.pipe > 1 else 0.0)
            )
        return self._working[key]

    def _sharding_work(self, placed: _Placed, layout: ParallelLayout) -> float:
        """Return the bytes of weights that are gathered, and of gradients that are not sharded yet."""
        replicas, options = self._replicas(layout), self.options
        if layout.zero < 2 or max(replicas) == 1:
            return 0.0
        last = layout.tensor - 1
        gathered = 0.0
        if layout.zero == 3:
            layers = {
                kind: sum(each.numel for each in self._local(kind, layout, last) if replicas[each.expert] > 1)
                for kind in placed.counts
            }
            if options.keep_gathered:
                gathered = options.size * sum(layers[kind] * count for kind, count in placed.counts.items())
            else:  # one layer runs while the next one is gathered
                gathered = 2 * options.size * max(layers.values(), default=0)
        buckets = self._buckets_of(placed, layout, last)
        if not options.reduce_each_microbatch:
            return gathered + options.wide * sum(shape.numel * n for shape, n in buckets.items() if not shape.tied)
        # One bucket is filled while two are reduced.
        return gathered + 3 * options.wide * max((shape.numel for shape in buckets), default=0)

    def _backward_work(self, placed: _Placed, tokens: float, sequence: int, layout: ParallelLayout) -> float:
        """Return the bytes that the backward pass of one layer needs at most."""
        return max((self._work_of(kind, tokens, sequence, layout) for kind in placed.counts), default=0.0)

    def _work_of(self, kind: int, tokens: float, sequence: int, layout: ParallelLayout) -> float:
        axes = (layout.tensor, layout.expert, layout.context, layout.sequence_parallel, layout.recompute)
        key = (kind, tokens, sequence, *axes)
        if key in self._backward:
            return self._backward[key]
        layer, size = self._kinds[kind], self.options.size
        needed = 2 * size * tokens * layer.hidden / (layout.tensor if layout.sequence_parallel else 1)
        if layer.kind == "head" and tokens > CHUNK_TOKENS:
            # The gradients of a chunk's logits, and of the weight, which adds up in fp32 at least.
            own = sum(each.numel for each in self._local(kind, layout, layout.tensor - 1))
            needed += size * self._chunk(tokens, sequence, layout) * self._vocabulary(layout) + max(size, 4) * own
        elif layer.kind == "head":
            needed += size * tokens * self._vocabulary(layout)  # the gradient of the logits
        elif layer.kind == "block":
            sizes = local_sizes(layer, layout, self.shard_tensor, self.fused_kernels)
            part, wide = self._tile(layer, sequence, layout), sizes.product + sizes.activation + sizes.routed
            # Gradients; in tiles also what the tile keeps.
            needed += size * tokens * part * wide * (1 if part == 1.0 and layout.recompute != "mlp" else 2)
            if layout.recompute == "full":
                whole = replace(layout, recompute="none")
                needed += self.layer_activations(layer, tokens, sequence, whole)
                needed += self._mask(layer, tokens, sequence, layout)
            elif layout.recompute == "selective" and not self.fused_attention:
                needed += _scores(tokens, sequence, layout, sizes.heads, size, layer.dropout)
        if self.options.wide != size:  # a weight's gradient, before it is added to the fp32 one
            weights = self._local(kind, layout, layout.tensor - 1)
            needed += size * max((each.numel for each in weights), default=0)
        self._backward[key] = needed
        return needed

    def _boundary(self, tokens: float, layout: ParallelLayout) -> float:
        """Return the bytes of a message between two stages."""
        apart = layout.tensor if layout.sequence_parallel else 1
        return self.options.size * tokens * self.config.hidden_size / apart

    def _vocabulary(self, layout: ParallelLayout) -> int:
        return -(-self.config.vocab_size // layout.tensor)


# Bytes of parameters, gradients, masters, optimizer state and buffers.
_States = tuple[float, float, float, float, float]


class _WeightShard(NamedTuple):
    numel: int  # of this rank's shard
    largest: int  # of the largest shard on the tensor axis
    expert: bool
    group: int


@dataclass(frozen=True, eq=False)  # one object for equal ranks: it is a key, and its hash must be fast
class _Placed:
    kinds: tuple[tuple[int, ...], ...]  # the layers of each stage
    owned: tuple[tuple[int, ...], ...]  # without those whose weight is tied
    tied: int  # 1: a tied weight that only this rank holds, 2: another holds it too

    @cached_property
    def counts(self) -> dict[int, int]:
        """Number of layers of each kind."""
        return Counter(kind for stage in self.kinds for kind in stage)

    @cached_property
    def owned_counts(self) -> dict[int, int]:
        """Number of layers of each kind, without those whose weight is tied."""
        return Counter(kind for stage in self.owned for kind in stage)


@dataclass(frozen=True, eq=False)
class _RankClass:
    placed: _Placed
    counts: list[tuple[float, ...]]  # microbatches in flight in its stages, as ``in_flight`` returns them
    activations: dict[tuple[object, ...], float] = field(default_factory=dict)  # that were asked for


class LocalSizes(NamedTuple):
    """Elements per token of a block on one rank, and its heads.

    Attributes:
        attention: queries, keys, values and the output of attention.
        heads: query heads.
        product: output of the first product of the MLP, of shared experts and of the experts that a token goes to.
        activation: what follows, up to the input of the last product.
        routed: inputs of experts, and their outputs before they are summed.
    """

    attention: float
    heads: float
    product: float
    activation: float
    routed: float


def local_sizes(
    layer: LayerShape, layout: ParallelLayout, shard_tensor: bool = False, fused_kernels: bool = False
) -> LocalSizes:
    """Return the sizes of a block on the tensor-parallel rank with most of them; tokens are spread evenly over experts.

    Args:
        layer: a block.
        layout: the layout.
        shard_tensor: the tensor axis shards experts.
        fused_kernels: as for ``ModelMemory``.
    """
    attention, feedforward, tensor = layer.attention, layer.feedforward, layout.tensor
    assert attention is not None and feedforward is not None
    heads = -(-attention.heads // tensor)
    keys = kv_heads(attention, tensor)
    query, value = attention.query_dim, attention.value_dim
    if attention.latent:
        # Keys are concatenated into new tensors; values stay views of the product.
        kept = heads * (2 * query + (query - attention.rotated + value) + value)
    else:
        # Rotated keys are new tensors; values stay views of the product.
        kept = heads * (query + value) + keys * (query + value)
        kept += keys * query if (attention.rotated and not fused_kernels) or attention.norms else 0
        kept += heads * query if attention.norms else 0
    factor = 2 if feedforward.gated else 1
    if not feedforward.experts:
        width = -(-feedforward.width // tensor)
        return LocalSizes(kept, heads, factor * width, width if fused_kernels else factor * width, 0.0)
    # Without ``shard_tensor`` each rank has whole experts, for its own tokens.
    share = 1 / tensor if shard_tensor or layout.sequence_parallel else 1.0
    rows = feedforward.per_token * share
    routed = 2 * rows * layer.hidden * (tensor if shard_tensor else 1)
    shared = feedforward.shared * share
    product = factor * (rows * feedforward.width + shared)
    if fused_kernels:  # the products' inputs: tokens in the order of their experts, and the gate's output
        return LocalSizes(kept, heads, product, rows * feedforward.width + shared, routed / 2)
    return LocalSizes(kept, heads, product, factor * shared, routed)


def repeated_keys(attention: Attention, tensor: int, fused_kernels: bool = False) -> float:
    """Return the elements per token that keys and values take in addition if each query head has a copy of its own.

    The product of which values are a part is then not kept, nor are the rotated keys.
    """
    heads, keys = -(-attention.heads // tensor), kv_heads(attention, tensor)
    if heads == keys:
        return 0.0
    rotated = keys * attention.query_dim if (attention.rotated and not fused_kernels) or attention.norms else 0
    return (heads - keys) * (attention.query_dim + attention.value_dim) - rotated


@cache
def kv_heads(attention: Attention, tensor: int) -> int:
    """Return the most key/value heads that a tensor-parallel rank computes."""
    axes = (Axis("tensor", range(tensor), rank, None) for rank in range(tensor))
    return max(HeadGroups.on(axis, attention.heads, attention.kv_heads).count for axis in axes)


def _scores(tokens: float, sequence: int, layout: ParallelLayout, heads: float, size: int, dropout: bool) -> float:
    """Return the bytes of attention's s x s tensors: 5 a s^2 b in 16 bits (Korthikanti et al. 2022, section 4.1)."""
    each = size + (1 + size if dropout else 0)  # probabilities; the dropout's mask and output
    return each * tokens * sequence * heads


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


def _decays(layer: LayerShape, weight: Weight) -> bool:
    """Return True if a weight decays under ``decays: matrices``: no norm, bias or embedding."""
    return len(weight.shape) > 1 and layer.kind not in ("embedding", "positions") and layer.tie is None
