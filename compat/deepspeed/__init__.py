"""DeepSpeed's API over triax: ``import triax.compat.deepspeed as deepspeed``.

``RepeatingLoader`` is triax's own, which has DeepSpeed's arguments.

__main__.py: ``python -m triax.compat.deepspeed script.py``: a script that imports deepspeed, as it is.
modules.py: modules under DeepSpeed's names; ``install``, which puts this package under the name ``deepspeed``.
ledger.py: every public name of DeepSpeed, and its place in triax or the reason why triax does not have it.
names.toml: these names, the members of engines and grids, and the classes of sections.
from_config.py: ``triax.initialize``: from a configuration in DeepSpeed's JSON to an engine.
config/: the configuration: its sections, and the options that they set.
context.py: ``initialize``: triax's own, which registers the engine for functions that take none; the grid of experts.
grids.py: a grid with the methods of DeepSpeed's ``PipelineParallelGrid`` and of Megatron's ``mpu``.
engine.py: the two engines, with all of DeepSpeed's members.
assignments.py: assignments to the engines' members act, or raise an error.
autotp.py: the section ``tensor_parallel``, which shards a module by the configuration alone.
offload_states.py: ``engine.offload_states``: states wait in host memory.
pipeline_arguments.py, process_topology.py: ``PipelineModule`` with DeepSpeed's arguments; its topologies.
module_calls.py: calls of the engine's module itself, which the engine must see.
parameter_values.py: one parameter's master weights, gradient or optimizer state, whole or this rank's part.
lr_schedules.py: WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, which ``triax.LRSchedule`` names too.
optimizer_classes.py: FusedAdam, DeepSpeedCPUAdam: torch's fused kernels with DeepSpeed's arguments.
older_members.py: DeepSpeed's names of members on engines of ``triax.Engine``, with a warning.
timers.py: timers that are started and stopped by hand, samples per second.
universal_checkpoint.py: import of DeepSpeed's universal checkpoints.
fp32_state_dict.py: ``zero_to_fp32``: a checkpoint's whole weights in fp32, in memory or in one file.
arguments.py: ``add_config_arguments`` (``--deepspeed_config``) and ``init_distributed``.
configuration.py: ``DeepSpeedConfig``: a checked configuration with the batch sizes.
section_classes.py: sections of the configuration under the names of DeepSpeed's classes.
monitors.py: ``MonitorMaster``: the configuration's monitors without an engine.
accelerator.py: ``deepspeed.accelerator``: the device of this process.
comm.py: ``deepspeed.comm``: collectives, ``log_summary`` of all engines.
groups.py: ``deepspeed.utils.groups``: ranks, sizes and process groups of the latest engine.
runner.py: ``deepspeed.launcher.runner``: the functions that read a hostfile.
utils.py: ``deepspeed.utils`` and ``runtime.utils``: log, seed, memory, nests of tensors.
parameter_marks.py: DeepSpeed's marks of parameters in stage 3: ``ds_id``, ``ds_status``, ...
fragments.py: ``safe_get_*`` and ``safe_set_*``: fp32 weights, gradients and optimizer state of a parameter.
zero.py: ``deepspeed.zero``: ``Init``, ``GatheredParameters``.
checkpointing.py: ``deepspeed.checkpointing``.
inference.py: ``init_inference``, its configuration, ``tp_model_init``.
inference.toml: the keys of this configuration.
moe.py: ``deepspeed.moe``: ``MoE``.
"""

from .modules import names_of, register

register()
__getattr__, __dir__, __all__ = names_of(__name__)
