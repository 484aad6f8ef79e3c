"""Each key of ``zero_optimization`` acts as documented, and none changes a gradient."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.base.errors import ConfigError
from triax.compat.deepspeed.from_config import read_config
from triax.pipe.program.draw import chrome_trace

from support.rank_checks import triax_warnings
from support.sweeps import some
from support.toys import error_text, mean_loss, random_pair, summed_loss
from support.training import train_plain

WIDTH, LAYERS, MICROBATCHES, REPLICAS, STEPS = 32, 4, 2, 2, 2
WEIGHT, BIAS = WIDTH * WIDTH, WIDTH  # elements, both multiples of every padding on two replicas
SAMPLES = MICROBATCHES * REPLICAS
BYTES = 8  # of an element: float64


class Layer(nn.Module):
    """A linear layer and a tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Idle(Layer):
    """A layer with an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(WIDTH))


def batch() -> tuple[Tensor, Tensor]:
    return random_pair(3, SAMPLES, 3, WIDTH)


def engine(grid: Grid, zero: dict[str, Any], layers: Any = None, **config: Any) -> triax.PipelineEngine:
    made = layers or [LayerSpec(Layer) for _ in range(LAYERS)]
    model = PipelineModule(made, grid=grid, loss_fn=summed_loss, dtype=torch.float64, partition="uniform")
    base = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": SAMPLES // grid.data.size,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"reduce_bucket_size": 2 * WEIGHT, **zero},
    }
    return triax.initialize(model=model, config={**base, **config})[0]


def data(grid: Grid) -> Iterator[tuple[Tensor, Tensor]]:
    x, y = batch()
    share = SAMPLES // grid.data.size
    while True:
        for i in range(grid.data.rank * share, (grid.data.rank + 1) * share):
            yield x[i : i + 1], y[i : i + 1]


def trained(shape: tuple[int, int, int], cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> Any:
    """Return, for each case, the last step's gradients, the weights after it, and the bytes sent and held."""
    found = []
    for zero, config in cases:
        grid = Grid(*shape, timeout=60)
        made, batches = engine(grid, zero, **config), data(grid)
        for made.record_memory in (False,) * (STEPS - 1) + (True,):
            made.train_batch(batches)
        sent = made.traffic_report()["sent"].get("data", {})
        formula = made.traffic_report()["formula"]["data"]
        found.append((made.gather("gradients"), made.gather(), sent, formula, made.memory_report()["held"]))
    return found


def reference() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the last step's gradients of plain PyTorch, and the weights after it."""
    model = PipelineModule([LayerSpec(Layer) for _ in range(LAYERS)], dtype=torch.float64)
    *_, last = train_plain(model, partial(torch.optim.AdamW, lr=0.01), [[batch()]] * STEPS, mean_loss)
    return last.gradients, last.weights


CASES: dict[str, dict[str, Any]] = {
    "2": {"stage": 2},
    "2 once": {"stage": 2, "reduce_each_microbatch": False},
    "3 once": {"stage": 3, "reduce_each_microbatch": False},
    "3 kept once": {"stage": 3, "reduce_each_microbatch": False, "stage3_keep_gathered": True},
    "1 all-reduced": {"stage": 1, "reduce_scatter": False},
    "2 all-reduced": {"stage": 2, "reduce_scatter": False},
    "3 all-reduced": {"stage": 3, "reduce_scatter": False},
    "1 broadcast": {"stage": 1, "allgather_partitions": False},
    "2 gathered one by one": {"stage": 2, "allgather_bucket_size": 1},
    **{f"{stage} waiting": {"stage": stage, "overlap_comm": False} for stage in range(4)},
    "3 without prefetch": {"stage": 3, "stage3_prefetch_bucket_size": 0},
    "3 far ahead": {"stage": 3, "stage3_prefetch_bucket_size": 1e9},
    "3 with whole biases": {"stage": 3, "stage3_param_persistence_threshold": BIAS},
    "3 all whole": {"stage": 3, "stage3_param_persistence_threshold": WEIGHT},
    "3 kept within a limit": {"stage": 3, "stage3_keep_gathered": True, "stage3_max_live_parameters": 3 * WEIGHT},
    "3 reusing": {"stage": 3, "stage3_max_reuse_distance": 1e9},
    "3 reusing one": {"stage": 3, "stage3_max_reuse_distance": 1},
    "2 strict": {"stage": 2, "ignore_unused_parameters": False},
}


