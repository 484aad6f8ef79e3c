"""A training run from one file: ``triax train FILE [key=value ...]``, and ``triax.train`` for programs.

sections.py: every key of the file: the engine's options, and what only a run has.
engine_sections.py: sections of the engine's options with what a run adds, and its defaults.
numbers.py: numbers of tokens and times, as 1.5B and 90m.
file.py: reading a file and ``key=value`` changes, with errors that name file, line and key.
older_keys.py, older_keys.toml: older names of keys, which are read until they end.
upgrade.py: rewriting a file under today's names, with its comments.
learning_rate.py: the learning rate of each step, as a share of the peak.
file_schedule.py: the scheduler that sets these rates.
model_choice.py: the model: a preset, a folder or a function of layers, with overrides, and what must fit it. No torch.
method_checks.py: checks of the method against the other keys. No torch.
engine_options.py: the engine's options, from the file's sections, and those in another library's keys. No torch.
job.py: the resolved run: model configuration, topology, schedule, engine configuration, steps. No torch.
text_data.py: text of the file's ``data``, tokenized once before the run.
data.py: training and held-out rows, with the checks of tokenizer and vocabulary.
evaluation.py: the loss on held-out rows.
tasks.py: metrics of tasks, by lm-eval.
lowest.py: the lowest loss on held-out rows, or the best metric: keep its model, end the run.
method.py: post-training on prompts and answers: the reference model's numbers, and the loss on held-out samples.
distilling.py: distillation: a teacher on the run's grid, or a file of its log-probabilities.
drawing.py: GRPO: answers drawn to prompts, with rewards; the mean reward on held-out prompts.
model.py: the ``PipelineModule`` of a job, and its parameter groups.
clock.py: the time of the steps, and the time limit.
spikes.py: spikes of loss and gradient norm: warn, skip, rewind.
requeue.py: Slurm's signal before the time limit.
progress.py: progress line, report page and pictures.
run_text.py: what a run prints before its first step and after its last one.
loop.py: one rank of a run: build, train, evaluate, save, export; ``Watch``, for what looks at each step.
start.py: from a training file to ranks: its own, or those of torchrun, ``triax run`` or srun.
"""
