"""FAMILIES: for each family of Hugging Face's models a table of names and a few flags.

An entry says how a ``config.json`` of the family reads as a configuration of ``models/config.py``, what its parameters
are called, and how ``parallelize`` shards its modules. ``load_hf``, ``save_hf``, ``hf_layers`` and ``parallelize`` know
no family beyond these entries. docs/models.md shows how to add one: to DENSE, MIXTURES, HYBRIDS or ENCODERS.
"""

from __future__ import annotations

from .dense_families import DENSE
from .encoder_families import ENCODERS
from .family import Family
from .hybrid_families import HYBRIDS
from .mixture_families import MIXTURES

FAMILIES: dict[str, Family] = {
    **DENSE,
    **MIXTURES,
    **HYBRIDS,
    **ENCODERS,
}

# Multimodal models whose language model is read alone: model_type -> that of their text_config, and the default of
# tie_word_embeddings, which stands beside it.
WRAPPERS: dict[str, tuple[str, bool]] = {"gemma3": ("gemma3_text", True)}
