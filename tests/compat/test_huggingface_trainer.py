"""triax.Trainer against transformers' own on one process: losses, checkpoints on other grids, exports, "auto"."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import pickle
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import Dataset
from typer.testing import CliRunner

import triax
from triax.base.errors import ConfigError
from triax.cli.main import app
from triax.compat.huggingface.auto_values import AutoValues, hidden_size

from paths import ROOT

_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_NO_DROPOUT = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": 53, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4} | _NO_DROPOUT | _NO_TOKENS,
    ),
    "llama": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "vocab_size": 61,
            "hidden_size": 32,
            "intermediate_size": 44,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32,
        }
        | _NO_TOKENS,
    ),
}
STEPS, BATCH, ACCUMULATION = 20, 4, 2  # the batch of all replicas


class Text(Dataset[dict[str, Tensor]]):
    """Rows with unlike numbers of labels that count: 44 of them are 5 steps of 2 microbatches, and one of 1."""

    def __init__(self, length: int = 44, first: int = 0) -> None:
        self.length, self.first = length, first

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.length:
            raise IndexError
        generator = torch.Generator().manual_seed(self.first + index)
        start = int(torch.randint(40, (), generator=generator))
        ids = (start + torch.arange(12) * (1 + index % 3)) % 53
        labels = ids.clone()
        labels[: 2 * (index % 5)] = -100
        return {"input_ids": ids, "labels": labels}


def model_of(case: str) -> Any:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config, model, sizes = CASES[case]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**sizes))


def trainer_of(
    case: str, out: str, replicas: int, config: Any = None, model: Any = None, data: Any = None, **options: Any
) -> Any:
    """Trainer of the same run on a number of replicas; transformers' own Trainer without a configuration."""
    import transformers

    model = model_of(case) if model is None else model
    common: dict[str, Any] = {
        "output_dir": out,
        "per_device_train_batch_size": BATCH // replicas,
        "per_device_eval_batch_size": BATCH // replicas,
        "gradient_accumulation_steps": ACCUMULATION,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "warmup_steps": 3,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "save_steps": 5,
        "report_to": "none",
        "disable_tqdm": True,
    } | options
    kinds: tuple[Any, Any] = (transformers.Trainer, transformers.TrainingArguments)
    if config is None:
        common["use_cpu"] = True
    else:
        common["triax"] = config
        kinds = (triax.Trainer, triax.TrainingArguments)
    train, held_out = data or (Text(), Text(16, 100))
    trainer = kinds[0](model=model, args=kinds[1](**common), train_dataset=train, eval_dataset=held_out)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def replicas_here() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def told(trainer: Any) -> dict[str, list[float]]:
    """Return the logged values: losses, norms, rates, and losses of evaluations."""
    history = trainer.state.log_history
    keys = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return {key: [row[key] for row in history if key in row] for key in keys}


def run(
    case: str, out: str, replicas: int, config: Any = None, resume: str | None = None, **options: Any
) -> dict[str, Any]:
    """Train, predict, and say what happened."""
    trainer = trainer_of(case, out, replicas, config, **options)
    trainer.train(resume_from_checkpoint=resume)
    found: dict[str, Any] = told(trainer)
    found["predicted"] = trainer.predict(Text(7, 200)).predictions
    found["best"] = trainer.state.best_model_checkpoint
    trainer.save_model(f"{out}/last")
    return found


