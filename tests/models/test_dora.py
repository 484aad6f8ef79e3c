"""DoRA, rsLoRA and LoRA's dropout on any grid against PEFT on one process, in float64, over 6 or 20 steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import triax

from support.lora_runs import (
    Sizes,
    batch,
    engine_of,
    equals_peft,
    loaded,
    loaded_by_peft,
    logits_of,
    make,
    peft_model,
    saved,
    train,
)

SOME: dict[str, Any] = {
    "r": 3,
    "lora_alpha": 5,
    "use_dora": True,
    "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"],
}
EVERY: dict[str, Any] = {"r": 3, "lora_alpha": 8, "use_dora": True, "use_rslora": True, "target_modules": "all-linear"}
DROPS: dict[str, Any] = EVERY | {"lora_dropout": 0.3}
PLAIN: dict[str, Any] = {"r": 3, "lora_alpha": 8, "lora_dropout": 0.3, "target_modules": "all-linear"}
SWEEP: list[tuple[Sizes, str, dict[str, Any], dict[str, Any]]] = [  # grid, model, lora, options
    ((1, 1, 1), "llama", SOME, {"stage": 0, "schedule": "1f1b"}),
    ((2, 2, 1), "llama", SOME, {"stage": 1}),
    ((2, 1, 2), "gpt2", DROPS, {"stage": 2, "schedule": "zb-h1"}),
    ((1, 2, 2), "llama", DROPS, {"stage": 3, "schedule": "1f1b", "device": "meta"}),
    ((1, 1, 2), "llama", DROPS, {"stage": 1, "schedule": "1f1b", "sequence_parallel": True}),
    ((1, 1, 4), "qwen2", DROPS, {"stage": 1, "schedule": "1f1b"}),
    ((1, 1, 2, 2), "llama", DROPS, {"stage": 2, "schedule": "1f1b"}),
    ((1, 1, 2, 2), "llama", PLAIN, {"schedule": "1f1b", "sequence_parallel": True}),
    ((1, 2, 1, 1, 2), "mixtral", PLAIN | {"target_modules": ["q_proj", "k_proj", "o_proj"]}, {"schedule": "1f1b"}),
    ((1, 1, 2), "llama", DROPS, {"schedule": "1f1b", "compile": {"enabled": True, "backend": "aot_eager"}}),
    ((1, 1, 2), "llama", DROPS, {"schedule": "1f1b", "activation_checkpointing": {"interval": 1}}),
]
FEW: list[tuple[Sizes, str, dict[str, Any], dict[str, Any]]] = [
    ((2, 1, 2), "llama", DROPS, {"stage": 1, "schedule": "1f1b"}),
    ((2, 2, 1), "llama", DROPS, {"stage": 3, "device": "meta"}),
]
CASES: list[Any] = [
    *((6, *case) for case in FEW),
    *(pytest.param(20, *case, marks=pytest.mark.exhaustive) for case in FEW + SWEEP),
]


@pytest.mark.parametrize(("steps", "sizes", "case", "lora", "options"), CASES)
def test_dora_steps_are_those_of_peft(
    ranks: Callable[..., list[Any]],
    tmp_path: Path,
    steps: int,
    sizes: Sizes,
    case: str,
    lora: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """With dropout, PEFT's layers have triax's masks in place of their own."""
    folder, size = saved(tmp_path / "model", case), torch.Size(sizes[:4]).numel()
    runs = ranks(size, train, folder, sizes, lora, tmp_path, steps=steps, **options)
    equals_peft(runs, case, lora, sizes[1], steps)
    logits = logits_of(peft_model(case, lora, runs[0][3]))
    assert (logits - logits_of(make(case))).abs().max() > 1e-3
    torch.testing.assert_close(logits_of(loaded_by_peft(case, tmp_path / "adapter")), logits, rtol=0, atol=1e-10)
    torch.testing.assert_close(logits_of(loaded(tmp_path / "merged")), logits, rtol=0, atol=1e-10)


def exchange(folder: Path, adapter: Path, out: Path) -> float:
    engine = engine_of(folder, (1, 1, 2), triax.lora_config(adapter), stage=3, schedule="1f1b")
    triax.load_lora(adapter, engine)
    triax.save_lora(engine, out)
    return float(engine.eval_batch(iter([batch(0, 9, 0)] * 4)))


def test_an_adapter_of_peft_comes_back_bit_for_bit(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    import peft

    folder, adapter, out = saved(tmp_path / "model", "llama"), tmp_path / "peft", tmp_path / "ours"
    torch.manual_seed(1)
    model = peft.get_peft_model(make("llama"), peft.LoraConfig(**(SOME | {"lora_dropout": 0.25, "use_rslora": True})))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(str(adapter))
    found = ranks(2, exchange, folder, adapter, out)[0]
    labels = batch(0, 9, 0)[1]
    assert found == pytest.approx(
        torch.nn.functional.cross_entropy(logits_of(model).flatten(0, 1), labels.flatten()).item()
    )
    mine, theirs = (load_file(each / "adapter_model.safetensors") for each in (out, adapter))
    assert mine.keys() == theirs.keys() and any(name.endswith("lora_magnitude_vector") for name in mine)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert triax.lora_config(out) | {"targets": 0} == triax.lora_config(adapter) | {"targets": 0}
