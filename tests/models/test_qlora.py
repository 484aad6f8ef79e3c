"""Frozen bases in 4 and 8 bits on any grid: training against PEFT's, bytes held, checkpoints, exports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from triax.tensor_parallel.nf4 import NF4

from lora_runs import (
    Sizes,
    equals_peft,
    loaded,
    loaded_by_peft,
    logits_of,
    make,
    peft_model,
    saved,
    train,
)

ALL = {"r": 3, "lora_alpha": 8, "target_modules": "all-linear"}
SOME = {"r": 3, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def rounded(form: str, weight: Tensor) -> Tensor:
    """The weight as a format keeps it, by a plain loop over its blocks."""
    found, table = weight.float().clone(), torch.tensor(NF4)
    for row in found:
        for block in [row] if form == "int8" else row.split(64):
            largest = block.abs().max()
            if form == "int8":
                block.copy_((block * (127 / largest)).round() * (largest / 127))
            else:
                block.copy_(table[(block[:, None] / largest - table).abs().argmin(1)] * largest)
    return found.to(weight.dtype)


def in_bits(form: str) -> Callable[[nn.Module], None]:
    """A function that rounds the linear layers of transformers' model, but its output layer."""

    def change(model: nn.Module) -> None:
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear) and name != "lm_head":
                layer.weight.data = rounded(form, layer.weight.data)

    return change


SWEEP: list[tuple[Sizes, str, str, dict[str, Any], dict[str, Any]]] = [  # grid, model, form, lora, options
    ((1, 1, 1), "wide", "nf4", ALL | {"use_dora": True, "lora_dropout": 0.2}, {"stage": 0, "schedule": "1f1b"}),
    ((2, 1, 4), "wide", "nf4", ALL, {"stage": 1, "schedule": "zb-h1"}),
    ((1, 1, 2), "wide", "nf4", ALL, {"stage": 1, "schedule": "1f1b", "sequence_parallel": True}),
    ((1, 2, 2), "wide", "int8", ALL | {"use_dora": True}, {"stage": 3, "schedule": "1f1b", "device": "meta"}),
    ((1, 1, 2, 2), "wide", "nf4", SOME, {"stage": 2, "schedule": "1f1b"}),
    ((1, 1, 4), "qwen2", "nf4", ALL, {"schedule": "1f1b"}),
    ((1, 2, 1, 1, 2), "mixtral", "nf4", {**SOME, "target_modules": ["q_proj", "o_proj"]}, {"schedule": "1f1b"}),
    ((1, 1, 2), "wide", "nf4", ALL, {"schedule": "1f1b", "activation_checkpointing": {"interval": 1}}),
]
CASES: list[Any] = [
    ((2, 1, 2), "wide", "nf4", ALL | {"use_dora": True}, {"stage": 1, "schedule": "1f1b"}),
    ((2, 2, 1), "wide", "nf4", SOME, {"stage": 3, "device": "meta"}),
    *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in SWEEP),
]


@pytest.mark.parametrize(("sizes", "case", "form", "lora", "options"), CASES)
def test_training_equals_pefts_over_the_rounded_base(
    ranks: Callable[..., list[Any]],
    tmp_path: Path,
    sizes: Sizes,
    case: str,
    form: str,
    lora: dict[str, Any],
    options: dict[str, Any],
) -> None:
    folder, size = saved(tmp_path / "model", case), torch.Size(sizes[:4]).numel()
    runs = ranks(size, train, folder, sizes, lora | {"base": form}, tmp_path, steps=5, **options)
    equals_peft(runs, case, lora, sizes[1], 5, in_bits(form))
    logits = logits_of(peft_model(case, lora, runs[0][3], in_bits(form)))
    assert (logits - logits_of(make(case))).abs().max() > 1e-3
    torch.testing.assert_close(logits_of(loaded(tmp_path / "merged")), logits, rtol=0, atol=1e-10)
    adapted = loaded_by_peft(case, tmp_path / "adapter")
    assert any("lora_A" in name for name, _ in adapted.named_parameters())
