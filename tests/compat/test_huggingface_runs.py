"""Runs of the Trainer: evaluation, generators, streams, workers, optimizers of one's own, resumed schedules."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import triax
from triax.base.errors import ConfigError

from support.paths import ROOT
from support.rank_checks import triax_warnings
from support.toys import error_text
from support.trainer_jobs import (
    ACCUMULATION,
    Text,
    logged,
    model_of,
    replicas_here,
    trainer_of,
    weights,
    zero,
)


class Classes(Text):
    """Rows with one label each."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = super().__getitem__(index)
        return {"input_ids": row["input_ids"], "labels": row["input_ids"][0] % 2}


def classified(out: str, replicas: int, accumulation: int, config: Any) -> dict[str, list[float]]:
    """An encoder whose loss is a mean over its samples, whatever ``num_items_in_batch`` is."""
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 53, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes))  # 2 classes
    options: dict[str, Any] = {"per_device_train_batch_size": 8 // replicas // accumulation, "max_steps": 4}
    options |= {"gradient_accumulation_steps": accumulation, "eval_steps": 2, "save_strategy": "no"}
    trainer = trainer_of("gpt2", out, replicas, config, model=model, data=(Classes(32), Classes(8, 100)), **options)
    trainer.train()
    return logged(trainer)


def test_losses_without_item_counts_train_as_transformers(ranks: Any, tmp_path: Path) -> None:
    """transformers' DDP multiplies such a loss by the replicas, and does not divide it by the microbatches."""
    (wanted,) = ranks(1, classified, str(tmp_path), 1, 1, None)
    for count, accumulation, stage in ((2, 2, 3), (1, 4, 0)):
        for found in ranks(count, classified, str(tmp_path), count, accumulation, zero(stage)):
            for key in ("loss", "grad_norm", "eval_loss"):
                assert found[key] == pytest.approx(wanted[key], abs=1e-4, rel=0), key


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of numbers with labels; those of one microbatch have none."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(5, 3, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, 4, (5,), generator=generator)
        return {"x": x, "labels": torch.full_like(labels, -100) if index in (2, 3) else labels}


class MeanLoss(nn.Module):
    """A linear layer, whose loss is a mean over its labels, whatever ``num_items_in_batch`` is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 4, dtype=torch.float64)

    def forward(self, x: Tensor, labels: Tensor, **others: Any) -> dict[str, Tensor]:
        logits = self.linear(x)
        return {"loss": F.cross_entropy(logits.flatten(0, -2), labels.flatten()), "logits": logits}


def stepped(out: str, replicas: int) -> Tensor:
    """The weight after a step of four microbatches, one of which has a loss of NaN, which is left out."""
    options: dict[str, Any] = {"optim": "sgd", "max_grad_norm": 0.0, "lr_scheduler_type": "constant", "max_steps": 1}
    options |= {"learning_rate": 0.1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4 // replicas}
    options |= {"train_sampling_strategy": "sequential", "save_strategy": "no", "report_to": "none"}
    model = MeanLoss()
    args = triax.TrainingArguments(out, triax={"nan_loss": "ignore"}, **options)
    triax.Trainer(model, args, train_dataset=Rows()).train()
    return model.linear.weight.detach()


def test_a_microbatch_with_a_nan_loss_is_left_out_of_the_step(ranks: Any, tmp_path: Path) -> None:
    """NaN is not equal to itself, but this does not show that the loss depends on ``num_items_in_batch``."""
    plain, rows = MeanLoss(), Rows()
    for first in (0, 4, 6):
        x, labels = (torch.stack([rows[first][key], rows[first + 1][key]]) for key in ("x", "labels"))
        (plain(x, labels)["loss"] / 4).backward()
    assert plain.linear.weight.grad is not None
    wanted = plain.linear.weight.detach() - 0.1 * plain.linear.weight.grad
    for found in ranks(2, stepped, str(tmp_path), 2):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def twice(out: str, replicas: int, config: Any) -> Any:
    """Result of a second train(), which continues with weights and moments, and a new schedule."""
    trainer = trainer_of("llama", out, replicas, config, max_steps=6, save_strategy="no", eval_strategy="no")
    trainer.train()
    first = logged(trainer)["loss"]
    trainer.train()
    return first, logged(trainer)["loss"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [0, 3])
def test_a_second_train_call_goes_on_as_transformers(ranks: Any, tmp_path: Path, stage: int) -> None:
    (wanted,) = ranks(1, twice, str(tmp_path), 1, None)
    for found in ranks(2, twice, str(tmp_path), 2, zero(stage)):
        assert found[0] == pytest.approx(wanted[0], abs=1e-4) and found[1] == pytest.approx(wanted[1], abs=1e-4)


def with_given_optimizer(out: str, replicas: int, config: Any, resume: str | None = None) -> Any:
    """An optimizer with two groups, and a schedule of schedules over it."""
    trainer = trainer_of("gpt2", out, replicas, config, max_steps=10, eval_strategy="no")
    named = list(trainer.model.named_parameters())
    matrices = [p for _, p in named if p.dim() > 1]
    others = [p for _, p in named if p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "lr": 1e-3}]
    trainer.optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9))
    kinds = torch.optim.lr_scheduler
    parts: list[Any] = [
        kinds.LinearLR(trainer.optimizer, 0.1, total_iters=4),
        kinds.ExponentialLR(trainer.optimizer, 0.8),
    ]
    trainer.lr_scheduler = kinds.SequentialLR(trainer.optimizer, parts, [4])
    trainer.train(resume_from_checkpoint=resume)
    return logged(trainer)


@pytest.mark.exhaustive
def test_a_given_optimizer_and_schedule_train_as_transformers(ranks: Any, tmp_path: Path) -> None:
    (wanted,) = ranks(1, with_given_optimizer, str(tmp_path / "plain"), 1, None)
    where = f"{tmp_path}/2/checkpoint-5"
    for count, resume in ((2, None), (1, where)):
        for found in ranks(count, with_given_optimizer, str(tmp_path / str(count)), count, zero(2), resume):
            for key in ("loss", "learning_rate", "grad_norm"):
                assert found[key] == pytest.approx(wanted[key], abs=1e-4, rel=0), key


class Stream(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Any:
        text = Text(44)
        return (text[index] for index in range(44))


def streaming_trainer(out: str, replicas: int, config: Any, **options: Any) -> Any:
    trainer = trainer_of("gpt2", out, replicas, config, max_steps=8, eval_strategy="no", save_strategy="no", **options)
    trainer.train_dataset = Stream()
    return trainer


def losses_of_stream(*args: Any, **options: Any) -> list[float]:
    trainer = streaming_trainer(*args, **options)
    trainer.train()
    return logged(trainer)["loss"]


@pytest.mark.exhaustive
def test_an_iterable_data_set_trains_as_on_one_process(ranks: Any, tmp_path: Path) -> None:
    (wanted,) = ranks(1, losses_of_stream, str(tmp_path), 1, None)
    shared = {"dispatch_batches": False}
    for data, tensor, options in ((2, 1, None), (2, 1, shared), (1, 2, shared), (2, 2, shared)):
        config = zero(1, tensor)
        for found in ranks(data * tensor, losses_of_stream, str(tmp_path), data, config, accelerator_config=options):
            assert found == pytest.approx(wanted, abs=1e-4)


def error_of_dispatched_stream(out: str) -> str:
    return error_text(streaming_trainer(out, 1, zero(1, 2)).train, ConfigError)


@pytest.mark.exhaustive
def test_dispatched_batches_are_refused_on_a_tensor_axis(ranks: Any, tmp_path: Path) -> None:
    for message in ranks(2, error_of_dispatched_stream, str(tmp_path)):
        assert "dispatch_batches" in message


def test_a_folder_of_weights_alone_is_not_resumed(tmp_path: Path) -> None:
    model_of("gpt2").save_pretrained(tmp_path / "checkpoint-5")
    (tmp_path / "checkpoint-5" / "trainer_state.json").write_text("{}")
    trainer = trainer_of("gpt2", str(tmp_path / "out"), 1, {})
    with pytest.raises(ConfigError, match=r"has neither a checkpoint of triax .* save_only_model"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))


def without_index(folder: Path) -> None:
    (folder / "global_step4" / "index.json").unlink()


def with_half_an_index(folder: Path) -> None:
    index = folder / "global_step4" / "index.json"
    index.write_bytes(index.read_bytes()[:100])


def without_latest(folder: Path) -> None:
    (folder / "latest").unlink()


def without_state(folder: Path) -> None:
    (folder / "trainer_state.json").unlink()


def with_half_a_state(folder: Path) -> None:
    (folder / "trainer_state.json").write_text('{"a":')


def with_a_deep_state(folder: Path) -> None:
    (folder / "trainer_state.json").write_text("[" * 10**6)


def with_a_file_of_another_folder(folder: Path) -> None:
    """transformers' own folder, whose index leads out of it."""
    shutil.rmtree(folder / "global_step4")
    (folder / "latest").unlink()
    (folder / "optimizer.pt").touch()
    (folder / "scheduler.pt").touch()
    index = {"weight_map": {"wte": "../checkpoint-2/model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def with_a_missing_file(folder: Path) -> None:
    with_a_file_of_another_folder(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"wte": "gone.safetensors"}}')


FAULTS = {
    without_index: "not a checkpoint",
    with_half_an_index: "index.json",
    without_latest: "neither a checkpoint of triax",
    without_state: "trainer_state.json cannot be read",
    with_half_a_state: "is damaged",
    with_a_deep_state: "nested too deeply",
    with_a_file_of_another_folder: "only files of its own folder are read",
    with_a_missing_file: "gone.safetensors is no file",
}


def test_the_trainer_resumes_from_the_newest_whole_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def trainer() -> Any:
        return trainer_of("gpt2", str(tmp_path / "run"), 1, {}, max_steps=4, save_steps=2, eval_strategy="no")

    (first := trainer()).train()
    shutil.copytree(tmp_path / "run", tmp_path / "kept")
    for damage, words in FAULTS.items():
        shutil.rmtree(tmp_path / "run")
        shutil.copytree(tmp_path / "kept", tmp_path / "run")
        damage(tmp_path / "run" / "checkpoint-4")
        with pytest.raises(ConfigError) as error:
            trainer().train(resume_from_checkpoint=f"{tmp_path}/run/checkpoint-4")
        assert words in str(error.value) and "checkpoint-2 is whole: give it" in str(error.value), damage
        caplog.clear()
        (again := trainer()).train(resume_from_checkpoint=True)
        assert words in caplog.text and "the run is resumed from" in caplog.text, damage
        assert logged(again)["loss"] == pytest.approx(logged(first)["loss"], abs=1e-6)
    shutil.rmtree(tmp_path / "run" / "checkpoint-2")
    without_state(tmp_path / "run" / "checkpoint-4")
    with pytest.raises(ConfigError, match="No other checkpoint there is whole"):
        trainer().train(resume_from_checkpoint=True)


def evaluated(out: str, config: Any) -> tuple[float, Any]:
    """Return loss and logits of a model that was not trained; by transformers' own Trainer if ``config`` is None."""
    trainer = trainer_of("llama", out, replicas_here(), config)
    loss = trainer.evaluate()["eval_loss"]
    return loss, trainer.predict(Text(6, 300)).predictions


def speeds(out: str, tensor: int) -> list[float]:
    trainer = trainer_of("gpt2", out, 1, zero(0, tensor))
    found, predicted = trainer.evaluate(), trainer.predict(Text(6, 300)).metrics
    metrics = ((found, "eval"), (predicted, "test"))
    return [each[f"{name}_steps_per_second"] * each[f"{name}_runtime"] for each, name in metrics]


def test_steps_per_second_of_an_evaluation_count_once(ranks: Any, tmp_path: Path) -> None:
    """Two tensor ranks of one replica are not counted as two replicas."""
    (wanted,) = ranks(1, speeds, str(tmp_path), 1)
    for found in ranks(2, speeds, str(tmp_path), 2):
        assert [round(steps) for steps in found] == [round(steps) for steps in wanted]


@pytest.mark.exhaustive
def test_evaluation_before_training_gives_transformers_loss(ranks: Any, tmp_path: Path) -> None:
    """A Llama in fp32, on two replicas: the loss on 16 rows, and the logits of 6 others."""
    ((wanted_loss, wanted_logits),) = ranks(1, evaluated, str(tmp_path), None)
    for stage in (0, 3):
        for loss, logits in ranks(2, evaluated, str(tmp_path), zero(stage)):
            assert loss == pytest.approx(wanted_loss, abs=1e-5)
            np.testing.assert_allclose(logits, wanted_logits, rtol=0, atol=1e-4)


def evaluated_first(out: str, replicas: int, config: Any, first: bool) -> list[float]:
    """Losses of training, behind an evaluation and an export or not."""
    trainer = trainer_of("gpt2", out, replicas, config, max_steps=3, eval_strategy="no", save_strategy="no")
    if first:
        trainer.evaluate()
        trainer.save_model(f"{out}/before")
    trainer.train()
    trainer.save_model(f"{out}/after")
    return logged(trainer)["loss"]


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.exhaustive) for stage in range(3)), 3])
def test_evaluation_before_training_changes_no_weight_and_loss(ranks: Any, tmp_path: Path, stage: int) -> None:
    """Neither the weights, which are whole in what is saved behind it, nor the training that follows."""
    (wanted,) = ranks(1, evaluated_first, str(tmp_path / "plain"), 1, None, False)
    for found in ranks(2, evaluated_first, str(tmp_path), 2, zero(stage), True):
        assert found == pytest.approx(wanted, abs=1e-4)
    start, saved = model_of("gpt2").state_dict(), weights(f"{tmp_path}/before")
    assert start.keys() == saved.keys() and all(torch.equal(saved[name], value) for name, value in start.items())
    after = weights(f"{tmp_path}/after")
    for name, value in weights(f"{tmp_path}/plain/after").items():
        assert torch.allclose(after[name], value, atol=2e-4), name


