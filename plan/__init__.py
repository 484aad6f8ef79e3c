"""Formulas for planning a run, without torch and without processes.

formulas.py         bytes of model states, of activations and of ZeRO's communication, by the papers
layers.py           layers_of: parameters, products and attention sizes of each layer of a model
memory.py           ModelMemory: bytes of each pipe rank by kind, on any layout
parallel_layout.py  ParallelLayout: degrees, microbatch, schedule, ZeRO stage, recomputation
"""
