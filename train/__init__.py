"""A training run from one file: ``triax train FILE [key=value ...]``, and ``triax.train`` for programs.

schema.py: every key of the file.
file.py: reading a file and ``key=value`` changes, with errors that name file, line and key.
job.py: the resolved run: model configuration, topology, schedule, engine configuration, steps. No torch.
model.py: the ``PipelineModule`` of a job, and its parameter groups.
data.py: training and held-out rows, with the checks of tokenizer and vocabulary.
start.py: from a job to ranks: its own, or those of torchrun, ``triax run`` or srun.
loop.py: one rank of a run: build, train, evaluate, save, export.
progress.py: progress line, report page and pictures.
"""
