"""Text generation on any grid: KV cache, continuous batching, decode loop over the pipeline stages.

engine.py: ``init_inference`` and ``InferenceEngine.generate`` and ``.stream``.
batching.py: continuous batching: which sequences run at each decode step; plain Python.
decode_loop.py: runs the decode steps over the stages: prefill, one token per sequence, hidden states between ranks.
kv_cache.py: the KV cache, keys and values of this rank's layers and heads.
sampling.py: temperature, top-k, top-p; the draw of a token from logits sharded over the vocabulary.
"""
