"""Slices of sequences: schedules over them, their memory and time by the papers, and numbers of one process."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import triax
from triax import Costs, Grid, LayerSpec, PipelineModule, Schedule, make_schedule, simulate, verify
from triax.base.option_error import OptionError
from triax.grid.randomness.random import Dropout
from triax.models.attention import SelfAttention
from triax.models.config import DecoderConfig, DeepseekConfig, MixtralConfig
from triax.models.decoder import decoder_layers
from triax.models.deepseek import deepseek_layers
from triax.models.gpt import GPTConfig
from triax.models.layers import NextTokenLoss
from triax.models.recurrent.sizes import DeltaNetSizes, Mamba2Sizes
from triax.pipe.program.critical import CriticalPath
from triax.pipe.program.deadlock import ScheduleError
from triax.pipe.program.ops import Op
from triax.pipe.program.passes import lower
from triax.pipe.program.slices import equal_cost_slices, slice_bounds, slice_costs

from support.command_line import run_triax
from support.reference import gpt_logits
from support.schedule_runner import assert_verify_accepts_what_runs, ops
from support.toys import error_text
from support.training import pipeline_engine

NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1")
TWO_ROWS = triax.Batch(size=2, microbatch=1)
VOCABULARY, LENGTH, ROWS, COUNT = 37, 17, 2, 4


# ------------------------------------------------------------------------------------------- schedules, without torch


def sizes(most: int) -> list[tuple[int, int, int]]:
    """Return (ranks, microbatches, slices)."""
    return [(p, m, n) for p in range(1, most) for m in (1, 2, 3, 5) for n in (2, 3, 4, 6, 8)]


@pytest.mark.parametrize("most", [4, pytest.param(9, marks=pytest.mark.exhaustive)])
def test_sliced_schedules_have_the_memory_and_bubble_of_the_papers(most: int) -> None:
    """Seq1F1B: 1 + (p-1)/n microbatches in place of p; SlimPipe with v chunks: 1 + 2(p-1)/(nv). Bubbles fall by n."""
    for pipe, m, n in sizes(most):
        ranks = range(pipe)
        expected: dict[str, tuple[float, list[float]]] = {
            "gpipe": (3 * (pipe - 1) / n, [m for _ in ranks]),
            "1f1b": (3 * (pipe - 1) / n, [min(1 + (pipe - 1 - r) / n, m) for r in ranks]),
        }
        if (m - 1) * n >= pipe - 1:
            expected["zb-h1"] = (pipe - 1) / n, [1 + (pipe - 1) / n for _ in ranks]
        if n % pipe == 0:
            peaks = [min(1 + 2 * (pipe - 1 - r) / (2 * n), m) for r in ranks]
            expected["interleaved"] = 3 * (pipe - 1) / (2 * n), peaks
        for name, (idle, peaks) in expected.items():
            schedule = make_schedule(name, pipe, m, slices=n)
            result = simulate(schedule)
            assert result.makespan - 3 * m == pytest.approx(idle), (name, pipe, m, n)
            assert result.peak_activations == pytest.approx(peaks), (name, pipe, m, n)
            verify(schedule, list(result.peak_activations))
            verify(lower(schedule, 3, ties=[[0, schedule.stages - 1]]))
            with pytest.raises(ScheduleError, match="activations, but at"):
                verify(schedule, [peak - 1 / (4 * n) for peak in result.peak_activations])


def test_1f1b_orders_slices_as_terapipe() -> None:
    assert str(make_schedule("1f1b", 2, 2, slices=2)).splitlines() == [
        "1f1b: pipe 2, microbatches 2, chunks 1, slices 2",
        "rank 0: 0F0 0F1 0F2 0B1 0F3 0B0 0B3 0B2",
        "rank 1: 1F0 1F1 1B1 1F2 1B0 1F3 1B3 1B2",
    ]
    for name in NAMES:
        assert make_schedule(name, 3, 6, slices=1) == make_schedule(name, 3, 6)
        sliced = make_schedule(name, 3, 6, slices=(3, 2, 1))
        assert Schedule.from_json(sliced.to_json()) == sliced and sliced.passes == 18


@settings(max_examples=60, derandomize=True)
@given(st.integers(1, 12), st.floats(0, 1), st.integers(1, 8), st.integers(1, 400))
def test_equal_cost_slices_have_equal_costs(count: int, attention: float, multiple: int, length: int) -> None:
    equal = equal_cost_slices(count, attention)
    shares = slice_costs(equal, attention)
    assert sum(tokens for tokens, _ in shares) == pytest.approx(1)
    assert [forward for _, forward in shares] == pytest.approx([1 / count] * count)
    assert sum(forward for _, forward in slice_costs((1,) * count, attention)) == pytest.approx(1)
    if length * min(equal) < 2 * multiple:
        with contextlib.suppress(ValueError):
            slice_bounds(length, equal, multiple)
        return
    bounds = slice_bounds(length, equal, multiple)
    assert bounds[0][0] == 0 and bounds[-1][1] == length
    for (_, end), (start, _) in pairwise(bounds):
        assert end == start and start % multiple == 0


def test_sequences_too_short_for_their_slices_are_refused() -> None:
    assert slice_bounds(4, (1, 1, 1, 1)) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert "of 3 tokens cannot be cut into 4 slices:" in error_text(lambda: slice_bounds(3, (1, 1, 1, 1)))
    assert "into 4 slices of at least 2 tokens" in error_text(lambda: slice_bounds(5, (1, 1, 1, 1), 2))
    for wrong in (0, (), (1, 0), (1, -1)):
        assert "give the number of slices" in error_text(lambda: make_schedule("1f1b", 2, 2, slices=wrong))  # noqa: B023


def test_later_slices_cost_more_attention_time() -> None:
    """Of n equal slices, slice i takes (2i+1)/n**2 of the attention; slices of equal costs have no waits (Seq1F1B)."""
    costs = Costs(F=3, I=3, W=2, COMM=0.3, attention=0.5)
    schedule = make_schedule("zb-h1", 3, 4, slices=4)
    spans = {span.op: span.end - span.start for row in simulate(schedule, costs).timeline.rows for span in row}
    for i in range(4):
        assert spans[Op("F", 0, i)] == pytest.approx(3 * (0.5 / 4 + 0.5 * (2 * i + 1) / 16)) == spans[Op("I", 2, i)]
        assert spans[Op("W", 1, 4 + i)] == pytest.approx(0.5)
    whole = simulate(make_schedule("zb-h1", 3, 4), costs).timeline.rows
    assert sum(spans.values()) == pytest.approx(sum(span.end - span.start for row in whole for span in row))
    balanced = make_schedule("1f1b", 4, 2, slices=equal_cost_slices(8, 0.5))
    assert simulate(balanced, replace(costs, W=0.0, COMM=0.0)).bubble == pytest.approx(3 / (8 * 2 + 3))
    assert simulate(make_schedule("1f1b", 4, 2, slices=8), replace(costs, W=0.0, COMM=0.0)).bubble > 0.2
    causes = CriticalPath(schedule, costs)
    path = causes.path  # a message of a slice takes a quarter of COMM
    for before, after in pairwise(path):
        wait = after.start - before.end
        assert wait == pytest.approx(0.075 if before.op.stage != after.op.stage else 0, abs=1e-9)
    assert "0F6 (slice 2 of microbatch 1) runs from" in causes.explain(Op("F", 0, 6))


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("0F1 0F0 0B1 0B0", "rank 0 runs 0F1 before 0F0, but slice 1 of microbatch 0 reads its keys and values"),
        ("0F0 0F1 0B0 0B1", "runs 0B0 before 0B1, but slice 0 of microbatch 0 needs the gradients of its keys"),
        ("0F0 0F1 0I0 0W0 0I1 0W1", "0I0 before 0I1"),
        ("0F0 0F1 0B1", "never runs 0B0"),
        ("0F0 0F1 0B1 0B2", "slices 0 to 1"),
        ("0F0 0F1 0I1 0I0 0W0 0W1", ""),
    ],
)
def test_verify_checks_the_order_of_slices(order: str, words: str) -> None:
    schedule = replace(make_schedule("1f1b", 1, 1, slices=2), orders=(ops(order),))
    if words:
        assert words in error_text(lambda: verify(schedule), ScheduleError)
    else:
        verify(schedule)


def mutant(seed: int) -> Schedule:
    """Return a schedule over slices in which ops of one rank were swapped, dropped or doubled, or none."""
    draw = random.Random(seed)
    pipe, name, n = draw.randint(1, 3), draw.choice(NAMES), draw.randint(2, 3)
    made = make_schedule(name, pipe, pipe * draw.randint(1, 2), slices=n)
    rank = draw.randrange(pipe)
    order = list(made.orders[rank])
    for _ in range(draw.randint(0, 2)):
        i = draw.randrange(len(order) - 1)
        how = draw.randrange(6)
        if how == 0:
            order.insert(draw.randint(0, len(order)), order.pop(i))
        elif how == 1:
            order[i] = order[i]._replace(microbatch=draw.randrange(made.passes))
        else:
            order[i : i + 2] = order[i : i + 2][::-1]
    return replace(made, orders=(*made.orders[:rank], tuple(order), *made.orders[rank + 1 :]))


@pytest.mark.parametrize("seeds", [range(300), pytest.param(range(300, 2300), marks=pytest.mark.exhaustive)])
def test_verify_accepts_only_orders_of_slices_that_run(seeds: range) -> None:
    assert_verify_accepts_what_runs((mutant(seed), 0) for seed in seeds)


def test_triax_schedule_takes_slices_on_the_command_line() -> None:
    def shown(*arguments: str) -> tuple[int, str]:
        return run_triax("schedule", *arguments, columns=200)

    code, text = shown("1f1b", "--slices", "4", "--pipe", "2", "--microbatches", "2", "--attention", "0.5")
    assert code == 0 and "slices 4" in text and "1.25 1" in text and "--slices 0.366,0.252,0.205,0.177" in text
    code, text = shown("zb-h1", "--slices", "3,2,1", "--json")
    assert code == 0 and json.loads(text)["slices"] == [3, 2, 1]
    for arguments, words in (
        (("zb-v", "--slices", "2"), "zb-v runs whole microbatches, not 2 slices of each: use gpipe, 1f1b"),
        (("auto", "--slices", "2"), "name a schedule, such as 1f1b"),
        (("1f1b", "--slices", "x"), "--slices = 'x': give a whole number or a list of numbers"),
        (("1f1b", "--attention", "0.5"), "give --slices too"),
        (("interleaved", "--pipe", "4", "--microbatches", "3", "--slices", "3"), "the nearest is slices=4"),
        (("compare", "--slices", "2"), "triax schedule compare has no --slices"),
    ):
        code, text = shown(*arguments)
        assert code == 2 and words in " ".join(text.split()), text


# ----------------------------------------------------------------------------------------------------- execution

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "hidden_size": 16,
    "num_attention_heads": 4,
}
NARROW: dict[str, Any] = {**COMMON, "num_key_value_heads": 2, "intermediate_size": 20, "head_dim": 6}
LINEAR, FULL = "linear_attention", "full_attention"
MODELS: dict[str, Any] = {
    "gpt": GPTConfig(**COMMON, num_hidden_layers=4, dropout=0.1, tie_word_embeddings=True),
    "llama": DecoderConfig(**NARROW, num_hidden_layers=4),
    "window": DecoderConfig(**NARROW, num_hidden_layers=4, sliding_window=5, attention_sinks=True),
    "mamba": DecoderConfig(
        **NARROW,
        num_hidden_layers=4,
        layer_types=(LINEAR, "mlp", FULL, LINEAR),
        one_branch=True,
        no_rope_layers=(0, 0, 0, 0),
        hidden_act="relu2",
        gated=False,
        dropout=0.1,
        linear_attention=Mamba2Sizes(6, 4, 5, n_groups=2, time_step_min=0.01),
    ),
    "delta": DecoderConfig(
        **NARROW,
        num_hidden_layers=4,
        layer_types=(LINEAR, FULL, LINEAR, FULL),
        qk_norm=True,
        linear_attention=DeltaNetSizes(4, 5, 2, 6),
    ),
    "alibi": DecoderConfig(**NARROW, num_hidden_layers=4, alibi="added"),
    "experts": MixtralConfig(
        **NARROW,
        num_hidden_layers=4,
        num_experts=4,
        num_experts_per_tok=2,
        scoring_func="sigmoid",
        selection_bias=True,
        router_aux_loss_coef=0.0,
        shared_expert_intermediate_size=8,
    ),
    "capped": DecoderConfig(
        **NARROW,
        num_hidden_layers=4,
        layer_types=("sliding_attention", FULL, "sliding_attention", FULL),
        sliding_window=5,
        attn_logit_softcapping=0.7,
        final_logit_softcapping=2.0,
    ),
}
Cell = tuple[str, str, Any, dict[str, Any]]  # model, schedule, slices, others


def batch(step: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5 + step)
    ids, labels = torch.randint(VOCABULARY, (2, COUNT * ROWS, length), generator=generator)
    labels[:, ::5] = -100
    labels[3] = -100  # a sequence without labels
    labels[1, length // 2 :] = -100  # late slices without labels, and early ones
    labels[6, : length // 2] = -100
    return ids, (torch.rand(ids.shape, generator=generator) < 0.2).cumsum(1), labels


def make_engine(
    grid: Grid, kind: str, name: str, slices: Any, stage: int = 0, sequence_parallel: bool = False, **options: Any
) -> triax.PipelineEngine:
    model = PipelineModule(
        decoder_layers(MODELS[kind], sequence_parallel=sequence_parallel),
        grid=grid,
        loss_fn=NextTokenLoss(grid, VOCABULARY),
        seed=3,
        dtype=torch.float64,
        chunks=2 if name == "interleaved" else 1,
    )
    for parameter in model.parameters():  # at their initial size the branches hardly matter
        if parameter.dim() == 2:
            parameter.data *= 4
    schedule = triax.ScheduleOptions.of({"name": name, "slices": slices, **options.pop("schedule", {})})
    batch = triax.Batch(microbatch=ROWS, microbatches=COUNT // grid.data.size)
    others = {"optimizer": torch.optim.AdamW, "clip": 0.5, **options}
    return pipeline_engine(model, batch, stage, schedule=schedule, **others)


def train(grid: Grid, cell: Cell) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Return the losses of some steps and of an evaluation, gradients of the first step, and weights at the end."""
    kind, schedule, slices, others = cell
    others = dict(others)
    packed, length, steps = others.pop("packed", False), others.pop("length", LENGTH), others.pop("steps", 2)
    engine = make_engine(grid, kind, schedule, slices, **others)
    assert engine.program.schedule.offloads == ("schedule" in others)
    share, losses = COUNT * ROWS // grid.data.size, list[float]()
    gradients: dict[str, Tensor] = {}
    for step in range(steps):
        ids, documents, labels = batch(step, length)
        rows = [
            ((ids[at], documents[at]) if packed else ids[at], labels[at])
            for first in range(grid.data.rank * share, (grid.data.rank + 1) * share, ROWS)
            for at in [slice(first, first + ROWS)]
        ]
        losses.append(engine.train_batch(iter(rows)).item())
        gradients = gradients or engine.gather("gradients")
    # Evaluation runs whole sequences, with the layers that have run slices.
    losses.append(float(engine.eval_batch(iter(rows))))
    return losses, gradients, engine.gather()


