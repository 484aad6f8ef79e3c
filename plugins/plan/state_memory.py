"""Bytes of model states on a rank: parameters, gradients, masters and optimizer state in ZeRO's buckets, and buffers.

Buckets are those that ``zero.flat`` makes, padding included: byte for byte what ``engine.memory_report()`` counts.

    weights of a rank ---> buckets ---> bytes of each bucket
       WeightShard        BucketShape      StateMemory.bytes

A bucket of n elements, padded to w, on r replicas, with z = w / r (Rajbhandari et al. 2020, figure 1), in elements:

| stage | parameters | gradients | masters, optimizer state |
|---|---|---|---|
| 0, and a bucket without replicas | w | w | w |
| 1 | w | w | z |
| 2 | w | z; w if another pipe rank has the weight too | z |
| 3 | z; w if it is persistent | z; w as in stage 2 | z |

With offload the CPU holds masters, optimizer state, and the gradients that stages 2 and 3 keep.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

from ...base.formulas import BYTES, STATE_BYTES, STATES
from ...options.engine import EngineOptions
from ...options.named import Optimizer
from ...zero.flat import ALIGN, BLOCK, LEAST_CODED, REPLICATED, Item, rules_of_size
from ...zero.flat import plan as plan_buckets
from .additive import Additive
from .cached import cached_method
from .layer_shapes import LayerShape, Weight
from .layers_by_kind import TIED_KIND, RankLayers, TiedWeight
from .parallel_layout import ParallelLayout, Replicas

BUCKET = 2**22  # default of ``zero.bucket_size``, in elements


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
        state: ``optimizer.state``, kind of the optimizer's state between two steps.
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
    state: str | None = None

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
            state=options.optimizer.state if isinstance(options.optimizer, Optimizer) else None,
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
    def align(self) -> int:
        """Elements to whose multiples parameters and shards are padded."""
        return BLOCK if self.state in ("int8", "int4") else ALIGN

    @property
    def states(self) -> int:
        """Number of state tensors of the optimizer."""
        return STATES[self.optimizer.lower()] if isinstance(self.optimizer, str) else self.optimizer


@dataclass(frozen=True)
class StateBytes(Additive):
    """Bytes that a rank holds between two steps, by kind."""

    parameters: float = 0
    gradients: float = 0
    masters: float = 0
    optimizer: float = 0
    buffers: float = 0


class BucketShape(NamedTuple):
    """Properties of a ZeRO bucket on which its bytes depend.

    Attributes:
        numel: elements, before they are padded to the number of shards.
        expert: it holds experts, whose replicas are data x context / expert ranks.
        tied: other pipe ranks hold it too, so that its whole gradient is kept.
        persistent: stage 3 does not shard its weights.
        small: its parameters are too small for codes, so that their optimizer state has full precision.
    """

    numel: int
    expert: bool
    tied: bool
    persistent: bool
    small: bool


class WeightShard(NamedTuple):
    """A rank's shard of one weight.

    Attributes:
        numel: its elements.
        largest: elements of the largest shard on the tensor axis.
        expert: the weight is an expert's, and the expert axis shards it.
        group: number of the parameter group.
        small: the whole weight is too small for codes of optimizer state.
    """

    numel: int
    largest: int
    expert: bool
    group: int
    small: bool


class StateSplit(NamedTuple):
    """The part of a layout on which model states depend.

    Attributes:
        tensor_rank: the rank on the tensor axis.
        tensor, expert, zero, offload: as in ``ParallelLayout``.
        replicas, shards: ranks with the same weights, and ranks over which ZeRO shards them.
    """

    tensor_rank: int
    tensor: int
    expert: int
    zero: int
    offload: bool
    replicas: Replicas
    shards: Replicas

    @classmethod
    def of(cls, layout: ParallelLayout, tensor_rank: int | None = None) -> StateSplit:
        """Return the part of a layout for a rank on the tensor axis; None: the last one, whose shards are largest."""
        rank = layout.tensor - 1 if tensor_rank is None else tensor_rank
        return cls(rank, layout.tensor, layout.expert, layout.zero, layout.offload, layout.replicas, layout.shards)

    @property
    def buckets(self) -> BucketSplit:
        """The part on which the buckets depend."""
        alone = Replicas(*(count == 1 and not self.offload for count in self.replicas))
        return BucketSplit(self.tensor_rank, self.tensor, self.expert, alone, self.zero == 3)

    def stage(self, expert: bool) -> int:
        """Return the stage of ZeRO that a bucket has: without shards and offload, none."""
        return self.zero if self.shards.of(expert) > 1 or self.offload else 0


class BucketSplit(NamedTuple):
    """The part of a layout on which ZeRO's buckets depend.

    Attributes:
        tensor_rank, tensor, expert: as in ``StateSplit``.
        alone: True for weights and for experts, whose numbers no rank sends.
        by_layer: each layer has buckets of its own, as in stage 3; else each stage.
    """

    tensor_rank: int
    tensor: int
    expert: int
    alone: Replicas
    by_layer: bool


class StateMemory:
    """Bytes of the model states of a rank.

    Args:
        kinds: the different layers of the model.
        options: training options.
    """

    def __init__(self, kinds: Sequence[LayerShape], options: StateOptions) -> None:
        self.kinds, self.options = kinds, options

    @cached_method
    def bytes(self, rank: RankLayers, split: StateSplit) -> StateBytes:
        """Return the bytes that a rank holds between two steps."""
        buffers = float(sum(self.kinds[kind].buffers * count for kind, count in rank.counts.items()))
        buckets = self.buckets(rank, split.buckets).items()
        trained = StateBytes.total(self._bucket_bytes(bucket, split) * count for bucket, count in buckets)
        if not self.options.frozen:
            return replace(trained, buffers=buffers)
        held = trained.parameters if split.zero == 3 else self._frozen(rank, split.buckets)
        return StateBytes(parameters=held, buffers=buffers)

    def _bucket_bytes(self, bucket: BucketShape, split: StateSplit) -> StateBytes:
        """Return the bytes of one bucket: the table at the head of this file."""
        size, wide, on_device = self.options.size, self.options.wide, not split.offload
        stage, shards = split.stage(bucket.expert), split.shards.of(bucket.expert)
        step = shards * self.options.align
        whole = -(-bucket.numel // step) * step
        owned = whole // shards if stage else whole
        sharded_gradient = stage >= 2 and not bucket.tied
        return StateBytes(
            parameters=size * (owned if stage == 3 and not bucket.persistent else whole),
            gradients=wide * (owned * on_device if sharded_gradient else whole),
            masters=wide * owned * (on_device and wide != size),
            optimizer=self._state_size(bucket) * owned * on_device * self.options.states,
        )

    def _state_size(self, bucket: BucketShape) -> float:
        """Return the bytes of an element of a state tensor."""
        kind = self.options.state
        return self.options.wide if kind is None or bucket.small else STATE_BYTES[kind]

    def _frozen(self, rank: RankLayers, split: BucketSplit) -> float:
        """Return the bytes of weights that are in no bucket, because they are not trained."""
        counts = Counter(rank.owned_counts)
        counts[TIED_KIND] += rank.tied is not TiedWeight.NONE
        return float(
            self.options.size
            * sum(count * sum(weight.numel for weight in self._weights(kind, split)) for kind, count in counts.items())
        )

    @cached_method
    def buckets(self, rank: RankLayers, split: BucketSplit) -> Counter[BucketShape]:
        """Return the buckets of a rank, and how many there are of each."""
        buckets: Counter[BucketShape] = Counter()
        runs = {(kind,): count for kind, count in rank.owned_counts.items()} if split.by_layer else Counter(rank.owned)
        for run, times in runs.items():
            for bucket, count in self._filled(run, split).items():
                buckets[bucket] += count * times
        if rank.tied is not TiedWeight.NONE:
            for bucket, count in self._filled((TIED_KIND,), split).items():
                buckets[bucket._replace(tied=rank.tied is TiedWeight.SHARED)] += count
        return buckets

    @cached_method
    def _filled(self, run: tuple[int, ...], split: BucketSplit) -> Counter[BucketShape]:
        """Return the buckets of a run of layers, as ``zero.bucketing`` fills them."""
        weights = [weight for kind in run for weight in self._weights(kind, split)]
        threshold = self.options.persistent if split.by_layer else 0
        items = []
        for number, weight in enumerate(weights):
            alone = bool(split.alone.of(weight.expert))
            rules = rules_of_size(number, weight.largest, threshold=threshold, nothing_sent=alone)
            key = (weight.expert, weight.group, weight.small, *rules)
            items.append(Item(number, weight.numel, REPLICATED, key, weight.largest))
        buckets: Counter[BucketShape] = Counter()
        for bucket in plan_buckets(items, self.options.bucket, self.options.align) if items else ():
            expert, _, small, persistent, _ = cast(tuple[bool, int, bool, bool, int | None], bucket.key)
            buckets[BucketShape(bucket.numel, expert, False, persistent, small)] += 1
        return buckets

    def _weights(self, kind: int, split: BucketSplit) -> list[WeightShard]:
        return self._shards(kind, split.tensor_rank, split.tensor, split.expert)

    @cached_method
    def _shards(self, kind: int, rank: int, tensor: int, expert: int) -> list[WeightShard]:
        """Return a rank's shards of a layer's weights."""
        layer = self.kinds[kind]
        return [
            WeightShard(
                math.prod(weight.local_shape(rank, tensor, (0, expert))),
                math.prod(weight.local_shape(tensor - 1, tensor, (0, expert))),
                weight.expert_dim is not None and expert > 1,
                0 if self.options.decays == "all" or _decays(layer, weight) else 1,
                self.options.align == BLOCK and math.prod(weight.shape) < LEAST_CODED,
            )
            for weight in layer.weights
        ]

    @cached_method
    def working(self, rank: RankLayers, split: StateSplit) -> float:
        """Return the bytes of weights that stage 3 gathers, and of gradients that are not sharded yet."""
        if split.zero < 2 or max(split.shards) == 1:
            return 0.0
        return self._gathered(rank, split) + self._unsharded_gradients(self.buckets(rank, split.buckets))

    def _gathered(self, rank: RankLayers, split: StateSplit) -> float:
        if split.zero < 3:
            return 0.0
        sizes = {kind: self._sharded_numel(self._weights(kind, split.buckets), split) for kind in rank.counts}
        if self.options.keep_gathered:
            return self.options.size * sum(sizes[kind] * count for kind, count in rank.counts.items())
        # One layer runs while the next one is gathered.
        return 2 * self.options.size * max(sizes.values(), default=0)

    @staticmethod
    def _sharded_numel(weights: Iterable[WeightShard], split: StateSplit) -> int:
        return sum(weight.numel for weight in weights if split.shards.of(weight.expert) > 1)

    def _unsharded_gradients(self, buckets: Mapping[BucketShape, int]) -> float:
        if not self.options.reduce_each_microbatch:
            return self.options.wide * sum(bucket.numel * n for bucket, n in buckets.items() if not bucket.tied)
        # One bucket is filled while two are reduced.
        return 3 * self.options.wide * max((bucket.numel for bucket in buckets), default=0)


def _decays(layer: LayerShape, weight: Weight) -> bool:
    """Return True if a weight decays under ``decays: matrices``: no norm, bias or embedding."""
    return len(weight.shape) > 1 and layer.kind not in ("embedding", "positions") and layer.tie is None
