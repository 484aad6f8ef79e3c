"""Frozen bases in 4 and 8 bits: bytes held, checkpoints, exports, bitsandbytes. test_lora.py trains them on grids."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax.grid import Grid
from triax.models.layers import NextTokenLoss

from support.command_line import output_of
from support.lora_runs import (
    EPS,
    LR,
    VOCAB,
    Sizes,
    batch,
    close,
    engine_of,
    factors,
    loaded,
    make,
    saved,
    step,
    theirs,
)

SOME: dict[str, Any] = {"r": 3, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}


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
def test_quantized_weights_are_bitwise_equal_on_every_grid(
    ranks: Callable[..., list[Any]], tmp_path: Path, form: str
) -> None:
    """They take the bytes of the formula, which stage 3 divides by the number of replicas."""
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


def save_then_go_on(folder: Path, out: Path, form: Any) -> tuple[float, dict[str, Tensor]]:
    engine = engine_of(folder, (2, 1, 2), SOME | {"base": form}, stage=1)
    step(engine, 0)
    engine.save_checkpoint(out, tag="all")
    engine.save_checkpoint(out, tag="adapters", exclude_frozen_parameters=True)
    return step(engine, 1), engine.gather()


def resume(folder: Path, out: Path, form: Any, tag: str) -> tuple[float, dict[str, Tensor], str]:
    engine = engine_of(folder, (1, 1, 2), SOME | {"base": form}, stage=3, schedule="1f1b")
    engine.load_checkpoint(out, tag=tag, load_module_strict=tag == "all")
    loss, found = step(engine, 1, engine.batch.accumulation), engine.gather()
    other = engine_of(folder, (1, 1, 2), SOME | {"base": "nf4"}, stage=1, schedule="1f1b")
    with pytest.raises(triax.CheckpointError) as caught:
        other.load_checkpoint(out, tag="all", load_module_strict=False)
    return loss, found, str(caught.value)


@pytest.mark.parametrize(
    ("form", "tag"),
    [
        ("nf4-double", "all"),
        pytest.param("nf4-double", "adapters", marks=pytest.mark.exhaustive),
        pytest.param(None, "all", marks=pytest.mark.exhaustive),
        pytest.param(None, "adapters", marks=pytest.mark.exhaustive),
    ],
)
def test_a_lora_checkpoint_resumes_on_another_grid(
    ranks: Callable[..., list[Any]], tmp_path: Path, form: Any, tag: str
) -> None:
    """A checkpoint of the adapters alone resumes too, over the same frozen weights in floating point and in 4 bits."""
    folder, out = saved(tmp_path / "model", "wide"), tmp_path / "checkpoints"
    loss, end = ranks(4, save_then_go_on, folder, out, form)[0]
    again, found, refused = ranks(2, resume, folder, out, form, tag)[0]
    assert again == pytest.approx(loss, rel=1e-10)
    close(factors(found), factors(end))
    assert all(torch.equal(found[name], value) for name, value in end.items() if ".lora." not in name)
    assert ("in another format of 4 or 8 bits" if form else "in floating point, but the model keeps it in") in refused
    if form and tag == "all":
        exported(out, tmp_path, found)


def exported(out: Path, folder: Path, weights: dict[str, Tensor]) -> None:
    """Check the exports of a checkpoint: PEFT's folder, and merged weights in floating point."""
    export = ("checkpoint", "export", out / "all")
    output_of(*export, folder / "adapter", "--format", "hf")
    output_of(*export, folder / "merged", "--format", "hf", "--merge-lora")
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


def losses_of_triax(folder: Path, sizes: Sizes, form: Any, steps: int) -> tuple[dict[str, Tensor], list[float]]:
    grid = Grid(*sizes)
    layers = triax.load_hf(folder)
    module = triax.PipelineModule(layers, grid=grid, loss_fn=NextTokenLoss(grid, VOCAB), dtype=torch.float32)
    engine = triax.Engine(
        module,
        optimizer=partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.0),
        batch=triax.Batch(size=2, microbatch=1),
        schedule="1f1b",
        lora=triax.Lora(rank=4, alpha=8, base=form),
    )
    start = factors(engine.gather())
    losses = []
    for _ in range(steps):
        ids, labels = batch(0, 0, 0)
        losses.append(float(engine.train_batch(iter([(ids[i : i + 1], labels[i : i + 1]) for i in range(2)]))))
    return start, losses