def require_equal(found: Any, wanted: tuple[dict[str, Tensor], dict[str, Tensor]], case: str) -> None:
    for mine, theirs in zip(found[:2], wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-13, msg=lambda text: f"{case}: {text}")


def test_zero_keys_change_bytes_sent_but_no_gradients(ranks: Any) -> None:
    wanted = reference()
    model = LAYERS * (WEIGHT + BIAS) * BYTES
    m, ring, layer = MICROBATCHES, (REPLICAS - 1) / REPLICAS, model / LAYERS
    # Once after its backward pass the first layer is whole still when its next forward begins.
    gathers = 2 * m * model - (m - 1) * layer
    sends = {  # bytes of: reduce_scatter, all_gather, all_reduce, broadcast, each of whole tensors
        "2": (m * model, model, 0, 0),
        "2 once": (model, model, 0, 0),
        "3 once": (model, gathers, 0, 0),
        "3 kept once": (model, model, 0, 0),
        "1 all-reduced": (0, model, 2 * model, 0),
        "2 all-reduced": (0, model, 2 * m * model, 0),
        "3 all-reduced": (0, gathers, 2 * m * model, 0),
        "1 broadcast": (model, 0, 0, model),
        "3 with whole biases": (
            m * model,
            (2 * m * LAYERS - (m - 1)) * WEIGHT * BYTES + LAYERS * BIAS * BYTES,
            0,
            0,
        ),
        "3 all whole": (m * model, model, 0, 0),
        "3 reusing": (m * model, model, 0, 0),  # it never lets go within a step
        "3 reusing one": (m * model, gathers - m * layer, 0, 0),  # the last layer's backward follows its forward
    }
    for found in ranks(REPLICAS, trained, (1, REPLICAS, 1), [(zero, {}) for zero in CASES.values()]):
        for case, one in zip(CASES, found, strict=True):
            require_equal(one, wanted, case)
            _, _, sent, formula, _ = one
            if case in sends:
                scatter, gather, reduced, cast = sends[case]
                figures = {kind: entry["bytes"] for kind, entry in sent.items()}
                # A broadcast counts on its source: of the whole, each rank sends its own range.
                expected = {"reduce_scatter": ring * scatter, "all_gather": ring * gather, "all_reduce": ring * reduced}
                expected["broadcast"] = cast / REPLICAS
                assert figures == {kind: size for kind, size in expected.items() if size}, case
            if case in ("2", "2 once"):
                assert formula == sum(entry["bytes"] for entry in sent.values()), case
        # What reducing once costs: gradients that are whole within a step.
        by_case = dict(zip(CASES, found, strict=True))
        each, once = by_case["2"][4], by_case["2 once"][4]
        assert each["gradients"] == once["gradients"] == model / REPLICAS
        assert once["working"] >= model


@pytest.mark.parametrize("schedule", some(["1f1b", "zb-h1"], [1]))
def test_reducing_once_per_step_in_a_pipeline_equals_plain_pytorch(ranks: Any, schedule: str) -> None:
    """Split backward passes are included; in bf16 the sum over microbatches is in fp32."""
    wanted = reference()
    config = {"pipeline": {"schedule": schedule}}
    cases = [({**CASES[case]}, config) for case in ("2 once", "3 once", "3 kept once", "3 with whole biases")]
    for found in ranks(4, trained, (2, 2, 1), cases):
        for case, one in zip(cases, found, strict=True):
            require_equal(one, wanted, str(case))


def events(zero: dict[str, Any]) -> list[str]:
    """Return the gathers and layer runs of a step's first forward, in order, with the gathered elements."""
    grid = Grid(data=REPLICAS, timeout=60)
    made = engine(grid, {"stage": 3, **zero})
    gatherer, calls = made.data_axis.gatherer, []
    assert gatherer is not None
    axis = gatherer._axes["data"]
    start = axis.all_gather

    def spy(output: Tensor, tensor: Tensor, async_op: bool = False) -> Any:
        layer = next(b.layers[0] for b in made.data_axis.buckets if b.weights is output)
        calls.append(f"gather {layer}")
        return start(output, tensor, async_op)

    axis.all_gather = spy  # type: ignore[method-assign]

    def ran(layer: int) -> None:
        whole = sum(not bucket.released for bucket in made.data_axis.buckets)
        calls.append(f"run {layer}, {whole} whole")

    for i, layer in enumerate(made.module.layers.values()):
        layer.register_forward_pre_hook(lambda *_, i=i: ran(i))
    made.train_batch(data(grid))
    return calls


