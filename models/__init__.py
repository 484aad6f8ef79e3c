"""GPT and Llama as lists of layers: from a configuration to ``list[LayerSpec]``.

config.py: ``GPTConfig`` and ``LlamaConfig`` with sizes, presets and number of parameters, without torch.
gpt.py: ``gpt_layers``, the architecture of GPT-2 and GPT-3.
llama.py: ``llama_layers``, the architecture of Llama, Qwen 2.5 and Qwen 3.
layers.py: layers that GPT and Llama share: token embedding and head, residual block, final norm, loss.
attention.py: causal self-attention with heads over the tensor axis, grouped queries, KV cache.
rope.py: rotary positions.
packed.py: several documents in one row of tokens.
huggingface/: loading and saving of Hugging Face's weights and configurations, and its models as lists of layers.
"""

from ..grid.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
