"""`triax check --types` on right layers and models, and on layers with a mistake each."""

from __future__ import annotations

import json
import random
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import triax
from triax import Grid, PipelineModule
from triax.models import ClassificationLoss, EncoderConfig, MaskedLMLoss, encoder_layers
from triax.plugins.sharding_types.check_types import TypeCheck, check_types
from triax.plugins.sharding_types.sharding import reshaped
from triax.testing.check import check

from laws import proved
from support import planted_faults, sharding_faults
from support.command_line import run_triax

GRIDS: dict[str, dict[str, int]] = {
    "pipe": {"pipe": 2},
    "tensor": {"tensor": 2},
    "context": {"context": 2},
    "data": {"data": 2},
    "expert": {"data": 2, "expert": 2},
}
ALL = {"tensor": 2, "context": 2, "data": 2, "expert": 2}


def texts(words: int) -> list[list[tuple[Tensor, Tensor]]]:
    draw = partial(torch.randint, words, (1, 8), generator=torch.Generator().manual_seed(5))
    return [[(draw(), draw() % 4) for _ in range(2)]]


def planted(kind: str, axes: dict[str, int]) -> TypeCheck:
    words = planted_faults.sizes_of(1).words
    return check_types(partial(planted_faults.build, kind, 1), partial(texts, words), axes)


# Of each mistake the code of the line that the finding names.
LINES = {
    "product_without_copy": "h = torch.tanh(F.linear(x, self.up))",
    "product_without_sum": 'return entered + (F.gelu(y) if self.name == "activation_before_sum" else y) + self.bias',
    "bias_before_sum": "return entered + all_reduce_copy(y + self.bias, axis)",
    "residual_before_sum": "return all_reduce_copy(entered + y, axis) + self.bias",
    "activation_before_sum": "return entered + all_reduce_copy(F.gelu(y), axis) + self.bias",
    "layer_norm_of_shard": "return F.layer_norm(h, h.shape[-1:])",
    "mean_square_of_shard": "return h * (h.square().mean(-1, keepdim=True) + 1e-6).rsqrt()",
    "squares_summed_one_way": "return h * ((total if wrong else copy_all_reduce(total, axis)) + 1e-6).rsqrt()",
    "squares_summed_in_place": "axis.all_reduce(total)",
    "scale_not_summed": "x = x * self.scale",
    "scale_summed_twice": "x = x * self.scale",
    "scale_without_layout": "class TensorLayer(nn.Module):",
    "gathered_for_shards": "h = torch.sin(h).cumsum(-1)[..., start:stop]",
    "copied_twice": "x = copy_all_reduce(x, axis)",
    "whole_summed": "y = all_reduce_copy(y, axis)",
    "sliced_by_hand": "mine = entered[..., start:stop] if wrong else split_gather(entered, axis)",
    "norm_of_tokens_not_summed": "h = F.gelu(F.linear(gather(self.norm(x), axis, dim=1, length=length), self.up))",
    "tokens_gathered_for_shards": "h = F.gelu(F.linear(gather(self.norm(x), axis, dim=1, length=length), self.up))",
    "mean_of_part": "return x + self.mix(x.mean(1, keepdim=True))",
    "positions_of_part": "return x + self.places(at.to(x.device))",
    "attention_in_part": "return x + F.scaled_dot_product_attention(self.mix(x), x, x)",
    "loss_over_own_tokens": "return (errors / counts.sum(), 1.0) if mistake else (errors, labels.numel())",
    "last_token_of_part": "last = x[:, -1:] if wrong else",
    "previous_token_in_part": "return x + self.mix(F.pad(x, [0, 0, 1, 0])[:, :-1])",
    "mean_summed_one_way": "return x + self.mix(mean if wrong else copy_all_reduce(mean, axis))",
    "running_mean": "self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)",
    "scaled_by_replica": "return self.mix(x * (1 + 0.1 * axis.rank)) if self.wrong else self.mix(x * 1.1)",
    "mean_of_replicas_in_place": "axis.all_reduce(mean)",
    "experts_without_layout": "class ExpertLayer(nn.Module):",
    "rows_not_exchanged": 'return x + torch.einsum("btd,edf->ebtf", x, self.own).sum(0)',
}


@pytest.mark.parametrize("name", sharding_faults.FAULTS)
def test_types_name_the_line_of_each_sharding_mistake(name: str) -> None:
    axes = GRIDS[sharding_faults.FAULTS[name]]
    right = check_types(partial(sharding_faults.build, name, True), sharding_faults.batches, axes)
    assert right.holds and right.ops > 20, right.findings
    wrong = check_types(partial(sharding_faults.build, name, False), sharding_faults.batches, axes)
    first = wrong.findings[0]
    assert re.match(rf"sharding_faults\.py:\d+: {re.escape(LINES[name])}", first.place), first
    assert first.axis in axes and first.mend and first.missing


