"""The command ``triax``: one file for each sub-command, with its options and help.

main.py: the command itself, and how errors are printed.
demo.py: ``triax demo``, a small model on two stages, and its measured timeline.
new.py: ``triax new``, a project to begin with; recipe.py: ``triax recipe``, training files to begin with.
flags.py: flags of a command from classes of options.
verbs.py: commands with verbs, and the flags that became verbs. The user may leave out the first verb.
output.py: printed lines that quote files, without their control characters.
memory.py: ``triax memory``, bytes of each pipe rank by kind, on paper.
plan.py: ``triax plan``, the fastest layouts that fit on a cluster, and the reasons; plan_text.py: what it prints;
plan_files.py: the training file and the Slurm script that it writes.
plan_inputs.py: the model that a name or a file stands for, and the keys of ``--layout``.
machine.py: ``triax machine``, a machine's figures, timed here or fitted to a table of runs.
grid.py: ``triax grid``, the place of each rank on a grid, and what it holds.
explain.py: what the run of a training file would be: stages, bytes of each rank, tokens, without ranks and torch.
run.py: ``triax run``, a script on many processes or hosts.
dry_report.py: a dry run of a script, a training file or a model, and its report.
replicas.py: ``triax replicas``, replicas that leave and join a run: their coordinator, and a request to leave.
foreign_options.py: the answer to a mistyped line; options of other libraries, by compat/launcher_options.py.
env.py: ``triax env``, versions, devices and backends of this machine, and what is missing for what.
compat.py: ``triax compat``, configurations of another library, checked and resolved.
schedule.py: ``triax schedule``, pipeline schedules verified, simulated and drawn;
schedule_flags.py: its flags, and the schedule that they make; schedule_text.py: what it prints.
cuts.py: ``triax schedule cuts``, where to cut a list of layers by their costs.
check.py: ``triax check``, a model of one's own compared on grids with one process; check_targets.py: what it takes.
report.py: ``triax report``, an HTML page about a run, or one that compares runs.
train.py: ``triax train``, a training run from one file; dry_run.py: ``--dry-run``, on rows of zeros.
generate.py: ``triax generate``, text from a prompt.
model_folder.py: the model of a folder, on ranks; model_text.py: its tokenizer, and text as it is made.
evaluate.py: ``triax evaluate``, the metrics of a model on tasks of lm-eval.
data.py: ``triax data``, text made into tokens, shown and verified; tokenizers trained.
checkpoint.py: ``triax checkpoint``, show, verify, diff, export, import and prune checkpoints.
"""
