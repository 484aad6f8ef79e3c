"""Text generation on any grid: KV cache, continuous batching, decode loop over the pipeline stages.

engine.py: ``init_inference`` and ``InferenceEngine.generate`` and ``.stream``.
batching.py: continuous batching: which sequences run at each decode step; plain Python.
decode_loop.py: runs the decode steps over the stages: prefill, one token per sequence, hidden states between ranks.
kv_cache.py: the KV cache, keys and values of this rank's layers and heads.
sampling.py: penalty, processors, temperature, top-k, top-p, min-p; the draw of a token from logits sharded over the
    vocabulary.
beam_search.py: beam search: which sequences go on, and which have ended.
text.py: tokenizers for string prompts, and the strings that end a text.
scoring.py: scores of given texts: the log-probability of each token, by the model of a training engine.
module_inference.py: ``ModuleInference``: any module, or the engine that trains one; transformers' ``generate``.
load_any.py: weights of a module from files of any known format.
int8.py: weights of linear layers in 8 bits, in groups.
"""
