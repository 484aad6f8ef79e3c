""" "auto" and ``autotuning``: the microbatch size that fits by counted bytes; steps equal those of the size by hand."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.base.errors import ConfigError
from triax.models.gpt import GPTConfig, GPTLoss, gpt_layers
from triax.models.mixtral import MixtralConfig, mixtral_layers

from support.toys import mean_loss

GPT = GPTConfig(vocab_size=64, max_position_embeddings=16, hidden_size=32, num_hidden_layers=4, num_attention_heads=4)
ADAM = {"type": "AdamW", "params": {"lr": 1e-2}}
AUTO = "train_micro_batch_size_per_gpu"


class Noisy(nn.Module):
    """Layer with a buffer that each forward pass changes, and noise of torch's own generator."""

    calls: Tensor

    def __init__(self, most: int = 10**9) -> None:
        super().__init__()
        self.linear, self.most = nn.Linear(8, 8), most
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise torch.OutOfMemoryError("as on a GPU")
        self.calls += 1
        return x + torch.tanh(self.linear(x)) * torch.rand(()) * self.calls


def tokens() -> TensorDataset:
    rows = torch.randint(64, (256, 17), generator=torch.Generator().manual_seed(1))
    return TensorDataset(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


def numbers() -> TensorDataset:
    return TensorDataset(*torch.randn(2, 256, 8, generator=torch.Generator().manual_seed(2)))


def gpt(grid: Grid) -> PipelineModule:
    return PipelineModule(gpt_layers(GPT), grid=grid, loss_fn=GPTLoss(grid, vocab_size=64))


def noisy(grid: Grid, most: int = 10**9) -> PipelineModule:
    return PipelineModule([LayerSpec(Noisy, most)] * 4, grid=grid, loss_fn=mean_loss, partition="uniform")


def train(model: Any, samples: Any, config: dict[str, Any], *grid: int, **axes: Any) -> dict[str, Any]:
    """Train, and return what was found, the losses, the weights, and the bytes counted in the last step."""
    torch.manual_seed(5)
    config = {"train_batch_size": 32, "optimizer": ADAM, **config}
    engine, _, loader, _ = triax.initialize(model=model(Grid(*grid, **axes)), training_data=samples(), config=config)
    assert loader is engine.training_dataloader
    engine.record_memory = True
    losses = [float(engine.train_batch()) for _ in range(3)]
    held = engine.memory_report()["held"]
    return {
        "batch": tuple(engine.get_batch_info()),
        "stage": engine.zero_optimization_stage(),
        "losses": losses,
        "weights": engine.gather(),
        "bytes": sum(held.values()),
        "buffers": sum(float(buffer) for buffer in engine.module.buffers()),
    }


def require_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert {k: v for k, v in found.items() if k != "weights"} == {k: v for k, v in wanted.items() if k != "weights"}
    assert all(torch.equal(value, wanted["weights"][name]) for name, value in found["weights"].items())


@pytest.mark.parametrize(("model", "data"), [(gpt, tokens), (noisy, numbers)], ids=["known", "measured"])
def test_auto_microbatch_is_the_largest_that_fits_in_memory(model: Any, data: Any) -> None:
    by_hand = {size: train(model, data, {AUTO: size}) for size in (32, 16, 8)}
    limit = (by_hand[32]["bytes"] + by_hand[16]["bytes"]) / 2
    tuning = {"enabled": True, "memory": limit / 1e9, "num_tuning_micro_batch_sizes": 1}
    found = train(model, data, {AUTO: "auto", "autotuning": tuning, "zero_optimization": {"stage": 0}})
    assert found["batch"] == (32, 16, 2) and found["bytes"] <= limit < by_hand[32]["bytes"]
    require_equal(found, by_hand[16])
    require_equal(train(model, data, {AUTO: "auto"}), by_hand[32])  # the host has memory for all


def test_tune_returns_options_and_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    """The model has layers that are modules, one of them listed twice, and an optimizer over their parameters."""
    torch.manual_seed(5)
    shared = nn.Linear(8, 8)
    model = PipelineModule([shared, Noisy(), nn.LayerNorm(8), shared], loss_fn=mean_loss, partition="uniform")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    options = triax.EngineOptions(
        batch=triax.Batch(size=32, microbatch="auto"), tuning=triax.Tuning(sizes=2, results=str(tmp_path))
    )
    options = triax.tune(model, options, optimizer=optimizer, zero="auto", training_data=numbers())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state()) and not optimizer.state
    results = json.loads((tmp_path / "results.json").read_text())
    assert options.batch.microbatch == int(min(results["seconds"], key=results["seconds"].get))
    assert options.tuning is None and options.zero.stage == 0 and options.batch.microbatches is not None
    written = json.loads((tmp_path / "options.json").read_text())
    assert written["batch"] == options.batch.plain(given=True) and "tuning" not in written
    engine = triax.Engine(model, options, training_data=numbers())
    assert engine.batch.micro == options.batch.microbatch and engine.train_batch().isfinite()


