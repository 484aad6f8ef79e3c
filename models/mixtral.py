"""Mixtral, Qwen-MoE, OLMoE, gpt-oss: ``decoder.py`` with experts.

arXiv:2401.04088, arXiv:2505.09388, arXiv:2409.02060, arXiv:2508.10925.
"""

from .config import MixtralConfig as MixtralConfig
from .decoder import MixtralBlock as MixtralBlock
from .decoder import decoder_layers as mixtral_layers

__all__ = ["MixtralBlock", "MixtralConfig", "mixtral_layers"]
