"""The sections of the configuration that measure, and those of autocast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Strict, WithJsonSchema, model_validator

from .config_base import Section, idle, no_such, refused, setting

# What ``comms_logger.prof_ops`` may name: the collectives and messages of ``grid/axis.py``.
OPS = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "receive"),
    *("all_gather_object", "barrier"),
)
# DeepSpeed's and torch's names of the same.
_ALSO = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_base": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_base": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "isend": "send",
    "recv": "receive",
    "irecv": "receive",
}

_SCALE = {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"const": "dynamic"}, {"type": "null"}]}


class _Switch(Section):
    """A section for which ``false`` and ``null`` are as good as ``{"enabled": false}``."""

    @model_validator(mode="before")
    @classmethod
    def _off(cls, values: Any) -> Any:
        return {} if values is None or values is False else values


class FlopsProfilerConfig(_Switch):
    """``flops_profiler``: a report of one step's operations, parameters and times, by module."""

    enabled: bool = setting(False, "Report one step's floating-point operations and times, by module.")
    recompute_fwd_factor: float = setting(
        0.0, "Forward passes that the backward pass runs once more, for its rate: 1 where all is recomputed.", ge=0.0
    )
    profile_step: int = setting(1, "The step that is reported, counted from 0: by default the second one.", ge=0)
    module_depth: int = setting(-1, "The depth to which modules are listed in the summary; -1: the deepest.", ge=-1)
    top_modules: int = setting(1, "So many classes of modules are listed at each depth.", ge=1)
    detailed: bool = setting(True, "Print the tree of modules too.")
    output_file: str | None = setting(None, "Write the report to this file; by default it is printed.")


class CommsLoggerConfig(_Switch):
    """``comms_logger``: every collective and message, counted and timed."""

    enabled: bool = setting(False, "Count and time every collective and message, for engine.log_summary().")
    verbose: bool = setting(False, "Log each one as it ends, on rank 0.")
    prof_all: bool = setting(True, "All of them; false: those of prof_ops.")
    prof_ops: tuple[Annotated[str, Strict()], ...] = setting(
        (), f"Which, where prof_all is false: {', '.join(OPS)}, or DeepSpeed's names of these."
    )
    debug: bool = setting(False, "Name the function that called each one.")

    @model_validator(mode="after")
    def _known(self) -> CommsLoggerConfig:
        for name in self.prof_ops:
            if name not in OPS and name not in _ALSO:
                raise ValueError(no_such("prof_ops", name, OPS))
        if self.enabled and not self.prof_all and not self.prof_ops:
            raise ValueError(
                f"prof_all is false and prof_ops names nothing to count: name some of {', '.join(OPS)}, or set "
                "prof_all to true"
            )
        return self

    @property
    def wanted(self) -> frozenset[str]:
        """Triax's names of what is counted."""
        return frozenset(OPS if self.prof_all else (_ALSO.get(name, name) for name in self.prof_ops))


class TorchAutocastConfig(_Switch):
    """``torch_autocast``: the forward pass runs under ``torch.autocast``."""

    enabled: bool = setting(False, "Run the forward pass under torch.autocast; weights stay as they are.")
    dtype: Literal["bfloat16", "float16", "bf16", "fp16"] = setting(
        "bfloat16", "Of what autocast narrows. Under float16 the loss is scaled, as fp16's keys say."
    )
    lower_precision_safe_modules: tuple[Annotated[str, Strict()], ...] | None = setting(
        None,
        "Classes (torch.nn.Linear) whose gradients are summed over replicas in dtype. null: none; all are summed as "
        "they are accumulated.",
    )


class AmpConfig(_Switch):
    """``amp``: apex's. Its O1 is autocast to float16 with a loss scale, which torch has itself."""

    enabled: bool = setting(
        False, "O1: the forward pass under torch.autocast to float16, and a loss scale.", auto_is=False
    )
    opt_level: Literal["O0", "O1", "O2", "O3"] = setting(
        "O1", "O0: nothing is narrowed. O2 and O3 are refused: fp16 does what they do.", auto=True
    )
    loss_scale: Annotated[float | None, WithJsonSchema(_SCALE)] = setting(
        None, 'A fixed scale; "dynamic" or null: one that adapts.', auto=True, gt=0.0
    )
    min_loss_scale: float | None = setting(None, "It does not fall below this; null: 1.", auto=True, gt=0.0)
    max_loss_scale: Any = refused("the scale has no upper limit, and an overflow halves it: leave it out")
    cast_model_type: Any = refused("weights stay fp32 under O1: leave it out, or enable fp16")
    patch_torch_functions: Any = refused("O1 casts at torch's functions, O0 nowhere: leave it out", True)
    keep_batchnorm_fp32: Any = refused("weights stay fp32 under O1: leave it out", True)
    master_weights: Any = refused("weights are their own masters under O1: leave it out, or enable fp16")
    cast_model_outputs: Any = refused("the module returns what it computes: leave it out, and cast that yourself")
    num_losses: Any = refused("each engine has one scale: leave it out, and make an engine for each loss", 1)
    verbosity: Any = idle('logging.getLogger("triax").setLevel(...) says what is logged')

    @model_validator(mode="before")
    @classmethod
    def _dynamic(cls, values: Any) -> Any:
        dynamic = isinstance(values, Mapping) and values.get("loss_scale") == "dynamic"
        return {**values, "loss_scale": None} if dynamic else values

    @model_validator(mode="after")
    def _acts_as_asked(self) -> AmpConfig:
        if self.enabled and self.opt_level in ("O2", "O3"):
            kept = "weights in float16 and masters in fp32" if self.opt_level == "O2" else "everything in float16"
            raise ValueError(
                f'opt_level {self.opt_level} ({kept}) is not amp\'s here: write "fp16": {{"enabled": true}}, which has '
                "float16 weights, fp32 masters and a loss scale, or opt_level O1"
            )
        return self
