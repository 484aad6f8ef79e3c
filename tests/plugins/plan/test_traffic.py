"""Bytes sent in a step: those of ``planned_traffic.sent_bytes`` are the counted ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import triax
from triax import Grid, PipelineModule
from triax.models.config import GPTConfig, LlamaConfig
from triax.models.gpt import gpt_layers
from triax.models.layers import NextTokenLoss
from triax.models.llama import llama_layers
from triax.pipe.schedules.registry import RECIPES
from triax.plugins.plan.parallel_layout import ParallelLayout

from support.planned_traffic import sent_bytes

_SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4}
_GPT = GPTConfig(max_position_embeddings=24, dropout=0.0, **_SIZES)
_LLAMA = LlamaConfig(max_position_embeddings=24, intermediate_size=48, num_key_value_heads=2, **_SIZES)
_BATCH, _SEQUENCE = 8, 24

Case = tuple[Any, dict[str, Any]]


def sent(cases: list[Case]) -> list[tuple[int, int, dict[str, float]]]:
    """Positions on the pipe and the tensor axis, and bytes sent by axis, of each case."""
    return [_sent(config, *layout_of(fields)) for config, fields in cases]


def layout_of(fields: dict[str, Any]) -> tuple[ParallelLayout, str]:
    """Return the layout of a case, and how the last stage gets labels."""
    others = {name: value for name, value in fields.items() if name != "labels"}
    return ParallelLayout(**others), fields.get("labels", "read")


def _sent(config: Any, layout: ParallelLayout, labels: str) -> tuple[int, int, dict[str, float]]:
    grid = Grid(layout.pipe, layout.data, layout.tensor, timeout=60)
    layers = (gpt_layers if isinstance(config, GPTConfig) else llama_layers)(
        config, sequence_parallel=bool(layout.sequence_parallel)
    )
    place = RECIPES[layout.schedule].place(layout.pipe, layout.chunks)
    loss = NextTokenLoss(grid, config.vocab_size)
    model = PipelineModule(layers, grid=grid, loss_fn=loss, chunks=layout.chunks, placement=place)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": layout.microbatch,
        "gradient_accumulation_steps": layout.microbatches(_BATCH),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "pipeline": {"schedule": layout.schedule, "labels": labels},
        "zero_optimization": {"stage": layout.zero},
    }
    if layout.recompute != "none":
        settings["activation_checkpointing"] = {"granularity": layout.recompute}
    engine, *_ = triax.initialize(model=model, config=settings)
    ids = torch.zeros((layout.microbatch, _SEQUENCE), dtype=torch.long)
    for _ in range(2):  # the first step sends schemas too
        data = iter([(ids, ids)] * layout.microbatches(_BATCH)) if labels == "read" or model.is_first else None
        engine.train_batch(data)
    counted = engine.traffic_report()["sent"]
    places = grid.pipe.rank, grid.tensor.rank
    return *places, {axis: sum(each["bytes"] for each in kinds.values()) for axis, kinds in counted.items()}


_QUICK: list[Case] = [
    (_GPT, {"pipe": 2, "data": 2, "zero": 3, "microbatch": 2, "labels": "sent"}),
    (_LLAMA, {"pipe": 2, "tensor": 2, "recompute": "full"}),
]
_THOROUGH: list[Case] = [
    *((_GPT, {"pipe": 2, "data": 2, "zero": zero}) for zero in (0, 1, 2)),
    *((_GPT, {"data": 4, "zero": zero}) for zero in (1, 3)),
    (_GPT, {"pipe": 4, "schedule": "gpipe"}),
    (_GPT, {"pipe": 2, "data": 2, "zero": 3, "schedule": "gpipe"}),
    (_LLAMA, {"pipe": 2, "data": 2, "chunks": 2, "schedule": "interleaved", "zero": 3}),
    (_LLAMA, {"pipe": 2, "data": 2, "schedule": "zb-h1", "zero": 1}),
    (_LLAMA, {"data": 2, "tensor": 2, "zero": 2, "recompute": "selective"}),
    *((_GPT, {"data": 2, "tensor": 2, "zero": 1, "sequence_parallel": each}) for each in (True, False)),
    (_GPT, {"pipe": 2, "tensor": 2, "sequence_parallel": False, "recompute": "full"}),
]


@pytest.mark.parametrize("cases", [_QUICK, pytest.param(_THOROUGH, marks=pytest.mark.exhaustive)])
def test_planned_bytes_sent_equal_the_counted_ones(ranks: Any, cases: list[Case]) -> None:
    for found in ranks(4, sent, cases):
        for (config, fields), (pipe, tensor, counted) in zip(cases, found, strict=True):
            layout, labels = layout_of(fields)
            each = sent_bytes(config, layout, _BATCH, _SEQUENCE, "fp32", tensor, labels == "sent")[pipe]
            assert {axis: counted.get(axis, 0.0) for axis in each} == each, (fields, pipe, counted)
