"""Conversion between Hugging Face's ``config.json`` and triax's configurations, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ..config import DecoderConfig, GPTConfig, LinearScaling, RopeScaling, TransformerConfig, YarnScaling
from .families import FAMILIES, Config, Family
from .folder_settings import Settings
from .names import Entry, Names, expand

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # keys of the number of experts
_SCALINGS = {"llama3": RopeScaling, "yarn": YarnScaling, "linear": LinearScaling}  # by rope_type
# Ids of tokens: without a tokenizer there are none, but the defaults of transformers' configurations are others.
_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def read_config(folder: Path) -> dict[str, Any]:
    """Read the content of a folder's ``config.json``.

    Raises:
        FileNotFoundError: the folder has no ``config.json``.
    """
    file = folder / "config.json"
    if not file.is_file():
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) if folder.is_dir() else "no such folder"
        raise FileNotFoundError(
            f"{file} does not exist ({found or 'the folder is empty'}). Give a folder that save_pretrained wrote, with "
            "config.json and *.safetensors."
        )
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        line = f" in line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"{file} is damaged: it is not JSON{line}. Copy or write it again.") from error
    if not isinstance(read, dict):
        raise ValueError(f"{file} is damaged: it has no keys. Copy or write it again.")
    return read


def layer_count(config: Mapping[str, Any]) -> int:
    """Return the number of blocks that a ``config.json`` gives under any family's key, or 0 if it gives none."""
    return int(config.get("num_hidden_layers") or config.get("n_layer") or 0)


def expert_count(config: Mapping[str, Any]) -> int:
    """Return the number of experts that a ``config.json`` gives under any family's key, or 0 if it gives none."""
    return int(next((config[key] for key in _EXPERTS if config.get(key)), 0))


def family_of(config: Config) -> Family:
    """Return the family of the model that a ``config.json`` describes, of those that triax's layers can compute.

    Raises:
        ValueError: the family is another one. The message says how to add it.
    """
    name = config.get("model_type")
    if name not in FAMILIES or FAMILIES[name].config is None:
        known = ", ".join(name for name, each in FAMILIES.items() if each.config is not None)
        raise ValueError(
            f"model_type is {name!r}, but the known ones are {known}. Pass your own layers and names, load_hf(path, "
            "layers, names={'layers.0.weight': 'model.embed.weight', ...}), or add the family (docs/models.md, 'Add a "
            "family')."
        )
    return FAMILIES[name]


def names_of(config: Config) -> Names:
    """Return the table of parameter names of the family of a ``config.json``.

    Raises:
        ValueError: triax has no table for this family.
    """
    name = config.get("model_type")
    if name not in FAMILIES or not FAMILIES[name].names:
        known = ", ".join(name for name, each in FAMILIES.items() if each.names)
        raise ValueError(
            f"there is no table of names for model_type {name!r}, only for {known}. Pass names, which maps triax's "
            "names to Hugging Face's, names={'layers.0.weight': 'model.embed.weight', ...}, or add the family "
            "(docs/models.md, 'Add a family')."
        )
    names = FAMILIES[name].names
    return names(config) if callable(names) else names


def entries(names: Names | None, config: Config) -> dict[str, Entry]:
    """Expand a table of names, or that of the family, to the full names of the model of a ``config.json``."""
    heads = None
    family = FAMILIES.get(str(config.get("model_type")))
    if family is not None and family.config is not None and issubclass(family.config, DecoderConfig):
        ours = from_hf(config)
        assert isinstance(ours, DecoderConfig)
        heads = ours.num_attention_heads, ours.num_key_value_heads, ours.head_dim
    return expand(names_of(config) if names is None else names, layer_count(config), expert_count(config), heads)


