"""The flops profiler: operations and parameters against formulas, on one process and over the grid."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, PipelineModule
from triax.engine.monitor import format as units
from triax.engine.monitor.profiler.tree_report import ModuleNode, merged, tree
from triax.models.gpt import GPTConfig, GPTLoss, gpt_layers
from triax.models.llama import llama_layers

from support.sweeps import some
from support.training import small_config

FlopsProfiler, get_model_profile = triax.profiler.FlopsProfiler, triax.profiler.get_model_profile

BATCH, TOKENS, WIDTH, LAYERS, HEADS, VOCABULARY = 2, 16, 32, 4, 4, 96


def block_flops(tokens: int = TOKENS, width: int = WIDTH, batch: int = BATCH) -> int:
    """A GPT layer, forward: 24 B T D^2 in its products (Narayanan et al. 2021, arXiv:2104.04473, appendix), and
    4 B T^2 D in attention."""
    return 24 * batch * tokens * width**2 + 4 * batch * tokens**2 * width


def head_flops(tokens: int = TOKENS, width: int = WIDTH, batch: int = BATCH) -> int:
    return 2 * batch * tokens * width * VOCABULARY


def gpt_params(tie: bool = True) -> int:
    """12 D^2 + 13 D a layer, the embeddings, and the last norm."""
    head = 0 if tie else VOCABULARY * WIDTH
    return LAYERS * (12 * WIDTH**2 + 13 * WIDTH) + (VOCABULARY + TOKENS) * WIDTH + 2 * WIDTH + head


def shape(tie: bool = True) -> GPTConfig:
    return GPTConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=TOKENS,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        tie_word_embeddings=tie,
    )


def ids() -> Tensor:
    return torch.zeros(BATCH, TOKENS, dtype=torch.long)


# ------------------------------------------------------------------------------------------------ without an engine


@pytest.mark.parametrize("tie", [False, True])
def test_flops_of_a_gpt_equal_the_formula(tie: bool, capsys: pytest.CaptureFixture[str]) -> None:
    model = PipelineModule(gpt_layers(shape(tie)))
    flops, macs, params = get_model_profile(model, args=[ids()], as_string=False)
    wanted = LAYERS * block_flops() + head_flops()
    assert (flops, macs, params) == (wanted, wanted // 2, gpt_params(tie))
    text = capsys.readouterr().out
    assert len(re.findall(r"\(\d\): GPTBlock\(", text)) == LAYERS
    assert f"{100 * block_flops() / wanted:.2f}% MACs" in text
    strings = get_model_profile(model, args=[ids()], print_profile=False)
    assert strings == (units.count(wanted, "FLOPS"), units.count(wanted / 2, "MACs"), units.count(params))


def test_flops_of_a_llama_equal_the_formula() -> None:
    """Llama: q and out D^2 each, k and v D^2 / 2 together, three products of the hidden width."""
    config = triax.LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=TOKENS,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        intermediate_size=48,
    )
    flops, _, _ = get_model_profile(
        PipelineModule(llama_layers(config)), args=[ids()], print_profile=False, as_string=False
    )
    products = 2 * BATCH * TOKENS * (2.5 * WIDTH**2 + 3 * WIDTH * 48)
    assert flops == 2 * (products + 4 * BATCH * TOKENS**2 * WIDTH) + head_flops()


class Net(nn.Module):
    """A convolution, a layer that is called twice, one that is not called, and a product outside of any."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.twice = nn.Linear(8, 8)
        self.never = nn.Linear(5, 5)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 4), nn.ReLU())])

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).mean((2, 3))
        x = self.twice(self.twice(x))
        for block in self.blocks:
            x = block(x)
        return x @ torch.ones(4, 6)


