"""Inputs of ``triax plan``: the model that a name or a file stands for, and the keys of ``--layout``."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import nearest, no_such
from ..base.files import read_object
from ..base.hub import local_folder

# All else is imported where it is used: `triax --help` needs none of it.
if TYPE_CHECKING:
    from ..models.config import TransformerConfig
    from ..train.file import ReadFile
    from ..train.sections import TrainingFile

TRAINING_FILES = (".yaml", ".yml", ".toml")


def model_of(name: str) -> tuple[TransformerConfig, TrainingFile | None, ReadFile | None]:
    """Return a model's configuration, and the training file that it comes from, checked and as it was read."""
    from ..train.file import read_training_file
    from ..train.model_choice import model_config
    from ..train.sections import ModelSection

    path = Path(name)
    if path.suffix in TRAINING_FILES:
        file, source = read_training_file(path)
        return model_config(file.model), file, source
    if path.suffix == ".json":
        return _from_fields(read_object(path), path), None, None
    if local_folder(name).is_dir():
        return model_config(ModelSection(folder=name, weights=False)), None, None
    return model_config(ModelSection(preset=name)), None, None


def _from_fields(values: dict[str, Any], path: Path) -> TransformerConfig:
    """Return the configuration of Hugging Face's fields; without ``model_type``, a GPT or a Llama by its fields."""
    from ..models.config import DecoderConfig, GPTConfig, LlamaConfig
    from ..models.huggingface.config import from_hf

    names = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    names |= {"n_positions": "max_position_embeddings", "n_inner": "intermediate_size", "ffn_dim": "intermediate_size"}
    if values.get("model_type") and not (values["model_type"] == "gpt2" and "n_embd" not in values):
        return from_hf(values if "n_embd" in values else {"max_position_embeddings": 2048, **values}, path)
    values = {names.get(key, key): value for key, value in values.items()}
    needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    if missing := [key for key in needed if key not in values]:
        raise ValueError(f"{path} has no {missing[0]}. Give at least {', '.join(needed)}.")
    values.setdefault("max_position_embeddings", 2048)
    grouped = values.get("num_key_value_heads") not in (None, values["num_attention_heads"])
    gated = grouped or {"rms_norm_eps", "rope_theta"} & set(values)
    if "hidden_act" in values:
        gated = values["hidden_act"] == "silu"
    width, inner = values["hidden_size"], values.get("intermediate_size")
    if gated:
        kind: type[TransformerConfig] = LlamaConfig
    elif inner is None or inner % width == 0:
        kind, values = GPTConfig, values | ({"mlp_ratio": inner // width} if inner else {})
    else:
        kind = DecoderConfig
        values |= {"norm": "layer", "gated": False, "learned_positions": True, "hidden_act": "gelu"}
    known = {*kind.settings()} - {"rope_scaling"}
    return kind(**{key: value for key, value in values.items() if key in known and value is not None})


def parse_layout(text: str) -> dict[str, list[Any]]:
    """Return the keys of ``--layout`` with their values.

    Raises:
        ValueError: an unknown key or value; the message names the nearest.
    """
    from ..pipe.schedules.registry import RECIPES
    from ..plugins.plan.parallel_layout import KNOWN_RECOMPUTATION, ParallelLayout

    keys = [field.name for field in fields(ParallelLayout)]
    given: dict[str, list[Any]] = {}
    for pair in filter(None, (word.strip() for word in text.split(","))):
        key, equals, value = pair.partition("=")
        if key not in keys:
            raise ValueError(no_such("--layout", key, keys))
        words = {
            "schedule": [name for name, recipe in RECIPES.items() if recipe.trains],
            "recompute": list(KNOWN_RECOMPUTATION),
        }
        if key in words:
            if value not in words[key]:
                raise ValueError(f"--layout: there is no {key} {value!r}; {nearest(value, words[key])}")
            given[key] = [value]
        elif key in ("recompute_ops", "offload_activations"):
            given[key] = [_share(key, value)]
        elif key in ("offload", "sequence_parallel", "pairs"):
            if value.lower() not in ("true", "false", "1", "0", ""):
                raise ValueError(f"--layout: {key} is {value!r}. Give true or false.")
            given[key] = [value.lower() in ("true", "1") or not equals]
        elif not value.isdecimal() or (int(value) < 1 and key != "zero") or (key == "zero" and int(value) > 3):
            range_ = "0, 1, 2 or 3" if key == "zero" else "a whole number of at least 1"
            raise ValueError(f"--layout: {key} is {value!r}. Give {range_}.")
        else:
            given[key] = [int(value)]
    if "zero" in given:  # a given stage is meant without offload
        given.setdefault("offload", [False])
    return given


def _share(key: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError(f"--layout: {key} is {value!r}. Give a share of each rank's activations, from 0 to 1.")
    return share
