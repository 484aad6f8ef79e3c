"""DeepSpeed's API over triax: ``import triax.compat.deepspeed as deepspeed``.

``RepeatingLoader`` is triax's own, which has DeepSpeed's arguments.

context.py: ``initialize``: triax's own, which registers the engine for functions that take none; the grid of experts.
arguments.py: ``add_config_arguments`` (``--deepspeed_config``) and ``init_distributed``.
comm.py: ``deepspeed.comm``: ``log_summary`` of all engines.
zero.py: ``deepspeed.zero``: ``GatheredParameters``.
moe/: ``deepspeed.moe``: ``MoE``.
"""

from ...grid.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