def test_profiler_counts_each_submodule_of_any_module(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    net, x = Net(), torch.randn(2, 3, 8, 8)
    profiler = FlopsProfiler(net)
    profiler.start_profile()
    net(x)
    profiler.stop_profile()
    conv, twice, last, outside = 2 * 2 * 64 * 8 * 27, 2 * 2 * 2 * 64, 2 * 2 * 32, 2 * 2 * 24
    assert profiler.get_total_flops() == conv + twice + last + outside
    assert profiler.get_total_macs() == profiler.get_total_flops() // 2
    params = {"conv": 8 * 27 + 8, "twice": 72, "never": 30, "blocks": 36}
    assert profiler.get_total_params() == sum(params.values())
    root = tree(profiler.passes.entries())
    assert {child.name: (child.params, child.flops) for child in root.children} == {
        "conv": (params["conv"], conv),
        "twice": (params["twice"], twice),
        "never": (params["never"], 0),
        "blocks": (params["blocks"], last),
    }
    assert 0 < sum(child.seconds for child in root.children) <= profiler.get_total_duration()
    assert not net.conv._forward_hooks and not net._forward_pre_hooks
    net(x)  # nothing is counted any more
    assert profiler.get_total_flops() == conv + twice + last + outside

    profiler.print_model_profile(profile_step=3, module_depth=1, output_file=str(tmp_path / "made" / "report.txt"))
    text = (tmp_path / "made" / "report.txt").read_text()
    assert "Profile Summary at step 3:" in text and "depth 1:" in text and "depth 2:" not in text
    assert f"'Conv2d': '{units.count(conv / 2, 'MACs')}'" in text
    profiler.print_model_aggregated_profile(module_depth=1, top_modules=2)
    printed = capsys.readouterr().out
    assert "'Conv2d'" in printed and "'Linear'" in printed
    profiler.end_profile()
    assert profiler.get_total_flops() == 0

    profiler.start_profile(ignore_list=[nn.Conv2d])
    net(x)
    profiler.stop_profile()
    assert profiler.get_total_flops() == twice + last + outside


def test_get_model_profile_takes_shapes_kwargs_and_generate() -> None:
    assert get_model_profile(nn.Linear(3, 5), (2, 3), print_profile=False, as_string=False) == (60, 30, 20)
    kwargs = {"input": torch.ones(2, 3)}
    assert get_model_profile(nn.Linear(3, 5), kwargs=kwargs, print_profile=False)[0] == "60 FLOPS"

    class Generator(nn.Linear):
        def generate(self, x: Tensor, times: int) -> Tensor:
            for _ in range(times):
                x = self(x)
            return x

    found = get_model_profile(
        Generator(3, 3), args=[torch.ones(1, 3), 4], print_profile=False, as_string=False, mode="generate"
    )
    assert found == (4 * 18, 4 * 9, 12)
    for wrong in ({}, {"args": [1], "input_shape": (1, 3)}, {"args": [torch.ones(1, 3)], "mode": "backward"}):
        with pytest.raises(ValueError):
            get_model_profile(nn.Linear(3, 3), **wrong)


def test_a_failing_module_does_not_change_the_counts_of_others() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fails, self.works = Fails(), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.fails(x)
            except ValueError:
                return self.works(x)

    profiler = FlopsProfiler(Tries())
    profiler.start_profile()
    profiler.model(torch.ones(1, 3))
    profiler.stop_profile()
    found = {entry.name: entry.flops for entry in profiler.passes.entries()}
    assert found == {"": 18, "fails": 0, "works": 18}


# ------------------------------------------------------------------------------------------------- in an engine


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield ids(), ids()


def profiled(grid: tuple[int, int, int], chunks: int, schedule: str, config: dict[str, Any], steps: int = 3) -> Any:
    """Rank 0's report, and whether the module is as it was."""
    import contextlib
    import io

    here = Grid(*grid, timeout=60)
    module = PipelineModule(gpt_layers(shape()), grid=here, loss_fn=GPTLoss(here, vocab_size=VOCABULARY), chunks=chunks)
    made, *_ = triax.initialize(
        model=module,
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "pipeline": {"schedule": schedule},
            "flops_profiler": {"enabled": True, "top_modules": 3},
            **config,
        },
    )
    out = []
    for _ in range(steps):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            made.train_batch(batches())
        out.append(printed.getvalue())
    clean = not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules()) and not made.record_timeline
    return out, clean


def value(text: str, label: str) -> str:
    found = re.search(rf"^{re.escape(label)}\s+(.+)$", text, re.MULTILINE)
    assert found is not None, f"{label} is not in\n{text}"
    return found[1]


GRIDS: list[Any] = [
    ((1, 1, 1), 1, "1f1b", {}),
    ((2, 1, 1), 1, "1f1b", {}),
    ((1, 2, 1), 1, "1f1b", {"zero_optimization": {"stage": 3}}),
    ((1, 1, 2), 1, "1f1b", {}),
    ((2, 1, 2), 2, "zb-v", {"activation_checkpointing": {"interval": 1}, "torch_autocast": {"enabled": True}}),
]


