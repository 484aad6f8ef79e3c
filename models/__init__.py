"""Models as lists of layers: a config in, ``list[LayerSpec]`` out.

``triax.models.gpt`` and ``triax.models.llama`` are the files; the function that makes the list is in each: ``from
triax.models.llama import llama``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import SelfAttention
    from .config import GPTConfig, LlamaConfig, RopeScaling
    from .gpt import GPTLoss
    from .hf_pipe import CausalLMLoss, hf_layers
    from .layers import NextTokenLoss
    from .llama import LlamaLoss
    from .packed import pack

_HOME = {
    "CausalLMLoss": "hf_pipe",
    "GPTConfig": "config",
    "GPTLoss": "gpt",
    "LlamaConfig": "config",
    "LlamaLoss": "llama",
    "NextTokenLoss": "layers",
    "RopeScaling": "config",
    "SelfAttention": "attention",
    "hf_layers": "hf_pipe",
    "pack": "packed",
}

__all__ = [
    "CausalLMLoss",
    "GPTConfig",
    "GPTLoss",
    "LlamaConfig",
    "LlamaLoss",
    "NextTokenLoss",
    "RopeScaling",
    "SelfAttention",
    "hf_layers",
    "pack",
]


def __getattr__(name: str) -> Any:
    # Lazy, so that a config can be read and counted where torch is not installed.
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
