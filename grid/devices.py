"""GPUs of this machine: as text, for ``triax env``, and left alone in a dry run."""

from __future__ import annotations

from typing import Any

import torch


def gpu_descriptions() -> list[tuple[str, str]]:
    """Return a name and a description of each GPU; without any, one entry with the reason."""
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        half = "bfloat16" if torch.cuda.is_bf16_supported() else "no bfloat16: use fp16"
        found.append((f"GPU {index}", f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB, {half}"))
    if not found:
        built = torch.version.cuda or torch.version.hip
        why = f"torch is built for {built}, but finds no GPU or driver" if built else "this torch is built without CUDA"
        found.append(("GPU", f"none: {why}. Ranks run on the CPU"))
    return found


def ignore_device_choice() -> None:
    """Make ``torch.cuda.set_device`` do nothing in this process, which runs as a rank of another machine."""
    cuda: Any = torch.cuda
    cuda.set_device = lambda *_: None
