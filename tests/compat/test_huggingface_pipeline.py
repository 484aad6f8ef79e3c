"""triax.Trainer on a pipe axis against transformers' own Trainer on one process, in float64: losses, norms, folders."""

from __future__ import annotations

import functools
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import triax
from triax.base.errors import ConfigError

from support.command_line import output_of
from support.toy_answers import quiet, tokenizer
from support.trainer_in_float64 import (
    GPT2,
    OTHERS,
    Text,
    exact,
    exact_loss,
    exported,
    model_of,
    near,
    padded,
    run,
    trainer_of,
)
from support.trainer_jobs import steps_of

_BERT: dict[str, Any] = {"vocab_size": 53, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
_BERT |= {"num_attention_heads": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def two_by_two(stage: int, **sections: Any) -> dict[str, Any]:
    return {"grid": {"pipe": 2, "data": 2}, "triax": {"zero_optimization": {"stage": stage}, **sections}}


SHORT: dict[str, Any] = {"max_steps": 6, "eval_steps": 3, "save_steps": 3}  # with the short step at the end of an epoch


def test_two_stages_and_a_resume_on_one_train_as_transformers(ranks: Any, tmp_path: Path) -> None:
    """The checkpoint resumes without a pipe axis, and the folder is transformers' own."""
    (wanted,) = ranks(1, run, str(tmp_path / "plain"), 1, None, **SHORT)
    out = str(tmp_path / "out")
    for found in ranks(2, run, out, 1, {"grid": {"pipe": 2}}, timeout=120, **SHORT):
        near(found, wanted, 6)
    for name, value in exported(f"{out}/last").items():
        torch.testing.assert_close(value, wanted["weights"].get(name, value), rtol=0, atol=1e-9, msg=name)
    (found,) = ranks(1, run, str(tmp_path / "again"), 1, {"triax": {}}, resume=f"{out}/checkpoint-3", **SHORT)
    near(found, wanted, 6)
    shutil.copytree(f"{out}/checkpoint-3", f"{out}/checkpoint-3-copy")  # the output folder means its highest number
    for checkpoint, source in ((out, "checkpoint-6"), (f"{out}/checkpoint-3", "checkpoint-3")):
        output_of("checkpoint", "export", checkpoint, f"{out}/hf", "--format", "hf")
        written, saved = exported(f"{out}/hf"), exported(f"{out}/{source}")
        assert written.keys() == saved.keys()
        assert all(torch.equal(written[name], value) for name, value in saved.items())


@pytest.fixture(scope="module")
def plain(ranks: Any, tmp_path_factory: Any) -> Any:
    """transformers' own run on one process, once a case."""

    @functools.cache
    def of(case: str) -> Any:
        return ranks(1, run, str(tmp_path_factory.mktemp(case)), 1, None, case=case, timeout=240)[0]

    return of


# Each run is resumed on the next line's grid, in its stage and with its schedule.
GRIDS: list[tuple[int, dict[str, Any]]] = [
    (2, two_by_two(1)),
    (1, {"triax": {}}),
    (2, two_by_two(3, pipeline={"schedule": "zb-v"})),
    (2, {"triax": {"zero_optimization": {"stage": 2}}}),
    (2, two_by_two(2, pipeline={"schedule": "interleaved"})),
    (
        1,
        {
            "grid": {"pipe": 3},
            "triax": {"pipeline": {"stages": 3, "schedule": "gpipe"}},
            "activation_checkpointing": True,
        },
    ),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["gpt2", "llama"])
@pytest.mark.parametrize("first", range(len(GRIDS)))
def test_every_grid_with_pipe_trains_and_resumes_as_transformers(
    ranks: Any, plain: Any, tmp_path: Path, case: str, first: int
) -> None:
    """20 steps equal transformers' to 1e-10, and the second half of them again on another grid."""
    resume = None
    for number in (first, (first + 1) % len(GRIDS)):
        replicas, options = GRIDS[number]
        stages = options.get("grid", {}).get("pipe", 1)
        out = str(tmp_path / str(number))
        job = {"case": case, "resume": resume, "timeout": 240}
        for found in ranks(stages * replicas, run, out, replicas, options, **job):
            near(found, plain(case))
        for name, value in exported(f"{out}/last").items():
            torch.testing.assert_close(value, plain(case)["weights"].get(name, value), rtol=0, atol=1e-9, msg=name)
        resume = f"{out}/checkpoint-10"


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", OTHERS)
def test_two_stages_of_other_families_train_as_transformers(ranks: Any, tmp_path: Path, case: str) -> None:
    """Losses, norms and weights of a short run; without a configuration, ``run`` is that of transformers' Trainer."""
    (wanted,) = ranks(1, run, str(tmp_path / "plain"), 1, None, case=case, **SHORT)
    for found in ranks(2, run, str(tmp_path / "out"), 1, {"grid": {"pipe": 2}}, case=case, timeout=120, **SHORT):
        near(found, wanted, 6)


def bf16_run(out: str, stage: int) -> dict[str, Any]:
    """Evaluate and save a model; train another one, which ``model_init`` makes, to step 6, and evaluate the best.

    The best checkpoint is the one with the larger loss (``greater_is_better``), so that it is not the last one.
    """
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    common: dict[str, Any] = {**SHORT, **best, "bf16": True}
    trainer = trainer_of(out, 2, two_by_two(stage), **common)
    before = trainer.evaluate()["eval_loss"]
    trainer.save_model(f"{out}/before")
    trainer.model_init = lambda: model_of()
    trainer.train()
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    return {"before": before, "losses": losses, "best": trainer.evaluate()["eval_loss"], "dtype": trainer.model.dtype}


def loss_before_training(out: str) -> float:
    """Return the loss by transformers' own Trainer in float64."""
    model = model_of().double()  # drawn in fp32, as in the other run
    with exact():
        loss: float = trainer_of(out, 1, None, model=model, **SHORT).evaluate()["eval_loss"]
    return loss


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [0, 3])
def test_bf16_runs_evaluate_first_and_load_the_best_model(ranks: Any, tmp_path: Path, stage: int) -> None:
    out = str(tmp_path / "out")
    (wanted,) = ranks(1, loss_before_training, str(tmp_path / "plain"))
    for found in ranks(4, bf16_run, out, stage, timeout=240):
        assert found["dtype"] == torch.bfloat16
        assert found["before"] == pytest.approx(wanted, rel=2**-8)  # the rounding of bf16
        at_step_3, at_step_6 = found["losses"]
        assert at_step_6 < at_step_3 < found["before"]
        assert found["best"] == pytest.approx(at_step_3, abs=1e-6)
    start, saved = model_of().state_dict(), exported(f"{out}/before")
    assert all(torch.equal(saved[name].float(), value) for name, value in start.items())


class Loss(triax.Trainer):
    """A Trainer with a loss of its own."""

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        return super().compute_loss(*args, **options)


def refused(out: str, left: bool) -> list[str]:
    """Return the messages of what cannot run over two stages."""
    import transformers

    def complaint(make: Any) -> str:
        with pytest.raises((ConfigError, RuntimeError)) as error:
            make()
        return str(error.value)

    args = triax.TrainingArguments(out, grid={"pipe": 2}, report_to="none", max_steps=1, disable_tqdm=True)
    config = transformers.GPT2Config(**GPT2)
    found = [
        complaint(lambda: Loss(model_of(), args)),
        complaint(lambda: triax.Trainer(model_of(), args, compute_loss_func=exact_loss)),
        complaint(lambda: triax.Trainer(transformers.GPT2ForSequenceClassification(config), args)),
        complaint(lambda: triax.Trainer(transformers.BertForMaskedLM(transformers.BertConfig(**_BERT)), args)),
    ]
    rows = triax.Trainer(model_of(), args, train_dataset=Text(), data_collator=lambda rows: padded(rows, left=True))
    return [*found, complaint(rows.train)]


def test_options_that_stages_cannot_run_are_errors_at_once(ranks: Any, tmp_path: Path) -> None:
    out = str(tmp_path)
    for options, message in (
        ({"grid": {"pipe": 2}, "neftune_noise_alpha": 1.0}, "neftune_noise_alpha is not supported with pipe=2"),
        ({"grid": {"pipe": 2}, "label_smoothing_factor": 0.1}, "label_smoothing_factor is not supported with pipe=2"),
        ({"grid": {"context": 2}, "label_smoothing_factor": 0.1}, "with context=2, .* use a grid with context=1"),
        ({"triax": {"pipeline": {"stages": 2}}, "average_tokens_across_devices": False}, "not supported with pipe=2"),
        ({"grid": {"pipe": 2}, "triax": {"pipeline": {"stages": 3}}}, "pipeline.stages is 3, but grid= has pipe=2"),
        ({"grid": {"pipes": 2}}, "grid= has pipes = 2: give whole numbers"),
        ({"grid": '{"pipe": 0}'}, "grid= has pipe = 0: give whole numbers"),
    ):
        with pytest.raises(ConfigError, match=message):
            triax.TrainingArguments(out, **options)
    for found in ranks(2, refused, out, True):
        own, function, classes, family, padding = found
        assert "Loss.compute_loss runs the whole model" in own and "compute_loss_func is not supported" in function
        assert "must be a GPT2LMHeadModel" in classes and "cannot be cut into the parts of pipe=2" in family
        assert "a triax.Engine trains it without the Trainer (docs/huggingface.md, 'Another family')" in family
        assert "pad on the right" in padding


def test_arguments_with_a_grid_are_parsed_and_pickled(tmp_path: Path) -> None:
    import transformers

    kind: Any = triax.TrainingArguments
    words = ["--output_dir", str(tmp_path), "--grid", '{"data": 1}', "--report_to", "none"]
    (parsed,) = transformers.HfArgumentParser(kind).parse_args_into_dataclasses(words)
    assert parsed.grid.size == 1 and parsed.to_dict()["grid"] == {"pipe": 1, "data": 1, "tensor": 1}
    assert pickle.loads(pickle.dumps(parsed)).grid.size == 1 and '"grid"' in parsed.to_json_string()
    given = triax.TrainingArguments(str(tmp_path), grid=parsed.grid, report_to="none")
    assert given.grid is parsed.grid


# ------------------------------------------------------------------------------------------ TRL's SFTTrainer


@exact()
def fine_tuned(
    out: str, replicas: int, options: dict[str, Any] | None, resume: str | None = None, lora: bool = False
) -> dict[str, Any]:
    """Run ``SFTTrainer`` in float64, on text and a tokenizer of letters; without options, TRL's own."""
    quiet()
    import datasets
    import transformers
    from trl import SFTConfig, SFTTrainer

    @dataclass
    class Cfg(SFTConfig, triax.TrainingArguments): ...

    class Tr(SFTTrainer, triax.Trainer): ...

    Cfg.__qualname__, globals()["Cfg"] = "Cfg", Cfg  # checkpoints pickle the arguments
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "sleeps"]
    rows = datasets.Dataset.from_list([{"text": f"{a} {b}"} for a in words for b in words][:44])
    common = steps_of(out, replicas, warmup_steps=0, weight_decay=0.0, eval_steps=10, save_steps=10, bf16=False)
    kinds: tuple[Any, Any] = (SFTTrainer, SFTConfig) if options is None else (Tr, Cfg)
    args = kinds[1](**common, **({"use_cpu": True} if options is None else options))
    data: dict[str, Any] = {
        "train_dataset": rows,
        "eval_dataset": rows.select(range(16)),
        "processing_class": tokenizer(),
    }
    if "grid" not in (options or {}):  # TRL's own loss rounds to fp32
        data["compute_loss_func"] = exact_loss
    if lora:
        import peft

        data["peft_config"] = peft.LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    trainer = kinds[0](model_of("llama"), args=args, **data)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    keys = ("loss", "grad_norm", "learning_rate", "eval_loss")
    found: dict[str, Any] = {key: [row[key] for row in trainer.state.log_history if key in row] for key in keys}
    trainer.save_model(f"{out}/last")
    return found