@pytest.mark.parametrize(("grid", "chunks", "schedule", "config"), some(GRIDS, [0, 2, 4]))
def test_flops_over_a_grid_add_up_to_the_formula(
    ranks: Any, grid: Any, chunks: int, schedule: str, config: Any
) -> None:
    """Stages and shards add up to the formula, and a replica is counted once."""
    size = grid[0] * grid[1] * grid[2]
    everyone = ranks(size, profiled, grid, chunks, schedule, config)
    assert all(not any(out) and clean for out, clean in everyone[1:])
    (out, clean) = everyone[0]
    assert clean and out[0] == "" and out[2] == ""
    text = out[1]
    flops = LAYERS * block_flops() + head_flops()
    assert "Profile Summary at step 1:" in text
    assert value(text, "params of model:") == units.count(gpt_params())
    assert value(text, "fwd flops of model, one microbatch:") == units.count(flops)
    assert value(text, "fwd MACs of model, one microbatch:") == units.count(flops / 2, "MACs")
    assert value(text, "flops of a step = 3 * fwd flops * microbatches * replicas:") == units.count(
        3 * flops * 2 * grid[1]
    )
    assert value(text, "world size:") == str(size) and value(text, "microbatches a step:") == "2"
    assert len(re.findall(r"\(\d\): GPTBlock\(", text)) == LAYERS
    assert f"'GPTBlock': '{units.count(LAYERS * block_flops() / 2, 'MACs')}'" in text
    head = re.search(r"\(0\): TokenEmbedding\(([^,]*), [^,]*, ([^,]*),", text)
    assert head is not None  # the tie's layer is the head too
    assert head[1] == units.count(VOCABULARY * WIDTH) and head[2] == units.count(head_flops() / 2, "MACs")
    for label in ("fwd latency (rank 0):", "bwd latency (rank 0):", "step latency (the update):", "iter latency:"):
        assert re.fullmatch(r"[\d.]+ (us|ms|s)", value(text, label)) and not value(text, label).startswith("0.00")
    assert re.fullmatch(r"[\d.]+ [KMGT]FLOPS", value(text, "fwd FLOPS per GPU = fwd flops per GPU / fwd latency:"))


def module_profiled(tensor: int, accumulation: int, output_file: str) -> Any:
    grid = Grid(tensor=tensor, timeout=60)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    if tensor > 1:
        triax.parallelize(net, grid, {"0": "column", "2": "row"})
    section = {"enabled": True, "profile_step": 0, "recompute_fwd_factor": 1.0, "output_file": output_file}
    made, *_ = triax.initialize(
        model=net,
        grid=grid,
        config=small_config(micro=4, accumulation=accumulation, flops_profiler=section),
    )
    for index in range(2 * accumulation):
        loss = made(torch.ones(4, 8)).square().mean()
        if index == 0:
            with torch.no_grad():
                made(torch.ones(4, 8))  # none of it
        made.backward(loss)
        made.step()
    assert not net._forward_hooks and made.global_steps == 2


@pytest.mark.parametrize(("replicas", "tensor", "accumulation"), [(1, 1, 1), (2, 1, 3), (1, 2, 2)])
def test_engine_flops_of_a_plain_module_equal_the_formula(
    ranks: Any, tmp_path: Path, replicas: int, tensor: int, accumulation: int
) -> None:
    file = str(tmp_path / "report.txt")
    ranks(replicas * tensor, module_profiled, tensor, accumulation, file)
    text = Path(file).read_text()
    flops = 2 * 4 * (8 * 16 + 16 * 8)
    assert value(text, "fwd flops of model, one microbatch:") == units.count(flops)
    assert value(text, "params of model:") == str(8 * 16 + 16 + 16 * 8 + 8)
    wanted = 4 * flops * accumulation * replicas
    assert value(text, "flops of a step = 4 * fwd flops * microbatches * replicas:") == units.count(wanted)
    assert text.count("Profile Summary") == 1 and "Profile Summary at step 0:" in text
    assert value(text, "bwd latency (rank 0):") != "-"


def test_entries_of_stages_and_shards_merge_into_one_model() -> None:
    first = [ModuleNode("", "M", 1, 10.0, 1.0, True), ModuleNode("a", "A", 2, 8.0, 0.5, True)]
    second = [ModuleNode("", "M", 0, 5.0, 2.0, True), ModuleNode("b", "B", 3, 4.0, 1.0, True)]
    slower = [replace(entry, seconds=entry.seconds * 2) for entry in second]
    root = tree(merged([[first, first], [second, slower]]))
    assert (root.params, root.flops, root.seconds) == (6, 2 * 10 + 2 * 5, 1 + 4)
    assert {c.name: (c.params, c.flops, c.seconds) for c in root.children} == {"a": (2, 16, 0.5), "b": (3, 8, 2.0)}


def test_profiler_numbers_have_readable_units() -> None:
    assert [units.count(n) for n in (0, 12, 999, 1000, 1.5e9)] == ["0", "12", "999", "1.00 K", "1.50 G"]
    assert (
        units.count(2e12, "FLOPS") == "2.00 TFLOPS" and units.rate(10, None) == "-" and units.rate(10, 2) == "5 FLOPS"
    )
    assert [units.duration(s) for s in (2, 0.0031, 4.2e-5)] == ["2.00 s", "3.10 ms", "42.00 us"]
    assert [units.size(n) for n in (0, 1023, 2048, 3 * 2**30)] == ["0 B", "1023 B", "2.0 KB", "3.0 GB"]
