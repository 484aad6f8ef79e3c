"""Adapters over the engine in another library's API.

deepspeed/: DeepSpeed: ``initialize``, ``add_config_arguments``, ``init_distributed``, ``comm.log_summary``.
launcher_options.py, launchers.toml: options of ``torchrun``, ``deepspeed`` and ``horovodrun``, for ``triax run``.
megatron/: Megatron-LM: grids of ``mpu``, layouts of its layers.
horovod/: Horovod: ``hvd.init``, collectives, ``DistributedOptimizer``.
huggingface/: transformers: ``Trainer`` and ``TrainingArguments``.
lm_eval.py: EleutherAI's lm-eval: its model class over an engine, and the metrics of its tasks.
mlflow.py, trackio.py: writers of a run's numbers for these trackers, by entry points of ``triax.writers``.
"""
