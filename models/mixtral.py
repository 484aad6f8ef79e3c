"""Mixtral, Qwen3-MoE and OLMoE (arXiv:2401.04088, arXiv:2505.09388, arXiv:2409.02060): ``decoder.py`` with experts."""

from .config import MixtralConfig as MixtralConfig
from .decoder import MixtralBlock as MixtralBlock
from .decoder import decoder_layers as mixtral_layers

__all__ = ["MixtralBlock", "MixtralConfig", "mixtral_layers"]
