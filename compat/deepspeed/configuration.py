"""DeepSpeed's class ``DeepSpeedConfig``: a checked configuration with the batch sizes computed."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from logging import getLogger
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...base.json_comments import read_json
from .config.read import Section, unknown_keys
from .config.to_options import batch_sizes
from .from_config import read_config

OWN_KEYS = ("partition_config", "preset_model")  # keys of tensor_parallel that autotp.py reads
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500


class OffloadDeviceEnum(StrEnum):
    """Values of ``offload_optimizer.device`` and ``offload_param.device``."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


def tensor_section(source: Any) -> tuple[Any, dict[str, Any]]:
    """Return a configuration without the keys of ``tensor_parallel`` that this adapter alone has, and that section."""
    values = read_json(source) if isinstance(source, (str, Path)) else source
    section = values.get("tensor_parallel") if isinstance(values, Mapping) else None
    if not isinstance(section, Mapping):
        return values, {}
    rest = {key: value for key, value in section.items() if key not in OWN_KEYS}
    return {**values, "tensor_parallel": rest}, dict(section)


def read_deepspeed_config(source: Section | Mapping[str, Any] | str | Path) -> Section:
    """Return a checked configuration. As in DeepSpeed, an unknown outermost key has no effect.

    A warning names it, on rank 0. A key like one that triax knows, in this section or another, is an error.

    Args:
        source: a configuration, a dict, or the path of a JSON file.
    """
    values = read_json(source) if isinstance(source, (str, Path)) else source
    if not isinstance(values, Mapping):
        return read_config(values)
    unknown = unknown_keys(values)
    for key in unknown if not dist.is_initialized() or dist.get_rank() == 0 else ():
        getLogger("triax").warning(
            "the configuration's key %r has no effect: neither DeepSpeed nor triax knows it, or a key like it", key
        )
    return read_config({key: value for key, value in values.items() if key not in unknown})


class DeepSpeedConfig:
    """Checked configuration. Keys of the file are attributes: ``config.gradient_clipping``.

    Args:
        config: a dict, or the path of a JSON file.
        mpu: Megatron's object of process groups, whose replicas count; by default every process is a replica.
        mesh_device: torch's mesh with the dim ``data_parallel``.

    Attributes:
        train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps: all three, also those that the
            configuration leaves out.
        zero_enabled, zero_optimization_stage, fp16_enabled, bfloat16_enabled: as they will be in effect.
        monitor_config: the sections of the monitors, for ``MonitorMaster``.
        optimizer_name, optimizer_params, scheduler_name, scheduler_params: of the two sections; None without them.
    """

    def __init__(self, config: Mapping[str, Any] | str | Path, mpu: Any = None, mesh_device: Any = None) -> None:
        self._checked = self.monitor_config = checked = read_deepspeed_config(tensor_section(config)[0])
        world = dist.get_world_size() if dist.is_initialized() else 1
        if mpu is not None:
            world = mpu.get_data_parallel_world_size()
        elif mesh_device is not None:
            world = mesh_device["data_parallel"].size()
        batch = batch_sizes(checked, world)
        self.train_batch_size, self.train_micro_batch_size_per_gpu = batch.train, batch.micro
        self.gradient_accumulation_steps = batch.accumulation
        self.zero_optimization_stage = checked.zero_optimization.stage
        self.zero_enabled = self.zero_optimization_stage > 0
        self.fp16_enabled, self.bfloat16_enabled = checked.fp16.enabled, checked.bf16.enabled
        for name in ("optimizer", "scheduler"):
            section = getattr(checked, name)
            kind = None if section is None else section.type
            setattr(self, f"{name}_name", kind if name == "scheduler" or kind is None else kind.lower())
            setattr(self, f"{name}_params", None if section is None else dict(section.params))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_checked"], name)
