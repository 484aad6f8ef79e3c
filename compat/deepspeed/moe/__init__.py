"""DeepSpeed's module ``deepspeed.moe``.

layer.py: ``MoE``, a mixture of copies of any module.
"""

from ....grid.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
