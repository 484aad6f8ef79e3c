"""``ModelMemory``: model states byte for byte as counted on ranks, activations as counted and as in the paper."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from operator import mul
from typing import Any

import pytest
import torch

import triax
from triax import Grid, PipelineModule
from triax.models.config import DeepseekConfig, GPTConfig, LlamaConfig, MixtralConfig
from triax.models.layers import NextTokenLoss
from triax.pipe.program.activations import counts_in_flight, peak_activations
from triax.pipe.schedules.registry import RECIPES, named_schedule
from triax.plugins.plan.memory import ModelMemory, in_flight
from triax.plugins.plan.parallel_layout import ParallelLayout
from triax.plugins.plan.state_memory import StateOptions

from support.paper_formulas import paper_activations

_GPT = GPTConfig.preset("bytes-tiny", num_hidden_layers=3, vocab_size=61)
_LLAMA = LlamaConfig.preset("llama-tiny", num_hidden_layers=5, vocab_size=61)
_MIXTRAL = MixtralConfig.preset("mixtral-tiny")
KINDS = ("parameters", "gradients", "masters", "optimizer", "buffers")


def held(cases: list[dict[str, Any]], activations: bool = False) -> list[dict[str, int]]:
    """Bytes that this rank holds after a step, of each case."""
    return [_held(**case, activations=activations) for case in cases]


def _held(config: Any, layout: ParallelLayout, options: StateOptions, activations: bool) -> Any:
    grid = Grid(layout.pipe, layout.data, layout.tensor, context=layout.context, expert=layout.expert, timeout=60)
    layers = config.layers(sequence_parallel=bool(layout.sequence_parallel))
    place = RECIPES[layout.schedule].place(layout.pipe, layout.chunks)
    loss = NextTokenLoss(grid, config.vocab_size)
    model = PipelineModule(layers, grid=grid, loss_fn=loss, chunks=layout.chunks, placement=place)
    groups = None
    if options.decays == "matrices":
        named = list(model.named_parameters())
        decays = [
            p.dim() > 1 and type(model.get_submodule(n.rpartition(".")[0])).__name__ not in _KEPT for n, p in named
        ]
        groups = [{"params": [p for (_, p), d in zip(named, decays) if d is kind]} for kind in (True, False)]
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": layout.microbatch,
        "gradient_accumulation_steps": 2 * layout.pipe,
        "optimizer": {"type": options.optimizer, "params": {"lr": 1e-3}},
        "pipeline": {"schedule": layout.schedule},
        "zero_optimization": {"stage": layout.zero, "reduce_bucket_size": options.bucket},
    }
    if layout.shard_size is not None:
        settings["zero_optimization"]["mics_shard_size"] = layout.shard_size
    if layout.zero == 3:
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = options.persistent
    if options.precision in ("bf16", "fp16"):
        settings[options.precision] = {"enabled": True}
    if options.precision == "fp16":
        settings["fp16"]["initial_scale_power"] = 4
    if layout.recompute != "none":
        settings["activation_checkpointing"] = {"granularity": layout.recompute}
    if layout.offload:
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    engine, *_ = triax.initialize(model=model, config=settings, model_parameters=groups)
    rows = torch.randint(config.vocab_size, (layout.microbatch, 25), generator=torch.Generator().manual_seed(0))
    engine.record_memory = activations
    engine.train_batch(iter([(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())] * 2 * layout.pipe))
    return engine.memory_report()["held"], grid.pipe.rank, grid.tensor.rank


_KEPT = ("TokenEmbedding", "PositionEmbedding")


def case(config: Any, precision: str = "bf16", bucket: int = 3000, **fields: Any) -> dict[str, Any]:
    options = {name: fields.pop(name) for name in ("persistent", "optimizer", "decays") if name in fields}
    states = StateOptions(precision=precision, bucket=bucket, **{"optimizer": "AdamW", **options})
    return {"config": config, "layout": ParallelLayout(**fields), "options": states}


_QUICK = [
    # tied embeddings on two ranks, uneven stages
    *(case(_GPT, pipe=2, data=2, zero=zero) for zero in (1, 2)),
    case(
        _GPT, pipe=2, data=2, chunks=2, schedule="zb-v", zero=3, persistent=100, decays="matrices"
    ),  # a tie on one rank
    case(_MIXTRAL, data=2, tensor=2, expert=2, zero=3),
    *(case(_MIXTRAL, data=4, expert=2, zero=zero, shard_size=2) for zero in (1, 3)),
]
_THOROUGH = [
    *(case(_GPT, pipe=2, data=2, zero=zero) for zero in (0, 3)),
    *(case(_GPT, data=2, tensor=2, zero=zero, precision="fp32", bucket=2**22) for zero in (0, 2, 3)),
    case(_GPT, pipe=4, zero=1, precision="fp16"),
    case(_GPT, pipe=2, data=2, chunks=2, schedule="interleaved", zero=2, decays="matrices"),
    case(_GPT, pipe=2, data=2, zero=1, offload=True),
    *(case(_LLAMA, data=4, zero=zero, decays="matrices", persistent=40 * (zero == 3)) for zero in (1, 3)),
    case(replace(_LLAMA, num_attention_heads=3, num_key_value_heads=1, head_dim=8), tensor=3, bucket=10**6),
    case(_LLAMA, pipe=2, context=2, zero=3, precision="fp32", optimizer="SGD"),
    *(case(_MIXTRAL, data=2, tensor=2, expert=2, zero=zero) for zero in (0, 1)),
    case(_MIXTRAL, pipe=2, data=2, expert=2, zero=2, precision="fp32"),
    case(DeepseekConfig.preset("deepseek-tiny"), data=4, expert=2, zero=3),
    *(case(_GPT, pipe=2, data=2, zero=zero, shard_size=1) for zero in (1, 2, 3)),
    *(case(_LLAMA, data=4, zero=zero, shard_size=2) for zero in (1, 2, 3)),
]


@pytest.mark.parametrize("cases", [_QUICK, pytest.param(_THOROUGH, marks=pytest.mark.exhaustive)])
def test_planned_states_equal_the_bytes_that_ranks_hold(ranks: Any, cases: list[dict[str, Any]]) -> None:
    for size in {each["layout"].gpus for each in cases}:
        fitting = [each for each in cases if each["layout"].gpus == size]
        for results in ranks(size, held, fitting):
            for each, (counted, pipe, tensor) in zip(fitting, results, strict=True):
                planned = ModelMemory(each["config"], options=each["options"]).states(each["layout"], tensor)[pipe]
                wanted = {kind: getattr(planned, kind) for kind in KINDS}
                assert {kind: counted[kind] for kind in KINDS} == wanted, (each, pipe, tensor)


_KEPT_QUICK = [
    case(_LLAMA, pipe=2, tensor=2, zero=1),
    case(_GPT, pipe=2, tensor=2, precision="fp32", sequence_parallel=False, recompute="selective"),
    # more tokens than a chunk of head and loss
    case(_GPT, tensor=2, microbatch=48, precision="fp32"),
]
_KEPT_THOROUGH = [
    *(case(_LLAMA, recompute=each, microbatch=3) for each in ("none", "selective", "full")),
    *(case(_GPT, tensor=2, recompute=each, sequence_parallel=sp) for each in ("none", "full") for sp in (True, False)),
    *(case(_LLAMA, tensor=2, recompute=each, precision="fp32") for each in ("none", "selective", "full")),
    case(_GPT, pipe=4, precision="fp32"),
    case(replace(_GPT, dropout=0.1), pipe=4, schedule="gpipe"),
    case(replace(_GPT, dropout=0.1), pipe=2, data=2, zero=3),
    case(_LLAMA, pipe=2, data=2, chunks=2, schedule="interleaved"),
    case(_LLAMA, pipe=2, data=2, chunks=2, schedule="zb-v"),
]


@pytest.mark.parametrize("cases", [_KEPT_QUICK, pytest.param(_KEPT_THOROUGH, marks=pytest.mark.exhaustive)])
def test_planned_activations_equal_the_bytes_that_ranks_hold(ranks: Any, cases: list[dict[str, Any]]) -> None:
    for size in {each["layout"].gpus for each in cases}:
        fitting = [each for each in cases if each["layout"].gpus == size]
        for results in ranks(size, held, fitting, activations=True):
            for each, (counted, pipe, tensor) in zip(fitting, results, strict=True):
                layout = each["layout"]
                memory = ModelMemory(each["config"], options=each["options"], device="cpu")
                planned = memory.ranks(layout, 2 * layout.pipe * layout.data * layout.microbatch, 24)[pipe]
                if tensor == layout.tensor - 1:  # it has the largest shard of the vocabulary
                    assert counted["activations"] == planned.activations, (each, pipe)


def test_planned_activations_equal_korthikantis_tables() -> None:
    """Korthikanti et al. 2022: table 2, the 22B to 1T models of table 3, and the first rank of section 4.2.3.

    Beside the paper's bytes, blocks keep the norms' means and deviations: 16 bytes a token.
    """
    models = {  # heads, width, layers, pipe, chunks
        "22B": (64, 6144, 48, 1, 1),
        "175B": (96, 12288, 96, 8, 3),
        "530B": (128, 20480, 105, 35, 3),
        "1T": (160, 25600, 128, 64, 1),
    }
    for heads, width, blocks, pipe, chunks in models.values():
        config = GPTConfig(51200, 2048, width, blocks, heads, dropout=0.1)
        memory = ModelMemory(config, fused_attention=False)
        block = memory.layers[2]
        for tensor, parallel, recompute in product((1, 8), (False, True), ("none", "selective", "full")):
            layout = ParallelLayout(tensor=tensor, sequence_parallel=parallel, recompute=recompute)
            paper = paper_activations(1, 2048, width, heads, tensor, parallel and tensor > 1, recompute)
            apart = tensor if layout.sequence_parallel else 1
            norms = 0 if recompute == "full" else 16 * 2048 / apart
            if recompute == "full":  # triax shards the input of a block, as sequence parallelism does
                paper /= apart
            counted = memory.layer_activations(block, 2048, 2048, layout) - norms
            assert counted == pytest.approx(paper, rel=1e-12)
        if pipe > 1:
            schedule = "interleaved" if chunks > 1 else "1f1b"
            layout = ParallelLayout(pipe=pipe, tensor=8, chunks=chunks, schedule=schedule)
            each = blocks // (pipe * chunks)
            cuts = (0, *range(2 + each, 2 + blocks, each), blocks + 4)
            memory = ModelMemory(config, fused_attention=False, partition=cuts)
            first = memory.ranks(layout, 4 * pipe, 2048)[0].activations
            whole = blocks * (paper_activations(1, 2048, width, heads, 8, True) + 16 * 2048 / 8)
            flight = 1 + (pipe - 1) / (pipe * chunks) if chunks > 1 else 1.0
            beside = 9 * 2048 + 2048 * width / 8  # ids, and the mask of the dropout behind the embeddings
            held = {counts[0] for counts in in_flight(schedule, pipe, chunks, 4 * pipe)[0]}  # of the first chunk
            assert any(first == pytest.approx(whole * flight + beside * count, rel=1e-12) for count in held)


# Of _GPT, with blocks of matrices 32 x 96, 32 x 32, 32 x 128 and 128 x 32, which make 12,288, and 416 in biases and
# norms: 61 words and 64 positions of 32, 3 blocks, and a norm of 64. Factors of rank 2 beside the matrices have
# 2 x (128 + 64 + 160 + 160).
FROZEN, FACTORS = (61 + 64) * 32 + 3 * (12_288 + 416) + 64, 3 * 1024


@pytest.mark.parametrize(("zero", "data", "shards"), [(0, 1, 1), (0, 2, 1), (2, 2, 1), (3, 1, 1), (3, 2, 2)])
def test_frozen_weights_cost_two_bytes_each_and_no_states(zero: int, data: int, shards: int) -> None:
    options = StateOptions(precision="bf16", optimizer="AdamW", frozen=True)
    (found,) = ModelMemory(_GPT, options=options).states(ParallelLayout(data=data, zero=zero))
    states = {kind: getattr(found, kind) for kind in KINDS}
    assert states == {"parameters": 2 * FROZEN / shards, "gradients": 0, "masters": 0, "optimizer": 0, "buffers": 0}


@pytest.mark.parametrize("zero", [0, 3])
def test_an_engine_with_lora_has_states_of_the_factors_only(zero: int) -> None:
    grid = Grid(timeout=60)
    model = PipelineModule(_GPT.layers(), grid=grid, loss_fn=NextTokenLoss(grid, _GPT.vocab_size))
    settings = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    settings |= {"bf16": {"enabled": True}, "lora": {"rank": 2}, "zero_optimization": {"stage": zero}}
    engine, *_ = triax.initialize(model=model, config=settings)
    held = engine.memory_report()["held"]
    assert held["parameters"] == 2 * (FROZEN + FACTORS)
    assert held["gradients"] == held["masters"] == 4 * FACTORS  # fp32


def test_zero_divides_the_states_of_a_70b_model_as_published() -> None:
    """ZeRO's paper, figure 1: 2 + 2 + 12 bytes a parameter; here gradients are fp32, and padding is below 0.1 %."""
    config = LlamaConfig.preset("llama3-70b")
    memory = ModelMemory(config)
    for zero, bytes_each in enumerate((18, 6 + 12 / 64, 2 + 16 / 64, 18 / 64)):
        (found,) = memory.states(ParallelLayout(data=64, zero=zero))
        assert found.states == pytest.approx(config.parameter_count * bytes_each, rel=1e-3)
        assert found.states >= config.parameter_count * bytes_each


