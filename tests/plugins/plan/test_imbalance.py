"""Imbalance of replicas by their documents: against simulations of what loaders read, and in ``triax plan``."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from triax import Grid, NextTokenLoss, PipelineModule, llama_layers
from triax.data import TokenData
from triax.data.balance import Balance
from triax.engine.setup.balance import balance_of
from triax.models import MixtralConfig, mixtral_layers
from triax.pipe.program.costs import Costs
from triax.pipe.program.simulate import simulate
from triax.pipe.schedules.registry import named_schedule
from triax.plugins.plan.imbalance import STEPS, Imbalance, attention_scale
from triax.plugins.plan.layer_shapes import layers_of
from triax.plugins.plan.parallel_layout import ParallelLayout

from support.command_line import output_of
from support.tokenized import byte_llama, folder

BATCH, LENGTH = 16, 64
CONFIG = byte_llama(LENGTH)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: Any) -> Path:
    return folder(tmp_path_factory.mktemp("tokens"), 600, longest=90)


def works_of_loader(tokens: Path, layout: ParallelLayout, balance: Balance | None, scale: float) -> Any:
    """Work of the microbatches that loaders read, over the mean of each step: (steps, replicas, microbatches)."""
    m, works = layout.microbatches(BATCH), []
    for replica in range(layout.data):
        loader = TokenData(tokens, LENGTH).loader(BATCH, layout.microbatch, replica, layout.data, balance=balance)
        for (ids, documents), _ in islice(loader, STEPS * m):
            sizes = [np.bincount(row) for row in documents.numpy()]
            if balance and not ids[0, -sizes[0][-1] :].any():  # a last document of zeros alone is padding
                sizes = [sizes[0][:-1]]
            works.append(sum(float((counts + counts**2 / scale).sum()) for counts in sizes))
    works_by_step = np.array(works).reshape(layout.data, STEPS, m).swapaxes(0, 1)
    return works_by_step / works_by_step.mean((1, 2), keepdims=True)


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize(
    ("schedule", "pipe", "data", "microbatch", "error"),
    [("1f1b", 1, 4, 2, 1e-12), ("gpipe", 2, 4, 1, 1e-12), ("1f1b", 4, 2, 1, 0.04), ("zb-h1", 2, 2, 1, 0.02)],
)
def test_imbalance_equals_simulations_of_what_loaders_read(
    tokens: Path, balanced: bool, schedule: str, pipe: int, data: int, microbatch: int, error: float
) -> None:
    """Exact for one stage and for GPipe: other schedules do not always wait for the longest microbatch."""
    layout = ParallelLayout(pipe=pipe, data=data, microbatch=microbatch, schedule=schedule)
    layers, m = layers_of(CONFIG), layout.microbatches(BATCH)
    scale = attention_scale(layers)
    program = named_schedule(schedule, pipe, m, 1)
    equal = simulate(program).makespan
    works = works_of_loader(tokens, layout, Balance(scale) if balanced else None, scale)
    slowest = [max(simulate(program, Costs(work=tuple(work))).makespan for work in step) for step in works]
    found = Imbalance(TokenData(tokens, LENGTH).rows(0), BATCH, layers, balanced)
    assert found.factor(layout, equal / 3 - m) == pytest.approx(float(np.mean(slowest)) / equal, rel=error)


@pytest.mark.parametrize("window", [None, 8])
def test_attention_scales_of_plan_and_engine_differ_by_the_embedding(window: int | None) -> None:
    """The engine counts the embedding's matrix as a product, too."""
    experts = MixtralConfig.preset("mixtral-tiny", sliding_window=window)
    for config, layers in ((CONFIG, llama_layers(CONFIG)), (experts, mixtral_layers(experts, balance=None))):
        module = PipelineModule(layers, loss_fn=NextTokenLoss(Grid(), config.vocab_size))
        scale = balance_of(module, Grid()).scale
        if config is experts and window:
            assert attention_scale(layers_of(config)) == scale == np.inf
            continue
        embedding = config.vocab_size / config.num_hidden_layers
        assert attention_scale(layers_of(config)) == pytest.approx(scale - embedding, rel=1e-12)


def test_triax_plan_counts_the_imbalance_of_a_files_documents(tokens: Path, tmp_path: Path) -> None:
    def planned(data: int, pipe: int = 1, **batch: Any) -> dict[str, Any]:
        file = tmp_path / "run.yaml"
        model = {"preset": "llama-tiny", "overrides": {"vocab_size": 256}}
        training = {"sequence": LENGTH, "steps": 4, "learning_rate": 0.1}
        settings = {"model": model, "data": {"training": str(tokens)}, "training": training}
        file.write_text(yaml.safe_dump(settings | {"batch": {"size": BATCH, "microbatch": 1, **batch}}))
        layout = f"pipe={pipe},tensor=1,data={data},microbatch=1,zero=0,recompute=none,context=1,schedule=1f1b"
        output = output_of("plan", "search", "--model", file, "--layout", layout, "--json")
        return dict(json.loads(output)["layouts"][0]["time_s"])

    few, many, balanced = planned(2), planned(8), planned(8, balance=True)
    assert planned(1)["imbalance"] == pytest.approx(0, abs=1e-15)
    assert 0 < few["imbalance"] / few["products"] < many["imbalance"] / many["products"]
    assert 0 < balanced["imbalance"] < many["imbalance"]


def test_copies_of_lent_experts_take_memory_in_a_plan(tmp_path: Path) -> None:
    def held(lend: int) -> dict[str, float]:
        file = tmp_path / "run.yaml"
        settings = {"model": {"preset": "mixtral-tiny", "experts": {"lend": lend}}, "data": {"training": "none"}}
        file.write_text(yaml.safe_dump(settings | {"training": {"steps": 1, "learning_rate": 0.1}, "batch": 8}))
        layout = "pipe=1,tensor=1,data=4,expert=4,microbatch=1,zero=0,recompute=none,context=1"
        output = output_of("plan", "--model", file, "--layout", layout, "--json")
        return dict(json.loads(output)["layouts"][0]["memory_gib"])

    config = MixtralConfig.preset("mixtral-tiny")
    expert = 3 * config.hidden_size * config.intermediate_size * 2  # bytes of its three matrices in bf16
    # Weights and gradients of one more expert.
    assert held(2)["temporaries"] - held(1)["temporaries"] == pytest.approx(2 * expert / 2**30, rel=1e-9)
