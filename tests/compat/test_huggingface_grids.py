"""triax.Trainer on pipe x tensor x data x context, and LoRA on each axis, beside transformers' own Trainer in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer_in_float64 import near, run

SHORT = {"max_steps": 6, "eval_steps": 3, "save_steps": 3}  # with the short step at the end of an epoch


def on(stage: int = 0, **grid: int) -> dict[str, Any]:
    return {"grid": grid, "triax": {"zero_optimization": {"stage": stage}}}


def count(options: dict[str, Any]) -> int:
    ranks = 1
    for size in options["grid"].values():
        ranks *= size
    return ranks


@pytest.mark.parametrize(
    "options", [on(1, tensor=2), on(1, pipe=2, tensor=2), on(1, context=2), on(2, pipe=2, tensor=2, data=2)], ids=str
)
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_scratch(ranks: Any, tmp_path: Path, case: str, options: dict[str, Any], lora: bool) -> None:
    (wanted,) = ranks(1, run, str(tmp_path / "plain"), 1, None, case=case, lora=lora, **SHORT)
    data = options["grid"].get("data", 1)
    for found in ranks(count(options), run, str(tmp_path / "out"), data, options, case=case, lora=lora, timeout=200, **SHORT):
        near(found, wanted, 6)