def near(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Compare whole histories; the first part of a resumed run's history is that of the first run."""
    for key, count in (("loss", STEPS), ("grad_norm", STEPS), ("learning_rate", STEPS), ("eval_loss", STEPS // 5)):
        assert len(found[key]) == len(wanted[key]) == count
        assert found[key] == pytest.approx(wanted[key], abs=1e-4, rel=0), key
    assert found["predicted"].shape == wanted["predicted"].shape and len(found["predicted"]) == 7
    assert abs(found["predicted"] - wanted["predicted"]).max() < 1e-3


@pytest.fixture(scope="module")
def plain(ranks: Any, tmp_path_factory: Any) -> Any:
    """transformers' own run on one process, once a case."""
    known: dict[str, dict[str, Any]] = {}

    def of(case: str) -> dict[str, Any]:
        if case not in known:
            (known[case],) = ranks(1, run, case, str(tmp_path_factory.mktemp(case)), 1)
        return known[case]

    return of


def zero(stage: int, tensor: int = 1) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"autotp_size": tensor},
    }


def weights(folder: str) -> dict[str, Tensor]:
    """Read a folder as transformers does."""
    import transformers

    reader: Any = transformers.AutoModelForCausalLM
    model, info = reader.from_pretrained(folder, output_loading_info=True)
    assert not any(info.get(key) for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    return dict(model.state_dict())


def check(
    ranks: Any, plain: Any, tmp_path: Path, case: str, grid: tuple[int, int], stage: int, then: tuple[int, int, int]
) -> None:
    """A run on one grid, and the second half of it on another one and in another stage."""
    wanted = plain(case)
    data, tensor = grid
    out = str(tmp_path / "out")
    for found in ranks(data * tensor, run, case, out, data, zero(stage, tensor), timeout=240):
        near(found, wanted)
    first = weights(f"{out}/last")
    data, tensor, stage = then
    again = str(tmp_path / "again")
    where = f"{out}/checkpoint-10"
    for found in ranks(data * tensor, run, case, again, data, zero(stage, tensor), resume=where, timeout=240):
        near(found, wanted)
    for name, value in weights(f"{again}/last").items():
        assert torch.allclose(value, first[name], atol=2e-4), name
    exported = weights(f"{out}/checkpoint-20")  # nothing happened since
    assert all(torch.equal(exported[name], value) for name, value in first.items())


def adapted(out: str, replicas: int, config: Any = None) -> list[float]:
    """Train LoRA's adapters and a whole output layer with PEFT, and save them."""
    import peft

    torch.manual_seed(1)
    options: Any = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    model = peft.get_peft_model(model_of("llama"), peft.LoraConfig(**options))
    trainer = trainer_of("llama", out, replicas, config, model, max_steps=4, save_steps=4, eval_strategy="no")
    trainer.train()
    return told(trainer)["loss"]


def test_modules_that_peft_trains_whole_are_saved_in_stage_3(ranks: Any, tmp_path: Path) -> None:
    (wanted,) = ranks(1, adapted, str(tmp_path / "plain"), 1)
    for losses in ranks(2, adapted, str(tmp_path / "sharded"), 2, zero(3), timeout=120):
        assert losses == pytest.approx(wanted, abs=1e-4, rel=0)
    file = "checkpoint-4/adapter_model.safetensors"
    plain, sharded = (load_file(tmp_path / name / file) for name in ("plain", "sharded"))
    assert "base_model.model.lm_head.weight" in plain and plain.keys() == sharded.keys()
    for name, value in plain.items():
        assert torch.allclose(sharded[name], value, atol=2e-4), name


def test_two_replicas_in_stage_3_then_one_process(ranks: Any, plain: Any, tmp_path: Path) -> None:
    check(ranks, plain, tmp_path, "gpt2", (2, 1), 3, (1, 1, 1))


def test_two_tensor_ranks_then_two_replicas(ranks: Any, plain: Any, tmp_path: Path) -> None:
    check(ranks, plain, tmp_path, "llama", (1, 2), 1, (2, 1, 2))


SWEEP = [
    (case, grid, stage)
    for case in CASES
    for grid in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4))
    for stage in range(4)
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("case", "grid", "stage"), SWEEP, ids=str)
def test_every_grid_and_stage(
    ranks: Any, plain: Any, tmp_path: Path, case: str, grid: tuple[int, int], stage: int
) -> None:
    """Each run resumes in the next stage, with other numbers of replicas and tensor ranks."""
    others = [other for other in ((1, 1), (2, 1), (2, 2), (1, 2), (4, 1)) if other != grid]
    data, tensor = others[(stage + len(case)) % len(others)]
    check(ranks, plain, tmp_path, case, grid, stage, (data, tensor, (stage + 1) % 4))


# ----------------------------------------------------------------------------------- best, precision, and others


def best(out: str, config: Any) -> dict[str, Any]:
    """The best shall be that of the largest loss, which is not the last one; one more checkpoint is kept."""
    options = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    trainer = trainer_of("gpt2", out, replicas_here(), config, save_total_limit=2, max_steps=15, **options)
    trainer.train()
    trainer.save_model(f"{out}/last")
    losses = told(trainer)["eval_loss"]
    again = trainer.evaluate()["eval_loss"]
    trainer.accelerator.wait_for_everyone()
    return {"losses": losses, "again": again, "best": trainer.state.best_model_checkpoint, "kept": os.listdir(out)}