def in_float64(name: str, right: bool, grid: Grid) -> PipelineModule:
    torch.set_default_dtype(torch.float64)
    return sharding_faults.build(name, right, grid)


ONE_AN_AXIS = ("product_without_copy", "mean_of_part", "running_mean", "rows_not_exchanged")


@pytest.mark.parametrize(
    "name",
    [
        name if name in ONE_AN_AXIS else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in sharding_faults.FAULTS
    ],
)
def test_numbers_find_each_sharding_mistake_too(name: str) -> None:
    axis = sharding_faults.FAULTS[name]
    for right in (True, False):
        rows = check(partial(in_float64, name, right), sharding_faults.batches, [axis], 2, timeout=60)
        assert all(row.holds for row in rows) == right


# The causes of these show in numbers alone: a state, a scaled gradient, a value that is wrong everywhere.
NUMBERS_ALONE = ("state", "tied_twice", "scaled_gradient", "missing_combine")
QUICK = ("tied_sequence", "experts", "own_loss", "smoothing_over_a_shard", "averaged_over_context", "equal_masks")


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.exhaustive)
        for kind in (*planted_faults.RIGHT, *planted_faults.FAULTS)
    ],
)
def test_types_find_the_planted_faults_that_they_can_see(kind: str) -> None:
    fault = planted_faults.FAULTS.get(kind)
    for axes in [GRIDS[fault.axis]] if fault else [GRIDS["pipe"], ALL]:
        found = planted(kind, axes)
        assert found.holds == (fault is None or kind in NUMBERS_ALONE), found.findings
        assert all(re.match(r"planted_faults\.py:\d+: \w", each.place) for each in found.findings), found.findings


MODELS = ("llama", "gpt_oss", "mamba2", "olmo2")


def adapted(kind: str, dora: bool, grid: Grid) -> PipelineModule:
    model = proved.build(kind, "full", proved.settings(kind), grid)
    triax.add_lora(model, triax.Lora(rank=2, dora=dora), grid)
    return model


@pytest.mark.parametrize(
    "kind", [kind if kind in MODELS else pytest.param(kind, marks=pytest.mark.exhaustive) for kind in proved.kinds()]
)
def test_types_raise_no_alarm_on_types_of_models(kind: str) -> None:
    pytest.importorskip("transformers")
    builds = [partial(proved.build, kind, "full", proved.settings(kind))]
    if kind not in MODELS[1:]:
        builds += [partial(adapted, kind, dora) for dora in (False, True)]
    grids = [ALL] if kind in MODELS else [*GRIDS.values(), ALL]
    if kind in ("t5", "mt5"):  # it has no context axis
        grids = [
            {axis: size for axis, size in grid.items() if axis != "context"} for grid in grids if grid != {"context": 2}
        ]
    for build in builds:
        for axes in grids:
            found = check_types(build, partial(proved.batches, "full"), axes)
            assert found.holds and found.ops > 200, (axes, found.findings)


ENCODERS = {
    "bert": EncoderConfig.preset("encoder-tiny"),
    "bert-classes": EncoderConfig.preset("encoder-tiny", num_labels=3),
    "modernbert-classes": EncoderConfig.preset(
        "modernbert-base",
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        num_labels=3,
        sliding_window=3,
        layer_types=("full_attention", "sliding_attention"),
    ),
    "dinov2": EncoderConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        image_size=12,
        patch_size=4,
        num_labels=3,
        norm_place="before",
        layer_scale=0.1,
        mean_pool=True,
        pooler=False,
    ),
}


def encoder(kind: str, grid: Grid) -> PipelineModule:
    config = ENCODERS[kind]
    loss = MaskedLMLoss(grid, config.vocab_size) if kind == "bert" else ClassificationLoss()
    layers = encoder_layers(config, sequence_parallel=kind != "dinov2")
    return PipelineModule(layers, grid=grid, loss_fn=loss, dtype=torch.float64)


def inputs_of(kind: str) -> list[list[tuple[Any, Tensor]]]:
    ids, mask = torch.arange(3, 19).view(2, 8), torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
    classes = torch.tensor([0, 2])
    if kind == "dinov2":
        return [[(torch.ones(2, 3, 12, 12, dtype=torch.float64), classes)]]
    return [[({"input_ids": ids, "attention_mask": mask}, ids if kind == "bert" else classes)]]


@pytest.mark.parametrize("kind", ENCODERS)
def test_types_raise_no_alarm_on_encoders(kind: str) -> None:
    for axes in ({"tensor": 2, "data": 2}, {"context": 2, "tensor": 2} if kind == "bert" else {"pipe": 2}):
        found = check_types(partial(encoder, kind), partial(inputs_of, kind), axes)
        assert found.holds and found.ops > 80, (axes, found.findings)


