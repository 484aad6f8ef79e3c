"""The resolved job: sizes derived from others, DeepSpeed's keys, and jobs that are refused."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from triax.base.errors import ConfigError
from triax.models.config import LlamaConfig
from triax.models.huggingface.config import to_hf
from triax.options.local_updates import DiLoCo
from triax.options.named import LRSchedule, Optimizer
from triax.train.job import Job, resolve
from triax.train.learning_rate import LearningRate
from triax.train.sections import TrainingFile
from triax.train.start import make_job


def _job(processes: int | None = None, **keys: Any) -> Job:
    training, batch = {"steps": 100} | keys.pop("training", {}), {"size": 8} | keys.pop("batch", {})
    values = {"model": {"preset": "bytes-tiny"}, "data": "tokens", "training": training, "batch": batch} | keys
    return resolve(TrainingFile.of(values), processes)


def test_a_minimal_training_file_gets_the_default_values() -> None:
    job = _job()
    assert (job.sequence, job.steps, job.batch.train, job.tokens_per_step) == (64, 100, 8, 512)
    assert job.topology.world_size == 1 and job.precision == "fp32"
    params = job.options.optimizer.arguments
    assert params == {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}
    assert job.options.zero.stage == 1


def test_steps_follow_from_tokens_and_replicas_from_processes() -> None:
    tokens = {"steps": None, "tokens": 100_000}
    batch = {"size": None, "tokens": 1024, "microbatch": 2}
    job = _job(8, training=tokens, batch=batch, grid={"pipe": 2, "tensor": 2}, model={"preset": "bytes-small"})
    assert job.topology.size("data") == 2 and job.batch.train == 8 and job.batch.accumulation == 2
    assert job.steps == math.ceil(100_000 / 1024)


def test_a_pair_of_answers_counts_the_tokens_of_both() -> None:
    """Methods of pairs trained on twice the tokens that the file asks for."""
    rate = {"warmup_tokens": 10_240}
    job = _job(method="dpo", training={"steps": None, "tokens": 102_400, "learning_rate": rate})
    assert job.rows == 2 and job.steps * job.tokens_per_step == 102_400
    assert job.learning_rate is not None and job.learning_rate.warmup * job.tokens_per_step == 10_240
    job = _job(method="dpo", batch={"size": None, "tokens": 1024})
    assert job.batch.train == 8 and job.tokens_per_step == 1024


def test_a_job_takes_the_sizes_of_a_hugging_face_folder(tmp_path: Path) -> None:
    import json

    config = LlamaConfig.preset("llama3-8b", num_hidden_layers=2, hidden_size=64, num_attention_heads=8)
    (tmp_path / "config.json").write_text(json.dumps(to_hf(config)))
    model = {"folder": str(tmp_path), "weights": False, "overrides": {"num_hidden_layers": 3}}
    job = _job(model=model, training={"sequence": 16})
    assert isinstance(job.model, LlamaConfig) and job.model.num_hidden_layers == 3 and job.layers == 6


def test_a_deepspeed_section_sets_the_options_of_its_keys() -> None:
    given = {
        "train_batch_size": "auto",
        "zero_optimization": {"stage": 2, "overlap_comm": False},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "betas": "auto"}},
        "bf16": {"enabled": True},
        "steps_per_print": 5,
    }
    job = _job(deepspeed=given)
    assert job.options.zero.stage == 2 and not job.options.zero.overlap_comm
    assert job.options.optimizer == Optimizer("AdamW", lr=1e-2, weight_decay=0.0)  # what DeepSpeed means by Adam
    assert job.options.monitor.print_every == 5 and job.precision == "bf16" and job.batch.train == 8
    job = _job(deepspeed={"scheduler": {"type": "WarmupLR"}, "gradient_clipping": 0.5})
    assert job.learning_rate is None and job.options.clip == 0.5


def test_a_deepspeed_section_keeps_other_options_of_the_file() -> None:
    """Switches of sections that it does not have, such as compile, stay as the file has them."""
    job = _job(compile=True, lora=4, monitor={"wandb": True}, deepspeed={"zero_optimization": {"stage": 2}})
    assert job.options.zero.stage == 2 and job.options.compile is not None and job.options.lora is not None
    assert job.options.monitor.wandb is not None
    assert _job(deepspeed={"compile": {"deepcompile": False}}, zero=2).options.zero.stage == 2


def test_training_files_set_every_engine_option() -> None:
    """Those that no other key of a file is named after."""
    given: dict[str, Any] = {
        "lr_scheduler": {"type": "WarmupLR", "warmup_num_steps": 3},
        "nan_loss": "skip",
        "reduction": {"dtype": "bf16"},
        "drop_last": False,
        "sparse_attention": {"mode": "fixed"},
        "clip": None,
        "checkpoint": True,
    }
    options = _job(**given).options
    assert options.lr_scheduler == LRSchedule("WarmupLR", warmup_num_steps=3)
    assert (options.nan_loss, options.reduction.dtype, options.drop_last, options.clip) == ("skip", "bf16", False, None)
    assert options.sparse_attention is not None and options.checkpoint.every == 500
    assert _job(compression={"type": "topk"}).options.compressor == "topk"
    local = _job(local_updates={"type": "diloco", "every": 4}, zero=0).options.local_updates
    assert isinstance(local, DiLoCo) and local.every == 4


def test_learning_rates_warm_up_and_decay_by_formula() -> None:
    cosine = LearningRate("cosine", 10, 110, 0.1, 0)
    assert cosine.share(0) == 0.1 and cosine.share(9) == 1.0 and cosine.share(10) == 1.0
    assert math.isclose(cosine.share(60), 0.55) and math.isclose(cosine.share(110), 0.1)
    assert math.isclose(LearningRate("linear", 0, 100, 0.0, 0).share(25), 0.75)
    assert LearningRate("constant", 2, 100, 0.1, 0).share(99) == 1.0
    wsd = LearningRate("wsd", 10, 100, 0.0, 20)
    assert LearningRate("cosine", 50, 20, 0.1, 0).share(19) == 0.4  # a short trial of a run
    assert wsd.share(79) == 1.0 and wsd.share(80) == 1.0 and wsd.share(90) == 0.5 and wsd.share(100) == 0.0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"batch": {"size": None}}, "there is no batch: give batch"),
    ({"training": {"steps": None}}, "training has no end: give steps, tokens or epochs"),
    ({"batch": {"size": 9}, "grid": {"data": 2}}, "multiple of microbatch 1 * 2 replicas = 2: give 8 or 10"),
    ({"batch": {"size": None, "tokens": 100}}, "multiple of the sequence of 64 tokens: give 128"),
    ({"training": {"sequence": 65}}, "but the model has 64 positions"),
    ({"grid": {"tensor": 8}}, "grid.tensor: num_"),
    ({"grid": {"pipe": 7}}, "is 7 stages, but"),
    ({"grid": {"expert": 2, "data": 2}}, "a GPTConfig has no experts"),
    ({"model": {"preset": "bytes-tny"}}, "there is no preset 'bytes-tny'; did you mean 'bytes-tiny'?"),
    ({"model": {"preset": "gpt2", "overrides": {"layers": 2}}}, "model.overrides: there is no 'layers'"),
    ({"model": {"preset": "gpt2", "overrides": {"hidden_size": "x"}}}, "overrides.hidden_size = 'x': give a"),
    ({"model": {"preset": "gpt2", "overrides": {"num_attention_heads": 0}}}, "num_attention_heads = 0: give 1"),
    ({"model": {"preset": "gpt2", "attention": "gather"}}, "has no effect, because grid.context is 1"),
    ({"model": {"preset": "gpt2", "experts": {"capacity": 2}}}, "model.experts has no effect"),
    ({"model": {"folder": "/no/such"}}, "model.folder /no/such: "),
    ({"schedule": "1f2b"}, "schedule: there is no '1f2b'; known are "),
    ({"schedule": "forward"}, "has no backward passes"),
    ({"schedule": {"name": "1f1b", "costs": [1, 1, 1]}}, "schedule.costs is for the schedule auto"),
    ({"schedule": {"name": "interleaved", "chunks": 1}}, "schedule: interleaved does not run 1 chunks"),
    ({"schedule": {"name": "zb-v", "slices": 2}}, "schedule: zb-v runs whole microbatches, not 2 slices"),
    ({"schedule": {"slices": 65}}, "schedule.slices: a sequence of 64 tokens cannot be cut into 65 slices"),
    (
        {"schedule": {"slices": 2}, "grid": {"context": 2}},
        "schedule.slices: slices cut sequences, and so does context=2",
    ),
    ({"model": {"preset": "mixtral-tiny"}, "schedule": {"slices": 2}}, "the model has a mixture of experts"),
    ({"method": {"name": "dpo"}, "schedule": {"slices": 2}}, "method dpo has a loss of whole sequences"),
    (
        {"schedule": {"name": "stp", "recompute": 0.5}, "grid": {"pipe": 2}, "batch": {"size": 8}},
        "schedule.recompute = 0.5",
    ),
    (
        {"schedule": {"recompute": 1.0}, "grid": {"pipe": 2}, "batch": {"size": 8}, "recompute": "full"},
        "recompute and a schedule that recomputes",
    ),
    ({"schedule": {"partition": "time", "slices": 2}}, "schedule: partition time is for whole sequences"),
    (
        {"evaluate": {"best": True}, "zero": 0, "local_updates": {"type": "async_diloco"}, "checkpoint": False},
        "evaluate.best compares one model of all replicas, which async_diloco has at the end only",
    ),
    (
        {"evaluate": {"patience": 3, "every": 10}, "zero": 0, "local_updates": {"type": "diloco", "every": 50}},
        "evaluate.every is 10: give a multiple of 50",
    ),
    ({"processes": 6, "grid": {"pipe": 4}}, "takes 4 processes a replica, and there are 6"),
    ({"processes": 6, "grid": {"pipe": 2, "data": 2}}, "is a grid of 4 processes, and there are 6"),
    ({"optimizer": {"type": "AdamW", "lr": 1}}, "give it as training.learning_rate"),
    ({"zero": 1, "deepspeed": {"zero_optimization": {}}}, "zero and deepspeed.zero"),
    ({"precision": "bf16", "deepspeed": {"fp16": {"enabled": True}}}, "precision.weights and deepspeed.bf16"),
    (
        {"batch": {"size": None, "tokens": 256}, "deepspeed": {"train_batch_size": 8}},
        "batch.size and deepspeed.train_batch_size say the same",
    ),
    ({"checkpoint": {"every": None, "keep": 3}}, "keep has no effect, because every is null"),
    (
        {"lr_scheduler": {"type": "WarmupLR"}, "training": {"learning_rate": {"schedule": "linear"}}},
        "lr_scheduler and training.learning_rate.schedule both set the rate",
    ),
    ({"precision": {"loss_scale": False}}, "precision.loss_scale"),
    ({"deepspeed": {"zero_optimisation": {}}}, "deepspeed: there is no 'zero_optimisation'"),
    ({"deepspeed": {"checkpoint": {"every": 3}}}, "give checkpoint.every"),
    ({"deepspeed": {"json_monitor": {}}}, "deepspeed.json_monitor has no effect here"),
    ({"deepspeed": "/no/such.json"}, "cannot be read"),
    ({"sample": {"prompt": "a"}, "grid": {"expert": 2, "data": 2}, "model": {"preset": "mixtral-8x7b"}}, "sample"),
]


@pytest.mark.parametrize(("keys", "expected"), REFUSED)
def test_jobs_that_cannot_run_are_refused(keys: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        _job(**keys)


def test_a_model_that_cannot_be_exported_is_refused_before_the_run() -> None:
    model = {"preset": "mixtral-tiny", "overrides": {"moe_intermediate_size": 40}}
    values = {"model": model, "data": "tokens", "training": {"steps": 1}, "batch": {"size": 1}}
    with pytest.raises(ConfigError, match="export cannot write this model: no family"):
        make_job(TrainingFile.of(values))
