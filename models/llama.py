"""Llama, Mistral, Qwen 2.5, Qwen 3 and SmolLM3: ``decoder.py`` with a ``LlamaConfig``."""

from .config import LlamaConfig as LlamaConfig
from .decoder import LlamaBlock as LlamaBlock
from .decoder import decoder_layers as llama_layers
from .layers import NextTokenLoss as LlamaLoss

__all__ = ["LlamaBlock", "LlamaConfig", "LlamaLoss", "llama_layers"]
