from . import layer as layer
from .layer import MoE as MoE
