"""Tensor parallelism: layers whose weights are sharded over the tensor axis (Shoeybi et al. 2019, arXiv:1909.08053).

The collectives at a layer's borders, forward and backward, are in ``grid/comm/regions.py``.

linear.py: ``ColumnParallelLinear``, ``RowParallelLinear``.
column.py: matrix product of column-parallel layers, with collectives that overlap the weight gradients.
embedding.py: ``VocabParallelEmbedding``, ``VocabParallelHead``, ``gather_logits``.
cross_entropy.py: cross entropy of logits whose vocabulary is sharded.
divergence.py: divergence of a student's distribution from a teacher's, both sharded so, for distillation.
norm.py: ``LayerNorm`` and ``RMSNorm`` under sequence parallelism.
outside.py: weights of sharded layers as other code sees them; it cannot take a shard for the whole weight.
shard_operations.py: operations that need a whole weight, or whose result is a shard too.
callers.py: code that asks for an operation, by the frames of the stack.
adaptable.py: linear layers as their adapters see them.
lora.py: sets of low-rank adapters of a model's linear layers: add, activate, merge.
lora_adapter.py: the update of one layer, of LoRA and of DoRA.
lora_layouts.py: layouts of an adapter's factors, which follow the layer's weight.
quantized.py: frozen weights in 4 or 8 bits.
nf4.py: the numbers of 4 and 8 bits: NF4, int8, double quantization.
parallelize.py: ``parallelize``, which shards an existing ``nn.Module`` in place.
plans.py: sharding styles that a plan for ``parallelize`` can name.
sharded.py: sharded layers with which ``parallelize`` replaces plain layers.
"""

from ..base.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
