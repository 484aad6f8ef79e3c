"""``gradient_compression`` and ``sparse_gradients``: fewer bytes for the sum of gradients over replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import model_validator

from .config_base import Section, setting

if TYPE_CHECKING:
    from .config import Config

_OPTIONS = {
    "none": (),
    "fp16": (),
    "bf16": (),
    "topk": ("ratio", "momentum", "clip", "warmup_steps", "start_step", "values"),
    "powersgd": ("rank", "start_step", "min_compression", "warm_start"),
}
_ONE_BIT = ("onebitadam", "zerooneadam", "onebitlamb")


class GradientCompressionConfig(Section):
    """``gradient_compression``: what travels in place of the plain sum of gradients over replicas."""

    type: Literal["none", "fp16", "bf16", "topk", "powersgd"] = setting(
        "none",
        "fp16, bf16: the sum is taken in that dtype (communication_data_type); topk: the largest elements (Lin et al. "
        "2018); powersgd: matrices of low rank (Vogels et al. 2019). The last two in stages 0 and 1.",
    )
    ratio: float = setting(0.01, "topk: the share of each tensor's elements that travels.", gt=0.0, le=1.0)
    momentum: float = setting(
        0.0, "topk: of momentum correction, in place of SGD's own, which is 0 then.", ge=0.0, lt=1.0
    )
    clip: float = setting(
        0.0,
        "topk: the longest gradient, of which a replica's own may be 1/sqrt(replicas); 0: no limit.",
        ge=0.0,
        allow_inf_nan=False,
    )
    warmup_steps: int = setting(0, "topk: steps in which the share falls from 0.25 to ratio.", ge=0)
    start_step: int = setting(0, "topk, powersgd: steps before that, of the plain sum.", ge=0)
    values: Literal["fp32", "fp16", "bf16"] | None = setting(
        None, "topk: the dtype in which values travel; by default the gradients' own."
    )
    rank: int = setting(4, "powersgd: of the matrices.", ge=1)
    min_compression: float = setting(
        2.0, "powersgd: matrices that it makes smaller by less than this are summed whole.", ge=1.0, allow_inf_nan=False
    )
    warm_start: bool = setting(True, "powersgd: begin with the matrices of the step before.")

    @model_validator(mode="after")
    def _of_its_type(self) -> GradientCompressionConfig:
        for key in sorted(self.model_fields_set - {"type"}):
            default = type(self).model_fields[key].default
            if key not in _OPTIONS[self.type] and getattr(self, key) != default:  # a file may have all of them
                kinds = [kind for kind, keys in _OPTIONS.items() if key in keys]
                raise ValueError(
                    f"{key} is an option of type {' and '.join(kinds)}, and the type is {self.type}: leave it out"
                )
        return self


def check_compression(config: Config) -> None:
    """What does not go together.

    Raises:
        ValueError: says why, and what to write.
    """
    section, stage = config.gradient_compression, config.zero_optimization.stage
    kind, dtype = section.type, config.communication_data_type
    if kind in ("fp16", "bf16") and dtype not in (None, kind):
        raise ValueError(
            f"gradient_compression.type {kind} and communication_data_type {dtype} are two names of one thing: give "
            "one of them"
        )
    classes = config.torch_autocast.lower_precision_safe_modules
    if kind != "none" and classes:
        raise ValueError(
            "gradient_compression and torch_autocast.lower_precision_safe_modules both say how gradients travel: give "
            "one of them"
        )
    whole = "sparse_gradients" if config.sparse_gradients else None
    if kind in ("topk", "powersgd"):
        if whole:
            raise ValueError(
                f"gradient_compression.type {kind} and sparse_gradients both say what travels of an embedding's "
                "gradient: give one of them"
            )
        whole = f"gradient_compression.type {kind}"
        if dtype is not None:
            raise ValueError(
                f"communication_data_type is the dtype of a plain sum, and {whole} sends something else: leave it out"
                + (" (values says in which dtype elements travel)" if kind == "topk" else "")
            )
    name = "" if config.optimizer is None else config.optimizer.type
    one_bit = name.lower().replace("_", "") in _ONE_BIT
    if "fp16" in (kind, dtype) and (whole == "sparse_gradients" or one_bit):
        raise ValueError(
            f"{name if one_bit else whole} sums gradients that are means already, without a loss scale, and fp16 has "
            "no room for how small they are: set "
            + ("gradient_compression.type" if kind == "fp16" else "communication_data_type")
            + ' to "bf16", or leave it out'
        )
    if whole is None:
        return
    if stage > 1:
        raise ValueError(
            f"{whole} acts on a replica's whole gradient of a step, and stage {stage} of ZeRO has it reduced after "
            'each backward pass, and keeps a shard: set stage 1, or gradient_compression.type to "bf16"'
        )
    if one_bit:
        raise ValueError(f"{name} compresses what it sends already: leave {whole.partition('.')[0]} out")
    if section.momentum and config.optimizer is not None:
        _one_momentum(name, config.optimizer.params.get("momentum", 0.0))


def _one_momentum(name: str, own: object) -> None:
    if name.lower() != "sgd":
        raise ValueError(
            f"gradient_compression.momentum takes the place of SGD's, and the optimizer is {name}, which averages "
            "gradients by itself: leave it out"
        )
    if own:
        raise ValueError(
            f"gradient_compression.momentum takes the place of SGD's, which is {own}: leave optimizer.params.momentum "
            "out"
        )