def test_the_best_model_comes_back(ranks: Any, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    first, second = ranks(2, best, out, zero(3), timeout=120)
    assert first["losses"] == second["losses"] and first["best"] == second["best"]
    losses = first["losses"]
    at = losses.index(max(losses))
    assert first["best"].endswith(f"checkpoint-{5 * (at + 1)}") and at < 2  # not the last one
    assert first["again"] == pytest.approx(losses[at], abs=1e-6)
    kept = [name for name in first["kept"] if name.startswith("checkpoint-")]
    assert sorted(kept) == sorted({Path(first["best"]).name, "checkpoint-15"})
    assert weights(first["best"]).keys() == weights(f"{out}/last").keys()
    for name, value in weights(first["best"]).items():
        assert torch.equal(value, weights(f"{out}/last")[name]), name


def narrow(out: str, key: str, stage: int) -> Any:
    section: dict[str, Any] = {"enabled": "auto"} | ({"initial_scale_power": 20} if key == "fp16" else {})
    config = {"zero_optimization": {"stage": stage}, key: section}
    trainer = trainer_of("gpt2", out, replicas_here(), config, **{key: True})
    trainer.train()
    trainer.save_model(f"{out}/last")
    return told(trainer), {str(p.dtype) for p in trainer.model.parameters()}, trainer.engine.skipped_steps


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("key", "stage"), [("bf16", 0), ("bf16", 3), ("fp16", 1), ("fp16", 2)])
def test_precision(ranks: Any, plain: Any, tmp_path: Path, key: str, stage: int, count: int) -> None:
    out = str(tmp_path / "out")
    for found, kinds, skipped in ranks(count, narrow, out, key, stage, timeout=120):
        assert kinds == {f"torch.{'bfloat16' if key == 'bf16' else 'float16'}"}
        assert (key == "fp16") == (skipped > 0)  # the scale starts too high, and rates wait with the weights
        assert len({*found["learning_rate"]}) == STEPS - skipped
        if key == "bf16":
            assert found["loss"] == pytest.approx(plain("gpt2")["loss"], rel=0.02)
        assert found["loss"][-1] < 0.9 * found["loss"][0]
    stored = {tensor.dtype for tensor in weights(f"{out}/last").values()}
    assert stored == {torch.bfloat16 if key == "bf16" else torch.float16}