def test_an_engine_with_auto_microbatch_searches_and_warns() -> None:
    batch, model = triax.Batch(size=32, microbatch="auto"), gpt(Grid())
    with pytest.warns(DeprecationWarning, match=r"write options = triax\.tune\(model, options") as warned:
        engine = triax.Engine(model, optimizer=partial(torch.optim.AdamW, lr=1e-2), batch=batch, training_data=tokens())
    assert engine.batch.micro == triax.tune(gpt(Grid()), engine.options.changed(batch=batch)).batch.microbatch == 32
    assert [each.filename for each in warned if "triax.tune" in str(each.message)] == [__file__]


def on_ranks(tuned: dict[str, Any], by_hand: dict[str, Any], *grid: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return train(gpt, tokens, tuned, *grid), train(gpt, tokens, by_hand, *grid)


def test_auto_and_given_microbatches_train_equal_on_4_ranks(ranks: Any) -> None:
    by_hand = {AUTO: 2, "zero_optimization": {"stage": 1}}
    for found, wanted in ranks(4, on_ranks, by_hand | {AUTO: "auto"}, by_hand, 2, 2, 1):
        assert found["batch"] == (32, 2, 8)  # four microbatches for each stage
        require_equal(found, wanted)


def moe(grid: Grid) -> PipelineModule:
    config = MixtralConfig.preset("mixtral-tiny")
    return PipelineModule(mixtral_layers(config), grid=grid, loss_fn=GPTLoss(grid, vocab_size=config.vocab_size))


def both(model: Any, config: dict[str, Any], axes: dict[str, int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What "auto" trains, and what the size that it found trains."""
    found = train(model, tokens, {**config, AUTO: "auto"}, **axes)
    return found, train(model, tokens, {**config, AUTO: found["batch"][1]}, **axes)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "config", "axes"),
    [
        (moe, {"zero_optimization": {"stage": 2}}, {"data": 2, "expert": 2}),
        (gpt, {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}, {"data": 2}),
        (gpt, {"fp16": {"enabled": True, "initial_scale_power": 4}}, {"data": 2}),
        (gpt, {"pipeline": {"schedule": "zb-v"}}, {"pipe": 2}),
        (gpt, {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, {"data": 2}),
        (gpt, {"gradient_compression": {"type": "topk", "ratio": 0.1}}, {"data": 2}),
        (gpt, {"lora": {"rank": 4}}, {"data": 2}),
    ],
)
def test_the_steps_of_the_search_do_not_change_training(
    ranks: Any, model: Any, config: dict[str, Any], axes: dict[str, int]
) -> None:
    for found, wanted in ranks(2, both, model, config, axes):
        require_equal(found, wanted)


def stages(limit: float, *grid: int) -> dict[str, Any]:
    tuning = {"enabled": True, "memory": limit / 1e9, "num_tuning_micro_batch_sizes": 1}
    return train(gpt, tokens, {AUTO: "auto", "autotuning": tuning, "zero_optimization": {"stage": "auto"}}, *grid)


@pytest.mark.exhaustive
def test_auto_stage_fits_in_the_memory_limit(ranks: Any) -> None:
    """The limit lies between the bytes that 4 replicas hold in stage 3 and in stage 1: a stage from 2 on is chosen."""
    small = ranks(4, train, gpt, tokens, {AUTO: 1, "zero_optimization": {"stage": 3}}, 1, 4, 1)
    large = ranks(4, train, gpt, tokens, {AUTO: 1, "zero_optimization": {"stage": 1}}, 1, 4, 1)
    limit = (max(each["bytes"] for each in small) + min(each["bytes"] for each in large)) / 2
    found = ranks(4, stages, limit, 1, 4, 1)
    assert {(each["stage"], each["batch"]) for each in found} == {(found[0]["stage"], found[0]["batch"])}
    assert found[0]["stage"] >= 2 and max(each["bytes"] for each in found) <= limit


def test_autotuning_picks_the_fastest_size_and_writes_a_config(tmp_path: Path) -> None:
    tuning = {"enabled": True, "results_dir": str(tmp_path), "num_tuning_micro_batch_sizes": 2, "end_profile_step": 2}
    found = train(gpt, tokens, {"autotuning": tuning, "zero_optimization": {"stage": 1}})
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results["seconds"]) == 2 and set(results["seconds"]) <= set(results["bytes"])
    assert found["batch"][1] == int(min(results["seconds"], key=results["seconds"].get))
    config = json.loads((tmp_path / "ds_config_optimal.json").read_text())
    assert config["autotuning"] == {"enabled": False} and config[AUTO] == found["batch"][1]
    require_equal(found, train(gpt, tokens, config))


def test_an_engine_out_of_memory_takes_the_next_smaller_size() -> None:
    assert train(lambda grid: noisy(grid, most=8), numbers, {AUTO: "auto"})["batch"] == (32, 8, 4)


def test_auto_microbatch_of_a_known_model_needs_no_data() -> None:
    config = {"train_batch_size": 8, AUTO: "auto", "optimizer": ADAM}
    engine, *_ = triax.initialize(model=gpt(Grid()), config=config)
    assert engine.get_batch_info() == (8, 8, 1) and engine.training_dataloader is None


def test_auto_microbatch_without_samples_is_the_whole_batch() -> None:
    engine, *_ = triax.initialize(model=noisy(Grid()), config={"train_batch_size": 8, AUTO: "auto", "optimizer": ADAM})
    assert engine.get_batch_info() == (8, 8, 1)


@pytest.mark.parametrize(
    ("model", "config", "words"),
    [
        (
            noisy,
            {"autotuning": {"enabled": True}},
            "there are no samples: pass training_data",
        ),
        (lambda grid: nn.Linear(2, 2), {"autotuning": {"enabled": True}}, "a step of a Linear is the script's own"),
        (
            gpt,
            {"autotuning": {"enabled": True, "memory": 1e-4}},
            "the smallest microbatch, of 1 samples, needs 0.001023 GB",
        ),
        (gpt, {AUTO: "auto", "local_updates": {"type": "local_sgd", "every": 2}}, "under local_updates they take none"),
        (gpt, {"train_batch_size": None, "autotuning": {"enabled": True}}, "write train_batch_size, the samples of a"),
        (gpt, {"autotuning": {"end_profile_step": 1}}, "no step before end_profile_step 1 is timed"),
    ],
)
def test_impossible_searches_for_sizes_are_refused(model: Any, config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        triax.initialize(model=model(Grid()), config={"train_batch_size": 32, "optimizer": ADAM, **config})
    assert words in str(error.value)