def test_prefetch_keys_set_how_many_layers_are_gathered_ahead(ranks: Any) -> None:
    layer = WEIGHT + BIAS
    for zero, wanted in (
        ({}, ["gather 0", "gather 1", "run 0, 2 whole", "gather 2", "run 1, 2 whole"]),
        ({"overlap_comm": False}, ["gather 0", "run 0, 1 whole", "gather 1", "run 1, 1 whole"]),
        ({"stage3_prefetch_bucket_size": 0}, ["gather 0", "run 0, 1 whole", "gather 1", "run 1, 1 whole"]),
        (
            {"stage3_prefetch_bucket_size": 2 * layer},
            ["gather 0", "gather 1", "gather 2", "run 0, 3 whole", "gather 3", "run 1, 3 whole"],
        ),
        ({"stage3_max_live_parameters": layer}, ["gather 0", "run 0, 1 whole", "gather 1", "run 1, 1 whole"]),
        (
            {"stage3_keep_gathered": True, "stage3_max_live_parameters": 2 * layer},
            ["gather 0", "gather 1", "run 0, 2 whole", "run 1, 2 whole", "gather 2", "run 2, 3 whole"],
        ),
    ):
        for calls in ranks(REPLICAS, events, zero):
            assert calls[: len(wanted)] == wanted, zero


def overlapping(zero: dict[str, Any]) -> Any:
    """Return, for each collective of a step, the layers whose backward pass ended during it; and the trace."""
    grid = Grid(data=REPLICAS, timeout=60)
    made, batches = engine(grid, {"reduce_bucket_size": WEIGHT, **zero}), data(grid)
    ended: list[tuple[float, int]] = []
    for i, layer in enumerate(made.module.layers.values()):
        layer.register_full_backward_hook(lambda *_, i=i: ended.append((time.perf_counter(), i)))
    made.train_batch(batches)
    ended.clear()
    made.record_timeline = True
    made.train_batch(batches)
    assert made.timeline is not None
    (flights,) = made.timeline.collectives
    origin = made.observer.timer.origin
    during = [
        (f.name, {i for at, i in ended if f.start < at - origin < f.waited}, f.start <= f.waited <= f.end)
        for f in flights
    ]
    return during, chrome_trace(made.timeline)


@pytest.mark.parametrize(
    ("stage", "kinds"), [(0, {"all_reduce"}), (1, {"reduce_scatter"}), (2, {"reduce_scatter"}), (3, {"all_gather"})]
)
def test_overlap_comm_overlaps_collectives_with_backward(ranks: Any, stage: int, kinds: set[str]) -> None:
    for overlap in (True, False):
        for during, trace in ranks(REPLICAS, overlapping, {"stage": stage, "overlap_comm": overlap}):
            assert during and all(ordered for *_, ordered in during)
            meanwhile = [layers for name, layers, _ in during if name in kinds]
            assert any(meanwhile) == overlap
            rows = {event["args"]["name"]: event["tid"] for event in trace["traceEvents"] if event["ph"] == "M"}
            drawn = [event for event in trace["traceEvents"] if event["tid"] == rows["rank 0, data"]]
            assert [event["name"] for event in drawn if event["ph"] == "b"] == [name for name, *_ in during]


def unused(strict: bool) -> str:
    grid = Grid(data=REPLICAS, timeout=60)
    zero = {"stage": 1, "ignore_unused_parameters": not strict}
    made = engine(grid, zero, [LayerSpec(Layer), LayerSpec(Idle)])
    return error_text(lambda: made.train_batch(data(grid)), RuntimeError)


def test_unused_parameters_are_an_error_if_not_ignored(ranks: Any) -> None:
    assert ranks(REPLICAS, unused, strict=False) == ["no error"] * REPLICAS
    for message in ranks(REPLICAS, unused, strict=True):
        assert "1 parameters got no gradient in this step: layers.1.idle" in message
        assert "allow_unused" in message