def recomputed(case: str, stage: int, section: dict[str, Any], itself: bool) -> tuple[dict[str, Tensor], int, int]:
    """Gradients of a model in a plain loop, elements that its forward pass saves, and calls of its first block."""
    model = model_of(case).double()
    if itself:
        model.activation_checkpointing_enable()
    calls, saved = 0, 0
    block = (model.transformer.h if case == "gpt2" else model.model.layers)[0]
    inner = block.mlp.forward

    def counted(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return inner(x)

    def pack(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += tensor.numel()
        return tensor

    block.mlp.forward = counted
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    config |= {"zero_optimization": {"stage": stage}, "activation_checkpointing": section}
    engine, *_ = triax.initialize(model=model, config=config)
    rows = [Text()[i] for i in range(4)]
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    torch.manual_seed(3)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
    return {name: g.clone() for name, g in engine.gather("gradients").items()}, saved, calls


@pytest.mark.parametrize(("case", "stage"), [("gpt2", 1), ("llama", 3)])
def test_activation_checkpointing_in_a_plain_loop(ranks: Any, case: str, stage: int) -> None:
    """The section did nothing. Blocks that checkpoint by themselves are not recomputed twice."""
    ((wanted, most, once),) = ranks(1, recomputed, case, stage, {}, False)
    for section, itself in (({"enabled": True}, False), ({"enabled": True}, True), ({}, True)):
        for found, saved, calls in ranks(2, recomputed, case, stage, section, itself):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
            assert once == 1 and calls == 2 and saved < 0.6 * most, (section, itself, calls, saved, most)


OPTIONS: list[dict[str, Any]] = [
    {"label_smoothing_factor": 0.1},
    {"activation_checkpointing": True},
    {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "threshold": 1.0}},
    {"lr_scheduler_type": "cosine", "warmup_steps": 0.2, "max_grad_norm": 0.0},
    {"optim": "sgd", "learning_rate": 0.1, "train_sampling_strategy": "sequential"},
    {"train_sampling_strategy": "group_by_length", "include_num_input_tokens_seen": "all"},
    {"neftune_noise_alpha": None, "dataloader_drop_last": True, "gradient_accumulation_steps": 3},
]


def with_options(out: str, replicas: int, config: Any, options: dict[str, Any]) -> dict[str, Any]:
    trainer = trainer_of("gpt2", out, replicas, config, **{"max_steps": 14, "save_strategy": "no"} | options)
    trainer.train()
    return {**told(trainer), "tokens": trainer.state.num_input_tokens_seen, "flos": trainer.state.total_flos}


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
@pytest.mark.parametrize(("grid", "stage"), [((2, 1), 3), ((1, 2), 0), ((2, 2), 2)], ids=str)
def test_other_arguments_act_as_ever(
    ranks: Any, tmp_path: Path, options: dict[str, Any], grid: tuple[int, int], stage: int
) -> None:
    (wanted,) = ranks(1, with_options, str(tmp_path / "plain"), 1, None, options)
    data, tensor = grid
    for found in ranks(data * tensor, with_options, str(tmp_path), data, zero(stage, tensor), options, timeout=120):
        for key in (
            "loss",
            "learning_rate",
            "eval_loss",
            *(["grad_norm"] if options.get("max_grad_norm", 1.0) else []),
        ):
            assert found[key] == pytest.approx(wanted[key], abs=1e-4, rel=0), key
        assert found["tokens"] == wanted["tokens"]
        assert found["flos"] == pytest.approx(wanted["flos"], rel=1e-9)


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
    return told(trainer)


def test_a_loss_that_ignores_the_number_of_items(ranks: Any, tmp_path: Path) -> None:
    """transformers' DDP multiplies such a loss by the replicas, and does not divide it by the microbatches."""
    (wanted,) = ranks(1, classified, str(tmp_path), 1, 1, None)
    for count, accumulation, stage in ((2, 2, 3), (1, 4, 0)):
        for found in ranks(count, classified, str(tmp_path), count, accumulation, zero(stage)):
            for key in ("loss", "grad_norm", "eval_loss"):
                assert found[key] == pytest.approx(wanted[key], abs=1e-4, rel=0), key


def twice(out: str, replicas: int, config: Any) -> Any:
    """Result of a second train(), which continues with weights and moments, and a new schedule."""
    trainer = trainer_of("llama", out, replicas, config, max_steps=6, save_strategy="no", eval_strategy="no")
    trainer.train()
    first = told(trainer)["loss"]
    trainer.train()
    return first, told(trainer)["loss"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [0, 3])
def test_training_twice(ranks: Any, tmp_path: Path, stage: int) -> None:
    (wanted,) = ranks(1, twice, str(tmp_path), 1, None)
    for found in ranks(2, twice, str(tmp_path), 2, zero(stage)):
        assert found[0] == pytest.approx(wanted[0], abs=1e-4) and found[1] == pytest.approx(wanted[1], abs=1e-4)


def ones_own(out: str, replicas: int, config: Any, resume: str | None = None) -> Any:
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
    return told(trainer)


@pytest.mark.exhaustive
def test_an_optimizer_and_a_schedule_of_ones_own(ranks: Any, tmp_path: Path) -> None:
    (wanted,) = ranks(1, ones_own, str(tmp_path / "plain"), 1, None)
    where = f"{tmp_path}/2/checkpoint-5"
    for count, resume in ((2, None), (1, where)):
        for found in ranks(count, ones_own, str(tmp_path / str(count)), count, zero(2), resume):
            for key in ("loss", "learning_rate", "grad_norm"):
                assert found[key] == pytest.approx(wanted[key], abs=1e-4, rel=0), key


class Stream(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Any:
        text = Text(44)
        return (text[index] for index in range(44))


def streamed(out: str, replicas: int, config: Any, **options: Any) -> Any:
    trainer = trainer_of("gpt2", out, replicas, config, max_steps=8, eval_strategy="no", save_strategy="no", **options)
    trainer.train_dataset = Stream()
    if options.get("accelerator_config") is None and config is not None and trainer.grid.tensor.size > 1:
        with pytest.raises(ConfigError, match="dispatch_batches"):
            trainer.train()
        return None
    trainer.train()
    return told(trainer)["loss"]


@pytest.mark.exhaustive
def test_a_stream(ranks: Any, tmp_path: Path) -> None:
    (wanted,) = ranks(1, streamed, str(tmp_path), 1, None)
    assert ranks(2, streamed, str(tmp_path), 1, zero(1, 2)) == [None, None]
    shared = {"dispatch_batches": False}
    for data, tensor, options in ((2, 1, None), (2, 1, shared), (1, 2, shared), (2, 2, shared)):
        config = zero(1, tensor)
        for found in ranks(data * tensor, streamed, str(tmp_path), data, config, accelerator_config=options):
            assert found == pytest.approx(wanted, abs=1e-4)


CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
            "warmup_type": "linear",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
}


def by_the_configuration(out: str) -> dict[str, Any]:
    """The optimizer and the schedule are the configuration's; rates are of the step that was made."""
    trainer = trainer_of("gpt2", out, replicas_here(), CONFIG, max_steps=6, save_steps=3)
    trainer.train()
    found = told(trainer)
    resumed = trainer_of("gpt2", out, replicas_here(), CONFIG, max_steps=6, save_steps=3)
    resumed.train(resume_from_checkpoint=f"{out}/checkpoint-3")
    return {"found": found, "again": told(resumed), "scheduler": type(trainer.lr_scheduler).__name__}


def test_optimizer_and_schedule_of_the_configuration(ranks: Any, tmp_path: Path) -> None:
    (result,) = ranks(1, by_the_configuration, str(tmp_path / "out"), timeout=120)
    assert result["scheduler"] == "WarmupDecayLR"
    rate, warm, total = 1e-2, 3, 6
    # DeepSpeed's schedule is at its beginning in the first step, and in the second.
    wanted = [0.0] + [rate * (k / warm if k < warm else (total - k) / (total - warm)) for k in range(5)]
    assert result["found"]["learning_rate"] == pytest.approx(wanted, rel=1e-9)
    assert result["again"]["learning_rate"] == pytest.approx(wanted, rel=1e-9)  # the first three are the first run's
    assert result["again"]["loss"] == pytest.approx(result["found"]["loss"], abs=1e-6)


# --------------------------------------------------------------------------------------- the configuration


class Arguments:
    """The part of TrainingArguments that ``AutoValues`` reads. Formulas are those of Hugging Face's documentation."""

    per_device_train_batch_size, gradient_accumulation_steps = 3, 5
    max_grad_norm, learning_rate, weight_decay, adam_epsilon = 0.7, 2e-4, 0.01, 1e-7
    adam_beta1, adam_beta2, fp16, bf16, seed = 0.8, 0.95, False, True, 7

    def get_warmup_steps(self, steps: int) -> int:
        return steps // 10


def autos(section: dict[str, Any], prefix: str = "") -> set[str]:
    """The dotted keys whose value is "auto"."""
    found = {f"{prefix}{key}" for key, value in section.items() if value == "auto"}
    inner = ((key, value) for key, value in section.items() if isinstance(value, dict))
    return found.union(*(autos(value, f"{prefix}{key}.") for key, value in inner))


def test_the_command_config_explains_what_a_trainer_fills_in(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONFIG))
    done = CliRunner().invoke(app, ["config", str(path), "--data", "2"])
    assert done.exit_code == 0, done.exception
    lines = dict(re.findall(r"^triax:   (\S+) = (.*)$", done.stderr, re.MULTILINE))
    added = {"seed", "fp16.enabled", "bf16.enabled"}  # not in the file: the arguments have them
    assert autos(CONFIG) | added == lines.keys() == autos(json.loads(done.stdout))
    assert lines["optimizer.params.lr"] == "learning_rate" and lines["gradient_clipping"] == "max_grad_norm"
    # What is named are arguments of the Trainer's, or said in words.
    named = {word for text in lines.values() for word in re.findall(r"[a-z]+_[a-z0-9_]+", text)} - {"hidden_size"}
    assert named and all(hasattr(TrainingArguments, word) for word in named)
    # Errors are errors still, with their own keys.
    path.write_text(json.dumps({**CONFIG, "optimzer": {}}))
    refused = CliRunner().invoke(app, ["config", str(path)]).exception
    assert isinstance(refused, ConfigError) and "optimizer" in str(refused)


