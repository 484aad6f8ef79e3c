"""DeepSpeed's JSON as a dialect: the options that its keys set, as in a training file's section ``deepspeed``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....base.errors import ConfigError, describe
from ....base.json_comments import read_json
from ....options.dialect import GivenOptions
from .table import TITLE, key_of
from .to_options import option_values, parse_config

__all__ = ["TITLE", "given_keys", "given_options", "key_of"]


def given_keys(source: Mapping[str, Any] | str) -> dict[str, Any]:
    """Return the keys of a section, or of the JSON file at a path, with their values; without those that are "auto"."""
    values = read_json(source) if isinstance(source, str) else source
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
    return GivenOptions(dict(kept), option_values(parse_config(kept)))
