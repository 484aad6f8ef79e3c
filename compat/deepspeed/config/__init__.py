"""The configuration file: DeepSpeed's JSON dialect, checked. A key acts, or is refused with the reason. No torch.

config.py: ``parse_config``, from a dict or a file to a ``Config``; ``batch_sizes``. (``from_config.read_config``
    checks the names of schedules and optimizers too.)
base.py: a section and its three kinds of keys: active, idle, refused.
schema.py: ``Config``, every key of the file.
optimizer.py: ``optimizer`` and ``scheduler``.
optimizer_names.py: optimizers by DeepSpeed's names and arguments, as triax's.
zero.py: ``zero_optimization``, with offload and ZeRO++.
parallelism.py: ``pipeline``, ``tensor_parallel`` and ``moe``.
attention.py: ``sparse_attention``.
precision.py: ``bf16``, ``fp16``, ``data_types``, ``torch_autocast`` and ``amp``.
activation_checkpointing.py: ``activation_checkpointing``, recomputation.
compression.py: ``gradient_compression``.
lora.py: ``lora``, low-rank adapters.
local_updates.py: ``local_updates``: local SGD and DiLoCo.
checkpoint.py: ``checkpoint``.
monitoring.py: monitors, timeline, FLOPs profiler and communication logger.
consistency.py: checks between sections.
compilation.py: ``compile``: torch.compile of the layers.
autotuning.py: ``autotuning``: microbatch size and ZeRO stage by measured steps.
elasticity.py: ``elasticity``: a batch size for many numbers of replicas.
to_options.py: the configuration as triax's options, and the key of each option.
dialect.py: keys of the configuration in a training file's section ``deepspeed``.
resolved.py: the configuration with all defaults, its JSON schema, and the table of keys in docs/config.md.
"""