def test_auto_values_follow_hugging_faces_formulas() -> None:
    values = AutoValues(CONFIG)
    values.from_arguments(Arguments(), replicas=4)
    found = values.from_run(Arguments(), hidden_size=96, steps=200)
    assert found == {
        "train_batch_size": 3 * 5 * 4,
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 5,
        "gradient_clipping": 0.7,
        "fp16": {"enabled": False},
        "bf16": {"enabled": True},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 2e-4, "betas": [0.8, 0.95], "eps": 1e-7, "weight_decay": 0.01},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": 0,
                "warmup_max_lr": 2e-4,
                "warmup_num_steps": 20,
                "total_num_steps": 200,
                "warmup_type": "linear",
            },
        },
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 96 * 96,
            "stage3_prefetch_bucket_size": int(0.9 * 96 * 96),
            "stage3_param_persistence_threshold": 10 * 96,
        },
        "seed": 7,
    }
    assert CONFIG["train_batch_size"] == "auto"  # the caller's is as it was
    assert values.from_run(Arguments(), 96, steps=5)["scheduler"]["params"]["warmup_num_steps"] == 1  # at least
    alone = values.from_run(Arguments(), None, steps=None)  # evaluation: no width is needed, and nothing is sharded
    assert not {"optimizer", "scheduler", "bf16"} & alone.keys() and alone["zero_optimization"] == {"stage": 0}
    second = AutoValues({"zero_optimization": {**CONFIG["zero_optimization"], "stage": 2}})  # type: ignore[dict-item]
    second.from_arguments(Arguments(), 1)
    assert second.from_run(Arguments(), 8, 1)["zero_optimization"]["stage3_prefetch_bucket_size"] == "auto"


def test_what_hugging_faces_own_code_fills_in() -> None:
    """Against transformers' integration itself, which needs no DeepSpeed for this much."""
    from types import SimpleNamespace

    from transformers.integrations import deepspeed as theirs

    class Config(theirs.HfTrainerDeepSpeedConfig):
        def __init__(self, config: dict[str, Any]) -> None:
            self.config, self._dtype, self.mismatches = config, None, []

        def find_config_node(self, key: str) -> Any:
            *sections, name = key.split(".")
            node: Any = self.config
            for section in sections:
                node = node.get(section)
                if node is None:
                    return None, name
            return node, name

        def get_value(self, key: str, default: Any = None) -> Any:
            node, name = self.find_config_node(key)
            return default if node is None else node.get(name, default)

        def is_true(self, key: str) -> bool:
            return bool(self.get_value(key))

        def is_zero3(self) -> bool:
            return self.get_value("zero_optimization.stage") == 3

    class Theirs(Arguments):
        # The latter three are asked for there, and refused here.
        world_size, save_on_each_node, fp16_full_eval, bf16_full_eval = 4, False, False, False

    reference = Config(json.loads(json.dumps(CONFIG)))
    reference.trainer_config_process(Theirs())
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=96))
    reference.trainer_config_finalize(Theirs(), model, 123)
    values = AutoValues(CONFIG)
    values.from_arguments(Theirs(), replicas=4)
    found = values.from_run(Theirs(), 96, 123)
    found.pop("seed")
    assert found == reference.config


