"""Context parallelism: attention of sequences whose tokens are spread over the ranks of the context axis.

order.py: zigzag order of the tokens; ``positions``, ``shard`` and ``gather``.
"""

from ..grid.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
