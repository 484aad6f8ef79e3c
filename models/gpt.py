"""GPT-2 and GPT-3 (Radford et al. 2019; Brown et al. 2020, arXiv:2005.14165): ``decoder.py`` with a ``GPTConfig``."""

from .config import GPTConfig as GPTConfig
from .decoder import GPTBlock as GPTBlock
from .decoder import decoder_layers as gpt_layers
from .layers import NextTokenLoss as GPTLoss

__all__ = ["GPTBlock", "GPTConfig", "GPTLoss", "gpt_layers"]
