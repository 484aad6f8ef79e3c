"""Tensor parallelism: layers whose weights are sharded over the tensor axis (Shoeybi et al. 2019, arXiv:1909.08053).

The collectives at a layer's borders, forward and backward, are in ``grid/comm/regions.py``.

linear.py: ``ColumnParallelLinear``, ``RowParallelLinear``.
column.py: matrix product of column-parallel layers, with collectives that overlap the weight gradients.
embedding.py: ``VocabParallelEmbedding``, ``VocabParallelHead``, ``gather_logits``.
cross_entropy.py: cross entropy of logits whose vocabulary is sharded.
divergence.py: divergence of a student's distribution from a teacher's, both sharded so, for distillation.
norm.py: ``LayerNorm`` and ``RMSNorm`` under sequence parallelism.
outside.py: weights of sharded layers as other code sees them; it cannot take a shard for the whole weight.
lora.py: low-rank adapters of frozen linear layers, sharded like the layers.
quantized.py: frozen weights in 4 or 8 bits.
nf4.py: the numbers of 4 and 8 bits: NF4, int8, double quantization.
parallelize.py: ``parallelize``, which shards an existing ``nn.Module`` in place.
plans.py: sharding styles that a plan for ``parallelize`` can name.
sharded.py: sharded layers with which ``parallelize`` replaces plain layers.
"""

from ..base.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