def from_hf(config: Config) -> TransformerConfig:
    """Return the configuration of the model that a ``config.json`` describes, for example a ``LlamaConfig``.

    Args:
        config: the content of ``config.json`` of a model of a family in ``families.py``.

    Raises:
        ValueError: the model is of another family or has a setting that triax's layers do not support. The message
            names the setting.
    """
    family = family_of(config)
    for key, values in family.only.items():
        if config.get(key, values[0]) not in values:
            shards = " triax.parallelize shards the Hugging Face model itself." * (family.plan is not None)
            raise ValueError(
                f"{config['model_type']} with {key}={config[key]!r} is not implemented, only with "
                f"{key}={' or '.join(map(repr, values))}.{shards}"
            )
    found: dict[str, Any] = dict(family.flags)
    for ours, place in family.keys.items():
        name, default = (place, None) if isinstance(place, str) else place
        if name in _EXPERTS:  # Transformers 5 writes one key, 4 wrote others
            found[ours] = expert_count(config)
        else:
            found[ours] = config[name] if isinstance(place, str) else config.get(name, default)
        if found[ours] is None and default == 0:
            found[ours] = 0
    if family.rope:
        found |= _read_rope(config, family)
    if family.window:
        found |= _read_window(config, family)
    if family.read is not None:
        found |= family.read(config)
    assert family.config is not None
    return family.config(**found)


def to_hf(config: TransformerConfig, settings: Settings | None = None) -> dict[str, Any]:
    """Return the content of ``config.json`` for a configuration, without the dtype.

    The family is the first one in whose ``config.json`` the configuration can be written without loss.

    Args:
        config: the configuration.
        settings: what goes with the model: its family, which is tried first, and its special tokens.

    Raises:
        ValueError: there is none. The message names the settings that the nearest family lacks.
    """
    lacking: dict[str, list[str]] = {}
    first, tokens = ("", {}) if settings is None else (settings["family"], settings["tokens"])
    for name in sorted(FAMILIES, key=lambda name: name != first):
        family = FAMILIES[name]
        if family.config is not type(config):
            continue
        written = _written(config, name, family)
        try:
            again = from_hf(written)
        except ValueError:
            continue
        lacking[family.prefix] = [
            f"{field.name}={getattr(config, field.name)!r}"
            for field in fields(config)
            if getattr(again, field.name) != getattr(config, field.name)
        ]
        if not lacking[family.prefix]:
            return written | tokens
    fewest = min(map(len, lacking.values()), default=0)
    near = [f"{prefix} has no {', '.join(each)}" for prefix, each in lacking.items() if len(each) == fewest]
    raise ValueError(
        f"no family of Hugging Face's has all settings of this {type(config).__name__}. The nearest: Hugging Face's "
        f"{'; '.join(near)}. Give the settings of one family, or pass the content of config.json as a dict."
    )


def _written(config: TransformerConfig, name: str, family: Family) -> dict[str, Any]:
    """Return the content of ``config.json`` for a configuration as a model of a family."""
    keys = {(key if isinstance(key, str) else key[0]): ours for ours, key in family.keys.items()}
    found = {"architectures": [family.architecture], "model_type": name}
    found |= {key: values[0] for key, values in family.only.items()}
    found |= {key: getattr(config, ours) for key, ours in keys.items()}
    if family.rope:
        found |= _write_rope(config, family)
    if family.window:
        found |= _write_window(config, family)
    if family.write is not None:
        found |= family.write(config)
    return found | _TOKENS


def same_model(ours: TransformerConfig, theirs: TransformerConfig) -> str | None:
    """Describe the settings with which two configurations compute different functions, or return None.

    Example: ``"rms_norm_eps is 1e-05 here, 1e-06 there"``.
    """
    if type(ours) is not type(theirs):
        return f"it is a {type(ours).__name__} here, a {type(theirs).__name__} there"
    # Fields that do not change the function that a model computes from its weights.
    free = {"dropout", "initializer_range", "router_aux_loss_coef", "aux_loss_alpha"}
    if not isinstance(ours, GPTConfig):
        free.add("max_position_embeddings")  # GPT-2 has a weight for each position
    differing = [
        f"{field.name} is {getattr(ours, field.name)} here, {getattr(theirs, field.name)} there"
        for field in fields(ours)
        if field.name not in free and getattr(ours, field.name) != getattr(theirs, field.name)
    ]
    return ", ".join(differing) or None


