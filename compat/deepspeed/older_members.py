"""DeepSpeed's names of engines' members, on engines of ``triax.Engine``: read until they end, with a warning."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

from ...engine.engines import Engine
from ...engine.pipeline_engine import PipelineEngine
from .from_config import ConfiguredEngine, ConfiguredModuleEngine

ENDS = "0.3"  # version of triax in which engines made by triax.Engine have them no more
# The member -> what to write in its place.
NEW = {
    "bfloat16_enabled": 'engine.options.precision.weights == "bf16"',
    "deepspeed_io": "engine.make_loader(...)",
    "fp16_enabled": 'engine.options.precision.weights == "fp16"',
    "get_batch_info": "engine.batch",
    "get_global_grad_norm": "engine.grad_norm",
    "get_lr": "engine.lr",
    "get_mom": 'group["betas"] of engine.optimizer.param_groups',
    "gradient_accumulation_steps": "engine.batch.accumulation",
    "gradient_clipping": "engine.options.clip",
    "is_gradient_accumulation_boundary": "engine.is_last_microbatch()",
    "local_rank": "engine.grid.local_rank",
    "save_16bit_model": "engine.save_weights(...)",
    "set_gradient_accumulation_boundary": "engine.set_last_microbatch(...)",
    "set_train_batch_size": "engine.set_batch_size(...)",
    "train_batch_size": "engine.batch.train",
    "train_micro_batch_size_per_gpu": "engine.batch.micro",
    "wall_clock_breakdown": "engine.options.monitor.breakdown",
    "zero_optimization": "engine.options.zero.stage > 0",
    "zero_optimization_stage": "engine.options.zero.stage",
}


def _member(name: str, engine: Engine) -> Any:
    """Return a member of an engine. Python shows the warning once for each line that uses the name."""
    text = f"engine.{name} is DeepSpeed's name, which engines have until triax {ENDS}: write {NEW[name]}"
    warnings.warn(text, DeprecationWarning, stacklevel=3 if isinstance(engine, PipelineEngine) else 4)
    kind = next(each for each in (ConfiguredModuleEngine, ConfiguredEngine) if name in vars(each))
    return vars(kind)[name].__get__(engine)


MEMBERS = {name: partial(_member, name) for name in NEW}
