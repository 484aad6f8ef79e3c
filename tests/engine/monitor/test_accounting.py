"""Law 4: the formula is the measure. Bytes sent and bytes held are counted and equal the papers' formulas."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.base.formulas import STATES, model_states
from triax.zero.range_stepper import ELEMENTWISE

from support.paths import ROOT
from support.peak_memory_program import engine, train
from support.resident import Growth, own_pages
from support.training import small_config, tiny_gpt

WIDTH, LAYERS, MICROBATCHES = 64, 4, 3
WEIGHTS = LAYERS * WIDTH * WIDTH  # no bias: a multiple of every padding


def accounts(grid: tuple[int, int, int], stage: int, keep: bool, config: dict[str, Any]) -> Any:
    here = Grid(*grid, timeout=60)
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = PipelineModule(layers, grid=here, loss_fn=lambda o, y: (o - y).float().square().mean())
    base = small_config(
        "AdamW", micro=2, accumulation=MICROBATCHES, zero={"stage": stage, "stage3_keep_gathered": keep}
    )
    engine, *_ = triax.initialize(model=model, config={**base, **config})

    def data() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield torch.randn(2, WIDTH), torch.randn(2, WIDTH)

    for _ in range(2):
        engine.train_batch(data())
    return engine.traffic_report(), engine.memory_report()


@pytest.mark.parametrize("replicas", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_traffic_of_each_stage_equals_the_formula(ranks: Any, replicas: int) -> None:
    """Traffic in model bytes M over a ring: stage 0 and 1 2M, stage 2 (1 + m)M, stage 3 3m M, kept gathered (1 + m)M.

    Where a backward pass is followed by the next forward of its stage, the first layer stays whole in between: with
    LAYERS alike, stage 3 saves 1/LAYERS M each time.
    """
    m, ring = MICROBATCHES, 4 * WEIGHTS * (replicas - 1) / replicas
    saved = (m - 1) / LAYERS
    cases = ((0, False, 2), (1, False, 2), (2, False, 1 + m), (3, False, 3 * m - saved), (3, True, 1 + m))
    for stage, keep, wanted in cases:
        for traffic, _ in ranks(replicas, accounts, (1, replicas, 1), stage, keep, {}):
            sent = traffic["sent"]["data"]
            assert sum(entry["bytes"] for entry in sent.values()) == wanted * ring, (stage, keep)
            if not keep:
                assert traffic["formula"]["data"] == (3 * m if stage == 3 else wanted) * ring


def both_engines(stage: int) -> Any:
    """The reports of one model, as a list of layers and as a plain module, after two steps."""
    here = Grid(timeout=60)
    config = small_config(
        "AdamW", micro=2, accumulation=MICROBATCHES, zero={"stage": stage, "stage3_param_persistence_threshold": 0}
    )
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    listed, *_ = triax.initialize(model=PipelineModule(layers, grid=here, loss_fn=nn.MSELoss()), config=config)
    chain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    plain, *_ = triax.initialize(model=chain, grid=here, config=config)
    listed.record_memory = plain.record_memory = True
    pairs = [(torch.randn(2, WIDTH), torch.randn(2, WIDTH)) for _ in range(MICROBATCHES)]
    for _ in range(2):
        listed.train_batch(iter(pairs))
        here.traffic.clear()  # of another engine
        for x, y in pairs:
            plain.backward(nn.functional.mse_loss(plain(x), y))
            plain.step()
        here.traffic.add("data", "broadcast", 1.0)  # after the step
    return listed.memory_report(), plain.memory_report(), listed.traffic_report(), plain.traffic_report()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_module_and_pipeline_engines_give_equal_reports(ranks: Any, stage: int) -> None:
    for listed, plain, sent, plain_sent in ranks(2, both_engines, stage):
        activations, most = plain["held"].pop("activations"), listed["held"].pop("activations")
        working, _ = plain["held"].pop("working"), listed["held"].pop("working")
        assert {k: v for k, v in plain.items() if k != "peak"} == {k: v for k, v in listed.items() if k != "peak"}
        assert 0 < activations <= most and working > 0  # a pipeline's loss counts too
        assert plain_sent["formula"] == sent["formula"] and plain_sent["uncompressed"] == sent["uncompressed"]
        here, there = (each["sent"]["data"] for each in (plain_sent, sent))
        gradients = "all_reduce" if stage == 0 else "reduce_scatter"
        assert here[gradients] == there[gradients] and "broadcast" not in here
        assert sum(entry["bytes"] for entry in here.values()) == plain_sent["formula"]["data"]


def frozen(numbers: list[int], plus: dict[str, Any], stage: int) -> Any:
    here = Grid(timeout=60)
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = PipelineModule(layers, grid=here, loss_fn=lambda o, y: (o - y).float().square().mean())
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number not in numbers)
    config = small_config("AdamW", micro=2, accumulation=MICROBATCHES, zero={"stage": stage, **plus})
    engine, *_ = triax.initialize(model=model, config=config)
    for _ in range(2):
        engine.train_batch(iter([(torch.randn(2, WIDTH), torch.randn(2, WIDTH))] * MICROBATCHES))
    report = engine.traffic_report()
    return sum(entry["bytes"] for entry in report["sent"]["data"].values()), report["formula"]["data"]


@pytest.mark.parametrize("plus", [{}, {"zero_quantized_weights": True}])
def test_frozen_weights_are_sent_in_stage_3_only(ranks: Any, plus: dict[str, Any]) -> None:
    """Frozen weights are gathered but have no gradient: with half of M frozen 2m M + m M / 2; else m counts half.

    A byte a weight, and scales, where they are quantised; the first layer stays whole from a backward to a forward.
    """
    m, ring = MICROBATCHES, 4 * WEIGHTS / 2
    for sent, formula in ranks(2, frozen, [1, 3], plus, 3):
        gather = (1 + 4 / 256) / 4 if plus else 1.0  # a scale for 256 weights
        assert formula == pytest.approx((2 * m * gather + m / 2) * ring, rel=1e-12)
        assert sent == pytest.approx(formula - (m - 1) / LAYERS * gather * ring, rel=1e-12)
    for stage in (0, 1, 2) if not plus else ():
        for sent, formula in ranks(2, frozen, [1, 3], {}, stage):
            assert sent == formula == (1 + (m if stage == 2 else 1)) / 2 * ring


def test_traffic_of_the_pipe_axis_equals_the_formula(ranks: Any) -> None:
    """Each boundary carries each microbatch's activations forward and their gradients back, once."""
    message = 2 * WIDTH * 4
    for rank, (traffic, _) in enumerate(ranks(4, accounts, (4, 1, 1), 0, keep=False, config={})):
        ways = (rank < 3) + (rank > 0)
        assert traffic["sent"]["pipe"]["send"] == {"calls": ways * MICROBATCHES, "bytes": ways * MICROBATCHES * message}


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize(("kind", "config"), [("fp32", {}), ("bf16", {"bf16": {"enabled": True}})])
def test_memory_of_each_stage_equals_the_formula(ranks: Any, replicas: int, kind: str, config: dict[str, Any]) -> None:
    """Rajbhandari et al. 2020, figure 1, with gradients accumulated in fp32: bytes per parameter on each rank."""
    p, n = WEIGHTS, replicas
    for stage in range(4):
        weights, gradients, state = (1 if s <= stage else 0 for s in (3, 2, 1))
        half = kind == "bf16"
        wanted = {
            "parameters": (2 if half else 4) * p // (n if weights else 1),
            "gradients": 4 * p // (n if gradients else 1),
            "masters": (4 * p // (n if state else 1)) if half else 0,
            "optimizer": 8 * p // (n if state else 1),
        }
        for _, report in ranks(replicas, accounts, (1, replicas, 1), stage, keep=False, config=config):
            assert report["formula"] == wanted, stage
            assert report["held"] == {**wanted, "buffers": 0, "activations": None, "working": None}, stage


def test_model_state_bytes_equal_figure_1_of_the_zero_paper() -> None:
    """Figure 1: 7.5 billion parameters, 64 replicas, Adam in fp16, gradients too."""
    table = [model_states(7.5e9, 64, stage, "fp16", "adam", gradients="fp16").total / 1e9 for stage in range(4)]
    assert [round(gigabytes, 1) for gigabytes in table] == [120.0, 31.4, 16.6, 1.9]
    with pytest.raises(ValueError, match="one of fp64, fp32, bf16, fp16"):
        model_states(1, precision="int8")
    with pytest.raises(ValueError, match="one of adadelta"):
        model_states(1, optimizer="shampoo")


@pytest.mark.parametrize(
    ("optimizer", "wanted"),
    [
        ({"type": "SGD", "params": {"lr": 0.1}}, 0),
        ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, 1),
        ({"type": "AdamW", "params": {"lr": 0.1, "amsgrad": True}}, 3),
        *(({"type": name, "params": {"lr": 0.1}}, STATES[name.lower()]) for name in ELEMENTWISE),
    ],
)
def test_optimizer_state_bytes_equal_the_formula(optimizer: dict[str, Any], wanted: int) -> None:
    _, report = accounts((1, 1, 1), 1, keep=False, config={"optimizer": optimizer})
    assert report["held"]["optimizer"] == report["formula"]["optimizer"] == wanted * 4 * WEIGHTS


