"""DeepSpeed's module ``deepspeed.moe``.

layer.py: ``MoE``, a mixture of copies of any module.
"""

from ..modules import names_of

__getattr__, __dir__, __all__ = names_of(__name__)
