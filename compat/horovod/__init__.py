"""Horovod's API over a triax grid: ``import triax.compat.horovod as hvd``.

context.py: ``init``, ``rank``, ``size``, process sets, the timeline; the one global context that ``init`` makes.
negotiation.py: the queue of collectives; ranks compare each request before it runs (Horovod's negotiation).
reductions.py: ``allreduce`` and its variants, handles, ``barrier``, ``join``.
collectives.py: ``allgather``, ``broadcast``, ``alltoall``, ``reducescatter``.
compression.py: ``Compression.none``, ``.fp16``, ``.bf16``: the dtype on the wire.
broadcast_state.py: ``broadcast_parameters``, ``broadcast_optimizer_state``, ``broadcast_object``.
optimizer.py: ``DistributedOptimizer``.
reducer.py: its gradient buckets, all-reduced while the backward pass runs.
"""

from ...base.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