def train_all(cells: list[tuple[dict[str, Any], Cell]]) -> list[Any]:
    return [train(Grid(**shape, timeout=100), cell) for shape, cell in cells]


def whole(cell: Cell) -> Cell:
    """Return the same job without slices, on one process."""
    return cell[0], "1f1b", 1, {key: value for key, value in cell[3].items() if key in ("packed", "length", "steps")}


_REFERENCES: dict[str, Any] = {}


def assert_equal_to_one_process(cells: list[Cell], found: list[Any]) -> None:
    for cell, (losses, gradients, weights) in zip(cells, found, strict=True):
        key = repr(whole(cell))
        if key not in _REFERENCES:
            _REFERENCES[key] = train(Grid(), whole(cell))
        expected = _REFERENCES[key]
        assert losses == pytest.approx(expected[0], rel=1e-10), cell
        for own, wanted in ((gradients, expected[1]), (weights, expected[2])):
            torch.testing.assert_close(own, wanted, rtol=1e-9, atol=1e-11, msg=lambda text: f"{cell}: {text}")  # noqa: B023


ALONE: list[Cell] = [  # one step each, and several steps on ranks below
    ("gpt", "gpipe", 3, {"schedule": {"offload": {"device": "cpu", "copy_time": 0.01}}}),
    ("llama", "zb-h1", (3, 2, 1), {"packed": True, "recompute": {"enabled": True}}),
    ("window", "gpipe", 4, {"packed": True, "recompute": {"granularity": "selective"}}),
    ("mamba", "zb-h1", 3, {"packed": True, "recompute": {"enabled": True}}),
    ("experts", "zb-h1", (3, 2, 1), {"packed": True, "recompute": {"enabled": True}}),
    ("capped", "1f1b", 4, {"packed": True, "recompute": {"granularity": "selective"}}),
]


