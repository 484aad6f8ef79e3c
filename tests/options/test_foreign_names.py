"""Keys of other libraries, and misspelt names: the message names the key that means the same, or lists all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from triax.base.errors import ConfigError, close, nearest
from triax.base.foreign_tables import read_table
from triax.compat.deepspeed.config.table import keys
from triax.compat.deepspeed.config.to_options import parse_config
from triax.options import foreign_names
from triax.options.table import rows
from triax.plugins.plan.machine import machine
from triax.train.file import read_training_file
from triax.train.sections import TrainingFile

RUN = "model: {preset: bytes-tiny}\ndata: tokens\nbatch: 2\ntraining: {steps: 2}\n"


def _named(text: str) -> Iterator[str]:
    """Yield the keys that a counterpart names, without what it explains."""
    text = re.sub(r": selective| \([^)]*\)|triax\.[\w.]+\([^)]*\).*|initialize\([^)]*\)|,? with .*", "", text)
    if not text.startswith("nothing: ") and text:
        yield from re.split(r", or |, | and | or ", text)


def _exists(key: str, known: list[str]) -> bool:
    if key.startswith(("optimizer.", "optimizer.params", "scheduler.params")):
        return True  # arguments of any optimizer or schedule
    return any(name == key or name.startswith(f"{key}.") for name in known)


def test_every_counterpart_of_a_foreign_name_exists() -> None:
    found = read_table(foreign_names.__file__, "foreign_names.toml")["rows"]
    names = [name for row in found for name in row["names"].split()]
    assert len(names) == len(set(names)) > 100
    in_file, in_config = [path for path, *_ in rows(TrainingFile)], [key for key, _ in keys()]
    for row in found:
        assert all(_exists(key, in_file) for key in _named(row["file"])), row
        assert all(_exists(key, in_config) for key in _named(row["configuration"])), row


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("training.dtype=bf16", "training: there is no 'dtype'; write precision"),
        ("checkpoint.interval=5", "checkpoint: there is no 'interval'; write checkpoint.every"),
        ("grid.device=cpu", "grid: there is no 'device'; write nothing: a run takes the GPUs that it sees"),
        ("model.name=gpt2", "model: there is no 'name'; write model.preset"),
        ("grid.tensor_parallel=2", "grid: there is no 'tensor_parallel'; write grid.tensor"),
        ("lr=1", "the training file: there is no 'lr'; write training.learning_rate"),
        ("training.weight_decay=1", "write optimizer.weight_decay"),
        ("training.bf16=true", "write precision (bf16, fp16 or fp32)"),
        ("gradient_accumulation_steps=4", "write batch.size and batch.microbatch (batch / microbatch"),
        ("output_dir=x", "write runs and name"),
        ("training.scheduler=cosine", "write training.learning_rate.schedule"),
        ("scheduler=cosine", "write training.learning_rate.schedule"),
        ("checkpoint.dir=x", "write checkpoint.folder"),
        ("training.seed=1", "write seed (of the file"),
        ("training.sequence_parallel=true", "there is no 'sequence_parallel' here, but in grid: write it there"),
        ("evaluate.interval=3", "write evaluate.every"),
        ("training.local_batch_size=2", "there is no 'local_batch_size'; write batch.microbatch"),
        ("training.pin_memory=true", "there is no 'pin_memory'; write nothing: a run has no such setting"),
        ("num_heads=4", "write model.overrides (of a preset)"),
        ("training.recompute_activations=true", "write recompute: selective"),
        ("training.recompute_granularity=full", "write recompute.granularity"),
        ("lora_r=4", "write lora.rank"),
        # A name of one word that another section has for something else: all keys are listed.
        ("interval=3", "there is no 'interval'; known are batch, optimizer"),
        ("sample.limit=3", "there is no 'limit'; known are prompt"),
        ("export.name=x", "there is no 'name'; known are folder, dtype"),
    ],
)
def test_unknown_keys_of_training_files_get_a_hint(tmp_path: Path, change: str, expected: str) -> None:
    """``training.dtype=bf16`` was answered "in export: write it there", which left the training in fp32."""
    (tmp_path / "run.yaml").write_text(RUN)
    with pytest.raises(ConfigError) as caught:
        read_training_file(tmp_path / "run.yaml", [change])
    assert f"{change.partition('=')[0]}=...: " in str(caught.value) and expected in str(caught.value)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"lr": 1}, "the configuration: there is no 'lr'; write optimizer.params.lr"),
        ({"optimizer": {"type": "Adam", "lr": 1}}, "optimizer: there is no 'lr'; write optimizer.params.lr"),
        ({"momentum": 0.1}, "write optimizer.params.momentum"),
        ({"dtype": "bf16"}, "write bf16.enabled or fp16.enabled"),
        ({"max_grad_norm": 1}, "write gradient_clipping"),
        ({"tensor_parallel_degree": 2}, "write triax.Grid(tensor=...)"),
        ({"checkpoint": {"interval": 5}}, "checkpoint: there is no 'interval'; write checkpoint.every"),
        ({"max_steps": 5}, "write nothing: the loop of your script sets this"),
        ({"pin_memory": True}, "write nothing: a DataLoader of your own has it"),
        ({"num_heads": 4}, "write nothing: the model of your script has it"),
        ({"model": {"name": "gpt2"}}, "there is no 'model'; write initialize(model=...)"),
        ({"local_batch_size": 2}, "write train_micro_batch_size_per_gpu"),
        ({"use_reentrant": False}, "there is no 'use_reentrant', and no key like it"),
        ({"min_compression": 3}, "there is no 'min_compression' here, but in gradient_compression: write it there"),
    ],
)
def test_unknown_keys_of_configurations_get_a_hint(config: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"train_batch_size": 2, **config})
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("bacth", ["batch", "batch_tokens"], "batch"),
        ("comms-logger", ["comms_logger"], "comms_logger"),
        ("commsqlogger", ["comms_logger"], "comms_logger"),
        ("num_layers", ["num_hidden_layers"], "num_hidden_layers"),
        ("bf6", ["bf16", "fp16"], "bf16"),
        ("h100", ["h200", "h100-80g", "a100-80g"], "h100-80g"),
        ("llama3", ["llama3-8b", "llama3-70b"], None),
        ("h300", ["h200", "h100-80g"], None),
        ("worker-3", ["worker-2", "worker-4"], None),
        ("tensor_parallel", ["sequence_parallel"], None),
        ("max_lr", ["min_lr"], None),
        ("fp8", ["fp16", "fp32"], None),
    ],
)
def test_close_finds_misspellings_but_no_other_names(name: str, known: list[str], expected: str | None) -> None:
    assert close(name, known) == expected


def test_nearest_may_suggest_a_longer_name() -> None:
    assert nearest("scheduler", ["schedule", "lr_scheduler"]) == "did you mean 'lr_scheduler'?"
    # Which keys DeepSpeed would ignore does not depend on it.
    assert close("clipping", ["gradient_clipping"]) is None


def test_an_unknown_machine_name_gets_a_suggestion() -> None:
    """``--machine h100`` was answered "Did you mean h200?"."""
    with pytest.raises(ValueError, match=r"there is no machine 'h100'\. Did you mean h100-80g\?"):
        machine("h100")
    with pytest.raises(ValueError, match=r"there is no machine 'h300'\. Give one of a100-80g, h100-80g"):
        machine("h300")
