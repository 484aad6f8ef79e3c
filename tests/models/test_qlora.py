"""Frozen bases in 4 and 8 bits on any grid: training against PEFT's, bytes held, checkpoints, exports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax.tensor_parallel.nf4 import NF4

from lora_runs import (
    Sizes,
    close,
    engine_of,
    equals_peft,
    factors,
    loaded,
    loaded_by_peft,
    logits_of,
    make,
    peft_model,
    saved,
    step,
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
                block.copy_((block * (127 / largest)).round() * largest * (1 / 127))
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
    ((1, 1, 4), "qwen2", "int8", ALL, {"schedule": "1f1b"}),
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


def bits_of(engine: Any) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in engine.gather().items() if ".quantized." in name}


def held_by(folder: Path, sizes: Sizes, form: str, stage: int) -> tuple[dict[str, Tensor], int, int]:
    """Whole integers, bytes of this rank's parameters, and bytes of those that are no integers, whole."""
    engine = engine_of(folder, sizes, SOME | {"base": form}, stage=stage, schedule="1f1b")
    step(engine, 0)
    others = sum(p.numel() for name, p in engine.module.named_parameters() if ".quantized." not in name)
    return bits_of(engine), engine.memory_report()["held"]["parameters"], 8 * others


def blocks_of(form: str, rows: int, columns: int) -> float:
    """Bytes of a matrix in blocks, by the formula."""
    scales = rows * (1 if form == "int8" else -(-columns // 64))
    outer = {"nf4": 4 * scales, "int8": 4 * scales, "nf4-double": scales + 4 * -(-scales // 256) + 4}
    return rows * columns * (1 if form == "int8" else 0.5) + outer[form]


@pytest.mark.parametrize("form", ["nf4-double", pytest.param("int8", marks=pytest.mark.exhaustive)])
def test_the_integers_are_bitwise_equal_on_every_grid(
    ranks: Callable[..., list[Any]], tmp_path: Path, form: str
) -> None:
    """And take the formula's bytes, which stage 3 divides by the number of replicas."""
    folder = saved(tmp_path / "model", "wide")
    bits, held, others = ranks(1, held_by, folder, (1, 1, 1), form, 0)[0]
    d, wide = 96, 176
    matrices = [(d, d), (2 * d // 4, d), (d, d), (2 * wide, d), (d, wide)]  # q, kv, out, gate and up, down
    formula = 2 * sum(blocks_of(form, *shape) for shape in matrices)
    assert sum(tensor.nbytes for tensor in bits.values()) == formula
    assert 0 <= held - (others + formula) < 512  # padding of a bucket
    for sizes, stage in (((2, 1, 2), 1), ((1, 2, 1), 3)):
        found = ranks(sizes[0] * sizes[1] * sizes[2], held_by, folder, sizes, form, stage)
        assert found[0][0].keys() == bits.keys()
        assert all(torch.equal(found[0][0][name], value) for name, value in bits.items())
    assert all(0 <= each[1] - (others + formula) / 2 < 4096 for each in found)


def save_in(folder: Path, out: Path, sizes: Sizes, form: str) -> tuple[float, dict[str, Tensor]]:
    engine = engine_of(folder, sizes, SOME | {"base": form}, stage=1)
    step(engine, 0)
    engine.save_checkpoint(out, tag="all")
    engine.save_checkpoint(out, tag="adapters", exclude_frozen_parameters=True)
    return step(engine, 1), engine.gather()


def resume(folder: Path, out: Path, sizes: Sizes, form: str, tag: str) -> tuple[float, dict[str, Tensor], str]:
    engine = engine_of(folder, sizes, SOME | {"base": form}, stage=3, schedule="1f1b")
    engine.load_checkpoint(out, tag=tag, load_module_strict=tag == "all")
    loss, found = step(engine, 1, engine.batch.accumulation), engine.gather()
    other = engine_of(folder, sizes, SOME | {"base": "nf4"}, stage=1, schedule="1f1b")
    with pytest.raises(triax.CheckpointError) as caught:
        other.load_checkpoint(out, tag="all", load_module_strict=False)
    return loss, found, str(caught.value)


@pytest.mark.parametrize("tag", ["all", pytest.param("adapters", marks=pytest.mark.exhaustive)])
def test_a_checkpoint_resumes_on_another_grid(ranks: Callable[..., list[Any]], tmp_path: Path, tag: str) -> None:
    folder, out = saved(tmp_path / "model", "wide"), tmp_path / "checkpoints"
    loss, end = ranks(4, save_in, folder, out, (2, 1, 2), "nf4-double")[0]
    again, found, refused = ranks(2, resume, folder, out, (1, 1, 2), "nf4-double", tag)[0]
    assert again == pytest.approx(loss, rel=1e-10)
    close(factors(found), factors(end))
    assert all(torch.equal(found[name], value) for name, value in end.items() if ".lora." not in name)
    assert "in another format of 4 or 8 bits" in refused
    if tag == "all":
        exported(out, tmp_path, found)


def exported(out: Path, folder: Path, weights: dict[str, Tensor]) -> None:
    """Check the exports of a checkpoint: PEFT's folder, and merged weights in floating point."""
    from typer.testing import CliRunner

    from triax.cli.main import app

    for words in (["adapter"], ["merged", "--merge-lora"]):
        target = [str(folder / words[0]), "--format", "hf", *words[1:]]
        done = CliRunner().invoke(app, ["checkpoint", "export", str(out / "all"), *target])
        assert done.exit_code == 0, done.output
    model: Any = loaded(folder / "merged")
    layer = model.model.layers[0].mlp.down_proj
    plain: Any = make("wide").model.layers[0].mlp.down_proj
    a, b = (weights[f"layers.1.mlp.down.lora.down_proj.{factor}"] for factor in "AB")
    assert layer.weight.shape == plain.weight.shape and not torch.equal(layer.weight, plain.weight)
    apart = layer.weight - (plain.weight + b @ a * 8 / 3)
    assert apart.abs().max() < 0.2 * plain.weight.abs().max()


def base_first(folder: Path, out: Path) -> tuple[str, str]:
    """Errors of loading a plain model's checkpoint under adapters, and the way that the messages name."""
    plain = engine_of(folder, (1, 1, 1), None, stage=0, schedule="1f1b")
    plain.save_checkpoint(out, tag="plain")
    messages = []
    for lora in (SOME | {"base": "nf4"}, SOME | {"use_dora": True}):
        engine = engine_of(folder, (1, 1, 1), lora, stage=0, schedule="1f1b")
        with pytest.raises(triax.CheckpointError) as caught:
            engine.load_checkpoint(out, tag="plain", load_module_strict=False)
        messages.append(str(caught.value))
    return messages[0], messages[1]


def test_a_base_is_not_changed_under_its_adapters(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    bits, norms = ranks(1, base_first, saved(tmp_path / "model", "llama"), tmp_path / "out")[0]
    assert "in floating point, but the model keeps it in 4 or 8 bits. Load the weights of a model before" in bits
    assert "but not the norms of its rows, which DoRA trains. Load the weights" in norms
