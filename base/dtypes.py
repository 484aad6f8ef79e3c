"""Names of torch's dtypes: the short ones of configurations, torch's own, and those of safetensors files."""

from __future__ import annotations

import torch

# Short names, in configurations and reports.
SHORT_NAMES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# The dtypes that safetensors holds, and its names for them.
SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}

# Torch's names of those dtypes: "bfloat16" -> torch.bfloat16.
TORCH_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in SAFETENSORS_NAMES}


def short_name(dtype: torch.dtype) -> str | None:
    """Return ``bf16`` for ``torch.bfloat16``; None for a dtype without a short name."""
    return next((name for name, short in SHORT_NAMES.items() if short == dtype), None)


def dtype_of(name: str | None) -> torch.dtype | None:
    """Return a dtype by its short name or torch's name, ``bf16`` or ``bfloat16``; None for None."""
    return None if name is None else SHORT_NAMES.get(name) or TORCH_NAMES[name]
