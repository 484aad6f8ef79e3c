"""Assignment of parameters to buckets, and the cast of tensors that lie in no bucket."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from ..grid import Grid
from .axis_options import ZeroOptions
from .bucket import Bucket
from .flat import ALIGN, BLOCK, PARTIAL, REPLICATED, SHARDED, Item, plan, rules_of_size
from .managed import BucketKey, ManagedParameter
from .offload import OffloadMemory
from .shard_groups import shards
from .stored_state import kind_of_state
from .summed_buckets import TransientBucket, WholeBucket

# Ends of the names of buffers that are not cast.
_KEPT = ("inv_freq", "correction_bias")


def make_buckets(
    members: Sequence[ManagedParameter],
    grid: Grid,
    options: ZeroOptions,
    capacity: int,
    memory: OffloadMemory,
) -> list[Bucket]:
    """Lay out parameters in buckets and move them there.

    Parameters that are not trained are put into buckets in stage 3 only, which shards them too. Integers (quantized
    weights, indices) keep their dtype there.

    Args:
        members: this rank's parameters, in the order of the model.
        grid: the grid of the replicas over which the buckets are sharded.
        options: options of ZeRO.
        capacity: maximum number of elements of a bucket; a larger parameter has a bucket of its own.
        memory: allocators of the offloaded tensors, made from ``options.offload``.
    """
    items = []
    low_precision = options.low_precision_parameters
    for number, member in enumerate(members):
        dtype = member.parameter.dtype
        if member.group is None and options.stage < 3:
            continue
        if dtype.is_complex:
            _refuse_real_parts(member, options)
        layout = member.layout
        replicas = layout.replicas if grid.expert.size > 1 else "data_context"
        ranks, size_of_group = grid.axis(replicas).size, shards(grid, replicas, options.shard_size)
        if replicas == "expert_data" and (options.exchange is not None or options.zeropp is not None):
            raise ValueError(
                f"{layout.name} holds experts, which are spread over the {grid.expert.size} ranks of the expert axis, "
                "and gradient compression, 1-bit optimizers and ZeRO++ exchange all gradients over data x context: "
                "leave that option out, or make the grid with expert=1"
            )
        run = SHARDED if layout.sharded else PARTIAL if layout.partial else REPLICATED
        layers = member.layers if options.stage == 3 else ()
        # Partial gradients are summed over the tensor axis, bucket by bucket: its ranks must have the same layout.
        tensor, expert = grid.tensor.size, (grid.expert.rank, grid.expert.size)
        size = max(math.prod(layout.local_shape(rank, tensor, expert)) for rank in range(tensor))
        persistent, own_bucket = rules_of_size(
            number,
            size,
            threshold=options.persistence_threshold if options.stage == 3 else 0,
            nothing_sent=ranks == 1 and not options.offload.portions,
        )
        key = BucketKey(
            stages=member.stages,
            layers=layers,
            tie=member.tie,
            counted=member.counted,
            group=member.group,
            dtype=dtype,
            persistent=persistent,
            low_precision=low_precision is None or member.parameter in low_precision,
            own_bucket=own_bucket,
            state=kind_of_state(
                None if member.group is None else options.state, layout, dtype, tensor, grid.expert.size
            ),
            replicas=replicas,
        )
        items.append(Item(number, member.parameter.numel(), run, key, size, size_of_group))
    buckets: list[Bucket] = []
    for flat in plan(items, capacity, BLOCK if options.state in ("int8", "int4") else ALIGN):
        assert isinstance(flat.key, BucketKey)
        sharded = options.sharding(flat.shards) >= 2 and flat.key.tie is None
        kind = TransientBucket if sharded else WholeBucket
        buckets.append(kind(flat, members, grid, options, memory))
    return buckets


def _refuse_real_parts(member: ManagedParameter, options: ZeroOptions) -> None:
    """Refuse options under which a complex parameter would lose its imaginary part.

    Raises:
        ValueError: names the parameter and the option.
    """
    for value, what in (
        (options.weight_dtype, "fp16 or bf16 weights (weight_dtype)"),
        (options.accumulation_dtype, "master weights of another dtype (master_dtype)"),
        (options.communication_dtype, "gradients sent in another dtype (reduction.dtype)"),
        (options.exchange, "gradient compression or a 1-bit optimizer"),
        (options.zeropp, "quantized weights or gradients (ZeRO++)"),
    ):
        if value is not None:
            raise ValueError(
                f"{member.layout.name} is {str(member.parameter.dtype).removeprefix('torch.')}, and {what} would keep "
                "its real part only: leave that option out, or make the parameter of pairs of real numbers, and call "
                "torch.view_as_complex on it in the module"
            )


def cast(parameters: Iterable[Tensor], module: nn.Module | None, options: ZeroOptions) -> None:
    """Cast floating-point tensors that lie in no bucket to the weights' dtype: buffers, and parameters not trained.

    Without ``buffer_dtype``, two kinds of buffers keep their dtype. They have the names that transformers gives them.
    ``inv_freq``: frequencies of rotary embeddings, because one that is rounded to bf16 is off by radians after some
    thousand tokens. ``correction_bias``: the bias that balances a router's experts, with steps smaller than bf16's.
    """
    wanted = [(parameter, options.weight_dtype) for parameter in parameters]
    if module is not None:
        by_name = (*module.named_parameters(), *(() if options.buffer_dtype else module.named_buffers()))
        wanted += [(tensor, options.weight_dtype) for name, tensor in by_name if not name.endswith(_KEPT)]
        wanted += [(buffer, options.buffer_dtype) for buffer in module.buffers() if options.buffer_dtype]
    for tensor, dtype in wanted:
        if dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype:
            tensor.data = tensor.data.to(dtype)