def test_arguments_that_changed_are_filled_in_anew() -> None:
    class Later(Arguments):
        learning_rate, max_grad_norm, weight_decay, adam_beta2 = 1e-3, 0.3, 0.2, 0.9

    values = AutoValues(CONFIG)
    values.from_arguments(Arguments(), replicas=4)
    values.from_arguments(Later(), replicas=4)
    found = values.from_run(Later(), 96, 200)
    params = {"lr": 1e-3, "betas": [0.8, 0.9], "eps": 1e-7, "weight_decay": 0.2}
    assert found["optimizer"]["params"] == params and found["gradient_clipping"] == 0.3
    assert found["scheduler"]["params"]["warmup_max_lr"] == 1e-3
    written = AutoValues({"gradient_clipping": 0.7})  # it stays, and no longer is what the arguments say
    written.from_arguments(Arguments(), 1)
    written.from_arguments(Later(), 1)
    with pytest.raises(ConfigError, match=r"gradient_clipping is 0\.7; max_grad_norm is 0\.3"):
        written.from_run(Later(), 96, 200)


def test_mismatches_are_told_together() -> None:
    config = json.loads(json.dumps(CONFIG))
    config["train_batch_size"] = 61
    config["optimizer"]["params"]["lr"] = 1e-3
    config["bf16"]["enabled"] = False
    config["scheduler"]["params"]["total_num_steps"] = 7
    values = AutoValues(config)
    values.from_arguments(Arguments(), replicas=4)
    with pytest.raises(ConfigError) as error:
        values.from_run(Arguments(), 96, 200)
    told = str(error.value)
    for line in (
        "train_batch_size is 61; 4 replicas * 3 * 5 is 60",
        "optimizer.params.lr is 0.001; learning_rate is 0.0002",
        "bf16.enabled is false; bf16 is true",
        "scheduler.params.total_num_steps is 7; the number of training steps is 200",
    ):
        assert f"- {line}\n" in told
    assert told.count("\n- ") == 4


def test_what_is_absent_comes_from_the_arguments() -> None:
    values = AutoValues({})
    values.from_arguments(Arguments(), replicas=2)
    found = values.from_run(Arguments(), None, 10)
    assert found["gradient_clipping"] == 0.7 and found["bf16"] == {"enabled": True} and found["seed"] == 7
    assert found["train_micro_batch_size_per_gpu"] == 3 and found["gradient_accumulation_steps"] == 5


