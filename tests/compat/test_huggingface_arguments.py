"""The Trainer's arguments: what a DeepSpeed file takes from them, and where the two do not fit."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import triax
from triax.base.errors import ConfigError
from triax.cli.main import app
from triax.compat.huggingface.auto_values import AutoValues, hidden_size

from support.trainer_jobs import (
    logged,
    model_of,
    replicas_here,
    trainer_of,
    zero,
)

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
    return {**logged(trainer), "tokens": trainer.state.num_input_tokens_seen, "flos": trainer.state.total_flos}


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
@pytest.mark.parametrize(("grid", "stage"), [((2, 1), 3), ((1, 2), 0), ((2, 2), 2)], ids=str)
def test_trainer_arguments_act_as_in_transformers(
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
    found = logged(trainer)
    resumed = trainer_of("gpt2", out, replicas_here(), CONFIG, max_steps=6, save_steps=3)
    resumed.train(resume_from_checkpoint=f"{out}/checkpoint-3")
    return {"found": found, "again": logged(resumed), "scheduler": type(trainer.lr_scheduler).__name__}


def test_the_trainer_uses_optimizer_and_schedule_of_the_file(ranks: Any, tmp_path: Path) -> None:
    (result,) = ranks(1, by_the_configuration, str(tmp_path / "out"), timeout=120)
    assert result["scheduler"] == "WarmupDecayLR"
    rate, warm, total = 1e-2, 3, 6
    # DeepSpeed's schedule is at its beginning in the first step, and in the second.
    wanted = [0.0] + [rate * (k / warm if k < warm else (total - k) / (total - warm)) for k in range(5)]
    assert result["found"]["learning_rate"] == pytest.approx(wanted, rel=1e-9)
    assert result["again"]["learning_rate"] == pytest.approx(wanted, rel=1e-9)  # the first three are the first run's
    assert result["again"]["loss"] == pytest.approx(result["found"]["loss"], abs=1e-6)


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


def test_triax_config_explains_values_that_a_trainer_fills_in(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONFIG))
    done = CliRunner().invoke(app, ["compat", "config", str(path), "--data", "2"])
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
    refused = CliRunner().invoke(app, ["compat", "config", str(path)]).exception
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


def test_auto_values_equal_those_of_transformers_own_code() -> None:
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


def test_changed_arguments_fill_in_auto_values_anew() -> None:
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


def test_all_mismatches_are_named_in_one_error() -> None:
    config = json.loads(json.dumps(CONFIG))
    config["train_batch_size"] = 61
    config["optimizer"]["params"]["lr"] = 1e-3
    config["bf16"]["enabled"] = False
    config["scheduler"]["params"]["total_num_steps"] = 7
    values = AutoValues(config)
    values.from_arguments(Arguments(), replicas=4)
    with pytest.raises(ConfigError) as error:
        values.from_run(Arguments(), 96, 200)
    message = str(error.value)
    for line in (
        "train_batch_size is 61; 4 replicas * 3 * 5 is 60",
        "optimizer.params.lr is 0.001; learning_rate is 0.0002",
        "bf16.enabled is false; bf16 is true",
        "scheduler.params.total_num_steps is 7; the number of training steps is 200",
    ):
        assert f"- {line}\n" in message
    assert message.count("\n- ") == 4


def test_absent_keys_come_from_the_trainers_arguments() -> None:
    values = AutoValues({})
    values.from_arguments(Arguments(), replicas=2)
    found = values.from_run(Arguments(), None, 10)
    assert found["gradient_clipping"] == 0.7 and found["bf16"] == {"enabled": True} and found["seed"] == 7
    assert found["train_micro_batch_size_per_gpu"] == 3 and found["gradient_accumulation_steps"] == 5


def test_the_hidden_size_is_read_from_any_configuration() -> None:
    from types import SimpleNamespace as Of

    assert hidden_size(Of(hidden_size=8)) == 8 and hidden_size(Of(hidden_sizes=[4, 16])) == 16
    assert hidden_size(Of(text_config=Of(hidden_size=5))) == 5
    assert hidden_size(None) is None and hidden_size(Of(text_config=Of(hidden_sizes=[3, 2]))) == 3
    values = AutoValues({"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}})
    values.from_arguments(Arguments(), 1)
    with pytest.raises(ConfigError, match=r"zero_optimization\.reduce_bucket_size: .* hidden_size"):
        values.from_run(Arguments(), None, 1)


def test_contradicting_training_arguments_are_refused(tmp_path: Path) -> None:
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


def test_arguments_are_parsed_by_transformers_and_pickled(tmp_path: Path) -> None:
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


def test_two_trainers_may_share_their_arguments(tmp_path: Path) -> None:
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


def test_arguments_changed_after_the_trainer_take_effect(ranks: Any, tmp_path: Path) -> None:
    (found,) = ranks(1, changed, str(tmp_path))
    assert found == [(0.3, 0.25), (0.2, 0.25)]
