"""Dry run: a program as ranks of a large cluster, on one machine without GPUs: ``triax run --dry-run 1024 script.py``.

dry_run.py      ``dry_run``: one rank of every class of ranks, in forked processes
classes.py      classes of ranks that cannot differ, from shapes and from comparisons in the user's code
rank.py         one rank: the user's program on the meta device, up to the end of a step, and its record
group.py        process group that sends nothing and records every collective and message
values.py       values of small meta tensors, and the stand-in where a program reads a value that is not known
traced_rank.py  a rank whose comparisons are noted
places.py       file and line of a call in the user's code
exchange.py     small values between ranks that run at the same time, and hangs
match.py        differences between the ranks' collectives and messages
report.py       the text that is printed
"""