class Started(NamedTuple):
    seed: int  # of the rank's generator at its first step
    warnings: list[str]


def started(out: str, grid: dict[str, int], resume: str | None = None) -> Started:
    """Train three steps, after each of which a rank seeds its generator with 100 + its number."""
    import transformers

    seeds: list[int] = []

    class Watch(transformers.TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            seeds.append(torch.initial_seed())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            torch.manual_seed(100 + trainer.grid.rank)

    config = zero(1, grid.get("tensor", 1))
    trainer = trainer_of("gpt2", out, grid.get("data", 1), config, max_steps=3, save_steps=2, eval_strategy="no")
    trainer.add_callback(Watch())
    with triax_warnings() as warnings:
        trainer.train(resume_from_checkpoint=resume)
    return Started(seeds[0], [text for text in warnings if "generators" in text])


def test_generators_are_restored_on_the_grid_that_saved_them(ranks: Any, tmp_path: Path) -> None:
    """On two tensor ranks those of two replicas would drop other elements of the activations that both hold."""
    ranks(2, started, str(tmp_path / "first"), {"data": 2})
    saved = f"{tmp_path}/first/checkpoint-2"
    same_grid = ranks(2, started, str(tmp_path / "same"), {"data": 2}, saved)
    assert same_grid == [Started(seed=100, warnings=[]), Started(seed=101, warnings=[])]
    first, second = ranks(2, started, str(tmp_path / "other"), {"tensor": 2}, saved)
    assert first.seed == 42 and second == Started(seed=42, warnings=[])  # the default of TrainingArguments
    (warning,) = first.warnings
    assert "'data': 2" in warning and "'tensor': 2" in warning and "seed=42" in warning


@pytest.mark.parametrize(
    ("asked", "kind", "said"),
    [("cosine", "WarmupLR", True), ("cosine", "WarmupCosineLR", False), ("linear", "WarmupLR", False)],
)
def test_triax_warns_if_the_file_replaces_a_schedule(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, asked: str, kind: str, said: bool
) -> None:
    params = {"warmup_num_steps": "auto"} | ({} if kind == "WarmupLR" else {"total_num_steps": "auto"})
    config = {**zero(0), "scheduler": {"type": kind, "params": params}}
    trainer = trainer_of("gpt2", str(tmp_path), 1, config, lr_scheduler_type=asked, max_steps=1, save_strategy="no")
    trainer.train()
    texts = [record.getMessage() for record in caplog.records if "lr_scheduler_type" in record.getMessage()]
    assert len(texts) == said
    assert all(f"lr_scheduler_type={asked}" in text and kind in text for text in texts)


def seed_of_a_worker(out: str, config: Any) -> tuple[int, int]:
    """Index of this rank's replica, and the seed that a worker of its loader gets."""
    trainer = trainer_of("gpt2", out, 2, config, dataloader_num_workers=2)
    start = trainer.get_train_dataloader().worker_init_fn
    torch.manual_seed(7)  # as torch would, alike on every rank
    start(0)
    return trainer.grid.data.rank, torch.initial_seed()


def test_workers_of_tensor_ranks_are_seeded_alike(ranks: Any, tmp_path: Path) -> None:
    """Equal seeds let a collator that draws masks make the same batch on all ranks of a replica."""
    found = ranks(4, seed_of_a_worker, str(tmp_path), zero(1, 2))
    assert sorted(found) == [(0, 7), (0, 7), (1, 7 + 2), (1, 7 + 2)]


def noise_of_embeddings(
    out: str, config: Any, alpha: float | None, fresh: bool
) -> tuple[list[float], list[tuple[int, float]]]:
    """Return the losses, and the length of the rows and the largest noise of each microbatch."""
    import transformers

    noises: list[tuple[int, float]] = []

    def measure(embedding: Any, ids: Any, output: Tensor) -> None:
        if embedding.training:
            noises.append((output.shape[1], (output - embedding.forward(*ids)).abs().max().item()))

    class Watch(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 0:  # behind NEFTune's own hook
                trainer.model.get_input_embeddings().register_forward_hook(measure)

    options: dict[str, Any] = {"eval_strategy": "no", "save_strategy": "no", "neftune_noise_alpha": alpha}
    trainer = trainer_of("gpt2", out, 1, config, max_steps=2, **options)
    trainer.add_callback(Watch())
    if fresh:
        trainer.model_init = lambda: model_of("gpt2")
    trainer.train()
    return logged(trainer)["loss"], noises


def test_noise_on_embeddings_reaches_tensor_ranks(ranks: Any, tmp_path: Path) -> None:
    """The sharded embedding has NEFTune's noise, uniform in alpha / sqrt(length * width), with ``model_init`` too."""
    for alpha, fresh in ((None, False), (50.0, False), (50.0, True)):
        first, second = ranks(2, noise_of_embeddings, str(tmp_path), zero(0, 2), alpha, fresh)
        assert first == second and len(first[0]) == 2 and len(first[1]) == 2 * ACCUMULATION
        for length, noise in first[1]:
            assert noise == pytest.approx((alpha or 0) / math.sqrt(length * 32), rel=0.02)


def cycled(out: str, resume: str | None = None) -> list[tuple[float, float]]:
    """Rates and first betas of each step, of a schedule that writes both into an optimizer of one's own."""
    import transformers

    found: list[tuple[float, float]] = []

    class Watch(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:  # the engine has stepped
            group = trainer.engine.optimizer.param_groups[0]
            found.append((group["lr"], group["betas"][0]))

    trainer = trainer_of("gpt2", out, 1, zero(1), max_steps=5, save_steps=3, eval_strategy="no")
    trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-3)
    trainer.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(trainer.optimizer, 1e-2, total_steps=8)
    trainer.add_callback(Watch())
    trainer.train(resume_from_checkpoint=resume)
    return found


def test_a_resumed_schedule_continues_with_the_saved_betas(ranks: Any, tmp_path: Path) -> None:
    (wanted,) = ranks(1, cycled, str(tmp_path / "whole"))
    (found,) = ranks(1, cycled, str(tmp_path / "again"), f"{tmp_path}/whole/checkpoint-3")
    assert wanted[3][1] < 0.9 < wanted[0][1]  # not those that it begins with
    assert found == [pytest.approx(pair, rel=1e-12) for pair in wanted[3:]]


def run_example(out: str) -> str:
    sys.path.insert(0, str(ROOT / "examples"))
    options = {"output_dir": out, "text": ROOT / "grid", "max_steps": 6, "save_steps": 3, "logging_steps": 2}
    options |= {"layers": 1, "width": 16, "heads": 2, "disable_tqdm": True}
    said = io.StringIO()
    for more in ([], ["--resume", "--max_steps", "8"]):
        sys.argv = [
            "hf_trainer.py",
            *(str(word) for key, value in options.items() for word in (f"--{key}", value)),
            *more,
        ]
        with contextlib.redirect_stdout(said):
            runpy.run_path(str(ROOT / "examples" / "hf_trainer.py"), run_name="__main__")
    return said.getvalue()


def test_the_trainer_example_runs_and_resumes(ranks: Any, tmp_path: Path) -> None:
    """The example runs on one process and on two, and each run continues from its last checkpoint."""
    for count in (1, 2):
        out = str(tmp_path / str(count))
        first, *others = ranks(count, run_example, out, timeout=120)
        found = [float(loss) for loss in re.findall(r"held-out loss ([\d.]+) nats", first)]
        assert len(found) == 2 and 3 < found[1] < found[0] < 5.6
        assert not any("held-out" in said for said in others)
        assert weights(f"{out}/model").keys() and (Path(out) / "checkpoint-6" / "latest").is_file()
