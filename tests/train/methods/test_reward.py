"""Reward models on grids, beside TRL's RewardTrainer over 3 or 20 steps, and in transformers' folders."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import triax
from triax import Grid
from triax.train.methods import reward_layers, reward_loss

from support.command_line import output_of
from support.exact_norms import exact as exact_norms
from support.method_steps import STEPS, Place, engine_at, gets_data, grids, same_steps
from support.toy_answers import SIZES, in_order, quiet, run_of, steps, tokenizer
from support.trl_in_float64 import exact

PAIRS, LENGTH, WORDS, RATE, CENTER = 4, 12, 29, 0.05, 0.1
SMALL = SIZES | {"vocab_size": WORDS, "initializer_range": 0.2}
METRICS = ("mean_reward", "accuracy", "margin")


def row_of(number: int, better: bool) -> list[int]:
    """Return the ids of an answer: of 5 to 12 tokens, the first 4 shared by the pair."""
    generator = torch.Generator().manual_seed(number)
    length = int(torch.randint(5, LENGTH + 1, (2,), generator=generator)[int(better)])
    both = torch.randint(2, WORDS, (2, LENGTH), generator=generator)
    return [*both[0, :4].tolist(), *both[int(better), 4:length].tolist()]


def margin_of(number: int) -> float:
    return 0.25 * (number % 3)


def batch_of(first: int, count: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a microbatch of the pairs from ``first`` on."""
    rows = [row_of(number, better) for better in (True, False) for number in range(first, first + count)]
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.tensor([row + [0] * (LENGTH - len(row)) for row in rows])
    margins = torch.tensor([margin_of(number) for number in range(first, first + count)])
    return ids, {"lengths": lengths, "margin": margins}


def trl_steps(folder: str, count: int) -> list[dict[str, float]]:
    """Train with TRL on one process; return losses and metrics, and save the weights before and after."""
    quiet()
    import datasets
    import transformers
    import trl

    args = trl.RewardConfig(center_rewards_coefficient=CENTER, **steps(folder, PAIRS, count, RATE))
    with exact():
        torch.manual_seed(0)
        model = transformers.LlamaForSequenceClassification(
            transformers.LlamaConfig(**SMALL | {"num_labels": 1})
        ).double()
        model.save_pretrained(f"{folder}/first")
        data = datasets.Dataset.from_list(
            [
                {"chosen_ids": row_of(n, True), "rejected_ids": row_of(n, False), "margin": margin_of(n)}
                for n in range(count * PAIRS)
            ]
        )
        trainer = in_order(trl.RewardTrainer, range(count * PAIRS))(
            model, args=args, train_dataset=data, processing_class=tokenizer()
        )
        return run_of(trainer, folder)


def trained(folder: str, steps: int, place: Place) -> tuple[list[list[float]], dict[str, Any]]:
    """Train with the model of a folder, and save the weights; return losses with metrics, and the last metrics."""
    grid = Grid(**place.axes, timeout=60)
    count = 1 if grid.data.size > 1 else 2  # pairs of a microbatch
    loss_fn = reward_loss(grid, center=CENTER)
    engine = engine_at(place, grid, f"{folder}/first", loss_fn, 2 * PAIRS, 2 * count, RATE)
    share = PAIRS // grid.data.size
    starts = [
        step * PAIRS + grid.data.rank * share + first for step in range(steps) for first in range(0, share, count)
    ]
    data = iter([batch_of(start, count) for start in starts]) if gets_data(engine, place) else None
    found = []
    for _ in range(steps):
        loss = engine.train_batch(data).item()
        found.append([loss, *(engine.metrics[name] for name in METRICS)])
    triax.save_hf(engine, f"{folder}/triax")
    return found, engine.metrics


@STEPS
def test_reward_losses_and_weights_equal_trls(ranks: Any, tmp_path: Path, steps: int) -> None:
    (rows,) = ranks(1, trl_steps, str(tmp_path), steps, timeout=300)
    wanted = [[row[name] for name in ("loss", *METRICS)] for row in rows]
    assert len(wanted) == steps and 0 < sum(row[2] for row in wanted) < steps
    places = grids(steps)
    shards = places[0]._replace(sequence_parallel=True)
    for place in [shards, *places[1:]] if steps < 20 else [*places, shards]:
        same_steps(ranks, trained, tmp_path, wanted, place)
    wrote, theirs = (json.loads((tmp_path / each / "config.json").read_text()) for each in ("triax", "last"))
    assert all(wrote[key] == theirs[key] for key in ("architectures", "id2label", "label2id", "pad_token_id"))


