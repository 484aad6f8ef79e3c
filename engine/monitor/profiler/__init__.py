"""Profiler of modules: floating-point operations, parameters, memory and time (``flops_profiler``).

flops.py           FlopsProfiler and get_model_profile, for any module
flop_counter.py    FlopCounter: counts matrix products, convolutions and attention
module_counter.py  ModuleCounter: operations and time of each module, by hooks
tree_report.py     text of the report: summary by class, module tree
step_report.py     head of the report about a step of an engine, over all ranks
memory_meter.py    MemoryMeter: bytes that a step allocates and that autograd saves
"""

from ....base.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
