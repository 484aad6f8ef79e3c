"""Every key of a configuration gives the options that it gave before the table ``keys.toml`` was made."""

from __future__ import annotations

import json
from typing import Any

import pytest

from triax.base.errors import ConfigError
from triax.compat.deepspeed.config.table import keys, table
from triax.compat.deepspeed.config.to_options import options_of, parse_config
from triax.options.engine import EngineOptions

from support.paths import ROOT

# A configuration, and the options that it sets; None: it is refused.
ANSWERS = [json.loads(line) for line in (ROOT / "tests/compat/deepspeed_keys.jsonl").read_text().splitlines()]


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the innermost values by their paths."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found


def test_every_key_sets_its_recorded_options() -> None:
    defaults = flat(EngineOptions().plain())
    for config, expected in ANSWERS:
        if expected is None:
            with pytest.raises(ConfigError) as caught:
                parse_config(config)
            assert any(path.rpartition(".")[2] in str(caught.value) for path in paths(config)), caught.value
        else:
            options = flat(options_of(parse_config(config)).plain())
            assert {path: value for path, value in options.items() if defaults.get(path, "-") != value} == expected


def test_every_key_has_a_recorded_answer() -> None:
    asked = {path for config, _ in ANSWERS for path in paths(config)}
    known = {path for path, _ in keys()} | {section.path for section in table().walk() if section.path}
    assert len(known) == 336 and known <= asked


def paths(config: dict[str, Any], prefix: str = "") -> set[str]:
    """Return the keys of a configuration, of inner sections too."""
    found = {f"{prefix}{key}" for key in config}
    return found.union(*(paths(value, f"{prefix}{key}.") for key, value in config.items() if isinstance(value, dict)))
