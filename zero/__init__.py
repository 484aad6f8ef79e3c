"""ZeRO: weights, gradients and optimizer state sharded over the replicas of the data axis.

Layout of the parameters:
    module_tree.py: changes of a module that a step would ignore
    managed.py: a parameter as the data axis manages it, and the key by which parameters share a bucket
    flat.py: layout of parameters in flat, padded buckets, and the range that each rank owns; no torch
    released_parameter.py: the class of a released parameter: an error that names it where its values are used
    shard_groups.py: groups of replicas that shard among themselves, and the axes within and between them (HSDP)
    bucketing.py: assignment of the parameters to buckets

Buckets:
    flat_weights.py: weights of a bucket: whole or sharded buffer, master weights, release and restore in stage 3
    gradient_buffer.py: unsharded gradients of a bucket, in one flat tensor
    bucket.py: gradients of a bucket: taken from ``.grad``, read and changed by user code
    summed_buckets.py: ... and summed over the replicas: whole (stages 0, 1) or transient (stages 2, 3)
    offload.py: offload of shards, masters, gradients and optimizer state to host memory or disk

``p.grad`` between two backward passes:
    shown_gradients.py: ``p.grad`` of a bucket's parameters, and the state of each gradient
    guarded_gradient.py: tensors in ``p.grad`` that ask before user code reads or changes a gradient
    gradient_access.py: what user code reads and changes, on all buckets: when it may, and what the step takes of it

A step:
    axis_options.py: options of the data axis, which engine/setup/zero.py makes from ``triax.Zero`` (options/zero.py)
    written_weights.py: weights that user code writes in place between two steps
    used_parameters.py: parameters that have a gradient in a step, which the replicas agree on
    data_axis.py: all of ZeRO on one rank, behind the ops GATHER, RELEASE, REDUCE and TIED of a program
    gradient_hooks.py: hooks by which autograd tells that a gradient is there
    gradients.py: when buckets are reduced: during the backward pass or at the end of a step, and if each reduction is
        waited for at once (``overlap_comm``)
    layer_gather.py: stage 3's all-gather of a layer's weights before it runs, prefetch (``overlap_comm``), release
    gradient_norm.py: the norm of all gradients, and the factor by which they are clipped
    range_stepper.py: gradients times 1 / divisor and clip factor, the optimizer's step on the ranges that a rank owns,
        and the all-gather of the new weights
    optimizer_kinds.py: trial of an optimizer of another library: if ZeRO may cut what it steps
    optimizer_modes.py: train and eval modes of schedule-free optimizers
    sub_groups.py: the step in sub-groups, for offloaded state and state in fewer bits
    stored_state.py: optimizer state in bf16, or in codes of 8 or 4 bits
    late_parameters.py: step counts of parameters that some steps left out
    whole_tensors.py: the step of optimizers that need whole tensors (Adafactor), in stage 0
    optimizer_state.py: entries of an optimizer's state, and copies of an optimizer for other tensors
    optimizer_entries.py: what an optimizer counts in its groups and in itself, for checkpoints
    sharded_layers.py: norms and matrices over the shards of each layer, for LAMB and Muon

Around it:
    held_bytes.py: bytes that a rank holds between two steps, by kind
    protocols.py: interfaces that gradient compression and zeropp/ implement
    exchange_state.py: state of a gradient exchange, copied and loaded
    sharded_init.py: models built with sharded parameters, before an engine has them
    state_dict_guard.py: refusal of ``state_dict()`` while parameters are released
    gathered_parameters.py: ``zero.gathered``: whole parameters outside of a step, to read or write
    shard_ranges.py: ranges of parameters in flat tensors, and the rank that writes them
    histograms.py: histograms of weights and gradients by parameter, for monitors
    state_shards.py: values and optimizer state of this rank, for checkpoints

Sub-folders:
    modules/: any ``nn.Module`` in a plain loop: ``ShardedOptimizer``, units of stage 3
    zeropp/: ZeRO++: quantized weights and gradients, secondary shards
"""

from ..base.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