def test_widths() -> None:
    from types import SimpleNamespace as Of

    assert hidden_size(Of(hidden_size=8)) == 8 and hidden_size(Of(hidden_sizes=[4, 16])) == 16
    assert hidden_size(Of(text_config=Of(hidden_size=5))) == 5
    assert hidden_size(None) is None and hidden_size(Of(text_config=Of(hidden_sizes=[3, 2]))) == 3
    values = AutoValues({"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}})
    values.from_arguments(Arguments(), 1)
    with pytest.raises(ConfigError, match=r"zero_optimization\.reduce_bucket_size: .* hidden_size"):
        values.from_run(Arguments(), None, 1)


def test_errors(tmp_path: Path) -> None:
    import transformers

    out = str(tmp_path)
    for options, complaint in (
        ({"triax": {}, "deepspeed": {}}, "names of one configuration"),
        ({"triax": str(tmp_path / "none.json")}, "cannot be read"),
        ({"triax": {"tensor_parallel": {"autotp_size": "2"}}}, "autotp_size: give a whole number"),
        ({"fsdp": True}, "fsdp=True"),
        ({"torch_compile": True}, "torch_compile=True"),
        ({"torch_compile_backend": "inductor"}, "torch_compile_backend='inductor'.*leave it out"),
        ({"torch_compile_mode": "default"}, "torch_compile_mode='default'.*leave it out"),
        ({"save_on_each_node": True}, "save_on_each_node=True is not supported, because rank 0 alone"),
        ({"use_liger_kernel": True, "triax": zero(3)}, "with zero_optimization.stage 3: its loss reads the head"),
        ({"use_liger_kernel": True, "triax": zero(1, 2)}, "with 2 tensor ranks: its loss reads the head"),
        ({"bf16_full_eval": True}, "pass bf16=True"),
        ({"auto_find_batch_size": True}, "per_device_train_batch_size"),
        ({"save_only_model": True, "load_best_model_at_end": True}, "save_only_model"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            triax.TrainingArguments(out, **options)
    with pytest.raises(TypeError, match=r"pass triax\.TrainingArguments"):
        triax.Trainer(model=model_of("gpt2"), args=transformers.TrainingArguments(out, use_cpu=True))
    values = AutoValues({"checkpoint": {"dir": "x"}})
    values.from_arguments(Arguments(), 1)
    with pytest.raises(ConfigError, match=r"checkpoint.dir has no effect here.*output_dir"):
        values.from_run(Arguments(), 8, 1)


def test_arguments_are_transformers_own_and_travel(tmp_path: Path) -> None:
    """deepspeed= is taken for triax=; JSON and files too; a copy of the arguments knows its grid."""
    import transformers

    file = tmp_path / "ds_config.json"
    file.write_text('{"zero_optimization": {"stage": 2}, // as in DeepSpeed\n "gradient_clipping": "auto",}')
    for given in ({"deepspeed": str(file)}, {"triax": str(file)}, {"triax": '{"zero_optimization": {"stage": 2}}'}):
        args = triax.TrainingArguments(str(tmp_path), report_to="none", **given)  # type: ignore[arg-type]
        assert isinstance(args, transformers.TrainingArguments) and args.deepspeed is None
        assert args.auto_values.config["zero_optimization"] == {"stage": 2}
        assert args.auto_values.config["gradient_clipping"] == args.max_grad_norm
    kind: Any = triax.TrainingArguments
    (parsed,) = transformers.HfArgumentParser(kind).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--deepspeed", str(file), "--report_to", "none"]
    )
    assert parsed.auto_values.config["zero_optimization"] == {"stage": 2} and parsed.triax == str(file)
    copied = pickle.loads(pickle.dumps(parsed))
    assert copied._grid is None and copied.grid.size == 1


def test_another_trainers_checkpoint_is_refused(tmp_path: Path) -> None:
    model_of("gpt2").save_pretrained(tmp_path / "checkpoint-5")
    (tmp_path / "checkpoint-5" / "trainer_state.json").write_text("{}")
    trainer = trainer_of("gpt2", str(tmp_path / "out"), 1, {})
    with pytest.raises(ConfigError, match="has no checkpoint of triax"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))


def evaluated(out: str, config: Any) -> tuple[float, Any]:
    trainer = trainer_of("llama", out, replicas_here(), config)
    loss = trainer.evaluate()["eval_loss"]
    return loss, trainer.predict(Text(6, 300)).predictions


def speeds(out: str, tensor: int) -> list[float]:
    trainer = trainer_of("gpt2", out, 1, zero(0, tensor))
    found, predicted = trainer.evaluate(), trainer.predict(Text(6, 300)).metrics
    metrics = ((found, "eval"), (predicted, "test"))
    return [each[f"{name}_steps_per_second"] * each[f"{name}_runtime"] for each, name in metrics]


def test_steps_per_second_of_an_evaluation_count_once(ranks: Any, tmp_path: Path) -> None:
    """Tensor ranks counted as replicas: two of them halved the number."""
    (wanted,) = ranks(1, speeds, str(tmp_path), 1)
    for found in ranks(2, speeds, str(tmp_path), 2):
        assert [round(steps) for steps in found] == [round(steps) for steps in wanted]


@pytest.mark.exhaustive
def test_evaluation_without_training(ranks: Any, tmp_path: Path) -> None:
    ((loss, logits),) = ranks(1, evaluated, str(tmp_path), None)
    for stage in (0, 3):
        for mine, theirs in ranks(2, evaluated, str(tmp_path), zero(stage)):
            assert mine == pytest.approx(loss, abs=1e-5) and abs(theirs - logits).max() < 1e-4


def evaluated_first(out: str, replicas: int, config: Any, first: bool) -> list[float]:
    """Losses of training, behind an evaluation and an export or not."""
    trainer = trainer_of("gpt2", out, replicas, config, max_steps=3, eval_strategy="no", save_strategy="no")
    if first:
        trainer.evaluate()
        trainer.save_model(f"{out}/before")
    trainer.train()
    trainer.save_model(f"{out}/after")
    return told(trainer)["loss"]


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.exhaustive) for stage in range(3)), 3])
def test_evaluation_first_changes_nothing(ranks: Any, tmp_path: Path, stage: int) -> None:
    """Neither the weights, which are whole in what is saved behind it, nor the training that follows."""
    (wanted,) = ranks(1, evaluated_first, str(tmp_path / "plain"), 1, None, False)
    for found in ranks(2, evaluated_first, str(tmp_path), 2, zero(stage), True):
        assert found == pytest.approx(wanted, abs=1e-4)
    start, saved = model_of("gpt2").state_dict(), weights(f"{tmp_path}/before")
    assert start.keys() == saved.keys() and all(torch.equal(saved[name], value) for name, value in start.items())
    after = weights(f"{tmp_path}/after")
    for name, value in weights(f"{tmp_path}/plain/after").items():
        assert torch.allclose(after[name], value, atol=2e-4), name


# ------------------------------------------------------------------------------- generators, workers, hooks