def _read_rope(config: Config, family: Family) -> dict[str, Any]:
    """Return the fields of the rotary positions. Transformers 5 has all in rope_parameters, 4 beside each other."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    found: dict[str, Any] = {}
    if "rope_local_base_freq" in family.rope:  # other positions in blocks with a sliding window
        local = rope.get("sliding_attention") or {}
        theta = local.get("rope_theta") or config.get("rope_local_base_freq") or family.rope["rope_local_base_freq"]
        found["rope_local_base_freq"] = float(theta)
        if local.get("rope_type", "default") != "default":
            raise ValueError(f"{config['model_type']} with scaled rotary positions in sliding_attention is unknown.")
        rope = dict(rope.get("full_attention") or ({} if "sliding_attention" in rope else rope))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", *family.scalings):
        raise ValueError(
            f"rope_type={kind!r} is not implemented for {config['model_type']}, only "
            f"{', '.join(map(repr, ('default', *family.scalings)))}."
            + " triax.parallelize shards the Hugging Face model itself."
            * (family.plan is not None)
        )
    scaling = None
    if kind != "default":
        if kind == "yarn" and rope.get("original_max_position_embeddings") is None:
            rope["original_max_position_embeddings"] = config["max_position_embeddings"]
        given = {each.name: rope.get(each.name) for each in fields(_SCALINGS[kind])}
        scaling = _SCALINGS[kind](**{name: value for name, value in given.items() if value is not None})
    if "partial_rotary_factor" in family.rope:
        names = ("partial_rotary_factor", "rotary_pct")  # the second one in GPT-NeoX of Transformers 4
        part = next((x[name] for x in (rope, config) for name in names if x.get(name) is not None), None)
        found["partial_rotary_factor"] = family.rope["partial_rotary_factor"] if part is None else float(part)
    theta = rope.get("rope_theta") or config.get("rope_theta") or config.get("rotary_emb_base")
    return {**found, "rope_theta": float(theta or family.rope["rope_theta"]), "rope_scaling": scaling}


def _write_rope(config: Any, family: Family) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        kind = next(kind for kind, cls in _SCALINGS.items() if isinstance(config.rope_scaling, cls))
        rope |= {"rope_type": kind, **asdict(config.rope_scaling)}
    if "partial_rotary_factor" in family.rope:
        rope["partial_rotary_factor"] = config.partial_rotary_factor
    if "rope_local_base_freq" in family.rope:
        local = {"rope_type": "default", "rope_theta": config.rope_local_base_freq}
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
    return {
        "rope_parameters": rope,
        "rope_theta": config.rope_theta,  # with rope_scaling, where Transformers 4 looks
        "rope_scaling": rope if config.rope_scaling is not None else None,
    }


def _read_window(config: Config, family: Family) -> dict[str, Any]:
    window, words = config.get("sliding_window", family.window_size), family.window.split()
    if window is None or ("flag" in words and not config.get("use_sliding_window", False)):
        return {"sliding_window": None}
    depth = layer_count(config)
    types = tuple((config.get("layer_types") or ())[:depth]) if "types" in words else ()
    if not types and family.slides is not None:
        types = tuple(("full_attention", "sliding_attention")[family.slides(config, i)] for i in range(depth))
    return {"sliding_window": window, **({"layer_types": types} if types else {})}


def _write_window(config: Any, family: Family) -> dict[str, Any]:
    found: dict[str, Any] = {"sliding_window": config.sliding_window}
    if "flag" in family.window:
        found["use_sliding_window"] = config.sliding_window is not None
    if "types" in family.window:
        windows = map(config.window_of, range(config.num_hidden_layers))
        found["layer_types"] = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return found
