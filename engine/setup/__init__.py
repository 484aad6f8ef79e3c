"""Setup of an engine: from options to the objects that an engine is made of.

arguments.py: arguments of ``triax.Engine``: options, grid, parameter groups.
check_names.py: names of schedules, optimizers and compressors, and their arguments.
rank_consistency.py: every rank has the same configuration, code and model.
precision.py: dtypes of weights and autocast, the loss scaler.
zero.py: ZeRO's options, offload and ZeRO++ included.
schedule.py, asked_schedule.py: the pipeline schedule.
balance.py: the cost of a document, by which microbatches get equal work.
slices.py: slices of sequences: which models are exact with them.
measured_layers.py: ``measure_layers``, seconds and bytes of each layer, for a cut by time or memory.
compilation.py: torch.compile of a model's layers, each by itself.
extensions.py: parts that packages beside the core offer, found by entry points.
compression.py: dtype and compressor of the sum of gradients.
optimizer.py: the optimizer over ZeRO's flat ranges, 1-bit optimizers included, and the learning-rate schedule.
recomputation.py: activation checkpointing of a ``PipelineModule``.
tuning.py: steps of a copy of the model, measured to find the microbatch size for ``triax.tune``.
lora.py: ``add_lora``, adapters on the layers that the options name.
"""