def test_sliced_training_on_one_process_equals_whole_training() -> None:
    cells = [(*cell[:3], {**cell[3], "steps": 1}) for cell in ALONE]
    assert_equal_to_one_process(cells, [train(Grid(), cell) for cell in cells])


def test_sliced_training_equals_plain_torch() -> None:
    engine = make_engine(Grid(), "gpt", "1f1b", 3, clip=None)
    for module in engine.module.modules():
        if isinstance(module, Dropout):
            module.p = 0.0
    weights = {name: value.clone().requires_grad_() for name, value in engine.gather().items()}
    ids, documents, labels = batch(0, LENGTH)
    loss = torch.nn.functional.cross_entropy(
        gpt_logits(weights, ids, 4, 4, documents).flatten(0, 1), labels.flatten(), ignore_index=-100
    )
    loss.backward()
    cuts = [slice(first, first + ROWS) for first in range(0, COUNT * ROWS, ROWS)]
    value = engine.train_batch(iter([((ids[at], documents[at]), labels[at]) for at in cuts]))
    assert value.item() == pytest.approx(loss.item(), rel=1e-12)
    for name, gradient in engine.gather("gradients").items():
        torch.testing.assert_close(gradient, weights[name].grad, rtol=1e-10, atol=1e-12, msg=name)


