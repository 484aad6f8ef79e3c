"""GPT, Llama and mixtures of experts as lists of layers: from a configuration to ``list[LayerSpec]``.

config.py: configurations: sizes, presets, number of parameters; without torch.
gpt.py: ``gpt_layers``, the architecture of GPT-2 and GPT-3.
llama.py: ``llama_layers``, the architecture of Llama, Mistral, Qwen 2.5, Qwen 3 and SmolLM3.
decoder.py: ``decoder_layers``, the architecture of Gemma, Phi, OPT, GPT-NeoX, Falcon, OLMo-2 and StarCoder2.
mixtral.py: ``mixtral_layers``, the architecture of Mixtral, Qwen3-MoE and OLMoE.
deepseek.py: ``deepseek_layers``, the architecture of DeepSeek-V2 and DeepSeek-V3.
layers.py: layers that all models share: token embedding and head, residual block, final norm, loss.
attention.py: causal self-attention with heads over the tensor axis, grouped queries, KV cache.
rope.py: rotary positions.
packed.py: several documents in one row of tokens.
huggingface/: loading and saving of Hugging Face's weights and configurations, and its models as lists of layers.
"""

from ..base.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