@pytest.mark.exhaustive
def test_trls_sft_trainer_trains_the_same_on_a_pipe_axis(ranks: Any, tmp_path: Path) -> None:
    (wanted,) = ranks(1, fine_tuned, str(tmp_path / "plain"), 1, None, timeout=240)
    out = str(tmp_path / "out")
    for count, replicas, options, resume in (
        (4, 2, two_by_two(1), None),
        (1, 1, {"triax": {}}, f"{out}/checkpoint-10"),
        (2, 2, {"triax": {"zero_optimization": {"stage": 3}}}, None),
    ):
        where = out if resume is None else f"{out}-again"
        for found in ranks(count, fine_tuned, where, replicas, options, resume, timeout=240):
            if "grid" not in options and replicas > 1:  # TRL takes the mean of each replica's mean
                found["eval_loss"] = wanted["eval_loss"]
            for key, values in wanted.items():
                assert found[key] == pytest.approx(values, rel=1e-10, abs=1e-12), (key, options)
        assert (Path(where) / "last" / "tokenizer.json").is_file() and exported(f"{where}/last")


@pytest.mark.exhaustive
def test_trls_sft_trainer_with_lora_trains_the_same_on_three_axes(ranks: Any, tmp_path: Path) -> None:
    (wanted,) = ranks(1, fine_tuned, str(tmp_path / "plain"), 1, None, lora=True, timeout=240)
    options = {"grid": {"pipe": 2, "tensor": 2, "data": 2}, "triax": {"zero_optimization": {"stage": 2}}}
    for found in ranks(8, fine_tuned, str(tmp_path / "out"), 2, options, lora=True, timeout=240):
        for key, values in wanted.items():
            assert found[key] == pytest.approx(values, rel=1e-10, abs=1e-12), key
    right, saved = (load_file(tmp_path / name / "last" / "adapter_model.safetensors") for name in ("plain", "out"))
    assert right.keys() == saved.keys()
    for name, value in right.items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=1e-10, msg=name)