def gpt_report(replicas: int, stage: int) -> Any:
    """A GPT in fp16: its report after a step whose activations were counted."""
    grid = Grid(data=replicas, timeout=60)
    shape: dict[str, Any] = {"vocab_size": 96, "max_position_embeddings": 16, "hidden_size": 64, "num_hidden_layers": 3}
    model = tiny_gpt(grid, dtype=torch.float32, **shape)
    zero, fp16 = {"stage": stage, "reduce_bucket_size": 50_000}, {"enabled": True, "initial_scale_power": 6}
    config = small_config("AdamW", 1e-3, micro=2, zero=zero, fp16=fp16)
    engine, *_ = triax.initialize(model=model, config=config)
    ids = torch.randint(96, (2, 17))
    for engine.record_memory in (False, True):
        engine.train_batch(iter([(ids[:, :-1], ids[:, 1:])]))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return parameters, len(engine.data_axis.buckets), engine.memory_report()


@pytest.mark.parametrize("replicas", [4, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 8))])
def test_counted_bytes_of_a_gpt_equal_the_formula(ranks: Any, replicas: int) -> None:
    """Bytes in fp16, for each stage, are equal up to the padding of parameters to 16 elements and of buckets."""
    for stage in range(4):
        for parameters, buckets, report in ranks(replicas, gpt_report, replicas, stage):
            held, formula = report["held"], model_states(parameters, replicas, stage, "fp16")._asdict()
            assert report["formula"] == pytest.approx(formula)
            padding = 16 * 40 + 16 * replicas * buckets  # elements: 40 parameters, of which some end in between
            for kind, most in (("parameters", 2), ("gradients", 4), ("masters", 4), ("optimizer", 8)):
                assert 0 <= held[kind] - formula[kind] <= padding * most, (stage, kind)
            assert held["activations"] > 0 and held["working"] > 0


