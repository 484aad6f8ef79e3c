"""Parts that a run can do without: each is found by its entry point, and imported by nothing but ``cli/``.

plan/: cost model, and search for a layout.
dry_run/: one rank of a large cluster, simulated on one machine.
gradient_compression/: compressed gradients and 1-bit optimizers.
local_sgd/: replicas that sum their weights every so many steps.
fault_tolerance/: replicas that leave and join a run.
"""
