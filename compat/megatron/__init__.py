"""Megatron-LM's objects: its process groups, its marks of sharded parameters, and its checkpoints.

mpu.py: the grid of Megatron's ``mpu``.
checkpoint.py, arguments.toml: import of Megatron-LM's checkpoints, torch_dist and legacy.
layouts.py: layouts of parameters that Megatron's layers mark as sharded.
"""