@pytest.mark.exhaustive
@pytest.mark.parametrize(("form", "apart"), [("nf4", 1e-4), ("nf4-double", 1e-2)])
def test_fifty_steps_of_qlora_follow_those_of_peft(
    ranks: Callable[..., list[Any]], tmp_path: Path, form: str, apart: float
) -> None:
    """Both run in fp32; the double quantization of bitsandbytes rounds a few scales differently."""
    bitsandbytes, peft = pytest.importorskip("bitsandbytes"), pytest.importorskip("peft")
    torch.manual_seed(3)
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, **sizes))
    base.save_pretrained(tmp_path / "model")
    start, losses = ranks(4, losses_of_triax, tmp_path / "model", (2, 1, 2), form, 50)[0]
    for name, layer in [*base.named_modules()]:
        if isinstance(layer, nn.Linear) and name != "lm_head":
            how: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": form == "nf4-double"}
            new = bitsandbytes.nn.Linear4bit(layer.in_features, layer.out_features, False, **how)
            new.weight = bitsandbytes.nn.Params4bit(layer.weight.data, requires_grad=False, **how)
            parent, _, last = name.rpartition(".")
            setattr(base.get_submodule(parent), last, new.to("cpu"))
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {theirs(name, "llama") for name in start} == set(trained)
    with torch.no_grad():
        for name, value in start.items():
            trained[theirs(name, "llama")].copy_(value)
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, weight_decay=0.0)
    ids, labels = batch(0, 0, 0)
    wanted = []
    for _ in range(50):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), labels.flatten())
        loss.backward()
        wanted.append(loss.item())
        optimizer.step()
    print(form, losses[::7], wanted[::7])
    assert wanted[-1] < 0.5 * wanted[0]
    assert losses == pytest.approx(wanted, rel=apart)


def streamed(folder: Path, sizes: Sizes, schedule: Any, form: Any, where: Any) -> tuple[list[float], int, int]:
    """Losses of a base whose weights are in host memory or on the device, and the bytes in each."""
    grid = Grid(*sizes)
    chunks = 2 if schedule == "zb-v" else 1
    loss_fn = NextTokenLoss(grid, VOCAB)
    module = triax.PipelineModule(
        triax.load_hf(folder), grid=grid, loss_fn=loss_fn, chunks=chunks, dtype=torch.float64, device="meta"
    )
    engine = triax.Engine(
        module,
        optimizer=partial(torch.optim.AdamW, lr=LR, eps=EPS),
        batch=triax.Batch(size=2 * 4 * grid.data.size, microbatch=2),
        schedule=schedule,
        zero=triax.Zero(stage=3, offload_parameters=where),
        lora=triax.Lora(rank=3, base=form),
    )
    losses = [step(engine, number) for number in range(2)]
    held = sum(b.weights.untyped_storage().nbytes() for b in engine.data_axis.buckets if not b.trained)
    return losses, held, engine.memory_report()["held"]["parameters"]


SCHEDULES = ["zb-v", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("gpipe", "1f1b", "zb-h1"))]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_base_is_streamed_from_host_memory(ranks: Callable[..., list[Any]], tmp_path: Path, schedule: str) -> None:
    """Every schedule has the same losses, and between steps the device holds no weight of the base."""
    folder = saved(tmp_path / "model", "wide")
    for form in (None, "nf4"):
        there = ranks(4, streamed, folder, (2, 2, 1), schedule, form, "cpu")
        here = ranks(4, streamed, folder, (2, 2, 1), schedule, form, "none")
        assert there[0][0] == here[0][0]
        assert all(held == 0 for _, held, _ in there) and all(away[2] < 1 + kept[2] for away, kept in zip(there, here))
        assert max(parameters for _, _, parameters in there) == 0


def in_bf16(folder: Path, precision: Any) -> list[float]:
    grid = Grid(tensor=2)
    module = triax.PipelineModule(triax.load_hf(folder), grid=grid, loss_fn=NextTokenLoss(grid, VOCAB))
    lora = triax.Lora(rank=3, alpha=8, base="nf4", dora=True, dropout=0.2)
    adam = partial(torch.optim.AdamW, lr=LR)
    engine = triax.Engine(
        module, optimizer=adam, batch=triax.Batch(size=8, microbatch=2), precision=precision, lora=lora
    )
    return [step(engine, 0) for _ in range(4)]


def test_bf16_follows_fp32_over_the_same_base(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "wide")
    narrow, wide = (ranks(2, in_bf16, folder, precision)[0] for precision in ("bf16", None))
    assert narrow == pytest.approx(wide, rel=0.01) and wide[-1] < wide[0]
