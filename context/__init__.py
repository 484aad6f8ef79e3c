"""Context parallelism: attention of sequences whose tokens are spread over the ranks of the context axis.

order.py: zigzag order of the tokens; ``positions``, ``shard`` and ``gather``.
context_attention.py: ``attention``, for any module: ``ring``, ``ulysses`` or ``gather``.
ring.py: keys and values travel around the axis.
gather_keys.py: each rank gathers all keys and values.
ulysses.py: all-to-alls between shards of the sequence and of the heads.
pair.py: a part of the queries with a part of the keys.
block.py: kernels of one block, and the merge by log-sum-exp.
mask.py: the rule by which a query sees a key; dense tiles of plain rules.
documents.py: packed rows: whole rows document by document.
block_sparse.py: other rules, by blocks: windows, sparse attention, documents of parts of rows.
sparsity.py: block masks of sparse attention: fixed, variable, BigBird, Longformer.
dropout.py: dropout of tokens that are spread over the axis.
scan.py: the state of a linear attention, which passes through the parts of the sequence.
previous.py: the tokens in front of each part, for convolutions.
slices.py: slices of a sequence that pass a pipeline one after the other.
part_loss.py: loss of a part of the sequences.
sparse_layers.py: these masks for the attention layers of a model.
"""

from ..base.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
