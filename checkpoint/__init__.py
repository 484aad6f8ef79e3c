"""Checkpoints: a sharded format that does not depend on the grid; reading, writing, checking and converting it.

snapshot.py: Snapshot, the state of a run as boxes of whole tensors, between the engine and the files
writer.py: every rank writes its own file, rank 0 the index; then format/folder.py commits
remote_writer.py: the same to a URI of fsspec: temporary files, uploads, and the index last
lineage.py: a run's identity in its checkpoints, their order, and the lock of a folder
async_writer.py: a thread that writes a copy in host memory while training goes on (checkpoint.background)
reader.py: opening a checkpoint on any grid, with its checksums verified; what to load (LoadOptions)
matching.py: names and shapes of a checkpoint compared with those of a model
auto.py: saving every N steps, on SIGTERM and on Ctrl-C, and finding the newest undamaged checkpoint to resume from
rendezvous.py: every rank makes the same call, or the error names those that did not
generator_states.py: states of the random generators of torch, Python and numpy
format/: the files of a checkpoint: index, commit, values in JSON
convert/: export to safetensors and Hugging Face, import from torch DCP

Snapshots of an engine are made and applied in engine/snapshot/.
"""
