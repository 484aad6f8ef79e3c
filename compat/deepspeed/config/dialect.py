"""DeepSpeed's JSON as a dialect: the options that its keys set, as in a training file's section ``deepspeed``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....base.errors import ConfigError, describe
from ....base.json_comments import read
from ....options.dialect import GivenOptions
from .config import parse_config
from .schema import Config
from .to_options import KEYS, key_of, options_of

__all__ = ["TITLE", "given_keys", "given_options", "key_of"]
TITLE = Config.TITLE

# Outermost keys -> the options that they set, where these are not those of ``_KEYS``.
_SETS: dict[str, tuple[str, ...]] = {
    "bf16": ("precision",),
    "bfloat16": ("precision",),
    "fp16": ("precision",),
    "amp": ("precision",),
    "data_types": ("precision",),
    "torch_autocast": ("precision", "reduction.low_precision_modules"),
    "gradient_compression": ("compression", "reduction.dtype"),
    "sparse_gradients": ("compression",),
}


def given_keys(source: Mapping[str, Any] | str) -> dict[str, Any]:
    """Return the keys of a section, or of the JSON file at a path, with their values; without those that are "auto"."""
    values = read(source) if isinstance(source, str) else source
    if not isinstance(values, Mapping):
        raise ConfigError(f"deepspeed is {describe(values)}: give a section, or the path of a JSON file with one")
    kept = {key: value for key, value in values.items() if value != "auto" and not key.startswith("_")}
    optimizer = kept.get("optimizer")
    if isinstance(optimizer, Mapping) and isinstance(optimizer.get("params"), Mapping):
        params = {key: value for key, value in optimizer["params"].items() if value != "auto"}
        kept["optimizer"] = {**optimizer, "params": params}
    return kept


def given_options(kept: Mapping[str, Any]) -> GivenOptions:
    """Return the options that keys set.

    Raises:
        ConfigError: as ``parse_config``.
    """
    config = parse_config(kept)
    options, fields = options_of(config), dict[str, Any]()
    for key in kept:
        sections = [path for path, name in KEYS.items() if name == key and path.count(".") < 2]
        for path in _SETS.get(key) or sections or ([key] if hasattr(options, key) else []):
            section, _, name = path.partition(".")
            found = getattr(options, section)
            if key == "checkpoint":
                given = config.checkpoint.model_fields_set
                fields[section] = {each: getattr(found, each) for each in given if hasattr(found, each)}
            elif name:
                fields.setdefault(section, {})[name] = getattr(found, name)
            else:
                fields[section] = found
    return GivenOptions(dict(kept), fields)
