"""Gradient compression on the data axis: exchanges that replace the plain sum of gradients in stages 0 and 1.

uncompressed_sum.py: the plain sum of everything that a method leaves uncompressed; slices of parameters in buckets
compressor.py: base of the methods: step counter, storage of residuals, all-gathered messages, state dict
topk.py: top-k sparsification (Deep Gradient Compression): error feedback (residuals), momentum correction, warm-up
powersgd.py: low-rank approximation with error feedback (PowerSGD)
sparse_rows.py: exact sums of row-sparse gradients of embeddings
onebit/: 1-bit Adam, 0/1 Adam, 1-bit LAMB, 1-bit SGD
"""

from ...base.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