TWO: list[tuple[dict[str, Any], Cell]] = [
    ({"pipe": 2}, ("gpt", "1f1b", 3, {"packed": True, "stage": 2})),
    ({"pipe": 2}, ("llama", "interleaved", 2, {"stage": 1})),
]
PARTS: dict[str, Any] = {"length": 16, "sequence_parallel": True, "steps": 1}
FOUR: list[tuple[dict[str, Any], Cell]] = [
    ({"pipe": 2, "tensor": 2}, ("delta", "zb-h1", 2, {**PARTS, "packed": True})),
    ({"pipe": 2, "data": 2}, ("llama", "1f1b", (2, 1, 1), {"packed": True, "stage": 3})),
]
MORE_FOUR: list[tuple[dict[str, Any], Cell]] = [
    ({"pipe": 2, "tensor": 2}, ("gpt", "1f1b", 3, {**PARTS, "steps": 2})),
    ({"pipe": 2, "tensor": 2}, ("delta", "zb-h1", 2, {**PARTS, "packed": True, "steps": 2})),
]


@pytest.mark.parametrize(
    ("size", "cells"),
    [(2, TWO), (4, FOUR), pytest.param(4, MORE_FOUR, marks=pytest.mark.exhaustive)],
    ids=["pipe", "tensor and ZeRO", "tensor"],
)
def test_sliced_training_on_ranks_equals_one_process(
    ranks: Any, size: int, cells: list[tuple[dict[str, Any], Cell]]
) -> None:
    assert_equal_to_one_process([cell for _, cell in cells], ranks(size, train_all, cells, timeout=150)[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [*MODELS])
def test_sliced_training_of_every_model_equals_one_process(ranks: Any, kind: str) -> None:
    """Every schedule twice, on three grids of 4 ranks, with each kind of recomputation and each stage of ZeRO."""
    cells: list[tuple[dict[str, Any], Cell]] = []
    recomputes: list[dict[str, Any]] = [{}, {"enabled": True}, {"granularity": "selective"}, {"granularity": "matmul"}]
    for number, name in enumerate(NAMES * 2):
        packed, others = number % 2 == 0, recomputes[number % 4]
        common = {"packed": packed, "length": 16, "recompute": others}
        cells += [
            ({"pipe": 2, "tensor": 2}, (kind, name, 2, {**common, "sequence_parallel": number > 3, "stage": 1})),
            ({"pipe": 2, "data": 2}, (kind, name, (3, 1, 2, 2), {**common, "stage": number % 4})),
            ({"pipe": 4}, (kind, "1f1b" if name == "interleaved" else name, 4, common)),
        ]
    assert_equal_to_one_process([cell for _, cell in cells], ranks(4, train_all, cells, timeout=600)[0])


def test_held_slices_equal_the_simulated_peak() -> None:
    most = {}
    for slices in (1, 4):
        engine = make_engine(Grid(), "llama", "1f1b", slices)
        ids, _, labels = batch(0, 16)
        cuts = [slice(first, first + ROWS) for first in range(0, COUNT * ROWS, ROWS)]
        engine.train_batch(iter([(ids[at], labels[at]) for at in cuts]))
        most[slices] = engine.executor.last_run.peak / slices
        assert most[slices] == simulate(engine.program.schedule).peak_activations[0]
        states: Any = next(each for each in engine.module.modules() if isinstance(each, SelfAttention)).slices
        assert (states is None) == (slices == 1)
        assert states is None or not (states._parts or states.active)  # nothing is kept between steps


class Mixes(nn.Module):
    """Adds the mean of a sequence to each token."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)


def mean_over_labels(outputs: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten(), ignore_index=-100)


def refused(layers: list[Any] | None = None, loss: Any = None, **options: Any) -> str:
    grid = Grid()
    given = decoder_layers(MODELS["llama"]) if layers is None else layers
    model = PipelineModule(given, grid=grid, loss_fn=loss or NextTokenLoss(grid, VOCABULARY))
    schedule = triax.ScheduleOptions.of({"name": "1f1b", "slices": 2, **options.pop("schedule", {})})
    make = partial(pipeline_engine, model, TWO_ROWS, schedule=schedule, **options)
    return error_text(make, OptionError)


def test_slices_refuse_layers_and_losses_that_mix_tokens() -> None:
    table = LayerSpec(nn.Embedding, VOCABULARY, 8)
    head = LayerSpec(nn.Linear, 8, VOCABULARY)
    assert "has a Mixes, which is not known to act on each token" in refused([table, LayerSpec(Mixes), head])
    assert "layer 1 runs the function tanh" in refused([table, torch.tanh, head])
    assert "loss_fn (mean_over_labels)" in refused(loss=mean_over_labels)
    assert "zb-v runs whole microbatches" in refused(schedule={"name": "zb-v"})
    assert "has sparse attention" in refused(sparse_attention={"mode": "bslongformer", "block": 4})
    block = decoder_layers(MODELS["llama"])[1].build(Grid())
    assert "is listed twice in stage 0" in refused([table, block, block, head])


WHOLE = "a mixture of experts with a loss or a limit of whole sequences"


def test_configurations_refuse_slices_as_engines_do() -> None:
    """A plan and a training file ask the configuration, before there is a model."""
    assert all(config.refuses_slices() is None for config in MODELS.values())  # which the other tests run
    mixtral, deepseek = MixtralConfig.preset("mixtral-tiny"), DeepseekConfig.preset("deepseek-tiny")
    limited, losing = {"balance": ["bias"], "capacity": 2.0}, {"balance": ["bias"], "z_loss": 0.1}
    cases: list[dict[str, Any]] = [{}, limited, losing, {"balance": "batch"}]
    for options in cases:
        assert WHOLE in str(mixtral.refuses_slices(options)) and WHOLE in refused(decoder_layers(mixtral, **options))
        assert WHOLE in str(deepseek.refuses_slices(options)) and WHOLE in refused(deepseek_layers(deepseek, **options))
    several = replace(deepseek, num_nextn_predict_layers=1)
    assert "predicts several tokens" in str(several.refuses_slices())
    assert refused(deepseek_layers(several)) != "no error"
    assert MODELS["experts"].refuses_slices({"balance": ["bias"]}) is None


def errors_on_two_ranks(pipe: int) -> list[str]:
    """Return the errors of each case, of which one rank alone knows the first."""
    grid, found = Grid(pipe=pipe, timeout=60), []
    layers = [LayerSpec(nn.Embedding, VOCABULARY, 8), LayerSpec(nn.Linear, 8, VOCABULARY)]
    for stack, slices, tokens in (([layers[0], LayerSpec(Mixes), layers[1]], 2, 4), (layers, 5, 4)):
        model = PipelineModule(stack, grid=grid, loss_fn=NextTokenLoss(grid, VOCABULARY), partition="uniform")

        def attempt(model: PipelineModule = model, slices: int = slices, tokens: int = tokens) -> None:
            engine = pipeline_engine(model, TWO_ROWS, schedule=triax.ScheduleOptions(slices=slices))
            row = torch.zeros(1, tokens, dtype=torch.int64)
            engine.train_batch(iter([(row, row)] * 2))

        found.append(error_text(attempt, (OptionError, RuntimeError)))
    return found


def test_every_rank_refuses_models_that_cannot_be_sliced(ranks: Any) -> None:
    for found in ranks(2, errors_on_two_ranks, 2, timeout=60):
        assert "has a Mixes" in found[0]
        assert "a sequence of 4 tokens cannot be cut into 5 slices" in found[1]


class TokenWise(nn.Module):
    """Layer of a user that says that it acts on each token by itself."""

    token_wise = True

    def forward(self, x: Tensor) -> Tensor:
        return x * x.sigmoid()


def test_token_wise_user_layers_and_losses_run_in_slices() -> None:
    def summed(outputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        loss = torch.nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, labels.numel()

    def mean(outputs: Tensor, labels: Tensor) -> Tensor:
        return summed(outputs, labels)[0] / labels.numel()

    def step(slices: int, loss: Callable[..., Any]) -> tuple[float, dict[str, Tensor]]:
        loss.token_wise = True  # type: ignore[attr-defined]
        layers = [LayerSpec(nn.Embedding, VOCABULARY, 8), LayerSpec(TokenWise), LayerSpec(nn.Linear, 8, VOCABULARY)]
        module = PipelineModule(layers, grid=Grid(), loss_fn=loss, dtype=torch.float64)
        engine = pipeline_engine(module, TWO_ROWS, schedule=triax.ScheduleOptions(slices=slices))
        ids, _, _ = batch(0, 7)
        value = engine.train_batch(iter([(ids[i : i + 1], ids[i + 2 : i + 3]) for i in range(2)]))
        return value.item(), engine.gather("gradients")

    (value, gradients), (expected, wanted) = step(3, summed), step(1, summed)
    assert value == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(gradients, wanted, rtol=1e-10, atol=1e-12)
    with pytest.raises(RuntimeError, match="cuts each sequence into 3 slices, and with a mean"):
        step(3, mean)