def scores_of(folder: str, ids: Tensor) -> Tensor:
    """Scores of all tokens, by triax on one process."""
    grid = Grid()
    module = triax.PipelineModule(triax.load_hf(folder), grid=grid, dtype=torch.float64)
    triax.save_hf(module, f"{folder}-again")
    config = triax.config_from_hf(folder)
    specs = reward_layers(triax.models.decoder_layers(config))  # type: ignore[arg-type]
    into = triax.load_hf(folder, triax.PipelineModule(specs, grid=grid, dtype=torch.float64, seed=1))
    assert all(torch.equal(a, b) for a, b in zip(into.parameters(), module.parameters(), strict=True))
    with torch.no_grad():
        found: Tensor = module.eval()(ids)
    return found


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Qwen3", {"tie_word_embeddings": True}),
        ("GPT2", {"n_embd": 16, "n_layer": 2, "n_head": 4}),
        ("GPTNeoX", {"num_attention_heads": 2}),
        ("Gemma3Text", {"head_dim": 4, "layer_types": ["sliding_attention", "full_attention"]}),
        ("Phi", {}),
        ("Mixtral", {"num_local_experts": 2, "experts_implementation": "eager"}),
    ],
)
def test_reward_models_of_transformers_load_and_save(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(SMALL | options), num_labels=1)
    model = getattr(transformers, f"{family}ForSequenceClassification")(config).double().eval()
    folder = tmp_path / "theirs"
    model.save_pretrained(folder)
    ids = torch.randint(2, WORDS, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), exact_norms(model):
        wanted = torch.stack([model(input_ids=ids[:, : length + 1]).logits[:, 0] for length in range(LENGTH)], 1)
    torch.testing.assert_close(scores_of(str(folder), ids), wanted, rtol=1e-10, atol=1e-10)
    again = load_file(f"{folder}-again/model.safetensors")
    names = load_file(folder / "model.safetensors")
    assert again.keys() == names.keys() and all(torch.equal(each, names[name]) for name, each in again.items())
    read = transformers.AutoModelForSequenceClassification.from_pretrained(f"{folder}-again")
    assert type(read) is type(model) and read.config.num_labels == 1
    right = model.state_dict()
    assert all(torch.equal(each, right[name].to(each.dtype)) for name, each in read.state_dict().items())


@pytest.mark.parametrize("tied", [False, True])
def test_a_reward_model_starts_from_a_language_model(tmp_path: Path, tied: bool) -> None:
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, tie_word_embeddings=tied))
    model.save_pretrained(tmp_path / "language")
    with pytest.raises(ValueError, match=r"has a language model, but .* reward_layers\(load_hf\(path\)\)"):
        triax.load_hf(tmp_path / "language", reward_layers(triax.load_hf(tmp_path / "language")))
    heads = []
    for seed in (0, 0, 1):
        layers = reward_layers(triax.load_hf(tmp_path / "language"))
        triax.save_hf(triax.PipelineModule(layers, grid=Grid(), seed=seed), tmp_path / "reward")
        found = load_file(tmp_path / "reward" / "model.safetensors")
        heads.append(found.pop("score.weight"))
        theirs = model.state_dict()
        assert found.keys() == theirs.keys() - {"lm_head.weight"}
        assert all(torch.equal(each, theirs[name]) for name, each in found.items())
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert heads[0].shape == (1, 16) and 0.1 < heads[0].std() < 0.3  # initializer_range is 0.2
    live = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward")
    module = triax.PipelineModule(triax.load_hf(live), grid=Grid())
    assert torch.equal(module.layers["4"].weight, heads[2])  # type: ignore[arg-type]


def test_lora_also_trains_the_new_reward_head(tmp_path: Path) -> None:
    grid = Grid()
    config = triax.LlamaConfig(vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=4)
    module = triax.PipelineModule(reward_layers(triax.llama_layers(config)), grid=grid, loss_fn=reward_loss(grid))
    batch, adam = triax.Batch(size=8, microbatch=8), partial(torch.optim.Adam, lr=0.003)
    engine: Any = triax.Engine(module, optimizer=adam, batch=batch, lora=triax.Lora(rank=1))
    triax.save_hf(engine, tmp_path / "first", merge_lora=True)
    losses = [engine.train_batch(iter([batch_of(0, 4)])).item() for _ in range(20)]
    triax.save_hf(engine, tmp_path / "last", merge_lora=True)
    heads = [load_file(tmp_path / name / "model.safetensors")["score.weight"] for name in ("first", "last")]
    assert losses[-1] < 0.7 * losses[0] and not torch.equal(*heads)


def test_a_reward_checkpoint_is_exported_for_transformers(ranks: Any, tmp_path: Path) -> None:
    ranks(1, checkpointed, str(tmp_path))
    output_of("checkpoint", "export", tmp_path / "kept", tmp_path / "out", "--format", "hf")
    assert load_file(tmp_path / "out" / "model.safetensors")["score.weight"].shape == (1, 16)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["LlamaForSequenceClassification"] and len(written["id2label"]) == 1


def checkpointed(folder: str) -> None:
    grid = Grid()
    config = triax.LlamaConfig(vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=4)
    layers = reward_layers(triax.llama_layers(config))
    module = triax.PipelineModule(layers, grid=grid, loss_fn=reward_loss(grid))
    triax.Engine(module, batch=triax.Batch(size=2, microbatch=2)).save_checkpoint(f"{folder}/kept")
