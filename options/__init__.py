"""Options of an engine, as plain dataclasses: each one with its default, meaning, unit and check.

sections.py: the fields of ``EngineOptions``, each a section or a single option: the keywords of ``triax.Engine``.
engine.py: ``EngineOptions``, which checks the sections against one another.
base.py: the declaration of an option, and of a section of options, which checks itself.
contradictions.py: checks of options of several sections.
batch.py: samples of a step and of a microbatch.
named.py: optimizer, learning-rate schedule and compression by name, where a file names them.
schedule.py: pipeline schedule.
zero.py: ZeRO, with offload and ZeRO++.
precision.py: dtypes, autocast and the loss scale.
reduction.py: how gradients are summed over replicas.
recomputation.py: activations that the backward pass recomputes.
compilation.py: torch.compile of the layers.
checkpoints.py: when and how checkpoints are written.
monitoring.py: monitors, traces and profiles.
local_updates.py: local SGD and DiLoCo.
fault_tolerance.py: replicas that come and go.
launch.py: start of ranks by ``triax run``; words.py: options as words of a command line.
lora.py: low-rank adapters.
sparse_attention.py: block masks of attention.
dialect.py: languages of other libraries, found by entry points.
table.py: tables of options for the documentation.
foreign_names.py, foreign_names.toml: other libraries' names of options, and the counterparts here.
tuning.py: search for the microbatch size and the ZeRO stage.
"""
