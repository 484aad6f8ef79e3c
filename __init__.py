"""triax: training in three dimensions at once, pipe (stages), tensor (shards) and data (ZeRO replicas).

This is the front door and nothing else. `import triax` costs nothing and needs no torch: each name below is
imported from its own module when it is first used.
"""

from .base import VERSION
from .base.lazy import attach
from .base.moved import find_moved

__version__ = VERSION

find_moved(__name__)
__getattr__, __dir__, __all__ = attach(__name__, __file__)
