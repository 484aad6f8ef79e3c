"""GPT, Llama, mixtures of experts, encoders, T5, Whisper: from a configuration to a list of layers, ``LayerSpec``.

config.py: configurations; config_base.py: what all have; config_groups.py: their fields by group; without torch.
shapes.py: the layers of a configuration on the meta device; number of parameters.
presets.py: the sizes of published models; rope_scaling.py: scalings of rotary positions; without torch.
decoder.py: ``decoder_layers``, the one block and list of layers of all decoders but DeepSeek's.
gpt.py, llama.py, mixtral.py: GPT, Llama and mixtures of experts, which are ``decoder.py`` with other defaults.
deepseek.py: ``deepseek_layers``, the architecture of DeepSeek-V2 and DeepSeek-V3.
encoder.py: ``encoder_layers``, BERT, ViT and others; encoder_config.py: their configuration, without torch.
encoder_losses.py: losses of masked tokens and of classes.
t5.py, whisper.py: ``t5_layers``, ``whisper_layers``, an encoder and a decoder of texts, and of speech and its text.
encoder_decoder.py: what both share; encoder_decoder_config.py: their configurations, without torch.
dit.py: ``dit_layers``, diffusion transformers; dit_config.py: their configuration, without torch.
flux.py: ``flux_layers``, Flux-like ones, of text and image tokens; flux_config.py: their configuration, without torch.
dit_weights.py: names of the weights of both in the library diffusers.
diffusion.py: training samples and sampling of diffusion models: velocity (flow matching), noise (DDPM).
mtp.py: multi-token prediction of DeepSeek-V3, and its loss; replicated_linear.py: linear layer without shards.
layers.py: layers that all models share: token embedding and head, residual block, final norm, loss.
log_probs.py: ``LogProbsLoss``, losses of the labels' log-probabilities.
reward.py: ``reward_layers``, a score of each token in place of logits.
attention.py: causal self-attention with heads over the tensor axis, grouped queries, KV cache.
attention_options.py: its options; head_groups.py: heads that share keys and values; qk_norm.py: norms of both.
recurrent/: linear attention and state spaces: Mamba2, Gated DeltaNet.
mlp.py: MLP, gated MLP, mixture of experts.
positions.py: learned positions; rope.py: rotary positions; alibi.py: biases that grow with the position.
packed.py: several documents in one row of tokens.
huggingface/: loading and saving of Hugging Face's weights and configurations, and its models as lists of layers.
"""

from ..base.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
