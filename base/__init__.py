"""Tools that need no process group: errors, lazy names, nests, JSON values, dtypes, hashes, safetensors.

errors.py: the errors of the library, and helpers for their messages.
option_error.py: errors and notes about options, under the names of each door.
checks.py: checks of numbers, seeds, names of folders, and kinds of arguments.
lazy.py: lazy public names of packages.
moved.py: modules and names at their older places.
entry_points.py: entry points of installed packages.
seeds.py: ``derive``, a seed from numbers and names.
nest.py: walks over nests of tensors.
json_values.py: plain Python values in JSON and back, for checkpoints and between ranks, without pickle.
json_comments.py: JSON with comments and trailing commas.
dtypes.py: names of dtypes.
checksum.py: a checksum of a tensor's bits.
safetensors_header.py: header of safetensors files, made and read.
safetensors.py: writer of safetensors files, tensor by tensor.
source_hashes.py: hashes of the files of Python modules.
autograd.py: marks in the graph, weak hooks, the casts of autocast.
deferred.py: queue of weight gradients that are computed later (the split backward of zero bubble).
evaluating.py: evaluation mode of a module for a while.
uncompiled.py: functions that torch.compile leaves out of its graphs.
steady_time.py: time of the day that does not jump when the clock is set.
files.py: reading of files from elsewhere: regular ones, and never a FIFO that has no writer.
folder_files.py: files of a folder that take the place of earlier ones together.
ports.py: the ports that the library opens, each on one address.
threads.py: calls in threads, whose errors are raised where their ends are awaited.
temporary_folders.py: temporary folders, and their removal after their process was killed.
named_function.py: functions of users by name, in files and modules.
hub.py: repositories of the Hugging Face Hub, as folders in its cache.
torch_private.py: torch's private names, each with the reason and what to do when torch drops it.
torch_versions.py: differences between versions of torch.
accelerators.py: torch's functions for each kind of accelerator.
formulas.py: bytes of model states and of ZeRO's communication, by the papers.
tables.py: tables of figures, in a terminal and as text.
html.py: tables in HTML, which a notebook shows.
foreign_tables.py: tables of other libraries' names, in TOML files.
verbosity.py: how much the command triax prints.
records.py: what a run writes about itself: an error of writing it never ends the run.
"""

VERSION = "0.1.0"  # here, because a checkout that is not installed has no metadata to ask