def at_once(size: int | str) -> int:
    """Return the largest number of all-gathers of new weights in flight at once."""
    grid = Grid(data=REPLICAS, timeout=60)
    made = engine(grid, {"stage": 1, "allgather_bucket_size": size, "reduce_bucket_size": WEIGHT})
    start, most = made.grid.data.all_gather, [0]
    open_: set[int] = set()

    def spy(output: Tensor, tensor: Tensor, async_op: bool = False) -> Any:
        work, key = start(output, tensor, async_op), len(open_) + 100 * most[0]
        open_.add(key)
        most[0] = max(most[0], len(open_))

        class Spied:
            def wait(self) -> None:
                open_.discard(key)
                work.wait()

        return Spied()

    made.grid.data.all_gather = spy  # type: ignore[method-assign]
    made.train_batch(data(grid))
    return most[0]


def test_allgather_bucket_size_limits_gathers_in_flight(ranks: Any) -> None:
    buckets = 2 * LAYERS  # a weight fills one; the biases between them have their own
    for size, wanted in (("auto", range(4, buckets + 1)), (2 * WEIGHT, range(2, 4)), (0, range(1, 2))):
        assert all(most in wanted for most in ranks(REPLICAS, at_once, size)), size


def test_auto_values_of_zero_become_defaults() -> None:
    huge = {"stage": 3, "reduce_bucket_size": "auto", "stage3_max_live_parameters": 1e9, "overlap_comm": True}
    huge |= {"stage3_prefetch_bucket_size": "auto", "stage3_gather_16bit_weights_on_model_save": True}
    zero = read_config({"train_batch_size": 1, "zero_optimization": huge}).zero_optimization
    assert (zero.reduce_bucket_size, zero.stage3_max_live_parameters) == (2**22, 10**9)
    assert zero.stage3_prefetch_bucket_size is None
    with pytest.raises(ConfigError, match="stage3_max_live_parameters"):
        read_config({"train_batch_size": 1, "zero_optimization": {"stage3_max_live_parameters": -1}})


def test_each_zero_key_without_effect_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    idle = {
        "stage": 1,
        "contiguous_gradients": False,
        "round_robin_gradients": True,
        "stage3_gather_16bit_weights_on_model_save": True,
        "stage3_prefetch_bucket_size": 10,
        "reduce_each_microbatch": False,
        "reduce_scatter": False,
    }
    with caplog.at_level(logging.WARNING, logger="triax"):
        engine(Grid(), idle)
    text = caplog.text
    assert "contiguous_gradients does nothing: gradients are always in flat buckets" in text
    assert "round_robin_gradients does nothing: every bucket is always sharded" in text
    assert "engine.gather() returns whole weights" in text
    assert "stage3_prefetch_bucket_size acts in stage 3, not in stage 1" in text
    assert "reduce_each_microbatch acts in stage 2 and 3, not in stage 1" in text
    assert "reduce_scatter acts" not in text  # it does
    caplog.clear()
    engine(Grid(), {"stage": 2})
    assert not caplog.text


def warnings_of(zero: dict[str, Any], *axes: int) -> list[str]:
    """Return what making an engine, by default on two replicas, says to this rank's log."""
    with triax_warnings() as warnings:
        engine(Grid(*axes or (1, 2, 1)), zero)
    return warnings


def test_triax_warns_once_if_stage_3_shards_nothing(ranks: Any) -> None:
    whole, silent = ranks(2, warnings_of, {"stage": 3, "stage3_param_persistence_threshold": WEIGHT})
    assert silent == []
    assert len(whole) == 1 and f"= {WEIGHT:,} elements (the largest has {WEIGHT:,})" in whole[0]
    for less in ({"stage": 3, "stage3_param_persistence_threshold": BIAS}, {"stage": 3}, {"stage": 2}):
        assert ranks(2, warnings_of, less) == [[], []], less
    offload = {"stage": 3, "offload_param": {"device": "cpu"}}
    for zero, count in (({"stage": 3}, 1), ({"stage": 2}, 1), ({"stage": 1}, 0), (offload, 0)):
        first, second = ranks(2, warnings_of, zero, 1, 1, 2)
        assert second == [] and len(first) == count, zero
        assert all("zero_optimization.stage" in text and "2 ranks are one replica" in text for text in first)
