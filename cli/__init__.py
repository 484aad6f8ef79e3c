"""The command ``triax``: one file for each sub-command, with its options and help.

main.py: the command itself, ``triax memory``, and how errors are printed.
run.py: ``triax run``, a script on many processes or hosts.
config.py: ``triax config``, a configuration checked and resolved.
schedule.py: ``triax schedule``, a pipeline schedule verified, simulated and drawn.
report.py: ``triax report``, an HTML page about a run.
generate.py: ``triax generate``, text from a prompt.
checkpoint.py: ``triax checkpoint``, show, verify, diff, export, import and prune checkpoints.
"""
