"""Wrong configurations: each mistake is named before a model is built."""

from __future__ import annotations

from typing import Any

import pytest

from triax.base.errors import ConfigError
from triax.compat.deepspeed.config.to_options import batch_sizes
from triax.compat.deepspeed.from_config import read_config

from support.toys import error_text


def case(kind: str, **params: Any) -> dict[str, Any]:
    return {"type": kind, "params": {"lr": 0.1, **params}}


DISK = {"device": "nvme", "nvme_path": "/tmp"}
SECTIONS: dict[str, list[tuple[Any, str]]] = {
    "comms_logger": [
        ({"enabled": True, "prof_ops": ["all_redcue"]}, "there is no 'all_redcue'; did you mean 'all_reduce'?"),
        ({"enabled": True, "prof_all": False}, "prof_ops names nothing to count"),
        ({"enabled": "yes"}, "comms_logger.enabled = 'yes'"),
        ({"enabled": True, "profile_all": True}, "there is no 'profile_all'"),
    ],
    "flops_profiler": [
        ({"enabled": True, "profile_steps": 1}, "there is no 'profile_steps'; did you mean 'profile_step'?"),
        ({"profile_step": -1}, "flops_profiler.profile_step = -1"),
        ({"module_depth": -2}, "flops_profiler.module_depth = -2"),
        ({"top_modules": 0}, "flops_profiler.top_modules = 0"),
        ({"output_file": True}, "flops_profiler.output_file = true"),
    ],
    "compile": [
        ({"deepcompile": True}, "refused: triax has no DeepCompile"),
        ({"enabled": True, "kwargs": {"backend": "eager"}}, "kwargs has backend, but torch.compile takes mode"),
        ({"enabled": True, "backend": "aot_eager", "kwargs": {"mode": "default"}}, "are for the backend inductor"),
        ({"enabled": True, "backend": 3}, "give a text in quotes"),
        ("inductor", "compile"),
    ],
    "checkpoint": [
        ({"every": 3}, "every needs a folder: give dir too"),
        ({"dir": "x", "keep": 2}, "keep is for automatic checkpoints: give every too"),
        ({"dir": "x", "resume": "always"}, "checkpoint.resume = 'always'"),
        ({"asynch": True}, "there is no 'asynch'; did you mean 'async'?"),
        ({"use_node_local_storage": True}, "ranks read files of other ranks"),
        ({"tag_validation": "maybe"}, "checkpoint.tag_validation"),
    ],
    "optimizer": [
        (case("LBFGS"), "it evaluates the loss several times a step"),
        (case("Adamm"), "there is no such optimizer; did you mean 'Adam'?"),
        (case("Adam", max_grad_norm=1.0), "optimizer.params.max_grad_norm: write gradient_clipping"),
        (case("Adam", fp32_optimizer_states=False), "optimizer.params.fp32_optimizer_states is false, but"),
        (case("Adam", weight_decy=1), "AdamW has no weight_decy; it takes lr, betas, eps, weight_decay"),
        (case("Adam", adam_w_mode="no"), "optimizer.params.adam_w_mode: give true or false"),
        (case("Adam", adam_w_mode=True, adamw_mode=False), "are two names of one switch, and differ"),
        (case("Adam", amsgrad=True, bias_correction=False), "amsgrad needs the bias correction"),
        (case("Adam", betas=[0.9]), "optimizer.params.betas: give a list of 2 numbers, not [0.9]"),
        (case("Adam", betas=[0.9, 1.0]), "optimizer.params.betas = [0.9, 1.0]"),
        (case("Lion", betas=[0.9, -1.0]), "optimizer.params.betas = [0.9, -1.0]: betas are (0.9, -1.0)"),
        (case("Adam", eps=-1), "optimizer.params.eps = -1"),
        ({"type": "Adam", "params": {"lr": "auto"}}, 'optimizer.params.lr is "auto"'),
        ({"type": "Adam", "params": {"lr": "1e-3"}}, "optimizer.params.lr: give a number, not '1e-3'"),
        ({"type": "SGD", "params": {"lr": True}}, "optimizer.params.lr: give a number, not true"),
        (case("Lamb", amsgrad=True), "amsgrad is true, but LAMB has no maximum"),
        (case("Lamb", min_coeff=2.0, max_coeff=1.0), "give 0 <= min_coeff <= max_coeff"),
        (case("FusedLamb", max_grad_norm=1.0), "write gradient_clipping"),
        (case("Muon", per_head_muon=True), "made orthogonal as a whole"),
        (case("Muon", ns_dtype="float16"), "give bfloat16, float32 or float64"),
        (case("Muon", ns_method="svd"), "give gram or standard"),
        (case("Muon", adam_w_mode=False), "weight decay is decoupled"),
    ],
}
WHOLE: list[tuple[Any, str]] = [
    (
        {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 4},
        "train_micro_batch_size_per_gpu 4 * 2 replicas = 8: give 8 or 16",
    ),
    ({"train_batch_size": 7}, "train_batch_size 7 must be a multiple of train_micro_batch_size_per_gpu 3 * 2"),
    ({}, "no batch size: give train_batch_size or train_micro_batch_size_per_gpu"),
    ({"train_batchsize": 4}, "there is no 'train_batchsize'; did you mean 'train_batch_size'?"),
    ({"zero_optimization": {"stge": 1}}, "zero_optimization: there is no 'stge'; did you mean 'stage'?"),
    ({"optimizer": {"typ": "Adam"}}, "optimizer: there is no 'typ'; did you mean 'type'?"),
    ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage = 4: give 3 or less"),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "a model computes in one of them"),
    ({"pipeline": {"schedule": "1F1B"}}, "there is no '1F1B'"),
    ({"gradient_clipping": -1}, "gradient_clipping = -1"),
    ("no/such/file.json", "cannot be read: No such file"),
    (3, "the configuration is a int"),
    (
        {"pipeline": {"schedule": "auto", "costs": [1e308, 1, 1]}},
        "pipeline.costs = [1e+308, 1, 1]: give a number of 3.4e+38 or less",
    ),
    (
        {"checkpoint": {"async": True}, "zero_optimization": {"stage": 1, "offload_optimizer": DISK}},
        "offload to nvme keeps it on disk",
    ),
    (
        {"optimizer": case("Adafactor"), "zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        "step flat ranges: leave them out, or use Lion",
    ),
    (
        {"optimizer": case("Adafactor"), "zero_optimization": {"sub_group_size": 100}},
        "offload_param and zero_optimization.sub_group_size",
    ),
]


@pytest.mark.parametrize(("config", "words"), WHOLE)
def test_configurations_that_contradict_are_refused(config: Any, words: str) -> None:
    assert words in error_text(lambda: batch_sizes(read_config(config), 2), ConfigError)


@pytest.mark.parametrize(
    ("section", "value", "words"), [(name, *row) for name, rows in SECTIONS.items() for row in rows]
)
def test_mistakes_in_each_section_are_refused(section: str, value: Any, words: str) -> None:
    assert words in error_text(lambda: read_config({"train_batch_size": 4, section: value}), ConfigError)
