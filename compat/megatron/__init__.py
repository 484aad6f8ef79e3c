"""Megatron-LM's objects: its process groups, and its marks of sharded parameters.

mpu.py: the grid of Megatron's ``mpu``.
layouts.py: layouts of parameters that Megatron's layers mark as sharded.
"""
