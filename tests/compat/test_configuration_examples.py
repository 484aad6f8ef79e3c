"""Configurations with the keys of DeepSpeed's documentation: each is accepted, or refused by its documented line.

They are small ones of our own, at least one for each key that the examples of its pages have.
"""

from __future__ import annotations

from typing import Any

import pytest

from triax.base.errors import ConfigError
from triax.compat.deepspeed.config.to_options import notes_of
from triax.compat.deepspeed.from_config import read_config

SIZE = {"train_batch_size": 8}

# Configuration, and the keys of which a note says that they do nothing.
ACCEPTED: list[tuple[dict[str, Any], set[str]]] = [
    ({"_comment": "a note", "zero_optimization": {"stage": 2, "_why": ["memory"]}}, set()),
    ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "_note": 1, "torch_adam": True}}}, set()),
    ({"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 4, "cuda_aware": False}}}, {"optimizer"}),
    ({"optimizer": {"type": "ZeroOneAdam", "params": {"var_freeze_step": 9, "local_step_clipper": 4}}}, set()),
    ({"optimizer": {"type": "OneBitLamb", "params": {"factor_max": 4.0, "max_coeff": 0.3}}}, set()),
    ({"optimizer": {"type": "Lamb", "params": {"lr": 1e-2, "max_coeff": 5.0, "min_coeff": 0.1}}}, set()),
    ({"optimizer": {"type": "FusedLamb"}, "zero_optimization": {"stage": 1}}, set()),
    (
        {
            "optimizer": {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.9, "muon_lr": 0.03, "adam_lr": 1e-3}},
            "zero_optimization": {"stage": 3, "save_muon_momentum_buffer_in_memory": True},
        },
        {"zero_optimization"},
    ),
    ({"scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_step_size": 3}}}, set()),
    ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}}}, set()),
    ({"fp16": {"enabled": True, "auto_cast": False, "loss_scale": 0, "consecutive_hysteresis": False}}, {"fp16"}),
    ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}, set()),
    ({"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}, "bf16": {"enabled": True}}, set()),
    ({"amp": {"enabled": True, "opt_level": "O1"}}, set()),
    ({"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "bf16"}, set()),
    ({"data_types": {"grad_accum_dtype": "bf16"}, "bf16": {"enabled": True}}, {"data_types"}),
    (
        {
            "data_types": {"grad_accum_dtype": "bf16"},
            "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
        },
        set(),
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/tmp", "buffer_count": 3, "max_in_cpu": 1e9},
                "offload_optimizer": {"device": "cpu", "ratio": 0.5, "fast_init": True, "pin_memory": True},
                "stage3_max_live_parameters": 1e9,
                "sub_group_size": 1e9,
                "elastic_checkpoint": True,
            },
            "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1, "single_submit": False},
        },
        {"zero_optimization", "aio"},
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "prefetch_bucket_size": 5,
                "zero_quantized_weights": True,
                "zero_hpz_partition_size": 2,
            }
        },
        set(),
    ),
    ({"activation_checkpointing": {"partition_activations": True, "number_checkpoints": 2, "profile": True}}, set()),
    ({"sparse_attention": {"mode": "fixed", "block": 16, "num_local_blocks": 4}}, set()),
    ({"flops_profiler": {"enabled": True, "module_depth": 2, "output_file": None}}, set()),
    ({"tensorboard": {"enabled": True}, "wandb": {"enabled": True, "group": "a"}, "csv_monitor": {}}, set()),
    ({"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce"]}}, set()),
    ({"checkpoint": {"tag_validation": "Fail", "load_universal": True, "parallel_write": {}}}, {"checkpoint"}),
    ({"tensor_parallel": {"autotp_size": 1, "tp_overlap_comm": True}}, {"tensor_parallel"}),
    ({"elasticity": {"enabled": False}, "autotuning": {"enabled": False}}, set()),
    ({"autotuning": {"enabled": True, "fast": False, "arg_mappings": {"a": "--a"}}}, {"autotuning"}),
    ({"autotuning": {"enabled": True}}, set()),
    (
        {"autotuning": {"enabled": True}, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 1}},
        {"autotuning"},
    ),
]

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "squares of gradients are too small for fp16"),
    ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "set both, or neither"),
    ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, "write gradient_clipping"),
    ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, "late gradients are not supported"),
    ({"tensor_parallel": {"autotp_size": 2, "preset_model": "llama"}}, "triax.parallelize(model, grid, plan)"),
    ({"tensor_parallel": {"partition_config": {"layer_specs": []}}}, "triax.parallelize(model, grid, plan)"),
    ({"expert_parallel": {"enabled": True}}, "write expert_parallel_size"),
    ({"hybrid_engine": {"enabled": True}}, "triax.init_inference(engine)"),
    ({"compression_training": {"layer_reduction": {"enabled": True}}}, "layers are trained as they are"),
    ({"progressive_layer_drop": {"enabled": True, "theta": 0.5}}, "all layers run"),
    ({"curriculum_learning": {"enabled": True}}, "pass the batches that you want"),
    ({"data_efficiency": {"enabled": True}}, "pass the batches that you want"),
    ({"compile": {"deepcompile": True}}, "triax has no DeepCompile"),
    ({"comet": {"enabled": True}}, "csv_monitor and tensorboard write the same numbers"),
    ({"datastates_ckpt": {"host_cache_size": 4}}, "checkpoint.async writes in the background"),
]


@pytest.mark.parametrize(("config", "idle"), ACCEPTED)
def test_published_configurations_are_accepted_with_notes(config: dict[str, Any], idle: set[str]) -> None:
    notes = notes_of(read_config({**SIZE, **config}))
    assert {note.partition(" ")[0].partition(".")[0] for note in notes} == idle, notes


@pytest.mark.parametrize(("config", "line"), REFUSED)
def test_published_configurations_are_refused_by_name(config: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_config({**SIZE, **config})
    assert line in str(error.value)