@pytest.mark.parametrize(
    "method",
    [
        name if name in ("kto", "distill") else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in proved.METHODS
        if name not in ("full", "lora")
    ],
)
def test_types_raise_no_alarm_on_losses_of_methods(method: str) -> None:
    pytest.importorskip("transformers")
    build, data = partial(proved.build, "llama", method, proved.settings("llama")), partial(proved.batches, method)
    found = check_types(build, data, {"tensor": 2, "context": 2})
    assert found.holds and found.ops > 200, found.findings


def test_llama_70b_on_1024_ranks_is_typed_within_30_seconds(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {preset: llama3-70b}\ndata: {training: text}\nbatch: 4\ntraining: {tokens: 1000}\n")
    begun = time.process_time()  # the other cores' tests take time from this one
    code, text = run_triax("check", file, "--types", "pipe=2,tensor=8,data=64")
    assert code == 0 and "1,024 ranks, 83 layers" in text and "all types fit" in text, text
    assert time.process_time() - begun < 30


SCRIPT = """
import torch
from torch import nn
import triax

class Mean(nn.Module):
    def __init__(self, width, grid):
        super().__init__()
        self.up = triax.ColumnParallelLinear(width, 2 * width, grid=grid)
        self.down = triax.RowParallelLinear(2 * width, width, grid=grid)

    def forward(self, x):
        h = self.up(x)
        h = h - h.mean(-1, keepdim=True)
        return self.down(h)

def build(grid):
    layers = [triax.LayerSpec(nn.Linear, 4, 4), triax.LayerSpec(Mean, 4)]
    return triax.PipelineModule(layers, grid=grid, loss_fn=nn.functional.mse_loss)

def batches():
    return [[(torch.ones(2, 4), torch.ones(2, 4))]]
"""


def test_check_types_prints_findings_and_returns_json(tmp_path: Path) -> None:
    file = tmp_path / "mean.py"
    file.write_text(SCRIPT)
    code, text = run_triax("check", f"{file}:build", "--types", "tensor=2,data=2", columns=200)
    line = SCRIPT.split("\n").index("        h = h - h.mean(-1, keepdim=True)") + 1
    assert code == 1 and f"layers.1 (Mean), axis tensor: mean.py:{line}: h = h - h.mean(-1, keepdim=True)" in text
    assert f"sub is given a partial value (from mean in mean.py:{line}), and a varying value, sliced along" in text
    assert "mend: all_reduce_copy(x, grid.tensor) before this line" in text and "1 op with inputs" in text
    code, text = run_triax("check", f"{file}:build", "--types", "tensor=2", "--json")
    found = json.loads(text)
    assert code == 1 and not found["holds"] and found["ranks"] == 2 and len(found["findings"]) == 1
    code, text = run_triax("check", f"{file}:build", "--types", "data=4,pipe=2")
    assert code == 0 and "8 ranks, 2 layers" in text and "all types fit" in text
    for sizes, says in (
        ("tenor=2", "--types has 'tenor=2'"),
        ("pipe=4", "2 layers"),
        ("expert=2", "expert=2 needs replicas"),
    ):
        code, text = run_triax("check", f"{file}:build", "--types", sizes)
        assert code == 2 and says in text, text


def test_slices_of_views_lie_where_the_types_say() -> None:
    draw = random.Random(3)
    known = 0
    for _ in range(300):
        ranks, sizes = 2, [draw.choice((1, 2, 3, 4)) for _ in range(draw.randint(1, 4))]
        dim = draw.randrange(len(sizes))
        whole = torch.arange(ranks * torch.Size(sizes).numel()).view(
            *sizes[:dim], ranks * sizes[dim], *sizes[dim + 1 :]
        )
        slices, before = whole.chunk(ranks, dim), {dim - len(sizes): 0}
        shape = sizes
        for _ in range(2):  # two views, one of the other
            flat, after = torch.Size(shape).numel(), []
            while flat > 1:
                size = draw.choice([each for each in (2, 3, 4, 6, 8, 12) if flat % each == 0] or [flat])
                after.append(size)
                flat //= size
            found = reshaped(before, shape, after or [1])
            if not found:
                break
            ((at, level),) = found.items()
            shape, before = after or [1], found
            if not level:  # the outermost elements of this dim are this rank's
                known += 1
                joined = torch.cat([each.reshape(shape) for each in slices], at).flatten()
                assert torch.equal(joined, whole.flatten()), (sizes, dim, shape, at)
    assert known > 60


@pytest.mark.parametrize("asked", [("--types", "tensor=2"), ("--dry-run", "tensor=2")])
def test_triax_check_refuses_options_of_another_judge(asked: tuple[str, str]) -> None:
    for other in (("--axes", "tensor"), ("--processes", "8"), ("--costs",), ("--over-replicas",)):
        code, text = run_triax("check", "model.py:build", *asked, *other)
        assert code == 2 and f"{other[0]} has no effect with {asked[0]}" in text
