"""``gradient_compression`` and ``sparse_gradients``: fewer bytes for the sum of gradients over replicas."""

from __future__ import annotations

from typing import ClassVar, Literal

from .base import Section, setting


class GradientCompressionConfig(Section):
    """``gradient_compression``: compression of the sum of gradients over replicas."""

    OPTIONS: ClassVar = {
        "none": (),
        "fp16": (),
        "bf16": (),
        "topk": ("ratio", "momentum", "clip", "warmup_steps", "start_step", "values"),
        "powersgd": ("rank", "start_step", "min_compression", "warm_start"),
    }

    type: Literal["none", "fp16", "bf16", "topk", "powersgd"] = setting(
        "none",
        "fp16, bf16: sum in that dtype, as communication_data_type; topk: send the largest elements (Lin et al. "
        "2018); powersgd: send low-rank matrices (Vogels et al. 2019). topk and powersgd need ZeRO stage 0 or 1.",
    )
    ratio: float = setting(0.01, "topk: fraction of each tensor's elements that is sent.", gt=0.0, le=1.0)
    momentum: float = setting(
        0.0, "topk: momentum correction, instead of SGD's momentum, which must be 0.", ge=0.0, lt=1.0
    )
    clip: float = setting(
        0.0,
        "topk: limit of the gradient norm; a replica's own gradient is clipped to 1/sqrt(replicas) of it. 0: no limit.",
        ge=0.0,
    )
    warmup_steps: int = setting(0, "topk: steps in which the fraction falls from 0.25 to ratio.", ge=0)
    start_step: int = setting(0, "topk, powersgd: first step that compresses; earlier steps use the plain sum.", ge=0)
    values: Literal["fp32", "fp16", "bf16"] | None = setting(
        None, "topk: dtype of the values that are sent; null: the gradients' dtype."
    )
    rank: int = setting(4, "powersgd: rank of the matrices.", ge=1)
    min_compression: float = setting(
        2.0,
        "powersgd: smallest compression factor; matrices with a lower one are summed whole.",
        ge=1.0,
    )
    warm_start: bool = setting(True, "powersgd: start from the matrices of the previous step.")
