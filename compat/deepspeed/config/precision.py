"""Sections ``bf16``, ``fp16``, ``data_types``, ``torch_autocast`` and ``amp``: the dtypes of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Strict, WithJsonSchema, field_validator, model_validator

from ....base.checks import LARGEST
from .base import Section, SwitchSection, idle, refused, setting

_SCALE = {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"const": "dynamic"}, {"type": "null"}]}


class Bf16Config(Section):
    """``bf16``: weights in bfloat16, master weights in fp32."""

    enabled: bool = setting(
        False, "Weights in bfloat16; master weights, optimizer state and accumulated gradients in fp32."
    )
    immediate_grad_update: Any = idle("each gradient is added to the fp32 sum as soon as it is computed")
    check_grad_overflow: Any = refused(
        "nan_loss sets what happens with gradients that are not finite: leave it out; nan_loss is raise by default"
    )
    bf16_master_weights_and_grads: bool = setting(
        False,
        "No fp32 master weights: weights, accumulated gradients and optimizer state are bfloat16. Updates below 1/256 "
        "of a weight are lost in rounding.",
    )
    bf16_optimizer_states: bool = setting(
        False,
        "Needs bf16_master_weights_and_grads, which keeps the optimizer state in bfloat16 with or without this key.",
    )

    @model_validator(mode="after")
    def _states_as_masters(self) -> Bf16Config:
        if self.bf16_optimizer_states and not self.bf16_master_weights_and_grads:
            raise ValueError(
                "bf16_optimizer_states is true and bf16_master_weights_and_grads is not, but optimizer state has the "
                "dtype of the master weights: set both, or neither"
            )
        return self


class Fp16Config(Section):
    """``fp16``: weights in float16, master weights in fp32, and a loss scale."""

    enabled: bool = setting(
        False, "Weights in float16; master weights, optimizer state and accumulated gradients in fp32."
    )
    loss_scale: float = setting(0.0, "Fixed loss scale; 0: a dynamic one.", auto=True, ge=0.0, le=LARGEST)
    initial_scale_power: int = setting(16, "The dynamic scale starts at 2 to this power.", auto=True, ge=0, le=126)
    loss_scale_window: int = setting(1000, "Steps without overflow after which the scale doubles.", auto=True, ge=1)
    hysteresis: int = setting(2, "Overflows after which the scale halves.", auto=True, ge=1)
    consecutive_hysteresis: bool = setting(False, "A step without overflow resets the count of hysteresis.")
    min_loss_scale: float = setting(1.0, "Lowest loss scale.", auto=True, gt=0.0, le=LARGEST)
    auto_cast: Any = idle("floating-point inputs are always cast to the model's dtype")
    fp16_master_weights_and_grads: Any = refused(
        "squares of gradients are too small for fp16, so master weights and optimizer state are fp32: leave it out, or "
        "write bf16 with bf16_master_weights_and_grads; offload_optimizer frees device memory too"
    )


class DataTypesConfig(Section):
    """``data_types``: dtypes that ``bf16`` and ``fp16`` determine."""

    grad_accum_dtype: Literal["fp32", "fp16", "bf16"] | None = setting(
        None,
        "Dtype in which gradients accumulate. It is always the master weights' dtype; another value has no effect, and "
        "triax logs a note.",
    )
    param_dtype: Any = refused("bf16 and fp16 set the dtype of weights: enable one, or leave it out")
    buffer_dtype: Literal["fp32", "fp16", "bf16"] | None = setting(
        None, "Dtype of floating-point buffers; null: the weights' dtype, except for inv_freq and correction_bias."
    )
    keep_in_fp32_modules: Any = refused("bf16 and fp16 cast all modules: leave it out", "auto")


class TorchAutocastConfig(SwitchSection):
    """``torch_autocast``: the forward pass runs under ``torch.autocast``."""

    enabled: bool = setting(False, "Run the forward pass under torch.autocast; weights stay as they are.")
    dtype: Literal["bfloat16", "float16", "bf16", "fp16"] = setting(
        "bfloat16", "Dtype of autocast; torch.bfloat16 too. With float16 the loss is scaled, with the keys of fp16."
    )
    lower_precision_safe_modules: tuple[Annotated[str, Strict()], ...] | None = setting(
        None,
        "Classes (torch.nn.Linear) whose gradients are summed over replicas in dtype. null: all gradients are summed "
        "in the dtype of accumulation.",
    )

    @field_validator("dtype", mode="before")
    @classmethod
    def _without_module(cls, value: Any) -> Any:
        return str(value).removeprefix("torch.")  # "torch.bfloat16", and torch.bfloat16 itself in a dict


class AmpConfig(SwitchSection):
    """``amp``: NVIDIA apex. Its O1 is autocast to float16 with a loss scale, done here by torch."""

    enabled: bool = setting(
        False, "Run the forward pass under torch.autocast to float16, with a loss scale.", auto_is=False
    )
    opt_level: Literal["O0", "O1", "O2", "O3"] = setting(
        "O1", "O1: autocast; O0: no autocast. O2 and O3 are refused: use fp16 instead.", auto=True
    )
    loss_scale: Annotated[float | None, WithJsonSchema(_SCALE)] = setting(
        None, 'Fixed loss scale; "dynamic" or null: a dynamic one.', auto=True, gt=0.0, le=LARGEST
    )
    min_loss_scale: float | None = setting(None, "Lowest loss scale; null: 1.", auto=True, gt=0.0, le=LARGEST)
    max_loss_scale: Any = refused("the loss scale has no upper limit, and an overflow halves it: leave it out")
    cast_model_type: Any = refused("weights stay fp32 under O1: leave it out, or enable fp16")
    patch_torch_functions: Any = refused("O1 casts in torch's functions, O0 nowhere: leave it out", True)
    keep_batchnorm_fp32: Any = refused("weights stay fp32 under O1: leave it out", True)
    master_weights: Any = refused("weights are fp32 under O1 and need no master weights: leave it out, or enable fp16")
    cast_model_outputs: Any = refused("outputs keep their dtype: leave it out, and cast them yourself")
    num_losses: Any = refused("each engine has one scale: leave it out, and make an engine for each loss", 1)
    verbosity: Any = idle('logging.getLogger("triax").setLevel(...) sets what is logged')

    @model_validator(mode="before")
    @classmethod
    def _dynamic(cls, values: Any) -> Any:
        dynamic = isinstance(values, Mapping) and values.get("loss_scale") == "dynamic"
        return {**values, "loss_scale": None} if dynamic else values

    @model_validator(mode="after")
    def _acts_as_asked(self) -> AmpConfig:
        if self.enabled and self.opt_level in ("O2", "O3"):
            kept = (
                "weights in float16 and master weights in fp32" if self.opt_level == "O2" else "everything in float16"
            )
            raise ValueError(
                f'opt_level {self.opt_level} ({kept}) is not supported in amp: write "fp16": {{"enabled": true}}, with '
                "float16 weights, fp32 master weights and a loss scale, or opt_level O1"
            )
        return self
