"""Conversion between Hugging Face's ``config.json`` and triax's configurations, without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ...base.errors import ConfigError
from ...base.files import read_object
from ..config import DecoderConfig, DeepseekConfig, EncoderConfig, TransformerConfig
from ..rope_scaling import DynamicScaling, LinearScaling, LongRopeScaling, RopeScaling, YarnScaling
from .families import FAMILIES, WRAPPERS
from .family import CLASSIFIER, Config, Family
from .folder_settings import Settings
from .names import Entry, Fused, Names, PerHead, expand

# Keys of the number of experts, and of blocks.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers")
_HEADS, _WIDTHS = ("num_attention_heads", "n_head"), ("hidden_size", "n_embd")
_KINDS = ("layers_block_type", "hybrid_override_pattern")  # of Nemotron-H: the kind of each block
_SCALINGS = {"llama3": RopeScaling, "yarn": YarnScaling, "linear": LinearScaling}  # by rope_type
_SCALINGS |= {"longrope": LongRopeScaling, "dynamic": DynamicScaling}
_GROWTH = "llama_4_scaling_beta"
_REQUIRED = {"llama3": ("factor", "low_freq_factor", "high_freq_factor"), "longrope": ("short_factor", "long_factor")}
INDEXED = "deepseek_v32"
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"  # types of layers with rotary positions of their own
_MOST = 10_000  # blocks, and experts of a block
_LARGEST = 2**40  # of all numbers
# Ids of tokens: without a tokenizer there are none, but the defaults of transformers' configurations are others.
_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def read_config(folder: Path) -> dict[str, Any]:
    """Read the content of a folder's ``config.json``; of a multimodal model, that of its language model.

    Raises:
        FileNotFoundError: the folder has no ``config.json``.
        ConfigError: the file is damaged, or counts more blocks or experts than any model has.
    """
    file = folder / "config.json"
    if not file.is_file():
        listed = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) if folder.is_dir() else "no such folder"
        raise FileNotFoundError(
            f"{file} does not exist, or is no file ({listed or 'the folder is empty'}). Give a folder that "
            "save_pretrained wrote, with config.json and *.safetensors."
        )
    read = read_object(file)
    if not isinstance(read.get("model_type"), str | None):
        raise ConfigError(f"{file}: model_type is {_shown(read['model_type'])}, but must be a word.")
    try:
        read = text_part(read)
        _check_counts(read)
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from error
    return read


def text_part(config: Config) -> dict[str, Any]:
    """Return the content of ``config.json`` of the language model of a multimodal model; of another model, its own.

    A DeepSeek-V3.2 is a DeepSeek-V3 whose attention looks at ``index_topk`` tokens, which an indexer chooses. triax
    reads it in its dense form, a DeepSeek-V3 without the indexer: equal for rows of at most ``index_topk`` tokens.
    """
    if config.get("model_type") == INDEXED:
        return _dense_form(config)
    if config.get("model_type") not in WRAPPERS:
        return dict(config)
    kind, tied = WRAPPERS[config["model_type"]]
    inner = _object(config, "text_config")
    if inner.get("model_type", kind) != kind:
        raise ValueError(
            f"text_config has the model_type {_shown(inner['model_type'])}, but triax reads {kind!r} only."
        )
    return {**inner, "model_type": kind, "tie_word_embeddings": config.get("tie_word_embeddings", tied)}


def _dense_form(config: Config) -> dict[str, Any]:
    """Return the content of ``config.json`` of a DeepSeek-V3.2 as a DeepSeek-V3."""
    types, first = config.get("mlp_layer_types"), config.get("first_k_dense_replace", 3)
    if isinstance(types, list):
        first = types.count("dense")
        if types[:first] != ["dense"] * first or set(types[first:]) - {"sparse"}:
            raise ValueError("mlp_layer_types must have 'dense' for the first blocks and 'sparse' for the others.")
    return {**config, "model_type": "deepseek_v3", "first_k_dense_replace": first, "rope_interleave": True}


def text_name(kind: Any, name: str) -> str | None:
    """Return the name of a tensor in the model that ``text_part`` describes; None: it is of another part.

    ``kind`` is the ``model_type``.

    Transformers 5 has ``model.language_model.`` in models, and writes ``language_model.model.`` as Transformers 4 did.
    """
    if kind == INDEXED:
        return None if ".self_attn.indexer." in name else name
    if kind not in WRAPPERS:
        return name
    for prefix, own in (("model.language_model.", "model."), ("language_model.", "")):
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name if name.startswith("lm_head.") else None


def layer_count(config: Mapping[str, Any]) -> int:
    """Return the number of blocks that a ``config.json`` gives under any family's key, or 0 if it gives none."""
    kinds = next((config[key] for key in _KINDS if isinstance(config.get(key), (list, str))), ())
    return len(kinds) or int(next((config[key] for key in _DEPTHS if config.get(key)), 0))


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
        known = ", ".join(name for name, family in FAMILIES.items() if family.config is not None)
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
        known = ", ".join(name for name, family in FAMILIES.items() if family.names)
        raise ValueError(
            f"there is no table of names for model_type {name!r}, only for {known}. Pass names, which maps triax's "
            "names to Hugging Face's, names={'layers.0.weight': 'model.embed.weight', ...}, or add the family "
            "(docs/models.md, 'Add a family')."
        )
    mapping = FAMILIES[name].names
    names = mapping(config) if callable(mapping) else mapping
    return _with_score(names) if is_reward(config) else names


