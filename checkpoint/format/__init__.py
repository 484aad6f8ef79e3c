"""Files of a checkpoint: a folder with index.json and a safetensors file of each rank.

folder.py: the folder of checkpoints: the commit (a rename that makes a checkpoint valid), latest, pruning, checks
lock.py: the lock of a folder, so that one run at a time saves into it
index.py: index.json: where the boxes of each tensor lie, with checksums
head.py: checks of the index's values beside its tensors
remote.py: folders and files at URIs, by fsspec, and their errors
remote_files.py: the safetensors files at a URI, read by blocks
mapped_files.py: the safetensors files, read through memory maps, and their checksums
"""
