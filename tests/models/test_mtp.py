"""Multi-token prediction of DeepSeek-V3, beside its equations in plain PyTorch, and in Hugging Face's folders."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import triax
from triax import Grid
from triax.models import MTPLoss, deepseek_layers
from triax.models.config import DeepseekConfig
from triax.models.huggingface.load import config_from_hf
from triax.plugins.plan.layer_shapes import layers_of

from support import mtp_reference
from support.exact_norms import exact
from support.paths import DOCS
from support.processes import program
from support.readme_blocks import blocks, programs
from support.toys import same

ROWS, LENGTH, FACTOR = 4, 9, 0.3
PROMPTS = [[3, 1, 4, 1, 5], [9, 2]]


def batch() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(5)
    ids, labels = (torch.randint(61, (ROWS, LENGTH), generator=draws) for _ in range(2))
    labels[:, ::5] = -100
    return ids, labels


def write(folder: Path, modules: int, **changes: Any) -> Any:
    """Write a folder as DeepSeek's, with a copy of embedding and head for each module; return the model."""
    model = mtp_reference.model_with_modules(modules, **changes)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": modules}))
    weights = load_file(folder / "model.safetensors")
    for k in range(modules):
        place = f"model.layers.{model.config.num_hidden_layers + k}."
        weights[place + "embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        weights[place + "shared_head.head.weight"] = head.clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return model


def module_of(folder: Path, grid: Grid, modules: int) -> triax.PipelineModule:
    config = config_from_hf(folder)
    assert isinstance(config, DeepseekConfig) and config.num_nextn_predict_layers == 0
    config = replace(config, num_nextn_predict_layers=modules, aux_loss_alpha=0.0)
    layers = triax.load_hf(folder, deepseek_layers(config))
    loss_fn = MTPLoss(grid, config.vocab_size, modules, FACTOR, chunk_tokens=4 if modules == 2 else None)
    return triax.PipelineModule(layers, grid=grid, loss_fn=loss_fn, dtype=torch.float64, partition="uniform")


def trained(
    folder: str, modules: int, axes: dict[str, Any], schedule: str, stage: Any
) -> tuple[float, dict[str, Any], dict[str, Tensor]]:
    """Save what was loaded, and return the loss, the terms and the gradients of a step, under Hugging Face's names."""
    grid = Grid(**axes, timeout=60)
    module = module_of(Path(folder), grid, modules)
    if module.is_last:
        assert module.loss_takes_head == (modules == 2)  # in chunks of 4 of the 9 tokens
    engine = triax.Engine(
        module,
        optimizer=partial(torch.optim.SGD, lr=1.0),
        batch=triax.Batch(size=ROWS, microbatch=1),
        schedule=schedule,
        zero=triax.Zero(stage=stage),
    )
    assert isinstance(engine, triax.PipelineEngine)
    triax.save_hf(engine, f"{folder}/again")
    ids, labels = batch()
    rows = range(ROWS)[grid.data.rank * ROWS // grid.data.size : (grid.data.rank + 1) * ROWS // grid.data.size]
    loss = engine.train_batch(iter([(ids[i : i + 1], labels[i : i + 1]) for i in rows])).item()
    return loss, engine.metrics, engine.gather("gradients")


def gradients_in_names(found: dict[str, Tensor], folder: Path, modules: int) -> dict[str, Tensor]:
    """Return gradients under Hugging Face's names, through the tables that save_hf uses."""
    module = module_of(folder, Grid(), modules)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(found[name])
    triax.save_hf(module, folder / "gradients")
    return load_file(folder / "gradients" / "model.safetensors")


CASES: list[tuple[int, bool, dict[str, int], str, int]] = [  # D, tied embedding and head
    (1, False, {"pipe": 1}, "1f1b", 0),
    (2, True, {"pipe": 1, "data": 2}, "1f1b", 2),
    (2, False, {"pipe": 2}, "1f1b", 1),
    (1, True, {"pipe": 2}, "zb-h1", 0),
    (2, False, {"pipe": 2, "tensor": 2}, "zb-v", 2),
    (2, False, {"data": 2, "expert": 2}, "1f1b", 1),
]
MORE: list[tuple[int, bool, dict[str, int], str, int]] = [
    (2, False, {"pipe": 4, "data": 2}, "1f1b", 2),
    (1, False, {"pipe": 4, "tensor": 2}, "zb-h1", 0),
]


@pytest.mark.parametrize(
    ("modules", "tied", "axes", "schedule", "stage"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE)],
)
def test_mtp_loss_and_gradients_follow_the_equations(
    ranks: Any, tmp_path: Path, modules: int, tied: bool, axes: dict[str, int], schedule: str, stage: int
) -> None:
    model = write(tmp_path, modules, tie_word_embeddings=tied)
    ids, labels = batch()
    with exact(model):
        loss, terms = mtp_reference.loss_of(mtp_reference.logits_of(model, ids), labels, FACTOR)
    loss.backward()
    size = math.prod(size for axis, size in axes.items() if axis != "expert")
    results = ranks(size, trained, str(tmp_path), modules, axes, schedule, stage, timeout=200)
    for found, metrics, gradients in results:
        assert found == pytest.approx(loss.item(), rel=1e-10)
        assert metrics == pytest.approx(terms, rel=1e-10) and list(metrics) == list(terms)
        assert gradients.keys() == results[0][2].keys()
    written = gradients_in_names(results[0][2], tmp_path, modules)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(tmp_path / "wanted")  # the same names as the folder's, expert by expert
    wanted = load_file(tmp_path / "wanted" / "model.safetensors")
    for name, gradient in wanted.items():
        if "correction_bias" not in name:
            same(written[name], gradient, atol=1e-12)
    before, again = (load_file(each / "model.safetensors") for each in (tmp_path, tmp_path / "again"))
    assert before.keys() == again.keys()
    assert all(torch.equal(again[name], weight) for name, weight in before.items())
    assert json.loads((tmp_path / "again" / "config.json").read_text())["num_nextn_predict_layers"] == modules


def generated(folder: str, modules: int, axes: dict[str, Any]) -> list[list[int]]:
    grid = Grid(**axes, timeout=60)
    module = module_of(Path(folder), grid, modules)
    return triax.init_inference(module, max_length=20).generate(PROMPTS, max_new_tokens=6, temperature=0)


def test_generation_ignores_multi_token_modules(ranks: Any, tmp_path: Path) -> None:
    model = write(tmp_path, 2)
    wanted = generated(str(tmp_path), 0, {})
    for prompt, tokens in zip(PROMPTS, wanted, strict=True):
        with exact(model):
            theirs = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
        assert tokens == theirs[0].tolist()
    assert ranks(2, generated, str(tmp_path), 2, {"pipe": 2}) == [wanted] * 2
    assert generated(str(tmp_path), 2, {}) == wanted


def evaluated(folder: str) -> tuple[float, dict[str, Any]]:
    module = module_of(Path(folder), Grid(), 1)
    batch_of_one = triax.Batch(size=ROWS, microbatch=ROWS)
    engine = triax.Engine(module, optimizer=partial(torch.optim.SGD, lr=0.1), batch=batch_of_one)
    assert isinstance(engine, triax.PipelineEngine)
    return engine.eval_batch(iter([batch()])).item(), engine.metrics


def test_evaluation_loss_excludes_multi_token_modules(tmp_path: Path) -> None:
    model = write(tmp_path, 1)
    ids, labels = batch()
    with exact(model), torch.no_grad():
        _, terms = mtp_reference.loss_of(mtp_reference.logits_of(model, ids), labels, FACTOR)
    loss, metrics = evaluated(str(tmp_path))
    assert loss == pytest.approx(terms["main"], rel=1e-10) and metrics == pytest.approx(terms, rel=1e-10)


def test_multi_token_layers_count_in_the_parameters() -> None:
    config = DeepseekConfig.preset("deepseek-tiny", num_nextn_predict_layers=2)
    layers = deepseek_layers(config)
    module = triax.PipelineModule(layers, grid=Grid(), device="meta")
    assert sum(parameter.numel() for parameter in module.parameters()) == config.parameter_count
    assert len(layers) == config.layer_count


def refusals(folder: str) -> list[str]:
    """Return the error message for a grid with a context axis."""
    grid = Grid(context=2, timeout=30)
    module = module_of(Path(folder), grid, 1)
    engine: Any = triax.Engine(module, optimizer=partial(torch.optim.SGD, lr=0.1), batch=triax.Batch(size=ROWS))
    with pytest.raises(Exception, match="context=1") as error:
        engine.train_batch(iter([batch()] * ROWS))
    return [str(error.value)]


def test_multi_token_modules_refuse_options_they_lack(ranks: Any, tmp_path: Path) -> None:
    write(tmp_path, 1)
    config = DeepseekConfig.preset("deepseek-tiny", num_nextn_predict_layers=1)
    with pytest.raises(ValueError, match="num_nextn_predict_layers = -1"):
        replace(config, num_nextn_predict_layers=-1)
    with pytest.raises(ValueError, match="num_nextn_predict_layers=1 shortens the sequence"):
        deepseek_layers(config, sequence_parallel=True)
    with pytest.raises(ValueError, match=r"num_nextn_predict_layers is 1, and modules .* are not counted"):
        layers_of(config)
    module = triax.PipelineModule(deepseek_layers(config), grid=Grid(), partition="uniform")
    ids, _ = batch()
    with pytest.raises(ValueError, match=r"needs ids .* without documents"):
        module.run_stage(0, (ids, torch.zeros_like(ids)))
    with pytest.raises(ValueError, match=r"the rows have 1 tokens.*at least 2"):
        module.run_stage(0, ids[:, :1])
    with pytest.raises(ValueError, match=r"layers\.\d+\..* is loaded from model\.layers\.4\."):
        module_of(tmp_path, Grid(), 2)
    assert ranks(2, refusals, str(tmp_path))


@pytest.mark.parametrize(("size", "sizes"), [(1, []), pytest.param(4, ["2", "1", "2"], marks=pytest.mark.exhaustive)])
def test_the_program_of_the_mtp_page_prints_its_output(ranks: Any, tmp_path: Path, size: int, sizes: list[str]) -> None:
    page = (DOCS / "models.md").read_text()
    (tmp_path / "mtp.py").write_text(programs(page)["mtp.py"])
    shown = next(block.text for block in blocks(page) if block.language == "text" and "mtp_1" in block.text)
    assert ranks(size, program, ["mtp.py", *sizes], str(tmp_path))[0] == shown