def is_reward(config: Config) -> bool:
    """Return True if a ``config.json`` is that of a language model with a score, or several, in place of logits."""
    classes, family = config.get("architectures"), FAMILIES.get(str(config.get("model_type")))
    if family is not None and family.config is EncoderConfig:
        return False
    return isinstance(classes, (list, tuple)) and bool(classes) and str(classes[0]).endswith(CLASSIFIER)


def as_reward(config: Config) -> dict[str, Any]:
    """Return the content of the ``config.json`` of a reward model, from that of its language model.

    Raises:
        ValueError: transformers has no such class in the family.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or not family.classifier:
        raise ValueError(
            f"transformers has no class for reward models of model_type {_shown(config.get('model_type'))}. Take a "
            "model of another family, or write it with the content of config.json as a dict and a table of names."
        )
    return {
        **config,
        "architectures": [family.classifier],
        "id2label": {"0": "LABEL_0"},  # transformers counts num_labels by them
        "label2id": {"LABEL_0": 0},
    }


def _with_score(names: Names) -> Names:
    """Return a table with the score in place of the output layer."""

    def is_head(form: Any) -> bool:
        first = form[0] if isinstance(form, list) else form
        return getattr(first, "name", first) in ("lm_head.*", "lm_head.weight")

    return {
        ours.replace("*", "weight") if is_head(form) else ours: "score.weight" if is_head(form) else form
        for ours, form in names.items()
    }


def entries(names: Names | None, config: Config) -> dict[str, Entry]:
    """Expand a table of names, or that of the family, to the full names of the model of a ``config.json``."""
    table, heads = names_of(config) if names is None else names, None
    forms = [form for theirs in table.values() for form in (theirs if isinstance(theirs, list) else [theirs])]
    if any(isinstance(form, (Fused, PerHead)) for form in forms):
        if config.get("model_type") in FAMILIES:
            ours = _from_hf(config)
            assert isinstance(ours, DecoderConfig)
            heads = ours.num_attention_heads, ours.num_key_value_heads, ours.head_dim
        else:
            count, size = (next((config[key] for key in keys if config.get(key)), 0) for keys in (_HEADS, _WIDTHS))
            groups, width = config.get("num_key_value_heads"), config.get("head_dim")
            heads = (count, groups or count, width or size // count) if count and size else None
    return expand(table, layer_count(config), expert_count(config), heads)


def from_hf(config: Config, file: Path | str = "config.json") -> TransformerConfig:
    """Return the configuration of the model that a ``config.json`` describes, for example a ``LlamaConfig``.

    A key that is missing has the value that the family's own configuration class gives it. Modules that predict further
    tokens are left out: ``dataclasses.replace(config, num_nextn_predict_layers=1)`` adds them.

    Args:
        config: the content of ``config.json`` of a model of a family in ``families.py``.
        file: where it was read, for error messages.

    Raises:
        ConfigError: the model is of another family, has a setting that triax's layers do not support, or lacks a size
            that a model must have. The message names the file and the setting.
    """
    try:
        return _from_hf(without_modules(config))
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from error


def without_modules(config: Config, but: int = 0) -> dict[str, Any]:
    """Return the content of ``config.json`` with this number of modules that predict further tokens."""
    return {**config, "num_nextn_predict_layers": but}


def _from_hf(config: Config) -> TransformerConfig:
    family = family_of(config)
    assert family.config is not None
    _check_counts(config)
    config = {**config, **{key: config[name] for name, key in family.aliases.items() if config.get(name) is not None}}
    for key, values in family.only.items():
        if config.get(key, values[0]) not in values:
            shards = " triax.parallelize shards the Hugging Face model itself." * (family.plan is not None)
            raise ValueError(
                f"{config['model_type']} with {key}={_shown(config[key])} is not implemented, only with "
                f"{key}={' or '.join(map(repr, values))}.{shards}"
            )
    if family.default_rope and not (config.get("rope_parameters") or config.get("rope_scaling")):
        config = {**config, "rope_parameters": family.default_rope}
    types = {field.name: field for field in fields(family.config)}
    kwargs: dict[str, Any] = dict(family.flags)
    for ours, (name, default) in family.places.items():
        if name in _EXPERTS:  # Transformers 5 writes one key, 4 wrote others
            kwargs[ours] = expert_count(config) or None
        else:
            kwargs[ours] = config.get(name, default)
        if kwargs[ours] is None and types[ours].default == 0:
            kwargs[ours] = 0
        _check_type(config, name, kwargs[ours], str(types[ours].type))
        if ours in family.inverse:
            if not kwargs[ours]:
                raise ValueError(f"{name} is {_shown(kwargs[ours])}, by which triax would divide. Give another number.")
            kwargs[ours] = 1.0 / kwargs[ours]
    if "head_dim" not in family.keys and "num_attention_heads" in kwargs and family.config is not DeepseekConfig:
        _check_head_dim(config, kwargs)
    if family.rope:
        kwargs |= _read_rope(config, family)
    if family.window:
        kwargs |= _read_window(config, family)
    if family.read is not None:
        kwargs |= family.read(config)
    return family.config(**kwargs)


def _check_counts(config: Config) -> None:
    """Raise ValueError for numbers of blocks or experts that are none, or for which names alone would fill the memory.

    Names are made from them before any weight is looked up.
    """
    for key in (*_DEPTHS, "num_decoder_layers", "decoder_layers", "num_nextn_predict_layers", *_EXPERTS):
        value = config.get(key)
        if value is not None and not (type(value) is int and 0 <= value <= _MOST):
            raise ValueError(f"{key} is {_shown(value)}, but must be a whole number of at most {_MOST}.")


def _check_type(config: Config, key: str, value: Any, wanted: str) -> None:
    """Raise ValueError for a value that a field cannot have: none, or one of another type.

    Args:
        config: the content of ``config.json``.
        key: the key that the value has there, if it has one.
        value: the value.
        wanted: annotation of the field, such as ``"int | None"``.
    """
    if value is None and "None" not in wanted:
        what = "null as" if key in config else "no"
        raise ValueError(f"there is {what} {key}, which a {config['model_type']} must have. Write its value there.")
    kinds: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}
    fits = kinds.get(wanted.partition(" ")[0])
    if value is None or fits is None:
        return
    if type(value) not in fits or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{key} is {_shown(value)}, but must be of the type {wanted}.")
    least = 0 if key.endswith(("eps", "epsilon")) else -_LARGEST
    if not isinstance(value, str) and not least <= value <= _LARGEST:
        raise ValueError(f"{key} is {_shown(value)}, but must be from {least} to {_LARGEST}.")


def _check_head_dim(config: Config, found: Mapping[str, Any]) -> None:
    """Raise ValueError for a ``head_dim`` in a family whose attention has no such setting.

    transformers computes the rotary positions by it, and the heads' width without it.
    """
    given, width = config.get("head_dim"), found["hidden_size"] // max(found["num_attention_heads"], 1)
    if given not in (None, width):
        raise ValueError(
            f"{config['model_type']} with head_dim={_shown(given)} is not implemented, only with "
            f"hidden_size / num_attention_heads = {width}. Leave head_dim out."
        )


def _shown(value: Any) -> str:
    """Return a value of a ``config.json`` as text of a line."""
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."


def to_hf(config: TransformerConfig, settings: Settings | None = None) -> dict[str, Any]:
    """Return the content of ``config.json`` for a configuration, without the dtype.

    The family is the first one in whose ``config.json`` the configuration can be written without loss.

    Args:
        config: the configuration.
        settings: what goes with the model: its family, which is tried first, its special tokens and its classes' names.

    Raises:
        ValueError: there is none. The message names the settings that the nearest family lacks.
    """
    lacking: dict[str, list[str]] = {}
    first, tokens = ("", {}) if settings is None else (settings["family"], settings["tokens"])
    labels = (settings or {}).get("labels", {})
    for name in sorted(FAMILIES, key=lambda name: name != first):
        family = FAMILIES[name]
        if family.config is not type(config):
            continue
        written = _written(config, name, family)
        try:
            again = _from_hf(written)
        except ValueError:
            continue
        lacking[family.prefix] = [
            f"{setting}={getattr(config, setting)!r}"
            for setting in config.settings()
            if getattr(again, setting) != getattr(config, setting)
        ]
        if not lacking[family.prefix]:
            if "id2label" in written and len(labels.get("id2label", ())) == len(written["id2label"]):
                written |= labels
            return written | tokens
    fewest = min(map(len, lacking.values()), default=0)
    near = [f"{prefix} has no {', '.join(unsaid)}" for prefix, unsaid in lacking.items() if len(unsaid) == fewest]
    raise ValueError(
        f"no family of Hugging Face's has all settings of this {type(config).__name__}. The nearest: Hugging Face's "
        f"{'; '.join(near)}. Give the settings of one family, or pass the content of config.json as a dict."
    )


def _written(config: TransformerConfig, name: str, family: Family) -> dict[str, Any]:
    """Return the content of ``config.json`` for a configuration as a model of a family."""
    keys = {key: ours for ours, (key, _) in family.places.items()}
    written = {**_TOKENS, "architectures": [family.architecture], "model_type": name}
    written |= {key: values[0] for key, values in family.only.items()}
    for key, ours in keys.items():
        value = getattr(config, ours)
        written[key] = 1.0 / value if ours in family.inverse and value else value
    if family.rope:
        written |= _write_rope(config, family)
    if family.window:
        written |= _write_window(config, family)
    if family.write is not None:
        written |= family.write(config)
    return written


def same_model(ours: TransformerConfig, theirs: TransformerConfig) -> str | None:
    """Describe the settings with which two configurations compute different functions, or return None.

    Example: ``"rms_norm_eps is 1e-05 here, 1e-06 there"``.
    """
    if type(ours) is not type(theirs):
        return f"it is a {type(ours).__name__} here, a {type(theirs).__name__} there"
    # Fields that do not change the function that a model computes from its weights.
    free = {"dropout", "initializer_range", "router_aux_loss_coef", "aux_loss_alpha", "num_nextn_predict_layers"}
    if not getattr(ours, "learned_positions", False):
        free.add("max_position_embeddings")  # else there is a weight for each position
    differing = [
        f"{name} is {getattr(ours, name)} here, {getattr(theirs, name)} there"
        for name in ours.settings()
        if name not in free and getattr(ours, name) != getattr(theirs, name)
    ]
    return ", ".join(differing) or None


def _read_rope(config: Config, family: Family) -> dict[str, Any]:
    """Return the fields of the rotary positions. Transformers 5 has all in rope_parameters, 4 beside each other."""
    parameters, scaling = _object(config, "rope_parameters"), _object(config, "rope_scaling")
    parameters = family.scaled if config.get("rope_parameters") is None else parameters
    read: dict[str, Any] = {}
    rope: Config = scaling or parameters  # as transformers, which lets the older key win
    if "rope_local_base_freq" in family.rope:  # other positions in blocks with a sliding window
        local, global_rope, other = _object(parameters, _LOCAL), _object(parameters, _GLOBAL), "rope_local_base_freq"
        read[other] = _number(
            {**config, **local}, "rope_theta" if local.get("rope_theta") else other, family.rope[other]
        )
        if local.get("rope_type", "default") != "default":
            raise ValueError(f"{config['model_type']} with scaled rotary positions in {_LOCAL} is unknown.")
        for key in parameters.keys() - {_LOCAL, _GLOBAL}:
            raise ValueError(
                f"rope_parameters have {_shown(key)}, but those of {config['model_type']} have {_GLOBAL} and {_LOCAL}: "
                "write it there."
            )
        if "type" in scaling and "rope_type" not in scaling and not global_rope:
            raise ValueError(f"rope_scaling of {config['model_type']} has no rope_type. Write it instead of type.")
        rope = {**global_rope, **scaling}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("su", "yarn") and "yarn" not in family.scalings and "longrope" in family.scalings:
        kind = "longrope"  # its first names, in Phi-3's files
    if kind not in ("default", *family.scalings):
        raise ValueError(
            f"rope_type={_shown(kind)} is not implemented for {config['model_type']}, only "
            f"{', '.join(map(repr, ('default', *family.scalings)))}."
            + " triax.parallelize shards the Hugging Face model itself."
            * (family.plan is not None)
        )
    scaled = None
    if kind != "default":
        rope = dict(rope)
        if kind != "linear":  # as transformers reads the length of pretraining
            length = "original_max_position_embeddings"
            former = config.get(length) or family.rope.get(length) or rope.get(length)
            rope[length] = former or _longest(config, family)
        if kind == "dynamic":  # transformers takes no notice of another length
            rope[length] = _longest(config, family)
        for name in _REQUIRED.get(kind, ("factor",)):
            if rope.get(name) is None:
                raise ValueError(f"there is no {name} for rope_type={kind!r} in the rotary positions. Write its value.")
        for entry in fields(_SCALINGS[kind]):
            if rope.get(entry.name) is not None:
                _check_type(config, entry.name, rope[entry.name], str(entry.type))
        given = {option.name: rope.get(option.name) for option in fields(_SCALINGS[kind])}
        if _GROWTH not in family.rope:  # transformers takes no notice of it
            given.pop(_GROWTH, None)
        if kind == "longrope":
            given["attention_factor"] = _longrope_factor(_longest(config, family), rope)
        scaled = _SCALINGS[kind](**{name: value for name, value in given.items() if value is not None})
    if "partial_rotary_factor" in family.rope:
        read["partial_rotary_factor"] = _of_positions(config, rope, family, "partial_rotary_factor", "rotary_pct")
    theta = _of_positions(config, rope, family, "rope_theta", "rotary_emb_base")
    return {**read, "rope_theta": theta, "rope_scaling": scaled}


def _longest(config: Config, family: Family) -> Any:
    """Return the length of the longest sequence."""
    key, default = family.places["max_position_embeddings"]
    return config[key] if default is None else config.get(key, default)


def _longrope_factor(longest: int, rope: Config) -> float:
    """Return LongRoPE's factor of the rotated channels, after a check of the factors of the pairs."""
    for key in ("short_factor", "long_factor"):
        if not (isinstance(rope[key], (list, tuple)) and all(type(number) in (int, float) for number in rope[key])):
            raise ValueError(f"{key} is {_shown(rope[key])}, but must be a list of numbers.")
    length = rope["original_max_position_embeddings"]
    factor = _number(rope, "factor", longest / max(length, 1))
    grown = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 and length > 1 else 1.0
    return _number(rope, "attention_factor", grown)