def generators(out: str, replicas: int, config: Any, resume: str | None = None) -> tuple[int, list[str]]:
    """Return the generator's seed at the first step, and the warnings; each rank seeds its generator differently."""
    import transformers

    seeds: list[int] = []
    heard: list[str] = []

    class Watch(transformers.TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            seeds.append(torch.initial_seed())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            torch.manual_seed(100 + trainer.grid.rank)

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    trainer = trainer_of("gpt2", out, replicas, config, max_steps=3, save_steps=2, eval_strategy="no")
    trainer.add_callback(Watch())
    ear, logger = Ear(logging.WARNING), logging.getLogger("triax")
    logger.addHandler(ear)
    try:
        trainer.train(resume_from_checkpoint=resume)
    finally:
        logger.removeHandler(ear)
    return seeds[0], [text for text in heard if "generators" in text]


def test_generators_come_back_on_the_same_grid_alone(ranks: Any, tmp_path: Path) -> None:
    """On as many ranks that mean something else, those of one replica would drop what they hold alike unlike."""
    first = str(tmp_path / "first")
    ranks(2, generators, first, 2, zero(1))
    where = f"{first}/checkpoint-2"
    assert ranks(2, generators, str(tmp_path / "same"), 2, zero(1), where) == [(100, []), (101, [])]
    (seed, heard), (other, silent) = ranks(2, generators, str(tmp_path / "other"), 1, zero(1, 2), where)
    assert seed == other == 42 and not silent  # TrainingArguments' own
    assert len(heard) == 1 and "'data': 2" in heard[0] and "'tensor': 2" in heard[0] and "seed=42" in heard[0]


@pytest.mark.parametrize(
    ("asked", "kind", "said"),
    [("cosine", "WarmupLR", True), ("cosine", "WarmupCosineLR", False), ("linear", "WarmupLR", False)],
)
def test_a_schedule_that_the_file_replaces_is_said(
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


def noisy(out: str, config: Any, alpha: float | None, fresh: bool) -> tuple[list[float], list[int]]:
    """Losses, and how many hooks the embedding has in each step."""
    import transformers

    hooks: list[int] = []

    class Watch(transformers.TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            hooks.append(len(trainer.model.get_input_embeddings()._forward_hooks))

    options: dict[str, Any] = {"eval_strategy": "no", "save_strategy": "no", "neftune_noise_alpha": alpha}
    trainer = trainer_of("gpt2", out, 1, config, max_steps=2, **options)
    trainer.add_callback(Watch())
    if fresh:
        trainer.model_init = lambda: model_of("gpt2")
    trainer.train()
    return told(trainer)["loss"], hooks


def test_noise_on_embeddings_reaches_tensor_ranks(ranks: Any, tmp_path: Path) -> None:
    """NEFTune's hook is on the module that runs, which is the sharded one; with ``model_init`` too."""
    (quiet, none), _ = ranks(2, noisy, str(tmp_path), zero(0, 2), None, False)
    assert none == [0, 0]
    for fresh in (False, True):
        (losses, hooks), (others, _) = ranks(2, noisy, str(tmp_path), zero(0, 2), 50.0, fresh)
        assert hooks == [1, 1] and losses == pytest.approx(others, abs=1e-6)
        assert all(abs(loud - still) > 1e-3 for loud, still in zip(losses, quiet, strict=True))


# ------------------------------------------------------------------------------------ arguments, used again


def test_two_trainers_of_the_same_arguments(tmp_path: Path) -> None:
    args = triax.TrainingArguments(str(tmp_path), gradient_accumulation_steps=2, report_to="none")
    for _ in range(2):
        trainer = triax.Trainer(model=model_of("gpt2"), args=args)
        assert trainer.args is args and args.gradient_accumulation_steps == 2


def changed(out: str) -> list[tuple[float, float]]:
    """Return the engine's clipping and weight decay, in two runs after changes of the arguments."""
    params = {"lr": "auto", "weight_decay": "auto"}
    config = {"gradient_clipping": "auto", "optimizer": {"type": "AdamW", "params": params}}
    trainer = trainer_of("gpt2", out, 1, config, max_steps=1, eval_strategy="no", save_strategy="no")
    trainer.args.weight_decay = 0.25
    found = []
    for norm in (0.3, 0.2):
        trainer.args.max_grad_norm = norm
        trainer.train()
        found.append((trainer.engine.gradient_clipping(), trainer.engine.optimizer.param_groups[0]["weight_decay"]))
    return found


def test_arguments_may_change_behind_the_trainer(ranks: Any, tmp_path: Path) -> None:
    (found,) = ranks(1, changed, str(tmp_path))
    assert found == [(0.3, 0.25), (0.2, 0.25)]


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


def test_a_resumed_schedule_has_its_betas(ranks: Any, tmp_path: Path) -> None:
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


def test_the_example_runs(ranks: Any, tmp_path: Path) -> None:
    """The example runs on one process and on two, and each run continues from its last checkpoint."""
    for count in (1, 2):
        out = str(tmp_path / str(count))
        first, *others = ranks(count, run_example, out, timeout=120)
        found = [float(loss) for loss in re.findall(r"held-out loss ([\d.]+) nats", first)]
        assert len(found) == 2 and 3 < found[1] < found[0] < 5.6
        assert not any("held-out" in said for said in others)
        assert weights(f"{out}/model").keys() and (Path(out) / "checkpoint-6" / "latest").is_file()