def saved_by_autograd() -> tuple[int, int]:
    """Bytes saved by a stack of linear layers and squares, by hand and as the engine counts them."""
    grid = Grid(timeout=60)
    layers: list[Any] = [LayerSpec(nn.Linear, WIDTH, WIDTH, bias=False), torch.square] * LAYERS
    model = PipelineModule(layers, grid=grid, loss_fn=lambda o, y: o.sum())
    schedule = {"pipeline": {"schedule": "gpipe"}, "gradient_accumulation_steps": MICROBATCHES}
    optimizer = {"type": "SGD", "params": {"lr": 0.0}}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, **schedule}
    engine, *_ = triax.initialize(model=model, config=config)
    engine.record_memory = True
    batch = [(torch.randn(2, WIDTH), torch.zeros(2)) for _ in range(MICROBATCHES)]
    engine.train_batch(iter(batch))
    # Linear saves its input, square too; the first input is the caller's. All microbatches at once: gpipe.
    return MICROBATCHES * (2 * LAYERS - 1) * 2 * WIDTH * 4, engine.memory_report()["held"]["activations"]


def test_counted_activations_equal_the_bytes_autograd_saved() -> None:
    by_hand, counted = saved_by_autograd()
    assert counted == by_hand


def peak_and_count(stage: int) -> tuple[int, int]:
    """Growth of the process at the peak of two steps with 13 million parameters, and what was counted."""
    grid = Grid(timeout=60)
    with own_pages():
        # First a model of next to nothing, for what is imported and connected on the way.
        train(engine(grid, stage, "fp32", 8, 1), 2)
        growth = Growth()
        report = train(engine(grid, stage, "fp32", 512, 4), 2)
        return growth.measure()[0], sum(report["held"].values())


def test_peak_memory_of_a_process_is_near_the_count(ranks: Any) -> None:
    """Within 10 % of the count. In processes of the pool; fresh ones are in the sweep."""
    for peak, counted in ranks(2, peak_and_count, 3):
        assert counted > 100e6
        assert peak == pytest.approx(counted, rel=0.1)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("stage", "replicas"), [(0, 1), (0, 2), (1, 2), (2, 2), (3, 2)])
def test_peak_memory_of_fresh_processes_is_near_the_count(stage: int, replicas: int) -> None:
    """Peak of fresh processes with 25 million parameters, within 10 % of the count, without the memory of imports.

    Blocks of 64 KiB and more are mapped one by one: what glibc keeps of blocks that were freed is not held.
    """
    child = ROOT / "tests" / "support" / "peak_memory_program.py"
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, str(child), str(stage), str(replicas), "fp32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = json.loads(done.stdout)
    assert len(reports) == replicas
    for report in reports:
        counted = sum(report["held"].values())
        assert counted > 200e6
        assert report["peak"] - report["footprint"] == pytest.approx(counted, rel=0.1)