def _of_positions(config: Config, rope: Config, family: Family, key: str, former: str) -> float:
    """Return a number of the rotary positions: theirs, else the model's, under a former name in some families."""
    own = former if former in family.rope else key
    return _number(rope, key, _number(config, own, family.rope[key]))


def _object(config: Config, key: str) -> Config:
    """Return the object that a key has as its value; an empty one if there is none."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{key} is {_shown(value)}, but must be an object with keys.")
    return value or {}


def _number(config: Config, key: str, default: float) -> float:
    """Return the number that a key has as its value; the default if there is none."""
    value = config.get(key)
    if value is not None and not (type(value) in (int, float) and 0 < value < math.inf):
        raise ValueError(f"{key} is {_shown(value)}, but must be a number above 0.")
    return float(default if value is None else value)


def _write_rope(config: Any, family: Family) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        kind = next(kind for kind, cls in _SCALINGS.items() if isinstance(config.rope_scaling, cls))
        rope |= {"rope_type": kind, **asdict(config.rope_scaling)}
        if _GROWTH not in family.rope:
            rope.pop(_GROWTH, None)
        rope |= {key: list(value) for key, value in rope.items() if isinstance(value, tuple)}
    if "partial_rotary_factor" in family.rope:
        rope["partial_rotary_factor"] = config.partial_rotary_factor
    if "rope_local_base_freq" in family.rope:
        local = {"rope_type": "default", "rope_theta": config.rope_local_base_freq}
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
    length = "original_max_position_embeddings"
    first = {length: rope[length]} if length in family.rope and length in rope else {}
    return first | {
        "rope_parameters": rope,
        "rope_theta": config.rope_theta,  # with rope_scaling, where Transformers 4 looks
        "rope_scaling": rope if config.rope_scaling is not None else None,
    }


def _read_window(config: Config, family: Family) -> dict[str, Any]:
    window, words = config.get("sliding_window", family.window_size), family.window.split()
    depth, types = layer_count(config), config.get("layer_types") if "types" in words else None
    if types is not None and not (isinstance(types, (list, tuple)) and all(isinstance(kind, str) for kind in types)):
        raise ValueError(f"layer_types are {_shown(types)}, but must be a list of words.")
    types = tuple((types or ())[:depth])
    if window is None or ("flag" in words and not config.get("use_sliding_window", False)):
        if "sliding_attention" in types:  # transformers has a window in the mask, and none in the kernel
            key = "sliding_window" if window is None else "use_sliding_window"
            raise ValueError(
                f"layer_types have sliding_attention, but {key} is {_shown(config.get(key))}. Set it, or write "
                "full_attention."
            )
        return {"sliding_window": None}
    _check_type(config, "sliding_window", window, "int")
    if not types and family.slides is not None:
        types = tuple(("full_attention", "sliding_attention")[family.slides(config, i)] for i in range(depth))
    return {"sliding_window": window, **({"layer_types": types} if types else {})}


def _write_window(config: Any, family: Family) -> dict[str, Any]:
    written: dict[str, Any] = {"sliding_window": config.sliding_window}
    if "flag" in family.window:
        written["use_sliding_window"] = config.sliding_window is not None
    if "types" in family.window:
        windows = map(config.window_of, range(config.num_hidden_layers))
        written["layer_types"] = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return written