def test_the_planned_peak_is_the_memory_of_the_fullest_rank() -> None:
    memory, layout = ModelMemory(LlamaConfig.preset("llama3-70b")), ParallelLayout(pipe=4, data=2, tensor=8, zero=1)
    ranks = memory.ranks(layout, batch=64, sequence=8192)
    assert memory.peak(layout, batch=64, sequence=8192) == max(ranks, key=lambda each: each.total)


_SCHEDULES = [
    *(("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h2", 1), ("zb-v", 2), ("gpipe", 1)),
    *(pytest.param(name, 2, marks=pytest.mark.exhaustive) for name in ("v-half", "v-min", "wave", "looped-bfs")),
    *(pytest.param(name, 1, marks=pytest.mark.exhaustive) for name in ("eager-1f1b", "zb-h1")),
    pytest.param("dualpipe-v", 2, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("schedule", "chunks"), _SCHEDULES)
@pytest.mark.parametrize("pipe", [1, 2, 3, 4])
def test_microbatches_in_flight_equal_the_peak_of_the_schedule(schedule: str, chunks: int, pipe: int) -> None:
    """Also in steps of many microbatches: the formula looks at the first ones only."""
    for microbatches in (1, 2, 3, 5, 8, 13, 16, 29, 40):
        if microbatches < RECIPES[schedule].least(pipe):
            continue
        made = named_schedule(schedule, pipe, microbatches, chunks)
        found = in_flight(schedule, pipe, chunks, microbatches)
        assert [max(map(sum, counts)) / chunks for counts in found] == list(peak_activations(made)), microbatches


def test_interleaved_microbatches_in_flight_equal_the_schedules_peak() -> None:
    """The largest sum over stages, each with bytes of its own, of the formula and of the schedule's passes."""
    draw = random.Random(0)
    for pipe, chunks, groups in product((1, 2, 3, 5), (2, 3, 5), (1, 2, 3, 6)):
        made = named_schedule("interleaved", pipe, groups * pipe, chunks)
        sizes = [draw.random() for _ in range(chunks)]
        for both in zip(in_flight("interleaved", pipe, chunks, groups * pipe), counts_in_flight(made), strict=True):
            most, exact = (max(sum(map(mul, held, sizes)) for held in counts) for counts in both)
            assert most == pytest.approx(exact, rel=1e-12), (pipe, chunks, groups)


def test_interleaved_stages_hold_the_microbatches_of_the_paper() -> None:
    """Narayanan et al. 2021, and Korthikanti et al. 2022, section 4.2.3: 1 + (p - 1) / (p v) times those of 1F1B."""
    (first, *_) = in_flight("interleaved", 8, 3, 64)
    assert max(map(sum, first)) / 3 == 8 * (1 + 7 / (8 * 3))
