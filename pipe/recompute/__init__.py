"""Recomputation (activation checkpointing): groups of layers keep their input and run again in the backward pass.

recompute.py     Recompute: cuts stages into groups and runs them; options full, matmul, selective
frame.py         Frame: stand-ins for the tensors that a group's graph saves; State: attributes, dropout, autocast
generators.py    random generators whose states the second run gets back: the global ones, and those of modules
kept_inputs.py   Inputs: a group's input as it is, partitioned over the tensor axis, in one buffer, or on the host
kept_matmuls.py  Matmuls: results of matrix products that are kept, so that the second run does not compute them
tiles.py         MLPs, and other modules that act on each token by itself, run and recomputed in tiles of tokens
early.py         run_to_recompute: a pass that C, an op of the schedule, runs again before the backward
calls.py         RecomputeCalls: recomputation of the functions that a model's own code names
"""
